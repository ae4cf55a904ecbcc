"""A gang that is due, but that the placement refuses: jobs after it in the order give way, lowest first, no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from kit.workloads import RESNET, VGG, finishes, story, trace_of, workloads
from thebes import Decision, Policy, Trace, View, fill, simulate
from thebes.live.entries import Arrive, Leave, Quota
from thebes.live.ledger import Ledger, NodeSpec
from thebes.model.cluster import Cluster, from_short_form
from thebes.model.decision import BEHIND, HOLDS, NO_GPUS, NO_PLACE, OVER_QUOTA
from thebes.model.parameters import parameter
from thebes.placement import Yarn
from thebes.policy.orders.tiresias import TiresiasL
from thebes.sim.costs import FREE_OF_COST

PATHS = pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])
REFUSING = pytest.mark.parametrize("placement", ["yarn", "skew"])
SIZED = pytest.mark.parametrize("sized", [False, True], ids=["plain", "with counts"])


@REFUSING
@PATHS
def test_the_lowest_job_gives_way_to_a_gang_that_is_due(placement: str, fast: bool) -> None:
    """Two nodes of two GPUs, each with a long job and a short one. From 5 s on each has one GPU free.

    The long jobs fall into the second queue at 10 s. At 20 s a gang of 2 comes, goes before both and fits by count, but
    no node has two GPUs. The lower one, job 2, gives way and has 80 s left. The gang falls into the second queue after
    5 s; then job 2 starts again, on the GPU beside job 0, and ends at 25 + 80. The gang would have begun at 100 s.
    """
    trace = trace_of((0, 1, 100), (0, 1, 5), (0, 1, 100), (0, 1, 5), (20, 2, 30), model=[RESNET] * 4 + [VGG])
    policy = TiresiasL(queue_limits=(10.0,))
    result = simulate(trace, "2x2", policy, placement=placement, costs=FREE_OF_COST, fast=fast)
    assert finishes(result) == [100, 5, 105, 5, 50]
    assert story(result, "suspend", "resume") == [(20, 2, "suspend"), (25, 2, "resume")]


@REFUSING
@PATHS
def test_nobody_gives_way_in_vain(placement: str, fast: bool) -> None:
    """Given on each of two nodes a short and a long job, when a gang of 2 outranks the long ones, they stay at first.

    Without both there would be one GPU free on each node, which is not where the placement wants them. When the short
    job of the first node has ended, the long one beside it gives way; when the other short job ends, it starts again.
    """
    jobs = (0, 1, 10), (0.1, 1, 100), (0.2, 1, 10), (0.3, 1, 100), (1, 2, 20)
    trace = trace_of(*jobs, model=[RESNET] * 4 + [VGG])
    options: dict[str, Any] = {"costs": FREE_OF_COST, "fast": fast}
    result = simulate(trace, "2x2", "srtf", placement=placement, **options)
    assert story(result, "suspend", "resume") == [(10, 1, "suspend"), (10.2, 1, "resume")]
    assert finishes(result) == pytest.approx([10, 100.3, 10.2, 100.3, 30])
    counted = simulate(trace, "2x2", "srtf", placement="count", **options)
    assert counted.metrics["preemptions"] == 2
    assert counted.jobs["first_start_s"][4] == 1


@dataclass(frozen=True)
class Ranked(Policy):
    """Jobs by a rank that the test gives, per row."""

    ranks: tuple[int, ...] = ()
    preempt: bool = True
    sized: bool = False  # it says how many GPUs each job gets: as many as it asks for

    def decide(self, view: View) -> Decision:
        order = np.argsort(np.array(self.ranks)[view.jobs.rows])
        return fill(view, order, preempt=self.preempt, counts=view.jobs.gpus if self.sized else None)


@SIZED
def test_who_was_asked_in_vain_stays_and_nobody_before_the_gang_is_asked(sized: bool) -> None:
    """Three nodes: job 0 alone; job 2 with job 3; job 4 alone, where job 5 was. The gang (6) goes before 0 and 2 only.

    Job 2, the lowest, is asked first: beside job 3 its GPU is of no use. Then job 0 gives way. Job 2 stays.
    """
    trace = trace_of(
        (0, 1, 100), (1, 1, 6), (2, 1, 100), (3, 1, 100), (4, 1, 100), (5, 1, 2), (10, 2, 30), model=[VGG] * 7
    )  # fmt: skip
    for placement in ("yarn", "skew"):
        policy = Ranked((3, 5, 4, 0, 1, 6, 2), sized=sized)
        result = simulate(trace, "3x2", policy, placement=placement, costs=FREE_OF_COST)
        assert story(result, "suspend", "resume") == [(10, 0, "suspend"), (40, 0, "resume")]
        assert finishes(result) == [130, 7, 102, 103, 104, 7, 40]


@SIZED
def test_who_was_asked_in_vain_stays_where_the_quota_is_used_up(sized: bool) -> None:
    """The same on a live cluster, where the tenant may have its six GPUs and no more."""
    ledger = Ledger([NodeSpec(f"n{i}", 2) for i in range(3)], Ranked((3, 5, 4, 0, 1, 6, 2), sized=sized), Yarn())
    ledger.apply(Quota(0.0, "all", 6))
    for job in range(6):
        ledger.apply(Arrive(float(job), str(job), 1, "all", float(job)))
        ledger.apply(ledger.decide(float(job))[0].entry())
    for job in ("1", "5"):
        ledger.apply(Leave(7.0, job))
    ledger.apply(Arrive(10.0, "6", 2, "all", 10.0))
    planned, _ = ledger.decide(10.0)
    assert (planned.suspend, planned.start, planned.migrate) == (("0",), (("6", (0, 1)),), ())


@SIZED
def test_jobs_give_way_to_a_gang_like_one_that_its_quota_holds_up(sized: bool) -> None:
    """Four nodes of two GPUs with a job each. A gang of 2 whose tenant may have nothing is first, then one like it."""
    ranks = (*range(2, 10), 0, 1)
    ledger = Ledger([NodeSpec(f"n{i}", 2) for i in range(4)], Ranked(ranks, sized=sized), Yarn())
    ledger.apply(Quota(0.0, "closed", 0))
    for job in range(8):
        ledger.apply(Arrive(0.0, str(job), 1, "open", 0.0))
    ledger.apply(ledger.decide(0.0)[0].entry())
    for job in ("0", "2", "4", "6"):
        ledger.apply(Leave(1.0, job))
    ledger.apply(Arrive(2.0, "8", 2, "closed", 2.0))
    ledger.apply(Arrive(2.0, "9", 2, "open", 2.0))
    planned, _ = ledger.decide(2.0)
    assert (planned.suspend, planned.start) == (("7",), (("9", (6, 7)),))
    ledger.apply(planned.entry())
    assert [ledger.fate_of(job) for job in ("8", "9")] == [OVER_QUOTA, HOLDS]


@dataclass(frozen=True)
class InOrder(Policy):
    """In the order of submission, and none passes a job that waits for room."""

    def decide(self, view: View) -> Decision:
        return fill(view, np.arange(len(view.jobs)), strict=True, counts=view.jobs.gpus)


def test_a_strict_order_with_counts_is_held_up_by_room_and_not_by_a_quota() -> None:
    """Three nodes of two GPUs, each half free. The gang of 2 finds no place, so the job behind it does not start."""
    ledger = Ledger([NodeSpec(f"n{i}", 2) for i in range(3)], InOrder(), Yarn())
    ledger.apply(Quota(0.0, "closed", 0))
    for job in range(6):
        ledger.apply(Arrive(0.0, str(job), 1, "open", 0.0))
    ledger.apply(ledger.decide(0.0)[0].entry())
    for job in ("0", "2", "4"):
        ledger.apply(Leave(1.0, job))
    for job, gpus, tenant in (("6", 2, "closed"), ("7", 2, "open"), ("8", 1, "open")):
        ledger.apply(Arrive(2.0, job, gpus, tenant, 2.0))
    planned, _ = ledger.decide(2.0)
    ledger.apply(planned.entry())
    assert (planned.start, planned.suspend) == ((), ())
    assert [ledger.fate_of(job) for job in ("6", "7", "8")] == [OVER_QUOTA, NO_PLACE, BEHIND]


@SIZED
def test_without_preemption_nobody_gives_way(sized: bool) -> None:
    trace = trace_of((0, 1, 100), (0, 1, 5), (0, 1, 90), (0, 1, 5), (10, 2, 30))
    policy = Ranked((2, 3, 4, 5, 1), preempt=False, sized=sized)
    result = simulate(trace, "2x2", policy, placement="yarn", costs=FREE_OF_COST)
    assert result.metrics["preemptions"] == 0
    assert finishes(result) == [100, 5, 90, 5, 120]


@dataclass(frozen=True)
class Sharing(Policy):
    """The youngest goes first; the first two jobs share their GPUs by halves."""

    shares = True

    def decide(self, view: View) -> Decision:
        order = np.arange(len(view.jobs))[::-1]
        return fill(view, order, shares=np.where(view.jobs.id < 2, 0.5, 1.0))


def test_jobs_that_share_a_gpu_give_way_to_a_gang_too() -> None:
    """Two nodes of two GPUs: jobs 0 and 1 share a GPU, job 2 has the one beside it, job 3 one of the other node.

    At 10 s a gang of 2 comes, and by count two GPUs are free once the sharers go. They go, the lowest first, but job 2
    sits beside them: it goes as well. The sharers' GPU is the gang's, so nobody can stay.
    """
    trace = trace_of((0, 1, 100), (1, 1, 100), (2, 1, 100), (3, 1, 100), (10, 2, 30), model=[RESNET] * 5)
    result = simulate(trace, "2x2", Sharing(), placement="yarn", costs=FREE_OF_COST, perf="ideal")
    assert result.jobs["first_start_s"][4] == 10
    assert {job for _, job, _ in story(result, "suspend")} == {0, 1, 2}
    assert result.metrics["completed"] == 5


@dataclass(frozen=True)
class Greedy(Policy):
    """Every job shall have as many GPUs as it can use."""

    resizes = True

    def decide(self, view: View) -> Decision:
        return fill(view, np.arange(len(view.jobs)), counts=view.jobs.max_gpus)


def test_an_elastic_job_takes_fewer_gpus_where_the_placement_never_gives_so_many() -> None:
    """Two racks of two nodes of two GPUs: `yarn` gives no job more than a rack, 4 GPUs, and this one could use 8."""
    bounds = {"min_gpus": pl.Series([1, 1]), "max_gpus": pl.Series([8, 1])}
    trace = Trace("elastic", trace_of((0, 2, 100), (0, 1, 20)).jobs.with_columns(**bounds))
    result = simulate(trace, "2x2x2", Greedy(), placement="yarn", costs=FREE_OF_COST)
    started = result.events.filter(result.events["kind"].cast(str) == "start")
    assert started["gpus"].to_list() == [4, 1]  # what it leaves over goes to the next
    assert result.jobs["first_start_s"].to_list() == [0, 0]


# --- what holds for every decision ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reshuffled(Policy):
    """Preemptive, in an order that is drawn anew every 20 s; each Decision is judged."""

    seed: int = parameter(0, "where the dice start")
    placement: str = parameter("yarn", "the rule that it is judged by")
    models: tuple[str, ...] = ()  # of all jobs, by row
    sized: bool = False

    def decide(self, view: View) -> Decision:
        turn = int(view.now_s // 20)
        chance = np.random.default_rng([self.seed, turn]).random(100)
        order = np.argsort(chance[view.jobs.rows])
        counts = view.jobs.gpus if self.sized else None
        decision = fill(view, order, wake_s=20.0 * (turn + 1), counts=counts)
        judge(view, order.tolist(), decision, self.placement, self.models)
        return decision


def judge(view: View, order: list[int], decision: Decision, placement: str, models: tuple[str, ...]) -> None:
    """Who is due by count and waits, is refused whatever jobs after it do; who had to go had to go for a better job."""
    jobs, gpus = view.jobs, iter(decision.gpus.tolist())
    holds = {i: {next(gpus) for _ in range(jobs.gpus[i])} for i in np.flatnonzero(decision.fate == HOLDS).tolist()}
    left = view.total_gpus
    due: set[int] = set()
    for i in order:
        if jobs.gpus[i] <= left:
            left -= int(jobs.gpus[i])
            due.add(i)
    assert order[0] in holds  # every job of these workloads has room on the idle cluster
    taken: set[int] = set()
    for i in order:
        if i not in holds and i in due and not jobs.running[i]:
            is_skewed = models[jobs.rows[i]] in (VGG, "alexnet")
            assert not accepts(view.cluster, taken, int(jobs.gpus[i]), is_skewed, placement)
        if i not in holds and i in due and jobs.running[i]:
            assert decision.fate[i] == NO_GPUS
            assert any(holds[j] & set(jobs.held(i).tolist()) for j in order[: order.index(i)] if j in holds)
        if i in holds and jobs.running[i]:
            assert holds[i] == set(jobs.held(i).tolist())  # nobody is moved
        taken |= holds.get(i, set())


def accepts(cluster: Cluster, taken: set[int], gpus: int, is_skewed: bool, placement: str) -> bool:
    """Whether the rule of the placement has room for a gang where these GPUs are taken; nodes are all alike."""
    free = [0] * cluster.num_nodes
    for gpu, node in enumerate(cluster.gpu_node.tolist()):
        free[node] += gpu not in taken
    size = int(cluster.node_gpus[0])
    if placement == "skew":
        fewest = -(-gpus // size)
        return sum(free) >= gpus if not is_skewed else sum(sorted(free)[-fewest:]) >= gpus
    if gpus <= size:
        return max(free) >= gpus
    for rack in range(cluster.num_racks):
        here = sorted(room for node, room in enumerate(free) if cluster.node_rack[node] == rack)
        wanted = [size] * (gpus // size) + [gpus % size] * (gpus % size > 0)
        if len(here) >= len(wanted) and all(have >= want for have, want in zip(here[::-1], wanted, strict=False)):
            return True
    return False


@REFUSING
@SIZED
@given(
    trace=workloads(most_gpus=4), cluster=st.sampled_from(["3x2", "2x2x2", "3x4", "2x2x3"]), seed=st.integers(0, 1000)
)
@effort(60)
def test_no_gang_that_is_due_waits_for_jobs_after_it(
    placement: str, sized: bool, trace: Trace, cluster: str, seed: int
) -> None:
    policy = Reshuffled(seed, placement, tuple(trace.jobs["model"]), sized)
    result = simulate(trace, from_short_form(cluster), policy, placement=placement, costs=FREE_OF_COST)
    assert result.metrics["completed"] == result.metrics["jobs"]
