"""A resource-sensitive baseline after Synergy (Mohan et al., OSDI'22): GPUs and plan as asked, CPUs where they help.

Synergy's TUNE gives a job the CPUs and the memory with which it is fastest. Where a node does not have so many, the job
gets its GPU-proportional share, and jobs above theirs are pushed back to it. No job is ever slower than with that
share. Here a job's need of CPUs comes from the plan book (only offloaded optimisers have one) instead of optimistic
profiling; there is no cache of training data, so host memory is what the plan needs, which always fits into a GPU's
share of its host. CPUs change hands at no cost, so they are dealt out again at every decision, and what is left over
goes to jobs that can use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.decision import BEHIND, NO_GPUS, Decision
from thebes.model.errors import UserError, nearest
from thebes.model.facts import PLANS
from thebes.model.jobs import NEVER
from thebes.model.machine import Machine, copy_of
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
    node_counts,
    seat_anywhere,
    seat_on,
    usable_gpus,
)

ORDERS = ("las", "fifo")
SATURATED = 0.99  # more CPUs than bring this part of the best throughput are not asked for


class Needs(NamedTuple):
    """CPUs for each GPU."""

    share: int  # the fewest with which it is as fast as with its GPU-proportional share
    best: int  # the fewest with which it is as fast as it can be


class SynergyRound(NamedTuple):
    """What is remembered: when jobs that have had less may next take GPUs from jobs that have had more."""

    next_s: float


@dataclass(frozen=True)
class SynergyLike(Policy):
    """GPUs and plan as asked, CPUs tuned to the job, after Synergy: never slower than with a GPU-proportional share.

    This is ours, not Synergy's code. The order is least attained service in rounds, or submission.
    """

    name: ClassVar[str] = "synergy-like"
    paper: ClassVar[str] = "after Synergy (OSDI'22), TUNE over LAS or FIFO; ours"
    needs: ClassVar[frozenset[str]] = frozenset({PLANS})

    order: str = parameter("las", "las: least GPU time first, preemptive by rounds; fifo: by submission, strictly")
    round_s: float = parameter(
        300.0, "las: jobs make room only every so many seconds, and only once they have run so long", low=1.0
    )

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UserError(f"synergy-like: order={self.order} is unknown", hint=nearest(self.order, ORDERS))

    def ignores(self) -> Mapping[str, str]:
        return {"placement": "it seats gangs itself, as close together as can be"}

    def decide(self, view: View) -> Decision:
        jobs, las = view.jobs, self.order == "las"
        next_s = view.memory.next_s if isinstance(view.memory, SynergyRound) else view.now_s
        due = next_s <= view.now_s
        service = jobs.attained_gpu_s if las else jobs.submit_s
        order = np.lexsort((~jobs.running, service, -jobs.priority))
        stays = jobs.running & (view.now_s - jobs.run_from_s < self.round_s) if las and due else jobs.running
        runs, fate = _who_runs(view, order, stays, strict=not las)
        needs = needs_of(view)
        seats = _seats(view, runs, needs)
        cpus = deal_cpus(view.machine, seats, order, needs, _site_cpus(view))
        if runs.all() or not las:
            next_s = NEVER  # no job waits, or only a finish helps those that do
        elif due or next_s == NEVER:
            next_s = next_round_s(view.now_s, self.round_s)
        return decision_of(
            view, seats, fate, wake_s=next_s, plans=jobs.asked_plan, cpus=cpus, memory=SynergyRound(next_s)
        )


def _who_runs(view: View, order: Ints, stays: NDArray[np.bool_], *, strict: bool) -> tuple[NDArray[np.bool_], Ints]:
    """The jobs that stay, and then others down the order while there are GPUs."""
    jobs, runs = view.jobs, stays.copy()
    fate = np.full(len(jobs), NO_GPUS)
    left = usable_gpus(view.machine) - int(jobs.width[runs].sum())
    gpus = jobs.gpus.tolist()
    for at, j in enumerate(order.tolist()):
        if runs[j]:
            continue
        if gpus[j] <= left:
            runs[j] = True
            left -= gpus[j]
        elif strict:
            fate[order[at + 1 :]] = BEHIND
            break
    return runs, fate


def _site_cpus(view: View) -> int:
    book: PlanBook = view.plans
    return book.site.node_cpus


def needs_of(view: View) -> list[Needs]:
    """The needs of each job under the plan that it asked for, on the fewest nodes."""
    known: dict[tuple[int, int], Needs] = {}
    found: list[Needs] = []
    for key in zip(view.jobs.model.tolist(), view.jobs.asked_plan.tolist(), strict=True):
        if key not in known:
            known[key] = _needs(view.plans, *key)
        found.append(known[key])
    return found


def _needs(book: PlanBook, number: int, code: int) -> Needs:
    plan, site = plan_of(code), book.site
    nodes = site.fewest_nodes(plan.gpus)
    most = site.node_cpus // -(-plan.gpus // nodes)
    share = min(site.cpus_per_gpu, most)

    def samples_s(cpus: int) -> float:
        outlook = book.of(number, plan, nodes, cpus)
        return outlook.samples_s if outlook is not None else 0.0

    if samples_s(1) >= samples_s(most):  # CPUs do nothing for most plans
        return Needs(1, 1)
    by_cpus = np.array([samples_s(cpus) for cpus in range(1, most + 1)])
    enough = 1 + int(np.argmax(by_cpus >= by_cpus[share - 1]))
    return Needs(enough, max(enough, 1 + int(np.argmax(by_cpus >= SATURATED * by_cpus.max()))))


def _seats(view: View, runs: NDArray[np.bool_], needs: list[Needs]) -> list[Ints]:
    """Jobs that go on keep their GPUs. Of the others the largest go first, and to nodes with enough CPUs."""
    machine, jobs = copy_of(view.machine), view.jobs
    seats = held_gpus(view)
    for j in np.flatnonzero(jobs.running & ~runs).tolist():
        give_up(machine, seats[j])
        seats[j] = NO_SEAT
    starts = np.flatnonzero(runs & ~jobs.running)
    best = np.array([need.best for need in needs])
    if (best[starts] == 1).all():
        spare = np.zeros(0, dtype=np.int64)
    else:
        used = node_counts(machine, seats) * np.array([need.best for need in needs])[:, None]
        spare = np.maximum(_site_cpus(view) - used.sum(axis=0), 0)
    for j in starts[np.lexsort((-best[starts], -jobs.gpus[starts]))].tolist():
        gpus, row = int(jobs.gpus[j]), int(jobs.rows[j])
        node = _roomy_node(machine, spare, gpus, int(best[j])) if best[j] > 1 else -1
        seats[j] = seat_on(machine, row, [node], gpus) if node >= 0 else seat_anywhere(machine, row, gpus)
        if len(spare):
            used = np.bincount(machine.gpus["node"][seats[j]], minlength=len(spare)) * best[j]
            spare = np.maximum(spare - used, 0)
    return seats


def _roomy_node(machine: Machine, spare: Ints, gpus: int, best: int) -> int:
    """The fullest node with these GPUs free and CPUs for all of them; -1 if there is none."""
    free = machine.nodes["free"]
    fits = (free >= gpus) & (spare >= gpus * best)
    return int(np.argmin(np.where(fits, free, np.iinfo(np.int64).max))) if fits.any() else -1


def deal_cpus(machine: Machine, seats: list[Ints], order: Ints, needs: list[Needs], node_cpus: int) -> Ints:
    """CPUs for each GPU of every gang: first the shares of all, then up to the best case, in this order.

    Shares always fit, because the GPU-proportional ones do. After that each gang in turn takes up to its best case,
    which comes to the same as pushing jobs above their share back to it.
    """
    cpus = np.array([need.share for need in needs], dtype=np.int64)
    best = np.array([need.best for need in needs], dtype=np.int64)
    hungry = [j for j in order.tolist() if best[j] > cpus[j] and len(seats[j])]
    if not hungry:
        return cpus
    on_node = node_counts(machine, seats)
    left = node_cpus - cpus @ on_node
    for j in hungry:
        there = on_node[j] > 0
        more = min(int(best[j] - cpus[j]), int((left[there] // on_node[j][there]).min()))
        cpus[j] += more
        left = left - more * on_node[j]
    return cpus
