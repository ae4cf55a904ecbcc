"""The simulated world: its clock, its log and timeline, and what it costs to start, suspend and resume.

The rule book (thebes.model.rules) says how a job's record changes. Here its functions get their facts: the costs say
when a hold is ready and when its work begins, and the neighbours say how fast it runs. A suspended job's GPUs stay busy
until its state is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model import rules
from thebes.model.compiled import Records, compiled, inlined, inner
from thebes.model.jobs import NEVER, JobTable, gpus_of
from thebes.model.machine import ZERO, Machine, occupy, release
from thebes.placement.strategies import Strategy
from thebes.sim.neighbours import Neighbours, come, go, move_in, move_out, repace

# Event kinds: positions in thebes.report.result.EVENT_KINDS.
_EVENTS: tuple[Any, ...] = tuple(np.arange(10))
FINISH, SUBMIT, DEMOTE, PROMOTE, SUSPEND, START, RESUME, MIGRATE, RESIZE, RECONFIGURE = _EVENTS

EVENT = np.dtype(
    [
        ("time_s", np.float64),
        ("plan", np.int64),  # the code of the plan
        ("job", np.uint32),
        ("gpus", np.int32),
        ("nodes", np.int32),
        ("event", np.int8),
    ]
)
STEP = np.dtype(
    [
        ("time_s", np.float64),
        ("busy_gpus", np.int64),
        ("waiting_jobs", np.int64),
        ("running_jobs", np.int64),
        ("waiting_gpus", np.int64),
    ]
)
CLOCK = np.dtype(
    [
        ("now_s", np.float64),
        ("quantum_s", np.float64),  # the policy reads attained service at multiples of it; 0 means at each decision
        ("arrived", np.int64),  # jobs submitted so far
        ("finished", np.int64),
        ("held", np.int64),
        ("waiting", np.int64),
        ("busy_gpus", np.int64),
        ("waiting_gpus", np.int64),
        ("decisions", np.int64),
        ("events", np.int64),
        ("logged", np.int64),
        ("steps", np.int64),
        ("step_gap_s", np.float64),  # the timeline's resolution, which grows when the timeline would get too long
        ("observed", np.int64),  # placements from which `skew` has learned
    ]
)
COSTS = np.dtype(
    [
        ("start_s", np.float64),
        ("start_s_per_gib", np.float64),
        ("migrate_s", np.float64),  # this is added to suspend and resume, which each job's record has
        ("migrate_s_per_gib", np.float64),
        ("saves", np.int64),  # 1: suspending saves state; 0: it kills, and the job goes back to a checkpoint
        ("checkpoint_every_s", np.float64),
    ]
)
OBSERVATION = np.dtype([("skew", np.float64), ("speed", np.float64)])


class World(NamedTuple):
    """The whole world, in the form that compiled code takes."""

    table: JobTable
    machine: Machine
    strategy: Strategy
    costs: Records  # one record
    clock: Records  # one record
    neighbours: Neighbours
    log: Records  # EVENT
    timeline: Records  # STEP
    services: NDArray[np.float64]  # GPU-seconds of each finished job, in the order of finishes
    observations: Records  # a ring of OBSERVATION: how fast spread-out gangs ran
    learns: NDArray[np.bool_]  # one cell: whether `skew` learns its limit


@inner
def record(w: World, row: int, event: int, nodes: int) -> None:
    clock = w.clock[0]
    entry = w.log[clock.logged]
    entry.time_s = clock.now_s
    entry.job = row
    entry.event = event
    entry.gpus = w.table.jobs[row].width
    entry.plan = w.table.jobs[row].plan
    entry.nodes = nodes
    clock.logged += 1
    clock.events += 1


@inner
def most_events(w: World, now_s: float) -> int:
    """The most events that an instant can write: each job alive can change its queue, stop and start once."""
    jobs, clock = w.table.jobs, w.clock[0]
    coming = clock.arrived
    while coming < jobs.size and jobs[coming].submit_s <= now_s:
        coming += 1
    return 3 * (clock.held + clock.waiting) + 4 * (coming - clock.arrived) + 16


@compiled
def step_timeline(w: World) -> None:
    """Write the state that holds from now on; a step closer than the resolution overwrites the one before."""
    clock = w.clock[0]
    at = clock.steps
    if at > 0 and clock.now_s - w.timeline[at - 1].time_s < clock.step_gap_s:
        at -= 1
    elif at == w.timeline.size:
        at = _thin_out(w)
    if at == clock.steps:
        clock.steps += 1
        w.timeline[at].time_s = clock.now_s
    step = w.timeline[at]
    step.busy_gpus = clock.busy_gpus
    step.waiting_jobs = clock.waiting
    step.running_jobs = clock.held
    step.waiting_gpus = clock.waiting_gpus


@inlined
def _thin_out(w: World) -> int:
    """Keep every second step and double the resolution, so that no run is too long for memory."""
    clock = w.clock[0]
    kept = (clock.steps + 1) // 2
    for i in range(kept):
        kept_step, step = w.timeline[i], w.timeline[2 * i]
        kept_step.time_s = step.time_s
        kept_step.busy_gpus = step.busy_gpus
        kept_step.waiting_jobs = step.waiting_jobs
        kept_step.running_jobs = step.running_jobs
        kept_step.waiting_gpus = step.waiting_gpus
    span_s = w.timeline[kept - 1].time_s - w.timeline[0].time_s
    clock.step_gap_s = max(2.0 * clock.step_gap_s, span_s / w.timeline.size)
    clock.steps = kept
    return kept


@inner
def submit(w: World, row: int) -> None:
    clock, job = w.clock[0], w.table.jobs[row]
    rules.submit(job, job.submit_s)
    clock.arrived += 1
    clock.waiting += 1
    clock.waiting_gpus += job.gpus
    record(w, row, SUBMIT, ZERO)


@inner
def hold(w: World, row: int, transfer_s: float) -> None:
    """Let the job hold its slots from now on (the machine knows already), and work out when it will run and end."""
    clock, job, costs = w.clock[0], w.table.jobs[row], w.costs[0]
    rules.hold(w.table, w.machine, row, clock.now_s)
    ready_s = clock.now_s
    for gpu in gpus_of(w.table, row):
        ready_s = max(ready_s, w.machine.gpus[gpu].clear_s)
    ready_s = max(ready_s, job.saved_s)
    cost_s = job.resume_s if job.executed_s > 0.0 else costs.start_s + costs.start_s_per_gib * job.state_gib
    come(w.neighbours, w.machine, w.table, row)
    rules.run(job, ready_s, ready_s + cost_s + transfer_s)
    job.finish_s = ready_s + cost_s + job.left_s / job.speed + transfer_s
    clock.held += 1
    clock.waiting -= 1
    if not w.neighbours.law[0].shares:  # where GPUs are shared, `take_slots` does the counting
        clock.busy_gpus += job.width
    clock.waiting_gpus -= job.gpus


@inner
def begin(w: World, row: int) -> None:
    """Start or resume a waiting job on its slots."""
    job = w.table.jobs[row]
    first = job.first_start_s == NEVER
    hold(w, row, 0.0)
    record(w, row, START if first else RESUME, job.nodes)


@inner
def checkpoint_every_s(w: World) -> float:
    """Running time between the checkpoints that survive a kill; 0 where state is saved on suspension."""
    return 0.0 if w.costs[0].saves == 1 else w.costs[0].checkpoint_every_s


@inner
def take_slots(w: World, row: int) -> None:
    """Tell the machine that the job sits on its slots."""
    if w.neighbours.law[0].shares:
        w.clock[0].busy_gpus += move_in(w.neighbours, w.machine, w.table, row)
    else:
        occupy(w.machine, row, gpus_of(w.table, row))


@inner
def free_slots(w: World, row: int) -> None:
    """Tell the machine that the job has left its slots."""
    if w.neighbours.law[0].shares:
        w.clock[0].busy_gpus -= move_out(w.neighbours, w.machine, w.table, row)
    else:
        release(w.machine, gpus_of(w.table, row))


@inner
def settle_neighbours(w: World) -> int:
    """Give every job touched at this instant a new speed; returns how many there are (they stay in `touched`)."""
    n = w.neighbours
    for i in range(n.count[0]):
        repace(n, w.machine, w.table, n.touched[i], w.clock[0].now_s, checkpoint_every_s(w))
    count = n.count[0]
    n.count[0] = 0
    return count


@inner
def _close_account(w: World, row: int) -> float:
    """Charge this hold up to now, while its neighbours still feel it; returns the seconds for which it ran."""
    ran_s = rules.close_account(w.table, w.machine, row, w.clock[0].now_s, checkpoint_every_s(w))
    go(w.neighbours, w.machine, w.table, row)
    _observe(w, row, ran_s)
    return ran_s


@inlined
def _observe(w: World, row: int, ran_s: float) -> None:
    """Remember how fast a gang ran if it was spread over more nodes than it needed."""
    job = w.table.jobs[row]
    if w.learns[0] and ran_s > 0.0 and job.nodes > job.min_nodes:
        seen = w.observations[w.clock[0].observed % w.observations.size]
        seen.skew = job.skew
        seen.speed = job.speed
        w.clock[0].observed += 1


@inner
def _vacate(w: World, row: int) -> None:
    """Stop a job: charge the hold, and write the state out. The caller frees the machine's GPUs."""
    clock, job, costs = w.clock[0], w.table.jobs[row], w.costs[0]
    now_s = clock.now_s
    ran_s, suspend_s = _close_account(w, row), 0.0
    if costs.saves != 1:
        rules.lose(job, ran_s, costs.checkpoint_every_s)
    elif ran_s > 0.0:  # a job that has not run has nothing new to write
        suspend_s = job.suspend_s
        rules.save(job, now_s, suspend_s)
    rules.keep_busy(w.table, w.machine, row, now_s + suspend_s)
    rules.vacate(job, now_s, ran_s, clock.quantum_s)
    clock.held -= 1
    clock.waiting += 1
    if not w.neighbours.law[0].shares:
        clock.busy_gpus -= job.width
    clock.waiting_gpus += job.gpus


