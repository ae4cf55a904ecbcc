"""Trials stand on the fixtures of several suites."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for folder in (TESTS, TESTS / "faults", TESTS / "slurm", TESTS / "ray"):
    sys.path.insert(0, str(folder))
