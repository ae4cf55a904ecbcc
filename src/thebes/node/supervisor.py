"""The parent of a job's ranks on one node. It outlives controller and agent, and writes the result durably.

One process per incarnation and node, so it is small: a script that imports nothing of ours and no module that pulls in
others (`signal`, `json` and `subprocess` would cost 2 MB and 15 ms each time). The first half, `Conduct`, has no I/O:
events go in, instructions come out. The second half carries them out and sleeps in `poll` until the next event or
deadline. `python -I -S supervisor.py ATTEMPT_DIR` supervises one attempt; with `--nursery` it forks a supervisor for
every path it is given, which takes 2 ms and shares most of the memory.

Every process of the job is a descendant of this one, daemons too, since it is a subreaper. Should it be killed, the
kernel kills the ranks (PR_SET_PDEATHSIG) and the agent the rest.
"""

# pathlib and contextlib would be loaded for these alone:
# ruff: noqa: PTH100, PTH110, PTH116, PTH118, PTH208, SIM105
from __future__ import annotations

import errno
import fcntl
import gc
import os
import select
import sys
import time
from _json import encode_basestring_ascii, make_scanner  # what `json` itself is made of, without its `re`
from _signal import (
    SIG_DFL,
    SIG_IGN,
    SIG_SETMASK,
    SIGCHLD,
    SIGCONT,
    SIGHUP,
    SIGINT,
    SIGIO,
    SIGKILL,
    SIGPIPE,
    SIGSTOP,
    SIGTERM,
    SIGUSR1,
    SIGXFSZ,
    pthread_sigmask,
    set_wakeup_fd,
    signal,
)

import ctypes  # isort: skip  (0.4 MB and 3 ms: the only way to prctl)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    Instruction = tuple[Any, ...]

PREEMPTED = 85
FAILING_S = 5.0  # between SIGTERM and SIGKILL for the others, when one rank has failed
TERM_MARGIN_S = 5.0  # SIGTERM so long before the deadline of a notice, or a quarter of the grace if that is less
CHUNK = 256 << 10
LEASE_EVERY_S = 1.0
LEASE_BYTES = 200

# Conduct: what to do when. No I/O ------------------------------------------------------------------------------------


