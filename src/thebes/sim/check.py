"""The checker of design rule 3: owners, gangs, kinds, the running set and the index of free GPUs are sound.

What changed at an instant is checked at that instant: the jobs that the log names, their GPUs, the nodes on which these
lie, and the totals. Everything is checked every so many instants and at the last one, so that a fault that no event
concerns is found as well. The price of a full check grows with the cluster, and so does the time between two of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, inlined, inner
from thebes.model.jobs import HELD, JobTable, gpus_of
from thebes.model.machine import Machine, listed_as
from thebes.sim.world import FINISH, RESUME, START, SUSPEND, World

# What the checker can find; 0 means that it found nothing.
FAULTS = (
    "",
    "a job that holds no GPUs is noted as the owner of one",
    "a job holds fewer or more GPUs than its gang has",
    "a GPU is held by two jobs",
    "a job sits on GPUs of a kind that it did not ask for",
    "the set of running jobs differs from the allocation",
    "the index of free GPUs is wrong",
)
SOUND, GHOST_HOLDER, GANG_BROKEN, DOUBLE_BOOKED, WRONG_KIND, SETS_DIFFER, INDEX_WRONG = range(7)

# Instants between two full checks: at least the first number, and on a larger cluster one for each so many GPUs.
FEWEST_INSTANTS, GPUS_PER_INSTANT = 64, 32

# Cells of the checker's memory: how many entries of the log it has seen, jobs and GPUs held by its own account, the
# instants since everything was checked, and the limit of these.
LOGGED, HOLDERS, GPUS_HELD, SINCE_FULL, FULL_EVERY = range(5)

CheckerMemory = NDArray[np.int64]


def nothing_seen(gpus: int) -> CheckerMemory:
    """The checker's memory before the first event, on a cluster of so many GPUs."""
    seen = np.zeros(5, dtype=np.int64)
    seen[FULL_EVERY] = max(FEWEST_INSTANTS, gpus // GPUS_PER_INSTANT)
    seen[SINCE_FULL] = seen[FULL_EVERY]  # the first instant is checked in full
    return seen


@inlined
def check_instant(w: World, seen: CheckerMemory) -> tuple[int, int]:
    """Check what the events of this instant changed, or everything when that is due; returns (fault, job row)."""
    seen[SINCE_FULL] += 1
    if seen[SINCE_FULL] >= seen[FULL_EVERY]:
        seen[SINCE_FULL] = 0
        fault, row = check_world(w)
        if fault != SOUND:
            return fault, row
    return check_changes(w, seen)


@compiled
def check_changes(w: World, seen: CheckerMemory) -> tuple[int, int]:
    """Check the jobs named in the log since the last look, their nodes, and the totals; returns (fault, job row)."""
    clock = w.clock[0]
    for at in range(seen[LOGGED], clock.logged):
        entry = w.log[at]
        if entry.event == START or entry.event == RESUME:
            seen[HOLDERS] += 1
            seen[GPUS_HELD] += entry.gpus
        elif entry.event == SUSPEND or entry.event == FINISH:
            seen[HOLDERS] -= 1
            seen[GPUS_HELD] -= entry.gpus
        else:  # the job arrived or changed its queue, so its GPUs are the same
            continue
        row: Any = np.int64(entry.job)
        fault = _fault_of(w.table, w.machine, row)
        if fault != SOUND:
            return fault, row
    seen[LOGGED] = clock.logged
    if seen[HOLDERS] != clock.held or seen[GPUS_HELD] != clock.busy_gpus:
        return SETS_DIFFER, -1
    free = seen[GPUS_HELD]
    for kind in range(w.machine.kinds.size):
        free += w.machine.kinds[kind].free - w.machine.kinds[kind].total
    return (SOUND if free == 0 else INDEX_WRONG), -1


@inner  # inlined, it costs a simulation a fifth of its time
def _fault_of(table: JobTable, m: Machine, row: int) -> int:
    """Check a job that began or ceased to hold GPUs: its gang, and every node that it sits or sat on."""
    job = table.jobs[row]
    holds, here, last, last_node = job.phase == HELD, 0, -1, -1
    for gpu in gpus_of(table, row):
        if holds:
            if gpu <= last:
                return GANG_BROKEN
            if m.gpus[gpu].owner != row:
                return DOUBLE_BOOKED
            last = gpu
        node = m.gpus[gpu].node
        if node != last_node:
            last_node = node
            if holds and not (job.kinds >> m.nodes[node].node_kind) & 1:
                return WRONG_KIND
            free = 0
            for other in range(m.nodes[node].first, m.nodes[node].first + m.nodes[node].gpus):
                free += m.gpus[other].owner < 0
                here += m.gpus[other].owner == row
            if free != m.nodes[node].free or not listed_as(m, node, free):
                return INDEX_WRONG
    if here != (job.width if holds else 0):
        return GANG_BROKEN if holds else GHOST_HOLDER
    return SOUND


@compiled
def check_world(w: World) -> tuple[int, int]:
    """Check everything, in one pass over the GPUs; returns (fault, job row)."""
    jobs, machine, clock = w.table.jobs, w.machine, w.clock[0]
    owned, gangs, gang_gpus, node_free = 0, 0, 0, 0
    for gpu in range(machine.gpus.size):
        row = machine.gpus[gpu].owner
        number = machine.gpus[gpu].node
        node = machine.nodes[number]
        if gpu == node.first:
            node_free = 0
        if row < 0:
            node_free += 1
        else:
            owned += 1
            if jobs[row].phase != HELD:
                return GHOST_HOLDER, row
            if gpus_of(w.table, row)[0] == gpu:  # each gang is looked at once, when the pass meets its first GPU
                gangs += 1
                gang_gpus += jobs[row].width
                last = -1
                for other in gpus_of(w.table, row):
                    if other <= last or machine.gpus[other].owner != row:
                        return DOUBLE_BOOKED if other > last else GANG_BROKEN, row
                    if not (jobs[row].kinds >> machine.nodes[machine.gpus[other].node].node_kind) & 1:
                        return WRONG_KIND, row
                    last = other
        if gpu == node.first + node.gpus - 1 and (node_free != node.free or not listed_as(machine, number, node_free)):
            return INDEX_WRONG, -1
    if owned != gang_gpus:
        return GANG_BROKEN, -1
    if gangs != clock.held or owned != clock.busy_gpus:
        return SETS_DIFFER, -1
    return SOUND, -1
