"""Make past decisions again from the journal, and say whether they come out the same.

The journal holds snapshots of the ledger, every entry that changed it, and every decision with the digest of its View.
From any snapshot on, the ledger is led through the entries; at each decision the policy is asked again. Same View, same
Decision: anything else is a bug, or another version of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thebes.model.decision import HOLDS
from thebes.model.errors import UserError
from thebes.placement import Placement
from thebes.policy.base import Policy
from thebes.server.ledger import Ledger
from thebes.server.rows import JournalEntry

COMPARED = ("digest", "suspend", "start", "migrate", "promote", "queues", "fates", "wake_s")


@dataclass(frozen=True)
class Replayed:
    """One decision, made again."""

    seq: int
    time_s: float
    digest: str
    jobs: int  # alive, in the View
    differs: tuple[str, ...]  # in what; empty: the same
    entry: Mapping[str, Any]  # as it was journalled
    again: Mapping[str, Any]  # as it came out now
    reasons: Mapping[str, str]  # why each job waited

    @property
    def same(self) -> bool:
        return not self.differs


def replay(entries: Iterable[JournalEntry], policy: Policy, placement: Placement) -> Iterator[Replayed]:
    """Replay from the first snapshot among the entries on."""
    ledger: Ledger | None = None
    for entry in entries:
        if entry.kind == "snapshot":
            ledger = Ledger.restore(entry.body, policy, placement)
        elif ledger is None:
            continue
        elif entry.kind == "input":
            ledger.apply(entry.body)
        else:
            planned, view = ledger.decide(entry.body["t"])
            again = planned.entry()
            ids = [ledger.ids[row] for row in view.jobs.rows]
            reasons = {job: ledger.reason(fate) for job, fate in zip(ids, planned.fates, strict=True) if fate != HOLDS}
            differs = tuple(key for key in COMPARED if again[key] != entry.body[key])
            yield Replayed(entry.seq, entry.time_s, again["digest"], len(ids), differs, entry.body, again, reasons)
            ledger.apply(entry.body)  # go on from what really happened


def replay_store(
    folder: Path | str,
    *,
    since: int | None = None,
    decision: int | None = None,
    progress: Callable[[Replayed], None] | None = None,
) -> list[Replayed]:
    """Replay the journal of an instance's folder: all that it holds, from entry `since` on, or one decision."""
    from thebes.node.instance import Instance
    from thebes.server import store as db
    from thebes.server.config import live_policy, load

    instance = Instance.at(folder)
    config = load(instance.config)
    policy, placement = live_policy(config)
    done: list[Replayed] = []
    with db.read_only(instance.store) as c:
        first = db.snapshot_before(c, decision if decision is not None else since)
        if first is None:
            raise UserError(
                "the journal holds no snapshot to begin with",
                hint="`thebes up` writes one; there may be no decision yet",
            )
        for replayed in replay(db.journal_from(c, first), policy, placement):
            if decision is not None and replayed.seq > decision:
                break
            if (decision is not None and replayed.seq == decision) or (
                decision is None and (since is None or replayed.seq >= since)
            ):
                done.append(replayed)
                if progress is not None:
                    progress(replayed)
    if decision is not None and not done:
        raise UserError(
            f"there is no decision {decision} in the journal", hint="GET /v1/decisions lists them; old ones are pruned"
        )
    return done
