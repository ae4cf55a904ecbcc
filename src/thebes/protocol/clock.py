"""The clock that all processes of a node share: CLOCK_BOOTTIME, which nobody can set and which counts through sleep.

It begins anew at every boot, so times that were written before one are moved by way of the wall clock. This module
loads nothing but `time`: supervisors and steps use it, too (see `node/bare.py`).
"""

# pathlib would be loaded for this alone:
# ruff: noqa: PTH123
from __future__ import annotations

import time

_boot_id = ""


def boot_s() -> float:
    """Seconds since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """An id that differs from one boot to the next."""
    global _boot_id
    if not _boot_id:
        with open("/proc/sys/kernel/random/boot_id") as file:
            _boot_id = file.read().strip()
    return _boot_id


def shift_s(*, written_boot_s: float, written_wall_s: float, now_boot_s: float, now_wall_s: float) -> float:
    """What to add to times of an earlier boot, so that they lie as long ago as the wall clock says."""
    return now_boot_s - (now_wall_s - written_wall_s) - written_boot_s
