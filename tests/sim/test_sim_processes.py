"""The same results in another process, with another hash seed, and without the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from one_run import all_runs

PROGRAM = Path(__file__).with_name("one_run.py")


@cache
def here() -> list[str]:
    return all_runs()


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "NUMBA_DISABLE_JIT": "1"}],
    ids=["another process", "uncompiled"],
)
def test_results_are_identical(environment: dict[str, str]) -> None:
    """Given tiresias-l, tiresias-g, srtf and a user's own policy, with two placements each."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    there = ran.stdout.splitlines()
    assert len(there) == 8
    for ours, theirs in zip(here(), there, strict=True):
        assert ours == theirs
