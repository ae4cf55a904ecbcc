"""The lease of a node whose agent is not on the controller's machine: kept, written down, and what is done when it
runs out.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from thebes.node.attempts import Attempts
from thebes.node.ending import AttemptEnding
from thebes.node.home import CallHome
from thebes.protocol import lease as leases
from thebes.protocol.clock import boot_id, boot_s
from thebes.protocol.instance import EventLog
from thebes.protocol.lease import Lease


@dataclass(frozen=True)
class Away:
    """How an agent that is not on the controller's machine finds it, and for how long it may go on alone."""

    homes: tuple[str, ...]
    key: bytes = field(repr=False)
    lease_s: float
    head_file: Path | None = None
    alone_s: float | None = None


class LeaseFile:
    """The file of a lease (`protocol/lease.py`), written over in place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, lease: Lease, epoch: int) -> None:
        os.pwrite(self._fd, leases.to_line(lease, boot_id(), epoch), 0)

    def read(self) -> tuple[Lease, int] | None:
        """None if there is none of this boot."""
        return leases.from_line(os.pread(self._fd, leases.FILE_BYTES, 0), boot_id())


class NodeLease:
    """Renewed by the controller's pings, and by what the head of the cluster says."""

    def __init__(self, away: Away, home: CallHome, folder: Path) -> None:
        self.home, self.head_file = home, away.head_file
        self.heard_s = boot_s()  # from a controller
        self.file = LeaseFile(folder / "lease")
        found = self.file.read()  # of an agent before us: what it was told holds for us, too
        self.lease, home.caller.epoch = found or (Lease(away.lease_s, boot_s()), 0)
        self._write()

    def _write(self) -> None:
        with suppress(OSError):  # supervisors then stop when the last one written is over
            self.file.write(self.lease, self.home.caller.epoch)

    # What a controller says

    def heard(self) -> None:
        """A controller has said something."""
        self.heard_s = boot_s()

    def renew(self, heard_s: float) -> None:
        """The controller tells until when it has heard of us, by our own clock."""
        self.lease.renew(min(boot_s(), heard_s))
        self._write()

    def greet(self, lease_s: float | None) -> None:
        self.lease.lease_s = lease_s or self.lease.lease_s
        self.lease.greet()
        self._write()

    def park(self, for_s: float) -> None:
        self.lease.park(for_s)
        self._write()

    @property
    def is_cut_off(self) -> bool:
        return self.lease.silent_s(boot_s()) >= self.lease.lease_s

    # What follows from silence

    async def keep(self, attempts: Attempts, ending: AttemptEnding, log: EventLog) -> None:
        """Cut off, we stop our jobs: others will start them elsewhere."""
        lease = self.lease
        while True:
            # Not for long: the machine may be asleep meanwhile, and a controller may tell of a shorter lease.
            await asyncio.sleep(max(0.05, min(1.0, lease.lease_s / 12, lease.next_s(boot_s()) - boot_s())))
            head_s = self._head_heard_s()
            if head_s is not None and head_s > boot_s() - lease.silent_s(boot_s()):
                lease.renew(head_s)
                self._write()
            verdict = lease.verdict(boot_s())
            if verdict not in ("notice", "kill"):
                continue
            alive, silent_s = attempts.alive(), lease.silent_s(boot_s())
            if alive or verdict == "notice":
                log.write("cut off", node=attempts.node, verdict=verdict, attempts=len(alive), silent_s=silent_s)
            for attempt in alive:
                grace_s = lease.notice_grace_s if verdict == "notice" else 0.0
                ending.fence(attempt, grace_s, leases.cut_off(silent_s))

    def _head_heard_s(self) -> float | None:
        """When the head of the cluster last said that this node is one of its own."""
        if self.head_file is None:
            return None
        try:
            asked_s = float(self.head_file.read_text())
        except (OSError, ValueError):
            return None
        return asked_s if asked_s <= boot_s() else None  # of the time before the machine was restarted
