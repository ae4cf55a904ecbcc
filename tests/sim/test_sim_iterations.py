"""Iterations that take turns on shared GPUs and transfers that meet: examples by hand, laws, and a naive referee."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from thebes import Result, Trace, UserError, simulate
from thebes.model.cluster import Cluster, from_toml
from thebes.model.decision import MAX_SHARERS
from thebes.perf.hkbu import PROFILES, Hkbu
from thebes.policy.ada_srsf import AdaSrsf
from thebes.sim.costs import Costs

EXACT = AdaSrsf(grain_s=0.0)
VGG_S, RESNET_S = PROFILES["vgg16"].compute_s, PROFILES["resnet50"].compute_s
VGG_WIRE_S, RESNET_WIRE_S = 0.856e-3 * 526.4, 0.856e-3 * 99.2
ETA = 0.235 / 0.856

Job = tuple[float, int, int, str]  # submitted, GPUs, iterations, model


def cluster_of(nodes: int, gpus: int, memory_gib: float = 32) -> Cluster:
    text = f'name = "c"\n[[node]]\ncount = {nodes}\ngpus = {gpus}\ngpu_memory_gib = {memory_gib}\n'
    return from_toml(text, "c.toml")


def trace_of_iterations(*jobs: Job) -> Trace:
    ordered = sorted(jobs, key=lambda job: job[0])
    return Trace.of(
        "iterations",
        {
            "job_id": [f"j{i}" for i in range(len(ordered))],
            "submit_time": [float(job[0]) for job in ordered],
            "duration": [job[2] * PROFILES[job[3]].compute_s for job in ordered],
            "num_gpus": [float(job[1]) for job in ordered],
            "model": [job[3] for job in ordered],
        },
    )


def play(*jobs: Job, nodes: int, gpus: int, policy: AdaSrsf = EXACT, memory_gib: float = 32) -> Result:
    return simulate(trace_of_iterations(*jobs), cluster_of(nodes, gpus, memory_gib), policy, perf="hkbu")


def finishes(result: Result) -> list[float]:
    return result.jobs["finish_s"].to_list()


def test_a_job_on_one_node_computes_and_nothing_else() -> None:
    assert finishes(play((0.0, 2, 10, "vgg16"), nodes=1, gpus=2)) == pytest.approx([10 * VGG_S])


def test_a_job_over_two_nodes_adds_one_all_reduce_per_iteration() -> None:
    result = play((0.0, 2, 10, "vgg16"), nodes=2, gpus=1)
    assert finishes(result) == pytest.approx([10 * (VGG_S + VGG_WIRE_S)])
    assert result.jobs["comm_s"][0] == pytest.approx(10 * VGG_WIRE_S)


def test_latency_is_paid_by_every_all_reduce() -> None:
    result = play((0.0, 2, 3, "vgg16"), nodes=2, gpus=1, policy=replace(EXACT, a_ms=7.0))
    assert finishes(result) == pytest.approx([3 * (VGG_S + 0.007 + VGG_WIRE_S)])


def test_two_jobs_on_one_gpu_take_turns_the_one_with_less_left_first() -> None:
    # given three iterations of ResNet and two of VGG on one GPU: 0.186 s and 0.180 s of service
    result = play((0.0, 1, 3, "resnet50"), (0.0, 1, 2, "vgg16"), nodes=1, gpus=1)
    # then VGG, with less left, runs to its end, and ResNet after it
    assert finishes(result) == pytest.approx([2 * VGG_S + 3 * RESNET_S, 2 * VGG_S])


def test_a_task_is_not_interrupted_by_a_shorter_job() -> None:
    # given VGG in the middle of its first forward task (36 ms) when a job with less to do arrives
    jobs: tuple[Job, ...] = ((0.0, 1, 5, "vgg16"), (0.03, 1, 1, "resnet50"))
    result = play(*jobs, nodes=1, gpus=1)
    # then that job begins when the task ends, before VGG's backward one
    assert finishes(result) == pytest.approx([5 * VGG_S + RESNET_S, 0.036 + RESNET_S])
    # and when forward and backward are one task, at the end of the iteration
    whole = play(*jobs, nodes=1, gpus=1, policy=replace(EXACT, forward_share=0.0))
    assert finishes(whole) == pytest.approx([5 * VGG_S + RESNET_S, VGG_S + RESNET_S])


# Two jobs over the same two nodes, one GPU each: ResNet (less service) computes first, then VGG, while ResNet talks.
RESNET_READY_S, VGG_READY_S = RESNET_S, RESNET_S + VGG_S


def test_two_jobs_by_hand_when_transfers_never_meet() -> None:
    result = play(
        (0.0, 2, 1, "resnet50"), (0.0, 2, 1, "vgg16"), nodes=2, gpus=1, policy=AdaSrsf(grain_s=0.0, admission="srsf")
    )
    resnet_done_s = RESNET_READY_S + RESNET_WIRE_S
    assert resnet_done_s < VGG_READY_S
    assert finishes(result) == pytest.approx([resnet_done_s, VGG_READY_S + VGG_WIRE_S])


def test_two_jobs_by_hand_when_ada_dual_lets_the_short_transfer_meet_the_long_one() -> None:
    # given VGG alone, in its transfer from 0.09 s on, and ResNet arriving so that its own is ready at 0.152 s
    jobs: tuple[Job, ...] = ((0.0, 2, 1, "vgg16"), (0.09, 2, 1, "resnet50"))
    result = play(*jobs, nodes=2, gpus=1)
    # then 99.2 MB are little beside what VGG has left: both go on at 1/(2 + eta/b)
    meet_s, cost = 0.09 + RESNET_S, 2 + ETA
    rest_s = VGG_WIRE_S - RESNET_S
    assert RESNET_WIRE_S / rest_s < 1 / (2 * (1 + ETA))
    part_s = meet_s + RESNET_WIRE_S * cost
    assert finishes(result) == pytest.approx([part_s + rest_s - RESNET_WIRE_S, part_s])
    # and with SRSF(1) it waits for the end of VGG's
    alone = play(*jobs, nodes=2, gpus=1, policy=replace(EXACT, admission="srsf", n=1))
    assert finishes(alone) == pytest.approx([0.09 + VGG_WIRE_S, 0.09 + VGG_WIRE_S + RESNET_WIRE_S])
    # and AdaDUAL made the sum of both smaller
    assert sum(finishes(result)) < sum(finishes(alone))


def test_k_is_that_of_the_busiest_node() -> None:
    # given one job on nodes 0 to 2 that meets two jobs, one on nodes 0 and 1... all transfers may meet
    many = replace(EXACT, admission="srsf", n=9)
    result = play(*[(0.0, 2, 1, "vgg16")] * 3, nodes=2, gpus=1, policy=many)
    # then the tasks end one after the other, and the three transfers overlap
    ends = finishes(result)
    assert sorted(ends) == ends
    # 0.09 alone for 0.09, two for 0.09, then three until the first has its bytes
    rest = VGG_WIRE_S - 0.09 - 0.09 / (2 + ETA)
    assert ends[0] == pytest.approx(0.27 + rest * (3 + 2 * ETA))


def test_memory_limits_who_sits_on_a_gpu() -> None:
    # given a GPU for one VGG only (4.42 GiB)
    result = play((0.0, 1, 5, "vgg16"), (0.0, 1, 1, "vgg16"), nodes=1, gpus=1, memory_gib=8)
    assert result.jobs["queue_delay_s"].to_list() == pytest.approx([VGG_S, 0.0])
    # then with room for both nobody queues
    both = play((0.0, 1, 5, "vgg16"), (0.0, 1, 1, "vgg16"), nodes=1, gpus=1, memory_gib=9)
    assert both.jobs["queue_delay_s"].to_list() == [0.0, 0.0]


def test_a_job_that_no_gpu_can_hold_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match=r"1 of 2 jobs need more memory than any of their GPUs has: j1 \(4.4 GiB"):
        play((0.0, 1, 1, "resnet50"), (0.0, 1, 1, "vgg16"), nodes=1, gpus=1, memory_gib=4)


def test_the_start_cost_is_overhead() -> None:
    trace = trace_of_iterations((0.0, 2, 10, "vgg16"))
    result = simulate(trace, cluster_of(1, 2), EXACT, perf="hkbu", costs=Costs(start_s=5.0))
    assert finishes(result) == pytest.approx([5 + 10 * VGG_S])
    assert result.jobs["overhead_gpu_s"][0] == pytest.approx(10.0)
    assert result.jobs["useful_gpu_s"][0] == pytest.approx(20 * VGG_S)


def test_memory_alone_limits_the_papers_jobs_and_a_number_those_that_need_next_to_none() -> None:
    # given 32 GiB, which hold eleven of the smallest of the paper's jobs
    result = play(*[(0.0, 1, 2, "lstm-ptb")] * 20, nodes=1, gpus=1)
    assert sum(delay == 0 for delay in result.jobs["queue_delay_s"]) == 11
    # and memory for all
    result = play(*[(0.0, 1, 2, "resnet50")] * 20, nodes=1, gpus=1, memory_gib=1000)
    assert sum(delay == 0 for delay in result.jobs["queue_delay_s"]) == MAX_SHARERS


def test_traces_with_other_speed_models_run_at_the_profiles_pace_when_alone() -> None:
    # given a skewed model over two nodes under `tiers`, where a rack costs 40 % of the speed: full speed is that pace
    trace = Trace.of(
        "t", {"job_id": ["a"], "submit_time": [0.0], "duration": [1000.0], "num_gpus": [2.0], "model": ["vgg19"]}
    )
    assert finishes(simulate(trace, cluster_of(2, 1), EXACT)) == pytest.approx([1000.0])


# Laws.

MODELS = tuple(PROFILES)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Job], int, int]:
    """Few jobs on a coarse clock and a small cluster, so that they share GPUs and meet on the network."""
    nodes, gpus = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 2), (4, 1)]))
    job = st.tuples(
        st.sampled_from([0.0, 0.0, 0.05, 0.1, 0.3]),
        st.integers(1, nodes * gpus),
        st.integers(1, 4),
        st.sampled_from(MODELS),
    )
    return draw(st.lists(job, min_size=1, max_size=7)), nodes, gpus


POLICIES = [
    EXACT,
    replace(EXACT, kappa=2),
    replace(EXACT, placement="first-fit"),
    replace(EXACT, admission="srsf", n=1),
    replace(EXACT, admission="srsf", n=2),
    replace(EXACT, admission="srsf", n=3, a_ms=5.0),
    replace(EXACT, forward_share=0.0),
    replace(EXACT, forward_share=0.5),
]


@given(cases(), st.sampled_from([*POLICIES, replace(EXACT, placement="random")]))
@effort(40, deadline=None)
def test_every_second_of_an_occupied_gpu_is_charged_once(case: tuple[list[Job], int, int], policy: AdaSrsf) -> None:
    jobs, nodes, gpus = case
    result = play(*jobs, nodes=nodes, gpus=gpus, policy=policy, memory_gib=10)
    timeline = result.timeline
    occupied = (timeline["busy_gpus"][:-1] * timeline["time_s"].diff()[1:]).sum()
    account = result.jobs.select("useful_gpu_s", "overhead_gpu_s", "lost_gpu_s", "idle_held_gpu_s").sum().row(0)
    assert sum(account) == pytest.approx(occupied)
    # and nobody is faster than alone
    alone_s = result.jobs["duration_s"] - 1e-9
    assert (result.jobs["finish_s"] - result.jobs["first_start_s"] >= alone_s).all()
    assert result.jobs["preemptions"].sum() == result.jobs["migrations"].sum() == 0


@given(cases(), st.sampled_from(POLICIES))
@effort(60, deadline=None)
def test_the_compiled_world_agrees_with_the_referee(case: tuple[list[Job], int, int], policy: AdaSrsf) -> None:
    jobs, nodes, gpus = case
    result = play(*jobs, nodes=nodes, gpus=gpus, policy=policy, memory_gib=10)
    expected = Referee(sorted(jobs, key=lambda job: job[0]), nodes, gpus, policy, memory_gib=10).finishes()
    assert finishes(result) == pytest.approx(expected, abs=1e-6)


def test_a_run_is_the_same_every_time() -> None:
    jobs: list[Job] = [(0.01 * i, 1 + i % 4, 1 + i % 5, MODELS[i % 4]) for i in range(30)]
    once = play(*jobs, nodes=2, gpus=2, policy=replace(EXACT, placement="random"))
    again = play(*jobs, nodes=2, gpus=2, policy=replace(EXACT, placement="random"))
    assert once.jobs.equals(again.jobs)
    assert once.events.equals(again.events)


def test_bundles_change_little() -> None:
    # given jobs of some hundred iterations that share GPUs and the network
    random = np.random.default_rng(5)
    jobs: list[Job] = [
        (float(random.uniform(0, 200)), int(random.choice([1, 1, 2, 4, 8])), int(random.integers(300, 2000)), m)
        for m in MODELS * 8
    ]
    exact = play(*jobs, nodes=4, gpus=4)
    # then in bundles of up to a hundredth of each job the mean JCT stays within some per cent
    bundled = play(*jobs, nodes=4, gpus=4, policy=AdaSrsf(grain_s=60.0))
    assert _mean(bundled.jobs["jct_s"]) == pytest.approx(_mean(exact.jobs["jct_s"]), rel=0.1)


def _mean(column: pl.Series) -> float:
    return float(column.to_numpy().mean())


# The referee: the same world told naively. No index, no calendar: at each instant everything is looked at again.


@dataclass
class _Run:
    """A job in the referee's world."""

    row: int
    submit_s: float
    workers: int
    iterations: int
    model: str
    gpus: list[int] = field(default_factory=list)
    waiting_tasks: set[int] = field(default_factory=set)  # GPUs whose task has not begun
    running_tasks: dict[int, float] = field(default_factory=dict)  # GPU -> when it ends
    parts_left: dict[int, list[float]] = field(default_factory=dict)  # GPU -> shares of the iteration's compute
    served_s: float = 0.0  # in this iteration, by all workers
    asks: bool = False
    talks: bool = False
    latency_s: float = 0.0
    rest_s: float = 0.0
    finish_s: float | None = None

    @property
    def compute_s(self) -> float:
        return PROFILES[self.model].compute_s

    @property
    def wire_s(self) -> float:
        return 0.856e-3 * PROFILES[self.model].size_mb

    @property
    def service(self) -> tuple[float, int]:
        return round(self.iterations * self.compute_s * self.workers - self.served_s, 6), self.row


