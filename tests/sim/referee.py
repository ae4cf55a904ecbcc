"""An independent referee: replays the decisions of a run with GPU ids and works out what must have happened.

It shares no code with the simulator's world: plain Python over dictionaries, one interval per GPU and hold. What it
finds (double bookings, torn gangs, finish times, the account of GPU-seconds) is compared with what the simulator says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from thebes.model.cluster import Cluster
from thebes.model.decision import Decision
from thebes.model.trace import Trace
from thebes.model.view import View
from thebes.perf import SpeedModel, Tiers
from thebes.perf.models import catalogue
from thebes.policy.base import Policy
from thebes.report.result import Result
from thebes.sim.costs import Costs


@dataclass(frozen=True)
class Recorded:
    """One decision: who shall hold which GPUs from now on."""

    now_s: float
    holds: dict[int, tuple[int, ...]]


class Recorder(Policy):
    """Another policy, asked through the general path, with a record of what it answered."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.needs: Any = policy.needs
        self.record: list[Recorded] = []

    @property
    def label(self) -> str:
        return self.policy.label

    def decide(self, view: View) -> Decision:
        decision = self.policy.decide(view)
        sizes = dict(zip(view.jobs.rows.tolist(), view.jobs.gpus.tolist(), strict=True))
        gpus = iter(decision.gpus.tolist())
        holds = {row: tuple(next(gpus) for _ in range(sizes[row])) for row in decision.rows.tolist()}
        self.record.append(Recorded(view.now_s, holds))
        return decision


@dataclass
class Job:
    """What the referee knows about one job."""

    submit_s: float
    gpus: int
    work_s: float
    skewed: bool
    state_gib: float
    left_s: float
    ever_ran: bool = False
    state_written_s: float = -np.inf
    finish_s: float | None = None
    first_start_s: float | None = None
    useful: float = 0.0
    overhead: float = 0.0
    lost: float = 0.0
    idle: float = 0.0
    work_done_s: float = 0.0  # useful seconds x speed, hold by hold
    suspensions: int = 0
    migrations: int = 0


@dataclass
class Hold:
    gpus: tuple[int, ...]
    from_s: float
    ready_s: float
    run_from_s: float
    speed: float
    finish_s: float
    clear_s: dict[int, float]  # per GPU: until when its last owner was writing


@dataclass
class Replay:
    """The run as the referee sees it."""

    jobs: list[Job]
    busy: dict[int, list[tuple[float, float]]] = field(default_factory=dict)  # per GPU: holds and suspend tails

    def busy_gpu_s(self) -> float:
        """GPU-seconds during which a GPU was held or written from, each counted once."""
        return sum(_union(intervals) for intervals in self.busy.values())


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    total, end = 0.0, -np.inf
    for low, high in sorted(intervals):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total


def _tier(cluster: Cluster, gpus: Iterable[int]) -> int:
    nodes = {int(cluster.gpu_node[gpu]) for gpu in gpus}
    if len({int(cluster.node_rack[node]) for node in nodes}) > 1:
        return 3
    if len(nodes) > 1:
        return 2
    return 1 if len({int(cluster.gpu_group[gpu]) for gpu in gpus}) > 1 else 0


def _best_tier(cluster: Cluster, gpus: int, gpu_type: str | None) -> int:
    """The narrowest network that could hold the gang on the idle cluster."""
    wanted = gpu_type.lower().split("|") if gpu_type else []
    best = 3
    for k, kind in enumerate(cluster.kinds):
        if wanted and kind.gpu_type and kind.gpu_type.lower() not in wanted:
            continue
        racks: dict[int, int] = {}
        for node in np.flatnonzero(cluster.node_kind == k).tolist():
            racks[int(cluster.node_rack[node])] = racks.get(int(cluster.node_rack[node]), 0) + kind.gpus
        rooms = (max(kind.groups or (kind.gpus,)), kind.gpus, max(racks.values()))
        best = min([best, *(tier for tier, room in enumerate(rooms) if gpus <= room)])
    return best


