"""The general path runs any policy, asked through its View, event by event.

Time and everything that costs time run in compiled code; once per instant the policy gets a View and answers with a
Decision, which is checked, compared with what is (`diff`) and carried out. A live controller does the same with a real
clock and real processes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model import gate
from thebes.model.cluster import Cluster
from thebes.model.compiled import Record, compiled, entry, inlined, inner, plain
from thebes.model.decision import UNPLANNED, Decision, Execution, diff, shares_of, workspace_for
from thebes.model.facts import DISTRIBUTION, PLANS, PROFILES, SIMULATED, Knowledge
from thebes.model.jobs import HELD, NEVER, copy_numbers
from thebes.model.machine import copy_of
from thebes.model.rules import change_share, charge_pace
from thebes.model.view import Board, JobsView, Sketch, View
from thebes.policy.base import Policy
from thebes.sim.calendar import Calendar, calendar_for, next_event_s, schedule
from thebes.sim.executions import Executions
from thebes.sim.neighbours import come, go, touch
from thebes.sim.profiler import REFIT_EVERY, refit_pack_limit
from thebes.sim.world import (
    MIGRATE,
    RECONFIGURE,
    RESIZE,
    World,
    arrive,
    begin,
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

# Reasons why `advance` returns.
ASK, DONE, LOG_FULL = range(3)


class Alive(NamedTuple):
    """Rows of the jobs submitted and not finished, ascending: rows[:size[0]]."""

    rows: NDArray[np.int64]
    size: NDArray[np.int64]


@compiled
def advance(w: World, calendar: Calendar, alive: Alive, wake_s: float) -> int:
    """Go to the next instant at which something happens: a finish, a submission, or the policy's own wake-up."""
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
        leave(alive, row)
    _reschedule_touched(w, calendar)
    while clock.arrived < jobs.size and jobs[clock.arrived].submit_s <= now_s:
        alive.rows[alive.size[0]] = clock.arrived
        alive.size[0] += 1
        submit(w, clock.arrived)
    return ASK


@inlined
def leave(alive: Alive, row: int) -> None:
    """Those behind it move up; rows are in order, so half of those left to look at are passed over at each look."""
    at, end = 0, alive.size[0]
    while at < end:
        middle = (at + end) // 2
        if alive.rows[middle] < row:
            at = middle + 1
        else:
            end = middle
    for i in range(at, alive.size[0] - 1):
        alive.rows[i] = alive.rows[i + 1]
    alive.size[0] -= 1


@inner
def _reschedule_touched(w: World, calendar: Calendar) -> None:
    for i in range(settle_neighbours(w)):
        row = w.neighbours.touched[i]
        if w.table.jobs[row].phase == HELD:
            schedule(calendar, row, w.table.jobs[row].finish_s)


@inner
def _execute(job: Record, execution: Execution, i: int) -> None:
    """Give the job the plan and the CPUs of row `i` of the Decision."""
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
    """Carry out a Decision that has passed the gate. `started` and `migrated` are positions in `rows`."""
    jobs, slots, now_s = w.table.jobs, w.table.slots, w.clock[0].now_s
    for row in promoted:
        promote(w, row)
    for row in suspended:
        free_slots(w, row)
        suspend(w, row)
        schedule(calendar, row, NEVER)
    if w.neighbours.law[0].shares:
        for i in range(rows.size):
            if change_share(w.table, w.machine, rows[i], shares[i], now_s, checkpoint_every_s(w)):
                touch(w.neighbours, jobs, rows[i])
    i: int
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
        copy_numbers(gpus[offset[i] : offset[i] + counts[i]], slots[job.first_slot :])
        arrive(w, rows[i], change, moved)
        schedule(calendar, rows[i], job.finish_s)
    for i in started:
        job = jobs[rows[i]]
        job.width = counts[i]
        _execute(job, execution, i)
        copy_numbers(gpus[offset[i] : offset[i] + counts[i]], slots[job.first_slot :])
        take_slots(w, rows[i])
        begin(w, rows[i])
        schedule(calendar, rows[i], job.finish_s)
    for i in range(execution.plan.size):
        job = jobs[rows[i]]
        if job.cpus != execution.cpus[i]:  # the job goes on where it is, at another pace
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


