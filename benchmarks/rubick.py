"""`make bench-rubick`: Rubick and its baselines on the published 406-job workload, 64 GPUs, honest restarts.

    python -m benchmarks.rubick [--workloads base,bp,mt] [--restarts A;B] [--policies A,B] [--limit N] [--out FILE]
    python -m benchmarks.rubick --tune        the baselines' parameters on what Rubick's defaults were chosen on

Every job has to do its number of steps, whatever its plan; times are those measured on A800 GPUs where there are any
(`--perf plans`). Writes benchmarks/results/rubick.json unless told to do less than everything. A run that leaves jobs
unfinished is an error. The workload with guaranteed jobs is ours: the published one is not available to us.

Some of Rubick's defaults were chosen on base, bp and shuffled copies of base (seeds 0 to 2). So there are also shuffled
copies that nobody has chosen anything on, and beside each baseline as it comes one with parameters chosen likewise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from benchmarks.run import ROOT, about_this_run
from thebes import Policy, Trace, UserError, simulate
from thebes.model.parameters import parameters_of
from thebes.perf.plans.speed import Plans
from thebes.placement import Consolidate
from thebes.policy import find, registry
from thebes.report import units
from thebes.sim.costs import Costs
from thebes.sim.setup import prepare
from thebes.trace import read
from thebes.trace.cluster_file import read_cluster

CLUSTER = ROOT / "examples" / "rubick" / "a800.toml"
RESULT = ROOT / "benchmarks" / "results" / "rubick.json"
TRUTH = Plans()  # as measured, where anybody has measured
SEED = 406
GUARANTEED, QUOTA = 194, 48  # of 406 jobs, as published; GPUs, ours: the largest gang of the workload just fits

RUBICK, BASELINES = "rubick", ("sia-like", "synergy-like", "antman-like")
VARIANTS = ("rubick-e", "rubick-r", "rubick-n")
ORIENTATION = ("fifo", "tiresias-l", "srtf")  # they keep GPUs and plans; srtf knows every run time
POLICIES = (RUBICK, *VARIANTS, *BASELINES, *ORIENTATION)
PAPER = {"avg_jct": 3.2, "makespan": 1.4}  # "up to", against the state of the art, on 64 GPUs (abstract)
PAPER_WORDS = {"avg_jct": "average JCT", "makespan": "makespan"}
FULL_SPEED = 0.99  # a guaranteed job that ran slower than this part of what it asked for was let down


@dataclass(frozen=True)
class Workload:
    """One of the three workloads."""

    name: str
    place: str
    about: str


WORKLOADS = (
    Workload("base", "rubick-406", "workload-base.csv as published; most plans are the fastest of what was measured"),
    Workload("bp", "rubick-406-bp", "workload-bp.csv as published; the same jobs with slower plans"),
    Workload(
        "mt",
        "rubick-406",
        f"ours: {GUARANTEED} jobs of base, drawn by seed {SEED}, are guaranteed and of tenant A (quota {QUOTA} GPUs), "
        "the others best effort and of tenant B",
    ),
)
# Chosen by --tune: the least mean of the average JCT over what Rubick's defaults were chosen on.
TUNED: dict[str, dict[str, float]] = {"sia-like": {"unserved": 2.0, "p": -0.25}}  # synergy-like: as it comes
GRID: dict[str, list[dict[str, float]]] = {
    "sia-like": [{"unserved": u, "p": p} for u in (1.1, 1.5, 2.0, 5.0) for p in (-0.25, -0.5, -1.0)],
    "synergy-like": [{"round_s": s} for s in (30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)],
}
SEEN_SEEDS, UNSEEN_SEEDS = range(3), range(1001, 1006)
JITTER_S = 900.0
RESTARTS: dict[str, Costs] = {
    "62 s": Costs(),  # 12 s to save and 50 s to restore: the usual of Thebes, from the Tiresias testbed
    "78 s": Costs(suspend_s=12.0, resume_s=66.0),  # the average of Rubick's paper, as far as we know
    "260 s, first start too": Costs(start_s=260.0, suspend_s=0.0, resume_s=260.0),  # the published simulator's
}


def workload(work: Workload) -> Trace:
    """Its jobs, each with as much to do as its steps take under the plan that it asks for."""
    return with_steps(with_guarantees(read(work.place)) if work.name == "mt" else read(work.place))


def with_guarantees(trace: Trace, count: int = GUARANTEED, seed: int = SEED) -> Trace:
    """So many jobs drawn at random become guaranteed ones of tenant A."""
    chosen = np.zeros(len(trace), dtype=np.int64)
    chosen[np.random.default_rng(seed).permutation(len(trace))[:count]] = 1
    columns = (
        pl.Series("guaranteed", chosen),
        pl.Series("vc", ["A" if guaranteed else "B" for guaranteed in chosen.tolist()]),
    )
    return replace(trace, jobs=trace.jobs.with_columns(*columns))


def with_steps(trace: Trace) -> Trace:
    """Run times from steps: the files tell the same seconds whatever the plan, but a step is longer under a slower one.

    What takes less than a step in the files takes one.
    """
    iteration_s = prepare(trace, read_cluster(CLUSTER), Consolidate(), TRUTH, seed=0).profiles.full_s
    return replace(trace, jobs=trace.jobs.with_columns((pl.col("steps") * pl.Series(iteration_s)).alias("duration")))


def shuffled(trace: Trace, seed: int) -> Trace:
    """The same jobs in another order, at the same instants give or take a quarter of an hour."""
    rng = np.random.default_rng(seed)
    submit_s = np.sort(trace.jobs["submit_time"].to_numpy() + rng.uniform(-JITTER_S, JITTER_S, len(trace)))
    jobs = trace.jobs[rng.permutation(len(trace))]
    return replace(trace, jobs=jobs.with_columns(pl.Series("submit_time", submit_s - submit_s.min())))


def tune(console: Console) -> None:
    """Print what each baseline makes of each of its settings."""
    base, bp = (workload(work) for work in WORKLOADS[:2])
    traces = [base, bp, *(shuffled(base, seed) for seed in SEEN_SEEDS)]
    for name, settings in GRID.items():
        for told in settings:
            runs = [simulate(trace, read_cluster(CLUSTER), find(name)(**told), perf=TRUTH) for trace in traces]
            mean_s = np.mean([run.metrics["avg_jct"] for run in runs])
            console.print(f"{name} {told}: {mean_s:,.0f} s", highlight=False)


def on_unseen(limit: int | None) -> dict[str, Any]:
    """Rubick and the baselines on shuffled copies that nobody has chosen parameters on: means, and gains per copy."""
    policies = {name: find(name)() for name in (RUBICK, *BASELINES)}
    policies |= {f"{name}, tuned": find(name)(**told) for name, told in TUNED.items()}
    traces = [shuffled(workload(WORKLOADS[0]), seed) for seed in UNSEEN_SEEDS]
    traces = [replace(trace, jobs=trace.jobs.head(limit)) for trace in traces] if limit else traces
    runs = {
        name: [simulate(trace, read_cluster(CLUSTER), policy, perf=TRUTH).metrics for trace in traces]
        for name, policy in policies.items()
    }
    figures = {key: {name: [round(run[key], 1) for run in of_name] for name, of_name in runs.items()} for key in PAPER}
    gain: dict[str, Any] = {}
    for key, by_name in figures.items():
        others = np.array([values for name, values in by_name.items() if name != RUBICK])
        gain[key] = [round(float(value), 2) for value in others.min(axis=0) / np.array(by_name[RUBICK])]
    return {"seeds": [*UNSEEN_SEEDS], "restart": "62 s", "tuned": TUNED, **figures, "gain_over_best": gain}


def policy_of(name: str, work: Workload) -> Policy:
    """As it comes; where there are guaranteed jobs, with the quota if it knows quotas."""
    kind = find(name)
    told = {"quotas": f"A={QUOTA}"} if work.name == "mt" and "quotas" in parameters_of(kind) else {}
    return kind(**told)


def perform(work: Workload, restart: str, name: str, trace: Trace) -> dict[str, Any]:
    """One run: what is published of it."""
    names = {"workload": work.name, "restart": restart, "policy": name}
    began_s = time.process_time()
    try:
        result = simulate(trace, read_cluster(CLUSTER), policy_of(name, work), perf=TRUTH, costs=RESTARTS[restart])
    except UserError as error:
        return names | {"error": error.message}
    jobs, metrics = result.jobs, result.metrics
    guaranteed = jobs.filter(pl.col("guaranteed"))
    return names | {
        "jobs": len(jobs),
        "avg_jct": round(metrics["avg_jct"], 1),
        "median_jct": round(metrics["median_jct"], 1),
        "p99_jct": round(metrics["p99_jct"], 1),
        "makespan": round(metrics["makespan"], 1),
        "restarts": sum(metrics[kind] for kind in ("preemptions", "migrations", "resizes", "reconfigurations")),
        "guaranteed": len(guaranteed),
        "sla_violations": guaranteed.filter(pl.col("speed_mean") < FULL_SPEED).height,
        "slowest_guaranteed": round(guaranteed["speed_mean"].min(), 3) if len(guaranteed) else None,
        "avg_jct_guaranteed": round(guaranteed["jct_s"].mean(), 1) if len(guaranteed) else None,
        "avg_jct_best_effort": round(jobs.filter(~pl.col("guaranteed"))["jct_s"].mean() or 0.0, 1),
        "cpu_seconds": round(time.process_time() - began_s, 2),
    }


def gains(runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """How many times better rubick is than the best of the baselines, per workload and restart, beside the paper."""
    at = {(run["workload"], run["restart"], run["policy"]): run for run in runs if "error" not in run}
    for work, restart in dict.fromkeys((run["workload"], run["restart"]) for run in runs):
        own = at.get((work, restart, RUBICK))
        others = {name: at[work, restart, name] for name in BASELINES if (work, restart, name) in at}
        if own is None or not others:
            continue
        gain: dict[str, Any] = {"workload": work, "restart": restart}
        for key, paper in PAPER.items():
            best = min(others, key=lambda name: others[name][key])
            gain[key] = {"gain": round(others[best][key] / own[key], 2), "over": best, "paper": paper}
        yield gain


def compare(
    workloads: Sequence[Workload],
    restarts: Sequence[str],
    names: Sequence[str],
    console: Console,
    *,
    limit: int | None = None,
    unseen: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All runs as one document."""
    runs: list[dict[str, Any]] = []
    for work in workloads:
        trace = workload(work)
        trace = trace if limit is None else replace(trace, jobs=trace.jobs.head(limit))
        for restart in restarts:
            here = [perform(work, restart, name, trace) for name in names]
            console.print(table(work, restart, here))
            runs += here
    document = about_this_run() | {
        "command": "make bench-rubick",
        "cluster": read_cluster(CLUSTER).describe(),
        "truth": TRUTH.truth,
        "seed": SEED,
        "quota_of_a": QUOTA,
        "workloads": [asdict(work) for work in workloads],
        "restarts": {
            name: {key: getattr(RESTARTS[name], key) for key in ("start_s", "suspend_s", "resume_s")}
            for name in restarts
        },
        "policies": list(names),
        "runs": runs,
        "gains": list(gains(runs)),
        "unseen": unseen,
    }
    for gain in document["gains"]:
        said = ", ".join(
            f"{words} {gain[key]['gain']}x over {gain[key]['over']} (paper: up to {gain[key]['paper']}x)"
            for key, words in PAPER_WORDS.items()
        )
        console.print(f"{gain['workload']}, restarts at {gain['restart']}: {said}", highlight=False)
    return document


