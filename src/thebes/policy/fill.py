"""From an order of jobs to a Decision: who holds which GPUs when the cluster is handed out in that order.

`fill` is what most policies end with. Each job in turn takes its GPUs from the cluster; one that does not fit is passed
over, and a running job that is passed over has to make room. Running jobs stay where they are. Only once everybody who
starts has a proven place is anybody given up: if placement refuses a gang, those who were to make room for it stay.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Records, compiled, entry, inner
from thebes.model.decision import BEHIND, HOLDS, NO_GPUS, NO_PLACE, NOT_CHOSEN, OVER_QUOTA, Decision
from thebes.model.jobs import HELD, NEVER, JobTable, gpus_of
from thebes.model.machine import NONE, Machine, all_free, copy_state, occupy, release
from thebes.model.view import Sketch, View
from thebes.placement.strategies import Strategy, place


def fill(
    view: View,
    order: NDArray[np.integer],
    *,
    preempt: bool = True,
    strict: bool = False,
    wake_s: float = NEVER,
    promote: NDArray[np.int64] | None = None,
    queues: NDArray[np.int64] | None = None,
    memory: object = None,
) -> Decision:
    """Hand the cluster out to `view.jobs` in this order (positions in its columns; jobs left out do not run).

    `preempt=False`: running jobs stay, only free GPUs are handed out. `strict=True`: nobody passes a job that does not
    fit. The other arguments go into the Decision as they are. Jobs of higher priority go before all others, whatever
    the order says; a tenant gets no more than its quota.
    """
    alive = view.jobs.rows
    priority = view.jobs.priority[order]
    if priority.any():
        order = np.asarray(order)[np.argsort(-priority, kind="stable")]
    rows = alive[order]
    state = np.full(len(alive), NOT_CHOSEN, dtype=np.int64)
    chosen = np.empty(len(rows), dtype=np.int64)
    sketch = view._sketch
    _draw_up(
        view._table, view.machine, sketch, view._strategy, alive, rows, preempt, strict, chosen, view._gang_classes
    )
    state[order] = chosen
    if not preempt:
        state[view.jobs.running] = HOLDS
    holders = view.jobs.rows[state == HOLDS]
    widths = view._table.jobs["width"][holders]
    resized = bool((widths != view._table.jobs["gpus"][holders]).any())
    return Decision(
        rows=holders,
        gpus=_collect(view._table.jobs, sketch.slots, holders),
        fate=state,
        wake_s=wake_s,
        promote=np.zeros(0, dtype=np.int64) if promote is None else promote,
        queues=queues,
        memory=memory,
        counts=widths if resized else None,
    )


@compiled
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
    """Hand out a copy of the cluster: sketch and `fate` then tell the wanted state."""
    copy_state(machine, sketch.machine)
    trial = JobTable(table.jobs, sketch.slots, table.quotas.copy())
    for row in alive:
        if table.jobs[row].phase == HELD:
            gpus_of(trial, row)[:] = gpus_of(table, row)
    if preempt and rows.size < alive.size:  # a running job that the policy did not list at all gives its GPUs up
        sketch.mark[alive] = False
        sketch.mark[rows] = True
        for row in alive:
            if table.jobs[row].phase == HELD and not sketch.mark[row]:
                release(sketch.machine, gpus_of(trial, row))
    hand_out(trial, sketch.machine, strategy, rows, preempt, strict, fate, gang_classes)


@compiled
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
    """The allowed kind with the most GPUs left that holds the gang; -1 when none does."""
    best = NONE
    for kind in range(budget.size):
        if (kinds >> kind) & 1 and budget[kind] >= gpus and (best < 0 or budget[kind] > budget[best]):
            best = kind
    return best


@inner
def try_to_place(table: JobTable, m: Machine, strategy: Strategy, budget: NDArray[np.int64], row: int) -> bool:
    """Place a gang on the kind with the most room, or else on another that it accepts; pays from the budget."""
    job = table.jobs[row]
    out = gpus_of(table, row)
    preferred = fitting_kind(budget, job.kinds, job.gpus)
    for turn in range(budget.size):
        kind = preferred
        if turn > 0:
            kind = turn - 1 if turn <= preferred else turn
        if (
            preferred >= 0
            and (job.kinds >> kind) & 1
            and budget[kind] >= job.gpus
            and place(m, strategy, row, job.holds, kind, job.gpus, job.want_nodes, job.skew, out)
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
    """Give a victim its GPUs back, unless somebody sits on one of them."""
    gpus = gpus_of(table, row)
    if not all_free(m, gpus):
        return False
    occupy(m, row, gpus)
    return True


@inner
def save_victims(table: JobTable, m: Machine, victims: NDArray[np.int64], unplaced_gpus: int) -> None:
    """Somebody was refused: victims, best first, stay if everybody still to be placed has room without their GPUs.

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


