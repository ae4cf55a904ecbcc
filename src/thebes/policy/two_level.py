"""Two levels: fairness between organisations above, any policy for short completion times inside each.

After the two levels of Themis (Mahajan et al., NSDI'20) with organisations in the place of apps. Level 1 leases GPUs to
organisations (`fair_share`: quotas, lending of idle quota, reclaim, turns for large gangs); level 2 is any policy of
the project, unchanged: it sees its organisation's jobs and a machine on which everybody else's GPUs are blocked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.compiled import Records, compiled, entry, inner
from thebes.model.decision import HOLDS, NOT_LEASED, Decision
from thebes.model.errors import UserError, nearest
from thebes.model.jobs import HELD, NEVER
from thebes.model.machine import BLOCKED, FREE, ZERO, Machine, copy_of, next_node, set_free, take
from thebes.model.parameters import configure, parameter
from thebes.model.view import JobsView, View
from thebes.placement.strategies import Strategy, place
from thebes.policy.base import Policy
from thebes.policy.fair_share import (
    NOBODY,
    Account,
    Allotment,
    Shares,
    Terms,
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

OUTER = ("fair-share", "themis")
ALONE = (
    "tiresias-compat",
    "two-level",
)  # not inside: one runs only in a simulator of its own, the other is the outside


class Answer(NamedTuple):
    """The last word of one organisation's own policy, and what it was given to decide on."""

    seen: NDArray[np.int64]  # rows of the organisation's jobs
    lease: NDArray[np.int64]  # GPUs per kind
    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    gpus: NDArray[np.int64]
    shares: NDArray[np.float64]
    fate: NDArray[np.int64]
    queues: NDArray[np.int64] | None
    promote: NDArray[np.int64]
    wake_s: float
    memory: object


class Past(NamedTuple):
    """What is remembered from one decision to the next."""

    account: Account
    answers: tuple[Answer | None, ...]  # per organisation
    rows: NDArray[np.int64]  # who held GPUs


def _named_numbers(text: str, what: str) -> dict[str, float]:
    """`vcA=64,vcB=32` as numbers by name."""
    numbers: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = part.rpartition("=")
        try:
            value = float(number) if equals and name else math.nan
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(
                f"two-level: {what}={text}: '{part}' is not NAME=NUMBER",
                hint=f"write for instance {what}=vcA=64,vcB=32",
            )
        if name in numbers:
            raise UserError(f"two-level: {what} names '{name}' twice", hint="name each organisation once")
        numbers[name] = value
    return numbers


