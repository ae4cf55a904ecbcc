"""Jobs with execution plans, retold by a referee: whatever changes plan, GPUs and CPUs when, the account adds up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from planned_referee import PlanRecorder, Referee

from kit.effort import effort
from thebes import Decision, Policy, Trace, View, simulate
from thebes.model.cluster import NodeKind, uniform
from thebes.model.facts import PLANS
from thebes.model.jobs import HELD
from thebes.model.parameters import parameter
from thebes.model.plan import plan_of
from thebes.model.profiles import shape_of
from thebes.perf.contention import OVERLAPS, Contention
from thebes.perf.plans.speed import Plans
from thebes.placement import find as find_placement
from thebes.sim.costs import FREE_OF_COST, Costs
from thebes.sim.loop import ASK, GeneralLoop
from thebes.sim.setup import build_world, prepare
from thebes.sim.world import World

# Twelve GPUs whose nodes have CPUs to be fought for.
CLUSTER = uniform("3x4", 1, 3, NodeKind(4, gpu_type="A800-80GB", gpu_memory_gib=80, cpus=18, memory_gib=800))
COSTS = {
    "free": FREE_OF_COST,
    "checkpoint": Costs(start_s=1.0, suspend_s=3.0, resume_s=2.5, migrate_s=0.5),
    "kill, periodic checkpoints": Costs(mechanism="kill", start_s=1.0, resume_s=2.0, checkpoint_every_s=4.0),
    "kill, none": Costs(mechanism="kill", resume_s=1.0, checkpoint_every_s=0.0),
}


@dataclass(frozen=True)
class PlanChaos(Policy):
    """Throws plans, GPUs and CPUs about, by seed, until `calm_s`; then everybody who runs goes on as it does.

    Now and then a whole decision names no plans, or no CPUs: then the mechanism fills them in.
    """

    name: ClassVar[str] = "plan-chaos"
    needs: ClassVar[frozenset[str]] = frozenset({PLANS})
    seed: int = parameter(0, "where the dice start")
    calm_s: float = parameter(60.0, "when it calms down")

    def decide(self, view: View) -> Decision:
        dice = np.random.default_rng([self.seed, int(view.now_s * 1000), len(view.jobs)])
        calm = view.now_s >= self.calm_s
        names_plans, names_cpus = calm or dice.random() < 0.7, calm or dice.random() < 0.7
        jobs, book, site = view.jobs, view.plans, view.plans.site
        node_of, owner = view.machine.gpus["node"], view.machine.gpus["owner"]
        free, free_cpus = np.ones(view.total_gpus, dtype=bool), np.full(len(view.machine.nodes), site.node_cpus)
        wanted: dict[int, tuple[np.ndarray, int, int]] = {}
        order = np.argsort(~jobs.running, kind="stable") if calm else dice.permutation(len(jobs))
        for i in order.tolist():
            here = np.flatnonzero(owner == jobs.rows[i])
            stays = bool(jobs.running[i]) and free[here].all() and (calm or dice.random() < 0.5)
            if stays:
                gpus = here
            elif calm:
                gpus = np.flatnonzero(free)[: jobs.gpus[i]]
            else:
                gpus = self._somewhere(dice, np.flatnonzero(free), int(jobs.max_gpus[i]))
            if not len(gpus) or (calm and not stays and len(gpus) < jobs.gpus[i]) or (not calm and dice.random() < 0.2):
                continue
            on_node = np.bincount(node_of[gpus], minlength=len(free_cpus))
            # what its nodes can still give, and what would be there on the fewest nodes
            most = int((free_cpus[on_node > 0] // on_node[on_node > 0]).min())
            most = min(most, site.node_cpus // -(-len(gpus) // site.fewest_nodes(len(gpus))))
            plan, cpus = int(jobs.plan[i] if stays else jobs.asked_plan[i]), int(jobs.asked_cpus[i])
            if calm:
                cpus = int(jobs.cpus[i])
            elif names_cpus:
                cpus = int(dice.integers(1, max(2, most + 1)))
            if stays and plan_of(plan).gpus < len(gpus):
                cpus = min(cpus, site.cpus_per_gpu)  # more may not be there on the nodes that its plan needs
            if cpus > most:
                continue
            if names_plans and not calm and not (stays and dice.random() < 0.5):
                fits = book.all_that_fit(int(jobs.model[i]), len(gpus), site.fewest_nodes(len(gpus)), cpus)
                if not fits:
                    continue
                plan = fits[int(dice.integers(len(fits)))].plan.code
            free[gpus] = False
            free_cpus = free_cpus - cpus * on_node
            wanted[int(jobs.rows[i])] = (gpus, plan, cpus)
        rows = np.array(sorted(wanted), dtype=np.int64)
        parts = [wanted[row] for row in rows.tolist()]
        return Decision(
            rows,
            np.concatenate([part[0] for part in parts] or [np.zeros(0, dtype=np.int64)]),
            np.zeros(len(jobs), dtype=np.int64),
            wake_s=np.inf if calm else min(view.now_s + float(dice.choice([0.7, 2.0, 5.0])), self.calm_s),
            counts=np.array([len(part[0]) for part in parts], dtype=np.int64),
            plans=np.array([part[1] for part in parts], dtype=np.int64) if names_plans else None,
            cpus=np.array([part[2] for part in parts], dtype=np.int64) if names_cpus else None,
        )

    @staticmethod
    def _somewhere(dice: np.random.Generator, free: np.ndarray, most: int) -> np.ndarray:
        """Some GPUs, anywhere, or all together."""
        count = int(dice.integers(1, most + 1))
        if count > len(free):
            return free[:0]
        return free[:count] if dice.random() < 0.5 else np.sort(dice.choice(free, count, replace=False))


WISHES = (
    ("bert-large", 4, "dp4"),
    ("bert-large", 2, "zero-dp"),
    ("gpt-2", 8, ""),
    ("gpt-2", 4, "dp2+pp2"),
    ("gpt-2", 1, "zero-offload"),
    ("llama-2-7b", 1, "zero-offload"),
    ("llama-2-7b", 8, ""),
)
jobs = st.tuples(
    st.integers(0, 40), st.sampled_from(WISHES), st.floats(0.5, 40), st.integers(1, 4), st.sampled_from([None, 8, 16])
)


Wishes = list[tuple[int, tuple[str, int, str], float, int, int | None]]


def trace_of_wishes(wishes: Wishes) -> Trace:
    wishes = sorted(wishes, key=lambda wish: wish[0])
    return Trace.of(
        "planned",
        {
            "job_id": [f"j{i}" for i in range(len(wishes))],
            "submit_time": [float(wish[0]) for wish in wishes],
            "num_gpus": [float(wish[1][1]) for wish in wishes],
            "duration": [wish[2] for wish in wishes],
            "model": [wish[1][0] for wish in wishes],
            "plan": [wish[1][2] for wish in wishes],
            "cpus": [wish[3] for wish in wishes],
            "global_batch": [wish[4] for wish in wishes],
        },
    )


@given(
    wishes=st.lists(jobs, min_size=1, max_size=8),
    costs=st.sampled_from(sorted(COSTS)),
    seed=st.integers(0, 1000),
)
@effort(100, suppress_health_check=[HealthCheck.too_slow])
def test_the_account_adds_up_whatever_happens_to_plans(wishes: Wishes, costs: str, seed: int) -> None:
    """Given a policy that changes plans, GPUs and CPUs at random, the referee confirms every figure."""
    trace = trace_of_wishes(wishes)
    recorder = PlanRecorder(PlanChaos(seed))
    result = simulate(trace, CLUSTER, recorder, costs=COSTS[costs], perf=Plans(truth="model"))
    order = result.jobs["duration_s"].to_list()
    Referee(CLUSTER, recorder, COSTS[costs], order).confirm(result)


@given(wishes=st.lists(jobs, min_size=2, max_size=8), seed=st.integers(0, 1000), overlap=st.sampled_from(OVERLAPS))
@effort(40, suppress_health_check=[HealthCheck.too_slow])
def test_the_wires_carry_what_the_plans_of_those_who_sit_there_send(wishes: Wishes, seed: int, overlap: str) -> None:
    """Given jobs that change plans and CPUs where they sit; at every instant loads and speeds are as looked up anew."""
    law, placement = Contention(on=True, overlap=overlap), find_placement("consolidate")()
    work = prepare(trace_of_wishes(wishes), CLUSTER, placement, Plans(truth="model"), seed=0, changes_plans=True)
    world = build_world(work, CLUSTER, placement, COSTS["checkpoint"], 0, contention=law)
    running = GeneralLoop(world, CLUSTER, PlanChaos(seed), checks=True, executions=work.executions)
    while running.run(1) == ASK:
        look_at_the_wires(running.world, law)


def look_at_the_wires(world: World, law: Contention) -> None:
    table, load = world.neighbours.profiles, np.zeros(CLUSTER.num_nodes)
    sits: list[tuple[Any, float, float, float, list[int]]] = []
    for job in world.table.jobs[world.table.jobs["phase"] == HELD]:
        at = int(table.first[job["plan_profile"]]) + shape_of(int(job["nodes"]), int(job["tier"]))
        compute_s, wire_s = table.compute_s[at], table.wire_s[at]
        talks = 0.0 if wire_s == 0 else wire_s / (compute_s + wire_s) if law.overlap == "expected" else 1.0
        slots = world.table.slots[job["first_slot"] : job["first_slot"] + job["width"]]
        nodes = sorted(set(CLUSTER.gpu_node[slots].tolist()))
        talks = talks if len(nodes) > 1 else 0.0
        load[nodes] += talks
        sits.append((job, compute_s, wire_s, talks, nodes))
    assert world.neighbours.node_load.tolist() == pytest.approx(load.tolist(), abs=1e-9)
    for job, compute_s, wire_s, talks, nodes in sits:
        most = max(1.0, *(1.0 + load[node] - talks for node in nodes))
        slow = most + (min(most, law.cap) - 1.0) * law.eta if len(nodes) > 1 else 1.0
        assert job["speed"] == pytest.approx(job["full_s"] / (compute_s + wire_s * slow))
