"""Published truth: what the released Tiresias simulator printed, against our re-implementation, to the last digit.

One test per row of the anchor table. The full table lives beside the project in `shared/data/tiresias`; the rows on the
60-job trace under contention ship with the tests and always run.
"""

from __future__ import annotations

import csv
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from kit.workloads import shared_data
from thebes.model.errors import UserError
from thebes.sim import released_gandiva
from thebes.sim import released_tiresias as released
from thebes.sim.released_tiresias import ClusterShape, ReleasedRun, run_released

SHIPPED = Path(__file__).parent / "data"
SHARED = shared_data() / "tiresias"
FIGURES = ("avg_jct", "median_jct", "p95_jct", "p99_jct", "makespan", "preemptions", "promotions")
SHAPES = {
    "n1g4.csv": ClusterShape(1, 1, 4, 40, 256),
    "n2g4.csv": ClusterShape(1, 2, 4, 128, 256),
    "n4g4.csv": ClusterShape(1, 4, 4, 128, 256),
}
Row = dict[str, str]
Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@lru_cache
def read_trace(path: Path) -> Columns:
    rows = read_rows(path)
    gpus, submit, duration = (
        np.array([int(row[name]) for row in rows], dtype=np.int64) for name in ("num_gpu", "submit_time", "duration")
    )
    return gpus, submit, duration


def read_shape(path: Path) -> ClusterShape:
    names = ("num_switch", "num_node_p_switch", "num_gpu_p_node", "num_cpu_p_node", "mem_p_node")
    (row,) = read_rows(path)
    return ClusterShape(*(int(row[name]) for name in names))


def anchors(path: Path) -> list[object]:
    """The rows of a table as test parameters with readable ids; a single skipped one where there is no table."""
    if not path.exists():
        reason = "the shared data is not beside this checkout (shared/data/tiresias/anchors.csv)"
        return [pytest.param({}, id="no-shared-data", marks=pytest.mark.skip(reason=reason))]
    keys = ("trace", "cluster", "placement", "schedule", "variant")
    return [pytest.param(row, id="/".join(row[key].removesuffix(".csv") for key in keys)) for row in read_rows(path)]


def run_row(row: Row, trace: Columns, shape: ClusterShape) -> ReleasedRun:
    two_queues = row["variant"] == "as-released K=2 [3250]"
    return run_released(
        *trace,
        shape=shape,
        placement=row["placement"],
        schedule=row["schedule"],
        variant="as-released" if two_queues else row["variant"],
        queue_limits=(3250,) if two_queues else released.QUEUE_LIMITS,
    )


def figures(run: ReleasedRun, submit: np.ndarray) -> dict[str, float]:
    """As the anchors were measured: over completed jobs, linear interpolation, three decimals."""
    done = run.finish_s >= 0
    jct = (run.finish_s - submit)[done]
    median, p95, p99 = np.percentile(jct, [50, 95, 99])
    values = (
        jct.mean(),
        median,
        p95,
        p99,
        run.finish_s.max() - submit.min(),
        run.preemptions[done].sum(),
        run.promotions[done].sum(),
    )
    return {name: round(float(value), 3) for name, value in zip(FIGURES, values, strict=True)}


def check_row(row: Row, trace: Columns, shape: ClusterShape) -> None:
    if row["jobs_completed"] == "0":  # the release crashed: we refuse and say so
        with pytest.raises(UserError, match="the released simulator crashes"):
            run_row(row, trace, shape)
        return
    run = run_row(row, trace, shape)
    assert len(run.finish_s) - len(run.stuck) == int(row["jobs_completed"])
    assert figures(run, trace[1]) == {name: float(row[name]) for name in FIGURES}


@pytest.mark.parametrize("row", anchors(SHIPPED / "anchors_60_job.csv"))
def test_shipped_anchor(row: Row) -> None:
    check_row(row, read_trace(SHIPPED / row["trace"]), SHAPES[row["cluster"]])


