"""The time model: overlaps, and where the seconds of an iteration go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thebes.perf.plans.timing import overlap

SECONDS = st.floats(0.0, 1e4)


@given(SECONDS, SECONDS, st.floats(1.0, 1e4))
def test_an_overlap_takes_between_the_longer_of_the_two_and_their_sum(x: float, y: float, k: float):
    both = float(overlap(x, y, k))
    assert max(x, y) * (1 - 1e-12) <= both <= (x + y) * (1 + 1e-12)


def test_an_overlap_of_order_1_is_one_after_the_other():
    assert overlap(2.0, 3.0, 1.0) == pytest.approx(5.0)


def test_an_overlap_of_a_large_order_hides_the_shorter_without_overflow():
    assert np.array_equal(overlap(np.array([1e-3, 900.0]), np.array([3.0, 30.0]), 1e4), [3.0, 900.0])
