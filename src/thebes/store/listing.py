"""Lists of jobs, page by page, and how many there are in each state: as far as the asking user may see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, or_, select, union

from thebes.model.errors import UserError
from thebes.store.principal import Viewer
from thebes.store.queries import JOB, with_specs
from thebes.store.rows import JobRow
from thebes.store.schema import (
    STATES,
    job_counts,
    jobs,
)

MAX_PAGE = 1000


def list_jobs(
    c: Connection,
    *,
    viewer: Viewer,
    states: Iterable[str] | None = None,
    user: str | None = None,
    tenant: str | None = None,
    name: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
    oldest_first: bool = False,
) -> tuple[list[JobRow], str | None]:
    """One page of what the viewer may see, newest first, and the cursor of the next page.

    The work does not grow with the number of jobs: a page is merged from a few index ranges, one per state and per way
    in which the job is visible, each read in order and no further than the page is long.
    """
    limit = max(1, min(limit, MAX_PAGE))
    after_seq = _seq_of(cursor)
    wanted_states = None if states is None else tuple(sorted(set(states) & set(STATES)))
    scopes = _scopes(viewer, {"user": user, "tenant": tenant})
    if wanted_states == () or not scopes:
        return [], None
    filters = [scope | ({} if name is None else {"name": name}) for scope in scopes]
    if wanted_states is None and any(filters):
        wanted_states = STATES  # the indexes have the state before seq, so all states are named
    values: dict[str, Any] = {"rows": limit + 1}
    shape = []
    for i, equal in enumerate(filters):
        shape.append(tuple(equal))
        values.update({f"{column}_{i}": value for column, value in equal.items()})
    if wanted_states is not None:
        values.update({f"state_{i}": state for i, state in enumerate(wanted_states)})
    if after_seq is not None:
        values["after_seq"] = after_seq
    statement = _page(tuple(shape), len(wanted_states or ()), after_seq is not None, oldest_first)
    rows = c.execute(statement, values).all()
    page = with_specs(c, rows[:limit])
    return page, str(page[-1].seq) if len(rows) > limit else None


@lru_cache(maxsize=256)
def _page(shape: tuple[tuple[str, ...], ...], states: int, continued: bool, oldest_first: bool) -> Select[Any]:
    """The statement for a page: the columns given in each branch, and the number of states (0 for any)."""
    order = jobs.c.seq.asc() if oldest_first else jobs.c.seq.desc()
    branches = []
    for i, columns in enumerate(shape):
        for state in range(max(states, 1)):
            branch = select(jobs.c.seq).where(*(jobs.c[column] == bindparam(f"{column}_{i}") for column in columns))
            if states:
                branch = branch.where(jobs.c.state == bindparam(f"state_{state}"))
            if continued:
                after = bindparam("after_seq")
                branch = branch.where(jobs.c.seq > after if oldest_first else jobs.c.seq < after)
            branches.append(select(branch.order_by(order).limit(bindparam("rows")).subquery().c.seq))
    if len(branches) == 1:
        seqs = branches[0]
    else:
        merged = union(*branches).subquery()
        seq = merged.c.seq
        seqs = select(seq).order_by(seq.asc() if oldest_first else seq.desc()).limit(bindparam("rows"))
    return JOB.where(jobs.c.seq.in_(seqs)).order_by(order)


def _scopes(viewer: Viewer, wanted: Mapping[str, str | None]) -> list[dict[str, str]]:
    """Sets of equalities; a job is shown if it satisfies one of the sets."""
    given = {column: value for column, value in wanted.items() if value is not None}
    if viewer.is_admin:
        return [given]
    allowed = [{"user": viewer.user}] + ([{"tenant": viewer.tenant}] if viewer.sees_tenant else [])
    return [
        given | scope for scope in allowed if all(given.get(column, value) == value for column, value in scope.items())
    ]


def _seq_of(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise UserError(f"{cursor[:40]!r} is not a cursor", hint="Pass `next` of the page before as it is.")
    return int(cursor)


def count_by_state(c: Connection, viewer: Viewer) -> dict[str, int]:
    """How many jobs the viewer may see, for every state."""
    counted = dict.fromkeys(STATES, 0)
    seen = []
    if not viewer.is_admin:
        own = job_counts.c.user == viewer.user
        seen = [or_(own, job_counts.c.tenant == viewer.tenant) if viewer.sees_tenant else own]
    statement = select(job_counts.c.state, func.sum(job_counts.c.number)).where(*seen).group_by(job_counts.c.state)
    counted.update((state, int(number)) for state, number in c.execute(statement))
    return counted
