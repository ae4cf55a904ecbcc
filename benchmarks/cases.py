"""One measurement per process, pinned to one core: `python -m benchmarks.cases JSON` prints its figures as JSON.

A process of its own gives each case its own peak memory. Reading or generating the trace, the loading of compiled code
and a first small run are outside the clock; everything from a Trace to a Result is inside it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.machine import calibrate
from thebes.model.cluster import Cluster
from thebes.model.decision import Decision
from thebes.model.links import with_network
from thebes.model.trace import Trace
from thebes.model.view import View
from thebes.perf import Tiers
from thebes.perf.plans.book import PlanBook
from thebes.perf.plans.site import A800
from thebes.perf.plans.speed import Plans
from thebes.perf.plans.timing import Constants
from thebes.perf.plans.transformer import catalogue, names
from thebes.placement import Consolidate
from thebes.policy import Policy, fill, find
from thebes.sim.costs import Costs
from thebes.sim.loop import GeneralLoop
from thebes.sim.setup import build_world, prepare
from thebes.sim.simulate import simulate
from thebes.trace import GeneratorSpec, generate, read
from thebes.trace.cluster_file import read_cluster

HELIOS = Path(__file__).parents[2] / "shared" / "data" / "helios_venus" / "jobs.csv.gz"
LOAD, SEED = 0.9, 1
LARGEST_JOB = 64  # GPUs, so that the mix of jobs is the same on every cluster
QUANTUM_S = 600.0
OLD_ENOUGH_S = 4000.0  # Rubick's guard lets jobs be reconfigured that ran so long


class PlainPolicy(Policy):
    """What a user writes without knowing our insides: two queues by attained service, in order of submission."""

    name = "plain-python"

    def decide(self, view: View) -> Decision:
        jobs = view.jobs
        demoted = jobs.attained_gpu_s >= 3600.0
        order = np.lexsort((jobs.submit_s, demoted))
        return fill(view, order, wake_s=(view.now_s // QUANTUM_S + 1) * QUANTUM_S)


class _Hold(Policy):
    """Starts nobody, stops nobody: brings a simulation to an instant without touching what runs."""

    name = "hold"

    def decide(self, view: View) -> Decision:
        return fill(view, np.zeros(0, dtype=np.int64), preempt=False)


def replay(
    *,
    trace: str,
    cluster: str,
    policy: str,
    checks: bool,
    repeats: int,
    jobs: int = 0,
    gpus: int = 0,
    load: float = LOAD,
    network: str | None = None,
) -> dict[str, Any]:
    """Simulate a whole trace (`helios`, or `generated` with so many jobs at a load of so many GPUs).

    With a network, jobs run as fast as their placement and their neighbours let them: speed model and contention on.
    """
    began = time.perf_counter()
    workload = read(HELIOS) if trace == "helios" else generated(jobs, gpus, load)
    read_s = time.perf_counter() - began
    chosen: Policy = PlainPolicy() if policy == PlainPolicy.name else find(policy)()
    where = read_cluster(cluster) if network is None else with_network(read_cluster(cluster), network)
    speed = {"perf": "network", "contention": True} if network else {}
    simulate(workload, where, chosen, limit=100, checks=checks, **speed)
    wall_s: list[float] = []
    cpu_s: list[float] = []
    loop_s: list[float] = []
    metrics: dict[str, Any] = {}
    for _ in range(repeats):
        began, cpu_began = time.perf_counter(), time.process_time()
        metrics = simulate(workload, where, chosen, checks=checks, **speed).metrics
        wall_s.append(time.perf_counter() - began)
        cpu_s.append(time.process_time() - cpu_began)
        loop_s.append(metrics["wall_seconds"])
    return {
        "trace": trace,
        "cluster": cluster,
        "policy": policy,
        "network": network,
        "load": load,
        "placement": metrics["placement"],
        "checks": checks,
        "jobs": metrics["jobs"],
        "events": metrics["events"],
        "preemptions": metrics["preemptions"],
        "avg_waiting_jobs": metrics["avg_waiting_jobs"],
        "gpu_utilization": metrics["gpu_utilization"],
        "read_seconds": read_s,
        "wall_seconds": min(wall_s),
        "all_wall_seconds": wall_s,
        "cpu_seconds": min(cpu_s),
        "loop_seconds": min(loop_s),
        "jobs_per_second": metrics["jobs"] / min(wall_s),
        "events_per_second": metrics["events"] / min(wall_s),
        "peak_memory_mb": _peak_memory_mb(),
    }


def generated(jobs: int, gpus: int, load: float = LOAD) -> Trace:
    """Jobs like those of the shipped Philly sample; Poisson arrivals so fast that they ask for `load` of the GPUs."""
    return generate(
        GeneratorSpec(jobs=jobs, gpus=gpus, load=load, seed=SEED, max_gpus=min(gpus, LARGEST_JOB), arrivals="poisson")
    )


def decision(*, cluster: str, waiting: int, policy: str, repeats: int) -> dict[str, Any]:
    """Time `policy.decide(view)` in three states of a large cluster."""
    place, chosen = read_cluster(cluster), find(policy)()
    states: dict[str, Callable[[], GeneralLoop]] = {
        "empty: all wait, nobody runs": lambda: _state(place, [(waiting, 0.0)], [_Hold()]),
        "full: nobody changes place": lambda: _state(place, [(waiting + _fillers(place), 0.0)], [chosen]),
        "full: all who run make room": lambda: _state(
            place, [(_fillers(place), 0.0), (waiting, 4000.0)], [chosen, _Hold()]
        ),
    }
    return {
        "policy": policy,
        "cluster": cluster,
        "gpus": place.total_gpus,
        "states": [_time_decision(name, build(), chosen, repeats) for name, build in states.items()],
        "peak_memory_mb": _peak_memory_mb(),
    }


def _fillers(cluster: Cluster) -> int:
    """So many jobs of the mix fill the cluster, with some to spare."""
    mean = generated(1000, cluster.total_gpus).jobs["num_gpus"].mean()
    assert isinstance(mean, float)
    return int(1.05 * cluster.total_gpus / mean) + 1


def _state(cluster: Cluster, submissions: list[tuple[int, float]], policies: list[Policy]) -> GeneralLoop:
    """A simulation after one instant under each of these policies; nobody finishes."""
    submit_s = np.concatenate([np.full(count, at_s) for count, at_s in submissions])
    jobs = generated(len(submit_s), cluster.total_gpus).jobs.with_columns(
        pl.Series("submit_time", submit_s), pl.lit(1e9).alias("duration")
    )
    placement = Consolidate()
    work = prepare(Trace("decision", jobs), cluster, placement, Tiers(), seed=SEED)
    world = build_world(work, cluster, placement, Costs(), SEED)
    loop = GeneralLoop(world, cluster, policies[0], checks=True)
    for policy in policies:
        loop.policy, loop.wake_s = policy, np.inf
        loop.run(1)
    return loop


def _time_decision(name: str, loop: GeneralLoop, policy: Policy, repeats: int) -> dict[str, Any]:
    policy.decide(loop.view())  # loads compiled code
    seconds: list[float] = []
    for _ in range(repeats):
        view = loop.view()  # columns are computed once per view: each decision gets a fresh one
        began = time.perf_counter()
        wanted = policy.decide(view)
        seconds.append(time.perf_counter() - began)
    view = loop.view()
    running = view.jobs.rows[view.jobs.running]
    return {
        "state": name,
        "waiting_jobs": len(view.jobs) - len(running),
        "running_jobs": len(running),
        "free_gpus": view.free_gpus,
        "starts": int(np.setdiff1d(wanted.rows, running).size),
        "suspends": int(np.setdiff1d(running, wanted.rows).size),
        "milliseconds": 1e3 * min(seconds),
        "all_milliseconds": [1e3 * s for s in seconds],
    }


def plans(*, gpus: int, repeats: int) -> dict[str, Any]:
    """Time `PlanBook.best` for every shipped model on every number of GPUs: asked first, asked again, whole curves.

    Each repeat asks a book that differs in one constant, so that nothing is remembered from the one before.
    """
    shipped = [catalogue()[name] for name in names()]
    first: dict[tuple[str, int], float] = {}
    again: dict[tuple[str, int], float] = {}
    curves: dict[str, float] = {}
    for turn in range(repeats + 1):  # the first turn warms up
        known = [model.constants or Constants() for model in shipped]
        fresh = [
            replace(model, constants=one._replace(k_const=one.k_const + 1e-9 * (turn + 1)))
            for model, one in zip(shipped, known, strict=True)
        ]
        book = PlanBook(tuple(fresh), A800, gpus)
        for number, model in enumerate(fresh):
            for count in range(1, gpus + 1):
                where = (number, count, A800.fewest_nodes(count), A800.cpus_per_gpu)
                for seconds in (first, again):
                    began = time.perf_counter()
                    book.best(*where)
                    took = time.perf_counter() - began
                    if turn:
                        key = (model.name, count)
                        seconds[key] = min(seconds.get(key, took), took)
            began = time.perf_counter()
            book.curve(number)
            took = time.perf_counter() - began
            curves[model.name] = took if turn <= 1 else min(curves[model.name], took)
    worst = max(first, key=lambda key: first[key])
    return {
        "gpus": gpus,
        "models": len(shipped),
        "questions": len(first),
        "milliseconds": 1e3 * first[worst],
        "worst_question": list(worst),
        "median_milliseconds": 1e3 * float(np.median(list(first.values()))),
        "again_milliseconds": 1e3 * max(again.values()),
        "again_median_milliseconds": 1e3 * float(np.median(list(again.values()))),
        "curve_milliseconds": {name: 1e3 * took for name, took in curves.items()},
        "peak_memory_mb": _peak_memory_mb(),
    }


def rubick_pass(*, cluster: str, running: int, waiting: int, repeats: int) -> dict[str, Any]:
    """Time one round of Rubick on a full cluster: all who run may be shrunk, and so many jobs wait, a third promised.

    Curves are worked out before, once per model, as they are in a run.
    """
    place, chosen = read_cluster(cluster), find("rubick")(headroom=0.0)
    draw, count = np.random.default_rng(SEED), running + waiting
    shipped, gangs = names(), np.array([1.0, 2.0, 4.0, 8.0])
    jobs = {
        "job_id": [f"j{i}" for i in range(count)],
        "submit_time": np.where(np.arange(count) < running, 0.0, OLD_ENOUGH_S),
        "duration": np.full(count, 1e9),
        "num_gpus": draw.choice(gangs, count, p=(0.5, 0.3, 0.15, 0.05)),
        "model": draw.choice(shipped[:-2], count).tolist(),
        "guaranteed": (draw.random(count) < 1 / 3).astype(int),
    }
    for i in range(0, count, 50):  # some of the largest: they cannot run on one GPU, and span nodes
        jobs["model"][i], jobs["num_gpus"][i] = shipped[-1 - i // 50 % 2], 16.0 * (1 + i // 50 % 2)
        jobs["guaranteed"][i] = 0
    placement = Consolidate()
    trace = Trace.of("rubick-pass", jobs)
    work = prepare(trace, place, placement, Plans(truth="model"), seed=SEED, changes_plans=True)
    world = build_world(work, place, placement, Costs(), SEED)
    loop = GeneralLoop(world, place, chosen, checks=True, executions=work.executions)
    states: list[dict[str, Any]] = []
    loop.run(1)
    for name, policy in (("just started", chosen), ("newcomers wait", _Hold())):
        if policy is not chosen:
            loop.policy, loop.wake_s = policy, np.inf
            loop.run(1)
            loop.policy = chosen
        states.append(_time_decision(name, loop, chosen, repeats))
    return {"cluster": cluster, "gpus": place.total_gpus, "states": states, "peak_memory_mb": _peak_memory_mb()}


def _peak_memory_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e6 / 1024)


def _pin_to_one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "calibrate": calibrate,
    "replay": replay,
    "decision": decision,
    "plans": plans,
    "rubick-pass": rubick_pass,
}


def main() -> None:
    _pin_to_one_core()
    case: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(CASES[case.pop("case")](**case)))


if __name__ == "__main__":
    main()
