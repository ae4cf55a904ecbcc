"""Weighted fair share between organisations: how many GPUs of each kind everybody has on lease at one instant.

Quotas come first, as in HiveD and AntMan (a guaranteed number of GPUs per tenant); what the others leave idle is lent,
gang by gang, to whoever has used least by its weight (Slurm's decayed usage, charged in advance for the time of the
lease, as in stride scheduling). Gangs that quota and idle GPUs never hold get turns, paid with quota saved beforehand.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Records, compiled, entry, inner
from thebes.model.jobs import HELD, NEVER

NOBODY = -1
SAVING = 0.5  # the part of its quota that an organisation lives on while it saves for a gang larger than its quota
EPSILON = 1e-9
AT_ONCE = 1e-6  # seconds of lease by which a saved sum may fall short: the instant was announced in rounded numbers


def decayed_usage(
    usage_gpu_s: NDArray[np.float64], held: NDArray[np.int64], elapsed_s: float, half_life_s: float
) -> NDArray[np.float64]:
    """GPU-seconds used, each counting half as much after every half-life, when `held` GPUs were held all the while.

    The solution of u' = held - u * ln 2 / half_life: exact however far apart the events are. Half-life 0: no memory.
    """
    if half_life_s == 0.0:
        return np.zeros_like(usage_gpu_s)
    if math.isinf(half_life_s):
        return usage_gpu_s + held * elapsed_s
    rate = math.log(2.0) / half_life_s
    kept = math.exp(-rate * elapsed_s)
    return usage_gpu_s * kept + held * (-math.expm1(-rate * elapsed_s) / rate)


class Turn(NamedTuple):
    """One organisation at a time may hold more than its quota at the expense of the others' quotas."""

    organisation: int
    row: int  # the gang that it is for
    kind: int
    gpus: int  # of this kind, that it may hold in all
    until_s: float


NO_TURN = Turn(NOBODY, NOBODY, 0, 0, NEVER)


class Account(NamedTuple):
    """What is remembered of each organisation, as of one instant."""

    at_s: float
    usage_gpu_s: NDArray[np.float64]  # decayed
    saved_gpu_s: NDArray[np.float64]  # quota that went unused while a gang waited which did not fit into it
    held: NDArray[np.int64]  # GPUs, from that instant on
    claim_s: NDArray[np.float64]  # since when it lacks GPUs that its quota promises
    until_s: NDArray[np.float64]  # end of the lease of what it has borrowed
    turn_due_s: NDArray[np.float64]  # since when it has saved enough for a turn
    saving: NDArray[np.bool_]  # whether it waits for a gang larger than its quota
    turn: Turn


def opened(organisations: int, now_s: float) -> Account:
    """Everybody begins with nothing."""
    nothing, never = np.zeros(organisations), np.full(organisations, NEVER)
    return Account(
        now_s, nothing, nothing, np.zeros(organisations, np.int64), never, never, never, nothing > 0, NO_TURN
    )


def widened(account: Account, organisations: int) -> Account:
    """The same account when organisations have come (on a live cluster)."""
    have = len(account.usage_gpu_s)
    if have == organisations:
        return account
    new = opened(organisations - have, account.at_s)
    columns = {
        name: np.concatenate((getattr(account, name), getattr(new, name)))
        for name in ("usage_gpu_s", "saved_gpu_s", "held", "claim_s", "until_s", "turn_due_s", "saving")
    }
    return account._replace(**columns)


class Shares(NamedTuple):
    """What each organisation may count on."""

    quota: NDArray[np.float64]  # [organisation, kind] GPUs, not always whole
    weight: NDArray[np.float64]


class Terms(NamedTuple):
    """How GPUs are lent and taken back."""

    borrow: bool
    reclaim: bool
    reclaim_after_s: float
    lease_s: float


class Allotment(NamedTuple):
    """GPUs on lease at one instant, and what has to be remembered of it. Positions are positions in the View's rows."""

    lease: NDArray[np.int64]  # [organisation, kind]
    granted: NDArray[np.int64]  # per job: the kind on which its gang was counted in; -1: it was not
    sequence: NDArray[np.int64]  # positions of the waiting gangs among them, in the order of being granted
    unmet: NDArray[np.int64]  # per organisation: position of its first waiting gang that was left out; -1: none
    oversize: NDArray[np.int64]  # likewise, of those that exceed its quota by themselves
    claims: NDArray[np.bool_]  # per organisation: whether it lacks what its quota promises


