"""The ledger of the live scheduler: the simulator's rules, changed only by entries, restored exactly."""

from __future__ import annotations

import heapq
import json
from typing import Any

import numpy as np
import pytest

import thebes
from thebes.live.entries import Arrive, Leave, Nodes, Quota, Ran, entry_of
from thebes.live.ledger import Ledger, NodeSpec
from thebes.live.ledger.packed import packed, unpacked
from thebes.model.errors import UserError
from thebes.model.jobs import JOB
from thebes.model.trace import Trace
from thebes.placement import Consolidate
from thebes.placement import find as find_placement
from thebes.policy import find

NODES = [NodeSpec("n0", 4), NodeSpec("n1", 4)]


def arrival(job: str, gpus: int, t: float = 0.0, **more: Any) -> Arrive:
    return Arrive(t, **{"job": job, "gpus": gpus, "submit_s": t, "tenant": "default", **more})


def decide(ledger: Ledger, now_s: float) -> dict:
    planned, _ = ledger.decide(now_s)
    entry = json.loads(json.dumps(planned.entry().to_json()))  # what the journal keeps is what is applied
    ledger.apply(entry_of(entry))
    return entry


def workload(seed: int, count: int) -> list[tuple[float, int, float]]:
    rng = np.random.default_rng(seed)
    submit = np.cumsum(rng.exponential(60.0, count)).round(3)
    return [
        (float(s), int(g), float(d))
        for s, g, d in zip(
            submit,
            rng.choice([1, 2, 4, 8], count, p=[0.6, 0.2, 0.15, 0.05]),
            rng.exponential(900, count).round(3) + 1,
            strict=True,
        )
    ]


def simulated(jobs: list[tuple[float, int, float]], policy: str) -> dict[str, float]:
    columns = {
        "job_id": [str(i) for i in range(len(jobs))],
        "submit_time": [j[0] for j in jobs],
        "duration": [j[2] for j in jobs],
        "num_gpus": [float(j[1]) for j in jobs],
    }
    trace = Trace.of("t", columns)
    costs = thebes.Costs(mechanism="free")
    result = thebes.simulate(trace, "2x4", policy, costs=costs, perf="ideal", fast=False)
    return dict(zip(result.jobs["job_id"], result.jobs["finish_s"], strict=True))


def lived(
    jobs: list[tuple[float, int, float]],
    policy: str,
    *,
    restore_every: int = 0,
    ledger: Ledger | None = None,
    models: list[str] | None = None,
) -> dict[str, float]:
    """The same workload through the ledger: the test plays the processes."""
    ledger = ledger or Ledger(NODES, find(policy)(), Consolidate())
    left = {str(i): job[2] for i, job in enumerate(jobs)}
    running: dict[str, float] = {}
    finish_s: dict[str, float] = {}
    coming = [(job[0], str(i)) for i, job in enumerate(jobs)]
    heapq.heapify(coming)
    steps = 0
    while coming or ledger.row_of:
        ends = {job: start + left[job] for job, start in running.items()}
        now_s = min([ledger.wake_s, *ends.values(), *(c[0] for c in coming[:1])])
        for job in sorted((j for j, end in ends.items() if end <= now_s), key=int):
            ledger.apply(Leave(now_s, job, completed=True))
            finish_s[job] = now_s
            del running[job]
        while coming and coming[0][0] <= now_s:
            _, job = heapq.heappop(coming)
            ledger.apply(arrival(job, jobs[int(job)][1], now_s, model=models[int(job)] if models else None))
        entry = decide(ledger, now_s)
        for job in entry["suspend"]:
            left[job] -= now_s - running.pop(job)
        for job, _gpus in entry["start"]:
            running[job] = now_s
            ledger.apply(Ran(now_s, job))
        steps += 1
        if restore_every and steps % restore_every == 0:
            body = json.loads(json.dumps(ledger.snapshot(now_s)))
            ledger = Ledger.restore(body, ledger.policy, ledger.placement)
    return finish_s


