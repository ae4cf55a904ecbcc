"""The live part of the benchmark runs and gives what is published. Times are not tested: machines differ."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.live_run import FULL, LivePlan, busy_notes, live_failures, live_goals, show_live
from benchmarks.run import bench_live
from rich.console import Console

pytestmark = pytest.mark.slow  # real clusters, a process per case

TINY = LivePlan(
    (
        {"case": "start", "jobs": 2, "pause_s": 0.0},
        {"case": "submits", "jobs": 32, "clients": 4, "through": "http"},
        {"case": "held", "jobs": 4, "watch_s": 0.5, "settle_s": 0.0},
    )
)
STORE = LivePlan(({"case": "store", "jobs": 200, "repeats": 1, "decide_s": 0.5},))


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return bench_live(TINY, Console(quiet=True))


def test_every_case_runs_and_is_json(results: dict[str, Any]) -> None:
    assert not live_failures(results)
    assert [case["case"] for case in results["live"]] == ["start", "submits", "held"]
    assert json.loads(json.dumps(results)) == results
    assert {"date", "commit", "machine", "live", "goals", "notes"} <= set(results)
    assert str(Path.home()) not in json.dumps(results)
    assert "/tmp" not in json.dumps(results)


def test_a_start_is_taken_apart(results: dict[str, Any]) -> None:
    start = results["live"][0]
    until = start["median_ms_until"]
    jiffy_ms = 10.0  # the kernel dates a process no finer
    assert 0 < until["decided"] < until["process_made"] + jiffy_ms
    assert until["process_made"] <= until["first_act"] + jiffy_ms
    assert start["median_ms"] <= start["p95_ms"] <= start["max_ms"]


def test_every_submit_is_counted(results: dict[str, Any]) -> None:
    submits = results["live"][1]
    assert submits["jobs"] == 32
    assert submits["acknowledged_per_second"] == pytest.approx(32 / submits["wall_seconds"])


def test_running_jobs_are_weighed_and_outlive_the_controller(results: dict[str, Any]) -> None:
    held = results["live"][2]
    assert held["memory"]["supervisors"]["processes"] == 4
    assert 0 < held["memory"]["supervisors"]["pss_mb_mean"] <= held["memory"]["supervisors"]["rss_mb_largest"]
    assert held["recovery"]["supervisors_alive"] >= 4
    assert set(held["idle"]["core_share"]) >= {"controller", "keeper", "standby", "agent-n0", "supervisors"}


def test_commands_are_timed_on_a_store_of_many_jobs() -> None:
    results = bench_live(STORE, Console(quiet=True))
    assert not live_failures(results)
    (store,) = results["live"]
    assert len(results["goals"]) == 5
    assert (store["jobs"], store["queued"]) == (200, 40)
    commands = {command["command"]: command for command in store["commands"]}
    assert {"ps", "ps -a", "show", "events", "nodes", "logs", "status", "cancel", "hold", "release"} <= set(commands)
    assert {"submit --dry-run", "submit --", "top --once", "wait"} <= set(commands)
    assert all(0 < command["server_ms"] < command["wall_ms"] for command in commands.values())
    assert store["decisions"]["decisions"] > 0
    assert store["restart_seconds"] > 0


def test_goals_are_held_against_the_figures(results: dict[str, Any]) -> None:
    goals = {goal["goal"]: goal for goal in live_goals(results["live"])}
    fast = next(goal for name, goal in goals.items() if name.startswith("submits acknowledged"))
    assert fast["at_least"]
    assert fast["met"] == (fast["measured"] >= 500)
    assert sum(not goal["at_least"] for goal in goals.values()) == 7
    assert {case["case"] for case in FULL.cases} == {case["case"] for case in (*TINY.cases, *STORE.cases)}


def test_a_failed_case_is_shown_and_counts() -> None:
    broken = {"live": [{"case": "start", "error": "live start: it broke"}], "goals": [], "notes": []}
    text = io.StringIO()
    show_live(broken, Console(file=text, width=120))
    assert live_failures(broken) == ["live start: it broke"]
    assert "it broke" in text.getvalue()


def test_a_busy_machine_is_told_of() -> None:
    assert busy_notes([{"load_average_before": 0.4}, {"error": "x"}]) == []
    (note,) = busy_notes([{"load_average_before": 0.4}, {"load_average_before": 7.25}])
    assert "1 of 2 live cases" in note
    assert "7.2" in note
