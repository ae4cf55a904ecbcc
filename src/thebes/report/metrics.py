"""The figures of one run, from its frames: what `--json` holds, what the tables print and what the report draws.

Definitions are those of the literature: JCT is finish minus submit; makespan is the last finish minus the first submit;
utilisation is useful GPU-seconds over the GPU-seconds that the cluster had during the makespan; percentiles interpolate
linearly. Job classes are Tiresias's bins (Gu et al., NSDI'19): small or large by GPUs, short or long by duration.
Finish-time fairness (rho) is Themis's: see thebes.report.fairness.
Sums are exactly rounded (`math.fsum`), so a figure depends neither on row order nor on the machine that added it up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from thebes.model.arrays import Floats
from thebes.report.fairness import rho_by_tenant, rho_of

Value = str | int | float | Mapping[str, object] | Sequence[Mapping[str, object]] | None
RunMetrics = dict[str, Value]

# The contract of `--json` is that these keys come first, in this order.
REQUIRED_KEYS = (
    "policy",
    "placement",
    "trace",
    "cluster",
    "jobs",
    "completed",
    "avg_jct",
    "median_jct",
    "p95_jct",
    "p99_jct",
    "max_jct",
    "makespan",
    "avg_queue_delay",
    "gpu_utilization",
    "preemptions",
    "promotions",
    "migrations",
    "useful_gpu_seconds",
    "overhead_gpu_seconds",
    "lost_gpu_seconds",
    "idle_held_gpu_seconds",
    "events",
    "wall_seconds",
)

SMALL_GPUS = 4.0  # a job that asks for at most this many GPUs is small
TENANTS_NAMED = 20  # of so many organisations, the worst off, the rho is told by name
SHORT_S = 800.0  # a job that runs for less than this is short (the mean duration of Tiresias's own workload)


@dataclass(frozen=True)
class JobClass:
    """One of the four bins; `key` names it in JSON, `label` names it to people."""

    key: str
    label: str
    small: bool
    short: bool


JOB_CLASSES = (
    JobClass("small_short", "Small, short", small=True, short=True),
    JobClass("small_long", "Small, long", small=True, short=False),
    JobClass("large_short", "Large, short", small=False, short=True),
    JobClass("large_long", "Large, long", small=False, short=False),
)


def summarise(
    *,
    policy: str,
    placement: str,
    trace: str,
    cluster: str,
    total_gpus: int,
    jobs: pl.DataFrame,
    events: int,
    wall_seconds: float,
    timeline: pl.DataFrame | None = None,
    parameters: Mapping[str, object] | None = None,
    perf: str | None = None,
    small_gpus: float = SMALL_GPUS,
    short_s: float = SHORT_S,
) -> RunMetrics:
    """The metrics of one run, in the key order of `--json`.

    Times are averaged over the jobs that completed; GPU-seconds are added up over all jobs. A figure that needs a
    completed job is None when there is none. `timeline`, where given, yields the average and the largest queue length
    and how long GPUs idled that waiting jobs had asked for.
    """
    jct = column(jobs, "jct_s")
    done = np.isfinite(jct)
    jct = jct[done]
    queue_delay = column(jobs, "queue_delay_s")[done]
    first_wait = column(jobs, "first_wait_s")[done]
    slowdown = _slowdown(jct, column(jobs, "duration_s")[done])
    makespan = _makespan(column(jobs, "submit_s"), column(jobs, "finish_s"))
    useful = total(column(jobs, "useful_gpu_s"))
    overhead = total(column(jobs, "overhead_gpu_s"))
    lost = total(column(jobs, "lost_gpu_s"))
    idle_held = total(column(jobs, "idle_held_gpu_s"))
    capacity = None if makespan is None else total_gpus * makespan
    avg_waiting, max_waiting = _queue_length(timeline)

    metrics: RunMetrics = {
        "policy": policy,
        "placement": placement,
        "trace": trace,
        "cluster": cluster,
        "jobs": jobs.height,
        "completed": int(done.sum()),
        "avg_jct": mean(jct),
        "median_jct": percentile(jct, 50),
        "p95_jct": percentile(jct, 95),
        "p99_jct": percentile(jct, 99),
        "max_jct": percentile(jct, 100),
        "makespan": makespan,
        "avg_queue_delay": mean(queue_delay),
        "gpu_utilization": useful / capacity if capacity else None,
        "preemptions": _count(jobs, "preemptions"),
        "promotions": _count(jobs, "promotions"),
        "migrations": _count(jobs, "migrations"),
        "useful_gpu_seconds": useful,
        "overhead_gpu_seconds": overhead,
        "lost_gpu_seconds": lost,
        "idle_held_gpu_seconds": idle_held,
        "events": int(events),
        "wall_seconds": float(wall_seconds),
        # These are beyond the contract, but their order is kept too, so that two files can be compared line by line.
        "demotions": _count(jobs, "demotions"),
        "total_gpus": int(total_gpus),
        "unused_gpu_seconds": _unused(capacity, (useful, overhead, lost, idle_held)),
        "median_queue_delay": percentile(queue_delay, 50),
        "p95_queue_delay": percentile(queue_delay, 95),
        "avg_first_wait": mean(first_wait),
        "avg_slowdown": mean(slowdown),
        "median_slowdown": percentile(slowdown, 50),
        "avg_waiting_jobs": avg_waiting,
        "max_waiting_jobs": max_waiting,
    }
    metrics |= _fairness(jobs, total_gpus) | _placement_figures(jobs, useful, timeline, total_gpus, capacity)
    for job_class, members in class_masks(jobs, small_gpus=small_gpus, short_s=short_s).items():
        times = column(jobs, "jct_s")[members & done]
        metrics[f"jobs_{job_class.key}"] = int(members.sum())
        metrics[f"avg_jct_{job_class.key}"] = mean(times)
        metrics[f"median_jct_{job_class.key}"] = percentile(times, 50)
    metrics["small_max_gpus"] = float(small_gpus)
    metrics["short_below_s"] = float(short_s)
    if models := _models(jobs):
        metrics["models"] = models
    if perf is not None:
        metrics["perf"] = perf
    if parameters is not None:
        metrics["parameters"] = dict(parameters)
    return metrics


def to_json(metrics: Mapping[str, Value] | Sequence[Mapping[str, Value]]) -> str:
    """Strict JSON (RFC 8259), the same bytes for the same figures: keys keep their order, nested ones are sorted.

    JSON has no NaN and no infinity: an undefined figure becomes null, an infinite parameter the word "inf".
    """
    plain = [_top_level(one) for one in metrics] if isinstance(metrics, Sequence) else _top_level(metrics)
    return json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def class_masks(
    jobs: pl.DataFrame, *, small_gpus: float = SMALL_GPUS, short_s: float = SHORT_S
) -> dict[JobClass, npt.NDArray[np.bool_]]:
    """Which rows of `jobs` belong to which class; every job with a known duration is in exactly one."""
    small = column(jobs, "gpus") <= small_gpus
    duration = column(jobs, "duration_s")
    known, short = np.isfinite(duration), duration < short_s
    return {c: known & (small == c.small) & (short == c.short) for c in JOB_CLASSES}


def column(frame: pl.DataFrame, name: str) -> Floats:
    """A column as floats, null as NaN."""
    return frame.get_column(name).cast(pl.Float64).fill_null(float("nan")).to_numpy()


def total(values: Floats) -> float:
    """The exactly rounded sum of the known values."""
    return math.fsum(values[np.isfinite(values)].tolist())


def mean(values: Floats) -> float | None:
    """The average of the known values; None if there are none."""
    known = values[np.isfinite(values)]
    return math.fsum(known.tolist()) / len(known) if len(known) else None


def percentile(values: Floats, percent: float) -> float | None:
    """The percentile of the known values by linear interpolation; None if there are none."""
    known = values[np.isfinite(values)]
    return float(np.percentile(known, percent)) if len(known) else None


def _makespan(submit: Floats, finish: Floats) -> float | None:
    finished = finish[np.isfinite(finish)]
    return float(finished.max() - np.nanmin(submit)) if len(finished) else None


def _slowdown(jct: Floats, duration: Floats) -> Floats:
    # A job of no length has no slowdown, because any wait would make it infinite.
    known = duration > 0
    return jct[known] / duration[known]


def _unused(capacity: float | None, held: Sequence[float]) -> float | None:
    if capacity is None:
        return None
    unused = math.fsum((capacity, *(-part for part in held)))
    # A full cluster leaves a rounding error of either sign. A larger one below zero is a real fault (or comes from jobs
    # that still held GPUs after the last finish) and must stay visible.
    return 0.0 if abs(unused) <= 1e-9 * capacity else unused


def _queue_length(timeline: pl.DataFrame | None) -> tuple[float | None, int | None]:
    """The time-weighted average and the largest number of waiting jobs."""
    if timeline is None or timeline.height < 2:
        return None, None
    time, waiting = column(timeline, "time_s"), column(timeline, "waiting_jobs")
    span = float(time[-1] - time[0])
    area = math.fsum((np.diff(time) * waiting[:-1]).tolist())
    return (area / span if span > 0 else None), int(waiting.max())


def _fairness(jobs: pl.DataFrame, total_gpus: int) -> RunMetrics:
    rho = rho_of(jobs, total_gpus)
    tenants = rho_by_tenant(jobs, rho)
    worst = sorted(tenants, key=lambda tenant: (-tenants[tenant], tenant))[:TENANTS_NAMED]
    return {
        "max_rho": percentile(rho, 100),
        "mean_rho": mean(rho),
        "median_rho": percentile(rho, 50),
        "p95_rho": percentile(rho, 95),
        "tenants": jobs["tenant"].fill_null("").n_unique(),
        "max_rho_tenant": max(tenants.values(), default=None),
        "rho_by_tenant": {tenant: tenants[tenant] for tenant in worst},
    }


def _placement_figures(
    jobs: pl.DataFrame, useful: float, timeline: pl.DataFrame | None, total_gpus: int, capacity: float | None
) -> RunMetrics:
    """What placement and network cost: exposed communication, gangs spread too far, GPUs idle though wanted."""
    gpus, ran_s = column(jobs, "gpus"), column(jobs, "ran_s")
    ran_gpu_s = total(gpus * ran_s)
    spread = total(column(jobs, "spread_gpu_s"))
    wanted = _wanted_but_idle(timeline, total_gpus)
    return {
        "communication_share": total(gpus * column(jobs, "comm_s")) / ran_gpu_s if ran_gpu_s > 0 else None,
        "spread_gpu_seconds": spread,
        "spread_share": spread / useful if useful > 0 else None,
        "idle_wanted_gpu_seconds": wanted,
        "fragmentation": wanted / capacity if wanted is not None and capacity else None,
        "resizes": _count(jobs, "resizes"),
        "reconfigurations": _count(jobs, "reconfigurations"),
    }


def _wanted_but_idle(timeline: pl.DataFrame | None, total_gpus: int) -> float | None:
    """GPU-seconds that no job held while waiting jobs asked for as many: lost to fragments, gangs and restraint."""
    if timeline is None or timeline.height < 2:
        return None
    idle = np.maximum(total_gpus - column(timeline, "busy_gpus"), 0.0)
    wanted = np.minimum(idle, column(timeline, "waiting_gpus"))
    return math.fsum((np.diff(column(timeline, "time_s")) * wanted[:-1]).tolist())


def _models(jobs: pl.DataFrame) -> dict[str, int]:
    """How many jobs train each model; where the trace names no models, this shows the assignment by the seed."""
    return {
        str(model): int(count) for model, count in jobs["model"].drop_nulls().value_counts().sort("model").iter_rows()
    }


def _count(jobs: pl.DataFrame, name: str) -> int:
    return int(jobs.get_column(name).sum() or 0)


def _top_level(metrics: Mapping[str, Value]) -> dict[str, object]:
    return {key: _strict(value) for key, value in metrics.items()}


def _strict(value: object) -> object:
    """`value` in the types that JSON has."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _strict(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_strict(item) for item in value), key=str)
    return str(value)
