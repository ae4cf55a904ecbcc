"""The rows of the table: room for more of them, and those given up whose jobs have left."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from thebes.live.ledger.drawing import block, sketch_for
from thebes.model.compiled import plain
from thebes.model.jobs import JOB, NO_QUOTA, JobTable

if TYPE_CHECKING:
    from thebes.live.ledger.ledger import Ledger

ROOM = 256  # rows to begin with; doubles
UNTOLD = -1  # the fate of a job that no decision has been about


def records(count: int) -> Any:
    made = np.recarray(count, dtype=JOB)
    made[:] = np.zeros(count, dtype=JOB)
    return plain(made)


def make_room(ledger: Ledger, gpus: int) -> None:
    dead = len(ledger.ids) - len(ledger.row_of)
    if dead > 1000 and dead > len(ledger.row_of):
        pack(ledger)
    jobs, slots = ledger.table.jobs, ledger.table.slots
    if len(ledger.ids) == len(jobs):
        more = records(2 * len(jobs))
        more[: len(jobs)] = jobs
        jobs = more
        ledger.marks, ledger.fates = longer(ledger.marks, len(jobs)), longer(ledger.fates, len(jobs))
    if ledger.slots_used + gpus > len(slots):
        slots = np.concatenate((slots, np.zeros(max(gpus, len(slots)), dtype=np.int64)))
    if jobs is not ledger.table.jobs or slots is not ledger.table.slots:
        ledger.table = JobTable(jobs, slots, ledger.table.quotas)
        ledger.sketch = sketch_for(ledger.table, ledger.machine)


def pack(ledger: Ledger) -> None:
    """Give up the rows of jobs that have left. Order stays, so policies notice nothing."""
    alive = sorted(ledger.row_of.values())
    jobs = records(max(ROOM, 2 * len(alive)))
    jobs[: len(alive)] = ledger.table.jobs[alive]
    ledger.marks, ledger.fates = longer(ledger.marks[alive], len(jobs)), longer(ledger.fates[alive], len(jobs))
    ledger.ids = [ledger.ids[row] for row in alive]
    ledger.row_of = {job: row for row, job in enumerate(ledger.ids)}
    counts = jobs["max_gpus"][: len(alive)]
    jobs["first_slot"][: len(alive)] = np.concatenate(([0], np.cumsum(counts)[:-1])) if len(alive) else 0
    ledger.slots_used = int(counts.sum())
    moved_by = ledger.table.jobs["first_slot"][alive] - jobs["first_slot"][: len(alive)]
    slots = ledger.table.slots[np.arange(ledger.slots_used) + np.repeat(moved_by, counts)]
    slots = np.concatenate((slots, np.zeros(max(4 * ROOM, ledger.slots_used), dtype=np.int64)))
    ledger.table = JobTable(jobs, slots, ledger.table.quotas)
    block(ledger)


def longer(values: Any, count: int) -> Any:
    """The same values in an array of this length."""
    result = np.zeros(count, dtype=values.dtype)
    result[: len(values)] = values
    return result


def mark(job_id: str) -> int:
    """A number that stands for the id."""
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "little")


def tenant_number(ledger: Ledger, name: str) -> int:
    """The number of a tenant, which gets one when it is first heard of."""
    if name not in ledger.tenants:
        ledger.tenants.append(name)
        ledger.limits.append(int(NO_QUOTA))
        if len(ledger.tenants) > len(ledger.table.quotas):
            quotas = np.full(2 * len(ledger.table.quotas), NO_QUOTA, dtype=np.int64)
            quotas[: len(ledger.table.quotas)] = ledger.table.quotas
            ledger.table = ledger.table._replace(quotas=quotas)
    return ledger.tenants.index(name)
