"""The world at the grain of iterations: tasks take turns on shared GPUs, and all-reduces share the network.

The model is that of Ada-SRSF (arXiv 2002.10105). A round of a job is two tasks per worker on that worker's GPU, forward
then backward, and, if the job spans nodes, one all-reduce. A GPU runs one task at a time, to its end, of the job with
the least remaining service. An all-reduce that is ready asks to be admitted; among k on its busiest node it
proceeds at 1 / (k + (k-1)*eta/b) of its pace alone, from the instant at which k changes. Everything happens at exact
instants, in compiled code; the policy is asked in Python when jobs arrive or end, as in thebes.sim.loop.

A round stands for one iteration, or for a bundle of n with n-fold compute, as a single task, and n-fold bytes
(`grain_s`): turns on a GPU then change and transfers then meet only n iterations apart, which is all that the bundle
approximates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model import gate, rules
from thebes.model.cluster import Cluster
from thebes.model.compiled import Record, Records, compiled, entry, inlined, inner, inner_maker, maker, plain
from thebes.model.decision import MAX_SHARERS, UNPLANNED, diff, shares_of
from thebes.model.errors import UserError
from thebes.model.facts import SIMULATED, Knowledge
from thebes.model.jobs import NEVER, JobTable, copy_numbers, gpus_of
from thebes.model.machine import ZERO, Machine
from thebes.model.profiles import iteration_s, shape_of
from thebes.policy.ada_srsf import AdaSrsf, cost_of_contention
from thebes.sim.calendar import Calendar, next_event_s, schedule
from thebes.sim.loop import ASK, DONE, LOG_FULL, Alive, GeneralLoop, leave
from thebes.sim.neighbours import NOBODY, move_in, move_out, place_in_table
from thebes.sim.world import FINISH, START, World, most_events, record, step_timeline, submit

LEAST_ROUNDS = 40.0  # no job is bundled into fewer rounds, unless it has fewer iterations
SAME_S = 1e-9  # events closer together than this, or than rounding can tell apart, happen at one instant
STRETCH = 200_000  # events simulated between two looks at the real clock
PAUSED = 3

# How far a job is in its round.
STARTING, COMPUTING, ASKS, TALKS = range(4)
# The state of a worker's task.
READY, BUSY, DONE_TASK = range(3)
# Cells of `Iterations.count`.
N_ASKING, N_ACTIVE, N_LOOK, N_FRESH, ENDED, CHANGED = range(6)

ROUND = np.dtype(
    [
        ("stage", np.int64),
        ("task_s", np.float64),  # compute of one iteration on the GPUs that the job has
        ("wire_s", np.float64),  # the all-reduce of one iteration, alone on the network
        ("left", np.float64),  # iterations that are not finished
        ("bundle", np.float64),  # iterations per round
        ("size", np.float64),  # iterations in the present round
        ("forward", np.float64),  # share of the compute that is a task of its own
        ("tasks_left", np.int64),  # workers that have not finished their task
        ("served_s", np.float64),  # GPU seconds of work that the tasks of this round have done
        ("service", np.float64),  # what is left to do, in microseconds of a GPU: the order of SRSF
        ("asked_s", np.float64),  # when the present all-reduce became ready
        ("obstacle", np.int64),  # the node whose transfers had it refused; NOBODY: it was not refused yet
        ("latency_s", np.float64),  # what is left of the transfer: first latency, then seconds alone on the network
        ("rest_s", np.float64),
        ("settled_s", np.float64),  # the instant for which these two hold
        ("k", np.int64),  # transfers on its busiest node since then
    ]
)
LAW = np.dtype(
    [
        ("eta_over_b", np.float64),
        ("most_met", np.int64),
        ("bound", np.float64),
        ("latency_s", np.float64),
        ("grain_s", np.float64),
        ("forward", np.float64),
    ]
)


class Iterations(NamedTuple):
    """What this world knows beyond the World."""

    law: Records  # one record
    rounds: Records  # ROUND, per job
    task: NDArray[np.int64]  # per slot: READY, BUSY or DONE_TASK
    backward: NDArray[np.bool_]  # per slot: whether its task is the last of the round, the backward pass
    due_s: NDArray[np.float64]  # per slot: when its task ends
    slot_row: NDArray[np.int64]  # per slot: the row of its job
    residents: NDArray[np.int64]  # [GPU, MAX_SHARERS]: slots of the jobs that sit there, then NOBODY
    computing: NDArray[np.int64]  # per GPU: the job whose task it runs, or NOBODY
    since_s: NDArray[np.float64]  # per GPU: it was charged up to this instant
    look: NDArray[np.int64]  # GPUs that may have a task to begin
    listed: NDArray[np.bool_]  # per GPU: whether `look` holds it
    asking: NDArray[np.int64]  # rows of the jobs whose all-reduce waits, by (service, row)
    active: NDArray[np.int64]  # rows of the jobs that transfer
    node_active: NDArray[np.int64]  # per node: transfers
    node_ended: NDArray[np.bool_]  # per node: whether a transfer has ended since the last admissions
    node_rows: NDArray[np.int64]  # per node: the sum of the rows of its transfers; of one transfer, its row
    count: NDArray[np.int64]  # type: ignore[assignment] - tuple has a method of that name


def iterations_for(world: World, policy: AdaSrsf) -> Iterations:
    jobs, gpus, nodes = len(world.table.jobs), len(world.machine.gpus), len(world.machine.nodes)
    law = np.recarray(1, dtype=LAW)
    law.eta_over_b, law.most_met, law.bound = policy.eta_over_b, policy.most_met, policy.bound
    law.latency_s, law.grain_s, law.forward = policy.a_ms / 1000.0, policy.grain_s, policy.forward_share
    rounds = np.recarray(jobs, dtype=ROUND)
    rounds[:] = np.zeros(jobs, dtype=ROUND)
    slots = len(world.table.slots)
    widths = np.diff(np.append(world.table.jobs["first_slot"], slots))
    return Iterations(
        law=plain(law),
        rounds=plain(rounds),
        task=np.full(slots, DONE_TASK, dtype=np.int64),
        backward=np.ones(slots, dtype=np.bool_),
        due_s=np.zeros(slots),
        slot_row=np.repeat(np.arange(jobs, dtype=np.int64), widths),
        residents=np.full((gpus, MAX_SHARERS), NOBODY, dtype=np.int64),
        computing=np.full(gpus, NOBODY, dtype=np.int64),
        since_s=np.zeros(gpus),
        look=np.zeros(gpus, dtype=np.int64),
        listed=np.zeros(gpus, dtype=np.bool_),
        asking=np.zeros(jobs, dtype=np.int64),
        active=np.zeros(jobs, dtype=np.int64),
        node_active=np.zeros(nodes, dtype=np.int64),
        node_ended=np.zeros(nodes, dtype=np.bool_),
        node_rows=np.zeros(nodes, dtype=np.int64),
        count=np.zeros(6, dtype=np.int64),
    )


@inner
def _at_once(now_s: float) -> float:
    """The end of this instant; what is due by then happens now."""
    return now_s + max(SAME_S, 1e-14 * now_s)


# The account: each second of an occupied GPU is charged once, to the job that computes, or else evenly to all there.


# Functions that run per task take only the arrays they need: passing whole worlds would cost more than the work.


@inner
def _crowd(residents: NDArray[np.int64], gpu: int) -> int:
    here = 0
    while here < MAX_SHARERS and residents[gpu, here] != NOBODY:
        here += 1
    return here


@inner
def _charge_idle(
    jobs: Records,
    residents: NDArray[np.int64],
    slot_row: NDArray[np.int64],
    gpu: int,
    since_s: float,
    now_s: float,
) -> None:
    here = _crowd(residents, gpu)
    for at in range(here):
        job = jobs[slot_row[residents[gpu, at]]]
        starting_s = min(max(job.run_from_s - since_s, 0.0), now_s - since_s)
        job.overhead_gpu_s += starting_s / here
        job.useful_gpu_s += (now_s - since_s - starting_s) / here


@inner
def _charge(w: World, it: Iterations, gpu: int) -> None:
    now_s, since_s = w.clock[0].now_s, it.since_s[gpu]
    it.since_s[gpu] = now_s
    if it.computing[gpu] != NOBODY:
        w.table.jobs[it.computing[gpu]].useful_gpu_s += now_s - since_s
    elif since_s < now_s:
        _charge_idle(w.table.jobs, it.residents, it.slot_row, gpu, since_s, now_s)


# Compute.


@inner
def _service(job: Record, turn: Record) -> float:
    """Remaining service in whole microseconds, so that rows break ties between equal jobs, and rounding does not."""
    return np.floor(1e6 * (job.left_s * job.width - turn.served_s) + 0.5)


@inner_maker
def _begin_round(w: World, it: Iterations, row: int) -> None:
    job, turn = w.table.jobs[row], it.rounds[row]
    turn.size = turn.bundle if turn.left - turn.bundle > 1e-9 * turn.left else turn.left
    turn.stage = COMPUTING
    turn.served_s = 0.0
    turn.service = _service(job, turn)
    turn.tasks_left = job.width
    first, last = job.first_slot, job.first_slot + job.width
    it.backward[first:last] = turn.forward == 0.0
    _make_ready(w.table.slots, it.task, it.computing, it.listed, it.look, it.count, first, last)


@inlined
def _make_ready(
    slots: NDArray[np.int64],
    task: NDArray[np.int64],
    computing: NDArray[np.int64],
    listed: NDArray[np.bool_],
    look: NDArray[np.int64],
    count: NDArray[np.int64],
    first: int,
    last: int,
) -> None:
    """Make a task ready for each worker of a job, and note its idle GPUs in `look`."""
    for slot in range(first, last):
        gpu = slots[slot]
        task[slot] = READY
        if computing[gpu] == NOBODY and not listed[gpu]:
            listed[gpu] = True
            look[count[N_LOOK]] = gpu
            count[N_LOOK] += 1


@inner
def _share(turn: Record, backward: bool) -> float:
    """The share of the round's compute that a task does."""
    return 1.0 - turn.forward if backward else turn.forward


