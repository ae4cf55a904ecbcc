"""The keeper of an instance: starts its controller and its agents, and starts again whichever dies.

`python -m thebes.node.keeper DIR`. It is small and knows nothing of jobs. The controller has a standby between itself
and the keeper, with its code loaded (`thebes.instance.standby`). Parts that live already when it comes, from a
keeper that was killed, are found by their locks, adopted and waited on by pidfd. SIGTERM stops the controller, then the
agents; jobs have supervisors of their own and go on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thebes.model.errors import UserError
from thebes.protocol.instance import EventLog, Instance, Lock, LockHeld, stop_process, wait_gone

YOUNG_S = 10.0  # a part that dies before this age is started again more and more slowly
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
LONGEST_DELAY_AFTER_KILL_S = 0.5  # killed from outside: no reason to think that it will fail again
LONGEST_DELAY_AFTER_MISTAKE_S = 30.0  # a person must put it right; `thebes up` then calls us
MISTAKES = (2, 3)  # exit codes: bad configuration or store, port taken
LOOK_S = 5.0  # how often to look whether the folder is still there
CONTROLLER_PATIENCE_S = 10.0
AGENT_PATIENCE_S = 5.0
TAIL_BYTES = 2000


@dataclass
class KeptProcess:
    """One process that should live. `name` is also that of its logs, and of its lock unless `lock` is another."""

    name: str
    argv: tuple[str, ...]
    lock: str = ""
    pidfd: int = -1  # -1: it does not run
    pid: int = 0
    process: subprocess.Popen[bytes] | None = None  # None: adopted, so its exit code cannot be known
    started_s: float = 0.0
    young_deaths: int = 0  # in a row
    due_s: float = 0.0  # not to be started before


def parts_of(instance: Instance, nodes: Sequence[str]) -> list[KeptProcess]:
    python = (sys.executable, "-m")
    folder = str(instance.dir)
    agents = [KeptProcess(f"agent-{node}", (*python, "thebes.node.agent", folder, node)) for node in nodes]
    return [*agents, KeptProcess("controller", (*python, "thebes.instance.standby", folder), lock="standby")]


def node_names(instance: Instance) -> list[str]:
    """Nodes whose agents are ours to keep. config.json was checked by `thebes up`; the controller tells in detail what
    is wrong with it.
    """
    try:
        config = json.loads(instance.config.read_bytes())
        names = [node["name"] for node in config["nodes"]]
        if config.get("engine", "local") != "local":
            return []  # Slurm or Ray start what is needed on their nodes
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{instance.config} cannot be read", hint="`thebes doctor` tells what is wrong") from None
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"{instance.config}: a node has no name")
    return names


class Keeper:
    """The loop: start what is due, wait until something ends or a signal comes."""

    def __init__(self, instance: Instance, lock: Lock, parts: list[KeptProcess], log: EventLog) -> None:
        self.instance = instance
        self.lock = lock
        self.parts = parts
        self.log = log
        self.poll = select.poll()
        self.stopping = False

    def run(self) -> None:
        wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.poll.register(wake, select.POLLIN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_call)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        while not self.stopping:
            now = time.monotonic()
            for part in self.parts:
                if part.pidfd < 0 and now >= part.due_s:
                    self._start(part)
            ended = {fd for fd, _ in self.poll.poll(self._sleep_s() * 1000)}
            if wake in ended:
                with suppress(BlockingIOError):
                    os.read(wake, 512)
            for part in self.parts:
                if part.pidfd in ended:
                    self._bury(part)
            if not self.lock.is_in_place():  # the folder was removed: nobody could ever find and stop us
                self.stopping = True
        self._stop_all()

    def _on_stop(self, number: int, frame: object) -> None:
        self.stopping = True

    def _on_call(self, number: int, frame: object) -> None:
        """Somebody thinks that it will go better now: try at once."""
        for part in self.parts:
            part.due_s, part.young_deaths = 0.0, 0

    def _sleep_s(self) -> float:
        now = time.monotonic()
        waits = [part.due_s - now for part in self.parts if part.pidfd < 0]
        return max(0.0, min([LOOK_S, *waits]))

    def _start(self, part: KeptProcess) -> None:
        if self._adopt(part):
            return
        try:
            out = _fresh_output(self.instance.log / f"{part.name}.stderr")
            try:
                process = subprocess.Popen(
                    part.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/"
                )
            finally:
                if out >= 0:
                    os.close(out)
            part.pidfd = os.pidfd_open(process.pid)
        except OSError as error:  # no more processes or memory: that may pass
            part.young_deaths += 1
            part.due_s = time.monotonic() + _delay_s(part, LONGEST_DELAY_S)
            self.log.write("cannot-start", part=part.name, error=str(error))
            return
        part.process, part.pid, part.started_s = process, process.pid, time.monotonic()
        self.poll.register(part.pidfd, select.POLLIN)
        self.log.write("started", part=part.name, pid=part.pid)

    def _adopt(self, part: KeptProcess) -> bool:
        """Take over a process that holds the lock of this part. Its pid is pinned before the lock is asked again."""
        with suppress(UserError, ProcessLookupError):
            lock = part.lock or part.name
            pid = self.instance.holder_pid(lock)
            if pid is None:
                return False
            pidfd = os.pidfd_open(pid)
            if self.instance.holder_pid(lock) != pid:
                os.close(pidfd)
                return False
            part.pidfd, part.pid, part.process, part.started_s = pidfd, pid, None, time.monotonic()
            self.poll.register(pidfd, select.POLLIN)
            self.log.write("adopted", part=part.name, pid=pid)
            return True
        return False

    def _bury(self, part: KeptProcess) -> None:
        self.poll.unregister(part.pidfd)
        os.close(part.pidfd)
        code = part.process.wait() if part.process else None
        age_s = time.monotonic() - part.started_s
        part.pidfd, part.process = -1, None
        part.young_deaths = part.young_deaths + 1 if age_s < YOUNG_S or code in MISTAKES else 0
        if code in (None, -signal.SIGKILL):
            longest_s = LONGEST_DELAY_AFTER_KILL_S
        else:
            longest_s = LONGEST_DELAY_AFTER_MISTAKE_S if code in MISTAKES else LONGEST_DELAY_S
        delay_s = _delay_s(part, longest_s)
        part.due_s = time.monotonic() + delay_s
        self.log.write(
            "died",
            part=part.name,
            pid=part.pid,
            code=code,
            age_s=round(age_s, 3),
            again_in_s=delay_s,
            said=_tail(self.instance.log / f"{part.name}.stderr"),
        )

    def _stop_all(self) -> None:
        self.log.write("stopping")
        controller = [part for part in self.parts if part.name == "controller"]
        agents = [part for part in self.parts if part.name != "controller"]
        for group, patience_s in ((controller, CONTROLLER_PATIENCE_S), (agents, AGENT_PATIENCE_S)):
            alive = [part for part in group if part.pidfd >= 0]
            for part in alive:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(part.pidfd, signal.SIGTERM)
            deadline_s = time.monotonic() + patience_s
            for part in alive:
                if not wait_gone(part.pidfd, deadline_s - time.monotonic()):
                    self.log.write("killed", part=part.name, pid=part.pid)
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(part.pidfd, signal.SIGKILL)
                    wait_gone(part.pidfd, 5.0)
                if part.process:
                    part.process.poll()
            if group is controller:
                self._stop_orphan()
        self.log.write("stopped")

    def _stop_orphan(self) -> None:
        """A controller that lives on without its standby, which was killed just before."""
        with suppress(UserError):
            pid = self.instance.holder_pid("controller")
            if pid is not None:
                stop_process(pid, self.instance.lock_path("controller"), patience_s=CONTROLLER_PATIENCE_S)


def _delay_s(part: KeptProcess, longest_s: float) -> float:
    """At once, unless it dies young: then twice as long each time."""
    return min(longest_s, FIRST_DELAY_S * 2 ** min(part.young_deaths - 1, 10)) if part.young_deaths else 0.0


def _fresh_output(path: Path) -> int:
    """A new file for what a part prints; that of its predecessor stays as .1. If none can be made: /dev/null."""
    try:
        if path.exists() and path.stat().st_size:
            path.replace(path.with_name(path.name + ".1"))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        return subprocess.DEVNULL


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def stop_instance(instance: Instance, nodes: Sequence[str]) -> list[str]:
    """Stop keeper, controller (with its standby) and agents, whichever live; names of those that had to be killed.

    The keeper stops its parts itself. If it was killed, or has not adopted one of them, they are stopped one by one.
    """
    patience_s = {
        "keeper": CONTROLLER_PATIENCE_S + AGENT_PATIENCE_S + 5.0,
        "standby": CONTROLLER_PATIENCE_S,
        "controller": CONTROLLER_PATIENCE_S,
    }
    killed: list[str] = []
    for name in ("keeper", "standby", "controller", *(f"agent-{node}" for node in nodes)):
        pid = instance.holder_pid(name)
        if pid is not None and not stop_process(
            pid, instance.lock_path(name), patience_s=patience_s.get(name, AGENT_PATIENCE_S)
        ):
            killed.append(name)
    return killed


def call_keeper(instance: Instance) -> None:
    """Let the keeper start at once what it would try again only later."""
    pid = instance.holder_pid("keeper")
    with suppress(ProcessLookupError, PermissionError):
        if pid is not None:
            os.kill(pid, signal.SIGUSR1)


def start_keeper(instance: Instance) -> subprocess.Popen[bytes]:
    """Start a keeper that outlives us and our terminal."""
    out = _fresh_output(instance.log / "keeper.stderr")
    try:
        return subprocess.Popen(
            (sys.executable, "-m", "thebes.node.keeper", str(instance.dir)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd="/",
        )
    finally:
        if out >= 0:
            os.close(out)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m thebes.node.keeper DIR", file=sys.stderr)
        return 2
    instance = Instance.at(argv[0])
    log = EventLog(instance.log / "keeper.jsonl")
    try:
        with instance.hold_lock("keeper") as lock:
            log.write("keeping", pid=os.getpid())
            Keeper(instance, lock, parts_of(instance, node_names(instance)), log).run()
    except LockHeld:
        return 0  # another keeper does it
    except UserError as error:
        log.write("failed", error=str(error))
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
