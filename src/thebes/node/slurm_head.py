"""A child process asks slurmctld whether it still counts this job among its own; the answer comes by a pipe."""

# contextlib would be loaded for this alone:
# ruff: noqa: SIM105
from __future__ import annotations

import os
from _signal import SIGKILL  # pyright: ignore[reportMissingImports]

from thebes.node.process_tree import send
from thebes.node.ranks import execute
from thebes.protocol.clock import boot_s

HEAD_S = 5.0  # slurmctld answers within this, or not at all


class SlurmHead:
    """One question at a time."""

    def __init__(self) -> None:
        self.pid = 0  # 0: nothing was asked
        self.fd = -1
        self.until_s = 0.0
        self._said = b""
        self._asked_s = 0.0

    def ask(self, now: float, lease_s: float) -> None:
        if self.pid:
            return
        told, tell = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(told)
            os.close(tell)
            return
        if pid == 0:
            try:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 0)
                os.dup2(tell, 1)
                os.dup2(null, 2)
                job = os.environ.get("SLURM_JOB_ID", "0")
                execute(["scontrol", "--oneliner", "show", "job", job], dict(os.environ))
            finally:
                os._exit(127)
        os.close(tell)
        os.set_blocking(told, False)
        self.pid, self.fd, self._said = pid, told, b""
        self._asked_s = now
        self.until_s = now + min(HEAD_S, lease_s / 3)

    def hear(self, ready: dict[int, int]) -> float | None:
        """When slurmctld was asked that now says that the job runs; None if it has not said so (yet)."""
        over = boot_s() >= self.until_s
        if ready.get(self.fd):
            try:
                while piece := os.read(self.fd, 65536):
                    self._said += piece
                over = True
            except BlockingIOError:
                pass
        if not over:
            return None
        self.stop()
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass
        os.close(self.fd)
        self.pid, self.fd = 0, -1
        return self._asked_s if b"JobState=RUNNING" in self._said else None

    def stop(self) -> None:
        if self.pid:
            send(self.pid, SIGKILL)
