"""The supervisor of a job's ranks on one node of a Slurm cluster: Slurm starts it there, and it calls the controller.

    python -I -S step.py NODES_DIR JOB.INCARNATION LAUNCH  (one task per node under one srun; SLURMD_NODENAME which)

It is `supervisor.py` with a line home in place of an agent beside it: one process per node and incarnation, so it is
small, single-threaded, and imports nothing of ours but its three neighbours in the same folder. The engine has written
`launch.json` and `step.json` into the attempt's folder, which all nodes share; nothing runs before the controller says
`start`. It keeps a lease (`lease.py`): cut off from the controller and from slurmctld, it stops the ranks, so that they
may be started elsewhere. When Slurm itself ends the job (time limit, preemption by the site, scancel), the ranks are
asked to save first.
"""

# pathlib and contextlib would be loaded for these alone:
# ruff: noqa: PTH100, PTH110, PTH116, PTH118, PTH120, PTH123, SIM105
from __future__ import annotations

import _socket
import errno
import fcntl
import os
import select
import sys
import time
from _json import encode_basestring_ascii
from _signal import ITIMER_VIRTUAL, SIGKILL, SIGTERM, SIGVTALRM, setitimer, signal

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import seal
import supervisor
from lease import Lease
from supervisor import boot_s, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Message = dict[str, Any]

