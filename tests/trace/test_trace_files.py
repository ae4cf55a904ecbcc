"""Written traces read back the same, and equal traces give equal bytes."""

from __future__ import annotations

import gzip
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kit.effort import effort
from thebes.model.trace import TRACE_SCHEMA, Trace
from thebes.trace import describe, generate, read, sample_path, write
from thebes.trace.generator import GeneratorSpec

ENDINGS = [".csv", ".csv.gz", ".parquet"]
# What a person could name a user or a cluster; blank is unknown, and outer space is no part of a name.
words = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zs", "Zl", "Zp")), min_size=1, max_size=8)
numbers = st.floats(0.001, 1e9, allow_nan=False)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    jobs = draw(st.integers(1, 12))
    column = lambda values: draw(st.lists(values, min_size=jobs, max_size=jobs))  # noqa: E731
    made = {
        "job_id": draw(st.lists(words, min_size=jobs, max_size=jobs, unique=True)),
        "submit_time": sorted(column(st.one_of(st.floats(-1e9, 1e9), st.integers(-1000, 1000).map(float)))),
        "duration": column(numbers),
        "num_gpus": column(st.one_of(st.integers(1, 512).map(float), st.sampled_from([0.25, 0.46, 0.1]))),
        "user": column(st.none() | words),
        "vc": column(st.none() | words),
        "status": column(st.none() | words),
        "gpu_type": column(st.none() | words),
        "num_nodes": column(st.none() | st.integers(1, 64)),
        "model": column(st.none() | words),
    }
    frame = pl.DataFrame(made, schema=dict(TRACE_SCHEMA)).with_columns(
        pl.col("submit_time") + 0.0,
        seen=pl.Series(column(st.integers(-(2**60), 2**60))),
        share=pl.Series([value + 0.5 for value in column(st.integers(0, 1000))]),
        label=pl.Series([f"x{word}" for word in column(words)]),
    )
    return Trace("made", frame)


@effort(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces(), ending=st.sampled_from(ENDINGS))
def test_a_trace_reads_back_exactly(tmp_path: Path, trace: Trace, ending: str):
    path = tmp_path / f"trace{ending}"
    write(trace, path)
    back = read(path)

    assert back.jobs.schema == trace.jobs.schema
    assert back.jobs.equals(trace.jobs)
    assert back.notes == ()


@pytest.mark.parametrize("ending", ENDINGS)
def test_equal_traces_give_equal_bytes(tmp_path: Path, ending):
    trace = read(sample_path())
    write(trace, tmp_path / f"a{ending}")
    write(trace, tmp_path / f"b{ending}")

    assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()


def test_whole_numbers_are_written_without_a_point(tmp_path: Path):
    write(read(sample_path()), tmp_path / "a.csv")

    assert (tmp_path / "a.csv").read_text().splitlines()[:2] == [
        "job_id,submit_time,duration,num_gpus,user,vc,status,gpu_type,num_nodes,model",
        "2869ce-m0,0,927475,4,,2869ce,NotPass,,,",
    ]


def test_gzip_carries_no_time_stamp(tmp_path: Path):
    write(read(sample_path()), tmp_path / "a.csv.gz")
    data = (tmp_path / "a.csv.gz").read_bytes()

    assert data[4:8] == b"\0\0\0\0"
    assert gzip.decompress(data).startswith(b"job_id,")


def test_the_shipped_sample_contends_for_64_gpus():
    figures = describe(read(sample_path()))

    assert figures["jobs"] == 822
    assert figures["max_gpus"] == 32
    assert 0.9 < figures["mean_gpu_demand"] / 64 < 1.1
    assert (sample_path().with_name("philly_sample.SOURCE.md")).read_text().count("CC BY 4.0") == 1


def test_describe_is_plain_data_and_adds_up():
    import json

    figures = describe(generate(GeneratorSpec(jobs=300, seed=3)))

    assert json.loads(json.dumps(figures)) == figures
    assert sum(row["jobs"] for row in figures["gpu_demand"]) == 300
    assert sum(row["share_of_gpu_hours"] for row in figures["gpu_demand"]) == pytest.approx(1.0)
    assert figures["models"] == 9


def test_describe_of_a_single_job():
    figures = describe(generate(GeneratorSpec(jobs=1)))

    assert (figures["jobs"], figures["span_s"], figures["arrivals_per_hour"]) == (1, 0.0, None)