@dataclass(frozen=True)
class TwoLevel(Policy):
    """Fair between organisations (the trace's vc column, or else its users), any other policy inside each of them.

    Every organisation has a quota of GPUs. What others do not use it may borrow, on leases; who lacks GPUs that its
    quota promises gets them back. A gang larger than the quota gets turns, paid with quota saved before.
    """

    name: ClassVar[str] = "two-level"
    paper: ClassVar[str] = "Themis (NSDI'20) two levels across organisations; quotas and lending as in HiveD and AntMan"

    inner: str = parameter("tiresias-l", "the policy inside each organisation: a name, or FILE.py:CLASS")
    inner_set: str = parameter("", "its parameters, as KEY=VALUE;KEY=VALUE")
    outer: str = parameter("fair-share", "between organisations: fair-share or themis")
    quotas: str = parameter("", "guaranteed GPUs, as vcA=64,vcB=32; the others share the rest by weight")
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
        quotas, weights = _named_numbers(self.quotas, "quotas"), _named_numbers(self.weights, "weights")
        for name, quota in quotas.items():
            if quota < 0:
                raise UserError(f"two-level: the quota of '{name}' is {quota:g}", hint="quotas are GPUs: 0 or more")
        for name, weight in weights.items():
            if weight <= 0:
                raise UserError(f"two-level: the weight of '{name}' is {weight:g}", hint="weights are above 0")
        inside = self._configured()
        for name, value in (("_inside", inside), ("_quotas", quotas), ("_weights", weights)):
            object.__setattr__(self, name, value)
        # What the inner policy needs to know and may do, the outer one needs and does.
        object.__setattr__(self, "needs", inside.needs)
        object.__setattr__(self, "shares", inside.shares)

    def _configured(self) -> Policy:
        from thebes.policy import find  # the registry, which has this module in it

        kind = find(self.inner)
        if kind.name in ALONE:
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
        """Names and quotas against this cluster and these organisations."""
        for what, named in (("quotas", self._quotas), ("weights", self._weights)):
            for name in named:
                if name not in tenants:
                    raise UserError(f"two-level: {what} name '{name}', which no job is of", hint=nearest(name, tenants))
        promised = sum(self._quotas.values())
        if promised > cluster.total_gpus:
            raise UserError(
                f"two-level: the quotas add up to {promised:g} GPUs, the cluster has {cluster.total_gpus}",
                hint="quotas are guaranteed: lower some, and let borrow=yes do the rest",
            )
        self._inside.check(cluster, tenants)

    @property
    def reads_every_s(self) -> float:
        return self._inside.reads_every_s

    # --- level 1 ------------------------------------------------------------------------------------------------------

    def _shares(self, view: View, organisations: int) -> Shares:
        """Quotas as told; organisations without one share what is left of the cluster by weight."""
        names = [*view.tenants, *("" for _ in range(organisations - len(view.tenants)))][:organisations]
        weight = np.array([self._weights.get(name, 1.0) for name in names])
        total = max(1, view.cluster.total_gpus)
        told = np.array([self._quotas.get(name, -1.0) for name in names])
        rest = max(0.0, total - told[told >= 0].sum())
        quota = np.where(told >= 0, told, rest * weight / max(1e-300, float(weight[told < 0].sum())))
        return Shares(np.outer(quota / total, view.machine.kinds["total"].astype(np.float64)), weight)

    @property
    def _terms(self) -> Terms:
        return Terms(self.borrow, self.reclaim, float(self.reclaim_after_s), float(self.lease_s))

    def _account(self, view: View, past: Past | None, organisations: int, shares: Shares) -> Account:
        if past is None:
            return opened(organisations, view.now_s)
        account = widened(past.account, organisations)
        # Policies are not asked while nobody is there: then nothing was held since the last job finished.
        jobs = view._table.jobs[past.rows]  # pyright: ignore[reportPrivateUsage]
        idle_from_s = float(jobs["finish_s"].max()) if len(jobs) and (jobs["phase"] != HELD).all() else NEVER
        if account.at_s < idle_from_s < view.now_s:
            account = charged(account, idle_from_s, shares.quota, self.decay_half_life_s)
            account = account._replace(held=np.zeros_like(account.held))
        return charged(account, view.now_s, shares.quota, self.decay_half_life_s)

    def decide(self, view: View) -> Decision:
        past = view.memory if isinstance(view.memory, Past) else None
        jobs, rows = view._table.jobs, view.jobs.rows  # pyright: ignore[reportPrivateUsage]
        organisations = max(len(view.quotas), len(view.tenants))
        tenant_of = jobs["tenant"]
        user = _users(view.machine, tenant_of)
        kind_of = view.machine.nodes["node_kind"][view.machine.gpus["node"]]
        kinds = len(view.machine.kinds)
        in_use = _count(user, kind_of, organisations, kinds)
        capacity = view.machine.kinds["total"].astype(np.int64)
        shares, terms = self._shares(view, organisations), self._terms
        account = without_ended_turn(self._account(view, past, organisations, shares), view.now_s, rows)
        urgency = account.usage_gpu_s / shares.weight

        def allotted(account: Account) -> Allotment:
            return allot(jobs, rows, in_use, capacity, shares, account, urgency, terms, view.now_s)

        allotment = allotted(account)
        wish = wishes(jobs, rows, allotment, in_use, capacity, shares.quota, terms.lease_s)
        account = with_savings(account, wish, terms.lease_s)
        turned = with_next_turn(account, wish, rows, view.jobs.gpus, in_use, capacity, terms.lease_s)
        if turned is not account:
            account, allotment = turned, allotted(turned)
        answers = self._ask(view, past, allotment, in_use, user, kind_of)
        held = _held(answers, kind_of, organisations, kinds)
        wish = wishes(jobs, rows, allotment, held, capacity, shares.quota, terms.lease_s)
        account, wake_s = settled(account, allotment, wish, held, shares.quota, terms)
        return _merged(view, answers, wake_s, account)

    # --- level 2 ------------------------------------------------------------------------------------------------------

    def _ask(
        self,
        view: View,
        past: Past | None,
        allotment: Allotment,
        in_use: NDArray[np.int64],
        user: NDArray[np.int64],
        kind_of: NDArray[np.int64],
    ) -> list[tuple[Answer | None, NDArray[np.int64]]]:
        """The answers of all organisations, each with its positions in the View; only those with news are asked."""
        organisations = len(in_use)
        tenant = view.jobs.tenant
        by_tenant = np.argsort(tenant, kind="stable")
        bounds = np.searchsorted(tenant[by_tenant], np.arange(organisations + 1))
        mine = [by_tenant[bounds[i] : bounds[i + 1]] for i in range(organisations)]
        largest = np.zeros(organisations, dtype=np.int64)
        np.maximum.at(largest, tenant[allotment.sequence], view.jobs.gpus[allotment.sequence])
        shrinks = (allotment.lease < in_use).any(axis=1)
        answers: list[Answer | None] = [None] * organisations
        asked: list[int] = []
        for i in range(organisations):
            if not len(mine[i]):
                continue
            last = past.answers[i] if past is not None and i < len(past.answers) else None
            seen = view.jobs.rows[mine[i]]
            if (
                last is not None
                and not largest[i]
                and not self._has_news(view, last, seen, allotment.lease[i], shrinks[i])
            ):
                answers[i] = last._replace(promote=_NO_ROWS)
            elif not allotment.lease[i].any() and not in_use[i].any():
                answers[i] = _nothing(view, seen, allotment.lease[i], last)
            else:
                asked.append(i)
        if not asked:
            return list(zip(answers, mine, strict=True))
        pool = copy_of(view.machine)
        # Who has to give GPUs back goes first, then whoever needs most of them in one piece.
        for i in sorted(asked, key=lambda i: (not shrinks[i], -largest[i], i)):
            positions = mine[i]
            gangs = allotment.sequence[tenant[allotment.sequence] == i]
            more = np.maximum(allotment.lease[i] - in_use[i], 0)
            handed = np.zeros(len(user), dtype=np.bool_)
            _hand(pool, view._strategy, view._table.jobs, view.jobs.rows[gangs], allotment.granted[gangs], more, handed)  # pyright: ignore[reportPrivateUsage]
            lease = np.where(
                allotment.lease[i] < in_use[i], allotment.lease[i], in_use[i] + _per_kind(handed, kind_of, more)
            )
            leased = (user == i) | handed
            fenced = copy_of(view.machine)
            _fence(fenced, user == i, handed, lease)
            last = past.answers[i] if past is not None and i < len(past.answers) else None
            answers[i] = self._answer(
                view, fenced, view.jobs.rows[positions], lease, leased, kind_of, last, allotment.lease[i]
            )
            used = np.zeros(len(user), dtype=np.bool_)
            used[answers[i].gpus] = True
            _return(pool, leased, used)
        return list(zip(answers, mine, strict=True))

    @staticmethod
    def _has_news(view: View, last: Answer, seen: NDArray[np.int64], lease: NDArray[np.int64], shrinks: bool) -> bool:
        """Whether anything changed that an organisation's own policy would have to know."""
        if view.now_s >= last.wake_s or shrinks or not np.array_equal(seen, last.seen):
            return True
        jobs = view._table.jobs  # pyright: ignore[reportPrivateUsage]
        if not np.array_equal(seen[jobs["phase"][seen] == HELD], last.rows):
            return True
        if np.array_equal(lease, last.lease):
            return False
        return len(last.rows) < len(seen) or bool((jobs["max_gpus"][seen] > jobs["min_gpus"][seen]).any())

    def _answer(
        self,
        view: View,
        machine: Machine,
        seen: NDArray[np.int64],
        lease: NDArray[np.int64],
        leased: NDArray[np.bool_],
        kind_of: NDArray[np.int64],
        last: Answer | None,
        allotted: NDArray[np.int64],
    ) -> Answer:
        """Ask the inner policy about these jobs on this machine; what exceeds the lease is cut off."""
        jobs = view._table.jobs  # pyright: ignore[reportPrivateUsage]
        columns = JobsView(view._table, seen, view.now_s, view.jobs._needs, view.jobs._tier_speeds)  # pyright: ignore[reportPrivateUsage]
        decision = self._inside.decide(
            replace(view, jobs=columns, machine=machine, memory=last.memory if last is not None else None)
        )
        rows, gpus = decision.rows, decision.gpus
        counts = decision.counts if decision.counts is not None else jobs["gpus"][rows]
        shares = decision.shares if decision.shares is not None else np.ones(len(rows))
        fate = decision.fate
        if not leased[gpus].all() or (_distinct(gpus, kind_of, len(lease)) > lease).any():
            since_s = np.where(jobs["phase"][rows] == HELD, jobs["since_s"][rows], NEVER)
            keep = _trimmed(rows, counts, gpus, since_s, leased, kind_of, lease)
            fate = fate.copy()
            fate[np.searchsorted(seen, rows[~keep])] = NOT_LEASED
            gpus = gpus[np.repeat(keep, counts)]
            rows, counts, shares = rows[keep], counts[keep], shares[keep]
        # Waiting for more than the whole lease is not waiting for the jobs before it in the order.
        short = (fate != HOLDS) & (fate != NOT_LEASED)
        if short.any() and lease.sum() < view.total_gpus:
            most = _largest_lease(jobs["kinds"][seen], lease)
            fate = np.where(short & (jobs["min_gpus"][seen] > most), NOT_LEASED, fate)
        return Answer(
            seen,
            allotted,
            rows,
            counts,
            gpus,
            shares,
            fate,
            decision.queues,
            decision.promote,
            decision.wake_s,
            decision.memory,
        )


