"""Synthetic workloads that keep the shape of a real one.

For the jobs, GPUs and run time are drawn together from a real trace (`like`, or the shipped Philly sample), so that
their correlation survives. With `empirical`, a row is drawn with replacement and its log run time is smoothed inside
its GPU class, shrunk so that mean and variance stay those of the class (Silverman & Young, "The bootstrap: to smooth or
not to smooth?", Biometrika 1987), and kept within the class's observed range. With `lognormal`, the row gives the GPUs;
the run time is log-normal with the class's mean and deviation, at most the longest run time observed.

For the arrivals, the span between first and last submission is fixed first: by the load, as span = GPU-seconds / (gpus
x load), so that the load is met exactly; or by the arrival rate. Then the jobs are placed in it:
poisson   uniformly, which is what a Poisson process is once the number of jobs is given;
bursty    a Neyman-Scott cluster process: sessions arrive as Poisson, each submits a geometric number of jobs (mean
          8) at gaps of mean 30 s, as parameter sweeps do;
diurnal   a Poisson process thinned by a daily wave (busiest at 15:00, 5 times the quietest) and a weekly one
          (weekdays above weekends); time 0 is a Monday midnight.

Each part has its own random stream, so that a change of arrivals leaves the jobs as they are. Equal specs give equal
traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from thebes.model.errors import UserError, nearest
from thebes.model.trace import TRACE_SCHEMA, Trace
from thebes.trace.reader import read
from thebes.trace.shipped import sample_path

# The nine networks of the Tiresias traces.
NINE_CNNS = ("vgg19", "vgg16", "vgg11", "alexnet", "resnet152", "resnet101", "resnet50", "inception4", "inception3")
DURATIONS = ("empirical", "lognormal")
DAY_S, WEEK_S = 86400.0, 7 * 86400.0
DAILY_SWING, DAILY_PEAK_S = 2.0 / 3.0, 15 * 3600.0  # (1 + 2/3) / (1 - 2/3) = 5
WEEKLY_SWING, WEEKLY_PEAK_S = 0.3, 2.5 * DAY_S  # Wednesday noon
WIDEST_KERNEL = 0.15  # in the logarithm of the run time: about 15 per cent up or down
BURST_JOBS, BURST_GAP_S = 8.0, 30.0
MOST_JOBS = 50_000_000


@dataclass(frozen=True)
class GeneratorSpec:
    """What to make. Give `load` with `gpus`, or `jobs_per_hour`, or neither to keep the real trace's arrival rate."""

    jobs: int = 1000
    arrivals: str = "poisson"
    durations: str = "empirical"
    like: Trace | None = None
    load: float | None = None
    gpus: int | None = None
    jobs_per_hour: float | None = None
    max_gpus: int | None = None  # larger jobs of the real trace are not drawn; by default it is `gpus`
    seed: int = 0
    models: tuple[str, ...] = NINE_CNNS


def generate(spec: GeneratorSpec) -> Trace:
    """A trace made after `spec`; equal specs give equal traces."""
    _check(spec)
    real = spec.like if spec.like is not None else read(sample_path())
    limit = spec.max_gpus if spec.max_gpus is not None else spec.gpus
    pool = real.jobs if limit is None else real.jobs.filter(pl.col("num_gpus") <= limit)
    if pool.height == 0:
        raise UserError(
            f"{real.name}: no job needs {limit} GPUs or fewer, so none can be drawn.",
            hint="Raise --max-gpus or --gpus.",
        )
    draw_rng, time_rng, place_rng, model_rng = (
        np.random.default_rng(stream) for stream in np.random.SeedSequence(spec.seed).spawn(4)
    )
    rows = draw_rng.integers(pool.height, size=spec.jobs)
    gpus = pool["num_gpus"].to_numpy()[rows]
    duration = _run_times(spec, pool, rows, time_rng)
    work = float((gpus * duration).sum())
    span = _span(spec, real, work)
    submit = _arrival_times(spec, span, place_rng)
    models = np.asarray(spec.models, dtype=object)[model_rng.integers(len(spec.models), size=spec.jobs)]
    made = {
        "job_id": [str(number) for number in range(spec.jobs)],
        "submit_time": submit,
        "duration": duration,
        "num_gpus": gpus,
        "model": models.tolist(),
    }
    frame = pl.DataFrame({name: made.get(name) for name in TRACE_SCHEMA}, schema=dict(TRACE_SCHEMA))
    name = f"generated-{spec.arrivals}-{spec.jobs}-seed{spec.seed}"
    return Trace(name, frame, "generated", _notes(spec, real, pool.height, work, span))


def _check(spec: GeneratorSpec) -> None:
    if spec.arrivals not in ARRIVALS:
        raise UserError(f"unknown arrivals '{spec.arrivals}'; {nearest(spec.arrivals, ARRIVALS)}")
    if spec.durations not in DURATIONS:
        raise UserError(f"unknown durations '{spec.durations}'; {nearest(spec.durations, DURATIONS)}")
    if not 1 <= spec.jobs <= MOST_JOBS:
        raise UserError(f"jobs is {spec.jobs}; it must be from 1 to {MOST_JOBS:,}.")
    if spec.seed < 0:
        raise UserError(f"seed is {spec.seed}; it must not be negative.")
    for name in ("load", "gpus", "jobs_per_hour", "max_gpus"):
        value = getattr(spec, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} is {value}; it must be above 0.")
    if spec.load is not None and spec.gpus is None:
        raise UserError("a load needs the size of the cluster it is a share of.", hint="Add --gpus N.")
    if spec.load is not None and spec.jobs_per_hour is not None:
        raise UserError("load and jobs_per_hour both fix the arrival rate.", hint="Give one of them.")
    if not spec.models:
        raise UserError("models is empty.", hint="Name at least one model.")


