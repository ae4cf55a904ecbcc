"""Gandiva's packing (OSDI'18, introspection): two jobs on the same GPUs at the same time, kept only where it pays.

It is done only during overload. A job has to have run by itself for a profiling window first. The waiting job of lowest
utilisation goes to the running job of lowest utilisation and of the same GPU count, if the peaks of their memory fit
together. One window later the pair is judged by its measured rates: unless they add up to more than 1, it is undone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, entry, inlined, inner, inner_maker, maker
from thebes.model.jobs import copy_numbers
from thebes.model.machine import Machine
from thebes.policy.gandiva.placement import allowed
from thebes.policy.gandiva.seats import NOBODY, Jobs, Seats, contended, count_out, partner_of, seats_of

# A guest looks at so many hosts; and after so many guests in vain, no more are tried before the next decision.
MOST_HOSTS, MOST_GUESTS = 32, 64


@inner
def _key(one: int, other: int) -> int:
    """A pair of ids as one number."""
    return (min(one, other) << 31) | max(one, other)


@inlined
def _was_refused(refused: NDArray[np.int64], key: int) -> bool:
    at = np.searchsorted(refused, key)
    return bool(at < refused.size and refused[at] == key)


@compiled
def note_profiles(jobs: Jobs, s: Seats, now_s: float, window_s: float) -> float:
    """Remember the speed of each job that has its GPUs to itself; returns when the next profile is complete."""
    next_s = np.inf
    for i in range(jobs.rows.size):
        resident = s.residents[i]
        if not jobs.running[i] or resident.partner != NOBODY or resident.width != jobs.gpus[i] or jobs.share[i] < 1.0:
            continue
        if resident.alone > 0.0 or jobs.ran_s[i] >= window_s * (1.0 - 1e-9):
            if np.isnan(jobs.speed[i]):  # it is not measured yet, and a job must not be judged by an unknown rate
                next_s = min(next_s, now_s + window_s)
            elif now_s >= jobs.run_from_s[i]:
                resident.alone = jobs.speed[i]
        else:
            next_s = min(next_s, max(now_s, jobs.run_from_s[i]) + window_s - jobs.ran_s[i])
    return next_s


@maker
def judge_pairs(
    jobs: Jobs, s: Seats, now_s: float, window_s: float, least: float, undone: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], float]:
    """Undo the pairs whose normalised rates do not add up to more than `least`.

    Returns the keys of those pairs and when the next trial ends. After that, the guest of an undone pair has no seats.
    """
    failed, failures, next_s = np.empty(jobs.rows.size, np.int64), 0, np.inf
    for i in range(jobs.rows.size):
        resident = s.residents[i]
        partner = partner_of(jobs.ids, s.residents, i)
        if partner == NOBODY or not resident.guest or not (jobs.running[i] and jobs.running[partner]):
            continue
        if jobs.share[i] >= 1.0 or jobs.share[partner] >= 1.0:
            continue
        ends_s = max(jobs.run_from_s[i], jobs.run_from_s[partner]) + window_s
        if not resident.judged and now_s < ends_s:
            next_s = min(next_s, ends_s)
            continue
        resident.judged = True
        if now_s < ends_s - window_s:
            continue
        if jobs.speed[i] / resident.alone + jobs.speed[partner] / s.residents[partner].alone <= least:
            failed[failures] = _key(jobs.ids[i], jobs.ids[partner])
            failures += 1
            undone[i] = True
            part(s, i, partner)
            resident.width = 0
    return failed[:failures], next_s


@inner
def part(s: Seats, i: int, partner: int) -> None:
    """Make two packed jobs two units again; the seats stay counted once, for the host."""
    s.residents[i].partner, s.residents[partner].partner = NOBODY, NOBODY
    s.residents[i].guest, s.residents[partner].guest = False, False
    s.residents[i].judged, s.residents[partner].judged = False, False


@maker
def pack(
    m: Machine,
    jobs: Jobs,
    s: Seats,
    by_utilisation: NDArray[np.int64],
    undone: NDArray[np.bool_],
    refused: NDArray[np.int64],
) -> int:
    """Try pairs, lowest utilisation first on both sides; returns how many were made."""
    made, in_vain = 0, 0
    begin = np.zeros(m.gpus.size + 1, np.int64)  # per size: no job before this place can be a host
    for guest in by_utilisation:
        if in_vain >= MOST_GUESTS:
            break
        if not _may_be_guest(jobs, s, guest, undone):
            continue
        looked, found, gpus = 0, False, int(jobs.gpus[guest])
        while begin[gpus] < by_utilisation.size and not _may_host(jobs, s, int(by_utilisation[begin[gpus]]), gpus):
            begin[gpus] += 1
        for at in range(begin[gpus], by_utilisation.size):
            host = int(by_utilisation[at])
            if looked >= MOST_HOSTS:
                break
            if host == guest or not _may_host(jobs, s, host, gpus):
                continue
            looked += 1
            if may_share(m, jobs, s, guest, host, refused):
                join(m, s, guest, host)
                made += 1
                found = True
                break
        in_vain += not found
    return made


@inlined
def _may_be_guest(jobs: Jobs, s: Seats, i: int, undone: NDArray[np.bool_]) -> bool:
    """Whether a job may be a guest: it is profiled, takes turns or has no seats, and does not run (moving is free)."""
    resident = s.residents[i]
    if resident.alone <= 0.0 or resident.partner != NOBODY or (jobs.running[i] and not undone[i]):
        return False
    return resident.width == 0 or contended(s.residents, s.slots, s.units, i)


@inner
def _may_host(jobs: Jobs, s: Seats, i: int, gpus: int) -> bool:
    if jobs.gpus[i] != gpus or not jobs.running[i]:
        return False
    resident = s.residents[i]
    return bool(resident.alone > 0.0 and resident.partner == NOBODY and resident.width == gpus)


@inner
def may_share(m: Machine, jobs: Jobs, s: Seats, guest: int, host: int, refused: NDArray[np.int64]) -> bool:
    """Whether two jobs may share: kinds suit, memory peaks fit together, and they were not tried in vain before."""
    node = m.gpus[seats_of(s.residents, s.slots, host)[0]].node
    memory_gib = m.kinds[m.nodes[node].node_kind].memory_gib
    if not allowed(m, jobs.kinds[guest], node) or jobs.memory_gib[guest] + jobs.memory_gib[host] > memory_gib:
        return False
    return not _was_refused(refused, _key(jobs.ids[guest], jobs.ids[host]))


@inner_maker
def join(m: Machine, s: Seats, guest: int, host: int) -> None:
    """Give the guest the seats of the host."""
    mine, theirs = s.residents[guest], s.residents[host]
    if mine.width > 0:
        count_out(m, s, guest)
    mine.width = theirs.width
    copy_numbers(seats_of(s.residents, s.slots, host), s.slots[mine.first :])
    mine.partner, theirs.partner = theirs.id, mine.id
    mine.guest, theirs.guest, mine.judged, theirs.judged = True, False, False, False


note_profiles_entry, judge_pairs_entry, pack_entry = entry(note_profiles), entry(judge_pairs), entry(pack)
