"""PACKLIMIT learned from the speeds of spread-out gangs, as in the Tiresias paper."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from kit.workloads import trace_of
from thebes import Trace, read_cluster, simulate
from thebes.perf import Tiers
from thebes.perf.models import catalogue
from thebes.placement import Skew
from thebes.policy import find
from thebes.sim import loop
from thebes.sim.costs import FREE_OF_COST
from thebes.sim.profiler import SLOWED_BELOW, learned_pack_limit
from thebes.sim.setup import build_world, prepare

BALANCED = {"resnet152", "resnet101", "resnet50", "inception4", "inception3"}


def crowd(jobs: int) -> Trace:
    """Gangs of 2 to 4 of all nine models, enough of them to be scattered over nodes of 4 GPUs."""
    models = list(catalogue())
    rows = [(3.0 * i, 2 + i % 3, 40.0 + 7 * (i % 11)) for i in range(jobs)]
    return trace_of(*rows, model=[models[(5 * i) % 9] for i in range(jobs)])


def test_the_limit_learned_in_a_run_separates_vgg_and_alexnet_from_the_others() -> None:
    """Spec 2.4: a threshold anywhere between 0.14 and 0.61."""
    cluster, placement = read_cluster("6x4"), Skew(learn=True)
    work = prepare(crowd(200), cluster, placement, Tiers(), seed=0)
    world = build_world(work, cluster, placement, FREE_OF_COST, 0)
    run = loop.GeneralLoop(world, cluster, find("backfill")(), checks=True)
    assert world.strategy.pack_limit[0] == np.inf
    while run.run(1000) != loop.DONE:
        pass
    assert 0.138 < world.strategy.pack_limit[0] < 0.611


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])
def test_once_learned_only_balanced_models_are_spread(fast: bool) -> None:
    """Given 300 gangs that all fit on one node, skewed ones are scattered only until the limit is learned."""
    result = simulate(crowd(300), "6x4", "backfill", placement=Skew(learn=True), costs=FREE_OF_COST, fast=fast)
    spread = result.jobs.with_row_index("row").filter(pl.col("nodes_last") > 1)
    skewed = spread.filter(~pl.col("model").is_in(BALANCED))
    balanced = spread.filter(pl.col("model").is_in(BALANCED))
    assert 0 < skewed.height < 25
    assert skewed["row"].max() < 100 < balanced["row"].max()


def misjudged(limit: float, skew: list[float], slowed: list[bool]) -> int:
    return sum((s > limit) != slow for s, slow in zip(skew, slowed, strict=True))


seen_once = st.tuples(st.sampled_from([0.04, 0.06, 0.11, 0.14, 0.61, 0.77]), st.booleans())


@given(seen=st.lists(seen_once, min_size=1, max_size=30))
@effort(200)
def test_the_cut_misjudges_as_few_as_any_cut_could(seen: list[tuple[float, bool]]) -> None:
    skew, slowed = [s for s, _ in seen], [slow for _, slow in seen]
    speed = np.where(slowed, SLOWED_BELOW - 0.1, SLOWED_BELOW)
    limit = learned_pack_limit(np.array(skew), speed)
    cuts = [-1.0, 0.05, 0.08, 0.12, 0.3, 0.7, np.inf]
    fewest = min(misjudged(cut, skew, slowed) for cut in cuts)
    assert misjudged(limit, skew, slowed) == fewest
    # between equally good ones, one that consolidates at least as much as any other
    assert sum(s > limit for s in skew) == max(
        sum(s > cut for s in skew) for cut in cuts if misjudged(cut, skew, slowed) == fewest
    )


def test_nothing_slowed_consolidates_nobody_and_everything_slowed_everybody() -> None:
    skew = np.array([0.1, 0.7])
    assert learned_pack_limit(skew, np.array([1.0, 1.0])) == np.inf
    assert learned_pack_limit(skew, np.array([0.5, 0.5])) < 0
    assert learned_pack_limit(skew, np.array([0.97, 0.5])) == pytest.approx(0.4)
