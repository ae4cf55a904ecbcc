"""Pages of events for two routes: those after a number, or the latest ones."""

from __future__ import annotations

from collections import deque
from typing import Annotated

from fastapi import Query
from sqlalchemy import Connection, func, select

from thebes import store as db
from thebes.api import answers
from thebes.store.history import MAX_EVENTS
from thebes.store.principal import Viewer
from thebes.store.schema import events

MAX_SEQ = 1 << 60

After = Annotated[int, Query(ge=0, le=MAX_SEQ, description="Only those behind this seq.")]
EventLimit = Annotated[int, Query(ge=1, le=10_000)]
Latest = Annotated[bool, Query(description="The last ones instead of the first ones; still oldest first.")]


def events_page(
    c: Connection, viewer: Viewer, job_id: str | None, after: int, limit: int, latest: bool
) -> answers.EventsAnswer:
    """Events that the viewer may see."""
    if not latest:
        rows = db.events_after(c, seq=after, job_id=job_id, viewer=viewer, limit=limit)
        return answers.EventsAnswer(events=[answers.event(row) for row in rows])
    after = max(after, _start_of_latest(c, viewer, job_id, limit))
    last: deque[db.EventRow] = deque(maxlen=limit)
    while page := db.events_after(c, seq=after, job_id=job_id, viewer=viewer, limit=MAX_EVENTS):
        last.extend(page)
        after = page[-1].seq
    return answers.EventsAnswer(events=[answers.event(row) for row in last])


def _start_of_latest(c: Connection, viewer: Viewer, job_id: str | None, limit: int) -> int:
    """A seq after which there are at least `limit` events, if there are so many; the search begins at the end."""
    newest = c.scalar(select(func.max(events.c.seq))) or 0
    reach = limit
    while reach < newest:
        found = db.events_after(c, seq=newest - reach, job_id=job_id, viewer=viewer, limit=limit)
        if len(found) >= limit:
            return newest - reach
        reach *= 4
    return 0