def allot(
    jobs: Records,
    rows: NDArray[np.int64],
    in_use: NDArray[np.int64],
    capacity: NDArray[np.int64],
    shares: Shares,
    account: Account,
    urgency: NDArray[np.float64],
    terms: Terms,
    now_s: float,
) -> Allotment:
    """The leases from now on. `urgency` is what lending goes by, smallest first: usage by weight, as a rule."""
    organisations, kinds = in_use.shape
    count = len(rows)
    out = Allotment(
        np.zeros((organisations, kinds), dtype=np.int64),
        np.full(count, NOBODY, dtype=np.int64),
        np.full(count, NOBODY, dtype=np.int64),
        np.full(organisations, NOBODY, dtype=np.int64),
        np.full(organisations, NOBODY, dtype=np.int64),
        np.zeros(organisations, dtype=np.bool_),
    )
    due = (
        (now_s >= account.claim_s + terms.reclaim_after_s) if terms.reclaim_after_s > 0 else np.ones(organisations) > 0
    )
    sequenced = _allot(
        jobs,
        rows,
        in_use,
        capacity,
        shares,
        urgency,
        terms.lease_s / shares.weight,
        now_s >= account.until_s,
        due & terms.reclaim,
        account.saving,
        account.turn,
        terms.borrow,
        out,
    )
    return out._replace(sequence=out.sequence[:sequenced])


class _Hand(NamedTuple):
    """The GPUs while they are being handed out."""

    given: NDArray[np.float64]  # [organisation, kind]
    left: NDArray[np.float64]  # per kind
    size: NDArray[np.float64]  # per job: GPUs that its gang takes
    quota: NDArray[np.float64]
    urgency: NDArray[np.float64]  # with what was given so far charged in advance
    charge: NDArray[np.float64]  # per organisation: urgency of one GPU more
    granted: NDArray[np.int64]


@inner
def _grant(h: _Hand, organisation: int, position: int, kind: int) -> None:
    h.granted[position] = kind
    h.given[organisation, kind] += h.size[position]
    h.left[kind] -= h.size[position]
    h.urgency[organisation] += h.charge[organisation] * h.size[position]


@inner
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
    """The organisation furthest above its quota gives up its latest gang of this kind; false when nobody is above."""
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
    """Among organisations with gangs still to be looked at, the one with the smallest number."""
    best = NOBODY
    for i in range(urgency.size):
        if at[i] < first[i + 1] and (best < 0 or urgency[i] < urgency[best]):
            best = i
    return best


