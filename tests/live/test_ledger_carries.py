"""A Decision is carried whole by the ledger: other numbers of GPUs than asked for, and shares of GPUs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from thebes import Decision, Policy, View, fill
from thebes.jobspec.spec import JobSpec
from thebes.live.entries import Arrive, Leave, Nodes, Ran, entry_of
from thebes.live.ledger import Ledger, NodeSpec
from thebes.model.machine import BLOCKED, FREE
from thebes.placement import Consolidate


class Evenly(Policy):
    """Every job gets as many GPUs as there are for each."""

    resizes = True

    def decide(self, view: View) -> Decision:
        jobs = view.jobs
        counts = np.clip(view.total_gpus // len(jobs), jobs.min_gpus, jobs.max_gpus)
        return fill(view, np.arange(len(jobs)), counts=counts)


class Halves(Policy):
    """Two jobs on every GPU."""

    shares = True

    def decide(self, view: View) -> Decision:
        return fill(view, np.arange(len(view.jobs)), shares=np.full(len(view.jobs), 0.5))


def arrival(job: str, gpus: int, t: float, **more: Any) -> Arrive:
    return Arrive(t, job=job, gpus=gpus, submit_s=t, tenant="default", **more)


def decide(ledger: Ledger, now_s: float) -> dict[str, Any]:
    planned, _ = ledger.decide(now_s)
    entry = json.loads(json.dumps(planned.entry().to_json()))
    ledger.apply(entry_of(entry))
    for job, _gpus in (*entry["start"], *entry["migrate"]):
        ledger.apply(Ran(now_s, job))
    return entry


def restored(ledger: Ledger) -> Ledger:
    body = json.loads(json.dumps(ledger.snapshot(ledger.now_s)))
    return Ledger.restore(body, ledger.policy, ledger.placement)


@pytest.mark.parametrize("snapshots", [False, True])
def test_an_elastic_job_is_resized_and_stands_in_the_ledger_with_what_it_holds(snapshots: bool) -> None:
    ledger = Ledger([NodeSpec("n0", 4)], Evenly(), Consolidate())
    ledger.apply(arrival("a", 2, 0.0, min_gpus=1, max_gpus=4))
    assert decide(ledger, 0.0)["start"] == [["a", [0, 1, 2, 3]]]
    ledger = restored(ledger) if snapshots else ledger
    ledger.apply(arrival("b", 2, 10.0, min_gpus=1, max_gpus=4))
    entry = decide(ledger, 10.0)
    assert (entry["migrate"], entry["start"]) == ([["a", [0, 1]]], [["b", [2, 3]]])
    assert ledger.table.jobs["resizes"][ledger.row_of["a"]] == 1
    ledger = restored(ledger) if snapshots else ledger
    ledger.apply(Leave(20.0, "a", completed=True))
    assert decide(ledger, 20.0)["migrate"] == [["b", [0, 1, 2, 3]]]
    assert ledger.gpus_of("b") == (0, 1, 2, 3)
    assert ledger.view(21.0).jobs.width.tolist() == [4]
    ledger.apply(Leave(30.0, "b", completed=True))
    assert (ledger.machine.gpus["owner"] == FREE).all()


@pytest.mark.parametrize("snapshots", [False, True])
def test_jobs_share_a_gpu_until_the_last_of_them_has_left(snapshots: bool) -> None:
    ledger = Ledger([NodeSpec("n0", 2)], Halves(), Consolidate())
    for at, job in enumerate("abc"):
        ledger.apply(arrival(job, 1, float(at)))
    entry = decide(ledger, 5.0)
    assert entry["start"] == [["a", [0]], ["b", [0]], ["c", [1]]]
    assert entry["shares"] == [["a", 0.5], ["b", 0.5], ["c", 0.5]]
    ledger = restored(ledger) if snapshots else ledger
    assert ledger.view(6.0).free_gpus == 0
    ledger.apply(Leave(7.0, "a", completed=True))
    assert ledger.view(7.0).free_gpus == 0  # b is still there
    assert ledger.machine.gpus["owner"][0] == ledger.row_of["b"]
    ledger = restored(ledger) if snapshots else ledger
    ledger.apply(Leave(8.0, "b", completed=True))
    assert ledger.view(8.0).free_gpus == 1
    assert ledger.shares_gpus("c")


class HalvesThenAlone(Policy):
    """Two jobs on a GPU; after 100 s the first has it to itself."""

    shares = True

    def decide(self, view: View) -> Decision:
        share = 0.5 if view.now_s < 100.0 else 1.0
        return fill(view, np.arange(len(view.jobs)), shares=np.full(len(view.jobs), share))


def test_a_share_that_changes_splits_the_account_at_that_instant() -> None:
    ledger = Ledger([NodeSpec("n0", 1)], HalvesThenAlone(), Consolidate())
    for job in "ab":
        ledger.apply(arrival(job, 1, 0.0))
    decide(ledger, 0.0)
    assert decide(ledger, 100.0)["suspend"] == ["b"]
    ledger.apply(Leave(150.0, "a", completed=True))
    account = ledger.table.jobs["useful_gpu_s"]
    assert account[:2].tolist() == [0.5 * 100.0 + 50.0, 0.5 * 100.0]


def test_who_shares_a_gpu_with_a_job_that_cannot_be_moved_stays_with_it() -> None:
    """Given a gang over two nodes and a job beside it on the first, when the second node is drained, both are left."""
    ledger = Ledger([NodeSpec("n0", 1), NodeSpec("n1", 1)], Halves(), Consolidate())
    ledger.apply(arrival("gang", 2, 0.0))
    ledger.apply(arrival("beside", 1, 0.0))
    entry = decide(ledger, 0.0)
    assert entry["start"] == [["gang", [0, 1]], ["beside", [0]]]
    ledger.apply(Nodes(10.0, blocked=("n1",)))
    assert ledger.parked == {"gang", "beside"}
    assert ledger.view(10.0).free_gpus == 0
    ledger.apply(Leave(20.0, "gang", completed=True))
    assert ledger.parked == set()
    assert ledger.machine.gpus["owner"].tolist() == [ledger.row_of["beside"], BLOCKED]
    ledger.apply(Leave(30.0, "beside", completed=True))
    assert ledger.view(30.0).free_gpus == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"min_gpus": 3}, "min_gpus is 3, but the job asks for 2 GPUs"),
        ({"max_gpus": 1}, "max_gpus is 1, but the job asks for 2 GPUs"),
        ({"max_gpus": 4, "nodes": 1}, "an elastic job .* cannot ask for a fixed number of nodes"),
    ],
)
def test_bounds_of_an_elastic_job_are_checked(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobSpec(command=["train"], gpus=2, **more)
