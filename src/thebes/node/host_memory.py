"""How much host memory a process may still have: of the machine, and of its control groups."""

from __future__ import annotations

from pathlib import Path


def host_free_bytes(pid: int, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What the process may still fill: the host's available memory, or less where a control group limits it.

    Images of suspended processes are ordinary memory of theirs, so they are counted already.
    """
    available = _fields(proc / "meminfo")["MemAvailable"] * 1024
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return available
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    group = cgroups / path.lstrip("/")
    while group != cgroups and cgroups in group.parents:
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                used = int((group / "memory.current").read_text())
                cache = _fields(group / "memory.stat").get("inactive_file", 0)
                available = min(available, int(limit) - used + cache)
        except OSError:
            pass  # no memory controller at this level
        group = group.parent
    return available


def _fields(path: Path) -> dict[str, int]:
    words = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}
