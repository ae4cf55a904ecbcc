"""Packing is judged by measured rates: when it pays, when it is undone, and who leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thebes.live.packing import Packing, PackingRules, StepSample, Verdict, Window, judge, window
from thebes.model.errors import UserError

RULES = PackingRules()
PAIR = Packing(("a", "b"))
ALONE = {"a": 100.0, "b": 50.0}


def made(a: float, b: float, seconds: float = 20.0) -> dict[str, Window]:
    """Windows in which a and b make these shares of their rates alone."""
    return {"a": Window(round(a * 100 * seconds), seconds), "b": Window(round(b * 50 * seconds), seconds)}


def verdict(a: float, b: float, packing: Packing = PAIR, rules: PackingRules = RULES) -> Verdict:
    return judge(packing, ALONE, made(a, b), rules)


def test_a_pair_that_wins_is_kept() -> None:
    found = verdict(0.95, 0.9)
    assert (found.action, found.leaves) == ("keep", None)
    assert found.total == pytest.approx(1.85)
    assert found.shares == {"a": pytest.approx(0.95), "b": pytest.approx(0.9)}
    assert found.after == Packing(("a", "b"), paid=True)
    assert found.reason == "0.95 + 0.90 = 1.85 reaches 1.10: packing pays"


def test_a_pair_that_does_not_win_is_undone_and_the_last_to_come_leaves() -> None:
    found = verdict(0.46, 0.46)
    assert (found.action, found.leaves) == ("undo", "b")
    assert found.reason == "0.46 + 0.46 = 0.92 is below 1.10: packing does not pay"
    assert judge(Packing(("b", "a")), ALONE, made(0.46, 0.46), RULES).leaves == "a"


def test_between_the_two_thresholds_a_pair_stays_what_it_was() -> None:
    assert verdict(0.53, 0.53).action == "undo"
    assert verdict(0.53, 0.53, Packing(("a", "b"), paid=True)).action == "keep"


def test_a_pair_that_has_paid_is_undone_after_some_low_windows_in_a_row() -> None:
    packing = Packing(("a", "b"), paid=True)
    first = verdict(0.5, 0.5, packing)
    assert (first.action, first.after.low_windows) == ("keep", 1)
    recovered = verdict(0.6, 0.6, first.after)
    assert (recovered.action, recovered.after.low_windows) == ("keep", 0)
    second = verdict(0.5, 0.5, first.after)
    assert (second.action, second.leaves) == ("undo", "b")
    assert "for 2 windows" in second.reason


def test_a_starved_job_ends_the_packing_though_the_sum_is_high() -> None:
    found = verdict(0.98, 0.3)
    assert found.total == pytest.approx(1.28)
    assert (found.action, found.leaves) == ("undo", "b")
    assert "b makes 0.30 of its rate alone, less than 0.35" in found.reason
    assert verdict(0.98, 0.3, Packing(("a", "b"), paid=True)).action == "undo"


def test_three_jobs_are_judged_by_thirds() -> None:
    alone = dict.fromkeys("abc", 10.0)
    windows = {job: Window(100, 20.0) for job in "abc"}
    found = judge(Packing(("a", "b", "c")), alone, windows, RULES)
    assert (found.action, found.total) == ("keep", pytest.approx(1.5))


@pytest.mark.parametrize(
    ("alone", "together", "reason"),
    [
        ({"a": 100.0}, made(1, 1), "the rate alone of b is not known"),
        ({"a": 100.0, "b": 0.0}, made(1, 1), "the rate alone of b is not known"),
        (ALONE, made(1, 1, seconds=5.0), "the window of a, b is too short yet"),
        (ALONE, {"a": Window(2000, 20.0)}, "the window of b is too short yet"),
        (ALONE, {"a": Window(2000, 20.0), "b": Window(9, 20.0)}, "the window of b is too short yet"),
    ],
)
def test_without_enough_measured_there_is_no_verdict(alone, together, reason) -> None:
    found = judge(PAIR, alone, together, RULES)
    assert (found.action, found.reason, found.after) == ("measure", reason, PAIR)


def test_a_job_that_makes_no_steps_at_all_is_not_waited_for_for_ever() -> None:
    found = judge(PAIR, ALONE, {"a": Window(3000, 30.0), "b": Window(0, 0.0)}, RULES)
    assert (found.action, found.leaves) == ("undo", "b")
    assert found.shares["b"] == 0.0


def test_a_window_lies_between_samples() -> None:
    samples = [StepSample(float(second), second * 10) for second in range(10)]
    assert window(samples, 2.5, 7.2) == Window(40, 4.0)
    assert window(samples, 2.5, 7.2).steps_per_s == 10.0
    assert window(samples, 2.5, 3.5) == Window(0, 0.0)
    assert window([], 0.0, 9.0).steps_per_s == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"leave_sum": 0.9},
        {"leave_sum": 1.2},
        {"fair_share": 1.5},
        {"min_window_s": 0.0},
        {"min_steps": 0},
        {"patience": 0},
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong) -> None:
    with pytest.raises(UserError, match="packing"):
        PackingRules(**wrong)


@given(a=st.floats(0.0, 1.2), b=st.floats(0.0, 1.2), paid=st.booleans(), low=st.integers(0, 1))
def test_what_holds_for_every_verdict(a: float, b: float, paid: bool, low: int) -> None:
    found = verdict(a, b, Packing(("a", "b"), paid, low))
    assert (found.action == "undo") == (found.leaves is not None)
    if found.action == "keep":
        assert found.after.paid
        assert found.total is not None
        assert min(found.shares.values()) >= RULES.fair_share / 2
        assert paid or found.total >= RULES.enter_sum
    if found.action == "measure":
        assert found.after == Packing(("a", "b"), paid, low)
    better = verdict(min(a + 0.2, 1.4), min(b + 0.2, 1.4), Packing(("a", "b"), paid, low))
    if found.action == "keep" and found.after.low_windows == 0:
        assert better.action == "keep", "more speed never undoes a packing"
