"""A rehearsal plays a workload on a live cluster in compressed time, and compares it with the simulator, job by job.

The jobs are real processes that train something tiny for as long as they are told, are preempted and resume. The costs
of starting, saving and resuming are measured and given to the simulator, with the real submission times; the policy,
its parameters and the placement are the same. What remains is the difference between the two worlds.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from thebes.job.stand_in import digest, train
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from thebes.client import Client
    from thebes.client_types import JobDetail

STEP_S = 0.1
GANGS = (1, 1, 1, 1, 2, 2, 4)  # for a small cluster
LARGE_GANGS = (1, 1, 2, 4, 8, 8, 16, 32, 64)
LARGE_GPUS = 128  # a cluster with so many GPUs counts as large


@dataclass(frozen=True)
class Act:
    """A job of the rehearsal."""

    submit_s: float  # seconds after the beginning
    gpus: int
    steps: int
    seed: int

    @property
    def duration_s(self) -> float:
        return self.steps * STEP_S


@dataclass(frozen=True)
class Played:
    """What became of a job, and what the simulator predicted."""

    job_id: str
    act: Act
    jct_s: float
    predicted_s: float
    preemptions: int
    lost_gpu_s: float
    same_weights: bool  # whether it has the weights of an uninterrupted run

    @property
    def error(self) -> float:
        return (self.jct_s - self.predicted_s) / self.predicted_s


@dataclass(frozen=True)
class Rehearsal:
    """All jobs, and the costs that were measured."""

    played: tuple[Played, ...]
    start_s: float
    suspend_s: float
    resume_s: float
    finish_s: float  # from the last step until the end of the process is known
    took_s: float

    @property
    def mean_jct_s(self) -> float:
        return statistics.fmean(p.jct_s for p in self.played)

    @property
    def mean_predicted_s(self) -> float:
        return statistics.fmean(p.predicted_s for p in self.played)

    @property
    def error_of_mean(self) -> float:
        return self.mean_jct_s / self.mean_predicted_s - 1.0

    @property
    def mean_error(self) -> float:
        """The mean over the jobs of the relative error, whatever its sign."""
        return statistics.fmean(abs(p.error) for p in self.played)

    @property
    def preemptions(self) -> int:
        return sum(p.preemptions for p in self.played)

    def to_json(self) -> dict[str, Any]:
        return {
            "jobs": len(self.played),
            "took_s": round(self.took_s, 1),
            "preemptions": self.preemptions,
            "lost_gpu_s": round(sum(p.lost_gpu_s for p in self.played), 3),
            "all_weights_as_uninterrupted": all(p.same_weights for p in self.played),
            "mean_jct_s": round(self.mean_jct_s, 3),
            "predicted_mean_jct_s": round(self.mean_predicted_s, 3),
            "error_of_mean_jct": round(self.error_of_mean, 4),
            "mean_abs_error_per_job": round(self.mean_error, 4),
            "measured": {
                "start_s": round(self.start_s, 3),
                "suspend_s": round(self.suspend_s, 3),
                "resume_s": round(self.resume_s, 3),
                "finish_s": round(self.finish_s, 3),
            },
        }


def make_workload(jobs: int, seconds: float, gpus: int, *, seed: int = 0, load: float = 0.55) -> list[Act]:
    """Jobs that arrive over two thirds of the time and keep so many GPUs busy on average.

    While jobs arrive, work alone then asks for 0.8 of the GPUs, and starts, saves and resumes for more. Beyond that,
    waiting times become chaotic: the simulator itself then predicts something else when starts take a tenth longer.
    """
    gangs = [g for g in (LARGE_GANGS if gpus >= LARGE_GPUS else GANGS) if g <= gpus]
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.uniform(0.0, seconds * 2 / 3, jobs))
    arrivals -= arrivals[0]
    sizes = rng.choice(gangs, jobs)
    lengths = rng.lognormal(0.0, 1.0, jobs)
    lengths *= load * gpus * seconds / float((lengths * sizes).sum())
    steps = np.maximum(10, np.round(lengths / STEP_S)).astype(int)
    return [
        Act(float(at), int(size), int(count), index)
        for index, (at, size, count) in enumerate(zip(arrivals, sizes, steps, strict=True))
    ]


def queue_limits(acts: Sequence[Act]) -> tuple[float, float]:
    """Limits of the feedback queues that divide the jobs of this workload: half of them leave the first queue.

    Each lies in the widest gap nearby, because a job that ends just where it would be demoted shows nothing.
    """
    services = sorted(act.gpus * act.duration_s for act in acts)
    return _gap(services, 0.4, 0.6), _gap(services, 0.7, 0.9)


def _gap(services: Sequence[float], low: float, high: float) -> float:
    """The middle of the widest gap, as a ratio, between these shares of the sorted values."""
    first, last = int(low * len(services)), max(int(low * len(services)) + 1, int(high * len(services)))
    pairs = list(pairwise(services[first : last + 1])) or [(services[-1], services[-1])]
    below, above = max(pairs, key=lambda pair: pair[1] / pair[0])
    return round((below * above) ** 0.5, 2)


def play(
    client: Client,
    acts: Sequence[Act],
    tell: Callable[[int, int], None] = lambda ended, total: None,
    *,
    gpus_per_node: int | None = None,
) -> tuple[list[str], float]:
    """Submit each job at its time and wait for all; returns the ids, in the order of the acts, and the time it took.

    A job of more GPUs than one node has (`gpus_per_node`) is a gang with a rank on each of several nodes.
    """
    began = time.monotonic()
    ids: list[str] = []
    for act in acts:
        time.sleep(max(0.0, began + act.submit_s - time.monotonic()))
        command = [sys.executable, "-m", "thebes.job.stand_in", "--steps", str(act.steps), "--step-time", str(STEP_S)]
        submitted = client.submit(
            [*command, "--seed", str(act.seed)],
            gpus=act.gpus,
            ranks_per_node=1,
            nodes=None if gpus_per_node is not None and act.gpus > gpus_per_node else 1,
            name=f"rehearsal-{act.seed}",
        )
        ids.append(submitted.id)
        tell(0, len(acts))
    for ended, job_id in enumerate(ids, start=1):
        client.wait(job_id, timeout_s=600)
        tell(ended, len(acts))
    return ids, time.monotonic() - began


def compare(client: Client, acts: Sequence[Act], ids: Sequence[str], took_s: float, config: Any) -> Rehearsal:
    """Simulate the same jobs with the measured costs, and put the two side by side."""
    infos = [info for job_id in ids if "state" in (info := client.job(job_id))]  # none of them is an array
    for info in infos:
        if info["state"] != "completed":
            raise UserError(f"job {info['id']} of the rehearsal ended as {info['state']}: {info['reason']}")
    attempts = [attempt for info in infos for attempt in info["attempts"]]
    starts = [a["startup_s"] for a in attempts if a["incarnation"] == 1 and a["startup_s"] is not None]
    resumes = [a["startup_s"] for a in attempts if a["incarnation"] > 1 and a["startup_s"] is not None]
    stops = [a["stop_s"] for a in attempts if a["stop_s"] is not None]
    ends = [_finish_s(act, info) for act, info in zip(acts, infos, strict=True)]
    # Means are used, not medians: a busy machine has some slow starts, and jobs wait for the sum.
    costs = tuple(statistics.fmean(values) if values else 0.0 for values in (starts, stops, resumes, ends))
    predicted = _simulate(acts, [info["submit_s"] for info in infos], costs, config)
    played = [
        Played(
            info["id"],
            act,
            (info["end_s"] or 0.0) - info["submit_s"],
            predicted[index],
            info["preemptions"],
            info["lost_gpu_s"],
            _weights(client, info["id"]) == digest(train(act.steps, seed=act.seed)[1]),
        )
        for index, (act, info) in enumerate(zip(acts, infos, strict=True))
    ]
    start_s, suspend_s, resume_s, finish_s = costs
    return Rehearsal(tuple(played), start_s, suspend_s, resume_s, finish_s, took_s)


def _finish_s(act: Act, info: JobDetail) -> float:
    """How much longer the last attempt took than its start and its steps."""
    *earlier, last = info["attempts"]
    done = max((attempt["checkpoint_step"] or 0 for attempt in earlier), default=0)
    steps_s = (act.steps - done) * STEP_S
    return max(0.0, (info["end_s"] or 0.0) - last["created_s"] - (last["startup_s"] or 0.0) - steps_s)


def _weights(client: Client, job_id: str) -> str:
    text = b"".join(client.logs(job_id)).decode(errors="replace")
    found = re.findall(r"^weights ([0-9a-f]+)$", text, re.MULTILINE)
    return found[-1] if found else ""


def _simulate(acts: Sequence[Act], submits: Sequence[float], costs: tuple[float, ...], config: Any) -> list[float]:
    from thebes.live.config import admitted_policy
    from thebes.live.ledger import NodeSpec, cluster_of
    from thebes.model.trace import Trace
    from thebes.sim.costs import Costs
    from thebes.sim.simulate import simulate

    first_s = min(submits)
    columns = {
        "job_id": [str(i) for i in range(len(acts))],
        "submit_time": [at - first_s for at in submits],
        "duration": [act.duration_s + costs[3] for act in acts],
        "num_gpus": [float(act.gpus) for act in acts],
    }
    policy, placement = admitted_policy(config)
    result = simulate(
        Trace.of("rehearsal", columns),
        cluster_of([NodeSpec(node.name, node.gpus, rack=node.rack) for node in config.nodes]),
        policy,
        placement=placement,
        perf="ideal",
        costs=Costs(start_s=costs[0], suspend_s=costs[1], resume_s=costs[2]),
    )
    jct = dict(zip(result.jobs["job_id"], result.jobs["jct_s"], strict=True))
    return [float(jct[str(i)]) for i in range(len(acts))]
