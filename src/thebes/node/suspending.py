"""Suspending and resuming attempts in place: by SIGSTOP, or by the driver (`suspend.py`)."""

from __future__ import annotations

import asyncio
import json

from thebes.node import processes, suspend
from thebes.node.attempts import Attempts, NodeAttempt
from thebes.node.ending import AttemptEnding
from thebes.node.reporting import Reporter
from thebes.protocol.clock import boot_s
from thebes.protocol.contract import Refused
from thebes.protocol.instance import EventLog
from thebes.protocol.messages import ByMechanism

FROZEN_WITHIN_S = 10.0


class Suspending:
    """One suspend or resume at a time for each attempt."""

    def __init__(self, attempts: Attempts, reporter: Reporter, ending: AttemptEnding, log: EventLog) -> None:
        self.attempts, self.reporter, self.ending, self.log = attempts, reporter, ending, log

    async def suspend(self, request: ByMechanism) -> float:
        attempt = self.attempts.living(request)
        mechanism = request["mechanism"]
        suspend.check(mechanism, self.reporter.facts.mechanisms)
        wanted = "frozen" if mechanism == "freeze" else "suspended"
        async with attempt.busy:
            if attempt.state.get("state") == wanted:
                return attempt.took.get("suspend_took_s", 0.0)
            if (attempt.dir.path / "notice").exists():
                raise Refused(f"job {attempt.dir.job_id} has been told to end and cannot be suspended")
            begun_s = boot_s()
            if mechanism == "cuda":
                await self._suspend_cuda(attempt)
            self.ending.order(attempt, "freeze" if mechanism == "freeze" else "park")
            await self._until(attempt, (wanted, "exited"))
            if attempt.state.get("state") != wanted:
                raise Refused(f"job {attempt.dir.job_id} is ending and could not be suspended")
            return self._took(attempt, "suspended", "suspend_took_s", mechanism, boot_s() - begun_s)

    async def resume(self, request: ByMechanism) -> float:
        attempt = self.attempts.living(request)
        mechanism = request["mechanism"]
        async with attempt.busy:
            if attempt.state.get("state") == "running":
                return attempt.took.get("resume_took_s", 0.0)
            begun_s = boot_s()
            if mechanism == "cuda":
                await self._resume_cuda(attempt)
            self.ending.order(attempt, "thaw" if mechanism == "freeze" else "unpark")
            await self._until(attempt, ("running", "exited"))
            if attempt.state.get("state") != "running":
                raise Refused(f"job {attempt.dir.job_id} could not be resumed")
            (attempt.dir.path / "cuda").unlink(missing_ok=True)
            return self._took(attempt, "resumed", "resume_took_s", mechanism, boot_s() - begun_s)

    async def _until(self, attempt: NodeAttempt, states: tuple[str, ...]) -> None:
        await self.reporter.until(attempt, lambda: attempt.state.get("state") in states, FROZEN_WITHIN_S)

    def _took(self, attempt: NodeAttempt, event: str, key: str, mechanism: str, took_s: float) -> float:
        """Remember, tell and log how long a suspension or a resume took."""
        attempt.took[key] = took_s
        self.reporter.tell(attempt)
        node, name = self.attempts.node, attempt.dir.name
        self.log.write(event, node=node, attempt=name, mechanism=mechanism, took_s=round(took_s, 4))
        return took_s

    async def _suspend_cuda(self, attempt: NodeAttempt) -> None:
        # Killed from here on, the next agent finds the mark and brings the process back.
        mark = attempt.dir.path / "cuda"
        pids = processes.descendants(attempt.pid)
        try:
            mark.write_text(json.dumps(await asyncio.to_thread(suspend.cuda_needs, pids)))
            await asyncio.to_thread(suspend.suspend_cuda, pids)
        except Refused:
            mark.unlink(missing_ok=True)
            raise
        except suspend.Broken as error:
            await self.ending.remove(attempt)
            raise OSError(f"{error}; it was killed and starts again from its last checkpoint") from None

    async def _resume_cuda(self, attempt: NodeAttempt) -> None:
        try:
            await asyncio.to_thread(suspend.resume_cuda, processes.descendants(attempt.pid), attempt.dir.cuda_needs())
        except suspend.Broken as error:
            await self.ending.remove(attempt)
            raise Refused(f"{error}; it was killed") from None

    async def undo_cuda(self, attempt: NodeAttempt) -> None:
        """An earlier agent was killed in the middle of a suspend or resume: the job runs again, or it is ended."""
        async with attempt.busy:
            try:
                pids = processes.descendants(attempt.pid)
                await asyncio.to_thread(suspend.resume_cuda, pids, attempt.dir.cuda_needs())
                (attempt.dir.path / "cuda").unlink(missing_ok=True)
            except (Refused, suspend.Broken) as error:
                self.log.write(
                    "cuda resume failed", node=self.attempts.node, attempt=attempt.dir.name, error=str(error)
                )
                await self.ending.remove(attempt)
