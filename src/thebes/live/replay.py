"""Past decisions are made again from the journal, and compared with it.

The journal holds snapshots of the ledger, every entry that changed it, and every decision with the digest of its View.
From any snapshot on, the ledger is led through the entries; at each decision the policy is asked again. The same View
must give the same Decision: anything else is a bug, or another version of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from thebes import __version__
from thebes.live.entries import Entry, entry_of
from thebes.live.ledger import FORMAT, Ledger
from thebes.model.decision import HOLDS
from thebes.model.errors import UserError
from thebes.placement import Placement
from thebes.policy.base import Policy
from thebes.store.database import database_at
from thebes.store.history import entries_from
from thebes.store.rows import JournalEntry
from thebes.store.schema import journal

FIRST_VERSION = "0.1"  # it did not write its number into snapshots
COMPARED = ("digest", "suspend", "start", "migrate", "promote", "queues", "fates", "wake_s", "guests")


@dataclass(frozen=True)
class Replayed:
    """One decision, made again."""

    seq: int
    time_s: float
    digest: str
    jobs: int  # living jobs in the View
    differs: tuple[str, ...]  # in what it differs; empty if it is the same
    entry: Mapping[str, Any]  # as it was journalled
    again: Mapping[str, Any]  # as it came out now
    reasons: Mapping[str, str]  # why each job waited
    version: str = ""  # the version of Thebes that made the decision

    @property
    def by_another_version(self) -> bool:
        """Whether another version made it; then the fingerprints of what was seen are not compared."""
        return self.version != __version__

    @property
    def same(self) -> bool:
        return not self.differs


Choose = Callable[[Mapping[str, Any]], tuple[Policy, Placement]]


def replay(entries: Iterable[JournalEntry], choose: Choose) -> Iterator[Replayed]:
    """Replay from the first snapshot among the entries on; `choose` makes the policy that a snapshot names."""
    ledger: Ledger | None = None
    version = ""
    for entry in entries:
        if entry.kind == "snapshot":
            version = str(entry.body.get("version", FIRST_VERSION))
            ledger = Ledger.restore(entry.body, *choose(entry.body["config"]))
        elif ledger is None:
            continue
        elif entry.kind == "input":
            _apply(ledger, entry)
        else:
            recorded = _read(entry).to_json()
            planned, _ = ledger.decide(recorded["t"])
            again = planned.entry().to_json()
            ids = [ledger.ids[row] for row in planned.rows]
            reasons = {job: ledger.reason(fate) for job, fate in zip(ids, planned.fates, strict=True) if fate != HOLDS}
            # What a View holds may differ between versions, and so may its fingerprint; what was done must not.
            same_view = version == __version__ and recorded.get("format", 1) >= FORMAT
            compared = COMPARED if same_view else COMPARED[1:]
            yield Replayed(
                seq=entry.seq,
                time_s=entry.time_s,
                digest=again["digest"],
                jobs=len(ids),
                differs=tuple(key for key in compared if again[key] != recorded[key]),
                entry=entry.body,
                again=again,
                reasons=reasons,
                version=version,
            )
            _apply(ledger, entry)  # the replay goes on from what really happened


def _read(entry: JournalEntry) -> Entry:
    try:
        return entry_of(entry.body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"entry {entry.seq} of the journal cannot be read ({type(error).__name__}: {error})",
            hint="the journal was changed by hand, or by a later version of Thebes",
        ) from None


def _apply(ledger: Ledger, entry: JournalEntry) -> None:
    change = _read(entry)
    try:
        ledger.apply(change)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"entry {entry.seq} of the journal does not fit what came before it ({type(error).__name__}: {error})",
            hint="the journal was changed by hand, or by another version of Thebes",
        ) from None


def replay_store(
    folder: Path | str,
    *,
    since: int | None = None,
    decision: int | None = None,
    progress: Callable[[Replayed], None] | None = None,
) -> list[Replayed]:
    """Replay the journal of an instance's folder: all that it holds, from entry `since` on, or one decision."""
    from thebes.live.config import live_policy, load
    from thebes.protocol.instance import Instance

    instance = Instance.at(folder)
    config = load(instance.config)

    def choose(chosen: Mapping[str, Any]) -> tuple[Policy, Placement]:
        return live_policy(config.model_copy(update=dict(chosen)))

    wanted = decision if decision is not None else since
    done: list[Replayed] = []
    for replayed in replay(_journal(config.store or instance.store, wanted), choose):
        if decision is not None and replayed.seq > decision:
            break
        if replayed.seq == decision or (decision is None and replayed.seq >= (since or 0)):
            done.append(replayed)
            if progress is not None:
                progress(replayed)
        if replayed.seq == decision:
            break
    if decision is not None and not done:
        raise UserError(
            f"there is no decision {decision} in the journal", hint="GET /v1/decisions lists them; old ones are pruned"
        )
    return done


def _journal(path: Path | str, wanted: int | None) -> Iterator[JournalEntry]:
    """The journal from the last snapshot before entry `wanted` on, or from the oldest one; read without a writer."""
    if isinstance(path, Path) and not path.exists():
        raise UserError(f"there is no store at {path}", hint="name the folder of an instance with --dir")
    engine = database_at(path).reader_engine()
    try:
        with engine.connect() as c:
            snapshots = select(func.min(journal.c.seq) if wanted is None else func.max(journal.c.seq)).where(
                journal.c.kind == "snapshot"
            )
            first = c.scalar(snapshots if wanted is None else snapshots.where(journal.c.seq <= wanted))
            if first is None:
                raise UserError(
                    f"the journal holds no snapshot before entry {wanted}" if wanted else "the journal is empty",
                    hint="old entries are pruned, and `thebes up` writes the first",
                )
            yield from entries_from(c, first)
    finally:
        engine.dispose()
