"""What happened: events, for people, and the journal, from which any decision can be made again.

Both only grow, so both have a pruning function that the controller calls now and then; each call does a bounded amount
of work. Sequence numbers are never used twice, also after pruning.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, and_, bindparam, func, or_, select, union_all

from thebes.store.database import Prepared
from thebes.store.principal import EVERYTHING, Viewer
from thebes.store.rows import EventRow, JournalEntry
from thebes.store.schema import events, jobs, journal

MAX_EVENTS = 10_000
KEEP_EVENTS = 5_000_000
KEEP_EVENTS_S = 90 * 86_400.0
KEEP_SNAPSHOTS = 10
PRUNE_AT_ONCE = 20_000  # rows per call, which take the writer some tens of milliseconds

_EVENT_COLUMNS = (
    events.c.seq,
    events.c.time_s,
    events.c.job_id,
    events.c.node,
    events.c.kind,
    events.c.actor,
    events.c.detail,
)
_JOB_OF_EVENT = jobs.c.id == bindparam("job_id")
_INSERT_EVENT = events.insert().values(
    **{name: bindparam(name) for name in ("time_s", "job_id", "node", "kind", "actor", "detail")}
)
_INSERT_JOB_EVENT = _INSERT_EVENT.values(
    user=select(jobs.c.user).where(_JOB_OF_EVENT).scalar_subquery(),
    tenant=select(jobs.c.tenant).where(_JOB_OF_EVENT).scalar_subquery(),
)
_ADD_EVENT, _ADD_JOB_EVENT = Prepared(_INSERT_EVENT), Prepared(_INSERT_JOB_EVENT)
_ADD_ENTRY = Prepared(journal.insert().values({name: bindparam(name) for name in ("time_s", "kind", "body")}))


# ---- events


def add_event(
    c: Connection,
    time_s: float,
    kind: str,
    *,
    job_id: str | None = None,
    node: str | None = None,
    actor: str = "",
    detail: Mapping[str, Any] | None = None,
) -> int:
    """Store an event; returns its sequence number. Values of a job's environment must never be put into `detail`."""
    values = {
        "time_s": time_s,
        "job_id": job_id,
        "node": node,
        "kind": kind,
        "actor": actor,
        "detail": json.dumps(detail or {}),
    }
    return (_ADD_EVENT if job_id is None else _ADD_JOB_EVENT).insert(c, values)


def events_after(
    c: Connection, *, seq: int = 0, job_id: str | None = None, viewer: Viewer = EVERYTHING, limit: int = 100
) -> list[EventRow]:
    """Events after `seq`, oldest first, as far as the viewer may see them; `job_id` may name an array.

    An event of a job is visible to all users that may see the job, an event of a node to all, any other to admins.
    """
    limit = max(1, min(limit, MAX_EVENTS))
    later = select(*_EVENT_COLUMNS).where(events.c.seq > seq).order_by(events.c.seq).limit(limit)
    if job_id is not None:
        named = or_(jobs.c.id == job_id, jobs.c.array_id == job_id)
        # All members of an array have the same owner.
        owner: Any = c.execute(select(jobs.c.user, jobs.c.tenant).where(named).limit(1)).first()
        if owner is None or not viewer.sees(owner):
            return []
        return [_event(row) for row in c.execute(later.where(events.c.job_id.in_(select(jobs.c.id).where(named))))]
    if viewer.is_admin:
        return [_event(row) for row in c.execute(later)]
    scopes = [
        events.c.user == viewer.user,
        and_(events.c.user.is_(None), events.c.job_id.is_(None), events.c.node.is_not(None)),
    ]
    if viewer.sees_tenant:
        scopes.append(and_(events.c.tenant == viewer.tenant, events.c.user != viewer.user))
    # Each branch is an index range read in order; together they are hardly longer than one page.
    merged = union_all(*(select(later.where(scope).subquery()) for scope in scopes)).subquery()
    return [_event(row) for row in c.execute(select(merged).order_by(merged.c.seq).limit(limit))]


def _event(row: Any) -> EventRow:
    *plain, detail = row
    return EventRow(*plain, detail=json.loads(detail))


def prune_events(
    c: Connection, *, now_s: float, keep_s: float = KEEP_EVENTS_S, keep: int = KEEP_EVENTS, at_once: int = PRUNE_AT_ONCE
) -> int:
    """Drop the oldest events: those older than `keep_s`, and all but the last `keep`. Returns how many; call till 0."""
    newest = c.scalar(select(func.max(events.c.seq))) or 0
    oldest = select(events.c.seq, events.c.time_s).order_by(events.c.seq).limit(at_once).subquery()
    # Numbers are given out one by one, so their difference is close enough to the count.
    gone = select(oldest.c.seq).where(or_(oldest.c.time_s < now_s - keep_s, oldest.c.seq <= newest - keep))
    return c.execute(events.delete().where(events.c.seq.in_(gone))).rowcount


# ---- journal


def append_journal(c: Connection, time_s: float, kind: str, body: Mapping[str, Any]) -> int:
    """Store an entry (snapshot, input or decision); returns its sequence number."""
    packed = zlib.compress(json.dumps(body, separators=(",", ":")).encode(), level=1)
    return _ADD_ENTRY.insert(c, {"time_s": time_s, "kind": kind, "body": packed})


def journal_since_snapshot(c: Connection) -> Iterator[JournalEntry]:
    """The last snapshot and the entries after it; all entries if there is no snapshot. Read it while `c` is open."""
    start = c.scalar(select(func.max(journal.c.seq)).where(journal.c.kind == "snapshot")) or 0
    yield from entries_from(c, start)


def entries_from(c: Connection, start: int) -> Iterator[JournalEntry]:
    """Entry `start` and the entries after it. Read it while `c` is open."""
    for row in c.execute(select(journal).where(journal.c.seq >= start).order_by(journal.c.seq)):
        yield _entry(row)


def journal_entry(c: Connection, seq: int) -> JournalEntry | None:
    row = c.execute(select(journal).where(journal.c.seq == seq)).first()
    return None if row is None else _entry(row)


def list_decisions(c: Connection, limit: int = 50, before: int | None = None) -> list[JournalEntry]:
    """Decisions, newest first, older than entry `before`."""
    statement = select(journal).where(journal.c.kind == "decision").order_by(journal.c.seq.desc())
    if before is not None:
        statement = statement.where(journal.c.seq < before)
    return [_entry(row) for row in c.execute(statement.limit(max(1, limit)))]


def _entry(row: Any) -> JournalEntry:
    return JournalEntry(row.seq, row.time_s, row.kind, json.loads(zlib.decompress(row.body)))


def prune_journal(c: Connection, keep: int = KEEP_SNAPSHOTS, *, at_once: int = PRUNE_AT_ONCE) -> int:
    """Drop entries before the last `keep` snapshots; all later decisions can still be replayed. Call until it is 0."""
    first = c.scalar(
        select(journal.c.seq)
        .where(journal.c.kind == "snapshot")
        .order_by(journal.c.seq.desc())
        .offset(max(1, keep) - 1)
        .limit(1)
    )
    if first is None:
        return 0
    gone = select(journal.c.seq).where(journal.c.seq < first).order_by(journal.c.seq).limit(at_once)
    return c.execute(journal.delete().where(journal.c.seq.in_(gone))).rowcount
