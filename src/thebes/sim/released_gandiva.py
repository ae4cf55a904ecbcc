"""Gandiva as the released Tiresias simulator models it: node sets per GPU count, time slicing in ticks of ten seconds.

This is a baseline of that paper, not Gandiva itself (OSDI'18): it has no packing, no migration cost and no profiling.
Every model counts as filling its GPUs, so a node set has room for as many jobs at a time as fit in its GPUs. The code
is plain Python because the anchors are small. Each quirk is named where it happens. `run_released` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# The known GPU counts, in the order in which Python 2.7 walks the release's dict: it decides which size goes first.
SIZES = (16, 1, 2, 4, 24, 32, 8, 64, 12)
TICK_S = 10
SLICE_S = 60


@dataclass
class _NodeSet:
    """Some nodes given to jobs of one size. `load` counts jobs ever placed and, a quirk, does not fall as they end."""

    nodes: int
    capacity: int
    load: int = 0
    jobs: list[int] = field(default_factory=list)

    def add(self, job: int) -> None:
        self.jobs.append(job)
        self.load += 1


@dataclass
class _NodeSets:
    """Free nodes and the node sets of each size, least loaded first."""

    gpus_per_node: int
    total_gpus: int
    free_nodes: int
    sets: dict[int, list[_NodeSet]] = field(default_factory=lambda: {size: [] for size in SIZES})

    def new_set(self, size: int) -> _NodeSet | None:
        """Take enough free nodes for one job of this size, or return None."""
        nodes = math.ceil(size / self.gpus_per_node)
        if nodes > self.free_nodes:
            return None
        self.free_nodes -= nodes
        return _NodeSet(nodes, nodes * self.gpus_per_node // size)


@dataclass(frozen=True)
class GandivaTimes:
    """Times per job, with -1 where the job never got there; `executed_s` exceeds the duration by up to a tick."""

    first_start_s: list[int]
    finish_s: list[int]
    executed_s: list[int]


def run_gandiva(
    gpus: Sequence[int], submit_s: Sequence[int], duration_s: Sequence[int], *, nodes: int, gpus_per_node: int
) -> GandivaTimes:
    """Run jobs in submission order, with sizes out of SIZES. Where the release would loop for ever, this stops."""
    n = len(gpus)
    times = GandivaTimes([-1] * n, [-1] * n, [0] * n)
    cluster = _NodeSets(gpus_per_node, nodes * gpus_per_node, nodes)
    pending: list[int] = []
    running = arrived = step = 0
    now = submit_s[0] if n else 0
    while arrived < n or pending or running:
        _adjust(cluster)
        finished, released = _execute(cluster, times, duration_s, now, step)
        running -= finished
        while arrived < n and submit_s[arrived] == now:
            if _place(cluster, arrived, gpus[arrived]):
                times.first_start_s[arrived] = now
                running += 1
            else:
                pending.append(arrived)
            arrived += 1
        if released:
            started = _start_pending(cluster, pending, gpus)
            for job in started:
                times.first_start_s[job] = now
            running += len(started)
        elif arrived == n and not running and not any(cluster.sets.values()):
            break  # the release looks at waiting jobs again only when a node set was freed
        step = TICK_S
        if arrived < n:
            step = min(TICK_S, submit_s[arrived] - now)
        now += step
    return times


def _start_pending(cluster: _NodeSets, pending: list[int], gpus: Sequence[int]) -> list[int]:
    """Start waiting jobs. As in quirk 7, jobs leave the list while it is walked, so that others are passed over."""
    started: list[int] = []
    i = 0
    while i < len(pending):
        if _place(cluster, pending[i], gpus[pending[i]]):
            started.append(pending.pop(i))
        i += 1
    return started


def _place(cluster: _NodeSets, job: int, size: int) -> bool:
    """Place a job in the first node set with room, else on free nodes, else sliced into the first set, else nowhere."""
    sets = cluster.sets[size]
    if sets:
        if sets[0].load + 1 < sets[0].capacity:  # strictly less, so the last place of a set is never given here
            sets[0].add(job)
            sets.append(sets.pop(0))
            sets.sort(key=lambda each: each.load)
            return True
        sets.append(sets.pop(0))
    chosen = cluster.new_set(size)
    if chosen is None:
        if not sets:
            return False
        chosen = sets.pop(0)
    chosen.add(job)
    sets.append(chosen)
    sets.sort(key=lambda each: each.load)
    return True


def _execute(
    cluster: _NodeSets, times: GandivaTimes, duration_s: Sequence[int], now: int, step: int
) -> tuple[int, bool]:
    """Run the front jobs of each set for `step`, rotate each minute, and free the nodes of empty sets."""
    finished, released = 0, False
    for sets in cluster.sets.values():
        for each in sets:
            at_once = min(len(each.jobs), each.capacity)
            front = each.jobs[:at_once]
            for job in front:
                times.executed_s[job] += step
            if now % SLICE_S == 0 and len(each.jobs) > at_once:
                each.jobs = each.jobs[at_once:] + front
            for job in front:
                if times.executed_s[job] >= duration_s[job]:
                    each.jobs.remove(job)
                    times.finish_s[job] = now
                    finished += 1
            if not each.jobs:
                cluster.free_nodes += each.nodes
                released = True
        sets[:] = [each for each in sets if each.jobs]
    return finished, released


def _adjust(cluster: _NodeSets) -> None:
    """Move nodes between the sizes towards their shares of the demand, in the order of SIZES."""
    demand = {size: size * sum(len(each.jobs) for each in sets) for size, sets in cluster.sets.items()}
    held = {size: sum(each.nodes for each in sets) * cluster.gpus_per_node for size, sets in cluster.sets.items()}
    total = sum(demand.values())
    for size, sets in cluster.sets.items():
        if demand[size] == 0:
            continue
        share = math.floor(demand[size] / total * cluster.total_gpus)
        missing = min(share, demand[size]) - held[size]
        if missing > 0:
            _expand(cluster, size, math.ceil(missing / size))
        elif missing < 0:
            _shrink(cluster, sets, math.ceil(-missing / size))


def _expand(cluster: _NodeSets, size: int, count: int) -> None:
    """Add up to `count` sets and spread the jobs anew.

    Quirk: the release tests a loop variable that the inner loop has overwritten. So when all the sets it asked for were
    added and each is a single node, the jobs stay where they are and the new sets go back at once.
    """
    sets = cluster.sets[size]
    added = None
    for _ in range(count):
        added = cluster.new_set(size)
        if added is not None:
            sets.append(added)
    if added is not None and added.nodes == 1:
        return
    jobs = [job for each in sets for job in each.jobs]
    for each in sets:
        if each.jobs:
            each.jobs, each.load = [], 0
    _spread(sets, jobs)


def _shrink(cluster: _NodeSets, sets: list[_NodeSet], count: int) -> None:
    """Free the first sets, always leaving one, and move their jobs to the others."""
    count = min(count, len(sets) - 1)
    jobs: list[int] = []
    for _ in range(count):
        gone = sets.pop(0)
        jobs += gone.jobs
        cluster.free_nodes += gone.nodes
    _spread(sets, jobs)


def _spread(sets: list[_NodeSet], jobs: list[int]) -> None:
    for job in jobs:
        sets[0].add(job)
        sets.sort(key=lambda each: each.load)
