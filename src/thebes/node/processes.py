"""The processes that a killed supervisor has left behind are found and ended here.

Leftovers of an attempt are known by THEBES_ATTEMPT_DIR in their environment (the path is unique on the machine, a job
number is not), by the process group of the ranks, or by having become children of the agent. Zombies count as gone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thebes.node.process_tree import all_pids, children, descendants, read_stat, send


@dataclass(frozen=True)
class Trail:
    """How to know the processes of one attempt. The group is 0 if unknown, or of an earlier boot."""

    attempt_dir: str
    group: int = 0
    session: int = 0


def environment(pid: int) -> bytes:
    """As it was at exec, entries ended by NUL; empty for a zombie or another user's process."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def leftovers(trails: Collection[Trail]) -> list[int]:
    """Living processes of these attempts, by one look at all processes."""
    marks = {f"THEBES_ATTEMPT_DIR={trail.attempt_dir}".encode() for trail in trails}
    groups = {(trail.group, trail.session) for trail in trails if trail.group}
    own = os.getpid()
    found: list[int] = []
    for pid in all_pids():
        if pid == own:
            continue
        if not marks.isdisjoint(environment(pid).split(b"\0")):
            found.append(pid)
            continue
        stat = read_stat(pid) if groups else None
        if stat and stat.alive and (stat.group, stat.session) in groups:
            found.append(pid)
    return found


def strays(supervisors: Collection[int]) -> list[int]:
    """Children that this process got because their supervisor died. It must be a subreaper; zombies are reaped.

    Own children that are no supervisors share our session; the MPS control process, which leaves it, is known by name.
    """
    session = os.getsid(0)
    found: list[int] = []
    for pid in children(os.getpid()):
        stat = read_stat(pid)
        if pid in supervisors or stat is None or stat.session == session or stat.name.startswith("nvidia-"):
            continue
        if stat.alive:
            found += [pid, *descendants(pid)]
        else:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return found


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        send(pid, signal.SIGKILL)


def wait_gone(pids: Iterable[int], timeout_s: float) -> bool:
    """Whether all of them have ended within the time."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        while (stat := read_stat(pid)) is not None and stat.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
    return True
