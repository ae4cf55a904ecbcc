"""Cluster time: seconds that only go forward, near to the wall clock but deaf to its jumps.

It is the machine's boot clock plus an offset that is fixed once and kept in the store, so that it goes on through
restarts of the controller and changes of the wall clock. Only after a reboot, when the boot clock begins anew, is
the wall clock asked, and then time never goes back behind what was written before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from thebes.node.clock import boot_id, boot_s


@dataclass(frozen=True)
class ClusterClock:
    """now_s = boot clock + offset."""

    offset_s: float
    boot: str
    boot_clock: Callable[[], float] = boot_s

    def now_s(self) -> float:
        return self.boot_clock() + self.offset_s

    def from_boot(self, at_s: float) -> float:
        """Cluster time of an instant that a node tells in boot-clock seconds."""
        return at_s + self.offset_s

    def kept(self) -> str:
        """What the store keeps."""
        return json.dumps({"boot": self.boot, "offset_s": self.offset_s})


def resume_clock(
    kept: str | None,
    last_s: float,
    *,
    boot: str | None = None,
    boot_clock: Callable[[], float] = boot_s,
    wall_clock: Callable[[], float] = time.time,
) -> ClusterClock:
    """The clock of this instance: the one it had, if the machine has not booted since; never before `last_s`."""
    boot = boot or boot_id()
    if kept is not None:
        known = json.loads(kept)
        if known["boot"] == boot and boot_clock() + known["offset_s"] >= last_s:
            return ClusterClock(float(known["offset_s"]), boot, boot_clock)
    return ClusterClock(max(wall_clock(), last_s) - boot_clock(), boot, boot_clock)
