"""`tiresias-compat`: a Trace and a Cluster become input of the released simulator, and its run becomes a Result."""

from __future__ import annotations

import time

import numpy as np
import polars as pl
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.errors import UserError
from thebes.model.trace import Trace
from thebes.policy.orders.tiresias_compat import TiresiasCompat
from thebes.report.fairness import rho_of
from thebes.report.metrics import summarise
from thebes.report.result import EVENT_KINDS, Result
from thebes.sim.released_tiresias import EVENTS, ClusterShape, ReleasedRun, run_released

# What the release's own cluster files give a node; it is used for cluster notations that do not say.
STOCK_CPUS, STOCK_MEMORY_GIB = 128, 256
PLACEMENTS = ("count", "yarn")


def run_compat(trace: Trace, cluster: Cluster, policy: TiresiasCompat, placement: str, limit: int | None) -> Result:
    """Run one published schedule in whole seconds. Jobs that the release leaves unfinished stay so, with a note."""
    if placement not in PLACEMENTS:
        raise UserError(
            f"tiresias-compat knows the placements {' and '.join(PLACEMENTS)}, not '{placement}'",
            hint="leave --placement out, or write --placement yarn",
        )
    jobs = trace.jobs if limit is None else trace.jobs.head(limit)
    gpus = np.ceil(jobs["num_gpus"].to_numpy()).astype(np.int64)
    submit_s, duration_s = (np.rint(jobs[name].to_numpy()).astype(np.int64) for name in ("submit_time", "duration"))
    notes = list(trace.notes)
    if (submit_s != jobs["submit_time"].to_numpy()).any() or (duration_s != jobs["duration"].to_numpy()).any():
        notes.append("tiresias-compat counts whole seconds: times were rounded")
    began = time.perf_counter()
    outcome = run_released(
        gpus,
        submit_s,
        duration_s,
        shape=_shape(cluster),
        placement=placement,
        schedule=policy.schedule,
        variant=policy.variant,
        queue_limits=[int(limit) for limit in policy.queue_limits],
    )
    wall_seconds = time.perf_counter() - began
    if outcome.stuck:
        notes.append(
            f"{len(outcome.stuck)} of {len(gpus)} jobs never finished: the released simulator stops without a word"
        )
    frame = _jobs_frame(jobs, gpus, submit_s, duration_s, outcome)
    frame = frame.with_columns(pl.Series("rho", rho_of(frame, cluster.total_gpus)).fill_nan(None))
    timeline = _timeline(gpus, submit_s, outcome)
    metrics = summarise(
        policy=policy.label,
        placement=placement,
        trace=trace.name,
        cluster=cluster.name,
        total_gpus=cluster.total_gpus,
        jobs=frame,
        events=len(outcome.event_job) + len(gpus),
        wall_seconds=wall_seconds,
        timeline=timeline,
        parameters={
            "schedule": policy.schedule,
            "variant": policy.variant,
            "queue_limits": ",".join(f"{limit:g}" for limit in policy.queue_limits),
        },
        perf="ideal",
    )
    return Result(
        policy=policy.label,
        placement=placement,
        cluster=cluster.name,
        total_gpus=cluster.total_gpus,
        trace=trace,
        jobs=frame,
        events=_events_frame(gpus, submit_s, outcome),
        timeline=timeline,
        metrics=metrics,
        notes=tuple(notes),
    )


def _shape(cluster: Cluster) -> ClusterShape:
    nodes_per_rack = np.bincount(cluster.node_rack)
    if len(cluster.kinds) > 1 or len(set(nodes_per_rack.tolist())) > 1:
        raise UserError(
            f"tiresias-compat knows only equal nodes in equal racks, not {cluster.describe()}",
            hint="use a short form such as 8x8, or a Tiresias CSV",
        )
    kind = next(iter(cluster.kinds))
    return ClusterShape(
        num_switch=cluster.num_racks,
        nodes_per_switch=int(nodes_per_rack[0]),
        gpus_per_node=kind.gpus,
        cpus_per_node=kind.cpus or STOCK_CPUS,
        mem_per_node=int(kind.memory_gib or STOCK_MEMORY_GIB),
    )