def table(work: Workload, restart: str, runs: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title=f"{work.name}, restarts at {restart}", title_justify="left")
    shown.add_column("policy")
    for words in ("avg JCT", "× rubick", "p99 JCT", "makespan", "× rubick", "restarts", "SLA missed"):
        shown.add_column(words, justify="right")
    own = next((run for run in runs if run["policy"] == RUBICK and "error" not in run), None)
    for run in runs:
        if "error" in run:
            shown.add_row(run["policy"], f"[red]{run['error']}[/red]")
            continue
        times = [f"{run[key] / own[key]:.2f}" if own else "" for key in PAPER]
        shown.add_row(
            run["policy"],
            units.duration(run["avg_jct"]),
            times[0],
            units.duration(run["p99_jct"]),
            units.duration(run["makespan"]),
            times[1],
            f"{run['restarts']:,}",
            f"{run['sla_violations']} of {run['guaranteed']}" if run["guaranteed"] else "",
        )
    return shown


def _chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(";" if what == "restarts" else ",")]
    for name in names:
        if name not in known:
            raise UserError(f"no {what} '{name}'", hint=f"there are {'; '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", default=",".join(work.name for work in WORKLOADS))
    parser.add_argument("--restarts", default=";".join(RESTARTS), help="separated by semicolons")
    parser.add_argument("--policies", default=",".join(name for name in POLICIES if name in registry()))
    parser.add_argument("--limit", type=int, help="only the first so many jobs; nothing is written then")
    parser.add_argument("--out", type=Path, help="write the document there")
    parser.add_argument("--tune", action="store_true", help="try the baselines' parameters, and nothing else")
    told = parser.parse_args(arguments)
    console = Console(width=max(110, Console().width))
    if told.tune:
        tune(console)
        return 0
    try:
        names = _chosen(told.workloads, [work.name for work in WORKLOADS], "workloads")
        restarts = _chosen(told.restarts, list(RESTARTS), "restarts")
        policies = _chosen(told.policies, list(registry()), "policies")
        works = [work for work in WORKLOADS if work.name in names]
        everything = len(works) * len(restarts) == len(WORKLOADS) * len(RESTARTS) and set(POLICIES) <= set(policies)
        unseen = on_unseen(told.limit) if everything else None
        document = compare(works, restarts, policies, console, limit=told.limit, unseen=unseen)
    except UserError as error:
        console.print(f"[red]{error}[/red]")
        return 2
    if unseen:
        said = ", ".join(f"{words} {unseen['gain_over_best'][key]}" for key, words in PAPER_WORDS.items())
        console.print(f"shuffled copies that nobody chose anything on, gain over the best baseline: {said}")
    place = told.out or (RESULT if everything and told.limit is None else None)
    if place is not None:
        place.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"written: {place.name}")
    return int(any("error" in run for run in document["runs"]))


if __name__ == "__main__":
    sys.exit(main())
