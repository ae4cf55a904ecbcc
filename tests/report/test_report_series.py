"""What the charts draw: thinning keeps what it must, labels tell runs apart, lives follow events."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thebes.report import series, units
from thebes.report.result import EVENT_KINDS, Result
from thebes.report.series import RUNNING, SUSPENDED, WAITING, Span, Steps

gaps = st.lists(st.floats(0, 1e4, allow_nan=False), min_size=2, max_size=80)


@given(gaps, st.data(), st.integers(1, 40))
def test_thinning_a_step_function_keeps_the_area_under_it(
    widths: list[float], data: st.DataObject, points: int
) -> None:
    edges = np.concatenate([[0.0], np.cumsum(widths)])
    values = np.array(
        data.draw(st.lists(st.integers(0, 1000), min_size=len(widths), max_size=len(widths))), dtype=float
    )
    steps = Steps(edges, values)
    small = series.thin(steps, points=points)
    assert small.area == pytest.approx(steps.area, rel=1e-9, abs=1e-6)
    assert (small.edges[0], small.edges[-1]) == (edges[0], edges[-1])
    if edges[-1] > 0 and len(values) > points:
        assert len(small.values) <= points + 1
        assert small.values.min() >= values.min() - 1e-6
        assert small.values.max() <= values.max() + 1e-6


def test_a_bin_is_the_time_weighted_mean() -> None:
    steps = Steps(np.array([0.0, 1.0, 10.0, 20.0]), np.array([10.0, 0.0, 4.0]))
    small = series.thin(steps, width_s=10.0, points=2)
    assert small.values.tolist() == pytest.approx([1.0, 4.0])


def test_a_short_step_function_is_drawn_as_it_is() -> None:
    steps = Steps(np.array([0.0, 1.0, 2.0]), np.array([1.0, 2.0]))
    assert series.thin(steps) is steps


@given(st.lists(st.floats(0.1, 1e7), min_size=1, max_size=300), st.integers(10, 100))
def test_a_thinned_distribution_is_exact_where_it_steps(values: list[float], points: int) -> None:
    known = np.array(values)
    x, y = series.cumulative(known, of=len(known), points=points)
    assert len(x) <= max(points, len(np.unique(known)))
    assert x[-1] == known.max()
    assert y[-1] == 1.0
    for at, share in zip(x, y, strict=True):
        assert share <= (known <= at).mean() + 1e-12


def test_unfinished_jobs_keep_the_distribution_below_one_and_small_values_gather_at_the_floor() -> None:
    x, y = series.cumulative(np.array([0.0, 0.5, 9.0, np.nan]), of=4, floor=1.0)
    assert x.tolist() == [1.0, 9.0]
    assert y.tolist() == [0.5, 0.75]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([{"policy": "fifo"}, {"policy": "srtf"}], ["fifo", "srtf"]),
        (
            [{"policy": "fifo", "placement": "yarn"}, {"policy": "fifo", "placement": "random"}, {"policy": "srtf"}],
            ["fifo, yarn", "fifo, random", "srtf"],
        ),
        (
            [{"policy": "las", "parameters": {"q": 1, "k": 2}}, {"policy": "las", "parameters": {"q": 5, "k": 2}}],
            ["las, q=1", "las, q=5"],
        ),
        ([{"policy": "fifo"}, {"policy": "fifo"}], ["fifo", "fifo #2"]),
    ],
)
def test_labels_say_no_more_than_tells_runs_apart(runs: list[dict[str, object]], expected: list[str]) -> None:
    assert series.labels(runs) == expected


def test_the_life_of_a_job_follows_its_events() -> None:
    story = [(0.0, "submit"), (5.0, "start"), (6.0, "demote"), (9.0, "suspend"), (12.0, "resume"), (20.0, "finish")]
    events = pl.DataFrame(
        [(time, 0, kind) for time, kind in story],
        schema={"time_s": pl.Float64, "job": pl.UInt32, "kind": pl.Enum(EVENT_KINDS)},
        orient="row",
    )
    assert series.spans(events) == [
        Span(0, WAITING, 0.0, 5.0),
        Span(0, RUNNING, 5.0, 9.0),
        Span(0, SUSPENDED, 9.0, 12.0),
        Span(0, RUNNING, 12.0, 20.0),
    ]
    assert series.spans(events[:2]) == [Span(0, WAITING, 0.0, 5.0)]


def test_lives_and_timeline_tell_the_same_story(four: list[Result]) -> None:
    for result in four:
        gpus = result.jobs["gpus"].to_list()
        held = sum(gpus[s.job] * (s.end_s - s.begin_s) for s in series.spans(result.events) if s.state == RUNNING)
        assert held == pytest.approx(series.steps_of(result.timeline, "busy_gpus").area)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.25, "0.25 s"),
        (42, "42.0 s"),
        (750, "12.5 min"),
        (5112, "1.42 h"),
        (280_800, "3.25 d"),
        (86_400_000, "1,000 d"),
    ],
)
def test_durations_are_said_in_one_unit(seconds: float | None, words: str) -> None:
    assert units.duration(seconds) == words


def test_other_units() -> None:
    assert units.share(0.8612) == "86.1%"
    assert units.share(0.0001) == "<0.1%"
    assert units.share(0) == "0.0%"
    assert units.ratio(3.0, 2.0) == "1.50×"
    assert units.ratio(3.0, None) == units.ratio(3.0, 0.0) == "–"
    assert units.gpu_time(7200) == "2.00 GPU-h"
    assert units.gpu_time(90) == "90.0 GPU-s"
    assert units.count(12345) == "12,345"
    assert units.axis_unit(3 * 86_400).name == "days"
    assert list(units.log_ticks(np.array([70.0, 5000.0])).values()) == ["1 min", "10 min", "1 h", "6 h"]
