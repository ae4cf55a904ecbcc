"""The HTML report in a real browser: charts are drawn, nothing is loaded from outside, no script fails."""

from __future__ import annotations

from pathlib import Path

import thebes
from kit.browser import needs_chromium, shown
from kit.waiting import until
from thebes.perf.plans.site import A800
from thebes.perf.plans.survey import survey
from thebes.perf.plans.transformer import find
from thebes.report.html import write_report
from thebes.report.matrix import Run, Scene, write_matrix
from thebes.report.plans import write_plot


def draws_itself(page: Path, folder: Path, fewest: int) -> None:
    """So many charts appear in a browser that reaches nobody, and no script complains.

    Charts are drawn when they come into sight: the window is as high as the page.
    """
    with shown(page, folder) as browser:
        charts = "document.querySelectorAll('.main-svg').length"
        until(lambda: browser.value(charts) >= fewest, f"{fewest} charts", told=lambda: browser.value(charts))
        assert browser.complaints == []


@needs_chromium
def test_the_report_draws_itself_offline(tmp_path: Path) -> None:
    results = [thebes.simulate("philly-sample", "8x8", name, limit=60) for name in ("fifo", "tiresias-l")]
    page = tmp_path / "report.html"
    write_report(results, page)
    draws_itself(page, tmp_path, fewest=8)


@needs_chromium
def test_the_page_of_many_runs_draws_itself_offline(tmp_path: Path) -> None:
    runs = [
        Run(trace, network, name, thebes.simulate(trace, "4x8x8", name, limit=30).metrics)
        for trace in ("philly-sample", "helios-sample")
        for network in ("10gbe", "100gbe")
        for name in ("fifo", "tiresias-l")
    ]
    scenes = [Scene("philly-sample", "4x8x8", "One."), Scene("helios-sample", "4x8x8", "Two.")]
    page = tmp_path / "matrix.html"
    write_matrix(runs, scenes, page, title="Many", about=[])
    draws_itself(page, tmp_path, fewest=6)


@needs_chromium
def test_the_page_of_execution_plans_draws_itself_offline(tmp_path: Path) -> None:
    page = tmp_path / "plans.html"
    write_plot(survey(find("gpt-2"), A800, range(1, 17), A800.cpus_per_gpu), page)
    draws_itself(page, tmp_path, fewest=3)
