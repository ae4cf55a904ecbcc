"""Policies on workloads small enough to follow by hand, at the exact instants that the papers' rules give.

Switching is free and placement does not matter here unless a test says so: one can add up the times in the head.
"""

from __future__ import annotations

from typing import Any

import pytest

from kit.workloads import finishes, story, trace_of
from thebes import Policy, Result, Trace, simulate
from thebes.policy import find
from thebes.policy.orders.fifo import LongestPendingFirst
from thebes.policy.orders.las import LeastAttainedService
from thebes.policy.orders.tiresias import TiresiasG, TiresiasL
from thebes.sim.costs import FREE_OF_COST, Costs

BOTH_PATHS = pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])


def run(trace: Trace, cluster: str, policy: Policy | str, **options: Any) -> Result:
    return simulate(trace, cluster, policy, **{"perf": "ideal", "costs": FREE_OF_COST, **options})


# --- the example of the Tiresias paper (spec 2.6): 2 GPUs, three jobs at once -----------------------------------------

PAPER = trace_of((0, 2, 2), (0, 1, 8), (0, 2, 6))


@BOTH_PATHS
@pytest.mark.parametrize(
    ("policy", "ends"),
    [
        (find("srsf")(), [2, 10, 16]),
        (find("srtf")(), [2, 16, 8]),
        (LeastAttainedService(quantum_s=1.0), [5, 14, 16]),
    ],
    ids=["srsf", "srtf", "las"],
)
def test_the_papers_example(policy: Policy, ends: list[float], fast: bool) -> None:
    assert finishes(run(PAPER, "1x2", policy, fast=fast)) == ends


# --- orders of submission ---------------------------------------------------------------------------------------------

# A job of two GPUs stands behind one that runs and before a small one.
CONVOY = trace_of((0, 1, 10), (1, 2, 10), (2, 1, 5))


@BOTH_PATHS
def test_fifo_holds_up_everybody_behind_a_job_that_does_not_fit(fast: bool) -> None:
    assert finishes(run(CONVOY, "1x2", "fifo", fast=fast)) == [10, 20, 25]


@BOTH_PATHS
@pytest.mark.parametrize("policy", ["backfill", "lpjf"])
def test_backfill_passes_over_a_job_that_does_not_fit(policy: str, fast: bool) -> None:
    assert finishes(run(CONVOY, "1x2", policy, fast=fast)) == [10, 20, 7]


def test_orders_of_submission_never_preempt() -> None:
    trace = trace_of(*((i, 1 + i % 3, 50 - i) for i in range(20)))
    for policy in ("fifo", "backfill", LongestPendingFirst()):
        assert run(trace, "1x4", policy).metrics["preemptions"] == 0


@BOTH_PATHS
def test_the_smallest_job_preempts_a_larger_one(fast: bool) -> None:
    result = run(trace_of((0, 2, 10), (4, 1, 3), (4, 2, 1)), "1x2", "sjf", fast=fast)
    # then the earlier of the two equal ones goes on
    assert finishes(result) == [13, 7, 14]
    assert story(result, "suspend", "resume") == [(4, 0, "suspend"), (7, 0, "resume")]


@BOTH_PATHS
def test_a_job_can_be_preempted_again_and_again(fast: bool) -> None:
    """Given a long job on one GPU, each of three short ones displaces it in turn, and it goes on in between."""
    result = run(trace_of((0, 1, 100), (10, 1, 5), (20, 1, 5), (30, 1, 5)), "1x1", "srtf", fast=fast)
    assert finishes(result) == [115, 15, 25, 35]
    assert result.jobs["preemptions"].to_list() == [3, 0, 0, 0]


# --- demotion ---------------------------------------------------------------------------------------------------------


def demotions(result: Result, job: int = 0) -> list[float]:
    return [time for time, row, _ in story(result, "demote") if row == job]


@pytest.mark.parametrize("submit", [0.0, 100.0])
def test_a_job_is_demoted_at_the_exact_instant(submit: float) -> None:
    """Given 3 GPUs and the limits 3250 and 7200 GPU-seconds, demotion is at a third of that, not at a whole second."""
    result = run(trace_of((submit, 3, 5000)), "1x4", "tiresias-l")
    assert demotions(result) == [submit + 3250 / 3, submit + 2400.0]


@pytest.mark.parametrize("queues", [1, 2, 3, 4, 5])
def test_a_job_goes_down_through_all_queues(queues: int) -> None:
    limits = (10.0, 20.0, 40.0, 80.0)[: queues - 1]
    result = run(trace_of((0, 2, 100)), "1x2", TiresiasL(queue_limits=limits))
    assert demotions(result) == [limit / 2 for limit in limits]
    assert result.jobs["demotions"].to_list() == [queues - 1]


