"""Questions about a whole job array that are answered without reading every member, of which there may be 10,000."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, func, select

from thebes import store as db
from thebes.store.schema import ALIVE_STATES, jobs

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
    """The job of this id, or the first member of the array of this number. All members have the same owner."""
    row = db.get_job(c, job_id)
    if row is None and "_" not in job_id:
        found = c.scalar(_FIRST, {"array": job_id})
        row = None if found is None else db.get_job(c, found)
    return row


def count_states(c: Connection, array_id: str) -> dict[str, int]:
    return {row[0]: row[1] for row in c.execute(_COUNTS, {"array": array_id})}


def telling_member(c: Connection, array_id: str) -> db.JobRow:
    """The member that stands for the array: the first alive, else the first that did not complete, else the first."""
    for statement in (_FIRST_ALIVE, _FIRST_NOT_COMPLETED, _FIRST):
        found = c.scalar(statement, {"array": array_id})
        row = None if found is None else db.get_job(c, found)
        if row is not None:
            return row
    raise KeyError(array_id)


def light_members(c: Connection, array_id: str) -> Sequence[Light]:
    return [tuple(row) for row in c.execute(_MEMBERS, {"array": array_id})]  # type: ignore[misc]
