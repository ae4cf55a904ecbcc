"""The simulated world: what it costs to start, suspend and resume, and the account of every GPU-second held.

A hold goes through three stretches: idle (its GPUs are given, but the last owner of some is still writing its state, or
the job's own state is not yet written), overhead (start or restore), running. A suspended job's GPUs stay busy until
its state is written. Every stretch is charged when it ends, to the job that caused it, so the account adds up exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Record, Records, compiled, inner
from thebes.model.jobs import FINISHED, HELD, NEVER, WAITING, JobTable, gpus_of, running_s
from thebes.model.machine import ZERO, Machine, nodes_spanned, occupy, release, tier_spanned
from thebes.placement.strategies import Strategy
from thebes.policy.priority import ticks_until
from thebes.sim.neighbours import Neighbours, charge_pace, come, go, move_in, move_out, repace

# Event kinds: positions in thebes.sim.result.EVENT_KINDS.
FINISH, SUBMIT, DEMOTE, PROMOTE, SUSPEND, START, RESUME, MIGRATE, RESIZE, RECONFIGURE = np.arange(10)

EVENT = np.dtype(
    [
        ("time_s", np.float64),
        ("plan", np.int64),  # its code
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
        ("quantum_s", np.float64),  # the policy reads attained service at multiples of it; 0: whenever it decides
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
        ("step_gap_s", np.float64),  # the timeline's resolution; grows when it would get too long
        ("observed", np.int64),  # placements that `skew` has learned from
    ]
)
COSTS = np.dtype(
    [
        ("start_s", np.float64),
        ("start_s_per_gib", np.float64),
        ("migrate_s", np.float64),  # on top of suspend and resume, which each job's record has
        ("migrate_s_per_gib", np.float64),
        ("saves", np.int64),  # 1: state is saved on suspend; 0: killed, back to the last periodic checkpoint
        ("checkpoint_every_s", np.float64),
    ]
)
OBSERVATION = np.dtype([("skew", np.float64), ("speed", np.float64)])


class World(NamedTuple):
    """All of it, as compiled code takes it."""

    table: JobTable
    machine: Machine
    strategy: Strategy
    costs: Records  # one record
    clock: Records  # one record
    neighbours: Neighbours
    log: Records  # EVENT
    timeline: Records  # STEP
    services: NDArray[np.float64]  # GPU-seconds run by each finished job, in order of finish
    observations: Records  # OBSERVATION ring: how fast spread-out gangs ran
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
    """No instant writes more events than this: each job alive can change queue, stop and start once."""
    jobs, clock = w.table.jobs, w.clock[0]
    coming = clock.arrived
    while coming < jobs.size and jobs[coming].submit_s <= now_s:
        coming += 1
    return 3 * (clock.held + clock.waiting) + 4 * (coming - clock.arrived) + 16


@compiled
def step_timeline(w: World) -> None:
    """Write the state that holds from now on; steps closer than the resolution overwrite each other."""
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


@inner
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
    job.phase = WAITING
    job.since_s = job.submit_s
    job.queue_since_s = job.submit_s
    clock.arrived += 1
    clock.waiting += 1
    clock.waiting_gpus += job.gpus
    record(w, row, SUBMIT, ZERO)


@inner
def hold(w: World, row: int) -> None:
    """The job holds its slots from now on (the machine knows already); works out when it will run and end."""
    clock, job, costs = w.clock[0], w.table.jobs[row], w.costs[0]
    now_s, gpus = clock.now_s, gpus_of(w.table, row)
    wait_s = now_s - job.since_s
    job.waited_s += wait_s
    if job.first_start_s < NEVER:
        job.aged_wait_s += wait_s
    gpus_clear_s = now_s
    for gpu in gpus:
        gpus_clear_s = max(gpus_clear_s, w.machine.gpus[gpu].clear_s)
    cost_s = job.resume_s if job.executed_s > 0.0 else costs.start_s + costs.start_s_per_gib * job.state_gib
    job.phase = HELD
    job.since_s = now_s
    job.ready_s = max(gpus_clear_s, job.saved_s)
    job.run_from_s = job.ready_s + cost_s
    job.booked_s = now_s
    job.paced_s = job.run_from_s
    job.kept_left_s = job.left_s
    job.tier = tier_spanned(w.machine, gpus)
    job.nodes = nodes_spanned(w.machine, gpus)
    job.node_kind = w.machine.nodes[w.machine.gpus[gpus[0]].node].node_kind
    come(w.neighbours, w.machine, w.table, row)
    job.finish_s = job.run_from_s + job.left_s / job.speed
    job.holds += 1
    clock.held += 1
    clock.waiting -= 1
    if not w.neighbours.law[0].shares:  # where GPUs are shared, `take_slots` counts
        clock.busy_gpus += job.width
    clock.waiting_gpus -= job.gpus


@inner
def begin(w: World, row: int) -> None:
    """Start or resume a waiting job on its slots."""
    job = w.table.jobs[row]
    first = job.first_start_s == NEVER
    hold(w, row)
    if first:
        job.first_start_s = w.clock[0].now_s
    record(w, row, START if first else RESUME, job.nodes)


@inner
def checkpoint_every_s(w: World) -> float:
    """Running time between the checkpoints that survive a kill; 0 where state is saved on suspension."""
    return 0.0 if w.costs[0].saves == 1 else w.costs[0].checkpoint_every_s


@inner
def take_slots(w: World, row: int) -> None:
    """The machine learns that the job sits on its slots."""
    if w.neighbours.law[0].shares:
        w.clock[0].busy_gpus += move_in(w.neighbours, w.machine, w.table, row)
    else:
        occupy(w.machine, row, gpus_of(w.table, row))


@inner
def free_slots(w: World, row: int) -> None:
    """The machine learns that the job has left its slots."""
    if w.neighbours.law[0].shares:
        w.clock[0].busy_gpus -= move_out(w.neighbours, w.machine, w.table, row)
    else:
        release(w.machine, gpus_of(w.table, row))


@inner
def settle_neighbours(w: World) -> int:
    """Everybody touched at this instant gets a new speed; returns how many (they stay in `touched`)."""
    n = w.neighbours
    for i in range(n.count[0]):
        repace(n, w.machine, w.table, n.touched[i], w.clock[0].now_s, checkpoint_every_s(w))
    count = n.count[0]
    n.count[0] = 0
    return count


@inner
def charge_beginning(w: World, row: int) -> None:
    """Book idle and overhead time of this hold, from where it was booked last up to now, at the present share."""
    now_s, job = w.clock[0].now_s, w.table.jobs[row]
    idle_until_s = min(now_s, job.ready_s)
    for gpu in gpus_of(w.table, row):  # the last owner pays until its state is written
        clear_s = max(job.booked_s, w.machine.gpus[gpu].clear_s)
        job.idle_gpu_s += job.share * max(0.0, idle_until_s - clear_s)
    restored_s = min(now_s, job.run_from_s) - max(job.ready_s, job.booked_s)
    job.overhead_gpu_s += job.width * job.share * max(0.0, restored_s)
    job.booked_s = now_s


@inner
def _charge_hold(w: World, row: int) -> float:
    """Close the account of this hold; returns the seconds it ran."""
    now_s, job = w.clock[0].now_s, w.table.jobs[row]
    charge_beginning(w, row)
    ran_s = running_s(job, now_s)
    charge_pace(job, now_s, checkpoint_every_s(w))
    go(w.neighbours, w.machine, w.table, row)
    job.executed_s += ran_s
    job.age_s += ran_s
    return ran_s


@inner
def _observe(w: World, row: int, ran_s: float) -> None:
    """Remember how fast a gang ran that was spread over more nodes than it needed."""
    job = w.table.jobs[row]
    if w.learns[0] and ran_s > 0.0 and job.nodes > job.min_nodes:
        seen = w.observations[w.clock[0].observed % w.observations.size]
        seen.skew = job.skew
        seen.speed = job.speed
        w.clock[0].observed += 1


@inner
def _unread_after(quantum_s: float, job: Record, ran_s: float, now_s: float) -> float:
    """How much of a stopped job's running time no tick has read: what it ran since the last tick that found it here."""
    if quantum_s <= 0.0:
        return 0.0
    last_tick_s = ticks_until(quantum_s, now_s) * quantum_s
    if last_tick_s > job.since_s:
        return max(0.0, now_s - max(last_tick_s, job.run_from_s))
    return job.unread_s + ran_s


