"""The orders of submission, which clusters use if nobody decides otherwise. None of them preempts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thebes.policy.orders.priority import SUBMIT, PriorityPolicy, Rule, make_rule


@dataclass(frozen=True)
class Fifo(PriorityPolicy):
    """First in, first out: a job that does not fit holds up all jobs behind it. It never preempts.

    With the `yarn` placement this is the YARN capacity scheduler of the Tiresias paper.
    """

    name: ClassVar[str] = "fifo"
    paper: ClassVar[str] = "baseline; `fifo` of the Tiresias simulator"

    def rule(self) -> Rule:
        return make_rule(SUBMIT, preemptive=False, strict=True)


@dataclass(frozen=True)
class Backfill(PriorityPolicy):
    """Submission order, but jobs that do not fit are passed over. It never preempts; large jobs can starve.

    It is the simulator's `fjf` (fit job first). With the `yarn` placement it is Best-effort in the Tiresias paper.
    """

    name: ClassVar[str] = "backfill"
    paper: ClassVar[str] = "baseline; `fjf` of the Tiresias simulator"

    def rule(self) -> Rule:
        return make_rule(SUBMIT, preemptive=False)


@dataclass(frozen=True)
class LongestPendingFirst(PriorityPolicy):
    """The job that has waited longest goes first; one that does not fit is passed over. It never preempts.

    No job waits twice if none is preempted, so the longest-pending job is the earliest submitted one, and this is
    `backfill` by another name. (The released simulator's `lpjf` differs through a slip: it never counts the waiting
    and forgets every other job while it walks the list. `tiresias-compat` reproduces that.)
    """

    name: ClassVar[str] = "lpjf"
    paper: ClassVar[str] = "baseline; what `lpjf` of the Tiresias simulator was meant to be"

    def rule(self) -> Rule:
        return make_rule(SUBMIT, preemptive=False)
