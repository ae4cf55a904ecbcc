"""Supervisors: started, watched, found again by the next agent, and what is done when one has vanished.

A supervisor that was killed can write no result. So its leftovers are ended first, and then the result "lost" is
written for it, under the attempt's lock.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from thebes.model.errors import UserError
from thebes.node import processes
from thebes.node.attempts import Attempts, NodeAttempt
from thebes.node.nursery import Nursery
from thebes.node.reporting import Reporter
from thebes.protocol.attempt import AttemptDir, lock_holder, lost_state, take_lock
from thebes.protocol.clock import boot_id
from thebes.protocol.instance import EventLog, write_json
from thebes.protocol.tasks import Tasks

SETTLE_AGAIN_S = 1.0


class Supervision:
    """The supervisors of one node."""

    def __init__(self, attempts: Attempts, reporter: Reporter, nursery: Nursery, tasks: Tasks, log: EventLog) -> None:
        self.attempts, self.reporter, self.nursery, self.tasks, self.log = attempts, reporter, nursery, tasks, log
        self.node = attempts.node
        self.vanished: list[NodeAttempt] = []
        self.cleaning: asyncio.Task[None] | None = None
        self.spawning = threading.Lock()  # held while a new child is not yet known to be a supervisor
        self.supervisors: set[int] = set()

    # Starting and watching -------------------------------------------------------------------------------------------

    async def start(self, attempt: NodeAttempt) -> None:
        """Start a supervisor for it and watch it."""
        try:
            attempt.pid = await asyncio.to_thread(self._spawn, attempt.dir)
        except OSError as error:
            self.log.write("no supervisor", node=self.node, attempt=attempt.dir.name, error=str(error))
        if not attempt.pid or not self._watch(attempt):
            self._vanish(attempt)
        self.reporter.follow_log(attempt)

    def _spawn(self, folder: AttemptDir) -> int:
        """Its pid. In a thread."""
        with self.spawning:
            pid = self.nursery.spawn(folder.path)
            self.supervisors.add(pid)
        return pid

    def adopt_all(self) -> list[NodeAttempt]:
        """Every attempt that is not forgotten: take what lives into care, and settle what vanished.

        Those that an earlier agent was suspending or resuming by the driver when it was killed.
        """
        begun_s = time.monotonic()
        half_done: list[NodeAttempt] = []
        for name in sorted(os.listdir(self.attempts.open_dir)):  # noqa: PTH208 - names are all that is wanted
            folder = self.attempts.named(name)
            if folder is None:
                continue
            attempt = self.attempts.add(folder)
            attempt.state = folder.state()
            attempt.report = self.reporter.report(attempt)
            if attempt.alive and not self._watch(attempt):
                self._vanish(attempt)
            elif attempt.alive:
                self._take_into_care(attempt)
                if (folder.path / "cuda").exists() and attempt.state.get("state") == "running":
                    half_done.append(attempt)
        known = self.attempts.by_key.values()
        if known:
            self.log.write(
                "adopted",
                node=self.node,
                alive=sum(one.alive for one in known),
                vanished=len(self.vanished),
                ended=sum(not one.alive for one in known),
                took_s=round(time.monotonic() - begun_s, 3),
            )
        return half_done

    def _take_into_care(self, attempt: NodeAttempt) -> None:
        self.reporter.follow_log(attempt, adopted=True)
        self.attempts.some_alive.set()

    def _watch(self, attempt: NodeAttempt) -> bool:
        """Be told when the supervisor ends; False if it has ended."""
        started = attempt.pid  # by us, just now: it may not have its lock yet
        pid = started or lock_holder(attempt.dir.path / "lock")
        if not pid:
            return False
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        if not started and lock_holder(attempt.dir.path / "lock") != pid:  # the number may be another's by now
            os.close(pidfd)
            return False
        attempt.pid, attempt.pidfd = pid, pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._gone, attempt)
        return True

    def _gone(self, attempt: NodeAttempt) -> None:
        asyncio.get_running_loop().remove_reader(attempt.pidfd)
        os.close(attempt.pidfd)
        attempt.pidfd = -1
        with suppress(ChildProcessError):  # ours only if the nursery has died before it
            os.waitpid(attempt.pid, os.WNOHANG)
        self.supervisors.discard(attempt.pid)
        self.reporter.refresh(attempt)
        if attempt.alive:
            self._vanish(attempt)

    def end_the_unreachable(self) -> None:
        """The folder was removed: nobody could ever find these jobs again, and they would keep their GPUs."""
        if self.attempts.dir.exists():
            return
        for attempt in self.attempts.by_key.values():
            if attempt.pidfd >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(attempt.pidfd, signal.SIGTERM)

    # Vanished --------------------------------------------------------------------------------------------------------

    def _vanish(self, attempt: NodeAttempt) -> None:
        self.log.write("supervisor vanished", node=self.node, attempt=attempt.dir.name, pid=attempt.pid)
        self.vanished.append(attempt)
        if self.cleaning is None or self.cleaning.done():
            self.cleaning = self.tasks.spawn(self._settle_vanished())

    async def _settle_vanished(self) -> None:
        told = ""
        while self.vanished:
            batch, self.vanished = self.vanished, []
            try:
                await asyncio.to_thread(self._end_leftovers, batch)
            except OSError as error:  # no more files or memory: that may pass
                self.vanished = [*batch, *self.vanished]
                if told != str(error):
                    self.log.write("cannot settle", node=self.node, attempts=len(self.vanished), error=str(error))
                told = str(error)
                await asyncio.sleep(SETTLE_AGAIN_S)
                continue
            for attempt in batch:
                attempt.pid = 0
                self.reporter.refresh(attempt)
                if attempt.alive and self._watch(attempt):
                    self._take_into_care(attempt)
                elif attempt.alive:
                    self._vanish(attempt)

    def _end_leftovers(self, batch: Sequence[NodeAttempt]) -> None:
        """Kill until no process is left; only then the results are written. In a thread.

        All under the attempts' locks: a supervisor that was only late waits for its lock, finds the result and ends.
        One that has its lock already is alive after all and is left alone.
        """
        locks: dict[NodeAttempt, int] = {}
        try:
            for attempt in batch:
                fd = take_lock(attempt.dir.path)
                if fd is not None:
                    locks[attempt] = fd
            killed = self._kill_leftovers([_trail(attempt) for attempt in locks])
            for attempt in locks:
                self._write_lost(attempt, killed)
        finally:
            for fd in locks.values():
                os.close(fd)

    def _kill_leftovers(self, trails: Sequence[processes.Trail]) -> int:
        wait_s, killed = 0.005, 0
        while True:
            with self.spawning:
                # A nursery that was too slow to answer, and was killed for it, may have started one all the same.
                known = {
                    int(one.state.get("supervisor", 0)) for one in list(self.attempts.by_key.values()) if one.alive
                }
                found = {*processes.leftovers(trails), *processes.strays(known | self.supervisors)}
                processes.kill_all(found)
            if not found:
                return killed
            killed += len(found)
            if not processes.wait_gone(found, wait_s):
                wait_s = min(1.0, wait_s * 2)

    def _write_lost(self, attempt: NodeAttempt, killed: int) -> None:
        state = attempt.dir.state()
        if state.get("state") == "exited":
            return
        detail = "its supervisor was killed" if state else "its supervisor was killed before it had started the job"
        if state and state.get("boot") != boot_id():
            detail = f"node {self.node} was restarted"
        self._persist(attempt.dir.path / "state.json", lost_state(attempt.dir, state, detail))
        self.log.write("lost", node=self.node, attempt=attempt.dir.name, killed=killed, detail=detail)

    def _persist(self, path: Path, value: dict[str, Any]) -> None:
        """Durably, and again until it works: a full disk must not lose a result. In a thread."""
        told = False
        while True:
            try:
                return write_json(path, value)
            except UserError as error:
                if not told:
                    self.log.write("cannot write", node=self.node, path=str(path), error=error.message)
                told = True
                time.sleep(0.5)


def _trail(attempt: NodeAttempt) -> processes.Trail:
    state = attempt.state
    if state.get("boot") != boot_id():
        return processes.Trail(str(attempt.dir.path))
    return processes.Trail(str(attempt.dir.path), int(state.get("group", 0)), int(state.get("supervisor", 0)))