SILENT_S = 12.0  # then he is gone, or another leads
CONNECT_S = 3.0
SHAKE_S = 10.0
AGAIN_FIRST_S, AGAIN_LAST_S = 0.1, 1.0
RESOLVE_AGAIN_S = 30.0  # a name is asked for again after so long without success; asking may block
LOOK_EVERY_S = 1.0
LOOK_AT_NEW_S = 0.1
LINGER_S = 5.0  # for the controller to hear how it ended
HEAD_S = 5.0  # slurmctld answers within this, or not at all
SLURM_TERM_S = 1.0  # SIGTERM may reach a rank before it reaches us: a slow machine needs a moment between the two
LINE_BYTES = 16 << 20
RATE_WINDOW_S = 30.0
SMALL_BYTES = 64 << 10
LOG_PIECE_BYTES = 1 << 20
PATTERN_S = 0.2
FIRST_PORT, LAST_PORT = 20_000, 32_000
# What a launcher around us may have set: the engine sets its own.
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def dump(value: Any) -> str:
    """JSON, with lists, which `supervisor.dump` has no need of."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode_basestring_ascii(str(key))}:{dump(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(dump(item) for item in value) + "]"
    return supervisor.dump(value)


def read_object(path: str) -> Message:
    """A small JSON file; one that is missing or spoilt is taken as empty."""
    try:
        with open(path, "rb") as file:
            found = parse(file.read(SMALL_BYTES).decode())
    except (OSError, ValueError, StopIteration, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# The line home -------------------------------------------------------------------------------------------------------


class Line:
    """Calls one controller after another until one opens the door and proves that it knows the key."""

    def __init__(
        self, who: str, key: bytes, homes: list[str], homes_file: str, heard: Callable[[Message], None]
    ) -> None:
        self.who, self.key, self.homes, self.homes_file, self.heard = who, key, homes, homes_file, heard
        self.state = "away"  # connecting, shaking, talking
        self.socket: Any = None
        self.seal: Any = None
        self.rest = b""
        self.unsent = b""
        self.turn = 0
        self.pause_s = AGAIN_FIRST_S
        self.dial_at = 0.0
        self.give_up_at = 0.0
        self.epoch = 0  # the newest leader heard of
        self.nonce = ""
        self.trouble = ""
        self.ever = False  # whether a controller has ever opened
        self.known: dict[str, tuple[Any, ...]] = {}  # address of each home, once found
        self.resolve_at: dict[str, float] = {}

    def events(self) -> int:
        wants_out = self.state == "connecting" or bool(self.unsent)
        return select.POLLIN | (select.POLLOUT if wants_out else 0)

    def next_s(self) -> float | None:
        return self.dial_at if self.state == "away" else self.give_up_at

    def go_on(self, now: float, ready: int) -> None:
        """Whatever can be done now without waiting."""
        try:
            if self.state == "away":
                if now >= self.dial_at:
                    self._dial(now)
                return
            if now >= self.give_up_at and not ready:
                # A controller says something every few seconds. One whose machine is gone does not even hang up.
                raise OSError(errno.ETIMEDOUT, "no answer")
            if self.state == "connecting":
                if ready:
                    self._connected(now)
                return
            if ready & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read(now)
            self._send()
        except (OSError, ValueError, StopIteration, KeyError, TypeError) as error:
            self.hang_up(now, str(error) or type(error).__name__)

    def _dial(self, now: float) -> None:
        told = read_object(self.homes_file).get("homes")
        if isinstance(told, list) and told:
            self.homes = [str(one) for one in told]
        if not self.homes:
            self.dial_at = now + AGAIN_LAST_S
            return
        home = self.homes[self.turn % len(self.homes)]
        self.turn += 1
        family, address = self._resolve(home, now)
        self.socket = _socket.socket(family, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC)
        self.socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self.state, self.give_up_at = "connecting", now + CONNECT_S
        try:
            self.socket.connect(address)
        except BlockingIOError:
            return
        self._connected(now)

    def _resolve(self, home: str, now: float) -> tuple[Any, ...]:
        known = self.known.get(home)
        if known is not None and now < self.resolve_at[home]:
            return known
        if known is None and now < self.resolve_at.get(home, 0.0):
            raise OSError(f"{home} is not known")
        self.resolve_at[home] = now + RESOLVE_AGAIN_S
        host, _, port = home.rpartition(":")
        try:
            found = _socket.getaddrinfo(host.strip("[]"), int(port), 0, _socket.SOCK_STREAM)[0]
        except OSError:
            if known is None:
                raise
            return known
        self.known[home] = (found[0], found[4])
        return self.known[home]

    def _connected(self, now: float) -> None:
        trouble = self.socket.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
        if trouble:
            raise OSError(trouble, os.strerror(trouble))
        self.nonce = os.urandom(seal.NONCE_BYTES).hex()
        self.state, self.give_up_at = "shaking", now + SHAKE_S
        self.unsent = dump({"thebes": seal.VERSION, "who": self.who, "nonce": self.nonce}).encode() + b"\n"
        self._send()

    def _read(self, now: float) -> None:
        while True:
            try:
                piece = self.socket.recv(65536)
            except BlockingIOError:
                break
            if not piece:
                raise OSError("hung up")
            self.rest += piece
            if len(self.rest) > LINE_BYTES:
                raise ValueError("too long a line")
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            if self.state == "shaking":
                self._shake_hands(parse(line.decode()), now)
            elif self.state == "talking":
                self.give_up_at = now + SILENT_S
                self.heard(parse(self.seal.unwrap(line).decode()))

    def _shake_hands(self, answer: Message, now: float) -> None:
        shaken = seal.check_door(self.key, self.who, self.nonce, answer)
        if answer["epoch"] < self.epoch:
            raise ValueError("a leader of the past")
        self.epoch = answer["epoch"]
        self.unsent += dump({"proof": shaken.caller_proof}).encode() + b"\n"
        self.seal = seal.Seal(shaken.session, is_door=False)
        self.state, self.pause_s, self.give_up_at = "talking", AGAIN_FIRST_S, now + SILENT_S
        self.ever = True

    def say(self, message: Message) -> None:
        if self.state == "talking":
            self.unsent += self.seal.wrap(dump(message).encode())

    def _send(self) -> None:
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            if len(self.unsent) > LINE_BYTES:
                raise OSError("it does not listen") from None

    def hang_up(self, now: float, why: str) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket = self.seal = None
        if not self.ever and self.homes:  # the engine reads this when it has waited in vain
            told = f"{self.homes[(self.turn - 1) % len(self.homes)]}: {why}"
            if told != self.trouble:
                self.trouble = told
                os.write(2, (told + "\n").encode())
        self.state, self.rest, self.unsent = "away", b"", b""
        # Every home is tried before there is a pause.
        last = self.turn % max(1, len(self.homes)) == 0
        self.dial_at = now + (self.pause_s if last else 0.0)
        self.pause_s = min(AGAIN_LAST_S, 2 * self.pause_s) if last else self.pause_s


# Steps from log lines ------------------------------------------------------------------------------------------------


class LogSteps:
    """Reads step numbers by the job's own pattern, for scripts that do not import `thebes.job`."""

    def __init__(self, path: str, pattern: str) -> None:
        import re  # 1 MB: only jobs with a pattern pay for it

        self.path, self.pattern = path, re.compile(pattern)
        self.rest, self.offset = b"", 0

    def newest(self) -> int | None:
        """The last step in what was written since the last call. TimeoutError when the pattern takes too long."""
        try:
            size = os.stat(self.path).st_size
            if size == self.offset:
                return None
            with open(self.path, "rb") as file:
                file.seek(min(self.offset, size))
                data = file.read(LOG_PIECE_BYTES)
                self.offset = file.tell()
        except OSError:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.rest = self.rest[-4096:]
        found = None
        before = signal(SIGVTALRM, _too_slow)
        setitimer(ITIMER_VIRTUAL, PATTERN_S)
        try:
            for line in lines:
                match = self.pattern.search(line[:4096].decode("utf-8", "replace"))
                if match:
                    try:
                        found = int(float((match.group(1) or "").replace(",", "").replace("_", "")))
                    except (ValueError, OverflowError, IndexError):
                        pass
        finally:
            setitimer(ITIMER_VIRTUAL, 0)
            signal(SIGVTALRM, before)
        return found


