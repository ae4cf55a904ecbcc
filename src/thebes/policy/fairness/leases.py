"""Leases in compiled code: how many GPUs each organisation may have, which ones, and the machine that it sees.

`fair_share` and `two_level` explain the rules; this is what happens at every event, in time linear in the jobs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Records, compiled, entry, inlined, inner, maker
from thebes.model.jobs import HELD
from thebes.model.machine import BLOCKED, FREE, ZERO, Machine, next_node, set_free, take
from thebes.placement.strategies import Strategy, place

NOBODY: Any = np.int64(-1)
SAVING = 0.5  # an organisation that saves for a gang larger than its quota lives on this part of the quota
EPSILON = 1e-9


class Turn(NamedTuple):
    """One organisation at a time may hold more than its quota, at the expense of the others' quotas."""

    organisation: int
    job: int  # id of the gang that it is for
    kind: int
    gpus: int  # of this kind, how many it may hold in all
    until_s: float


class Shares(NamedTuple):
    """What each organisation may count on."""

    quota: NDArray[np.float64]  # [organisation, kind] GPUs, not always whole
    weight: NDArray[np.float64]


class Allotment(NamedTuple):
    """GPUs on lease at one instant, and what has to be remembered of it. Positions are positions in the View's rows."""

    lease: NDArray[np.int64]  # [organisation, kind]
    granted: NDArray[np.int64]  # per job: the kind on which its gang was counted in; -1 if it was not
    sequence: NDArray[np.int64]  # positions of the waiting gangs among them, in the order in which they were granted
    unmet: NDArray[np.int64]  # per organisation: position of its first gang that was left out; -1 if none
    oversize: NDArray[np.int64]  # the same for gangs that alone exceed its quota
    claims: NDArray[np.bool_]  # per organisation: whether it lacks what its quota promises
    elastic: NDArray[np.bool_]  # per organisation: whether a job of it can run on more or fewer GPUs


class _Hand(NamedTuple):
    """The GPUs while they are being handed out."""

    given: NDArray[np.float64]  # [organisation, kind]
    left: NDArray[np.float64]  # per kind
    size: NDArray[np.float64]  # per job: GPUs that its gang takes
    quota: NDArray[np.float64]
    urgency: NDArray[np.float64]  # what was given so far is charged in advance
    charge: NDArray[np.float64]  # per organisation: how much one GPU more adds to its urgency
    granted: NDArray[np.int64]


@inner
def _grant(h: _Hand, organisation: int, position: int, kind: int) -> None:
    h.granted[position] = kind
    h.given[organisation, kind] += h.size[position]
    h.left[kind] -= h.size[position]
    h.urgency[organisation] += h.charge[organisation] * h.size[position]


@inlined
def _withdraw(h: _Hand, organisation: int, position: int) -> None:
    kind = h.granted[position]
    h.granted[position] = NOBODY
    h.given[organisation, kind] -= h.size[position]
    h.left[kind] += h.size[position]
    h.urgency[organisation] -= h.charge[organisation] * h.size[position]


@inner
def _take_back(
    jobs: Records,
    rows: NDArray[np.int64],
    h: _Hand,
    weight: NDArray[np.float64],
    order: NDArray[np.int64],
    first: NDArray[np.int64],
    kind: int,
    for_whom: int,
    in_turn: int,
    into_quota: bool,
) -> bool:
    """The organisation furthest above its quota gives up its latest gang of this kind; false if none is above."""
    victim, worst = NOBODY, EPSILON
    for i in range(h.given.shape[0]):
        above = (h.given[i, kind] - (0.0 if into_quota else h.quota[i, kind])) / weight[i]
        if i != for_whom and i != in_turn and above > worst and _latest(jobs, rows, h, order, first, i, kind) >= 0:
            victim, worst = i, above
    if victim < 0:
        return False
    _withdraw(h, victim, _latest(jobs, rows, h, order, first, victim, kind))
    return True


