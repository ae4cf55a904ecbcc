"""The machine as policies see it, drawn from the table: which job holds what, and what cannot be had."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from thebes.model.jobs import HELD, NO_QUOTA, JobTable
from thebes.model.machine import BLOCKED, FREE, Machine, copy_of, machine_of, occupy, set_free
from thebes.model.view import Sketch

if TYPE_CHECKING:
    from thebes.live.ledger.ledger import Ledger


def block(ledger: Ledger) -> None:
    """Draw the machine again: which job holds what, and what cannot be had.

    A job with GPUs on a blocked node cannot be moved and is parked: its GPUs, also those on other nodes, count as
    taken until it ends. So is a job that shares a GPU with a parked one.
    """
    ledger.machine = machine_of(ledger.cluster)
    ledger.parked = set(ledger.held_by_user)
    unusable = {
        gpu
        for gpu in range(ledger.cluster.total_gpus)
        if gpu in ledger.sick or ledger.nodes[int(ledger.cluster.gpu_node[gpu])].name in ledger.blocked
    }
    taken, holders = set(unusable), ledger.holders()
    while stuck := [job for job in holders if job not in ledger.parked and taken.intersection(ledger.gpus_of(job))]:
        ledger.parked.update(stuck)
        taken.update(gpu for job in stuck for gpu in ledger.gpus_of(job))
    for job in holders:
        if job not in ledger.parked:
            row = ledger.row_of[job]
            first = int(ledger.table.jobs["first_slot"][row])
            gpus = ledger.table.slots[first : first + int(ledger.table.jobs["width"][row])]
            gpus = gpus[ledger.machine.gpus["owner"][gpus] == FREE]  # the others are shared, and noted as another's
            if len(gpus):
                occupy(ledger.machine, cast(int, np.int64(row)), gpus)
    for gpu in taken:
        node = int(ledger.cluster.gpu_node[gpu])
        ledger.machine.gpus["owner"][gpu] = BLOCKED
        ledger.machine.kinds["total"][int(ledger.cluster.node_kind[node])] -= 1
        free = np.int64(int(ledger.machine.nodes["free"][node]) - 1)
        set_free(ledger.machine, cast(int, np.int64(node)), cast(int, free))
    share_quotas(ledger)
    ledger.sketch = sketch_for(ledger.table, ledger.machine)


def share_quotas(ledger: Ledger) -> None:
    """Policies do not see parked jobs, but what those hold is part of their tenant's quota."""
    ledger.table.quotas[: len(ledger.limits)] = ledger.limits
    for job in ledger.parked:
        record = ledger.table.jobs[ledger.row_of[job]]
        if record["phase"] == HELD and ledger.limits[record["tenant"]] != NO_QUOTA:
            ledger.table.quotas[record["tenant"]] -= record["width"]


def sketch_for(table: JobTable, machine: Machine) -> Sketch:
    """Fresh paper, of their size, for policies that try placements out."""
    return Sketch(copy_of(machine), table.slots.copy(), np.zeros(len(table.jobs), dtype=np.bool_))
