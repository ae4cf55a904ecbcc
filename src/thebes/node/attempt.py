"""The folder of one attempt (a job's incarnation on one node): where its files lie, and what they say as a Report.

The supervisor writes `state.json`; the job writes `ack`, `checkpoint.json` and `progress`; the agent writes the rest.
A file that a job has spoilt is taken as missing.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thebes.engine.contract import Report
from thebes.model.errors import UserError
from thebes.node.clock import boot_id, boot_s, shift_s
from thebes.node.instance import holder_of, take

SMALL_BYTES = 64 << 10  # no file that a job writes for us is longer
RATE_WINDOW_S = 30.0
_TIMES = ("started_s", "since_s", "exited_s")
_JOB_ID = re.compile(r"[A-Za-z0-9_]{1,64}")


@dataclass(frozen=True)
class AttemptDir:
    """`nodes/NODE/attempts/JOB.INC`."""

    attempts: Path
    job_id: str
    incarnation: int

    @staticmethod
    def named(attempts: Path, name: str) -> AttemptDir | None:
        """From the folder's name; None if it is not one of ours."""
        job_id, _, incarnation = name.rpartition(".")
        if not _JOB_ID.fullmatch(job_id) or not incarnation.isdigit():
            return None
        return AttemptDir(attempts, job_id, int(incarnation))

    @property
    def name(self) -> str:
        return f"{self.job_id}.{self.incarnation}"

    @property
    def path(self) -> Path:
        return self.attempts / self.name

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def command(self, line: str) -> None:
        """Hand a line to the supervisor, which holds the FIFO open as long as it lives."""
        fd = os.open(self.path / "ctl", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)

    def launch(self) -> dict[str, Any]:
        return _object(self.path / "launch.json", limit_bytes=16 << 20)

    def first_step(self) -> tuple[int, float] | None:
        """The first step that was reported, and when."""
        found = _object(self.path / "progress")
        step, at_s = _int(found.get("first_step")), _float(found.get("first_at_s"))
        return None if step is None or at_s is None else (step, at_s)

    def cuda_needs(self) -> dict[str, int] | None:
        """GPU memory that a process suspended by the driver needs to come back, by GPU."""
        found = _object(self.path / "cuda")
        return {str(gpu): int(size) for gpu, size in found.items()} if found else None

    def state(self) -> dict[str, Any]:
        """state.json, its times moved to this boot; {} if there is none."""
        found = _object(self.path / "state.json", limit_bytes=16 << 20)
        if not found or found.get("boot") == boot_id():
            return found
        shift = shift_s(
            written_boot_s=found.get("at_s", 0.0),
            written_wall_s=found.get("wall_s", 0.0),
            now_boot_s=boot_s(),
            now_wall_s=time.time(),
        )
        for name in _TIMES:
            if isinstance(found.get(name), int | float):
                found[name] += shift
        return found


def lock_holder(lock: Path) -> int | None:
    """The pid in an attempt's lock file if somebody holds it. A look by somebody else does not count as holding."""
    with suppress(UserError):
        return holder_of(lock, within_s=1.0)
    return None


def take_lock(folder: Path) -> int | None:
    """Take the lock of an attempt, unless somebody holds it; the open file."""
    folder.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if take(fd):
        return fd
    os.close(fd)
    return None


def lost_state(attempt: AttemptDir, state: Mapping[str, Any], detail: str) -> dict[str, Any]:
    """The result of an attempt whose supervisor vanished."""
    now = boot_s()
    run_s = float(state.get("run_s", 0.0))
    if state.get("state") == "running" and state.get("boot") == boot_id():
        run_s += max(0.0, now - state["since_s"])
    return {
        **state,
        "version": 1,
        "job_id": attempt.job_id,
        "incarnation": attempt.incarnation,
        "state": "exited",
        "cause": "lost",
        "detail": detail,
        "codes": {},
        "started_s": state.get("started_s"),
        "since_s": now,
        "exited_s": now,
        "run_s": run_s,
        "boot": boot_id(),
        "wall_s": time.time(),
        "at_s": now,
    }


class Rate:
    """Steps per second over the last half minute; begins anew whenever the job was stopped."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def clear(self) -> None:
        self._seen.clear()

    def add(self, at_s: float, step: int) -> None:
        if self._seen and (at_s <= self._seen[-1][0] or step < self._seen[-1][1]):
            if step >= self._seen[-1][1]:
                return
            self.clear()  # it went back to a checkpoint
        self._seen.append((at_s, step))
        while len(self._seen) > 2 and self._seen[1][0] < at_s - RATE_WINDOW_S:
            self._seen.popleft()

    def steps_per_s(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (from_s, first), (to_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (to_s - from_s)


def make_report(attempt: AttemptDir, node: str, state: Mapping[str, Any], rate: Rate, **more: Any) -> Report:
    """What the files say now."""
    progress = _object(attempt.path / "progress")
    checkpoint = _object(attempt.path / "checkpoint.json")
    step, step_s = _int(progress.get("step")), _float(progress.get("at_s"))
    first_step, first_s = _int(progress.get("first_step")), _float(progress.get("first_at_s"))
    if step is not None and step_s is not None:
        rate.add(step_s, step)
    steps_per_s = rate.steps_per_s()
    if steps_per_s is None and None not in (step, step_s, first_step, first_s) and step_s > first_s:  # type: ignore[operator]
        steps_per_s = (step - first_step) / (step_s - first_s)  # type: ignore[operator]
    run_s = float(state.get("run_s") or 0.0)
    if state.get("state") == "running":
        run_s += max(0.0, boot_s() - state["since_s"])
    return Report(
        job_id=attempt.job_id,
        incarnation=attempt.incarnation,
        node=node,
        state=state.get("state", "starting"),
        cause=state.get("cause", ""),
        detail=state.get("detail", ""),
        codes={int(rank): code for rank, code in state.get("codes", {}).items()},
        started_s=state.get("started_s"),
        exited_s=state.get("exited_s"),
        run_s=run_s,
        acknowledged=(attempt.path / "ack").exists(),
        checkpoint_step=_int(checkpoint.get("step")),
        checkpoint_path=_str(checkpoint.get("path")),
        checkpoint_s=_float(checkpoint.get("at_s")),
        step=step,
        step_s=step_s,
        first_step_s=first_s,
        steps_per_s=steps_per_s,
        **more,
    )


def read_log(path: Path, offset: int, limit: int) -> tuple[bytes, int]:
    """Up to `limit` bytes from `offset`, and the offset after them. Beyond the end (it was cut): go on at the end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        start = max(0, size + offset) if offset < 0 else min(offset, size)
        data = os.pread(fd, limit, start)
        return data, start + len(data)
    finally:
        os.close(fd)


def _object(path: Path, limit_bytes: int = SMALL_BYTES) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(limit_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _int(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and abs(value) < 2**53 else None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 2**53 else None


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) else None
