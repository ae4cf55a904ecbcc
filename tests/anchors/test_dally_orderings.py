"""What Dally's released code shows in its own mode (spec 2.5): orders, not figures, for the traces are drawn anew.

The 500 jobs are those of `benchmarks.dally_reproduction`; docs/reproduction.md has all the figures side by side.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
from benchmarks.dally_reproduction import MODELS, SIZES, figures, jobs, run

from thebes.policy import find

pytestmark = pytest.mark.slow


@lru_cache
def measured(policy: str, jobs_per_day: float | None) -> tuple[float, float, float]:
    """(makespan, mean JCT, mean communication) on 128 GPUs."""
    return figures(run(jobs(0, jobs_per_day), 128, find(policy)()))


@pytest.mark.parametrize("jobs_per_day", [None, 100.0], ids=["batch", "poisson"])
@pytest.mark.parametrize("policy", ["dally", "dally-manual", "dally-consolidated"])
def test_never_waiting_is_worst(policy: str, jobs_per_day: float | None) -> None:
    """Without timers jobs finish later on average and talk more than with any."""
    _, jct, comm = measured(policy, jobs_per_day)
    _, hasty_jct, hasty_comm = measured("dally-no-wait", jobs_per_day)
    assert jct < hasty_jct
    assert comm < hasty_comm


@pytest.mark.parametrize("jobs_per_day", [None, 100.0], ids=["batch", "poisson"])
def test_always_waiting_talks_least(jobs_per_day: float | None) -> None:
    least = measured("dally-consolidated", jobs_per_day)[2]
    assert all(least <= measured(policy, jobs_per_day)[2] for policy in ("dally", "dally-manual", "dally-no-wait"))


def test_the_jobs_are_those_of_the_published_trace() -> None:
    """Sizes and models to the job; median and mean of the work within a few per cent, as one draw gives them."""
    trace = jobs(0).jobs
    assert dict(trace["num_gpus"].value_counts().rows()) == SIZES
    assert dict(trace["model"].value_counts().rows()) == MODELS
    work_h = (trace["duration"] * trace["num_gpus"] / 3600).to_numpy()
    assert float(work_h.mean()) == pytest.approx(26.1, rel=0.01)
    assert sorted(work_h)[250] == pytest.approx(15.6, rel=0.05)
    assert 222 < work_h.max() <= 324
