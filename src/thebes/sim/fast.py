"""The fast path simulates priority policies in compiled code, event by event, and touches only the jobs concerned.

It decides exactly what `PriorityPolicy.decide` decides (tests hold the two against each other on random workloads), but
keeps the order between decisions: waiting jobs stand in lines, running jobs in one short list. The cost of a decision
therefore depends on what runs and what changes hands, not on how many jobs wait.

The order at one instant is: finishes, then demotions and promotions, then submissions, each by row; then one decision.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, inlined, inner
from thebes.model.jobs import HELD, NEVER, WAITING, gpus_of
from thebes.model.machine import NONE, ZERO, release
from thebes.model.rules import ticks_until
from thebes.policy.fill import (
    charge_kind,
    could_give_way,
    fitting_kind,
    keep_if_free,
    make_way,
    read_free,
    read_total,
    save_victims,
    try_to_place,
)
from thebes.policy.orders.learning import known_count, next_refresh
from thebes.policy.orders.priority import (
    GROUPS,
    Distribution,
    Rule,
    moves_while_running,
    next_change_s,
    next_tick_s,
    promotion_s,
    rank_and_key,
    set_samples,
    ticks,
)
from thebes.sim.calendar import Calendar, calendar_for, next_event_s, schedule
from thebes.sim.check import SOUND, CheckerMemory, check_instant, check_world, nothing_seen
from thebes.sim.lines import Lines, before, dequeue, enqueue, first_in_line, first_of_all, lines_for, to_the_heads
from thebes.sim.profiler import REFIT_EVERY, refit_pack_limit
from thebes.sim.world import (
    World,
    begin,
    finish,
    most_events,
    promote,
    set_queue,
    settle_neighbours,
    step_timeline,
    submit,
    suspend,
)

# Reasons why `run` returns.
DONE, LOG_FULL, PAUSED, UNSOUND, LEARN = range(5)

# Cells of Memory.state.
RUNNING, MIDWAY, DUE, REFRESH_AT, REFIT_AT, FAULT, FAULT_ROW, TICKED = range(8)


class Memory(NamedTuple):
    """What the fast path keeps between decisions, and room to work in."""

    lines: Lines
    calendar: Calendar
    running: NDArray[np.int64]  # rows in the order of the last decision, each once; some may have finished since
    state: NDArray[np.int64]
    budget: NDArray[np.int64]  # GPUs left per kind
    idle: NDArray[np.int64]  # GPUs per kind that are free without anybody giving way
    starts: NDArray[np.int64]
    charged: NDArray[np.int64]  # per start, the kind that is charged for it
    victims: NDArray[np.int64]
    lower: NDArray[np.int64]  # running jobs that could give way to a gang that was refused
    due: NDArray[np.int64]
    checks: bool
    seen: CheckerMemory  # the checker's own account


def memory_for(world: World, *, learns: bool, checks: bool) -> Memory:
    table, gpus, kinds = world.table, len(world.machine.gpus), len(world.machine.kinds)
    count = len(table.jobs)
    state = np.zeros(8, dtype=np.int64)
    never = np.iinfo(np.int64).max
    state[REFRESH_AT] = next_refresh(0) if learns else never
    state[REFIT_AT] = REFIT_EVERY if world.learns[0] else never
    return Memory(
        lines=lines_for(table.jobs),
        calendar=calendar_for(table.jobs),
        running=np.zeros(2 * gpus + 16, dtype=np.int64),
        state=state,
        budget=np.zeros(kinds, dtype=np.int64),
        idle=np.zeros(kinds, dtype=np.int64),
        starts=np.zeros(min(count, gpus) + 1, dtype=np.int64),
        charged=np.zeros(min(count, gpus) + 1, dtype=np.int64),
        victims=np.zeros(2 * gpus + 1, dtype=np.int64),  # one that was saved may have to give way again
        lower=np.zeros(gpus + 1, dtype=np.int64),
        due=np.zeros(count + 1, dtype=np.int64),
        checks=checks,
        seen=nothing_seen(gpus),
    )


def learn(w: World, mem: Memory, rule: Rule, d: Distribution, given: NDArray[np.float64]) -> None:
    """Give `run` what it returned for with LEARN: a new distribution, a new PACKLIMIT, or both."""
    finished = int(w.clock["finished"][0])
    if finished >= mem.state[REFRESH_AT]:
        known = known_count(finished)
        mem.state[REFRESH_AT] = next_refresh(known)
        set_samples(d, np.concatenate((given, w.services[:known])))
        _rank_everybody(w, mem, rule, d)
        _sort_lines(mem.lines)
    mem.state[REFIT_AT] = refit_pack_limit(w, int(mem.state[REFIT_AT]))


@compiled
def _rank_everybody(w: World, mem: Memory, rule: Rule, d: Distribution) -> None:
    for row in range(w.clock[0].arrived):
        if w.table.jobs[row].phase == WAITING or w.table.jobs[row].phase == HELD:
            _rank(w, rule, d, row)


def _sort_lines(q: Lines) -> None:
    for line in q.lines:
        rows = q.rows[line["low"] : line["high"]]
        rows.sort()
        rows[:] = rows[np.lexsort((q.jobs["key"][rows], q.jobs["rank"][rows]))]


@compiled
def run(w: World, mem: Memory, rule: Rule, d: Distribution, instants: int) -> int:
    """Go on for at most so many instants, until everything has happened, or until the caller has to do something."""
    jobs, clock, state = w.table.jobs, w.clock[0], mem.state
    for _ in range(instants):
        if state[MIDWAY] == 0:
            now_s = next_event_s(mem.calendar)
            if clock.arrived < jobs.size:
                now_s = min(now_s, jobs[clock.arrived].submit_s)
            if clock.waiting > 0:
                now_s = min(now_s, next_tick_s(rule, clock.now_s))
            if now_s == NEVER:
                if mem.checks:
                    state[FAULT], state[FAULT_ROW] = check_world(w)
                return DONE if state[FAULT] == SOUND else UNSOUND
            if w.log.size - clock.logged < most_events(w, now_s):
                return LOG_FULL
            clock.now_s = now_s
            _finish_those_due(w, mem)
            if clock.finished >= state[REFRESH_AT]:
                state[MIDWAY] = 1
                return LEARN
        state[MIDWAY] = 0
        _change_queues(w, mem, rule, d)
        while clock.arrived < jobs.size and jobs[clock.arrived].submit_s <= clock.now_s:
            row = clock.arrived
            submit(w, row)
            _stand_in_line(w, mem, rule, d, row)
        if clock.waiting > 0:
            _decide(w, mem, rule, d)
            clock.decisions += 1
        for i in range(settle_neighbours(w)):
            if jobs[w.neighbours.touched[i]].phase == HELD:
                _watch(w, mem, rule, w.neighbours.touched[i])
        step_timeline(w)
        if mem.checks:
            state[FAULT], state[FAULT_ROW] = check_instant(w, mem.seen)
            if state[FAULT] != SOUND:
                return UNSOUND
        if clock.observed >= state[REFIT_AT]:
            return LEARN
    return PAUSED


@inlined
def _finish_those_due(w: World, mem: Memory) -> None:
    """Take what is due now off the calendar, and carry out the finishes, which come first."""
    jobs, now_s, others = w.table.jobs, w.clock[0].now_s, 0
    while next_event_s(mem.calendar) <= now_s:
        row = mem.calendar.rows[0]
        schedule(mem.calendar, row, NEVER)
        if jobs[row].phase == HELD and jobs[row].finish_s <= now_s:
            finish(w, row)
        else:
            mem.due[others] = row
            others += 1
    mem.state[DUE] = others


@inlined
def _change_queues(w: World, mem: Memory, rule: Rule, d: Distribution) -> None:
    """Carry out the demotions and promotions that are due now."""
    for i in range(mem.state[DUE]):
        row = mem.due[i]
        if w.table.jobs[row].phase == WAITING:
            dequeue(mem.lines, row)
            promote(w, row)
            _stand_in_line(w, mem, rule, d, row)
        else:
            _rank(w, rule, d, row)
            _watch(w, mem, rule, row)


@inner
def _rank(w: World, rule: Rule, d: Distribution, row: int) -> None:
    job = w.table.jobs[row]
    rank, key = rank_and_key(rule, d, job, job.age_s, w.clock[0].now_s)
    job.rank = rank
    job.key = key
    if rule.limits.size > 0:
        set_queue(w, row, rank // GROUPS)


@inner
def _stand_in_line(w: World, mem: Memory, rule: Rule, d: Distribution, row: int) -> None:
    _rank(w, rule, d, row)
    enqueue(mem.lines, row)
    job = w.table.jobs[row]
    schedule(mem.calendar, row, promotion_s(rule, job, job.age_s, job.since_s))


@inner
def _watch(w: World, mem: Memory, rule: Rule, row: int) -> None:
    """Put on the calendar when a running job ends or moves in the order."""
    job = w.table.jobs[row]
    schedule(
        mem.calendar, row, min(job.finish_s, next_change_s(rule, job, job.age_s, job.run_from_s, w.clock[0].now_s))
    )


@inlined
def _decide(w: World, mem: Memory, rule: Rule, d: Distribution) -> None:
    kinds = w.machine.kinds
    room_for_all = kinds.size == 1 and w.clock[0].waiting_gpus <= kinds[0].free
    settled = False
    if room_for_all or not rule.preemptive:
        settled = _start_in_order(w, mem, rule, d)
    if not settled:
        to_the_heads(mem.lines)
        read_total(w.machine, mem.budget)
        read_free(w.machine, mem.idle)
        _decide_preemptive(w, mem, rule, d)


@inlined
def _start_in_order(w: World, mem: Memory, rule: Rule, d: Distribution) -> bool:
    """Give free GPUs to waiting jobs in order; a strict policy stops at the first job that does not fit.

    Where lower jobs may have to give way to a refused gang, it stops at a refusal, and false is returned.
    """
    q, budget, starts = mem.lines, mem.budget, ZERO
    to_the_heads(q)
    read_free(w.machine, budget)
    settled = True
    while True:
        number = first_of_all(q) if rule.strict else first_in_line(q, budget)
        if number < 0:
            break
        line = q.lines[number]
        at: int = line.at
        row = q.rows[at]
        if try_to_place(w.table, w.machine, w.strategy, budget, row, NONE):
            mem.starts[starts] = row
            starts += 1
            line.at += 1
        elif rule.preemptive:
            settled = False
            break
        elif rule.strict:
            break
        else:
            line.closed = 1
    for i in range(starts):
        if settled:
            _start(w, mem, rule, d, mem.starts[i])
        else:
            release(w.machine, gpus_of(w.table, mem.starts[i]))
    return settled


@inner
def _start(w: World, mem: Memory, rule: Rule, d: Distribution, row: int) -> None:
    dequeue(mem.lines, row)
    begin(w, row)
    _rank(w, rule, d, row)
    _watch(w, mem, rule, row)
    if mem.state[RUNNING] == mem.running.size:
        _forget_stopped(w, mem)
    mem.running[mem.state[RUNNING]] = row
    mem.state[RUNNING] += 1


@inner
def _forget_stopped(w: World, mem: Memory) -> None:
    kept = 0
    for i in range(mem.state[RUNNING]):
        if w.table.jobs[mem.running[i]].phase == HELD:
            mem.running[kept] = mem.running[i]
            kept += 1
    mem.state[RUNNING] = kept


@inlined
def _sort_running(w: World, mem: Memory, rule: Rule, d: Distribution) -> None:
    """Sort the running jobs, by insertion: from one decision to the next the order hardly changes."""
    jobs, running = w.table.jobs, mem.running
    tick = np.int64(ticks_until(rule.quantum_s, w.clock[0].now_s)) if ticks(rule) else mem.state[TICKED]
    all_move = moves_while_running(rule) or tick != mem.state[TICKED]
    mem.state[TICKED] = tick
    kept = 0
    for i in range(mem.state[RUNNING]):
        row = running[i]
        job = jobs[row]
        if job.phase != HELD:
            continue
        # A job that was demoted, or that arrived and started, at the last decision counts as running from now on.
        if all_move or job.rank % GROUPS != 0:
            _rank(w, rule, d, row)
        j = kept - 1
        while j >= 0 and before(jobs, row, running[j]):
            running[j + 1] = running[j]
            j -= 1
        running[j + 1] = row
        kept += 1
    mem.state[RUNNING] = kept


@inlined
def _decide_preemptive(w: World, mem: Memory, rule: Rule, d: Distribution) -> None:
    """Walk running and waiting jobs merged in order, and give each its GPUs from the budget of the whole cluster.

    A running job that is passed over becomes a victim; a waiting job that is reached starts.
    """
    jobs, q, budget = w.table.jobs, mem.lines, mem.budget
    _sort_running(w, mem, rule, d)
    starts, victims = ZERO, ZERO
    number = first_in_line(q, budget)
    for i in range(mem.state[RUNNING]):
        row = mem.running[i]
        while number >= 0 and before(jobs, q.rows[q.lines[number].at], row):  # pyright: ignore[reportArgumentType]
            number = _pay_for_head(mem, number, starts)
            starts += 1
        job = jobs[row]
        if budget[job.node_kind] >= job.gpus:
            budget[job.node_kind] -= job.gpus
            if number >= 0 and fitting_kind(budget, q.lines[number].kinds, q.lines[number].gpus) < 0:
                number = first_in_line(q, budget)
        else:
            mem.victims[victims] = row
            victims += 1
    while number >= 0:
        number = _pay_for_head(mem, number, starts)
        starts += 1
    if starts > 0 or victims > 0:
        _settle(w, mem, rule, d, starts, victims)


@inner
def _pay_for_head(mem: Memory, number: int, at: int) -> int:
    """Note the head of this line as start number `at`, charge its kind, and return the next line to serve."""
    line = mem.lines.lines[number]
    mem.starts[at] = mem.lines.rows[line.at]
    mem.charged[at] = charge_kind(mem.budget, mem.idle, line.kinds, line.gpus)
    line.at += 1
    return first_in_line(mem.lines, mem.budget)


@inlined
def _settle(w: World, mem: Memory, rule: Rule, d: Distribution, starts: int, victims: int) -> None:
    """Place the jobs that are to start on the GPUs of victims and on idle GPUs.

    When the placement refuses a gang, lower jobs give way to it; where that does not help, its victims are saved.
    Nothing is suspended before the placement of the jobs that take over is certain.
    """
    jobs, budget = w.table.jobs, mem.budget
    for i in range(victims):
        release(w.machine, gpus_of(w.table, mem.victims[i]))
    placed, left_over = ZERO, False
    for i in range(starts):
        row = mem.starts[i]
        read_free(w.machine, budget)
        line = mem.lines.lines[jobs[row].gang_class]
        if line.closed == 0 and try_to_place(w.table, w.machine, w.strategy, budget, row, mem.charged[i]):
            mem.starts[placed] = row
            placed += 1
            continue
        left_over = True
        more = _make_way(w, mem, row, mem.charged[i], victims) if line.closed == 0 else NONE
        if more >= 0:
            victims = more
            mem.starts[placed] = row
            placed += 1
        else:
            line.closed = 1
            save_victims(w.table, w.machine, mem.victims[:victims], _unplaced_gpus(w, mem, starts, i + 1))
    if left_over:
        placed = _hand_out_leftovers(w, mem, victims, placed)
    for i in range(victims):
        row = mem.victims[i]
        if row >= 0:
            suspend(w, row)
            _stand_in_line(w, mem, rule, d, row)
    if victims > 0:  # this comes before they start again, so that no job stands in the list of running jobs twice
        _forget_stopped(w, mem)
    for i in range(placed):
        _start(w, mem, rule, d, mem.starts[i])


@inlined
def _make_way(w: World, mem: Memory, row: int, charged: int, victims: int) -> int:
    """Let lower jobs give way to a refused gang; they join the victims. Returns the new number of victims, or -1."""
    jobs, count = w.table.jobs, 0
    for i in range(mem.state[RUNNING]):
        other = mem.running[i]
        if before(jobs, row, other) and could_give_way(w.table, w.machine, row, other):
            mem.lower[count] = other
            count += 1
    lower = mem.lower[:count]
    if not make_way(w.table, w.machine, w.strategy, mem.budget, row, charged, lower):
        return NONE
    for i in range(count):
        if lower[i] >= 0:
            mem.victims[victims] = lower[i]
            victims += 1
    return victims


@inlined
def _unplaced_gpus(w: World, mem: Memory, starts: int, first: int) -> int:
    """How many GPUs the jobs that are still to be placed will need."""
    jobs, total = w.table.jobs, 0
    for i in range(first, starts):
        job = jobs[mem.starts[i]]
        if mem.lines.lines[job.gang_class].closed == 0:
            total += job.gpus
    return total


@inlined
def _hand_out_leftovers(w: World, mem: Memory, victims: int, placed: int) -> int:
    """Give what refusals left over to the next jobs in order: a victim stays, a waiting job starts."""
    jobs, q, budget = w.table.jobs, mem.lines, mem.budget
    read_free(w.machine, budget)
    for i in range(victims):
        row = mem.victims[i]
        if row < 0:
            continue
        number = first_in_line(q, budget)
        while number >= 0 and before(jobs, q.rows[q.lines[number].at], row):  # pyright: ignore[reportArgumentType]
            placed = _start_leftover(w, mem, number, placed)
            number = first_in_line(q, budget)
        if keep_if_free(w.table, w.machine, row):
            budget[jobs[row].node_kind] -= jobs[row].gpus
            mem.victims[i] = -1
    number = first_in_line(q, budget)
    while number >= 0:
        placed = _start_leftover(w, mem, number, placed)
        number = first_in_line(q, budget)
    return placed


@inner
def _start_leftover(w: World, mem: Memory, number: int, placed: int) -> int:
    line = mem.lines.lines[number]
    at: int = line.at
    row = mem.lines.rows[at]
    if try_to_place(w.table, w.machine, w.strategy, mem.budget, row, NONE):
        mem.starts[placed] = row
        placed += 1
        line.at += 1
    else:
        line.closed = 1
    return placed
