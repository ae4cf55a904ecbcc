"""Gandiva's time slicing (OSDI'18, suspend-resume): jobs with the same seats take turns on one cluster-wide clock.

It is a weighted round robin: a unit runs for as many quanta as its weight says, then those that have waited longest. A
gang is resumed on all of its GPUs or not at all. A job that never ran has the next turn, for early feedback, unless a
job has waited beyond the limit: the guard against starvation, which the paper lacks, raises weights with waiting.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Records, entry, inlined, inner, maker
from thebes.model.machine import Machine
from thebes.policy.gandiva.placement import QUEUED, find_free
from thebes.policy.gandiva.seats import NOBODY, Jobs, Seats, contended, count_out, leads, partner_of, seat, seats_of


def quantum_s(cost_s: NDArray[np.float64], gpus: NDArray[np.int64], least_s: float, share: float) -> float:
    """A quantum so long that jobs that take turns lose no more than this share of their GPU-seconds to switching."""
    if not len(cost_s):
        return least_s
    return max(least_s, float(np.average(cost_s, weights=gpus)) / share)


def weights(priority: NDArray[np.int64], waited_s: NDArray[np.float64], starve_after_s: float) -> NDArray[np.float64]:
    """1 for every job, more by priority; it rises in proportion to a wait beyond the limit."""
    over = np.maximum(0.0, waited_s - starve_after_s) / starve_after_s
    return (1.0 + np.maximum(0, priority)) * (1.0 + over)


def turn_order(
    weight: NDArray[np.float64],
    waited_s: NDArray[np.float64],
    new: NDArray[np.bool_],
    starved: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """The next jobs: those beyond the limit, then jobs that never ran, then by weighted wait; ties in order of rows."""
    return np.lexsort((-weight * waited_s, ~new, ~starved))


@maker
def taking_turns(jobs: Jobs, s: Seats) -> NDArray[np.bool_]:
    """The jobs on whose GPUs another unit has seats, too."""
    turns = np.zeros(jobs.rows.size, np.bool_)
    for i in range(jobs.rows.size):
        turns[i] = s.residents[i].width > 0 and contended(s.residents, s.slots, s.units, i)
    return turns


@maker
def who_is_on(
    m: Machine, jobs: Jobs, s: Seats, stays: NDArray[np.bool_], order: NDArray[np.int64], left: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(on, kept off by a quota). Jobs that stay keep their GPUs; the others come in this order, gang by gang.

    `left` is what each tenant may hold; a tenant above a lowered quota keeps what runs.
    """
    on, over_quota = np.zeros(jobs.rows.size, np.bool_), np.zeros(jobs.rows.size, np.bool_)
    busy = np.zeros(s.units.size, np.bool_)
    for i in range(jobs.rows.size):
        if stays[i] and leads(s.residents, i) and s.residents[i].width > 0:
            _turn_on(jobs.ids, jobs.tenant, s.residents, s.slots, i, on, busy, left)
    for i in order:
        if on[i] or not leads(s.residents, i) or s.residents[i].width == 0 or _any_busy(s.residents, s.slots, i, busy):
            continue
        partner = partner_of(jobs.ids, s.residents, i)
        if not _in_quota(jobs.tenant, s.residents[i].width, i, partner, left):
            over_quota[i] = True
            if partner != NOBODY:
                over_quota[partner] = True
            continue
        _turn_on(jobs.ids, jobs.tenant, s.residents, s.slots, i, on, busy, left)
    _use_idle(m, jobs, s, on, over_quota, busy, order, left)
    return on, over_quota


@inlined
def _use_idle(
    m: Machine,
    jobs: Jobs,
    s: Seats,
    on: NDArray[np.bool_],
    over_quota: NDArray[np.bool_],
    busy: NDArray[np.bool_],
    order: NDArray[np.int64],
    left: NDArray[np.int64],
) -> None:
    """Move waiting jobs to GPUs that stand idle because the gangs with seats there lack others."""
    idle = Seats(s.residents, s.slots, busy.astype(np.int64), s.shut, s.room.copy(), s.room, s.demand, s.affinity)
    total = 0
    for gpu in range(busy.size):
        idle.free[m.gpus[gpu].node] -= busy[gpu]
        total += not busy[gpu] and not s.shut[gpu]
    out, too_many = np.empty(m.gpus.size, np.int64), 1 << 30
    for i in order:
        if total == 0:
            break
        gpus, kinds = int(jobs.gpus[i]), int(jobs.kinds[i])
        if on[i] or over_quota[i] or s.residents[i].partner != NOBODY or gpus > total or gpus >= too_many:
            continue
        if left[jobs.tenant[i]] < gpus:
            continue
        if find_free(m, idle, kinds, gpus, out) == QUEUED:
            too_many = gpus if m.kinds.size == 1 else too_many
            continue
        if s.residents[i].width > 0:
            count_out(m, s, i)
        seat(m, s, i, out[:gpus])
        _turn_on(jobs.ids, jobs.tenant, s.residents, s.slots, i, on, busy, left)
        for gpu in seats_of(s.residents, s.slots, i):
            idle.units[gpu] = 1
            idle.free[m.gpus[gpu].node] -= 1
        total -= gpus


@inner
def _turn_on(
    ids: NDArray[np.int64],
    tenant: NDArray[np.int64],
    residents: Records,
    slots: NDArray[np.int64],
    i: int,
    on: NDArray[np.bool_],
    busy: NDArray[np.bool_],
    left: NDArray[np.int64],
) -> None:
    on[i] = True
    left[tenant[i]] -= residents[i].width
    for gpu in seats_of(residents, slots, i):
        busy[gpu] = True
    partner = partner_of(ids, residents, i)
    if partner != NOBODY:
        on[partner] = True
        left[tenant[partner]] -= residents[partner].width


@inlined
def _any_busy(residents: Records, slots: NDArray[np.int64], i: int, busy: NDArray[np.bool_]) -> bool:
    for gpu in seats_of(residents, slots, i):  # noqa: SIM110 - Numba compiles no generators
        if busy[gpu]:
            return True
    return False


@inlined
def _in_quota(tenant: NDArray[np.int64], width: int, i: int, partner: int, left: NDArray[np.int64]) -> bool:
    mine = tenant[i]
    if partner == NOBODY:
        return bool(left[mine] >= width)
    theirs = tenant[partner]
    if mine == theirs:
        return bool(left[mine] >= 2 * width)
    return bool(left[mine] >= width and left[theirs] >= width)


taking_turns_entry, who_is_on_entry = entry(taking_turns), entry(who_is_on)
