"""Which jobs disturb which: a job's speed follows from its placement and from its neighbours, at every instant.

When a job starts, stops or moves, the jobs that share a link, a node or a GPU with it are *touched*; before the instant
is over, each of them is charged for the time at its old speed and gets a new one. No other job is looked at, so the
cost of an event depends on what sits on the nodes concerned, however many jobs there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Record, Records, inlined, inner
from thebes.model.decision import MAX_SHARERS
from thebes.model.jobs import HELD, JobTable, gpus_of
from thebes.model.machine import FREE, Machine
from thebes.model.plan import NO_PLAN
from thebes.model.profiles import TIER_CLUSTER, Profiles, iteration_s, profile_row, shape_of
from thebes.model.rules import charge_pace, rise, sit

NOBODY = -1


class Neighbours(NamedTuple):
    """What is on every link, node and GPU."""

    law: Records  # one record, thebes.perf.contention.LAW
    profiles: Profiles
    node_load: NDArray[np.float64]  # transfers on the wires of each node
    rack_load: NDArray[np.float64]  # in each rack, the wires of nodes that lead out of it
    rack_nodes: NDArray[np.int64]
    rack_first: NDArray[np.int64]  # the nodes of rack r are rack_first[r] : rack_first[r + 1]
    node_rate: NDArray[np.float64]  # by [own model, neighbour's model]
    gpu_rate: NDArray[np.float64]  # by [own model, partner's model]
    occupants: NDArray[np.int64]  # [GPU, MAX_SHARERS]; filled where GPUs are shared
    touched: NDArray[np.int64]  # rows; the first count[0] of them count
    count: NDArray[np.int64]  # type: ignore[assignment] - tuple has a method of that name


@inner
def place_in_table(n: Neighbours, m: Machine, job: Record) -> int:
    if job.plan != NO_PLAN:
        return job.plan_profile  # plans are only used where all nodes are of one kind
    return profile_row(job.profile, job.min_gpus, job.width, m.kinds.size, job.node_kind)


@inner
def _talks(n: Neighbours, m: Machine, job: Record) -> float:
    """How much of a transfer this job puts on each wire that it uses; 0 if it uses none."""
    law = n.law[0]
    if not law.contends or job.nodes < 2:
        return 0.0
    row, shape = place_in_table(n, m, job), shape_of(job.nodes, job.tier)
    at: int = n.profiles.first[row] + shape
    wire_s: float = n.profiles.wire_s[at]
    if wire_s <= 0.0:
        return 0.0
    return min(1.0, wire_s / iteration_s(n.profiles, row, shape, 1.0)) if law.expected else 1.0


@inner
def _add_load(n: Neighbours, m: Machine, table: JobTable, row: int, talks: float) -> None:
    job, last = table.jobs[row], NOBODY
    for gpu in gpus_of(table, row):
        node = m.gpus[gpu].node
        if node != last:
            n.node_load[node] += talks
            if job.tier == TIER_CLUSTER:
                n.rack_load[m.nodes[node].rack] += talks
            last = node


@inlined
def _transfers_met(n: Neighbours, m: Machine, table: JobTable, row: int, talks: float) -> float:
    """k of the law: the most transfers on any link of this job, where its own counts as one."""
    law, job, k, last = n.law[0], table.jobs[row], 1.0, NOBODY
    for gpu in gpus_of(table, row):
        node: int = m.gpus[gpu].node
        if node != last:
            k = max(k, 1.0 + n.node_load[node] - talks)
            if job.tier == TIER_CLUSTER and law.oversubscription > 1.0:
                rack: int = m.nodes[node].rack
                k = max(k, n.rack_load[rack] * law.oversubscription / n.rack_nodes[rack])
            last = node
    return k


@inlined
def slowdown(law: Record, k: float) -> float:
    """The time of a transfer among k, relative to one alone: k + (k - 1) * eta / b, with the penalty capped."""
    return k + (min(k, law.cap) - 1.0) * law.eta


@inner
def _sits_at(n: Neighbours, m: Machine, gpu: int, row: int) -> bool:
    if not n.law[0].shares:
        return m.gpus[gpu].owner == row
    for at in range(MAX_SHARERS):  # noqa: SIM110 - Numba compiles no generators
        if n.occupants[gpu, at] == row:
            return True
    return False


@inlined
def _met_before(n: Neighbours, m: Machine, first: int, until: int, other: int) -> bool:
    """Whether a job sits on one of these GPUs, which is asked because its GPUs on a node need not be neighbours."""
    for gpu in range(first, until):  # noqa: SIM110 - Numba compiles no generators
        if _sits_at(n, m, gpu, other):
            return True
    return False


@inlined
def _rate_on_nodes(n: Neighbours, m: Machine, table: JobTable, row: int) -> float:
    """What the neighbours on the worst of a job's nodes leave of its speed; jobs on its own GPUs do not count here."""
    worst, last = 1.0, NOBODY
    mine: int = table.jobs[row].model
    places = MAX_SHARERS if n.law[0].shares else 1
    for gpu in gpus_of(table, row):
        node = m.gpus[gpu].node
        if node == last:
            continue
        last = node
        rate, first = 1.0, m.nodes[node].first
        for other_gpu in range(first, first + m.nodes[node].gpus):
            if _sits_at(n, m, other_gpu, row):
                continue
            for at in range(places):
                other = n.occupants[other_gpu, at] if n.law[0].shares else m.gpus[other_gpu].owner
                if other < 0 or table.jobs[other].phase != HELD or _shares_a_gpu(n, table, row, other):
                    continue
                if not _met_before(n, m, first, other_gpu, other):
                    theirs: int = table.jobs[other].model
                    rate *= n.node_rate[mine, theirs]
        worst = min(worst, rate)
    return worst


