"""The simulator that the authors of Tiresias (NSDI'19) released, re-implemented to the last digit, defects included.

We need it to compare ourselves with published figures. It counts integer seconds, preemption and placement cost
nothing, and it has the defects of the release. Three loops cover the schedules: `_run_in_order` (fifo, fjf, lpjf),
`_run_sorted` (sjf, shortest*, gittins) and `_run_queues` (dlas*, multi-dlas-gpu); `released_gandiva` is the fourth. For
results that make sense, use the policies of `thebes.policy`. The quirks, by the numbers that the functions below give:

 1. gittins: crashes; repaired, it serves the worst index first, forgets a waiting job's GPUs and soon stops its timer
 2. dlas-gpu: the demotion of a job with several GPUs is planned too late
 3. Gittins: E[min(S - a, D)] is taken of S instead of S - a, in integers, at the sample above a
 4. yarn under a preemptive schedule: memory leaks at every event until no job fits and the run stops
 5. placements random and crandom: crash at the first completion
 6. dlas* and gittins count GPUs whatever the placement
 7. lpjf: fifo that passes over the job behind each one it starts
 8. dlas-gpu-gittins-K: dlas-gpu-K, without Gittins
 9. multi-dlas-gpu: owns no GPU for 600 s, may never serve a size; a job larger than the cluster stops fifo, silently
14. a completion planned for the instant of an arrival happens then, even if the job was preempted in the meantime
15. shortest-expected: what running jobs executed is booked on the job that arrived last
16. fifo, fjf, lpjf: a job of zero seconds never ends

The anchors confirm all but 16 (14 by one job of muri3 under dlas-gpu-1); 16 follows from reading the release.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from thebes.model.arrays import Floats, Ints
from thebes.model.compiled import inner_maker, maker
from thebes.model.errors import UserError, nearest
from thebes.sim import released_gandiva

ReleasedPlacement = Literal["count", "yarn", "gandiva"]
Variant = Literal["as-released", "memfix", "gittins-distfix", "corrected"]

KNOBS = {"05": 0.5, "1": 1.0, "2": 2.0, "4": 4.0, "8": 8.0, "10": 10.0, "100": 100.0, "1000": 1000.0}
GITTINS_KNOBS = ("1", "2", "4", "8")
SCHEDULES: tuple[str, ...] = (
    "fifo",
    "fjf",
    "lpjf",
    "sjf",
    "shortest",
    "shortest-gpu",
    "shortest-expected",
    "gittins",
    "dlas",
    "dlas-gpu",
    *(f"dlas-gpu-{knob}" for knob in KNOBS),
    "dlas-gpu-gittins",
    *(f"dlas-gpu-gittins-{knob}" for knob in GITTINS_KNOBS),
    "dlas-gpu-pack",
    "multi-dlas-gpu",
    "gandiva",
)
PLACEMENTS: tuple[str, ...] = get_args(ReleasedPlacement)
VARIANTS: tuple[str, ...] = get_args(Variant)

# Constants of the release; the queue limits are in (GPU-)seconds.
QUEUE_LIMITS = (3250, 7200)
GITTINS_DELTA = 3250
MULTI_QUEUE_LIMITS = (3600,)
MULTI_RESERVE_EVERY_S = 600

# What can happen to a job, in the order in which it is logged at one instant.
EVENTS = ("finish", "demote", "promote", "suspend", "start", "resume")
_FINISH, _DEMOTE, _PROMOTE, _SUSPEND, _START, _RESUME = range(len(EVENTS))

_FIFO, _FJF, _LPJF = range(3)
_BY_GPUS, _BY_TIME, _BY_GPU_TIME, _BY_EXPECTED, _BY_INDEX = range(5)
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class ClusterShape:
    """The one data row of a Tiresias cluster file; memory in GB per node."""

    num_switch: int
    nodes_per_switch: int
    gpus_per_node: int
    cpus_per_node: int
    mem_per_node: int

    @property
    def nodes(self) -> int:
        return self.num_switch * self.nodes_per_switch

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class ReleasedRun:
    """What became of every job, in trace order, with -1 where it never got there.

    `executed_s` is the time spent running. It equals the duration of a finished job, except for quirk 14 (a completion
    that was planned for the instant of an arrival is kept even when the job is preempted in between).
    `stuck` are the rows of the jobs that the release leaves unfinished, silently and with exit code 0.
    """

    first_start_s: Ints
    finish_s: Ints
    executed_s: Ints
    preemptions: Ints
    promotions: Ints
    demotions: Ints
    event_time_s: Ints
    event_job: Ints
    event_kind: Ints  # index into EVENTS
    stuck: tuple[int, ...]


class _JobColumns(NamedTuple):
    """The columns of the loops, in submission order."""

    gpus: Ints
    submit: Ints
    duration: Ints
    running: NDArray[np.bool_]
    checked: Ints  # `executed` and the waits are accounted up to this instant
    executed: Ints
    first_start: Ints
    finish: Ints
    preemptions: Ints
    promotions: Ints
    demotions: Ints


class _NodeColumns(NamedTuple):
    """Free resources. If `by_node` is false, only the first element of `free_gpus` counts, for the whole cluster."""

    by_node: bool
    nodes_per_switch: int
    gpus_per_node: int
    cpus_per_node: int
    mem_per_node: int
    free_gpus: Ints
    free_cpus: Ints
    free_mem: Floats
    slot: Ints  # job j holds the nodes held[slot[j] : slot[j] + count[j]]
    count: Ints  # type: ignore[assignment] - tuple has a method of that name
    held: Ints


class _Queues(NamedTuple):
    """The queues of every group. Row group * n_queues + level of `members` lists `length` jobs in order of service."""

    n_queues: int
    limits: Ints  # of all queues but the last
    gpu_time: bool  # attained service is time times GPUs, or else time alone
    exact: bool  # demotions are planned for the right instant, which undoes quirk 2
    knob: float  # a job is promoted when it has waited knob times its age; 0 means never
    group: Ints  # of each job, as are the next three
    level: Ints
    age: Ints  # executed since the last promotion
    waited: Ints  # since the first start or the last promotion
    members: Ints
    length: Ints


# ---------------------------------------------------------------------------------------------------------------------
# Gittins index and expected total, computed as the release does
# ---------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def released_samples() -> Ints:
    """Total GPU-seconds of 1001 past jobs: `yarn-gput1000.csv`, the distribution that the release always reads."""
    text = resources.files("thebes").joinpath("data/tiresias/yarn-gput1000.csv").read_text(encoding="ascii")
    samples = np.array(sorted(int(row["duration"]) for row in csv.DictReader(text.splitlines())), dtype=np.int64)
    samples.flags.writeable = False
    return samples


def _round_half_up(value: float, digits: int) -> float:
    """Python 2's round(): exact halves go away from zero, whereas Python 3 takes the even neighbour."""
    return float(Decimal(value).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP))


