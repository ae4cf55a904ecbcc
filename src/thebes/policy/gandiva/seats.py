"""Where every job belongs under Gandiva, also while it is not its turn. The mechanisms work on this state.

A job that was placed has *seats*, its GPUs; several jobs may have the same ones and take turns. Two packed jobs are one
*unit*: they have the same seats, run at the same time and count once. All arrays are aligned with the living jobs, so
that the cost of a decision depends on these, and the policy stays pure: every decision starts from a copy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Records, compiled, entry, inlined, inner, inner_maker, maker, plain
from thebes.model.facts import PROGRESS
from thebes.model.jobs import copy_numbers
from thebes.model.machine import BLOCKED, Machine
from thebes.model.view import View

NOBODY = -1

RESIDENT = np.dtype(
    [
        ("id", np.int64),  # of the job
        ("first", np.int64),  # its seats are slots[first : first + width]; those that it asked for come first
        ("width", np.int64),  # 0 if it has no seats, because it is queued
        ("partner", np.int64),  # id of the job with which it is packed; NOBODY if none
        ("guest", np.bool_),  # whether it is the one of a pair that came later
        ("judged", np.bool_),  # whether the trial of this pair, or of this growth, is over
        ("alone", np.float64),  # profiled: its speed when it had its GPUs to itself; 0 before that
        ("moved_s", np.float64),  # when it last migrated or grew
        ("narrow", np.float64),  # its speed before it grew
        ("fixed", np.bool_),  # growing it was tried and did not pay
        ("turns", np.int64),  # rounds that it was given (gandiva-gavel only)
    ]
)


# Functions that are called once per job take single arrays, because passing a whole tuple takes longer than they do.
# Without the compiler, fields are read as attributes of records; `plain` would ask each time, which takes a while.
_AS_RECORDS = isinstance(plain(np.recarray(0, dtype=RESIDENT)), np.recarray)


class Jobs(NamedTuple):
    """What the View tells, per living job."""

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]  # ascending; what is remembered of a job is remembered by its id
    gpus: NDArray[np.int64]
    kinds: NDArray[np.int64]  # bit k is set if node kind k will do
    max_gpus: NDArray[np.int64]
    running: NDArray[np.bool_]
    share: NDArray[np.float64]
    since_s: NDArray[np.float64]
    run_from_s: NDArray[np.float64]
    speed: NDArray[np.float64]  # NaN if not measured yet
    ran_s: NDArray[np.float64]
    cost_s: NDArray[np.float64]  # of one suspension and one resume
    nodes: NDArray[np.int64]
    min_nodes: NDArray[np.int64]
    memory_gib: NDArray[np.float64]
    utilisation: NDArray[np.float64]
    tenant: NDArray[np.int64]


class Seats(NamedTuple):
    """Which job belongs where, and what follows for every GPU and server."""

    residents: Records  # RESIDENT, per living job
    slots: NDArray[np.int64]
    units: NDArray[np.int64]  # per GPU: how many units have a seat on it
    shut: NDArray[np.bool_]  # per GPU: whether it cannot be had
    free: NDArray[np.int64]  # per server: GPUs without any unit
    room: NDArray[np.int64]  # per server: GPUs that can be had
    demand: NDArray[np.int64]  # per server: seats given to units
    affinity: NDArray[np.int64]  # per server: GPU count of the jobs that it hosts; 0 if none yet


def jobs_in(view: View) -> Jobs:
    jobs = view.jobs
    return Jobs(
        jobs.rows,
        jobs.id,
        jobs.gpus,
        jobs.kinds,
        jobs.max_gpus,
        jobs.running,
        jobs.share,
        jobs.since_s,
        jobs.run_from_s,
        jobs.speed if view.knows(PROGRESS) else np.full(len(jobs), np.nan),
        jobs.ran_s,
        jobs.suspend_s + jobs.resume_s,
        jobs.nodes,
        jobs.min_nodes,
        jobs.memory_gib,
        jobs.utilisation,
        jobs.tenant,
    )


def no_residents() -> tuple[Records, NDArray[np.int64]]:
    return plain(np.recarray(0, dtype=RESIDENT)), np.zeros(0, dtype=np.int64)


def recall(
    view: View, jobs: Jobs, remembered: tuple[Records, NDArray[np.int64]], affinity: NDArray[np.int64]
) -> tuple[Seats, bool]:
    """The seats as the last decision left them, without jobs that finished since; and whether any job left."""
    machine, count = view.machine, len(jobs.rows)
    blank = np.zeros(count, dtype=RESIDENT)
    blank["id"], blank["partner"], blank["moved_s"] = jobs.ids, NOBODY, -np.inf
    blank["first"] = np.cumsum(jobs.max_gpus) - jobs.max_gpus
    nodes = len(machine.nodes)
    seats = Seats(
        blank.view(np.recarray) if _AS_RECORDS else blank,
        np.zeros(int(jobs.max_gpus.sum()), dtype=np.int64),
        np.zeros(len(machine.gpus), dtype=np.int64),
        machine.gpus["owner"] == BLOCKED,
        np.zeros(nodes, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        affinity.copy(),
    )
    left = _seat_again(machine, jobs, seats, remembered[0], remembered[1])
    return seats, bool(left)


@compiled
def seat_again(m: Machine, jobs: Jobs, s: Seats, old: Records, old_slots: NDArray[np.int64]) -> bool:
    """Walk both lists of jobs, which ascend; a job on GPUs that can no longer be had loses its seats."""
    for gpu in range(m.gpus.size):
        node = m.gpus[gpu].node
        if not s.shut[gpu]:
            s.room[node] += 1
            s.free[node] += 1
    left, was = False, 0
    for i in range(jobs.rows.size):
        while was < old.size and old[was].id < jobs.ids[i]:
            left = left or old[was].width > 0
            was += 1
        if was < old.size and old[was].id == jobs.ids[i]:
            now, before = s.residents[i], old[was]
            now.width, now.partner, now.guest, now.judged = before.width, before.partner, before.guest, before.judged
            now.alone, now.moved_s, now.narrow, now.fixed = before.alone, before.moved_s, before.narrow, before.fixed
            now.turns = before.turns
            for k in range(before.width):
                s.slots[now.first + k] = old_slots[before.first + k]
            was += 1
        elif jobs.running[i]:  # it was started by other means, so it belongs where it is
            _adopt(m, jobs, s, i)
    while was < old.size:
        left = left or old[was].width > 0
        was += 1
    for i in range(jobs.rows.size):
        resident = s.residents[i]
        if resident.partner != NOBODY and position(jobs.ids, resident.partner) < 0:
            resident.partner = NOBODY
        for k in range(resident.width):
            if s.shut[s.slots[resident.first + k]]:
                resident.width = 0
                left = True
    for i in range(jobs.rows.size):
        resident, partner = s.residents[i], partner_of(jobs.ids, s.residents, i)
        if partner != NOBODY and (resident.width == 0 or s.residents[partner].width == 0):
            s.residents[partner].partner = NOBODY
            resident.partner = NOBODY
    for i in range(jobs.rows.size):
        if s.residents[i].width > 0 and leads(s.residents, i):
            count_in(m, s, i)
    for node in range(m.nodes.size):
        if s.demand[node] == 0:
            s.affinity[node] = 0
    return left


@inlined
def _adopt(m: Machine, jobs: Jobs, s: Seats, i: int) -> None:
    resident, count = s.residents[i], 0
    for gpu in range(m.gpus.size):
        if m.gpus[gpu].owner == jobs.rows[i] and count < jobs.gpus[i]:
            s.slots[resident.first + count] = gpu
            count += 1
    if count == jobs.gpus[i]:
        resident.width = count


@inner
def position(ids: NDArray[np.int64], job: int) -> int:
    """The position of the job with this id among the living jobs, or NOBODY."""
    at = int(np.searchsorted(ids, job))
    return at if at < ids.size and ids[at] == job else NOBODY


@inner
def partner_of(ids: NDArray[np.int64], residents: Records, i: int) -> int:
    """The position of the job that shares its GPUs, or NOBODY."""
    return position(ids, residents[i].partner) if residents[i].partner != NOBODY else NOBODY


@inner
def leads(residents: Records, i: int) -> bool:
    """Whether a job stands for its unit: it is alone, or the host of a pair."""
    return residents[i].partner == NOBODY or not residents[i].guest


@inlined
def seats_of(residents: Records, slots: NDArray[np.int64], i: int) -> NDArray[np.int64]:
    return slots[residents[i].first : residents[i].first + residents[i].width]


@inner
def count_in(m: Machine, s: Seats, i: int) -> None:
    """Count the seats of this job's unit in."""
    for gpu in seats_of(s.residents, s.slots, i):
        node = m.gpus[gpu].node
        s.units[gpu] += 1
        s.demand[node] += 1
        if s.units[gpu] == 1:
            s.free[node] -= 1
        if s.affinity[node] == 0:
            s.affinity[node] = s.residents[i].width


