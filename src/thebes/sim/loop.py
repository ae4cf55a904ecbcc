"""The general path: any policy, asked through its View, event by event.

Time and everything that costs time run in compiled code; once per instant the policy gets a View and answers with a
Decision, which is checked, compared with what is (`diff`) and carried out. A live controller does the same with a real
clock and real processes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.compiled import Record, compiled, entry, inner, plain
from thebes.model.decision import (
    FAULTS,
    UNPLANNED,
    Decision,
    Execution,
    diff,
    fault_in,
    shares_of,
    workspace_for,
)
from thebes.model.errors import UserError
from thebes.model.jobs import HELD, NEVER, WAITING
from thebes.model.machine import copy_of
from thebes.model.view import DISTRIBUTION, PLANS, PROFILES, JobsView, Sketch, View
from thebes.policy.base import Policy
from thebes.sim.calendar import Calendar, calendar_for, next_event_s, schedule
from thebes.sim.executions import Executions
from thebes.sim.neighbours import charge_pace, come, go, touch
from thebes.sim.profiler import REFIT_EVERY, refit_pack_limit
from thebes.sim.world import (
    MIGRATE,
    RECONFIGURE,
    RESIZE,
    World,
    arrive,
    begin,
    charge_beginning,
    checkpoint_every_s,
    depart,
    finish,
    free_slots,
    most_events,
    promote,
    set_queue,
    settle_neighbours,
    step_timeline,
    submit,
    suspend,
    take_slots,
)

# Why `advance` came back.
ASK, DONE, LOG_FULL = range(3)


class Alive(NamedTuple):
    """Rows of the jobs submitted and not finished, ascending: rows[:size[0]]."""

    rows: NDArray[np.int64]
    size: NDArray[np.int64]


@compiled
def advance(w: World, calendar: Calendar, alive: Alive, wake_s: float) -> int:
    """Go to the next instant at which anything happens: finishes, submissions, or the policy's own wake-up."""
    jobs, clock = w.table.jobs, w.clock[0]
    now_s = min(wake_s, next_event_s(calendar))
    if clock.arrived < jobs.size:
        now_s = min(now_s, jobs[clock.arrived].submit_s)
    if now_s == NEVER:
        return DONE
    if w.log.size - clock.logged < most_events(w, now_s):
        return LOG_FULL
    clock.now_s = now_s
    while next_event_s(calendar) <= now_s:
        row = calendar.rows[0]
        schedule(calendar, row, NEVER)
        finish(w, row)
        at = np.searchsorted(alive.rows[: alive.size[0]], row)
        for i in range(at, alive.size[0] - 1):
            alive.rows[i] = alive.rows[i + 1]
        alive.size[0] -= 1
    _reschedule_touched(w, calendar)
    while clock.arrived < jobs.size and jobs[clock.arrived].submit_s <= now_s:
        alive.rows[alive.size[0]] = clock.arrived
        alive.size[0] += 1
        submit(w, clock.arrived)
    return ASK


@inner
def _reschedule_touched(w: World, calendar: Calendar) -> None:
    for i in range(settle_neighbours(w)):
        row = w.neighbours.touched[i]
        if w.table.jobs[row].phase == HELD:
            schedule(calendar, row, w.table.jobs[row].finish_s)


@inner
def _execute(job: Record, execution: Execution, i: int) -> None:
    """The job takes on the plan and the CPUs of row `i` of the Decision."""
    if execution.plan.size > 0:
        job.plan = execution.plan[i]
        job.plan_profile = execution.profile[i]
        job.cpus = execution.cpus[i]
        job.host_gib = execution.host_gib[i]
        job.memory_gib = execution.memory_gib[i]


