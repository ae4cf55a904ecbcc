"""Dally by its specification: leases, offers, delay timers, the priority of those whom the network hurts, the tuner.

Switching is free unless a test says so. `2x3` with two long jobs of two GPUs leaves one GPU free on each of two nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from kit.workloads import finishes, story, trace_of, workloads
from thebes import Decision, Policy, Result, Trace, UserError, View, simulate
from thebes.model.decision import BETTER_PLACE, HOLDS, NO_GPUS
from thebes.model.facts import PROFILES
from thebes.model.machine import BLOCKED, copy_of, set_free, tier_spanned
from thebes.model.profiles import TIER_NODE, TIER_RACK
from thebes.policy.dally.dally import (
    CONSOLIDATED,
    MANUAL,
    NO_WAIT,
    Dally,
    DallyConsolidated,
    DallyManual,
    DallyMemory,
    DallyNoWait,
    nw_sens,
)
from thebes.policy.dally.tuner import IN_RACK, ON_MACHINE, Waits, estimate, record, tune
from thebes.sim.costs import FREE_OF_COST

Look = Callable[[View, Decision], None]


class Watched(Policy):
    """Another policy with somebody looking over its shoulder; `changed` may alter what it decides on, or its answer."""

    def __init__(self, policy: Policy, look: Look, changed: Any = None, woken: Any = None) -> None:
        self.policy, self.look, self.changed, self.woken = policy, look, changed, woken
        self.needs: Any = policy.needs

    def decide(self, view: View) -> Decision:
        decision = self.policy.decide(self.changed(view) if self.changed else view)
        self.look(view, decision)
        return self.woken(view, decision) if self.woken else decision


def nothing(_: View, __: Decision) -> None:
    pass


def run(trace: Trace, cluster: str, policy: Policy, look: Look = nothing, **options: Any) -> Result:
    return simulate(trace, cluster, Watched(policy, look), **{"costs": FREE_OF_COST, "perf": "ideal", **options})


def starts(result: Result) -> list[float]:
    return result.jobs["first_start_s"].to_list()


def by_timer(machine_wait: float, rack_wait: float = 99.0, **more: Any) -> Dally:
    return Dally(timers=MANUAL, lease_s=1000.0, machine_wait=machine_wait, rack_wait=rack_wait, **more)


# Two jobs that leave one GPU free on each of two nodes of three, and one that wants two GPUs.
SCATTERED = trace_of((0, 2, 900), (0, 2, 900), (1, 2, 90))
LONG_SCATTERED = trace_of((0, 2, 9000), (0, 2, 9000), (1, 2, 3000))


# --- accept or reject -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "cluster", "start_s"),
    [
        (DallyNoWait(lease_s=1000.0), "2x3", 1.0),
        (DallyConsolidated(lease_s=1000.0), "2x3", 900.0),
        (by_timer(0.5), "2x3", 501.0),
        (by_timer(0.25, 0.5), "2x1x3", 501.0),
        (by_timer(0.0, 0.0), "2x3", 1.0),
    ],
    ids=["no-wait", "consolidated", "D1", "D2", "manual-0"],
)
def test_a_job_insists_on_close_gpus_until_its_timer_ends(policy: Dally, cluster: str, start_s: float) -> None:
    assert starts(run(SCATTERED, cluster, policy))[2] == start_s


def test_a_job_that_waits_for_a_better_place_is_told_so() -> None:
    fates: dict[float, list[int]] = {}
    run(SCATTERED, "2x3", by_timer(0.5), lambda view, decision: fates.update({view.now_s: decision.fate.tolist()}))
    assert fates[1.0] == [HOLDS, HOLDS, BETTER_PLACE]
    fates.clear()
    run(trace_of((0, 1, 9), (0, 1, 9)), "1x1", Dally(), lambda v, d: fates.update({v.now_s: d.fate.tolist()}))
    assert fates[0.0] == [HOLDS, NO_GPUS]


def test_only_a_timer_that_matters_wakes_the_policy() -> None:
    """Given free GPUs in two racks, the end of the wait for one machine changes nothing, the end of the other does."""
    seen: list[float] = []
    run(SCATTERED, "2x1x3", by_timer(0.25, 0.5), lambda view, _: seen.append(view.now_s))
    assert seen == [0.0, 1.0, 501.0, 591.0]


@given(trace=workloads(most_gpus=8))
@effort(20)
def test_endless_timers_never_cross_a_tier_that_could_hold_the_job(trace: Trace) -> None:
    def look(view: View, decision: Decision) -> None:
        assert decision.counts is not None
        at = 0
        for count in decision.counts.tolist():
            tier = tier_spanned(view.machine, decision.gpus[at : at + count])
            at += count
            assert tier <= TIER_NODE or count > 2
            assert tier <= TIER_RACK or count > 4

    run(trace, "2x2x2", Dally(timers=CONSOLIDATED, lease_s=10.0), look)


def test_a_rejected_offer_passes_on() -> None:
    """Given one free GPU and a gang of two at the head, the job behind it starts."""
    assert starts(run(trace_of((0, 1, 100), (0, 2, 10), (0, 1, 10)), "1x2", Dally())) == [0, 100, 0]


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_job_without_rivals_keeps_its_gpus_at_no_cost() -> None:
    result = simulate(trace_of((0, 2, 500), (3, 3, 500)), "2x3", Dally(lease_s=10.0), perf="ideal")
    assert finishes(result) == [500, 503]
    assert result.metrics["preemptions"] == result.metrics["migrations"] == 0
    assert result.metrics["overhead_gpu_seconds"] == 0


def test_at_the_end_of_a_lease_everybody_may_choose_again() -> None:
    """Given two jobs and one GPU: who never ran goes first, then who has waited longer."""
    result = run(trace_of((0, 1, 25), (0, 1, 25)), "1x1", Dally(lease_s=10.0))
    assert finishes(result) == [45, 50]
    assert story(result, "suspend") == [(10, 0, "suspend"), (20, 1, "suspend"), (30, 0, "suspend"), (40, 1, "suspend")]


def test_timers_restart_when_a_lease_is_lost() -> None:
    """Given a job spread out after its timer, at its lease end it insists on one machine again, for as long."""
    result = run(LONG_SCATTERED, "2x3", by_timer(0.25))
    told = [event for event in story(result, "start", "suspend", "resume") if event[1] == 2]
    assert told[:3] == [(251, 2, "start"), (1251, 2, "suspend"), (1501, 2, "resume")]


def test_with_keep_place_a_job_stays_where_nobody_else_wants() -> None:
    result = run(LONG_SCATTERED, "2x3", by_timer(0.25, keep_place=True))
    assert result.metrics["preemptions"] == 0
    assert finishes(result) == [9000, 9000, 3251]


def lease_is_held(view: View, decision: Decision) -> None:
    """GPUs on lease are the GPUs of active jobs, and no lease in force has ended."""
    memory = decision.memory
    assert isinstance(memory, DallyMemory)
    leases, counts = memory.leases, decision.counts
    assert counts is not None
    assert np.array_equal(leases.ids, decision.rows)
    assert counts.sum() == len(decision.gpus) == len(np.unique(decision.gpus))
    assert (leases.end_s > view.now_s).all()
    assert (leases.end_s <= view.now_s + 10.0 + 1e-9).all()
    before = view.memory
    if isinstance(before, DallyMemory):
        alive = np.isin(before.leases.ids, view.jobs.rows)
        assert np.array_equal(before.leases.ids[alive], view.jobs.rows[view.jobs.running])
        if not before.leases.unrivalled:
            assert (before.leases.end_s[alive] >= view.now_s).all()
    if len(decision.rows) < len(view.jobs) and len(leases.end_s):
        assert decision.wake_s <= leases.end_s.min()


TIMER_SETS = st.sampled_from(
    [
        Dally(lease_s=10.0),
        Dally(lease_s=10.0, tuner_by_model=True, keep_place=True, ageing=0.1, reserve_large=True),
        Dally(lease_s=10.0, skip_costly_waits=True),
        DallyManual(lease_s=10.0, machine_wait=1.0, rack_wait=2.0),
        DallyNoWait(lease_s=10.0),
        DallyConsolidated(lease_s=10.0),
    ]
)


@given(trace=workloads(most_gpus=8), policy=TIMER_SETS)
@effort(40)
def test_gpus_on_lease_are_the_gpus_of_active_jobs(trace: Trace, policy: Dally) -> None:
    assert run(trace, "2x2x2", policy, lease_is_held, perf="tiers").metrics["completed"] == len(trace.jobs)


def at_every_lease_end(view: View, decision: Decision) -> Decision:
    assert isinstance(decision.memory, DallyMemory)
    ends_s = decision.memory.leases.end_s
    return dataclasses.replace(decision, wake_s=float(min([decision.wake_s, *ends_s])))


@given(trace=workloads(most_gpus=8), policy=TIMER_SETS)
@effort(20)
def test_a_lease_that_renews_itself_is_one_that_was_renewed(trace: Trace, policy: Dally) -> None:
    """Given nobody waits, asking at each end of a lease gives the same run as asking only where it matters."""
    options: dict[str, Any] = {"perf": "tiers", "costs": FREE_OF_COST}
    asked = simulate(trace, "2x2x2", Watched(policy, nothing, woken=at_every_lease_end), **options)
    assert asked.events.equals(run(trace, "2x2x2", policy, **options).events)


@given(trace=workloads(most_gpus=8), policy=TIMER_SETS)
@effort(10)
def test_the_same_run_twice_is_the_same(trace: Trace, policy: Dally) -> None:
    first, second = (run(trace, "2x2x2", policy, perf="tiers") for _ in range(2))
    assert first.events.equals(second.events)


# --- the priority of those whom the network hurts ---------------------------------------------------------------------


def test_nw_sens_is_the_mean_efficiency_over_time() -> None:
    """Given jobs that move between one machine, one rack and two, the simulator's own account gives the same mean."""
    tiers: dict[int, set[int]] = {}
    checked: list[float] = []

    def look(view: View, _: Decision) -> None:
        ran_s, progress_s = view.jobs.ran_s, view.jobs.progress_s
        for i, row in enumerate(view.jobs.rows.tolist()):
            score = float(nw_sens(ran_s[i], view.jobs.talked_s[i]))
            if view.jobs.running[i]:
                tiers.setdefault(row, set()).add(int(view.jobs.tier[i]))
            if ran_s[i] == 0:
                assert score == 0
            else:
                assert score == pytest.approx(progress_s[i] / ran_s[i], abs=1e-8)
                checked.append(score)

    jobs = [(7.0 * i, 1 + i % 4, 60.0 + 13 * i) for i in range(24)]
    models = ["resnet18", "bert", "alexnet", "mobilenetv3"] * 6
    run(trace_of(*jobs, model=models), "2x2x2", DallyNoWait(lease_s=20.0), look, perf="artist")
    assert max(len(seen) for seen in tiers.values()) >= 2
    assert min(checked) < 0.9 < max(checked)


