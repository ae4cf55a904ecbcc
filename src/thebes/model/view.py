"""All that a policy may see at one instant.

`view.jobs` has the jobs that are alive as NumPy columns, in order of submission; position i is the same job in each.
What a policy has not declared under `needs` is hidden: asking for it raises, so nobody reads a duration by accident.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.errors import UserError
from thebes.model.jobs import HELD, JobTable
from thebes.model.machine import Machine

# What a policy can declare that it needs to know, beyond what any scheduler sees.
DURATIONS = "durations"  # how long each job will run: oracles only
DISTRIBUTION = "distribution"  # the total service of finished jobs
PROFILES = "profiles"  # how fast each job would run in other places
PLANS = "plans"  # how fast each job would run under every execution plan
NEEDS = {
    DURATIONS: "the run time of each job in advance (an oracle: cannot run live)",
    DISTRIBUTION: "the service that finished jobs took",
    PROFILES: "how fast each job would run in other places, from profiles of its model",
    PLANS: "the speed and the memory of every execution plan, from a fitted model (simulation with --perf plans)",
}


class HiddenFromPolicy(UserError):  # noqa: N818 - reads as what it says
    """A policy asked for what it did not declare."""


class Sketch(NamedTuple):
    """Room to try a decision out, kept between views so that a View costs nothing to make."""

    machine: Machine
    slots: NDArray[np.int64]
    mark: NDArray[np.bool_]  # per row of the job table


class JobsView:
    """Columns over the jobs that are alive. Each is computed when first asked for."""

    def __init__(
        self,
        table: JobTable,
        rows: NDArray[np.int64],
        now_s: float,
        needs: frozenset[str],
        tier_speeds: NDArray[np.float64] | None = None,
    ) -> None:
        self._all = table.jobs
        self._tier_speeds = tier_speeds
        self._needs = needs
        self._now_s = now_s
        self.rows = rows  # rows of the job table: what a Decision names

    def __len__(self) -> int:
        return len(self.rows)

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
        """Set by the user, higher first; `fill` heeds it before the policy's own order."""
        return self._all["priority"][self.rows]

    @cached_property
    def tenant(self) -> NDArray[np.int64]:
        """On whose account: a position in `view.quotas`."""
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
        """The narrowest network that it could be placed in, on an idle cluster."""
        return self._all["best_tier"][self.rows]

    @cached_property
    def model(self) -> NDArray[np.int64]:
        """Number of its model: equal numbers, equal models."""
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
        return np.where(self.running, self._all["speed"][self.rows], 0.0)

    @cached_property
    def _paced_for_s(self) -> NDArray[np.float64]:
        return np.where(self.running, np.maximum(self._now_s - self._all["paced_s"][self.rows], 0.0), 0.0)

    @cached_property
    def ran_s(self) -> NDArray[np.float64]:
        """All its running time, promotions or not."""
        return self._all["executed_s"][self.rows] + self._running_s

    @cached_property
    def progress_s(self) -> NDArray[np.float64]:
        """Measured: work done so far, in seconds at full speed."""
        return self._all["progress_s"][self.rows] + self._paced_for_s * self._all["speed"][self.rows]

    @cached_property
    def talked_s(self) -> NDArray[np.float64]:
        """Measured: running time that went into communication which compute did not hide."""
        return self._all["talked_s"][self.rows] + self._paced_for_s * self._all["talk_share"][self.rows]

    def speed_in(self, tier: int) -> NDArray[np.float64]:
        """Profiled: its speed on as few nodes as possible inside this tier, undisturbed; 0 where it cannot fit."""
        self._only_with(PROFILES, "speed_in()")
        assert self._tier_speeds is not None
        return self._tier_speeds[self.rows, tier]

    @cached_property
    def plan(self) -> NDArray[np.int64]:
        """Code (`thebes.plan_of`) of the execution plan that it runs under, ran under last, or asked for; 0: none."""
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
        """Whether its tenant's quota vouches for the speed that it asked for; best effort otherwise."""
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
        return np.divide(self._all["full_s"][self.rows], speed, out=np.zeros(len(self)), where=speed > 0.0)

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

    def _only_with(self, need: str, column: str) -> None:
        if need not in self._needs:
            why = "if it is meant to be an oracle" if need == DURATIONS else "to be shown it"
            raise HiddenFromPolicy(
                f"view.jobs.{column} is hidden: the policy does not declare that it needs '{need}'.",
                hint=f'Write needs = frozenset({{"{need}"}}) in the policy\'s class {why}.',
            )


@dataclass(frozen=True, eq=False)
class View:
    """One instant."""

    now_s: float
    cluster: Cluster
    jobs: JobsView
    machine: Machine
    # What `fill` and the compiled orders work on. It holds secrets (durations): policies keep to the columns.
    _table: JobTable
    _sketch: Sketch
    _strategy: Any
    _gang_classes: int
    finished_gpu_s: NDArray[np.float64]  # service of finished jobs, in order of finish; empty unless declared
    memory: object = None  # what the policy's last Decision asked to remember
    tenants: tuple[str, ...] = ("",)  # names, by the numbers in `jobs.tenant`
    _plans: Any = None

    @property
    def plans(self) -> Any:
        """The book of plans (`thebes.perf.plans.book.PlanBook`) of the models that `jobs.model` numbers."""
        if self._plans is None:
            raise HiddenFromPolicy(
                f"view.plans is hidden: the policy does not declare that it needs '{PLANS}'.",
                hint=f'Write needs = frozenset({{"{PLANS}"}}) in the policy\'s class to be shown it.',
            )
        return self._plans

    @property
    def quotas(self) -> NDArray[np.int64]:
        """GPUs that each tenant may hold at once."""
        return self._table.quotas

    @property
    def free_gpus(self) -> int:
        return int(self.machine.kinds["free"].sum())

    @property
    def total_gpus(self) -> int:
        return int(self.machine.kinds["total"].sum())
