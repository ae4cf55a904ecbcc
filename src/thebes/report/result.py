"""What a simulation returns: three frames and the metrics, which can be read without the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from thebes.model.errors import UserError
from thebes.model.trace import Trace

# The frame holds event kinds as an Enum of these words. At one instant they are written in the order finish, demote and
# promote, submit, suspend, then start, resume, migrate, resize and reconfigure.
EVENT_KINDS = (
    "finish",
    "submit",
    "demote",
    "promote",
    "suspend",
    "start",
    "resume",
    "migrate",
    "resize",
    "reconfigure",
)


@dataclass(frozen=True)
class Result:
    """The outcome of one policy on one trace.

    `jobs`, a row per job in trace order:
        job_id, user, vc, model (String or null), tenant (String: vc, else user), gpus (Float64), submit_s, duration_s,
        first_start_s, finish_s, jct_s,
        queue_delay_s (all waits without GPUs added up), first_wait_s (the wait before the first start),
        preemptions, promotions, demotions, migrations, resizes, reconfigurations (Int64),
        useful_gpu_s, overhead_gpu_s, lost_gpu_s, idle_held_gpu_s (Float64),
        spread_gpu_s (Float64: the useful part on more nodes than needed),
        ran_s (Float64: running time, all holds), comm_s (Float64: the part of it in communication that compute does
        not hide), nodes_last (Int64: nodes of the last placement), speed_mean (Float64: work done per running second),
        rho (Float64: finish-time fairness, see thebes.report.fairness); where jobs have execution plans also
        plan_last (String), cpus_last (Int64: for each GPU), guaranteed (Boolean). Times of a job
        that did not finish are null.
    `events`, a row per event in time order:
        time_s (Float64), job (UInt32: row in `jobs`), kind (Enum EVENT_KINDS), gpus (Int32),
        nodes (Int32: nodes spanned, 0 if none), plan (String, only where jobs have execution plans).
    `timeline`, a step function (each row holds until the next):
        time_s (Float64), busy_gpus, waiting_jobs, running_jobs (Int64),
        waiting_gpus (Int64: GPUs asked for by waiting jobs).
    `metrics`: the figures of `--json`, in its key order (see thebes.report.metrics).
    """

    policy: str
    placement: str
    cluster: str
    total_gpus: int
    trace: Trace
    jobs: pl.DataFrame
    events: pl.DataFrame
    timeline: pl.DataFrame
    metrics: dict[str, Any]
    notes: tuple[str, ...] = ()


def write_events(result: Result, path: Path) -> None:
    """Write every event as a table, with the job's own id. The file's ending chooses the format: .parquet or .csv."""
    ids = result.jobs["job_id"].gather(result.events["job"]).alias("job_id")
    table = result.events.with_columns(ids).select(
        "time_s", "job_id", "kind", "gpus", "nodes", *(["plan"] if "plan" in result.events.columns else [])
    )
    check_events_ending(path)
    try:
        table.write_csv(path) if path.suffix == ".csv" else table.write_parquet(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror or error}", hint="choose another place") from None


def check_events_ending(path: Path) -> None:
    if path.suffix not in (".parquet", ".csv"):
        raise UserError(
            f"{path}: events are written as .parquet or .csv", hint="choose a name that ends in one of them"
        )
