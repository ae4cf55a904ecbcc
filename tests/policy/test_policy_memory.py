"""What a policy remembers of a job is remembered by its id: rows are given up and numbered anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kit.workloads import trace_of
from thebes import Decision, Policy, Trace, View, simulate
from thebes.model.jobs import JobTable
from thebes.model.machine import copy_of
from thebes.model.view import Board, JobsView
from thebes.policy import find
from thebes.sim.costs import FREE_OF_COST


def packed(view: View) -> View:
    """The same instant, from a table that has only the jobs that are alive: row i is the i-th of them."""
    jobs, board = view.jobs, view.board
    rows, count = jobs.rows, len(jobs)
    table = JobTable(board.table.jobs[rows], board.table.slots, board.table.quotas)
    machine = copy_of(view.machine)
    owner = machine.gpus["owner"]
    owner[owner >= 0] = np.searchsorted(rows, owner[owner >= 0])
    speeds = None if jobs._tier_speeds is None else jobs._tier_speeds[rows]
    return replace(
        view,
        jobs=JobsView(table, np.arange(count), view.now_s, jobs.needs, speeds, jobs.knowledge),
        machine=machine,
        board=Board(
            table, board.sketch._replace(mark=np.zeros(count, dtype=np.bool_)), board.strategy, board.gang_classes
        ),
    )


class Packed(Policy):
    """Another policy, in front of a table that is packed before every decision."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.needs: Any = policy.needs
        self.shares: Any = policy.shares

    @property
    def reads_every_s(self) -> float:
        return self.policy.reads_every_s

    def decide(self, view: View) -> Decision:
        decision = self.policy.decide(packed(view))
        return replace(decision, rows=view.jobs.rows[decision.rows], promote=view.jobs.rows[decision.promote])


REMEMBER: dict[str, Policy] = {
    "dally": find("dally")(lease_s=20.0),
    "dally-no-wait": find("dally-no-wait")(lease_s=20.0),
    "two-level": find("two-level")(lease_s=30.0, quotas="a=3"),
    "two-level of dally": find("two-level")(lease_s=30.0, inner="dally", inner_set="lease_s=20"),
    "two-level of gandiva": find("two-level")(lease_s=30.0, inner="gandiva", inner_set="quantum_s=10;profile_s=5"),
    "gandiva": find("gandiva")(quantum_s=10.0, profile_s=5.0),
    "gandiva-gavel": find("gandiva-gavel")(round_s=20.0, profile_s=5.0),
    "themis": find("themis")(lease_s=15.0),
    "ftf": find("ftf")(round_s=15.0),
    "multi-dlas": find("multi-dlas")(queue_limit=20.0, split_every_s=30.0),
}


def workload() -> Trace:
    """Short jobs between long ones, so that rows are given up all the time."""
    rng = np.random.default_rng(3)
    count = 40
    jobs = zip(
        np.cumsum(rng.exponential(9.0, count)).round(1).tolist(),
        rng.choice([1, 1, 2, 4], count).tolist(),
        rng.choice([5.0, 25.0, 120.0], count).tolist(),
        strict=True,
    )
    return trace_of(*jobs, user=rng.choice(["a", "b", "c"], count).tolist())


@pytest.mark.parametrize("name", sorted(REMEMBER))
def test_a_policy_decides_alike_when_rows_are_numbered_anew_between_decisions(name: str) -> None:
    straight = simulate(workload(), "2x2x2", REMEMBER[name], costs=FREE_OF_COST, fast=False)
    renumbered = simulate(workload(), "2x2x2", Packed(REMEMBER[name]), costs=FREE_OF_COST)
    assert renumbered.events.equals(straight.events)
    assert renumbered.jobs.equals(straight.jobs)