@pytest.mark.parametrize("policy", ["fifo", "backfill", "las", "tiresias-l", "tiresias-g", "gittins", "multi-dlas"])
def test_the_ledger_decides_as_the_simulator_does(policy):
    jobs = workload(1, 60)
    expected, found = simulated(jobs, policy), lived(jobs, policy)
    assert {job: round(s, 6) for job, s in found.items()} == {job: round(s, 6) for job, s in expected.items()}


@pytest.mark.parametrize("policy", ["tiresias-l", "las", "multi-dlas"])
def test_a_restored_ledger_goes_on_as_if_nothing_had_happened(policy):
    jobs = workload(2, 60)
    assert lived(jobs, policy) == lived(jobs, policy, restore_every=3)


@pytest.mark.parametrize("placement", ["yarn", "skew"])
def test_the_lowest_job_gives_way_to_a_gang_that_is_due(placement: str) -> None:
    """Two nodes of two GPUs with a long job each and one GPU free; at 20 s a gang of 2 goes before both.

    No node has two GPUs for it. Job 2, the lower one, gives way and starts again at 25 s, when the gang falls into its
    queue. `tests/policy/test_policy_give_way.py` tells the same story of the simulator.
    """
    jobs = [(0.0, 1, 100.0), (0.0, 1, 5.0), (0.0, 1, 100.0), (0.0, 1, 5.0), (20.0, 2, 30.0)]
    nodes = [NodeSpec("n0", 2), NodeSpec("n1", 2)]
    ledger = Ledger(nodes, find("tiresias-l")(queue_limits=(10.0,)), find_placement(placement)())
    models = ["resnet50"] * 4 + ["vgg19"]
    assert lived(jobs, "tiresias-l", ledger=ledger, models=models) == {"0": 100, "1": 5, "2": 105, "3": 5, "4": 50}


def test_nobody_gets_gpus_of_a_blocked_node_and_what_runs_there_stays():
    ledger = Ledger(NODES, find("tiresias-l")(), Consolidate())
    ledger.apply(arrival("a", 4))
    decide(ledger, 1.0)
    node = ledger.parts(ledger.gpus_of("a"))[0][0]
    ledger.apply(Nodes(2.0, (node,)))
    ledger.apply(arrival("b", 4, 2.0))
    ledger.apply(arrival("c", 4, 2.0))
    decide(ledger, 2.0)
    assert ledger.holds("a")
    assert ledger.parts(ledger.gpus_of("b"))[0][0] != node
    assert not ledger.holds("c")
    ledger.apply(Leave(3.0, "a", completed=True))
    decide(ledger, 3.0)
    assert not ledger.holds("c")
    ledger.apply(Nodes(4.0, ()))
    decide(ledger, 4.0)
    assert ledger.holds("c")


def test_a_tenant_gets_no_more_than_its_quota():
    ledger = Ledger(NODES, find("tiresias-l")(), Consolidate())
    ledger.apply(Quota(0.0, "vision", 3))
    for job in "abcd":
        ledger.apply(arrival(job, 1, tenant="vision"))
    ledger.apply(arrival("e", 4, tenant="speech"))
    planned, _ = ledger.decide(1.0)
    assert [job for job, _ in planned.start] == ["a", "b", "c", "e"]
    assert "quota" in ledger.reason(planned.fates[3])
    ledger.apply(planned.entry())
    ledger.apply(Quota(2.0, "vision", 8))
    assert decide(ledger, 2.0)["start"][0][0] == "d"


def test_higher_priority_goes_first_and_preempts():
    ledger = Ledger(NODES, find("tiresias-l")(), Consolidate())
    ledger.apply(arrival("a", 8))
    decide(ledger, 1.0)
    ledger.apply(Ran(1.0, "a"))
    ledger.apply(arrival("b", 8, 2.0))
    assert decide(ledger, 2.0)["suspend"] == []
    ledger.apply(arrival("c", 8, 3.0, priority=5))
    assert decide(ledger, 3.0)["suspend"] == ["a"]
    assert ledger.holds("c")


def test_so_many_nodes_means_exactly_so_many():
    ledger = Ledger(NODES, find("tiresias-l")(), Consolidate())
    ledger.apply(arrival("a", 2, nodes=2))
    ledger.apply(arrival("b", 4, nodes=None))
    decide(ledger, 1.0)
    assert [(node, len(gpus)) for node, gpus in ledger.parts(ledger.gpus_of("a"))] == [("n0", 1), ("n1", 1)]
    assert len(ledger.parts(ledger.gpus_of("b"))) == 2  # three are left on each


