"""Dally (Sharma et al., arXiv 2401.16492): leases, offers and delay timers for jobs that the network slows down.

GPUs are leased for a fixed time. Free GPUs are offered to the waiting jobs, first to those that communication has
slowed down most; a job refuses GPUs that lie too far apart until it has waited long enough, and the offer passes on.
When a lease ends, the GPUs are offered again to all jobs, also to their holder: losing them is Dally's preemption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Record, Records, compiled, entry, inlined, inner, inner_maker, maker
from thebes.model.decision import BETTER_PLACE, HOLDS, NO_GPUS, OVER_QUOTA, Decision
from thebes.model.errors import UserError, nearest
from thebes.model.facts import COMMUNICATION, PROFILES, PROGRESS
from thebes.model.jobs import HELD, NEVER, JobTable, copy_numbers, gpus_of
from thebes.model.machine import BLOCKED, Machine, all_free, copy_state, nodes_spanned, occupy, release, tier_spanned
from thebes.model.parameters import parameter
from thebes.model.profiles import TIER_CLUSTER, TIER_GROUP, TIER_NODE, TIER_RACK
from thebes.model.view import Sketch, View
from thebes.placement.by_tier import place_within
from thebes.placement.strategies import Strategy, place
from thebes.policy.base import Policy
from thebes.policy.dally.tuner import IN_RACK, NO_WAITS, ON_MACHINE, Waits, first, record, tune, with_room
from thebes.policy.fill import charge_quota, within_quota

AUTO, MANUAL, NO_WAIT, CONSOLIDATED = "auto", "manual", "no-wait", "consolidated"
TIMERS = (AUTO, MANUAL, NO_WAIT, CONSOLIDATED)
_TIMERS_DOC = f"how long jobs wait for close GPUs: {', '.join(TIMERS)}"
NOWHERE = 9  # wider than any tier


class Leases(NamedTuple):
    """Which jobs have GPUs on lease, and until when."""

    ids: NDArray[np.int64]  # ascending
    end_s: NDArray[np.float64]
    loose: NDArray[np.bool_]  # whether it could lie closer together than it does
    unrivalled: bool  # no job waits, so a lease that is not loose renews itself


class DallyMemory(NamedTuple):
    """What Dally knows from one decision to the next."""

    leases: Leases
    waits: Waits


NO_MEMORY = DallyMemory(Leases(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.bool_), False), NO_WAITS)


class MeasuredJobs(NamedTuple):
    """Measurements per job of the View, with NaN where there are none."""

    ran_s: NDArray[np.float64]
    talked_s: NDArray[np.float64]
    progress_s: NDArray[np.float64]


class OfferTerms(NamedTuple):
    """What holds for all offers, in the form for compiled code."""

    lease_s: float
    machine_wait: float
    rack_wait: float
    history: float
    auto: bool
    keep_place: bool
    by_model: bool
    skips: bool
    ageing: float
    reserve_large: bool


@dataclass(frozen=True)
class Dally(Policy):
    """GPUs are leased; jobs that the network hurts most choose first, and wait for close GPUs as long as it has paid.

    A job accepts GPUs on one machine at once, GPUs in one rack after its first timer, any GPUs after its second.
    """

    name: ClassVar[str] = "dally"
    paper: ClassVar[str] = "Dally (arXiv 2401.16492), as its released code does it, with best fit and without its leaks"

    uses: ClassVar[Mapping[str, str]] = {
        COMMUNICATION: "offers GPUs in the order in which jobs have waited",
        PROGRESS: "skip_costly_waits ends no timer of a job that was not measured",
    }

    timers: str = parameter(AUTO, _TIMERS_DOC)
    lease_s: float = parameter(3600.0, "length of a lease, in seconds; longer than a resume takes", low=1.0)
    machine_wait: float = parameter(12.0, "manual: leases to insist on one machine (D1)", low=0)
    rack_wait: float = parameter(24.0, "manual: leases to insist on one rack (D2), from the same instant", low=0)
    history: float = parameter(24.0, "auto: leases that the tuner looks back (H)", low=1)
    keep_place: bool = parameter(
        False, "beyond the paper: at a lease end stay, timer or not, where no other job wants to be"
    )
    tuner_by_model: bool = parameter(False, "beyond the paper: the tuner learns per GPU demand and model")
    skip_costly_waits: bool = parameter(
        False, "beyond the paper: no wait that is longer than what it would save (needs profiles)"
    )
    ageing: float = parameter(0.0, "beyond the paper: how much a job's score falls with each lease waited", low=0)
    reserve_large: bool = parameter(
        False, "beyond the paper: no job is served behind one that no machine can hold and that would take any GPUs"
    )

    def __post_init__(self) -> None:
        if self.timers not in TIMERS:
            raise UserError(f"{self.name}: timers={self.timers} is unknown", hint=nearest(self.timers, TIMERS))
        if self.skip_costly_waits:
            object.__setattr__(self, "needs", frozenset({PROFILES}))
        machine_wait, rack_wait = {NO_WAIT: (0.0, 0.0), CONSOLIDATED: (NEVER, NEVER)}.get(
            self.timers, (self.machine_wait, self.rack_wait)
        )
        terms = OfferTerms(
            lease_s=float(self.lease_s),
            machine_wait=float(machine_wait),
            rack_wait=float(rack_wait),
            history=float(self.history),
            auto=self.timers == AUTO,
            keep_place=self.keep_place,
            by_model=self.tuner_by_model,
            skips=self.skip_costly_waits,
            ageing=float(self.ageing),
            reserve_large=self.reserve_large,
        )
        object.__setattr__(self, "_terms", terms)

    def ignores(self) -> Mapping[str, str]:
        return {"placement": "it offers GPUs by network tier, and a job accepts a tier or waits"}

    def decide(self, view: View) -> Decision:
        memory = view.memory if isinstance(view.memory, DallyMemory) else NO_MEMORY
        terms: OfferTerms = self._terms  # type: ignore[attr-defined]
        rows, counts, gpus, fate, wake_s, leases, waits = _offer_round(
            view.board.table, view.machine, view.board.sketch, view.board.strategy, view.board.gang_classes,
            view.jobs.rows, view.jobs.id, view.now_s, terms, memory.leases, memory.waits,
            _measured(view), self._slowdowns(view),
        )  # fmt: skip
        return Decision(
            rows=rows,
            gpus=gpus,
            fate=fate,
            wake_s=wake_s,
            memory=DallyMemory(Leases(*leases), Waits(*waits)),
            counts=counts,
        )

    def _slowdowns(self, view: View) -> NDArray[np.float64]:
        """[job, machine or rack]: how much more a second of work costs in the next wider tier; 0 if it does not fit."""
        if not self.skip_costly_waits:
            return _NO_SLOWDOWNS
        speeds = np.stack([view.jobs.speed_in(tier) for tier in (TIER_NODE, TIER_RACK, TIER_CLUSTER)], axis=1)
        second_s = 1.0 / np.where(speeds > 0, speeds, 1.0)
        return np.where((speeds[:, :-1] > 0) & (speeds[:, 1:] > 0), np.diff(second_s, axis=1), 0.0)


_NO_SLOWDOWNS = np.zeros((0, 2))


def _measured(view: View) -> MeasuredJobs:
    """What is known of how the jobs ran; a world that does not measure gives NaN, as for a job that never ran."""
    jobs, unknown = view.jobs, np.full(len(view.jobs), np.nan)
    return MeasuredJobs(
        jobs.ran_s,
        jobs.talked_s if view.knows(COMMUNICATION) else unknown,
        jobs.progress_s if view.knows(PROGRESS) else unknown,
    )


@dataclass(frozen=True)
class DallyManual(Dally):
    """Dally with fixed timers: twelve leases for one machine, twenty-four for one rack."""

    name: ClassVar[str] = "dally-manual"
    timers: str = parameter(MANUAL, _TIMERS_DOC)


@dataclass(frozen=True)
class DallyNoWait(Dally):
    """Dally without timers: a job takes the closest GPUs that are free, however far apart."""

    name: ClassVar[str] = "dally-no-wait"
    timers: str = parameter(NO_WAIT, _TIMERS_DOC)


@dataclass(frozen=True)
class DallyConsolidated(Dally):
    """Dally whose timers never end: a job waits for one machine, or for one rack if no machine could hold it."""

    name: ClassVar[str] = "dally-consolidated"
    timers: str = parameter(CONSOLIDATED, _TIMERS_DOC)


# --- priority ---------------------------------------------------------------------------------------------------------


@compiled
def nw_sens(ran_s: Any, talked_s: Any) -> float:
    """Nw_sens: the mean efficiency of a job's running time so far, compute / (compute + exposed communication).

    It is 0 before the first run, so that a job that never ran chooses first. So does a job whose communication was not
    measured: where nothing is measured, only the wait counts. It is rounded, so that equal jobs are equal to the last
    bit.
    """
    if ran_s <= 0.0 or np.isnan(talked_s):
        return 0.0
    return np.round(1e9 * (1.0 - talked_s / ran_s)) / 1e9


@inlined
def _in_order(
    jobs: Records,
    rows: NDArray[np.int64],
    waiting: NDArray[np.int64],
    t_last_s: NDArray[np.float64],
    now_s: float,
    terms: OfferTerms,
    measured: MeasuredJobs,
) -> NDArray[np.int64]:
    """Positions of the waiting jobs in the order of the offers.

    They are ordered by the user's priority, then Nw_sens, then the longest wait, then submission. (The paper's further
    key, GPUs that a job holds already, is always 0, because only jobs without any are offered GPUs.)
    """
    score = np.empty(rows.size)
    for i in waiting:
        wait = (now_s - t_last_s[i]) / terms.lease_s
        score[i] = nw_sens(measured.ran_s[i], measured.talked_s[i]) - terms.ageing * wait
    # A merge sort: runs of equal length, then twice as long ones. NumPy's, by three keys, takes two seconds to compile.
    order, merged, length = waiting.copy(), waiting.copy(), 1
    while length < order.size:
        for begins in range(0, order.size, 2 * length):
            left, middle, right = begins, min(begins + length, order.size), begins + length
            end = min(begins + 2 * length, order.size)
            for at in range(begins, end):
                if left < middle and (
                    right >= end or not _goes_before(jobs, rows, score, t_last_s, order[right], order[left])
                ):
                    merged[at] = order[left]
                    left += 1
                else:
                    merged[at] = order[right]
                    right += 1
        order, merged = merged, order
        length *= 2
    return order


@inner
def _goes_before(
    jobs: Records, rows: NDArray[np.int64], score: NDArray[np.float64], t_last_s: NDArray[np.float64], i: int, k: int
) -> bool:
    """Whether the job at position `i` is offered GPUs before the one at `k`, by more than submission."""
    urgent_i, urgent_k = jobs[rows[i]].priority, jobs[rows[k]].priority
    if urgent_i != urgent_k:
        return urgent_i > urgent_k
    return score[i] < score[k] or (score[i] == score[k] and t_last_s[i] < t_last_s[k])


# --- the offer round --------------------------------------------------------------------------------------------------


@maker
def offer_round(
    table: JobTable,
    machine: Machine,
    sketch: Sketch,
    strategy: Strategy,
    gang_classes: int,
    rows: NDArray[np.int64],
    ids: NDArray[np.int64],
    now_s: float,
    terms: OfferTerms,
    leases: Leases,
    waits: Waits,
    measured: MeasuredJobs,
    slowdowns: NDArray[np.float64],
) -> tuple[
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int64],
    float,
    tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_], bool],
    tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]],
]:
    """Offer all free GPUs, with those of ended leases, to each waiting job in turn."""
    m, jobs, count = sketch.machine, table.jobs, rows.size
    copy_state(machine, m)
    trial = JobTable(jobs, sketch.slots, table.quotas.copy())
    end_s, loose = _read_leases(jobs, rows, ids, now_s, terms.lease_s, leases)
    fate, t_last_s = np.full(count, NO_GPUS, dtype=np.int64), np.empty(count)
    width, waiting, waits_for = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64), 0
    for i in range(count):
        row = rows[i]
        job = jobs[row]
        t_last_s[i], width[i] = job.since_s, job.width
        if job.phase == HELD:
            copy_numbers(gpus_of(table, row), gpus_of(trial, row))
            if end_s[i] > now_s:
                fate[i] = HOLDS
                charge_quota(trial, row)
                continue
            release(m, gpus_of(table, row))
            t_last_s[i] = now_s  # a job that loses a lease waits from that instant on
        waiting[waits_for] = i
        waits_for += 1
    queue = _in_order(jobs, rows, waiting[:waits_for], t_last_s, now_s, terms, measured)
    largest = _largest(m)
    refused = np.zeros((gang_classes, TIER_CLUSTER + 1), dtype=np.bool_)
    timer_s = np.full((count, 2), NEVER)  # when the timers of each job end, for jobs that had to look at them
    open_kinds = (1 << m.kinds.size) - 1
    known = waits.key.size
    waits = with_room(waits, queue.size)
    for turn in range(queue.size):
        i = int(queue[turn])
        row = rows[i]
        job = jobs[row]
        if not within_quota(trial, row):
            fate[i] = OVER_QUOTA
            continue
        kinds = job.kinds & open_kinds
        if not terms.reserve_large and not _enough(m, kinds, job.gpus):
            continue
        key = job.gpus + ((job.model + 1) << 32) if terms.by_model else job.gpus
        machine_wait, rack_wait = terms.machine_wait, terms.rack_wait
        if terms.auto:
            machine_wait, rack_wait = tune(waits, known, key, terms.history)
        timer_s[i, ON_MACHINE] = t_last_s[i] + machine_wait * terms.lease_s
        timer_s[i, IN_RACK] = t_last_s[i] + rack_wait * terms.lease_s
        if terms.skips:
            _skip_costly(measured.progress_s[i], t_last_s[i], slowdowns[i], timer_s[i])
        if job.gpus > _most(largest, job.kinds, ON_MACHINE):  # a job that no machine can hold need not wait for one
            timer_s[i, ON_MACHINE] = t_last_s[i]
        if job.gpus > _most(largest, job.kinds, IN_RACK):
            timer_s[i, IN_RACK] = t_last_s[i]
        tier = NOWHERE
        if _enough(m, kinds, job.gpus):
            tier = _decide(table, trial, m, strategy, row, kinds, now_s, end_s[i] <= now_s, timer_s[i], refused, terms)
            fate[i] = HOLDS if tier < NOWHERE else BETTER_PLACE
        if tier < NOWHERE:
            charge_quota(trial, row)
            end_s[i], width[i] = now_s + terms.lease_s, job.gpus
            loose[i] = _is_loose(job, tier, nodes_spanned(m, trial.slots[job.first_slot : job.first_slot + job.gpus]))
            if terms.auto and tier < TIER_CLUSTER:
                offer = ON_MACHINE if tier <= TIER_NODE else IN_RACK
                wait = (now_s - t_last_s[i]) / terms.lease_s
                known = record(waits, known, key, offer, now_s, wait, now_s - terms.history * terms.lease_s)
        elif terms.reserve_large and timer_s[i, IN_RACK] <= now_s and job.gpus > _most(largest, job.kinds, ON_MACHINE):
            open_kinds &= ~job.kinds
    return _answer(table, trial, m, rows, ids, now_s, fate, width, end_s, loose, timer_s, first(waits, known))


@inlined
def _read_leases(
    jobs: Records,
    rows: NDArray[np.int64],
    ids: NDArray[np.int64],
    now_s: float,
    lease_s: float,
    leases: Leases,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """When each job's lease ends (never, if it has none), and whether the job could lie closer together.

    A job that was started by other means is on lease from then on.
    """
    end_s, loose = np.full(rows.size, NEVER), np.zeros(rows.size, dtype=np.bool_)
    at = 0
    for i in range(rows.size):
        job = jobs[rows[i]]
        while at < leases.ids.size and leases.ids[at] < ids[i]:
            at += 1
        if job.phase != HELD:
            continue
        end_s[i], loose[i] = job.since_s + lease_s, _is_loose(job, job.tier, job.nodes)
        if at < leases.ids.size and leases.ids[at] == ids[i]:
            end_s[i], loose[i] = leases.end_s[at], leases.loose[at]
            while leases.unrivalled and not loose[i] and end_s[i] < now_s:
                end_s[i] += lease_s
    return end_s, loose


@inner
def _is_loose(job: Record, tier: int, nodes: int) -> bool:
    """Whether a placement is wider than the job's best; only then can the end of a lease change it without rivals."""
    return tier > max(TIER_NODE, job.best_tier) or nodes > job.min_nodes


