"""The policy is asked: its answer, checked, in words that outlive row numbers. Nothing changes yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thebes.live.entries import Decide
from thebes.live.ledger.packed import packed, packed_small
from thebes.live.ledger.snapshot import FORMAT
from thebes.live.packing import PackingRules
from thebes.model import gate
from thebes.model.arrays import Ints
from thebes.model.decision import HOLDS, NO_GPUS, Decision, diff, shares_of
from thebes.model.jobs import HELD, NEVER, WAITING
from thebes.model.view import View
from thebes.policy.packing import pair_up

if TYPE_CHECKING:
    from thebes.live.ledger.ledger import Ledger

ABLE = gate.Abilities("a live cluster", counts=True, shares=True)


@dataclass(frozen=True, eq=False)
class Planned:
    """A decision in words that outlive row numbers: job ids and GPU numbers of the cluster."""

    now_s: float
    digest: str  # of the View it was made from
    suspend: tuple[str, ...]
    start: tuple[tuple[str, tuple[int, ...]], ...]
    migrate: tuple[tuple[str, tuple[int, ...]], ...]
    promote: tuple[str, ...]
    queues: Ints | None
    fates: Ints
    wake_s: float
    memory: str | None  # as the journal keeps it
    rows: Ints  # of the View
    guests: tuple[tuple[str, str], ...] = ()  # (guest, host): packed on the host's GPU
    shares: tuple[tuple[str, float], ...] = ()  # (job, its share of each of its GPUs), of those that change

    def entry(self) -> Decide:
        """As an entry to apply and to keep."""
        return Decide(
            self.now_s,
            digest=self.digest,
            suspend=self.suspend,
            start=self.start,
            migrate=self.migrate,
            promote=self.promote,
            queues=None if self.queues is None else packed_small(self.queues),
            fates=packed_small(self.fates),
            wake_s=None if self.wake_s == NEVER else self.wake_s,
            memory=self.memory,
            guests=self.guests,
            shares=self.shares,
            format=FORMAT,
        )

    @property
    def changes(self) -> bool:
        return bool(self.suspend or self.start or self.migrate or self.promote or self.guests or self.shares)


def plan(ledger: Ledger, now_s: float, *, fingerprint: bool = True) -> tuple[Planned, View]:
    """Ask the policy. Its answer is checked, and what it remembers written down; nothing has changed yet."""
    now_s, label = max(float(now_s), ledger.now_s), ledger.policy.label
    view, alive = ledger.view(now_s), ledger.scheduled()
    digest = ledger.digest(now_s) if fingerprint else ""
    if not len(alive):
        return Planned(now_s, digest, (), (), (), (), None, np.zeros(0, dtype=np.int64), NEVER, None, alive), view
    decision = gate.admit(
        gate.answer_of(ledger.policy.decide, view, label),
        now_s,
        alive,
        ledger.table,
        ledger.machine,
        ledger.room,
        label=label,
        shares=ledger.policy.shares,
        able=ABLE,
        name_of=lambda row: f"job {ledger.ids[row]}" if row < len(ledger.ids) else f"job row {row}",
    )
    memory = gate.pickled(decision.memory, label)
    actions = diff(ledger.table, alive, decision)

    def named(position: int) -> tuple[str, tuple[int, ...]]:
        row, at, count = int(decision.rows[position]), int(actions.offset[position]), int(actions.counts[position])
        return ledger.ids[row], tuple(decision.gpus[at : at + count].tolist())

    return (
        Planned(
            now_s=now_s,
            digest=digest,
            suspend=tuple(ledger.ids[row] for row in actions.suspend),
            start=tuple(named(i) for i in actions.start.tolist()),
            migrate=tuple(named(i) for i in actions.migrate.tolist()),
            promote=tuple(ledger.ids[row] for row in decision.promote),
            queues=decision.queues,
            fates=decision.fate,
            wake_s=decision.wake_s,
            memory=None if memory is None else packed(memory),
            rows=alive,
            guests=_paired(ledger, decision, alive, now_s) if ledger.packing else (),
            shares=_new_shares(ledger, decision),
        ),
        view,
    )


def _new_shares(ledger: Ledger, decision: Decision) -> tuple[tuple[str, float], ...]:
    shares, before = shares_of(decision), ledger.table.jobs["share"][decision.rows]
    changed = np.flatnonzero(shares != before).tolist()
    return tuple((ledger.ids[int(decision.rows[i])], float(shares[i])) for i in changed)


def _paired(ledger: Ledger, decision: Decision, alive: Ints, now_s: float) -> tuple[tuple[str, str], ...]:
    """Waiting jobs that shall be guests of running ones, on top of the policy's decision."""
    jobs = ledger.table.jobs
    taken = {*ledger.guests, *ledger.guests.values()}
    waiting: list[str] = []
    hosts: list[str] = []
    for row, fate in zip(alive.tolist(), decision.fate.tolist(), strict=True):
        job = ledger.ids[row]
        if jobs["gpus"][row] != 1 or job not in ledger.rates or job in taken:
            continue
        runs = jobs["phase"][row] == HELD and jobs["run_from_s"][row] < now_s
        if fate == HOLDS and runs:
            hosts.append(job)
        elif fate == NO_GPUS and jobs["phase"][row] == WAITING:
            waiting.append(job)
    recent = {pair for pair, at_s in ledger.undone if now_s - at_s < PackingRules().retry_after_s}
    return pair_up(waiting, hosts, recent)
