"""The simulator's door, where a trace, a cluster and the chosen models become one World of flat arrays.

Everything that can be wrong with a workload for this cluster is found here, before the first event: jobs that can never
fit, GPU types that do not exist, fractional GPUs under a policy that does not share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from thebes.model import rules
from thebes.model.cluster import Cluster
from thebes.model.compiled import Records, plain
from thebes.model.decision import MAX_SHARERS
from thebes.model.errors import UserError, nearest
from thebes.model.jobs import JOB, NEVER, JobTable, without_quotas
from thebes.model.machine import machine_of
from thebes.model.trace import Trace
from thebes.perf import SpeedModel
from thebes.perf.contention import Contention
from thebes.perf.interference import Interference
from thebes.perf.models import Model, facts_of
from thebes.perf.plans.speed import Plans
from thebes.perf.profiles import JobProfiles, profiles_for, profiles_of_plans
from thebes.placement import Placement
from thebes.placement.strategies import SKEW, largest_gangs
from thebes.sim.costs import Costs
from thebes.sim.executions import CannotRun, Executions, executions_for
from thebes.sim.neighbours import NOBODY, Neighbours
from thebes.sim.world import CLOCK, EVENT, OBSERVATION, STEP, World

TIMELINE_ROOM = 1 << 16
LEARNING_WINDOW = 1000


@dataclass(frozen=True)
class Workload:
    """The jobs of a trace that will be simulated, and what was done to them to get there."""

    jobs: pl.DataFrame
    gpus: NDArray[np.int64]
    kinds: NDArray[np.int64]  # the node kinds that each job may use, as bits
    models: list[str | None]
    tenants: tuple[str, ...]
    tenant: NDArray[np.int64]  # for each job, the number of its tenant
    min_gpus: NDArray[np.int64]
    max_gpus: NDArray[np.int64]
    profiles: JobProfiles
    catalogue: Mapping[str, Model]  # the models that the speed model knows
    notes: tuple[str, ...]
    executions: Executions | None = None  # where jobs have execution plans


def prepare(
    trace: Trace,
    cluster: Cluster,
    placement: Placement,
    perf: SpeedModel,
    *,
    seed: int,
    limit: int | None = None,
    skip_oversize: bool = False,
    ignore_gpu_type: bool = False,
    changes_plans: bool = False,
) -> Workload:
    """Choose the jobs, round up their GPUs, give models to jobs without one, and refuse what can never run.

    Under a policy that changes execution plans, a job can run on any number of GPUs that some plan can use.
    """
    notes: list[str] = []
    jobs = trace.jobs if limit is None else trace.jobs.head(limit)
    if jobs.is_empty():
        raise UserError(
            f"{trace.name}: no jobs to simulate", hint="check --limit, or the trace with `thebes trace info`"
        )
    asked = jobs["num_gpus"].to_numpy()
    gpus = np.ceil(asked - 1e-9).astype(np.int64)
    fractional = int((gpus > asked + 1e-9).sum())
    if fractional:
        notes.append(f"{fractional} of {len(gpus)} jobs asked for fractions of a GPU: rounded up to whole GPUs")
    kinds = _allowed_kinds(jobs, cluster, ignore_gpu_type)
    fits = _fits(gpus, kinds, cluster, placement)
    if not fits.all():
        if not skip_oversize:
            raise UserError(
                _oversize(jobs, gpus, kinds, fits, cluster, placement, trace.name),
                hint="--skip-oversize leaves them out and goes on",
            )
        notes.append(
            f"{int((~fits).sum())} of {len(fits)} jobs left out: they can never fit this cluster (--skip-oversize)"
        )
        jobs, gpus, kinds = jobs.filter(pl.Series(fits)), gpus[fits], kinds[fits]
        if jobs.is_empty():
            raise UserError(f"{trace.name}: no job fits {cluster.describe()}", hint="use a larger cluster")
    perf.check(cluster)
    models = _models(jobs, gpus, perf, seed, trace.name, notes)
    tenants, tenant = _tenants(jobs)
    min_gpus, max_gpus = _elastic(jobs, gpus, cluster, trace.name)
    if isinstance(perf, Plans):
        assigned = not any(jobs["model"].to_list()) if "model" in jobs.columns else True
        try:
            executions = executions_for(perf, cluster, jobs, gpus, models, trace.name, assigned=assigned, notes=notes)
        except CannotRun as why:
            if not skip_oversize or len(why.positions) == len(jobs):
                raise
            left = np.setdiff1d(np.arange(len(jobs)), why.positions)
            out = f"{len(why.positions)} of {len(jobs)} jobs left out"
            work = prepare(
                replace(trace, jobs=jobs[left]),
                cluster,
                placement,
                perf,
                seed=seed,
                skip_oversize=True,
                ignore_gpu_type=ignore_gpu_type,
                changes_plans=changes_plans,
            )
            return replace(work, notes=(f"{out}: they cannot run here as they ask (--skip-oversize)", *work.notes))
        if changes_plans:
            # Plans make every job elastic, as far as the trace sets no bounds.
            most = executions.most_gpus(gpus)
            min_gpus = np.where(_says(jobs, "min_gpus"), min_gpus, 1)
            max_gpus = np.where(_says(jobs, "max_gpus"), np.minimum(max_gpus, most), most)
        profiles = profiles_of_plans(executions.profiles, cluster, executions.number, executions.asked, gpus)
        models, facts = list[str | None](executions.models), executions.facts
    else:
        executions, facts = None, perf.models()
        profiles = profiles_for(perf, cluster, models, gpus, min_gpus, max_gpus, kinds)
    return Workload(
        jobs, gpus, kinds, models, tenants, tenant, min_gpus, max_gpus, profiles, facts, tuple(notes), executions
    )


def _models(
    jobs: pl.DataFrame, gpus: NDArray[np.int64], perf: SpeedModel, seed: int, name: str, notes: list[str]
) -> list[str | None]:
    """The model of each job: the trace's, or one assigned by the seed. A model that nobody has profiled is refused."""
    models: list[str | None] = jobs["model"].to_list() if "model" in jobs.columns else [None] * len(jobs)
    if not any(models):
        notes.append(f"the trace names no models: assigned by seed {seed} from {len(perf.models())} known ones")
        return list(perf.assign(gpus, seed))
    unknown = sorted({m for m in models if m and m not in perf.models()})
    refused = [model for model in unknown if not perf.knows(model)]
    if refused:
        raise UserError(
            f"{name}: performance model {perf.name} does not know '{refused[0]}'"
            + (f" and {len(refused) - 1} other models" if len(refused) > 1 else ""),
            hint=nearest(refused[0], perf.models()),
        )
    if unknown:
        listed = ", ".join(unknown[:3]) + (" …" if len(unknown) > 3 else "")
        notes.append(f"models without a tensor table are taken as not skewed: {listed}")
    return models


