"""The live part of `make bench`: which cases, their goals, and their tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]
ROOT = Path(__file__).parents[1]
QUIET_LOAD = 1.5  # load average before a case, above which others were at work


@dataclass(frozen=True)
class LivePlan:
    """Cases of benchmarks.live with their arguments."""

    cases: tuple[Figures, ...]
    case_limit_s: float = 900.0


FULL = LivePlan(
    (
        {"case": "start", "jobs": 50, "pause_s": 0.2},
        {"case": "submits", "jobs": 10_000, "clients": 16, "through": "http"},
        {"case": "submits", "jobs": 10_000, "clients": 16, "through": "thebes.Client"},
        {"case": "held", "jobs": 500, "watch_s": 30.0},
        {"case": "store", "jobs": 100_000, "repeats": 3, "decide_s": 15.0},
    )
)
QUICK = LivePlan(
    (
        {"case": "start", "jobs": 10, "pause_s": 0.1},
        {"case": "submits", "jobs": 1_600, "clients": 16, "through": "http"},
        {"case": "held", "jobs": 50, "watch_s": 3.0},
    )
)


def measure_all(plan: LivePlan, console: Console) -> list[Figures]:
    """One case after the other, each in a process of its own. What failed has an `error`."""
    return [_measure(plan, console, case) for case in plan.cases]


def _measure(plan: LivePlan, console: Console, case: Figures) -> Figures:
    title = " ".join(str(value) for value in case.values())
    with console.status(f"live: {title}"):
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.live", json.dumps(case)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=plan.case_limit_s,
            )
        except subprocess.TimeoutExpired:
            return case | {"error": f"live {title}: stopped after {plan.case_limit_s:g} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return case | {"error": f"live {title}: {last}"}
    return json.loads(done.stdout)


def live_goals(cases: list[Figures]) -> Iterator[Figures]:
    """Every goal that the cases can answer."""
    for case in cases:
        if "error" not in case:
            yield from GOALS[case["case"]](case)


def _goal(name: str, unit: str, limit: float, measured: float, *, at_least: bool = False) -> Figures:
    met = measured >= limit if at_least else measured <= limit
    return {"goal": name, "unit": unit, "limit": limit, "at_least": at_least, "measured": measured, "met": met}


def _of_submits(case: Figures) -> Iterator[Figures]:
    name = f"submits acknowledged, {case['jobs']:,} from {case['clients']} clients by {case['through']}"
    yield _goal(name, "/s", 500.0, case["acknowledged_per_second"], at_least=True)


def _of_held(case: Figures) -> Iterator[Figures]:
    count, memory, idle = case["jobs"], case["memory"], case["idle"]["core_share"]
    yield _goal(
        f"{count} running jobs: largest supervisor, resident", "MB", 12.0, memory["supervisors"]["rss_mb_largest"]
    )
    yield _goal("… its own share of memory (PSS), mean", "MB", 12.0, memory["supervisors"]["pss_mb_mean"])
    yield _goal("… controller while nothing happens", "% of a core", 1.0, 100 * idle["controller"])
    yield _goal("… all supervisors while nothing happens", "% of a core", 1.0, 100 * idle["supervisors"])
    yield _goal("… controller killed: answers again", "s", 5.0, case["recovery"]["answering_seconds"])


def _of_start(case: Figures) -> Iterator[Figures]:
    yield _goal("submit to the job's first action, idle cluster, median", "ms", 100.0, case["median_ms"])
    yield _goal("… 95th percentile", "ms", 100.0, case["p95_ms"])


def _of_store(case: Figures) -> Iterator[Figures]:
    slowest = max(case["commands"], key=lambda command: command["wall_ms"])
    busiest = max(case["commands"], key=lambda command: command["server_ms"])
    stored = f"{case['jobs']:,} jobs in the store"
    yield _goal(f"{stored}: slowest command ({slowest['command']})", "ms", 500.0, slowest["wall_ms"])
    yield _goal(f"… most work for the server ({busiest['command']})", "ms", 50.0, busiest["server_ms"])
    yield _goal(f"… one decision, {case['queued']:,} waiting", "ms", 50.0, case["decisions"]["decision_mean_ms"])
    yield _goal("… a small request meanwhile, 95th percentile", "ms", 50.0, case["decisions"]["probe"]["p95_ms"])
    yield _goal("… controller killed with those waiting: answers again", "s", 5.0, case["restart_seconds"])


GOALS: dict[str, Callable[[Figures], Iterator[Figures]]] = {
    "submits": _of_submits,
    "held": _of_held,
    "start": _of_start,
    "store": _of_store,
}


def busy_notes(cases: list[Figures]) -> list[str]:
    busy = [case for case in cases if case.get("load_average_before", 0.0) > QUIET_LOAD]
    if not busy:
        return []
    worst = max(case["load_average_before"] for case in busy)
    return [f"others were at work: {len(busy)} of {len(cases)} live cases began at a load of up to {worst:.1f}"]


def show_live(results: Figures, console: Console) -> None:
    """The commands on a large store, and every goal."""
    for case in results["live"]:
        if case["case"] == "store" and "error" not in case:
            table = Table("command", "wall ms", "server ms", title=f"{case['jobs']:,} jobs in the store")
            for command in case["commands"]:
                name = f"{command['command']} {command['about']}"
                table.add_row(name, f"{command['wall_ms']:.0f}", f"{command['server_ms']:.1f}")
            console.print(table)
    table = Table("goal", "limit", "measured", "met", title="live cluster")
    for goal in results["goals"]:
        sign = "≥" if goal["at_least"] else "≤"
        met = "[green]yes[/]" if goal["met"] else "[red]no[/]"
        table.add_row(
            goal["goal"], f"{sign} {goal['limit']:g} {goal['unit']}", f"{goal['measured']:.3g} {goal['unit']}", met
        )
    console.print(table)
    for note in (*results["notes"], *live_failures(results)):
        console.print(f"note: {note}", markup=False)


def live_failures(results: Figures) -> list[str]:
    return [case["error"] for case in results["live"] if "error" in case]