@inlined
def _begin_tasks(w: World, calendar: Calendar, it: Iterations) -> None:
    """On every idle GPU, begin the ready task of the job with the least remaining service."""
    now_s, jobs, rounds = w.clock[0].now_s, w.table.jobs, it.rounds
    residents, slot_row, task, computing, since_s = it.residents, it.slot_row, it.task, it.computing, it.since_s
    gpu: int
    row: int
    slot: int
    for i in range(it.count[N_LOOK]):
        gpu = it.look[i]
        it.listed[gpu] = False
        best, best_row, least = NOBODY, NOBODY, NEVER
        for at in range(MAX_SHARERS):
            slot = residents[gpu, at]
            if slot == NOBODY:
                break
            if task[slot] == READY:
                row = slot_row[slot]
                mine = rounds[row].service
                if best == NOBODY or mine < least or (mine == least and row < best_row):
                    best, best_row, least = slot, row, mine
        if best == NOBODY:
            continue
        if since_s[gpu] < now_s:
            _charge_idle(jobs, residents, slot_row, gpu, since_s[gpu], now_s)
        since_s[gpu] = now_s
        computing[gpu] = best_row
        task[best] = BUSY
        turn = rounds[best_row]
        due_s = now_s + _share(turn, it.backward[best]) * turn.size * turn.task_s
        it.due_s[best] = due_s
        if due_s < jobs[best_row].event_s:
            schedule(calendar, best_row, due_s)
    it.count[N_LOOK] = 0


