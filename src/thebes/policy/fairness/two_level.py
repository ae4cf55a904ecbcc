"""Two levels: fairness between organisations above, any policy for short completion times inside each.

This follows the two levels of Themis (Mahajan et al., NSDI'20), with organisations in place of apps. Level 1 leases
GPUs to organisations (`fair_share`: quotas, lending of idle quota, reclaim, turns for large gangs); level 2 is any
policy of the project, unchanged: it sees its organisation's jobs and a machine on which the GPUs of all others are
blocked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.decision import HOLDS, NOT_LEASED, Decision
from thebes.model.errors import UserError, nearest
from thebes.model.facts import DURATIONS, PLANS
from thebes.model.jobs import HELD, NEVER
from thebes.model.machine import copy_of
from thebes.model.parameters import configure, named_numbers, parameter
from thebes.model.view import View
from thebes.policy.base import DECISIONS, Policy
from thebes.policy.fairness.fair_share import (
    Account,
    LendingTerms,
    allot,
    charged,
    opened,
    settled,
    widened,
    wishes,
    with_next_turn,
    with_savings,
    without_ended_turn,
)
from thebes.policy.fairness.leases import Allotment, Shares, fence_now, hand_now, return_now, tally_now
from thebes.policy.fairness.two_level_auction import auction_urgency
from thebes.policy.quotas import check_names, check_sum, read_quotas

OUTER = ("fair-share", "themis")
SPLITS = ("active", "all")


class Ground(NamedTuple):
    """What follows from the cluster and from its organisations."""

    tenants: tuple[str, ...]
    capacity: NDArray[np.int64]  # GPUs per kind
    sharing: NDArray[np.bool_]  # per organisation: whether it takes part in the split
    shares: Shares


class OrganisationAnswer(NamedTuple):
    """What one organisation's own policy says, cut down to the lease."""

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    gpus: NDArray[np.int64]
    shares: NDArray[np.float64]
    fate: NDArray[np.int64]  # per job of the organisation, as is all that follows
    queues: NDArray[np.int64] | None
    promote: NDArray[np.int64]


class Past(NamedTuple):
    """What is remembered between decisions: all answers, for organisations that are not asked the next time."""

    ground: Ground
    account: Account
    seen: NDArray[np.int64]  # ids of all jobs, ascending
    tenant: NDArray[np.int64]  # of each of them
    holders: NDArray[np.int64]  # ids of the jobs that hold GPUs, ascending
    fate: NDArray[np.int64]
    queues: NDArray[np.int64] | None
    counts: NDArray[np.int64]  # per holder
    gpus: NDArray[np.int64]
    shares: NDArray[np.float64]
    lease: NDArray[np.int64]  # [organisation, kind]
    wake_s: NDArray[np.float64]  # per organisation: when its own policy wants to be asked
    memories: tuple[object, ...]  # per organisation: what its own policy remembers

    def tenant_of_holders(self) -> NDArray[np.int64]:
        return self.tenant[np.searchsorted(self.seen, self.holders)]


