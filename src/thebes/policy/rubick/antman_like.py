"""A two-class baseline after AntMan (Xiao et al., OSDI'20): guaranteed jobs have a quota, others live on what is left.

A guaranteed gang within its tenant's quota gets what it asked for, at once: opportunistic jobs make room. If guaranteed
jobs hold the GPUs it needs, it keeps its place in the order (no guaranteed job passes it), and opportunistic jobs use
its GPUs meanwhile. AntMan itself is different: there two jobs share one GPU, the opportunistic one in the gaps of the
other, with its memory moved to the host if needed. Here no GPU is shared, so opportunistic jobs are suspended instead
of slowed down, and only GPUs that no guaranteed job holds are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.decision import BEHIND, NO_GPUS, OVER_QUOTA, Decision
from thebes.model.facts import PLANS
from thebes.model.jobs import NEVER
from thebes.model.machine import Machine, copy_of
from thebes.model.parameters import parameter
from thebes.model.view import View
from thebes.policy.base import Policy
from thebes.policy.quotas import check_names, check_sum, read_quotas
from thebes.policy.rubick.gangs import (
    NO_SEAT,
    Ints,
    decision_of,
    free_gpus,
    give_up,
    held_gpus,
    node_counts,
    return_to,
    seat_anywhere,
    seat_on,
    usable_gpus,
)


@dataclass(frozen=True)
class Admitted:
    """What is remembered: the jobs that hold their GPUs by right, not by chance."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class AntManLike(Policy):
    """Guaranteed jobs within quotas first, opportunistic ones on what they leave, after AntMan; no GPU is shared.

    This is ours, not AntMan's code. Every job has the GPUs, the CPUs and the plan that it asked for. A guaranteed job
    that waits for quota too long may run as an opportunistic one until its turn comes; so may, at once, a job that is
    larger than its tenant's quota.
    """

    name: ClassVar[str] = "antman-like"
    paper: ClassVar[str] = "after AntMan (OSDI'20): quotas and opportunistic jobs, without sharing of GPUs; ours"
    needs: ClassVar[frozenset[str]] = frozenset({PLANS})  # the class of a job comes with them

    quotas: str = parameter("", "GPUs for guaranteed jobs, as vcA=40,vcB=24; a tenant that is not named has no limit")
    patience_s: float = parameter(
        3600.0, "a guaranteed job that waited so long for quota may run as an opportunistic one; inf: never", low=0
    )

    _quotas: dict[str, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_quotas", read_quotas(self.quotas, self.name))

    def check(self, cluster: Cluster, tenants: tuple[str, ...]) -> None:
        check_names(self._quotas, "quotas", self.name, tenants)
        check_sum(self._quotas, self.name, cluster, "some, opportunistic jobs use what is left")

    def ignores(self) -> Mapping[str, str]:
        return {"placement": "it seats gangs itself, as close together as can be"}

    def decide(self, view: View) -> Decision:
        jobs = view.jobs
        by_right, fate = self._admit(view)
        patient = jobs.guaranteed & ~by_right & ~self._beyond_quota(view)
        out_of_patience = jobs.running | (jobs.since_s + self.patience_s <= view.now_s)  # a job by chance goes on
        by_chance = ~by_right & (~patient | out_of_patience)
        order = np.lexsort((jobs.submit_s, -jobs.priority)).tolist()
        seats = _seats(view, order, by_right, by_chance)
        waits = patient & ~by_chance & ~jobs.running
        holds = np.array([len(seat) > 0 for seat in seats])
        return decision_of(
            view,
            seats,
            fate,
            wake_s=float((jobs.since_s[waits] + self.patience_s).min(initial=NEVER)),
            plans=jobs.asked_plan,
            memory=Admitted(tuple(jobs.id[by_right & holds].tolist())),
        )

    def _limits(self, view: View) -> NDArray[np.float64]:
        """GPUs per tenant."""
        names = (*view.tenants, *("" for _ in range(len(view.quotas) - len(view.tenants))))
        return np.minimum(np.array([self._quotas.get(name, np.inf) for name in names]), view.quotas)

    def _beyond_quota(self, view: View) -> NDArray[np.bool_]:
        """Gangs for which no wait will be long enough to fit into their tenant's quota, or into the cluster."""
        most = np.minimum(self._limits(view)[view.jobs.tenant], usable_gpus(view.machine))
        return view.jobs.gpus > most

    def _admit(self, view: View) -> tuple[NDArray[np.bool_], Ints]:
        """Which jobs hold GPUs by right, and the fates of the others.

        First come the jobs that do so already; then the others in order, for each tenant until one does not fit into
        what is left of its quota, and for all until one does not fit beside the other guaranteed jobs: its GPUs are
        reserved.
        """
        jobs = view.jobs
        before = view.memory.ids if isinstance(view.memory, Admitted) else ()
        by_right = np.isin(jobs.id, before) & jobs.running
        quota = self._limits(view)
        np.subtract.at(quota, jobs.tenant[by_right], jobs.gpus[by_right])
        left = usable_gpus(view.machine) - int(jobs.gpus[by_right].sum())
        fate = np.full(len(jobs), NO_GPUS)
        blocked = np.zeros(len(quota), dtype=np.bool_)
        candidates = np.flatnonzero(jobs.guaranteed & ~by_right & ~self._beyond_quota(view))
        fate[jobs.guaranteed & self._beyond_quota(view)] = OVER_QUOTA
        for j in candidates[np.lexsort((jobs.submit_s[candidates], -jobs.priority[candidates]))].tolist():
            tenant, gpus = int(jobs.tenant[j]), int(jobs.gpus[j])
            if left < 0:
                fate[j] = BEHIND
            elif blocked[tenant] or quota[tenant] < gpus:
                fate[j], blocked[tenant] = OVER_QUOTA, True
            elif gpus > left:
                left = -1  # a reservation, which no guaranteed job passes
            else:
                by_right[j] = True
                quota[tenant] -= gpus
                left -= gpus
        return by_right, fate


def _seats(view: View, order: list[int], by_right: NDArray[np.bool_], by_chance: NDArray[np.bool_]) -> list[Ints]:
    """First the jobs by right, then, on what is left, the jobs by chance; a running job stays where it is if it can."""
    machine, jobs = copy_of(view.machine), view.jobs
    rows, gpus = jobs.rows.tolist(), jobs.gpus.tolist()
    seats = held_gpus(view)
    evicted: list[int] = []
    newest_first = sorted(
        np.flatnonzero(by_chance & jobs.running).tolist(), key=lambda j: (jobs.priority[j], -jobs.since_s[j], -j)
    )
    for j in order:
        if by_right[j] and not len(seats[j]):
            nodes = _make_room(machine, seats, gpus[j], newest_first, evicted)
            seat = seat_on(machine, rows[j], nodes, gpus[j]) if nodes else seat_anywhere(machine, rows[j], gpus[j])
            seats[j] = seat
    held = held_gpus(view)
    for j in order:  # suspended for one node of a gang whose other nodes were not needed after all
        if j in evicted and return_to(machine, rows[j], held[j]):
            seats[j] = held[j]
    for j in order:
        if by_chance[j] and not len(seats[j]) and gpus[j] <= free_gpus(machine):
            seats[j] = seat_anywhere(machine, rows[j], gpus[j])
    return seats


def _make_room(machine: Machine, seats: list[Ints], gpus: int, victims: list[int], evicted: list[int]) -> list[int]:
    """Suspend jobs by chance on the fewest nodes that can hold a gang; returns the nodes, or none if any will do.

    Of the nodes that will do, those where the fewest GPUs have to be taken; of the victims, the newest first.
    """
    size = int(machine.kinds["gpus_per_node"][0])
    running = [j for j in victims if len(seats[j])]
    taken = (
        node_counts(machine, [seats[j] for j in running]) if running else np.zeros((0, len(machine.nodes)), np.int64)
    )
    free = machine.nodes["free"].astype(np.int64)
    could = free + taken.sum(axis=0)
    whole, rest = divmod(gpus, size)
    full = np.flatnonzero(could == size)
    nodes = full[np.argsort(-free[full], kind="stable")][:whole].tolist()
    wanted = [size] * len(nodes)
    if rest:
        enough = np.setdiff1d(np.flatnonzero(could >= rest), nodes)
        # no preemption where the GPUs are free, and then the tightest fit
        fit = np.lexsort((free[enough], np.maximum(rest - free[enough], 0)))
        nodes += enough[fit][:1].tolist()
        wanted += [rest]
    together = len(nodes) == whole + (rest > 0)
    for at, j in enumerate(running):
        if together:
            needed = any(
                taken[at, node] and machine.nodes["free"][node] < want
                for node, want in zip(nodes, wanted, strict=False)
            )
        else:
            needed = free_gpus(machine) < gpus
        if needed:
            give_up(machine, seats[j])
            seats[j] = NO_SEAT
            evicted.append(j)
    return nodes if together else []