@inlined
def _end_tasks(w: World, calendar: Calendar, it: Iterations, row: int) -> None:
    job, turn, slots, now_s = w.table.jobs[row], it.rounds[row], w.table.slots, w.clock[0].now_s
    task, backward, due_s, computing, since_s = it.task, it.backward, it.due_s, it.computing, it.since_s
    listed, look, count = it.listed, it.look, it.count
    next_s, at_once_s, work_s = NEVER, _at_once(now_s), turn.size * job.full_s
    for slot in range(job.first_slot, job.first_slot + job.width):
        if task[slot] != BUSY:
            continue
        if due_s[slot] <= at_once_s:
            gpu = slots[slot]
            job.useful_gpu_s += now_s - since_s[gpu]
            since_s[gpu] = now_s
            computing[gpu] = NOBODY
            turn.served_s += _share(turn, backward[slot]) * work_s
            if backward[slot]:
                task[slot] = DONE_TASK
                turn.tasks_left -= 1
            else:
                task[slot] = READY
                backward[slot] = True
            if not listed[gpu]:
                listed[gpu] = True
                look[count[N_LOOK]] = gpu
                count[N_LOOK] += 1
        else:
            next_s = min(next_s, due_s[slot])
    turn.service = _service(job, turn)
    if next_s < NEVER:
        schedule(calendar, row, next_s)


