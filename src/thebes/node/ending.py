"""Ending attempts: by notice, by signal, by force, and what is done when a supervisor does not do its work."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

from thebes.node.attempts import Attempts, NodeAttempt
from thebes.node.reporting import Reporter
from thebes.protocol.contract import Refused
from thebes.protocol.fences import sync
from thebes.protocol.instance import EventLog
from thebes.protocol.messages import KillAttempt, WithGrace
from thebes.protocol.tasks import Tasks

KILLED_WITHIN_S = 5.0  # after which the supervisor itself is killed


class AttemptEnding:
    """Hands orders to supervisors, which carry them out."""

    def __init__(self, attempts: Attempts, reporter: Reporter, tasks: Tasks, log: EventLog) -> None:
        self.attempts, self.reporter, self.tasks, self.log = attempts, reporter, tasks, log
        self.node = attempts.node

    def order(self, attempt: NodeAttempt, line: str) -> None:
        try:
            attempt.dir.command(line)
        except OSError:
            raise Refused(f"job {attempt.dir.job_id} is just ending on node {self.node}") from None

    async def notice(self, request: WithGrace) -> None:
        attempt = self.attempts.living(request)
        self.order(attempt, f"notice {float(request['grace_s'])}")
        self.log.write("notice", node=self.node, attempt=attempt.dir.name, grace_s=request["grace_s"])

    async def terminate(self, request: WithGrace) -> None:
        attempt = self.attempts.living(request)
        self.order(attempt, f"term {float(request['grace_s'])}")
        self.log.write("terminate", node=self.node, attempt=attempt.dir.name, grace_s=request["grace_s"])

    async def kill(self, request: KillAttempt) -> None:
        attempt = self.attempts.asked_for(request)
        if attempt is None:
            folder = self.attempts.named(f"{request['job_id']}.{request['incarnation']}")
            if folder is not None and not folder.path.exists():
                # Its start may still be on the way: it must not come to life after this.
                fence = self.attempts.fences.raise_to(folder.job_id, folder.incarnation + 1, durable=False)
                await asyncio.to_thread(sync, fence)
            return
        if attempt.alive:
            why = " ".join(str(request.get("because") or "").split())
            with suppress(OSError):  # nobody there: it is being settled
                attempt.dir.command(f"abort {why}" if why else "kill")
            self.log.write("kill", node=self.node, attempt=attempt.dir.name, because=why)
            self.insist(attempt)

    def fence(self, attempt: NodeAttempt, grace_s: float, why: str) -> None:
        """This node is cut off, so others will take the job for lost: it must be gone by then."""
        with suppress(OSError):
            attempt.dir.command(f"fence {grace_s} {why}")
        if not grace_s:
            self.insist(attempt)

    def insist(self, attempt: NodeAttempt) -> None:
        self.tasks.spawn(self._insist(attempt))

    async def _insist(self, attempt: NodeAttempt) -> None:
        if not await self.reporter.until(attempt, lambda: not attempt.alive, KILLED_WITHIN_S):
            await self.remove(attempt)

    async def remove(self, attempt: NodeAttempt) -> None:
        """Kill an incarnation and wait until it is gone; a supervisor that does not do its work is killed itself."""
        with suppress(OSError):
            attempt.dir.command("kill")
        if await self.reporter.until(attempt, lambda: not attempt.alive, KILLED_WITHIN_S):
            return
        if attempt.pidfd >= 0:
            signal.pidfd_send_signal(attempt.pidfd, signal.SIGKILL)
        if not await self.reporter.until(attempt, lambda: not attempt.alive, 2 * KILLED_WITHIN_S):
            raise Refused(f"incarnation {attempt.dir.incarnation} of job {attempt.dir.job_id} cannot be ended")
