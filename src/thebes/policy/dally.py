"""Dally (Sharma et al., arXiv 2401.16492): leases, offers and delay timers for jobs that the network slows down.

GPUs are leased for a fixed time. Whatever is free is offered to the waiting jobs, those first that communication has
slowed down most; a job refuses GPUs that lie too far apart until it has waited long enough, and the offer passes on.
When a lease ends, the GPUs are offered again to everybody, their holder included: losing them is Dally's preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Record, compiled, entry, inner
from thebes.model.decision import BETTER_PLACE, HOLDS, NO_GPUS, OVER_QUOTA, Decision
from thebes.model.errors import UserError, nearest
from thebes.model.jobs import HELD, NEVER, JobTable, gpus_of
from thebes.model.machine import BLOCKED, Machine, all_free, copy_state, nodes_spanned, occupy, release, tier_spanned
from thebes.model.parameters import parameter
from thebes.model.profiles import TIER_CLUSTER, TIER_GROUP, TIER_NODE, TIER_RACK
from thebes.model.view import PROFILES, JobsView, Sketch, View
from thebes.placement.by_tier import place_within
from thebes.placement.strategies import Strategy, place
from thebes.policy.base import Policy
from thebes.policy.dally_tuner import (
    IN_RACK,
    ON_MACHINE,
    Tuner,
    cut_to,
    fixed,
    recorded,
    untaught,
    with_keys,
    with_room,
)
from thebes.policy.fill import charge_quota, within_quota

AUTO, MANUAL, NO_WAIT, CONSOLIDATED = "auto", "manual", "no-wait", "consolidated"
TIMERS = (AUTO, MANUAL, NO_WAIT, CONSOLIDATED)
NOWHERE = 9  # wider than any tier


class Memory(NamedTuple):
    """What Dally knows from one decision to the next."""

    rows: NDArray[np.int64]  # the jobs on lease, ascending
    lease_end_s: NDArray[np.float64]
    tuner: Tuner


@dataclass(frozen=True)
class Dally(Policy):
    """Leases GPUs; the jobs that the network hurts most choose first, and wait for close GPUs as long as it has paid.

    A job accepts GPUs on one machine at once, GPUs in one rack after its first timer, any GPUs after its second.
    """

    name: ClassVar[str] = "dally"
    paper: ClassVar[str] = "Dally (arXiv 2401.16492), as its released code does it, with best fit and without its leaks"

    timers: str = parameter(AUTO, f"how long jobs wait for close GPUs: {', '.join(TIMERS)}")
    lease_s: float = parameter(3600.0, "length of a lease, in seconds", low=1.0)
    machine_wait: float = parameter(12.0, "manual: leases to insist on one machine (D1)", low=0)
    rack_wait: float = parameter(24.0, "manual: leases to insist on one rack (D2), from the same instant", low=0)
    history: float = parameter(24.0, "auto: leases that the tuner looks back (H)", low=1)
    keep_place: bool = parameter(
        False, "beyond the paper: at the lease end stay, timer or not, unless somebody took it"
    )
    tuner_by_model: bool = parameter(False, "beyond the paper: the tuner learns per GPU demand and model")
    skip_costly_waits: bool = parameter(
        False, "beyond the paper: no wait that is longer than what it would save (needs profiles)"
    )
    ageing: float = parameter(0.0, "beyond the paper: how much a job's score falls with each lease waited", low=0)
    reserve_large: bool = parameter(
        False, "beyond the paper: what is free goes to nobody behind a job that no machine can hold, its timers over"
    )

    def __post_init__(self) -> None:
        if self.timers not in TIMERS:
            raise UserError(f"dally: timers={self.timers} is unknown", hint=nearest(self.timers, TIMERS))
        if self.skip_costly_waits:
            object.__setattr__(self, "needs", frozenset({PROFILES}))

    def decide(self, view: View) -> Decision:
        jobs, now_s = view.jobs, view.now_s
        memory = view.memory if isinstance(view.memory, Memory) else self._start()
        lease_end_s = self._lease_ends(jobs, memory)
        over = lease_end_s <= now_s
        t_last_s = np.where(jobs.running, now_s, jobs.since_s)  # who lost a lease waits from that instant on
        queue = self._queue(jobs, np.flatnonzero(~jobs.running | over), t_last_s, now_s)
        keys, tuner = self._keys(jobs), memory.tuner
        if self.timers == AUTO:
            tuner = with_keys(tuner, keys, self.history)
        at = np.searchsorted(tuner.keys, keys)
        offers = Offers(jobs.rows, queue, over, t_last_s, at, self._skips(jobs, tuner, at))
        room = with_room(tuner, len(queue)) if self.timers == AUTO else tuner
        terms = Terms(now_s, self.lease_s, self.history, self.timers == AUTO, self.keep_place, self.reserve_large)
        fate = np.full(len(jobs), NO_GPUS, dtype=np.int64)
        waits, wake_s = _offer_round(
            view._table, view.machine, view._sketch, view._strategy, view._gang_classes, offers, terms, room,
            len(tuner.key), fate,
        )  # fmt: skip
        holds = fate == HOLDS
        new_lease = holds & (~jobs.running | over)
        lease_end_s[new_lease] = now_s + self.lease_s
        ends_s = lease_end_s[holds]
        counts = np.where(new_lease, jobs.gpus, jobs.width)[holds]
        return Decision(
            rows=jobs.rows[holds],
            gpus=_collected(view._table, view._sketch.slots, jobs.rows[holds], counts),
            fate=fate,
            wake_s=float(min(wake_s, ends_s.min() if len(ends_s) else NEVER)),
            memory=Memory(jobs.rows[holds], ends_s, cut_to(room, waits)),
            counts=counts,
        )

    def _start(self) -> Memory:
        nobody = np.zeros(0, dtype=np.int64)
        if self.timers == AUTO:
            tuner = untaught(nobody, self.history)
        else:
            chosen = {MANUAL: (self.machine_wait, self.rack_wait), NO_WAIT: (0.0, 0.0), CONSOLIDATED: (NEVER, NEVER)}
            tuner = fixed(*chosen[self.timers])
        return Memory(nobody, np.zeros(0), tuner)

    def _lease_ends(self, jobs: JobsView, memory: Memory) -> NDArray[np.float64]:
        """When each job's lease ends; never for those without one. Who was started by others is on lease since then."""
        ends_s = np.where(jobs.running, jobs.since_s + self.lease_s, NEVER)
        if len(memory.rows):
            at = np.minimum(np.searchsorted(memory.rows, jobs.rows), len(memory.rows) - 1)
            leased = jobs.running & (memory.rows[at] == jobs.rows)
            ends_s[leased] = memory.lease_end_s[at[leased]]
        return ends_s

    def _queue(
        self, jobs: JobsView, waiting: NDArray[np.int64], t_last_s: NDArray[np.float64], now_s: float
    ) -> NDArray[np.int64]:
        """The order of the offers: positions in the View. Nobody here holds GPUs, so the paper's second key is idle."""
        score = nw_sens(jobs)[waiting]
        if self.ageing > 0:
            score = score - self.ageing * (now_s - t_last_s[waiting]) / self.lease_s
        return waiting[np.lexsort((t_last_s[waiting], score, -jobs.priority[waiting]))]

    def _keys(self, jobs: JobsView) -> NDArray[np.int64]:
        """What the tuner tells jobs apart by."""
        if self.timers != AUTO:
            return np.zeros(len(jobs), dtype=np.int64)
        return jobs.gpus + ((jobs.model + 1) << 32) if self.tuner_by_model else jobs.gpus

    def _skips(self, jobs: JobsView, tuner: Tuner, at: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whose wait for a machine, and for a rack, would cost more than it can save.

        How much work remains nobody knows; as much as is done already is the best guess where long jobs tend to go on.
        """
        if not self.skip_costly_waits:
            return np.zeros((len(jobs), 2), dtype=np.bool_)
        with np.errstate(divide="ignore", invalid="ignore"):
            machine, rack, cluster = (1.0 / jobs.speed_in(tier) for tier in (TIER_NODE, TIER_RACK, TIER_CLUSTER))
            saved_s = jobs.progress_s * np.nan_to_num((rack - machine, cluster - rack), posinf=NEVER)
        waits_s = np.stack((tuner.machine_wait[at], tuner.rack_wait[at])) * self.lease_s
        return np.ascontiguousarray((waits_s > np.nan_to_num(saved_s)).T)


@dataclass(frozen=True)
class DallyManual(Dally):
    """Dally with fixed timers: twelve leases for one machine, twenty-four for one rack."""

    name: ClassVar[str] = "dally-manual"
    timers: str = parameter(MANUAL, f"how long jobs wait for close GPUs: {', '.join(TIMERS)}")


@dataclass(frozen=True)
class DallyNoWait(Dally):
    """Dally without timers: a job takes the closest GPUs that are free, however far apart."""

    name: ClassVar[str] = "dally-no-wait"
    timers: str = parameter(NO_WAIT, f"how long jobs wait for close GPUs: {', '.join(TIMERS)}")


@dataclass(frozen=True)
class DallyConsolidated(Dally):
    """Dally whose timers never end: a job waits for one machine, or for one rack if no machine could hold it."""

    name: ClassVar[str] = "dally-consolidated"
    timers: str = parameter(CONSOLIDATED, f"how long jobs wait for close GPUs: {', '.join(TIMERS)}")


def nw_sens(jobs: JobsView) -> NDArray[np.float64]:
    """Nw_sens: the mean efficiency of a job's running time so far, compute / (compute + exposed communication).

    It is 0 before the first run: who never ran chooses first. Rounded, so that equal jobs are equal to the last bit.
    """
    ran_s = jobs.ran_s
    efficiency = np.where(ran_s > 0, 1.0 - jobs.talked_s / np.where(ran_s > 0, ran_s, 1.0), 0.0)
    return efficiency.round(9)


# --- the offer round --------------------------------------------------------------------------------------------------


class Offers(NamedTuple):
    """Per job of the View, and the positions of those that offers are made to, in their order."""

    rows: NDArray[np.int64]
    queue: NDArray[np.int64]
    over: NDArray[np.bool_]  # its lease ends now
    t_last_s: NDArray[np.float64]  # since when it waits
    key: NDArray[np.int64]  # position of its timers in the tuner
    skips: NDArray[np.bool_]  # [job, timer]: this timer does not count


class Terms(NamedTuple):
    """What holds for all offers of a round."""

    now_s: float
    lease_s: float
    history: float
    learns: bool
    keep_place: bool
    reserve_large: bool


@compiled
def offer_round(
    table: JobTable,
    machine: Machine,
    sketch: Sketch,
    strategy: Strategy,
    gang_classes: int,
    offers: Offers,
    terms: Terms,
    tuner: Tuner,
    waits: int,
    fate: NDArray[np.int64],
) -> tuple[int, float]:
    """Offer all free GPUs, those of ended leases among them, to each job in turn.

    Returns how many waits the tuner now remembers, and the next instant at which a timer would let a job accept.
    """
    m, jobs = sketch.machine, table.jobs
    copy_state(machine, m)
    trial = JobTable(jobs, sketch.slots, table.quotas.copy())
    for i in range(offers.rows.size):
        row = offers.rows[i]
        if jobs[row].phase == HELD:
            gpus_of(trial, row)[:] = gpus_of(table, row)
            if offers.over[i]:
                release(m, gpus_of(table, row))
            else:
                fate[i] = HOLDS
                charge_quota(trial, row)
    largest = _largest(m)
    refused = np.zeros((gang_classes, TIER_CLUSTER + 1), dtype=np.bool_)
    open_kinds = (1 << m.kinds.size) - 1
    for turn in range(offers.queue.size):
        i = int(offers.queue[turn])
        row = offers.rows[i]
        if not within_quota(trial, row):
            fate[i] = OVER_QUOTA
            continue
        kinds = jobs[row].kinds & open_kinds
        if not _enough(m, kinds, jobs[row].gpus):
            fate[i] = NO_GPUS
        else:
            tier = _decide(table, trial, m, strategy, kinds, offers, terms, tuner, i, largest, refused)
            if tier < NOWHERE:
                fate[i] = HOLDS
                charge_quota(trial, row)
                if terms.learns and tier < TIER_CLUSTER:
                    wait = (terms.now_s - offers.t_last_s[i]) / terms.lease_s
                    kept = ON_MACHINE if tier <= TIER_NODE else IN_RACK
                    waits = recorded(tuner, waits, offers.key[i], kept, terms.now_s, wait, terms.history, terms.lease_s)
            else:
                fate[i] = BETTER_PLACE
        if terms.reserve_large and fate[i] != HOLDS and _may_reserve(jobs[row], offers, terms, tuner, i, largest):
            open_kinds &= ~jobs[row].kinds
    return waits, _next_timer_s(jobs, m, offers, terms, tuner, fate)


@inner
def _decide(
    table: JobTable,
    trial: JobTable,
    m: Machine,
    strategy: Strategy,
    kinds: int,
    offers: Offers,
    terms: Terms,
    tuner: Tuner,
    i: int,
    largest: NDArray[np.int64],
    refused: NDArray[np.bool_],
) -> int:
    """Accept or reject: the tier in which a job takes GPUs of what is free, NOWHERE if it rejects the offer."""
    row = offers.rows[i]
    job = table.jobs[row]
    out = trial.slots[job.first_slot : job.first_slot + job.gpus]
    own = gpus_of(table, row)[: job.width if offers.over[i] else 0]  # the GPUs of the lease that ends now
    own_tier = NOWHERE
    if own.size == job.gpus and (kinds >> job.node_kind) & 1 and all_free(m, own):
        own_tier = tier_spanned(m, own)
    if job.want_nodes > 0:  # the user fixed the shape: there is nothing to wait for
        return _as_the_user_wants(m, strategy, row, job, kinds, out, own, own_tier)
    if _take_within(m, row, job, kinds, TIER_NODE, out, own, own_tier, refused):
        return TIER_NODE
    if (
        _expired(offers, terms, tuner.machine_wait, i, ON_MACHINE) or job.gpus > _most(largest, job.kinds, ON_MACHINE)
    ) and _take_within(m, row, job, kinds, TIER_RACK, out, own, own_tier, refused):
        return TIER_RACK
    if (
        _expired(offers, terms, tuner.rack_wait, i, IN_RACK) or job.gpus > _most(largest, job.kinds, IN_RACK)
    ) and _take_within(m, row, job, kinds, TIER_CLUSTER, out, own, own_tier, refused):
        return TIER_CLUSTER
    if terms.keep_place and own_tier < NOWHERE:
        occupy(m, row, own)
        return own_tier
    return NOWHERE


@inner
def _expired(offers: Offers, terms: Terms, wait: NDArray[np.float64], i: int, timer: int) -> bool:
    return offers.skips[i, timer] or terms.now_s >= offers.t_last_s[i] + wait[offers.key[i]] * terms.lease_s


@inner
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
    if refused[job.gang_class, tier]:  # free GPUs only get fewer while a round lasts
        return False
    placed = tier == TIER_NODE and _best_kind_within(m, row, job, kinds, TIER_GROUP, out)
    if not placed and not _best_kind_within(m, row, job, kinds, tier, out):
        refused[job.gang_class, tier] = True
        return False
    if own_tier <= tier and nodes_spanned(m, own) <= nodes_spanned(m, out):
        release(m, out)
        occupy(m, row, own)
        out[:] = own
    return True


@inner
def _best_kind_within(m: Machine, row: int, job: Record, kinds: int, tier: int, out: NDArray[np.int64]) -> bool:
    """A gang trains on one kind of node: those with most free GPUs are tried first."""
    while kinds != 0:
        best = -1
        for kind in range(m.kinds.size):
            if (kinds >> kind) & 1 and (best < 0 or m.kinds[kind].free > m.kinds[best].free):
                best = kind
        if best < 0:
            return False
        if place_within(m, row, best, job.gpus, tier, out):
            return True
        kinds &= ~(1 << best)
    return False


@inner
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
        if (kinds >> kind) & 1 and place(m, strategy, row, job.holds, kind, job.gpus, job.want_nodes, job.skew, out):
            return TIER_CLUSTER
    return NOWHERE


@inner
def _enough(m: Machine, kinds: int, gpus: int) -> bool:
    for kind in range(m.kinds.size):  # noqa: SIM110 - Numba compiles no generators
        if (kinds >> kind) & 1 and m.kinds[kind].free >= gpus:
            return True
    return False


@inner
def _largest(m: Machine) -> NDArray[np.int64]:
    """[kind, 0 machine or 1 rack]: the most GPUs that one of them could ever give, blocked ones left out."""
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


@inner
def _may_reserve(job: Record, offers: Offers, terms: Terms, tuner: Tuner, i: int, largest: NDArray[np.int64]) -> bool:
    """A gang that no machine can hold and that would by now take any GPUs keeps what is free from those behind it."""
    return job.gpus > _most(largest, job.kinds, ON_MACHINE) and _expired(offers, terms, tuner.rack_wait, i, IN_RACK)


@inner
def _next_timer_s(
    jobs: Record, m: Machine, offers: Offers, terms: Terms, tuner: Tuner, fate: NDArray[np.int64]
) -> float:
    """The first instant at which a timer ends that keeps a job from GPUs which are free."""
    rack_free = np.zeros(m.kinds.size, dtype=np.int64)
    for rack in range(m.rack_free.shape[0]):
        for kind in range(m.kinds.size):
            rack_free[kind] = max(rack_free[kind], m.rack_free[rack, kind])
    next_s = NEVER
    for turn in range(offers.queue.size):
        i = int(offers.queue[turn])
        if fate[i] != BETTER_PLACE:
            continue
        job, since_s, at = jobs[offers.rows[i]], offers.t_last_s[i], offers.key[i]
        machine_s = since_s + tuner.machine_wait[at] * terms.lease_s
        rack_s = since_s + tuner.rack_wait[at] * terms.lease_s
        for kind in range(m.kinds.size):
            if (job.kinds >> kind) & 1:
                if terms.now_s < machine_s < next_s and rack_free[kind] >= job.gpus:
                    next_s = machine_s
                if terms.now_s < rack_s < next_s and m.kinds[kind].free >= job.gpus:
                    next_s = rack_s
    return next_s


@compiled
def collected(
    table: JobTable, slots: NDArray[np.int64], rows: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The GPUs of these jobs, so many each, one after the other."""
    gpus = np.empty(counts.sum(), dtype=np.int64)
    at = 0
    for i in range(rows.size):
        first = table.jobs[rows[i]].first_slot
        for j in range(counts[i]):
            gpus[at] = slots[first + j]
            at += 1
    return gpus


_offer_round, _collected = entry(offer_round), entry(collected)
