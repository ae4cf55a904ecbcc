"""Figures for a paper: every chart, twice, in the right size, the same bytes each time."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from toy import toy_results

from thebes.model.errors import UserError
from thebes.report.charts import looks
from thebes.report.figures import figures_of, write_figures
from thebes.report.result import Result

NAMES = ["jct", "queueing-delay", "fairness", "jct-by-class", "utilisation", "queue-length", "gpu-time", "jobs"]


def odd_results() -> list[Result]:
    results = toy_results(2, jobs=10)
    results[0].metrics["policy"] = "$x_{ <b>odd</b>"
    return results


def test_every_chart_as_png_and_pdf_in_column_or_page_width_with_equal_bytes(tmp_path: Path) -> None:
    paths = write_figures(odd_results(), tmp_path / "new" / "figures")
    assert [p.name for p in paths] == [f"{name}{suffix}" for name in NAMES for suffix in (".png", ".pdf")]
    for path in paths:
        data = path.read_bytes()
        if path.suffix == ".pdf":
            assert data.startswith(b"%PDF")
        else:
            width = struct.unpack(">I", data[16:20])[0]
            assert width == (1400 if path.stem in ("jct-by-class", "jobs") else 660)
    again = write_figures(odd_results(), tmp_path / "again")
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in paths]


def test_large_runs_have_no_timeline_of_jobs() -> None:
    results = toy_results(1, jobs=120)
    names = list(figures_of(results, looks(["fifo"]), ["fifo"]))
    assert names == NAMES[:-1]


def test_what_cannot_be_done_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there is no result to draw"):
        write_figures([], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot make the folder .*: a file has that name"):
        write_figures(toy_results(1, jobs=5), tmp_path / "file")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"Writing figures needs Matplotlib.*\n.*pip install 'thebes\[report\]'"):
        write_figures(toy_results(1, jobs=5), tmp_path)
