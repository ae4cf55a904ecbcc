"""Smallest first: by GPUs, which are known, or by what is left to do, which only an oracle knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thebes.model.facts import DURATIONS
from thebes.policy.orders.priority import GPUS, REMAINING_SERVICE, REMAINING_TIME, PriorityPolicy, Rule, make_rule


@dataclass(frozen=True)
class SmallestJobFirst(PriorityPolicy):
    """Fewest GPUs first, preemptive; equal sizes in order of submission. Large jobs can starve."""

    name: ClassVar[str] = "sjf"
    paper: ClassVar[str] = "baseline; `sjf` of the Tiresias simulator"

    def rule(self) -> Rule:
        return make_rule(GPUS)


@dataclass(frozen=True)
class ShortestRemainingTime(PriorityPolicy):
    """Shortest remaining time first, preemptive. An oracle: it knows how long every job will run."""

    name: ClassVar[str] = "srtf"
    paper: ClassVar[str] = "baseline; `shortest` of the Tiresias simulator"
    needs: ClassVar[frozenset[str]] = frozenset({DURATIONS})

    def rule(self) -> Rule:
        return make_rule(REMAINING_TIME)


@dataclass(frozen=True)
class ShortestRemainingService(PriorityPolicy):
    """Shortest remaining service (time x GPUs) first, preemptive. An oracle: it knows how long every job will run."""

    name: ClassVar[str] = "srsf"
    paper: ClassVar[str] = "Tiresias (NSDI'19) section 3; `shortest-gpu` of its simulator"
    needs: ClassVar[frozenset[str]] = frozenset({DURATIONS})

    def rule(self) -> Rule:
        return make_rule(REMAINING_SERVICE)