def released_gittins_table(samples: Ints, delta: int = GITTINS_DELTA, *, corrected: bool = False) -> Floats:
    """Index times 1e6 of a job, by the first sample above its attained service; 0 above the last.

    Quirk 3: the release takes the samples themselves for E[min(S - a, delta)] and divides integers. `corrected`
    subtracts the attained service and divides floats. Both evaluate at a = sample - 1, whatever the true service is.
    """
    table = [_gittins_index(samples, int(sample) - 1, delta, corrected) for sample in samples]
    return np.array([*table, 0.0])


def _gittins_index(samples: Ints, attained: int, delta: int, corrected: bool) -> float:
    """1e6 * P / E at one attained service, with the release's intermediate roundings."""
    total = len(samples)
    above = int(np.searchsorted(samples, attained, side="right"))
    beyond = total - 1  # the release never lets the quantum reach past the largest sample
    if attained + delta <= samples[-1] - 1:
        beyond = int(np.searchsorted(samples, attained + delta, side="right"))
    left = total - above
    done = beyond - above
    served = int(samples[above:beyond].sum()) + delta * (total - beyond)
    probability = _round_half_up(done / left, 5)
    expected = _round_half_up((served - attained * done) / left, 5) if corrected else float(served // left)
    return _round_half_up(probability * 1e6 / expected, 4)


def _expected_totals(samples: Ints) -> Floats:
    """shortest-expected: the mean total of the samples above the executed time (no GPUs), except the largest sample."""
    last = len(samples) - 1
    after = np.concatenate([np.cumsum(samples[:last][::-1])[::-1], [0]])
    table = [_round_half_up(int(after[i]) / (last - i), 2) for i in range(last)]
    return np.array([*table, float(samples[last]), 0.0])


# ---------------------------------------------------------------------------------------------------------------------
# Placement: a counter, or yarn's first fit under one switch
# ---------------------------------------------------------------------------------------------------------------------


@inner_maker
def _take(nodes: _NodeColumns, job: int, gpus: int) -> bool:
    """Hold resources for a job, all or nothing, under the first switch that has them."""
    if not nodes.by_node:
        if nodes.free_gpus[0] < gpus:
            return False
        nodes.free_gpus[0] -= gpus
        return True
    per_switch = nodes.nodes_per_switch
    for first in range(0, len(nodes.free_gpus), per_switch):
        if gpus <= nodes.gpus_per_node:
            if _take_one_node(nodes, job, gpus, first, first + per_switch):
                return True
        elif _take_many_nodes(nodes, job, gpus, first, first + per_switch):
            return True
    return False


@inner_maker
def _cpus_of(gpus: int, job_gpus: int) -> int:
    """Two CPUs for a worker and, if the job has several workers, four for the parameter server beside it."""
    return 2 if job_gpus == 1 else 6 * gpus


@inner_maker
def _mem_of(gpus: int, job_gpus: int, gpus_per_node: int) -> float:
    """GB on one node: 5 if the job fits in a node, whatever its GPUs; else worker and server for each GPU."""
    if job_gpus <= gpus_per_node:
        return 5.0
    return (6 + job_gpus * 0.1 + 5) * gpus


@inner_maker
def _has(nodes: _NodeColumns, node: int, gpus: int, cpus: int, mem: float) -> bool:
    """Whether this much is free on one node."""
    return nodes.free_gpus[node] >= gpus and nodes.free_cpus[node] >= cpus and nodes.free_mem[node] >= mem


@inner_maker
def _hold(nodes: _NodeColumns, job: int, node: int, gpus: int, cpus: int, mem: float) -> None:
    """Give part of one node to a job and remember which node it was."""
    nodes.free_gpus[node] -= gpus
    nodes.free_cpus[node] -= cpus
    nodes.free_mem[node] -= mem
    nodes.held[nodes.slot[job] + nodes.count[job]] = node
    nodes.count[job] += 1


@inner_maker
def _take_one_node(nodes: _NodeColumns, job: int, gpus: int, first: int, end: int) -> bool:
    """Take the first node with room for the whole job."""
    cpus = _cpus_of(gpus, gpus)
    mem = _mem_of(gpus, gpus, nodes.gpus_per_node)
    for node in range(first, end):
        if _has(nodes, node, gpus, cpus, mem):
            nodes.count[job] = 0
            _hold(nodes, job, node, gpus, cpus, mem)
            return True
    return False


@inner_maker
def _take_many_nodes(nodes: _NodeColumns, job: int, gpus: int, first: int, end: int) -> bool:
    """Take whole idle nodes, then one node for the rest, under one switch; it never relaxes this."""
    per_node = nodes.gpus_per_node
    whole, rest = gpus // per_node, gpus % per_node
    mem = _mem_of(per_node, gpus, per_node)
    cpus = _cpus_of(per_node, gpus)
    start: int = nodes.slot[job]
    found = 0
    for node in range(first, end):
        if found < whole and _has(nodes, node, per_node, cpus, mem):
            nodes.held[start + found] = node
            found += 1
    if found < whole:
        return False
    last = -1
    if rest > 0:
        rest_mem = _mem_of(rest, gpus, per_node)
        for node in range(first, end):
            if last < 0 and _has(nodes, node, rest, _cpus_of(rest, gpus), rest_mem):
                taken = False
                for i in range(whole):
                    taken = taken or nodes.held[start + i] == node
                if not taken:
                    last = node
        if last < 0:
            return False
    nodes.count[job] = 0
    for i in range(whole):
        _hold(nodes, job, nodes.held[start + i], per_node, cpus, mem)
    if rest > 0:
        _hold(nodes, job, last, rest, _cpus_of(rest, gpus), _mem_of(rest, gpus, per_node))
    return True


@inner_maker
def _give_back(nodes: _NodeColumns, job: int, gpus: int) -> None:
    """Return what a finished job holds, memory included."""
    if not nodes.by_node:
        nodes.free_gpus[0] += gpus
        return
    per_node = nodes.gpus_per_node
    left = gpus
    for i in range(nodes.count[job]):
        here = min(left, per_node)
        left -= here
        node = nodes.held[nodes.slot[job] + i]
        nodes.free_gpus[node] += here
        nodes.free_cpus[node] += _cpus_of(here, gpus)
        nodes.free_mem[node] += _mem_of(here, gpus, per_node)


@inner_maker
def _empty(nodes: _NodeColumns, total_gpus: int, reset_memory: bool) -> None:
    """Free the whole cluster before it is dealt out again. Quirk 4: as released, memory is not freed."""
    if not nodes.by_node:
        nodes.free_gpus[0] = total_gpus
        return
    nodes.free_gpus[:] = nodes.gpus_per_node
    nodes.free_cpus[:] = nodes.cpus_per_node
    if reset_memory:
        nodes.free_mem[:] = nodes.mem_per_node


# ---------------------------------------------------------------------------------------------------------------------
# What the loops share
# ---------------------------------------------------------------------------------------------------------------------


@inner_maker
def _note(log: Ints, time: int, job: int, kind: int) -> Ints:
    """Log one event; row 0 holds the number of rows. Returns the log, which may have moved to a larger array."""
    row = log[0, 0] + 1
    if row == len(log):
        longer = np.empty((2 * len(log), 3), np.int64)
        for i in range(row):  # copying single elements compiles much faster than a slice
            for column in range(3):
                longer[i, column] = log[i, column]
        log = longer
    log[row, 0] = time
    log[row, 1] = job
    log[row, 2] = kind
    log[0, 0] = row
    return log


@inner_maker
def _complete(jobs: _JobColumns, job: int, now: int, log: Ints) -> Ints:
    """End a job now, whether it runs or (quirk 14) not."""
    if jobs.running[job]:
        jobs.executed[job] += now - jobs.checked[job]
        jobs.running[job] = False
    jobs.finish[job] = now
    return _note(log, now, job, _FINISH)


@inner_maker
def _without_finished(jobs: _JobColumns, members: Ints, size: int) -> int:
    """Close the gaps that finished jobs leave in a list; returns the new size."""
    kept = 0
    for i in range(size):
        if jobs.finish[members[i]] < 0:
            members[kept] = members[i]
            kept += 1
    return kept


@inner_maker
def _copy(source: Ints, target: Ints, size: int) -> int:
    """Copy the first elements of a list, one by one because that compiles faster than a slice; returns their number."""
    for i in range(size):
        target[i] = source[i]
    return size


@inner_maker
def _without(members: Ints, size: int, job: int) -> int:
    """Take one job out of a list, keeping the order; returns the new size."""
    kept = 0
    for i in range(size):
        if members[i] != job:
            members[kept] = members[i]
            kept += 1
    return kept


@inner_maker
def _switch(jobs: _JobColumns, wanted: NDArray[np.bool_], live: Ints, size: int, now: int, log: Ints) -> Ints:
    """Suspend the running jobs that are not wanted, then start the wanted jobs that do not run."""
    for i in range(size):
        job = live[i]
        if jobs.running[job] and not wanted[job]:
            jobs.running[job] = False
            jobs.preemptions[job] += 1
            log = _note(log, now, job, _SUSPEND)
    for i in range(size):
        job = live[i]
        if wanted[job] and not jobs.running[job]:
            jobs.running[job] = True
            if jobs.first_start[job] < 0:
                jobs.first_start[job] = now
                log = _note(log, now, job, _START)
            else:
                log = _note(log, now, job, _RESUME)
    return log


@inner_maker
def _next_completions(jobs: _JobColumns, live: Ints, size: int, now: int, ending: Ints) -> tuple[int, int]:
    """The earliest planned completion and how many jobs share it; the jobs go to `ending`."""
    job: int
    due, count = _NEVER, 0
    for i in range(size):
        job = live[i]
        if jobs.running[job]:
            end = now + jobs.duration[job] - jobs.executed[job]
            if end < due:
                due, count = end, 0
            if end == due:
                ending[count] = job
                count += 1
    return due, count


@inner_maker
def _sort_stably(members: Ints, size: int, key: Floats, scratch: Ints) -> None:
    """Sort by key[job], ascending; equal keys keep the order that they had in the list.

    The merge sort is our own: it skips what is in order already, as most of a list is from one event to the next, and
    it compiles in a tenth of the time that NumPy's takes under Numba.
    """
    width = 1
    while width < size:
        for left in range(0, size - width, 2 * width):
            middle = left + width
            if key[members[middle]] < key[members[middle - 1]]:
                _merge(members, left, middle, min(middle + width, size), key, scratch)
        width *= 2


@inner_maker
def _merge(members: Ints, left: int, middle: int, end: int, key: Floats, scratch: Ints) -> None:
    """Merge two sorted neighbours; on equal keys the left one goes first."""
    for i in range(middle - left):
        scratch[i] = members[left + i]
    take, right, put = 0, middle, left
    while take < middle - left:
        if right < end and key[members[right]] < key[scratch[take]]:
            members[put] = members[right]
            right += 1
        else:
            members[put] = scratch[take]
            take += 1
        put += 1


@inner_maker
def _lookup(samples: Ints, table: Floats, service: int) -> float:
    """The table's value for the first sample above `service`."""
    return table[np.searchsorted(samples, service, side="right")]


# ---------------------------------------------------------------------------------------------------------------------
# The three loops
# ---------------------------------------------------------------------------------------------------------------------


@maker
def _run_in_order(jobs: _JobColumns, nodes: _NodeColumns, mode: int, log: Ints) -> Ints:
    """fifo, fjf, lpjf: jobs start in submission order and are never preempted.

    fifo stops at the first job that does not fit; fjf goes on. lpjf was meant to be longest-pending-first. Quirk 7: it
    is fifo that passes over the job behind every job it starts, because it walks the list that it removes from.
    Quirk 16: a job of zero seconds never ends, because its end is put on an instant that has already been dealt with.
    """
    n = len(jobs.gpus)
    pending = np.empty(n, np.int64)
    holding = np.empty(n, np.int64)  # running jobs, in the order in which they started
    n_pending = n_holding = arrived = 0
    while True:
        now = jobs.submit[arrived] if arrived < n else _NEVER
        for i in range(n_holding):
            now = min(now, jobs.first_start[holding[i]] + jobs.duration[holding[i]])
        if now == _NEVER:
            return log

        job: int
        for i in range(n_holding):
            job = holding[i]
            if jobs.first_start[job] + jobs.duration[job] == now:
                _give_back(nodes, job, jobs.gpus[job])
                log = _complete(jobs, job, now, log)
        n_holding = _without_finished(jobs, holding, n_holding)
        while arrived < n and jobs.submit[arrived] == now:
            pending[n_pending] = arrived
            n_pending += 1
            arrived += 1

        i = 0
        while i < n_pending:
            job = pending[i]
            if _take(nodes, job, jobs.gpus[job]):
                jobs.running[job] = True
                jobs.first_start[job] = jobs.checked[job] = now
                log = _note(log, now, job, _START)
                if jobs.duration[job] > 0:
                    holding[n_holding] = job
                    n_holding += 1
                if mode == _LPJF:
                    i += 1
            elif mode != _FJF:
                break
            i += 1
        kept = 0
        for i in range(n_pending):
            if not jobs.running[pending[i]]:
                pending[kept] = pending[i]
                kept += 1
        n_pending = kept


@maker
def _run_sorted(
    jobs: _JobColumns,
    nodes: _NodeColumns,
    total_gpus: int,
    order: int,
    reset_memory: bool,
    corrected: bool,
    samples: Ints,
    table: Floats,
    log: Ints,
) -> Ints:
    """sjf, shortest, shortest-gpu, shortest-expected, gittins: deal the cluster out in sorted order at each event.

    The list of live jobs is sorted in place and stably, so ties keep the order of the last event. `gittins` also wakes
    one quantum after an event. Quirk 1: as released, the absolute time is added instead, so that it soon wakes no more.
    (No source says how the `corrected` anchors set this timer: one quantum after each event is what matches them all.)
    """
    n = len(jobs.gpus)
    key = np.zeros(n)
    submit = jobs.submit.astype(np.float64)
    wanted = np.zeros(n, np.bool_)
    live = np.empty(n, np.int64)
    scratch = np.empty(n, np.int64)
    ending = np.empty(n, np.int64)
    kept_ending = np.empty(n, np.int64)
    n_live = n_ending = n_kept = arrived = 0
    next_end = _NEVER
    quantum = GITTINS_DELTA if order == _BY_INDEX else _NEVER
    newest = -1
    job: int

    while arrived < n or next_end != _NEVER:
        next_arrival = jobs.submit[arrived] if arrived < n else _NEVER
        if next_arrival == next_end:  # quirk 14: the arrival remembers these, even if the quantum comes first
            n_kept = _copy(ending, kept_ending, n_ending)
        now = min(next_arrival, next_end)
        if now > quantum:
            now = quantum
        elif next_arrival == now:
            for i in range(n_kept):
                job = kept_ending[i]
                _give_back(nodes, job, jobs.gpus[job])
                log = _complete(jobs, job, now, log)
            n_kept = 0
        else:
            for i in range(n_ending):
                job = ending[i]
                _give_back(nodes, job, jobs.gpus[job])
                log = _complete(jobs, job, now, log)
        n_live = _without_finished(jobs, live, n_live)
        while arrived < n and jobs.submit[arrived] == now:
            live[n_live] = newest = arrived
            jobs.checked[newest] = now
            n_live += 1
            arrived += 1
            if order == _BY_EXPECTED:
                key[newest] = _lookup(samples, table, 0)

        for i in range(n_live):
            job = live[i]
            if jobs.running[job]:
                jobs.executed[job] += now - jobs.checked[job]
                if order == _BY_EXPECTED:  # quirk 15: written to the newest job, whichever job this is
                    key[newest] = _lookup(samples, table, jobs.executed[job])
            jobs.checked[job] = now
            if order == _BY_GPUS:
                key[job] = jobs.gpus[job]
            elif order == _BY_TIME:
                key[job] = jobs.duration[job] - jobs.executed[job]
            elif order == _BY_GPU_TIME:
                key[job] = (jobs.duration[job] - jobs.executed[job]) * jobs.gpus[job]
            elif order == _BY_INDEX:  # quirk 1: a waiting job's GPUs are forgotten
                by_gpu = corrected or jobs.running[job]
                index = _lookup(samples, table, jobs.executed[job] * (jobs.gpus[job] if by_gpu else 1))
                key[job] = -index if corrected else index  # quirk 1: the lowest index, the worst, comes first
        if order == _BY_INDEX and corrected:
            _sort_stably(live, n_live, submit, scratch)
        _sort_stably(live, n_live, key, scratch)

        _empty(nodes, total_gpus, reset_memory)
        for i in range(n_live):
            job = live[i]
            wanted[job] = _take(nodes, job, jobs.gpus[job])
        log = _switch(jobs, wanted, live, n_live, now, log)
        next_end, n_ending = _next_completions(jobs, live, n_live, now, ending)
        if order == _BY_INDEX:
            quantum = now + GITTINS_DELTA if corrected else quantum + now
    return log


@maker
def _run_queues(
    jobs: _JobColumns,
    queues: _Queues,
    gittins: bool,
    samples: Ints,
    table: Floats,
    group_gpus: Ints,
    budget: Ints,
    total_gpus: int,
    reserve_every: int,
    log: Ints,
) -> tuple[Ints, bool]:
    """dlas*: queues by attained service, each dealt out in order; multi-dlas-gpu: one such set of queues per GPU count.

    `budget` is how many GPUs each group of queues may use; dlas* have one group, which owns all.
    Quirk 6: GPUs are counted, never placed. It returns false instead of looping for ever.
    """
    n = len(jobs.gpus)
    free = budget.copy()
    submit = jobs.submit.astype(np.float64)
    rank = np.zeros(n)  # minus the index: the highest index first
    wanted = np.zeros(n, np.bool_)
    live = np.empty(n, np.int64)
    scratch = np.empty(n, np.int64)
    ending = np.empty(n, np.int64)
    kept_ending = np.empty(n, np.int64)
    n_live = n_ending = n_kept = arrived = 0
    next_end = next_jump = _NEVER
    next_reserve = reserve_every if reserve_every > 0 else _NEVER
    latest, standstill = np.int64(-1), 0

    while arrived < n or next_end != _NEVER:
        next_arrival = jobs.submit[arrived] if arrived < n else _NEVER
        if next_arrival == next_end:  # quirk 14: the arrival remembers these, even if a jump comes first
            n_kept = _copy(ending, kept_ending, n_ending)
        now = min(next_arrival, next_end)
        due = True
        if now > next_jump:
            now = next_jump
            due = False
        if now > next_reserve:
            now = next_reserve
            due = False
            next_reserve += reserve_every
            _divide(total_gpus, group_gpus, budget, free, _demands(jobs, queues.group, group_gpus, live, n_live))
        standstill = 0 if now > latest else standstill + 1
        latest = max(now, latest)
        if standstill > n * queues.n_queues + 2:
            return log, False

        if due:
            arrival = next_arrival == now
            for i in range(n_kept if arrival else n_ending):
                job = kept_ending[i] if arrival else ending[i]
                free[queues.group[job]] += jobs.gpus[job]
                _leave(queues, job)
                log = _complete(jobs, job, now, log)
            n_live = _without_finished(jobs, live, n_live)
            if arrival:
                n_kept = 0
                while arrived < n and jobs.submit[arrived] == now:
                    live[n_live] = arrived
                    jobs.checked[arrived] = now
                    _join(queues, arrived, 0)
                    n_live += 1
                    arrived += 1

        for i in range(n_live):
            log = _grow_older(jobs, queues, live[i], now, log)
            if gittins:
                rank[live[i]] = -_lookup(samples, table, _service(jobs, queues, live[i]))
        if gittins:
            for row in range(len(queues.length)):
                _sort_stably(queues.members[row], queues.length[row], submit, scratch)
                _sort_stably(queues.members[row], queues.length[row], rank, scratch)
        _deal_out(jobs, queues, budget, free, wanted)
        log = _switch(jobs, wanted, live, n_live, now, log)
        for row in range(len(queues.length)):
            _running_first(queues.members[row], queues.length[row], jobs.running, scratch)
        next_end, n_ending = _next_completions(jobs, live, n_live, now, ending)
        next_jump = _next_change_of_queue(jobs, queues, live, n_live, now)
    return log, True


@inner_maker
def _join(queues: _Queues, job: int, level: int) -> None:
    """Put a job at the tail of a queue."""
    queues.level[job] = level
    row = queues.group[job] * queues.n_queues + level
    queues.members[row, queues.length[row]] = job
    queues.length[row] += 1


@inner_maker
def _leave(queues: _Queues, job: int) -> None:
    """Take a job out of its queue."""
    row: int = queues.group[job] * queues.n_queues + queues.level[job]
    queues.length[row] = _without(queues.members[row], queues.length[row], job)


@inner_maker
def _service(jobs: _JobColumns, queues: _Queues, job: int) -> int:
    """The attained service of a job since its last promotion."""
    return queues.age[job] * jobs.gpus[job] if queues.gpu_time else queues.age[job]


@inner_maker
def _grow_older(jobs: _JobColumns, queues: _Queues, job: int, now: int, log: Ints) -> Ints:
    """Account the time since the last event; demote by one queue at most, or promote to the first."""
    passed = now - jobs.checked[job]
    jobs.checked[job] = now
    level = queues.level[job]
    if jobs.running[job]:
        jobs.executed[job] += passed
        queues.age[job] += passed
        if level < queues.n_queues - 1 and _service(jobs, queues, job) >= queues.limits[level]:
            _leave(queues, job)
            _join(queues, job, level + 1)
            jobs.demotions[job] += 1
            log = _note(log, now, job, _DEMOTE)
        return log
    if queues.age[job] > 0:
        queues.waited[job] += passed
        patience = int(queues.age[job] * queues.knob)
        if queues.knob > 0 and level > 0 and queues.waited[job] >= patience:
            queues.age[job] = queues.waited[job] = 0
            _leave(queues, job)
            _join(queues, job, 0)
            jobs.promotions[job] += 1
            log = _note(log, now, job, _PROMOTE)
    return log


@inner_maker
def _deal_out(jobs: _JobColumns, queues: _Queues, budget: Ints, free: Ints, wanted: NDArray[np.bool_]) -> None:
    """Walk the queues in order; a job runs if enough GPUs are left in its group, or else it is passed over."""
    for g in range(len(budget)):
        first = g * queues.n_queues
        if queues.length[first : first + queues.n_queues].sum() > 0:
            free[g] = budget[g]
        for row in range(first, first + queues.n_queues):
            for i in range(queues.length[row]):
                job = queues.members[row, i]
                wanted[job] = jobs.gpus[job] <= free[g]
                if wanted[job]:
                    free[g] -= jobs.gpus[job]


@inner_maker
def _next_change_of_queue(jobs: _JobColumns, queues: _Queues, live: Ints, size: int, now: int) -> int:
    """The next planned demotion or promotion.

    Quirk 2: as released, a job of several GPUs is planned for the floor of (limit - time) / GPUs, which is too late.
    """
    change = _NEVER
    for i in range(size):
        job: int = live[i]
        level: int = queues.level[job]
        if jobs.running[job] and level < queues.n_queues - 1:
            left = queues.limits[level] - queues.age[job]
            if queues.gpu_time and queues.exact:
                left = -((_service(jobs, queues, job) - queues.limits[level]) // jobs.gpus[job])
            elif queues.gpu_time:
                left = left // jobs.gpus[job]
            change = min(change, now + left)
        elif not jobs.running[job] and queues.knob > 0 and level > 0 and queues.age[job] > 0:
            left = int(queues.age[job] * queues.knob - queues.waited[job])
            if left > 0:
                change = min(change, now + left)
    return change


@inner_maker
def _running_first(members: Ints, size: int, running: NDArray[np.bool_], scratch: Ints) -> None:
    """Move running jobs to the front of their queue; both parts keep their order, which is FIFO by start."""
    front = back = 0
    for i in range(size):
        job = members[i]
        if running[job]:
            members[front] = job
            front += 1
        else:
            scratch[back] = job
            back += 1
    for i in range(back):
        members[front + i] = scratch[i]


# ---------------------------------------------------------------------------------------------------------------------
# multi-dlas-gpu: dividing the GPUs among the sizes
# ---------------------------------------------------------------------------------------------------------------------


@inner_maker
def _demands(jobs: _JobColumns, group: Ints, group_gpus: Ints, live: Ints, size: int) -> Ints:
    """The GPUs that the live jobs of each group ask for, waiting or running."""
    demands = np.zeros(len(group_gpus), np.int64)
    for i in range(size):
        demands[group[live[i]]] += jobs.gpus[live[i]]
    return demands


@inner_maker
def _hundredths(part: int, whole: int) -> int:
    """round(part / whole, 2) * 100 as Python 2 rounds: on the binary value of the quotient, with exact halves up."""
    ratio = part / whole
    scaled = ratio * 100.0
    low = math.floor(scaled)
    rest = scaled - low
    if rest != 0.5:
        return low + 1 if rest > 0.5 else low
    # The product may have been rounded onto the half, so ratio * 200 is compared with an odd number in integers.
    mantissa, exponent = math.frexp(ratio)
    exact = int(mantissa * 2.0**53) * 200
    return low + 1 if exact >= (2 * low + 1) << (53 - exponent) else low


@inner_maker
def _divide(total_gpus: int, group_gpus: Ints, budget: Ints, free: Ints, demands: Ints) -> None:
    """Every 600 s, give each size its share of the demand; what is left goes round from the smallest size up.

    Quirk 9: shares are rounded down to whole jobs, and no size gives up GPUs in use, so a size may never be served.
    """
    if demands.sum() == 0:
        return
    used = budget - free
    share = np.zeros(len(budget), np.int64)
    spare = total_gpus - used.sum()
    by_demand, by_size = np.arange(len(budget)), np.arange(len(budget))
    scratch = np.empty(len(budget), np.int64)
    _sort_stably(by_demand, len(budget), demands.astype(np.float64), scratch)
    _sort_stably(by_size, len(budget), group_gpus.astype(np.float64), scratch)
    for g in by_demand:
        if demands[g] > 0:
            wish = math.floor(_hundredths(demands[g], demands.sum()) / 100.0 * total_gpus / group_gpus[g])
            extra = max(0, min(wish * group_gpus[g], demands[g]) - used[g])
            if extra > 0 and extra > spare:
                extra = spare // group_gpus[g] * group_gpus[g]
            share[g] = used[g] + extra
            spare -= extra
    given = True
    while spare > 0 and given:
        given = False
        for g in by_size:
            if spare > 0 and demands[g] > share[g] and spare >= group_gpus[g]:
                spare -= group_gpus[g]
                share[g] += group_gpus[g]
                given = True
    free[:] = share - used
    budget[:] = share


def python2_dict_order(keys: Sequence[int], capacity: int = 8) -> list[int]:
    """The order in which Python 2.7 iterates over a dict of these small positive integers, inserted in this order.

    The release walks such dicts, and where demands are equal their order decides which GPU count is served first.
    """
    slots: list[int | None] = [None for _ in range(capacity)]
    for used, key in enumerate(keys, start=1):
        _dict_insert(slots, key)
        if 3 * used >= 2 * len(slots):
            capacity = 8
            while capacity <= 4 * used:
                capacity *= 2
            old, slots = slots, list[int | None]([None] * capacity)
            for entry in old:
                if entry is not None:
                    _dict_insert(slots, entry)
    return [key for key in slots if key is not None]


def _dict_insert(slots: list[int | None], key: int) -> None:
    """CPython's open addressing: an integer hashes to itself, and collisions probe on with the high bits mixed in."""
    mask, probe, perturb = len(slots) - 1, key, key
    while slots[probe & mask] is not None:
        probe = 5 * probe + perturb + 1
        perturb >>= 5
    slots[probe & mask] = key


# ---------------------------------------------------------------------------------------------------------------------
# The door
# ---------------------------------------------------------------------------------------------------------------------


def run_released(
    gpus: Ints,
    submit_s: Ints,
    duration_s: Ints,
    *,
    shape: ClusterShape,
    placement: str = "count",
    schedule: str = "dlas-gpu",
    variant: str = "as-released",
    queue_limits: Sequence[int] = QUEUE_LIMITS,
    samples: Ints | None = None,
) -> ReleasedRun:
    """Run one trace as the released simulator does, with whole seconds and whole GPUs, and rows in file order.

    `variant` undoes defects: `memfix` the memory leak (quirk 4), `gittins-distfix` the crash of `gittins` (quirk 1),
    `corrected` both and the exact demotion, index and order of quirks 1, 2, 3 and 8. `queue_limits` applies to dlas*.
    """
    _check_names(placement, schedule, variant)
    columns = [np.ascontiguousarray(column, dtype=np.int64) for column in (gpus, submit_s, duration_s)]
    _check_columns(*columns)
    limits = _checked_limits(queue_limits)
    known = _checked_samples(released_samples() if samples is None else samples)

    order = np.argsort(columns[1], kind="stable")
    jobs = _fresh_jobs(*(column[order] for column in columns))
    log = np.zeros((max(64, 8 * len(order)), 3), dtype=np.int64)
    log = _dispatch(jobs, columns[0], shape, placement, schedule, variant, limits, known, log)
    return _in_trace_order(jobs, order, log)


def _dispatch(
    jobs: _JobColumns,
    gpus_in_file_order: Ints,
    shape: ClusterShape,
    placement: str,
    schedule: str,
    variant: str,
    limits: Ints,
    samples: Ints,
    log: Ints,
) -> Ints:
    """Choose the loop and its flags for a schedule."""
    corrected = variant == "corrected"
    nothing = np.zeros(len(samples) + 1)
    in_order = {"fifo": _FIFO, "fjf": _FJF, "lpjf": _LPJF}
    if schedule == "gandiva":
        return _run_gandiva(jobs, shape)
    if schedule in in_order:
        return _run_in_order(jobs, _fresh_nodes(jobs.gpus, shape, placement), in_order[schedule], log)

    sorted_by = {
        "sjf": _BY_GPUS,
        "shortest": _BY_TIME,
        "shortest-gpu": _BY_GPU_TIME,
        "shortest-expected": _BY_EXPECTED,
        "gittins": _BY_INDEX,
    }
    if schedule in sorted_by:
        by = sorted_by[schedule]
        table = nothing
        if by == _BY_EXPECTED:
            table = _expected_totals(samples)
        elif by == _BY_INDEX:
            table = released_gittins_table(samples, corrected=corrected)
            placement = "count"  # quirk 6
        nodes = _fresh_nodes(jobs.gpus, shape, placement)
        reset_memory = variant in ("memfix", "corrected")
        return _run_sorted(jobs, nodes, shape.gpus, by, reset_memory, corrected, samples, table, log)

    gittins = schedule == "dlas-gpu-gittins" or (corrected and schedule.startswith("dlas-gpu-gittins"))  # quirk 8
    table = released_gittins_table(samples, corrected=corrected) if gittins else nothing
    knob = KNOBS.get(schedule.rpartition("-")[2], 0.0)
    group, group_gpus = np.zeros(len(jobs.gpus), dtype=np.int64), np.zeros(1, dtype=np.int64)
    budget = np.array([shape.gpus], dtype=np.int64)
    reserve_every = 0
    if schedule == "multi-dlas-gpu":
        sizes = python2_dict_order(list(dict.fromkeys(gpus_in_file_order.tolist())))
        group = np.array([sizes.index(size) for size in jobs.gpus.tolist()], dtype=np.int64)
        group_gpus = np.array(sizes, dtype=np.int64)
        limits = np.array(MULTI_QUEUE_LIMITS, dtype=np.int64)
        budget = np.zeros(len(sizes), dtype=np.int64)  # quirk 9: no size owns a GPU before the first division
        reserve_every = MULTI_RESERVE_EVERY_S
    queues = _fresh_queues(group, len(budget), limits, gpu_time=schedule != "dlas", exact=corrected, knob=knob)
    log, ended = _run_queues(jobs, queues, gittins, samples, table, group_gpus, budget, shape.gpus, reserve_every, log)
    if not ended:
        raise UserError(
            f"the released simulator never ends on this trace under '{schedule}': it waits forever at one instant",
            hint="A job asks for more GPUs than a queue limit has seconds. Use larger queue limits, or tiresias-l.",
        )
    return log


def _run_gandiva(jobs: _JobColumns, shape: ClusterShape) -> Ints:
    """Run the gandiva model, and log its starts and ends as events."""
    unknown = [size for size in jobs.gpus.tolist() if size not in released_gandiva.SIZES]
    if unknown:
        raise UserError(
            f"the released 'gandiva' crashes on a job of {unknown[0]} GPUs",
            hint=f"It knows jobs of {', '.join(str(size) for size in sorted(released_gandiva.SIZES))} GPUs only.",
        )
    times = released_gandiva.run_gandiva(
        jobs.gpus.tolist(),
        jobs.submit.tolist(),
        jobs.duration.tolist(),
        nodes=shape.nodes,
        gpus_per_node=shape.gpus_per_node,
    )
    jobs.first_start[:], jobs.finish[:], jobs.executed[:] = times.first_start_s, times.finish_s, times.executed_s
    happened = [(end, job, _FINISH) for job, end in enumerate(times.finish_s) if end >= 0]
    happened += [(start, job, _START) for job, start in enumerate(times.first_start_s) if start >= 0]
    happened.sort(key=lambda event: (event[0], event[2]))
    return np.array([(len(happened), 0, 0), *happened], dtype=np.int64)


def _fresh_jobs(gpus: Ints, submit: Ints, duration: Ints) -> _JobColumns:
    """Jobs to which nothing has happened yet."""
    n = len(gpus)

    def column(value: int) -> Ints:
        return np.full(n, value, dtype=np.int64)

    running = np.zeros(n, dtype=np.bool_)
    return _JobColumns(
        gpus, submit, duration, running, column(0), column(0), column(-1), column(-1), column(0), column(0), column(0)
    )


def _fresh_nodes(gpus: Ints, shape: ClusterShape, placement: str) -> _NodeColumns:
    """An empty cluster: single nodes for yarn, one counter for every other placement."""
    by_node = placement == "yarn"
    nodes = shape.nodes if by_node else 1
    slots = np.zeros(len(gpus) + 1, dtype=np.int64)
    if by_node:
        slots[1:] = np.cumsum(np.minimum(-(-gpus // shape.gpus_per_node), shape.nodes_per_switch + 1))
    return _NodeColumns(
        by_node=by_node,
        nodes_per_switch=shape.nodes_per_switch,
        gpus_per_node=shape.gpus_per_node,
        cpus_per_node=shape.cpus_per_node,
        mem_per_node=shape.mem_per_node,
        free_gpus=np.full(nodes, shape.gpus_per_node if by_node else shape.gpus, dtype=np.int64),
        free_cpus=np.full(nodes, shape.cpus_per_node, dtype=np.int64),
        free_mem=np.full(nodes, float(shape.mem_per_node)),
        slot=slots,
        count=np.zeros(len(gpus), dtype=np.int64),
        held=np.zeros(int(slots[-1]), dtype=np.int64),
    )


def _fresh_queues(group: Ints, n_groups: int, limits: Ints, *, gpu_time: bool, exact: bool, knob: float) -> _Queues:
    """Empty queues for every group."""
    n, n_queues = len(group), len(limits) + 1
    return _Queues(
        n_queues=n_queues,
        limits=limits,
        gpu_time=gpu_time,
        exact=exact,
        knob=knob,
        group=group,
        level=np.zeros(n, dtype=np.int64),
        age=np.zeros(n, dtype=np.int64),
        waited=np.zeros(n, dtype=np.int64),
        members=np.zeros((n_groups * n_queues, n), dtype=np.int64),
        length=np.zeros(n_groups * n_queues, dtype=np.int64),
    )


def _in_trace_order(jobs: _JobColumns, order: NDArray[np.intp], log: Ints) -> ReleasedRun:
    """Undo the sorting by submission."""

    def back(column: Ints) -> Ints:
        restored = np.empty_like(column)
        restored[order] = column
        return restored

    events = log[1 : int(log[0, 0]) + 1]
    finish = back(jobs.finish)
    return ReleasedRun(
        first_start_s=back(jobs.first_start),
        finish_s=finish,
        executed_s=back(jobs.executed),
        preemptions=back(jobs.preemptions),
        promotions=back(jobs.promotions),
        demotions=back(jobs.demotions),
        event_time_s=events[:, 0].copy(),
        event_job=order[events[:, 1]].astype(np.int64),
        event_kind=events[:, 2].copy(),
        stuck=tuple(int(row) for row in np.flatnonzero(finish < 0)),
    )


def _check_names(placement: str, schedule: str, variant: str) -> None:
    """Refuse what the release does not have, and what makes it crash (quirks 1 and 5)."""
    if placement in ("random", "crandom"):
        raise UserError(
            f"the released simulator crashes at the first completion with placement '{placement}'",
            hint=f"Use one of: {', '.join(PLACEMENTS)}.",
        )
    for kind, word, valid in (
        ("placement", placement, PLACEMENTS),
        ("schedule", schedule, SCHEDULES),
        ("variant", variant, VARIANTS),
    ):
        if word not in valid:
            raise UserError(f"the released simulator has no {kind} '{word}'", hint=nearest(word, valid))
    if schedule == "multi-dlas-gpu" and placement != "count":
        raise UserError("the released 'multi-dlas-gpu' runs with placement 'count' only", hint="Use placement=count.")
    if (schedule == "gandiva") != (placement == "gandiva"):
        raise UserError(
            "the released schedule 'gandiva' and placement 'gandiva' run only with each other",
            hint="Use both, or neither.",
        )
    if schedule == "gittins" and variant in ("as-released", "memfix"):
        raise UserError(
            "the released simulator crashes under 'gittins': it never stores the service distribution",
            hint="Use variant=gittins-distfix, which stores it, or variant=corrected.",
        )


def _check_columns(gpus: Ints, submit: Ints, duration: Ints) -> None:
    """Refuse columns that the release could not have read."""
    if not len(gpus) == len(submit) == len(duration):
        raise UserError(
            f"columns differ in length: {len(gpus)} GPU counts, {len(submit)} submit times, {len(duration)} durations",
            hint="Give one value per job in each column.",
        )
    for name, column, least in (("GPU count", gpus, 1), ("submit time", submit, 0), ("duration", duration, 0)):
        bad = np.flatnonzero(column < least)
        if len(bad):
            raise UserError(
                f"row {bad[0]}: {name} {column[bad[0]]} is below {least}",
                hint="The released simulator reads whole, non-negative numbers.",
            )


def _checked_limits(queue_limits: Sequence[int]) -> Ints:
    """A rising limit for each queue but the last."""
    limits = np.array(list(queue_limits), dtype=np.int64)
    if len(limits) == 0 or limits[0] < 1 or bool(np.any(np.diff(limits) <= 0)):
        raise UserError(
            f"queue limits {tuple(queue_limits)} do not rise from above zero",
            hint="Give one limit per queue but the last, for example 3250,7200.",
        )
    return limits


def _checked_samples(samples: NDArray[np.integer[Any]]) -> Ints:
    """The distribution, sorted. The release's arithmetic needs two samples, and none may be zero."""
    known = np.sort(np.asarray(samples, dtype=np.int64))
    if len(known) < 2 or known[0] < 1:
        raise UserError(
            "the service distribution needs at least two samples, all of one GPU-second or more",
            hint="Leave it out to use the release's own 1001 samples.",
        )
    return known