@inner
def _vacate(w: World, row: int) -> None:
    """Stop running: charge the hold, write the state out. The machine's GPUs are the caller's business."""
    clock, job, costs = w.clock[0], w.table.jobs[row], w.costs[0]
    now_s = clock.now_s
    ran_s = _charge_hold(w, row)
    _observe(w, row, ran_s)
    job.unread_s = _unread_after(clock.quantum_s, job, ran_s, now_s)
    kept_s, suspend_s = ran_s, 0.0
    if costs.saves == 1:
        if ran_s > 0.0:  # nothing new to write otherwise
            suspend_s = job.suspend_s
            job.saved_s = now_s + suspend_s
    else:
        every_s = costs.checkpoint_every_s
        kept_s = np.floor(ran_s / every_s) * every_s if every_s > 0.0 else 0.0
        lost_gpu_s = job.width * job.share * (ran_s - kept_s)
        job.useful_gpu_s -= lost_gpu_s
        job.lost_gpu_s += lost_gpu_s
        job.progress_s -= job.kept_left_s - job.left_s
        job.left_s = job.kept_left_s
    job.overhead_gpu_s += job.width * job.share * suspend_s
    for gpu in gpus_of(w.table, row):
        slot = w.machine.gpus[gpu]
        slot.clear_s = max(slot.clear_s, now_s + suspend_s)
    job.phase = WAITING
    job.since_s = now_s
    job.run_from_s = NEVER
    job.finish_s = NEVER
    clock.held -= 1
    clock.waiting += 1
    if not w.neighbours.law[0].shares:
        clock.busy_gpus -= job.width
    clock.waiting_gpus += job.gpus