@inlined
def _shares_a_gpu(n: Neighbours, table: JobTable, row: int, other: int) -> bool:
    if n.law[0].shares:
        for gpu in gpus_of(table, row):
            for at in range(MAX_SHARERS):
                if n.occupants[gpu, at] == other:
                    return True
    return False


@inlined
def _rate_on_gpus(n: Neighbours, table: JobTable, row: int) -> float:
    """What the partners on the worst of a job's GPUs leave of its speed.

    The cost of each partner is measured for pairs. The delays of several add up, as they do when jobs take turns.
    """
    worst = 1.0
    mine: int = table.jobs[row].model
    for gpu in gpus_of(table, row):
        slow = 1.0
        for at in range(MAX_SHARERS):
            other = n.occupants[gpu, at]
            if other >= 0 and other != row:
                theirs: int = table.jobs[other].model
                slow += 1.0 / n.gpu_rate[mine, theirs] - 1.0
        worst = min(worst, 1.0 / slow)
    return worst


@inner
def set_pace(n: Neighbours, m: Machine, table: JobTable, row: int) -> None:
    """Set speed and exposed communication of a job that holds GPUs, from its placement and its neighbours."""
    job, law = table.jobs[row], n.law[0]
    at, shape = place_in_table(n, m, job), shape_of(job.nodes, job.tier)
    slow = 1.0
    if law.contends and job.nodes > 1:
        slow = slowdown(law, _transfers_met(n, m, table, row, _talks(n, m, job)))
    seconds = iteration_s(n.profiles, at, shape, slow)
    compute_s = n.profiles.compute_s[n.profiles.first[at] + shape]
    speed = job.full_s / seconds
    if job.width != job.gpus and job.plan == NO_PLAN:  # a batch per GPU; a plan keeps the global batch
        speed *= job.width / job.gpus
    if law.disturbs:
        speed *= _rate_on_nodes(n, m, table, row)
    if law.shares:
        speed *= _rate_on_gpus(n, table, row)
    job.speed = speed
    job.talk_share = max(0.0, seconds - compute_s) / seconds


