"""Questions about a job array as a whole that do not read every member: an array may have ten thousand."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, func, select

from thebes.server import store as db
from thebes.server.schema import ALIVE_STATES, jobs

_IN_ARRAY = jobs.c.array_id == bindparam("array")
_FIRST = select(jobs.c.id).where(_IN_ARRAY).order_by(jobs.c.seq).limit(1)
_FIRST_ALIVE = _FIRST.where(jobs.c.state.in_(ALIVE_STATES))
_FIRST_NOT_COMPLETED = _FIRST.where(jobs.c.state != "completed")
_COUNTS = select(jobs.c.state, func.count()).where(_IN_ARRAY).group_by(jobs.c.state)
_MEMBERS = (
    select(jobs.c.id, jobs.c.array_index, jobs.c.state, jobs.c.reason, jobs.c.exit_code)
    .where(_IN_ARRAY)
    .order_by(jobs.c.seq)
)

Light = tuple[str, int, str, str, int | None]  # id, index, state, reason, exit code


def first_of(c: Connection, job_id: str) -> db.JobRow | None:
    """The job of this id, or the first member of the array of this number. All members have one owner."""
    row = db.get_job(c, job_id)
    if row is None and "_" not in job_id:
        found = c.scalar(_FIRST, {"array": job_id})
        row = None if found is None else db.get_job(c, found)
    return row


def count_states(c: Connection, array_id: str) -> dict[str, int]:
    return dict(tuple(row) for row in c.execute(_COUNTS, {"array": array_id}))


def telling_member(c: Connection, array_id: str) -> db.JobRow:
    """The one that says how the array stands: the first that is alive, else that did not complete, else the first."""
    for statement in (_FIRST_ALIVE, _FIRST_NOT_COMPLETED, _FIRST):
        found = c.scalar(statement, {"array": array_id})
        row = None if found is None else db.get_job(c, found)
        if row is not None:
            return row
    raise KeyError(array_id)


def light_members(c: Connection, array_id: str) -> Sequence[Light]:
    return [tuple(row) for row in c.execute(_MEMBERS, {"array": array_id})]  # type: ignore[misc]
