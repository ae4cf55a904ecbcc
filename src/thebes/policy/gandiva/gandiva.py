"""Gandiva (Xiao et al., OSDI'18): every job gets GPUs at once where it can, and what was decided is looked at again.

The reactive part is placement by affinity (`placement`). Where a server has given more seats than it has GPUs, its jobs
take turns (`slicing`). The introspective part uses measured rates to decide about packing (`packing`), migration,
growing and shrinking (`migration`). The quantum follows from what a switch costs here, not the paper's 100 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Records
from thebes.model.decision import HOLDS, NO_GPUS, NOT_ITS_TURN, OVER_QUOTA, Decision
from thebes.model.facts import PROGRESS
from thebes.model.jobs import NEVER
from thebes.model.parameters import parameter
from thebes.model.view import View
from thebes.policy.base import Policy
from thebes.policy.gandiva.migration import bring_together_entry as bring_together
from thebes.policy.gandiva.migration import grow_entry as grow
from thebes.policy.gandiva.migration import judge_growth_entry as judge_growth
from thebes.policy.gandiva.migration import to_free_gpus_entry as to_free_gpus
from thebes.policy.gandiva.packing import judge_pairs_entry as judge_pairs
from thebes.policy.gandiva.packing import note_profiles_entry as note_profiles
from thebes.policy.gandiva.packing import pack_entry as pack
from thebes.policy.gandiva.placement import place_queue_entry as place_queue
from thebes.policy.gandiva.seats import NOBODY, Jobs, Seats, jobs_in, no_residents, recall
from thebes.policy.gandiva.seats import hand_over_entry as hand_over
from thebes.policy.gandiva.slicing import quantum_s, turn_order, weights
from thebes.policy.gandiva.slicing import taking_turns_entry as taking_turns
from thebes.policy.gandiva.slicing import who_is_on_entry as who_is_on

NO_LIMIT = 1 << 40


@dataclass(frozen=True, eq=False)
class Residence:
    """What Gandiva remembers between decisions. It is never changed in place: each decision starts from a copy."""

    residents: Records
    slots: NDArray[np.int64]
    affinity: NDArray[np.int64]  # per server
    refused: NDArray[np.int64]  # pairs that did not pay, sorted
    turn_ends_s: float = NEVER
    quantum_s: float = 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Residence) and all(
            np.array_equal(getattr(self, each.name), getattr(other, each.name)) for each in fields(Residence)
        )


@dataclass(frozen=True)
class Gandiva(Policy):
    """Gandiva: jobs start at once where they can, take turns where they must, and are packed or moved as rates show."""

    name: ClassVar[str] = "gandiva"
    paper: ClassVar[str] = "Gandiva (OSDI'18): affinity placement, time slicing, packing, migration, grow-shrink"
    shares: ClassVar[bool] = True
    resizes: ClassVar[bool] = True
    uses: ClassVar[Mapping[str, str]] = {PROGRESS: "packs, grows and brings together no jobs: they only take turns"}

    quantum_s: float = parameter(60.0, "shortest turn of those who share GPUs in time, in seconds", low=1.0)
    switch_share: float = parameter(
        0.02,
        "part of their GPU time that switching may cost; turns are longer where it costs more",
        low=1e-3,
        high=0.5,
    )
    max_height: int = parameter(0, "jobs that may take turns on a server, in servers full; 0: no limit", low=0)
    starve_after_s: float = parameter(
        21600.0, "a job that waited so long goes before newcomers, and over-subscribes any server", low=1.0
    )
    packing: bool = parameter(True, "put two jobs on the same GPUs during overload, where measured rates say it pays")
    profile_s: float = parameter(60.0, "window in which a job, a pair or a growth is measured, in seconds", low=1.0)
    pack_above: float = parameter(1.0, "keep a pair while its normalised rates add up to more than this", low=0, high=2)
    migration: bool = parameter(True, "move jobs to free GPUs, and split jobs together when somebody leaves")
    migrate_margin: float = parameter(1.0, "a move must gain so many times what it costs", low=0)
    cooldown_s: float = parameter(600.0, "shortest time between two moves of a running job, in seconds", low=0)
    growing: bool = parameter(True, "give idle GPUs to jobs that say they can use more (max_gpus)")
    grow_above: float = parameter(1.1, "keep a growth that raised the rate to so many times the old one", low=1)

    def ignores(self) -> Mapping[str, str]:
        return {"placement": "it seats jobs by affinity, and moves them later"}

    def decide(self, view: View) -> Decision:
        now_s, machine = view.now_s, view.machine
        memory = view.memory if isinstance(view.memory, Residence) else nothing_yet(view)
        jobs = jobs_in(view)
        seats, left = recall(view, jobs, (memory.residents, memory.slots), memory.affinity)
        waited_s = np.where(jobs.running, 0.0, now_s - jobs.since_s)
        starved = ~jobs.running & (jobs.since_s + self.starve_after_s <= now_s)
        undone, over_quota = np.zeros(len(jobs.rows), np.bool_), np.zeros(len(jobs.rows), np.bool_)
        overload = bool(jobs.gpus.sum() > seats.room.sum())
        refused, trial_s, profiled_s, growth_s = memory.refused, NEVER, NEVER, NEVER
        elastic = self.growing and bool((jobs.max_gpus > jobs.gpus).any())

        if self.packing:
            profiled_s = note_profiles(jobs, seats, now_s, self.profile_s)
        if (seats.residents["partner"] != NOBODY).any():
            failed, trial_s = judge_pairs(jobs, seats, now_s, self.profile_s, self.pack_above, undone)
            refused = with_pairs(refused, failed, jobs.ids)
        if elastic:
            growth_s = judge_growth(machine, jobs, seats, now_s, self.profile_s, self.grow_above)

        seatless = seats.residents["width"] == 0
        queued = self._place(view, jobs, seats, seatless, starved, over_quota)
        tick = memory.turn_ends_s <= now_s
        order = self._turn_order(view, jobs, waited_s, starved, seatless | undone, everybody=tick)
        if self.migration:
            moved = False
            if seats.free.any():
                moved = to_free_gpus(machine, jobs, seats, order, now_s, self.cooldown_s, self.migrate_margin)
            if left or moved:
                bring_together(machine, jobs, seats, now_s, self.cooldown_s, self.migrate_margin)
        if self.packing and overload:
            made = self._pack(view, jobs, seats, undone, refused)
            trial_s = min(trial_s, profiled_s, now_s + self.profile_s if made else NEVER)
        in_turn = taking_turns(jobs, seats)
        someone = bool(in_turn.any())
        if elastic and not (overload or queued or someone):
            again_s = grow(machine, jobs, seats, now_s, self.cooldown_s, self.migrate_margin, self.profile_s)
            growth_s = min(growth_s, again_s)

        stays = jobs.running & ~(seatless | undone)
        if someone and tick:
            stays &= ~in_turn | self._has_turn_left(view, jobs, memory.quantum_s)
        on, refused_quota = who_is_on(machine, jobs, seats, stays, order, view.quotas.copy())
        turn_s, ends_s = memory.quantum_s, memory.turn_ends_s if someone else NEVER
        if someone and (tick or ends_s == NEVER):
            turn_s = quantum_s(jobs.cost_s[in_turn], jobs.gpus[in_turn], self.quantum_s, self.switch_share)
            ends_s = now_s + turn_s
        if self.packing and overload and (on & ~jobs.running & (seats.residents["alone"] == 0)).any():
            trial_s = min(trial_s, now_s + self.profile_s)  # the next decision knows when they really begin

        without = seats.residents["width"] == 0
        fate = np.where(on, HOLDS, np.where(without, NO_GPUS, NOT_ITS_TURN))
        fate[(over_quota | refused_quota) & ~on] = OVER_QUOTA
        guarded_s = jobs.since_s[without & ~starved & ~jobs.running] + self.starve_after_s
        wake_s = min(ends_s, trial_s, growth_s, float(guarded_s.min(initial=NEVER)))
        rows, counts, shares, gpus = hand_over(jobs, seats, on)
        return Decision(
            rows=rows,
            gpus=gpus,
            fate=fate,
            wake_s=wake_s,
            memory=Residence(seats.residents, seats.slots, seats.affinity, refused, ends_s, turn_s),
            counts=counts,
            shares=shares,
        )

    def _has_turn_left(self, view: View, jobs: Jobs, quantum_s: float) -> NDArray[np.bool_]:
        """Whether a job has a turn left. Its run is rounded to whole turns, so that none is suspended too early."""
        turn_s = (1.0 + np.maximum(0, view.jobs.priority)) * quantum_s
        return view.now_s - jobs.run_from_s < turn_s - quantum_s / 2

    def _turn_order(
        self,
        view: View,
        jobs: Jobs,
        waited_s: NDArray[np.float64],
        starved: NDArray[np.bool_],
        moving: NDArray[np.bool_],
        *,
        everybody: bool,
    ) -> NDArray[np.int64]:
        """The next jobs, as positions: at a tick all of them, else those that wait, move or share their GPUs."""
        able = np.arange(len(jobs.rows))
        if not everybody:
            able = np.flatnonzero(~jobs.running | moving | (jobs.share < 1.0))
        weight = weights(view.jobs.priority[able], waited_s[able], self.starve_after_s)
        new = np.isinf(view.jobs.first_start_s[able])
        return able[turn_order(weight, waited_s[able], new, starved[able])]

    def _pack(
        self, view: View, jobs: Jobs, seats: Seats, undone: NDArray[np.bool_], refused: NDArray[np.int64]
    ) -> bool:
        """Make pairs of the jobs whose profile is complete; returns whether any was made."""
        able = np.flatnonzero((seats.residents["alone"] > 0) & (seats.residents["partner"] == NOBODY))
        if not (~jobs.running | undone)[able].any():
            return False
        lowest_first = able[np.argsort(jobs.utilisation[able], kind="stable")]
        return pack(view.machine, jobs, seats, lowest_first, undone, refused) > 0

    def _place(
        self,
        view: View,
        jobs: Jobs,
        seats: Seats,
        seatless: NDArray[np.bool_],
        starved: NDArray[np.bool_],
        over_quota: NDArray[np.bool_],
    ) -> int:
        """Give seats to jobs without, in order of priority and then of submission; returns how many stay queued."""
        queue = np.flatnonzero(seatless)
        if not len(queue):
            return 0
        queue = queue[np.argsort(-view.jobs.priority[queue], kind="stable")]
        left = view.quotas.copy()
        np.subtract.at(left, jobs.tenant, seats.residents["width"])
        most = self.max_height or NO_LIMIT
        return place_queue(view.machine, jobs, seats, queue, starved, most, left, over_quota)


def nothing_yet(view: View) -> Residence:
    nobody, slots = no_residents()
    return Residence(nobody, slots, np.zeros(len(view.machine.nodes), np.int64), np.zeros(0, np.int64))


def with_pairs(refused: NDArray[np.int64], failed: NDArray[np.int64], alive: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pairs that are never to be tried again, without those of which one job has finished."""
    if not len(failed):
        return refused
    pairs = np.union1d(refused, failed)
    there = np.isin(pairs >> 31, alive) & np.isin(pairs & ((1 << 31) - 1), alive)
    return pairs[there]
