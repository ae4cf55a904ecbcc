"""Gandiva as Gavel (OSDI'20) re-implements it for a baseline: it has random pairs, and nothing else of Gandiva.

When the jobs ask for more GPUs than there are, random jobs of equal GPU count are put on the same GPUs; a pair stays
while its normalised rates add up to at least 1, else it is broken. Underneath are Gavel's rounds: in each the units
with the fewest rounds so far go first, placed as in `gandiva`. There are no profiles, no migration and no growing.
Gavel looks pairs up in a table of throughputs; here they are measured, and a pair that was broken is not made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import entry, inlined, inner, maker
from thebes.model.decision import HOLDS, NO_GPUS, OVER_QUOTA, Decision
from thebes.model.facts import PROGRESS
from thebes.model.jobs import NEVER
from thebes.model.machine import Machine
from thebes.model.parameters import parameter
from thebes.model.view import View
from thebes.policy.base import Policy
from thebes.policy.gandiva.gandiva import Residence, nothing_yet, with_pairs
from thebes.policy.gandiva.packing import MOST_HOSTS, join, may_share, part
from thebes.policy.gandiva.packing import judge_pairs_entry as judge_pairs
from thebes.policy.gandiva.placement import find_free
from thebes.policy.gandiva.seats import (
    NOBODY,
    Jobs,
    Seats,
    count_out,
    jobs_in,
    leads,
    partner_of,
    recall,
    seat,
    seats_of,
)
from thebes.policy.gandiva.seats import hand_over_entry as hand_over


@dataclass(frozen=True)
class GandivaGavel(Policy):
    """Gavel's model of Gandiva: jobs take turns in rounds; when GPUs are short, random jobs of equal size share."""

    name: ClassVar[str] = "gandiva-gavel"
    paper: ClassVar[str] = "the baseline `gandiva` of Gavel (OSDI'20): random packing only, in rounds"
    shares: ClassVar[bool] = True
    uses: ClassVar[Mapping[str, str]] = {PROGRESS: "keeps every pair that it made"}

    round_s: float = parameter(360.0, "length of a round, in seconds", low=1.0)
    keep_from: float = parameter(1.0, "keep a pair while its normalised rates add up to at least this", low=0, high=2)
    profile_s: float = parameter(60.0, "how long a pair is measured before it is judged, in seconds", low=1.0)
    seed: int = parameter(0, "chooses the pairs", low=0)

    def ignores(self) -> Mapping[str, str]:
        return {"placement": "it seats jobs as gandiva does, on the fewest servers"}

    def decide(self, view: View) -> Decision:
        now_s = view.now_s
        memory = view.memory if isinstance(view.memory, Residence) else nothing_yet(view)
        jobs = jobs_in(view)
        seats, _ = recall(view, jobs, (memory.residents, memory.slots), memory.affinity)
        residents = seats.residents
        residents["alone"] = 1.0  # by definition: speed is relative to the job alone, at its best
        undone = np.zeros(len(jobs.rows), np.bool_)
        below = float(np.nextafter(self.keep_from, -1.0))
        failed, trial_s = judge_pairs(jobs, seats, now_s, self.profile_s, below, undone)
        refused = with_pairs(memory.refused, failed, jobs.ids)
        overload = bool(jobs.gpus.sum() > seats.room.sum())
        if not overload:  # there are enough GPUs, so guests get their own
            residents["width"][(residents["partner"] != NOBODY) & residents["guest"]] = 0
            residents["partner"] = NOBODY

        tick = memory.turn_ends_s <= now_s
        in_round = now_s < memory.turn_ends_s < NEVER
        seated = residents["width"] > 0
        if tick:
            residents["turns"] += seated
        old = memory.residents["id"]
        new = np.flatnonzero(jobs.ids > (old[-1] if len(old) else NOBODY))  # ids are given as jobs come
        if (
            0 < len(new) < len(jobs.rows)
        ):  # new jobs start level with the fewest turns, or they would have every round for long
            residents["turns"][new] = residents["turns"][: new[0]].min()
        over_quota = np.zeros(len(jobs.rows), np.bool_)
        if in_round and not seats.free.any():  # nothing to give, and pairs are made at the beginning of a round
            waiting = bool((~seated).any())
        else:
            restored = ~jobs.running | (now_s - jobs.run_from_s >= self.round_s / 2)  # others were just resumed
            order = np.lexsort((~seated, residents["turns"], restored, -view.jobs.priority))
            rng = np.random.default_rng((self.seed, len(order), int(jobs.ids[-1]), int(residents["turns"].sum())))
            dice, left, pairs = rng.permutation(len(order)), view.quotas.copy(), overload and not in_round
            waiting = _hand_out(view.machine, jobs, seats, order, dice, tick, pairs, refused, left, over_quota)
        on = residents["width"] > 0
        if (residents["partner"][on & ~jobs.running] != NOBODY).any():
            trial_s = min(trial_s, now_s + self.profile_s)
        ends_s = memory.turn_ends_s
        if not waiting:
            ends_s = NEVER
        elif tick or ends_s == NEVER:
            ends_s = now_s + self.round_s
        fate = np.where(on, HOLDS, NO_GPUS)
        fate[over_quota & ~on] = OVER_QUOTA
        rows, counts, shares, gpus = hand_over(jobs, seats, on)
        return Decision(
            rows=rows,
            gpus=gpus,
            fate=fate,
            wake_s=min(ends_s, trial_s),
            memory=Residence(residents, seats.slots, seats.affinity, refused, ends_s, self.round_s),
            counts=counts,
            shares=shares,
        )


