"""An elastic baseline after Sia (Subramanya et al., SOSP'23): every round divides GPUs again, plans keep their type.

As in Sia, each job has a few configurations (numbers of GPUs), a row of throughputs normalised to its smallest one, and
a discount for changing; a round chooses at most one configuration per job so that the sum of normalised throughputs to
the power p is best. Sia itself is different. Here there is one kind of GPU only, so that its integer programme is a
knapsack, solved exactly by dynamic programming. The global batch is fixed, so that goodput is throughput. Throughputs
come from the plan book, not from profiles that are refined while jobs run. Jobs that keep their configuration are never
moved to make room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from thebes.model.arrays import Floats
from thebes.model.decision import NOT_CHOSEN, Decision
from thebes.model.facts import PLANS
from thebes.model.jobs import NEVER
from thebes.model.machine import copy_of
from thebes.model.parameters import parameter
from thebes.model.plan import plan_of
from thebes.model.view import View
from thebes.perf.plans.book import PlanBook
from thebes.policy.base import Policy
from thebes.policy.rubick.gangs import (
    NO_SEAT,
    Ints,
    decision_of,
    give_up,
    held_gpus,
    next_round_s,
    seat_anywhere,
    usable_gpus,
)

UNIT = float(2**32)  # values are whole numbers of 1/UNIT, so that sums are exact and ties are ties
STAYS = 1e-6  # in a tie, a running job goes on as it is


class Configurations(NamedTuple):
    """What a job may be given: ascending numbers of GPUs, each faster than the one before."""

    gpus: Ints
    samples_s: Floats
    plans: Ints  # codes


class SiaRound(NamedTuple):
    """What is remembered: when GPUs are divided next."""

    next_s: float


@dataclass(frozen=True)
class SiaLike(Policy):
    """Elastic GPUs under the user's type of plan, after Sia: every round the best sum of normalised throughputs.

    This is ours, not Sia's code: one kind of GPU, a fixed global batch, and an exact dynamic programme.
    """

    name: ClassVar[str] = "sia-like"
    paper: ClassVar[str] = "after Sia (SOSP'23): elastic GPUs, fixed type of plan; ours"
    needs: ClassVar[frozenset[str]] = frozenset({PLANS})

    round_s: float = parameter(60.0, "GPUs are divided anew every so many seconds", low=1.0)
    p: float = parameter(
        -0.5, "power of the normalised throughput: the further below 0, the fairer", low=-10, high=-1e-3
    )
    unserved: float = parameter(
        1.1, "cost of a job without GPUs (Sia's lambda), where a job of one GPU on that GPU costs 1", low=1
    )

    def ignores(self) -> Mapping[str, str]:
        return {"placement": "it seats gangs itself, as close together as can be"}

    def decide(self, view: View) -> Decision:
        held = held_gpus(view)
        if isinstance(view.memory, SiaRound) and view.now_s < view.memory.next_s:
            return self._as_it_is(view, held, view.memory.next_s)
        offers = configurations_of(view)
        widths = np.array([len(seat) for seat in held])
        told = zip(offers, widths.tolist(), restart_factors(view).tolist(), strict=True)
        values = [self._values(offer, width, factor) for offer, width, factor in told]
        chosen = choose([offer.gpus for offer in offers], values, usable_gpus(view.machine))
        counts = np.array([int(offer.gpus[k]) if k >= 0 else 0 for offer, k in zip(offers, chosen, strict=True)])
        seats = _seats(view, held, counts)
        plans = np.array([int(offer.plans[max(k, 0)]) for offer, k in zip(offers, chosen, strict=True)])
        settled = all(k >= 0 and k == len(offer.gpus) - 1 for offer, k in zip(offers, chosen, strict=True))
        next_s = next_round_s(view.now_s, self.round_s)
        return decision_of(
            view,
            seats,
            np.full(len(view.jobs), NOT_CHOSEN),
            wake_s=NEVER if settled else next_s,  # each job has the most that it can use
            plans=plans,
            memory=SiaRound(next_s),
        )

    def _as_it_is(self, view: View, held: list[Ints], next_s: float) -> Decision:
        """Inside a round nothing changes; new jobs wait for the next one, and free GPUs are divided then."""
        fate = np.full(len(view.jobs), NOT_CHOSEN)
        return decision_of(view, held, fate, wake_s=next_s, plans=view.jobs.plan, memory=SiaRound(next_s))

    def _values(self, offer: Configurations, width: int, factor: float) -> Ints:
        """What each configuration is worth, compared with none: `unserved` - (normalised throughput)^p."""
        normalised = offer.gpus[0] * offer.samples_s / offer.samples_s[0]
        discount = np.where((offer.gpus == width) | (width == 0), 1.0, factor)
        with np.errstate(divide="ignore"):  # a job that may not change yet has 0^p, which is infinitely bad
            worth = np.maximum(self.unserved - (normalised * discount) ** self.p, -1.0)
        return np.rint((worth + STAYS * (offer.gpus == width)) * UNIT).astype(np.int64)


def configurations_of(view: View) -> list[Configurations]:
    """The configurations of each job; jobs of one model that asked for the same share them."""
    jobs, known = view.jobs, {}
    most = usable_gpus(view.machine)
    asked = zip(
        jobs.model.tolist(), jobs.asked_plan.tolist(), jobs.asked_cpus.tolist(), jobs.width.tolist(),
        jobs.min_gpus.tolist(), jobs.max_gpus.tolist(), strict=True,
    )  # fmt: skip
    found: list[Configurations] = []
    for key in asked:
        if key not in known:
            number, code, cpus, width, least, limit = key
            known[key] = configurations(view.plans, number, code, cpus, width, min(limit, most), least)
        found.append(known[key])
    return found


def configurations(
    book: PlanBook, number: int, code: int, cpus: int, width: int, most: int, least: int = 1
) -> Configurations:
    """Any number of GPUs of one node, whole nodes above, and whole replicas of a model that is divided.

    Only those remain that a plan of the asked type can use. Sia scales hybrid-parallel jobs by replicas, too; without
    those numbers a model on 40 GPUs could run on nothing else, and would wait until no other job wants to grow.
    """
    asked, size = plan_of(code), book.site.node_gpus
    replica = asked.tp * asked.pp
    gpus = {*range(1, size + 1), *range(size, most + 1, size)}
    if replica > 1:
        gpus |= {*range(replica, most + 1, replica)}
    gpus = {count for count in gpus if count >= least} | {asked.gpus, width}
    rows: list[tuple[int, float, int]] = []
    for count in sorted(gpus):
        nodes = book.site.fewest_nodes(count)
        if count == asked.gpus:
            outlook = book.of(number, asked, nodes, cpus)
        else:
            outlook = book.best(number, count, nodes, cpus, like=asked) if count <= most else None
        if outlook is not None and (count == width or not rows or outlook.samples_s > rows[-1][1]):
            rows.append((count, outlook.samples_s, outlook.plan.code))
    columns = list(zip(*rows, strict=True))
    return Configurations(np.array(columns[0]), np.array(columns[1]), np.array(columns[2]))


def restart_factors(view: View) -> Floats:
    """(T - N S) / (T + S): what is left of a job's time T since it came, after N restarts at S seconds and one more."""
    jobs = view.jobs
    age_s, cost_s = view.now_s - jobs.submit_s, jobs.suspend_s + jobs.resume_s
    restarts = jobs.preemptions + jobs.moves
    return np.maximum(age_s - restarts * cost_s, 0.0) / np.maximum(age_s + cost_s, 1e-9)


