"""`make compare-all`: all policies on real traces and three networks, as JSON, as a Markdown page and as a report.

    python -m benchmarks.compare_all [--policies A,B] [--traces A,B] [--networks A,B] [--limit N] [--out DIR]

Jobs run as fast as their placement and their neighbours let them (`--perf network --contention`). Each run has a
process to itself for as long as it takes, up to a limit; one that fails or takes too long is reported in its place.
Four traces ship with Thebes. A fifth is taken when it lies beside the checkout, in ../shared/data.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.run import ROOT, about_this_run
from thebes.model.errors import UserError
from thebes.model.facts import PLANS
from thebes.model.links import with_network
from thebes.model.trace import Trace
from thebes.policy import registry
from thebes.report import units
from thebes.report.matrix import Run, Scene, write_matrix
from thebes.report.series import ACCOUNT_PARTS, account
from thebes.sim.simulate import simulate
from thebes.sim.warmup import compile_side_by_side
from thebes.trace import read
from thebes.trace.cluster_file import read_cluster

PAI = ROOT.parent / "shared" / "data" / "alibaba_pai2020" / "jobs.csv.gz"
NETWORKS = ("10gbe", "100gbe", "nvlink+hdr")
NOT_COMPARED = ("tiresias-compat",)  # counts whole seconds and knows no network
SEED = 1
LIMIT_S = 120.0  # of processor time for one run, before it is given up
COMMAND = "make compare-all"

# What is kept of each run: what the tables and charts show, and the account.
KEPT = (
    *("jobs", "completed", "avg_jct", "median_jct", "p95_jct", "p99_jct", "max_jct", "makespan", "avg_queue_delay"),
    *("median_slowdown", "gpu_utilization", "preemptions", "migrations", "resizes", "communication_share"),
    *("spread_share", "fragmentation", "max_rho", "mean_rho", "median_rho", "max_rho_tenant", "tenants"),
    *(f"{part}_gpu_seconds" for part in ACCOUNT_PARTS),
    "events",
)


@dataclass(frozen=True)
class Workload:
    """A trace, where its jobs are (a name that ships, or a file and a window of it), and a cluster that it fills."""

    name: str
    place: str
    cluster: str  # racks x nodes x GPUs
    about: str
    first: int = 0
    jobs: int | None = None


WORKLOADS = (
    Workload("philly-sample", "philly-sample", "2x4x8", "One virtual cluster of Philly; 9 % of jobs on 32 GPUs."),
    Workload("philly-small-jobs", "philly-small-jobs", "5x4x8", "Another; no job needs two nodes.", 0, 1_000),
    Workload("philly-three-tenants", "philly-three-tenants", "4x14x8", "Three virtual clusters of Philly on one."),
    Workload("helios-sample", "helios-sample", "4x14x8", "Three days of Helios Venus; 17 % of jobs span nodes."),
    Workload("pai-2020", str(PAI), "4x16x8", "Two days of Alibaba PAI; 14 % of jobs span nodes.", 30_000, 1_500),
)


@dataclass(frozen=True)
class Task:
    """One run, as a worker process is told of it."""

    workload: Workload
    network: str
    policy: str
    limit: int | None
    limit_s: float


def policies() -> list[str]:
    """All that are installed, but for the reproduction of another simulator and for those that decide on plans."""
    return [name for name, policy in registry().items() if name not in NOT_COMPARED and PLANS not in policy.needs]


def available() -> list[Workload]:
    """The workloads whose trace ships or lies beside the checkout."""
    return [work for work in WORKLOADS if "/" not in work.place or Path(work.place).is_file()]


def perform(task: Task) -> tuple[Run, list[str]]:
    """One run with its notes; whatever goes wrong with it becomes part of the answer."""
    work = task.workload
    names = (work.name, task.network, task.policy)
    began_s = time.process_time()
    try:
        with _within(task.limit_s):
            result = simulate(
                _trace(work),
                with_network(read_cluster(work.cluster), task.network),
                task.policy,
                perf="network",
                contention=True,
                seed=SEED,
                limit=task.limit,
                skip_oversize=True,
            )
    except GivenUp:
        return Run(*names, error=f"given up after {task.limit_s:g} s"), []
    except UserError as error:
        return Run(*names, error=error.message), []
    except Exception as error:  # a policy's own fault must not cost the other runs
        return Run(*names, error=f"{type(error).__name__}: {error}"), []
    figures = {key: result.metrics[key] for key in KEPT} | {"cpu_seconds": round(time.process_time() - began_s, 2)}
    return Run(*names, figures=figures), list(result.notes)


def _trace(work: Workload) -> Trace:
    trace = read(work.place)
    return replace(trace, jobs=trace.jobs.slice(work.first, work.jobs)) if work.jobs is not None else trace


class GivenUp(KeyboardInterrupt):
    """It ends a run from outside, as Ctrl-C does: no fault of the policy that happens to be deciding."""


@contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """GivenUp after so much processor time: what a busy machine takes for itself does not count."""

    def give_up(_signal: int, _frame: object) -> None:
        raise GivenUp

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def compare_all(
    workloads: Sequence[Workload],
    networks: Sequence[str],
    names: Sequence[str],
    console: Console,
    *,
    workers: int,
    limit: int | None = None,
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """All runs, in the order of workloads, networks and policies, as one document."""
    began = time.perf_counter()
    compile_side_by_side([name for name in names if name in registry()])  # an unknown one is told of in its place
    tasks = [Task(work, network, name, limit, limit_s) for work in workloads for network in networks for name in names]
    done: dict[Task, Run] = {}
    notes: dict[str, list[str]] = {work.name: [] for work in workloads}
    # The newest policies are the slowest: begun first, they do not keep everybody waiting at the end.
    queue = sorted(tasks, key=lambda task: -names.index(task.policy))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(perform, task): task for task in queue}
        for future in as_completed(futures):
            task = futures[future]
            done[task], told = future.result()
            notes[task.workload.name] = list(dict.fromkeys((*notes[task.workload.name], *told)))
            console.print(f"{len(done)}/{len(tasks)} {_line(done[task])}", highlight=False, markup=False)
    document = about_this_run() | {
        "command": COMMAND,
        "seconds": round(time.perf_counter() - began, 1),
        "workers": workers,
        "seed": SEED,
        "perf": "network",
        "contention": True,
        "workloads": [_told(work, notes[work.name]) for work in workloads],
        "networks": list(networks),
        "policies": list(names),
    }
    return document | {"runs": [_as_json(done[task]) for task in tasks]}


def _line(run: Run) -> str:
    figures = run.figures
    what = run.error or f"{units.duration(figures['avg_jct'])} in {figures['cpu_seconds']:.1f} s"  # type: ignore[index]
    return f"{run.trace} {run.network} {run.policy}: {what}"


def _told(work: Workload, notes: list[str]) -> dict[str, Any]:
    """What is published about a workload: no paths of this machine."""
    told = asdict(work) | {"notes": notes, "ships": "/" not in work.place}
    told["place"] = Path(work.place).parent.name if "/" in work.place else work.place
    trace, gpus = _trace(work), read_cluster(work.cluster).total_gpus
    asked, submit = trace.jobs["num_gpus"] * trace.jobs["duration"], trace.jobs["submit_time"]
    return told | {"jobs": len(trace), "gpus": gpus, "load": round(asked.sum() / (submit[-1] - submit[0]) / gpus, 2)}


def _as_json(run: Run) -> dict[str, Any]:
    names = {"trace": run.trace, "network": run.network, "policy": run.policy}
    return names | ({"error": run.error} if run.figures is None else dict(run.figures))


def runs_of(document: dict[str, Any]) -> list[Run]:
    names = ("trace", "network", "policy")
    return [
        Run(
            *(one[name] for name in names),
            figures=None if "error" in one else {key: one[key] for key in one if key not in names},
            error=one.get("error", ""),
        )
        for one in document["runs"]
    ]


def scenes_of(document: dict[str, Any]) -> list[Scene]:
    return [
        Scene(
            work["name"],
            work["cluster"],
            f"{work['about']} {work['jobs']:,} jobs, load {work['load']:g} of {work['gpus']} GPUs.",
        )
        for work in document["workloads"]
    ]


COLUMNS = (
    ("average JCT", "avg_jct", units.duration, min),
    ("p99 JCT", "p99_jct", units.duration, min),
    ("makespan", "makespan", units.duration, min),
    ("communication", "communication_share", units.share, min),
    ("max rho", "max_rho", units.figure, min),
    ("mean rho", "mean_rho", units.figure, min),
    ("worst tenant's rho", "max_rho_tenant", units.figure, min),
    ("fragmentation", "fragmentation", units.share, min),
)


INTRODUCTION = """\
Written by `{command}`: {runs} runs in {minutes:.1f} minutes, {workers} processes on {machine}; {date}, commit {commit}.
Do not edit it: run the command again. The same figures are in `benchmarks/results/compare-all.json` and, to be sorted
and looked at, in `out/compare-all.html`.

