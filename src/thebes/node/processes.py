"""Looks at processes through /proc and ends those that a killed supervisor has left behind.

Leftovers of an attempt are known by THEBES_ATTEMPT_DIR in their environment (the path is unique on the machine, a job
number is not), by the process group of the ranks, or by having become children of the agent. Zombies count as gone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    threads: int = 1

    @property
    def alive(self) -> bool:
        """A first thread that has ended looks like a zombie while others of the process still run, or still die."""
        return self.state not in ("Z", "X") or self.threads > 1


@dataclass(frozen=True)
class Trail:
    """How to know the processes of one attempt. The group is 0 if unknown, or of an earlier boot."""

    attempt_dir: str
    group: int = 0
    session: int = 0


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    words = rest.split()
    return Stat(pid, name, words[0], int(words[1]), int(words[2]), int(words[3]), int(words[17]))


def all_pids() -> Iterator[int]:
    for name in os.listdir("/proc"):  # noqa: PTH208 - a Path for each process would cost more than the look
        if name.isdigit():
            yield int(name)


def environment(pid: int) -> bytes:
    """As it was at exec, entries ended by NUL; empty for a zombie or another user's process."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    """Direct children, whichever thread made them."""
    if not _LISTS_CHILDREN:
        return [other for other in all_pids() if (stat := read_stat(other)) and stat.parent == pid]
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


_LISTS_CHILDREN = Path("/proc/thread-self/children").exists()  # not every kernel does


def descendants(pid: int) -> list[int]:
    """All of them that are not zombies, parents first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        new = [child for child in children(queue.pop(0)) if child not in found]
        found += new
        queue += new
    return [child for child in found if (stat := read_stat(child)) and stat.alive]


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

    Own children that are no supervisors share our session; the MPS daemon, which leaves it, is known by its name.
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
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def wait_gone(pids: Iterable[int], timeout_s: float) -> bool:
    """Whether all of them have ended within the time."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        while (stat := read_stat(pid)) is not None and stat.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
    return True
