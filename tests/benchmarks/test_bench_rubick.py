"""The comparison of Rubick with its baselines: what it measures, and that nobody leaves a job of the 406 behind."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from benchmarks.rubick import (
    CLUSTER,
    POLICIES,
    QUOTA,
    RESTARTS,
    SEEN_SEEDS,
    UNSEEN_SEEDS,
    WORKLOADS,
    gains,
    main,
    perform,
    policy_of,
    shuffled,
    with_guarantees,
    workload,
)

from kit.workloads import shared_data
from thebes.perf.plans.site import A800, site_of
from thebes.trace import read
from thebes.trace.cluster_file import read_cluster

BASE, BP, MT = WORKLOADS


def test_the_cluster_is_the_papers() -> None:
    assert site_of(read_cluster(CLUSTER), 0) == A800
    assert read_cluster(CLUSTER).num_nodes == 8


@pytest.mark.parametrize(("name", "file"), [("rubick-406", "workload-base.csv"), ("rubick-406-bp", "workload-bp.csv")])
def test_the_shipped_workloads_are_the_published_ones(name: str, file: str, shared: Path) -> None:
    published = read(shared_data() / "workloads" / "morphling" / file)
    assert read(name).jobs.equals(published.jobs)
    assert len(published) == 406


def test_jobs_have_their_steps_to_do_whatever_their_plan() -> None:
    """A slower plan means a longer run, not fewer steps: BP asks for more GPU time than Base."""
    base, bp = workload(BASE).jobs, workload(BP).jobs
    assert base["steps"].equals(bp["steps"])
    hours = [(jobs["duration"] * jobs["num_gpus"]).sum() / 3600 for jobs in (base, bp)]
    assert hours[0] == pytest.approx((read("rubick-406").jobs["duration"] * base["num_gpus"]).sum() / 3600, rel=0.01)
    assert hours[1] > 1.1 * hours[0]
    same = base["plan"] == bp["plan"]
    assert base.filter(same)["duration"].equals(bp.filter(same)["duration"])


def test_guaranteed_jobs_are_drawn_by_seed() -> None:
    jobs = with_guarantees(read("rubick-406")).jobs
    assert jobs["guaranteed"].sum() == 194
    assert jobs.equals(with_guarantees(read("rubick-406")).jobs)
    assert not jobs.equals(with_guarantees(read("rubick-406"), seed=1).jobs)
    assert set(jobs.filter(pl.col("guaranteed") == 1)["vc"]) == {"A"}
    assert set(jobs.filter(pl.col("guaranteed") == 0)["vc"]) == {"B"}
    assert jobs["num_gpus"].max() == QUOTA


def test_shuffled_copies_have_the_same_jobs_and_seeds_that_nothing_was_chosen_on() -> None:
    base = read("rubick-406")
    copy = shuffled(base, 1001)
    assert copy.jobs["submit_time"].is_sorted()
    assert copy.jobs["job_id"].to_list() != base.jobs["job_id"].to_list()
    work = ["job_id", "num_gpus", "duration", "plan"]
    assert copy.jobs.select(work).sort("job_id").equals(base.jobs.select(work).sort("job_id"))
    assert not set(SEEN_SEEDS) & set(UNSEEN_SEEDS)


def test_quotas_are_told_to_those_who_know_them() -> None:
    assert policy_of("antman-like", MT).quotas == f"A={QUOTA}"  # type: ignore[attr-defined]
    assert policy_of("antman-like", BASE).quotas == ""  # type: ignore[attr-defined]
    assert policy_of("sia-like", MT).name == "sia-like"


def test_the_gain_is_over_the_best_baseline_of_each_figure() -> None:
    def run(policy: str, jct: float, makespan: float) -> dict[str, object]:
        return {"workload": "base", "restart": "62 s", "policy": policy, "avg_jct": jct, "makespan": makespan}

    runs = [run("rubick", 100, 1000), run("sia-like", 400, 1100), run("synergy-like", 250, 1500), run("srtf", 50, 900)]
    broken = {"workload": "base", "restart": "62 s", "policy": "antman-like", "error": "1 of 2 jobs never finished"}
    (gain,) = gains([*runs, broken])
    assert gain["avg_jct"] == {"gain": 2.5, "over": "synergy-like", "paper": 3.2}
    assert gain["makespan"] == {"gain": 1.1, "over": "sia-like", "paper": 1.4}
    assert list(gains(runs[1:])) == []


def test_a_small_run_is_written_where_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "some.json"
    told = ["--workloads", "mt", "--restarts", "78 s", "--policies", "fifo,sia-like", "--limit", "12"]
    assert main([*told, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert [run["policy"] for run in document["runs"]] == ["fifo", "sia-like"]
    assert all(run["jobs"] == 12 and run["avg_jct"] > 0 for run in document["runs"])
    assert document["restarts"] == {"78 s": {"start_s": 0.0, "suspend_s": 12.0, "resume_s": 66.0}}
    assert "mt, restarts at 78 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (["--workloads", "mtt"], "no workloads 'mtt'"),
        (["--restarts", "9 s"], "no restarts '9 s'"),
        (["--policies", "rubic"], "no policies 'rubic'"),
    ],
)
def test_mistakes(told: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(told) == 2
    assert message in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("name", POLICIES)
def test_all_406_jobs_finish(name: str, restart: str) -> None:
    for work in (BASE, MT):
        run = perform(work, restart, name, workload(work))
        assert run["jobs"] == 406, run
        assert run["restarts"] < 406 * 5  # nobody does little else than restart
        assert (run["guaranteed"] == 194) == (work is MT)
