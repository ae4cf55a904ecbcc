"""The drawing of a survey of plans: what it shows, that it stands alone, and that it is the same each time."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from thebes.perf.plans.site import A800
from thebes.perf.plans.survey import Survey, survey
from thebes.perf.plans.transformer import find
from thebes.report.plans import memory_chart, parts_chart, render, throughput_chart, write_plot


@pytest.fixture(scope="module")
def llama() -> Survey:
    return survey(find("llama-2-7b"), A800, range(1, 65), 12)


def test_throughput_has_a_line_per_family_and_rings_around_the_best(llama: Survey) -> None:
    drawn = {str(trace["name"]): trace for trace in throughput_chart(llama).data}

    assert {"ZeRO data parallel", "ZeRO-Offload", "3D (tensor, pipeline, data)", "best"} <= set(drawn)
    assert drawn["best"]["x"] == [1, 2, 4, 8, 16, 32, 64]
    assert drawn["best"]["y"] == [row.best.samples_s for row in llama.rows]


def test_memory_is_drawn_once_for_each_allocation(llama: Survey) -> None:
    bars = [trace for trace in memory_chart(llama).data if trace["type"] == "bar"]

    assert sorted(int(x) for trace in bars for x in trace["x"]) == [row.gpus for row in llama.rows]  # type: ignore


def test_the_parts_of_an_iteration_add_up(llama: Survey) -> None:
    shares = [trace["y"] for trace in parts_chart(llama).data]

    for column in zip(*shares, strict=True):  # type: ignore
        assert sum(column) == pytest.approx(100)


def test_the_page_stands_alone_and_explains_its_own_words(llama: Survey) -> None:
    page = render(llama)

    assert page == render(llama)
    own = re.sub(r"<script>(?!\n).*?</script>", "", page, count=1, flags=re.DOTALL)
    assert not re.search(r"https?://|@import|url\(", own)
    assert "Pipeline bubble" in own
    assert "Finish-time fairness" not in own


def test_names_are_escaped(llama: Survey) -> None:
    page = render(llama._replace(model=replace(llama.model, name="<b>bold</b>")))

    assert "<b>bold</b>" not in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page


def test_a_single_allocation_can_be_drawn(tmp_path: Path) -> None:
    found = survey(find("vit"), A800, [8], 12)

    for name in ("one.html", "one.png"):
        write_plot(found, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


def test_figures_are_the_same_bytes_each_time(llama: Survey, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        write_plot(llama, tmp_path / name)

    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
