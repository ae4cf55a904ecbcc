"""Results to report on, from the smallest simulation that deserves the name: GPUs are counted, jobs go in list order.

It exists so that the report is tested on consistent frames (events, timeline and jobs that tell the same story) without
the simulator; a quantum turns it into a round robin, so that there are suspensions to show.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from thebes.model.trace import Trace
from thebes.report.metrics import summarise
from thebes.report.result import EVENT_KINDS, Result

OVERHEAD_S = 30.0  # what a resume costs here


def workload(jobs: int, *, seed: int = 1, gpus: int = 32, load: float = 2.2) -> pl.DataFrame:
    """Poisson arrivals, lognormal durations, powers of two of GPUs, at `load` of a cluster of `gpus`."""
    random = np.random.default_rng(seed)
    duration = np.round(random.lognormal(7.0, 1.3, jobs).clip(max=40_000), 1) + 10
    demand = random.choice([1, 1, 1, 2, 4, 8, 16], jobs).astype(float)
    span = float((duration * demand).sum()) / (load * gpus)
    submit = np.sort(np.round(random.uniform(0, span, jobs), 1))
    return pl.DataFrame(
        {"job_id": [f"job-{i}" for i in range(jobs)], "submit_time": submit, "duration": duration, "num_gpus": demand}
    )


def toy_result(
    trace: pl.DataFrame,
    *,
    policy: str = "fifo",
    gpus: int = 32,
    key: Callable[[float, float, float], float] = lambda submit, duration, demand: submit,
    quantum_s: float | None = None,
    name: str = "synthetic",
    placement: str = "count",
    parameters: dict[str, object] | None = None,
    notes: tuple[str, ...] = (),
) -> Result:
    """Run the jobs in the order of `key`, skipping those that do not fit; with a quantum, they also take turns."""
    submit, duration, demand = (trace[c].to_list() for c in ("submit_time", "duration", "num_gpus"))
    n = len(submit)
    order = [key(submit[i], duration[i], demand[i]) for i in range(n)]
    left, held, waited = list(duration), [0.0] * n, [0.0] * n
    since = list(submit)
    first: list[float | None] = [None] * n
    finish: list[float | None] = [None] * n
    preemptions = [0] * n
    events: list[tuple[float, int, str, int]] = []
    steps: list[tuple[float, int, int, int, int]] = []
    running: dict[int, float] = {}  # job: the instant at which it would finish
    waiting: set[int] = set()
    arrivals = sorted(range(n), key=lambda i: submit[i])
    at, now = 0, submit[arrivals[0]] if n else 0.0
    while at < n or running or waiting:
        candidates = [submit[arrivals[at]]] if at < n else []
        candidates += list(running.values())
        if quantum_s and waiting and running:
            candidates.append(now + quantum_s)
        now = min(candidates)
        for job in [j for j, end in running.items() if end <= now]:
            del running[job]
            finish[job] = now
            events.append((now, job, "finish", 0))
        while at < n and submit[arrivals[at]] <= now:
            job = arrivals[at]
            waiting.add(job)
            events.append((now, job, "submit", 0))
            at += 1
        before = set(running)
        wanted: set[int] = set()
        free = gpus
        ranked = sorted(before | waiting, key=lambda j: (order[j] + held[j] * (1e3 if quantum_s else 0), j))
        for job in ranked if quantum_s else [*sorted(before), *sorted(waiting, key=lambda j: (order[j], j))]:
            if demand[job] <= free:
                wanted.add(job)
                free -= int(demand[job])
        for job in sorted(before - wanted):
            left[job] = running.pop(job) - now
            held[job] = duration[job] - left[job]
            since[job] = now
            preemptions[job] += 1
            waiting.add(job)
            events.append((now, job, "suspend", 0))
        for job in sorted(wanted - before):
            waiting.discard(job)
            waited[job] += now - since[job]
            cost = OVERHEAD_S if first[job] is not None else 0.0
            events.append((now, job, "resume" if first[job] is not None else "start", int(demand[job])))
            first[job] = now if first[job] is None else first[job]
            running[job] = now + cost + left[job]
        busy = gpus - free
        steps.append((now, busy, len(waiting), len(running), int(sum(demand[j] for j in waiting))))
    jobs = _jobs_frame(trace, first, finish, waited, preemptions)
    timeline = pl.DataFrame(
        steps,
        schema={
            "time_s": pl.Float64,
            "busy_gpus": pl.Int64,
            "waiting_jobs": pl.Int64,
            "running_jobs": pl.Int64,
            "waiting_gpus": pl.Int64,
        },
        orient="row",
    )
    return result_of(
        jobs,
        timeline,
        events,
        policy=policy,
        gpus=gpus,
        name=name,
        placement=placement,
        parameters=parameters,
        notes=notes,
        trace=trace,
    )


def result_of(
    jobs: pl.DataFrame,
    timeline: pl.DataFrame,
    events: list[tuple[float, int, str, int]],
    *,
    policy: str,
    gpus: int,
    name: str,
    placement: str,
    parameters: dict[str, object] | None,
    notes: tuple[str, ...],
    trace: pl.DataFrame,
) -> Result:
    frame = pl.DataFrame(
        [(*event, int(event[3] > 0)) for event in events],
        schema={
            "time_s": pl.Float64,
            "job": pl.UInt32,
            "kind": pl.Enum(EVENT_KINDS),
            "gpus": pl.Int32,
            "nodes": pl.Int32,
        },
        orient="row",
    )
    metrics = summarise(
        policy=policy,
        placement=placement,
        trace=name,
        cluster="4x8",
        total_gpus=gpus,
        jobs=jobs,
        events=frame.height,
        wall_seconds=0.5,
        timeline=timeline,
        parameters=parameters,
        perf="ideal",
    )
    return Result(
        policy=policy,
        placement=placement,
        cluster="4x8",
        total_gpus=gpus,
        trace=Trace(name=name, jobs=trace),
        jobs=jobs,
        events=frame,
        timeline=timeline,
        metrics=metrics,  # type: ignore[arg-type]
        notes=notes,
    )


def _jobs_frame(
    trace: pl.DataFrame,
    first: list[float | None],
    finish: list[float | None],
    waited: list[float],
    preemptions: list[int],
) -> pl.DataFrame:
    submit, duration, demand = (trace[c].to_numpy() for c in ("submit_time", "duration", "num_gpus"))
    started, ended = np.array(first, dtype=float), np.array(finish, dtype=float)
    held = (ended - submit - np.array(waited)) * demand
    useful = duration * demand
    # The toy loses no work: what a job held beyond its length was the cost of its resumes.
    overhead = np.clip(held - useful, 0, None)
    zeros = np.zeros(trace.height, dtype=np.int64)
    return pl.DataFrame(
        {
            "job_id": trace["job_id"],
            "user": pl.Series([None] * trace.height, dtype=pl.String),
            "vc": pl.Series([None] * trace.height, dtype=pl.String),
            "model": pl.Series([None] * trace.height, dtype=pl.String),
            "tenant": pl.Series([f"org-{row % 3}" for row in range(trace.height)], dtype=pl.String),
            "gpus": demand,
            "submit_s": submit,
            "duration_s": duration,
            "first_start_s": started,
            "finish_s": ended,
            "jct_s": ended - submit,
            "queue_delay_s": np.array(waited, dtype=float),
            "first_wait_s": started - submit,
            "preemptions": np.array(preemptions, dtype=np.int64),
            "promotions": zeros,
            "demotions": zeros,
            "migrations": zeros,
            "resizes": zeros,
            "reconfigurations": zeros,
            "useful_gpu_s": useful,
            "overhead_gpu_s": overhead,
            "lost_gpu_s": np.zeros(trace.height),
            "idle_held_gpu_s": np.zeros(trace.height),
            "spread_gpu_s": np.zeros(trace.height),
            "ran_s": duration,
            "comm_s": 0.1 * duration,
            "nodes_last": zeros + 1,
            "speed_mean": np.ones(trace.height),
        }
    )


# Twelve names that people will compare, as orders that the toy can play.
TOY_POLICIES: dict[str, dict[str, object]] = {
    "fifo": {},
    "srtf": {"key": lambda s, d, g: d},
    "tiresias-l": {"key": lambda s, d, g: 0.0, "quantum_s": 900.0},
    "tiresias-g": {"key": lambda s, d, g: d / 50, "quantum_s": 1200.0},
    "srsf": {"key": lambda s, d, g: d * g},
    "sjf": {"key": lambda s, d, g: g},
    "lpjf": {"key": lambda s, d, g: s / 3},
    "backfill": {"key": lambda s, d, g: s + g},
    "las": {"key": lambda s, d, g: g, "quantum_s": 600.0},
    "gittins": {"key": lambda s, d, g: d * g, "quantum_s": 1800.0},
    "multi-dlas": {"key": lambda s, d, g: s / 10, "quantum_s": 3000.0},
    "shortest-expected": {"key": lambda s, d, g: d + 3 * s},
}


def toy_results(count: int, *, jobs: int = 80, seed: int = 3, load: float = 2.2) -> list[Result]:
    trace = workload(jobs, seed=seed, load=load)
    return [toy_result(trace, policy=name, **setting) for name, setting in list(TOY_POLICIES.items())[:count]]  # type: ignore[arg-type]
