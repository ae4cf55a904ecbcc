"""Execution plans as values: text, code and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thebes.model.errors import UserError
from thebes.model.plan import FAMILIES, NO_PLAN, Plan, parse_plan, plan_of

sizes = st.integers(1, 1000)
split = st.builds(Plan, dp=sizes, tp=sizes, pp=sizes, ga=sizes, gc=st.booleans())
zero = st.builds(Plan, dp=sizes, zero=st.sampled_from([1, 2]), ga=sizes, gc=st.booleans())
plans = st.one_of(split, zero)


@given(plans)
def test_a_plan_survives_text_and_code(plan: Plan) -> None:
    assert parse_plan(str(plan)) == plan
    assert plan_of(plan.code) == plan
    assert NO_PLAN < plan.code < 2**63
    assert plan.family in FAMILIES


@given(plans, plans)
def test_different_plans_have_different_codes(one: Plan, other: Plan) -> None:
    assert (one.code == other.code) == (one == other)


@pytest.mark.parametrize(
    ("text", "plan", "family"),
    [
        ("dp8", Plan(dp=8), "dp"),
        ("dp2+tp4+pp2+ga4+gc", Plan(2, 4, 2, 0, 4, True), "3d"),
        ("zero-dp8+ga2", Plan(dp=8, zero=1, ga=2), "zero-dp"),
        ("ZERO-OFFLOAD1+gc", Plan(dp=1, zero=2, gc=True), "zero-offload"),
        ("tp4", Plan(tp=4), "3d"),
    ],
)
def test_plans_are_written_as_in_the_papers(text: str, plan: Plan, family: str) -> None:
    assert parse_plan(text) == plan
    assert plan.family == family


def test_plans_are_alike_that_differ_in_data_parallel_size_only() -> None:
    assert parse_plan("dp8+tp2").like(parse_plan("dp2+tp2+ga4"))
    assert not parse_plan("dp8").like(parse_plan("dp8+gc"))
    assert not parse_plan("dp8").like(parse_plan("zero-dp8"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp", "'dp' in 'dp' is no part of an execution plan"),
        ("dp2+xp3", "'xp3' in"),
        ("dp2+dp4", "says dp twice"),
        ("dp2+gc+gc", "says gc twice"),
        ("dp0", "has dp = 0"),
        ("dp99999", "has dp = 99999"),
        ("zero-dp8+tp2", "ZeRO is not combined with tensor or pipeline parallelism"),
        ("", "'' in '' is no part"),
    ],
)
def test_what_is_no_plan_is_said_with_a_way_out(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_plan(text)
    assert caught.value.hint
