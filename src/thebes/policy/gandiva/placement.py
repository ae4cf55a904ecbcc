"""Gandiva's reactive placement by affinity (OSDI'18, Algorithm 1): the GPUs on which a job is given a seat.

For a job of g GPUs, inside each step on the least-loaded server: (1) servers of affinity g with g free GPUs, (2) those
of no affinity yet, (3) any others with g free GPUs, in the end over several servers, fewest first, (4) over-subscribe a
server of affinity g, (5) queue. The starvation guard lets a job that was queued for too long over-subscribe any server.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import entry, inlined, inner, inner_maker, maker
from thebes.model.jobs import copy_numbers
from thebes.model.machine import Machine
from thebes.policy.gandiva.seats import (
    NOBODY,
    Jobs,
    Seats,
    count_in,
    count_out,
    leads,
    seat,
    seats_of,
)

# The step that found seats; QUEUED if none did.
QUEUED, SAME_AFFINITY, NO_AFFINITY, OTHER_AFFINITY, OVER_SUBSCRIBED = range(5)


@inner
def allowed(m: Machine, kinds: int, node: int) -> bool:
    return bool((kinds >> m.nodes[node].node_kind) & 1)


@inner
def load(s: Seats, node: int) -> float:
    return s.demand[node] / s.room[node]


@inner_maker
def free_on_one_server(m: Machine, s: Seats, kinds: int, gpus: int, out: NDArray[np.int64]) -> int:
    """Steps 1 to 3 on one server; returns the step, or QUEUED."""
    best = np.full(4, NOBODY)
    for node in range(m.nodes.size):
        if s.free[node] < gpus or not allowed(m, kinds, node):
            continue
        affinity = s.affinity[node]
        step = SAME_AFFINITY if affinity == gpus else (NO_AFFINITY if affinity == 0 else OTHER_AFFINITY)
        if best[step] < 0 or load(s, node) < load(s, best[step]):
            best[step] = node
    for step in range(SAME_AFFINITY, OVER_SUBSCRIBED):
        if best[step] >= 0:
            free_gpus_on(m, s, best[step], gpus, out, 0)
            return step
    return QUEUED


@inner
def free_gpus_on(m: Machine, s: Seats, node: int, gpus: int, out: NDArray[np.int64], at: int) -> int:
    """Free GPUs of a server, the best-fitting NVLink group first."""
    first, last, need = m.nodes[node].first, m.nodes[node].first + m.nodes[node].gpus, gpus
    while need > 0:
        best, best_free, gpu = -1, 0, first
        while gpu < last:
            group, free = m.gpus[gpu].group, 0
            while gpu < last and m.gpus[gpu].group == group:
                free += s.units[gpu] == 0 and not s.shut[gpu]
                gpu += 1
            for k in range(at - (gpus - need), at):  # a group that was chosen before is used up
                free -= m.gpus[out[k]].group == group
            fits, best_fits = free >= need, best_free >= need
            better = (fits and (not best_fits or free < best_free)) or (not fits and not best_fits and free > best_free)
            if free > 0 and (best < 0 or better):
                best, best_free = group, free
        for gpu in range(first, last):
            if need > 0 and m.gpus[gpu].group == best and s.units[gpu] == 0 and not s.shut[gpu]:
                out[at] = gpu
                at += 1
                need -= 1
    return at


@inner
def _in_step(s: Seats, node: int, gpus: int, step: int) -> bool:
    if step == SAME_AFFINITY:
        return s.affinity[node] == gpus
    return step == OTHER_AFFINITY or s.affinity[node] == 0


@inner_maker
def free_on_several(m: Machine, s: Seats, kind: int, gpus: int, step: int, out: NDArray[np.int64]) -> int:
    """The fewest servers of one kind with so many free GPUs, in one rack if that costs none more; returns how many."""
    racks, top = m.rack_free.shape[0], m.kinds[kind].gpus_per_node + 1
    levels, total = np.zeros((racks + 1, top), np.int64), 0
    for node in range(m.nodes.size):
        if m.nodes[node].node_kind == kind and s.free[node] > 0 and _in_step(s, node, gpus, step):
            levels[m.nodes[node].rack, s.free[node]] += 1
            levels[racks, s.free[node]] += 1
            total += s.free[node]
    if total < gpus:
        return 0
    fewest, chosen = _servers_needed(levels[racks], gpus), NOBODY
    for rack in range(racks):
        if _servers_needed(levels[rack], gpus) == fewest:
            chosen = rack
            break
    used, at, servers = np.zeros(m.nodes.size, np.bool_), 0, 0
    while at < gpus:
        rest, best = gpus - at, NOBODY
        for node in range(m.nodes.size):
            if m.nodes[node].node_kind != kind or s.free[node] == 0 or used[node]:
                continue
            if not _in_step(s, node, gpus, step) or (chosen >= 0 and m.nodes[node].rack != chosen):
                continue
            if best < 0 or _fits_better(s, node, best, rest):
                best = node
        used[best] = True
        servers += 1
        at = free_gpus_on(m, s, best, min(rest, s.free[best]), out, at)
    return servers


@inlined
def _fits_better(s: Seats, node: int, best: int, rest: int) -> bool:
    """Whether a server fits better: the tightest that holds the rest, else the most free GPUs; then the least load."""
    free, best_free = s.free[node], s.free[best]
    if (free >= rest) != (best_free >= rest):
        return free >= rest
    if free != best_free:
        return free < best_free if free >= rest else free > best_free
    return load(s, node) < load(s, best)


@inner
def _servers_needed(levels: NDArray[np.int64], gpus: int) -> int:
    needed, rest = 0, gpus
    for free in range(levels.size - 1, 0, -1):
        use = min(levels[free], -(-rest // free))
        needed += use
        rest -= use * free
        if rest <= 0:
            return needed
    return 1 << 30


@inlined
def fits_one_server(m: Machine, s: Seats, kinds: int, gpus: int) -> bool:
    for node in range(m.nodes.size):  # noqa: SIM110 - Numba compiles no generators
        if s.room[node] >= gpus and allowed(m, kinds, node):
            return True
    return False


@inner
def find_free(m: Machine, s: Seats, kinds: int, gpus: int, out: NDArray[np.int64]) -> int:
    """Steps 1 to 3, on one server if possible, else on the fewest."""
    step = free_on_one_server(m, s, kinds, gpus, out)
    if step != QUEUED:
        return step
    # A job that one server could hold is spread only in step 3, which allows fragments on purpose.
    first = OTHER_AFFINITY if fits_one_server(m, s, kinds, gpus) else SAME_AFFINITY
    for step in range(first, OVER_SUBSCRIBED):
        for kind in range(m.kinds.size):
            if (kinds >> kind) & 1 and free_on_several(m, s, kind, gpus, step, out) > 0:
                return step
    return QUEUED


@inlined
def over_subscribe(
    m: Machine, jobs: Jobs, s: Seats, kinds: int, gpus: int, any_server: bool, most: int, out: NDArray[np.int64]
) -> bool:
    """Step 4: seats beside others on the least-loaded server of affinity g (of any, for the starvation guard)."""
    best, one_server = NOBODY, False
    for node in range(m.nodes.size):
        if s.room[node] < gpus or not allowed(m, kinds, node):
            continue
        one_server = True
        if not any_server and s.affinity[node] != gpus:
            continue
        if -(-(s.demand[node] + gpus) // s.room[node]) > most:
            continue
        if best < 0 or load(s, node) < load(s, best):
            best = node
    if best >= 0:
        if not _beside_equals(m, jobs, s, best, gpus, kinds, out):
            _least_crowded(m, s, best, gpus, out, 0)
        return True
    if one_server:
        return False
    if _beside_equals(m, jobs, s, NOBODY, gpus, kinds, out):
        return _tallest(m, s, out[:gpus]) < most
    return any_server and _least_loaded_servers(m, s, kinds, gpus, out) and _tallest(m, s, out[:gpus]) < most


@inner
def _tallest(m: Machine, s: Seats, gpus: NDArray[np.int64]) -> int:
    height = 0
    for gpu in gpus:
        node = m.gpus[gpu].node
        height = max(height, int(-(-s.demand[node] // s.room[node])))
    return height


@inner_maker
def _beside_equals(m: Machine, jobs: Jobs, s: Seats, node: int, gpus: int, kinds: int, out: NDArray[np.int64]) -> bool:
    """Take the seats of the least crowded unit of the same size (on this server), so that gangs take clean turns."""
    best, best_units = NOBODY, 0
    for i in range(jobs.rows.size):
        if s.residents[i].width != gpus or not leads(s.residents, i):
            continue
        theirs, most, here = seats_of(s.residents, s.slots, i), 0, True
        for gpu in theirs:
            most = max(most, s.units[gpu])
            if node >= 0 and m.gpus[gpu].node != node:
                here = False
                break
        if here and allowed(m, kinds, m.gpus[theirs[0]].node) and (best < 0 or most < best_units):
            best, best_units = i, most
    if best < 0:
        return False
    copy_numbers(seats_of(s.residents, s.slots, best), out)
    return True


@inner
def _least_crowded(m: Machine, s: Seats, node: int, gpus: int, out: NDArray[np.int64], at: int) -> int:
    first, end = m.nodes[node].first, at + gpus
    height = 0
    while at < end:
        for gpu in range(first, first + m.nodes[node].gpus):
            if at < end and not s.shut[gpu] and s.units[gpu] == height:
                out[at] = gpu
                at += 1
        height += 1
    return at


@inlined
def _least_loaded_servers(m: Machine, s: Seats, kinds: int, gpus: int, out: NDArray[np.int64]) -> bool:
    """For a gang larger than a server that finds no other of its size: the roomiest servers, least loaded first."""
    for kind in range(m.kinds.size):
        total = 0
        for node in range(m.nodes.size):
            total += s.room[node] if m.nodes[node].node_kind == kind else 0
        if not (kinds >> kind) & 1 or total < gpus:
            continue
        used, at = np.zeros(m.nodes.size, np.bool_), 0
        while at < gpus:
            best = NOBODY
            for node in range(m.nodes.size):
                if m.nodes[node].node_kind != kind or used[node] or s.room[node] == 0:
                    continue
                roomier = best >= 0 and s.room[node] > s.room[best]
                as_roomy = best >= 0 and s.room[node] == s.room[best]
                if best < 0 or roomier or (as_roomy and load(s, node) < load(s, best)):
                    best = node
            used[best] = True
            at = _least_crowded(m, s, best, min(gpus - at, s.room[best]), out, at)
        return True
    return False


@inner
def shrink(m: Machine, jobs: Jobs, s: Seats, i: int) -> None:
    """Shrink a job back to the GPUs that it asked for."""
    count_out(m, s, i)
    s.residents[i].width = jobs.gpus[i]
    count_in(m, s, i)


@inlined
def _shrink_the_last(m: Machine, jobs: Jobs, s: Seats) -> bool:
    """Let the job that grew last give its further GPUs back, because load rises."""
    last = NOBODY
    for i in range(jobs.rows.size):
        if s.residents[i].width > jobs.gpus[i] and (last < 0 or s.residents[i].moved_s >= s.residents[last].moved_s):
            last = i
    if last < 0:
        return False
    shrink(m, jobs, s, last)
    return True


@maker
def place_queue(
    m: Machine,
    jobs: Jobs,
    s: Seats,
    order: NDArray[np.int64],
    starved: NDArray[np.bool_],
    most: int,
    left: NDArray[np.int64],
    over_quota: NDArray[np.bool_],
) -> int:
    """Give seats to jobs without, in this order; returns how many are still queued.

    `most` is the height that no server may exceed by over-subscription; `left` is what each tenant may still have. A
    job equal to one that was refused earlier in the queue is refused without looking again.
    """
    out = np.empty(m.gpus.size, np.int64)
    refused = np.empty((64, 3), np.int64)
    refusals, queued = 0, 0
    grown = False
    for i in range(jobs.rows.size):
        grown = grown or s.residents[i].width > jobs.gpus[i]
    for i in order:
        gpus, kinds, guard = int(jobs.gpus[i]), int(jobs.kinds[i]), bool(starved[i])
        if left[jobs.tenant[i]] < gpus:
            over_quota[i] = True
            continue
        known = False
        for k in range(refusals):
            if refused[k, 0] == gpus and refused[k, 1] == kinds and refused[k, 2] == guard:
                known = True
                break
        if known:
            queued += 1
            continue
        found = find_free(m, s, kinds, gpus, out) != QUEUED
        while not found and grown:
            grown = _shrink_the_last(m, jobs, s)
            found = find_free(m, s, kinds, gpus, out) != QUEUED
        if not found:
            found = over_subscribe(m, jobs, s, kinds, gpus, guard, most, out)
        if found:
            seat(m, s, i, out[:gpus])
            left[jobs.tenant[i]] -= gpus
            refusals = 0 if guard else refusals  # a server of a new affinity may take other jobs of its size
        else:
            queued += 1
            if refusals < refused.shape[0]:
                refused[refusals, 0], refused[refusals, 1], refused[refusals, 2] = gpus, kinds, guard
                refusals += 1
    return queued


place_queue_entry = entry(place_queue)
