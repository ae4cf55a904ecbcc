"""Our own policies against published figures: where the released simulator has no slip, the real simulator must agree.

Same rows as in the compatibility tests, but run by the event-driven simulator with placement `count`, ideal speed and
no costs: float time, our orders, our checker. Jobs that are larger than the cluster are refused by us, so rows on n1g4
are left out. Two rows differ in one figure, through a tie.
"""

from __future__ import annotations

import csv
from functools import lru_cache

import numpy as np
import polars as pl
import pytest

from kit.workloads import shared_data
from thebes import read_cluster, read_trace, simulate
from thebes.model.trace import Trace
from thebes.sim.costs import FREE_OF_COST

TIRESIAS = shared_data() / "tiresias"
OURS = {"fifo": "fifo", "fjf": "backfill", "sjf": "sjf", "shortest": "srtf", "shortest-gpu": "srsf"}
FIGURES = ("avg_jct", "median_jct", "p95_jct", "p99_jct", "makespan", "preemptions")
Row = dict[str, str]

# At 504 s jobs 13 (8 GPUs, 55 s left) and 16 (4 GPUs, 110 s left) have the same remaining service. We serve the
# earlier submission; the released simulator sorts its list in place, so that the order of a moment ago decides.
TIES = {
    ("60_job.csv", "n4g4.csv", "shortest-gpu"): {"avg_jct": 194.983},
    ("60x20_job.csv", "n4g4.csv", "shortest-gpu"): {"avg_jct": 3899.667},
}


def anchors() -> list[object]:
    if not (TIRESIAS / "anchors.csv").exists():
        reason = "the shared data is not beside this checkout (shared/data/tiresias/anchors.csv)"
        return [pytest.param({}, id="no-shared-data", marks=pytest.mark.skip(reason=reason))]
    with (TIRESIAS / "anchors.csv").open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["schedule"] in OURS
            and (row["placement"], row["variant"]) == ("count", "as-released")
            and row["cluster"] != "n1g4.csv"
        ]
    return [
        pytest.param(row, id="/".join(row[key].removesuffix(".csv") for key in ("trace", "cluster", "schedule")))
        for row in rows
    ]


@lru_cache
def jobs_of(name: str) -> Trace:
    return read_trace(TIRESIAS / name)


@pytest.mark.parametrize("row", anchors())
def test_our_policy_gives_the_published_figures(row: Row) -> None:
    result = simulate(
        jobs_of(row["trace"]),
        read_cluster(str(TIRESIAS / row["cluster"])),
        OURS[row["schedule"]],
        placement="count",
        perf="ideal",
        costs=FREE_OF_COST,
    )
    jct = result.jobs["jct_s"].to_numpy()
    median, p95, p99 = np.percentile(jct, [50, 95, 99])
    makespan = result.jobs["finish_s"].max() - result.jobs["submit_s"].min()
    values = (jct.mean(), median, p95, p99, makespan, result.jobs["preemptions"].sum())
    assert len(jct) == int(row["jobs_completed"])
    ours = {name: round(float(value), 3) for name, value in zip(FIGURES, values, strict=True)}
    differs = TIES.get((row["trace"], row["cluster"], row["schedule"]), {})
    assert ours == {name: float(row[name]) for name in FIGURES} | differs


@pytest.mark.skipif(not TIRESIAS.is_dir(), reason="the shared data is not beside this checkout")
def test_the_tie_that_two_rows_differ_by() -> None:
    """Given equal remaining service at 504 s, when a third job arrives, 16 gives way and 13, submitted first, stays."""
    result = simulate(jobs_of("60_job.csv"), "4x4", "srsf", placement="count", perf="ideal", costs=FREE_OF_COST)
    jobs, at_s = result.jobs, 504.0
    first = result.events.filter((pl.col("time_s") < at_s) & pl.col("job").is_in([13, 16]))
    assert first.select("job", pl.col("kind").cast(pl.String)).rows() == [
        (13, "submit"), (13, "start"), (16, "submit"), (16, "start")
    ]  # fmt: skip
    ran = {row: at_s - jobs["first_start_s"][row] for row in (13, 16)}
    left = {row: (jobs["duration_s"][row] - ran[row]) * jobs["gpus"][row] for row in (13, 16)}
    assert left[13] == left[16] == 440.0
    now = result.events.filter((pl.col("time_s") == at_s) & (pl.col("kind").cast(pl.String) == "suspend"))
    assert now["job"].to_list() == [16]