@pytest.mark.parametrize("row", anchors(SHARED / "anchors.csv"))
def test_anchor(row: Row) -> None:
    check_row(row, read_trace(SHARED / row["trace"]), read_shape(SHARED / row["cluster"]))


# --- the Gittins table -----------------------------------------------------------------------------------------------


def test_released_gittins_reference_values() -> None:
    samples, table = released.released_samples(), released.released_gittins_table(released.released_samples())
    reference = {
        0: 299.701,
        500: 249.8181,
        1000: 191.5154,
        3250: 87.4493,
        7200: 36.7358,
        10_000: 29.9396,
        50_000: 5.463,
        100_000: 4.0659,
    }
    assert {a: table[np.searchsorted(samples, a, side="right")] for a in reference} == reference
    assert table[-1] == 0.0


def test_correct_gittins_reference_values() -> None:
    """At the exact service and unrounded; the roundings of P and E that `corrected` keeps move the fourth digit."""
    samples = released.released_samples()
    reference = {
        0: 297.1591,
        1000: 236.8615,
        3250: 122.1628,
        7200: 49.9348,
        10_000: 42.7197,
        50_000: 7.5152,
        100_000: 3.439,
    }
    for attained, expected in reference.items():
        left = samples[samples > attained] - attained
        index = 1e6 * np.mean(left <= released.GITTINS_DELTA) / np.mean(np.minimum(left, released.GITTINS_DELTA))
        assert round(float(index), 4) == expected
        ours = released._gittins_index(samples, attained, released.GITTINS_DELTA, corrected=True)
        assert ours == pytest.approx(expected, rel=2e-4)


def test_the_shipped_distribution_is_the_published_one() -> None:
    samples = released.released_samples()
    assert (len(samples), samples[0], samples[-1], np.median(samples)) == (1001, 121, 53_294_624, 2227)


# --- quirks that no anchor shows alone -------------------------------------------------------------------------------

ONE_GPU = ClusterShape(1, 1, 1, 8, 64)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_completion_planned_for_an_arrival_survives_a_preemption() -> None:
    """Quirk 14: job 0 is due at 20, when job 2 arrives; it is demoted and preempted at 10, and still ends at 20."""
    run = run_released(
        ints(1, 1, 1), ints(0, 1, 20), ints(20, 5, 5), shape=ONE_GPU, schedule="dlas", queue_limits=(10,)
    )
    assert run.finish_s.tolist() == [20, 15, 25]
    assert run.executed_s.tolist() == [15, 5, 5]
    story = [
        (int(time), int(job), released.EVENTS[kind])
        for time, job, kind in zip(run.event_time_s, run.event_job, run.event_kind, strict=True)
    ]
    assert story == [
        (0, 0, "start"),
        (10, 0, "demote"),
        (10, 0, "suspend"),
        (10, 1, "start"),
        (15, 1, "finish"),
        (15, 0, "resume"),
        (20, 0, "finish"),
        (20, 2, "start"),
        (25, 2, "finish"),
    ]


def test_a_zero_second_job_never_ends_under_fifo() -> None:
    """Quirk 16, and the job behind it is stuck with it."""
    run = run_released(ints(1, 1), ints(0, 1), ints(0, 5), shape=ONE_GPU, schedule="fifo")
    assert run.stuck == (0, 1)
    assert run.first_start_s.tolist() == [0, -1]


def test_rows_need_not_be_sorted() -> None:
    run = run_released(ints(1, 1), ints(7, 0), ints(5, 3), shape=ONE_GPU, schedule="fifo")
    assert run.finish_s.tolist() == [12, 3]
    assert run.event_job.tolist() == [1, 1, 0, 0]


def test_an_empty_trace_runs() -> None:
    for schedule in released.SCHEDULES:
        placement = "gandiva" if schedule == "gandiva" else "count"
        run = run_released(
            ints(), ints(), ints(), shape=ONE_GPU, placement=placement, schedule=schedule, variant="corrected"
        )
        assert len(run.finish_s) == len(run.event_job) == 0


