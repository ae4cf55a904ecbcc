"""What becomes of one attempt, and when: events go in, instructions come out. No I/O.

The supervisor carries the instructions out, and so does the step of a Slurm job.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    Instruction = tuple[Any, ...]

PREEMPTED = 85  # an exit code: "I have saved my state: resume me"
FAILING_S = 5.0  # between SIGTERM and SIGKILL for the others, when one rank has failed
TERM_MARGIN_S = 5.0  # SIGTERM so long before the deadline of a notice, or a quarter of the grace if that is less


class Conduct:
    """What becomes of one attempt: each event answers with instructions, tuples that begin with what to do.

    ("notice", deadline_s, grace_s)  write the flag file     ("usr1",)  SIGUSR1 to each process that catches it, once
    ("term",) ("kill",)              signal every process    ("stop",) ("cont",)  freeze and thaw every process
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
            return self._kill(now)  # the processes that are left over in the background
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
        """Every process, again and again until none is left: a process may fork while it is being killed."""
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
