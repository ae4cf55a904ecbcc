"""Cluster time: seconds that only go forward, near to the wall clock but unmoved by its jumps.

It is the machine's boot clock plus an offset that is fixed once and kept in the store, so that it goes on through
restarts of the controller and changes of the wall clock. Only after a reboot, when the boot clock begins again, is
the wall clock asked, and then time never goes back behind what was written before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from thebes.protocol.clock import boot_id, boot_s


@dataclass(frozen=True)
class ClusterClock:
    """The clock: now_s is the boot clock plus an offset."""

    offset_s: float
    boot: str
    boot_clock: Callable[[], float] = boot_s

    def now_s(self) -> float:
        return self.boot_clock() + self.offset_s

    def from_boot(self, at_s: float) -> float:
        """The cluster time of an instant that a node tells in boot-clock seconds."""
        return at_s + self.offset_s

    def kept(self) -> str:
        """The text that the store keeps."""
        return json.dumps({"boot": self.boot, "offset_s": self.offset_s})


def resume_clock(
    kept: str | None,
    last_s: float,
    *,
    boot: str | None = None,
    boot_clock: Callable[[], float] = boot_s,
    wall_clock: Callable[[], float] = time.time,
) -> ClusterClock:
    """The clock of this instance: the one it had, if the machine has not booted since; it is never before `last_s`."""
    boot = boot or boot_id()
    if kept is not None:
        known = json.loads(kept)
        if known["boot"] == boot and boot_clock() + known["offset_s"] >= last_s:
            return ClusterClock(float(known["offset_s"]), boot, boot_clock)
    return ClusterClock(max(wall_clock(), last_s) - boot_clock(), boot, boot_clock)