def test_service_can_be_time_alone() -> None:
    assert demotions(run(trace_of((0, 3, 50)), "1x4", TiresiasL(queue_limits=(10.0,), gpu_time=False))) == [10.0]


def test_a_job_shorter_than_the_limit_is_never_demoted() -> None:
    """Given a job that ends at the very instant of its demotion, the end comes first."""
    assert demotions(run(trace_of((0, 1, 10)), "1x1", TiresiasL(queue_limits=(10.0,)))) == []


@BOTH_PATHS
def test_a_demoted_job_gives_way_to_a_new_one_at_once_and_not_before(fast: bool) -> None:
    """Given a job in the first queue, a newcomer waits until the very instant of its demotion (10 GPU-s on 3 GPUs)."""
    result = run(trace_of((0, 3, 20), (1, 3, 2)), "1x3", TiresiasL(queue_limits=(10.0,)), fast=fast)
    assert story(result, "suspend", "start", "resume") == [
        (0.0, 0, "start"),
        (10 / 3, 0, "suspend"),
        (10 / 3, 1, "start"),
        (10 / 3 + 2, 0, "resume"),
    ]
    assert finishes(result) == pytest.approx([22.0, 10 / 3 + 2])


def test_demotion_counts_running_time_only() -> None:
    """Given costs of 12 s to suspend and 50 s to resume, neither counts as service.

    The job runs 0 to 12 (demoted at 10), gives way; the other waits until 24 for its GPU and ends at 29; then the job
    is restored until 79, and has 8 of 20 GPU-seconds left in its queue.
    """
    policy = TiresiasL(queue_limits=(10.0, 20.0))
    result = run(trace_of((0, 1, 60), (12, 1, 5)), "1x1", policy, costs=Costs())
    assert demotions(result) == [10.0, 87.0]
    assert finishes(result) == [79.0 + 48.0, 29.0]


# --- order inside a queue ---------------------------------------------------------------------------------------------

# Job 1 is submitted before job 2 but cannot start with it; when job 0 ends, both want the same GPUs.
LATE_START = trace_of((0, 1, 5), (1, 2, 100), (2, 1, 100))


@BOTH_PATHS
@pytest.mark.parametrize("order", ["start", "first-start"])
def test_inside_a_queue_the_start_counts_and_not_the_submission(order: str, fast: bool) -> None:
    result = run(LATE_START, "1x2", TiresiasL(order=order), fast=fast)
    assert finishes(result) == [5, 202, 102]
    assert result.metrics["preemptions"] == 0


@BOTH_PATHS
def test_inside_a_queue_the_submission_counts_if_one_wants(fast: bool) -> None:
    """What the paper warns of: a running job is preempted by an equal one."""
    result = run(LATE_START, "1x2", TiresiasL(order="submit"), fast=fast)
    assert story(result, "suspend") == [(5, 2, "suspend")]


@BOTH_PATHS
def test_of_those_preempted_in_a_queue_the_last_one_goes_on_first(fast: bool) -> None:
    """Given two jobs of the second queue, displaced one after the other, the last one has the next free GPU."""
    trace = trace_of((0, 1, 50), (0, 1, 50), (20, 1, 5), (22, 1, 8))
    result = run(trace, "1x2", TiresiasL(queue_limits=(10.0,)), fast=fast)
    assert story(result, "suspend", "resume") == [
        (20, 1, "suspend"),
        (22, 0, "suspend"),
        (25, 0, "resume"),
        (30, 1, "resume"),
    ]


@BOTH_PATHS
def test_nobody_is_preempted_by_a_waiting_job_of_the_same_queue(fast: bool) -> None:
    """Given four long jobs on two GPUs, each gives way when it is demoted; then those who run go on to their end."""
    trace = trace_of(*((i, 1, 100) for i in range(4)))
    result = run(trace, "1x2", TiresiasL(queue_limits=(10.0,)), fast=fast)
    assert [time for time, _, _ in story(result, "suspend")] == [10, 11, 20, 21]
    assert sorted(finishes(result)) == [110, 111, 200, 201]


# --- promotion --------------------------------------------------------------------------------------------------------

# One GPU. Job 0 is demoted at 10 and displaced at 15 by short jobs that come every 8 s and stay in the first queue.
STREAM = trace_of((0, 1, 100), *((15 + 8 * i, 1, 8) for i in range(12)))