# Communication.


@inner
def _join_network(w: World, it: Iterations, row: int, sign: int) -> None:
    last, m = NOBODY, w.machine
    for gpu in gpus_of(w.table, row):
        node = m.gpus[gpu].node
        if node != last:
            last = node
            it.node_active[node] += sign
            it.node_rows[node] += sign * row
            it.node_ended[node] |= sign < 0
    it.count[CHANGED] = 1


@inlined
def _ask_to_talk(w: World, it: Iterations, row: int) -> None:
    turn, at = it.rounds[row], it.count[N_ASKING]
    turn.stage = ASKS
    turn.asked_s = w.clock[0].now_s
    turn.obstacle = NOBODY
    while at > 0:
        before = it.asking[at - 1]
        least = it.rounds[before].service
        if least < turn.service or (least == turn.service and before < row):
            break
        it.asking[at] = before
        at -= 1
    it.asking[at] = row
    it.count[N_ASKING] += 1
    it.count[N_FRESH] += 1


@inner
def _rest_s(it: Iterations, turn: Record, now_s: float) -> float:
    """What is left of a transfer, in seconds alone on the network."""
    ran_s = max(0.0, now_s - turn.settled_s - turn.latency_s)
    return max(0.0, turn.rest_s - ran_s / cost_of_contention(turn.k, it.law[0].eta_over_b))


@inlined
def _obstacle(w: World, it: Iterations, row: int) -> int:
    """By AdaDUAL or SRSF(n), the node whose transfers this all-reduce may not join, or NOBODY."""
    law, m, last = it.law[0], w.machine, NOBODY
    for gpu in gpus_of(w.table, row):
        node = m.gpus[gpu].node
        if node != last:
            last = node
            if it.node_active[node] > law.most_met:
                return node
    if law.bound == np.inf:
        return NOBODY
    size_s = it.rounds[row].size * it.rounds[row].wire_s
    for gpu in gpus_of(w.table, row):
        node = m.gpus[gpu].node
        if it.node_active[node] == 1:
            met = it.rounds[it.node_rows[node]]
            if size_s > law.bound * _rest_s(it, met, w.clock[0].now_s):
                return node
    return NOBODY


