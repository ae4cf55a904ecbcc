"""What the charts draw, as plain arrays: labels, distributions, step functions, the account, the story of each job.

Both the page (Plotly) and the figures (Matplotlib) draw these, so they show the same thing. Long runs are thinned here
without distortion: a step function becomes its time-weighted means, which keep the area under it; a distribution keeps
its extremes and is thinned along its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import polars as pl

from thebes.report.metrics import JOB_CLASSES, SHORT_S, SMALL_GPUS, Floats, JobClass, class_masks, column
from thebes.report.metrics import mean as mean_of
from thebes.report.metrics import percentile as percentile_of
from thebes.report.result import Result

MAX_POINTS = 600  # per curve: more than a chart has pixels to show, and few enough for a small file
MAX_GANTT_JOBS = 100
MAX_GANTT_SPANS = 6000

ACCOUNT_PARTS = {
    "useful": "Useful",
    "overhead": "Overhead",
    "lost": "Lost",
    "idle_held": "Idle-held",
    "unused": "Unused",
}
RUNNING, WAITING, SUSPENDED = "running", "waiting", "suspended"


@dataclass(frozen=True)
class Steps:
    """A step function: `values[i]` holds from `edges[i]` to `edges[i + 1]`."""

    edges: Floats
    values: Floats

    @property
    def area(self) -> float:
        return float(np.diff(self.edges) @ self.values)

    @property
    def mean(self) -> float | None:
        span = float(self.edges[-1] - self.edges[0]) if len(self.edges) else 0.0
        return self.area / span if span > 0 else None


@dataclass(frozen=True)
class Span:
    """A stretch of a job's life in one state; `job` is its row in `Result.jobs`."""

    job: int
    state: str
    begin_s: float
    end_s: float


def labels(metrics: Sequence[Mapping[str, object]]) -> list[str]:
    """A short name for each run: its policy, and as much more as it takes to tell the runs apart."""
    names = [str(one["policy"]) for one in metrics]
    for aspect in ("placement", "cluster", "trace", "parameters"):
        for name in sorted({name for name in names if names.count(name) > 1}):
            twins = [i for i, other in enumerate(names) if other == name]
            told = _apart([metrics[i].get(aspect) for i in twins])
            for i, words in zip(twins, told, strict=True):
                names[i] = f"{name}, {words}" if words else name
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[i] = f"{name} #{seen[name]}"
    return names


