"""Gandiva's migration and grow-shrink (OSDI'18): better seats for jobs that already have some.

Jobs that take turns go to GPUs that have become free, and so does a packed guest if that is worth a switch; a job split
over more servers than it needs is brought together when another leaves. A move has to gain more work than it costs; the
time run so far is the guess of what remains. Idle GPUs go to jobs that can use more, as long as their rate shows it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, entry, inlined, maker
from thebes.model.jobs import copy_numbers
from thebes.model.machine import Machine
from thebes.policy.gandiva.packing import part
from thebes.policy.gandiva.placement import QUEUED, find_free, free_on_one_server, free_on_several, shrink
from thebes.policy.gandiva.seats import (
    NOBODY,
    Jobs,
    Seats,
    contended,
    count_in,
    count_out,
    partner_of,
    seat,
    seats_of,
)


@maker
def to_free_gpus(
    m: Machine, jobs: Jobs, s: Seats, order: NDArray[np.int64], now_s: float, cooldown_s: float, margin: float
) -> int:
    """Give free GPUs to jobs that take turns (in this order) and to guests of pairs; returns how many moved."""
    moved, out = 0, np.empty(m.gpus.size, np.int64)
    free = s.free.sum()
    too_many = 1 << 30  # so many GPUs were looked for in vain, where all GPUs are alike
    for i in order:
        if free == 0:
            break
        if s.residents[i].width == 0:
            continue
        partner, gpus, kinds = partner_of(jobs.ids, s.residents, i), s.residents[i].width, int(jobs.kinds[i])
        if partner != NOBODY:
            parts = s.residents[i].guest and _worth_parting(jobs, s, i, partner, now_s, cooldown_s, margin)
            if parts and free_on_one_server(m, s, kinds, gpus, out) != QUEUED:
                part(s, i, partner)
                seat(m, s, i, out[:gpus])
                s.residents[i].moved_s = now_s
                moved += 1
                free = s.free.sum()
            continue
        if jobs.running[i] or gpus >= too_many or not contended(s.residents, s.slots, s.units, i):
            continue
        before = seats_of(s.residents, s.slots, i).copy()
        count_out(m, s, i)
        if find_free(m, s, kinds, gpus, out) == QUEUED:
            too_many = min(too_many, gpus) if m.kinds.size == 1 else too_many
            seat(m, s, i, before)
        else:
            seat(m, s, i, out[:gpus])
            moved += 1
            free = s.free.sum()
    return moved


@inlined
def _worth_parting(jobs: Jobs, s: Seats, i: int, partner: int, now_s: float, cooldown_s: float, margin: float) -> bool:
    """Whether a pair that runs would gain more by parting than moving the guest costs."""
    if not jobs.running[i]:
        return True
    if not s.residents[i].judged or now_s - s.residents[i].moved_s < cooldown_s:
        return False
    rates = jobs.speed[i] / s.residents[i].alone + jobs.speed[partner] / s.residents[partner].alone
    return (2.0 - rates) * min(jobs.ran_s[i], jobs.ran_s[partner]) >= jobs.cost_s[i] * margin


@maker
def bring_together(m: Machine, jobs: Jobs, s: Seats, now_s: float, cooldown_s: float, margin: float) -> int:
    """Move running jobs on more servers than they need to fewer where that pays; returns how many moved."""
    moved, out = 0, np.empty(m.gpus.size, np.int64)
    for i in range(jobs.rows.size):
        resident = s.residents[i]
        if not jobs.running[i] or jobs.nodes[i] <= jobs.min_nodes[i] or resident.width != jobs.gpus[i]:
            continue
        # Speed 1 is its speed at its best placement.
        gain_s = (1.0 - jobs.speed[i]) * jobs.ran_s[i]
        if resident.partner != NOBODY or now_s - resident.moved_s < cooldown_s:
            continue
        pays = gain_s >= jobs.cost_s[i] * margin and gain_s > 0.0  # this is false if its speed is unknown
        if contended(s.residents, s.slots, s.units, i) or not pays:
            continue
        before, gpus = seats_of(s.residents, s.slots, i).copy(), jobs.gpus[i]
        count_out(m, s, i)
        found = free_on_one_server(m, s, jobs.kinds[i], gpus, out) != QUEUED
        kind = m.nodes[m.gpus[before[0]].node].node_kind
        if not found:
            servers = free_on_several(m, s, kind, gpus, 3, out)
            found = servers > 0 and servers < jobs.nodes[i]
        if found:
            seat(m, s, i, out[:gpus])
            resident.moved_s = now_s
            moved += 1
        else:
            seat(m, s, i, before)
    return moved


@compiled
def judge_growth(m: Machine, jobs: Jobs, s: Seats, now_s: float, window_s: float, least: float) -> float:
    """One window after it grew, a job whose rate did not rise enough shrinks back and stays as it is from then on."""
    next_s = np.inf
    for i in range(jobs.rows.size):
        resident = s.residents[i]
        if resident.width <= jobs.gpus[i] or resident.judged or not jobs.running[i]:
            continue
        ends_s = jobs.run_from_s[i] + window_s
        if now_s < ends_s:
            next_s = min(next_s, ends_s)
            continue
        if np.isnan(jobs.speed[i]):  # it is judged once its rate is known
            next_s = min(next_s, now_s + window_s)
            continue
        resident.judged = True
        if jobs.speed[i] < least * resident.narrow:
            shrink(m, jobs, s, i)
            resident.fixed = True
    return next_s


@maker
def grow(m: Machine, jobs: Jobs, s: Seats, now_s: float, cooldown_s: float, margin: float, window_s: float) -> float:
    """Give idle GPUs to running jobs that can use more, on their own servers first; returns when more could grow."""
    next_s = np.inf
    for i in range(jobs.rows.size):
        resident = s.residents[i]
        if jobs.max_gpus[i] <= jobs.gpus[i] or resident.width != jobs.gpus[i] or resident.fixed:
            continue
        if resident.partner != NOBODY or resident.width == 0:
            continue
        free = _idle_gpus_for(m, s, i, jobs.max_gpus[i] - jobs.gpus[i])
        if free.size == 0:
            continue
        # Its rate on what it asked for has to be known first; then the gain, if all goes well, has to exceed the cost.
        speed = jobs.speed[i] if jobs.running[i] else 1.0
        if np.isnan(speed):
            continue
        needed_s = max(window_s, jobs.cost_s[i] * margin * jobs.gpus[i] / (free.size * speed))
        begins_s = max(now_s, jobs.run_from_s[i]) if jobs.running[i] else now_s
        ready_s = max(resident.moved_s + cooldown_s, begins_s)
        if jobs.ran_s[i] < needed_s * (1.0 - 1e-9):
            ready_s = max(ready_s, begins_s + needed_s - jobs.ran_s[i])
        if not jobs.running[i]:
            ready_s = max(ready_s, now_s + window_s)
        if ready_s > now_s:
            next_s = min(next_s, ready_s)
            continue
        count_out(m, s, i)
        copy_numbers(free, s.slots[resident.first + resident.width :])
        resident.width += free.size
        count_in(m, s, i)
        resident.narrow, resident.judged, resident.moved_s = jobs.speed[i], False, now_s
        next_s = min(next_s, now_s + jobs.cost_s[i] + window_s)
    return next_s


@inlined
def _idle_gpus_for(m: Machine, s: Seats, i: int, most: int) -> NDArray[np.int64]:
    """Free GPUs of its own servers; if there are none, of the one other server of its kind with the most."""
    out, at = np.empty(most, np.int64), 0
    for gpu in seats_of(s.residents, s.slots, i):
        node = m.gpus[gpu].node
        first = m.nodes[node].first
        for other in range(first, first + m.nodes[node].gpus):
            if at < most and s.units[other] == 0 and not s.shut[other] and not _among(out[:at], other):
                out[at] = other
                at += 1
    if at > 0:
        return out[:at]
    kind, best = m.nodes[m.gpus[seats_of(s.residents, s.slots, i)[0]].node].node_kind, NOBODY
    for node in range(m.nodes.size):
        if m.nodes[node].node_kind == kind and s.free[node] > 0 and (best < 0 or s.free[node] > s.free[best]):
            best = node
    if best >= 0:
        first = m.nodes[best].first
        for other in range(first, first + m.nodes[best].gpus):
            if at < most and s.units[other] == 0 and not s.shut[other]:
                out[at] = other
                at += 1
    return out[:at]


@inlined
def _among(gpus: NDArray[np.int64], gpu: int) -> bool:
    for one in gpus:  # noqa: SIM110 - Numba compiles no generators
        if one == gpu:
            return True
    return False


to_free_gpus_entry, bring_together_entry = entry(to_free_gpus), entry(bring_together)
judge_growth_entry, grow_entry = entry(judge_growth), entry(grow)
