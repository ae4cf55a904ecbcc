"""The agent of one node: starts supervisors, watches them, and tells whoever is connected what becomes of them.

It decides nothing and holds nothing that is not in files: killed at any moment, the next agent finds every attempt in
its folder, adopts what lives, and writes the result "lost" for supervisors that vanished, after ending whatever they
left behind. Jobs do not notice.

    python -m thebes.node.agent DIR NODE [--virtual-gpus N]
                                [--homes HOST:PORT,… --lease SECONDS --head-file FILE --alone SECONDS]

On the controller's own machine it listens on a Unix socket. With `--homes` it calls the controller (the key is in
THEBES_HOME_KEY) and keeps a lease: cut off from the controller, and from the head of the cluster, it stops its jobs.
Whoever can ask the head writes the boot time of the last good answer into the head file. With `--alone`, an agent
without jobs goes when it has heard nothing from a controller for so long: nobody may be left to end it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import ctypes
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from thebes.engine import wire
from thebes.engine.contract import Gpu, Launch, NodeFacts, Refused, Report
from thebes.model.errors import UserError
from thebes.node import gpus as gpu_discovery
from thebes.node import launch as launching
from thebes.node import mps, old_attempts, processes, suspend
from thebes.node.attempt import AttemptDir, Rate, lock_holder, lost_state, make_report, read_log, take_lock
from thebes.node.clock import boot_id, boot_s
from thebes.node.home import CallHome
from thebes.node.instance import Instance, JsonLines, LockHeld, explain, write_json
from thebes.node.lease import Lease
from thebes.node.log_steps import LogSteps, TooSlow
from thebes.node.nursery import Nursery

STARTED_WITHIN_S = 10.0
KILLED_WITHIN_S = 5.0  # after which the supervisor itself is killed
FROZEN_WITHIN_S = 10.0
LOOK_EVERY_S = 1.0
LOOK_AT_NEW_S = 0.1  # at an attempt that has not made a step; then less and less often
HEALTH_EVERY_S = 30.0
SETTLE_AGAIN_S = 1.0
MPS_ANSWERS_WITHIN_S = 2.0  # when we go: the keeper does not wait for us for long
TIDY_EVERY_S = 86_400.0
TIDY_AT_ONCE = 1000  # removals; what is left over waits for the next go
TIDY_AGAIN_S = 60.0
LOG_LIMIT_BYTES = 1 << 20
BACKLOG_BYTES = 32 << 20  # a listener that does not read is let go
PR_SET_CHILD_SUBREAPER = 36
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

Key = tuple[str, int]


@dataclass(frozen=True)
class Away:
    """How an agent that is not on the controller's machine finds it, and for how long it may go on alone."""

    homes: tuple[str, ...]
    key: bytes = field(repr=False)
    lease_s: float
    head_file: Path | None = None
    alone_s: float | None = None


class LeaseFile:
    """The lease of this node for supervisors, which stop their jobs by themselves when nobody renews it any more, and
    for the next agent. Written over in place, so that a full disk does not matter.
    """

    BYTES = 200

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, lease: Lease, epoch: int) -> None:
        words = (boot_id(), lease.over_at_s, *lease.kept(), epoch)
        os.pwrite(self._fd, (" ".join(map(str, words))).ljust(self.BYTES - 1).encode() + b"\n", 0)

    def read(self) -> tuple[Lease, int] | None:
        """None if there is none of this boot."""
        words = os.pread(self._fd, self.BYTES, 0).decode("ascii", "replace").split()
        if len(words) != 6 or words[0] != boot_id():
            return None
        try:
            return Lease.resumed(*map(float, words[2:5])), int(words[5])
        except ValueError:
            return None


class Attempt:
    """What the agent knows of one attempt beyond its files."""

    def __init__(self, folder: AttemptDir) -> None:
        self.dir = folder
        self.state: dict[str, Any] = {}
        self.report: Report | None = None
        self.rate = Rate()
        self.steps: LogSteps | None = None
        self.first_step: tuple[int, float] | None = None
        self.pid = 0  # of the supervisor
        self.pidfd = -1
        self.looked_ns = 0  # mtime of the folder when last looked into
        self.took: dict[str, float] = {}
        self.changed = asyncio.Event()
        self.busy = asyncio.Lock()  # one suspend or resume at a time

    @property
    def key(self) -> Key:
        return self.dir.job_id, self.dir.incarnation

    @property
    def alive(self) -> bool:
        return self.state.get("state") != "exited"