@inlined
def _admit(w: World, it: Iterations) -> None:
    """Admit all-reduces that ask, in order of remaining service.

    One that was refused stays refused until a transfer has ended on that node: until then the transfers in its way only
    get shorter, and more may come.
    """
    count, kept = it.count, 0
    for i in range(count[N_ASKING]):
        row = it.asking[i]
        turn = it.rounds[row]
        if turn.obstacle == NOBODY or it.node_ended[turn.obstacle]:
            turn.obstacle = _obstacle(w, it, row)
        if turn.obstacle == NOBODY:
            turn.stage = TALKS
            turn.latency_s = turn.size * it.law[0].latency_s
            turn.rest_s = turn.size * turn.wire_s
            turn.settled_s = w.clock[0].now_s
            turn.k = 0
            it.active[count[N_ACTIVE]] = row
            count[N_ACTIVE] += 1
            _join_network(w, it, row, 1)
        else:
            it.asking[kept] = row
            kept += 1
    count[N_ASKING] = kept
    if count[ENDED] == 1:
        it.node_ended[:] = False
    count[ENDED] = 0
    count[N_FRESH] = 0


@inlined
def _set_rates(w: World, calendar: Calendar, it: Iterations) -> None:
    """Give transfers a new pace where the number of transfers on their busiest node has changed."""
    it.count[CHANGED] = 0
    now_s, m = w.clock[0].now_s, w.machine
    for i in range(it.count[N_ACTIVE]):
        row = it.active[i]
        turn, k = it.rounds[row], 1
        for gpu in gpus_of(w.table, row):
            node: int = m.gpus[gpu].node
            k = max(k, it.node_active[node])
        if k != turn.k:
            if turn.k > 0:
                turn.rest_s = _rest_s(it, turn, now_s)
                turn.latency_s = max(0.0, turn.latency_s - (now_s - turn.settled_s))
            turn.settled_s = now_s
            turn.k = k
            cost_s = turn.rest_s * cost_of_contention(k, it.law[0].eta_over_b)
            schedule(calendar, row, now_s + turn.latency_s + cost_s)


@inlined
def _end_transfer(w: World, it: Iterations, row: int) -> None:
    w.table.jobs[row].talked_s += w.clock[0].now_s - it.rounds[row].asked_s
    _join_network(w, it, row, -1)
    it.count[ENDED] = 1
    for i in range(it.count[N_ACTIVE]):
        if it.active[i] == row:
            it.count[N_ACTIVE] -= 1
            it.active[i] = it.active[it.count[N_ACTIVE]]
            return


# The life of a job.


@inlined
def _begin(w: World, calendar: Calendar, it: Iterations, row: int) -> None:
    """Start a waiting job on its slots; it keeps them to its end."""
    clock, job, m, costs = w.clock[0], w.table.jobs[row], w.machine, w.costs[0]
    gpus, turn = gpus_of(w.table, row), it.rounds[row]
    for i in range(gpus.size):
        _charge(w, it, gpus[i])
        it.residents[gpus[i], _crowd(it.residents, gpus[i])] = job.first_slot + i
    clock.busy_gpus += move_in(w.neighbours, m, w.table, row)
    rules.hold(w.table, m, row, clock.now_s)
    rules.run(job, clock.now_s, clock.now_s + costs.start_s + costs.start_s_per_gib * job.state_gib)
    job.paced_s = NEVER  # what is left to do is noted at the end of every round instead
    clock.held += 1
    clock.waiting -= 1
    clock.waiting_gpus -= job.gpus
    profiles, at, shape = w.neighbours.profiles, place_in_table(w.neighbours, m, job), shape_of(job.nodes, job.tier)
    alone_s = iteration_s(profiles, at, shape, 1.0)
    turn.task_s = iteration_s(profiles, at, shape, 0.0)
    turn.wire_s = max(0.0, alone_s - turn.task_s) if job.nodes > 1 else 0.0
    job.speed = job.full_s / alone_s
    turn.left = job.left_s / job.full_s
    if abs(turn.left - np.round(turn.left)) < 1e-6:
        turn.left = np.round(turn.left)
    turn.bundle = max(1.0, np.floor(min(it.law[0].grain_s, turn.left * alone_s / LEAST_ROUNDS) / alone_s))
    turn.forward = it.law[0].forward if turn.bundle == 1.0 else 0.0
    record(w, row, START, job.nodes)
    if job.run_from_s > clock.now_s or turn.left <= 0.0:
        turn.stage = STARTING
        schedule(calendar, row, job.run_from_s)
    else:
        _begin_round(w, it, row)