@inner
def _latest(
    jobs: Records,
    rows: NDArray[np.int64],
    h: _Hand,
    order: NDArray[np.int64],
    first: NDArray[np.int64],
    organisation: int,
    kind: int,
) -> int:
    """Position of the last running gang that this organisation still has granted on this kind."""
    for at in range(first[organisation + 1] - 1, first[organisation] - 1, -1):
        position = order[at]
        if jobs[rows[position]].phase == HELD and h.granted[position] == kind:
            return position
    return NOBODY


@inner
def _most_urgent(urgency: NDArray[np.float64], at: NDArray[np.int64], first: NDArray[np.int64]) -> int:
    """Among organisations with gangs still to be looked at, the one with the smallest urgency."""
    best = NOBODY
    for i in range(urgency.size):
        if at[i] < first[i + 1] and (best < 0 or urgency[i] < urgency[best]):
            best = i
    return best


@inlined
def _by_organisation(
    jobs: Records, rows: NDArray[np.int64], organisations: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions by organisation, running jobs first, then by submission; and where each organisation begins."""
    first = np.zeros(organisations + 1, dtype=np.int64)
    for row in rows:
        first[jobs[row].tenant + 1] += 1
    for i in range(organisations):
        first[i + 1] += first[i]
    at, order = first.copy(), np.empty(rows.size, dtype=np.int64)
    for turn in range(2):
        for position in range(rows.size):
            job = jobs[rows[position]]
            if (job.phase == HELD) == (turn == 0):
                order[at[job.tenant]] = position
                at[job.tenant] += 1
    return order, first


@maker
def allot_gangs(
    jobs: Records,
    rows: NDArray[np.int64],
    in_use: NDArray[np.int64],
    capacity: NDArray[np.int64],
    shares: Shares,
    urgency: NDArray[np.float64],
    charge: NDArray[np.float64],
    expired: NDArray[np.bool_],
    due: NDArray[np.bool_],
    saving: NDArray[np.bool_],
    turn: Turn,
    borrow: bool,
    out: Allotment,
) -> int:
    """Fill in `out`; returns the length of its sequence."""
    organisations, kinds = in_use.shape
    order, first = _by_organisation(jobs, rows, organisations)
    quota = shares.quota.copy()
    for i in range(organisations):
        if saving[i]:
            for kind in range(kinds):
                quota[i, kind] *= SAVING
    left = np.empty(kinds)
    for kind in range(kinds):
        left[kind] = capacity[kind]
    h = _Hand(
        np.zeros((organisations, kinds)),
        left,
        _sizes(jobs, rows, in_use),
        quota,
        urgency.copy(),
        charge,
        out.granted,
    )
    # 1. What runs stays: inside the quota always, beyond it until the lease ends.
    for place_in_order in range(rows.size):
        position = order[place_in_order]
        job = jobs[rows[position]]
        i, kind, size = job.tenant, job.node_kind, h.size[position]
        if job.phase == HELD and h.left[kind] + EPSILON >= size:
            inside = h.given[i, kind] + size <= quota[i, kind] + EPSILON
            if inside or i == turn.organisation or not expired[i]:
                _grant(h, i, position, kind)
    sequenced = 0
    # 2. The organisation whose turn it is.
    if turn.organisation >= 0:
        need = turn.gpus - h.given[turn.organisation, turn.kind]
        for into_quota in (False, True):
            while h.left[turn.kind] + EPSILON < need and _take_back(
                jobs, rows, h, shares.weight, order, first, turn.kind, turn.organisation, turn.organisation, into_quota
            ):
                pass
        for position in range(rows.size):
            if jobs[rows[position]].id == turn.job and out.granted[position] < 0 and need > 0:
                size = h.size[position]
                if h.left[turn.kind] + EPSILON >= size:
                    _grant(h, turn.organisation, position, turn.kind)
                    out.sequence[sequenced] = position
                    sequenced += 1
                more = min(h.left[turn.kind], turn.gpus - h.given[turn.organisation, turn.kind])
                if more > 0.0:
                    h.given[turn.organisation, turn.kind] += more
                    h.left[turn.kind] -= more
    # 3. What the quotas promise.
    reserved = np.zeros(kinds)
    at: Any = first[:-1].copy()
    i = _most_urgent(h.urgency, at, first)
    while i >= 0:
        position: Any = order[at[i]]
        at[i] += 1
        size: Any = h.size[position]
        job = jobs[rows[position]]
        if job.phase != HELD and out.granted[position] < 0:
            kind = NOBODY
            for k in range(kinds):
                promised = (job.kinds >> k) & 1 and h.given[i, k] + size <= quota[i, k] + EPSILON
                if promised and (kind < 0 or h.left[k] > h.left[kind]):
                    kind = k
            if kind >= 0:
                while (
                    due[i]
                    and h.left[kind] + EPSILON < size
                    and _take_back(jobs, rows, h, shares.weight, order, first, kind, i, turn.organisation, False)
                ):
                    pass
                if h.left[kind] + EPSILON >= size:
                    _grant(h, i, position, kind)
                    out.sequence[sequenced] = position
                    sequenced += 1
                else:
                    out.claims[i] = True
                    reserved[kind] += size
        i = _most_urgent(h.urgency, at, first)
    # 4. What is left is lent, gang by gang, but not GPUs for which some quota waits.
    if borrow:
        at = first[:-1].copy()
        i = _most_urgent(h.urgency, at, first)
        while i >= 0:
            position = order[at[i]]
            at[i] += 1
            size = h.size[position]
            job = jobs[rows[position]]
            if out.granted[position] < 0 and (not saving[i] or _exceeds(job.kinds, size, shares.quota[i])):
                kind = NOBODY
                for k in range(kinds):
                    allowed = k == job.node_kind if job.phase == HELD else (job.kinds >> k) & 1 == 1
                    if allowed and (kind < 0 or h.left[k] - reserved[k] > h.left[kind] - reserved[kind]):
                        kind = k
                if h.left[kind] - reserved[kind] + EPSILON >= size:
                    _grant(h, i, position, kind)
                    if job.phase != HELD:
                        out.sequence[sequenced] = position
                        sequenced += 1
            i = _most_urgent(h.urgency, at, first)
    # 5. What no gang takes goes to organisations that wait for their quota, or else to all, for jobs that can grow.
    for kind in range(kinds):
        _hand_out_rest(h, shares.weight, first, out.claims, kind, borrow)
        for i in range(organisations):
            out.lease[i, kind] = np.int64(np.ceil(h.given[i, kind] - EPSILON))
    for at_end in range(rows.size - 1, -1, -1):
        position = order[at_end]
        size = h.size[position]
        job = jobs[rows[position]]
        if job.max_gpus > job.min_gpus:
            out.elastic[job.tenant] = True
        if out.granted[position] < 0:
            out.unmet[job.tenant] = position
            if _exceeds(job.kinds, size, shares.quota[job.tenant]):
                out.oversize[job.tenant] = position
    return sequenced


@inlined
def _sizes(jobs: Records, rows: NDArray[np.int64], in_use: NDArray[np.int64]) -> NDArray[np.float64]:
    """GPUs that each gang takes; gangs that share GPUs take a part each."""
    widths = np.zeros(in_use.shape)
    for row in rows:
        job = jobs[row]
        if job.phase == HELD:
            widths[job.tenant, job.node_kind] += job.width
    size = np.empty(rows.size)
    for position in range(rows.size):
        job = jobs[rows[position]]
        if job.phase == HELD:
            size[position] = job.width * in_use[job.tenant, job.node_kind] / widths[job.tenant, job.node_kind]
        else:
            size[position] = job.gpus
    return size


@inner
def _exceeds(kinds: int, size: float, quota: NDArray[np.float64]) -> bool:
    """Whether the gang is larger than the quota, whichever kind it takes."""
    for k in range(quota.size):  # noqa: SIM110 - Numba compiles no generators
        if (kinds >> k) & 1 and size <= quota[k] + EPSILON:
            return False
    return True


@inlined
def _hand_out_rest(
    h: _Hand, weight: NDArray[np.float64], first: NDArray[np.int64], claims: NDArray[np.bool_], kind: int, borrow: bool
) -> None:
    rest = np.floor(h.left[kind] + EPSILON)
    only_claims = claims.any()
    total, last = 0.0, NOBODY
    for i in range(weight.size):
        if first[i + 1] > first[i] and (claims[i] or not only_claims):
            total += weight[i]
            last = i
    handed = 0.0
    for i in range(weight.size):
        if first[i + 1] > first[i] and (claims[i] or not only_claims):
            part = rest - handed if i == last else np.floor(rest * weight[i] / total)
            if not borrow:
                part = max(0.0, min(part, np.floor(h.quota[i, kind] + EPSILON) - np.ceil(h.given[i, kind] - EPSILON)))
            h.given[i, kind] += part
            handed += part


@maker
def hand(
    m: Machine,
    strategy: Strategy,
    jobs: Records,
    rows: NDArray[np.int64],
    kinds: NDArray[np.int64],
    more: NDArray[np.int64],
    handed: NDArray[np.bool_],
) -> None:
    """Choose `more` free GPUs per kind: where these gangs would be placed, then whole nodes first."""
    left = more.copy()
    out = np.empty(handed.size, dtype=np.int64)
    for i in range(rows.size):
        job = jobs[rows[i]]
        if left[kinds[i]] >= job.gpus and place(
            m, strategy, rows[i], job.id, job.holds, kinds[i], job.gpus, job.want_nodes, job.skew, out
        ):
            left[kinds[i]] -= job.gpus
            for gpu in out[: job.gpus]:
                handed[gpu] = True
    for kind in range(left.size):
        level = m.kinds[kind].gpus_per_node
        while left[kind] > 0 and level > 0:
            node = next_node(m, kind, level, ZERO)
            if node < 0:
                level -= 1
                continue
            count = min(left[kind], m.nodes[node].free)
            take(m, ZERO, node, count, out, ZERO)
            for gpu in out[:count]:
                handed[gpu] = True
            left[kind] -= count


@compiled
def fence(m: Machine, own: NDArray[np.bool_], handed: NDArray[np.bool_], lease: NDArray[np.int64]) -> None:
    """Make it the machine of one organisation: its own GPUs stay, the handed ones are free, all others are blocked."""
    for gpu in range(own.size):
        if handed[gpu]:
            m.gpus[gpu].owner = FREE
        elif not own[gpu]:
            m.gpus[gpu].owner = BLOCKED
    _index(m)
    for kind in range(lease.size):
        m.kinds[kind].total = lease[kind]


@compiled
def give_back(m: Machine, leased: NDArray[np.bool_], used: NDArray[np.bool_]) -> None:
    """Leave GPUs that an organisation was leased and does not use to the next one."""
    for gpu in range(leased.size):
        if leased[gpu] and m.gpus[gpu].owner != BLOCKED:
            m.gpus[gpu].owner = ZERO if used[gpu] else FREE
    _index(m)


@inner
def _index(m: Machine) -> None:
    for node in range(m.nodes.size):
        free = 0
        for gpu in range(m.nodes[node].first, m.nodes[node].first + m.nodes[node].gpus):
            free += m.gpus[gpu].owner == FREE
        if free != m.nodes[node].free:
            set_free(m, node, free)


@compiled
def tally_users(
    m: Machine, jobs: Records, user: NDArray[np.int64], kind_of: NDArray[np.int64], in_use: NDArray[np.int64]
) -> None:
    """Per GPU, the organisation whose job sits on it, or -1, and its kind; and GPUs per organisation and kind."""
    for gpu in range(user.size):
        kind_of[gpu] = m.nodes[m.gpus[gpu].node].node_kind
        user[gpu] = NOBODY
        if m.gpus[gpu].owner >= 0:
            user[gpu] = jobs[m.gpus[gpu].owner].tenant
            in_use[user[gpu], kind_of[gpu]] += 1


allot_now, hand_now, fence_now, return_now = entry(allot_gangs), entry(hand), entry(fence), entry(give_back)
tally_now = entry(tally_users)