@inlined
def _skip_costly(
    progress_s: float, t_last_s: float, slowdown: NDArray[np.float64], timer_s: NDArray[np.float64]
) -> None:
    """End the timers that cost more than they can save.

    Nobody knows how much work remains; as much as is done already is the usual guess where long jobs tend to go on. For
    a job whose progress was not measured (NaN) nothing is guessed, and its timers stay.
    """
    remaining_s = progress_s
    if timer_s[ON_MACHINE] - t_last_s > remaining_s * slowdown[ON_MACHINE]:
        timer_s[ON_MACHINE] = t_last_s
    if timer_s[IN_RACK] - t_last_s > remaining_s * slowdown[IN_RACK]:  # a machine implies a rack
        timer_s[IN_RACK] = min(timer_s[IN_RACK], timer_s[ON_MACHINE])


@inner
def _decide(
    table: JobTable,
    trial: JobTable,
    m: Machine,
    strategy: Strategy,
    row: int,
    kinds: int,
    now_s: float,
    over: bool,
    timer_s: NDArray[np.float64],
    refused: NDArray[np.bool_],
    terms: OfferTerms,
) -> int:
    """Accept or reject: the tier in which a job takes free GPUs, or NOWHERE if it rejects the offer."""
    job = table.jobs[row]
    out = trial.slots[job.first_slot : job.first_slot + job.gpus]
    own, own_tier = gpus_of(table, row), NOWHERE  # the GPUs of the lease that ends now
    if over and job.width == job.gpus and (kinds >> job.node_kind) & 1 and all_free(m, own):
        own_tier = tier_spanned(m, own)
    if job.want_nodes > 0:  # the user fixed the shape, so there is nothing to wait for
        return _as_the_user_wants(m, strategy, row, job, kinds, out, own, own_tier)
    if _take_within(m, row, job, kinds, TIER_NODE, out, own, own_tier, refused):
        return TIER_NODE
    if now_s >= timer_s[ON_MACHINE] and _take_within(m, row, job, kinds, TIER_RACK, out, own, own_tier, refused):
        return TIER_RACK
    if now_s >= timer_s[IN_RACK] and _take_within(m, row, job, kinds, TIER_CLUSTER, out, own, own_tier, refused):
        return TIER_CLUSTER
    if terms.keep_place and own_tier < NOWHERE:
        occupy(m, row, own)
        return own_tier
    return NOWHERE