@compiled
def carry_out(
    w: World,
    calendar: Calendar,
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    shares: NDArray[np.float64],
    gpus: NDArray[np.int64],
    execution: Execution,
    suspended: NDArray[np.int64],
    started: NDArray[np.int64],
    migrated: NDArray[np.int64],
    offset: NDArray[np.int64],
    promoted: NDArray[np.int64],
) -> None:
    """Do what a sound Decision asks for. `started` and `migrated` are positions in `rows`."""
    jobs, slots, now_s = w.table.jobs, w.table.slots, w.clock[0].now_s
    for row in promoted:
        promote(w, row)
    for row in suspended:
        free_slots(w, row)
        suspend(w, row)
        schedule(calendar, row, NEVER)
    if w.neighbours.law[0].shares:
        for i in range(rows.size):
            job = jobs[rows[i]]
            if job.phase == HELD and job.share != shares[i]:
                charge_pace(job, now_s, checkpoint_every_s(w))
                charge_beginning(w, rows[i])
                touch(w.neighbours, jobs, rows[i])
            job.share = shares[i]
    for i in migrated:
        depart(w, rows[i])
    for i in migrated:
        job = jobs[rows[i]]
        change, moved = MIGRATE, False
        for at in range(min(job.width, counts[i])):
            moved = moved or slots[job.first_slot + at] != gpus[offset[i] + at]
        if job.width != counts[i]:
            change, moved = RESIZE, True
        elif execution.plan.size and execution.plan[i] != job.plan:
            change = RECONFIGURE
        job.width = counts[i]
        _execute(job, execution, i)
        slots[job.first_slot : job.first_slot + job.width] = gpus[offset[i] : offset[i] + counts[i]]
        arrive(w, rows[i], change, moved)
        schedule(calendar, rows[i], job.finish_s)
    for i in started:
        job = jobs[rows[i]]
        job.width = counts[i]
        _execute(job, execution, i)
        slots[job.first_slot : job.first_slot + job.width] = gpus[offset[i] : offset[i] + counts[i]]
        take_slots(w, rows[i])
        begin(w, rows[i])
        schedule(calendar, rows[i], job.finish_s)
    for i in range(execution.plan.size):
        job = jobs[rows[i]]
        if job.cpus != execution.cpus[i]:  # it goes on where it is, at another pace
            charge_pace(job, now_s, checkpoint_every_s(w))
            go(w.neighbours, w.machine, w.table, rows[i])
            _execute(job, execution, i)
            come(w.neighbours, w.machine, w.table, rows[i])
            touch(w.neighbours, jobs, rows[i])
    _reschedule_touched(w, calendar)
    w.clock[0].decisions += 1


@compiled
def note_queues(w: World, rows: NDArray[np.int64], queues: NDArray[np.int64]) -> None:
    for i in range(rows.size):
        set_queue(w, rows[i], queues[i])


_advance, _carry_out, _step_timeline = entry(advance), entry(carry_out), entry(step_timeline)
_note_queues = entry(note_queues)