# How a job stands while the cluster is handed out, beside the fates of thebes.model.decision.
_STARTS, _VICTIM = 100, 101


@inner
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
    """Change machine and slots to what they shall be, and tell the fate of each row."""
    closed = np.zeros(gang_classes, dtype=np.bool_)
    budget = np.empty(m.kinds.size, dtype=np.int64)
    if preempt:
        read_total(m, budget)
        if _choose(table, rows, budget, strict, fate):
            _settle(table, m, strategy, rows, budget, fate, closed)
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
        elif not closed[job.gang_class] and try_to_place(table, m, strategy, budget, rows[i]):
            fate[i] = HOLDS
            charge_quota(table, rows[i])
        else:
            fate[i] = NO_PLACE
            closed[job.gang_class] = True
            blocked = strict


@inner
def _choose(
    table: JobTable, rows: NDArray[np.int64], budget: NDArray[np.int64], strict: bool, fate: NDArray[np.int64]
) -> bool:
    """Go down the order with the whole cluster's GPUs to give; true if anything changes."""
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
        kind = fitting_kind(budget, job.kinds, job.gpus)
        if blocked:
            fate[i] = BEHIND
        elif not within_quota(table, rows[i]):
            fate[i] = OVER_QUOTA
        elif kind >= 0:
            budget[kind] -= job.gpus
            charge_quota(table, rows[i])
            fate[i] = _STARTS
            changes = True
        else:
            fate[i] = NO_GPUS
            blocked = strict
    return changes


@inner
def _settle(
    table: JobTable,
    m: Machine,
    strategy: Strategy,
    rows: NDArray[np.int64],
    budget: NDArray[np.int64],
    fate: NDArray[np.int64],
    closed: NDArray[np.bool_],
) -> None:
    """Victims out, newcomers in; what refusals leave over goes to whoever is next."""
    victims, unplaced = 0, 0
    scratch = np.empty(rows.size, dtype=np.int64)
    for i in range(rows.size):
        if fate[i] == _VICTIM:
            release(m, gpus_of(table, rows[i]))
            scratch[victims] = rows[i]
            victims += 1
        elif fate[i] == _STARTS:
            unplaced += table.jobs[rows[i]].gpus
    refused = False
    for i in range(rows.size):
        if fate[i] != _STARTS:
            continue
        job = table.jobs[rows[i]]
        read_free(m, budget)
        unplaced -= job.gpus
        if not closed[job.gang_class] and try_to_place(table, m, strategy, budget, rows[i]):
            fate[i] = HOLDS
        else:
            fate[i] = NO_PLACE
            refused = True
            refund_quota(table, rows[i])
            if not closed[job.gang_class]:
                closed[job.gang_class] = True
                for later in range(i + 1, rows.size):  # the same refusal awaits them
                    if fate[later] == _STARTS and table.jobs[rows[later]].gang_class == job.gang_class:
                        unplaced -= table.jobs[rows[later]].gpus
                        fate[later] = NO_PLACE
                        refund_quota(table, rows[later])
            save_victims(table, m, scratch[:victims], unplaced)
    read_free(m, budget)
    victim = 0
    for i in range(rows.size):
        if fate[i] == _VICTIM:
            saved = scratch[victim] < 0
            victim += 1
            if not saved and refused and within_quota(table, rows[i]) and keep_if_free(table, m, rows[i]):
                charge_quota(table, rows[i])
                budget[table.jobs[rows[i]].node_kind] -= table.jobs[rows[i]].width
                saved = True
            fate[i] = HOLDS if saved else (NO_GPUS if within_quota(table, rows[i]) else OVER_QUOTA)
        elif (fate[i] == NO_GPUS or fate[i] == OVER_QUOTA) and refused and within_quota(table, rows[i]):
            job = table.jobs[rows[i]]
            if fitting_kind(budget, job.kinds, job.gpus) >= 0:
                if not closed[job.gang_class] and try_to_place(table, m, strategy, budget, rows[i]):
                    fate[i] = HOLDS
                    charge_quota(table, rows[i])
                else:
                    closed[job.gang_class] = True
                    fate[i] = NO_PLACE