def _tenants(jobs: pl.DataFrame) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The tenants: the virtual clusters of the trace, else its users, else one for all jobs."""
    for column in ("vc", "user"):
        if column in jobs.columns and jobs[column].drop_nulls().n_unique() > 1:
            named = jobs[column].fill_null("")
            names = tuple(named.unique(maintain_order=True).to_list())
            number = {name: at for at, name in enumerate(names)}
            return names, np.array([number[name] for name in named.to_list()], dtype=np.int64)
    for column in ("vc", "user"):  # a single tenant keeps its name
        if column in jobs.columns and jobs[column].drop_nulls().len():
            return (jobs[column].drop_nulls()[0],), np.zeros(len(jobs), dtype=np.int64)
    return ("everybody",), np.zeros(len(jobs), dtype=np.int64)


def _elastic(
    jobs: pl.DataFrame, gpus: NDArray[np.int64], cluster: Cluster, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many GPUs each job can run on: what it asks for, unless the trace has min_gpus or max_gpus."""
    bounds: list[NDArray[np.int64]] = []
    for column, sign in (("min_gpus", 1), ("max_gpus", -1)):
        if column not in jobs.columns:
            bounds.append(gpus.copy())
            continue
        values = jobs[column].cast(pl.Int64, strict=False)
        given = values.fill_null(pl.Series(gpus)).to_numpy().astype(np.int64)
        wrong = np.flatnonzero((given < 1) | (sign * given > sign * gpus))
        if len(wrong):
            job, least = jobs["job_id"][int(wrong[0])], "at most" if sign > 0 else "at least"
            raise UserError(
                f"{name}: job {job}: {column} = {given[wrong[0]]} with {gpus[wrong[0]]} GPUs asked for",
                hint=f"{column} is {least} num_gpus; leave it blank for jobs that cannot adapt",
            )
        bounds.append(np.minimum(given, cluster.total_gpus))
    return bounds[0], np.maximum(bounds[1], gpus)