@inner
def suspend(w: World, row: int) -> None:
    """Preempt a job whose GPUs the machine has already released."""
    _vacate(w, row)
    w.table.jobs[row].preemptions += 1
    record(w, row, SUSPEND, ZERO)
    w.table.jobs[row].width = w.table.jobs[row].gpus


@inner
def depart(w: World, row: int) -> None:
    """First half of a migration: suspend the job here, free its GPUs."""
    free_slots(w, row)
    _vacate(w, row)


@inner
def arrive(w: World, row: int, change: int, moved: bool) -> None:
    """Second half: resume on its new slots. All departures of a decision come first, so that jobs can swap places.

    `change` is the event: MIGRATE, RESIZE or RECONFIGURE; state goes over the network only if the GPUs are others.
    """
    job, costs = w.table.jobs[row], w.costs[0]
    take_slots(w, row)
    hold(w, row)
    transfer_s = costs.migrate_s + costs.migrate_s_per_gib * job.state_gib if moved else 0.0
    job.run_from_s += transfer_s
    job.paced_s += transfer_s
    job.finish_s += transfer_s
    if change == RESIZE:
        job.resizes += 1
    elif change == RECONFIGURE:
        job.reconfigurations += 1
    else:
        job.migrations += 1
    record(w, row, change, job.nodes)


@inner
def finish(w: World, row: int) -> None:
    clock, job = w.clock[0], w.table.jobs[row]
    ran_s = _charge_hold(w, row)
    _observe(w, row, ran_s)
    free_slots(w, row)
    w.services[clock.finished] = job.executed_s * job.gpus
    job.left_s = 0.0
    job.phase = FINISHED
    clock.finished += 1
    clock.held -= 1
    if not w.neighbours.law[0].shares:
        clock.busy_gpus -= job.width
    record(w, row, FINISH, ZERO)


@inner
def promote(w: World, row: int) -> None:
    """Back to the first queue: the age that decides priority starts again, the work done stays done."""
    job = w.table.jobs[row]
    job.age_s = 0.0
    job.unread_s = 0.0
    job.aged_wait_s = 0.0
    job.waited_s += w.clock[0].now_s - job.since_s
    job.since_s = w.clock[0].now_s
    job.promotions += 1
    job.queue = 0
    job.queue_since_s = w.clock[0].now_s
    record(w, row, PROMOTE, ZERO)


@inner
def set_queue(w: World, row: int, queue: int) -> None:
    """Remember the queue that the policy put a job in, and tell of demotions."""
    job = w.table.jobs[row]
    if queue > job.queue:
        job.demotions += 1
        record(w, row, DEMOTE, ZERO)
    if queue != job.queue:
        job.queue = queue
        job.queue_since_s = w.clock[0].now_s


# What the checker found; 0 is good.
FAULTS = (
    "",
    "a job that holds no GPUs is noted as the owner of one",
    "a job holds fewer or more GPUs than its gang has",
    "a GPU is held by two jobs",
    "a job sits on GPUs of a kind that it did not ask for",
    "the set of running jobs differs from the allocation",
    "the index of free GPUs is wrong",
)
SOUND, GHOST_HOLDER, GANG_BROKEN, DOUBLE_BOOKED, WRONG_KIND, SETS_DIFFER, INDEX_WRONG = range(7)


@compiled
def check_world(w: World) -> tuple[int, int]:
    """Design rule 3 on the state itself, in one pass over the GPUs: (fault, job row)."""
    jobs, machine, clock = w.table.jobs, w.machine, w.clock[0]
    owned, gangs, gang_gpus, node_free = 0, 0, 0, 0
    for gpu in range(machine.gpus.size):
        row = machine.gpus[gpu].owner
        node = machine.nodes[machine.gpus[gpu].node]
        if gpu == node.first:
            node_free = 0
        if row < 0:
            node_free += 1
        else:
            owned += 1
            if jobs[row].phase != HELD:
                return GHOST_HOLDER, row
            if gpus_of(w.table, row)[0] == gpu:  # a gang is looked at once, at its first GPU
                gangs += 1
                gang_gpus += jobs[row].width
                last = -1
                for other in gpus_of(w.table, row):
                    if other <= last or machine.gpus[other].owner != row:
                        return DOUBLE_BOOKED if other > last else GANG_BROKEN, row
                    if not (jobs[row].kinds >> machine.nodes[machine.gpus[other].node].node_kind) & 1:
                        return WRONG_KIND, row
                    last = other
        if gpu == node.first + node.gpus - 1 and node_free != node.free:
            return INDEX_WRONG, -1
    if owned != gang_gpus:
        return GANG_BROKEN, -1
    if gangs != clock.held or owned != clock.busy_gpus:
        return SETS_DIFFER, -1
    return SOUND, -1
