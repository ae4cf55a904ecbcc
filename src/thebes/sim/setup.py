"""The simulator's door: a trace, a cluster and the chosen models become one World of flat arrays.

Everything that can be wrong with a workload for this cluster is found here, before the first event: jobs that can never
fit, GPU types that do not exist, fractional GPUs under a policy that does not share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.compiled import Records, plain
from thebes.model.errors import UserError
from thebes.model.jobs import JOB, NEVER, JobTable, without_quotas
from thebes.model.machine import machine_of
from thebes.model.trace import Trace
from thebes.perf import SpeedModel
from thebes.perf.models import BALANCED, UNKNOWN_STATE_GIB, assign, catalogue
from thebes.placement import Placement
from thebes.placement.strategies import SKEW, max_gang
from thebes.sim.costs import Costs
from thebes.sim.world import CLOCK, EVENT, OBSERVATION, STEP, World

TIMELINE_ROOM = 1 << 16
LEARNING_WINDOW = 1000


@dataclass(frozen=True)
class Workload:
    """The jobs of a trace that will be simulated, and what was done to them to get there."""

    jobs: pl.DataFrame
    gpus: NDArray[np.int64]
    kinds: NDArray[np.int64]  # allowed node kinds, as bits
    models: list[str | None]
    notes: tuple[str, ...]


def prepare(
    trace: Trace,
    cluster: Cluster,
    placement: Placement,
    *,
    seed: int,
    limit: int | None = None,
    skip_oversize: bool = False,
    ignore_gpu_type: bool = False,
) -> Workload:
    """Choose the jobs, round up their GPUs, give models to those without, refuse what can never run."""
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
    models = jobs["model"].to_list() if "model" in jobs.columns else [None] * len(jobs)
    if not any(models):
        models = assign(len(jobs), seed)
        notes.append(f"the trace names no models: assigned by seed {seed} from {len(catalogue())} CNNs")
    elif unknown := sorted({m for m in models if m and m not in catalogue()}):
        listed = ", ".join(unknown[:3]) + (" …" if len(unknown) > 3 else "")
        notes.append(f"models without a tensor table are taken as not skewed: {listed}")
    return Workload(jobs, gpus, kinds, models, tuple(notes))


def _allowed_kinds(jobs: pl.DataFrame, cluster: Cluster, ignore_gpu_type: bool) -> NDArray[np.int64]:
    """Per job, the node kinds whose GPU type it accepts; an unknown type on either side suits."""
    everything = (1 << len(cluster.kinds)) - 1
    if ignore_gpu_type or "gpu_type" not in jobs.columns:
        return np.full(len(jobs), everything, dtype=np.int64)

    def kinds_for(wanted: str | None) -> int:
        if not wanted:
            return everything
        types = {name.strip().lower() for name in wanted.split("|")}
        return sum(
            1 << k for k, kind in enumerate(cluster.kinds) if not kind.gpu_type or kind.gpu_type.lower() in types
        )

    by_type = {wanted: kinds_for(wanted) for wanted in jobs["gpu_type"].unique().to_list()}
    return np.array([by_type[wanted] for wanted in jobs["gpu_type"].to_list()], dtype=np.int64)


def _fits(
    gpus: NDArray[np.int64], kinds: NDArray[np.int64], cluster: Cluster, placement: Placement
) -> NDArray[np.bool_]:
    """Whether each job could run on an idle cluster: a gang needs GPUs of one kind."""
    machine = machine_of(cluster)
    fits = np.zeros(len(gpus), dtype=np.bool_)
    for kind in range(len(cluster.kinds)):
        fits |= ((kinds >> kind) & 1).astype(np.bool_) & (gpus <= max_gang(machine, placement.code, kind))
    return fits


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
    work: Workload, cluster: Cluster, placement: Placement, perf: SpeedModel, costs: Costs, seed: int
) -> World:
    """The World at the instant before the first submission."""
    count = len(work.gpus)
    jobs = np.recarray(count, dtype=JOB)
    jobs[:] = np.zeros(count, dtype=JOB)
    jobs.gpus, jobs.kinds = work.gpus, work.kinds
    jobs.submit_s = work.jobs["submit_time"].to_numpy()
    jobs["work_s"] = jobs["left_s"] = work.jobs["duration"].to_numpy()
    _fill_in_models(jobs, work.models)
    _fill_in_shape(jobs, cluster)
    jobs["suspend_s"], jobs["resume_s"] = costs.suspend_and_resume_s(jobs["state_gib"])
    jobs.gang_class = _gang_classes(jobs, placement)
    jobs.first_slot = np.concatenate(([0], np.cumsum(work.gpus)[:-1]))
    jobs.speed = 1.0
    for column in ("first_start_s", "run_from_s", "finish_s"):
        jobs[column] = NEVER
    jobs.saved_s = -NEVER
    clock = np.recarray(1, dtype=CLOCK)
    clock[:] = np.zeros(1, dtype=CLOCK)
    return World(
        table=JobTable(plain(jobs), np.zeros(int(work.gpus.sum()), dtype=np.int64), without_quotas()),
        machine=machine_of(cluster),
        strategy=placement.strategy(seed),
        costs=costs.record(),
        clock=plain(clock),
        speeds=perf.speeds(),
        log=plain(np.recarray(max(4096, 6 * count), dtype=EVENT)),
        timeline=plain(np.recarray(TIMELINE_ROOM, dtype=STEP)),
        services=np.zeros(count),
        observations=plain(np.recarray(LEARNING_WINDOW, dtype=OBSERVATION)),
        learns=np.array([placement.learns]),
    )


def _fill_in_models(jobs: Records, models: list[str | None]) -> None:
    known = catalogue()
    distinct = {name: known.get(name) if name else None for name in set(models)}
    facts = {
        name: (m.skew, m.state_gib, m.model_class) if m else (0.0, UNKNOWN_STATE_GIB, BALANCED)
        for name, m in distinct.items()
    }
    columns = np.array([facts[name] for name in models])
    jobs.skew, jobs.state_gib, jobs.model_class = columns[:, 0], columns[:, 1], columns[:, 2].astype(np.int64)


def _fill_in_shape(jobs: Records, cluster: Cluster) -> None:
    """What each job's best placement on an idle cluster spans: the placement at which it runs at full speed."""
    jobs.best_tier, jobs.min_nodes = 3, np.iinfo(np.int64).max
    for kind, spec in enumerate(cluster.kinds):
        allowed = ((jobs.kinds >> kind) & 1).astype(np.bool_)
        here = cluster.node_kind == kind
        rack_gpus = np.bincount(cluster.node_rack[here], weights=cluster.node_gpus[here]).max()
        largest_group = max(spec.groups or (spec.gpus,))
        tier = np.where(
            jobs.gpus <= largest_group, 0, np.where(jobs.gpus <= spec.gpus, 1, np.where(jobs.gpus <= rack_gpus, 2, 3))
        )
        jobs.best_tier = np.where(allowed, np.minimum(jobs.best_tier, tier), jobs.best_tier)
        jobs.min_nodes = np.where(allowed, np.minimum(jobs.min_nodes, -(-jobs.gpus // spec.gpus)), jobs.min_nodes)


def _gang_classes(jobs: Records, placement: Placement) -> NDArray[np.int64]:
    """Number jobs by what decides whether they can be placed: GPUs, kinds and, for `skew`, the model's skew."""
    skew = jobs.skew if placement.code == SKEW else np.zeros(len(jobs))
    keys = np.rec.fromarrays([jobs.gpus, jobs.kinds, skew], names="gpus,kinds,skew")
    return np.unique(keys, return_inverse=True)[1].astype(np.int64).ravel()