class Referee:
    def __init__(self, jobs: list[Job], nodes: int, gpus: int, policy: AdaSrsf, memory_gib: float) -> None:
        self.jobs = [_Run(i, *job) for i, job in enumerate(jobs)]
        self.gpus, self.nodes, self.per_node = range(nodes * gpus), range(nodes), gpus
        self.policy, self.memory_gib, self.now_s = policy, memory_gib, 0.0
        self.runner: dict[int, _Run | None] = dict.fromkeys(self.gpus)

    def node(self, gpu: int) -> int:
        return gpu // self.per_node

    def nodes_of(self, job: _Run) -> set[int]:
        return {self.node(gpu) for gpu in job.gpus}

    def on_gpu(self, gpu: int) -> list[_Run]:
        return [job for job in self.jobs if gpu in job.gpus and job.finish_s is None]

    def transfers_on(self, node: int) -> list[_Run]:
        return [job for job in self.jobs if job.talks and node in self.nodes_of(job)]

    def cost(self, job: _Run) -> float:
        k = max(len(self.transfers_on(node)) for node in self.nodes_of(job))
        return k + (k - 1) * self.policy.eta_over_b

    def finishes(self) -> list[float | None]:
        while any(job.finish_s is None for job in self.jobs):
            coming = [job.submit_s for job in self.jobs if job.submit_s > self.now_s + 1e-9]
            ends = [end for job in self.jobs for end in job.running_tasks.values()]
            ends += [self.now_s + j.latency_s + j.rest_s * self.cost(j) for j in self.jobs if j.talks]
            fresh = [j for j in self.jobs if j.submit_s <= self.now_s + 1e-9 and not j.gpus]
            self.now_s = 0.0 if fresh and self.now_s == 0.0 and not ends else self._pass_to(min(coming + ends))
            self._instant()
        return [job.finish_s for job in self.jobs]

    def _pass_to(self, then_s: float) -> float:
        """Bytes that go over the wires meanwhile."""
        rates = {job.row: self.cost(job) for job in self.jobs if job.talks}
        for job in self.jobs:
            if job.talks:
                spent_s = then_s - self.now_s
                latency_s = min(job.latency_s, spent_s)
                job.latency_s -= latency_s
                job.rest_s -= (spent_s - latency_s) / rates[job.row]
        return then_s

    def _instant(self) -> None:
        for job in self.jobs:  # what is over
            for gpu in [gpu for gpu, end in job.running_tasks.items() if end <= self.now_s + 1e-9]:
                del job.running_tasks[gpu]
                self.runner[gpu] = None
                job.served_s += job.parts_left[gpu].pop(0) * job.compute_s
                if job.parts_left[gpu]:
                    job.waiting_tasks.add(gpu)
                if not job.running_tasks and not job.waiting_tasks:
                    if len(self.nodes_of(job)) > 1:
                        job.asks = True
                    else:
                        self._next_iteration(job)
            if job.talks and job.latency_s < 1e-9 and job.rest_s < 1e-9:
                job.talks = False
                self._next_iteration(job)
        self._place()
        for job in sorted((j for j in self.jobs if j.asks), key=lambda j: j.service):
            if self._admitted(job):
                job.asks, job.talks = False, True
                job.latency_s, job.rest_s = self.policy.a_ms / 1000, job.wire_s
        for gpu in self.gpus:
            ready = [job for job in self.jobs if gpu in job.waiting_tasks]
            if self.runner[gpu] is None and ready:
                chosen = min(ready, key=lambda job: job.service)
                self.runner[gpu] = chosen
                chosen.waiting_tasks.remove(gpu)
                chosen.running_tasks[gpu] = self.now_s + chosen.parts_left[gpu][0] * chosen.compute_s

    def _next_iteration(self, job: _Run) -> None:
        job.iterations -= 1
        if job.iterations == 0:
            job.finish_s = self.now_s
        else:
            self._begin_iteration(job)

    def _begin_iteration(self, job: _Run) -> None:
        forward = self.policy.forward_share
        job.waiting_tasks, job.served_s = set(job.gpus), 0.0
        job.parts_left = {gpu: [forward, 1 - forward] if forward else [1.0] for gpu in job.gpus}

    def _admitted(self, job: _Run) -> bool:
        met = {other.row: other for node in self.nodes_of(job) for other in self.transfers_on(node)}
        k = max(len(self.transfers_on(node)) for node in self.nodes_of(job))
        if self.policy.admission == "srsf":
            return k <= self.policy.n - 1
        bound = 1 / (2 * (1 + self.policy.eta_over_b))
        return k == 0 or (k == 1 and all(job.wire_s <= bound * other.rest_s for other in met.values()))

    def _place(self) -> None:
        waiting = [j for j in self.jobs if j.submit_s <= self.now_s + 1e-9 and not j.gpus and j.finish_s is None]
        for job in sorted(waiting, key=lambda j: j.service):
            need_gib = PROFILES[job.model].memory_mb / 1024
            room = [
                gpu
                for gpu in self.gpus
                if need_gib + sum(PROFILES[j.model].memory_mb / 1024 for j in self.on_gpu(gpu))
                <= self.memory_gib + 1e-9
                and len(self.on_gpu(gpu)) < MAX_SHARERS
            ]
            if len(room) >= job.workers:
                job.gpus = sorted(self._choose(job, room))
                self._begin_iteration(job)

    def load(self, gpu: int) -> float:
        return round(
            sum(
                job.iterations * (job.compute_s + (job.wire_s if len(self.nodes_of(job)) > 1 else 0.0))
                for job in self.on_gpu(gpu)
            ),
            9,
        )

    def _choose(self, job: _Run, room: list[int]) -> list[int]:
        if self.policy.placement == "first-fit":
            return room[: job.workers]
        if job.workers <= self.policy.kappa:
            return sorted(room, key=lambda gpu: (self.load(gpu), gpu))[: job.workers]
        mean = {
            n: round(sum(self.load(n * self.per_node + i) for i in range(self.per_node)) / self.per_node, 9)
            for n in self.nodes
        }
        ordered = sorted(room, key=lambda gpu: (mean[self.node(gpu)], self.node(gpu), self.load(gpu), gpu))
        return ordered[: job.workers]


def test_a_network_without_bandwidth_is_refused() -> None:
    for b in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="is no bandwidth"):
            Hkbu(b_ms_per_mb=b)
        with pytest.raises(UserError, match="is no bandwidth"):
            AdaSrsf(b_ms_per_mb=b)
