"""From an order of jobs to a Decision: which job holds which GPUs when the cluster is handed out in that order.

`fill` is what most policies end with. Each job in turn takes its GPUs from the cluster; one that does not fit is passed
over, and a running job that is passed over has to make room. Running jobs stay where they are. Where the placement
refuses a gang, running jobs after it in the order give way, lowest first, until it is accepted. A job is given up only
when every job that starts has a proven place: if nothing helps the gang, the jobs that were to make room for it stay.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Records, entry, inlined, inner, maker
from thebes.model.decision import BEHIND, HOLDS, NO_GPUS, NO_PLACE, NOT_CHOSEN, OVER_QUOTA, Decision
from thebes.model.jobs import HELD, NEVER, JobTable, copy_numbers, gpus_of
from thebes.model.machine import NONE, Machine, all_free, copy_state, occupy, release
from thebes.model.view import Sketch, View
from thebes.placement.strategies import Strategy, place
from thebes.policy.seating import by_priority, checked_order, fill_sized


def fill(
    view: View,
    order: Any,
    *,
    counts: Any = None,
    shares: Any = None,
    preempt: bool = True,
    strict: bool = False,
    wake_s: float = NEVER,
    promote: NDArray[np.int64] | None = None,
    queues: NDArray[np.int64] | None = None,
    memory: object = None,
) -> Decision:
    """Hand the cluster out to `view.jobs` in this order (positions in its columns; jobs left out do not run).

    `counts`: how many GPUs each job of the View gets, between its min_gpus and max_gpus; fewer of them if the placement
    refuses so many even when all jobs after it in the order give way. `shares`: which share of each of its GPUs; jobs
    whose shares add up to 1 at most, and whose memory fits, sit together (the policy says `shares = True`).
    `preempt=False`: running jobs stay, and only free GPUs are handed out. `strict=True`: no job passes one that
    does not fit. The other arguments go into the Decision as they are. Jobs of higher priority go before all others,
    whatever the order says; a tenant gets no more than its quota.
    """
    order = by_priority(view, checked_order(view, order, "fill"))
    if counts is not None or shares is not None:
        seating, shared = fill_sized(view, order, counts, shares, preempt, strict)
        return seating.decision(shared, wake_s, promote, queues, memory)
    alive = view.jobs.rows
    rows = alive[order]
    state = np.full(len(alive), NOT_CHOSEN, dtype=np.int64)
    chosen = np.empty(len(rows), dtype=np.int64)
    table, sketch, strategy, gang_classes = view.board
    _draw_up(table, view.machine, sketch, strategy, alive, rows, preempt, strict, chosen, gang_classes)
    state[order] = chosen
    if not preempt:
        state[view.jobs.running] = HOLDS
    holders = view.jobs.rows[state == HOLDS]
    widths = table.jobs["width"][holders]
    resized = bool((widths != table.jobs["gpus"][holders]).any())
    return Decision(
        rows=holders,
        gpus=_collect(table.jobs, sketch.slots, holders),
        fate=state,
        wake_s=wake_s,
        promote=np.zeros(0, dtype=np.int64) if promote is None else promote,
        queues=queues,
        memory=memory,
        counts=widths if resized else None,
    )


@maker
def draw_up(
    table: JobTable,
    machine: Machine,
    sketch: Sketch,
    strategy: Strategy,
    alive: NDArray[np.int64],
    rows: NDArray[np.int64],
    preempt: bool,
    strict: bool,
    fate: NDArray[np.int64],
    gang_classes: int,
) -> None:
    """Hand out a copy of the cluster; after that, sketch and `fate` tell the wanted state."""
    copy_state(machine, sketch.machine)
    trial = JobTable(table.jobs, sketch.slots, table.quotas.copy())
    for row in alive:
        if table.jobs[row].phase == HELD:
            copy_numbers(gpus_of(table, row), gpus_of(trial, row))
    if preempt and rows.size < alive.size:  # a running job that the policy did not list gives its GPUs up
        for row in alive:
            sketch.mark[row] = False
        for row in rows:
            sketch.mark[row] = True
        for row in alive:
            if table.jobs[row].phase == HELD and not sketch.mark[row]:
                release(sketch.machine, gpus_of(trial, row))
    hand_out(trial, sketch.machine, strategy, rows, preempt, strict, fate, gang_classes)


@maker
def collect(jobs: Records, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The GPUs of these jobs, one after the other."""
    total = 0
    for row in rows:
        total += jobs[row].width
    gpus = np.empty(total, dtype=np.int64)
    at = 0
    for row in rows:
        first = jobs[row].first_slot
        for i in range(jobs[row].width):
            gpus[at] = slots[first + i]
            at += 1
    return gpus


