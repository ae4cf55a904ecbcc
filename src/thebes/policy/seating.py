"""Seats for jobs of any size and share: `fill` uses them when a policy says how many GPUs or which share each job gets,
and `place` uses them for policies that have chosen themselves which jobs run.

Gangs are seated whole, on one kind of node that the job accepts, within the tenant's quota. A running job that keeps
its size keeps its GPUs; one that grows or shrinks keeps as many of them as it can. Jobs with a share below 1 sit
together where their shares add up to 1 at most and their memory fits. Where the placement refuses a gang, running jobs
after it in the order give way, as in `fill`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thebes.model.arrays import Floats, Ints
from thebes.model.compiled import entry
from thebes.model.decision import (
    BEHIND,
    HOLDS,
    MAX_SHARERS,
    NO_GPUS,
    NO_PLACE,
    NOT_CHOSEN,
    OVER_QUOTA,
    Decision,
)
from thebes.model.errors import UserError
from thebes.model.jobs import NEVER
from thebes.model.machine import BLOCKED, FREE, copy_state, occupy, release
from thebes.model.view import View
from thebes.placement import strategies

WHOLE = 1.0 - 1e-9  # three thirds are one whole GPU, in spite of rounding
_copy_state, _occupy, _release, _place = entry(copy_state), entry(occupy), entry(release), entry(strategies.place)


def checked_order(view: View, order: Any, what: str) -> Ints:
    """An order of jobs as positions in the View's columns; a UserError names the position that is wrong."""
    given = np.asarray(order)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        kind = f"{given.dtype} in {given.ndim} dimensions" if given.ndim != 1 else str(given.dtype)
        raise UserError(
            f"{what}: an order is a list of positions in view.jobs, whole numbers, not {kind}",
            hint="np.argsort(key, kind='stable') makes one from a key per job",
        )
    count, positions = len(view.jobs), given.astype(np.int64)
    wrong = np.flatnonzero((positions < 0) | (positions >= count))
    if len(wrong):
        raise UserError(
            f"{what}: position {wrong[0]} of the order is {positions[wrong[0]]}, but view.jobs has {count} jobs",
            hint=f"name jobs by their place in the columns, 0 to {count - 1}; view.jobs.rows is something else",
        )
    seen = np.zeros(count, dtype=np.bool_)
    seen[positions] = True
    if int(seen.sum()) < len(positions):
        named: set[int] = set()
        for at, position in enumerate(positions.tolist()):
            if position in named:
                raise UserError(
                    f"{what}: position {at} of the order names job {position} for the second time",
                    hint="each job can stand in the order once",
                )
            named.add(position)
    return positions


def by_priority(view: View, order: Ints) -> Ints:
    """The same order with jobs of higher priority, which users set, before all others."""
    priority = view.jobs.priority[order]
    return order[np.argsort(-priority, kind="stable")] if priority.any() else order


def place(
    view: View,
    chosen: Any,
    *,
    counts: Any = None,
    shares: Any = None,
    wake_s: float = NEVER,
    promote: Ints | None = None,
    queues: Ints | None = None,
    memory: object = None,
) -> Decision:
    """Give GPUs to these jobs (positions in `view.jobs`; an earlier one chooses before a later one).

    A running job that keeps its size stays where it is; the others are seated in turn where there is room, by the rule
    of the placement. No job makes room for another: one that finds none waits. `counts` and `shares` have a number per
    job of the View: how many GPUs (between min_gpus and max_gpus), which share of each. The rest is as in `fill`.
    """
    order = checked_order(view, chosen, "place")
    seating = Seating(view, _counts(view, counts), _shares(view, shares))
    for i in order[view.jobs.running[order]].tolist():
        seating.stay(i)
    for i in order.tolist():
        seating.seat(i)
    return seating.decision(shares is not None, wake_s, promote, queues, memory)


def fill_sized(
    view: View,
    order: Ints,
    counts: Any,
    shares: Any,
    preempt: bool,
    strict: bool,
) -> tuple[Seating, bool]:
    """Hand the cluster out in this order, each job on its count of GPUs and at its share of them."""
    seating = Seating(view, _counts(view, counts), _shares(view, shares))
    running = view.jobs.running
    if not preempt:
        for i in np.flatnonzero(running).tolist():
            seating.stay_as_it_is(i)
    chosen, passed = _affordable(view, seating, order.tolist(), strict)
    for i in chosen:
        seating.stay(i)
    closed: set[Hashable] = set()  # gangs that were refused although all others gave way; others like them are, too
    left_over = False
    for at, i in enumerate(chosen):
        if i in seating.gave_way or seating.seat(i):
            continue
        left_over = True
        lower = [j for j in chosen[at + 1 :] if seating.could_give_way(j, i)] if preempt else []
        seated = _seat_somehow(view, seating, i, lower, closed, adapts=counts is not None)
        if strict and not seated and seating.fate[i] != OVER_QUOTA:  # a quota holds up nobody else
            for j in chosen[at + 1 :]:
                seating.fate[j] = HOLDS if seating.holds(j) else BEHIND
            break
    for i in passed if left_over and not strict else ():  # what a refusal leaves over goes to the next
        seating.stay(i)
        if not running[i] or view.jobs.width[i] != seating.counts[i]:  # else it would be moved
            seating.seat(i)
    return seating, shares is not None