def _says(jobs: pl.DataFrame, column: str) -> NDArray[np.bool_]:
    """For each job, whether the trace fills in this column."""
    return jobs[column].is_not_null().to_numpy() if column in jobs.columns else np.zeros(len(jobs), dtype=np.bool_)


def _allowed_kinds(jobs: pl.DataFrame, cluster: Cluster, ignore_gpu_type: bool) -> NDArray[np.int64]:
    """For each job, the node kinds whose GPU type it accepts; an unknown type on either side suits."""
    everything = (1 << len(cluster.kinds)) - 1
    if ignore_gpu_type or "gpu_type" not in jobs.columns:
        return np.full(len(jobs), everything, dtype=np.int64)
    by_type = {wanted: rules.kinds_that_suit(cluster, wanted) for wanted in jobs["gpu_type"].unique().to_list()}
    return np.array([by_type[wanted] for wanted in jobs["gpu_type"].to_list()], dtype=np.int64)


def _fits(
    gpus: NDArray[np.int64], kinds: NDArray[np.int64], cluster: Cluster, placement: Placement
) -> NDArray[np.bool_]:
    """For each job, whether it could run on an idle cluster."""
    largest = largest_gangs(machine_of(cluster), placement.code)
    asked, which = np.unique(np.stack([gpus, kinds]), axis=1, return_inverse=True)
    fits = [not rules.never_runs(cluster, largest, count, 0, suit) for count, suit in asked.T.tolist()]
    return np.array(fits, dtype=np.bool_)[which.ravel()]


def _oversize(
    jobs: pl.DataFrame,
    gpus: NDArray[np.int64],
    kinds: NDArray[np.int64],
    fits: NDArray[np.bool_],
    cluster: Cluster,
    placement: Placement,
    name: str,
) -> str:
    """The one message about jobs that can never run."""
    bad = np.flatnonzero(~fits)
    ids = jobs["job_id"].to_list()
    wrong_type = int((kinds[bad] == 0).sum())
    listed = [f"{ids[i]} ({gpus[i]} GPUs)" for i in bad[:5]]
    more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
    where = f"{cluster.describe()}, placement {placement.name}"
    reason = (
        f"; {wrong_type} of them ask for a GPU type that is not there (--ignore-gpu-type takes any)"
        if wrong_type
        else ""
    )
    what = f"{len(bad)} of {len(fits)} jobs can never run on this cluster ({where}){reason}"
    return f"{name}: {what}: {', '.join(listed)}{more}"


