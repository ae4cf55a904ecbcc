"""What really happened, in the shape of a simulation's result, as a row beside what policies would have done.

The figures are those of any run, by the same definitions, from the times at which the site's own scheduler started and
ended each job. But they come from another world, with nodes that failed, CPU jobs on the same nodes, and limits and
reservations that no export tells of. `CAVEAT` says so wherever they are shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from thebes.model.arrays import Floats
from thebes.model.cluster import Cluster
from thebes.model.trace import Trace
from thebes.report.fairness import rho_of
from thebes.report.metrics import summarise
from thebes.report.result import EVENT_KINDS, Result

LABEL = "(as it was)"
PLACEMENT = "the site's own"
CAVEAT = (
    f"{LABEL} is what the site's own scheduler did, by the recorded Start and End, on its real cluster with its "
    "limits, failures and CPU jobs. The policies are simulated with the recorded run times on a cluster where nothing "
    "fails."
)


@dataclass(frozen=True)
class _Runs:
    """Every start: its job, its beginning and end, and whether it was the job's first and its last."""

    job: NDArray[np.int64]
    start_s: Floats
    end_s: Floats
    first: NDArray[np.bool_]
    last: NDArray[np.bool_]


def actual(trace: Trace, runs: pl.DataFrame, cluster: Cluster) -> Result:
    """The outcome of a history. `runs` has the columns job (row of the trace), start_s and end_s, sorted by them."""
    known = _runs(runs)
    jobs = _jobs(trace, known, cluster.total_gpus)
    events = _events(jobs, known)
    timeline = _timeline(jobs, known)
    metrics = summarise(
        policy=LABEL,
        placement=PLACEMENT,
        trace=trace.name,
        cluster=cluster.name,
        total_gpus=cluster.total_gpus,
        jobs=jobs,
        events=events.height,
        wall_seconds=0.0,
        timeline=timeline,
    )
    return Result(
        policy=LABEL,
        placement=PLACEMENT,
        cluster=cluster.name,
        total_gpus=cluster.total_gpus,
        trace=trace,
        jobs=jobs,
        events=events,
        timeline=timeline,
        metrics=metrics,
        notes=(*trace.notes, CAVEAT),
    )


def _runs(frame: pl.DataFrame) -> _Runs:
    job = frame["job"].cast(pl.Int64).to_numpy()
    edge = job[1:] != job[:-1]
    return _Runs(
        job,
        frame["start_s"].cast(pl.Float64).to_numpy(),
        frame["end_s"].cast(pl.Float64).to_numpy(),
        np.concatenate(([True], edge)),
        np.concatenate((edge, [True])),
    )


def _jobs(trace: Trace, runs: _Runs, total_gpus: int) -> pl.DataFrame:
    frame = trace.jobs
    submit_s, gpus = frame["submit_time"].to_numpy(), frame["num_gpus"].to_numpy()
    duration_s = frame["duration"].to_numpy()
    held_s = np.bincount(runs.job, runs.end_s - runs.start_s, minlength=len(submit_s))
    start_s, finish_s = np.full(len(submit_s), np.nan), np.full(len(submit_s), np.nan)
    start_s[runs.job[runs.first]] = runs.start_s[runs.first]
    finish_s[runs.job[runs.last]] = runs.end_s[runs.last]
    earlier_s = frame["earlier_run_s"].to_numpy()
    none = np.zeros(len(submit_s), np.int64)
    columns = {
        "gpus": gpus,
        "submit_s": submit_s,
        "duration_s": duration_s,
        "first_start_s": start_s,
        "finish_s": finish_s,
        "jct_s": finish_s - submit_s,
        "queue_delay_s": np.maximum(finish_s - submit_s - held_s, 0.0),
        "first_wait_s": start_s - submit_s,
        "preemptions": frame["restarts"].cast(pl.Int64).to_numpy(),
        **dict.fromkeys(("promotions", "demotions", "migrations", "resizes", "reconfigurations"), none),
        "useful_gpu_s": gpus * duration_s,
        "overhead_gpu_s": np.zeros(len(gpus)),
        "lost_gpu_s": gpus * earlier_s,
        "idle_held_gpu_s": np.maximum(gpus * (held_s - duration_s - earlier_s), 0.0),  # Slurm had it suspended
        "spread_gpu_s": np.full(len(gpus), np.nan),
        "ran_s": duration_s + earlier_s,
        "comm_s": np.full(len(gpus), np.nan),
        "nodes_last": frame["num_nodes"].fill_null(0).to_numpy(),
        "speed_mean": np.ones(len(gpus)),
    }
    tenant = pl.coalesce(pl.col("vc"), pl.col("user"), pl.lit("")).alias("tenant")
    jobs = frame.select("job_id", "user", "vc", tenant, "model").with_columns(
        *(pl.Series(name, values).fill_nan(None) if values.dtype == np.float64 else pl.Series(name, values)
          for name, values in columns.items())
    )  # fmt: skip
    return jobs.with_columns(pl.Series("rho", rho_of(jobs, total_gpus)).fill_nan(None))


def _events(jobs: pl.DataFrame, runs: _Runs) -> pl.DataFrame:
    gpus, nodes = jobs["gpus"].to_numpy(), jobs["nodes_last"].to_numpy()
    everyone = np.arange(jobs.height)
    ends, starts = np.where(runs.last, "finish", "suspend"), np.where(runs.first, "start", "resume")
    job = np.concatenate((everyone, runs.job, runs.job))
    kind = np.concatenate((np.full(jobs.height, "submit"), starts, ends))
    holds = np.isin(kind, ("start", "resume"))
    return (
        pl.DataFrame(
            {
                "time_s": np.concatenate((jobs["submit_s"].to_numpy(), runs.start_s, runs.end_s)),
                "job": job.astype(np.uint32),
                "kind": pl.Series(kind).cast(pl.Enum(EVENT_KINDS)),
                "gpus": np.where(kind == "submit", 0, gpus[job]).astype(np.int32),
                "nodes": np.where(holds, nodes[job], 0).astype(np.int32),
            }
        ).sort("time_s", "kind", "job", maintain_order=True)  # an Enum sorts by the order of its words
    )


def _timeline(jobs: pl.DataFrame, runs: _Runs) -> pl.DataFrame:
    submit_s, gpus = jobs["submit_s"].to_numpy(), jobs["gpus"].to_numpy().astype(np.int64)
    of_run = gpus[runs.job]
    one, again = np.ones(len(runs.job), np.int64), (~runs.last).astype(np.int64)
    parts = (  # for each instant, the change of busy GPUs, waiting jobs, running jobs and waiting GPUs
        (submit_s, 0 * gpus, np.ones(len(gpus), np.int64), 0 * gpus, gpus),
        (runs.start_s, of_run, -one, one, -of_run),
        (runs.end_s, -of_run, again, -one, of_run * again),
    )
    changes = pl.DataFrame(
        {
            name: np.concatenate([part[place] for part in parts])
            for place, name in enumerate(("time_s", "busy_gpus", "waiting_jobs", "running_jobs", "waiting_gpus"))
        }
    )
    return changes.group_by("time_s").sum().sort("time_s").with_columns(pl.exclude("time_s").cum_sum())
