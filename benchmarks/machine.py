"""The machine a benchmark ran on: what it is, and how fast plain Python is on it.

Nothing here names the host or a path: result files are published.
"""

from __future__ import annotations

import heapq
import os
import platform
import random
import re
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HEAP_OPERATIONS = 1_000_000
NOISE = re.compile(r"\((r|tm)\)|@.*|\b(intel|amd|cpu|processor|gen|with|\d+-core|\d+(st|nd|rd|th))\b", re.IGNORECASE)


def describe() -> dict[str, Any]:
    """CPU, memory, system and the versions that decide how fast we are."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "numba": version("numba"),
        "numpy": version("numpy"),
        "polars": version("polars"),
    }


def short_name(machine: dict[str, Any]) -> str:
    """For file names: `2core-xeon`."""
    words = re.findall(r"[a-z0-9]+", NOISE.sub(" ", machine["cpu"]).lower())
    return f"{machine['cores']}core-{'-'.join(words[:3]) or machine['architecture']}"


def calibrate(repeats: int) -> dict[str, Any]:
    """One million heap operations in plain Python: half a million pushes, then as many pops."""
    numbers = random.Random(0)
    keys = [numbers.random() for _ in range(HEAP_OPERATIONS // 2)]
    seconds = [_push_and_pop(keys) for _ in range(repeats)]
    return {"heap_operations": HEAP_OPERATIONS, "seconds": min(seconds), "all_seconds": seconds}


def _push_and_pop(keys: list[float]) -> float:
    heap: list[float] = []
    began = time.perf_counter()
    for key in keys:
        heapq.heappush(heap, key)
    while heap:
        heapq.heappop(heap)
    return time.perf_counter() - began


def _cpu_model() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
