"""`simulate` runs one trace on one cluster under one policy, from files or objects to a Result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl

from thebes.model.cluster import Cluster
from thebes.model.errors import UserError
from thebes.model.facts import PLANS, SIMULATED, Knowledge, withholding
from thebes.model.jobs import FINISHED, HELD, NEVER
from thebes.model.parameters import parameters_of, show_value
from thebes.model.plan import plan_of
from thebes.model.trace import Trace
from thebes.perf import SpeedModel, Tiers
from thebes.perf import find as find_perf
from thebes.perf.contention import Contention
from thebes.perf.interference import Interference
from thebes.placement import Consolidate, Placement
from thebes.placement import find as find_placement
from thebes.policy import Policy
from thebes.policy import find as find_policy
from thebes.policy.base import ITERATIONS, REPLICA
from thebes.policy.orders.priority import Ordering, distribution_of
from thebes.report.fairness import rho_of
from thebes.report.metrics import summarise
from thebes.report.result import EVENT_KINDS, Result
from thebes.sim import fast, loop
from thebes.sim.check import FAULTS
from thebes.sim.costs import Costs
from thebes.sim.iterations import IterationLoop, refuse_what_no_gpu_holds
from thebes.sim.setup import Workload, build_world, prepare
from thebes.sim.world import World
from thebes.trace import read
from thebes.trace.cluster_file import read_cluster

# Instants simulated between two updates of the progress bar (and looks for Ctrl-C).
STRETCH = 20_000

# Settings with these prefixes are not the policy's, such as `--set cost.suspend_s=5`.
PREFIXES = ("placement", "perf", "cost", "contention", "interference")

Progress = Callable[[int, int, float], None]  # jobs finished, jobs in all, simulated seconds


@dataclass(frozen=True)
class SimulationOptions:
    """Everything that one can choose for a simulation beside trace, cluster and policy."""

    placement: Placement = dataclasses.field(default_factory=Consolidate)
    perf: SpeedModel = dataclasses.field(default_factory=Tiers)
    costs: Costs = dataclasses.field(default_factory=Costs)
    contention: Contention = dataclasses.field(default_factory=Contention)
    interference: Interference = dataclasses.field(default_factory=Interference)
    seed: int = 0
    limit: int | None = None
    skip_oversize: bool = False
    ignore_gpu_type: bool = False
    checks: bool = True
    knowledge: Knowledge = SIMULATED  # what policies can know: everything, unless something is withheld
    fast: bool = True  # priority policies run in compiled code, or else through View and Decision like any other policy


def simulate(
    trace: Trace | str | Path,
    cluster: Cluster | str,
    policy: Policy | str,
    *,
    placement: Placement | str | None = None,
    perf: SpeedModel | str = "tiers",
    costs: Costs | None = None,
    contention: Contention | bool = False,
    interference: Interference | None = None,
    seed: int = 0,
    limit: int | None = None,
    skip_oversize: bool = False,
    ignore_gpu_type: bool = False,
    checks: bool = True,
    measured_after_s: float = 0.0,
    fast: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Replay a trace on a cluster under a policy.

    Names and paths stand for objects: `simulate("jobs.csv", "8x8", "tiresias-l")`; the trace "philly-sample" ships with
    Thebes. The placement is `consolidate` unless told otherwise. `checks=False` leaves out the checker of every
    decision; `measured_after_s` withholds what is measured of a job until it has run for so long. A run that ends with
    jobs unfinished is an error that names them.
    """
    chosen = find_policy(policy)() if isinstance(policy, str) else policy
    where = find_placement(placement)() if isinstance(placement, str) else placement
    options = SimulationOptions(
        placement=where or chosen.default_placement(),
        perf=find_perf(perf)() if isinstance(perf, str) else perf,
        costs=costs or Costs(),
        contention=Contention(on=contention) if isinstance(contention, bool) else contention,
        interference=interference or Interference(),
        seed=seed,
        limit=limit,
        skip_oversize=skip_oversize,
        ignore_gpu_type=ignore_gpu_type,
        checks=checks,
        knowledge=withholding(measured_after_s),
        fast=fast,
    )
    return run(
        trace if isinstance(trace, Trace) else read(trace),
        cluster if isinstance(cluster, Cluster) else read_cluster(cluster),
        chosen,
        options,
        progress,
    )


