"""The reconfiguration guard says when Rubick may touch a running job, from what a reconfiguration really costs.

A job that ran for T seconds and would then have been reconfigured N times at delta seconds each may be touched only if
(T - N delta) / T is at least a threshold. So a young job is left alone, and the changes of an old one lie ever farther
apart: what reconfiguring costs stays below 3 % of its life, and no job is moved to and fro for ever.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thebes.model.arrays import Floats


def allowed_after_s(changes: NDArray[np.int64], cost_s: Floats, threshold: float) -> Floats:
    """Running time from which on the next reconfiguration is allowed."""
    paid_s = (changes + 1) * cost_s
    if threshold >= 1.0:
        return np.where(paid_s > 0.0, np.inf, 0.0)
    return paid_s / (1.0 - threshold)


def burden(ran_s: Floats, changes: NDArray[np.int64], cost_s: Floats) -> Floats:
    """The part of its running time that a job would have spent on restarts after one more."""
    paid_s = (changes + 1) * cost_s
    return np.divide(paid_s, ran_s, out=np.where(paid_s > 0.0, np.inf, 0.0), where=ran_s > 0.0)


def guarded(ran_s: Floats, changes: NDArray[np.int64], cost_s: Floats, threshold: float) -> NDArray[np.bool_]:
    """Which jobs must not be reconfigured yet."""
    return ran_s < allowed_after_s(changes, cost_s, threshold)


def next_round_s(now_s: float, at_s: float, round_s: float) -> float:
    """The first multiple of the round after now that is not before `at_s`."""
    if at_s == np.inf:
        return np.inf
    after = np.floor(now_s / round_s) + 1.0
    return float(max(after, np.ceil(at_s / round_s)) * round_s)