@maker
def hand_out(
    m: Machine,
    jobs: Jobs,
    s: Seats,
    order: NDArray[np.int64],
    dice: NDArray[np.int64],
    tick: bool,
    pairs: bool,
    refused: NDArray[np.int64],
    left: NDArray[np.int64],
    over_quota: NDArray[np.bool_],
) -> bool:
    """Give seats in this order; returns whether a job is left without.

    Inside a round the running jobs stay. At the beginning of one, all units stand in line: a unit for which the GPUs
    are not enough gives its seats up, so that units before it in line that had none can have them.
    """
    out = np.empty(m.gpus.size, np.int64)
    if tick:
        _make_room(m, jobs, s, order)
    for i in range(jobs.rows.size):
        left[jobs.tenant[i]] -= s.residents[i].width
    waiting = False
    closed = np.zeros(m.gpus.size + 1, np.bool_)
    for i in order:
        if s.residents[i].width > 0:
            continue
        gpus = int(jobs.gpus[i])
        if left[jobs.tenant[i]] < gpus:
            over_quota[i] = True
        elif not closed[gpus] and find_free(m, s, int(jobs.kinds[i]), gpus, out) > 0:
            seat(m, s, i, out[:gpus])
            left[jobs.tenant[i]] -= gpus
        else:
            closed[gpus] = m.kinds.size == 1
            waiting = True
    if pairs and waiting:
        _pair_at_random(m, jobs, s, order, dice, refused, left)
        waiting = False
        for i in range(jobs.rows.size):
            waiting = waiting or s.residents[i].width == 0
    return waiting


@inlined
def _make_room(m: Machine, jobs: Jobs, s: Seats, order: NDArray[np.int64]) -> None:
    """Count the GPUs of each kind out down the line; a unit with seats beyond that count loses them."""
    budget = np.zeros(m.kinds.size, np.int64)
    for node in range(m.nodes.size):
        budget[m.nodes[node].node_kind] += s.room[node]
    for i in order:
        seated, best = s.residents[i].width > 0, NOBODY
        if seated and not leads(s.residents, i):
            continue
        if seated:
            best = m.nodes[m.gpus[seats_of(s.residents, s.slots, i)[0]].node].node_kind
        else:
            for kind in range(budget.size):
                if (jobs.kinds[i] >> kind) & 1 and (best < 0 or budget[kind] > budget[best]):
                    best = kind
        if jobs.gpus[i] <= budget[best]:
            budget[best] -= jobs.gpus[i]
        elif seated:
            partner = partner_of(jobs.ids, s.residents, i)
            if partner != NOBODY:
                part(s, i, partner)
                s.residents[partner].width = 0
            count_out(m, s, i)
            s.residents[i].width = 0


@inlined
def _pair_at_random(
    m: Machine,
    jobs: Jobs,
    s: Seats,
    order: NDArray[np.int64],
    dice: NDArray[np.int64],
    refused: NDArray[np.int64],
    left: NDArray[np.int64],
) -> None:
    """Each job without seats joins a random job of its size that has seats to itself."""
    begin = np.zeros(m.gpus.size + 1, np.int64)  # per size: no job before this place of the dice can be a host
    for guest in order:
        gpus = int(jobs.gpus[guest])
        if s.residents[guest].width > 0:
            continue
        if left[jobs.tenant[guest]] < gpus:
            continue
        while begin[gpus] < dice.size and not _may_host(s, int(dice[begin[gpus]]), gpus):
            begin[gpus] += 1
        looked = 0
        for at in range(begin[gpus], dice.size):
            host = int(dice[at])
            if looked >= MOST_HOSTS:
                break
            if _may_host(s, host, gpus):
                looked += 1
                if may_share(m, jobs, s, guest, host, refused):
                    join(m, s, guest, host)
                    left[jobs.tenant[guest]] -= gpus
                    break


@inner
def _may_host(s: Seats, i: int, gpus: int) -> bool:
    return bool(s.residents[i].width == gpus and s.residents[i].partner == NOBODY)


_hand_out = entry(hand_out)