@BOTH_PATHS
@pytest.mark.parametrize(("floor", "promoted"), [(5.0, 45.0), (40.0, 55.0)])
def test_a_job_is_promoted_at_the_exact_instant(floor: float, promoted: float, fast: bool) -> None:
    """Given a job that ran 15 s and waits since 15, PROMOTEKNOB 2 promotes it at 45, or when the floor is over."""
    policy = TiresiasL(queue_limits=(10.0,), promote_knob=2.0, promote_floor_s=floor, order="first-start")
    result = run(STREAM, "1x1", policy, fast=fast)
    assert story(result, "promote")[0] == (promoted, 0, "promote")
    # it started first of all, so in the first queue it goes first
    assert (promoted, 0, "resume") in story(result)


@BOTH_PATHS
def test_a_promoted_job_waits_for_those_who_run_in_the_first_queue(fast: bool) -> None:
    """Given a promotion at 45 while a job of the first queue runs until 47, the promoted job is next."""
    policy = TiresiasL(queue_limits=(10.0,), promote_knob=2.0, promote_floor_s=5.0)
    result = run(STREAM, "1x1", policy, fast=fast)
    assert story(result, "promote")[0] == (45, 0, "promote")
    assert story(result, "resume")[0] == (47, 0, "resume")


def test_promotion_starts_the_age_again() -> None:
    """Given a promotion at 45, the next demotion comes a full queue later and the next promotion counts from there."""
    policy = TiresiasL(queue_limits=(10.0,), promote_knob=2.0, promote_floor_s=5.0, order="first-start")
    result = run(STREAM, "1x1", policy)
    assert demotions(result)[:2] == [10.0, 55.0]
    # displaced at 55 with an age of 10: after 20 s more it is promoted again
    assert [time for time, _, _ in story(result, "promote")][:2] == [45.0, 75.0]
    # the work done before is not done again
    assert result.jobs["useful_gpu_s"][0] == 100.0


def test_earlier_waits_count_towards_promotion() -> None:
    """Given a wait of 8 s before, and an age of 23 at the second displacement, the promotion is 2 x 23 - 8 later."""
    trace = trace_of((0, 1, 100), (15, 1, 8), *((31 + 8 * i, 1, 8) for i in range(10)))
    policy = TiresiasL(queue_limits=(10.0,), promote_knob=2.0, promote_floor_s=5.0)
    assert story(run(trace, "1x1", policy), "promote")[0] == (31.0 + 38.0, 0, "promote")


def test_nobody_is_promoted_without_a_knob() -> None:
    assert run(STREAM, "1x1", TiresiasL(queue_limits=(10.0,))).metrics["promotions"] == 0


def test_the_floor_keeps_long_jobs_from_doing_nothing_but_switch() -> None:
    """Given three long jobs on one GPU and a tiny knob, each promotion takes at least the floor in waiting."""
    trace = trace_of((0, 1, 3000), (1, 1, 3000), (2, 1, 3000))
    runs = {
        floor: run(trace, "1x1", TiresiasL(queue_limits=(10.0,), promote_knob=0.01, promote_floor_s=floor))
        for floor in (1.0, 600.0)
    }
    assert runs[1.0].metrics["promotions"] > 300
    for floor, result in runs.items():
        jobs = result.jobs
        assert (jobs["promotions"] * floor <= jobs["queue_delay_s"] + 1e-6).all()
    assert runs[600.0].metrics["promotions"] <= 3 * 9000 / 600


def test_tiresias_g_promotes_too() -> None:
    policy = TiresiasG(queue_limits=(10.0,), promote_knob=2.0, promote_floor_s=5.0)
    assert story(run(STREAM, "1x1", policy), "promote")[0] == (45.0, 0, "promote")


# --- least attained service -------------------------------------------------------------------------------------------


@BOTH_PATHS
def test_las_shares_in_turns_of_its_quantum(fast: bool) -> None:
    result = run(trace_of((0, 1, 30), (0, 1, 30)), "1x1", LeastAttainedService(quantum_s=10.0), fast=fast)
    assert finishes(result) == [50, 60]
    assert story(result, "suspend") == [(10, 0, "suspend"), (20, 1, "suspend"), (30, 0, "suspend"), (40, 1, "suspend")]


def test_las_counts_gpus_unless_told_otherwise() -> None:
    """Given a job on 3 GPUs and one on 2 that never fit together, the smaller has had less after the same time."""
    trace = trace_of((0, 3, 30), (0, 2, 30))
    two = run(trace, "1x3", LeastAttainedService(quantum_s=10.0))
    one = run(trace, "1x3", LeastAttainedService(quantum_s=10.0, gpu_time=False))
    # after 10 s each: 30 and 20 GPU-seconds, so the second keeps the GPUs for another quantum
    assert story(two, "suspend")[:2] == [(10, 0, "suspend"), (30, 1, "suspend")]
    assert story(one, "suspend")[:2] == [(10, 0, "suspend"), (20, 1, "suspend")]