def cumulative(values: Floats, *, of: int, floor: float = 0.0, points: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """The cumulative distribution of the known `values` as shares `of` all jobs: where it steps, and to which share.

    Values below `floor` are drawn at it (a logarithmic axis has no zero); from there on the curve is exact. Jobs that
    have no value (unfinished) keep the curve below 1.
    """
    known = np.sort(values[np.isfinite(values)])
    if not len(known) or not of:
        return np.empty(0), np.empty(0)
    ranks = np.arange(len(known))
    if len(known) > points:
        # Half of the points lie evenly along the ranks, half along the logarithm of the tail, where few jobs span
        # decades.
        even = np.linspace(0, len(known) - 1, points // 2)
        tail = len(known) - np.geomspace(1, len(known), points // 2)
        ranks = np.unique(np.concatenate([even, tail]).round().astype(np.int64))
    at, reached = np.maximum(known[ranks], floor), (ranks + 1) / of
    last_of_equal = np.append(at[1:] > at[:-1], True)  # equal values are one step, not several at one place
    return at[last_of_equal], reached[last_of_equal]


def steps_of(timeline: pl.DataFrame, name: str, *, end_s: float | None = None) -> Steps:
    """A column of the timeline as a step function, to `end_s` if that is later than the last row."""
    time, values = column(timeline, "time_s"), column(timeline, name)
    if not len(time):
        return Steps(np.empty(0), np.empty(0))
    last = float(time[-1]) if end_s is None else max(float(time[-1]), end_s)
    return Steps(np.append(time, last), values)


def thin(steps: Steps, *, width_s: float | None = None, points: int = MAX_POINTS) -> Steps:
    """`steps` as time-weighted means over bins of `width_s`, unless it is short enough to be drawn as it is.

    The area is kept: each bin holds the exact integral of the function over it.
    """
    if len(steps.values) <= points:
        return steps
    begin, end = float(steps.edges[0]), float(steps.edges[-1])
    if end <= begin:
        return steps
    width = width_s or (end - begin) / points
    bins = max(int(np.ceil((end - begin) / width - 1e-9)), 1)
    edges = np.append(begin + width * np.arange(bins), end)
    running_area = np.concatenate([[0.0], np.cumsum(np.diff(steps.edges) * steps.values)])
    # np.interp wants increasing positions. Of rows at one instant only the last has a width, so it keeps the area.
    position, keep = np.unique(steps.edges[::-1], return_index=True)
    area_at = np.interp(edges, position, running_area[::-1][keep])
    return Steps(edges, np.diff(area_at) / np.diff(edges))


def class_limits(metrics: Mapping[str, object]) -> tuple[float, float]:
    """The limits of the job classes in a run: the most GPUs of a small job, and the duration of a long one."""
    small, short = metrics.get("small_max_gpus", SMALL_GPUS), metrics.get("short_below_s", SHORT_S)
    return float(cast(float, small)), float(cast(float, short))


@dataclass(frozen=True)
class ClassFigures:
    """The JCT of one class of jobs under each run; None where no such job completed."""

    job_class: JobClass
    jobs: int
    mean_s: list[float | None]
    median_s: list[float | None]


def by_class(results: Sequence[Result]) -> list[ClassFigures]:
    """Mean and median JCT per job class and run, in the order of JOB_CLASSES."""
    masks = [_masks(result) for result in results]
    times = [column(result.jobs, "jct_s") for result in results]
    return [
        ClassFigures(
            job_class,
            max((int(m[job_class].sum()) for m in masks), default=0),
            [mean_of(t[m[job_class]]) for m, t in zip(masks, times, strict=True)],
            [percentile_of(t[m[job_class]], 50) for m, t in zip(masks, times, strict=True)],
        )
        for job_class in JOB_CLASSES
    ]


def account(metrics: Mapping[str, object]) -> dict[str, float]:
    """The GPU-seconds of a run by what became of them, keyed as ACCOUNT_PARTS."""
    return {part: float(cast(float, metrics.get(f"{part}_gpu_seconds") or 0.0)) for part in ACCOUNT_PARTS}


def spans(events: pl.DataFrame) -> list[Span]:
    """The life of each job, from its events: waiting until it starts, running, suspended between."""
    state_after = {"submit": WAITING, "start": RUNNING, "resume": RUNNING, "suspend": SUSPENDED, "finish": ""}
    open_since: dict[int, tuple[str, float]] = {}
    lives: list[Span] = []
    for time_s, job, kind in events.select("time_s", "job", pl.col("kind").cast(pl.String)).iter_rows():
        if kind not in state_after:  # a promotion, a demotion or a migration does not change whether a job runs
            continue
        state, since = open_since.pop(job, ("", time_s))
        if state and time_s > since:
            lives.append(Span(job, state, since, time_s))
        if state_after[kind]:
            open_since[job] = (state_after[kind], time_s)
    end_s = float(cast(float, events["time_s"].max())) if events.height else 0.0
    lives += [Span(job, state, since, end_s) for job, (state, since) in open_since.items() if end_s > since]
    return sorted(lives, key=lambda span: (span.job, span.begin_s))


def why_no_gantt(results: Sequence[Result]) -> str:
    """Why the jobs' timeline is left out; empty if it can be drawn."""
    most = max((result.jobs.height for result in results), default=0)
    if most > MAX_GANTT_JOBS:
        return (
            f"A timeline of single jobs is drawn for runs of up to {MAX_GANTT_JOBS} jobs; this one has {most:,}. "
            f"Use --limit {MAX_GANTT_JOBS} to look at the first {MAX_GANTT_JOBS}."
        )
    if any(result.events.height > MAX_GANTT_SPANS for result in results):
        return f"The jobs change state more than {MAX_GANTT_SPANS:,} times here: too often to be drawn one by one."
    return ""


def first_submit(results: Sequence[Result]) -> float:
    """The origin of all time axes."""
    known = [submit for r in results if np.isfinite(submit := _extreme(r.jobs, "submit_s", np.min))]
    return min(known, default=0.0)


def last_instant(results: Sequence[Result]) -> float:
    """The end of all time axes: the last finish or the last step of any run."""
    ends = [_extreme(r.jobs, "finish_s", np.max) for r in results]
    ends += [_extreme(r.timeline, "time_s", np.max) for r in results]
    return max((end for end in ends if np.isfinite(end)), default=first_submit(results))


def _masks(result: Result) -> dict[JobClass, np.ndarray]:
    small, short = class_limits(result.metrics)
    return class_masks(result.jobs, small_gpus=small, short_s=short)


def _extreme(frame: pl.DataFrame, name: str, pick: Callable[[Floats], Any]) -> float:
    values = column(frame, name)
    known = values[np.isfinite(values)]
    return float(pick(known)) if len(known) else float("nan")


def _apart(values: Sequence[object]) -> list[str]:
    """What tells the runs apart: the settings that differ, or the words; empty texts if all agree."""
    if all(value == values[0] for value in values):
        return [""] * len(values)
    if not any(isinstance(value, Mapping) for value in values):
        return ["" if value is None else str(value) for value in values]
    settings = [cast(Mapping[str, object], value or {}) for value in values]
    keys = sorted({key for one in settings for key in one if any(one.get(key) != other.get(key) for other in settings)})
    return [", ".join(f"{key}={one[key]}" for key in keys if key in one) for one in settings]