def _too_slow(*_: object) -> None:
    raise TimeoutError


# The process ---------------------------------------------------------------------------------------------------------


class Refused(Exception):  # noqa: N818 - reads as what it says
    """The engine is told why."""


class Step(supervisor.Supervisor):
    """One attempt on one node, with a line home."""

    def __init__(self, attempt: str, launch: str = "") -> None:
        super().__init__(attempt)
        self.settings = read_object(attempt + "/step.json")
        self.node: str = self.launch["node"]
        self.line = Line(
            f"step:{self.name}:{self.node}:{launch}",
            bytes.fromhex(self.settings["key"]),
            list(self.settings["homes"]),
            self.settings["homes_file"],
            self._heard,
        )
        now = boot_s()
        self.lease = Lease(float(self.settings["lease_s"]), now)
        self.start_by: float | None = now + float(self.settings["start_within_s"])
        self.listening = False  # the controller has said hello
        self.started = False
        self.acknowledged_end = False
        self.leave_at: float | None = None
        self.port_socket: Any = None
        self.head_pid = 0
        self.head_fd = -1
        self.head_said = b""
        self.head_asked_s = 0.0
        self.head_until = 0.0
        self.look_files_at = float("inf")
        self.look_pause_s = LOOK_AT_NEW_S
        self.looked_ns = 0
        self.last_told: Message = {}
        self.rate: list[tuple[float, int]] = []
        self.steps: LogSteps | None = None
        self.first_step: tuple[int, float] | None = None

    # Life

    def run(self) -> None:
        self._take_lock()
        if os.path.exists(self.attempt + "/state.json"):
            return
        self._prepare()
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        registered: dict[int, int] = {}
        while True:
            self._register(poll, registered)
            ready = dict(poll.poll(self._sleep_ms()))
            self._drain_wake()
            self._keep_lease(boot_s())  # first: we may have been frozen for longer than it lasts
            line_fd = self.line.socket.fileno() if self.line.socket is not None else -1
            self.line.go_on(boot_s(), ready.get(line_fd, 0))
            if self.head_pid:
                self._hear_head(ready)
            if self.started:
                self._supervise()
            elif self.asked_to_end:
                self._never_started("Slurm ended its job before it had started")
            self._keep_lease(boot_s())
            if self._may_leave(boot_s()):
                self._say_last_words()
                return

    def _take_lock(self) -> None:
        """Held to the end. Not every shared file system has locks; Slurm starts only one of us anyway."""
        self.lock_fd = os.open(self.attempt + "/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"{self.name} is supervised by another process already") from None
        except OSError:
            pass

    def _open_control(self) -> None:
        """Orders come by the line. And without a blank in our name: Slurm would not find us to signal us.

        (proctrack/linuxproc reads /proc/PID/stat word by word.)
        """
        self.libc.prctl(supervisor.PR_SET_NAME, b"thebes-" + self.name.encode(), 0, 0, 0)

    def _register(self, poll: Any, registered: dict[int, int]) -> None:
        wanted: dict[int, int] = {}
        if self.line.socket is not None:
            wanted[self.line.socket.fileno()] = self.line.events()
        if self.head_fd >= 0:
            wanted[self.head_fd] = select.POLLIN
        for fd in [one for one in registered if one not in wanted]:
            del registered[fd]
            try:
                poll.unregister(fd)
            except (KeyError, OSError):
                pass
        for fd, events in wanted.items():
            poll.register(fd, events)  # again, too: a closed number may be another's by now
            registered[fd] = events

    def _sleep_ms(self) -> float | None:
        now = boot_s()
        times = [self.lease.next_s(now), self.line.next_s(), self.leave_at]
        times += [self.start_by if not self.started else None, self.head_until if self.head_pid else None]
        if self.started and self.conduct.state != "exited":
            times += [self.conduct.next_s(), self.look_at, self.look_files_at]
        if self.unwritten:
            times.append(self.retry_at)
        known = [at for at in times if at is not None]
        return max(0.0, min(known) - now) * 1000 + 1

    def _supervise(self) -> None:
        now = boot_s()
        for words in self._commands():
            self._do(self.conduct.command(now, words))
        if self.conduct.state != "exited":
            self._wait_for_slurm()
            for words in self._commands():
                self._do(self.conduct.command(now, words))
            self._reap()
            self._do(self.conduct.tick(boot_s()))
            self._look_at_logs(boot_s())
            self._look_at_files(boot_s())
        if self.unwritten and self.retry_at is not None and boot_s() >= self.retry_at:
            self._write_state()

    def _commands(self) -> list[list[str]]:
        """SIGTERM comes from Slurm: its time limit, a preemption by the site, somebody's scancel."""
        if not self.asked_to_end:
            return []
        self.asked_to_end = False
        grace_s = float(self.settings.get("term_grace_s") or 0.0)
        return [["fence", repr(grace_s), "Slurm", "ended", "its", "job", os.environ.get("SLURM_JOB_ID", "")]]

    def _wait_for_slurm(self) -> None:
        """A rank that was ended by a signal not of ours may be Slurm's doing: then we get one, too, in a moment."""
        if self.conduct.ending or self.conduct.signalled:
            return
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            return
        if found is None or found.si_code == os.CLD_EXITED or found.si_status not in (SIGTERM, SIGKILL):
            return
        until = boot_s() + SLURM_TERM_S
        while not self.asked_to_end and boot_s() < until:
            time.sleep(0.01)

    def _may_leave(self, now: float) -> bool:
        if self.started and self.conduct.state != "exited":
            return False
        if not self.started:
            if self.start_by is not None and now >= self.start_by:
                self._never_started("nobody has told it to start in time")
            if self.conduct.state != "exited":
                return False
        if self.unwritten:
            return False
        if self.leave_at is None:
            self.leave_at = now + LINGER_S
        return self.acknowledged_end or self.line.state != "talking" or now >= self.leave_at

    def _say_last_words(self) -> None:
        self.line.go_on(boot_s(), 0)
        if self.head_pid:
            supervisor.send(self.head_pid, SIGKILL)

    # Start

    def _start_now(self, request: Message) -> Message:
        if self.started or self.conduct.state == "exited":
            return self._report()
        self._release_port()
        sentinel = str(self.settings["unknown_port"])
        address, port = str(request["master_addr"]), str(request["master_port"])
        swap = {sentinel: port, str(self.settings["unknown_address"]): address}
        self.launch["command"] = [swap.get(word, word) for word in self.launch["command"]]
        env = {key: value for key, value in os.environ.items() if not key.startswith("THEBES_") and key not in OWN}
        env.update(self.launch["env"])
        env.update(MASTER_ADDR=address, MASTER_PORT=port)
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        if self.settings.get("visible") == "slurm" and given:
            env["CUDA_VISIBLE_DEVICES"] = given
        self.launch["env"] = env
        pattern, ranks = self.launch.get("progress_pattern"), self.launch["ranks"]
        if pattern and ranks:
            self.steps = LogSteps(f"{self.attempt}/rank-{ranks[0]['rank']}.log", pattern)
        self.started, self.start_by = True, None
        self._start()
        self.look_files_at = boot_s() + LOOK_AT_NEW_S
        self._look_at_logs(boot_s())
        return self._report()

    def _never_started(self, why: str, cause: str = "lost") -> None:
        """That is the result; only `launch-failed` is the job's own fault."""
        if self.conduct.state == "exited":
            return
        self.asked_to_end = False
        self.start_by = None
        self._release_port()
        self.conduct.ending, self.conduct.detail = "launch-failed", why
        self.conduct.cause = lambda: cause
        self.conduct.left = set()
        self._do(self.conduct.empty(boot_s()))

    def _free_port(self) -> int:
        """A port that nobody listens on; held until the ranks start, so that no other step is given it."""
        self._release_port()
        for _ in range(100):
            port = FIRST_PORT + int.from_bytes(os.urandom(4), "big") % (LAST_PORT - FIRST_PORT)
            probe = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
            try:
                probe.bind(("", port))
            except OSError:
                probe.close()
                continue
            self.port_socket = probe
            return port
        raise Refused(f"no free port between {FIRST_PORT} and {LAST_PORT} for MASTER_PORT")

    def _release_port(self) -> None:
        if self.port_socket is not None:
            self.port_socket.close()
            self.port_socket = None

    # Requests

    def _heard(self, request: Message) -> None:
        answer: Message = {"id": request.get("id")}
        try:
            answer["result"] = self._answer(str(request.get("op")), request)
        except Refused as error:
            answer.update(error="refused", detail=str(error))
        except Exception as error:
            answer.update(error="failed", detail=f"{type(error).__name__}: {error}")
        self.line.say(answer)
        if request.get("op") == "hello":
            self.listening = True

    def _answer(self, op: str, request: Message) -> Any:
        now = boot_s()
        if op == "ping":
            heard_s = request.get("heard_s")  # until when it has heard of us, by our own clock
            if isinstance(heard_s, int | float):
                self.lease.renew(min(now, float(heard_s)))
            return {"boot_s": now}
        if op == "hello":
            self.lease.greet()
            self.line.homes = [str(one) for one in request.get("homes") or self.line.homes]
            self.lease.lease_s = float(request.get("lease_s") or self.lease.lease_s)
            facts = {"name": self.node, "gpus": [], "mechanisms": ["checkpoint"]}
            return {"facts": facts, "reports": [self._report()], "boot": self.boot, "boot_s": now}
        if op == "list":
            return [self._report()]
        if op == "homes":
            self.line.homes = [str(one) for one in request["homes"]]
            return None
        if op == "park":
            self.lease.park(float(request["for_s"]))
            return None
        if op == "done":  # the controller has heard how it ended
            self.acknowledged_end = True
            return None
        if op == "port":
            return self._free_port()
        if op == "start":
            return self._start_now(request)
        if op == "kill":
            return self._kill(now, " ".join(str(request.get("because") or "").split()))
        if not self.started or self.conduct.state == "exited":
            raise Refused(f"job {self.launch['job_id']} does not run on node {self.node}")
        return self._order(op, request, now)

    def _kill(self, now: float, why: str) -> None:
        if not self.started:
            self._never_started(why or "it was stopped before it had started", "launch-failed" if why else "killed")
        else:
            self._do(self.conduct.command(now, ["abort", why] if why else ["kill"]))

    def _order(self, op: str, request: Message, now: float) -> None:
        if op == "notice":
            self._do(self.conduct.command(now, ["notice", repr(float(request["grace_s"]))]))
        elif op == "terminate":
            self._do(self.conduct.command(now, ["term", repr(float(request["grace_s"]))]))
        elif op == "fence":
            self._do(self.conduct.command(now, ["fence", repr(float(request["grace_s"])), str(request["because"])]))
        else:
            raise ValueError(f"what is '{op}'?")

    # Reports

    def _poke(self) -> None:
        """The state has changed, and is in its file."""
        self.rate.clear()
        if self.conduct.state == "exited":
            self._read_steps()
        self._tell()

    def _tell(self) -> None:
        self.last_told = self._report()
        if self.listening:
            self.line.say({"push": "report", "report": self.last_told})

    def _report(self) -> Message:
        now = boot_s()
        progress, checkpoint = read_object(self.attempt + "/progress"), read_object(self.attempt + "/checkpoint.json")
        step, step_s = _whole(progress.get("step")), _number(progress.get("at_s"))
        first_step, first_s = _whole(progress.get("first_step")), _number(progress.get("first_at_s"))
        state = self.conduct.record()
        path = checkpoint.get("path")
        return {
            "job_id": self.launch["job_id"],
            "incarnation": self.launch["incarnation"],
            "node": self.node,
            "state": state["state"],
            "cause": state.get("cause", ""),
            "detail": state.get("detail", ""),
            "codes": {str(rank): code for rank, code in state.get("codes", {}).items()},
            "started_s": self.conduct.started_s,
            "exited_s": self.conduct.exited_s,
            "run_s": self.conduct.run_s(now),
            "acknowledged": os.path.exists(self.attempt + "/ack"),
            "checkpoint_step": _whole(checkpoint.get("step")),
            "checkpoint_path": path if isinstance(path, str) else None,
            "checkpoint_s": _number(checkpoint.get("at_s")),
            "step": step,
            "step_s": step_s,
            "first_step_s": first_s,
            "steps_per_s": self._rate(step, step_s, first_step, first_s),
        }

    def _rate(self, step: int | None, step_s: float | None, first: int | None, first_s: float | None) -> float | None:
        """Steps per second over the last half minute; begins anew whenever the job was stopped."""
        seen = self.rate
        if step is not None and step_s is not None and (not seen or step_s > seen[-1][0] or step < seen[-1][1]):
            if seen and step < seen[-1][1]:
                seen.clear()  # it went back to a checkpoint
            seen.append((step_s, step))
            while len(seen) > 2 and seen[1][0] < step_s - RATE_WINDOW_S:
                del seen[0]
        if len(seen) >= 2:
            return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
        if step is None or step_s is None or first is None or first_s is None or step_s <= first_s:
            return None
        return (step - first) / (step_s - first_s)

    def _look_at_files(self, now: float) -> None:
        """Has the job written anything for us? More often until its first step, whose time counts for policies."""
        if now < self.look_files_at:
            return
        if self.last_told.get("first_step_s") is None and self.look_pause_s < LOOK_EVERY_S:
            self.look_pause_s *= 1.25
        else:
            self.look_pause_s = LOOK_EVERY_S
        self.look_files_at = now + self.look_pause_s
        self._read_steps()
        try:
            changed_ns = os.stat(self.attempt).st_mtime_ns  # files are renamed into place
        except OSError:
            return
        if changed_ns == self.looked_ns:
            return
        self.looked_ns = changed_ns if time.time_ns() - changed_ns > 50_000_000 else 0
        report = self._report()
        if {**report, "run_s": 0.0} != {**self.last_told, "run_s": 0.0}:
            self.last_told = report
            if self.listening:
                self.line.say({"push": "report", "report": report})

    def _read_steps(self) -> None:
        """Steps from log lines go where those of the library go."""
        if self.steps is None:
            return
        try:
            step = self.steps.newest()
        except TimeoutError:
            self.steps = None
            return
        if step is None:
            return
        now = boot_s()
        self.first_step = self.first_step or (step, now)
        found = {"step": step, "at_s": now, "first_step": self.first_step[0], "first_at_s": self.first_step[1]}
        try:
            self._replace("progress", dump(found), durable=False)
        except OSError:
            pass

    # Lease

    def _keep_lease(self, now: float) -> None:
        verdict = self.lease.verdict(now)
        if verdict == "held":
            return
        if verdict == "ask":
            if not self.head_pid:
                self._ask_head(now)
            return
        silent_s = self.lease.silent_s(now)
        why = f"cut off: no word from the controller for {silent_s:.0f} s"
        if not self.started:
            self._never_started(why)
        elif self.conduct.state != "exited":
            grace_s = min(self.launch["grace_s"], self.lease.notice_grace_s) if verdict == "notice" else 0.0
            if verdict == "notice" or not self.conduct.kills:
                self._do(self.conduct.command(now, ["fence", repr(grace_s), why]))

    def _ask_head(self, now: float) -> None:
        """Does slurmctld still count us among its own? Its answer comes by a pipe."""
        told, tell = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(told)
            os.close(tell)
            return
        if pid == 0:
            try:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 0)
                os.dup2(tell, 1)
                os.dup2(null, 2)
                job = os.environ.get("SLURM_JOB_ID", "0")
                supervisor.execute(["scontrol", "--oneliner", "show", "job", job], dict(os.environ))
            finally:
                os._exit(127)
        os.close(tell)
        os.set_blocking(told, False)
        self.head_pid, self.head_fd, self.head_said = pid, told, b""
        self.head_asked_s = now
        self.head_until = now + min(HEAD_S, self.lease.lease_s / 3)

    def _hear_head(self, ready: dict[int, int]) -> None:
        over = boot_s() >= self.head_until
        if ready.get(self.head_fd):
            try:
                while piece := os.read(self.head_fd, 65536):
                    self.head_said += piece
                over = True
            except BlockingIOError:
                pass
        if not over:
            return
        supervisor.send(self.head_pid, SIGKILL)
        try:
            os.waitpid(self.head_pid, 0)
        except ChildProcessError:
            pass
        os.close(self.head_fd)
        if b"JobState=RUNNING" in self.head_said:
            self.lease.renew(self.head_asked_s)  # not now: we may have been frozen since
        self.head_pid, self.head_fd = 0, -1


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and abs(value) < 2**53 else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 2**53 else None


def main(argv: list[str]) -> None:
    node = os.environ["SLURMD_NODENAME"]
    attempt = os.path.join(os.path.abspath(argv[1]), node, "attempts", argv[2])
    log = os.open(attempt + "/supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    step = Step(attempt, argv[3] if len(argv) > 3 else "")
    os.dup2(log, 1)  # from here on srun hears nothing of us
    os.dup2(log, 2)
    os.close(log)
    step.run()


if __name__ == "__main__":
    main(sys.argv)