class Conduct:
    """What becomes of one attempt: each event answers with instructions, tuples that begin with what to do.

    ("notice", deadline_s, grace_s)  write the flag file     ("usr1",)  SIGUSR1 to those who catch it, each once
    ("term",) ("kill",)              signal everybody        ("stop",) ("cont",)  freeze and thaw everybody
    ("state",)                       write state.json
    """

    def __init__(self, ranks: Iterable[int], grace_s: float, limit_s: float | None) -> None:
        self.left = set(ranks)  # ranks that have not ended
        self.grace_s = grace_s
        self.limit_s = limit_s
        self.state = "starting"
        self.codes: dict[int, int] = {}
        self.detail = ""
        self.ending = ""  # why it ends: notice, timeout, failing, killed, launch-failed, fence
        self.signalled = False  # we have sent SIGTERM or SIGKILL
        self.started_s: float | None = None
        self.since_s = 0.0  # when the present state began
        self.exited_s: float | None = None
        self.ran_s = 0.0  # up to since_s
        self.term_at: float | None = None
        self.kill_at: float | None = None
        self.usr1_at: float | None = None
        self.kills = 0

    # Time

    def run_s(self, now: float) -> float:
        return self.ran_s + (max(0.0, now - self.since_s) if self.state == "running" else 0.0)

    def _enter(self, state: str, now: float) -> None:
        self.ran_s = self.run_s(now)
        self.state = state
        self.since_s = now

    def limit_at(self) -> float | None:
        if self.state != "running" or self.limit_s is None or self.ending:
            return None
        return self.since_s + self.limit_s - self.ran_s

    def next_s(self) -> float | None:
        """The next instant at which something happens by itself."""
        times = [at for at in (self.limit_at(), self.term_at, self.kill_at, self.usr1_at) if at is not None]
        return min(times) if times and self.state != "exited" else None

    def tick(self, now: float) -> list[Instruction]:
        todo: list[Instruction] = []
        limit_at = self.limit_at()
        if limit_at is not None and limit_at <= now:
            todo += self._notice(now, self.grace_s, "timeout")
        if self.usr1_at is not None and self.usr1_at <= now:
            # Again and again: a program that is still importing gets its handler later.
            self.usr1_at = now + 1.0
            todo.append(("usr1",))
        if self.term_at is not None and self.term_at <= now:
            self.term_at = None
            self.signalled = True
            todo.append(("term",))
        if self.kill_at is not None and self.kill_at <= now:
            todo += self._kill(now)
        return todo

    # Events

    def started(self, now: float) -> list[Instruction]:
        self.started_s = now
        self._enter("running", now)
        return [("state",)]

    def not_started(self, now: float, detail: str) -> list[Instruction]:
        """A rank could not be started: those before it go, and that is the result."""
        self.ending = "launch-failed"
        self.detail = detail
        return self._kill(now)

    def rank_ended(self, now: float, rank: int, code: int) -> list[Instruction]:
        self.left.discard(rank)
        self.codes[rank] = code
        if not self.left:
            self._enter("ending", now)
            self.usr1_at = self.term_at = None
            return self._kill(now)  # whoever is left over: daemons
        if code != 0 and not self.ending:
            self.ending = "failing"
            self.term_at = now
            self.kill_at = now + FAILING_S
            return self._thaw(now)
        return []

    def empty(self, now: float) -> list[Instruction]:
        """No process is left."""
        if self.left and self.ending != "launch-failed":
            return []
        self._enter("exited", now)
        self.exited_s = now
        return [("state",)]

    def command(self, now: float, words: list[str]) -> list[Instruction]:
        """A line of the control FIFO. Repeats are harmless; what cannot be understood is left alone."""
        if self.state in ("exited", "ending") or not words:
            return []
        name, rest = words[0], words[1:]
        if name == "notice":
            try:
                grace_s = max(0.0, float(rest[0])) if rest else self.grace_s
            except ValueError:
                return []
            return self._notice(now, grace_s, "notice")
        if name == "kill":
            self.ending = self.ending if self.ending in ("timeout", "launch-failed") else "killed"
            return self._kill(now)
        if name == "abort":  # another part of the gang could not start
            self.ending = "launch-failed"
            self.detail = " ".join(rest)
            return self._kill(now)
        if name == "fence":  # this node is cut off: others will take the job for lost
            try:
                grace_s = max(0.0, float(rest[0]))
            except (IndexError, ValueError):
                return []
            if self.ending in ("", "notice"):
                self.ending = "fence"
                self.detail = " ".join(rest[1:])
            if not grace_s:
                return self._kill(now)
            return self._notice(now, grace_s, "fence")
        if name == "term":
            if self.ending not in ("timeout", "launch-failed"):
                self.ending = "killed"
            try:
                grace_s = max(0.0, float(rest[0])) if rest else FAILING_S
            except ValueError:
                return []
            self.term_at = now
            self._kill_by(now + grace_s)
            return self._thaw(now)
        if name in ("freeze", "park"):
            if self.state == "running" and not self.ending:
                self._enter("frozen" if name == "freeze" else "suspended", now)
                return [("stop",), ("state",)] if name == "freeze" else [("state",)]
            return []
        if name == "thaw" and self.state == "frozen":
            return self._thaw(now)
        if name == "unpark" and self.state == "suspended":
            self._enter("running", now)
            return [("state",)]
        return []

    # Steps

    def _notice(self, now: float, grace_s: float, why: str) -> list[Instruction]:
        if self.ending in ("failing", "killed", "launch-failed"):
            return []
        deadline = now + grace_s
        if self.ending and self.kill_at is not None and self.kill_at <= deadline:
            return []  # told before; a repeat gives no more time
        self.ending = self.ending or why
        self.kill_at = deadline
        self.term_at = deadline - min(TERM_MARGIN_S, grace_s / 4)
        self.usr1_at = now + 1.0
        return [*self._thaw(now), ("notice", deadline, grace_s), ("usr1",)]

    def _thaw(self, now: float) -> list[Instruction]:
        if self.state != "frozen":
            return []
        self._enter("running", now)
        return [("cont",), ("state",)]

    def _kill_by(self, at: float) -> None:
        self.kill_at = at if self.kill_at is None else min(self.kill_at, at)

    def _kill(self, now: float) -> list[Instruction]:
        """Everybody, and again until nobody is left: a process may fork while it is being killed."""
        self.signalled = self.signalled or bool(self.left)
        self.term_at = self.usr1_at = None
        self.kill_at = now + min(1.0, 0.02 * 2**self.kills)
        self.kills += 1
        return [("kill",)]

    # Result

    def cause(self) -> str:
        codes = set(self.codes.values())
        if self.ending == "launch-failed":
            return "launch-failed"
        if codes <= {0} and not self.left:
            return "exit"
        if self.ending == "timeout":
            return "timeout"
        if self.ending == "fence" and not codes <= {0, PREEMPTED}:
            return "lost"
        if self.ending in ("notice", "killed") and self.signalled and not codes <= {0, PREEMPTED}:
            return "killed"
        return "exit"

    def record(self) -> dict[str, Any]:
        """What goes into state.json, beside the pids."""
        found: dict[str, Any] = {
            "state": "running" if self.state == "ending" else self.state,
            "started_s": self.started_s,
            "since_s": self.since_s,
            "run_s": self.ran_s,
        }
        if self.state == "exited":
            found.update(exited_s=self.exited_s, cause=self.cause(), codes=self.codes, detail=self.detail)
        return found