@given(trace=workloads(most_gpus=4))
@effort(20)
def test_offers_go_first_to_whom_the_network_hurts_most(trace: Trace) -> None:
    """Given equal demands and no timers, nobody gets a new lease before one with a lower score."""

    def look(view: View, decision: Decision) -> None:
        jobs = view.jobs
        before = view.memory.leases if isinstance(view.memory, DallyMemory) else None
        ended = np.zeros(len(jobs), dtype=bool)
        if before is not None:
            ends = dict(zip(before.ids.tolist(), before.end_s.tolist(), strict=True))
            ended = np.array([ends.get(row, np.inf) == view.now_s for row in jobs.rows.tolist()])
        key = [
            (float(nw_sens(jobs.ran_s[i], jobs.talked_s[i])), view.now_s if running else jobs.since_s[i], row)
            for i, (row, running) in enumerate(zip(jobs.rows.tolist(), jobs.running, strict=True))
        ]
        holds = decision.fate == HOLDS
        for demand in set(jobs.gpus.tolist()):
            here = jobs.gpus == demand
            got = [key[i] for i in np.flatnonzero(here & holds & (~jobs.running | ended))]
            refused = [key[i] for i in np.flatnonzero(here & ~holds)]
            assert not got or not refused or max(got) < min(refused)

    run(trace, "2x2x2", Dally(timers=NO_WAIT, lease_s=10.0), look, perf="tiers")


