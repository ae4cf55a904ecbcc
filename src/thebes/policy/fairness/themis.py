"""Themis (Mahajan et al., NSDI'20): finish-time fairness by leases and auctions. Every job is an app of its own.

rho = T_sh/T_id compares the finish time in the shared cluster with that on a private 1/N of it, N being the average
number of apps over the app's life. GPUs are leased. When leases end or GPUs become free, they are offered to the
fraction 1-f of apps with the largest rho; those bid, by locality, and a partial-allocation auction decides
(`thebes.policy.fairness.auction`); what is left over goes to the others, so that nothing idles. Three things are ours.
Leases end together, at multiples of `lease_s`, because a gang could never be put together from leases that end one by
one. A gang is leased whole, so a hidden payment is taken in time, c of the lease. An app that goes empty-handed expects
its next turn after as many leases as it would have to wait on its private 1/N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import TIERS
from thebes.model.compiled import compiled, entry
from thebes.model.decision import HOLDS, OUTBID, OVER_QUOTA, Decision
from thebes.model.facts import DURATIONS, PROFILES
from thebes.model.jobs import NEVER, JobTable, gpus_of
from thebes.model.machine import Machine, copy_state, occupy, release
from thebes.model.parameters import parameter
from thebes.model.view import View
from thebes.placement.by_tier import narrowest_tier, place_within
from thebes.policy.base import Policy
from thebes.policy.fairness.auction import EXACT_UP_TO, NOTHING, Bids, auction
from thebes.policy.fairness.ftf import next_multiple, places_of, private_s
from thebes.policy.fill import collect

SHORTEST_LEASE_S = 1.0  # however large the hidden payment is
NOBODY = -1


def ideal_s(
    duration_s: NDArray[np.float64], gpus: NDArray[np.int64], apps: NDArray[np.float64], total_gpus: int
) -> NDArray[np.float64]:
    """T_id: the time on a private 1/N of the cluster, where N = `apps`.

    A gang that fits into its part runs there at full speed; a larger one has the cluster for the same share of time.
    """
    return duration_s * private_s(apps, gpus, total_gpus)


def shared_s(
    elapsed_s: NDArray[np.float64], left_s: NDArray[np.float64], speed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """T_sh: the time since submission, and the work that is left at the speed of a placement."""
    return elapsed_s + left_s / speed


class Book(NamedTuple):
    """What the arbiter remembers of each app that was alive at its last decision."""

    now_s: float
    apps_s: float  # integral of the number of apps over time
    call_s: float  # when the next leases end; infinite while no app waits, as they are then renewed without a round
    ids: NDArray[np.int64]  # ascending
    born_apps_s: NDArray[np.float64]  # what the integral was at submission
    until_s: NDArray[np.float64]  # end of its lease, if it has one


class Apps(NamedTuple):
    """The apps that want GPUs now, because they have no lease, in the order of the View."""

    at: NDArray[np.int64]  # positions in the View
    gpus: NDArray[np.int64]
    kinds: NDArray[np.int64]  # node kinds that will do; after a lease, the kind where it sits
    tenant: NDArray[np.int64]
    sits: NDArray[np.bool_]  # its lease has just ended, so that it can go on where it is
    rho: NDArray[np.float64]  # if it gets the GPUs of its bid
    rho_empty: NDArray[np.float64]  # if it gets nothing
    speed: NDArray[np.float64]  # [app, tier]


@dataclass(frozen=True)
class Themis(Policy):
    """Themis: leases by auction to the apps that are treated worst. An oracle: it knows every job's duration."""

    name: ClassVar[str] = "themis"
    paper: ClassVar[str] = "Themis (NSDI'20), finish-time fairness by partial-allocation auctions"
    needs: ClassVar[frozenset[str]] = frozenset({DURATIONS, PROFILES})

    f: float = parameter(
        0.8, "fairness knob: GPUs are offered to the worst 1-f of apps; 1: to the worst app only", low=0, high=1
    )
    lease_s: float = parameter(600.0, "leases end at multiples of this, in seconds", low=1.0)
    payments: bool = parameter(False, "hidden payments, taken in lease time: against apps that bid untruthfully")
    moves: bool = parameter(True, "a gang whose lease is renewed may move to GPUs that lie closer together, if it pays")
    exact_up_to: int = parameter(EXACT_UP_TO, "largest auction solved exactly: bundles x GPUs on offer", low=0)

    def ignores(self) -> Mapping[str, str]:
        return {"placement": "it bids for the closest GPUs to be had, by network tier"}

    def decide(self, view: View) -> Decision:
        book = self._opened(view)
        jobs = view.jobs
        ended = jobs.running & (book.until_s <= view.now_s)
        renewed = ended & self._not_at_work_yet(view)
        book = book._replace(until_s=np.where(renewed, next_multiple(self.lease_s, view.now_s), book.until_s))
        ended &= ~renewed
        wants = ~jobs.running | ended
        if jobs.running.all() or not self._somebody_fits(view, ended):
            until_s = np.where(ended, next_multiple(self.lease_s, view.now_s), book.until_s)
            return _answer(view, book, jobs.running, until_s, {})
        pool = _Pool(view, jobs.rows[ended])
        apps = self._ask(view, book, wants, ended, pool)
        kind, kept = self._hold_round(view, apps, pool)
        places = self._place(view, apps, kind, pool)
        holds = jobs.running & ~ended
        holds[apps.at[kind != NOBODY]] = True
        end_s = next_multiple(self.lease_s, view.now_s)
        until_s = book.until_s.copy()
        paid_s = np.maximum(kept * (end_s - view.now_s), SHORTEST_LEASE_S)
        until_s[apps.at] = np.where(apps.sits, end_s, np.minimum(view.now_s + paid_s, end_s))
        return _answer(view, book, holds, until_s, places)

    def _opened(self, view: View) -> Book:
        """The book of now: time has passed, and apps have come and gone."""
        jobs, now_s = view.jobs, view.now_s
        old = view.memory if isinstance(view.memory, Book) and len(view.memory.ids) else None
        apps_s, call_s = (0.0, NEVER) if old is None else (old.apps_s + len(old.ids) * (now_s - old.now_s), old.call_s)
        born_apps_s = apps_s - len(jobs) * (now_s - jobs.submit_s)
        until_s = np.full(len(jobs), next_multiple(self.lease_s, now_s))
        if old is not None:
            at, known = places_of(jobs.id, old.ids)
            born_apps_s[known] = old.born_apps_s[at]
            until_s[known] = old.until_s[at]
        if now_s < call_s:  # no app waited, so leases that ended since then were renewed
            this_end_s = self.lease_s * np.ceil(now_s / self.lease_s)
            until_s = np.where(until_s < now_s, max(this_end_s, now_s), until_s)
        return Book(now_s, apps_s, call_s, jobs.id, born_apps_s, until_s)

    def _not_at_work_yet(self, view: View) -> NDArray[np.bool_]:
        """Apps whose leases are renewed unasked: if leases are shorter than a switch takes, none would get to work."""
        jobs = view.jobs
        works_from_s = jobs.run_from_s + jobs.suspend_s + jobs.resume_s
        return (works_from_s > view.now_s) & (jobs.since_s <= view.now_s - self.lease_s)

    @staticmethod
    def _somebody_fits(view: View, ended: NDArray[np.bool_]) -> bool:
        """Whether any waiting app could use the GPUs that are free or come back."""
        waits = ~view.jobs.running
        return int(view.jobs.gpus[waits].min()) <= view.free_gpus + int(view.jobs.width[ended].sum())

    def _ask(self, view: View, book: Book, wants: NDArray[np.bool_], ended: NDArray[np.bool_], pool: _Pool) -> Apps:
        """The rho of each app (round, step 1). Bids are made by locality: the narrowest that the pool has."""
        jobs, at = view.jobs, np.flatnonzero(wants)
        gpus, sits = jobs.gpus[at], ended[at]
        kinds = np.where(sits, np.int64(1) << jobs.node_kind[at], jobs.kinds[at])
        speed = np.stack([jobs.speed_in(tier)[at] for tier in range(len(TIERS))], axis=1)
        best = speed.max(axis=1)
        tier = np.where(sits, jobs.tier[at], pool.narrowest_tiers(gpus, kinds))
        here = speed[np.arange(len(at)), np.maximum(tier, 0)]
        here = np.where(here > 0.0, here, best)
        lived_s = view.now_s - jobs.submit_s[at]
        apps = np.full(len(at), float(len(jobs)))  # N, its average over the app's life
        np.divide(book.apps_s - book.born_apps_s[at], lived_s, out=apps, where=lived_s > 0.0)
        private_part_s = ideal_s(jobs.duration_s[at], gpus, apps, view.total_gpus)
        next_turn_s = self.lease_s * private_s(apps, gpus, view.total_gpus)
        restart_s = np.where(jobs.ran_s[at] > 0.0, jobs.resume_s[at], 0.0)
        left_s = np.maximum(jobs.remaining_s[at], 0.0)
        rho = shared_s(lived_s + np.where(sits, 0.0, restart_s), left_s, here) / private_part_s
        rho_empty = shared_s(lived_s + restart_s + next_turn_s, left_s, best) / private_part_s
        return Apps(at, gpus, kinds, jobs.tenant[at], sits, rho, rho_empty, speed)

    def offered(self, rho: NDArray[np.float64]) -> NDArray[np.int64]:
        """The apps that see an offer: the fraction 1-f with the largest rho, at least one, worst first (step 2)."""
        count = max(1, int(np.ceil((1.0 - self.f) * len(rho) - 1e-9)))
        return np.argsort(-rho, kind="stable")[:count]

    def _hold_round(self, view: View, apps: Apps, pool: _Pool) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Per app, the node kind of its GPUs, or NOBODY; and the share c that it keeps (round, steps 2 to 5)."""
        kind = np.full(len(apps.at), NOBODY, dtype=np.int64)
        kept = np.ones(len(apps.at))
        quotas = view.quotas.copy()
        held = view.jobs.running.copy()
        held[apps.at] = False
        np.subtract.at(quotas, view.jobs.tenant[held], view.jobs.width[held])
        budget = pool.gpus.copy()
        worst = self.offered(apps.rho)
        for k in np.argsort(-budget, kind="stable"):
            bidders = np.sort(worst[(kind[worst] == NOBODY) & ((apps.kinds[worst] >> k) & 1 == 1)])
            value, nothing = 1.0 / apps.rho[bidders], 1.0 / apps.rho_empty[bidders]
            bids = Bids(np.arange(len(bidders)), apps.gpus[bidders], value, nothing)
            outcome = auction(bids, int(budget[k]), payments=self.payments, exact_up_to=self.exact_up_to)
            won = outcome.bundle != NOTHING
            dearest = np.argsort(-(value / nothing)[won], kind="stable")
            only = np.where(np.arange(len(budget)) == k, budget, 0)
            _admit(bidders[won][dearest], apps.gpus, apps.kinds, apps.tenant, only, quotas, kind)
            budget[k] = only[k]
            kept[bidders[won]] = outcome.kept[won]
        rest = np.flatnonzero(kind == NOBODY)
        rest = rest[np.lexsort((-apps.rho[rest], ~apps.sits[rest]))]
        kept[rest] = 1.0  # leftovers cost nothing
        _admit(rest, apps.gpus, apps.kinds, apps.tenant, budget, quotas, kind)
        return kind, kept

    def _place(self, view: View, apps: Apps, kind: NDArray[np.int64], pool: _Pool) -> dict[int, NDArray[np.int64]]:
        """GPUs of apps that start or move, by row. Renewed apps stay; others get GPUs as close together as possible."""
        rows, won = view.jobs.rows[apps.at], kind != NOBODY
        pool.keep(rows[won & apps.sits])
        starts = np.flatnonzero(won & ~apps.sits)
        suffers = apps.speed[starts].max(axis=1) - apps.speed[starts].min(axis=1)
        places: dict[int, NDArray[np.int64]] = {}
        for i in starts[np.lexsort((-suffers, -apps.gpus[starts]))]:
            found = pool.place(int(rows[i]), int(kind[i]), int(apps.gpus[i]), range(len(TIERS)))
            assert found is not None  # there are enough of its kind, and the widest tier takes any
            places[int(rows[i])] = found
        if self.moves:
            self._move_closer(view, apps, won, pool, places)
        return places

    @staticmethod
    def _move_closer(
        view: View, apps: Apps, won: NDArray[np.bool_], pool: _Pool, places: dict[int, NDArray[np.int64]]
    ) -> None:
        """Move renewed apps to idle GPUs in a narrower tier if that brings their end closer, costs included."""
        jobs, at = view.jobs, apps.at
        here = apps.speed[np.arange(len(at)), jobs.tier[at]]
        best = apps.speed.max(axis=1)
        able = won & apps.sits & (best > here) & (here > 0.0) & (apps.gpus <= pool.free_gpus())
        cost_s = jobs.suspend_s[at] + jobs.resume_s[at]
        with np.errstate(divide="ignore"):
            saves_s = np.where(able, jobs.remaining_s[at] / here - jobs.remaining_s[at] / best - cost_s, 0.0)
        refused: set[tuple[int, int, int]] = set()
        for i in np.flatnonzero(saves_s > 0.0)[np.argsort(-saves_s[saves_s > 0.0], kind="stable")]:
            row, gpus, kind = int(jobs.rows[at[i]]), int(apps.gpus[i]), int(apps.kinds[i]).bit_length() - 1
            enough = here[i] * jobs.remaining_s[at[i]] / (jobs.remaining_s[at[i]] - cost_s[i] * here[i])
            tiers = [tier for tier in range(len(TIERS)) if apps.speed[i, tier] > enough and tier < jobs.tier[at[i]]]
            if not tiers or (gpus, kind, tiers[-1]) in refused:
                continue
            found = pool.place(row, kind, gpus, tiers)
            if found is None:
                refused.add((gpus, kind, tiers[-1]))
            else:
                pool.vacate(row)
                places[row] = found


class _Pool:
    """The GPUs on offer: a copy of the machine without the apps whose leases have ended."""

    def __init__(self, view: View, ended: NDArray[np.int64]) -> None:
        self._table, self._machine = view.board.table, view.board.sketch.machine
        _copy_state(view.machine, self._machine)
        _take_off(self._table, self._machine, ended)
        self.gpus = self._machine.kinds["free"].copy()

    def free_gpus(self) -> int:
        return int(self._machine.kinds["free"].max())

    def narrowest_tiers(self, gpus: NDArray[np.int64], kinds: NDArray[np.int64]) -> NDArray[np.int64]:
        """The narrowest tier in which each gang would fit if it had the pool for itself; -1 if in none."""
        sizes, which = np.unique(gpus, return_inverse=True)
        found = np.full(len(gpus), len(TIERS), dtype=np.int64)
        for kind in range(len(self.gpus)):
            of_size = np.array([_narrowest_tier(self._machine, kind, int(size)) for size in sizes], dtype=np.int64)
            tier = of_size[which.ravel()]
            use = ((kinds >> kind) & 1 == 1) & (tier >= 0)
            found = np.where(use, np.minimum(found, tier), found)
        return np.where(found < len(TIERS), found, -1)

    def keep(self, rows: NDArray[np.int64]) -> None:
        _put_back(self._table, self._machine, rows)

    def vacate(self, row: int) -> None:
        _take_off(self._table, self._machine, np.array([row], dtype=np.int64))

    def place(self, row: int, kind: int, gpus: int, tiers: Any) -> NDArray[np.int64] | None:
        out = np.empty(gpus, dtype=np.int64)
        for tier in tiers:
            if _place_within(self._machine, row, kind, gpus, tier, out):
                return out
        return None


@compiled
def take_off(table: JobTable, m: Machine, rows: NDArray[np.int64]) -> None:
    for row in rows:
        release(m, gpus_of(table, row))


@compiled
def put_back(table: JobTable, m: Machine, rows: NDArray[np.int64]) -> None:
    for row in rows:
        occupy(m, row, gpus_of(table, row))


@compiled
def admit(
    order: NDArray[np.int64],
    gpus: NDArray[np.int64],
    kinds: NDArray[np.int64],
    tenant: NDArray[np.int64],
    budget: NDArray[np.int64],
    quotas: NDArray[np.int64],
    given: NDArray[np.int64],
) -> None:
    """In this order, give each app that fits GPUs of the kind that has most of them, while the tenant's quota lasts."""
    for i in order:
        best = -1
        for kind in range(budget.size):
            if (kinds[i] >> kind) & 1 and budget[kind] >= gpus[i] and (best < 0 or budget[kind] > budget[best]):
                best = kind
        if best >= 0 and quotas[tenant[i]] >= gpus[i]:
            given[i] = best
            budget[best] -= gpus[i]
            quotas[tenant[i]] -= gpus[i]


