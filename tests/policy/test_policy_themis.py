"""Themis: rho, offers, leases, leftovers (specification in shared/specs/themis.md, section 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_policy_conduct import is_pure, watch

from kit.effort import effort
from kit.workloads import finishes, mixed_cluster, story, trace_of, workloads
from thebes import Decision, Policy, Trace, View, simulate
from thebes.model.decision import HOLDS, OUTBID, OVER_QUOTA, fault_in, workspace_for
from thebes.model.machine import BLOCKED, copy_of, release, set_free
from thebes.policy.fairness.themis import Book, Themis, ideal_s, shared_s
from thebes.sim.costs import FREE_OF_COST


def rho(elapsed_s: float, left_s: float, speed: float, duration_s: float, gpus: int, apps: float, total: int) -> float:
    shared = shared_s(np.array([elapsed_s]), np.array([left_s]), np.array([speed]))
    return float((shared / ideal_s(np.array([duration_s]), np.array([gpus]), np.array([apps]), total))[0])


# --- 1. rho -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_rho_of_one_job_alone_is_1(gpus: int) -> None:
    """Given N_avg = 1 and a placement at full speed, T_sh = T_id, from the first instant to the last."""
    assert rho(0, 100, 1.0, 100, gpus, 1, 8) == 1.0
    assert rho(60, 40, 1.0, 100, gpus, 1, 8) == 1.0
    assert rho(0, 100, 0.5, 100, gpus, 1, 8) == 2.0


def test_rho_of_two_equal_jobs_on_half_the_cluster_each_is_1() -> None:
    """Given N_avg = 2 and a demand of the whole cluster: half of it is half the speed, twice the time, as T_id says."""
    assert rho(0, 100, 0.5, 100, 8, 2, 8) == 1.0
    assert rho(100, 50, 0.5, 100, 8, 2, 8) == 1.0
    assert rho(0, 100, 1.0, 100, 4, 2, 8) == 1.0  # a gang of half the cluster fits into its part


def test_n_is_the_average_over_the_life_of_the_app() -> None:
    """Given a job alone for 100 s and with three more after that: at 400 s, N_avg = (100*1 + 300*4) / 400."""
    seen: dict[float, float] = {}

    def look(_: Policy, view: View, decision: Decision) -> None:
        book = decision.memory
        assert isinstance(book, Book)
        if 0 < view.now_s < 1000:
            seen[view.now_s] = float((book.apps_s - book.born_apps_s[0]) / view.now_s)

    trace = trace_of((0, 1, 1000), (100, 1, 1000), (100, 1, 1000), (100, 1, 300))
    watch(trace, "1x4", Themis(), look)
    assert seen[100.0] == 1.0
    assert seen[400.0] == (100 * 1 + 300 * 4) / 400


# --- 2. offers --------------------------------------------------------------------------------------------------------


@given(values=st.lists(st.floats(0.1, 50), min_size=1, max_size=40), f=st.floats(0, 1))
@effort(100)
def test_only_the_worst_fraction_sees_an_offer(values: list[float], f: float) -> None:
    told = np.array(values)
    offered = Themis(f=f).offered(told)
    assert len(offered) == max(1, int(np.ceil((1 - f) * len(told) - 1e-9)))
    assert told[offered].min() >= np.delete(told, offered).max(initial=0.0)


def test_f_of_0_shows_it_to_all_and_f_of_1_to_the_worst_only() -> None:
    told = np.array([1.0, 3.0, 2.0])
    assert Themis(f=0.0).offered(told).tolist() == [1, 2, 0]
    assert Themis(f=1.0).offered(told).tolist() == [1]


def test_the_auction_goes_by_gain_among_those_offered() -> None:
    """Given GPUs for one of two apps, the same wait for both: rho of the longer is lower, but f decides who is asked.

    At 600 the first lease ends. With f = 1 the worst app gets all, and it is the short one that has waited since 10.
    """
    trace = trace_of((0, 2, 5000), (10, 2, 100), (10, 2, 1000))
    result = simulate(trace, "1x2", Themis(f=1.0), costs=FREE_OF_COST)
    assert result.jobs["first_start_s"].to_list()[1] == 600.0
    assert finishes(result)[1] == 700.0


@given(trace=workloads(most_gpus=4), f=st.sampled_from([0.0, 0.5, 0.8, 1.0]), payments=st.booleans())
@effort(20)
def test_every_gpu_goes_to_at_most_one_app_and_gangs_are_whole(trace: Trace, f: float, payments: bool) -> None:
    def look(_: Policy, view: View, decision: Decision) -> None:
        assert len(np.unique(decision.gpus)) == len(decision.gpus)
        assert len(decision.gpus) == view.jobs.gpus[decision.fate == HOLDS].sum()
        assert fault_in(view.board.table, view.machine, decision, workspace_for(view.machine)) == (0, -1)

    result = watch(trace, mixed_cluster(), Themis(f=f, lease_s=9.0, payments=payments), look)
    assert result.metrics["completed"] == len(trace.jobs)


# --- 3. payments ------------------------------------------------------------------------------------------------------
# (that truth pays is tested on the auction itself, in test_policy_auction.py)


def leases(trace: Trace, cluster: str, policy: Themis) -> dict[tuple[float, int], float]:
    """(when, row) -> end of each lease that begins or is renewed at that instant."""
    found: dict[tuple[float, int], float] = {}

    def look(_: Policy, view: View, decision: Decision) -> None:
        book = decision.memory
        assert isinstance(book, Book)
        for at, row in enumerate(view.jobs.rows.tolist()):
            if decision.fate[at] == HOLDS and not view.jobs.running[at]:
                found[view.now_s, row] = float(book.until_s[at])

    watch(trace, cluster, policy, look, costs=FREE_OF_COST)
    return found


def test_a_hidden_payment_is_taken_in_lease_time() -> None:
    """Given three gangs that need all GPUs, the winner leaves before the common end; without payments it stays."""
    trace = trace_of((0, 2, 300), (0, 2, 3000), (0, 2, 3000))
    free, paid = (leases(trace, "1x2", Themis(f=0.0, payments=on)) for on in (False, True))
    first = min(free)
    assert free[first] == 600.0
    # Each expects its next turn after three leases: without the winner, one of the others would end at 3000, not 4800.
    assert paid[first] == pytest.approx(600.0 * 3000 / 4800)


def test_without_payments_every_lease_runs_to_the_common_end() -> None:
    trace = trace_of((0, 2, 3000), (7, 1, 2000), (7, 2, 900), (50, 1, 2000), (1234, 2, 100))
    assert {end % 600 for end in leases(trace, "1x3", Themis(f=0.5)).values()} == {0.0}


# --- 4. leftovers -----------------------------------------------------------------------------------------------------


@given(trace=workloads(most_gpus=6), f=st.sampled_from([0.0, 0.8, 1.0]), payments=st.booleans())
@effort(25)
def test_no_gpu_idles_while_some_app_can_use_it(trace: Trace, f: float, payments: bool) -> None:
    def look(_: Policy, view: View, decision: Decision) -> None:
        left = view.total_gpus - len(decision.gpus)
        assert (view.jobs.gpus[decision.fate != HOLDS] > left).all()

    watch(trace, "3x2", Themis(f=f, lease_s=11.0, payments=payments), look)


def test_who_is_not_asked_gets_what_is_left_over() -> None:
    """Given f = 1, the worst app alone is asked; its GPUs taken, the rest goes to the others that fit."""
    result = simulate(trace_of((0, 2, 100), (0, 1, 100), (0, 1, 100)), "1x4", Themis(f=1.0))
    assert result.jobs["first_start_s"].to_list() == [0.0, 0.0, 0.0]


# --- 5. leases --------------------------------------------------------------------------------------------------------


@given(trace=workloads(most_gpus=4), payments=st.booleans())
@effort(25)
def test_nothing_runs_past_its_lease_without_renewal(trace: Trace, payments: bool) -> None:
    """Whoever holds GPUs after a decision has a lease beyond it; who waits is the reason to wake at the first end."""

    def look(_: Policy, view: View, decision: Decision) -> None:
        book, holds = decision.memory, decision.fate == HOLDS
        assert isinstance(book, Book)
        assert (book.until_s[holds] > view.now_s).all()
        if holds.all():
            assert decision.wake_s == np.inf
        elif holds.any():
            assert decision.wake_s == book.until_s[holds].min()
        old = view.memory
        if isinstance(old, Book) and view.now_s < old.call_s < np.inf:  # leases in force are left alone
            leased = np.isin(view.jobs.id, old.ids) & view.jobs.running
            assert holds[leased].all()

    watch(trace, mixed_cluster(), Themis(lease_s=9.0, payments=payments), look)


def test_a_lease_that_nobody_contests_is_renewed_without_a_round() -> None:
    seen: list[tuple[float, float]] = []

    def look(_: Policy, view: View, decision: Decision) -> None:
        seen.append((view.now_s, decision.wake_s))

    watch(trace_of((0, 1, 5000), (1500, 2, 100)), "1x2", Themis(), look, costs=FREE_OF_COST)
    assert seen[:3] == [(0.0, np.inf), (1500.0, 1800.0), (1800.0, 2400.0)]


def test_an_app_that_wins_again_keeps_its_gpus() -> None:
    result = simulate(trace_of((0, 2, 5000), (10, 4, 100)), "1x4", Themis(), costs=FREE_OF_COST)
    kinds = [kind for _, job, kind in story(result) if job == 0]
    assert "migrate" not in kinds
    assert kinds.count("suspend") <= 1


def test_leases_shorter_than_a_restart_still_get_work_done() -> None:
    """Given leases of 10 s and 62 s for each switch, whoever is restored works as long as the switch took."""
    result = simulate(trace_of((0, 4, 300), (0, 4, 300)), "1x4", Themis(lease_s=10))
    assert max(finishes(result)) < 2000.0


def test_who_waits_was_outbid() -> None:
    def look(_: Policy, view: View, decision: Decision) -> None:
        assert set(decision.fate.tolist()) <= {HOLDS, OUTBID}

    watch(trace_of((0, 2, 900), (1, 2, 900), (2, 1, 900)), "1x2", Themis(), look)


def test_large_gangs_are_put_together_when_leases_end() -> None:
    """Given small jobs that keep every GPU busy, a gang of the whole cluster runs long before they stop coming."""
    small = [(50.0 * i, 1, 400.0) for i in range(120)]
    trace = trace_of(*sorted([*small, (405.0, 8, 300.0)]))
    result = simulate(trace, "2x4", Themis(), costs=FREE_OF_COST)
    gang = result.jobs.filter(result.jobs["gpus"] == 8)
    assert gang["finish_s"][0] < 4000.0


def test_a_renewed_gang_moves_closer_together_if_it_pays() -> None:
    """Given a skewed gang over two nodes, at its lease's end with room in one node, it moves there."""
    models = ["vgg19", "vgg19", "vgg19", "resnet50"]
    trace = trace_of((0, 3, 700), (0, 3, 550), (0, 2, 20000), (10, 8, 10000), model=models)
    moved = simulate(trace, "2x4", Themis(), costs=FREE_OF_COST)
    stayed = simulate(trace, "2x4", Themis(moves=False), costs=FREE_OF_COST)
    assert story(moved, "migrate")[0] == (600.0, 2, "migrate")
    assert stayed.metrics["migrations"] == 0
    assert moved.jobs["finish_s"][2] < stayed.jobs["finish_s"][2]


