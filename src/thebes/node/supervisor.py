"""The parent of a job's ranks on one node. It outlives controller and agent, and writes the result durably.

There is one process per incarnation and node, so it is small: a script that loads a few small modules of ours
(`node/bare.py` lists them) and none that pulls in others (`signal`, `json` and `subprocess` would cost 2 MB and 15 ms
each time). `Conduct` says what to do; this module does it, and sleeps in `poll` until the next event or deadline.
`python -I -S supervisor.py ATTEMPT_DIR` supervises one attempt; with `--nursery` it forks a supervisor for every path
that it is given, which takes 2 ms and shares most of the memory.

Every process of the job is a descendant of this one, also those in the background, since it is a subreaper. If it is
killed, the kernel kills the ranks (PR_SET_PDEATHSIG) and the agent the rest.
"""

# pathlib and contextlib would be loaded for these alone:
# ruff: noqa: PTH100, PTH110, PTH123, SIM105
from __future__ import annotations

import fcntl
import gc
import os
import select
import sys
import time
from _signal import (  # pyright: ignore[reportMissingImports]
    SIG_IGN,
    SIGCHLD,
    SIGCONT,
    SIGHUP,
    SIGINT,
    SIGIO,
    SIGKILL,
    SIGSTOP,
    SIGTERM,
    SIGUSR1,
    set_wakeup_fd,
    signal,
)

import ctypes  # isort: skip  (0.4 MB and 3 ms: the only way to prctl)

if not __package__:  # a script: its neighbours lie below the folder that `node/bare.py` has made, or in our sources
    sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))

from thebes.node.conduct import Conduct
from thebes.node.log_limit import LogWatch
from thebes.node.process_tree import catches, descendants, send
from thebes.node.ranks import NotStarted, start_rank
from thebes.protocol.clock import boot_id, boot_s
from thebes.protocol.lease import FILE_BYTES, over_at_in
from thebes.protocol.plain_json import dump, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from thebes.node.conduct import Instruction

LEASE_EVERY_S = 1.0
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def _wake(_number: int, _frame: object) -> None:
    """A signal that shall only wake the loop."""


