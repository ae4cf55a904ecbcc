"""Every run, retold by an independent referee: no GPU twice, gangs whole, no job lost, every GPU-second accounted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from referee import Recorder, confirm, replay

from kit.effort import effort
from kit.workloads import mixed_cluster, workloads
from thebes import Decision, Policy, View, simulate
from thebes.model.cluster import Cluster, from_short_form
from thebes.model.parameters import parameter
from thebes.model.trace import Trace
from thebes.perf import Tiers
from thebes.placement import registry
from thebes.policy import find
from thebes.policy.orders.tiresias import TiresiasG, TiresiasL
from thebes.sim.costs import FREE_OF_COST, Costs

COSTS = {
    "free": FREE_OF_COST,
    "checkpoint": Costs(start_s=1.0, suspend_s=3.0, resume_s=2.5, migrate_s=0.5),
    "checkpoint per GiB": Costs(
        start_s=0.5,
        start_s_per_gib=1.0,
        suspend_s=0.0,
        suspend_s_per_gib=4.0,
        resume_s=1.0,
        resume_s_per_gib=0.7,
        migrate_s_per_gib=0.3,
    ),
    "kill, periodic checkpoints": Costs(mechanism="kill", start_s=1.0, resume_s=2.0, checkpoint_every_s=4.0),
    "kill, none": Costs(mechanism="kill", resume_s=1.0, checkpoint_every_s=0.0),
}
CLUSTERS = {"3x2": from_short_form("3x2"), "2x2x2": from_short_form("2x2x2"), "mixed": mixed_cluster()}


@dataclass(frozen=True)
class Chaos(Policy):
    """Throws everybody about, by seed, until `calm_s`; then leaves the running where they are and starts the rest."""

    seed: int = parameter(0, "where the dice start")
    calm_s: float = parameter(60.0, "when it calms down")

    def decide(self, view: View) -> Decision:
        dice = np.random.default_rng([self.seed, int(view.now_s * 1000), len(view.jobs)])
        calm = view.now_s >= self.calm_s
        jobs, cluster = view.jobs, view.cluster
        kind_of = cluster.node_kind[cluster.gpu_node]
        owner = view.machine.gpus["owner"]
        free = np.ones(cluster.total_gpus, dtype=bool)
        wanted: dict[int, np.ndarray] = {}
        order = np.argsort(~jobs.running, kind="stable") if calm else dice.permutation(len(jobs))
        for i in order.tolist():
            row = int(jobs.rows[i])
            here = np.flatnonzero(owner == row)
            if jobs.running[i] and free[here].all() and (calm or dice.random() < 0.5):
                chosen = here
            elif calm or dice.random() < 0.8:
                kind = dice.permutation(len(cluster.kinds)).tolist()
                rooms = [np.flatnonzero(free & (kind_of == k)) for k in kind]
                room = next((r for r in rooms if len(r) >= jobs.gpus[i]), None)
                if room is None:
                    continue
                chosen = np.sort(dice.choice(room, jobs.gpus[i], replace=False))
            else:
                continue
            free[chosen] = False
            wanted[row] = chosen.astype(np.int64)
        rows = np.array(sorted(wanted), dtype=np.int64)
        gpus = np.concatenate([wanted[row] for row in rows.tolist()] or [np.zeros(0, dtype=np.int64)])
        wake_s = np.inf if calm else min(view.now_s + float(dice.choice([0.7, 2.0, 5.0])), self.calm_s)
        return Decision(rows, gpus, np.zeros(len(jobs), dtype=np.int64), wake_s=wake_s)


def referee_agrees(trace: Trace, cluster: Cluster, policy: Policy, costs: Costs, **options: object) -> None:
    recorder = Recorder(policy)
    result = simulate(trace, cluster, recorder, costs=costs, perf=Tiers(), **options)
    confirm(result, replay(trace, cluster, recorder.record, costs, Tiers()))


@given(
    trace=workloads(most_gpus=6, longest_s=40),
    cluster=st.sampled_from(sorted(CLUSTERS)),
    costs=st.sampled_from(sorted(COSTS)),
    seed=st.integers(0, 1000),
)
@effort(150)
def test_the_account_adds_up_whatever_a_policy_does(trace: Trace, cluster: str, costs: str, seed: int) -> None:
    """Given a policy that suspends, resumes and migrates at random, the referee confirms every figure."""
    referee_agrees(trace, CLUSTERS[cluster], Chaos(seed), COSTS[costs])


POLICIES = {
    "fifo": find("fifo")(),
    "backfill": find("backfill")(),
    "sjf": find("sjf")(),
    "srtf": find("srtf")(),
    "srsf": find("srsf")(),
    "las": find("las")(quantum_s=10.0),
    "tiresias-l": TiresiasL(queue_limits=(20.0, 60.0)),
    "tiresias-l with promotion": TiresiasL(queue_limits=(20.0, 60.0), promote_knob=2.0, promote_floor_s=10.0),
    "tiresias-g": TiresiasG(queue_limits=(20.0, 60.0), quantum_s=10.0),
    "multi-dlas": find("multi-dlas")(queue_limit=20.0, split_every_s=30.0),
}


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(
    trace=workloads(most_gpus=4, typed=True),
    costs=st.sampled_from(["free", "checkpoint", "checkpoint per GiB", "kill, periodic checkpoints"]),
    placement=st.sampled_from(sorted(registry())),
)
@effort(25, suppress_health_check=[HealthCheck.too_slow])
def test_the_account_adds_up_under_every_policy(policy: str, trace: Trace, costs: str, placement: str) -> None:
    if "promotion" in policy and "kill" in costs:
        costs = "free"  # jobs that are killed and promoted every few seconds may never get anywhere
    referee_agrees(trace, mixed_cluster(), POLICIES[policy], COSTS[costs], placement=placement)