def replay(trace: Trace, cluster: Cluster, record: list[Recorded], costs: Costs, perf: SpeedModel) -> Replay:
    """Go through the decisions, hold by hold."""
    free, saves = costs.mechanism == "free", costs.mechanism == "checkpoint"
    speeds = (perf.balanced, perf.skewed) if isinstance(perf, Tiers) else ((1.0,) * 4, (1.0,) * 4)
    types = trace.jobs["gpu_type"].to_list()
    jobs = []
    for row in trace.jobs.iter_rows(named=True):
        model = catalogue()[row["model"]]
        skewed = max(model.tensors_mib) / sum(model.tensors_mib) > 0.3
        gib = 3 * sum(model.tensors_mib) / 1024
        jobs.append(Job(row["submit_time"], int(row["num_gpus"]), row["duration"], skewed, gib, row["duration"]))
    seen = Replay(jobs)
    owner: dict[int, int] = {}
    clear_s: dict[int, float] = {}
    holds: dict[int, Hold] = {}

    def begin(row: int, gpus: tuple[int, ...], now_s: float, *, moved: bool) -> None:
        job = jobs[row]
        assert job.finish_s is None, f"job {row} starts after its end"
        assert now_s >= job.submit_s, f"job {row} starts before it is submitted"
        assert len(set(gpus)) == job.gpus, f"job {row}: a torn gang"
        assert len({int(cluster.node_kind[cluster.gpu_node[gpu]]) for gpu in gpus}) == 1, f"job {row}: two kinds"
        for gpu in gpus:
            assert gpu not in owner, f"GPU {gpu} is given to {row} and {owner.get(gpu)}"
            owner[gpu] = row
        ready_s = max([now_s, job.state_written_s, *(clear_s.get(gpu, -np.inf) for gpu in gpus)])
        cost_s = transfer_s = 0.0
        if not free:
            cost_s = costs.start_s + costs.start_s_per_gib * job.state_gib
            if job.ever_ran:
                cost_s = costs.resume_s + costs.resume_s_per_gib * job.state_gib
            if moved:
                transfer_s = costs.migrate_s + costs.migrate_s_per_gib * job.state_gib
        # Compute and communication of one iteration, added up: rounded as there, so that ties fall as they do there.
        seconds = [1.0 + (1.0 / speed - 1.0) for speed in speeds[1 if job.skewed else 0]]
        speed = seconds[_best_tier(cluster, job.gpus, types[row])] / seconds[_tier(cluster, gpus)]
        run_from_s = ready_s + cost_s
        holds[row] = Hold(
            gpus,
            now_s,
            ready_s,
            run_from_s + transfer_s,
            speed,
            run_from_s + job.left_s / speed + transfer_s,  # added in this order, so that ties fall as they do there
            {gpu: clear_s.get(gpu, -np.inf) for gpu in gpus},
        )
        if job.first_start_s is None:
            job.first_start_s = now_s

    def end(row: int, now_s: float, *, finished: bool) -> None:
        job, hold = jobs[row], holds.pop(row)
        ran_s = max(0.0, now_s - hold.run_from_s)
        job.idle += sum(max(0.0, min(now_s, hold.ready_s) - max(hold.from_s, clear)) for clear in hold.clear_s.values())
        job.overhead += job.gpus * max(0.0, min(now_s, hold.run_from_s) - hold.ready_s)
        kept_s, tail_s = ran_s, 0.0
        if not finished:
            if saves and ran_s > 0:
                tail_s = costs.suspend_s + costs.suspend_s_per_gib * job.state_gib
                job.state_written_s = now_s + tail_s
            if costs.mechanism == "kill":
                every_s = costs.checkpoint_every_s
                kept_s = np.floor(ran_s / every_s) * every_s if every_s > 0 else 0.0
        job.useful += job.gpus * kept_s
        job.lost += job.gpus * (ran_s - kept_s)
        job.overhead += job.gpus * tail_s
        job.left_s -= kept_s * hold.speed
        job.work_done_s += kept_s * hold.speed
        job.ever_ran |= ran_s > 0
        for gpu in hold.gpus:
            del owner[gpu]
            clear_s[gpu] = max(clear_s.get(gpu, -np.inf), now_s + tail_s)
            seen.busy.setdefault(gpu, []).append((hold.from_s, now_s))
            if tail_s:
                seen.busy[gpu].append((now_s, now_s + tail_s))
        if finished:
            job.finish_s = now_s

    def finish_until(now_s: float) -> None:
        due = sorted((hold.finish_s, row) for row, hold in holds.items() if hold.finish_s <= now_s)
        for finish_s, row in due:
            end(row, finish_s, finished=True)

    for decision in record:
        now_s = decision.now_s
        finish_until(now_s)
        moved = [row for row, gpus in decision.holds.items() if row in holds and holds[row].gpus != gpus]
        gone = [row for row in holds if row not in decision.holds]
        for row in gone:
            jobs[row].suspensions += 1
            end(row, now_s, finished=False)
        for row in moved:
            jobs[row].migrations += 1
            end(row, now_s, finished=False)
        for row, gpus in decision.holds.items():
            if row not in holds:
                begin(row, gpus, now_s, moved=row in moved)
    finish_until(np.inf)
    return seen


def confirm(result: Result, seen: Replay) -> None:
    """What the simulator reported is what the referee saw."""
    frame = result.jobs

    def same(column: str, values: list[Any]) -> None:
        assert frame[column].to_list() == pytest.approx(values, rel=1e-9, abs=1e-6), column

    jobs = seen.jobs
    assert all(job.finish_s is not None for job in jobs), "a job was lost"
    same("finish_s", [job.finish_s for job in jobs])
    same("first_start_s", [job.first_start_s for job in jobs])
    same("useful_gpu_s", [job.useful for job in jobs])
    same("overhead_gpu_s", [job.overhead for job in jobs])
    same("lost_gpu_s", [job.lost for job in jobs])
    same("idle_held_gpu_s", [job.idle for job in jobs])
    assert frame["preemptions"].to_list() == [job.suspensions for job in jobs]
    assert frame["migrations"].to_list() == [job.migrations for job in jobs]
    # work is conserved: what was kept, at the speed it ran at, is what was asked for
    assert [job.work_done_s for job in jobs] == pytest.approx([job.work_s for job in jobs], rel=1e-9)
    # every GPU-second that a GPU was held or written from is on somebody's account, once
    account = frame.select("useful_gpu_s", "overhead_gpu_s", "lost_gpu_s", "idle_held_gpu_s").sum().row(0)
    assert sum(account) == pytest.approx(seen.busy_gpu_s(), rel=1e-9, abs=1e-6)
