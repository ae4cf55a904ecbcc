"""The folder of one attempt (a job's incarnation on one node): where its files lie, and what they say as a Report.

The supervisor writes `state.json`; the job writes `ack`, `checkpoint.json` and `progress`; the agent writes the rest.
A file that a job has spoilt is taken as missing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thebes.model.errors import UserError
from thebes.protocol.clock import boot_id, boot_s, shift_s
from thebes.protocol.contract import Report
from thebes.protocol.instance import holder_of, take
from thebes.protocol.plain_json import read_object
from thebes.protocol.progress import StepRate, first_step_reported, written_by_job

LARGE_BYTES = 16 << 20  # a launch and a state are our own, and may have many ranks
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
        return read_object(self.path / "launch.json", LARGE_BYTES)

    def first_step(self) -> tuple[int, float] | None:
        """The first step that was reported, and when."""
        return first_step_reported(str(self.path))

    def cuda_needs(self) -> dict[str, int] | None:
        """GPU memory that a process suspended by the driver needs to come back, by GPU."""
        found = read_object(self.path / "cuda")
        return {str(gpu): int(size) for gpu, size in found.items()} if found else None

    def state(self) -> dict[str, Any]:
        """state.json, its times moved to this boot; {} if there is none."""
        found = read_object(self.path / "state.json", LARGE_BYTES)
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


def make_report(attempt: AttemptDir, node: str, state: Mapping[str, Any], rate: StepRate, **more: Any) -> Report:
    """What the files say now."""
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
        **written_by_job(str(attempt.path), rate),
        **more,
    )
