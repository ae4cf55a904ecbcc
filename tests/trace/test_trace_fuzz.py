"""Whatever the bytes, reading ends in a trace or in a `UserError`: never in anything else."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from trace_samples import SAMPLES

from kit.effort import effort
from thebes.model.errors import UserError
from thebes.trace import FORMATS, read, sample_path, write

RELAXED = effort(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
NASTY = st.sampled_from(
    ["", "-1", "nan", "inf", "1e400", "99999999999999999999", '"', ",", "\n", "\t", "|", ";", "None", "\u00e9", "\r",
     "0", "-0.0", "[", "{", "}", "null", "2020-01-01 00:00:00", "9999-99-99", "1-1", "1_0", "\x1f", "PAR1", "\u2028"]
)  # fmt: skip


def attempt(folder: Path, data: bytes, name: str = "fuzz", format_name: str | None = None) -> None:
    path = folder / name
    path.write_bytes(data)
    try:
        trace = read(path, format=format_name)
    except UserError:
        return
    assert len(trace) > 0
    assert trace.jobs["submit_time"].is_sorted()
    assert (trace.jobs["duration"] > 0).all()
    assert (trace.jobs["num_gpus"] > 0).all()
    assert trace.jobs["job_id"].n_unique() == len(trace)


@RELAXED
@given(data=st.binary(max_size=400), format_name=st.sampled_from([None, *(known.name for known in FORMATS)]))
def test_random_bytes(tmp_path: Path, data, format_name):
    attempt(tmp_path, data, format_name=format_name)


@RELAXED
@given(text=st.text(max_size=300), format_name=st.sampled_from([None, *(known.name for known in FORMATS)]))
def test_random_text(tmp_path: Path, text, format_name):
    attempt(tmp_path, text.encode("utf-8", "replace"), format_name=format_name)


@RELAXED
@given(data=st.binary(max_size=200), magic=st.sampled_from([b"\x1f\x8b", b"PAR1", b"PK\x03\x04"]))
def test_random_bytes_behind_a_magic_number(tmp_path: Path, data, magic):
    attempt(tmp_path, magic + data + magic)


@pytest.mark.parametrize("name", SAMPLES)
@effort(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_samples(tmp_path: Path, name, data):
    text = SAMPLES[name]
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(text)))
        end = min(len(text), begin + data.draw(st.integers(0, 12)))
        text = text[:begin] + data.draw(NASTY) + text[end:]
    packed = data.draw(st.booleans())
    asked = data.draw(st.sampled_from([None, name]))
    attempt(tmp_path, gzip.compress(text.encode()) if packed else text.encode(), format_name=asked)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_cut_off_anywhere(tmp_path: Path, name):
    data = SAMPLES[name].encode()
    for end in range(0, len(data), max(1, len(data) // 60)):
        attempt(tmp_path, data[:end])


@effort(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 200))
def test_damaged_parquet(tmp_path: Path, place, byte, cut):
    good = tmp_path / "good.parquet"
    if not good.exists():
        write(read(sample_path()).head(20), good)
    data = bytearray(good.read_bytes())
    data[place % len(data)] = byte
    attempt(tmp_path, bytes(data[: len(data) - cut]))
