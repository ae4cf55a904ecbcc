"""Gavel's finish-time fairness: the programme against SciPy's solvers, and the rounds that realise it."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from test_policy_conduct import is_pure, watch

from kit.effort import effort
from kit.workloads import finishes, mixed_cluster, story, trace_of, workloads
from thebes import Decision, Policy, Trace, View, simulate
from thebes.model.decision import HOLDS, NOT_ITS_TURN
from thebes.policy.fairness.ftf import Ftf, Race, fairest_shares, fairest_shares_by_kind, next_multiple
from thebes.sim.costs import FREE_OF_COST

JOB = st.tuples(st.integers(1, 8), st.floats(0, 500), st.floats(1, 500), st.floats(1, 5))


def race_of(jobs: list[tuple[int, float, float, float]]) -> Race:
    gpus, elapsed, left, private = (np.array(column) for column in zip(*jobs, strict=True))
    return Race(gpus.astype(np.int64), elapsed, left, left * private + elapsed / 2)


def reachable(race: Race, rho: float, kinds: np.ndarray, kind_gpus: np.ndarray) -> bool:
    """Whether shares exist, each split over the kinds a job accepts, with which nobody's rho is above this one.

    rho_i(x) <= rho is x_i (rho T_id - elapsed) >= left: linear in x, so SciPy's linear programme decides.
    """
    jobs, count = len(race.gpus), len(kind_gpus)
    room = rho * race.isolated_s - race.elapsed_s
    if (room < race.left_s * (1 - 1e-12)).any():
        return False
    x = np.arange(jobs * count).reshape(jobs, count)
    above, limit = np.zeros((jobs + jobs + count, jobs * count)), np.zeros(jobs + jobs + count)
    for i in range(jobs):
        above[i, x[i]], limit[i] = -room[i], -race.left_s[i] * (1 - 1e-9)
        above[jobs + i, x[i]], limit[jobs + i] = 1.0, 1.0
    for k in range(count):
        above[2 * jobs + k, x[:, k]], limit[2 * jobs + k] = race.gpus, kind_gpus[k]
    bounds = [(0, 1 if (kinds[i] >> k) & 1 else 0) for i in range(jobs) for k in range(count)]
    return linprog(np.zeros(jobs * count), above, limit, bounds=bounds).status == 0


def is_the_least(largest: float, race: Race, kinds: np.ndarray, kind_gpus: np.ndarray) -> bool:
    """Whether the programme's optimum is this one: it can be reached, and nothing clearly below it."""
    return reachable(race, largest * (1 + 1e-6), kinds, kind_gpus) and not reachable(
        race, largest * (1 - 1e-5), kinds, kind_gpus
    )


@given(jobs=st.lists(JOB, min_size=1, max_size=6), total=st.integers(1, 12))
@effort(30)
def test_the_largest_rho_is_the_least_that_scipy_finds(jobs: Any, total: int) -> None:
    race = race_of(jobs)
    shares = fairest_shares(race, total)
    everything = np.ones(len(jobs), dtype=np.int64)
    assert (shares > 0).all()
    assert (shares <= 1).all()
    assert race.gpus @ shares <= total * (1 + 1e-9)
    assert is_the_least(race.rho(shares).max(), race, everything, np.array([total]))


@given(jobs=st.lists(JOB, min_size=2, max_size=8), total=st.integers(1, 12))
@effort(60)
def test_who_is_below_the_largest_rho_is_not_held_back_for_nothing(jobs: Any, total: int) -> None:
    """Shares below 1 all have the same rho, and nobody with a full share is better off: nobody can be helped more."""
    race = race_of(jobs)
    shares = fairest_shares(race, total)
    rho, held_back = race.rho(shares), shares < 1 - 1e-6
    if held_back.any():
        assert np.isclose(race.gpus @ shares, total)
        assert np.allclose(rho[held_back], rho[held_back][0], rtol=1e-5)
        assert (rho[~held_back] >= rho[held_back][0] * (1 - 1e-5)).all()


