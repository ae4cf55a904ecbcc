"""Waiting jobs stand in one sorted line per gang class; all lines merged give the policy's order.

Jobs of one class (same GPUs, same node kinds) fit or do not fit alike, so a decision looks only at the heads of lines
that still fit and never walks past thousands of waiting jobs that cannot start. Places in a line are fixed while a job
waits; a change of its place (by a promotion or a new distribution) takes the job out and puts it back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Record, Records, inlined, inner, plain
from thebes.model.machine import NONE
from thebes.policy.fill import fitting_kind

LINE = np.dtype(
    [
        ("gpus", np.int64),
        ("kinds", np.int64),
        ("first", np.int64),  # the line owns rows[first : first + room]
        ("room", np.int64),
        ("low", np.int64),  # its jobs are rows[low:high]
        ("high", np.int64),
        ("at", np.int64),  # the head, which moves as a decision goes along the line
        ("closed", np.int64),  # this decision has found that no job of this class can be placed
    ]
)


class Lines(NamedTuple):
    jobs: Records
    lines: Records
    rows: NDArray[np.int64]


def lines_for(jobs: Records) -> Lines:
    """Empty lines with room for every job; `gang_class` numbers them."""
    classes, example, counts = np.unique(jobs["gang_class"], return_index=True, return_counts=True)
    lines = np.recarray(len(classes), dtype=LINE)
    lines.gpus, lines.kinds = jobs["gpus"][example], jobs["kinds"][example]
    lines.room = counts
    lines.first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    for column in ("low", "high", "at"):
        lines[column] = lines.first
    lines.closed = 0
    return Lines(jobs, plain(lines), np.zeros(len(jobs), dtype=np.int64))


@inner
def before(jobs: Records, a: int, b: int) -> bool:
    """Whether job `a` stands before job `b` in the policy's order."""
    x, y = jobs[a], jobs[b]
    if x.rank != y.rank:
        return x.rank < y.rank
    if x.key != y.key:
        return x.key < y.key
    return a < b


@inner
def _position(q: Lines, line: Record, row: int) -> int:
    """The first place in the line whose job does not stand before `row`."""
    low, high = line.low, line.high
    while low < high:
        middle: int = (low + high) >> 1
        if before(q.jobs, q.rows[middle], row):
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def enqueue(q: Lines, row: int) -> None:
    """Put a job into its line by its rank and key; the shorter part of the line moves to make room."""
    line = q.lines[q.jobs[row].gang_class]
    at = _position(q, line, row)
    room_left, room_right = line.low > line.first, line.high < line.first + line.room
    if room_left and (not room_right or at - line.low < line.high - at):
        for i in range(line.low, at):
            q.rows[i - 1] = q.rows[i]
        line.low -= 1
        q.rows[at - 1] = row
    else:
        for i in range(line.high, at, -1):
            q.rows[i] = q.rows[i - 1]
        line.high += 1
        q.rows[at] = row


@inner
def dequeue(q: Lines, row: int) -> None:
    """Take a job out of its line; its rank and key must be the ones with which it was put in."""
    line = q.lines[q.jobs[row].gang_class]
    at = _position(q, line, row)
    if at - line.low < line.high - 1 - at:
        for i in range(at, line.low, -1):
            q.rows[i] = q.rows[i - 1]
        line.low += 1
    else:
        for i in range(at, line.high - 1):
            q.rows[i] = q.rows[i + 1]
        line.high -= 1


@inner
def to_the_heads(q: Lines) -> None:
    """Begin a decision: open every line, and go to its head."""
    for number in range(q.lines.size):
        line = q.lines[number]
        line.at = line.low
        line.closed = 0


@inner
def first_in_line(q: Lines, budget: NDArray[np.int64]) -> int:
    """Of the open lines whose gangs fit the budget, the one whose head comes first in the order; -1 if none fits."""
    best = NONE
    for number in range(q.lines.size):
        line = q.lines[number]
        if (
            line.at < line.high
            and line.closed == 0
            and fitting_kind(budget, line.kinds, line.gpus) >= 0
            and (best < 0 or before(q.jobs, q.rows[line.at], q.rows[q.lines[best].at]))  # pyright: ignore[reportArgumentType]
        ):
            best = number
    return best


@inlined
def first_of_all(q: Lines) -> int:
    """The line whose head comes first, whether it fits or not: a strict policy has to wait for that job."""
    best = NONE
    for number in range(q.lines.size):
        line = q.lines[number]
        if line.at >= line.high:
            continue
        if best < 0 or before(q.jobs, q.rows[line.at], q.rows[q.lines[best].at]):  # pyright: ignore[reportArgumentType]
            best = number
    return best