# --- what holds for every policy --------------------------------------------------------------------------------------


@given(trace=workloads(most_gpus=4, typed=True), payments=st.booleans())
@effort(15)
def test_the_policy_is_pure_and_all_jobs_finish(trace: Trace, payments: bool) -> None:
    result = watch(trace, mixed_cluster(), Themis(lease_s=8.0, payments=payments), is_pure)
    assert result.metrics["completed"] == len(trace.jobs)


def test_runs_are_repeatable() -> None:
    one, two = (simulate("philly-sample", "4x8", "themis", limit=60, skip_oversize=True) for _ in range(2))
    assert one.jobs.equals(two.jobs)


def part_of(view: View, keep: Any, blocked_gpus: list[int]) -> View:
    """The View of an organisation: some of the jobs, and none of the blocked GPUs."""
    machine = copy_of(view.machine)
    for row in view.jobs.rows[~keep & view.jobs.running]:
        release(machine, np.flatnonzero(machine.gpus["owner"] == row))
    for gpu in blocked_gpus:
        assert machine.gpus["owner"][gpu] == -1
        node = machine.gpus["node"][gpu]
        machine.gpus["owner"][gpu] = BLOCKED
        set_free(machine, int(node), int(machine.nodes["free"][node]) - 1)
    jobs = view.jobs
    some = jobs.among(jobs.rows[keep])
    return replace(view, machine=machine, jobs=some)