def run(
    trace: Trace, cluster: Cluster, policy: Policy, options: SimulationOptions, progress: Progress | None = None
) -> Result:
    """Like `simulate`, for objects that are already made."""
    if policy.grain == REPLICA:
        from thebes.policy.orders.tiresias_compat import TiresiasCompat
        from thebes.sim.compat import run_compat

        return run_compat(trace, cluster, cast(TiresiasCompat, policy), options.placement.name, options.limit)
    unused = _unused_by(policy, options)
    if "placement" in policy.ignores():
        options = dataclasses.replace(options, placement=policy.default_placement())
    work = prepare(
        trace,
        cluster,
        options.placement,
        options.perf,
        seed=options.seed,
        limit=options.limit,
        skip_oversize=options.skip_oversize,
        ignore_gpu_type=options.ignore_gpu_type,
        changes_plans=PLANS in policy.needs,
    )
    if PLANS in policy.needs and work.executions is None:
        raise UserError(
            f"policy {policy.label} decides on execution plans, and performance model {options.perf.name} has none",
            hint='add --perf plans (in Python: perf="plans")',
        )
    policy.check(cluster, work.tenants)
    world = build_world(
        work,
        cluster,
        options.placement,
        options.costs,
        options.seed,
        contention=options.contention,
        interference=options.interference,
        shares=policy.shares,
    )
    world.clock["quantum_s"] = policy.reads_every_s
    began = time.perf_counter()
    order = policy.one_order()
    if options.fast and order is not None:
        world = _run_fast(world, policy, order, options, progress)
    else:
        world = _run_loop(_loop(world, cluster, policy, options, work), policy, options, progress)
    wall_seconds = time.perf_counter() - began
    _refuse_unfinished(world, work, policy, options)
    return _result(trace, cluster, policy, options, work, world, wall_seconds, unused)


def _loop(
    world: World, cluster: Cluster, policy: Policy, options: SimulationOptions, work: Workload
) -> loop.GeneralLoop:
    """The general path: at the grain of decisions, or of iterations where jobs take turns on a GPU."""
    known: dict[str, Any] = {
        "checks": options.checks,
        "tenants": work.tenants,
        "tier_speeds": work.profiles.tier_speeds,
        "knowledge": options.knowledge,
    }
    if policy.grain == ITERATIONS:
        own = cast(Any, policy)  # a policy of the one family that has this grain
        refuse_what_no_gpu_holds(world.table, world.machine, own, work.jobs["job_id"].to_list())
        return IterationLoop(world, cluster, own, **known)
    return loop.GeneralLoop(world, cluster, policy, **known, executions=work.executions)


def _unused_by(policy: Policy, options: SimulationOptions) -> tuple[str, ...]:
    """Notes on settings that were made but that the policy does not use."""
    own = policy.default_placement()
    made = {
        "placement": options.placement not in (own, type(own)()),
        "contention": options.contention != Contention(),
        "interference": options.interference != Interference(),
    }
    what = {"placement": f"placement {options.placement.name}"}
    return tuple(
        f"{policy.name} does not use {what.get(setting, f'the {setting} settings')}: {why}"
        for setting, why in policy.ignores().items()
        if made[setting]
    )


def _run_fast(
    world: World, policy: Policy, order: Ordering, options: SimulationOptions, progress: Progress | None
) -> World:
    jobs = world.table.jobs
    rule, given = order.rule, order.samples
    distribution = distribution_of(given, room=len(jobs))
    memory = fast.memory_for(world, learns=order.learn, checks=options.checks)
    status, watch = fast.PAUSED, _Livelock(options)
    while status != fast.DONE:
        status = fast.run(world, memory, rule, distribution, STRETCH)
        watch.look(world, policy)
        if status == fast.LOG_FULL:
            world = loop.with_longer_log(world)
        elif status == fast.LEARN:
            fast.learn(world, memory, rule, distribution, given)
        elif status == fast.UNSOUND:
            fault, row = FAULTS[memory.state[fast.FAULT]], memory.state[fast.FAULT_ROW]
            raise AssertionError(
                f"{fault} (job row {row}) at {world.clock['now_s'][0]} s: a defect of Thebes, please report it"
            )
        if progress:
            progress(*_progress_of(world))
    return world