class Loop:
    """One simulation under one policy; `run` goes on until done or for so many instants."""

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        policy: Policy,
        *,
        checks: bool,
        tenants: tuple[str, ...] = ("",),
        tier_speeds: NDArray[np.float64] | None = None,
        executions: Executions | None = None,
    ) -> None:
        count = len(world.table.jobs)
        self.world = world
        self.cluster = cluster
        self.policy = policy
        self.checks = checks
        self.tenants = tenants
        self.tier_speeds = tier_speeds if PROFILES in policy.needs else None
        self.executions = executions
        self.calendar = calendar_for(world.table.jobs)
        self.alive = Alive(np.zeros(count, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self.sketch = Sketch(copy_of(world.machine), world.table.slots.copy(), np.zeros(count, dtype=np.bool_))
        self.gang_classes = int(world.table.jobs["gang_class"].max()) + 1
        self.room = workspace_for(world.machine)
        self.wake_s = NEVER
        self.memory: object = None
        self.refit_at = REFIT_EVERY

    def run(self, instants: int) -> int:
        """DONE, LOG_FULL (give the log more room and go on) or ASK (there is more to do)."""
        for _ in range(instants):
            status = _advance(self.world, self.calendar, self.alive, self.wake_s)
            if status != ASK:
                return status
            if self.alive.size[0]:
                self._decide()
            else:
                self.wake_s = NEVER
            _step_timeline(self.world)
            if self.world.learns[0]:
                self.refit_at = refit_pack_limit(self.world, self.refit_at)
        return ASK

    def grow_log(self) -> None:
        self.world = with_longer_log(self.world)

    def view(self) -> View:
        world, needs = self.world, self.policy.needs
        now_s = float(world.clock["now_s"][0])
        rows = self.alive.rows[: self.alive.size[0]].copy()
        return View(
            now_s=now_s,
            cluster=self.cluster,
            jobs=JobsView(world.table, rows, now_s, needs, self.tier_speeds),
            machine=world.machine,
            _table=world.table,
            _sketch=self.sketch,
            _strategy=world.strategy,
            _gang_classes=self.gang_classes,
            finished_gpu_s=world.services[: world.clock["finished"][0] if DISTRIBUTION in needs else 0],
            memory=self.memory,
            tenants=self.tenants,
            _plans=self.executions.book if self.executions and PLANS in needs else None,
        )

    def _decide(self) -> None:
        view = self.view()
        decision = self.policy.decide(view)
        execution = self._execution(decision)
        if self.checks:
            self._check(decision, view, execution)
        if not decision.wake_s > view.now_s:
            raise UserError(
                f"policy {self.policy.label}: at {view.now_s:g} s it asks to be woken at {decision.wake_s:g} s",
                hint="wake_s is an instant after view.now_s; leave it out if nothing changes by itself",
            )
        actions = diff(self.world.table, view.jobs.rows, decision, execution)
        _carry_out(
            self.world,
            self.calendar,
            decision.rows,
            actions.counts,
            shares_of(decision),
            decision.gpus,
            execution,
            actions.suspend,
            actions.start,
            actions.migrate,
            actions.offset,
            decision.promote,
        )
        if decision.queues is not None:
            _note_queues(self.world, view.jobs.rows, decision.queues)
        self.wake_s = decision.wake_s
        self.memory = decision.memory

    def _execution(self, decision: object) -> Execution:
        """The plans of a Decision, looked up; profiles of plans that nobody had yet join the world's."""
        if self.executions is None or not isinstance(decision, Decision):
            return UNPLANNED
        execution, profiles = self.executions.of(self.world.table, decision, self.policy.label)
        if profiles is not self.world.neighbours.profiles:
            self.world = self.world._replace(neighbours=self.world.neighbours._replace(profiles=profiles))
        return execution

    def _check(self, decision: object, view: View, execution: Execution) -> None:
        if not isinstance(decision, Decision):
            raise UserError(
                f"policy {self.policy.label}: decide returned {type(decision).__name__}, not a Decision",
                hint="end it with `return thebes.fill(view, order)`",
            )
        fault, row = fault_in(self.world.table, self.world.machine, decision, self.room, execution)
        if not fault and decision.shares is not None and not self.policy.shares and (decision.shares < 1).any():
            raise UserError(
                f"policy {self.policy.label}: its decision shares GPUs, but the policy does not say that it does",
                hint="write shares = True in the policy's class",
            )
        what = f"{FAULTS[fault]} (job row {row})" if fault else self._fault_in_queues(decision, view)
        if what:
            raise UserError(
                f"policy {self.policy.label}: its decision at {view.now_s:g} s {what}",
                hint="a Decision names whole gangs on free GPUs; `thebes.fill(view, order)` makes one from an order",
            )

    def _fault_in_queues(self, decision: Decision, view: View) -> str:
        if len(decision.promote):
            waiting = view.jobs.rows[self.world.table.jobs["phase"][view.jobs.rows] == WAITING]
            wrong = np.setdiff1d(decision.promote, waiting)
            if len(wrong):
                return f"promotes a job that is not waiting (job row {wrong[0]})"
        if decision.queues is not None and len(decision.queues) != len(view.jobs):
            return f"names the queues of {len(decision.queues)} jobs, but {len(view.jobs)} are alive"
        return ""


def with_longer_log(world: World) -> World:
    """The same world with twice the room for events."""
    longer = np.recarray(2 * len(world.log), dtype=world.log.dtype)
    longer[: len(world.log)] = world.log
    return world._replace(log=plain(longer))
