"""Weighted fair share between organisations: how many GPUs of each kind each of them has on lease at one instant.

Quotas come first, as in HiveD and AntMan (a guaranteed number of GPUs per tenant); what the others leave idle is lent,
gang by gang, to the organisation that has used least by its weight (Slurm's decayed usage, charged in advance for the
time of the lease, as in stride scheduling). Gangs that never fit into quota and idle GPUs get turns, paid with quota
saved beforehand.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Records
from thebes.model.jobs import NEVER
from thebes.policy.fairness.leases import EPSILON, NOBODY, SAVING, Allotment, Shares, Turn, allot_now

AT_ONCE = 1e-6  # seconds of lease by which savings may fall short, because the instant was announced in rounded numbers


def decayed_usage(
    usage_gpu_s: NDArray[np.float64], held: NDArray[np.int64], elapsed_s: float, half_life_s: float
) -> NDArray[np.float64]:
    """GPU-seconds used, each counting half as much after every half-life, if `held` GPUs were held all the while.

    It solves u' = held - u * ln 2 / half_life, and is exact however far apart the events are. Half-life 0: no memory.
    """
    if half_life_s == 0.0:
        return np.zeros_like(usage_gpu_s)
    if math.isinf(half_life_s):
        return usage_gpu_s + held * elapsed_s
    rate = math.log(2.0) / half_life_s
    kept = math.exp(-rate * elapsed_s)
    return usage_gpu_s * kept + held * (-math.expm1(-rate * elapsed_s) / rate)


NO_TURN = Turn(-1, -1, 0, 0, NEVER)


class Account(NamedTuple):
    """What is remembered of each organisation, as of one instant."""

    at_s: float
    usage_gpu_s: NDArray[np.float64]  # decayed
    saved_gpu_s: NDArray[np.float64]  # quota that was not used while a gang waited that did not fit into it
    held: NDArray[np.int64]  # GPUs, from that instant on
    claim_s: NDArray[np.float64]  # since when it lacks GPUs that its quota promises
    until_s: NDArray[np.float64]  # end of the lease of what it has borrowed
    turn_due_s: NDArray[np.float64]  # since when it has saved enough for a turn
    saving: NDArray[np.bool_]  # whether it waits for a gang larger than its quota
    turn: Turn


def opened(organisations: int, now_s: float) -> Account:
    """The first account, in which every organisation begins with nothing."""
    nothing, never = np.zeros(organisations), np.full(organisations, NEVER)
    return Account(
        now_s, nothing, nothing, np.zeros(organisations, np.int64), never, never, never, nothing > 0, NO_TURN
    )


def widened(account: Account, organisations: int) -> Account:
    """The same account after organisations have come (on a live cluster)."""
    have = len(account.usage_gpu_s)
    if have == organisations:
        return account
    new = opened(organisations - have, account.at_s)
    columns = {
        name: np.concatenate((getattr(account, name), getattr(new, name)))
        for name in ("usage_gpu_s", "saved_gpu_s", "held", "claim_s", "until_s", "turn_due_s", "saving")
    }
    return account._replace(**columns)


class LendingTerms(NamedTuple):
    """How GPUs are lent and taken back."""

    borrow: bool
    reclaim: bool
    reclaim_after_s: float
    lease_s: float


def allot(
    jobs: Records,
    rows: NDArray[np.int64],
    in_use: NDArray[np.int64],
    capacity: NDArray[np.int64],
    shares: Shares,
    account: Account,
    urgency: NDArray[np.float64],
    charge: NDArray[np.float64],
    terms: LendingTerms,
    now_s: float,
) -> Allotment:
    """The leases from now on.

    Lending goes by `urgency`, smallest first, and each GPU given raises it by `charge`.
    """
    organisations, kinds = in_use.shape
    count = len(rows)
    out = Allotment(
        np.zeros((organisations, kinds), dtype=np.int64),
        np.full(count, NOBODY, dtype=np.int64),
        np.full(count, NOBODY, dtype=np.int64),
        np.full(organisations, NOBODY, dtype=np.int64),
        np.full(organisations, NOBODY, dtype=np.int64),
        np.zeros(organisations, dtype=np.bool_),
        np.zeros(organisations, dtype=np.bool_),
    )
    due = (
        (now_s >= account.claim_s + terms.reclaim_after_s) if terms.reclaim_after_s > 0 else np.ones(organisations) > 0
    )
    sequenced = allot_now(
        jobs,
        rows,
        in_use,
        capacity,
        shares,
        urgency,
        charge,
        now_s >= account.until_s,
        due & terms.reclaim,
        account.saving,
        account.turn,
        terms.borrow,
        out,
    )
    return out._replace(sequence=out.sequence[:sequenced])


def charged(account: Account, now_s: float, quota: NDArray[np.float64], half_life_s: float) -> Account:
    """The account at a later instant: usage has decayed and grown; organisations that wait have saved unused quota."""
    elapsed_s = now_s - account.at_s
    saved = account.saved_gpu_s + (quota.sum(axis=1) - account.held) * elapsed_s
    return account._replace(
        at_s=now_s,
        usage_gpu_s=decayed_usage(account.usage_gpu_s, account.held, elapsed_s, half_life_s),
        saved_gpu_s=np.maximum(saved, 0.0),
    )


class Wish(NamedTuple):
    """The gang for which each organisation would like a turn, and the savings that it costs."""

    position: NDArray[np.int64]  # in the View's rows; -1 if none
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
    """Gangs above the quota go first, because the others' day comes anyway. A turn costs the excess over the quota."""
    position = np.where(allotment.oversize >= 0, allotment.oversize, allotment.unmet)
    wants = np.flatnonzero(position >= 0)
    kind, cost = np.zeros(len(position), dtype=np.int64), np.full(len(position), NEVER)
    if len(wants):
        mine = rows[position[wants]]
        gpus, allowed = jobs["gpus"][mine], (jobs["kinds"][mine, None] >> np.arange(len(capacity))) & 1
        kind[wants] = np.argmax(np.where(allowed, capacity, -1), axis=1)
        beyond = np.maximum(gpus + held[wants, kind[wants]] - quota[wants, kind[wants]], 0.0)
        cost[wants] = np.where(gpus <= capacity[kind[wants]], beyond * lease_s, NEVER)
    return Wish(position, kind, cost)


