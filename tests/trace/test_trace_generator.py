"""The generator meets the load, repeats itself for a seed, and keeps the shape of the trace it is fitted to."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kit.effort import effort
from thebes.model.errors import UserError
from thebes.model.trace import TRACE_SCHEMA, Trace
from thebes.trace import GeneratorSpec, describe, generate, read, sample_path
from thebes.trace.generator import NINE_CNNS

ARRIVALS = ("poisson", "bursty", "diurnal")


def load_of(trace: Trace, gpus: int) -> float:
    demand = describe(trace)["mean_gpu_demand"]
    assert demand is not None
    return demand / gpus


@effort(40)
@given(
    jobs=st.integers(2, 400),
    arrivals=st.sampled_from(ARRIVALS),
    durations=st.sampled_from(["empirical", "lognormal"]),
    load=st.floats(0.05, 3.0),
    gpus=st.integers(1, 512),
    seed=st.integers(0, 2**32),
)
def test_the_offered_load_is_the_one_asked_for(jobs, arrivals, durations, load, gpus, seed):
    spec = GeneratorSpec(jobs=jobs, arrivals=arrivals, durations=durations, load=load, gpus=gpus, seed=seed)
    trace = generate(spec)

    assert load_of(trace, gpus) == pytest.approx(load, rel=1e-3)
    assert len(trace) == jobs
    assert trace.jobs["num_gpus"].max() <= gpus
    assert trace.jobs["submit_time"][0] == 0.0
    assert trace.jobs["submit_time"].is_sorted()
    assert (trace.jobs["duration"] >= 1.0).all()
    assert dict(trace.jobs.schema) == TRACE_SCHEMA


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_equal_specs_give_equal_traces_and_seeds_differ(arrivals):
    spec = GeneratorSpec(jobs=200, arrivals=arrivals, seed=7)

    assert generate(spec).jobs.equals(generate(spec).jobs)
    assert not generate(spec).jobs.equals(generate(GeneratorSpec(jobs=200, arrivals=arrivals, seed=8)).jobs)


def test_arrivals_do_not_change_the_jobs():
    made = [generate(GeneratorSpec(jobs=200, arrivals=arrivals, seed=1)).jobs for arrivals in ARRIVALS]
    columns = ["job_id", "duration", "num_gpus", "model"]

    assert made[0].select(columns).equals(made[1].select(columns))
    assert made[0].select(columns).equals(made[2].select(columns))


def test_empirical_run_times_keep_the_distribution_and_its_tail():
    real, made = read(sample_path()).jobs, generate(GeneratorSpec(jobs=20_000, seed=2)).jobs
    distance = stats.ks_2samp(np.log(real["duration"]), np.log(made["duration"])).statistic

    assert distance < 0.05
    assert made["duration"].quantile(0.99) == pytest.approx(real["duration"].quantile(0.99), rel=0.25)
    assert made["duration"].max() <= real["duration"].max()
    assert made["duration"].mean() == pytest.approx(real["duration"].mean(), rel=0.1)
    # Heavy-tailed: the longest tenth of the jobs does most of the work.
    longest = made["duration"].sort(descending=True)
    assert longest.head(2000).sum() > 0.35 * longest.sum()


def test_empirical_run_times_are_not_mere_copies():
    real, made = read(sample_path()).jobs, generate(GeneratorSpec(jobs=2000, seed=2)).jobs

    assert made["duration"].n_unique() > 2 * real["duration"].n_unique() * 0.7


@pytest.mark.parametrize("durations", ["empirical", "lognormal"])
def test_gpus_and_run_times_stay_correlated(durations):
    rng = np.random.default_rng(0)
    gpus = rng.choice([1.0, 8.0], 500)
    duration = np.rint(np.exp(rng.normal(np.where(gpus == 8.0, 9.0, 4.0), 0.5)))
    jobs = pl.DataFrame({"job_id": [str(n) for n in range(500)], "submit_time": np.arange(500.0)}).with_columns(
        duration=duration, num_gpus=gpus
    )
    made = generate(GeneratorSpec(jobs=5000, like=Trace("toy", jobs), durations=durations, seed=1)).jobs
    small, large = (np.log(made.filter(pl.col("num_gpus") == size)["duration"]) for size in (1.0, 8.0))

    assert small.mean() == pytest.approx(4.0, abs=0.1)
    assert large.mean() == pytest.approx(9.0, abs=0.1)
    assert large.std() == pytest.approx(0.5, abs=0.1)
    assert (made["num_gpus"] == 8.0).mean() == pytest.approx((gpus == 8.0).mean(), abs=0.03)


def dispersion(trace: Trace, window_s: float) -> float:
    """Variance over mean of the counts per window: 1 for a Poisson process."""
    counts = np.bincount((trace.jobs["submit_time"].to_numpy() // window_s).astype(int))
    return float(counts.var() / counts.mean())


def test_poisson_counts_are_poisson_and_bursts_are_not():
    plain = generate(GeneratorSpec(jobs=20_000, jobs_per_hour=20, seed=1))
    bursty = generate(GeneratorSpec(jobs=20_000, jobs_per_hour=20, arrivals="bursty", seed=1))

    assert dispersion(plain, 3600) == pytest.approx(1.0, abs=0.15)
    assert dispersion(bursty, 3600) > 5.0


def test_diurnal_arrivals_follow_day_and_week():
    submit = generate(GeneratorSpec(jobs=50_000, jobs_per_hour=50, arrivals="diurnal", seed=1)).jobs["submit_time"]
    hour = np.bincount(((submit.to_numpy() % 86400) // 3600).astype(int), minlength=24)
    day = np.bincount(((submit.to_numpy() % 604800) // 86400).astype(int), minlength=7)

    assert np.argmax(hour) in (14, 15)
    assert 3.5 < hour.max() / hour.min() < 6.5
    assert np.argmax(day) == 2
    assert day[5:].max() < day[1:4].min()


def test_arrival_rate_is_that_of_the_real_trace_unless_told():
    real = describe(read(sample_path()))
    made = describe(generate(GeneratorSpec(jobs=500)))

    assert made["arrivals_per_hour"] == pytest.approx(real["arrivals_per_hour"], rel=0.01)
    assert describe(generate(GeneratorSpec(jobs=500, jobs_per_hour=33)))["arrivals_per_hour"] == pytest.approx(33)


def test_largest_job_can_be_limited():
    assert generate(GeneratorSpec(jobs=500, max_gpus=4)).jobs["num_gpus"].max() == 4.0


def test_models_come_from_the_nine_by_seed():
    models = generate(GeneratorSpec(jobs=2000, seed=5)).jobs["model"]

    assert set(models) == set(NINE_CNNS)
    assert models.value_counts()["count"].min() > 150


def test_notes_tell_the_fit_and_the_load():
    assert generate(GeneratorSpec(jobs=100, load=0.8, gpus=64)).notes[0] == (
        "Fitted to 822 jobs of the shipped Philly sample."
    )
    assert "80% of 64" in generate(GeneratorSpec(jobs=100, load=0.8, gpus=64)).notes[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrivals": "poison"}, "unknown arrivals 'poison'; did you mean 'poisson'?"),
        ({"durations": "lognormall"}, "unknown durations 'lognormall'; did you mean 'lognormal'?"),
        ({"jobs": 0}, "jobs is 0; it must be from 1 to 50,000,000."),
        ({"seed": -1}, "seed is -1; it must not be negative."),
        ({"load": 0.0, "gpus": 8}, "load is 0.0; it must be above 0."),
        ({"load": float("nan"), "gpus": 8}, "load is nan; it must be above 0."),
        ({"load": 0.5}, "a load needs the size of the cluster it is a share of.\nAdd --gpus N."),
        ({"load": 0.5, "gpus": 8, "jobs_per_hour": 3.0}, "load and jobs_per_hour both fix the arrival rate."),
        ({"models": ()}, "models is empty."),
    ],
)
def test_impossible_specs_are_refused(options, message):
    with pytest.raises(UserError) as caught:
        generate(GeneratorSpec(**options))

    assert str(caught.value).startswith(message)


def test_no_job_small_enough():
    big = read(sample_path()).jobs.filter(pl.col("num_gpus") >= 8)
    with pytest.raises(UserError, match="big: no job needs 4 GPUs or fewer, so none can be drawn"):
        generate(GeneratorSpec(like=Trace("big", big), max_gpus=4))
