"""The HTML report in a real browser: charts are drawn, nothing is loaded from outside, no script fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import thebes
from thebes.perf.plans.site import A800
from thebes.perf.plans.survey import survey
from thebes.perf.plans.transformer import find
from thebes.report.html import write_report
from thebes.report.matrix import Run, Scene, write_matrix
from thebes.report.plans import write_plot

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")


def charts_drawn(page: Path, folder: Path) -> int:
    """How many charts the page draws in a browser that reaches nobody; no script may complain."""
    command = [
        str(CHROMIUM),
        *QUIET,
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        "--virtual-time-budget=10000",
        "--window-size=1400,6000",  # charts are drawn when they come into sight
        "--dump-dom",
        page.as_uri(),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "HOME": str(folder)})
    console = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
    return len(re.findall(r'class="main-svg"', ran.stdout))


@needs_chromium
def test_the_report_draws_itself_offline(tmp_path: Path) -> None:
    results = [thebes.simulate("philly-sample", "8x8", name, limit=60) for name in ("fifo", "tiresias-l")]
    page = tmp_path / "report.html"
    write_report(results, page)
    assert charts_drawn(page, tmp_path) >= 8


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
    assert charts_drawn(page, tmp_path) >= 6


@needs_chromium
def test_the_page_of_execution_plans_draws_itself_offline(tmp_path: Path) -> None:
    page = tmp_path / "plans.html"
    write_plot(survey(find("gpt-2"), A800, range(1, 17), A800.cpus_per_gpu), page)
    assert charts_drawn(page, tmp_path) >= 3
