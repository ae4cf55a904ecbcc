"""The API for people who write policies: `fill` with counts and shares, `place`, orders that are checked, own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given

from kit.workloads import effort, mixed_cluster, trace_of, workloads
from thebes import Decision, Policy, Trace, UserError, View, fill, place, simulate
from thebes.model.decision import HOLDS
from thebes.policy import find
from thebes.sim.costs import FREE_OF_COST


class Asks(Policy):
    """Answers with what a function makes of the View."""

    def __init__(self, answer: Any, *, shares: bool = False) -> None:
        self.answer = answer
        self.shares: Any = shares

    def decide(self, view: View) -> Decision:
        return self.answer(view)


def once(answer: Any) -> None:
    simulate(trace_of((0, 1, 9), (0, 2, 9), (0, 1, 9)), "1x4", Asks(answer))


@pytest.mark.parametrize("give", [fill, place], ids=["fill", "place"])
@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 0], "position 2 of the order names job 0 for the second time"),
        ([2, 3], "position 1 of the order is 3, but view.jobs has 3 jobs"),
        ([-1], "position 0 of the order is -1, but view.jobs has 3 jobs"),
        ([0.0, 1.0], "whole numbers, not float64"),
        ([[0, 1]], "whole numbers, not int64 in 2 dimensions"),
        ([True, False, True], "whole numbers, not bool"),
    ],
)
def test_an_order_that_is_wrong_is_refused_and_the_position_named(give: Any, order: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        once(lambda view: give(view, np.array(order)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"counts": [1, 2, 2]}, r"counts\[2\] is 2, but that job runs on 1 to 1 GPUs"),
        ({"counts": [1, 2]}, r"counts are int64 of shape \(2,\), but view.jobs has 3 jobs"),
        ({"counts": [1.0, 2.0, 1.0]}, "counts are float64"),
        ({"shares": [0.5, 0.0, 0.5]}, r"shares\[1\] is 0"),
        ({"shares": 0.5}, r"shares are float64 of shape \(\)"),
    ],
)
def test_counts_and_shares_that_are_wrong_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        once(lambda view: fill(view, np.arange(3), **more))


def test_counts_grow_and_shrink_elastic_jobs_where_they_are() -> None:
    """Given an elastic job alone, it has the node; when another one comes, each has half and keeps its own GPUs."""
    held: list[list[list[int]]] = []

    def share_out(view: View) -> Decision:
        jobs = view.jobs
        held.append([jobs.held(i).tolist() for i in range(len(jobs))])
        counts = np.clip(view.total_gpus // len(jobs), jobs.min_gpus, jobs.max_gpus)
        return fill(view, np.arange(len(jobs)), counts=counts)

    bounds = {"min_gpus": pl.Series([1, 1]), "max_gpus": pl.Series([4, 4])}
    trace = Trace("elastic", trace_of((0, 2, 100), (10, 2, 30)).jobs.with_columns(**bounds))
    result = simulate(trace, "1x4", Asks(share_out), perf="ideal", costs=FREE_OF_COST)
    assert held == [[[]], [[0, 1, 2, 3], []], [[0, 1]]]
    assert result.events.filter(result.events["kind"].cast(str) == "resize").height == 2


def test_shares_put_jobs_together_where_their_memory_fits() -> None:
    seen: list[list[list[int]]] = []

    def halves(view: View) -> Decision:
        decision = fill(view, np.arange(len(view.jobs)), shares=np.full(len(view.jobs), 0.5))
        starts = np.cumsum(view.jobs.gpus[decision.fate == HOLDS])[:-1]
        seen.append([part.tolist() for part in np.split(decision.gpus, starts)])
        return decision

    three = trace_of((0, 1, 9), (0, 1, 9), (0, 1, 9), model=["alexnet"] * 3)
    simulate(three, "1x2", Asks(halves, shares=True))
    assert seen[0] == [[0], [0], [1]]
    seen.clear()
    large = trace_of((0, 1, 9), (0, 1, 9), model=["alexnet"] * 2)
    from thebes.model.cluster import NodeKind, build

    small = build("small", [(NodeKind(2, gpu_memory_gib=3.0), 1, [0])])
    simulate(large, small, Asks(halves, shares=True))
    assert seen[0] == [[0], [1]]  # two of them would not fit into 3 GiB


def test_place_seats_who_is_chosen_and_nobody_makes_room() -> None:
    """Given a running job that is chosen again behind a newcomer, it stays, and the newcomer waits."""
    fates: list[list[int]] = []

    def newest_first(view: View) -> Decision:
        decision = place(view, np.arange(len(view.jobs))[::-1])
        fates.append((decision.fate == HOLDS).tolist())
        return decision

    simulate(trace_of((0, 3, 20), (5, 2, 5), (6, 1, 5)), "1x4", Asks(newest_first), costs=FREE_OF_COST)
    assert fates[:3] == [[True], [True, False], [True, False, True]]


@given(trace=workloads(most_gpus=4))
@effort(20)
def test_whatever_is_asked_of_fill_and_place_passes_the_checker(trace: Trace) -> None:
    """Kinds, quotas, whole gangs, memory: the checker looks at every decision of the run."""

    def some_share(view: View) -> Decision:
        jobs = view.jobs
        shares = np.where(jobs.id % 2 == 0, 0.5, 1.0)
        order = np.argsort(jobs.id % 3, kind="stable")
        give = fill if len(jobs) % 2 else place
        return give(view, order, counts=jobs.gpus, shares=shares, wake_s=view.now_s + 7.0)

    result = simulate(trace, mixed_cluster(), Asks(some_share, shares=True), costs=FREE_OF_COST)
    assert result.metrics["completed"] == len(trace)


def write_policy(folder: Path, number: int) -> Path:
    folder.mkdir()
    (folder / "neighbour.py").write_text(f"NUMBER = {number}\n")
    file = folder / "mine.py"
    file.write_text("import thebes\nfrom neighbour import NUMBER\n\nclass Mine(thebes.Policy):\n    number = NUMBER\n")
    return file


def test_a_file_can_import_its_neighbours_and_folders_do_not_get_mixed_up(tmp_path: Path) -> None:
    one, two = write_policy(tmp_path / "one", 1), write_policy(tmp_path / "two", 2)
    first, second, again = find(f"{one}:Mine"), find(f"{two}:Mine"), find(f"{one}:Mine")
    assert [kind.number for kind in (first, second, again)] == [1, 2, 1]  # type: ignore[attr-defined]
    assert first.__module__ != second.__module__


def test_a_neighbour_does_not_hide_a_module_of_pythons_own(tmp_path: Path) -> None:
    file = write_policy(tmp_path / "folder", 3)
    (file.parent / "colorsys.py").write_text("raise AssertionError('not this one')\n")
    file.write_text("import colorsys\n" + file.read_text())
    assert find(f"{file}:Mine").number == 3  # type: ignore[attr-defined]
