"""These tests start a Slurm of their own (`make test-slurm`); those of the commands need none."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent, HERE.parent / "conformance"):
    sys.path.insert(0, str(folder))
