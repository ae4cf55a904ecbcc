"""The table of profiles of one workload on one cluster, made by asking the speed model about every gang and shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import TIERS, Cluster
from thebes.model.decision import Execution
from thebes.model.plan import plan_of
from thebes.model.profiles import GROUP_SHAPE, TIER_RACK, Profiles, shape_of, shape_table
from thebes.perf.base import Gang, SpeedModel, Times
from thebes.perf.plans.profiles import PlanProfiles


@dataclass(frozen=True)
class JobProfiles:
    """The table, and what each job needs to find its rows in it."""

    table: Profiles
    first_row: NDArray[np.int64]  # per job
    full_s: NDArray[np.float64]  # per job, the iteration that counts as speed 1
    tier_speeds: NDArray[np.float64]  # [job, tier]: speed on the fewest nodes inside that tier; 0 if it does not fit


@dataclass(frozen=True)
class _Reach:
    """How far a gang on one kind of node has to stretch on an idle cluster."""

    group_gpus: int
    node_gpus: int
    rack_gpus: int
    kind_gpus: int
    rack_nodes: int
    nodes: int

    def nodes_in(self, gpus: int, tier: int) -> int:
        """The fewest nodes inside this tier that hold the gang; 0 if it does not fit."""
        room = (self.group_gpus, self.node_gpus, self.rack_gpus, self.kind_gpus)[tier]
        if gpus > room:
            return 0
        if tier < TIER_RACK or gpus == 1:
            return 1
        needed = max(2, -(-gpus // self.node_gpus))
        return needed if needed <= (self.rack_nodes if tier == TIER_RACK else self.nodes) else 0


def _reaches(cluster: Cluster) -> list[_Reach]:
    reaches: list[_Reach] = []
    for kind, spec in enumerate(cluster.kinds):
        here = cluster.node_kind == kind
        rack_gpus = np.bincount(cluster.node_rack[here], weights=cluster.node_gpus[here]).max()
        rack_nodes = int(np.bincount(cluster.node_rack[here]).max())
        largest = max(spec.groups or (spec.gpus,))
        kind_gpus, nodes = int(cluster.kind_gpus[kind]), int(here.sum())
        reaches.append(_Reach(largest, spec.gpus, int(rack_gpus), kind_gpus, rack_nodes, nodes))
    return reaches


def iterations(times: Times, gamma: float) -> NDArray[np.float64]:
    """Seconds per iteration of each shape without neighbours: `thebes.model.profiles.iteration_s` for arrays."""
    compute_s, talk_s = times.compute_s, times.inner_s + times.wire_s
    if gamma == 1.0:
        return compute_s + talk_s
    long_s, short_s = np.maximum(compute_s, talk_s), np.minimum(compute_s, talk_s)
    return long_s * (1.0 + (short_s / np.where(long_s > 0, long_s, 1.0)) ** gamma) ** (1.0 / gamma)


def profiles_for(
    perf: SpeedModel,
    cluster: Cluster,
    models: list[str | None],
    gpus: NDArray[np.int64],
    min_gpus: NDArray[np.int64],
    max_gpus: NDArray[np.int64],
    kinds: NDArray[np.int64],
) -> JobProfiles:
    """Ask the speed model once for each distinct kind of job."""
    number = {name: at for at, name in enumerate(dict.fromkeys(models))}
    keys = (np.array([number[m] for m in models]), gpus, min_gpus, max_gpus, kinds)
    examples, jobs = _distinct(keys)
    distinct = np.stack([key[examples] for key in keys], axis=1)
    names, reaches = list(number), _reaches(cluster)
    known: dict[tuple[int, int, int], Times] = {}  # elastic jobs of different sizes ask for the same counts
    parts: list[Times] = []
    sizes: list[int] = []
    first_row, full_s = np.zeros(len(distinct), dtype=np.int64), np.zeros(len(distinct))
    tier_speeds = np.zeros((len(distinct), len(TIERS)))
    for at, (model, asked, least, most, allowed) in enumerate(distinct.tolist()):
        first_row[at] = len(sizes)
        here: dict[int, Times] = {}
        for count in range(least, most + 1):
            for kind, reach in enumerate(reaches):
                nodes, tier = shape_table(min(count, reach.nodes))
                silent = np.zeros(len(nodes))
                times = Times(np.ones(len(nodes)), silent, silent)
                if (allowed >> kind) & 1:
                    if (model, count, kind) not in known:
                        known[model, count, kind] = perf.times(Gang(cluster, kind, names[model], count, nodes, tier))
                    times = known[model, count, kind]
                    if count == asked:
                        here[kind] = times
                parts.append(times)
                sizes.append(len(nodes))
        full_s[at], tier_speeds[at] = _references(
            here, asked, reaches, gamma=perf.overlap_gamma, relative_to_compute=perf.relative_to_compute
        )
    table = Profiles(
        first=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        compute_s=np.concatenate([p.compute_s for p in parts]),
        inner_s=np.concatenate([p.inner_s for p in parts]),
        wire_s=np.concatenate([p.wire_s for p in parts]),
        gamma=np.array([perf.overlap_gamma]),
    )
    return JobProfiles(table, first_row[jobs], full_s[jobs], tier_speeds[jobs])


def profiles_of_plans(
    plans: PlanProfiles, cluster: Cluster, number: NDArray[np.int64], asked: Execution, gpus: NDArray[np.int64]
) -> JobProfiles:
    """Profiles of jobs with execution plans. Speed 1 is the plan that a job asked for, at its best placement."""
    reaches = _reaches(cluster)
    full_s, tier_speeds = np.zeros(len(number)), np.zeros((len(number), len(TIERS)))
    examples, jobs = _distinct((number, asked.plan, asked.cpus, gpus))
    for at, job in enumerate(examples.tolist()):
        plan = plan_of(int(asked.plan[job]))
        count = int(gpus[job])
        times = plans.times(int(number[job]), plan, int(asked.cpus[job]), count)
        mine = jobs == at
        full_s[mine], tier_speeds[mine] = _references(dict.fromkeys(range(len(reaches)), times), count, reaches)
    return JobProfiles(plans.table, asked.profile, full_s, tier_speeds)


_MOST_CODES = 2**62


def _renumbered(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """The values renumbered from 0 without gaps, in the same order; and how many different ones there are."""
    distinct, number = np.unique(values, return_inverse=True)
    return number.ravel().astype(np.int64), len(distinct)


def _distinct(keys: tuple[NDArray[np.int64], ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One job of each distinct combination, and for each job the number of its combination."""
    code, room = np.zeros(len(keys[0]), dtype=np.int64), 1
    for key in keys:  # packed into one number if possible: that is one sort, where a million rows would take many
        low, span = int(key.min()), int(key.max()) - int(key.min()) + 1
        if room * span >= _MOST_CODES:
            code, room = _renumbered(code)
            if span >= _MOST_CODES // room:
                key, span = _renumbered(key)
                low = 0
        code = code * span + (key - low)
        room *= span
    _, examples, of_job = np.unique(code, return_index=True, return_inverse=True)
    return examples, of_job.ravel()


def _references(
    times: dict[int, Times],
    gpus: int,
    reaches: list[_Reach],
    *,
    gamma: float = 1.0,
    relative_to_compute: bool = False,
) -> tuple[float, NDArray[np.float64]]:
    """The iteration that counts as speed 1, and the speed in each tier, on the fastest kind that will do."""
    tier_s = np.full(len(TIERS), np.inf)
    full_s = np.inf
    for kind, here in times.items():
        seconds = iterations(here, gamma)
        best = None
        for tier in range(len(TIERS)):
            nodes = reaches[kind].nodes_in(gpus, tier)
            if nodes == 0:
                continue
            shape = GROUP_SHAPE if gpus == 1 else shape_of(nodes, tier)
            tier_s[tier] = min(tier_s[tier], seconds[shape])
            best = shape if best is None else best
        if best is not None:
            full_s = min(full_s, float((here.compute_s if relative_to_compute else seconds)[best]))
    return full_s, np.where(np.isfinite(tier_s), full_s / tier_s, 0.0)