@inner
def _by_organisation(
    jobs: Records, rows: NDArray[np.int64], organisations: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions by organisation, those who run first, else in order of submission; where each organisation begins."""
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


@compiled
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
            quota[i] *= SAVING
    h = _Hand(
        np.zeros((organisations, kinds)),
        capacity.astype(np.float64),
        _sizes(jobs, rows, in_use),
        quota,
        urgency.copy(),
        charge,
        out.granted,
    )
    # 1. What runs stays: inside the quota always, beyond it until the lease ends.
    for at in range(rows.size):
        position = order[at]
        job = jobs[rows[position]]
        i, kind, size = job.tenant, job.node_kind, h.size[position]
        if job.phase == HELD and h.left[kind] + EPSILON >= size:
            inside = h.given[i, kind] + size <= quota[i, kind] + EPSILON
            if inside or i == turn.organisation or not expired[i]:
                _grant(h, i, position, kind)
    sequenced = 0
    # 2. Whose turn it is.
    if turn.organisation >= 0:
        need = turn.gpus - h.given[turn.organisation, turn.kind]
        for into_quota in (False, True):
            while h.left[turn.kind] + EPSILON < need and _take_back(
                jobs, rows, h, shares.weight, order, first, turn.kind, turn.organisation, turn.organisation, into_quota
            ):
                pass
        for position in range(rows.size):
            if rows[position] == turn.row and out.granted[position] < 0 and need > 0:
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
    at = first[:-1].copy()
    i = _most_urgent(h.urgency, at, first)
    while i >= 0:
        position = order[at[i]]
        at[i] += 1
        job, size = jobs[rows[position]], h.size[position]
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
    # 4. What is left is lent, gang by gang; but not what somebody's quota waits for.
    if borrow:
        at = first[:-1].copy()
        i = _most_urgent(h.urgency, at, first)
        while i >= 0:
            position = order[at[i]]
            at[i] += 1
            job, size = jobs[rows[position]], h.size[position]
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
    # 5. What no gang takes goes to those who are waiting for their quota, or else to everybody, for jobs that can grow.
    for kind in range(kinds):
        _hand_out_rest(h, shares.weight, first, out.claims, kind, borrow)
        for i in range(organisations):
            out.lease[i, kind] = np.int64(np.ceil(h.given[i, kind] - EPSILON))
    for at_end in range(rows.size - 1, -1, -1):
        position = order[at_end]
        job = jobs[rows[position]]
        if job.phase != HELD and out.granted[position] < 0:
            out.unmet[job.tenant] = position
            if _exceeds(job.kinds, h.size[position], shares.quota[job.tenant]):
                out.oversize[job.tenant] = position
    return sequenced


@inner
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


@inner
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


_allot = entry(allot_gangs)


def charged(account: Account, now_s: float, quota: NDArray[np.float64], half_life_s: float) -> Account:
    """The account at a later instant: usage has decayed and grown, those who wait have saved what they did not use."""
    elapsed_s = now_s - account.at_s
    saved = account.saved_gpu_s + (quota.sum(axis=1) - account.held) * elapsed_s
    return account._replace(
        at_s=now_s,
        usage_gpu_s=decayed_usage(account.usage_gpu_s, account.held, elapsed_s, half_life_s),
        saved_gpu_s=np.maximum(saved, 0.0),
    )


class Wish(NamedTuple):
    """The gang that each organisation would like a turn for, and the savings that it costs."""

    position: NDArray[np.int64]  # in the View's rows; -1: none
    kind: NDArray[np.int64]
    cost_gpu_s: NDArray[np.float64]


def wishes(
    jobs: Records,
    rows: NDArray[np.int64],
    allotment: Allotment,
    held: NDArray[np.int64],
    capacity: NDArray[np.int64],
    quota: NDArray[np.float64],
    lease_s: float,
) -> Wish:
    """Gangs above the quota go first: the others' day comes anyway. A turn costs what it exceeds the quota by."""
    position = np.where(allotment.oversize >= 0, allotment.oversize, allotment.unmet)
    kind, cost = np.zeros(len(position), dtype=np.int64), np.full(len(position), NEVER)
    for i in np.flatnonzero(position >= 0):
        job = jobs[rows[position[i]]]
        allowed = [k for k in range(len(capacity)) if (int(job["kinds"]) >> k) & 1]
        kind[i] = max(allowed, key=lambda k: int(capacity[k]))
        if capacity[kind[i]] >= job["gpus"]:
            cost[i] = max(0.0, float(job["gpus"] + held[i, kind[i]] - quota[i, kind[i]])) * lease_s
    return Wish(position, kind, cost)


def with_savings(account: Account, wish: Wish, lease_s: float) -> Account:
    """Nobody saves without a wish, nor more than it costs; who has enough is in the queue for a turn from now on."""
    wants = np.isfinite(wish.cost_gpu_s)
    saved = np.where(wants, np.minimum(account.saved_gpu_s, np.where(wants, wish.cost_gpu_s, 0.0)), 0.0)
    enough = wants & (saved >= wish.cost_gpu_s - AT_ONCE * lease_s) & (saved > 0.0)
    due_s = np.where(enough, np.minimum(account.turn_due_s, account.at_s), NEVER)
    return account._replace(saved_gpu_s=saved, turn_due_s=due_s)


def without_ended_turn(account: Account, now_s: float, alive: NDArray[np.int64]) -> Account:
    """A turn is over at its end, or when the gang that it was for has finished; its price is paid in any case."""
    turn = account.turn
    if turn.organisation < 0 or (now_s < turn.until_s and turn.row in alive):
        return account
    saved, until_s = account.saved_gpu_s.copy(), account.until_s.copy()
    saved[turn.organisation] = 0.0
    until_s[turn.organisation] = min(until_s[turn.organisation], now_s)
    return account._replace(saved_gpu_s=saved, until_s=until_s, turn=NO_TURN)


def with_next_turn(
    account: Account,
    wish: Wish,
    rows: NDArray[np.int64],
    sizes: NDArray[np.int64],
    held: NDArray[np.int64],
    capacity: NDArray[np.int64],
    lease_s: float,
) -> Account:
    """If nobody has a turn, whoever has had enough for one for longest gets it."""
    if account.turn.organisation >= 0 or not np.isfinite(account.turn_due_s).any():
        return account
    i = int(np.argmin(account.turn_due_s))
    position, kind = int(wish.position[i]), int(wish.kind[i])
    gpus = min(int(capacity[kind]), int(held[i, kind] + sizes[position]))
    return account._replace(turn=Turn(i, int(rows[position]), kind, gpus, account.at_s + lease_s))


def settled(
    account: Account,
    allotment: Allotment,
    wish: Wish,
    held: NDArray[np.int64],
    quota: NDArray[np.float64],
    terms: Terms,
) -> tuple[Account, float]:
    """The account once the decision is carried out, and when leases, claims or turns next change anything."""
    now_s, turn = account.at_s, account.turn
    saving = allotment.oversize >= 0
    limit = np.where(saving[:, None], SAVING * quota, quota)
    over = (held > limit + EPSILON).any(axis=1)
    unmet = allotment.unmet >= 0
    wanted = (unmet.sum() - unmet) > 0  # whether another organisation waits
    renewed = (account.until_s == NEVER) | (wanted & (now_s >= account.until_s))
    until_s = np.where(over, np.where(renewed, now_s + terms.lease_s, account.until_s), NEVER)
    if turn.organisation >= 0:
        until_s[turn.organisation] = turn.until_s
    claim_s = np.where(allotment.claims, np.minimum(account.claim_s, now_s), NEVER)
    after = account._replace(held=held.sum(axis=1), claim_s=claim_s, until_s=until_s, saving=saving)
    ends = [until_s[wanted]]
    if terms.reclaim:
        ends.append(claim_s + terms.reclaim_after_s)
    if turn.organisation >= 0:
        ends.append(np.array([turn.until_s]))
    else:
        spare = quota.sum(axis=1) - after.held
        saves = np.isfinite(wish.cost_gpu_s) & (spare > EPSILON)
        ends.append(now_s + (wish.cost_gpu_s[saves] - account.saved_gpu_s[saves]) / spare[saves])
    instants = np.concatenate(ends)
    later = instants[instants > now_s]
    return after, float(later.min()) if len(later) else NEVER
