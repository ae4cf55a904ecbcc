"""Finish-time fairness, by hand: alone is fair, an equal share is fair, and who waits for another is not."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import thebes
from thebes.report.fairness import alive_on_average, rho_by_tenant, rho_of


def frame(*rows: tuple[float, float | None, float, float], tenants: tuple[str, ...] | None = None) -> pl.DataFrame:
    """Jobs as (submit, finish, duration, GPUs)."""
    columns = {"submit_s": pl.Float64, "finish_s": pl.Float64, "duration_s": pl.Float64, "gpus": pl.Float64}
    jobs = pl.DataFrame(list(rows), schema=columns, orient="row")
    return jobs.with_columns(pl.Series("tenant", tenants or ("",) * len(rows), dtype=pl.String))


def test_a_job_alone_has_a_rho_of_one() -> None:
    assert rho_of(frame((5, 105, 100, 4)), 8) == pytest.approx([1.0])


def test_two_equal_jobs_that_share_one_gpu_half_each_are_both_treated_fairly() -> None:
    assert rho_of(frame((0, 200, 100, 1), (0, 200, 100, 1)), 1) == pytest.approx([1.0, 1.0])


def test_who_waits_for_an_equal_is_treated_as_both_expected_and_the_first_better() -> None:
    """One GPU, two jobs of 100 s, one after the other. The first lives with the other: fair share 200 s, needs 100. The
    second lives for 200 s with 1.5 alive on average: 150 s would have been fair."""
    assert rho_of(frame((0, 100, 100, 1), (0, 200, 100, 1)), 1) == pytest.approx([0.5, 200 / 150])


def test_a_fair_share_is_never_faster_than_the_job_itself() -> None:
    """Two jobs of 2 GPUs each on 8: there is room for both, so any wait is unfair."""
    assert rho_of(frame((0, 100, 100, 2), (0, 150, 100, 2)), 8) == pytest.approx([1.0, 1.5])


def test_jobs_that_did_not_finish_or_have_no_length_have_no_rho_but_count_as_alive() -> None:
    rho = rho_of(frame((0, 100, 100, 1), (0, None, 50, 1), (0, 10, 0, 1)), 1)
    assert np.isnan(rho[1:]).all()
    assert rho[0] == pytest.approx(100 / (100 * 2.1))
    assert len(rho_of(frame(), 8)) == 0


@st.composite
def lives(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    times = st.integers(0, 20)
    pairs = draw(st.lists(st.tuples(times, times), min_size=1, max_size=12))
    submit, length = np.array(pairs, dtype=np.float64).T
    return submit, submit + length


@given(lives())
def test_the_average_number_alive_is_that_of_a_count_second_by_second(life: tuple[np.ndarray, np.ndarray]) -> None:
    submit, finish = life
    found = alive_on_average(submit, finish)
    for mine, (begin, end) in enumerate(zip(submit, finish, strict=True)):
        if end > begin:
            alive = [((submit <= t) & (finish > t)).sum() for t in np.arange(begin, end)]
            assert found[mine] == pytest.approx(np.mean(alive))


def test_an_organisation_is_judged_by_the_work_of_its_jobs() -> None:
    """Given 100 GPU-seconds at rho 2 and 300 at rho 4 for one, and a job without a rho for another."""
    jobs = frame((0, 1, 100, 1), (0, 1, 100, 3), (0, None, 9, 1), (0, 1, 5, 1), tenants=("a", "a", "b", "c"))
    assert rho_by_tenant(jobs, np.array([2.0, 4.0, np.nan, 1.0])) == {"a": pytest.approx(3.5), "c": pytest.approx(1.0)}


def test_a_result_has_the_rho_of_every_job_and_of_every_organisation() -> None:
    columns = {
        "job_id": ["a", "b"],
        "submit_time": [0.0, 0.0],
        "duration": [100.0, 100.0],
        "num_gpus": [1.0, 1.0],
        "vc": ["red", "blue"],
    }
    result = thebes.simulate(thebes.Trace.of("two", columns), "1x1", "fifo", perf="ideal")
    assert result.jobs["rho"].to_list() == pytest.approx([0.5, 200 / 150])
    assert result.metrics["rho_by_tenant"] == {"red": pytest.approx(0.5), "blue": pytest.approx(200 / 150)}
    assert result.metrics["tenants"] == 2
    assert result.metrics["max_rho_tenant"] == pytest.approx(result.metrics["max_rho"])
