"""Commands go to the engine after the commit: those of one job in order, those of different jobs side by side."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from thebes.live import answers
from thebes.live.commands import Command, Forget, Kill, LaunchGang, Notice, Resume, Suspend, Terminate
from thebes.model.errors import UserError
from thebes.protocol.contract import Engine, GpusTaken, Refused

if TYPE_CHECKING:
    from thebes.live.core import Core
    from thebes.live.snapshots import Snapshots

logger = logging.getLogger("thebes.controller")

RETRY_S = (0.1, 2.0)  # pauses between two tries of a command whose node cannot be reached


class Dispatch:
    """Commands that were given to the engine and are not done yet. Messages tell the core how they went."""

    def __init__(
        self, core: Core, engine: Engine, snapshots: Snapshots, tell: Callable[[Callable[[float], None]], None]
    ) -> None:
        self.core = core
        self.engine = engine
        self.snapshots = snapshots
        self.tell = tell
        self.tasks: dict[str, asyncio.Task[None]] = {}  # by job
        self.on_the_way: set[tuple[str, int]] = set()  # launches that are neither carried out nor refused yet
        self._pending: dict[str, list[Command]] = {}

    def order(self, command: Command) -> None:
        """Give a command to the engine; commands of one job go in order."""
        self._pending.setdefault(command.job_id, []).append(command)
        if isinstance(command, LaunchGang):
            self.on_the_way.add((command.job_id, command.incarnation))
        if command.job_id not in self.tasks:
            self.tasks[command.job_id] = asyncio.create_task(self._carry_out_all(command.job_id))

    async def _carry_out_all(self, job_id: str) -> None:
        try:
            while self._pending.get(job_id):
                command = self._pending[job_id].pop(0)
                await self._carry_out(command)
                if isinstance(command, LaunchGang):
                    self.tell(functools.partial(self._launch_known, job_id, command.incarnation))
        finally:
            self._pending.pop(job_id, None)
            self.tasks.pop(job_id, None)

    def _launch_known(self, job_id: str, incarnation: int, _now_s: float) -> None:
        """Note that the core has heard how a launch went; before that, no node that is back may judge it."""
        self.on_the_way.discard((job_id, incarnation))

    async def _carry_out(self, command: Command) -> None:
        """Try until it is done or refused; a node that cannot be reached now may be reached later."""
        pause_s, longest_s = RETRY_S
        called_off: LaunchGang | None = None
        while True:
            try:
                await self._try(command)
                if called_off is not None:
                    self._refused(called_off, "it was stopped before it had started")
                return
            except Refused as refused:
                self._refused(command, str(refused), taken=isinstance(refused, GpusTaken))
                return
            except (OSError, TimeoutError) as error:
                logger.warning(
                    "engine", extra={"fields": {"verb": command.verb, "job_id": command.job_id, "error": str(error)}}
                )
                if self._pending.get(command.job_id) and isinstance(command, Notice | Suspend | Forget):
                    return  # a later command says more; a node that was not told to forget tells of it when it is back
                await asyncio.sleep(pause_s)
                pause_s = min(longest_s, 2 * pause_s)
                if isinstance(command, LaunchGang) and self._called_off(command):
                    called_off = command
                    command = Kill(command.job_id, command.incarnation)  # so that it cannot come to life
            except Exception as error:
                logger.exception("engine")
                self._refused(command, f"{type(error).__name__}: {error}")
                return

    def _called_off(self, launch: LaunchGang) -> bool:
        """Whether the job is to stop before its launch has reached the node; then the commands to stop are dropped."""
        waiting = self._pending.get(launch.job_id, [])
        stops = [c for c in waiting if c.incarnation == launch.incarnation and isinstance(c, Notice | Terminate | Kill)]
        for command in stops:
            waiting.remove(command)
        return bool(stops)

    async def _try(self, command: Command) -> None:
        engine, job, incarnation = self.engine, command.job_id, command.incarnation
        match command:
            case LaunchGang(launch=launch, snapshot=snapshot):
                if snapshot is not None:
                    await self._unpack(snapshot, job)
                await engine.launch(launch)
            case Notice(grace_s=grace_s):
                await engine.notice(job, incarnation, grace_s)
            case Terminate(grace_s=grace_s):
                await engine.terminate(job, incarnation, grace_s)
            case Kill():
                await engine.kill(job, incarnation)
            case Forget():
                await engine.forget(job, incarnation)
            case Suspend(mechanism=mechanism):
                await engine.suspend(job, incarnation, mechanism)
                self.tell(lambda now_s: answers.suspended(self.core, job, incarnation, now_s))
            case Resume(mechanism=mechanism):
                started = time.perf_counter()
                await engine.resume(job, incarnation, mechanism)
                took_s = time.perf_counter() - started
                self.tell(lambda now_s: answers.resumed(self.core, job, incarnation, took_s, now_s))
            case _:
                assert_never(command)

    async def _unpack(self, snapshot: str, job_id: str) -> None:
        try:
            await asyncio.to_thread(self.snapshots.unpack, snapshot, job_id)
        except UserError as error:
            raise Refused(error.message) from None

    def _refused(self, command: Command, why: str, *, taken: bool = False) -> None:
        core, job, incarnation = self.core, command.job_id, command.incarnation
        match command:
            case LaunchGang():
                self.tell(lambda now_s: answers.launch_refused(core, job, incarnation, why, now_s, taken=taken))
            case Suspend():
                self.tell(lambda now_s: answers.suspend_refused(core, job, incarnation, why, now_s))
            case Resume():
                self.tell(lambda now_s: answers.resume_refused(core, job, incarnation, why, now_s))
            case _:
                # What we wanted to stop does not exist: its node reports, or has reported, how it ended.
                logger.info("refused", extra={"fields": {"verb": command.verb, "job_id": job, "why": why}})
