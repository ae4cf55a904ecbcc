"""Who disturbs whom: the speed of a job follows from its own placement and from its neighbours, at every instant.

When a job starts, stops or moves, the jobs that share a link, a node or a GPU with it are *touched*; before the instant
is over each of them is charged for the time at its old speed and gets a new one. Nobody else is looked at, so the cost
of an event is what sits on the nodes concerned, however many jobs there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Record, Records, inner
from thebes.model.decision import MAX_SHARERS
from thebes.model.jobs import HELD, JobTable, gpus_of, paced_for_s
from thebes.model.machine import FREE, Machine, occupy, release
from thebes.model.plan import NO_PLAN
from thebes.model.profiles import TIER_CLUSTER, Profiles, iteration_s, profile_row, shape_of

NOBODY = -1


class Neighbours(NamedTuple):
    """What is on every link, node and GPU."""

    law: Records  # one record, thebes.perf.contention.LAW
    profiles: Profiles
    node_load: NDArray[np.float64]  # transfers on the wires of each node
    rack_load: NDArray[np.float64]  # node wires in each rack that lead out of it
    rack_nodes: NDArray[np.int64]
    rack_first: NDArray[np.int64]  # nodes of rack r are rack_first[r] : rack_first[r + 1]
    node_rate: NDArray[np.float64]  # [mine, neighbour's model]
    gpu_rate: NDArray[np.float64]  # [mine, partner's model]
    occupants: NDArray[np.int64]  # [GPU, MAX_SHARERS], where GPUs are shared
    touched: NDArray[np.int64]  # rows, the first count[0]
    count: NDArray[np.int64]


@inner
def place_in_table(n: Neighbours, m: Machine, job: Record) -> int:
    if job.plan != NO_PLAN:
        return job.plan_profile  # there is one kind of node
    return profile_row(job.profile, job.min_gpus, job.width, m.kinds.size, job.node_kind)


@inner
def _talks(n: Neighbours, m: Machine, job: Record) -> float:
    """How much of a transfer this job puts on each wire it uses; 0 when it uses none."""
    law = n.law[0]
    if not law.contends or job.nodes < 2:
        return 0.0
    row, shape = place_in_table(n, m, job), shape_of(job.nodes, job.tier)
    wire_s = n.profiles.wire_s[n.profiles.first[row] + shape]
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


@inner
def _transfers_met(n: Neighbours, m: Machine, table: JobTable, row: int, talks: float) -> float:
    """k of the law: the most transfers on any link of this job, its own counted as one."""
    law, job, k, last = n.law[0], table.jobs[row], 1.0, NOBODY
    for gpu in gpus_of(table, row):
        node = m.gpus[gpu].node
        if node != last:
            k = max(k, 1.0 + n.node_load[node] - talks)
            if job.tier == TIER_CLUSTER and law.oversubscription > 1.0:
                rack = m.nodes[node].rack
                k = max(k, n.rack_load[rack] * law.oversubscription / n.rack_nodes[rack])
            last = node
    return k


@inner
def slowdown(law: Record, k: float) -> float:
    """Time of a transfer among k, relative to one alone: k + (k - 1) * eta / b, the penalty capped."""
    return k + (min(k, law.cap) - 1.0) * law.eta


@inner
def _sits_at(n: Neighbours, m: Machine, gpu: int, row: int) -> bool:
    if not n.law[0].shares:
        return m.gpus[gpu].owner == row
    for at in range(MAX_SHARERS):  # noqa: SIM110 - Numba compiles no generators
        if n.occupants[gpu, at] == row:
            return True
    return False


@inner
def _met_before(n: Neighbours, m: Machine, first: int, until: int, other: int) -> bool:
    """Whether a job sits on one of these GPUs: the GPUs of one job need not lie together on a node."""
    for gpu in range(first, until):  # noqa: SIM110 - Numba compiles no generators
        if _sits_at(n, m, gpu, other):
            return True
    return False


@inner
def _rate_on_nodes(n: Neighbours, m: Machine, table: JobTable, row: int) -> float:
    """What the neighbours on the worst of its nodes leave of its speed; who shares its GPUs is not counted again."""
    job, worst, last = table.jobs[row], 1.0, NOBODY
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
                    rate *= n.node_rate[job.model, table.jobs[other].model]
        worst = min(worst, rate)
    return worst


@inner
def _shares_a_gpu(n: Neighbours, table: JobTable, row: int, other: int) -> bool:
    if n.law[0].shares:
        for gpu in gpus_of(table, row):
            for at in range(MAX_SHARERS):
                if n.occupants[gpu, at] == other:
                    return True
    return False


@inner
def _rate_on_gpus(n: Neighbours, table: JobTable, row: int) -> float:
    """What the partners on the worst of its GPUs leave of its speed.

    What each of them costs is measured for pairs; the delays of several add up, as they do when jobs take turns.
    """
    job, worst = table.jobs[row], 1.0
    for gpu in gpus_of(table, row):
        slow = 1.0
        for at in range(MAX_SHARERS):
            other = n.occupants[gpu, at]
            if other >= 0 and other != row:
                slow += 1.0 / n.gpu_rate[job.model, table.jobs[other].model] - 1.0
        worst = min(worst, 1.0 / slow)
    return worst


@inner
def set_pace(n: Neighbours, m: Machine, table: JobTable, row: int) -> None:
    """Speed and exposed communication of a job that holds GPUs, from where it sits and who sits beside it."""
    job, law = table.jobs[row], n.law[0]
    at, shape = place_in_table(n, m, job), shape_of(job.nodes, job.tier)
    slow = 1.0
    if law.contends and job.nodes > 1:
        slow = slowdown(law, _transfers_met(n, m, table, row, _talks(n, m, job)))
    seconds = iteration_s(n.profiles, at, shape, slow)
    compute_s = n.profiles.compute_s[n.profiles.first[at] + shape]
    speed = job.full_s / seconds
    if job.width != job.gpus and job.plan == NO_PLAN:  # a batch on every GPU; a plan keeps the global batch
        speed *= job.width / job.gpus
    if law.disturbs:
        speed *= _rate_on_nodes(n, m, table, row)
    if law.shares:
        speed *= _rate_on_gpus(n, table, row)
    job.speed = speed
    job.talk_share = max(0.0, seconds - compute_s) / seconds


@inner
def charge_pace(job: Record, now_s: float, checkpoint_every_s: float) -> None:
    """Book what the job did at its present speed, up to now."""
    ran_s = paced_for_s(job, now_s)
    if ran_s <= 0.0:
        return
    if checkpoint_every_s > 0.0:
        begun_s = job.paced_s - job.run_from_s
        saved_s = np.floor((begun_s + ran_s) / checkpoint_every_s) * checkpoint_every_s
        if saved_s >= begun_s and saved_s > 0.0:
            job.kept_left_s = job.left_s - (saved_s - begun_s) * job.speed
    useful_gpu_s = job.width * ran_s * job.share
    job.left_s -= ran_s * job.speed
    job.progress_s += ran_s * job.speed
    job.talked_s += ran_s * job.talk_share
    job.useful_gpu_s += useful_gpu_s
    if job.nodes > job.min_nodes:
        job.spread_gpu_s += useful_gpu_s
    job.paced_s = now_s


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
    """Everybody whom this job's coming or going concerns."""
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
    """A job was just placed on its slots: its traffic joins, its neighbours are touched, it gets its pace."""
    law = n.law[0]
    if law.contends or law.disturbs or law.shares:
        talks = _talks(n, m, table.jobs[row])
        if talks > 0.0:
            _add_load(n, m, table, row, talks)
        _touch_around(n, m, table, row, talks)
    set_pace(n, m, table, row)


