"""The supervisor of a job's ranks on one node of a Slurm cluster: Slurm starts it there, and it calls the controller.

    python -I -S step.py NODES_DIR JOB.INCARNATION LAUNCH  (one task per node under one srun; SLURMD_NODENAME which)

It is `supervisor.py` with a line home in place of an agent beside it: one process per node and incarnation, so it is
small, single-threaded, and loads nothing of ours but the modules that `node/bare.py` lists. The engine has written
`launch.json` and `step.json` into the attempt's folder, which all nodes share; nothing runs before the controller says
`start`. It keeps a lease (`lease.py`): cut off from the controller and from slurmctld, it stops the ranks, so that they
may be started elsewhere. When Slurm itself ends the job (time limit, preemption by the site, scancel), the ranks are
asked to save first.
"""

# pathlib and contextlib would be loaded for these alone:
# ruff: noqa: PTH100, PTH110, PTH116, PTH118, SIM105
from __future__ import annotations

import fcntl
import os
import select
import sys
import time
from _signal import SIGKILL, SIGTERM  # pyright: ignore[reportMissingImports]

if not __package__:  # a script: its neighbours lie below the folder that `node/bare.py` has made
    sys.path.insert(0, os.path.abspath(__file__ + "/../../.."))

from thebes.node.log_steps import LogSteps, TooSlow
from thebes.node.ports import hold_port
from thebes.node.slurm_head import SlurmHead
from thebes.node.step_line import Line
from thebes.node.supervisor import PR_SET_NAME, Supervisor
from thebes.protocol.clock import boot_s
from thebes.protocol.inherited import inherited
from thebes.protocol.lease import Lease, cut_off
from thebes.protocol.plain_json import dump, read_object
from thebes.protocol.progress import (
    LOOK_AT_NEW_S,
    LOOK_EVERY_S,
    LOOK_LESS_BY,
    FolderWatch,
    StepRate,
    progress_record,
    written_by_job,
)
from thebes.protocol.refused import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Message = dict[str, Any]

LINGER_S = 5.0  # for the controller to hear how it ended
SLURM_TERM_S = 1.0  # SIGTERM may reach a rank before it reaches us: a slow machine needs a moment between the two


class Step(Supervisor):
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
        self.head = SlurmHead()
        self.look_files_at = float("inf")
        self.look_pause_s = LOOK_AT_NEW_S
        self.folder_watch = FolderWatch()
        self.last_report: Message = {}
        self.rate = StepRate()
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
            if self.head.pid:
                asked_s = self.head.hear(ready)
                if asked_s is not None:
                    self.lease.renew(asked_s)  # not now: we may have been frozen since
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
        self.libc.prctl(PR_SET_NAME, b"thebes-" + self.name.encode(), 0, 0, 0)

    def _register(self, poll: Any, registered: dict[int, int]) -> None:
        wanted: dict[int, int] = {}
        if self.line.socket is not None:
            wanted[self.line.socket.fileno()] = self.line.events()
        if self.head.fd >= 0:
            wanted[self.head.fd] = select.POLLIN
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
        times += [self.start_by if not self.started else None, self.head.until_s if self.head.pid else None]
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
        self.head.stop()

    # Start

    def _start_now(self, request: Message) -> Message:
        if self.started or self.conduct.state == "exited":
            return self._report()
        self._release_port()
        sentinel = str(self.settings["unknown_port"])
        address, port = str(request["master_addr"]), str(request["master_port"])
        swap = {sentinel: port, str(self.settings["unknown_address"]): address}
        self.launch["command"] = [swap.get(word, word) for word in self.launch["command"]]
        env = inherited(os.environ)
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
        try:
            port, self.port_socket = hold_port()
        except OSError as error:
            raise Refused(str(error)) from None
        return port

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
        self.last_report = self._report()
        if self.listening:
            self.line.say({"push": "report", "report": self.last_report})

    def _report(self) -> Message:
        state = self.conduct.record()
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
            "run_s": self.conduct.run_s(boot_s()),
            **written_by_job(self.attempt, self.rate),
        }

    def _look_at_files(self, now: float) -> None:
        """Has the job written anything for us? More often until its first step, whose time counts for policies."""
        if now < self.look_files_at:
            return
        if self.last_report.get("first_step_s") is None and self.look_pause_s < LOOK_EVERY_S:
            self.look_pause_s *= LOOK_LESS_BY
        else:
            self.look_pause_s = LOOK_EVERY_S
        self.look_files_at = now + self.look_pause_s
        self._read_steps()
        try:
            changed_ns = os.stat(self.attempt).st_mtime_ns
        except OSError:
            return
        if not self.folder_watch.changed(changed_ns, time.time_ns()):
            return
        report = self._report()
        if {**report, "run_s": 0.0} != {**self.last_report, "run_s": 0.0}:
            self.last_report = report
            if self.listening:
                self.line.say({"push": "report", "report": report})

    def _read_steps(self) -> None:
        """Steps from log lines go where those of the library go."""
        if self.steps is None:
            return
        try:
            step = self.steps.newest()
        except TooSlow:
            self.steps = None
            return
        if step is None:
            return
        now = boot_s()
        self.first_step = self.first_step or (step, now)
        try:
            self._replace("progress", dump(progress_record(step, now, self.first_step)), durable=False)
        except OSError:
            pass

    # Lease

    def _keep_lease(self, now: float) -> None:
        verdict = self.lease.verdict(now)
        if verdict == "held":
            return
        if verdict == "ask":
            self.head.ask(now, self.lease.lease_s)
            return
        why = cut_off(self.lease.silent_s(now))
        if not self.started:
            self._never_started(why)
        elif self.conduct.state != "exited":
            grace_s = min(self.launch["grace_s"], self.lease.notice_grace_s) if verdict == "notice" else 0.0
            if verdict == "notice" or not self.conduct.kills:
                self._do(self.conduct.command(now, ["fence", repr(grace_s), why]))


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