@inlined
def _end_round(w: World, it: Iterations, row: int) -> bool:
    """End a round of a job; returns whether it was the last one."""
    job, turn = w.table.jobs[row], it.rounds[row]
    turn.left -= turn.size
    job.left_s = turn.left * job.full_s
    job.progress_s = job.work_s - job.left_s
    if turn.left <= 0.0:
        _finish(w, it, row)
        return True
    _begin_round(w, it, row)
    return False


@inner
def _finish(w: World, it: Iterations, row: int) -> None:
    clock, job, gpus = w.clock[0], w.table.jobs[row], gpus_of(w.table, row)
    for i in range(gpus.size):
        _charge(w, it, gpus[i])
        here = it.residents[gpus[i]]
        last = _crowd(it.residents, gpus[i]) - 1
        for at in range(last):
            if here[at] == job.first_slot + i:
                here[at] = here[last]
        here[last] = NOBODY
    clock.busy_gpus -= move_out(w.neighbours, w.machine, w.table, row)
    rules.count_run(job, clock.now_s)
    rules.finish(job, clock.now_s)
    if job.nodes > job.min_nodes:
        job.spread_gpu_s = job.useful_gpu_s
    w.services[clock.finished] = rules.service_of(job)
    clock.finished += 1
    clock.held -= 1
    record(w, row, FINISH, ZERO)


@inlined
def _happen(w: World, calendar: Calendar, it: Iterations, row: int) -> bool:
    """Carry out what is due for this job now; returns whether it finished."""
    turn = it.rounds[row]
    schedule(calendar, row, NEVER)
    if turn.stage == STARTING:
        if turn.left <= 0.0:
            _finish(w, it, row)
            return True
        _begin_round(w, it, row)
        return False
    if turn.stage == COMPUTING:
        _end_tasks(w, calendar, it, row)
        if turn.tasks_left > 0:
            return False
        if turn.wire_s > 0.0:
            _ask_to_talk(w, it, row)
            return False
    else:
        _end_transfer(w, it, row)
    return _end_round(w, it, row)


@inner
def _settle(w: World, calendar: Calendar, it: Iterations) -> None:
    """End an instant: admit transfers, set new rates, and begin tasks on idle GPUs."""
    count = it.count
    if count[ENDED] == 1 or count[N_FRESH] > 0:
        _admit(w, it)
    if count[CHANGED] == 1:
        _set_rates(w, calendar, it)
    if count[N_LOOK] > 0:
        _begin_tasks(w, calendar, it)


@compiled
def play(w: World, calendar: Calendar, it: Iterations, alive: Alive, stretch: int) -> int:
    """Let iterations go by until jobs arrive or end; the policy is then asked before that instant is settled."""
    jobs, clock = w.table.jobs, w.clock[0]
    room = 4 * jobs.size + 16  # enough for any instant; only when less is left, events have to be counted
    _settle(w, calendar, it)
    for _ in range(stretch):
        now_s = next_event_s(calendar)
        if clock.arrived < jobs.size:
            now_s = min(now_s, jobs[clock.arrived].submit_s)
        if now_s == NEVER:
            return DONE
        if w.log.size - clock.logged < room and w.log.size - clock.logged < most_events(w, now_s):
            return LOG_FULL
        clock.now_s = now_s
        asks = False
        while next_event_s(calendar) <= _at_once(now_s):
            row = calendar.rows[0]
            if _happen(w, calendar, it, row):
                asks = True
                leave(alive, row)
        while clock.arrived < jobs.size and jobs[clock.arrived].submit_s <= now_s:
            asks = True
            alive.rows[alive.size[0]] = clock.arrived
            alive.size[0] += 1
            submit(w, clock.arrived)
        if asks:
            return ASK
        _settle(w, calendar, it)
    return PAUSED