# --- the tuner --------------------------------------------------------------------------------------------------------


def waits_with_room(room: int = 20) -> Waits:
    return Waits(np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int64), np.zeros(room), np.zeros(room))


def test_timers_by_hand() -> None:
    """Mean plus two standard deviations, rounded up, between 6 and 0.8 H (machine), 12 and H (rack)."""
    waits = waits_with_room()
    assert tune(waits, 0, 8, 24.0) == (6, 12)  # nothing known
    count = 0
    for leases in (6.0, 8.0, 10.0):
        count = record(waits, count, 8, ON_MACHINE, 100.0, leases, 0.0)
    assert estimate(waits, count, 8, ON_MACHINE) == pytest.approx(8 + 2 * np.sqrt(8 / 3))
    assert tune(waits, count, 8, 24.0) == (12, 12)  # 11.27 rounded up; the rack's floor
    assert tune(waits, count, 4, 24.0) == (6, 12)  # another demand learns nothing from it
    count = record(waits, count, 8, IN_RACK, 100.0, 17.0, 0.0)
    assert tune(waits, count, 8, 24.0) == (12, 17)
    count = record(waits, count, 8, IN_RACK, 100.0, 70.0, 0.0)
    count = record(waits, count, 8, ON_MACHINE, 100.0, 70.0, 0.0)
    assert tune(waits, count, 8, 24.0) == (20, 24)  # the caps