_NO_ROWS = np.zeros(0, dtype=np.int64)


def _nothing(view: View, seen: NDArray[np.int64], lease: NDArray[np.int64], last: Answer | None) -> Answer:
    """Of an organisation that has nothing on lease."""
    queues = view._table.jobs["queue"][seen] if last is not None and last.queues is not None else None  # pyright: ignore[reportPrivateUsage]
    return Answer(
        seen,
        lease,
        _NO_ROWS,
        _NO_ROWS,
        _NO_ROWS,
        np.zeros(0),
        np.full(len(seen), NOT_LEASED, dtype=np.int64),
        queues,
        _NO_ROWS,
        NEVER,
        last.memory if last is not None else None,
    )


def _users(machine: Machine, tenant_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per GPU, the organisation whose job sits on it, or -1."""
    owner = machine.gpus["owner"]
    return np.where(owner >= 0, tenant_of[np.maximum(owner, 0)], NOBODY)


def _count(user: NDArray[np.int64], kind_of: NDArray[np.int64], organisations: int, kinds: int) -> NDArray[np.int64]:
    used = user >= 0
    cells = np.bincount(user[used] * kinds + kind_of[used], minlength=organisations * kinds)
    return cells.reshape(organisations, kinds)


def _distinct(gpus: NDArray[np.int64], kind_of: NDArray[np.int64], kinds: int) -> NDArray[np.int64]:
    """GPUs per kind; those that several jobs share count once."""
    return np.bincount(kind_of[np.unique(gpus)], minlength=kinds)


def _per_kind(handed: NDArray[np.bool_], kind_of: NDArray[np.int64], like: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.bincount(kind_of[handed], minlength=len(like))


def _largest_lease(kinds: NDArray[np.int64], lease: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per job, the most GPUs on lease of one kind that it accepts."""
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
    """Which holds remain when an answer exceeds its lease: the newest go first, before all those who would start."""
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
    answers: list[tuple[Answer | None, NDArray[np.int64]]], kind_of: NDArray[np.int64], organisations: int, kinds: int
) -> NDArray[np.int64]:
    user = np.full(len(kind_of), NOBODY, dtype=np.int64)
    for i, (answer, _) in enumerate(answers):
        if answer is not None:
            user[answer.gpus] = i
    return _count(user, kind_of, organisations, kinds)