@inner
def count_out(m: Machine, s: Seats, i: int) -> None:
    """Count the seats of this job's unit out; a server that hosts no job loses its affinity."""
    for gpu in seats_of(s.residents, s.slots, i):
        node = m.gpus[gpu].node
        s.units[gpu] -= 1
        s.demand[node] -= 1
        if s.units[gpu] == 0:
            s.free[node] += 1
        if s.demand[node] == 0:
            s.affinity[node] = 0


@inner_maker
def seat(m: Machine, s: Seats, i: int, gpus: NDArray[np.int64]) -> None:
    resident = s.residents[i]
    resident.width = gpus.size
    copy_numbers(np.sort(gpus), s.slots[resident.first :])
    count_in(m, s, i)


@inner
def contended(residents: Records, slots: NDArray[np.int64], units: NDArray[np.int64], i: int) -> bool:
    """Whether a job has to take turns, because another unit has a seat on one of its GPUs."""
    for gpu in seats_of(residents, slots, i):  # noqa: SIM110 - Numba compiles no generators
        if units[gpu] > 1:
            return True
    return False


@maker
def hand_over(
    jobs: Jobs, s: Seats, on: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """(rows, counts, shares, GPUs) of the jobs that are on, as a Decision wants them."""
    chosen, total = 0, 0
    for i in range(on.size):
        if on[i]:
            chosen += 1
            total += s.residents[i].width
    rows, counts, shares = np.empty(chosen, np.int64), np.empty(chosen, np.int64), np.ones(chosen)
    gpus = np.empty(total, np.int64)
    at, gpu_at = 0, 0
    for i in range(on.size):
        if on[i]:
            width = s.residents[i].width
            rows[at], counts[at] = jobs.rows[i], width
            if s.residents[i].partner != NOBODY:
                shares[at] = 0.5
            copy_numbers(seats_of(s.residents, s.slots, i), gpus[gpu_at:])
            if width > jobs.gpus[i]:  # the GPUs by which it grew come last
                gpus[gpu_at : gpu_at + width].sort()
            at += 1
            gpu_at += width
    return rows, counts, shares, gpus


_seat_again = entry(seat_again)
hand_over_entry = entry(hand_over)