def _seat_somehow(
    view: View, seating: Seating, i: int, lower: list[int], closed: set[Hashable], *, adapts: bool
) -> bool:
    """A job that is due was refused: jobs after it give way. Where that does not help, an elastic job takes fewer GPUs.

    So the first job of an order is never refused for ever, however many GPUs the policy wants it to have.
    """
    wanted, jobs = int(seating.counts[i]), view.jobs
    like_it = int(jobs.gang_class[i]), float(seating.shares[i]), float(jobs.memory_gib[i]), bool(jobs.running[i])
    for count in range(wanted, int(jobs.min_gpus[i]) - 1 if adapts else wanted - 1, -1):
        seating.counts[i] = count
        if not seating.within_quota(i):  # that tells nothing about gangs of other tenants
            continue
        if (count, like_it) not in closed and ((count < wanted and seating.seat(i)) or seating.make_way(i, lower)):
            return True
        closed.add((count, like_it))
    seating.counts[i] = wanted
    return False


def _affordable(view: View, seating: Seating, order: list[int], strict: bool) -> tuple[list[int], list[int]]:
    """The jobs that have room by number alone, kind by kind, when GPUs are handed out in this order; and the others."""
    budget = view.machine.kinds["total"].astype(np.float64)
    idle = view.machine.kinds["free"].astype(np.float64)
    for i in seating.seated():
        budget[view.jobs.node_kind[i]] -= seating.counts[i] * seating.shares[i]
    left = seating.left.copy()
    chosen: list[int] = []
    passed: list[int] = []
    for at, i in enumerate(order):
        if seating.holds(i):
            continue
        tenant = view.jobs.tenant[i]
        left[tenant] -= seating.counts[i]
        if left[tenant] < 0:  # the quota decides about it, and it takes no GPUs from others
            left[tenant] += seating.counts[i]
            chosen.append(i)
            continue
        need = float(seating.counts[i] * seating.shares[i])
        kinds = [k for k in range(len(budget)) if (view.jobs.kinds[i] >> k) & 1 and budget[k] >= need - 1e-9]
        if not kinds:
            passed.append(i)
            seating.fate[i] = NO_GPUS
            if strict:
                seating.fate[order[at + 1 :]] = np.where(seating.fate[order[at + 1 :]] == HOLDS, HOLDS, BEHIND)
                break
            continue
        own = int(view.jobs.node_kind[i])
        best = own if view.jobs.running[i] and own in kinds else max(kinds, key=lambda k: (idle[k] >= need, budget[k]))
        budget[best] -= need
        idle[best] -= 0.0 if view.jobs.running[i] else need
        chosen.append(i)
    return chosen, passed


