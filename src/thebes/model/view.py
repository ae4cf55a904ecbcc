"""All that a policy may see at one instant.

`view.jobs` has the jobs that are alive as NumPy columns, in order of submission; position i is the same job in each.
What a policy has not declared under `needs` is hidden: asking for it raises, so that no policy reads a duration by
accident. What this world does not know raises as well (see `thebes.model.facts`): no column shows a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.errors import UserError
from thebes.model.facts import COMMUNICATION, DURATIONS, PLANS, PROFILES, PROGRESS, SIMULATED, Knowledge
from thebes.model.jobs import HELD, JobTable
from thebes.model.machine import Machine


class HiddenFromPolicy(UserError):  # noqa: N818 - reads as what it says
    """The error for a policy that asked for what it did not declare."""


class Sketch(NamedTuple):
    """Room to try a decision out, kept between Views so that making a View costs nothing."""

    machine: Machine
    slots: NDArray[np.int64]
    mark: NDArray[np.bool_]  # per row of the job table


class Board(NamedTuple):
    """What compiled code works on; `fill`, `place` and the compiled policies take it whole.

    The records hold what the columns hide (durations); compiled code keeps to what its policy declares, and
    `tests/policy/test_policy_conduct.py` changes what is hidden and expects the same decisions.
    """

    table: JobTable
    sketch: Sketch
    strategy: Any  # thebes.placement.strategies.Strategy
    gang_classes: int  # how many there are; they are numbered from 0 (`jobs.gang_class`)


class JobsView:
    """Columns over the jobs that are alive. Each is computed when first asked for."""

    def __init__(
        self,
        table: JobTable,
        rows: NDArray[np.int64],
        now_s: float,
        needs: frozenset[str],
        tier_speeds: NDArray[np.float64] | None = None,
        knowledge: Knowledge = SIMULATED,
    ) -> None:
        self._table = table
        self._all = table.jobs
        self._tier_speeds = tier_speeds
        self.knowledge = knowledge
        self.needs = needs
        self._now_s = now_s
        self.rows = rows  # rows of the job table, which a Decision names

    def __len__(self) -> int:
        return len(self.rows)

    def among(self, rows: NDArray[np.int64]) -> JobsView:
        """The same columns over these rows of the job table only."""
        return JobsView(self._table, rows, self._now_s, self.needs, self._tier_speeds, self.knowledge)

    def held(self, position: int) -> NDArray[np.int64]:
        """The GPUs that the job at this position holds now, ascending; none while it waits."""
        job = self._all[self.rows[position]]
        if job["phase"] != HELD:
            return np.zeros(0, dtype=np.int64)
        return self._table.slots[job["first_slot"] : job["first_slot"] + job["width"]].copy()

    @cached_property
    def id(self) -> NDArray[np.int64]:
        """The number of each job, which stays the same for ever. Remember jobs by it; rows are numbered again."""
        return self._all["id"][self.rows]

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """Node kinds that will do, as bits: bit k stands for `view.cluster.kinds[k]`."""
        return self._all["kinds"][self.rows]

    @cached_property
    def node_kind(self) -> NDArray[np.int64]:
        """The node kind of its present or last GPUs; meaningless before its first start."""
        return self._all["node_kind"][self.rows]

    @cached_property
    def gang_class(self) -> NDArray[np.int64]:
        """Jobs of one class fit, or do not fit, alike: as many GPUs, of the same kinds, in the same shape."""
        return self._all["gang_class"][self.rows]

    @cached_property
    def queue(self) -> NDArray[np.int64]:
        """The feedback queue that the last decision put it in."""
        return self._all["queue"][self.rows]

    @cached_property
    def gpus(self) -> NDArray[np.int64]:
        """GPUs asked for, all or nothing."""
        return self._all["gpus"][self.rows]

    @cached_property
    def submit_s(self) -> NDArray[np.float64]:
        return self._all["submit_s"][self.rows]

    @cached_property
    def running(self) -> NDArray[np.bool_]:
        """Whether the job holds GPUs now."""
        return self._all["phase"][self.rows] == HELD

    @cached_property
    def first_start_s(self) -> NDArray[np.float64]:
        """When it first got GPUs; infinite if never."""
        return self._all["first_start_s"][self.rows]

    @cached_property
    def since_s(self) -> NDArray[np.float64]:
        """When its present hold or wait began."""
        return self._all["since_s"][self.rows]

    @cached_property
    def _running_s(self) -> NDArray[np.float64]:
        return np.where(self.running, np.maximum(self._now_s - self._all["run_from_s"][self.rows], 0.0), 0.0)

    @cached_property
    def attained_s(self) -> NDArray[np.float64]:
        """Running time so far, since the last promotion."""
        return self._all["age_s"][self.rows] + self._running_s

    @cached_property
    def attained_gpu_s(self) -> NDArray[np.float64]:
        """Attained service: GPUs x running time so far, since the last promotion."""
        return self.attained_s * self.gpus

    @cached_property
    def waited_s(self) -> NDArray[np.float64]:
        """Seconds without GPUs so far, all waits added up."""
        return self._all["waited_s"][self.rows] + np.where(self.running, 0.0, self._now_s - self.since_s)

    @cached_property
    def preemptions(self) -> NDArray[np.int64]:
        return self._all["preemptions"][self.rows]

    @cached_property
    def priority(self) -> NDArray[np.int64]:
        """The user's own number, higher first; `fill` heeds it before the policy's own order."""
        return self._all["priority"][self.rows]

    @cached_property
    def tenant(self) -> NDArray[np.int64]:
        """The tenant on whose account it runs: a position in `view.quotas`."""
        return self._all["tenant"][self.rows]

    @cached_property
    def suspend_s(self) -> NDArray[np.float64]:
        """What suspending it is expected to cost: from the cost model, or measured on a live cluster."""
        return self._all["suspend_s"][self.rows]

    @cached_property
    def resume_s(self) -> NDArray[np.float64]:
        """What resuming it is expected to cost."""
        return self._all["resume_s"][self.rows]

    @cached_property
    def min_gpus(self) -> NDArray[np.int64]:
        """The fewest GPUs that it can run on: what it asked for, unless it says that it can adapt."""
        return self._all["min_gpus"][self.rows]

    @cached_property
    def max_gpus(self) -> NDArray[np.int64]:
        """The most GPUs that it can use."""
        return self._all["max_gpus"][self.rows]

    @cached_property
    def width(self) -> NDArray[np.int64]:
        """GPUs that it holds now; what it asked for while it waits."""
        return self._all["width"][self.rows]

    @cached_property
    def share(self) -> NDArray[np.float64]:
        """Its share of each GPU that it holds: below 1 it shares them."""
        return self._all["share"][self.rows]

    @cached_property
    def nodes(self) -> NDArray[np.int64]:
        """Nodes that its present or last placement spans; 0 if it never had one."""
        return self._all["nodes"][self.rows]

    @cached_property
    def min_nodes(self) -> NDArray[np.int64]:
        """Nodes that it would span at best, on an idle cluster."""
        return self._all["min_nodes"][self.rows]

    @cached_property
    def tier(self) -> NDArray[np.int64]:
        """Widest network that its present or last placement crosses: a position in `thebes.model.cluster.TIERS`."""
        return self._all["tier"][self.rows]

    @cached_property
    def best_tier(self) -> NDArray[np.int64]:
        """The narrowest network in which it could be placed, on an idle cluster."""
        return self._all["best_tier"][self.rows]

    @cached_property
    def model(self) -> NDArray[np.int64]:
        """Number of its model; jobs with equal numbers have equal models."""
        return self._all["model"][self.rows]

    @cached_property
    def state_gib(self) -> NDArray[np.float64]:
        """What a checkpoint has to write."""
        return self._all["state_gib"][self.rows]

    @cached_property
    def memory_gib(self) -> NDArray[np.float64]:
        """Peak memory on each of its GPUs."""
        return self._all["memory_gib"][self.rows]

    @cached_property
    def utilisation(self) -> NDArray[np.float64]:
        """Share of a GPU's time that it computes when alone; meaningful once it has run alone for a while."""
        return self._all["utilisation"][self.rows]

    @cached_property
    def run_from_s(self) -> NDArray[np.float64]:
        """When this hold's work began, or will begin (GPUs not clear yet, restoring); infinite while it waits."""
        return self._all["run_from_s"][self.rows]

    @cached_property
    def speed(self) -> NDArray[np.float64]:
        """Measured: work per running second now, 1 at its best placement on an idle cluster; 0 while it waits."""
        return self._measured(PROGRESS, "speed", np.where(self.running, self._all["speed"][self.rows], 0.0))

    @cached_property
    def _paced_for_s(self) -> NDArray[np.float64]:
        return np.where(self.running, np.maximum(self._now_s - self._all["paced_s"][self.rows], 0.0), 0.0)

    @cached_property
    def ran_s(self) -> NDArray[np.float64]:
        """All its running time, whether it was promoted or not."""
        return self._all["executed_s"][self.rows] + self._running_s

    @cached_property
    def progress_s(self) -> NDArray[np.float64]:
        """Measured: work done so far, in seconds at full speed."""
        done_s = self._all["progress_s"][self.rows] + self._paced_for_s * self._all["speed"][self.rows]
        return self._measured(PROGRESS, "progress_s", done_s)

    @cached_property
    def talked_s(self) -> NDArray[np.float64]:
        """Measured: running time that went into communication which compute did not hide."""
        talked_s = self._all["talked_s"][self.rows] + self._paced_for_s * self._all["talk_share"][self.rows]
        return self._measured(COMMUNICATION, "talked_s", talked_s)

    def speed_in(self, tier: int) -> NDArray[np.float64]:
        """Profiled: its speed on as few nodes as possible inside this tier, undisturbed; 0 where it cannot fit."""
        self._only_with(PROFILES, "speed_in()")
        assert self._tier_speeds is not None  # a world that knows profiles passes them on
        return self._tier_speeds[self.rows, tier]

    @cached_property
    def plan(self) -> NDArray[np.int64]:
        """Code (`thebes.plan_of`) of the execution plan of its present or last run, or that it asked for; 0: none."""
        return self._all["plan"][self.rows]

    @cached_property
    def asked_plan(self) -> NDArray[np.int64]:
        """Code of the execution plan that its user wrote."""
        return self._all["asked_plan"][self.rows]

    @cached_property
    def cpus(self) -> NDArray[np.int64]:
        """CPUs that it holds with each of its GPUs; what it asked for while it waits."""
        return np.where(self.running, self._all["cpus"][self.rows], self.asked_cpus)

    @cached_property
    def asked_cpus(self) -> NDArray[np.int64]:
        """CPUs asked for with each GPU."""
        return self._all["asked_cpus"][self.rows]

    @cached_property
    def guaranteed(self) -> NDArray[np.bool_]:
        """Whether its tenant's quota guarantees the speed that it asked for; otherwise it is best effort."""
        return self._all["guaranteed"][self.rows]

    @cached_property
    def moves(self) -> NDArray[np.int64]:
        """How often it was moved, resized or reconfigured while it ran."""
        jobs = self._all[self.rows]
        return jobs["migrations"] + jobs["resizes"] + jobs["reconfigurations"]

    @cached_property
    def iteration_s(self) -> NDArray[np.float64]:
        """Measured: seconds of one iteration as it runs now; 0 while it does not run."""
        speed = np.where(self._running_s > 0.0, self.speed, 0.0)
        known_s = np.divide(self._all["full_s"][self.rows], speed, out=np.zeros(len(self)), where=speed > 0.0)
        return np.where(np.isnan(speed), np.nan, known_s)

    @cached_property
    def skew(self) -> NDArray[np.float64]:
        """Share of the model's largest tensor, 0 where the model is unknown."""
        return self._all["skew"][self.rows]

    @cached_property
    def duration_s(self) -> NDArray[np.float64]:
        """Oracle: seconds of running at full speed that the job needs in all."""
        self._only_with(DURATIONS, "duration_s")
        return self._all["work_s"][self.rows]

    @cached_property
    def remaining_s(self) -> NDArray[np.float64]:
        """Oracle: seconds of running at full speed that the job still needs."""
        self._only_with(DURATIONS, "remaining_s")
        return self._all["left_s"][self.rows] - self._paced_for_s * self._all["speed"][self.rows]

    def _measured(self, fact: str, column: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values of a measured fact; NaN for a job that has not run long enough to be measured."""
        self.knowledge.demand(fact, f"jobs.{column}")
        if self.knowledge.measured_after_s <= 0.0:
            return values
        return np.where(self.ran_s >= self.knowledge.measured_after_s, values, np.nan)

    def _only_with(self, need: str, column: str) -> None:
        if need not in self.needs:
            why = "if it is meant to be an oracle" if need == DURATIONS else "to be shown it"
            raise HiddenFromPolicy(
                f"view.jobs.{column} is hidden: the policy does not declare that it needs '{need}'.",
                hint=f'Write needs = frozenset({{"{need}"}}) in the policy\'s class {why}.',
            )
        self.knowledge.demand(need, f"jobs.{column}")


@dataclass(frozen=True, eq=False)
class View:
    """All that a policy may see at one instant."""

    now_s: float
    cluster: Cluster
    jobs: JobsView
    machine: Machine
    board: Board  # for compiled code; a policy in Python uses the columns
    finished_gpu_s: NDArray[np.float64]  # service of finished jobs, in order of finish; empty unless declared
    memory: object = None  # what the policy's last Decision asked to remember
    last_finish_s: float = -np.inf  # when a job last ended; policies are not asked while no job is alive
    tenants: tuple[str, ...] = ("",)  # names, by the numbers in `jobs.tenant`
    _plans: Any = None

    def knows(self, fact: str) -> bool:
        """Whether this world knows a fact of `thebes.model.facts`: "progress", "communication", …"""
        return self.jobs.knowledge.knows(fact)

    def among(self, rows: NDArray[np.int64], machine: Machine, memory: object) -> View:
        """The same instant with only these jobs, on this machine, for a policy inside a policy."""
        return replace(self, jobs=self.jobs.among(rows), machine=machine, memory=memory)

    @property
    def plans(self) -> Any:
        """The book of plans (`thebes.perf.plans.book.PlanBook`) of the models that `jobs.model` numbers."""
        if PLANS not in self.jobs.needs:
            raise HiddenFromPolicy(
                f"view.plans is hidden: the policy does not declare that it needs '{PLANS}'.",
                hint=f'Write needs = frozenset({{"{PLANS}"}}) in the policy\'s class to be shown it.',
            )
        self.jobs.knowledge.demand(PLANS, "plans")
        return self._plans

    @property
    def quotas(self) -> NDArray[np.int64]:
        """GPUs that each tenant may hold at once."""
        return self.board.table.quotas

    @property
    def free_gpus(self) -> int:
        return int(self.machine.kinds["free"].sum())

    @property
    def total_gpus(self) -> int:
        return int(self.machine.kinds["total"].sum())
