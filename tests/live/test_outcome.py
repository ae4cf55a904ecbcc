"""How an incarnation ended: a table of what its ranks said, what we had asked, and what follows."""

from __future__ import annotations

import pytest

from thebes.live.outcomes import describe, judge, lost_work_s
from thebes.protocol.contract import GANG_NOT_STARTED, Report


def part(
    *codes: int, cause: str = "exit", node: str = "n0", first: int = 0, detail: str = "", **more: object
) -> Report:
    ranks = {first + i: code for i, code in enumerate(codes)}
    return Report("1", 1, node, "exited", cause=cause, codes=ranks, detail=detail, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "why", "kind", "exit_code", "saved"),
    [
        # it ended by itself
        ([part(0, 0)], "", "completed", 0, True),
        ([part(0), part(0, node="n1", first=1)], "", "completed", 0, True),
        ([part(85)], "", "preempted", 85, True),
        ([part(85, 0)], "", "preempted", 85, True),
        ([part(0, 3)], "", "failed", 3, False),
        ([part(85, 3)], "", "failed", 3, False),  # not all saved
        ([part(-11)], "", "failed", -11, False),
        # it was asked to go
        ([part(85, 85)], "preempt", "preempted", 85, True),
        ([part(85, -9, cause="killed")], "preempt", "preempted", 85, True),
        ([part(0, 0)], "preempt", "completed", 0, True),  # it was done at that very moment
        ([part(-9, cause="killed")], "preempt", "preempted", -9, False),
        ([part(1)], "preempt", "preempted", 1, False),  # it failed to save: not a failure of its own
        ([part(1)], "migrate", "preempted", 1, False),
        ([part(-15, cause="killed")], "hold", "preempted", -15, False),
        ([part(-9, cause="lost")], "requeue", "preempted", -9, False),
        ([part(-9, cause="killed")], "shutdown", "preempted", -9, False),
        ([part(0)], "cancel", "cancelled", None, False),
        ([part(-15, cause="killed")], "cancel", "cancelled", None, False),
        # its limit
        ([part(-9, cause="timeout")], "", "timeout", -9, False),
        ([part(85, cause="timeout")], "", "timeout", 85, True),
        ([part(-9, cause="timeout")], "preempt", "timeout", -9, False),
        # a gang that broke: who began counts
        ([part(3), part(-9, cause="killed", node="n1", first=1)], "gang", "failed", 3, False),
        ([part(-9, cause="lost"), part(-9, cause="killed", node="n1", first=1)], "gang", "lost", -9, False),
        ([part(85), part(-9, cause="killed", node="n1", first=1)], "gang", "preempted", 85, True),
        ([part(0), part(7, node="n1", first=1)], "", "failed", 7, False),
        # not its fault
        ([part(-9, cause="lost")], "", "lost", -9, False),
        ([part(cause="lost")], "", "lost", None, False),
        ([part(-9, cause="killed")], "", "lost", -9, False),
        ([part(cause="launch-failed", detail="no such program")], "", "failed", None, False),
        # a node could not be reached when the gang was started: nobody's failure; a program that is not there is one
        (
            [part(cause="launch-failed", detail=f"{GANG_NOT_STARTED}: n1 cannot be reached")],
            "gang",
            "lost",
            None,
            False,
        ),
        (
            [
                part(cause="launch-failed", detail=f"{GANG_NOT_STARTED}: n1: no such program"),
                part(cause="launch-failed", detail="no such program", node="n1", first=1),
            ],
            "gang",
            "failed",
            None,
            False,
        ),
    ],
)
def test_what_ranks_said_and_what_we_asked_give_the_outcome(parts, why, kind, exit_code, saved):
    outcome = judge(parts, why)
    assert (outcome.kind, outcome.exit_code, outcome.saved) == (kind, exit_code, saved)


def test_the_outcome_is_told_in_words():
    assert judge([part(0, 3)], "").detail == "rank 1 exited with code 3"
    assert judge([part(-11)], "").detail == "rank 0 was ended by signal 11"
    assert judge([part(cause="launch-failed", detail="no such program")], "").detail == "no such program"
    assert judge([part(cause="launch-failed")], "").detail == "it could not be started"
    assert judge([part(cause="lost", detail="n1 GPU 0 has bob")], "taken").detail == "not started: n1 GPU 0 has bob"
    assert judge([part(cause="lost", detail="the supervisor vanished")], "").detail == "the supervisor vanished"
    assert judge([part(-9, cause="killed")], "").detail == "its processes were killed from outside"
    assert describe(-9) == "was ended by signal 9"


def test_lost_work_is_what_must_be_done_again():
    ran = {"started_s": 100.0, "exited_s": 200.0, "run_s": 100.0}
    killed = part(-9, cause="killed", **ran)
    assert lost_work_s([killed], judge([killed], "preempt")) == 100.0
    saved_at_150 = part(-9, cause="killed", checkpoint_s=150.0, **ran)
    assert lost_work_s([saved_at_150], judge([saved_at_150], "preempt")) == 50.0
    old_checkpoint = part(-9, cause="killed", checkpoint_s=20.0, **ran)
    assert lost_work_s([old_checkpoint], judge([old_checkpoint], "preempt")) == 100.0
    said_so = part(85, **ran)
    assert lost_work_s([said_so], judge([said_so], "preempt")) == 0.0
    done = part(0, **ran)
    assert lost_work_s([done], judge([done], "")) == 0.0
    never_started = part(cause="lost", exited_s=200.0)
    assert lost_work_s([never_started], judge([never_started], "")) == 0.0


def test_one_rank_saves_for_the_whole_gang():
    ran = {"started_s": 100.0, "exited_s": 200.0, "run_s": 100.0}
    parts = [part(-9, cause="killed", checkpoint_s=190.0, **ran), part(-9, cause="killed", node="n1", first=1, **ran)]
    assert lost_work_s(parts, judge(parts, "preempt")) == 10.0


def test_frozen_time_is_not_lost_work():
    """It froze 80 of its 100 seconds: no more than its running time can be lost."""
    frozen = part(-9, cause="lost", started_s=100.0, exited_s=200.0, run_s=20.0, checkpoint_s=101.0)
    assert lost_work_s([frozen], judge([frozen], "")) == 20.0


def exited(codes: dict[int, int], cause: str = "exit", node: str = "n0") -> Report:
    return Report("1", 1, node, "exited", cause=cause, codes=codes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codes", "rank", "code"),
    [
        ({1: 7, 0: -15}, 1, 7),  # rank 0 was stopped because rank 1 had failed
        ({0: -15, 1: 7}, 1, 7),
        ({1: -11, 0: -15, 2: -9}, 1, -11),
        ({2: -9, 0: -15}, 2, -9),  # killed from outside: the first that went
        ({0: 0, 1: 3}, 1, 3),
    ],
)
def test_the_rank_that_failed_is_named_not_those_that_went_down_with_it(
    codes: dict[int, int], rank: int, code: int
) -> None:
    outcome = judge([exited(codes)], "")
    assert (outcome.kind, outcome.exit_code) == ("failed", code)
    assert outcome.detail.startswith(f"rank {rank} ")


def test_a_part_that_we_killed_with_the_gang_is_not_named() -> None:
    outcome = judge([exited({0: -9}, "killed"), exited({1: 7}, node="n1")], "gang")
    assert (outcome.kind, outcome.exit_code) == ("failed", 7)
