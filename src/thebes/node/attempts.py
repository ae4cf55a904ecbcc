"""The attempts of this node that are not forgotten: what an agent knows of each, and the files that the next agent
finds them by.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from thebes.node.log_steps import LogSteps
from thebes.protocol.attempt import AttemptDir
from thebes.protocol.contract import AttemptKey, Refused, Report
from thebes.protocol.fences import Fences
from thebes.protocol.instance import explain
from thebes.protocol.launch import PartLaunch
from thebes.protocol.messages import AboutAttempt
from thebes.protocol.progress import FolderWatch, StepRate


class NodeAttempt:
    """What the agent knows of one attempt beyond its files."""

    def __init__(self, folder: AttemptDir) -> None:
        self.dir = folder
        self.state: dict[str, Any] = {}
        self.report: Report | None = None
        self.rate = StepRate()
        self.steps: LogSteps | None = None
        self.first_step: tuple[int, float] | None = None
        self.pid = 0  # of the supervisor
        self.pidfd = -1
        self.folder_watch = FolderWatch()
        self.took: dict[str, float] = {}
        self.changed = asyncio.Event()
        self.busy = asyncio.Lock()  # one suspend or resume at a time

    @property
    def key(self) -> AttemptKey:
        return self.dir.job_id, self.dir.incarnation

    @property
    def alive(self) -> bool:
        return self.state.get("state") != "exited"


class Attempts:
    """All attempts of a node that are not forgotten, alive or ended."""

    def __init__(self, node: str, folder: Path) -> None:
        self.node = node
        self.dir = folder / "attempts"
        self.open_dir = folder / "open"  # one empty file per attempt that is not forgotten: what a new agent reads
        self.fences = Fences(folder / "fence")
        for path in (self.dir, self.open_dir, self.fences.dir):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.by_key: dict[AttemptKey, NodeAttempt] = {}
        self.job_locks: dict[str, asyncio.Lock] = {}  # one start or removal of a job's attempts at a time
        self.ports: dict[AttemptKey, int] = {}  # given as MASTER_PORT
        self.some_alive = asyncio.Event()

    def named(self, name: str) -> AttemptDir | None:
        return AttemptDir.named(self.dir, name)

    def find(self, folder: AttemptDir) -> NodeAttempt | None:
        return self.by_key.get((folder.job_id, folder.incarnation))

    def add(self, folder: AttemptDir) -> NodeAttempt:
        attempt = NodeAttempt(folder)
        self.by_key[attempt.key] = attempt
        return attempt

    def alive(self) -> list[NodeAttempt]:
        return [attempt for attempt in self.by_key.values() if attempt.alive]

    def asked_for(self, request: AboutAttempt) -> NodeAttempt | None:
        return self.by_key.get((request["job_id"], request["incarnation"]))

    def living(self, request: AboutAttempt) -> NodeAttempt:
        """The attempt that a request is about; Refused unless it lives."""
        attempt = self.asked_for(request)
        if attempt is None:
            raise Refused(f"node {self.node} has no incarnation {request['incarnation']} of job {request['job_id']}")
        if not attempt.alive:
            raise Refused(f"job {request['job_id']} has ended on node {self.node}")
        return attempt

    def lock_of(self, job_id: str) -> asyncio.Lock:
        return self.job_locks.setdefault(job_id, asyncio.Lock())

    def drop_lock(self, job_id: str) -> None:
        lock = self.job_locks.get(job_id)
        if lock is not None and not lock.locked():
            del self.job_locks[job_id]

    def starting(self) -> set[str]:
        """Jobs of which an attempt is being started or removed."""
        return {job for job, lock in self.job_locks.items() if lock.locked()}

    def write(self, folder: AttemptDir, part: PartLaunch, checkpoint_dir: str) -> None:
        """All that the supervisor needs; nothing stays if it cannot be written. In a thread."""
        path = folder.path
        try:
            if checkpoint_dir:
                Path(checkpoint_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(path / "launch.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as file:
                json.dump(part.as_dict(), file)
            with suppress(FileExistsError):
                os.mkfifo(path / "ctl", 0o600)
            (self.open_dir / folder.name).touch(mode=0o600)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise explain(error, path, "cannot be written") from error

    def forget(self, attempt: NodeAttempt) -> None:
        """The controller has its result: nobody asks for it again. Its files stay until they are old."""
        (self.open_dir / attempt.dir.name).unlink(missing_ok=True)
        del self.by_key[attempt.key]
        self.drop_lock(attempt.dir.job_id)
