"""The clock that all processes of a node share: CLOCK_BOOTTIME, which nobody can set and which counts through sleep.

It begins anew at every boot, so times that were written before one are moved by way of the wall clock.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path


def boot_s() -> float:
    """Seconds since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def boot_id() -> str:
    """Tells one boot from the next."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def shift_s(*, written_boot_s: float, written_wall_s: float, now_boot_s: float, now_wall_s: float) -> float:
    """What to add to times of an earlier boot, so that they lie as long ago as the wall clock says."""
    return now_boot_s - (now_wall_s - written_wall_s) - written_boot_s
