"""The HTML report in a real browser: charts are drawn, nothing is loaded from outside, no script fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import thebes
from thebes.report.html import write_report

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


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
def test_the_report_draws_itself_offline(tmp_path: Path) -> None:
    results = [thebes.simulate("philly-sample", "8x8", name, limit=60) for name in ("fifo", "tiresias-l")]
    page = tmp_path / "report.html"
    write_report(results, page)
    command = [
        str(CHROMIUM),
        *QUIET,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        "--virtual-time-budget=10000",
        "--window-size=1400,6000",  # charts are drawn when they come into sight
        "--dump-dom",
        page.as_uri(),
    ]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(tmp_path)}
    )
    drawn = re.findall(r'class="main-svg"', ran.stdout)
    assert len(drawn) >= 8, ran.stderr[-2000:]
    console = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
