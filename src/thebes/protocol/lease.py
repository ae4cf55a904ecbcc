"""How long a node may go on alone: the lease that keeps a job from living twice when a node is cut off. Pure.

The process that supervises jobs hears from the controller, and may ask the head of the cluster (Slurm's or Ray's)
whether this node still counts. Without either for the time of the lease it is cut off: others will take its jobs for
lost. So it asks them to save, and kills what is left half a lease later; only then does the controller start them
elsewhere.

What counts is not when a word was read but since when the other side has surely heard of us: a controller sends back
the time that stood in our last answer, the head is counted from when it was asked. So words that lay in a buffer while
we were frozen renew nothing.

An agent also keeps its lease in a file: one line, written over in place, so that a full disk does not matter. It is
for supervisors, which stop their jobs by themselves when nobody renews it any more, and for the next agent.

This module imports nothing: steps and supervisors use it, too (see `node/bare.py`).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Verdict = Literal["held", "ask", "notice", "kill"]

ASK_FROM = 0.5  # of the lease: from then on the head is asked
ASK_EVERY = 1 / 6
KILL_AT = 1.5
FILE_BYTES = 200


def over_s(lease_s: float) -> float:
    """After so much silence nothing of it is alive: what the controller waits before it takes jobs for lost."""
    return KILL_AT * lease_s + max(2.0, 0.1 * lease_s)


class Lease:
    """One lease; times are seconds of any clock that goes on by itself."""

    def __init__(self, lease_s: float, now_s: float) -> None:
        self.lease_s = lease_s
        self._heard_s = now_s
        self._asked_s = float("-inf")
        self._parked_until_s = float("-inf")
        self._greeted = False
        self._noticed = False

    def renew(self, at_s: float) -> None:
        """At that time the controller had heard of us, or the head was asked and says that all is well."""
        self._heard_s = max(self._heard_s, at_s)
        if self._greeted:
            self._parked_until_s = float("-inf")

    def park(self, for_s: float) -> None:
        """The controller leaves on purpose and will be back. What it still says before it goes changes nothing."""
        self._parked_until_s = self._heard_s + for_s
        self._greeted = False

    def greet(self) -> None:
        """A controller is there: with its next word the ordinary lease holds again."""
        self._greeted = True

    @property
    def over_at_s(self) -> float:
        """When nothing may be left, as things stand."""
        return max(self._heard_s, self._parked_until_s) + KILL_AT * self.lease_s

    def kept(self) -> tuple[float, float, float]:
        """What another process must know to go on with it."""
        return self.lease_s, self._heard_s, self._parked_until_s

    @classmethod
    def resumed(cls, lease_s: float, heard_s: float, parked_until_s: float) -> Lease:
        lease = cls(lease_s, heard_s)
        lease._parked_until_s = parked_until_s
        return lease

    def silent_s(self, now_s: float) -> float:
        return now_s - max(self._heard_s, min(now_s, self._parked_until_s))

    def verdict(self, now_s: float) -> Verdict:
        """What to do now. `ask` and `notice` are said once for each time that they are due."""
        silent_s = self.silent_s(now_s)
        if silent_s < self.lease_s:
            self._noticed = False
        if silent_s >= KILL_AT * self.lease_s:
            return "kill"
        if silent_s >= self.lease_s:
            if not self._noticed:
                self._noticed = True
                return "notice"
        elif silent_s >= ASK_FROM * self.lease_s and now_s - self._asked_s >= 0.99 * ASK_EVERY * self.lease_s:
            self._asked_s = now_s
            return "ask"
        return "held"

    def next_s(self, now_s: float) -> float:
        """When to ask for a verdict again."""
        silent_s = self.silent_s(now_s)
        for at in (ASK_FROM, 1.0, KILL_AT):
            if silent_s < at * self.lease_s:
                wait_s = at * self.lease_s - silent_s
                doubtful = ASK_FROM * self.lease_s <= silent_s < self.lease_s
                return now_s + (min(wait_s, ASK_EVERY * self.lease_s) if doubtful else wait_s)
        return now_s + self.lease_s

    @property
    def notice_grace_s(self) -> float:
        """From the notice to the kill."""
        return (KILL_AT - 1.0) * self.lease_s


def cut_off(silent_s: float) -> str:
    """Why jobs are stopped when nothing was heard for so long."""
    return f"cut off: no word from the controller for {silent_s:.0f} s"


# The file ------------------------------------------------------------------------------------------------------------


def to_line(lease: Lease, boot: str, epoch: int) -> bytes:
    """The contents of the file. The epoch is that of the newest leader heard of."""
    words = (boot, lease.over_at_s, *lease.kept(), epoch)
    return " ".join(map(str, words)).ljust(FILE_BYTES - 1).encode() + b"\n"


def from_line(line: bytes, boot: str) -> tuple[Lease, int] | None:
    """The lease and the epoch; None if the line is spoilt, or of another boot."""
    words = line.decode("ascii", "replace").split()
    if len(words) != 6 or words[0] != boot:
        return None
    try:
        return Lease.resumed(*map(float, words[2:5])), int(words[5])
    except ValueError:
        return None


def over_at_in(line: bytes, boot: str) -> float | None:
    """When the lease in this line is over: all that a supervisor must know. None as above."""
    words = line.split()
    try:
        return float(words[1]) if words[0].decode() == boot else None
    except (ValueError, IndexError):
        return None
