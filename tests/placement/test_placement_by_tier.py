"""Placement inside one tier: best fit, nothing outside the tier, and never a GPU that is not free."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from thebes.model.cluster import TIERS, NodeKind, uniform
from thebes.model.machine import FREE, copy_of, machine_of, nodes_spanned, occupy, tier_spanned
from thebes.placement.by_tier import narrowest_tier, place_within

GROUP, NODE, RACK, CLUSTER = range(4)
WHERE = uniform("2 racks x 3 nodes x 2 groups of 2", 2, 3, NodeKind(4, groups=(2, 2)))


def machine_with(*taken: int):
    machine = machine_of(WHERE)
    for gpu in taken:
        occupy(machine, 99, np.array([gpu]))
    return machine


def placed(machine, gpus: int, tier: int) -> list[int] | None:
    out = np.zeros(gpus, dtype=np.int64)
    return out.tolist() if place_within(machine, 7, 0, gpus, tier, out) else None


def test_a_group_is_one_group_and_the_tightest_node_is_taken() -> None:
    assert placed(machine_with(0), 2, GROUP) == [2, 3]


def test_two_gpus_that_lie_in_two_groups_are_no_group() -> None:
    machine = machine_with(*(gpu for gpu in range(24) if gpu not in (0, 2)))
    assert placed(machine, 2, GROUP) is None
    assert placed(machine, 2, NODE) == [0, 2]


def test_a_node_is_the_fullest_that_holds_the_gang() -> None:
    assert placed(machine_with(4), 3, NODE) == [5, 6, 7]


def test_a_rack_is_the_one_with_fewest_nodes_and_then_the_tightest() -> None:
    assert placed(machine_with(0, 1, 2, 3), 8, RACK) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_gang_larger_than_a_rack_is_refused_there_and_placed_across() -> None:
    assert placed(machine_with(), 13, RACK) is None
    assert len(placed(machine_with(), 13, CLUSTER) or []) == 13


def test_across_racks_fewest_nodes_come_first_then_fewest_racks() -> None:
    machine = machine_with(0, 12)  # two idle nodes in each rack, and one with three free
    gpus = placed(machine, 8, CLUSTER) or []
    assert nodes_spanned(machine, np.array(gpus)) == 2
    assert tier_spanned(machine, np.array(gpus)) == RACK


@effort(60)
@given(st.sets(st.integers(0, 23)), st.integers(1, 24))
def test_what_is_placed_lies_inside_the_tier_was_free_and_the_narrowest_tier_is_told(
    taken: set[int], gpus: int
) -> None:
    machine = machine_with(*taken)
    narrowest = narrowest_tier(machine, 0, gpus)
    for tier in range(len(TIERS)):
        trial = copy_of(machine)
        got = placed(trial, gpus, tier)
        assert (got is not None) == (0 <= narrowest <= tier)
        if got is None:
            np.testing.assert_array_equal(trial.gpus["owner"], machine.gpus["owner"])
        else:
            assert not taken & set(got)
            assert got == sorted(set(got))
            assert tier_spanned(machine, np.array(got)) <= tier
            assert (trial.gpus["owner"] == 7).sum() == gpus
            assert trial.nodes["free"].sum() == (trial.gpus["owner"] == FREE).sum()


@pytest.mark.parametrize("tier", range(4))
def test_more_gpus_than_are_free_are_refused(tier: int) -> None:
    assert placed(machine_with(0), 24, tier) is None