def _merged(
    view: View, answers: list[tuple[Answer | None, NDArray[np.int64]]], wake_s: float, account: Account
) -> Decision:
    """One Decision out of one per organisation."""
    given = [(answer, positions) for answer, positions in answers if answer is not None]
    rows = np.concatenate([answer.rows for answer, _ in given])
    counts = np.concatenate([answer.counts for answer, _ in given])
    gpus = np.concatenate([answer.gpus for answer, _ in given])
    shares = np.concatenate([answer.shares for answer, _ in given])
    order = np.argsort(rows)
    ends = np.cumsum(counts)
    firsts, rows, counts, shares = (ends - counts)[order], rows[order], counts[order], shares[order]
    shift = np.repeat(firsts - (np.cumsum(counts) - counts), counts)
    fate = np.empty(len(view.jobs), dtype=np.int64)
    queues = np.zeros(len(view.jobs), dtype=np.int64)
    queued = False
    for answer, positions in given:
        fate[positions] = answer.fate
        if answer.queues is not None:
            queues[positions] = answer.queues
            queued = True
    asked = view._table.jobs["gpus"][rows]  # pyright: ignore[reportPrivateUsage]
    return Decision(
        rows=rows,
        gpus=gpus[np.arange(len(gpus)) + shift],
        fate=fate,
        wake_s=min(wake_s, *(answer.wake_s for answer, _ in given)),
        promote=np.sort(np.concatenate([answer.promote for answer, _ in given])),
        queues=queues if queued else None,
        memory=Past(account, tuple(answer for answer, _ in answers), rows),
        counts=None if np.array_equal(counts, asked) else counts,
        shares=None if (shares == 1.0).all() else shares,
    )


# --- machines ---------------------------------------------------------------------------------------------------------


@compiled
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
            m, strategy, rows[i], job.holds, kinds[i], job.gpus, job.want_nodes, job.skew, out
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
    """Make it the machine of one organisation: its own GPUs as they are, handed ones free, all others not to be had."""
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
    """What an organisation was leased and does not use is there for the next one."""
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


_hand, _fence, _return = entry(hand), entry(fence), entry(give_back)