_draw_up, _collect = entry(draw_up), entry(collect)


@inner
def read_free(m: Machine, budget: NDArray[np.int64]) -> None:
    for kind in range(budget.size):
        budget[kind] = m.kinds[kind].free


@inner
def read_total(m: Machine, budget: NDArray[np.int64]) -> None:
    for kind in range(budget.size):
        budget[kind] = m.kinds[kind].total


@inner
def fitting_kind(budget: NDArray[np.int64], kinds: int, gpus: int) -> int:
    """The allowed kind with the most GPUs left that holds the gang; -1 if none does."""
    best = NONE
    for kind in range(budget.size):
        if (kinds >> kind) & 1 and budget[kind] >= gpus and (best < 0 or budget[kind] > budget[best]):
            best = kind
    return best


@inner
def charge_kind(budget: NDArray[np.int64], idle: NDArray[np.int64], kinds: int, gpus: int) -> int:
    """The allowed kind to which a gang is charged, which pays at once; -1 if none has so many GPUs left.

    A kind whose idle GPUs hold the gang goes first, because no job has to make room; then the kind with the most left.
    """
    best, has_room = NONE, False
    for kind in range(budget.size):
        if not (kinds >> kind) & 1 or budget[kind] < gpus:
            continue
        room = idle[kind] >= gpus
        if best < 0 or (room and not has_room) or (room == has_room and budget[kind] > budget[best]):
            best, has_room = kind, room
    if best >= 0:
        budget[best] -= gpus
        if has_room:
            idle[best] -= gpus
    return best


@inner
def try_to_place(
    table: JobTable, m: Machine, strategy: Strategy, budget: NDArray[np.int64], row: int, charged: int
) -> bool:
    """Place a gang on the kind to which it was charged, or else on the one with the most room, or else on any that it
    accepts; pay from the budget. `charged` is NONE if nothing was charged yet."""
    job = table.jobs[row]
    out = gpus_of(table, row)
    preferred = fitting_kind(budget, job.kinds, job.gpus)
    if charged >= 0 and budget[charged] >= job.gpus:
        preferred = charged
    for turn in range(budget.size):
        kind = preferred
        if turn > 0:
            kind = turn - 1 if turn <= preferred else turn
        if (
            preferred >= 0
            and (job.kinds >> kind) & 1
            and budget[kind] >= job.gpus
            and place(m, strategy, row, job.id, job.holds, kind, job.gpus, job.want_nodes, job.skew, out)
        ):
            budget[kind] -= job.gpus
            return True
    return False


@inner
def within_quota(table: JobTable, row: int) -> bool:
    """Whether the job's tenant may have its GPUs, beside what it was given so far in this decision."""
    return table.quotas[table.jobs[row].tenant] >= table.jobs[row].width


@inner
def charge_quota(table: JobTable, row: int) -> None:
    table.quotas[table.jobs[row].tenant] -= table.jobs[row].width


@inner
def refund_quota(table: JobTable, row: int) -> None:
    table.quotas[table.jobs[row].tenant] += table.jobs[row].width


@inner
def keep_if_free(table: JobTable, m: Machine, row: int) -> bool:
    """Give a victim its GPUs back, unless another job sits on one of them."""
    gpus = gpus_of(table, row)
    if not all_free(m, gpus):
        return False
    occupy(m, row, gpus)
    return True


@inner
def save_victims(table: JobTable, m: Machine, victims: NDArray[np.int64], unplaced_gpus: int) -> None:
    """After a refusal, let victims stay, best first, if all jobs still to be placed have room without their GPUs.

    A victim that is saved becomes -1 in the list.
    """
    spare = -unplaced_gpus
    for kind in range(m.kinds.size):
        spare += m.kinds[kind].free
    for i in range(victims.size):
        row = victims[i]
        if row >= 0 and table.jobs[row].width <= spare and within_quota(table, row) and keep_if_free(table, m, row):
            charge_quota(table, row)
            spare -= table.jobs[row].width
            victims[i] = -1