def test_what_can_never_run_is_told_with_the_reason():
    ledger = Ledger([NodeSpec("n0", 4, "A100"), NodeSpec("n1", 2, "H100")], find("fifo")(), Consolidate())
    assert ledger.never_fits(4, None, None) == ""
    assert "the cluster has 4" in ledger.never_fits(5, None, None)
    assert "type V100" in ledger.never_fits(1, None, "V100")
    assert "not 2 nodes with 1 GPUs" in ledger.never_fits(2, 2, None)


def test_a_policy_that_gives_a_blocked_gpu_is_stopped():
    class Rogue(thebes.Policy):
        name = "rogue"

        def decide(self, view):
            return thebes.Decision(
                rows=view.jobs.rows, gpus=np.arange(len(view.jobs)), fate=np.zeros(len(view.jobs), dtype=np.int64)
            )

    ledger = Ledger(NODES, Rogue(), Consolidate())
    ledger.apply(Nodes(0.0, ("n0",)))
    ledger.apply(arrival("a", 1))
    with pytest.raises(UserError, match=r"down or drained \(job a\)"):
        ledger.decide(1.0)


def test_a_thousand_jobs_come_and_go_and_the_table_stays_small():
    ledger = Ledger(NODES, find("fifo")(), Consolidate())
    for i in range(5000):
        ledger.apply(arrival(str(i), 1, float(i)))
        if i >= 10:
            ledger.apply(Leave(float(i), str(i - 10)))
    assert len(ledger.row_of) == 10
    assert len(ledger.table.jobs) <= 4096
    decide(ledger, 5000.0)
    assert sum(ledger.holds(str(i)) for i in range(4990, 5000)) == 8


def test_time_is_never_a_whole_number_to_compiled_code() -> None:
    """Which would take all later instants for whole seconds: a job that came a moment ago would not have come yet."""
    ledger = Ledger(NODES, find("dally")(), Consolidate())
    ledger.apply(Arrive(1, job="1", gpus=8, tenant="t", submit_s=1))
    assert isinstance(ledger.view(1).now_s, float)
    planned, view = ledger.decide(2)
    assert isinstance(view.now_s, float)
    ledger.apply(planned.entry())
    assert [job for job, _ in planned.start] == ["1"]


def test_a_job_keeps_its_number_while_rows_are_numbered_anew():
    ledger = Ledger(NODES, find("fifo")(), Consolidate())
    for job in "abc":
        ledger.apply(arrival(job, 1))
    ledger.apply(Leave(1.0, "a"))
    again = Ledger.restore(json.loads(json.dumps(ledger.snapshot(1.0))), ledger.policy, ledger.placement)
    again.apply(arrival("d", 1, 2.0))
    assert [(job, again.table.jobs["id"][row]) for job, row in again.row_of.items()] == [("b", 1), ("c", 2), ("d", 3)]


def test_a_snapshot_of_version_0_1_gives_numbers_in_order_and_forgets_what_was_known_by_rows():
    ledger = Ledger(NODES, find("fifo")(), Consolidate())
    for job in "ab":
        ledger.apply(arrival(job, 1))
    body = json.loads(json.dumps(ledger.snapshot(1.0)))
    stored = np.frombuffer(unpacked(body["jobs"]), dtype=JOB)
    old = np.dtype([field for field in JOB.descr if field[0] != "id"])
    records = np.zeros(2, dtype=old)
    for name in old.names:
        records[name] = stored[name]
    body |= {
        "format": 1,
        "dtype": [[name, str(old[name])] for name in old.names],
        "jobs": packed(records.tobytes()),
        "memory": packed(b"cthebes.policy.gone\nMemory\n."),
    }
    del body["next_id"]
    again = Ledger.restore(body, ledger.policy, ledger.placement)
    again.apply(arrival("c", 1, 2.0))
    assert again.table.jobs["id"][:3].tolist() == [0, 1, 2]
    assert again.memory is None