def _run_loop(
    simulation: loop.GeneralLoop, policy: Policy, options: SimulationOptions, progress: Progress | None
) -> World:
    status, watch = loop.ASK, _Livelock(options)
    while status != loop.DONE:
        status = simulation.run(STRETCH // 20)
        watch.look(simulation.world, policy)
        if status == loop.LOG_FULL:
            simulation.grow_log()
        if progress:
            progress(*_progress_of(simulation.world))
    return simulation.world


class _Livelock:
    """It notices that no work gets done: jobs are killed before a checkpoint, or switched before they run."""

    PATIENCE = 20  # so many looks without any progress

    def __init__(self, options: SimulationOptions) -> None:
        self.kills = options.costs.mechanism == "kill"
        self.least_left_s = np.inf
        self.looks = 0
        self.finished = 0

    def look(self, world: World, policy: Policy) -> None:
        finished = int(world.clock["finished"][0])
        if finished > self.finished:  # a finish is progress, so the work of all jobs need not be added up
            self.finished, self.looks = finished, 0
            return
        left_s = _work_left_s(world)
        self.looks = 0 if left_s < self.least_left_s else self.looks + 1
        self.least_left_s = min(self.least_left_s, left_s)
        if self.looks <= self.PATIENCE:
            return
        when = f"under {policy.label} (at {world.clock['now_s'][0]:g} s)"
        if self.kills:
            raise UserError(
                f"no work is kept any more {when}: jobs are killed before they reach a checkpoint",
                hint="make cost.checkpoint_every_s shorter, or use cost.mechanism=checkpoint",
            )
        raise UserError(
            f"no work gets done any more {when}: jobs are suspended before they have begun to run",
            hint="leases, rounds and turns must last longer than it takes to suspend and resume a job (cost.*)",
        )


def _work_left_s(world: World) -> float:
    """The work that all jobs together still have to do."""
    jobs = world.table.jobs
    ran_s = np.where(jobs["phase"] == HELD, np.maximum(world.clock["now_s"][0] - jobs["paced_s"], 0.0), 0.0)
    return float((jobs["left_s"] - ran_s * jobs["speed"]).sum())


def _progress_of(world: World) -> tuple[int, int, float]:
    return int(world.clock["finished"][0]), len(world.table.jobs), float(world.clock["now_s"][0])


def _refuse_unfinished(world: World, work: Workload, policy: Policy, options: SimulationOptions) -> None:
    """Refuse a run that ended with unfinished jobs, because nothing may fail silently."""
    unfinished = np.flatnonzero(world.table.jobs["phase"] != FINISHED)
    if len(unfinished):
        ids = work.jobs["job_id"].gather(unfinished[:5]).to_list()
        more = f" and {len(unfinished) - 5} more" if len(unfinished) > 5 else ""
        raise UserError(
            f"{len(unfinished)} of {len(work.gpus)} jobs never finished under {policy.label} with placement "
            f"{options.placement.name}: {', '.join(ids)}{more}",
            hint="nothing was left that could start them: the policy or the placement passes them over for ever",
        )


def _result(
    trace: Trace,
    cluster: Cluster,
    policy: Policy,
    options: SimulationOptions,
    work: Workload,
    world: World,
    wall_seconds: float,
    unused: tuple[str, ...],
) -> Result:
    jobs, clock = _jobs_frame(work, world), world.clock.view(np.recarray)[0]
    jobs = jobs.with_columns(pl.Series("rho", rho_of(jobs, cluster.total_gpus)).fill_nan(None))
    timeline = pl.DataFrame({name: world.timeline[name][: clock.steps].copy() for name in world.timeline.dtype.names})
    notes = (*trace.notes, *work.notes, *unused)
    metrics = summarise(
        policy=policy.label,
        placement=options.placement.name,
        trace=trace.name,
        cluster=cluster.name,
        total_gpus=cluster.total_gpus,
        jobs=jobs,
        events=int(clock.events),
        wall_seconds=wall_seconds,
        timeline=timeline,
        parameters=settings_of(policy, options),
        perf=options.perf.name,
    )
    return Result(
        policy=policy.label,
        placement=options.placement.name,
        cluster=cluster.name,
        total_gpus=cluster.total_gpus,
        trace=trace,
        jobs=jobs,
        events=_events_frame(world),
        timeline=timeline,
        metrics=metrics,
        notes=notes,
    )


def settings_of(policy: Policy, options: SimulationOptions) -> dict[str, Any]:
    """Every parameter in force, as `--set` would take it, so that the run can be repeated."""
    settings: dict[str, Any] = {name: show_value(getattr(policy, name)) for name in parameters_of(type(policy))}
    owners = (options.placement, options.perf, options.costs, options.contention, options.interference)
    for prefix, owner in zip(PREFIXES, owners, strict=True):
        settings |= {f"{prefix}.{name}": show_value(getattr(owner, name)) for name in parameters_of(type(owner))}
    return settings | {"seed": options.seed}


def _jobs_frame(work: Workload, world: World) -> pl.DataFrame:
    jobs = world.table.jobs.view(np.recarray)
    finished = jobs.phase == FINISHED
    ran_s = np.where(jobs.executed_s > 0, jobs.executed_s, 1.0)
    kept = work.jobs.select("job_id", "user", "vc")
    names = pl.Series(work.tenants)
    return kept.with_columns(
        names.gather(work.tenant).alias("tenant"),
        pl.Series("model", work.models, dtype=pl.String),
        pl.Series("gpus", jobs.gpus.astype(np.float64)),
        pl.Series("submit_s", jobs.submit_s),
        pl.Series("duration_s", jobs.work_s),
        _times("first_start_s", jobs.first_start_s, jobs.first_start_s < NEVER),
        _times("finish_s", jobs.finish_s, finished),
        _times("jct_s", jobs.finish_s - jobs.submit_s, finished),
        _times("queue_delay_s", jobs.waited_s, finished),
        _times("first_wait_s", jobs.first_start_s - jobs.submit_s, jobs.first_start_s < NEVER),
        *(pl.Series(name, jobs[name].copy()) for name in ("preemptions", "promotions", "demotions", "migrations")),
        *(pl.Series(name, jobs[name].copy()) for name in ("resizes", "reconfigurations")),
        *_plan_columns(work, jobs),
        *(pl.Series(name, jobs[name].copy()) for name in ("useful_gpu_s", "overhead_gpu_s", "lost_gpu_s")),
        pl.Series("idle_held_gpu_s", jobs.idle_gpu_s.copy()),
        pl.Series("spread_gpu_s", jobs.spread_gpu_s.copy()),
        pl.Series("ran_s", jobs.executed_s.copy()),
        pl.Series("comm_s", jobs.talked_s.copy()),
        pl.Series("nodes_last", jobs.nodes.copy()),
        pl.Series("speed_mean", np.where(jobs.executed_s > 0, jobs.work_s / ran_s, np.nan)),
    )


def _plan_columns(work: Workload, jobs: np.recarray[Any, Any]) -> list[pl.Series]:
    if work.executions is None:
        return []
    return [
        pl.Series("plan_last", _plan_names(jobs.plan)),
        pl.Series("cpus_last", jobs.cpus.copy()),
        pl.Series("guaranteed", jobs.guaranteed.copy()),
    ]


def _plan_names(codes: np.ndarray[Any, Any]) -> pl.Series:
    """Plans in words, with null where a job has none."""
    distinct, number = np.unique(codes, return_inverse=True)
    words = pl.Series([str(plan_of(int(code))) if code else None for code in distinct], dtype=pl.String)
    return words.gather(number.ravel())


def _times(name: str, values: np.ndarray[Any, Any], known: np.ndarray[Any, Any]) -> pl.Series:
    return pl.Series(name, np.where(known, values, np.nan)).fill_nan(None)


def _events_frame(world: World) -> pl.DataFrame:
    log = world.log[: world.clock["logged"][0]].view(np.recarray)
    kinds = pl.Series("kind", EVENT_KINDS, dtype=pl.Enum(EVENT_KINDS))
    events = pl.DataFrame(
        {
            "time_s": log.time_s.copy(),
            "job": log.job.copy(),
            "kind": kinds.gather(log.event.astype(np.uint32)),
            "gpus": log.gpus.copy(),
            "nodes": log.nodes.copy(),
        }
    )
    return events.with_columns(_plan_names(log.plan).alias("plan")) if log.plan.any() else events