@inner
def sits(table: JobTable, m: Machine, row: int) -> bool:
    """Whether a job that ran before this decision still has its GPUs in it."""
    return m.gpus[table.slots[table.jobs[row].first_slot]].owner == row


@inner
def could_give_way(table: JobTable, m: Machine, row: int, other: int) -> bool:
    """Whether `other`, which ran before this decision, still has GPUs of a kind that `row` may have."""
    return (table.jobs[row].kinds >> table.jobs[other].node_kind) & 1 == 1 and sits(table, m, other)


@inner
def make_way(
    table: JobTable,
    m: Machine,
    strategy: Strategy,
    budget: NDArray[np.int64],
    row: int,
    charged: int,
    lower: NDArray[np.int64],
) -> bool:
    """Let running jobs after a refused gang in the order give way, lowest first, until it has room.

    `lower` are these jobs, best first. Those whose GPUs are still free once the gang sits stay, and become -1 in the
    list; the others have to go. If the gang is refused even without all of them, all stay.
    """
    at, placed = lower.size, False
    while at > 0 and not placed:
        at -= 1
        release(m, gpus_of(table, lower[at]))
        read_free(m, budget)
        placed = try_to_place(table, m, strategy, budget, row, charged)
    for i in range(lower.size):
        if i < at or keep_if_free(table, m, lower[i]):
            lower[i] = -1
    return placed


# The state of a job while the cluster is handed out, beside the fates of thebes.model.decision.
_STARTS, _VICTIM, _GAVE_WAY = 100, 101, 102


@inlined
def hand_out(
    table: JobTable,
    m: Machine,
    strategy: Strategy,
    rows: NDArray[np.int64],
    preempt: bool,
    strict: bool,
    fate: NDArray[np.int64],
    gang_classes: int,
) -> None:
    """Change machine and slots to the wanted state, and tell the fate of each row."""
    closed = np.zeros(gang_classes, dtype=np.bool_)
    budget = np.empty(m.kinds.size, dtype=np.int64)
    if preempt:
        charged, idle = np.empty(rows.size, dtype=np.int64), np.empty(m.kinds.size, dtype=np.int64)
        read_total(m, budget)
        read_free(m, idle)
        if _choose(table, rows, budget, idle, strict, fate, charged):
            _settle(table, m, strategy, rows, budget, fate, charged, closed)
        return
    read_free(m, budget)
    blocked = False
    for i in range(rows.size):
        if table.jobs[rows[i]].phase == HELD:
            charge_quota(table, rows[i])
    for i in range(rows.size):
        job = table.jobs[rows[i]]
        if job.phase == HELD:
            fate[i] = HOLDS
        elif blocked:
            fate[i] = BEHIND
        elif not within_quota(table, rows[i]):
            fate[i] = OVER_QUOTA
        elif fitting_kind(budget, job.kinds, job.gpus) < 0:
            fate[i] = NO_GPUS
            blocked = strict
        elif not closed[job.gang_class] and try_to_place(table, m, strategy, budget, rows[i], NONE):
            fate[i] = HOLDS
            charge_quota(table, rows[i])
        else:
            fate[i] = NO_PLACE
            closed[job.gang_class] = True
            blocked = strict


@inlined
def _choose(
    table: JobTable,
    rows: NDArray[np.int64],
    budget: NDArray[np.int64],
    idle: NDArray[np.int64],
    strict: bool,
    fate: NDArray[np.int64],
    charged: NDArray[np.int64],
) -> bool:
    """Go down the order with the whole cluster's GPUs to give; returns whether anything changes."""
    changes, blocked = False, False
    for i in range(rows.size):
        job = table.jobs[rows[i]]
        if job.phase == HELD:
            if budget[job.node_kind] >= job.width and not blocked and within_quota(table, rows[i]):
                budget[job.node_kind] -= job.width
                charge_quota(table, rows[i])
                fate[i] = HOLDS
            else:
                fate[i] = _VICTIM
                changes = True
            continue
        if blocked:
            fate[i] = BEHIND
            continue
        if not within_quota(table, rows[i]):
            fate[i] = OVER_QUOTA
            continue
        charged[i] = charge_kind(budget, idle, job.kinds, job.gpus)
        if charged[i] >= 0:
            charge_quota(table, rows[i])
            fate[i] = _STARTS
            changes = True
        else:
            fate[i] = NO_GPUS
            blocked = strict
    return changes