Speed model `network` with contention on, seed {seed}, placement `consolidate`, costs and parameters as they come. The
traces name no models: the seed assigns them by GPU demand. *Communication* is the share of running GPU time that
compute does not hide. *Rho* is finish-time fairness, 1 is fair, of the worst job and in the mean. *Fragmentation* is
the share of all GPU time that idled although waiting jobs asked for it. The account splits all GPU time into useful /
overhead / lost / idle-held / unused. Bold is the best of its column."""


def markdown(document: dict[str, Any]) -> str:
    """The page docs/comparison.md."""
    runs, scenes = runs_of(document), scenes_of(document)
    machine = document["machine"]
    lines = [
        "# All policies on real traces and three networks",
        "",
        INTRODUCTION.format(
            command=document["command"],
            runs=len(runs),
            minutes=document["seconds"] / 60,
            workers=document["workers"],
            machine=f"{machine['cpu']}, {machine['cores']} cores",
            date=document["date"],
            commit=document["commit"],
            seed=document["seed"],
        ),
        "",
        "| trace | cluster (racks x nodes x GPUs) | what it is |",
        "|---|---|---|",
        *(f"| {scene.trace} | {scene.cluster} | {scene.about} |" for scene in scenes),
        "",
        "## Average JCT, relative to the best of each column",
        "",
        *_overview(runs, document),
    ]
    for work in document["workloads"]:
        lines += ["", f"## {work['name']}"]
        lines += ["", *(f"- {note}" for note in work["notes"])] if work["notes"] else []
        for network in document["networks"]:
            own = [run for run in runs if (run.trace, run.network) == (work["name"], network)]
            lines += ["", f"### {work['name']}, {network}", "", *_table(own)]
    return "\n".join(lines) + "\n"


def _overview(runs: Sequence[Run], document: dict[str, Any]) -> Iterator[str]:
    columns = [(work["name"], network) for work in document["workloads"] for network in document["networks"]]
    at = {(run.trace, run.network, run.policy): run for run in runs}
    best = {
        column: min((v for p in document["policies"] if (v := _value(at[(*column, p)], "avg_jct"))), default=None)
        for column in columns
    }
    yield "| policy | " + " | ".join(f"{trace}, {network}" for trace, network in columns) + " |"
    yield "|---|" + "---|" * len(columns)
    for policy in document["policies"]:
        cells = []
        for column in columns:
            value = _value(at[(*column, policy)], "avg_jct")
            said = units.ratio(value, best[column]) if value is not None else "failed"
            cells.append(f"**{said}**" if value is not None and value == best[column] else said)
        yield f"| {policy} | " + " | ".join(cells) + " |"


def _table(runs: Sequence[Run]) -> Iterator[str]:
    yield "| policy | " + " | ".join(words for words, *_ in COLUMNS) + " | account |"
    yield "|---|" + "---|" * (len(COLUMNS) + 1)
    best = {
        key: pick((v for run in runs if (v := _value(run, key)) is not None), default=None)
        for _, key, _, pick in COLUMNS
    }
    for run in runs:
        if run.figures is None:
            yield f"| {run.policy} | {run.error} " + "| " * len(COLUMNS) + "|"
            continue
        cells = []
        for _, key, say, _ in COLUMNS:
            value = _value(run, key)
            cells.append(f"**{say(value)}**" if value is not None and value == best[key] else say(value))
        parts = account(run.figures)
        whole = sum(parts.values()) or 1.0
        cells.append(" / ".join(f"{100 * part / whole:.1f}" for part in parts.values()) + " %")
        yield f"| {run.policy} | " + " | ".join(cells) + " |"


def _value(run: Run, key: str) -> float | None:
    value = None if run.figures is None else run.figures[key]
    return None if value is None else float(value)  # type: ignore[arg-type]


def write_all(document: dict[str, Any], *, results: Path, page: Path, report: Path) -> None:
    for path in (results, page):
        path.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(document, indent=1) + "\n")
    page.write_text(markdown(document))
    write_matrix(
        runs_of(document),
        scenes_of(document),
        report,
        title="All policies on real traces and three networks",
        about=[
            f"Speed model network with contention on, seed {document['seed']}; {document['command']},",
            f"{document['date']}, {document['machine']['cpu']}, {document['machine']['cores']} cores,",
            f"{document['seconds'] / 60:.1f} min.",
        ],
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_all", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--policies", default=",".join(policies()), metavar="A,B")
    parser.add_argument("--traces", default=",".join(work.name for work in available()), metavar="A,B")
    parser.add_argument("--networks", default=",".join(NETWORKS), metavar="A,B")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N jobs of each trace")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="processor time after which a run is given up")
    parser.add_argument("--workers", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--out", type=Path, metavar="DIR", help="everything goes here, instead of the published files")
    options = parser.parse_args(argv)
    console = Console(stderr=True)
    wanted = options.traces.split(",")
    workloads = [work for work in available() if work.name in wanted]
    unknown = sorted(set(wanted) - {work.name for work in workloads})
    if unknown:
        parser.error(f"no trace '{unknown[0]}'; there are {', '.join(work.name for work in available())}")
    document = compare_all(
        workloads,
        options.networks.split(","),
        options.policies.split(","),
        console,
        workers=options.workers,
        limit=options.limit,
        limit_s=options.limit_s,
    )
    out: Path | None = options.out
    write_all(
        document,
        results=(out or ROOT / "benchmarks" / "results") / "compare-all.json",
        page=(out or ROOT / "docs") / "comparison.md",
        report=(out or ROOT / "out") / "compare-all.html",
    )
    failed = [run for run in runs_of(document) if run.error]
    console.print(f"{document['seconds'] / 60:.1f} min, {len(failed)} of {len(document['runs'])} runs failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