@maker
def start_jobs(
    w: World,
    calendar: Calendar,
    it: Iterations,
    rows: NDArray[np.int64],
    shares: NDArray[np.float64],
    gpus: NDArray[np.int64],
    started: NDArray[np.int64],
    offset: NDArray[np.int64],
) -> None:
    """Carry out a Decision, which here neither suspends nor moves a job. `started` are positions in `rows`."""
    jobs, slots = w.table.jobs, w.table.slots
    for i in range(rows.size):
        jobs[rows[i]].share = shares[i]
    i: int
    for i in started:
        job = jobs[rows[i]]
        copy_numbers(gpus[offset[i] : offset[i] + job.width], slots[job.first_slot :])
        _begin(w, calendar, it, rows[i])
    w.clock[0].decisions += 1


_play, _start_jobs, _step_timeline = entry(play), entry(start_jobs), entry(step_timeline)


class IterationLoop(GeneralLoop):
    """One simulation at the grain of iterations; it is driven like any `Loop`."""

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        policy: AdaSrsf,
        *,
        checks: bool,
        tenants: tuple[str, ...],
        tier_speeds: NDArray[np.float64],
        knowledge: Knowledge = SIMULATED,
    ) -> None:
        super().__init__(
            world, cluster, policy, checks=checks, tenants=tenants, tier_speeds=tier_speeds, knowledge=knowledge
        )
        self.able = gate.Abilities("a simulation at the grain of iterations", shares=True)
        self.iterations = iterations_for(world, policy)

    def run(self, instants: int) -> int:
        for _ in range(instants):
            status = _play(self.world, self.calendar, self.iterations, self.alive, STRETCH)
            if status == PAUSED:
                return ASK
            if status != ASK:
                return status
            if self.alive.size[0]:
                self._decide()
            _step_timeline(self.world)
        return ASK

    def _decide(self) -> None:
        now_s, alive = float(self.world.clock["now_s"][0]), self.alive.rows[: self.alive.size[0]].copy()
        decision = self._admitted(self._answer(alive), now_s, alive, UNPLANNED)  # every job keeps its own plan
        actions = diff(self.world.table, alive, decision)
        if len(actions.suspend) or len(actions.migrate):
            raise UserError(
                f"policy {self.policy.label}: at {now_s:g} s it suspends or moves a job",
                hint="where iterations take turns on a GPU, a job stays on its GPUs until it ends",
            )
        _start_jobs(
            self.world,
            self.calendar,
            self.iterations,
            decision.rows,
            shares_of(decision),
            decision.gpus,
            actions.start,
            actions.offset,
        )


def refuse_what_no_gpu_holds(table: JobTable, machine: Machine, policy: AdaSrsf, ids: list[str]) -> None:
    """Refuse jobs that need more memory than any GPU has: GPUs are shared by memory, so they would wait for ever."""
    jobs = table.jobs
    most_gib = np.zeros(len(jobs))
    for kind in range(len(machine.kinds)):
        allowed = ((jobs["kinds"] >> kind) & 1).astype(np.bool_)
        most_gib = np.where(allowed, np.maximum(most_gib, machine.kinds["memory_gib"][kind]), most_gib)
    bad = np.flatnonzero(jobs["memory_gib"] > most_gib)
    if len(bad):
        first = bad[0]
        raise UserError(
            f"{policy.label}: {len(bad)} of {len(jobs)} jobs need more memory than any of their GPUs has: "
            f"{ids[first]} ({jobs['memory_gib'][first]:.1f} GiB, a GPU has {most_gib[first]:.1f} GiB)",
            hint="use a cluster with larger GPUs, or leave those jobs out",
        )