class Seating:
    """A copy of the cluster, empty at first, and the jobs that have been seated in it."""

    def __init__(self, view: View, counts: Ints, shares: Floats) -> None:
        self.view, self.counts, self.shares = view, counts, shares
        self.machine = view.board.sketch.machine
        _copy_state(view.machine, self.machine)
        _release(self.machine, np.flatnonzero(self.machine.gpus["owner"] >= 0))
        gpus = len(self.machine.gpus)
        self.given, self.memory_gib = np.zeros(gpus), np.zeros(gpus)
        self.there = np.zeros(gpus, dtype=np.int64)
        self.kind_of = self.machine.nodes["node_kind"][self.machine.gpus["node"]]
        self.room_gib = self.machine.kinds["memory_gib"][self.kind_of]
        self.left = view.quotas.copy()
        self.fate = np.full(len(view.jobs), NOT_CHOSEN, dtype=np.int64)
        self.gpus: dict[int, Ints] = {}
        self.gave_way: set[int] = set()  # those whose GPUs a job before them has taken

    def holds(self, i: int) -> bool:
        return i in self.gpus

    def seated(self) -> list[int]:
        return list(self.gpus)

    def stay_as_it_is(self, i: int) -> None:
        """Let a running job keep its size, its share and its GPUs, whatever was asked for it."""
        self.counts[i], self.shares[i] = self.view.jobs.width[i], self.view.jobs.share[i]
        self.stay(i)

    def stay(self, i: int) -> None:
        """Let a running job that keeps its size stay where it is, if its share still fits there."""
        if self.holds(i) or not self.view.jobs.running[i] or self.view.jobs.width[i] != self.counts[i]:
            return
        here = self.view.jobs.held(i)
        if self.within_quota(i) and self._fits(i, here).all():
            self._sit(i, here)

    def seat(self, i: int) -> bool:
        """Find room for a job that has none yet; if there is none, its fate says why."""
        if self.holds(i):
            return True
        if not self.within_quota(i):
            self.fate[i] = OVER_QUOTA
            return False
        found = self._nearby(i) if self.view.jobs.running[i] else None
        found = self._anywhere(i) if found is None else found
        if found is None:
            kinds = [k for k in range(len(self.machine.kinds)) if (self.view.jobs.kinds[i] >> k) & 1]
            free = max((int(self.machine.kinds["free"][k]) for k in kinds), default=0)
            self.fate[i] = NO_PLACE if free >= self.counts[i] else NO_GPUS
            return False
        self._sit(i, found)
        return True

    def could_give_way(self, j: int, i: int) -> bool:
        """Whether job `j`, which ran before this decision, has GPUs of a kind that job `i` may have."""
        suits = (int(self.view.jobs.kinds[i]) >> int(self.view.jobs.node_kind[j])) & 1 == 1
        return suits and self.holds(j) and bool(self.view.jobs.running[j])

    def make_way(self, i: int, lower: list[int]) -> bool:
        """The jobs in `lower`, best first, give way to job `i`, the last one first, until it has a seat.

        Those whose seats are still free then, or all if it finds none even so, stay where they are. Nobody is moved.
        """
        if not self.within_quota(i):
            return False
        gone: list[int] = []
        for j in reversed([j for j in lower if self.holds(j)]):
            self._rise(j)
            gone.append(j)
            if self.seat(i):
                break
        for j in reversed(gone):
            self.stay(j)
            if not self.holds(j):
                self.fate[j] = NO_GPUS
                self.gave_way.add(j)
        return self.holds(i)

    def _rise(self, i: int) -> None:
        """Undo `_sit`."""
        gpus = self.gpus.pop(i)
        self.there[gpus] -= 1
        left = gpus[self.there[gpus] == 0]
        self.given[gpus] -= self.shares[i]
        self.memory_gib[gpus] -= self.view.jobs.memory_gib[i]
        self.given[left] = self.memory_gib[left] = 0.0  # to the last bit
        if len(left):
            _release(self.machine, left)
        self.left[self.view.jobs.tenant[i]] += self.counts[i]

    def within_quota(self, i: int) -> bool:
        return bool(self.left[self.view.jobs.tenant[i]] >= self.counts[i])

    def _fits(self, i: int, gpus: Ints) -> NDArray[np.bool_]:
        """On which of these GPUs the job could sit, beside the jobs that are there."""
        memory_gib = float(self.view.jobs.memory_gib[i])
        alone = self.there[gpus] == 0
        beside = (
            (self.given[gpus] + self.shares[i] <= 1.0 + 1e-9)
            & (self.there[gpus] < MAX_SHARERS)
            & (self.memory_gib[gpus] + memory_gib <= self.room_gib[gpus] * (1.0 + 1e-9))
        )
        return (self.machine.gpus["owner"][gpus] != BLOCKED) & (alone | beside)

    def _sit(self, i: int, gpus: Ints) -> None:
        fresh = gpus[self.machine.gpus["owner"][gpus] == FREE]
        if len(fresh):
            _occupy(self.machine, int(self.view.jobs.rows[i]), fresh)
        self.given[gpus] += self.shares[i]
        self.there[gpus] += 1
        self.memory_gib[gpus] += self.view.jobs.memory_gib[i]
        self.left[self.view.jobs.tenant[i]] -= self.counts[i]
        self.gpus[i], self.fate[i] = gpus, HOLDS

    def _nearby(self, i: int) -> Ints | None:
        """GPUs for a job that grows or shrinks: its own first, then others of its nodes, then others of its kind."""
        kind = int(self.view.jobs.node_kind[i])
        own = self.view.jobs.held(i)
        could = np.flatnonzero((self.kind_of == kind) & self._fits(i, np.arange(len(self.kind_of))))
        if len(could) < self.counts[i]:
            return None
        node = self.machine.gpus["node"]
        of_node = np.bincount(node[own], minlength=len(self.machine.nodes))
        free_there = np.bincount(node[could], minlength=len(self.machine.nodes))
        mine = np.isin(could, own)
        order = np.lexsort((could, -free_there[node[could]], -of_node[node[could]], ~mine))
        return np.sort(could[order[: self.counts[i]]])

    def _anywhere(self, i: int) -> Ints | None:
        kinds = [k for k in range(len(self.machine.kinds)) if (self.view.jobs.kinds[i] >> k) & 1]
        kinds.sort(key=lambda k: -int(self.machine.kinds["free"][k]))
        for kind in kinds:
            found = self._by_rule(i, kind) if self.shares[i] >= WHOLE else self._together(i, kind)
            if found is not None:
                return found
        return None

    def _by_rule(self, i: int, kind: int) -> Ints | None:
        """Whole GPUs where the placement wants them."""
        job, count = self.view.board.table.jobs[self.view.jobs.rows[i]], int(self.counts[i])
        nodes = int(job["want_nodes"])
        nodes = nodes if nodes and count % nodes == 0 else 0
        out = np.empty(count, dtype=np.int64)
        drawn_by = int(job["id"]), int(job["holds"])
        row, skew = int(self.view.jobs.rows[i]), float(job["skew"])
        if not _place(self.machine, self.view.board.strategy, row, *drawn_by, kind, count, nodes, skew, out):
            return None
        _release(self.machine, out)
        return out

    def _together(self, i: int, kind: int) -> Ints | None:
        """GPUs on one node if possible, and rather beside other jobs than on GPUs that are still free."""
        could = np.flatnonzero((self.kind_of == kind) & self._fits(i, np.arange(len(self.kind_of))))
        count = int(self.counts[i])
        if len(could) < count:
            return None
        node = self.machine.gpus["node"][could]
        room = np.bincount(node, minlength=len(self.machine.nodes))
        used = np.bincount(node, weights=self.given[could], minlength=len(self.machine.nodes))
        enough = room[node] >= count
        order = np.lexsort((could, -self.given[could], -used[node], -room[node] * ~enough, ~enough))
        return np.sort(could[order[:count]])

    def decision(
        self, shared: bool, wake_s: float, promote: Ints | None, queues: Ints | None, memory: object
    ) -> Decision:
        holders = sorted(self.gpus)  # rows ascend with positions
        counts = self.counts[holders]
        resized = bool((counts != self.view.jobs.gpus[holders]).any())
        return Decision(
            rows=self.view.jobs.rows[holders],
            gpus=np.concatenate([self.gpus[i] for i in holders]) if holders else np.zeros(0, dtype=np.int64),
            fate=self.fate,
            wake_s=wake_s,
            promote=np.zeros(0, dtype=np.int64) if promote is None else promote,
            queues=queues,
            memory=memory,
            counts=counts if resized else None,
            shares=self.shares[holders] if shared else None,
        )


