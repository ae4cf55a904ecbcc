"""The Gittins index against the published values and against its definition; how distributions are learned."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from kit.workloads import finishes, story, trace_of
from thebes import UserError, simulate
from thebes.policy.orders.gittins import Gittins, ShortestExpected
from thebes.policy.orders.learning import FIRST_REFRESH, known_count, next_refresh
from thebes.policy.orders.priority import distribution_of, gittins_index
from thebes.policy.orders.samples import read_samples
from thebes.policy.orders.tiresias import TiresiasG
from thebes.sim.costs import FREE_OF_COST
from thebes.sim.released_tiresias import released_samples


@pytest.mark.parametrize(
    ("attained", "index"),
    [
        (0, 297.1591),
        (1000, 236.8615),
        (3250, 122.1628),
        (7200, 49.9348),
        (10_000, 42.7197),
        (50_000, 7.5152),
        (100_000, 3.439),
    ],
)
def test_the_published_values(attained: float, index: float) -> None:
    """Spec 3.3, `correct fixed D`, on the published distribution; millionths, as printed there."""
    published = distribution_of(released_samples().astype(np.float64))
    assert round(1e6 * gittins_index(published, float(attained), 3250.0), 4) == index


def by_definition(samples: list[float], attained: float, horizon: float) -> float:
    """P(S - a <= D | S > a) / E[min(S - a, D) | S > a], sample by sample."""
    left = [s - attained for s in samples if s > attained]
    if not left:
        return 0.0
    chance = sum(1 for s in left if s <= horizon) / len(left)
    return chance / (math.fsum(min(s, horizon) for s in left) / len(left))


services = st.integers(1, 200).map(float)


@given(
    samples=st.lists(services, min_size=1, max_size=40),
    attained=st.one_of(st.just(0.0), services, st.floats(0, 250)),
    horizon=st.one_of(services, st.just(math.inf)),
)
@effort(300)
def test_the_index_is_its_definition(samples: list[float], attained: float, horizon: float) -> None:
    room = distribution_of(np.array(samples), room=5)  # room for more must not matter
    expected = by_definition(samples, attained, horizon)
    if math.isfinite(expected) and all(abs(s - attained) > 1e-9 for s in samples if s != attained):
        assert gittins_index(room, attained, horizon) == pytest.approx(expected, rel=1e-6)


def test_nothing_is_known_beyond_the_largest_sample() -> None:
    known = distribution_of(np.array([10.0, 20.0]))
    assert gittins_index(known, 20.0, 5.0) == 0.0
    assert gittins_index(known, 19.0, math.inf) == 1.0


# --- in a run ---------------------------------------------------------------------------------------------------------


def samples_file(tmp_path: Path, *values: float) -> Path:
    path = tmp_path / "samples.csv"
    path.write_text("gpu_time\n" + "".join(f"{value}\n" for value in values))
    return path


def test_the_job_most_likely_to_end_soon_goes_first(tmp_path: Path) -> None:
    """Given that jobs take 10 or 1000 GPU-seconds, one that has had 10 gives way to one that is new."""
    policy = Gittins(samples_file=samples_file(tmp_path, *[10] * 9, 1000), learn=False, delta_gpu_s=10.0, quantum_s=1.0)
    result = simulate(trace_of((0, 1, 30), (5, 1, 10)), "1x1", policy, costs=FREE_OF_COST, perf="ideal")
    # at 10 s its index falls: nine in ten jobs would have ended by then
    assert story(result, "suspend", "resume") == [(10, 0, "suspend"), (20, 0, "resume")]
    assert finishes(result) == [40, 20]


def test_until_something_is_known_jobs_go_in_order_of_first_start() -> None:
    trace = trace_of((0, 1, 5), (1, 2, 100), (2, 1, 100))
    for policy in (Gittins(), ShortestExpected(), TiresiasG()):
        assert finishes(simulate(trace, "1x2", policy, costs=FREE_OF_COST, perf="ideal")) == [5, 202, 102]


def test_finished_jobs_change_the_order_once_there_are_enough_of_them() -> None:
    """Given many finished jobs of 1 GPU-second, what has outlived them all yields to a newcomer, if one learns."""
    short = [(float(i), 1, 1) for i in range(40)]
    trace = trace_of(*short, (50, 1, 50), (60, 1, 1))
    learned, ignorant = (
        simulate(trace, "1x1", Gittins(learn=learn, quantum_s=1.0), costs=FREE_OF_COST, perf="ideal")
        for learn in (True, False)
    )
    assert finishes(learned)[-2:] == [101, 61]
    assert finishes(ignorant)[-2:] == [100, 101]


@given(finished=st.integers(0, 3000))
@effort(50)
def test_the_distribution_is_taken_anew_after_every_tenth_more(finished: int) -> None:
    known = known_count(finished)
    assert known <= finished < next_refresh(known)
    assert known == 0 or known >= FIRST_REFRESH
    assert next_refresh(known) - known <= max(FIRST_REFRESH, 8, known // 10)


# --- sample files -----------------------------------------------------------------------------------------------------


def test_samples_with_and_without_a_header(tmp_path: Path) -> None:
    assert read_samples(samples_file(tmp_path, 3, 1.5)).tolist() == [3.0, 1.5]
    bare = tmp_path / "bare.txt"
    bare.write_bytes(b"3\r\n\r\n 1.5 \r\n")
    assert read_samples(bare).tolist() == [3.0, 1.5]
    assert read_samples(None).tolist() == []


def test_the_published_file(shared: Path) -> None:
    assert np.array_equal(read_samples(shared / "tiresias" / "yarn-gput1000.csv"), released_samples())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"gpu_time\n5\n\nmany\n", "samples.csv, line 4: 'many' is not a positive number\none sample per line"),
        (b"gpu_time\n0\n", "samples.csv, line 2: '0' is not a positive number"),
        (b"3\nnan\n", "samples.csv, line 2: 'nan' is not a positive number"),
        (b"gpu_time\n", "samples.csv: no samples\none sample per line, in GPU-seconds"),
        (b"", "samples.csv: no samples"),
        (b"\xff\xfe\x00", "samples.csv: not a text file\ngive a text file of GPU-seconds, one per line"),
    ],
)
def test_mistakes_in_sample_files(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        TiresiasG(samples_file=path)
    assert message in str(caught.value)


def test_a_missing_sample_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.csv: cannot read samples: No such file or directory\ngive a text file"):
        Gittins(samples_file=tmp_path / "none.csv")