def test_an_endless_run_is_refused() -> None:
    shape = ClusterShape(1, 100, 8, 64, 256)
    with pytest.raises(UserError, match="never ends"):
        run_released(ints(400), ints(0), ints(50), shape=shape, schedule="dlas-gpu", queue_limits=(300,))


def test_gandiva_stops_where_the_release_would_loop() -> None:
    run = run_released(ints(4), ints(0), ints(9), shape=ONE_GPU, placement="gandiva", schedule="gandiva")
    assert run.stuck == (0,)


def test_python2_rounding_of_shares() -> None:
    for whole in range(1, 260):
        for part in range(1, whole + 1):
            exact = Decimal(part / whole).quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)
            assert released._hundredths.py_func(part, whole) == int(exact * 100), (part, whole)


def test_python2_dict_order() -> None:
    assert released.python2_dict_order([1, 8, 2, 4]) == [8, 1, 2, 4]
    assert released.python2_dict_order([4, 8, 1, 32, 2, 16]) == [32, 1, 2, 4, 8, 16]
    assert tuple(released.python2_dict_order(sorted(released_gandiva.SIZES), capacity=16)) == released_gandiva.SIZES


# --- the same code, uncompiled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "placement", "variant"),
    [
        ("fifo", "yarn", "as-released"),
        ("lpjf", "count", "as-released"),
        ("shortest-gpu", "yarn", "as-released"),
        ("shortest-expected", "count", "memfix"),
        ("gittins", "count", "corrected"),
        ("dlas-gpu-05", "count", "as-released"),
        ("dlas-gpu-gittins-1", "count", "corrected"),
        ("multi-dlas-gpu", "count", "as-released"),
    ],
)
def test_compiled_and_plain_code_agree(
    schedule: str, placement: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, submit, duration = read_trace(SHIPPED / "60_job.csv")
    trace = (gpus, submit * 20, duration * 20)
    options = {"shape": SHAPES["n4g4.csv"], "placement": placement, "schedule": schedule, "variant": variant}

    compiled = run_released(*trace, **options)
    for name, function in list(vars(released).items()):
        if hasattr(function, "py_func"):
            monkeypatch.setattr(released, name, function.py_func)
    plain = run_released(*trace, **options)

    for name in ReleasedRun.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(compiled, name), getattr(plain, name), err_msg=name)


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "dlas-gpu-3"}, "no schedule 'dlas-gpu-3'"),
        ({"schedule": "fifoo"}, "did you mean 'fifo'?"),
        ({"placement": "yam"}, "did you mean 'yarn'?"),
        ({"variant": "correct"}, "did you mean 'corrected'?"),
        ({"placement": "random"}, "crashes at the first completion"),
        ({"schedule": "gittins"}, "variant=gittins-distfix"),
        ({"schedule": "multi-dlas-gpu", "placement": "yarn"}, "Use placement=count"),
        ({"schedule": "gandiva"}, "run only with each other"),
        ({"schedule": "gandiva", "placement": "gandiva", "gpus": ints(3)}, "crashes on a job of 3 GPUs"),
        ({"queue_limits": (7200, 3250)}, "do not rise"),
        ({"queue_limits": ()}, "do not rise"),
        ({"samples": ints(5)}, "at least two samples"),
        ({"gpus": ints(0)}, "row 0: GPU count 0 is below 1"),
        ({"gpus": ints(1, 1)}, "columns differ in length"),
    ],
)
def test_mistakes_are_told(options: dict[str, object], message: str) -> None:
    given = {"gpus": ints(1), "submit_s": ints(0), "duration_s": ints(5), "shape": ONE_GPU} | options
    with pytest.raises(UserError) as caught:
        run_released(**given)  # type: ignore[arg-type]
    assert message in str(caught.value)