def _counts(view: View, counts: Any) -> Ints:
    """GPUs per job of the View; where nothing is said, as many as each has, or else asks for."""
    jobs = view.jobs
    if counts is None:
        return jobs.width.copy()
    given = _per_job(view, counts, "counts", "iu")
    wrong = np.flatnonzero((given < jobs.min_gpus) | (given > jobs.max_gpus))
    if len(wrong):
        i = int(wrong[0])
        raise UserError(
            f"counts[{i}] is {given[i]}, but that job runs on {jobs.min_gpus[i]} to {jobs.max_gpus[i]} GPUs",
            hint="np.clip(counts, view.jobs.min_gpus, view.jobs.max_gpus) keeps them inside",
        )
    return given.astype(np.int64)


def _shares(view: View, shares: Any) -> Floats:
    if shares is None:
        return np.ones(len(view.jobs))
    given = _per_job(view, shares, "shares", "iuf").astype(np.float64)
    wrong = np.flatnonzero(~((given > 0.0) & (given <= 1.0)))
    if len(wrong):
        i = int(wrong[0])
        raise UserError(f"shares[{i}] is {given[i]:g}", hint="a share is above 0 and at most 1, which is a whole GPU")
    return given


def _per_job(view: View, values: Sequence[Any] | NDArray[Any], name: str, kinds: str) -> NDArray[Any]:
    given = np.asarray(values)
    if given.shape != (len(view.jobs),) or given.dtype.kind not in kinds:
        raise UserError(
            f"{name} are {given.dtype} of shape {given.shape}, but view.jobs has {len(view.jobs)} jobs",
            hint=f"give one of {name} per job of the View, in the order of its columns",
        )
    return given
