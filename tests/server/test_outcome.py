"""How an incarnation ended, from what its parts tell."""

from __future__ import annotations

import pytest

from thebes.engine.contract import Report
from thebes.server.outcome import judge


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