@inner_maker
def _take_within(
    m: Machine,
    row: int,
    job: Record,
    kinds: int,
    tier: int,
    out: NDArray[np.int64],
    own: NDArray[np.int64],
    own_tier: int,
    refused: NDArray[np.bool_],
) -> bool:
    """Take the best fit inside one instance of this tier; a job that sits there already stays, if on no more nodes."""
    if own_tier <= TIER_NODE:
        occupy(m, row, own)
        return True
    if refused[job.gang_class, tier]:  # free GPUs only get fewer during a round
        return False
    placed = tier == TIER_NODE and _best_kind_within(m, row, job, kinds, TIER_GROUP, out)
    if not placed and not _best_kind_within(m, row, job, kinds, tier, out):
        refused[job.gang_class, tier] = True
        return False
    if own_tier <= tier and nodes_spanned(m, own) <= nodes_spanned(m, out):
        release(m, out)
        occupy(m, row, own)
        copy_numbers(own, out)
    return True


@inner
def _best_kind_within(m: Machine, row: int, job: Record, kinds: int, tier: int, out: NDArray[np.int64]) -> bool:
    """A gang trains on one kind of node; the kinds with most free GPUs are tried first."""
    while kinds != 0:
        best = -1
        for kind in range(m.kinds.size):
            if (kinds >> kind) & 1 and (best < 0 or m.kinds[kind].free > m.kinds[best].free):
                best = kind
        if place_within(m, row, best, job.gpus, tier, out):
            return True
        kinds &= ~(1 << best)
    return False


