"""The fault tests use the fake engine of the server's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "server"))