_take_off, _put_back, _admit, _collect = entry(take_off), entry(put_back), entry(admit), entry(collect)
_copy_state, _place_within, _narrowest_tier = entry(copy_state), entry(place_within), entry(narrowest_tier)


def _answer(
    view: View,
    book: Book,
    holds: NDArray[np.bool_],
    until_s: NDArray[np.float64],
    places: dict[int, NDArray[np.int64]],
) -> Decision:
    """The Decision in which these apps hold GPUs, where they are or at their new places."""
    jobs = view.jobs
    rows = jobs.rows[holds]
    gpus = _gpus(view, rows, places)
    fate = np.where(holds, HOLDS, OUTBID)
    if not holds.all():
        quotas = view.quotas.copy()
        np.subtract.at(quotas, jobs.tenant[holds], jobs.gpus[holds])
        fate[~holds & (quotas[jobs.tenant] < jobs.gpus)] = OVER_QUOTA
    call_s = float(until_s[holds].min()) if holds.any() and not holds.all() else NEVER
    memory = book._replace(call_s=call_s, until_s=until_s)
    return Decision(rows, gpus, fate, wake_s=call_s, memory=memory)


def _gpus(view: View, rows: NDArray[np.int64], places: dict[int, NDArray[np.int64]]) -> NDArray[np.int64]:
    table = view.board.table
    if not places:
        return _collect(table.jobs, table.slots, rows)
    new = np.fromiter(places, dtype=np.int64)
    stay = rows[~np.isin(rows, new)]
    owner = np.concatenate((np.repeat(stay, table.jobs["width"][stay]), np.repeat(new, table.jobs["gpus"][new])))
    gpus = np.concatenate((_collect(table.jobs, table.slots, stay), *places.values()))
    return gpus[np.argsort(owner, kind="stable")]