@inlined
def _as_the_user_wants(
    m: Machine,
    strategy: Strategy,
    row: int,
    job: Record,
    kinds: int,
    out: NDArray[np.int64],
    own: NDArray[np.int64],
    own_tier: int,
) -> int:
    if own_tier < NOWHERE:
        occupy(m, row, own)
        return TIER_CLUSTER
    for kind in range(m.kinds.size):
        if (kinds >> kind) & 1 and place(
            m, strategy, row, job.id, job.holds, kind, job.gpus, job.want_nodes, job.skew, out
        ):
            return TIER_CLUSTER
    return NOWHERE


@inner
def _enough(m: Machine, kinds: int, gpus: int) -> bool:
    for kind in range(m.kinds.size):  # noqa: SIM110 - Numba compiles no generators
        if (kinds >> kind) & 1 and m.kinds[kind].free >= gpus:
            return True
    return False


@inlined
def _largest(m: Machine) -> NDArray[np.int64]:
    """[kind, machine or rack]: the most GPUs that one of them could ever give, without blocked ones."""
    largest = np.zeros((m.kinds.size, 2), dtype=np.int64)
    racks = np.zeros((m.rack_free.shape[0], m.kinds.size), dtype=np.int64)
    for at in range(m.nodes.size):
        node, count = m.nodes[at], 0
        for gpu in range(node.first, node.first + node.gpus):
            count += m.gpus[gpu].owner != BLOCKED
        racks[node.rack, node.node_kind] += count
        largest[node.node_kind, ON_MACHINE] = max(largest[node.node_kind, ON_MACHINE], count)
    for rack in range(racks.shape[0]):
        for kind in range(m.kinds.size):
            largest[kind, IN_RACK] = max(largest[kind, IN_RACK], racks[rack, kind])
    return largest


