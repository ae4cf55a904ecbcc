"""examples/train/numpy_train.py, interrupted wherever it happens to be, ends with the very same weights."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from attempts import EXAMPLES, Job

from kit.waiting import IMPORT_PATIENCE_S, until

SCRIPT = EXAMPLES / "numpy_train.py"
STEPS = 300


def weights(path: Path) -> list[bytes]:
    with np.load(path) as saved:
        return [saved[name].tobytes() for name in saved.files]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    job = Job(tmp_path_factory.mktemp("whole"))
    job.next_attempt()
    job.run(SCRIPT, "--steps", str(STEPS), "--out", "final.npz")
    assert job.remember() == STEPS
    return weights(job.folder / "final.npz")


def a_run(job: Job, *more: str) -> list[str | Path]:
    job.next_attempt()
    return [SCRIPT, "--steps", str(STEPS), "--out", "final.npz", *more]


def slow_run(job: Job, *more: str) -> list[str | Path]:
    """So slow that it is not over before it is interrupted."""
    return a_run(job, "--step-time", "0.05", *more)


@pytest.mark.parametrize("seed", range(3))
def test_preempted_at_random_steps(tmp_path: Path, uninterrupted: list[bytes], seed: int) -> None:
    chance, job = random.Random(seed), Job(tmp_path)
    for _ in range(3):
        process = job.start(*slow_run(job))
        until(lambda: job.has("progress"), "the first step")
        time.sleep(chance.uniform(0.0, 0.25))
        job.notice()
        output, _ = process.communicate(timeout=IMPORT_PATIENCE_S)
        assert process.returncode == 85, output
        assert job.has("ack")
        assert f"preempted at step {job.remember()}" in output
    assert 0 < job.steps_told[0] < job.steps_told[1] < job.steps_told[2] < STEPS

    output = job.run(*a_run(job))
    assert f"resumed at step {job.steps_told[-1]}" in output
    assert weights(job.folder / "final.npz") == uninterrupted


def test_killed_without_a_word_it_goes_on_from_its_last_checkpoint(tmp_path: Path, uninterrupted: list[bytes]) -> None:
    chance, job = random.Random(5), Job(tmp_path)
    for _ in range(2):
        process = job.start(*slow_run(job, "--checkpoint-every", "5"))
        until(lambda: job.has("checkpoint.json"), "the first checkpoint of this run")
        time.sleep(chance.uniform(0.0, 0.1))
        process.kill()
        process.communicate(timeout=IMPORT_PATIENCE_S)
        assert process.returncode == -signal.SIGKILL
        assert job.remember() % 5 == 0
    job.run(*a_run(job))
    assert weights(job.folder / "final.npz") == uninterrupted
    assert len(list((job.folder / "checkpoint").iterdir())) <= 2  # old ones and half-written ones are gone


def test_a_notice_before_the_first_step_is_taken(tmp_path: Path, uninterrupted: list[bytes]) -> None:
    job = Job(tmp_path)
    command = slow_run(job)
    job.notice()
    process = job.start(*command)
    output, _ = process.communicate(timeout=IMPORT_PATIENCE_S)
    assert process.returncode == 85, output
    assert job.remember() == 0
    job.run(*a_run(job))
    assert weights(job.folder / "final.npz") == uninterrupted


def test_started_again_after_its_end_it_ends_at_once(tmp_path: Path, uninterrupted: list[bytes]) -> None:
    """Its result may have got lost; the last checkpoint says that nothing is left to do."""
    job = Job(tmp_path)
    job.run(*a_run(job))
    job.remember()
    (job.folder / "final.npz").unlink()
    assert f"resumed at step {STEPS}" in job.run(*a_run(job))
    assert weights(job.folder / "final.npz") == uninterrupted


def test_several_ranks_stop_and_only_the_first_one_saves(tmp_path: Path, uninterrupted: list[bytes]) -> None:
    job = Job(tmp_path)
    ranks = job.start_ranks(2, *slow_run(job))
    until(lambda: job.has("progress"), "the first step")
    job.notice()
    for process in ranks:
        output, _ = process.communicate(timeout=IMPORT_PATIENCE_S)
        assert process.returncode == 85, output
    job.remember()
    for process in job.start_ranks(2, *a_run(job)):
        output, _ = process.communicate(timeout=IMPORT_PATIENCE_S)
        assert process.returncode == 0, output
    assert weights(job.folder / "final.npz") == uninterrupted


def test_steps_take_the_time_they_are_given(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.next_attempt()
    job.run(SCRIPT, "--steps", "50", "--step-time", "0.02")
    progress = job.read("progress")
    assert progress["step"] == 50
    took_s = float(progress["at_s"]) - float(progress["first_at_s"])
    assert 48 * 0.02 < took_s < 49 * 0.02 + 30.0  # a busy machine may stall it


def test_time_in_which_it_was_frozen_is_not_made_up_for(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.next_attempt()
    process = job.start(SCRIPT, "--steps", "1000000", "--step-time", "0.02")
    until(lambda: job.has("progress"), "the first step")
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    before_s, step = time.monotonic(), int(job.read("progress")["step"])
    time.sleep(0.6)
    frozen_s = time.monotonic() - before_s
    process.send_signal(signal.SIGCONT)
    until(lambda: int(job.read("progress")["step"]) > step + 40, "more steps than would be made up for")
    job.notice()
    output, _ = process.communicate(timeout=IMPORT_PATIENCE_S)
    assert process.returncode == 85, output
    progress = job.read("progress")
    steps = int(progress["step"]) - int(progress["first_step"])
    assert float(progress["at_s"]) - float(progress["first_at_s"]) > (steps - 3) * 0.02 + frozen_s