@dataclass(frozen=True)
class TwoLevel(Policy):
    """Fair between organisations (the trace's vc column, or else its users), any other policy inside each of them.

    Every organisation has a quota of GPUs. It may borrow, on leases, what others do not use; an organisation that lacks
    GPUs which its quota promises gets them back. A gang larger than the quota gets turns, paid with quota saved before.
    """

    name: ClassVar[str] = "two-level"
    paper: ClassVar[str] = "Themis (NSDI'20) two levels across organisations; quotas and lending as in HiveD and AntMan"

    inner: str = parameter("tiresias-l", "the policy inside each organisation: a name, or FILE.py:CLASS")
    inner_set: str = parameter("", "its parameters, as KEY=VALUE;KEY=VALUE")
    outer: str = parameter("fair-share", "between organisations: fair-share or themis")
    f: float = parameter(
        0.8, "outer=themis: idle GPUs are offered to the 1-f of organisations with the worst rho first", low=0, high=1
    )
    quotas: str = parameter("", "guaranteed GPUs, as vcA=64,vcB=32; the others share the rest by weight")
    split: str = parameter(
        "all", "which organisations share that rest: all of them, or those that have jobs at the time (active)"
    )
    weights: str = parameter("", "weights, as vcA=2,vcB=1; 1 where nothing is said")
    decay_half_life_s: float = parameter(
        604800.0, "usage counts half as much after this many seconds; 0: no memory, inf: never forgets", low=0
    )
    lease_s: float = parameter(600.0, "borrowed GPUs are leased for so many seconds; so long is a turn, too", low=1e-3)
    borrow: bool = parameter(True, "whether organisations may use what others leave idle of their quotas")
    reclaim: bool = parameter(True, "whether quota that is lent comes back on demand; no: when the lease ends")
    reclaim_after_s: float = parameter(0.0, "grace before reclaimed GPUs have to be given back, in seconds", low=0)

    _inside: Policy = field(init=False, repr=False, compare=False)
    _quotas: dict[str, float] = field(init=False, repr=False, compare=False)
    _weights: dict[str, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.outer not in OUTER:
            raise UserError(f"two-level: outer={self.outer} is unknown", hint=nearest(self.outer, OUTER))
        if self.split not in SPLITS:
            raise UserError(f"two-level: split={self.split} is unknown", hint=nearest(self.split, SPLITS))
        quotas = read_quotas(self.quotas, self.name)
        weights = named_numbers(self.weights, "weights", self.name)
        for name, weight in weights.items():
            if weight <= 0:
                raise UserError(f"two-level: the weight of '{name}' is {weight:g}", hint="weights are above 0")
        inside = self._configured()
        if PLANS in inside.needs:
            raise UserError(
                f"two-level: inner={self.inner} decides on execution plans, which cannot be done on lease",
                hint=f"use {self.inner} by itself: it has quotas of its own",
            )
        for name, value in (("_inside", inside), ("_quotas", quotas), ("_weights", weights)):
            object.__setattr__(self, name, value)
        # The outer policy needs what the inner one needs to know, and does what that may do.
        rho = {DURATIONS} if self.outer == "themis" else set[str]()
        object.__setattr__(self, "needs", inside.needs | rho)
        object.__setattr__(self, "uses", inside.uses)
        object.__setattr__(self, "shares", inside.shares)
        object.__setattr__(self, "resizes", inside.resizes)

    def _configured(self) -> Policy:
        from thebes.policy import find  # the registry, which lists this module

        kind = find(self.inner)
        # A policy cannot be inside if it only runs in a simulation of its own, nor can this one.
        if kind.grain != DECISIONS or issubclass(kind, TwoLevel):
            raise UserError(
                f"two-level: {kind.name} cannot run inside an organisation",
                hint="inner is any other policy: tiresias-l",
            )
        settings: dict[str, str] = {}
        for text in filter(None, (text.strip() for text in self.inner_set.split(";"))):
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise UserError(
                    f"two-level: inner_set={self.inner_set}: '{text}' is not KEY=VALUE",
                    hint="write for instance inner_set=promote_knob=8;queue_limits=3250,7200",
                )
            settings[key.strip()] = value.strip()
        return configure(kind, settings, what=f"policy {kind.name or self.inner} inside two-level")

    def check(self, cluster: Cluster, tenants: tuple[str, ...]) -> None:
        """Check names and quotas against this cluster and these organisations."""
        check_names(self._quotas, "quotas", self.name, tenants)
        check_names(self._weights, "weights", self.name, tenants)
        check_sum(self._quotas, self.name, cluster, "some, and let borrow=yes do the rest")
        rest = sum(self._quotas.values()) < cluster.total_gpus
        for name in tenants:
            if not self.borrow and (self._quotas.get(name, float(rest)) == 0.0):
                raise UserError(
                    f"two-level: '{name}' has a quota of 0 GPUs and may not borrow: its jobs would never run",
                    hint="give it a quota, or let organisations use what others leave idle: borrow=yes",
                )
        self._inside.check(cluster, tenants)

    @property
    def reads_every_s(self) -> float:
        return self._inside.reads_every_s

    # --- level 1 ------------------------------------------------------------------------------------------------------

    def _ground(self, view: View, past: Past | None) -> Ground:
        """Quotas as given; organisations without one share what is left of the cluster by weight."""
        capacity = view.machine.kinds["total"].astype(np.int64)
        organisations = max(len(view.quotas), len(view.tenants))
        sharing = np.full(organisations, self.split == "all")
        sharing[view.jobs.tenant] = True
        if (
            past is not None
            and past.ground.tenants == view.tenants
            and np.array_equal(past.ground.capacity, capacity)
            and np.array_equal(past.ground.sharing, sharing)
        ):
            return past.ground
        names = [*view.tenants, *("" for _ in range(organisations - len(view.tenants)))]
        weight = np.array([self._weights.get(name, 1.0) for name in names])
        total = max(1, view.cluster.total_gpus)
        told = np.array([self._quotas.get(name, -1.0) for name in names])
        rest = max(0.0, total - float(told[told >= 0].sum()))
        parts = np.where(sharing & (told < 0), weight, 0.0)
        quota = np.where(told >= 0, told, rest * parts / max(1e-300, float(parts.sum())))
        return Ground(view.tenants, capacity, sharing, Shares(quota[:, None] / total * capacity[None, :], weight))

    @property
    def _terms(self) -> LendingTerms:
        return LendingTerms(self.borrow, self.reclaim, float(self.reclaim_after_s), float(self.lease_s))

    def _account(self, view: View, past: Past | None, shares: Shares) -> Account:
        if past is None:
            return opened(len(shares.weight), view.now_s)
        organisations = len(shares.weight)
        account, quota = widened(past.account, organisations), shares.quota
        if len(past.ground.shares.quota) == organisations:
            quota = past.ground.shares.quota  # this was in force until now
        # Policies are not asked while no job is alive: then nothing was held since the last job finished.
        holds_on = np.isin(past.holders, view.jobs.id[view.jobs.running])
        if len(past.holders) and not holds_on.any() and account.at_s < view.last_finish_s < view.now_s:
            account = charged(account, view.last_finish_s, quota, self.decay_half_life_s)
            account = account._replace(held=np.zeros_like(account.held))
        return charged(account, view.now_s, quota, self.decay_half_life_s)

    def decide(self, view: View) -> Decision:
        past = view.memory if isinstance(view.memory, Past) else None
        jobs, rows = view.board.table.jobs, view.jobs.rows
        ground, terms = self._ground(view, past), self._terms
        shares, capacity = ground.shares, ground.capacity
        user, kind_of = np.empty((2, len(view.machine.gpus)), dtype=np.int64)
        in_use = np.zeros(shares.quota.shape, dtype=np.int64)
        tally_now(view.machine, jobs, user, kind_of, in_use)
        account = without_ended_turn(self._account(view, past, shares), view.now_s, view.jobs.id)
        urgency, charge = account.usage_gpu_s / shares.weight, terms.lease_s / shares.weight

        def allotted(account: Account, terms: LendingTerms = terms) -> Allotment:
            return allot(jobs, rows, in_use, capacity, shares, account, urgency, charge, terms, view.now_s)

        if self.outer == "themis":
            promised = allotted(account, terms._replace(borrow=False))
            urgency, charge = auction_urgency(view, shares, promised, capacity, f=self.f, lease_s=self.lease_s)

        allotment = allotted(account)
        stays = np.minimum(in_use, allotment.lease)
        wish = wishes(jobs, rows, allotment, stays, capacity, shares.quota, terms.lease_s)
        before = with_savings(account, wish, terms.lease_s)
        turned = account = with_next_turn(before, wish, view.jobs.id, view.jobs.gpus, stays, capacity, terms.lease_s)
        if turned is not before:
            allotment = allotted(turned)
        answered = self._ask(view, past, allotment, in_use, user, kind_of)
        held = _held(jobs["tenant"][answered.rows], answered, kind_of, in_use.shape)
        if turned is not before or not np.array_equal(held, stays):
            wish = wishes(jobs, rows, allotment, held, capacity, shares.quota, terms.lease_s)
        account, wake_s = settled(account, allotment, wish, held, shares.quota, terms)
        asked_for = jobs["gpus"][answered.rows]
        return Decision(
            rows=answered.rows,
            gpus=answered.gpus,
            fate=answered.fate,
            wake_s=min(wake_s, float(answered.wake_s.min())),
            promote=answered.promote,
            queues=answered.queues,
            memory=_remembered(ground, account, view, answered),
            counts=None if np.array_equal(answered.counts, asked_for) else answered.counts,
            shares=None if (answered.shares == 1.0).all() else answered.shares,
        )

    # --- level 2 ------------------------------------------------------------------------------------------------------

    def _ask(
        self,
        view: View,
        past: Past | None,
        allotment: Allotment,
        in_use: NDArray[np.int64],
        user: NDArray[np.int64],
        kind_of: NDArray[np.int64],
    ) -> Answered:
        """The answers of all organisations. Only those with news are asked; for the others, the last answer stands."""
        organisations, rows, tenant = len(in_use), view.jobs.rows, view.jobs.tenant
        strategy, jobs = view.board.strategy, view.board.table.jobs
        largest = np.zeros(organisations, dtype=np.int64)  # the largest gang that may start
        waiting = tenant[allotment.sequence]
        np.maximum.at(largest, waiting, view.jobs.gpus[allotment.sequence])
        shrinks: Any = (allotment.lease < in_use).any(axis=1)
        news = shrinks | (largest > 0) | _news(view, past, allotment)
        wake_s = np.full(organisations, NEVER)
        memories: list[object] = [None] * organisations
        if past is not None:
            known = len(past.wake_s)
            wake_s[:known], memories[:known] = past.wake_s, past.memories
        present = np.bincount(tenant, minlength=organisations) > 0
        leased_any = (allotment.lease > 0).any(axis=1) | (in_use > 0).any(axis=1)
        wake_s[~present | ~leased_any] = NEVER
        asked = np.flatnonzero(news & present & leased_any)
        answers: list[tuple[NDArray[np.int64], OrganisationAnswer]] = []
        pool = copy_of(view.machine) if len(asked) else view.machine
        # Organisations that have to give GPUs back go first, then those that need most GPUs in one piece.
        for i in asked[np.lexsort((-largest[asked], ~shrinks[asked]))].tolist():
            gangs = allotment.sequence[np.equal(waiting, i)]
            handed = np.zeros(len(user), dtype=np.bool_)
            more: NDArray[np.int64] = np.maximum(allotment.lease[i] - in_use[i], 0)
            hand_now(pool, strategy, jobs, rows[gangs], allotment.granted[gangs], more, handed)
            got = np.bincount(kind_of[handed], minlength=len(more))
            mine, before = allotment.lease[i], in_use[i]
            lease = np.where(np.less(mine, before), mine, before + got)
            own: NDArray[np.bool_] = np.equal(user, i)
            machine = copy_of(view.machine)
            fence_now(machine, own, handed, lease)
            positions = np.flatnonzero(tenant == i)
            decision = self._inside.decide(view.among(rows[positions], machine, memories[i]))
            wake_s[i], memories[i] = decision.wake_s, decision.memory
            answer = _cut_to_lease(view, rows[positions], decision, lease, own | handed, kind_of)
            answers.append((positions, answer))
            if len(answers) < len(asked):
                used = np.zeros(len(user), dtype=np.bool_)
                used[answer.gpus] = True
                return_now(pool, own | handed, used)
        stands = present & leased_any
        stands[asked] = False
        return _merged(view, past, stands, answers, allotment.lease, wake_s, tuple(memories))


class Answered(NamedTuple):
    """All answers together, and the jobs that are promoted now."""

    fate: NDArray[np.int64]
    queues: NDArray[np.int64] | None
    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    gpus: NDArray[np.int64]
    shares: NDArray[np.float64]
    lease: NDArray[np.int64]
    wake_s: NDArray[np.float64]
    memories: tuple[object, ...]
    promote: NDArray[np.int64]


def _remembered(ground: Ground, account: Account, view: View, answered: Answered) -> Past:
    ids = view.jobs.id
    return Past(
        ground=ground,
        account=account,
        seen=ids,
        tenant=view.jobs.tenant,
        holders=ids[np.searchsorted(view.jobs.rows, answered.rows)],
        fate=answered.fate,
        queues=answered.queues,
        counts=answered.counts,
        gpus=answered.gpus,
        shares=answered.shares,
        lease=answered.lease,
        wake_s=answered.wake_s,
        memories=answered.memories,
    )


def _news(view: View, past: Past | None, allotment: Allotment) -> NDArray[np.bool_]:
    """For each organisation, whether anything changed that its own policy would have to know."""
    organisations = len(allotment.lease)
    if past is None or len(past.wake_s) != organisations:
        return np.ones(organisations, dtype=np.bool_)
    news = view.now_s >= past.wake_s
    ids, tenant, running = view.jobs.id, view.jobs.tenant, view.jobs.running
    # Jobs that came or went, and jobs that do not do what was decided.
    for before, its_tenant, now, tenant_now in (
        (past.seen, past.tenant, ids, tenant),
        (past.holders, past.tenant_of_holders(), ids[running], tenant[running]),
    ):
        if not np.array_equal(before, now):
            news[its_tenant[~np.isin(before, now, assume_unique=True)]] = True
            news[tenant_now[~np.isin(now, before, assume_unique=True)]] = True
    could_use = (allotment.unmet >= 0) | allotment.elastic
    return news | (could_use & (allotment.lease != past.lease).any(axis=1))


def _cut_to_lease(
    view: View,
    seen: NDArray[np.int64],
    decision: Decision,
    lease: NDArray[np.int64],
    leased: NDArray[np.bool_],
    kind_of: NDArray[np.int64],
) -> OrganisationAnswer:
    """The answer within the lease: whatever the inner policy answers, the newest holds beyond the lease are dropped."""
    jobs = view.board.table.jobs
    rows, gpus, fate = decision.rows, decision.gpus, decision.fate
    counts = decision.counts if decision.counts is not None else jobs["gpus"][rows]
    shares = decision.shares if decision.shares is not None else np.ones(len(rows))
    distinct = gpus if decision.shares is None else np.unique(gpus)
    if not leased[gpus].all() or (np.bincount(kind_of[distinct], minlength=len(lease)) > lease).any():
        since_s = np.where(jobs["phase"][rows] == HELD, jobs["since_s"][rows], NEVER)
        keep = _trimmed(rows, counts, gpus, since_s, leased, kind_of, lease)
        fate = fate.copy()
        fate[np.searchsorted(seen, rows[~keep])] = NOT_LEASED
        gpus = gpus[np.repeat(keep, counts)]
        rows, counts, shares = rows[keep], counts[keep], shares[keep]
    # A job that needs more than the whole lease does not wait for the jobs before it in the order.
    if len(rows) < len(seen) and lease.sum() < view.total_gpus:
        short = (fate != HOLDS) & (jobs["min_gpus"][seen] > _largest_lease(jobs["kinds"][seen], lease))
        fate = np.where(short, NOT_LEASED, fate)
    return OrganisationAnswer(rows, counts, gpus, shares, fate, decision.queues, decision.promote)


def _largest_lease(kinds: NDArray[np.int64], lease: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each job, the most GPUs on lease of one kind that it accepts."""
    most = np.zeros(len(kinds), dtype=np.int64)
    for kind, gpus in enumerate(lease.tolist()):
        most = np.where((kinds >> kind) & 1, np.maximum(most, gpus), most)
    return most


def _trimmed(
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    gpus: NDArray[np.int64],
    since_s: NDArray[np.float64],
    leased: NDArray[np.bool_],
    kind_of: NDArray[np.int64],
    lease: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which holds remain when an answer exceeds its lease: the newest are dropped first, and new starts before them."""
    keep = np.zeros(len(rows), dtype=np.bool_)
    starts = np.concatenate(([0], np.cumsum(counts)))
    mine = np.zeros(len(leased), dtype=np.bool_)
    left = lease.copy()
    for at in np.lexsort((rows, since_s)):
        wanted = gpus[starts[at] : starts[at + 1]]
        new = wanted[~mine[wanted]]
        need = np.bincount(kind_of[new], minlength=len(lease))
        if leased[wanted].all() and (need <= left).all():
            keep[at] = True
            mine[wanted] = True
            left -= need
    return keep


def _held(
    tenant: NDArray[np.int64], answered: Answered, kind_of: NDArray[np.int64], shape: tuple[int, ...]
) -> NDArray[np.int64]:
    """GPUs per organisation and kind after the decision; GPUs that several jobs share count once."""
    user = np.full(len(kind_of), -1, dtype=np.int64)
    user[answered.gpus] = np.repeat(tenant, answered.counts)
    used = np.flatnonzero(user >= 0)
    return np.bincount(user[used] * shape[1] + kind_of[used], minlength=shape[0] * shape[1]).reshape(shape)


def _merged(
    view: View,
    past: Past | None,
    stands: NDArray[np.bool_],
    answers: list[tuple[NDArray[np.int64], OrganisationAnswer]],
    lease: NDArray[np.int64],
    wake_s: NDArray[np.float64],
    memories: tuple[object, ...],
) -> Answered:
    """One answer made of those given now and, for the organisations where it `stands`, of the last one."""
    jobs, rows = view.board.table.jobs, view.jobs.rows
    fate = np.full(len(rows), NOT_LEASED, dtype=np.int64)
    queues: NDArray[np.int64] | None = None
    if any(answer.queues is not None for _, answer in answers) or (past is not None and past.queues is not None):
        queues = jobs["queue"][rows]
    parts = [(answer.rows, answer.counts, answer.gpus, answer.shares) for _, answer in answers]
    if past is not None and stands.any():
        same = np.flatnonzero(stands[view.jobs.tenant])
        before = np.searchsorted(past.seen, view.jobs.id[same])
        fate[same] = past.fate[before]
        if queues is not None and past.queues is not None:
            queues[same] = past.queues[before]
        keep = stands[past.tenant_of_holders()]
        holders = rows[np.searchsorted(view.jobs.id, past.holders[keep])]
        parts.append((holders, past.counts[keep], past.gpus[np.repeat(keep, past.counts)], past.shares[keep]))
    for positions, answer in answers:
        fate[positions] = answer.fate
        if queues is not None and answer.queues is not None:
            queues[positions] = answer.queues
    promote = [answer.promote for _, answer in answers if len(answer.promote)]
    holders, counts, gpus, shares = (np.concatenate(column) for column in zip(*parts, strict=True)) if parts else _EMPTY
    order = np.argsort(holders)
    first = (np.cumsum(counts) - counts)[order]
    counts = counts[order]
    shift = np.repeat(first - (np.cumsum(counts) - counts), counts)
    return Answered(
        fate,
        queues,
        holders[order],
        counts,
        gpus[np.arange(len(gpus)) + shift],
        shares[order],
        lease,
        wake_s,
        memories,
        np.sort(np.concatenate(promote)) if promote else _NO_ROWS,
    )


_NO_ROWS = np.zeros(0, dtype=np.int64)
_EMPTY = (_NO_ROWS, _NO_ROWS, _NO_ROWS, np.zeros(0))