# Log limit: how much to cut, and when to look ------------------------------------------------------------------------


class LogWatch:
    """Keeps one log below its limit: head and tail stay, one line in between says how many bytes were dropped."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self.path = path
        self.limit = max(limit_bytes, 16 << 10)
        self.head_end = -1  # where the head ends, once cut
        self.tail_from = -1  # where the tail begins: after the line between them
        self.dropped = 0
        self.size = 0
        self.looked_s: float | None = None
        self.rate = 0.0

    def look(self, now: float) -> float | None:
        """Cut if it is too long. Seconds until the next look, or None when nothing was written since the last one."""
        try:
            size = os.stat(self.path).st_size
        except OSError:
            return None
        grown = size - self.size
        if self.looked_s is not None and now > self.looked_s:
            self.rate = max(0.0, grown / (now - self.looked_s))
        quiet = grown == 0
        self.looked_s = now
        if size > self.limit:
            try:
                size = self.cut()
            except OSError:
                pass  # no room, or it is gone: next time
        self.size = size
        if quiet:
            return None
        # It may overshoot by half its limit, at four times the rate seen and at 1 MB/s at the least.
        return min(2.0, max(0.02, (1.5 * self.limit - size) / (4 * self.rate + 1e6)))

    def cut(self) -> int:
        """Replace the middle in place, in small pieces; the writers go on appending meanwhile. The new size."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if self.head_end < 0:
                self.head_end = self.tail_from = _after_newline(fd, self.limit // 4)
            source = max(self.tail_from, _after_newline(fd, size - self.limit // 2))
            dropped = self.dropped + source - self.tail_from
            line = b"\n[thebes: %d bytes dropped here: the log limit is %d bytes]\n" % (dropped, self.limit)
            target = self.head_end
            os.pwrite(fd, line, target)
            target += len(line)
            tail_from = target
            last = size + self.limit // 4  # one who writes faster than we copy is not followed for ever
            while source < last:
                piece = os.pread(fd, CHUNK, source)
                if not piece:
                    break
                os.pwrite(fd, piece, target)
                source += len(piece)
                target += len(piece)
            os.ftruncate(fd, target)
            self.dropped = dropped
            self.tail_from = tail_from
            return target
        finally:
            os.close(fd)


def _after_newline(fd: int, offset: int) -> int:
    """The first beginning of a line at or after the offset, if there is one near."""
    at = os.pread(fd, 4096, max(0, offset)).find(b"\n")
    return max(0, offset) + at + 1


# Processes -----------------------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """All descendants that are not zombies, parents first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        parent = queue.pop(0)
        for child in children(parent):
            if child not in found:
                queue.append(child)
                found.append(child)
    return [child for child in found if _status(child, b"State:")[:1] not in (b"", b"Z")]


def children(pid: int) -> list[int]:
    base = f"/proc/{pid}/task"
    try:
        threads = os.listdir(base)
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        try:
            found += [int(word) for word in _read(f"{base}/{thread}/children").split()]
        except FileNotFoundError:
            if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
                return _children_by_scan(pid)  # a kernel without CONFIG_PROC_CHILDREN
        except OSError:
            pass
    return found


def _children_by_scan(pid: int) -> list[int]:
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and _status(int(name), b"PPid:") == b"%d" % pid:
            found.append(int(name))
    return found


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal. To one that has none, most signals are deadly."""
    mask = _status(pid, b"SigCgt:")
    return bool(mask) and bool(int(mask, 16) >> (number - 1) & 1)


def _status(pid: int, name: bytes) -> bytes:
    try:
        for line in _read(f"/proc/{pid}/status").splitlines():
            if line.startswith(name):
                return line[len(name) :].strip()
    except OSError:
        pass
    return b""


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces: list[bytes] = []
        while True:
            piece = os.read(fd, 65536)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
    finally:
        os.close(fd)


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass  # gone, or not ours to signal


# JSON, as much as is needed ------------------------------------------------------------------------------------------


class _Plain:
    strict = True
    object_hook = object_pairs_hook = parse_constant = None
    parse_float = float
    parse_int = int


def parse(text: str) -> Any:
    return make_scanner(_Plain)(text, 0)[0]


def dump(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dump(str(key))}: {dump(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


# Starting a rank -----------------------------------------------------------------------------------------------------

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


class NotStarted(Exception):  # noqa: N818 - reads as what it says
    """A rank could not be started; the text says what to do."""


def start_rank(libc: Any, launch: dict[str, Any], env: dict[str, str], group: int, log_path: str) -> int:
    """Fork and exec one rank; its pid. The exec has happened when this returns."""
    parent = os.getpid()
    told, tell = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(told)
        os.close(tell)
        raise NotStarted(explain("fork", error.errno, launch, log_path)) from None
    if pid == 0:
        stage, number = "exec", 0
        try:
            os.setpgid(0, group)
            libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(127)
            for one in (SIGPIPE, SIGXFSZ, SIGCHLD, SIGIO, SIGHUP, SIGINT, SIGTERM):
                signal(one, SIG_DFL)
            pthread_sigmask(SIG_SETMASK, ())
            stage = "log"
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            stage = "chdir"
            os.chdir(launch["workdir"])
            stage = "exec"
            number = execute(launch["command"], env)
        except OSError as error:
            number = error.errno
        except BaseException:
            number = errno.EINVAL
        os.write(tell, b"%s %d" % (stage.encode(), number))
        os._exit(127)
    os.close(tell)
    try:
        os.setpgid(pid, group or pid)  # both sides do it, so that neither has to wait
    except OSError:
        pass
    answer = os.read(told, 100)
    os.close(told)
    if answer:
        stage, number = answer.decode().split()
        raise NotStarted(explain(stage, int(number), launch, log_path))
    return pid


def execute(command: list[str], env: dict[str, str]) -> int:
    """Become the program, looked for in the job's own PATH; the error number if that cannot be.

    os.execvpe does the same after importing `warnings`, which takes longer than all the rest.
    """
    program = command[0]
    folders = [""] if "/" in program else env.get("PATH", os.defpath).split(":")
    worst = errno.ENOENT
    for folder in folders:
        try:
            os.execve(os.path.join(folder, program), command, env)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                worst = error.errno
    return worst


def explain(stage: str, number: int, launch: dict[str, Any], log_path: str) -> str:
    """What went wrong and what to do about it."""
    reason = os.strerror(number)
    program, workdir, node = launch["command"][0], launch["workdir"], launch["node"]
    if stage == "chdir":
        what = f"the work directory {workdir} cannot be entered on node {node} ({reason}): "
        if number == errno.ENOENT:
            return what + "create it, or submit with another --workdir"
        if number == errno.ENOTDIR:
            return what + "name a directory with --workdir"
        return what + "the user who runs Thebes needs the right to enter it"
    if stage == "log":
        return f"the log {log_path} cannot be written ({reason}): free space on node {node} and requeue the job"
    if stage == "fork" or number in (errno.EAGAIN, errno.ENOMEM):
        return f"node {node} has no room for another process ({reason}): look at `ulimit -u` and at its memory"
    if number == errno.ENOENT and "/" in program and os.path.exists(os.path.join(workdir, program)):
        return f"'{program}' names an interpreter in its first line that node {node} does not have: correct it"
    if number in (errno.ENOENT, errno.ENOTDIR):
        where = "does not exist" if "/" in program else "was not found in PATH"
        return f"the program '{program}' {where} on node {node}: give its full path, or set PATH with --env"
    if number == errno.EACCES:
        return f"'{program}' may not be executed ({reason}): try `chmod +x`, or start it with its interpreter"
    if number == errno.ENOEXEC:
        return f"'{program}' is not a program: begin it with a line like #!/bin/bash, or start it with its interpreter"
    if number == errno.E2BIG:
        return f"command and environment of '{program}' are too long together: put values into a file"
    return f"'{program}' cannot be started on node {node}: {reason}"


# The process ---------------------------------------------------------------------------------------------------------


def boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Supervisor:
    """Carries out what `Conduct` says."""

    def __init__(self, attempt: str) -> None:
        self.attempt = attempt
        self.launch: dict[str, Any] = parse(_read(attempt + "/launch.json").decode())
        self.name = f"{self.launch['job_id']}.{self.launch['incarnation']}"
        self.ranks = [one["rank"] for one in self.launch["ranks"]]
        self.conduct = Conduct(self.ranks, self.launch["grace_s"], self.launch["limit_s"])
        self.pids: dict[int, int] = {}
        self.group = 0
        self.told: set[int] = set()  # who has had SIGUSR1
        self.unwritten = False  # a state that could not be written yet
        self.retry_at: float | None = None
        self.boot = _read("/proc/sys/kernel/random/boot_id").decode().strip()
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
        signal(SIGCHLD, lambda *_: None)
        signal(SIGIO, lambda *_: None)
        signal(SIGTERM, self._on_term)
        signal(SIGINT, self._on_term)
        signal(SIGHUP, lambda *_: None)
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
                words = os.pread(fd, LEASE_BYTES, 0).split()
            finally:
                os.close(fd)
            if words[0].decode() == self.boot:
                self.lease_over_at = float(words[1])
        except (OSError, ValueError, IndexError):
            pass  # what we have read last holds
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
                # Whoever descends from us has a living ancestor that is our child, so there is nobody.
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
            if pid not in self.told and catches(pid, SIGUSR1):
                self.told.add(pid)
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
    """A supervisor of its own: another session, its own output. Does not return."""
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
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def main(argv: list[str]) -> None:
    if argv[1] == "--nursery":
        nursery()
    else:
        Supervisor(os.path.abspath(argv[1])).run()


if __name__ == "__main__":
    main(sys.argv)