@inner
def touch(n: Neighbours, jobs: Records, row: int) -> None:
    if not jobs[row].touched and jobs[row].phase == HELD:
        jobs[row].touched = True
        n.touched[n.count[0]] = row
        n.count[0] += 1


@inner
def _touch_node(n: Neighbours, m: Machine, table: JobTable, node: int) -> None:
    first = m.nodes[node].first
    for gpu in range(first, first + m.nodes[node].gpus):
        if n.law[0].shares:
            for at in range(n.occupants.shape[1]):
                if n.occupants[gpu, at] >= 0:
                    touch(n, table.jobs, n.occupants[gpu, at])
        elif m.gpus[gpu].owner >= 0:
            touch(n, table.jobs, m.gpus[gpu].owner)


@inner
def _touch_around(n: Neighbours, m: Machine, table: JobTable, row: int, talks: float) -> None:
    """Touch every job that this job's coming or going concerns."""
    job, law, last, last_rack = table.jobs[row], n.law[0], NOBODY, NOBODY
    for gpu in gpus_of(table, row):
        node = m.gpus[gpu].node
        if node == last:
            continue
        last = node
        if law.disturbs or law.shares or talks > 0.0:
            _touch_node(n, m, table, node)
        rack = m.nodes[node].rack
        if talks > 0.0 and job.tier == TIER_CLUSTER and law.oversubscription > 1.0 and rack != last_rack:
            last_rack = rack
            for other in range(n.rack_first[rack], n.rack_first[rack + 1]):
                _touch_node(n, m, table, other)


@inner
def come(n: Neighbours, m: Machine, table: JobTable, row: int) -> None:
    """Take in a job that was just placed: its traffic joins, its neighbours are touched, and it gets its pace."""
    law = n.law[0]
    if law.contends or law.disturbs or law.shares:
        talks = _talks(n, m, table.jobs[row])
        if talks > 0.0:
            _add_load(n, m, table, row, talks)
        _touch_around(n, m, table, row, talks)
    set_pace(n, m, table, row)


@inner
def go(n: Neighbours, m: Machine, table: JobTable, row: int) -> None:
    """Take out a job that is about to leave its slots."""
    law = n.law[0]
    if law.contends or law.disturbs or law.shares:
        talks = _talks(n, m, table.jobs[row])
        if talks > 0.0:
            _add_load(n, m, table, row, -talks)
        _touch_around(n, m, table, row, talks)


@inlined
def repace(n: Neighbours, m: Machine, table: JobTable, row: int, now_s: float, checkpoint_every_s: float) -> None:
    """Charge a touched job at its old speed, and let it go on at its new one."""
    job = table.jobs[row]
    job.touched = False
    if job.phase != HELD:
        return
    charge_pace(job, now_s, checkpoint_every_s)
    set_pace(n, m, table, row)
    job.finish_s = max(job.paced_s, now_s) + max(0.0, job.left_s) / job.speed


# Several jobs on one GPU: the machine knows one of them as the owner, and `occupants` knows all of them.


@inner
def move_in(n: Neighbours, m: Machine, table: JobTable, row: int) -> int:
    """Put the job on its slots, beside the jobs that are there; returns how many of the GPUs were free before."""
    gpus = gpus_of(table, row)
    for gpu in gpus:
        for at in range(n.occupants.shape[1]):
            if n.occupants[gpu, at] == NOBODY:
                n.occupants[gpu, at] = row
                break
    return sit(m, row, gpus)


@inner
def move_out(n: Neighbours, m: Machine, table: JobTable, row: int) -> int:
    """Take the job off its slots; returns how many of the GPUs are free now."""
    freed, gpus = 0, gpus_of(table, row)
    for i in range(gpus.size):
        gpu, heir = gpus[i], FREE
        for at in range(n.occupants.shape[1]):
            other = n.occupants[gpu, at]
            if other == row:
                n.occupants[gpu, at] = NOBODY
            elif other != NOBODY and (heir == FREE or other < heir):
                heir = other
        freed += rise(m, gpus[i : i + 1], heir)
    return freed