def test_short_waits_are_not_recorded_and_old_ones_are_all_forgotten() -> None:
    waits, count = waits_with_room(), 0
    for at_s in (10.0, 20.0, 30.0, 40.0):
        count = record(waits, count, 2, ON_MACHINE, at_s, 5.0, 0.0)
    count = record(waits, count, 2, IN_RACK, 15.0, 3.0, 0.0)
    assert record(waits, count, 2, ON_MACHINE, 50.0, 0.99, 45.0) == count == 5
    count = record(waits, count, 2, ON_MACHINE, 50.0, 7.0, 30.0)
    assert waits.at_s[:count].tolist() == [30.0, 40.0, 15.0, 50.0]  # the rack's list is another one
    assert estimate(waits, count, 2, ON_MACHINE) == pytest.approx(17 / 3 + 2 * np.sqrt(8 / 9))


@pytest.mark.parametrize("by_model", [False, True])
def test_the_tuner_learns_from_the_waits_of_a_run(by_model: bool) -> None:
    """Given three jobs in turns of 10 s on one GPU, the third has waited two leases before its first."""
    memories: dict[float, DallyMemory] = {}

    def look(view: View, decision: Decision) -> None:
        assert isinstance(decision.memory, DallyMemory)
        memories[view.now_s] = decision.memory

    trace = trace_of((0, 1, 15), (0, 1, 15), (0, 1, 15), model=["resnet50", "vgg19", "vgg19"])
    run(trace, "1x1", Dally(lease_s=10.0, tuner_by_model=by_model), look)
    waits = memories[20.0].waits
    assert waits.leases.tolist() == [1.0, 2.0]
    assert waits.at_s.tolist() == [10.0, 20.0]
    assert (waits.key & 0xFFFFFFFF).tolist() == [1, 1]
    assert (waits.key > 1).all() == by_model


# --- beyond the paper -------------------------------------------------------------------------------------------------


def test_only_skipping_waits_needs_profiles() -> None:
    assert not Dally.needs
    assert not Dally(keep_place=True).needs
    assert Dally(skip_costly_waits=True).needs == {PROFILES}