def _run_times(spec: GeneratorSpec, pool: pl.DataFrame, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Run times in whole seconds, at least 1; each class of equal GPU demand is smoothed by itself."""
    classes, place = np.unique(pool["num_gpus"].to_numpy(), return_inverse=True)
    logs = np.log(pool["duration"].to_numpy())
    number = np.bincount(place, minlength=len(classes))
    mean = np.bincount(place, logs, minlength=len(classes)) / number
    spread = np.sqrt(np.bincount(place, (logs - mean[place]) ** 2, minlength=len(classes)) / number)
    noise = rng.standard_normal(len(rows))
    mine = place[rows]
    if spec.durations == "lognormal":
        drawn = np.minimum(mean[mine] + spread[mine] * noise, logs.max())
    else:
        # This is Silverman's rule of thumb with a limit. Run times have several modes (crashes, tests, full trainings):
        # a wide kernel would fill the gaps between them and stretch the tail.
        width = np.minimum(0.9 * spread * number**-0.2, WIDEST_KERNEL)
        shrink = 1.0 / np.sqrt(1.0 + np.divide(width, spread, out=np.zeros_like(width), where=spread > 0) ** 2)
        drawn = mean[mine] + (logs[rows] - mean[mine] + width[mine] * noise) * shrink[mine]
        low, high = np.full(len(classes), np.inf), np.full(len(classes), -np.inf)
        np.minimum.at(low, place, logs)
        np.maximum.at(high, place, logs)
        drawn = np.clip(drawn, low[mine], high[mine])
    return np.maximum(np.rint(np.exp(drawn)), 1.0)


def _span(spec: GeneratorSpec, real: Trace, work: float) -> float:
    """Seconds from the first submission to the last."""
    if spec.jobs == 1:
        return 0.0
    if spec.load is not None and spec.gpus is not None:
        return work / (spec.gpus * spec.load)
    if spec.jobs_per_hour is not None:
        return spec.jobs * 3600.0 / spec.jobs_per_hour
    submit = real.jobs["submit_time"].to_numpy()
    return float(submit.max() - submit.min()) * spec.jobs / len(submit)


def _arrival_times(spec: GeneratorSpec, span: float, rng: np.random.Generator) -> np.ndarray:
    times = np.sort(ARRIVALS[spec.arrivals](spec.jobs, span, rng))
    if spec.jobs == 1 or times[-1] == times[0]:
        return np.linspace(0.0, span, spec.jobs)
    # The times are stretched to the whole span, by about one gap, so that the load is exactly what was asked for.
    return np.round((times - times[0]) * (span / (times[-1] - times[0])), 3)


def _poisson(jobs: int, span: float, rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(0.0, span, jobs)


def _bursty(jobs: int, span: float, rng: np.random.Generator) -> np.ndarray:
    sizes = rng.geometric(1.0 / BURST_JOBS, size=jobs)  # there are more than enough sessions
    sizes = sizes[: int(np.searchsorted(np.cumsum(sizes), jobs)) + 1]
    begin = np.repeat(rng.uniform(0.0, span, len(sizes)), sizes)[:jobs]
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)[:jobs]
    steps = np.cumsum(rng.exponential(BURST_GAP_S, jobs))
    # A session near the end would run over it; folding it back keeps its gaps real and the span fixed.
    return (begin + steps - steps[first]) % span if span > 0.0 else begin


def _diurnal(jobs: int, span: float, rng: np.random.Generator) -> np.ndarray:
    top = (1.0 + DAILY_SWING) * (1.0 + WEEKLY_SWING)
    kept: list[np.ndarray] = []
    missing = jobs
    while missing > 0:
        times = rng.uniform(0.0, span, 2 * missing + 16)
        daily = 1.0 + DAILY_SWING * np.cos(2.0 * np.pi * (times - DAILY_PEAK_S) / DAY_S)
        weekly = 1.0 + WEEKLY_SWING * np.cos(2.0 * np.pi * (times - WEEKLY_PEAK_S) / WEEK_S)
        chosen = times[rng.uniform(0.0, top, len(times)) < daily * weekly][:missing]
        kept.append(chosen)
        missing -= len(chosen)
    return np.concatenate(kept)


ARRIVALS: dict[str, Callable[[int, float, np.random.Generator], np.ndarray]] = {
    "poisson": _poisson,
    "bursty": _bursty,
    "diurnal": _diurnal,
}


def _notes(spec: GeneratorSpec, real: Trace, pool: int, work: float, span: float) -> tuple[str, ...]:
    fitted = f"Fitted to {pool:,} jobs of {real.name if spec.like is not None else 'the shipped Philly sample'}."
    if not span:
        return (fitted,)
    demand = work / span
    load = f", {demand / spec.gpus:.0%} of {spec.gpus}" if spec.gpus else ""
    return (fitted, f"Mean demand {demand:,.1f} GPUs{load} over {span / DAY_S:.1f} days.")
