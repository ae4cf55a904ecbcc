"""The handshake through the files of an attempt folder, in this process."""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from pathlib import Path

import pytest

from kit.waiting import until
from thebes.job import handshake
from thebes.job.handshake import Handshake, boot_s


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    (tmp_path / "attempt").mkdir()
    return tmp_path / "attempt"


def of(attempt: Path, **more: str) -> Handshake:
    """As a rank sees it. Asked from another thread, so that it leaves the test's signals alone."""
    return Handshake({"THEBES_ATTEMPT_DIR": str(attempt), "THEBES_CHECKPOINT_DIR": str(attempt / "saved"), **more})


def asked(handshake: Handshake) -> bool:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(handshake.should_stop()))
    thread.start()
    thread.join()
    return answers[0]


def notify(attempt: Path, grace_s: float = 30.0) -> float:
    """The deadline that it tells."""
    deadline_s = boot_s() + grace_s
    (attempt / "notice").write_text(json.dumps({"deadline_s": deadline_s, "grace_s": grace_s}))
    return deadline_s


def test_without_a_cluster_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone = Handshake({})
    assert not alone.should_stop()
    assert alone.deadline_s() is None
    assert alone.seconds_left() == math.inf
    assert not alone.resuming()
    assert alone.resume_path() is None
    assert (alone.rank(), alone.world_size()) == (0, 1)
    alone.report(1)
    alone.flush()
    assert list(tmp_path.iterdir()) == []
    assert alone.checkpoint_dir() == tmp_path / "checkpoints"
    (tmp_path / "checkpoints" / "step-1.bin").touch()
    alone.checkpointed(1, tmp_path / "checkpoints" / "step-1.bin")
    assert alone.resume_path() is None  # a second run by hand starts afresh
    with pytest.raises(SystemExit) as ended:
        alone.exit_preempted()
    assert ended.value.code == 85


def test_a_notice_is_seen_and_acknowledged_once(attempt: Path) -> None:
    rank = of(attempt)
    assert not asked(rank)
    assert not (attempt / "ack").exists()
    deadline_s = notify(attempt, grace_s=200.0)
    until(lambda: asked(rank), "the notice is seen")
    assert (attempt / "ack").exists()
    assert rank.deadline_s() == deadline_s
    before_s, left_s, after_s = boot_s(), rank.seconds_left(), boot_s()
    assert deadline_s - after_s <= left_s <= deadline_s - before_s
    (attempt / "notice").unlink()
    assert asked(rank)  # once asked, always asked


def test_asking_is_cheap(attempt: Path) -> None:
    rank, took_s = of(attempt), []

    def ask_often() -> None:
        began = time.thread_time()
        for _ in range(20_000):
            rank.should_stop()
        took_s.append((time.thread_time() - began) / 20_000)

    thread = threading.Thread(target=ask_often)
    thread.start()
    thread.join()
    assert took_s[0] < 50e-6  # about 1 microsecond


def test_a_deadline_that_is_past_leaves_nothing(attempt: Path) -> None:
    notify(attempt, grace_s=-3.0)
    assert of(attempt).seconds_left() == 0.0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"deadline_s": null}'])
def test_a_notice_made_by_hand_gives_the_usual_grace(attempt: Path, text: str) -> None:
    before_s = boot_s()
    (attempt / "notice").write_text(text)
    after_s = boot_s()
    rank = of(attempt, THEBES_GRACE_SECONDS="12")
    assert asked(rank)
    assert before_s + 11.9 < rank.deadline_s() < after_s + 12.1
    assert rank.seconds_left() <= 12.1
    assert of(attempt).seconds_left() == math.inf  # nobody said how long


