"""`make bench`: measure what we claim about speed, print it beside the goals, write it as JSON.

    python -m benchmarks.run [--quick] [--part simulator|live] [--out FILE]

Without --out the full run goes to benchmarks/results/DATE-MACHINE.json, its live part to DATE-MACHINE-live.json, the
quick one nowhere. A case that fails is reported and makes the command fail; a goal that is missed does not, since
machines differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import thebes
from benchmarks import live_run, machine
from benchmarks.cases import HELIOS, LARGEST_JOB, LOAD, SEED, PlainPolicy
from thebes.model.facts import PLANS
from thebes.policy import registry

ROOT = Path(__file__).parents[1]
GPUS_PER_NODE = 8
PLAIN = PlainPolicy.name
BUSY = 0.95  # share of the wall time that a process on an idle core spends computing

Figures = dict[str, Any]

# Policies that are older than networks and contention; tiresias-l stays in, to compare with.
OLDER = (
    *("fifo", "backfill", "lpjf", "sjf", "srtf", "srsf", "las", "gittins", "shortest-expected", "tiresias-g"),
    *("multi-dlas", "tiresias-compat"),
)
NETWORK = "100gbe"
CONTENDED_GPUS, CROWDED_GPUS = 1_024, 128
PLANNED_GPUS = 64  # best plans of every shipped model on 1 to so many GPUs
CONTENDED: Figures = {
    "case": "replay",
    "trace": "generated",
    "cluster": "8x16x8",
    "network": NETWORK,
    "checks": False,
    "repeats": 1,
    "limit_s": 120.0,
}
CROWDED = CONTENDED | {"cluster": "2x8x8", "load": 20.0}


RUBICK_PASS: Figures = {"cluster": "256x8", "running": 1_000, "waiting": 300, "repeats": 5}


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    jobs: tuple[int, ...]
    gpus: tuple[int, ...]
    repeats: int
    helios: tuple[tuple[str, str, bool], ...]  # cluster, policy, checker on
    decision_cluster: str
    decision_waiting: int
    contended_jobs: int  # on CONTENDED_CLUSTER, with network and contention, under every policy that knows them
    crowds: tuple[int, ...]  # jobs on a cluster that has room for few of them, to see what a job more alive costs
    rubick_pass: Figures = field(default_factory=lambda: dict(RUBICK_PASS))
    case_limit_s: float = 600.0


FULL = Plan(
    jobs=(1_000, 10_000, 100_000),
    gpus=(64, 1_000, 10_000),
    repeats=3,
    helios=(
        ("133x8", "tiresias-l", False),
        ("133x8", "tiresias-l", True),
        ("133x8", "tiresias-g", False),
        ("57x8", "tiresias-l", False),
        ("57x8", "tiresias-l", True),
        ("57x8", "tiresias-g", False),
        ("133x8", PLAIN, False),
        ("133x8", PLAIN, True),
    ),
    decision_cluster="12500x8",
    decision_waiting=50_000,
    contended_jobs=10_000,
    crowds=(1_000, 2_000),
)
QUICK = Plan(
    jobs=(1_000, 10_000),
    gpus=(64, 1_000),
    repeats=1,
    helios=(("133x8", "tiresias-l", False),),
    decision_cluster="12500x8",
    decision_waiting=50_000,
    contended_jobs=0,
    crowds=(),
)


def bench(plan: Plan, console: Console) -> Figures:
    """Run the plan, one case after the other, and hold the figures against the goals."""
    results = about_this_run()
    results["scheme"] = {"load": LOAD, "seed": SEED, "largest_job_gpus": LARGEST_JOB, "repeats": plan.repeats}
    results["notes"] = []
    _warm_up(console)
    results["calibration"] = _measure(plan, console, case="calibrate", repeats=plan.repeats)
    results["grid"] = [
        _measure(
            plan,
            console,
            case="replay",
            trace="generated",
            jobs=jobs,
            gpus=gpus,
            cluster=f"{gpus // GPUS_PER_NODE}x{GPUS_PER_NODE}",
            policy="tiresias-l",
            checks=False,
            repeats=plan.repeats,
        )
        | {"gpus": gpus, "jobs": jobs}
        for gpus in plan.gpus
        for jobs in plan.jobs
    ]
    results["growth"] = list(growth(results["grid"]))
    results["replays"] = []
    if not HELIOS.is_file():
        results["notes"].append("the Helios trace is not beside this checkout: its goals were not measured")
    else:
        results["replays"] = [
            _measure(
                plan,
                console,
                case="replay",
                trace="helios",
                cluster=cluster,
                policy=policy,
                checks=checks,
                repeats=plan.repeats,
            )
            for cluster, policy, checks in plan.helios
        ]
    results["decision"] = _measure(
        plan,
        console,
        case="decision",
        cluster=plan.decision_cluster,
        waiting=plan.decision_waiting,
        policy="tiresias-l",
        repeats=5,
    )
    results["plans"] = _measure(plan, console, case="plans", gpus=PLANNED_GPUS, repeats=3)
    results["rubick_pass"] = _measure(plan, console, case="rubick-pass", **plan.rubick_pass)
    results["contended"] = [
        _measure(plan, console, jobs=plan.contended_jobs, gpus=CONTENDED_GPUS, policy=policy, **CONTENDED)
        for policy in (newer_policies() if plan.contended_jobs else [])
    ]
    results["crowds"] = [
        _measure(plan, console, jobs=jobs, gpus=CROWDED_GPUS, policy=policy, **CROWDED)
        for policy in newer_policies()
        for jobs in plan.crowds
    ]
    results["goals"] = list(goals(results))
    results["notes"] += _busy(results)
    return results


def newer_policies() -> list[str]:
    """Those for which network, contention and sharing matter, whatever is installed."""
    return [name for name, policy in registry().items() if name not in OLDER and PLANS not in policy.needs]


def bench_live(plan: live_run.LivePlan, console: Console) -> Figures:
    """The same for a live cluster."""
    results = about_this_run()
    results["live"] = live_run.measure_all(plan, console)
    results["goals"] = list(live_run.live_goals(results["live"]))
    results["notes"] = live_run.busy_notes(results["live"])
    return results


def about_this_run() -> Figures:
    """When, which code, which machine."""
    about = {"format": 1, "date": date.today().isoformat(), "thebes": thebes.__version__}
    return about | _source() | {"machine": machine.describe()}


def growth(grid: list[Figures]) -> Iterator[Figures]:
    """Time per job of each trace of the grid over that of the next shorter one, same GPUs, same load."""
    for small, large in pairwise(grid):
        if small["gpus"] == large["gpus"] and "error" not in small and "error" not in large:
            wall, cpu = (
                (large[key] / large["jobs"]) / (small[key] / small["jobs"]) for key in ("wall_seconds", "cpu_seconds")
            )
            yield {
                "gpus": small["gpus"],
                "from_jobs": small["jobs"],
                "to_jobs": large["jobs"],
                "growth": wall,
                "cpu_growth": cpu,
            }


def crowding(crowds: list[Figures]) -> Iterator[Figures]:
    """Time per event with many jobs alive over that with fewer, same policy. Twice the jobs, twice the time: linear."""
    for few, many in pairwise(crowds):
        if few["policy"] == many["policy"] and "error" not in few and "error" not in many:
            wall, cpu = (
                (many[key] / many["events"]) / (few[key] / few["events"]) for key in ("wall_seconds", "cpu_seconds")
            )
            yield {
                "policy": few["policy"],
                "from_jobs": few["jobs"],
                "to_jobs": many["jobs"],
                "growth": wall,
                "cpu_growth": cpu,
            }


def goals(results: Figures) -> Iterator[Figures]:
    """Every goal that the figures can answer."""
    replays = {
        (case["cluster"], case["policy"], case["checks"]): case for case in results["replays"] if "error" not in case
    }
    for cluster, limit in (("133x8", 3.0), ("57x8", 8.0)):
        lean, gittins = replays.get((cluster, "tiresias-l", False)), replays.get((cluster, "tiresias-g", False))
        if lean:
            yield _goal(f"Helios Venus, tiresias-l, {cluster}", "s", limit, lean["wall_seconds"], lean["cpu_seconds"])
            yield _goal(f"peak memory of that process, {cluster}", "MB", 600.0, lean["peak_memory_mb"])
        if lean and gittins:
            wall, cpu = (gittins[key] / lean[key] for key in ("wall_seconds", "cpu_seconds"))
            yield _goal(f"tiresias-g over tiresias-l, {cluster}", "x", 2.0, wall, cpu)
    plain = replays.get(("133x8", PLAIN, False))
    if plain:
        name = "Helios Venus, plain Python policy, 133x8"
        yield _goal(name, "s", 30.0, plain["wall_seconds"], plain["cpu_seconds"])
    for step in results["growth"]:
        if (step["from_jobs"], step["to_jobs"]) == (10_000, 100_000):
            name = f"growth of time per job, 10k to 100k jobs, {step['gpus']:,} GPUs"
            yield _goal(name, "x", 1.5, step["growth"], step["cpu_growth"])
    for case in results["contended"]:
        if "error" not in case:
            name = f"{case['jobs']:,} jobs, 1,024 GPUs, contention on, {case['policy']}"
            yield _goal(name, "s", 30.0, case["wall_seconds"], case["cpu_seconds"])
    for step in crowding(results["crowds"]):
        name = f"time per event, {step['to_jobs']:,} over {step['from_jobs']:,} jobs alive, {step['policy']}"
        yield _goal(name, "x", 1.6, step["growth"], step["cpu_growth"])
    for state in results["decision"].get("states", []):
        name = (
            f"one decision, {results['decision']['gpus']:,} GPUs, {state['waiting_jobs']:,} waiting, {state['state']}"
        )
        yield _goal(name, "ms", 100.0, state["milliseconds"])
    planned = results.get("plans", {})
    if "milliseconds" in planned:
        name = f"best plan of one model on one allocation, worst of {planned['questions']}"
        yield _goal(name, "ms", 1.0, planned["milliseconds"])
        yield _goal(f"{name}, asked again", "ms", 0.1, planned["again_milliseconds"])
    rounds = results.get("rubick_pass", {})
    for state in rounds.get("states", []):
        jobs = f"{state['running_jobs']:,} running, {state['waiting_jobs']:,} waiting"
        name = f"one round of Rubick, {rounds['gpus']:,} GPUs, {jobs}, {state['state']}"
        yield _goal(name, "ms", 200.0, state["milliseconds"])


def _busy(results: Figures) -> list[str]:
    """A pinned process that waits for its core is measured too slow: say so."""
    cases = [case for case in (*results["grid"], *results["replays"]) if "error" not in case]
    shared = [case for case in cases if case["cpu_seconds"] < BUSY * case["wall_seconds"]]
    if not shared:
        return []
    return [f"the machine was busy: {len(shared)} of {len(cases)} replays waited for their core even in the best run"]


def _goal(name: str, unit: str, limit: float, measured: float, cpu: float | None = None) -> Figures:
    """Wall time decides; `cpu`, the same in CPU time, tells how much of a miss is the fault of a busy machine."""
    return {"goal": name, "unit": unit, "limit": limit, "measured": measured, "cpu": cpu, "met": measured <= limit}


def failures(results: Figures) -> list[str]:
    cases = [results["calibration"], *results["grid"], *results["replays"], results["decision"]]
    cases += [*results["contended"], *results["crowds"], results["plans"], results["rubick_pass"]]
    return [case["error"] for case in cases if "error" in case]


def show(results: Figures, console: Console) -> None:
    """The tables on the terminal."""
    about = results["machine"]
    console.print(f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, Python {about['python']}")
    if "error" not in results["calibration"]:
        console.print(f"calibration: one million heap operations in {results['calibration']['seconds']:.2f} s\n")
    table = Table("GPUs", "jobs", "wall s", "jobs/s", "events/s", "peak MB", "growth per job", title="tiresias-l")
    grown = {(step["gpus"], step["to_jobs"]): step["growth"] for step in results["growth"]}
    for case in results["grid"]:
        size = (f"{case['gpus']:,}", f"{case['jobs']:,}")
        if "error" in case:
            table.add_row(*size, "failed")
            continue
        factor = grown.get((case["gpus"], case["jobs"]))
        table.add_row(
            *size,
            f"{case['wall_seconds']:.3f}",
            f"{case['jobs_per_second']:,.0f}",
            f"{case['events_per_second']:,.0f}",
            f"{case['peak_memory_mb']:.0f}",
            f"{factor:.2f}x" if factor else "",
        )
    console.print(table)
    _show_replays(results["replays"], console)
    _show_contended(results, console)
    table = Table("goal", "at most", "measured", "in CPU time", "met")
    for goal in results["goals"]:
        unit = goal["unit"] if goal["unit"] == "x" else f" {goal['unit']}"
        met = "[green]yes[/]" if goal["met"] else "[red]no[/]"
        cpu = "" if goal["cpu"] is None else f"{goal['cpu']:.3g}{unit}"
        table.add_row(goal["goal"], f"{goal['limit']:g}{unit}", f"{goal['measured']:.3g}{unit}", cpu, met)
    console.print(table)
    for note in (*results["notes"], *failures(results)):
        console.print(f"note: {note}", markup=False)


def _show_contended(results: Figures, console: Console) -> None:
    """Network and contention: the large runs, then the crowded ones."""
    for part, title in (("contended", "contention on, 1,024 GPUs"), ("crowds", "contention on, 128 GPUs, load 20")):
        if not results[part]:
            continue
        table = Table("policy", "jobs", "wall s", "CPU s", "events", "us/event", "mean waiting", "peak MB", title=title)
        for case in results[part]:
            if "error" in case:
                table.add_row(case["policy"], f"{case['jobs']:,}", "failed")
                continue
            table.add_row(
                case["policy"],
                f"{case['jobs']:,}",
                f"{case['wall_seconds']:.2f}",
                f"{case['cpu_seconds']:.2f}",
                f"{case['events']:,}",
                f"{1e6 * case['cpu_seconds'] / case['events']:.0f}",
                f"{case['avg_waiting_jobs']:.0f}",
                f"{case['peak_memory_mb']:.0f}",
            )
        console.print(table)


def _show_replays(replays: list[Figures], console: Console) -> None:
    if not replays:
        return
    title = "Helios Venus, 99,707 jobs"
    table = Table("policy", "cluster", "checker", "wall s (all)", "CPU s", "events/s", "peak MB", title=title)
    for case in replays:
        what = (case["policy"], case["cluster"], "on" if case["checks"] else "off")
        if "error" in case:
            table.add_row(*what, "failed")
            continue
        table.add_row(
            *what,
            f"{case['wall_seconds']:.2f} ({' '.join(f'{wall:.1f}' for wall in case['all_wall_seconds'])})",
            f"{case['cpu_seconds']:.2f}",
            f"{case['events_per_second']:,.0f}",
            f"{case['peak_memory_mb']:.0f}",
        )
    console.print(table)


def _measure(plan: Plan, console: Console, *, limit_s: float | None = None, **case: Any) -> Figures:
    """One case in a process of its own, stopped after a while."""
    limit_s = limit_s or plan.case_limit_s
    words = [
        f"{case[key]:,}" if isinstance(case[key], int) else case[key]
        for key in ("case", "policy", "cluster")
        if key in case
    ]
    if "jobs" in case:
        words.append(f"{case['jobs']:,} jobs")
    title = " ".join(words) + (" with checks" if case.get("checks") else "")
    with console.status(title):
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.cases", json.dumps(case)],
                cwd=ROOT,
                env=os.environ | {"POLARS_MAX_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return case | {"error": f"{title}: stopped after {limit_s:g} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return case | {"error": f"{title}: {last}"}
    return json.loads(done.stdout)


def _warm_up(console: Console) -> None:
    with console.status("compiling, once per version of the sources …"):
        subprocess.run([sys.executable, "-m", "thebes.sim.warmup"], cwd=ROOT, check=True, capture_output=True)


def _source() -> Figures:
    """Which code was measured: the commit, and source files that differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    try:
        changed = [line[3:] for line in git("status", "--porcelain", "--", "src").splitlines()]
        return {"commit": git("rev-parse", "--short=12", "HEAD").strip(), "changed_sources": changed}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed_sources": []}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measure the speed of Thebes.")
    parser.add_argument("--quick", action="store_true", help="a subset that takes less than a minute")
    parser.add_argument("--part", choices=("simulator", "live"), help="measure only this part")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes; the live part to FILE-live.json")
    options = parser.parse_args(argv)
    console = Console()
    failed: list[str] = []
    if options.part != "live":
        results = bench(QUICK if options.quick else FULL, console)
        show(results, console)
        failed += failures(results)
        _write(results, options, "", console)
    if options.part != "simulator":
        results = bench_live(live_run.QUICK if options.quick else live_run.FULL, console)
        live_run.show_live(results, console)
        failed += live_run.live_failures(results)
        _write(results, options, "-live", console)
    return 1 if failed else 0


def _write(results: Figures, options: argparse.Namespace, suffix: str, console: Console) -> None:
    results["quick"] = options.quick
    out: Path | None = options.out
    if out is None and not options.quick:
        out = ROOT / "benchmarks" / "results" / f"{results['date']}-{machine.short_name(results['machine'])}.json"
    if out:
        out = out.with_name(f"{out.stem}{suffix}{out.suffix}")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"written to {os.path.relpath(out)}")


if __name__ == "__main__":
    sys.exit(main())