def build_world(
    work: Workload,
    cluster: Cluster,
    placement: Placement,
    costs: Costs,
    seed: int,
    *,
    contention: Contention | None = None,
    interference: Interference | None = None,
    shares: bool = False,
) -> World:
    """The World at the instant before the first submission."""
    count = len(work.gpus)
    jobs = np.recarray(count, dtype=JOB)
    jobs[:] = np.zeros(count, dtype=JOB)
    jobs.id = np.arange(count)
    jobs.gpus, jobs.kinds, jobs.width, jobs.share = work.gpus, work.kinds, work.gpus, 1.0
    jobs.min_gpus, jobs.max_gpus, jobs.tenant = work.min_gpus, work.max_gpus, work.tenant
    jobs.profile, jobs.full_s = work.profiles.first_row, work.profiles.full_s
    jobs.submit_s = work.jobs["submit_time"].to_numpy()
    jobs["work_s"] = jobs["left_s"] = jobs["kept_left_s"] = work.jobs["duration"].to_numpy()
    numbered = _fill_in_models(jobs, work.models, work.catalogue)
    jobs.best_tier, jobs.min_nodes = rules.best_shape(cluster, work.gpus, work.kinds)
    if work.executions is not None:
        _fill_in_plans(jobs, work.executions)
    jobs["suspend_s"], jobs["resume_s"] = costs.suspend_and_resume_s(jobs["state_gib"], jobs["memory_gib"])
    jobs.gang_class = rules.GangClasses(by_skew=placement.code == SKEW).number(jobs)
    jobs.first_slot = np.concatenate(([0], np.cumsum(work.max_gpus)[:-1]))
    jobs.speed = 1.0
    for column in ("first_start_s", "run_from_s", "paced_s", "finish_s"):
        jobs[column] = NEVER
    jobs.saved_s = -NEVER
    machine = machine_of(cluster)
    if work.executions is not None:  # what the plans assume of these GPUs has to hold for every job
        machine.kinds["memory_gib"] = work.executions.book.site.gpu_gib
    clock = np.recarray(1, dtype=CLOCK)
    clock[:] = np.zeros(1, dtype=CLOCK)
    return World(
        table=JobTable(
            plain(jobs), np.zeros(int(work.max_gpus.sum()), dtype=np.int64), without_quotas(len(work.tenants))
        ),
        machine=machine,
        strategy=placement.strategy(seed),
        costs=costs.record(),
        clock=plain(clock),
        neighbours=_neighbours(
            cluster, numbered, work.profiles, contention or Contention(), interference or Interference(), shares, count
        ),
        log=plain(np.recarray(max(4096, 6 * count), dtype=EVENT)),
        timeline=plain(np.recarray(TIMELINE_ROOM, dtype=STEP)),
        services=np.zeros(count),
        observations=plain(np.recarray(LEARNING_WINDOW, dtype=OBSERVATION)),
        learns=np.array([placement.learns]),
    )


def _fill_in_plans(jobs: Records, executions: Executions) -> None:
    asked = executions.asked
    jobs["model"] = executions.number
    jobs["asked_plan"] = jobs["plan"] = asked.plan
    jobs["asked_profile"] = jobs["plan_profile"] = asked.profile
    jobs["asked_cpus"] = jobs["cpus"] = asked.cpus
    jobs["state_gib"] = np.array([model.state_gib for model in executions.book.models])[executions.number]
    jobs["host_gib"], jobs["memory_gib"], jobs["guaranteed"] = asked.host_gib, asked.memory_gib, executions.guaranteed


def _neighbours(
    cluster: Cluster,
    models: list[Model | None],
    profiles: JobProfiles,
    contention: Contention,
    interference: Interference,
    shares: bool,
    jobs: int,
) -> Neighbours:
    node_rate = interference.node_rates(models)
    rack_nodes = np.bincount(cluster.node_rack).astype(np.int64)
    return Neighbours(
        law=contention.law(disturbs=bool((node_rate < 1.0).any()), shares=shares),
        profiles=profiles.table,
        node_load=np.zeros(cluster.num_nodes),
        rack_load=np.zeros(len(rack_nodes)),
        rack_nodes=rack_nodes,
        rack_first=np.concatenate(([0], np.cumsum(rack_nodes))),
        node_rate=node_rate,
        gpu_rate=interference.gpu_rates(models),
        occupants=np.full((cluster.total_gpus if shares else 1, MAX_SHARERS), NOBODY, dtype=np.int64),
        touched=np.zeros(jobs, dtype=np.int64),
        count=np.zeros(1, dtype=np.int64),
    )


def _fill_in_models(jobs: Records, models: list[str | None], known: Mapping[str, Model]) -> list[Model | None]:
    """Fill in the facts of each job's model; returns the models in the order of their numbers."""
    number = {name: at for at, name in enumerate(dict.fromkeys(models))}
    distinct = [known.get(name) if name else None for name in number]
    facts = np.array([facts_of(model) for model in distinct])
    jobs.model = [number[name] for name in models]
    mine = facts[jobs.model]
    jobs.skew, jobs.state_gib, jobs.memory_gib, jobs.utilisation = mine.T
    return distinct