@inner
def _most(largest: NDArray[np.int64], kinds: int, domain: int) -> int:
    most = 0
    for kind in range(largest.shape[0]):
        if (kinds >> kind) & 1:
            most = max(most, largest[kind, domain])
    return most


@inlined
def _answer(
    table: JobTable,
    trial: JobTable,
    m: Machine,
    rows: NDArray[np.int64],
    ids: NDArray[np.int64],
    now_s: float,
    fate: NDArray[np.int64],
    width: NDArray[np.int64],
    end_s: NDArray[np.float64],
    loose: NDArray[np.bool_],
    timer_s: NDArray[np.float64],
    waits: Waits,
) -> tuple[
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int64],
    float,
    tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_], bool],
    tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]],
]:
    """Holders, their GPUs, the fates of all jobs, the next instant that matters, and what to remember."""
    holders, total, wake_s = 0, 0, _next_timer_s(table.jobs, m, rows, now_s, fate, timer_s)
    for i in range(rows.size):
        if fate[i] == HOLDS:
            holders += 1
            total += width[i]
    unrivalled = holders == rows.size
    kept, kept_ids = np.empty(holders, dtype=np.int64), np.empty(holders, dtype=np.int64)
    counts = np.empty(holders, dtype=np.int64)
    kept_end_s, kept_loose = np.empty(holders), np.empty(holders, dtype=np.bool_)
    gpus = np.empty(total, dtype=np.int64)
    n, at = 0, 0
    for i in range(rows.size):
        if fate[i] != HOLDS:
            continue
        first_slot = table.jobs[rows[i]].first_slot
        kept[n], kept_ids[n], counts[n] = rows[i], ids[i], width[i]
        kept_end_s[n], kept_loose[n] = end_s[i], loose[i]
        copy_numbers(trial.slots[first_slot : first_slot + width[i]], gpus[at:])
        at += width[i]
        n += 1
        if loose[i] or not unrivalled:
            wake_s = min(wake_s, end_s[i])
    leases = (kept_ids, kept_end_s, kept_loose, unrivalled)
    return kept, counts, gpus, fate, wake_s, leases, (waits.key, waits.offer, waits.at_s, waits.leases)


@inlined
def _next_timer_s(
    jobs: Records,
    m: Machine,
    rows: NDArray[np.int64],
    now_s: float,
    fate: NDArray[np.int64],
    timer_s: NDArray[np.float64],
) -> float:
    """The first instant at which a timer ends that keeps a job from GPUs which are free."""
    rack_free = np.zeros(m.kinds.size, dtype=np.int64)
    for rack in range(m.rack_free.shape[0]):
        for kind in range(m.kinds.size):
            rack_free[kind] = max(rack_free[kind], m.rack_free[rack, kind])
    next_s = NEVER
    for i in range(rows.size):
        if fate[i] != BETTER_PLACE:
            continue
        job, machine_s, rack_s = jobs[rows[i]], timer_s[i, ON_MACHINE], timer_s[i, IN_RACK]
        for kind in range(m.kinds.size):
            if (job.kinds >> kind) & 1:
                if machine_s > now_s and machine_s < next_s and rack_free[kind] >= job.gpus:
                    next_s = machine_s
                if rack_s > now_s and rack_s < next_s and m.kinds[kind].free >= job.gpus:
                    next_s = rack_s
    return next_s


_offer_round = entry(offer_round)
