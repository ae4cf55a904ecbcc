"""Facts: what a world can know about jobs beyond what any scheduler sees, and which of them a world does know.

A policy declares the facts that it cannot do without (`needs`) and those that it uses where they are known (`uses`). A
world says what it knows; a column of a fact that it does not know raises an error. No column shows a guess, a 0 or a 1
in place of something that was not measured: a job that has not been measured yet shows NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from thebes.model.errors import UserError, nearest

# Facts that are shown only to a policy that declares them under `needs`.
DURATIONS = "durations"  # how long each job will run, which only oracles may ask
DISTRIBUTION = "distribution"  # the total service of finished jobs
PROFILES = "profiles"  # how fast each job would run in other places
PLANS = "plans"  # how fast each job would run under every execution plan
# Facts that are measured while jobs run, and shown to every policy where they are known.
PROGRESS = "progress"  # progress_s, speed, iteration_s
COMMUNICATION = "communication"  # talked_s


class Fact(NamedTuple):
    """A fact: what it is, and what would make it known where it is not."""

    what: str
    remedy: str


FACTS = {
    DURATIONS: Fact(
        "the run time of each job in advance (an oracle: cannot run live)",
        "only a simulation knows durations: `thebes simulate`",
    ),
    DISTRIBUTION: Fact("the service that finished jobs took", "every world keeps it: the policy has to declare it"),
    PROFILES: Fact(
        "how fast each job would run in other places, from profiles of its model",
        "only a simulation has profiles of the models: `thebes simulate`",
    ),
    PLANS: Fact(
        "the speed and the memory of every execution plan, from a fitted model (simulation with --perf plans)",
        "only a simulation with --perf plans has plans",
    ),
    PROGRESS: Fact(
        "how fast each job makes progress, measured while it runs",
        "jobs have to report their steps (thebes.job, or step lines in their logs)",
    ),
    COMMUNICATION: Fact(
        "how much of its running time each job spends on communication, measured while it runs",
        "only a simulation measures communication: `thebes simulate`",
    ),
}
NEEDS = {name: fact.what for name, fact in FACTS.items()}
MEASURED = frozenset({PROGRESS, COMMUNICATION})


class UnknownHere(UserError):  # noqa: N818 - reads as what it says
    """The error for a policy that asked for a fact that this world does not know."""


@dataclass(frozen=True)
class Knowledge:
    """The facts that one world knows."""

    world: str  # in words, for people
    facts: frozenset[str]
    measured_after_s: float = 0.0  # measured facts of a job are withheld until it has run for so long

    def knows(self, fact: str) -> bool:
        if fact not in FACTS:
            raise UserError(f"there is no fact '{fact}'", hint=nearest(fact, FACTS))
        return fact in self.facts

    def demand(self, fact: str, column: str) -> None:
        """Raise if this world does not know the fact that a column of the View is about."""
        if fact not in self.facts:
            raise UnknownHere(
                f"view.{column} is not known in {self.world}: it is {FACTS[fact].what}",
                hint=f'{FACTS[fact].remedy}; a policy that can do without asks `view.knows("{fact}")` first',
            )


SIMULATED = Knowledge("a simulation", frozenset(FACTS))
LIVE = Knowledge("a live cluster", frozenset({DISTRIBUTION, PROGRESS}))


def withholding(measured_after_s: float) -> Knowledge:
    """What a simulation knows if the measured facts of a job are withheld until it has run for so long."""
    if not 0.0 <= measured_after_s < float("inf"):
        raise UserError(
            f"measured_after_s={measured_after_s:g} is no time that a job could run for",
            hint="give seconds, such as 60; 0 withholds nothing",
        )
    return replace(SIMULATED, measured_after_s=measured_after_s)
