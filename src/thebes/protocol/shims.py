"""Programs that stand for Slurm's own (`thebes shims install`): how to know them, and a PATH without them.

The engine for Slurm must find the real commands even when its user has put the others in front of them.
"""

from __future__ import annotations

import os
from pathlib import Path

NAMES = ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "srun")
MARK = "# Made by `thebes shims install`."


def is_shim(path: Path) -> bool:
    """Whether a program is one of ours."""
    try:
        with path.open("rb") as stream:
            return MARK.encode() in stream.read(200)
    except OSError:
        return False


def without_shims(path: str) -> str:
    """A PATH without the folders in which our programs lie."""
    folders = path.split(os.pathsep)
    return os.pathsep.join(one for one in folders if not any(is_shim(Path(one or ".", name)) for name in NAMES))
