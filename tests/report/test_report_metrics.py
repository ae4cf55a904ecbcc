"""The metrics, on runs small enough to be checked by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import toy_result, workload

from thebes.report.metrics import JOB_CLASSES, REQUIRED_KEYS, RunMetrics, class_masks, summarise, to_json
from thebes.report.result import Result


def jobs_frame(rows: Sequence[Mapping[str, float | str | None]]) -> pl.DataFrame:
    """Job rows with what the metrics read; what a row does not say is zero, or null for a job that did not finish."""
    counts = ("preemptions", "promotions", "demotions", "migrations", "resizes", "reconfigurations")
    sums = ("useful_gpu_s", "overhead_gpu_s", "lost_gpu_s", "idle_held_gpu_s", "spread_gpu_s", "ran_s", "comm_s")
    words = ("tenant", "model")
    times = ("submit_s", "duration_s", "finish_s", "jct_s", "queue_delay_s", "first_wait_s")
    return pl.DataFrame(
        [{**dict.fromkeys((*counts, *sums), 0), **dict.fromkeys((*times, *words)), "gpus": 1.0, **row} for row in rows],
        schema={
            **dict.fromkeys(("gpus", *times, *sums), pl.Float64),
            **dict.fromkeys(counts, pl.Int64),
            **dict.fromkeys(words, pl.String),
        },
    )


# Two GPUs. A: 1 GPU, 0 to 100. B: 2 GPUs, submitted at 10, 100 to 1100 (one second of it overhead). C: 8 GPUs' worth of
# demand never starts. Capacity: 2 × 1100 GPU-seconds.
THREE_JOBS = (
    {
        "submit_s": 0.0,
        "duration_s": 100.0,
        "finish_s": 100.0,
        "jct_s": 100.0,
        "queue_delay_s": 0.0,
        "first_wait_s": 0.0,
        "useful_gpu_s": 100.0,
    },
    {
        "gpus": 2.0,
        "submit_s": 10.0,
        "duration_s": 999.0,
        "finish_s": 1100.0,
        "jct_s": 1090.0,
        "queue_delay_s": 90.0,
        "first_wait_s": 90.0,
        "useful_gpu_s": 1998.0,
        "overhead_gpu_s": 2.0,
        "preemptions": 1,
        "promotions": 2,
    },
    {"gpus": 8.0, "submit_s": 20.0, "duration_s": 5.0},
)


def metrics_of(jobs: pl.DataFrame, **changes: object) -> RunMetrics:
    given_values: dict[str, object] = {
        "policy": "fifo",
        "placement": "count",
        "trace": "t.csv",
        "cluster": "1x2",
        "total_gpus": 2,
        "jobs": jobs,
        "events": 7,
        "wall_seconds": 0.25,
    }
    return summarise(**(given_values | changes))  # type: ignore[arg-type]


def test_figures_of_a_run_computed_by_hand() -> None:
    metrics = metrics_of(jobs_frame(THREE_JOBS))
    expected = {
        "jobs": 3,
        "completed": 2,
        "avg_jct": 595.0,
        "median_jct": 595.0,
        "p95_jct": 100 + 0.95 * 990,
        "p99_jct": 100 + 0.99 * 990,
        "max_jct": 1090.0,
        "makespan": 1100.0,
        "avg_queue_delay": 45.0,
        "gpu_utilization": 2098 / 2200,
        "preemptions": 1,
        "promotions": 2,
        "migrations": 0,
        "useful_gpu_seconds": 2098.0,
        "overhead_gpu_seconds": 2.0,
        "lost_gpu_seconds": 0.0,
        "idle_held_gpu_seconds": 0.0,
        "events": 7,
        "wall_seconds": 0.25,
        "unused_gpu_seconds": 100.0,
        "avg_slowdown": (1.0 + 1090 / 999) / 2,
        "p95_queue_delay": 85.5,
        "jobs_small_short": 1,
        "avg_jct_small_short": 100.0,
        "avg_jct_small_long": 1090.0,
        "jobs_large_short": 1,
        "avg_jct_large_short": None,
        "avg_jct_large_long": None,
    }
    for key, value in expected.items():
        assert metrics[key] == (None if value is None else pytest.approx(value, rel=1e-12)), key


def test_required_keys_come_first_and_in_order() -> None:
    metrics = metrics_of(jobs_frame(THREE_JOBS), parameters={"queues": 2}, perf="ideal")
    assert tuple(metrics)[: len(REQUIRED_KEYS)] == REQUIRED_KEYS
    assert metrics["parameters"] == {"queues": 2}
    assert metrics["perf"] == "ideal"


@pytest.mark.parametrize("rows", [(), THREE_JOBS[2:]], ids=["no jobs", "none finished"])
def test_figures_that_need_a_finished_job_are_none_without_one(rows: Sequence[dict[str, float | None]]) -> None:
    metrics = metrics_of(jobs_frame(rows))
    for key in ("avg_jct", "p99_jct", "max_jct", "makespan", "avg_queue_delay", "gpu_utilization", "avg_slowdown"):
        assert metrics[key] is None
    assert metrics["completed"] == 0
    json.loads(to_json(metrics))


def test_a_job_of_no_length_has_no_slowdown_and_breaks_nothing() -> None:
    row = {**THREE_JOBS[0], "duration_s": 0.0, "finish_s": 0.0, "jct_s": 0.0, "useful_gpu_s": 0.0}
    metrics = metrics_of(jobs_frame([row]))
    assert metrics["avg_slowdown"] is None
    assert metrics["makespan"] == 0.0
    assert metrics["gpu_utilization"] is None


def test_limits_of_the_job_classes_are_parameters() -> None:
    jobs = jobs_frame(THREE_JOBS)
    metrics = metrics_of(jobs, small_gpus=1, short_s=1000)
    assert metrics["avg_jct_large_short"] == 1090.0
    assert (metrics["small_max_gpus"], metrics["short_below_s"]) == (1.0, 1000.0)


def test_queue_length_is_weighted_by_time() -> None:
    timeline = pl.DataFrame(
        {"time_s": [0.0, 10.0, 40.0], "waiting_jobs": [4, 0, 9], "busy_gpus": [1, 2, 0], "waiting_gpus": [8, 0, 9]}
    )
    metrics = metrics_of(jobs_frame(THREE_JOBS), timeline=timeline)
    assert metrics["avg_waiting_jobs"] == 1.0
    assert metrics["max_waiting_jobs"] == 9


def test_communication_is_weighted_by_gpus_and_running_time() -> None:
    """Given 1 GPU for 100 s with 10 s of talk and 3 GPUs for 100 s with 50 s of it: (10 + 150) of 400 GPU-seconds."""
    jobs = jobs_frame([{"ran_s": 100.0, "comm_s": 10.0}, {"gpus": 3.0, "ran_s": 100.0, "comm_s": 50.0}])
    assert metrics_of(jobs)["communication_share"] == pytest.approx(160 / 400)
    assert metrics_of(jobs_frame([{}]))["communication_share"] is None


def test_spread_is_a_share_of_useful_work() -> None:
    jobs = jobs_frame([{"useful_gpu_s": 300.0, "spread_gpu_s": 100.0}, {"useful_gpu_s": 100.0}])
    metrics = metrics_of(jobs)
    assert (metrics["spread_gpu_seconds"], metrics["spread_share"]) == (100.0, 0.25)
    assert metrics_of(jobs_frame([{}]))["spread_share"] is None


def test_fragmentation_counts_idle_gpus_that_somebody_waits_for() -> None:
    """Two GPUs for 1,100 s. Idle and wanted: both for 10 s (8 were asked for), one for 20 s (only 1 was), then none."""
    timeline = pl.DataFrame(
        {
            "time_s": [0.0, 10.0, 30.0, 40.0],
            "busy_gpus": [0, 0, 2, 0],
            "waiting_jobs": [1, 1, 3, 0],
            "waiting_gpus": [8, 1, 9, 0],
        }
    )
    metrics = metrics_of(jobs_frame(THREE_JOBS), timeline=timeline)
    assert metrics["idle_wanted_gpu_seconds"] == 40.0
    assert metrics["fragmentation"] == pytest.approx(40 / 2200)
    assert metrics_of(jobs_frame(THREE_JOBS))["fragmentation"] is None


def test_the_models_of_the_jobs_are_part_of_the_figures() -> None:
    metrics = metrics_of(jobs_frame([{"model": "vgg16"}, {"model": "resnet50"}, {"model": "vgg16"}, {}]))
    assert metrics["models"] == {"resnet50": 1, "vgg16": 2}
    assert "models" not in metrics_of(jobs_frame(THREE_JOBS))


def test_json_is_strict_even_for_infinite_and_odd_parameters() -> None:
    odd = {
        "knob": math.inf,
        "nothing": math.nan,
        "limits": (np.float64(1.5), np.int64(2)),
        "on": True,
        "kinds": {"b", "a"},
        "array": np.array([1, 2]),
    }
    text = to_json(metrics_of(jobs_frame(THREE_JOBS), parameters=odd))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(text, parse_constant=refuse)["parameters"] == {
        "array": [1, 2],
        "kinds": ["a", "b"],
        "knob": "inf",
        "limits": [1.5, 2],
        "nothing": None,
        "on": True,
    }


def test_json_is_the_same_bytes_but_for_wall_seconds() -> None:
    trace = workload(60)
    texts = [to_json({**toy_result(trace).metrics, "wall_seconds": wall}) for wall in (0.1, 0.2)]
    differing = [a for a, b in zip(*(text.splitlines() for text in texts), strict=True) if a != b]
    assert [line.split(":")[0].strip() for line in differing] == ['"wall_seconds"']


SOME_JOBS = toy_result(workload(40)).jobs


@given(st.permutations(range(SOME_JOBS.height)))
def test_figures_do_not_depend_on_the_order_of_rows(order: list[int]) -> None:
    jobs = SOME_JOBS
    assert to_json(metrics_of(jobs[order])) == to_json(metrics_of(jobs))


def test_every_job_is_in_exactly_one_class(four: list[Result]) -> None:
    masks = class_masks(four[0].jobs)
    assert list(masks) == list(JOB_CLASSES)
    assert (sum(mask.astype(int) for mask in masks.values()) == 1).all()


def test_account_adds_up_to_the_capacity(twelve: list[Result]) -> None:
    parts = ("useful", "overhead", "lost", "idle_held", "unused")
    for result in twelve:
        held = sum(result.metrics[f"{part}_gpu_seconds"] for part in parts)  # type: ignore[misc]
        assert held == pytest.approx(result.total_gpus * result.metrics["makespan"])  # type: ignore[operator]


def test_a_full_cluster_has_nothing_unused_and_an_overbooked_one_shows_it() -> None:
    full = {**THREE_JOBS[0], "gpus": 2.0, "useful_gpu_s": 200.0 * (1 + 1e-12)}
    assert metrics_of(jobs_frame([full]))["unused_gpu_seconds"] == 0.0
    assert metrics_of(jobs_frame([{**full, "useful_gpu_s": 250.0}]))["unused_gpu_seconds"] == -50.0
