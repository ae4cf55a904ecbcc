"""How far a job has come, as its own files and its log lines tell: for the agent's reports and for those of steps.

The job writes `ack`, `checkpoint.json` and `progress` into its attempt's folder, each renamed into place. This module
loads nothing heavy: steps use it, too (see `node/bare.py`).
"""

# pathlib would be loaded for these alone:
# ruff: noqa: PTH110
from __future__ import annotations

import os

from thebes.protocol.plain_json import read_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RATE_WINDOW_S = 30.0
LOOK_EVERY_S = 1.0
LOOK_AT_NEW_S = 0.1  # at an attempt that has not made a step; then less and less often
LOOK_LESS_BY = 1.25
COARSE_NS = 50_000_000  # file times are coarse: what changed just now may change again within the same tick


def whole(value: Any) -> int | None:
    """A number that a job has written, if it is one that means anything."""
    return int(value) if isinstance(value, int | float) and abs(value) < 2**53 else None


def number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 2**53 else None


class StepRate:
    """Steps per second over the last half minute; begins anew whenever the job was stopped."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def clear(self) -> None:
        self._seen.clear()

    def add(self, at_s: float, step: int) -> None:
        seen = self._seen
        if seen and (at_s <= seen[-1][0] or step < seen[-1][1]):
            if step >= seen[-1][1]:
                return
            seen.clear()  # it went back to a checkpoint
        seen.append((at_s, step))
        while len(seen) > 2 and seen[1][0] < at_s - RATE_WINDOW_S:
            del seen[0]

    def steps_per_s(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (from_s, first), (to_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (to_s - from_s)


def written_by_job(attempt: str, rate: StepRate) -> dict[str, Any]:
    """What a job has written into the folder of its attempt, by the names of a Report."""
    progress = read_object(attempt + "/progress")
    checkpoint = read_object(attempt + "/checkpoint.json")
    path = checkpoint.get("path")
    step, step_s = whole(progress.get("step")), number(progress.get("at_s"))
    first_step, first_s = whole(progress.get("first_step")), number(progress.get("first_at_s"))
    if step is not None and step_s is not None:
        rate.add(step_s, step)
    steps_per_s = rate.steps_per_s()
    begun = None if first_step is None or first_s is None else (first_step, first_s)
    if steps_per_s is None and step is not None and step_s is not None and begun is not None and step_s > begun[1]:
        steps_per_s = (step - begun[0]) / (step_s - begun[1])
    return {
        "acknowledged": os.path.exists(attempt + "/ack"),
        "checkpoint_step": whole(checkpoint.get("step")),
        "checkpoint_path": path if isinstance(path, str) else None,
        "checkpoint_s": number(checkpoint.get("at_s")),
        "step": step,
        "step_s": step_s,
        "first_step_s": first_s,
        "steps_per_s": steps_per_s,
    }


def first_step_reported(attempt: str) -> tuple[int, float] | None:
    """The first step that was reported, and when."""
    found = read_object(attempt + "/progress")
    step, at_s = whole(found.get("first_step")), number(found.get("first_at_s"))
    return None if step is None or at_s is None else (step, at_s)


def progress_record(step: int, now_s: float, first: tuple[int, float]) -> dict[str, Any]:
    """What goes into `progress` for a step that was read from a log line: the same as the library writes."""
    return {"step": step, "at_s": now_s, "first_step": first[0], "first_at_s": first[1]}


class FolderWatch:
    """Has anything in a folder changed? Files are renamed into place, so its time tells of any of them by one look."""

    def __init__(self) -> None:
        self._looked_ns = 0

    def changed(self, changed_ns: int, now_ns: int) -> bool:
        """Given when the folder changed last, and the time now by the wall clock."""
        if changed_ns == self._looked_ns:
            return False
        self._looked_ns = changed_ns if now_ns - changed_ns > COARSE_NS else 0
        return True