class GeneralLoop:
    """One simulation under one policy; `run` goes on to the end, or for so many instants."""

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
        knowledge: Knowledge = SIMULATED,
    ) -> None:
        count = len(world.table.jobs)
        self.world = world
        self.cluster = cluster
        self.policy = policy
        self.checks = checks
        self.tenants = tenants
        self.tier_speeds = tier_speeds if PROFILES in policy.needs else None
        self.executions = executions
        unknown = frozenset() if executions else frozenset({PLANS})
        self.knowledge = replace(knowledge, facts=knowledge.facts - unknown)
        self.calendar = calendar_for(world.table.jobs)
        self.alive = Alive(np.zeros(count, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self.sketch = Sketch(copy_of(world.machine), world.table.slots.copy(), np.zeros(count, dtype=np.bool_))
        self.gang_classes = int(world.table.jobs["gang_class"].max()) + 1
        self.room = workspace_for(world.machine)
        self.writes = gate.WriteWatch()
        self.able = gate.Abilities("this simulation", counts=True, shares=policy.shares, plans=executions is not None)
        self.wake_s = NEVER
        self.memory: object = None
        self.finished, self.last_finish_s = 0, -np.inf
        self.refit_at = REFIT_EVERY

    def run(self, instants: int) -> int:
        """Go on; returns DONE, LOG_FULL (give the log more room and call again) or ASK (there is more to do)."""
        for _ in range(instants):
            status = _advance(self.world, self.calendar, self.alive, self.wake_s)
            if status != ASK:
                return status
            if self.world.clock["finished"][0] > self.finished:
                self.finished, self.last_finish_s = self.world.clock["finished"][0], float(self.world.clock["now_s"][0])
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
            jobs=JobsView(world.table, rows, now_s, needs, self.tier_speeds, self.knowledge),
            machine=world.machine,
            board=Board(world.table, self.sketch, world.strategy, self.gang_classes),
            finished_gpu_s=world.services[: world.clock["finished"][0] if DISTRIBUTION in needs else 0],
            memory=self.memory,
            last_finish_s=self.last_finish_s,
            tenants=self.tenants,
            _plans=self.executions.book if self.executions and PLANS in needs else None,
        )

    def _decide(self) -> None:
        now_s, alive = float(self.world.clock["now_s"][0]), self.alive.rows[: self.alive.size[0]].copy()
        answer = self._answer(alive)
        if self.executions is not None and self.checks and isinstance(answer, Decision):
            answer = gate.taken(answer, self.policy.label)  # its plans are looked up before it is admitted
        execution = self._execution(answer)
        decision = self._admitted(answer, now_s, alive, execution)
        actions = diff(self.world.table, alive, decision, execution)
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
            _note_queues(self.world, alive, decision.queues)
        self.wake_s = decision.wake_s
        self.memory = decision.memory

    def _execution(self, decision: object) -> Execution:
        """The plans of a Decision. Profiles of plans that no job had before are added to the world's."""
        if self.executions is None or not isinstance(decision, Decision):
            return UNPLANNED
        execution, profiles = self.executions.of(self.world.table, decision, self.policy.label)
        if profiles is not self.world.neighbours.profiles:
            self.world = self.world._replace(neighbours=self.world.neighbours._replace(profiles=profiles))
        return execution

    def _answer(self, alive: NDArray[np.int64]) -> object:
        """Ask the policy."""
        table, machine = self.world.table, self.world.machine
        if not self.checks:
            return self.policy.decide(self.view())
        self.writes.begin(alive, table, machine)
        answer = gate.answer_of(self.policy.decide, self.view(), self.policy.label)
        if self.writes.seen(alive, table, machine):
            raise gate.DecisionRefused(
                f"policy {self.policy.label}: it {gate.WROTE}", hint="take copies of its columns"
            )
        return answer

    def _admitted(self, answer: Any, now_s: float, alive: NDArray[np.int64], execution: Execution) -> Decision:
        if not self.checks:
            gate.refuse_wake(answer.wake_s, now_s, self.policy.label)
            return answer
        decision = gate.admit(
            answer,
            now_s,
            alive,
            self.world.table,
            self.world.machine,
            self.room,
            label=self.policy.label,
            shares=self.policy.shares,
            able=self.able,
            execution=execution,
        )
        # A policy's memory may be large, so it is written only when the View is looked at, or when its type is new.
        if self.writes.looks or type(decision.memory) is not type(self.memory):
            gate.pickled(decision.memory, self.policy.label)
        return decision


def with_longer_log(world: World) -> World:
    """The same world with twice the room for events."""
    longer = np.recarray(2 * len(world.log), dtype=world.log.dtype)
    longer[: len(world.log)] = world.log
    return world._replace(log=plain(longer))
