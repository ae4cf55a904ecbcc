"""Ada-SRSF and the SRSF(n) baselines: several jobs on a GPU, and communication that waits for a free network.

Wang et al., "Communication contention aware scheduling of multiple deep learning training jobs" (arXiv 2002.10105).
Jobs are placed by LWF-kappa (thebes.placement.lwf) in order of their service, stay where they are until they end, and
take turns on shared GPUs, the one with the least remaining service first. An all-reduce that is ready asks to start:
AdaDUAL lets it meet one other transfer if that makes the sum of both finish times smaller, SRSF(n) up to n - 1 others.
The turns and the transfers are played out, iteration by iteration, in thebes.sim.iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, entry, inlined, inner, maker
from thebes.model.decision import HOLDS, MAX_SHARERS, NO_GPUS, OVER_QUOTA, Decision
from thebes.model.errors import UserError, nearest
from thebes.model.facts import DURATIONS, PROFILES
from thebes.model.jobs import HELD, JobTable, copy_numbers, gpus_of
from thebes.model.machine import BLOCKED, Machine, tier_spanned
from thebes.model.parameters import parameter
from thebes.model.view import View
from thebes.placement import Count, Lwf, Placement, Random
from thebes.placement.lwf import CHOICES, choose
from thebes.policy.base import ITERATIONS, Policy

ADA_DUAL = "ada-dual"
SRSF = "srsf"
ADMISSIONS = (ADA_DUAL, SRSF)
_SLACK = 1e-9  # memory that adds up to exactly what a GPU has still fits


@inner
def cost_of_contention(k: int, eta_over_b: float) -> float:
    """How many times as long k transfers on a link take as one alone: (k*b + (k-1)*eta) / b."""
    return k + (k - 1) * eta_over_b


@compiled
def all_reduce_s(size_mb: float, k: int, a_s: float, b_s_per_mb: float, eta_s_per_mb: float) -> float:
    """Time of an all-reduce among k of them on its busiest node: a + k*b*M + (k-1)*eta*M."""
    return a_s + b_s_per_mb * size_mb * cost_of_contention(k, eta_s_per_mb / b_s_per_mb)


@compiled
def ada_dual_bound(eta_over_b: float) -> float:
    """The largest M_new / M_rest at which starting beside one other transfer beats waiting: b / (2*(b + eta))."""
    return 0.5 / (1.0 + eta_over_b)


@dataclass(frozen=True)
class AdaSrsf(Policy):
    """Ada-SRSF: GPUs hold several jobs, LWF-kappa places them, AdaDUAL admits their all-reduces. An oracle.

    Jobs never move. A GPU runs one task at a time, of the job with the least remaining service; jobs that span nodes
    exchange gradients after every iteration, and meet at most one other transfer.
    """

    name: ClassVar[str] = "ada-srsf"
    paper: ClassVar[str] = "LWF-kappa, AdaDUAL and Ada-SRSF (arXiv 2002.10105)"
    needs: ClassVar[frozenset[str]] = frozenset({DURATIONS, PROFILES})
    shares: ClassVar[bool] = True
    grain: ClassVar[str] = ITERATIONS

    placement: str = parameter("lwf", "lwf, first-fit or random")
    kappa: int = parameter(1, "lwf: jobs of up to so many GPUs are spread, larger ones consolidated", low=0)
    admission: str = parameter(ADA_DUAL, "of all-reduces: ada-dual, or srsf with n")
    n: int = parameter(1, "srsf: so many transfers may meet on a node", low=1)
    a_ms: float = parameter(0.0, "latency of an all-reduce", low=0)
    b_ms_per_mb: float = parameter(0.856, "all-reduce time per MB without contention (10 GbE)")
    eta_ms_per_mb: float = parameter(0.235, "extra time per MB and further transfer on the link", low=0)
    forward_share: float = parameter(
        0.4, "of an iteration's compute: between forward and backward a GPU may turn to another job; 0: one task", low=0
    )
    grain_s: float = parameter(
        900.0,
        "iterations are simulated in bundles of up to so many seconds, at least 40 per job; 0: one by one",
        low=0,
    )

    def __post_init__(self) -> None:
        self._one_of("placement", CHOICES)
        self._one_of("admission", ADMISSIONS)
        self._at_least("kappa", 0, "1 spreads single-GPU jobs only, which is best in the paper")
        self._at_least("n", 1, "n=1 lets no transfers meet")
        self._at_least("a_ms", 0, "the paper's simulator has 0")
        self._at_least("eta_ms_per_mb", 0, "10 GbE has 0.235")
        self._at_least("grain_s", 0, "0 simulates every iteration")
        if not 0.0 <= self.forward_share < 1.0:
            raise UserError(
                f"{self.name}: forward_share={self.forward_share:g} is no share of an iteration",
                hint="0.4 is that of the paper's models; with 0 forward and backward are one task",
            )
        if not (np.isfinite(self.b_ms_per_mb) and self.b_ms_per_mb > 0):
            raise UserError(
                f"{self.name}: b_ms_per_mb={self.b_ms_per_mb:g} is no bandwidth", hint="10 GbE has 0.856 ms per MB"
            )

    def _one_of(self, key: str, words: object) -> None:
        known = [str(word) for word in words] if isinstance(words, dict | tuple) else []
        if getattr(self, key) not in known:
            raise UserError(
                f"{self.name}: {key}={getattr(self, key)} is unknown", hint=nearest(getattr(self, key), known)
            )

    def _at_least(self, key: str, low: float, hint: str) -> None:
        value = getattr(self, key)
        if not (np.isfinite(value) and value >= low):
            raise UserError(f"{self.name}: {key}={value:g} must be at least {low:g}", hint=hint)

    def default_placement(self) -> Placement:
        """Its own placement, because no other one can put several jobs on a GPU."""
        return {"lwf": Lwf(self.kappa), "first-fit": Count(), "random": Random()}[self.placement]

    def ignores(self) -> Mapping[str, str]:
        return {
            "placement": f"it places several jobs on a GPU, by its own parameters {self.name}.placement="
            f"{self.placement} and {self.name}.kappa={self.kappa}",
            "contention": f"its transfers meet by its own law ({self.name}.b_ms_per_mb, {self.name}.eta_ms_per_mb)",
            "interference": "jobs on one GPU take turns, task by task, and do not slow each other down otherwise",
        }

    @property
    def eta_over_b(self) -> float:
        return self.eta_ms_per_mb / self.b_ms_per_mb

    @property
    def most_met(self) -> int:
        """How many other transfers a new one may meet on its nodes."""
        return 1 if self.admission == ADA_DUAL else self.n - 1

    @property
    def bound(self) -> float:
        """The largest M_new / M_rest of a transfer that may meet others."""
        return float(ada_dual_bound(self.eta_over_b)) if self.admission == ADA_DUAL else np.inf

    def decide(self, view: View) -> Decision:
        """Placed jobs stay; waiting jobs are placed by ascending service, and those that find no room go on waiting."""
        jobs = view.jobs
        waiting = np.flatnonzero(~jobs.running)
        service = (jobs.duration_s * jobs.gpus)[waiting]
        order = waiting[np.lexsort((jobs.rows[waiting], service, -jobs.priority[waiting]))]
        tier_speeds = np.stack([jobs.speed_in(tier) for tier in range(4)], axis=1)
        speed = np.where(np.isnan(jobs.speed), tier_speeds[np.arange(len(jobs)), jobs.tier], jobs.speed)
        fate, rows, gpus, shares = _place_waiting(
            view.board.table,
            view.machine,
            view.board.sketch.slots,
            jobs.rows,
            order,
            jobs.remaining_s,
            speed,  # as measured, or as profiled until then
            tier_speeds,
            CHOICES[self.placement],
            self.kappa,
            view.board.strategy.seed,
        )
        return Decision(rows=rows, gpus=gpus, fate=fate, shares=shares)


@dataclass(frozen=True)
class Srsf1(AdaSrsf):
    """SRSF(1): as Ada-SRSF, but transfers never meet. An oracle."""

    name: ClassVar[str] = "srsf-1"
    paper: ClassVar[str] = "baseline of Ada-SRSF (arXiv 2002.10105): contention is avoided altogether"

    admission: str = parameter(SRSF, "of all-reduces: ada-dual, or srsf with n")
    n: int = parameter(1, "srsf: so many transfers may meet on a node", low=1)


@dataclass(frozen=True)
class Srsf2(Srsf1):
    """SRSF(2): as Ada-SRSF, but any two transfers may meet on a node. An oracle."""

    name: ClassVar[str] = "srsf-2"
    paper: ClassVar[str] = "baseline of Ada-SRSF (arXiv 2002.10105): two-way contention is accepted"

    n: int = parameter(2, "srsf: so many transfers may meet on a node", low=1)


@dataclass(frozen=True)
class Srsf3(Srsf1):
    """SRSF(3): as Ada-SRSF, but any three transfers may meet on a node. An oracle."""

    name: ClassVar[str] = "srsf-3"
    paper: ClassVar[str] = "baseline of Ada-SRSF (arXiv 2002.10105): three-way contention is accepted"

    n: int = parameter(3, "srsf: so many transfers may meet on a node", low=1)


@maker
def place_waiting(
    table: JobTable,
    m: Machine,
    slots: NDArray[np.int64],
    rows: NDArray[np.int64],
    order: NDArray[np.int64],
    remaining_s: NDArray[np.float64],
    speed: NDArray[np.float64],
    tier_speeds: NDArray[np.float64],
    choice: int,
    kappa: int,
    seed: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """The fate per job, then rows, GPUs and shares of the jobs that hold. `slots` is room to work placements out."""
    jobs, size = table.jobs, m.gpus.size
    load_s, memory_gib, sharers = np.zeros(size), np.zeros(size), np.zeros(size, dtype=np.int64)
    fate = np.full(rows.size, NO_GPUS)
    quota = table.quotas.copy()
    for at in range(rows.size):
        job = jobs[rows[at]]
        if job.phase == HELD:
            fate[at] = HOLDS
            quota[job.tenant] -= job.width
            copy_numbers(gpus_of(table, rows[at]), slots[job.first_slot :])
            _move_in(slots[job.first_slot : job.first_slot + job.width], job.memory_gib, memory_gib, sharers)
            _add_load(
                slots[job.first_slot : job.first_slot + job.width], float(remaining_s[at]), float(speed[at]), load_s
            )
    open_gpus = 0
    for gpu in range(size):
        open_gpus += sharers[gpu] < MAX_SHARERS and m.gpus[gpu].owner != BLOCKED
    room = np.zeros(size, dtype=np.bool_)
    refused, refusals = np.empty(order.size, dtype=np.int64), 0  # a job that wants as much has no chance
    for at in order:
        job = jobs[rows[at]]
        if open_gpus == 0:
            break
        if job.gpus > open_gpus:
            continue
        if quota[job.tenant] < job.gpus:
            fate[at] = OVER_QUOTA
            continue
        hopeless = False
        for i in range(refusals):
            less = jobs[refused[i]]
            wants_no_less = job.gpus >= less.gpus and job.memory_gib >= less.memory_gib
            hopeless = hopeless or (wants_no_less and job.kinds == less.kinds)
        if hopeless:
            continue
        gpus = slots[job.first_slot : job.first_slot + job.gpus]
        for kind in range(m.kinds.size):
            if not (job.kinds >> kind) & 1:
                continue
            most_gib = m.kinds[kind].memory_gib - job.memory_gib + _SLACK
            for gpu in range(size):
                fits = memory_gib[gpu] <= most_gib and sharers[gpu] < MAX_SHARERS
                here = m.nodes[m.gpus[gpu].node].node_kind == kind and m.gpus[gpu].owner != BLOCKED
                room[gpu] = fits and here
            if choose(m, choice, kappa, seed, int(rows[at]), job.gpus, load_s, room, gpus):
                fate[at] = HOLDS
                break
        if fate[at] == NO_GPUS:
            refused[refusals] = rows[at]
            refusals += 1
        if fate[at] == HOLDS:
            quota[job.tenant] -= job.gpus
            _move_in(gpus, job.memory_gib, memory_gib, sharers)
            _add_load(gpus, float(remaining_s[at]), float(tier_speeds[at, tier_spanned(m, gpus)]), load_s)
            for gpu in gpus:
                open_gpus -= sharers[gpu] == MAX_SHARERS
    return _drawn_up(table, slots, rows, fate, sharers)


@inner
def _move_in(
    gpus: NDArray[np.int64],
    job_gib: float,
    memory_gib: NDArray[np.float64],
    sharers: NDArray[np.int64],
) -> None:
    for gpu in gpus:
        memory_gib[gpu] += job_gib
        sharers[gpu] += 1


@inner
def _add_load(gpus: NDArray[np.int64], remaining_s: float, speed: float, load_s: NDArray[np.float64]) -> None:
    """Add to L_g what the job still has to do here: compute, and communication if it spans nodes."""
    for gpu in gpus:
        load_s[gpu] += remaining_s / speed if speed > 0.0 else remaining_s


@inlined
def _drawn_up(
    table: JobTable,
    slots: NDArray[np.int64],
    rows: NDArray[np.int64],
    fate: NDArray[np.int64],
    sharers: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """The parts of the Decision. A job's share is that of its most crowded GPU, so that no GPU gives out too much."""
    jobs, held, given = table.jobs, 0, 0
    for at in range(rows.size):
        if fate[at] == HOLDS:
            held += 1
            given += jobs[rows[at]].width
    holders, shares = np.empty(held, dtype=np.int64), np.empty(held)
    gpus = np.empty(given, dtype=np.int64)
    i, to = 0, 0
    for at in range(rows.size):
        if fate[at] == HOLDS:
            job, crowd = jobs[rows[at]], 1
            for slot in range(job.first_slot, job.first_slot + job.width):
                gpus[to] = slots[slot]
                to += 1
                crowd = max(crowd, sharers[slots[slot]])
            holders[i], shares[i] = rows[at], 1.0 / crowd
            i += 1
    return fate, holders, gpus, shares


_place_waiting = entry(place_waiting)
