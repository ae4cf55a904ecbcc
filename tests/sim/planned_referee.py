"""The referee for jobs with execution plans: replays what a policy asked for, stretch by stretch, in plain Python.

It knows the plan book, for iterations are its subject matter, and nothing of the simulator's world: who held which GPUs
and CPUs under which plan, what of the work was done meanwhile, and where every GPU-second went.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest

from thebes.model.cluster import Cluster
from thebes.model.decision import Decision
from thebes.model.facts import PLANS
from thebes.model.plan import Plan, plan_of
from thebes.model.view import View
from thebes.perf.plans.book import PlanBook
from thebes.policy.base import Policy
from thebes.report.result import Result
from thebes.sim.costs import Costs


@dataclass(frozen=True)
class Asked:
    """One row of a Decision; None: not named."""

    gpus: tuple[int, ...]
    plan: Plan | None
    cpus: int | None


@dataclass(frozen=True)
class Asking:
    now_s: float
    alive: frozenset[int]
    rows: dict[int, Asked]


class PlanRecorder(Policy):
    """Another policy, with a record of what it answered and of what each job had asked for."""

    needs: ClassVar[frozenset[str]] = frozenset({PLANS})

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.record: list[Asking] = []
        self.book: PlanBook | None = None
        self.wishes: dict[int, tuple[int, Plan, int]] = {}  # (model, plan, CPUs)

    @property
    def label(self) -> str:
        return self.policy.label

    def decide(self, view: View) -> Decision:
        decision, jobs = self.policy.decide(view), view.jobs
        self.book = view.plans
        told = zip(
            jobs.rows.tolist(), jobs.model.tolist(), jobs.asked_plan.tolist(), jobs.asked_cpus.tolist(), strict=True
        )
        self.wishes |= {row: (model, plan_of(plan), cpus) for row, model, plan, cpus in told}
        counts = jobs.gpus[np.searchsorted(jobs.rows, decision.rows)] if decision.counts is None else decision.counts
        gpus, rows = iter(decision.gpus.tolist()), {}
        for i, row in enumerate(decision.rows.tolist()):
            held = tuple(next(gpus) for _ in range(int(counts[i])))
            plan = None if decision.plans is None else plan_of(int(decision.plans[i]))
            rows[row] = Asked(held, plan, None if decision.cpus is None else int(decision.cpus[i]))
        self.record.append(Asking(view.now_s, frozenset(jobs.rows.tolist()), rows))
        return decision


@dataclass
class Hold:
    gpus: tuple[int, ...]
    plan: Plan
    cpus: int
    from_s: float
    ready_s: float
    run_from_s: float
    clear_s: dict[int, float]
    paces: list[tuple[float, float]] = field(default_factory=list)  # (from when, speed)

    def work_until(self, until_s: float) -> float:
        """What it has done by then: seconds at full speed."""
        ends = [begin for begin, _ in self.paces[1:]] + [np.inf]
        return sum(
            speed * max(0.0, min(until_s, end) - max(begin, self.run_from_s))
            for (begin, speed), end in zip(self.paces, ends, strict=True)
        )


@dataclass
class Job:
    left_s: float
    ever_ran: bool = False
    written_s: float = -np.inf
    finish_s: float | None = None
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Referee:
    def __init__(self, cluster: Cluster, recorder: PlanRecorder, costs: Costs, work_s: list[float]) -> None:
        assert recorder.book is not None
        self.cluster, self.book, self.wishes, self.costs = cluster, recorder.book, recorder.wishes, costs
        self.saves = costs.mechanism != "kill"
        self.jobs = [Job(work) for work in work_s]
        self.holds: dict[int, Hold] = {}
        self.clear_s: dict[int, float] = {}
        for asking in recorder.record:
            self._step(asking)
        self._finish(np.inf)

    def _nodes(self, gpus: tuple[int, ...]) -> int:
        return len({int(self.cluster.gpu_node[gpu]) for gpu in gpus})

    def _iteration_s(self, row: int, plan: Plan, nodes: int, cpus: int) -> float:
        nodes = min(max(nodes, self.book.site.fewest_nodes(plan.gpus)), plan.gpus)
        outlook = self.book.of(self.wishes[row][0], plan, nodes, cpus)
        assert outlook is not None
        return outlook.iteration_s

    def _speed(self, row: int, plan: Plan, gpus: tuple[int, ...], cpus: int) -> float:
        _, own, own_cpus = self.wishes[row]
        return self._iteration_s(row, own, 1, own_cpus) / self._iteration_s(row, plan, self._nodes(gpus), cpus)

    def _plan(self, row: int, asked: Asked, cpus: int) -> Plan:
        """The plan that was named; else the one it has on so many GPUs; else its own; else its own type, stretched."""
        model, own, _ = self.wishes[row]
        hold = self.holds.get(row)
        if asked.plan is not None:
            return asked.plan
        if hold is not None and len(hold.gpus) == len(asked.gpus):
            return hold.plan
        if len(asked.gpus) == own.gpus:
            return own
        for like in (own, None):
            for count in range(len(asked.gpus), 0, -1):
                found = self.book.best(model, count, self.book.site.fewest_nodes(count), cpus, like)
                if found is not None:
                    return found.plan
        raise AssertionError("no plan at all")

    def _step(self, asking: Asking) -> None:
        now_s = asking.now_s
        self._finish(now_s)
        assert asking.alive.isdisjoint(row for row, job in enumerate(self.jobs) if job.finish_s is not None)
        wanted: dict[int, Hold] = {}
        for row, asked in asking.rows.items():
            cpus = self.wishes[row][2] if asked.cpus is None else asked.cpus
            wanted[row] = Hold(asked.gpus, self._plan(row, asked, cpus), cpus, now_s, now_s, now_s, {})
        self._within_capacity(wanted)
        old = dict(self.holds)
        for row, hold in old.items():
            new = wanted.get(row)
            if new is None or (new.gpus, new.plan) != (hold.gpus, hold.plan):
                self._end(row, now_s, finished=False)
        for row in old.keys() - wanted.keys():
            self.jobs[row].counts["preemptions"] += 1
        for row, hold in wanted.items():
            if row not in self.holds:
                self._begin(row, hold, old.get(row))
            elif self.holds[row].cpus != hold.cpus:
                here = self.holds[row]
                here.cpus = hold.cpus
                here.paces.append((now_s, self._speed(row, here.plan, here.gpus, here.cpus)))

    def _within_capacity(self, wanted: dict[int, Hold]) -> None:
        taken = [gpu for hold in wanted.values() for gpu in hold.gpus]
        assert len(taken) == len(set(taken)), "a GPU twice"
        cpus: dict[int, int] = defaultdict(int)
        host_gib: dict[int, float] = defaultdict(float)
        for row, hold in wanted.items():
            fewest = self.book.site.fewest_nodes(hold.plan.gpus)
            outlook = self.book.of(self.wishes[row][0], hold.plan, fewest, hold.cpus)
            assert outlook is not None, "a plan that cannot run"
            assert outlook.gpu_gib <= self.book.site.gpu_gib
            for gpu in hold.gpus:
                cpus[int(self.cluster.gpu_node[gpu])] += hold.cpus
                host_gib[int(self.cluster.gpu_node[gpu])] += outlook.host_gib
        assert all(used <= self.book.site.node_cpus for used in cpus.values()), "too many CPUs"
        assert all(used <= self.book.site.node_gib + 1e-6 for used in host_gib.values()), "too much host memory"

    def _begin(self, row: int, hold: Hold, before: Hold | None) -> None:
        job, costs, free = self.jobs[row], self.costs, self.costs.mechanism == "free"
        hold.clear_s = {gpu: self.clear_s.get(gpu, -np.inf) for gpu in hold.gpus}
        hold.ready_s = max([hold.from_s, job.written_s, *hold.clear_s.values()])
        hold.run_from_s = hold.ready_s + (0.0 if free else costs.resume_s if job.ever_ran else costs.start_s)
        if before is not None:
            if before.gpus != hold.gpus and not free:
                hold.run_from_s += costs.migrate_s
            resized, replanned = len(before.gpus) != len(hold.gpus), before.plan != hold.plan
            job.counts["resizes" if resized else "reconfigurations" if replanned else "migrations"] += 1
        hold.paces = [(-np.inf, self._speed(row, hold.plan, hold.gpus, hold.cpus))]
        self.holds[row] = hold

    def _end(self, row: int, now_s: float, *, finished: bool) -> None:
        job, hold = self.jobs[row], self.holds.pop(row)
        width, ran_s = len(hold.gpus), max(0.0, now_s - hold.run_from_s)
        kept_s, tail_s = ran_s, 0.0
        if not finished and self.saves and ran_s > 0 and self.costs.mechanism != "free":
            tail_s = self.costs.suspend_s
            job.written_s = now_s + tail_s
        if not finished and not self.saves:
            every_s = self.costs.checkpoint_every_s
            kept_s = np.floor(ran_s / every_s) * every_s if every_s > 0 else 0.0
        idle_until_s = min(now_s, hold.ready_s)
        job.counts["idle_held_gpu_s"] += sum(
            max(0.0, idle_until_s - max(hold.from_s, clear_s)) for clear_s in hold.clear_s.values()
        )
        restoring_s = max(0.0, min(now_s, hold.run_from_s) - hold.ready_s)
        job.counts["overhead_gpu_s"] += width * (restoring_s + tail_s)
        job.counts["useful_gpu_s"] += width * kept_s
        job.counts["lost_gpu_s"] += width * (ran_s - kept_s)
        job.left_s -= hold.work_until(hold.run_from_s + kept_s)
        job.ever_ran |= ran_s > 0
        for gpu in hold.gpus:
            self.clear_s[gpu] = max(self.clear_s.get(gpu, -np.inf), now_s + tail_s)
        if finished:
            job.finish_s = now_s

    def _finish(self, now_s: float) -> None:
        for finish_s, row in sorted((self._finish_s(row), row) for row in self.holds):
            if finish_s <= now_s + 1e-9:
                self._end(row, finish_s, finished=True)

    def _finish_s(self, row: int) -> float:
        hold = self.holds[row]
        last_s, speed = hold.paces[-1]
        from_s = max(last_s, hold.run_from_s)
        return from_s + max(0.0, self.jobs[row].left_s - hold.work_until(from_s)) / speed

    def confirm(self, result: Result) -> None:
        def same(column: str, values: list[Any]) -> None:
            assert result.jobs[column].to_list() == pytest.approx(values, rel=1e-7, abs=1e-5), column

        assert all(job.finish_s is not None for job in self.jobs), "a job was lost"
        same("finish_s", [job.finish_s for job in self.jobs])
        for column in ("useful_gpu_s", "overhead_gpu_s", "lost_gpu_s", "idle_held_gpu_s"):
            same(column, [job.counts[column] for job in self.jobs])
        for column in ("preemptions", "migrations", "resizes", "reconfigurations"):
            assert result.jobs[column].to_list() == [job.counts[column] for job in self.jobs], column
        assert [job.left_s for job in self.jobs] == pytest.approx([0.0] * len(self.jobs), abs=1e-5)