def test_a_checkpoint_is_told_with_its_absolute_path(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(attempt)
    (attempt / "state.bin").write_bytes(b"x")
    before_s = boot_s()
    of(attempt).checkpointed(7, "state.bin")
    told = json.loads((attempt / "checkpoint.json").read_text())
    assert told["step"] == 7
    assert told["path"] == str(attempt / "state.bin")
    assert before_s <= told["at_s"] <= boot_s()


def test_a_checkpoint_may_be_a_folder_or_an_address(attempt: Path) -> None:
    deep = attempt / "checkpoint-3" / "shards"
    deep.mkdir(parents=True)
    (deep / "0.bin").write_bytes(b"x")
    rank = of(attempt)
    rank.checkpointed(3, attempt / "checkpoint-3")
    assert json.loads((attempt / "checkpoint.json").read_text())["path"] == str(attempt / "checkpoint-3")
    rank.checkpointed(4, "s3://bucket/step-4")
    assert json.loads((attempt / "checkpoint.json").read_text())["path"] == "s3://bucket/step-4"


@pytest.mark.parametrize("environ", [{}, {"THEBES_ATTEMPT_DIR": "/nowhere"}])
def test_a_checkpoint_that_is_not_there_is_an_error(environ: dict[str, str]) -> None:
    with pytest.raises(FileNotFoundError, match=r"call it after the save"):
        Handshake(environ).checkpointed(7, "no-such-file.bin")


def test_only_rank_0_is_heard(attempt: Path) -> None:
    (attempt / "state.bin").touch()
    second = of(attempt, RANK="1", WORLD_SIZE="2")
    second.report(5)
    second.checkpointed(5, attempt / "state.bin")
    assert sorted(path.name for path in attempt.iterdir()) == ["state.bin"]
    assert (second.rank(), second.world_size()) == (1, 2)
    assert of(attempt, RANK="x").rank() == 0


def test_reports_are_not_written_too_often_and_none_is_lost(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert handshake._REPORT_EVERY_S == 1.0
    monkeypatch.setattr(handshake, "_REPORT_EVERY_S", 600.0)
    rank = of(attempt)

    def told() -> dict[str, float]:
        return json.loads((attempt / "progress").read_text())

    for step in range(10, 50):
        rank.report(step, samples=step * 32)
    first = told()
    assert (first["step"], first["first_step"]) == (10, 10)
    rank.flush()
    last = told()
    assert (last["step"], last["first_step"], last["samples"]) == (49, 10, 49 * 32)
    assert last["first_at_s"] == first["at_s"] <= last["at_s"]
    assert sorted(path.name for path in attempt.iterdir()) == ["progress"]


def test_a_checkpoint_brings_the_last_report_along(attempt: Path) -> None:
    rank = of(attempt)
    (attempt / "state.bin").touch()
    rank.report(1)
    rank.report(2)
    rank.checkpointed(2, attempt / "state.bin")
    assert json.loads((attempt / "progress").read_text())["step"] == 2


def test_talking_never_kills_a_run(tmp_path: Path) -> None:
    """The attempt folder is gone, or cannot be written: a warning, once, and training goes on."""
    (tmp_path / "state.bin").touch()
    rank = of(tmp_path / "state.bin")  # a file where a folder should be
    assert not asked(rank)
    with pytest.warns(RuntimeWarning, match="step 1 is saved, but Thebes cannot be told"):
        rank.checkpointed(1, tmp_path / "state.bin")
    with pytest.warns(RuntimeWarning, match="progress cannot be told"):
        rank.report(1)
    with warnings.catch_warnings(action="error"):
        rank.report(2)
        rank.flush()
    with pytest.warns(RuntimeWarning, match="cannot be acknowledged"):
        rank.agreed_to_stop()
    assert asked(rank)


def test_going_on_from_the_last_checkpoint_told(attempt: Path) -> None:
    saved = attempt / "saved"
    fresh = of(attempt, THEBES_RESUME="0", THEBES_RESUME_FROM="")
    assert fresh.checkpoint_dir() == saved
    assert fresh.resume_path() is None
    for step in (1, 2):
        (saved / f"step-{step}.bin").touch()
    told = str(saved / "step-1.bin")
    assert of(attempt, THEBES_RESUME="1", THEBES_RESUME_FROM=told).resume_path() == saved / "step-1.bin"
    # Never told, or deleted since: the newest whole one.
    assert of(attempt, THEBES_RESUME="1", THEBES_RESUME_FROM="").resume_path() == saved / "step-2.bin"
    gone = str(saved / "step-0.bin")
    assert of(attempt, THEBES_RESUME="1", THEBES_RESUME_FROM=gone).resume_path() == saved / "step-2.bin"
    assert of(attempt, THEBES_RESUME="0", THEBES_RESUME_FROM=told).resume_path() is None


def test_many_threads_may_talk_at_once(attempt: Path) -> None:
    rank = of(attempt)
    notify(attempt)
    (attempt / "state.bin").touch()
    answers: list[bool] = []

    def talk(number: int) -> None:
        for step in range(20):
            rank.report(step)
            rank.checkpointed(step, attempt / "state.bin")
        until(rank.should_stop, "this thread sees the notice")
        answers.append(True)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 8
    assert json.loads((attempt / "checkpoint.json").read_text())["step"] == 19
    assert sorted(path.name for path in attempt.iterdir()) == [
        "ack", "checkpoint.json", "notice", "progress", "state.bin",
    ]  # fmt: skip
