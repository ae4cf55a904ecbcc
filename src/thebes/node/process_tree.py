"""Processes as /proc shows them: their ancestors, whether they live, and which signals they catch.

Zombies count as gone. This module loads nothing heavy: supervisors and steps use it, and the agent (`processes.py`).
"""

# pathlib and contextlib would be loaded for these alone:
# ruff: noqa: PTH110, PTH123, PTH208, SIM105
from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


class Stat:
    """What /proc/PID/stat says."""

    def __init__(self, pid: int, text: str) -> None:
        self.pid = pid
        self.name, _, rest = text.partition("(")[2].rpartition(")")
        words = rest.split()
        self.state, self.threads = words[0], int(words[17])
        self.parent, self.group, self.session = int(words[1]), int(words[2]), int(words[3])

    @property
    def alive(self) -> bool:
        """A first thread that has ended looks like a zombie while others of the process still run, or still die."""
        return self.state not in ("Z", "X") or self.threads > 1


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return Stat(pid, file.read())
    except OSError:
        return None


def all_pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def children(pid: int) -> list[int]:
    """Direct children, whichever thread made them."""
    if not _LISTS_CHILDREN:
        return [other for other in all_pids() if (stat := read_stat(other)) and stat.parent == pid]
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    found += [int(word) for word in file.read().split()]
            except OSError:
                pass  # that thread has just ended
    except OSError:
        pass  # the process has
    return found


_LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")  # not every kernel does


def descendants(pid: int) -> list[int]:
    """All descendants that are not zombies, parents first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        new = [child for child in children(queue.pop(0)) if child not in found]
        found += new
        queue += new
    return [child for child in found if (stat := read_stat(child)) and stat.alive]


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal. To one that has none, most signals are deadly."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = [line.split()[1] for line in file if line.startswith(b"SigCgt:")]
    except OSError:
        return False
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass  # gone, or not ours to signal