@inlined
def _settle(
    table: JobTable,
    m: Machine,
    strategy: Strategy,
    rows: NDArray[np.int64],
    budget: NDArray[np.int64],
    fate: NDArray[np.int64],
    charged: NDArray[np.int64],
    closed: NDArray[np.bool_],
) -> None:
    """Take victims out and newcomers in; what refusals leave over goes to the next jobs in order."""
    victims, unplaced = 0, 0
    scratch = np.empty(rows.size, dtype=np.int64)
    lower, places = np.empty(rows.size, dtype=np.int64), np.empty(rows.size, dtype=np.int64)
    for i in range(rows.size):
        if fate[i] == _VICTIM:
            release(m, gpus_of(table, rows[i]))
            scratch[victims] = rows[i]
            victims += 1
        elif fate[i] == _STARTS:
            unplaced += table.jobs[rows[i]].gpus
    left_over = False
    for i in range(rows.size):
        if fate[i] != _STARTS:
            continue
        job = table.jobs[rows[i]]
        read_free(m, budget)
        unplaced -= job.gpus
        if try_to_place(table, m, strategy, budget, rows[i], charged[i]):
            fate[i] = HOLDS
            continue
        left_over = True
        count = _list_lower(table, m, rows, i, lower, places)
        if make_way(table, m, strategy, budget, rows[i], charged[i], lower[:count]):
            fate[i] = HOLDS
            for k in range(count):
                if lower[k] >= 0:
                    fate[places[k]] = _GAVE_WAY
                    refund_quota(table, lower[k])
            continue
        closed[job.gang_class] = True
        fate[i] = NO_PLACE
        refund_quota(table, rows[i])
        for later in range(i + 1, rows.size):  # they would be refused in the same way
            if fate[later] == _STARTS and table.jobs[rows[later]].gang_class == job.gang_class:
                unplaced -= table.jobs[rows[later]].gpus
                fate[later] = NO_PLACE
                refund_quota(table, rows[later])
        save_victims(table, m, scratch[:victims], unplaced)
    read_free(m, budget)
    for i in range(rows.size):
        if fate[i] == _VICTIM:
            saved = sits(table, m, rows[i])
            if not saved and left_over and within_quota(table, rows[i]) and keep_if_free(table, m, rows[i]):
                charge_quota(table, rows[i])
                budget[table.jobs[rows[i]].node_kind] -= table.jobs[rows[i]].width
                saved = True
            fate[i] = HOLDS if saved else (NO_GPUS if within_quota(table, rows[i]) else OVER_QUOTA)
        elif fate[i] == _GAVE_WAY:
            fate[i] = NO_GPUS
        elif (fate[i] == NO_GPUS or fate[i] == OVER_QUOTA) and left_over and within_quota(table, rows[i]):
            job = table.jobs[rows[i]]
            if fitting_kind(budget, job.kinds, job.gpus) >= 0:
                if not closed[job.gang_class] and try_to_place(table, m, strategy, budget, rows[i], NONE):
                    fate[i] = HOLDS
                    charge_quota(table, rows[i])
                else:
                    closed[job.gang_class] = True
                    fate[i] = NO_PLACE


@inlined
def _list_lower(
    table: JobTable,
    m: Machine,
    rows: NDArray[np.int64],
    gang: int,
    lower: NDArray[np.int64],
    places: NDArray[np.int64],
) -> int:
    """Note the jobs that could give way to the job at place `gang`, best first, and their places; returns how many."""
    count = 0
    for later in range(gang + 1, rows.size):
        if table.jobs[rows[later]].phase == HELD and could_give_way(table, m, rows[gang], rows[later]):
            lower[count], places[count] = rows[later], later
            count += 1
    return count
