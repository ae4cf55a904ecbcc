"""The time model: overlaps, pipelines, who shares which link, and that the parts of an iteration add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from thebes.model.plan import NO_ZERO, ZERO_DP, ZERO_OFFLOAD, Plan, parse_plan
from thebes.perf.plans.site import A800
from thebes.perf.plans.timing import (
    ENVIRONMENT,
    Breakdown,
    Constants,
    breakdown,
    forward_s,
    iteration_s,
    logits_layers,
    overlap,
    plan_arrays,
)
from thebes.perf.plans.transformer import Transformer, catalogue

LLAMA = catalogue()["llama-2-7b"]
CONSTANTS = Constants()
# Nothing but arithmetic: no cost of starting kernels, no loss by splitting.
IDEAL = ENVIRONMENT._replace(layer_s=0.0, split=1.0)
SECONDS = st.floats(0.0, 1e4)


def time_of(plan: str, nodes: int = 1, model: Transformer = LLAMA, cpus: float = 12, **more) -> Breakdown:
    return breakdown(model, A800, CONSTANTS, parse_plan(plan), nodes, cpus, **more)


# --- overlaps ---------------------------------------------------------------------------------------------------------


@given(SECONDS, SECONDS, st.floats(1.0, 1e4))
def test_an_overlap_takes_between_the_longer_of_the_two_and_their_sum(x: float, y: float, k: float) -> None:
    both = float(overlap(x, y, k))
    assert max(x, y) * (1 - 1e-12) <= both <= (x + y) * (1 + 1e-12)


def test_an_overlap_of_order_1_is_one_after_the_other() -> None:
    assert overlap(2.0, 3.0, 1.0) == pytest.approx(5.0)


def test_an_overlap_of_a_large_order_hides_the_shorter_without_overflow() -> None:
    assert np.array_equal(overlap(np.array([1e-3, 900.0]), np.array([3.0, 30.0]), 1e4), [3.0, 900.0])


# --- the whole --------------------------------------------------------------------------------------------------------

SPLIT = st.builds(
    Plan,
    dp=st.sampled_from((1, 2, 4, 8)),
    tp=st.sampled_from((1, 2, 4, 8)),
    pp=st.sampled_from((1, 2, 4)),
    ga=st.sampled_from((1, 2)),
    gc=st.booleans(),
)
SHARDED = st.builds(
    Plan, dp=st.sampled_from((1, 2, 8)), zero=st.sampled_from((ZERO_DP, ZERO_OFFLOAD)), gc=st.booleans()
)
PLANS = st.one_of(SPLIT, SHARDED)


@effort(100)
@given(PLANS, st.integers(0, 6), st.sampled_from((1.0, 12.0)))
def test_the_parts_of_an_iteration_add_up_and_none_is_negative(plan: Plan, spread: int, cpus: float) -> None:
    nodes = max(1, plan.gpus >> spread)
    found = breakdown(LLAMA, A800, CONSTANTS, plan, nodes, cpus)

    *parts, total, wire_s = found
    assert sum(parts) == pytest.approx(total)
    assert min(parts) >= -1e-12
    assert 0 <= wire_s <= total
    assert wire_s == 0 or nodes > 1


@effort(50)
@given(st.lists(PLANS, min_size=1, max_size=8))
def test_many_plans_at_once_take_what_each_takes_alone(plans: list[Plan]) -> None:
    nodes = [-(-plan.gpus // 8) for plan in plans]
    together = iteration_s(LLAMA, A800, CONSTANTS, plan_arrays(plans), [p.gpus for p in plans], nodes, 12)

    alone = [breakdown(LLAMA, A800, CONSTANTS, plan, n, 12).total for plan, n in zip(plans, nodes, strict=True)]
    assert together.tolist() == pytest.approx(alone)


def test_one_gpu_computes_and_updates_and_sends_nothing() -> None:
    found = time_of("dp1")
    assert (found.tp, found.pp, found.bubble, found.sync, found.offload, found.wire_s) == (0, 0, 0, 0, 0, 0)
    assert found.backward == pytest.approx(CONSTANTS.k_bwd * found.forward)


def test_gradient_checkpointing_adds_one_forward_pass() -> None:
    assert time_of("dp1+gc").total - time_of("dp1").total == pytest.approx(time_of("dp1").forward)


def test_a_forward_pass_nobody_profiled_follows_from_arithmetic() -> None:
    unknown = replace(LLAMA, forward_s_per_sample=())
    doubled = replace(unknown, parameters=2 * LLAMA.parameters, layers=2 * LLAMA.layers)
    assert forward_s(doubled, A800) == pytest.approx(2 * forward_s(unknown, A800))
    assert forward_s(replace(unknown, forward_s_per_sample=((A800.gpu_type, 0.5),)), A800) == 0.5


def test_a_tiny_micro_batch_takes_as_long_as_its_kernels_take_to_start() -> None:
    tiny = replace(catalogue()["vit"], forward_s_per_sample=((A800.gpu_type, 1e-9),))
    assert time_of("dp1", model=tiny).forward == pytest.approx(tiny.layers * ENVIRONMENT.layer_s)


# --- pipelines --------------------------------------------------------------------------------------------------------


def test_a_pipeline_of_equal_stages_takes_m_plus_pp_less_1_slots() -> None:
    model = replace(LLAMA, vocabulary=0)
    found = time_of("pp4+ga8+dp1", model=model, environment=IDEAL)
    slot = (found.forward + found.backward) / 8
    assert found.bubble == pytest.approx(3 * slot)


def test_one_micro_batch_is_no_faster_on_more_stages() -> None:
    one, four = (time_of(plan, environment=IDEAL) for plan in ("dp1", "dp1+pp4"))
    assert four.forward + four.backward + four.bubble == pytest.approx(one.forward + one.backward)


def test_the_stage_with_the_logits_sets_the_pace() -> None:
    plain = time_of("dp1+pp4+ga8", model=replace(LLAMA, vocabulary=0), environment=IDEAL)
    worded = time_of("dp1+pp4+ga8", model=replace(LLAMA, vocabulary=250_000), environment=IDEAL)
    assert logits_layers(replace(LLAMA, vocabulary=250_000)) > 4
    assert worded.bubble > 1.5 * plain.bubble


def test_gradients_are_exchanged_during_the_last_micro_batch_only() -> None:
    whole, in_eight = time_of("dp2", nodes=2), time_of("dp2+ga4", nodes=2)
    assert in_eight.sync > whole.sync


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_tensor_group_inside_a_node_stays_off_the_wire() -> None:
    inside, across = time_of("dp1+tp4+pp2", nodes=2), time_of("dp1+tp8", nodes=2)
    assert inside.wire_s == pytest.approx(inside.pp)
    assert across.wire_s == pytest.approx(across.tp)


def test_a_tensor_group_that_does_not_divide_its_nodes_straddles_them() -> None:
    even, uneven = time_of("dp4+tp2+pp5", nodes=5), time_of("dp4+tp2+pp5", nodes=8)
    assert even.tp < uneven.tp
    assert uneven.wire_s > uneven.tp


def test_few_gpus_of_a_node_reach_few_of_its_network_cards() -> None:
    """Measured: two nodes of 4 beat four of 2, and 3 + 5 is as good as 4 + 4, but 2 + 6 is not."""
    four, two = time_of("dp8", nodes=2), time_of("dp8", nodes=4)
    assert four.sync < 0.7 * two.sync
    assert time_of("dp8", nodes=2, fewest=3).sync == pytest.approx(four.sync)
    assert time_of("dp8", nodes=2, fewest=2).sync > 1.5 * four.sync


def test_rings_of_tensor_parallel_ranks_share_the_wire_of_their_node() -> None:
    """Four rings of a quarter of the gradients are as much as one of all; half the cards take twice as long."""
    full, half = time_of("dp8+tp4", nodes=4), time_of("dp8+tp4", nodes=8)
    assert half.sync == pytest.approx(2 * full.sync, rel=0.25)


def test_data_parallel_groups_inside_a_node_stay_off_the_wire() -> None:
    found = time_of("dp4+tp2+pp5", nodes=5)
    assert found.wire_s == pytest.approx(found.pp)


# --- ZeRO -------------------------------------------------------------------------------------------------------------


def test_zero_divides_the_update_and_sends_as_much() -> None:
    plain, zero = time_of("dp8", nodes=2), time_of("zero-dp8", nodes=2)
    assert zero.optimiser == pytest.approx(plain.optimiser / 8)
    assert zero.sync > 0.5 * plain.sync


@pytest.mark.parametrize("plan", ["dp2", "zero-dp2", "dp1+tp2"])
def test_only_offload_asks_for_cpus(plan: str) -> None:
    assert time_of(plan, cpus=1) == time_of(plan, cpus=12)
    assert time_of("zero-offload2", cpus=1).total > time_of("zero-offload2", cpus=12).total


def test_every_rank_takes_all_weights_back_from_the_host() -> None:
    """Measured with five models: a part of the offloaded update does not shrink with the number of ranks."""
    one, eight = time_of("zero-offload1", cpus=1e9), time_of("zero-offload8", cpus=1e9)
    assert one.offload < 2 * eight.offload + one.backward
    assert eight.offload > 0.9 * 2 * LLAMA.parameters / (A800.pcie_gb_s * 1e9 * ENVIRONMENT.pcie)


def test_offload_costs_more_than_it_would_to_stay() -> None:
    assert time_of("zero-offload8").total > time_of("zero-dp8").total


def test_what_overlaps_perfectly_is_hidden() -> None:
    hidden = CONSTANTS._replace(k_sync=1e3)
    found = breakdown(catalogue()["bert-large"], A800, hidden, Plan(dp=2, zero=NO_ZERO), 1, 12)
    assert found.sync == pytest.approx(0, abs=1e-12)
