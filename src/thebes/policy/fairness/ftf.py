"""Finish-time fairness as Gavel solves it (Narayanan et al., OSDI'20): a convex programme, realised in rounds.

Each job i gets a share x_i of time so that the largest rho_i = (elapsed + left/x_i) / (isolated so far + isolated left)
is as small as possible, where sum gpus_i x_i fits the cluster. For a given rho the smallest shares follow in closed
form, and fewer GPUs are needed the larger rho is, so the programme is one root of one decreasing function: it is exact
and fast, and needs no solver. A job that is held back by its own speed gets x = 1; all others end up equal. Rounds then
realise the shares by Gavel's mechanism: jobs that have received least of what their shares owe them go first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from thebes.model.cluster import TIERS
from thebes.model.decision import HOLDS, NO_GPUS, NOT_ITS_TURN, Decision
from thebes.model.facts import DURATIONS, PROFILES, PROGRESS
from thebes.model.jobs import NEVER
from thebes.model.parameters import parameter
from thebes.model.view import JobsView, View
from thebes.policy.base import Policy
from thebes.policy.fill import fill


class Race(NamedTuple):
    """What the programme knows of each job."""

    gpus: NDArray[np.int64]
    elapsed_s: NDArray[np.float64]
    left_s: NDArray[np.float64]  # at the speed that it has when it runs
    isolated_s: NDArray[np.float64]  # finish time on a private 1/N of the cluster: so far, and still to come

    def of(self, some: NDArray[np.bool_]) -> Race:
        return Race(self.gpus[some], self.elapsed_s[some], self.left_s[some], self.isolated_s[some])

    def shares_for(self, rho: float) -> NDArray[np.float64]:
        """The smallest share with which each job reaches rho; 1 for jobs that cannot reach it."""
        room_s = rho * self.isolated_s - self.elapsed_s
        return np.where(room_s > self.left_s, self.left_s / np.where(room_s > 0.0, room_s, 1.0), 1.0)

    def rho(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        return (self.elapsed_s + self.left_s / shares) / self.isolated_s


def fairest_shares(race: Race, total_gpus: float) -> NDArray[np.float64]:
    """Shares of time that minimise the largest rho, then the next largest, and so on."""
    if race.gpus.sum() <= total_gpus:
        return np.ones(len(race.gpus))
    if total_gpus <= 0:
        return np.zeros(len(race.gpus))
    low = float(race.rho(np.ones(len(race.gpus))).min())  # below this every job needs a full share
    high = float(race.rho(np.full(len(race.gpus), total_gpus / race.gpus.sum())).max())  # equal shares reach this

    def missing(rho: float) -> float:
        return float(race.gpus @ race.shares_for(rho)) - total_gpus

    rho: Any = brentq(missing, low, high * (1 + 1e-9), xtol=1e-9 * low)
    shares = race.shares_for(float(rho))
    return shares * min(1.0, total_gpus / float(race.gpus @ shares))


_FULL = 1.0 - 1e-9  # shares that use every GPU are a rounding error below full, and count as full


def fairest_shares_by_kind(race: Race, kinds: NDArray[np.int64], kind_gpus: NDArray[np.int64]) -> NDArray[np.float64]:
    """The same where jobs accept only some kinds of nodes (bits of `kinds`).

    Shares can be realised if, for each set of kinds, the jobs that accept nothing else fit into it. The set that forces
    the largest rho settles its jobs; the others divide the rest.
    """
    everything = (1 << len(kind_gpus)) - 1
    shares = np.ones(len(kinds))
    kinds = kinds & everything
    open_jobs = np.ones(len(kinds), dtype=np.bool_)
    left_gpus = kind_gpus.astype(np.float64)
    while open_jobs.any() and left_gpus.any():
        masks = {int(mask) for mask in np.unique(kinds[open_jobs])}
        unions = {_union(some) for size in range(1, len(masks) + 1) for some in combinations(sorted(masks), size)}
        worst, settled = -np.inf, open_jobs
        for union in sorted(unions):
            inside = open_jobs & ((kinds & ~union) == 0)
            gpus = float(sum(left_gpus[k] for k in range(len(kind_gpus)) if (union >> k) & 1))
            found = fairest_shares(race.of(inside), gpus)
            held_back = found < _FULL
            if not held_back.any():
                rho = -np.inf
            else:
                rho = float(race.of(inside).rho(found)[held_back].max()) if found.all() else np.inf
            if rho > worst:
                worst, settled = rho, inside
                shares[inside] = found
        if worst == -np.inf:
            shares[open_jobs] = 1.0
            break
        used = int(np.bitwise_or.reduce(kinds[settled]))
        for k in range(len(kind_gpus)):
            if (used >> k) & 1:
                left_gpus[k] = 0.0  # a set that binds uses its kinds up
                kinds = kinds & ~np.int64(1 << k)
        open_jobs = open_jobs & ~settled
    return shares


def _union(masks: tuple[int, ...]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


class _FtfMemory(NamedTuple):
    """What has to be remembered of each job alive at the last decision."""

    now_s: float
    round_end_s: float  # when shares are made and realised again; infinite while no job waits
    rho: float  # the largest, at which the shares aim
    ids: NDArray[np.int64]  # ascending
    held: NDArray[np.bool_]
    progress_s: NDArray[np.float64]
    isolated_s: NDArray[np.float64]  # time that its progress would have taken on a private 1/N
    share: NDArray[np.float64]
    owed_s: NDArray[np.float64]  # what its shares add up to
    received_s: NDArray[np.float64]


@dataclass(frozen=True)
class Ftf(Policy):
    """Finish-time fairness by Gavel's convex programme, in rounds. An oracle: it knows every job's duration."""

    name: ClassVar[str] = "ftf"
    paper: ClassVar[str] = "Gavel (OSDI'20), `finish_time_fairness`: the largest rho of Themis, minimised"
    needs: ClassVar[frozenset[str]] = frozenset({DURATIONS, PROFILES})
    uses: ClassVar[Mapping[str, str]] = {PROGRESS: "what a job did so far counts for nothing"}

    round_s: float = parameter(360.0, "length of a round, in seconds: between two, only idle GPUs are given", low=1.0)

    def decide(self, view: View) -> Decision:
        jobs, now_s = view.jobs, view.now_s
        ledger = self._brought_up_to(view)
        turn = now_s >= ledger.round_end_s
        priority = (ledger.owed_s + ledger.share * self.round_s) / (ledger.received_s + self.round_s / 2)
        # Where restoring takes longer than a round, no job would ever get to work, so each is left half a round of
        # work.
        begins = jobs.running & (jobs.run_from_s + self.round_s / 2 > now_s)
        order = np.lexsort((jobs.rows, -priority, ~begins))
        decision = fill(view, order, preempt=turn)
        fate = np.where(decision.fate == NO_GPUS, NOT_ITS_TURN, decision.fate)
        held = fate == HOLDS
        round_end_s = NEVER if held.all() else next_multiple(self.round_s, now_s)
        memory = ledger._replace(held=held, round_end_s=round_end_s)
        return Decision(decision.rows, decision.gpus, fate, wake_s=round_end_s, memory=memory, counts=decision.counts)

    def _brought_up_to(self, view: View) -> _FtfMemory:
        """The ledger of now: what happened since the last decision, and new jobs; at the end of a round, new shares."""
        jobs, now_s = view.jobs, view.now_s
        old = view.memory if isinstance(view.memory, _FtfMemory) and len(view.memory.ids) else None
        fair_s = private_s(len(jobs), jobs.gpus, view.total_gpus)
        speed = best_speed(jobs)
        # A job that was not measured yet counts as without progress.
        progress_s = np.nan_to_num(jobs.progress_s) if view.knows(PROGRESS) else np.zeros(len(jobs))
        isolated_s = progress_s / speed * fair_s  # for jobs that are seen for the first time
        owed_s, received_s = np.zeros(len(jobs)), np.zeros(len(jobs))
        at = known = np.zeros(0, dtype=np.int64)
        if old is not None:
            at, known = places_of(jobs.id, old.ids)
            since_s, did_s = now_s - old.now_s, (progress_s[known] - old.progress_s[at]) / speed[known]
            fair_then_s = private_s(len(old.ids), jobs.gpus[known], view.total_gpus)
            isolated_s[known] = old.isolated_s[at] + did_s * fair_then_s
            owed_s[known] = old.owed_s[at] + old.share[at] * since_s
            received_s[known] = old.received_s[at] + old.held[at] * since_s
        left_s = np.maximum(jobs.remaining_s, 1e-6) / speed
        race = Race(jobs.gpus, now_s - jobs.submit_s, left_s, isolated_s + left_s * fair_s)
        if old is None or now_s >= old.round_end_s:
            share = self._shares(view, race)
            rho = float(race.rho(np.maximum(share, 1e-9)).max())
        else:  # between two rounds the rho of the last one stays in force, also for new jobs
            share, rho = race.shares_for(old.rho), old.rho
            share[known] = old.share[at]
        round_end_s = NEVER if old is None else old.round_end_s
        return _FtfMemory(
            now_s, round_end_s, rho, jobs.id, jobs.running, progress_s, isolated_s, share, owed_s, received_s
        )

    @staticmethod
    def _shares(view: View, race: Race) -> NDArray[np.float64]:
        """Shares of the GPUs that can be had: those that are free, or held by jobs that take part."""
        jobs = view.jobs
        kinds, held = view.machine.kinds, np.where(jobs.running, jobs.width, 0)
        to_be_had = kinds["free"] + np.bincount(jobs.node_kind, weights=held, minlength=len(kinds))
        if len(to_be_had) == 1:
            return fairest_shares(race, float(to_be_had[0]))
        return fairest_shares_by_kind(race, jobs.kinds, to_be_had)


def private_s(apps: float | NDArray[np.float64], gpus: NDArray[np.int64], total_gpus: int) -> NDArray[np.float64]:
    """Seconds that a second of work takes on a private 1/N of the cluster, where a larger gang has to wait its turn."""
    return np.maximum(1.0, apps * gpus / total_gpus)


def best_speed(jobs: JobsView) -> NDArray[np.float64]:
    """The speed of each job where it runs best."""
    return np.max([jobs.speed_in(tier) for tier in range(len(TIERS))], axis=0)


def places_of(ids: NDArray[np.int64], known: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The places in `known` (ascending) of the jobs that are there, and which jobs those are: two position lists."""
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    found = np.flatnonzero(known[at] == ids)
    return at[found], found


def next_multiple(step_s: float, now_s: float) -> float:
    """The first multiple of `step_s` after now."""
    count = np.floor(now_s / step_s) + 1.0
    return float(count * step_s if count * step_s > now_s else (count + 1.0) * step_s)
