"""One incarnation of a job under Slurm: what is remembered of it, in memory and in the folder that all nodes share.

SHARED/slurm/gangs/JOB.INC.json       one per incarnation that is not forgotten: what a new controller reads
SHARED/slurm/log/JOB.INC.log          what srun had to say
SHARED/slurm/homes.json               where steps call, read by them before each call
SHARED/slurm/bin-HASH/                what runs on the nodes: step.pyc and the modules that it loads
SHARED/fence/JOB                      the newest incarnation; nothing older starts
SHARED/nodes/NODE/attempts/JOB.INC/   launch.json, step.json from us; state.json and logs from the step
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from thebes.engine.link import NodeLink
from thebes.model.errors import UserError
from thebes.node import bare, old_attempts
from thebes.protocol.attempt import AttemptDir, lost_state, make_report
from thebes.protocol.contract import AttemptKey, Part, Report
from thebes.protocol.fences import Fences
from thebes.protocol.instance import write_json
from thebes.protocol.progress import StepRate

# launching: not started on any node, will be undone after a crash. started: `start` may have been said.
GangPhase = Literal["launching", "started", "over"]


@dataclass(eq=False)
class SlurmGang:
    """What the engine knows of one incarnation."""

    job_id: str
    incarnation: int
    parts: tuple[Part, ...]
    phase: GangPhase = "launching"
    slurm_job: int = 0
    ids: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the GPUs that Slurm gave, by its numbers
    master: tuple[str, int] | None = None
    grace_s: float = 30.0
    token: str = ""  # of this launch: steps of an earlier one of the same incarnation are nobody's
    lease_s: float = 0.0  # the longest that its steps may have been told
    links: dict[str, NodeLink] = field(default_factory=dict, repr=False)
    reports: dict[str, Report] = field(default_factory=dict, repr=False)
    srun: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    srun_ended: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    kill_asked: bool = False
    fenced: bool = False  # Slurm's job is over and its step was told so
    gone_s: float | None = None  # since when Slurm has no such job running, by the loop's clock
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def key(self) -> AttemptKey:
        return self.job_id, self.incarnation

    @property
    def name(self) -> str:
        return f"{self.job_id}.{self.incarnation}"

    @property
    def nodes(self) -> list[str]:
        return [part.node for part in self.parts]

    @property
    def alive(self) -> list[str]:
        """Nodes on which it has not ended."""
        return [node for node in self.nodes if node not in self.reports or self.reports[node].state != "exited"]

    def tell(self) -> None:
        """Wake the tasks that wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()


class SharedFolder:
    """The folder that all nodes see, as the engine uses it. Blocking: called in threads where it matters."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder
        self.nodes = folder / "nodes"
        self.fences = Fences(folder / "fence")
        self.slurm = folder / "slurm"
        self.gangs = self.slurm / "gangs"
        self.logs = self.slurm / "log"
        self.homes = self.slurm / "homes.json"

    def make(self) -> None:
        for path in (self.nodes, self.fences.dir, self.gangs, self.logs):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def attempt(self, node: str, gang: SlurmGang | AttemptKey) -> AttemptDir:
        job_id, incarnation = gang.key if isinstance(gang, SlurmGang) else gang
        return AttemptDir(self.nodes / node / "attempts", job_id, incarnation)

    def install_step(self) -> Path:
        """What runs on the nodes: they need our Python, but not our package."""
        return bare.install(bare.STEP_FILES, self.slurm)

    # Gangs

    def save(self, gang: SlurmGang) -> None:
        write_json(
            self.gangs / f"{gang.name}.json",
            {
                "job_id": gang.job_id,
                "incarnation": gang.incarnation,
                "parts": [[part.node, list(part.gpus)] for part in gang.parts],
                "phase": gang.phase,
                "slurm_job": gang.slurm_job,
                "ids": {node: list(ids) for node, ids in gang.ids.items()},
                "master": list(gang.master) if gang.master else None,
                "grace_s": gang.grace_s,
                "token": gang.token,
                "lease_s": gang.lease_s,
            },
        )

    async def save_durably(self, gang: SlurmGang) -> None:
        """In a thread; OSError when it cannot be written."""
        try:
            await asyncio.to_thread(self.save, gang)
        except UserError as error:
            raise OSError(error.message) from None

    def drop(self, gang: SlurmGang) -> None:
        (self.gangs / f"{gang.name}.json").unlink(missing_ok=True)

    def load(self) -> Iterator[SlurmGang]:
        for path in sorted(self.gangs.glob("*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                found: dict[str, Any] = json.loads(path.read_bytes())
                yield SlurmGang(
                    job_id=found["job_id"],
                    incarnation=found["incarnation"],
                    parts=tuple(Part(node, tuple(gpus)) for node, gpus in found["parts"]),
                    phase=found["phase"],
                    slurm_job=found["slurm_job"],
                    ids={node: tuple(ids) for node, ids in found["ids"].items()},
                    master=tuple(found["master"]) if found["master"] else None,
                    grace_s=found["grace_s"],
                    token=found.get("token", ""),
                    lease_s=found.get("lease_s", 0.0),
                )

    def raise_fence(self, job_id: str, incarnation: int) -> None:
        """Durably: from now on nothing older starts."""
        self.fences.raise_to(job_id, incarnation, durable=True)

    # What is old

    def remove_old(self, before_s: float, script: Path, limit: int) -> int:
        """Attempts, fences and logs of jobs that were forgotten before this (Unix seconds), and programs of versions
        before ours. So many attempts at most; how many they were.
        """
        removed, jobs = 0, set[str]()
        kept = {path.stem for path in self.gangs.glob("*.json")}
        for node in sorted(self.nodes.iterdir()):
            attempts, most = node / "attempts", limit - removed + len(kept)
            for folder in old_attempts.old_attempts(attempts, self.gangs, before_s=before_s, limit=most):
                if folder.name not in kept and removed < limit:
                    with suppress(OSError):
                        removed += old_attempts.remove_attempt(folder)
            with suppress(OSError):
                jobs |= {path.name.rpartition(".")[0] for path in attempts.iterdir()}
        others = [path for path in self.fences.dir.iterdir() if path.name not in jobs]
        others += [path for path in self.logs.iterdir() if path.stem not in kept]
        for path in others:
            if old_attempts.is_older(path, before_s):
                path.unlink(missing_ok=True)
        for path in self.slurm.glob("bin-*"):
            if path != bare.installed_in(script) and old_attempts.is_older(path, before_s):
                shutil.rmtree(path, ignore_errors=True)
        return removed

    # Attempts

    def write_attempt(self, attempt: AttemptDir, launch: dict[str, Any], step: dict[str, Any]) -> None:
        """What the step reads; values are secrets."""
        attempt.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, value in (("launch.json", launch), ("step.json", step)):
            fd = os.open(attempt.path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as file:
                json.dump(value, file)

    def remove_attempts(self, gang: SlurmGang) -> None:
        """Of one that never started."""
        for node in gang.nodes:
            shutil.rmtree(self.attempt(node, gang).path, ignore_errors=True)

    def report(self, gang: SlurmGang, node: str) -> Report:
        """What the files say."""
        attempt = self.attempt(node, gang)
        return make_report(attempt, node, attempt.state(), StepRate())

    def write_lost(self, gang: SlurmGang, node: str, cause: str, detail: str) -> Report:
        """The result of a part that can tell no other: unless its step has written one after all."""
        attempt = self.attempt(node, gang)
        state = attempt.state()
        if state.get("state") != "exited":
            write_json(attempt.path / "state.json", {**lost_state(attempt, state, detail), "cause": cause})
        return self.report(gang, node)