def choose(gpus: Sequence[Ints], values: Sequence[Ints], capacity: int) -> list[int]:
    """For each job the configuration to take, or -1: the best sum of values that so many GPUs allow.

    It is a multiple-choice knapsack: `best[c]` is the best sum with at most c GPUs for the jobs so far. It is exact,
    and among equal sums it takes the one that serves earlier jobs, with fewer GPUs.
    """
    best = np.zeros(capacity + 1, dtype=np.int64)
    taken = np.full((len(gpus), capacity + 1), -1, dtype=np.int16)
    for j, (counts, worth) in enumerate(zip(gpus, values, strict=True)):
        before, best = best, best.copy()
        for k, (count, value) in enumerate(zip(counts.tolist(), worth.tolist(), strict=True)):
            if value <= 0 or count > capacity:
                continue
            with_it = before[: capacity + 1 - count] + value
            better = with_it > best[count:]
            best[count:][better] = with_it[better]
            taken[j, count:][better] = k
    left, chosen = capacity, [-1] * len(gpus)
    for j in range(len(gpus) - 1, -1, -1):
        k = int(taken[j, left])
        if k >= 0:
            chosen[j] = k
            left -= int(gpus[j][k])
    return chosen


def _seats(view: View, held: list[Ints], counts: Ints) -> list[Ints]:
    """Jobs that keep their number keep their GPUs; the others are placed on the fewest nodes, the largest first."""
    machine, rows = copy_of(view.machine), view.jobs.rows.tolist()
    stays = np.array([len(seat) for seat in held]) == counts
    seats = [seat if stay else NO_SEAT for seat, stay in zip(held, stays, strict=True)]
    for seat, stay in zip(held, stays, strict=True):
        if not stay and len(seat):
            give_up(machine, seat)
    for j in np.argsort(-counts, kind="stable").tolist():
        if not stays[j] and counts[j]:
            seats[j] = seat_anywhere(machine, rows[j], int(counts[j]))
    return seats
