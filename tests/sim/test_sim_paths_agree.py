"""The fast path decides exactly what `PriorityPolicy.decide` decides: same events, instants and numbers of nodes."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from kit.workloads import mixed_cluster, workloads
from thebes import simulate
from thebes.model.cluster import from_short_form
from thebes.model.trace import Trace
from thebes.perf.contention import Contention
from thebes.perf.interference import Interference
from thebes.placement import Skew, registry
from thebes.policy import find
from thebes.policy.orders.priority import PriorityPolicy
from thebes.policy.orders.tiresias import TiresiasG, TiresiasL
from thebes.report.result import Result
from thebes.sim.costs import FREE_OF_COST, Costs

POLICIES: dict[str, PriorityPolicy] = {
    "fifo": find("fifo")(),
    "backfill": find("backfill")(),
    "lpjf": find("lpjf")(),
    "sjf": find("sjf")(),
    "srtf": find("srtf")(),
    "srsf": find("srsf")(),
    "las": find("las")(quantum_s=7.0),
    "las by time": find("las")(quantum_s=5.0, gpu_time=False),
    "gittins": find("gittins")(delta_gpu_s=40.0, quantum_s=10.0),
    "shortest-expected": find("shortest-expected")(quantum_s=10.0),
    "tiresias-l": TiresiasL(queue_limits=(20.0, 60.0)),
    "tiresias-l by time, submit order": TiresiasL(queue_limits=(11.0,), gpu_time=False, order="submit"),
    "tiresias-l with promotion": TiresiasL(queue_limits=(10.0, 45.0), promote_knob=1.0, promote_floor_s=5.0),
    "tiresias-l by first start": TiresiasL(queue_limits=(10.0, 30.0), order="first-start"),
    "tiresias-g": TiresiasG(queue_limits=(20.0, 60.0), quantum_s=10.0),
    "tiresias-g with promotion": TiresiasG(queue_limits=(10.0,), quantum_s=10.0, promote_knob=2.0, promote_floor_s=8.0),
}
# Its order moves at every event, and the general path may wake once more than there are events (see `wake_after`).
ONLY_FREE = {"gittins at each event": find("gittins")(delta_gpu_s=40.0, quantum_s=0.0)}

COSTS = {
    "free": FREE_OF_COST,
    "checkpoint": Costs(start_s=1.0, suspend_s=3.0, resume_s=2.5),
    "kill": Costs(mechanism="kill", resume_s=0.5, checkpoint_every_s=1.0),
}
CLUSTERS = {"3x2": from_short_form("3x2"), "2x2x2": from_short_form("2x2x2"), "mixed": mixed_cluster()}
REFUSING = ("yarn", "skew", "skew, learned")
PLACEMENTS = {name: placement() for name, placement in registry().items()} | {"skew, learned": Skew(learn=True)}


def told(result: Result) -> list[tuple[object, ...]]:
    """Events by time, job and kind.

    Without demotions, whose number is compared with the jobs: that of a job which is suspended within a rounding error
    of its limit is noted at once in one path and at the next decision in the other.
    """
    events = result.events.filter(pl.col("kind").cast(pl.String) != "demote")
    return events.sort("time_s", "job", "kind", maintain_order=True).rows()


def paths_agree(
    trace: Trace,
    cluster: str,
    policy: PriorityPolicy,
    placement: str,
    costs: Costs,
    contention: Contention | None = None,
    interference: Interference | None = None,
) -> None:
    runs = [
        simulate(
            trace, CLUSTERS[cluster], policy, placement=PLACEMENTS[placement], costs=costs, seed=3,
            skip_oversize=True, fast=fast, contention=contention or False, interference=interference,
        )
        for fast in (True, False)
    ]  # fmt: skip
    assert told(runs[0]) == told(runs[1])
    assert runs[0].jobs.equals(runs[1].jobs)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(
    trace=workloads(most_gpus=4, typed=True),
    cluster=st.sampled_from(sorted(CLUSTERS)),
    placement=st.sampled_from(sorted(PLACEMENTS)),
    costs=st.sampled_from(sorted(COSTS)),
)
@effort(40)
def test_both_paths_tell_the_same_story(policy: str, trace: Trace, cluster: str, placement: str, costs: str) -> None:
    if "promotion" in policy and costs == "kill":
        costs = "free"  # jobs that are killed and promoted every few seconds may never get anywhere
    if cluster == "mixed" or placement in REFUSING:
        # Asked once more (see `wake_after`), the general path may find room elsewhere for a job that it displaced.
        costs = "free"
    paths_agree(trace, cluster, POLICIES[policy], placement, COSTS[costs])


@pytest.mark.parametrize("policy", ["fifo", "srtf", "las", "tiresias-l"])
@given(
    trace=workloads(most_gpus=4),
    placement=st.sampled_from(["relaxed", "random"]),
    costs=st.sampled_from(sorted(COSTS)),
    node_loss=st.sampled_from([0.0, 0.1]),
)
@effort(25)
def test_both_paths_agree_where_neighbours_slow_each_other_down(
    policy: str, trace: Trace, placement: str, costs: str, node_loss: float
) -> None:
    """With full overlap loads are whole numbers; expected ones are sums whose last digit depends on who came first."""
    law = Contention(on=True, oversubscription=2.0)
    paths_agree(trace, "2x2x2", POLICIES[policy], placement, COSTS[costs], law, Interference(node_loss=node_loss))


@pytest.mark.parametrize("policy", sorted(ONLY_FREE))
@given(trace=workloads(most_gpus=4), placement=st.sampled_from(sorted(PLACEMENTS)))
@effort(30)
def test_both_paths_agree_where_switching_is_free(policy: str, trace: Trace, placement: str) -> None:
    paths_agree(trace, "2x2x2", ONLY_FREE[policy], placement, FREE_OF_COST)


@pytest.mark.parametrize("policy", ["gittins", "shortest-expected", "tiresias-g"])
@given(trace=workloads(most_gpus=4, most_jobs=14), repeats=st.integers(6, 8))
@effort(4)
def test_both_paths_learn_the_same_distribution_at_the_same_time(policy: str, trace: Trace, repeats: int) -> None:
    """Given enough jobs for several refreshes (32, 40, 48 …), what is learned enters both paths alike."""
    jobs = pl.concat([trace.jobs] * repeats).with_row_index("n")
    jobs = jobs.with_columns(job_id=pl.format("j{}", "n"), submit_time=2.0 * pl.col("n").cast(pl.Float64)).drop("n")
    paths_agree(Trace("repeated", jobs), "2x2x2", POLICIES[policy], "consolidate", COSTS["checkpoint"])