def _jobs_frame(
    jobs: pl.DataFrame,
    gpus: NDArray[np.int64],
    submit_s: NDArray[np.int64],
    duration_s: NDArray[np.int64],
    outcome: ReleasedRun,
) -> pl.DataFrame:
    def known(name: str, values: NDArray[np.int64], valid: NDArray[np.bool_]) -> pl.Series:
        return pl.Series(name, np.where(valid, values.astype(np.float64), np.nan)).fill_nan(None)

    finished, started = outcome.finish_s >= 0, outcome.first_start_s >= 0
    jct_s = outcome.finish_s - submit_s
    nothing, never = np.zeros(len(gpus)), np.zeros(len(gpus), dtype=np.int64)
    return jobs.select("job_id", "user", "vc", "model").with_columns(
        pl.coalesce("vc", "user", pl.lit("")).alias("tenant"),
        pl.Series("gpus", gpus.astype(np.float64)),
        pl.Series("submit_s", submit_s.astype(np.float64)),
        pl.Series("duration_s", duration_s.astype(np.float64)),
        known("first_start_s", outcome.first_start_s, started),
        known("finish_s", outcome.finish_s, finished),
        known("jct_s", jct_s, finished),
        known("queue_delay_s", jct_s - outcome.executed_s, finished),
        known("first_wait_s", outcome.first_start_s - submit_s, started),
        pl.Series("preemptions", outcome.preemptions),
        pl.Series("promotions", outcome.promotions),
        pl.Series("demotions", outcome.demotions),
        pl.Series("migrations", never),
        pl.Series("resizes", never),
        pl.Series("reconfigurations", never),
        pl.Series("useful_gpu_s", (outcome.executed_s * gpus).astype(np.float64)),
        *(pl.Series(name, nothing) for name in ("overhead_gpu_s", "lost_gpu_s", "idle_held_gpu_s", "spread_gpu_s")),
        pl.Series("ran_s", outcome.executed_s.astype(np.float64)),
        pl.Series("comm_s", nothing),
        pl.Series("nodes_last", never),
        pl.Series("speed_mean", np.where(outcome.executed_s > 0, 1.0, np.nan)),
    )


def _events_frame(gpus: NDArray[np.int64], submit_s: NDArray[np.int64], outcome: ReleasedRun) -> pl.DataFrame:
    rows = np.concatenate((outcome.event_job, np.arange(len(gpus))))
    times = np.concatenate((outcome.event_time_s, submit_s))
    codes = np.array([EVENT_KINDS.index(kind) for kind in EVENTS])
    kinds = np.concatenate((codes[outcome.event_kind], np.full(len(gpus), EVENT_KINDS.index("submit"))))
    names = pl.Series("kind", EVENT_KINDS, dtype=pl.Enum(EVENT_KINDS))
    # At one instant, finishes come before submissions, and submissions before starts.
    turn = np.where(kinds == EVENT_KINDS.index("finish"), 0, np.where(kinds == EVENT_KINDS.index("submit"), 1, 2))
    order = np.lexsort((turn, times))
    return pl.DataFrame(
        {
            "time_s": times[order].astype(np.float64),
            "job": rows[order].astype(np.uint32),
            "kind": names.gather(kinds[order].astype(np.uint32)),
            "gpus": gpus[rows[order]].astype(np.int32),
            "nodes": np.zeros(len(rows), dtype=np.int32),
        }
    )


def _timeline(gpus: NDArray[np.int64], submit_s: NDArray[np.int64], outcome: ReleasedRun) -> pl.DataFrame:
    """The timeline made from events: starts and resumes take GPUs, suspends and finishes give them back."""
    taken = np.isin(outcome.event_kind, [EVENTS.index("start"), EVENTS.index("resume")]).astype(np.int64)
    given = np.isin(outcome.event_kind, [EVENTS.index("suspend"), EVENTS.index("finish")]).astype(np.int64)
    ended = (outcome.event_kind == EVENTS.index("finish")).astype(np.int64)
    width = gpus[outcome.event_job]
    times = np.concatenate((outcome.event_time_s, submit_s))
    changes = pl.DataFrame(
        {
            "time_s": times.astype(np.float64),
            "busy_gpus": np.concatenate(((taken - given) * width, np.zeros(len(gpus), dtype=np.int64))),
            "waiting_jobs": np.concatenate((given - taken - ended, np.ones(len(gpus), dtype=np.int64))),
            "running_jobs": np.concatenate((taken - given, np.zeros(len(gpus), dtype=np.int64))),
            "waiting_gpus": np.concatenate(((given - taken - ended) * width, gpus)),
        }
    )
    steps = changes.group_by("time_s").sum().sort("time_s")
    return steps.with_columns(pl.exclude("time_s").cum_sum())
