"""The calendar holds at most one coming event per job, in a binary heap that can be corrected in place.

Two events at one instant come out in the order of the job rows, so that runs are deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Records, inlined, inner
from thebes.model.jobs import NEVER

ABSENT = -1


class Calendar(NamedTuple):
    """`rows[:size[0]]` is the heap; each job record knows its event's instant and its place in the heap."""

    jobs: Records
    rows: NDArray[np.int64]
    size: NDArray[np.int64]


def calendar_for(jobs: Records) -> Calendar:
    jobs["event_at"], jobs["event_s"] = ABSENT, NEVER
    return Calendar(jobs, np.zeros(len(jobs), dtype=np.int64), np.zeros(1, dtype=np.int64))


@inner
def _earlier(c: Calendar, a: int, b: int) -> bool:
    at_a, at_b = c.jobs[a].event_s, c.jobs[b].event_s
    return at_a < at_b or (at_a == at_b and a < b)


@inner
def _rise(c: Calendar, at: int) -> None:
    row = c.rows[at]
    while at > 0:
        parent = (at - 1) >> 1
        if not _earlier(c, row, c.rows[parent]):
            break
        c.rows[at] = c.rows[parent]
        c.jobs[c.rows[at]].event_at = at
        at = parent
    c.rows[at] = row
    c.jobs[row].event_at = at


@inner
def _sink(c: Calendar, at: int) -> None:
    row, size = c.rows[at], c.size[0]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _earlier(c, c.rows[child + 1], c.rows[child]):
            child += 1
        if not _earlier(c, c.rows[child], row):
            break
        c.rows[at] = c.rows[child]
        c.jobs[c.rows[at]].event_at = at
        at = child
    c.rows[at] = row
    c.jobs[row].event_at = at


@inner
def schedule(c: Calendar, row: int, event_s: float) -> None:
    """Set the job's next event; an infinite instant takes it off the calendar."""
    job = c.jobs[row]
    if event_s == NEVER:
        cancel(c, row)
        return
    sooner = event_s < job.event_s
    job.event_s = event_s
    if job.event_at == ABSENT:
        at = c.size[0]
        c.size[0] += 1
        c.rows[at] = row
        job.event_at = at
        _rise(c, at)
    elif sooner:
        _rise(c, job.event_at)
    else:
        _sink(c, job.event_at)


@inlined
def cancel(c: Calendar, row: int) -> None:
    job = c.jobs[row]
    at = job.event_at
    job.event_s = NEVER
    if at == ABSENT:
        return
    job.event_at = ABSENT
    c.size[0] -= 1
    last = c.rows[c.size[0]]
    if last != row:
        c.rows[at] = last
        c.jobs[last].event_at = at
        _rise(c, at)
        _sink(c, c.jobs[last].event_at)


@inner
def next_event_s(c: Calendar) -> float:
    return c.jobs[c.rows[0]].event_s if c.size[0] > 0 else NEVER