@inner
def suspend(w: World, row: int) -> None:
    """Preempt a job whose GPUs the machine has already released."""
    _vacate(w, row)
    record(w, row, SUSPEND, ZERO)  # the event names the GPUs that the job held
    rules.suspend(w.table.jobs[row])


@inlined
def depart(w: World, row: int) -> None:
    """First half of a migration: suspend the job, and free its GPUs."""
    free_slots(w, row)
    _vacate(w, row)


@inlined
def arrive(w: World, row: int, change: int, moved: bool) -> None:
    """Second half: resume the job on its new slots. All departures of a decision come first, so that jobs can swap.

    `change` is the event: MIGRATE, RESIZE or RECONFIGURE. State goes over the network only if the GPUs are others.
    """
    job, costs = w.table.jobs[row], w.costs[0]
    take_slots(w, row)
    hold(w, row, costs.migrate_s + costs.migrate_s_per_gib * job.state_gib if moved else 0.0)
    rules.count_move(job, change == RESIZE, change == RECONFIGURE)
    record(w, row, change, job.nodes)


@inner
def finish(w: World, row: int) -> None:
    clock, job = w.clock[0], w.table.jobs[row]
    _close_account(w, row)
    free_slots(w, row)
    w.services[clock.finished] = rules.service_of(job)
    rules.finish(job, clock.now_s)
    clock.finished += 1
    clock.held -= 1
    if not w.neighbours.law[0].shares:
        clock.busy_gpus -= job.width
    record(w, row, FINISH, ZERO)


@inner
def promote(w: World, row: int) -> None:
    rules.promote(w.table.jobs[row], w.clock[0].now_s)
    record(w, row, PROMOTE, ZERO)


@inner
def set_queue(w: World, row: int, queue: int) -> None:
    """Remember the queue that the policy put a job in, and log a demotion."""
    if rules.set_queue(w.table.jobs[row], queue, w.clock[0].now_s):
        record(w, row, DEMOTE, ZERO)