@pytest.mark.parametrize(
    ("model", "machine_wait", "lost"), [("resnet50", 0.1, 0), ("vgg19", 0.1, 1), ("vgg19", 0.5, 0)]
)
def test_a_wait_that_costs_more_than_it_saves_is_skipped(model: str, machine_wait: float, lost: int) -> None:
    """Given a spread job at its lease end: it waits again only if that costs less than the work done suggests.

    VGG has done 600 s of work at 0.6 against 0.95 on a machine: as much again would be 368 s faster there, which is
    worth 100 s of waiting but not 500; ResNet would save 30.
    """
    result = run(
        trace_of((0, 2, 1900), (0, 2, 1900), (1, 2, 1200), model=["resnet50", "resnet50", model]),
        "2x3",
        by_timer(machine_wait, skip_costly_waits=True),
        perf="tiers",
    )
    assert starts(result)[2] == 1
    assert len([event for event in story(result, "suspend") if event == (1001, 2, "suspend")]) == lost


def test_a_reservation_collects_gpus_for_a_gang_that_no_machine_can_hold() -> None:
    """Given four small jobs whose leases end one after the other and a fifth that waits with a gang of four."""
    small = [(float(i), 1, 100.0) for i in range(4)]
    trace = trace_of(*small, (4, 4, 10), (5, 1, 100))
    without, reserved = (
        run(trace, "2x2", DallyNoWait(lease_s=10.0, reserve_large=reserve)) for reserve in (False, True)
    )
    assert starts(reserved)[4] == 13
    assert starts(without)[4] > 100


def test_ageing_lets_a_job_return_that_newcomers_keep_out() -> None:
    trace = trace_of((0, 1, 20), *((10.0 * i + 5, 1, 10) for i in range(20)))
    without, aged = (run(trace, "1x1", Dally(lease_s=10.0, ageing=ageing)) for ageing in (0.0, 1.0))
    assert finishes(without)[0] == 220
    assert finishes(aged)[0] < 60


# --- the world around it ----------------------------------------------------------------------------------------------


def test_blocked_gpus_are_not_offered_and_do_not_count_as_room() -> None:
    """Given two nodes of which one GPU each may be had, a gang of two takes both at once: no machine could hold it."""

    def one_gpu_per_node(view: View) -> View:
        machine = copy_of(view.machine)
        for node in range(2):
            blocked = np.arange(3 * node, 3 * node + 2)
            machine.gpus["owner"][blocked] = BLOCKED
            set_free(machine, node, int((machine.gpus["owner"][3 * node : 3 * node + 3] == -1).sum()))
        return dataclasses.replace(view, machine=machine)

    given: list[list[int]] = []
    policy = Watched(DallyConsolidated(), lambda _, decision: given.append(decision.gpus.tolist()), one_gpu_per_node)
    simulate(trace_of((0, 2, 10)), "2x3", policy)
    assert given == [[2, 5]]


def test_the_users_own_shape_is_kept() -> None:
    def over_two_nodes(view: View) -> View:
        jobs = view.board.table.jobs.copy()  # the View that the world shows must not be changed
        jobs["want_nodes"][0] = 2
        return replace(view, board=view.board._replace(table=view.board.table._replace(jobs=jobs)))

    policy = Watched(DallyConsolidated(lease_s=4.0), nothing, over_two_nodes)
    result = simulate(trace_of((0, 2, 10), (0, 1, 10)), "2x3", policy, costs=FREE_OF_COST)
    assert result.metrics["migrations"] == 0
    assert result.jobs["nodes_last"].to_list() == [2, 1]
    assert starts(result) == [0, 0]


def test_user_priority_goes_before_sensitivity() -> None:
    def urgent_last(view: View) -> View:
        view.board.table.jobs["priority"][2] = 1
        return view

    policy = Watched(Dally(), nothing, urgent_last)
    result = simulate(trace_of((0, 1, 10), (1, 1, 10), (2, 1, 10)), "1x1", policy, costs=FREE_OF_COST)
    assert starts(result) == [0, 20, 10]


def test_mistakes() -> None:
    with pytest.raises(UserError) as caught:
        Dally(timers="automatic")
    assert str(caught.value) == "dally: timers=automatic is unknown\ndid you mean 'auto'?"
