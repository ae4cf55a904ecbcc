"""Checkpoint files: whole or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
from attempts import environment

from kit.waiting import IMPORT_PATIENCE_S
from thebes import job


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_there_and_nothing_else(tmp_path: Path) -> None:
    path = job.atomic_save(lambda file: file.write(b"weights"), tmp_path / "new" / "step-1.bin")
    assert path.read_bytes() == b"weights"
    assert names(path.parent) == ["step-1.bin"]


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "step-1.bin"
    path.write_bytes(b"old")

    def half(file: BinaryIO) -> None:
        file.write(b"ne")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        job.atomic_save(half, path)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["step-1.bin"]


def test_a_kill_in_the_middle_of_a_save_leaves_no_checkpoint_under_a_good_name(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from thebes import job
def half(file):
    file.write(b"x" * 100_000); file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
job.atomic_save(lambda file: file.write(b"whole"), sys.argv[1] + "/step-1.bin")
job.atomic_save(half, sys.argv[1] + "/step-2.bin")
"""
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment(), timeout=IMPORT_PATIENCE_S)
    assert ended.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 2  # the checkpoint, and what was half written
    assert job.latest(tmp_path) == tmp_path / "step-1.bin"

    job.prune(tmp_path)
    assert names(tmp_path) == ["step-1.bin"]


def test_latest_goes_by_the_number_then_by_age(tmp_path: Path) -> None:
    assert job.latest(tmp_path) is None
    assert job.latest(tmp_path / "missing") is None
    for name in ("step-9.bin", "step-10.bin", "step-2.bin", ".step-99.bin", "step-99.bin.tmp", "notes"):
        (tmp_path / name).touch()
    (tmp_path / "checkpoint-8").mkdir()
    assert job.latest(tmp_path) == tmp_path / "step-10.bin"
    assert job.latest(tmp_path, "checkpoint-*") == tmp_path / "checkpoint-8"

    plain = tmp_path / "plain"
    plain.mkdir()
    for age, name in enumerate(("a", "c", "b")):
        (plain / name).touch()
        os.utime(plain / name, (age, age))
    assert job.latest(plain) == plain / "b"


def test_prune_keeps_the_newest_and_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    for name in ("step-1.bin", "step-2.bin", "step-10.bin", "events.log"):
        (tmp_path / name).touch()
    (tmp_path / "step-0").mkdir()  # a folder is never deleted
    assert [path.name for path in job.prune(tmp_path, keep=2)] == ["step-1.bin"]
    assert names(tmp_path) == ["events.log", "step-0", "step-10.bin", "step-2.bin"]
    with pytest.raises(ValueError, match="at least one"):
        job.prune(tmp_path, keep=0)