class Agent:
    """One node's attempts, and those who listen."""

    def __init__(
        self,
        instance: Instance,
        node: str,
        gpus: Sequence[Gpu],
        virtual: bool,
        log: JsonLines,
        away: Away | None = None,
    ) -> None:
        self.instance = instance
        self.head_file = away.head_file if away else None
        self.home: CallHome | None = None
        self.lease: Lease | None = None
        self.alone_s = away.alone_s if away else None
        self.heard_s = boot_s()  # from a controller
        self.stop = asyncio.Event()
        self.lease_file: LeaseFile | None = None
        if away is not None:
            self.home = CallHome(f"node:{node}", away.homes, away.key, self._talk, heard=self._heard_from_home)
        self.node = node
        self.virtual = virtual
        self.log = log
        self.folder = instance.nodes / node
        self.attempts_dir = self.folder / "attempts"
        self.open_dir = self.folder / "open"  # one empty file per attempt that is not forgotten: what a new agent reads
        self.fence_dir = self.folder / "fence"
        for folder in (self.attempts_dir, self.open_dir, self.fence_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.poke_path = instance.run / f"agent-{node}.poke"
        if away is not None and self.home is not None:
            self.lease_file = LeaseFile(self.folder / "lease")
            found = self.lease_file.read()  # of an agent before us: what it was told holds for us, too
            self.lease, self.home.epoch = found or (Lease(away.lease_s, boot_s()), 0)
            self._write_lease()
        self.facts = NodeFacts(node, tuple(gpus), pid=os.getpid(), mechanisms=suspend.offered(gpus))
        self.attempts: dict[Key, Attempt] = {}
        self.job_locks: dict[str, asyncio.Lock] = {}
        self.listeners: set[asyncio.StreamWriter] = set()
        self.ports: dict[Key, int] = {}
        self.vanished: list[Attempt] = []
        self.cleaning: asyncio.Task[None] | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.some_alive = asyncio.Event()
        self.mps = mps.Mps(instance.run / f"mps-{node}")
        self.mps_starting = asyncio.Lock()
        self.spawning = threading.Lock()  # held while a new child is not yet known to be a supervisor
        self.supervisors: set[int] = set()
        self.nursery = Nursery(instance.run)

    # Life ------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(64))  # a suspend by the driver may keep one for a minute
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)
        self._open_poke(loop)
        await self._adopt_all()
        path = self.instance.run / f"agent-{self.node}.sock"
        server = await asyncio.start_unix_server(
            self._serve, sock=wire.listening_socket(path), limit=wire.LINE_LIMIT_BYTES
        )
        if self.home is not None and self.lease is not None:
            self._spawn(self.home.keep_up())
            self._spawn(self._keep_lease(self.lease))
            if self.alone_s is not None:
                self._spawn(self._go_when_alone(self.alone_s))
        self._spawn(self._watch_progress())
        self._spawn(self._tidy())
        if not self.virtual:
            self._spawn(self._watch_health())
        self.log.write(
            "agent up",
            node=self.node,
            pid=os.getpid(),
            gpus=len(self.facts.gpus),
            unhealthy=[gpu.index for gpu in self.facts.gpus if not gpu.healthy],
            virtual=self.virtual,
        )
        await self.stop.wait()
        self._end_the_unreachable()
        server.close()
        await self._stop_mps()
        self.log.write("agent down", node=self.node, attempts=sum(one.alive for one in self.attempts.values()))
        self.nursery.close()
        path.unlink(missing_ok=True)

    def _end_the_unreachable(self) -> None:
        """The folder was removed: nobody could ever find these jobs again, and they would keep their GPUs."""
        if self.attempts_dir.exists():
            return
        for attempt in self.attempts.values():
            if attempt.pidfd >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(attempt.pidfd, signal.SIGTERM)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.log.write("error", node=self.node, error=repr(task.exception()))

    def _open_poke(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(FileExistsError):
            os.mkfifo(self.poke_path, 0o600)
        self.poke_fd = os.open(self.poke_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        loop.add_reader(self.poke_fd, self._poked)

    def _poked(self) -> None:
        with suppress(BlockingIOError):
            names = set(os.read(self.poke_fd, 65536).decode("utf-8", "replace").split())
            for name in names:
                folder = AttemptDir.named(self.attempts_dir, name)
                attempt = folder and self.attempts.get((folder.job_id, folder.incarnation))
                if attempt:
                    self._refresh(attempt)

    async def _adopt_all(self) -> None:
        """Every attempt that is not forgotten: take what lives into care, and settle what vanished."""
        begun_s = time.monotonic()
        for name in sorted(os.listdir(self.open_dir)):  # noqa: PTH208 - names are all that is wanted
            folder = AttemptDir.named(self.attempts_dir, name)
            if folder is None:
                continue
            attempt = Attempt(folder)
            self.attempts[attempt.key] = attempt
            attempt.state = folder.state()
            attempt.report = self._make_report(attempt)
            if attempt.alive and not self._watch(attempt):
                self._vanish(attempt)
            elif attempt.alive:
                self._follow_log(attempt, adopted=True)
                self.some_alive.set()
                if (folder.path / "cuda").exists() and attempt.state.get("state") == "running":
                    self._spawn(self._undo_cuda(attempt))
        if self.attempts:
            self.log.write(
                "adopted",
                node=self.node,
                alive=sum(one.alive for one in self.attempts.values()),
                vanished=len(self.vanished),
                ended=sum(not one.alive for one in self.attempts.values()),
                took_s=round(time.monotonic() - begun_s, 3),
            )

    def _watch(self, attempt: Attempt) -> bool:
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
        asyncio.get_running_loop().add_reader(pidfd, self._supervisor_gone, attempt)
        return True

    def _supervisor_gone(self, attempt: Attempt) -> None:
        asyncio.get_running_loop().remove_reader(attempt.pidfd)
        os.close(attempt.pidfd)
        attempt.pidfd = -1
        with suppress(ChildProcessError):  # ours only if the nursery has died before it
            os.waitpid(attempt.pid, os.WNOHANG)
        self.supervisors.discard(attempt.pid)
        self._refresh(attempt)
        if attempt.alive:
            self._vanish(attempt)

    def _vanish(self, attempt: Attempt) -> None:
        self.log.write("supervisor vanished", node=self.node, attempt=attempt.dir.name, pid=attempt.pid)
        self.vanished.append(attempt)
        if self.cleaning is None or self.cleaning.done():
            self.cleaning = self._spawn(self._settle_vanished())

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
                self._refresh(attempt)
                if attempt.alive and self._watch(attempt):
                    self._follow_log(attempt, adopted=True)
                    self.some_alive.set()
                elif attempt.alive:
                    self._vanish(attempt)

    def _end_leftovers(self, batch: Sequence[Attempt]) -> None:
        """Kill until nobody is left; only then the results are written. In a thread.

        All under the attempts' locks: a supervisor that was only late waits for its lock, finds the result and ends.
        One that has its lock already is alive after all and is left alone.
        """
        locks: dict[Attempt, int] = {}
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
                known = {one.state.get("supervisor") for one in list(self.attempts.values()) if one.alive}
                found = {*processes.leftovers(trails), *processes.strays(known | self.supervisors)}
                processes.kill_all(found)
            if not found:
                return killed
            killed += len(found)
            if not processes.wait_gone(found, wait_s):
                wait_s = min(1.0, wait_s * 2)

    def _write_lost(self, attempt: Attempt, killed: int) -> None:
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

    # Lease -----------------------------------------------------------------------------------------------------------

    async def _keep_lease(self, lease: Lease) -> None:
        """Cut off, we stop our jobs: others will start them elsewhere."""
        while True:
            # Not for long: the machine may be asleep meanwhile, and a controller may tell of a shorter lease.
            await asyncio.sleep(max(0.05, min(1.0, lease.lease_s / 12, lease.next_s(boot_s()) - boot_s())))
            head_s = self._head_heard_s()
            if head_s is not None and head_s > boot_s() - lease.silent_s(boot_s()):
                lease.renew(head_s)
                self._write_lease()
            verdict = lease.verdict(boot_s())
            if verdict not in ("notice", "kill"):
                continue
            alive = [attempt for attempt in self.attempts.values() if attempt.alive]
            silent_s = lease.silent_s(boot_s())
            if alive or verdict == "notice":
                self.log.write("cut off", node=self.node, verdict=verdict, attempts=len(alive), silent_s=silent_s)
            for attempt in alive:
                grace_s = lease.notice_grace_s if verdict == "notice" else 0.0
                with suppress(OSError):
                    attempt.dir.command(f"fence {grace_s} cut off: no word from the controller for {silent_s:.0f} s")
                if verdict == "kill":
                    self._spawn(self._insist(attempt))

    def _heard_from_home(self) -> None:
        self.heard_s = boot_s()

    def _write_lease(self) -> None:
        if self.lease is not None and self.lease_file is not None and self.home is not None:
            with suppress(OSError):  # supervisors then stop when the last one written is over
                self.lease_file.write(self.lease, self.home.epoch)

    async def _go_when_alone(self, alone_s: float) -> None:
        """What we know is in files: whoever wants it starts another agent."""
        while not self.stop.is_set():
            await asyncio.sleep(max(0.05, min(alone_s, self.heard_s + alone_s - boot_s())))
            if boot_s() - self.heard_s >= alone_s and not any(one.alive for one in self.attempts.values()):
                self.log.write("alone", node=self.node, silent_s=boot_s() - self.heard_s)
                self._go()

    def _head_heard_s(self) -> float | None:
        """When the head of the cluster last said that this node is one of its own."""
        if self.head_file is None:
            return None
        try:
            asked_s = float(self.head_file.read_text())
        except (OSError, ValueError):
            return None
        return asked_s if asked_s <= boot_s() else None  # of the time before the machine was restarted

    # Reports ---------------------------------------------------------------------------------------------------------

    def _make_report(self, attempt: Attempt) -> Report:
        return make_report(attempt.dir, self.node, attempt.state, attempt.rate, **attempt.took)

    def _refresh(self, attempt: Attempt) -> None:
        """Read the state again; tell everybody if it is another one."""
        before = attempt.state.get("state"), attempt.state.get("since_s")
        state = attempt.dir.state()
        if not state or (state.get("state"), state.get("since_s")) == before:
            return
        attempt.state = state
        attempt.rate.clear()
        if state["state"] == "exited":
            self._read_steps(attempt)
            self.ports.pop(attempt.key, None)
            attempt.steps = None
            self.log.write(
                "exited", node=self.node, attempt=attempt.dir.name, cause=state["cause"], codes=state["codes"]
            )
        self._tell(attempt)
        attempt.changed.set()
        attempt.changed = asyncio.Event()

    def _tell(self, attempt: Attempt) -> None:
        attempt.report = self._make_report(attempt)
        self._push({"push": "report", "report": wire.report_to_dict(attempt.report)})

    def _push(self, message: dict[str, Any]) -> None:
        line = wire.encode(message)
        for listener in list(self.listeners):
            if listener.transport.get_write_buffer_size() > BACKLOG_BYTES:
                listener.transport.abort()
            else:
                listener.write(line)

    async def _until(self, attempt: Attempt, true: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a state; a poke that got lost is made up for by looking."""
        deadline = time.monotonic() + timeout_s
        while not true():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 0.25)):
                    await attempt.changed.wait()
                continue
            self._refresh(attempt)
        return True

    async def _watch_progress(self) -> None:
        """Once a second, and only while something runs: has a job written anything for us?"""
        while True:
            await self.some_alive.wait()
            await asyncio.sleep(LOOK_EVERY_S)
            alive = [attempt for attempt in self.attempts.values() if attempt.alive]
            if not alive:
                self.some_alive.clear()
            for attempt in alive:
                self._read_steps(attempt)
                with suppress(OSError):
                    self._look(attempt)

    async def _look_for_first_step(self, attempt: Attempt) -> None:
        """When it came counts for the policy, since loading is no service: so look more often at first."""
        pause_s = LOOK_AT_NEW_S
        while pause_s < LOOK_EVERY_S and attempt.alive and (attempt.report is None or not attempt.report.first_step_s):
            await asyncio.sleep(pause_s)
            pause_s *= 1.25
            with suppress(OSError):
                self._look(attempt)

    def _look(self, attempt: Attempt) -> None:
        # Files are renamed into place, so the time of the folder tells of any of them by one look.
        changed_ns = attempt.dir.path.stat().st_mtime_ns
        if changed_ns == attempt.looked_ns:
            return
        # File times are coarse: a folder that changed just now may change again within the same tick.
        attempt.looked_ns = changed_ns if time.time_ns() - changed_ns > 50_000_000 else 0
        before, now = attempt.report, self._make_report(attempt)
        attempt.report = now
        if before is None or replace(before, run_s=0.0) != replace(now, run_s=0.0):
            self._push({"push": "report", "report": wire.report_to_dict(now)})

    def _follow_log(self, attempt: Attempt, *, adopted: bool = False) -> None:
        launch = attempt.dir.launch()
        if adopted:
            with suppress(KeyError, ValueError):
                self.ports[attempt.key] = int(launch["env"]["MASTER_PORT"])
        if launch.get("progress_pattern") and launch.get("ranks"):
            path = attempt.dir.log(launch["ranks"][0]["rank"])
            attempt.steps = LogSteps(path, launch["progress_pattern"], from_end=adopted)
            attempt.first_step = attempt.dir.first_step()

    def _read_steps(self, attempt: Attempt) -> None:
        """Steps from log lines go where those of the library go."""
        if attempt.steps is None:
            return
        try:
            step = attempt.steps.newest()
        except TooSlow:
            attempt.steps = None
            self.log.write("progress pattern given up", node=self.node, attempt=attempt.dir.name, why="too slow")
            return
        if step is None:
            return
        now = boot_s()
        attempt.first_step = attempt.first_step or (step, now)
        first_step, first_s = attempt.first_step
        found = {"step": step, "at_s": now, "first_step": first_step, "first_at_s": first_s}
        draft = attempt.dir.path / ".progress.agent"
        with suppress(OSError):
            draft.write_text(json.dumps(found))
            draft.replace(attempt.dir.path / "progress")

    async def _watch_health(self) -> None:
        """Whether the GPUs are all right."""
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            try:
                found = await asyncio.to_thread(gpu_discovery.discover)
            except UserError as error:
                found = ()
                self.log.write("GPUs", node=self.node, error=error.message)
            found = gpu_discovery.looked_at_again(self.facts.gpus, found)
            if found != self.facts.gpus:
                self.facts = replace(self.facts, gpus=found)
                self._push({"push": "facts", "facts": wire.facts_to_dict(self.facts)})

    async def _tidy(self) -> None:
        """Remove what is too old to be kept, at the start and then daily; in small portions, so that nobody notices."""
        while True:
            removed = await self._remove_old(time.time() - old_attempts.KEEP_ATTEMPTS_S)
            await asyncio.sleep(TIDY_EVERY_S if removed < TIDY_AT_ONCE else TIDY_AGAIN_S)

    async def _remove_old(self, before_s: float) -> int:
        found = await asyncio.to_thread(
            old_attempts.old_attempts, self.attempts_dir, self.open_dir, before_s=before_s, limit=TIDY_AT_ONCE
        )
        removed = 0
        for folder in found:
            async with self.job_locks.setdefault(folder.job_id, asyncio.Lock()):  # no start of it is under way
                if (folder.job_id, folder.incarnation) not in self.attempts:
                    with suppress(OSError):
                        removed += await asyncio.to_thread(old_attempts.remove_attempt, folder)
            await asyncio.sleep(0)  # whoever waits for the lock takes it now, and it stays
            self._drop_job_lock(folder.job_id)
        fences = await asyncio.to_thread(
            old_attempts.old_fences, self.fence_dir, self.attempts_dir, before_s=before_s, limit=TIDY_AT_ONCE
        )
        # Without a pause, so that no start or kill comes in between.
        in_use = {job_id for job_id, _ in self.attempts} | {
            job for job, lock in self.job_locks.items() if lock.locked()
        }
        for path in fences:
            if path.name not in in_use and old_attempts.is_older(path, before_s):
                path.unlink(missing_ok=True)
        if removed or fences:
            self.log.write("removed what was old", node=self.node, attempts=removed, fences=len(fences))
        return max(removed, len(fences))

    def _drop_job_lock(self, job_id: str) -> None:
        lock = self.job_locks.get(job_id)
        if lock is not None and not lock.locked():
            del self.job_locks[job_id]

    # Requests --------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # the agent ends
            await self._talk(reader, writer)

    async def _talk(self, reader: Any, writer: Any) -> None:
        try:
            while line := await reader.readline():
                self._spawn(self._answer(writer, json.loads(line)))
        except (OSError, ValueError) as error:
            self.log.write("connection", node=self.node, error=repr(error))
        finally:
            self.listeners.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": request.get("id")}
        try:
            operation = self.OPERATIONS[request["op"]]
            answer["result"] = await operation(self, request)
            if request["op"] == "hello":
                self.listeners.add(writer)  # whatever is pushed from now on is newer than the answer
        except Refused as error:
            answer.update(error="refused", detail=str(error))
        except FileNotFoundError as error:
            answer.update(error="missing", detail=str(error))
        except UserError as error:
            answer.update(error="failed", detail=error.message)
        except Exception as error:
            answer.update(error="failed", detail=f"{type(error).__name__}: {error}")
        if "error" in answer:
            self.log.write(
                "not done",
                node=self.node,
                op=request.get("op"),
                job=request.get("job_id"),
                incarnation=request.get("incarnation"),
                error=answer["error"],
                detail=answer["detail"],
            )
        if not writer.is_closing():
            writer.write(wire.encode(answer))
            with suppress(OSError):
                await writer.drain()

    def _known(self, request: dict[str, Any]) -> Attempt | None:
        return self.attempts.get((request["job_id"], request["incarnation"]))

    def _living(self, request: dict[str, Any]) -> Attempt:
        attempt = self._known(request)
        if attempt is None:
            raise Refused(f"node {self.node} has no incarnation {request['incarnation']} of job {request['job_id']}")
        if not attempt.alive:
            raise Refused(f"job {request['job_id']} has ended on node {self.node}")
        return attempt

    async def _ping(self, request: dict[str, Any]) -> dict[str, float]:
        """The controller tells until when it has heard of us, by our own clock."""
        heard_s = request.get("heard_s")
        if self.lease is not None and isinstance(heard_s, int | float):
            self.lease.renew(min(boot_s(), float(heard_s)))
            self._write_lease()
        return {"boot_s": boot_s()}

    async def _facts(self, request: dict[str, Any]) -> dict[str, Any]:
        return wire.facts_to_dict(self.facts)

    async def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        """All there is to know; changes are pushed from then on."""
        if self.home is not None and self.lease is not None:
            self.home.homes = list(request.get("homes") or self.home.homes)
            self.lease.lease_s = float(request.get("lease_s") or self.lease.lease_s)
            self.lease.greet()
            self._write_lease()
            self.facts = replace(self.facts, address=self.facts.address or self.home.address)
        return {
            "facts": await self._facts(request),
            "reports": await self._list(request),
            "boot": boot_id(),
            "boot_s": boot_s(),
        }

    async def _homes(self, request: dict[str, Any]) -> None:
        if self.home is not None:
            self.home.homes = list(request["homes"])

    async def _park(self, request: dict[str, Any]) -> None:
        """The controller leaves on purpose."""
        if self.lease is not None:
            self.lease.park(float(request["for_s"]))
            self._write_lease()

    async def _retire(self, request: dict[str, Any]) -> None:
        """The cluster is taken down, and nobody will need us."""
        if any(attempt.alive for attempt in self.attempts.values()):
            raise Refused(f"jobs still run on node {self.node}")
        asyncio.get_running_loop().call_later(0.05, self._go)  # after the answer

    def _go(self) -> None:
        """For good: the mark tells whoever keeps us running to let it be."""
        with suppress(OSError):
            (self.instance.run / "gone").touch()
        self.stop.set()

    async def _list(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        return [wire.report_to_dict(self._make_report(attempt)) for attempt in self.attempts.values()]

    async def _port(self, request: dict[str, Any]) -> int:
        return free_port(self.ports.values())

    async def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        launch = wire.launch_from_dict(request["launch"])
        folder = AttemptDir.named(self.attempts_dir, f"{launch.job_id}.{launch.incarnation}")
        if folder is None:
            raise Refused(f"'{launch.job_id}' is not a job id")
        async with self.job_locks.setdefault(launch.job_id, asyncio.Lock()):
            known = self.attempts.get((launch.job_id, launch.incarnation))
            if known is not None:
                return wire.report_to_dict(self._make_report(known))
            if self.lease is not None and self.lease.silent_s(boot_s()) >= self.lease.lease_s:
                # We were frozen, and these are words of long ago: it may be somewhere else by now.
                raise Refused(f"node {self.node} has been cut off: nothing starts there until a controller is back")
            newest = self._fence(launch.job_id)
            if launch.incarnation < newest:
                raise Refused(
                    f"incarnation {launch.incarnation} of job {launch.job_id} is older than {newest}, "
                    f"the newest that node {self.node} has seen"
                )
            if (folder.path / "state.json").exists():  # done and forgotten
                return wire.report_to_dict(make_report(folder, self.node, folder.state(), Rate()))
            fence = self._raise_fence(launch.job_id, launch.incarnation)
            for other in [one for one in self.attempts.values() if one.dir.job_id == launch.job_id and one.alive]:
                await self._remove(other)
            # A power cut ends every process, so what matters is that the fence is on disk before we say that it runs.
            durable = asyncio.to_thread(_sync, fence)
            attempt, _ = await asyncio.gather(self._start_new(launch, folder, request), durable)
            return wire.report_to_dict(self._make_report(attempt))

    async def _start_new(self, launch: Launch, folder: AttemptDir, request: dict[str, Any]) -> Attempt:
        begun_s = boot_s()
        port = request.get("master_port") or free_port(self.ports.values())
        part = launching.part_launch(
            launch,
            request["part"],
            gpus=self.facts.gpus,
            base_env=os.environ,
            attempt_dir=str(folder.path),
            poke=str(self.poke_path),
            master_addr=request.get("master_addr") or "127.0.0.1",
            master_port=port,
            more_env=await self._mps_env(launch),
        )
        if self.lease_file is not None:
            part = replace(part, lease_file=str(self.lease_file.path))
        await asyncio.to_thread(self._write_attempt, folder, part, launch.checkpoint_dir)
        attempt = Attempt(folder)
        self.attempts[attempt.key] = attempt  # from now on pokes are heard
        self.ports[attempt.key] = port
        self.some_alive.set()
        try:
            attempt.pid = await asyncio.to_thread(self._spawn_supervisor, folder)
        except OSError as error:
            self.log.write("no supervisor", node=self.node, attempt=folder.name, error=str(error))
        if not attempt.pid or not self._watch(attempt):
            self._vanish(attempt)
        self._follow_log(attempt)
        await self._until(attempt, lambda: bool(attempt.state), STARTED_WITHIN_S)
        self._spawn(self._look_for_first_step(attempt))
        self.log.write(
            "started",
            node=self.node,
            attempt=folder.name,
            gpus=launch.parts[request["part"]].gpus,
            state=attempt.state.get("state", "starting"),
            took_s=round(boot_s() - begun_s, 4),
        )
        return attempt

    async def _mps_env(self, launch: Launch) -> dict[str, str]:
        """A job that may share its GPU runs under the node's MPS daemon; without MPS the driver slices its time."""
        if self.virtual or not launch.packs:
            return {}
        uuids = [gpu.uuid for gpu in self.facts.gpus if gpu.healthy]  # a name that is unknown hides those after it
        try:
            async with self.mps_starting:
                daemon = await asyncio.to_thread(mps.start, self.mps.directory, gpu_uuids=uuids)
        except mps.MpsUnavailable as error:
            self.log.write("no MPS", node=self.node, job=launch.job_id, error=error.message)
            return {}
        return mps.client_env(daemon)

    async def _stop_mps(self) -> None:
        """When we are told to go and nobody needs the daemon, it goes too; otherwise the next agent finds it."""
        if self.virtual:
            return
        async with self.mps_starting:
            for attempt in self.attempts.values():
                if attempt.alive:
                    self._refresh(attempt)
            if any(one.alive for one in self.attempts.values()) or any(one.locked() for one in self.job_locks.values()):
                return
            try:
                await asyncio.to_thread(mps.stop, self.mps, clients_end_within_s=1, answer_s=MPS_ANSWERS_WITHIN_S)
            except (mps.MpsUnavailable, OSError) as error:
                self.log.write("MPS not stopped", node=self.node, error=str(error))

    def _write_attempt(self, folder: AttemptDir, part: launching.PartLaunch, checkpoint_dir: str) -> None:
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

    def _spawn_supervisor(self, folder: AttemptDir) -> int:
        """Its pid. In a thread."""
        with self.spawning:
            pid = self.nursery.spawn(folder.path)
            self.supervisors.add(pid)
        return pid

    async def _remove(self, attempt: Attempt) -> None:
        """Kill an incarnation and wait until it is gone; a supervisor that does not do its work is killed itself."""
        with suppress(OSError):
            attempt.dir.command("kill")
        if await self._until(attempt, lambda: not attempt.alive, KILLED_WITHIN_S):
            return
        if attempt.pidfd >= 0:
            signal.pidfd_send_signal(attempt.pidfd, signal.SIGKILL)
        if not await self._until(attempt, lambda: not attempt.alive, 2 * KILLED_WITHIN_S):
            raise Refused(f"incarnation {attempt.dir.incarnation} of job {attempt.dir.job_id} cannot be ended")

    def _fence(self, job_id: str) -> int:
        try:
            return int((self.fence_dir / job_id).read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _raise_fence(self, job_id: str, incarnation: int) -> Path:
        """From now on nothing older starts; for it to survive a power cut, `_sync` follows."""
        path = self.fence_dir / job_id
        if incarnation > self._fence(job_id):
            draft = self.fence_dir / f".{job_id}.new"
            draft.write_text(f"{incarnation}\n")
            draft.replace(path)
        return path

    def _order(self, attempt: Attempt, line: str) -> None:
        try:
            attempt.dir.command(line)
        except OSError:
            raise Refused(f"job {attempt.dir.job_id} is just ending on node {self.node}") from None

    async def _notice(self, request: dict[str, Any]) -> None:
        attempt = self._living(request)
        self._order(attempt, f"notice {float(request['grace_s'])}")
        self.log.write("notice", node=self.node, attempt=attempt.dir.name, grace_s=request["grace_s"])

    async def _terminate(self, request: dict[str, Any]) -> None:
        attempt = self._living(request)
        self._order(attempt, f"term {float(request['grace_s'])}")
        self.log.write("terminate", node=self.node, attempt=attempt.dir.name, grace_s=request["grace_s"])

    async def _kill(self, request: dict[str, Any]) -> None:
        attempt = self._known(request)
        if attempt is None:
            folder = AttemptDir.named(self.attempts_dir, f"{request['job_id']}.{request['incarnation']}")
            if folder is not None and not folder.path.exists():
                # Its start may still be on the way: it must not come to life after this.
                await asyncio.to_thread(_sync, self._raise_fence(folder.job_id, folder.incarnation + 1))
            return
        if attempt.alive:
            why = " ".join(str(request.get("because") or "").split())
            with suppress(OSError):  # nobody there: it is being settled
                attempt.dir.command(f"abort {why}" if why else "kill")
            self.log.write("kill", node=self.node, attempt=attempt.dir.name, because=why)
            self._spawn(self._insist(attempt))

    async def _insist(self, attempt: Attempt) -> None:
        if not await self._until(attempt, lambda: not attempt.alive, KILLED_WITHIN_S):
            await self._remove(attempt)

    async def _suspend(self, request: dict[str, Any]) -> float:
        attempt = self._living(request)
        mechanism = request["mechanism"]
        suspend.check(mechanism, self.facts.mechanisms)
        wanted = "frozen" if mechanism == "freeze" else "suspended"
        async with attempt.busy:
            if attempt.state.get("state") == wanted:
                return attempt.took.get("suspend_took_s", 0.0)
            if (attempt.dir.path / "notice").exists():
                raise Refused(f"job {attempt.dir.job_id} has been told to end and cannot be suspended")
            begun_s = boot_s()
            if mechanism == "cuda":
                await self._suspend_cuda(attempt)
            self._order(attempt, "freeze" if mechanism == "freeze" else "park")
            await self._until(attempt, lambda: attempt.state.get("state") in (wanted, "exited"), FROZEN_WITHIN_S)
            if attempt.state.get("state") != wanted:
                raise Refused(f"job {attempt.dir.job_id} is ending and could not be suspended")
            return self._took(attempt, "suspended", "suspend_took_s", mechanism, boot_s() - begun_s)

    def _took(self, attempt: Attempt, event: str, key: str, mechanism: str, took_s: float) -> float:
        """Remember, tell and log how long a suspension or a resume took."""
        attempt.took[key] = took_s
        self._tell(attempt)
        self.log.write(event, node=self.node, attempt=attempt.dir.name, mechanism=mechanism, took_s=round(took_s, 4))
        return took_s

    async def _suspend_cuda(self, attempt: Attempt) -> None:
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
            await self._remove(attempt)
            raise OSError(f"{error}; it was killed and starts again from its last checkpoint") from None

    async def _resume(self, request: dict[str, Any]) -> float:
        attempt = self._living(request)
        mechanism = request["mechanism"]
        async with attempt.busy:
            if attempt.state.get("state") == "running":
                return attempt.took.get("resume_took_s", 0.0)
            begun_s = boot_s()
            if mechanism == "cuda":
                await self._resume_cuda(attempt)
            self._order(attempt, "thaw" if mechanism == "freeze" else "unpark")
            done = ("running", "exited")
            await self._until(attempt, lambda: attempt.state.get("state") in done, FROZEN_WITHIN_S)
            if attempt.state.get("state") != "running":
                raise Refused(f"job {attempt.dir.job_id} could not be resumed")
            (attempt.dir.path / "cuda").unlink(missing_ok=True)
            return self._took(attempt, "resumed", "resume_took_s", mechanism, boot_s() - begun_s)

    async def _resume_cuda(self, attempt: Attempt) -> None:
        try:
            await asyncio.to_thread(suspend.resume_cuda, processes.descendants(attempt.pid), attempt.dir.cuda_needs())
        except suspend.Broken as error:
            await self._remove(attempt)
            raise Refused(f"{error}; it was killed") from None

    async def _undo_cuda(self, attempt: Attempt) -> None:
        """An earlier agent was killed in the middle of a suspend or resume: the job runs again, or it is ended."""
        async with attempt.busy:
            try:
                pids = processes.descendants(attempt.pid)
                await asyncio.to_thread(suspend.resume_cuda, pids, attempt.dir.cuda_needs())
                (attempt.dir.path / "cuda").unlink(missing_ok=True)
            except (Refused, suspend.Broken) as error:
                self.log.write("cuda resume failed", node=self.node, attempt=attempt.dir.name, error=str(error))
                await self._remove(attempt)

    async def _forget(self, request: dict[str, Any]) -> None:
        attempt = self._known(request)
        if attempt is None:
            return
        if attempt.alive:
            raise Refused(f"job {attempt.dir.job_id} is alive on node {self.node}: it cannot be forgotten")
        (self.open_dir / attempt.dir.name).unlink(missing_ok=True)
        del self.attempts[attempt.key]
        self._drop_job_lock(attempt.dir.job_id)

    async def _log(self, request: dict[str, Any]) -> dict[str, Any]:
        folder = AttemptDir.named(self.attempts_dir, f"{request['job_id']}.{int(request['incarnation'])}")
        if folder is None:
            raise FileNotFoundError(f"'{request['job_id']}' is not a job id")
        limit = max(0, min(int(request["limit"]), LOG_LIMIT_BYTES))
        data, after = read_log(folder.log(int(request["rank"])), int(request["offset"]), limit)
        return {"data": base64.b64encode(data).decode(), "offset": after}

    OPERATIONS = {  # noqa: RUF012 - never changed
        "ping": _ping,
        "hello": _hello,
        "homes": _homes,
        "park": _park,
        "retire": _retire,
        "facts": _facts,
        "list": _list,
        "port": _port,
        "start": _start,
        "notice": _notice,
        "terminate": _terminate,
        "kill": _kill,
        "suspend": _suspend,
        "resume": _resume,
        "forget": _forget,
        "log": _log,
    }


def _sync(path: Path) -> None:
    """Make a file and its name durable."""
    for one in (path, path.parent):
        fd = os.open(one, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _trail(attempt: Attempt) -> processes.Trail:
    state = attempt.state
    if state.get("boot") != boot_id():
        return processes.Trail(str(attempt.dir.path))
    return processes.Trail(str(attempt.dir.path), int(state.get("group", 0)), int(state.get("supervisor", 0)))


def free_port(taken: Sequence[int] | Any, *, tries: int = 100) -> int:
    """A port for MASTER_PORT that nobody listens on and no other job of this node was given."""
    held = set(taken)
    for _ in range(tries):
        port = random.randrange(launching.FIRST_PORT, launching.LAST_PORT)
        if port in held:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {launching.FIRST_PORT} and {launching.LAST_PORT} for MASTER_PORT")


def node_gpus(instance: Instance, node: str, virtual: int | None) -> tuple[tuple[Gpu, ...], bool]:
    """The node's GPUs and whether they are virtual, from config.json or the option."""
    if virtual is not None:
        return gpu_discovery.virtual_gpus(virtual), True
    try:
        nodes = json.loads(instance.config.read_bytes())["nodes"]
        found = next(one for one in nodes if one["name"] == node)
        count, is_virtual = int(found["gpus"]), bool(found.get("virtual", False))
    except StopIteration:
        raise UserError(f"{instance.config} names no node '{node}'") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{instance.config} cannot be used: {error}", hint="`thebes up` writes a new one") from None
    if is_virtual:
        return gpu_discovery.virtual_gpus(count), True
    return _real_gpus(instance.nodes / node / "gpus.json", count), False


def _real_gpus(path: Path, count: int) -> tuple[Gpu, ...]:
    """GPUs by the numbers under which earlier agents knew them: jobs that live hold them by these."""
    try:
        known = [Gpu(**one) for one in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError):
        known = []
    try:
        found = gpu_discovery.discover()
    except UserError as error:
        print(error, file=sys.stderr)
        found = ()
    gpus = gpu_discovery.numbered(count, known, found)
    if [gpu.uuid for gpu in gpus] != [gpu.uuid for gpu in known]:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, [asdict(gpu) for gpu in gpus])
        except (OSError, UserError) as error:  # a full disk: jobs need an agent more than we need the file
            print(error, file=sys.stderr)
    return gpus


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="thebes-agent", description="The agent of one node; started by the keeper.")
    parser.add_argument("dir")
    parser.add_argument("node")
    parser.add_argument("--virtual-gpus", type=int, default=None)
    parser.add_argument("--homes", default="", help="HOST:PORT of controllers, separated by commas")
    parser.add_argument("--lease", type=float, default=60.0, help="seconds")
    parser.add_argument("--head-file", type=Path, default=None)
    parser.add_argument("--alone", type=float, default=None, help="seconds")
    options = parser.parse_args(argv)
    key = bytes.fromhex(os.environ.pop("THEBES_HOME_KEY", ""))
    try:
        if not _NODE.fullmatch(options.node):
            raise UserError(f"'{options.node}' is not the name of a node")
        instance = Instance.at(options.dir)
        for folder in (instance.run, instance.log, instance.nodes):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = instance.hold_lock(f"agent-{options.node}")
        gpus, virtual = node_gpus(instance, options.node, options.virtual_gpus)
    except LockHeld as error:
        print(error, file=sys.stderr)
        return 4  # as the controller: 2 and 3 are mistakes, which end `thebes up`
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    with lock:
        log = JsonLines(instance.log / f"agent-{options.node}.jsonl")
        homes = tuple(home for home in options.homes.split(",") if home)
        away = Away(homes, key, options.lease, options.head_file, options.alone) if homes else None
        agent = Agent(instance, options.node, gpus, virtual, log, away)
        _prepare_process()
        asyncio.run(agent.run())
    return 0


def _prepare_process() -> None:
    """Orphans of killed supervisors become our children, so that none escapes; room for a pidfd per job."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
