"""Small workloads for tests: jobs written down in a line each, and Hypothesis strategies that draw them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from hypothesis import strategies as st

from kit.effort import effort as effort  # whoever draws workloads says how many
from thebes.model.cluster import Cluster, from_toml
from thebes.model.trace import TRACE_SCHEMA, Trace
from thebes.report.result import Result

# A balanced and a skewed model of the tensor tables.
RESNET, VGG = "resnet50", "vgg19"
MODELS = (RESNET, VGG, "alexnet", "inception3")

# Two kinds of nodes in two racks; the first kind has two NVLink groups per node.
MIXED = """
name = "mixed"
[[node]]
count = 2
gpus = 4
groups = [2, 2]
gpu_type = "A100"
rack = "a"
[[node]]
count = 3
gpus = 2
gpu_type = "V100"
rack = "b"
"""


def mixed_cluster() -> Cluster:
    return from_toml(MIXED, "mixed.toml")


def trace_of(*jobs: Sequence[float], name: str = "test", **columns: Sequence[Any]) -> Trace:
    """A trace from (submit_time, gpus, duration) per job; further columns of the schema by name."""
    height = len(jobs)
    data: dict[str, Sequence[Any]] = {
        "job_id": [f"j{i}" for i in range(height)],
        "submit_time": [job[0] for job in jobs],
        "num_gpus": [job[1] for job in jobs],
        "duration": [job[2] for job in jobs],
        "model": [RESNET] * height,
        **columns,
    }
    frame = pl.DataFrame(
        {
            column: pl.Series(column, data.get(column, [None] * height), dtype=dtype, strict=False)
            for column, dtype in TRACE_SCHEMA.items()
        }
    )
    return Trace(name, frame)


def finishes(result: Result) -> list[float]:
    """When each job ended, in trace order."""
    return result.jobs["finish_s"].to_list()


def story(result: Result, *kinds: str) -> list[tuple[float, int, str]]:
    """(time, job, kind) of every event, or of those kinds only."""
    events = result.events.select("time_s", "job", pl.col("kind").cast(pl.String))
    return [row for row in events.rows() if not kinds or row[2] in kinds]


@st.composite
def workloads(
    draw: st.DrawFn, *, most_gpus: int = 6, most_jobs: int = 14, longest_s: int = 60, typed: bool = False
) -> Trace:
    """Few jobs on a coarse clock, so that ties, simultaneous events and crowding are common."""
    count = draw(st.integers(2, most_jobs))
    gap = st.sampled_from([0, 0, 1, 2, 5, 7.5])
    gpus = st.integers(1, most_gpus)
    duration = st.one_of(st.integers(1, longest_s), st.sampled_from([0.1, 10, 20, 33.3]))
    submit, jobs = 0.0, []
    for _ in range(count):
        submit += draw(gap)
        jobs.append((submit, draw(gpus), float(draw(duration))))
    models = draw(st.lists(st.sampled_from(MODELS), min_size=count, max_size=count))
    columns: dict[str, Sequence[Any]] = {"model": models}
    if typed:
        types = st.sampled_from([None, None, "A100", "V100", "A100|V100"])
        columns["gpu_type"] = draw(st.lists(types, min_size=count, max_size=count))
    return trace_of(*jobs, **columns)


def shared_data() -> Path:
    """The folder of real data beside the checkout (it may be absent)."""
    return Path(__file__).resolve().parents[3] / "shared" / "data"
