"""What a world knows: a fact that nobody has measured raises or shows NaN, in a simulation as on a live cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from kit.workloads import effort, trace_of, workloads
from thebes import Decision, Policy, Result, Trace, UserError, View, fill, simulate
from thebes.live.config import CARRIED
from thebes.live.entries import Arrive
from thebes.live.ledger import Ledger, NodeSpec
from thebes.model.facts import COMMUNICATION, FACTS, LIVE, MEASURED, SIMULATED, UnknownHere
from thebes.placement import Consolidate
from thebes.policy import registry
from thebes.policy.admission import COUNTS, SHARES, missing, obstacle, runs_live, runs_live_on
from thebes.policy.dally.dally import Dally
from thebes.policy.orders.tiresias import TiresiasL
from thebes.sim.costs import FREE_OF_COST
from thebes.sim.simulate import SimulationOptions, run
from thebes.trace.cluster_file import read_cluster

EVERYTHING = frozenset({SHARES, COUNTS})
ADMITTED = sorted(name for name, kind in registry().items() if obstacle(kind(), EVERYTHING) is None)


def simulate_knowing(knowledge: Any, trace: Trace, cluster: str, policy: Policy, **options: Any) -> Result:
    return run(trace, read_cluster(cluster), policy, SimulationOptions(knowledge=knowledge, **options))


class Reads(Policy):
    """Reads one column at every decision."""

    def __init__(self, column: str) -> None:
        self.column, self.seen = column, []

    def decide(self, view: View) -> Decision:
        self.seen.append((view.now_s, getattr(view.jobs, self.column).tolist()))
        return fill(view, np.arange(len(view.jobs)), wake_s=view.now_s + 10.0)


def test_a_fact_that_the_world_does_not_know_raises_and_says_what_would_make_it_known() -> None:
    with pytest.raises(UnknownHere) as caught:
        simulate_knowing(LIVE, trace_of((0, 1, 30)), "1x1", Reads("talked_s"))
    assert "view.jobs.talked_s is not known in a live cluster" in str(caught.value)
    assert 'view.knows("communication")' in str(caught.value)
    none = replace(SIMULATED, facts=frozenset())
    for column in ("speed", "progress_s", "iteration_s"):
        with pytest.raises(UnknownHere, match="jobs have to report their steps"):
            simulate_knowing(none, trace_of((0, 1, 30)), "1x1", Reads(column))


def test_a_live_view_raises_alike_and_shows_nan_for_a_job_that_was_not_measured() -> None:
    ledger = Ledger([NodeSpec("a", 2)], TiresiasL(), Consolidate())
    ledger.apply(Arrive(1.0, job="one", gpus=1, tenant="", submit_s=1.0))
    view = ledger.view(2.0)
    with pytest.raises(UnknownHere, match=r"view\.jobs\.talked_s is not known in a live cluster"):
        _ = view.jobs.talked_s
    assert np.isnan(view.jobs.progress_s).all()
    assert view.knows("progress")
    assert not view.knows(COMMUNICATION)
    with pytest.raises(UserError, match="there is no fact 'comunication'\ndid you mean 'communication'"):
        view.knows("comunication")


def test_measured_facts_are_withheld_until_a_job_has_run_for_so_long() -> None:
    trace = trace_of((0, 1, 35))
    at_once, withheld = Reads("progress_s"), Reads("progress_s")
    simulate(trace, "1x1", at_once, perf="ideal")
    simulate(trace, "1x1", withheld, perf="ideal", measured_after_s=20.0)
    assert at_once.seen == [(0.0, [0.0]), (10.0, [10.0]), (20.0, [20.0]), (30.0, [30.0])]
    assert [np.isnan(values[0]) for _, values in withheld.seen] == [True, True, False, False]
    assert withheld.seen[2:] == at_once.seen[2:]
    with pytest.raises(UserError, match="measured_after_s=-1 is no time"):
        simulate(trace, "1x1", "fifo", measured_after_s=-1.0)


@pytest.mark.parametrize("name", ADMITTED)
@given(trace=workloads(most_gpus=4))
@effort(4)
def test_whatever_is_admitted_live_decides_on_what_is_known_live(name: str, trace: Trace) -> None:
    """Given a simulation that knows no more than a live cluster, when any such policy decides, nothing raises."""
    for measured_after_s in (0.0, 25.0):
        known = replace(LIVE, measured_after_s=measured_after_s)
        result = simulate_knowing(known, trace, "2x2x2", registry()[name](), fast=False)
        assert result.metrics["completed"] == len(trace)


def test_without_communication_dally_offers_by_the_wait() -> None:
    """Given a job that has run beside one that waits longer, when a GPU is free, who waits longest goes first.

    With communication known the job that has never run goes first; where it is not, unmeasured zeros would say so too.
    """
    orders: dict[bool, list[int]] = {}
    for known in (SIMULATED, LIVE):
        starts = simulate_knowing(
            known,
            trace_of((0, 1, 100), (5, 1, 100), (12, 1, 20)),
            "1x1",
            Dally(lease_s=10.0, timers="no-wait"),
            costs=FREE_OF_COST,
        ).events
        running = starts.filter(starts["kind"].cast(str).is_in(["start", "resume"]))
        orders[known is LIVE] = running["job"].to_list()[:4]
    assert orders[True] == [0, 1, 0, 2]
    assert orders[True] != orders[False]


def test_admission_is_one_function_for_the_table_and_for_up() -> None:
    assert set(MEASURED) < set(FACTS)
    assert runs_live(TiresiasL(), CARRIED["local"]) == "yes"
    assert missing(Dally()).keys() == {COMMUNICATION}
    assert runs_live(Dally(), CARRIED["local"]).startswith("yes; without communication: offers GPUs in the order")
    assert runs_live(registry()["srtf"](), EVERYTHING) == "no: needs durations"
    assert runs_live(registry()["gandiva"](), frozenset()) == "no: shares GPUs"
    assert runs_live(registry()["gandiva"](), frozenset({SHARES})) == "no: resizes jobs"
    assert runs_live_on(registry()["gandiva"](), CARRIED) == "yes, with --engine local"
    assert runs_live_on(TiresiasL(), CARRIED) == "yes"
    assert runs_live_on(registry()["srtf"](), CARRIED) == "no: needs durations"
    for name, kind in registry().items():
        refused = obstacle(kind(), EVERYTHING)
        assert (refused is None) == runs_live(kind(), EVERYTHING).startswith("yes"), name
