"""`thebes trace …` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trace_samples import SACCT, TIRESIAS
from typer.testing import CliRunner

from thebes.cli.trace import app
from thebes.model.errors import UserError
from thebes.trace import FORMATS, read, sample_path

runner = CliRunner()


def run(*words: object):
    return runner.invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture
def tiresias(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(TIRESIAS)
    return path


def test_info_shows_the_figures(tiresias: Path):
    shown = " ".join(run("info", tiresias).stdout.split())

    assert "format tiresias" in shown
    assert "2 models" in shown
    assert "largest job 8" in shown
    assert "p50 2.59 min" in shown


def test_info_as_json_on_stdout(tiresias: Path):
    figures = json.loads(run("info", tiresias, "--json", "-").stdout)

    assert (figures["jobs"], figures["format"], figures["max_gpus"]) == (2, "tiresias", 8.0)


def test_info_as_json_file(tiresias: Path, tmp_path: Path):
    run("info", tiresias, "--json", tmp_path / "out.json")

    assert json.loads((tmp_path / "out.json").read_text())["jobs"] == 2


def test_info_json_where_one_cannot_write(tiresias: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"out\.json: cannot be written: No such file or directory"):
        run("info", tiresias, "--json", tmp_path / "nowhere" / "out.json")


def test_convert_writes_and_tells_notes_on_stderr(tmp_path: Path):
    (tmp_path / "sacct.txt").write_text(SACCT)
    done = run("convert", tmp_path / "sacct.txt", tmp_path / "out.parquet")

    assert done.stdout == ""
    assert "note: Skipped 2 job steps." in done.stderr
    assert "out.parquet: 2 jobs (slurm → normalised)" in done.stderr
    assert len(read(tmp_path / "out.parquet")) == 2


def test_convert_refuses_to_overwrite_without_force(tiresias: Path):
    with pytest.raises(UserError, match=r"jobs\.csv: the file exists\.\nAdd --force to overwrite it"):
        run("convert", sample_path(), tiresias)
    assert run("convert", sample_path(), tiresias, "--force").exit_code == 0
    assert len(read(tiresias)) == 822


def test_convert_with_the_wrong_format(tiresias: Path, tmp_path: Path):
    with pytest.raises(UserError, match="for a Helios cluster log"):
        run("convert", tiresias, tmp_path / "out.csv", "--format", "helios")


def test_generate_meets_its_options(tmp_path: Path):
    words = ("--jobs", 300, "--arrivals", "bursty", "--load", 0.8, "--gpus", 64, "--seed", 4, "--max-gpus", 8)
    done = run("generate", tmp_path / "a.csv", *words)
    run("generate", tmp_path / "b.csv", *words)

    assert "note: Fitted to 747 jobs of the shipped Philly sample." in done.stderr
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert len(read(tmp_path / "a.csv")) == 300
    assert read(tmp_path / "a.csv").jobs["num_gpus"].max() == 8.0


def test_generate_like_a_given_trace(tiresias: Path, tmp_path: Path):
    done = run("generate", tmp_path / "a.csv", "--like", tiresias, "--jobs", 50)

    assert f"Fitted to 2 jobs of {tiresias}" in done.stderr.replace("\n", "")
    assert set(read(tmp_path / "a.csv").jobs["num_gpus"]) == {1.0, 8.0}


def test_formats_are_all_listed():
    shown = run("formats").stdout

    assert all(known.name in shown for known in FORMATS)


def test_the_commands_load_nothing_heavy_until_used():
    code = "import sys, thebes.cli.trace; print([name for name in ('polars', 'numpy', 'numba') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert found.strip() == "[]"