class Supervisor:
    """Carries out what `Conduct` says."""

    def __init__(self, attempt: str) -> None:
        self.attempt = attempt
        with open(attempt + "/launch.json", "rb") as file:
            self.launch: dict[str, Any] = parse(file.read().decode())
        self.name = f"{self.launch['job_id']}.{self.launch['incarnation']}"
        self.ranks = [one["rank"] for one in self.launch["ranks"]]
        self.conduct = Conduct(self.ranks, self.launch["grace_s"], self.launch["limit_s"])
        self.pids: dict[int, int] = {}
        self.group = 0
        self.had_usr1: set[int] = set()  # the processes that have had SIGUSR1
        self.unwritten = False  # a state that could not be written yet
        self.retry_at: float | None = None
        self.boot = boot_id()
        self.logs = [LogWatch(f"{attempt}/rank-{rank}.log", self.launch["log_limit_bytes"]) for rank in self.ranks]
        self.look_at: float | None = None
        self.folder = os.open(attempt, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.lease_file: str = self.launch.get("lease_file") or ""
        self.lease_at = 0.0 if self.lease_file else float("inf")  # when to look at it
        self.lease_over_at = float("inf")

    def run(self) -> None:
        # Held to the end. An agent that finds it free takes it and writes a result: then there is nothing to start.
        self.lock_fd = os.open(self.attempt + "/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX)
        if os.path.exists(self.attempt + "/state.json"):
            return
        self._prepare()
        self._start()
        self._look_at_logs(boot_s())  # from now on the kernel tells of writes
        poll = select.poll()
        poll.register(self.ctl, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while True:
            poll.poll(self._sleep_ms())
            self._drain_wake()
            self._look_at_lease(boot_s())  # first: we may have been frozen for longer than it lasts
            now = boot_s()
            for line in self._commands():
                self._do(self.conduct.command(now, line))
            self._reap()
            self._do(self.conduct.tick(boot_s()))
            self._look_at_logs(boot_s())
            if self.unwritten and self.retry_at is not None and boot_s() >= self.retry_at:
                self._write_state()
            if self.conduct.state == "exited" and not self.unwritten:
                return

    def _prepare(self) -> None:
        text = b"%d\n" % os.getpid()
        os.pwrite(self.lock_fd, text, 0)
        os.ftruncate(self.lock_fd, len(text))
        self.wake, wake = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake, False)
        set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.asked_to_end = False
        signal(SIGCHLD, _wake)
        signal(SIGIO, _wake)
        signal(SIGTERM, self._on_term)
        signal(SIGINT, self._on_term)
        signal(SIGHUP, _wake)
        self.libc = ctypes.CDLL(None)
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.libc.prctl(PR_SET_NAME, b"thebes " + self.name.encode(), 0, 0, 0)  # what `ps` and `top` show
        self._open_control()

    def _open_control(self) -> None:
        self.ctl = os.open(self.attempt + "/ctl", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.rest = b""

    def _on_term(self, *_: object) -> None:
        self.asked_to_end = True

    def _start(self) -> None:
        try:
            for one in self.launch["ranks"]:
                env = dict(self.launch["env"])
                env.update(one["env"])
                log = f"{self.attempt}/rank-{one['rank']}.log"
                pid = start_rank(self.libc, self.launch, env, self.group, log)
                self.group = self.group or pid
                self.pids[one["rank"]] = pid
        except NotStarted as error:
            self._do(self.conduct.not_started(boot_s(), str(error)))
            self._reap()
            return
        self._do(self.conduct.started(boot_s()))
        self.launch["env"] = None  # values are secrets, and memory
        self.launch["ranks"] = None

    def _sleep_ms(self) -> float | None:
        times = [at for at in (self.conduct.next_s(), self.look_at, self.retry_at) if at is not None]
        if self.lease_file:
            times.append(self.lease_at)
        if not times:
            return None
        return max(0.0, min(times) - boot_s()) * 1000 + 1

    def _look_at_lease(self, now: float) -> None:
        """The agent renews it. If it cannot, being dead, frozen or cut off, others will take this job for lost."""
        if now < self.lease_at:
            return
        try:
            fd = os.open(self.lease_file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                over_at = over_at_in(os.pread(fd, FILE_BYTES, 0), self.boot)
            finally:
                os.close(fd)
        except OSError:
            over_at = None
        if over_at is not None:  # else what we have read last holds
            self.lease_over_at = over_at
        self.lease_at = now + LEASE_EVERY_S
        if now < self.lease_over_at:
            self.lease_at = min(self.lease_at, self.lease_over_at)
        elif self.conduct.state != "exited" and not self.conduct.kills:
            why = "cut off: nobody has renewed the lease of this node"
            self._do(self.conduct.command(now, ["fence", "0", *why.split()]))

    def _drain_wake(self) -> None:
        try:
            while os.read(self.wake, 4096):
                pass
        except BlockingIOError:
            pass

    def _commands(self) -> list[list[str]]:
        try:
            while True:
                piece = os.read(self.ctl, 65536)
                self.rest += piece
        except BlockingIOError:
            pass
        *lines, self.rest = self.rest.split(b"\n")
        found = [line.decode("utf-8", "replace").split() for line in lines]
        if self.asked_to_end:
            self.asked_to_end = False
            found.append(["term"])
        return found

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                # Every descendant of ours has a living ancestor that is our child, so there is none.
                if self.conduct.state != "exited":
                    for log in self.logs:
                        log.look(boot_s())
                    self._do(self.conduct.empty(boot_s()))
                return
            if pid == 0:
                return
            for rank, other in self.pids.items():
                if other == pid and rank in self.conduct.left:
                    self._do(self.conduct.rank_ended(boot_s(), rank, os.waitstatus_to_exitcode(status)))

    def _do(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            getattr(self, "_do_" + instruction[0])(*instruction[1:])

    def _do_notice(self, deadline_s: float, grace_s: float) -> None:
        text = dump({"deadline_s": deadline_s, "grace_s": grace_s}) + "\n"
        try:
            self._replace("notice", text, durable=False)
        except OSError:
            pass  # the signal is the other way to be told

    def _do_usr1(self) -> None:
        for pid in descendants(os.getpid()):
            if pid not in self.had_usr1 and catches(pid, SIGUSR1):
                self.had_usr1.add(pid)
                send(pid, SIGUSR1)

    def _do_term(self) -> None:
        for pid in descendants(os.getpid()):
            send(pid, SIGTERM)

    def _do_kill(self) -> None:
        if self.group and self.conduct.left:
            try:
                os.killpg(self.group, SIGKILL)
            except OSError:
                pass
        for pid in descendants(os.getpid()):
            send(pid, SIGKILL)

    def _do_stop(self) -> None:
        done: set[int] = set()
        while True:  # one that is not stopped yet may fork
            new = [pid for pid in descendants(os.getpid()) if pid not in done]
            if not new:
                return
            for pid in new:
                send(pid, SIGSTOP)
                done.add(pid)

    def _do_cont(self) -> None:
        for pid in descendants(os.getpid()):
            send(pid, SIGCONT)

    def _do_state(self) -> None:
        self.unwritten = True
        self._write_state()

    def _write_state(self) -> None:
        record = {"version": 1, "job_id": self.launch["job_id"], "incarnation": self.launch["incarnation"]}
        record.update(self.conduct.record())
        record.update(supervisor=os.getpid(), group=self.group, pids=self.pids, boot=self.boot)
        record.update(wall_s=time.time(), at_s=boot_s())
        try:
            # Only the result must survive a power cut: after one, nothing else of it is true any more.
            self._replace("state.json", dump(record) + "\n", durable=record["state"] == "exited")
        except OSError:
            if os.path.exists(self.attempt):
                self.retry_at = boot_s() + 0.5  # disk full: the result stays in memory until there is room
                return
            # The folder was removed: nobody will ever ask for the result.
        self.unwritten = False
        self.retry_at = None
        self._poke()

    def _replace(self, name: str, text: str, durable: bool) -> None:
        fd = os.open(f".{name}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=self.folder)
        try:
            data = text.encode()
            while data:
                data = data[os.write(fd, data) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(f".{name}.new", name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        if durable:
            os.fsync(self.folder)

    def _poke(self) -> None:
        """Tell the agent, if one listens; it looks by itself when it starts."""
        try:
            fd = os.open(self.launch["poke"], os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.write(fd, self.name.encode() + b"\n")
        except OSError:
            pass
        finally:
            os.close(fd)

    def _look_at_logs(self, now: float) -> None:
        """While something is written, at the pace that the limit needs; else the kernel tells of the next write."""
        if self.conduct.state == "exited" or (self.look_at is not None and now < self.look_at):
            return
        waits = [wait for wait in [log.look(now) for log in self.logs] if wait is not None]
        if waits:
            self.look_at = now + min(waits)
            return
        try:
            fcntl.fcntl(self.folder, fcntl.F_NOTIFY, fcntl.DN_MODIFY)  # one SIGIO at the next write in the folder
            self.look_at = None
        except OSError:
            self.look_at = now + 5.0


def nursery() -> None:
    """Read paths of attempts, each ended by NUL; fork a supervisor for each and answer with its pid."""
    boot_id()  # read once for all
    gc.freeze()  # what is there now stays shared with the children
    signal(SIGCHLD, SIG_IGN)  # the kernel reaps them
    rest = b""
    while True:
        piece = os.read(0, 65536)
        if not piece:
            return  # the agent is gone; the next one has a nursery of its own
        *paths, rest = (rest + piece).split(b"\0")
        for path in paths:
            pid = os.fork()
            if pid == 0:
                leave_nursery(path.decode("utf-8", "surrogateescape"))
            try:
                os.write(1, b"%d\n" % pid)
            except OSError:
                return  # gone just now


def leave_nursery(attempt: str) -> None:
    """Become a supervisor of its own, with another session and its own output. This does not return."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, 0)
        log = os.open(attempt + "/supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(null)
        os.close(log)
        Supervisor(attempt).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type] - there is one, here
        os._exit(1)
    os._exit(0)


def main(argv: list[str]) -> None:
    if argv[1] == "--nursery":
        nursery()
    else:
        Supervisor(os.path.abspath(argv[1])).run()


if __name__ == "__main__":
    main(sys.argv)