@inner
def go(n: Neighbours, m: Machine, table: JobTable, row: int) -> None:
    """A job is about to leave its slots."""
    law = n.law[0]
    if law.contends or law.disturbs or law.shares:
        talks = _talks(n, m, table.jobs[row])
        if talks > 0.0:
            _add_load(n, m, table, row, -talks)
        _touch_around(n, m, table, row, talks)


@inner
def repace(n: Neighbours, m: Machine, table: JobTable, row: int, now_s: float, checkpoint_every_s: float) -> None:
    """A touched job: charged at its old speed, then on at its new one."""
    job = table.jobs[row]
    job.touched = False
    if job.phase != HELD:
        return
    charge_pace(job, now_s, checkpoint_every_s)
    set_pace(n, m, table, row)
    job.finish_s = max(job.paced_s, now_s) + max(0.0, job.left_s) / job.speed


# Several jobs on one GPU: the machine knows one of them as the owner, `occupants` knows all.


@inner
def move_in(n: Neighbours, m: Machine, table: JobTable, row: int) -> int:
    """Take the job's slots, beside whoever is there; returns how many GPUs were free before."""
    fresh, gpus = 0, gpus_of(table, row)
    for i in range(gpus.size):
        gpu = gpus[i]
        for at in range(n.occupants.shape[1]):
            if n.occupants[gpu, at] == NOBODY:
                n.occupants[gpu, at] = row
                break
        if m.gpus[gpu].owner == FREE:
            occupy(m, row, gpus[i : i + 1])
            fresh += 1
    return fresh


@inner
def move_out(n: Neighbours, m: Machine, table: JobTable, row: int) -> int:
    """Leave the job's slots; returns how many GPUs are free now."""
    freed, gpus = 0, gpus_of(table, row)
    for i in range(gpus.size):
        gpu, heir = gpus[i], NOBODY
        for at in range(n.occupants.shape[1]):
            if n.occupants[gpu, at] == row:
                n.occupants[gpu, at] = NOBODY
            elif n.occupants[gpu, at] != NOBODY:
                heir = n.occupants[gpu, at]
        if heir != NOBODY:
            m.gpus[gpu].owner = heir
        else:
            release(m, gpus[i : i + 1])
            freed += 1
    return freed