@given(
    jobs=st.lists(JOB, min_size=1, max_size=5),
    masks=st.lists(st.integers(1, 7), min_size=5, max_size=5),
    kind_gpus=st.lists(st.integers(1, 6), min_size=3, max_size=3),
)
@effort(40)
def test_with_several_kinds_the_largest_rho_is_the_least_that_scipy_finds(
    jobs: Any, masks: list[int], kind_gpus: list[int]
) -> None:
    race, kinds = race_of(jobs), np.array(masks[: len(jobs)], dtype=np.int64)
    shares = fairest_shares_by_kind(race, kinds, np.array(kind_gpus))
    assert is_the_least(race.rho(shares).max(), race, kinds, np.array(kind_gpus))


def test_a_full_share_that_rounding_made_a_little_less_holds_nobody_back() -> None:
    """Given a job that cannot reach the common rho with all its GPUs, its kind must not be taken for the scarcest."""
    race = race_of([(2, 23.0, 1.0, 1.5), (4, 0, 1, 1), (1, 0, 1, 1), (1, 0, 1, 2), (1, 0, 1, 1)])
    kinds, kind_gpus = np.array([2, 2, 1, 1, 3]), np.array([1, 5, 1])
    shares = fairest_shares_by_kind(race, kinds, kind_gpus)
    assert is_the_least(race.rho(shares).max(), race, kinds, kind_gpus)


def test_equal_jobs_take_turns() -> None:
    """Given two equal jobs that each need all GPUs, they alternate by rounds and end one round apart."""
    result = simulate(trace_of((0, 4, 1000), (0, 4, 1000)), "1x4", Ftf(round_s=100), costs=FREE_OF_COST)
    assert sorted(finishes(result)) == [1900.0, 2000.0]
    assert {time % 100 for time, _, _ in story(result, "start", "suspend", "resume")} == {0.0}


def test_between_rounds_nobody_is_preempted_and_idle_gpus_are_given_at_once() -> None:
    trace = trace_of((0, 3, 250), (10, 2, 60), (20, 1, 30))
    result = simulate(trace, "1x4", Ftf(round_s=100), costs=FREE_OF_COST)
    assert result.jobs["first_start_s"][2] == 20.0
    assert all(time % 100 == 0 for time, _, _ in story(result, "suspend"))


def test_no_round_is_called_while_nobody_waits() -> None:
    seen: list[float] = []

    def look(_: Policy, view: View, decision: Decision) -> None:
        seen.append(decision.wake_s)
        assert (decision.wake_s == np.inf) == bool((decision.fate == HOLDS).all())
        assert set(decision.fate.tolist()) <= {HOLDS, NOT_ITS_TURN}

    watch(trace_of((0, 2, 5000), (10, 2, 1000), (20, 2, 100)), "1x4", Ftf(), look)
    assert seen[:3] == [np.inf, np.inf, 360.0]


def test_rounds_shorter_than_a_restart_still_get_work_done() -> None:
    """Given rounds of 10 s and 62 s for each switch, whoever is switched to works for half a round at least."""
    result = simulate(trace_of((0, 4, 60), (0, 4, 60)), "1x4", Ftf(round_s=10))
    assert max(finishes(result)) < 2000.0


def test_a_job_alone_has_rho_1_whatever_its_gang() -> None:
    """Given N = 1, the private part is the whole cluster: elapsed + left over isolated is 1 at a full share."""
    race = Race(np.array([4]), np.array([30.0]), np.array([70.0]), np.array([100.0]))
    assert race.rho(fairest_shares(race, 4)).tolist() == [1.0]


@given(trace=workloads(most_gpus=4))
@effort(15)
def test_all_jobs_finish_and_the_policy_is_pure(trace: Trace) -> None:
    result = watch(trace, mixed_cluster(), Ftf(round_s=7.3), is_pure)
    assert result.metrics["completed"] == len(trace.jobs)


def test_runs_are_repeatable() -> None:
    one, two = (simulate("philly-sample", "4x8", "ftf", limit=60, skip_oversize=True) for _ in range(2))
    assert one.jobs.equals(two.jobs)


@given(step=st.floats(0.1, 1000), count=st.integers(0, 10_000))
def test_the_next_multiple_is_after_now(step: float, count: int) -> None:
    assert count * step < next_multiple(step, count * step) <= (count + 2) * step