def test_blocked_gpus_are_not_given_and_only_own_jobs_are_named() -> None:
    """Given a View with every second job and GPUs 0 to 3 blocked, as two levels show it to an inner policy."""
    seen: list[int] = []

    def look(policy: Policy, view: View, _: Decision) -> None:
        if view.jobs.running.any():
            return
        keep = np.arange(len(view.jobs)) % 2 == 0
        part = part_of(view, keep, [0, 1, 2, 3])
        decision = policy.decide(part)
        assert fault_in(part.board.table, part.machine, decision, workspace_for(part.machine)) == (0, -1)
        assert (decision.gpus >= 4).all()
        assert np.isin(decision.rows, part.jobs.rows).all()
        assert len(decision.fate) == len(part.jobs)
        seen.append(len(decision.gpus))

    watch(trace_of((0, 2, 50), (0, 1, 50), (0, 3, 50), (0, 1, 50), (0, 1, 50)), "2x4", Themis(), look)
    assert seen == [3]


def test_quotas_are_respected_and_told() -> None:
    def look(policy: Policy, view: View, _: Decision) -> None:
        if view.jobs.running.any():
            return
        table = view.board.table._replace(quotas=np.array([2], dtype=np.int64))
        decision = policy.decide(replace(view, board=view.board._replace(table=table)))
        assert sorted(decision.fate.tolist()) == [HOLDS, HOLDS, OVER_QUOTA]

    watch(trace_of((0, 1, 50), (0, 1, 50), (0, 1, 50)), "1x4", Themis(), look)