def with_savings(account: Account, wish: Wish, lease_s: float) -> Account:
    """Nobody saves without a wish, nor more than it costs; one with enough savings queues for a turn from now on."""
    wants = np.isfinite(wish.cost_gpu_s)
    saved = np.where(wants, np.minimum(account.saved_gpu_s, np.where(wants, wish.cost_gpu_s, 0.0)), 0.0)
    enough = wants & (saved >= wish.cost_gpu_s - AT_ONCE * lease_s) & (saved > 0.0)
    due_s = np.where(enough, np.minimum(account.turn_due_s, account.at_s), NEVER)
    return account._replace(saved_gpu_s=saved, turn_due_s=due_s)


def without_ended_turn(account: Account, now_s: float, alive: NDArray[np.int64]) -> Account:
    """End a turn at its end, or when its gang has finished; its price is paid in any case."""
    turn = account.turn
    if turn.organisation < 0 or (now_s < turn.until_s and turn.job in alive):
        return account
    saved, until_s = account.saved_gpu_s.copy(), account.until_s.copy()
    saved[turn.organisation] = 0.0
    until_s[turn.organisation] = min(until_s[turn.organisation], now_s)
    return account._replace(saved_gpu_s=saved, until_s=until_s, turn=NO_TURN)


def with_next_turn(
    account: Account,
    wish: Wish,
    ids: NDArray[np.int64],
    sizes: NDArray[np.int64],
    held: NDArray[np.int64],
    capacity: NDArray[np.int64],
    lease_s: float,
) -> Account:
    """If no organisation has a turn, give it to the one that has had enough savings for longest."""
    if account.turn.organisation >= 0 or not np.isfinite(account.turn_due_s).any():
        return account
    i = int(np.argmin(account.turn_due_s))
    position, kind = int(wish.position[i]), int(wish.kind[i])
    gpus = min(int(capacity[kind]), int(held[i, kind] + sizes[position]))
    return account._replace(turn=Turn(i, int(ids[position]), kind, gpus, account.at_s + lease_s))


def settled(
    account: Account,
    allotment: Allotment,
    wish: Wish,
    held: NDArray[np.int64],
    quota: NDArray[np.float64],
    terms: LendingTerms,
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
