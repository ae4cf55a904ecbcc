"""What the controller asks of the store when it starts, and about dependencies when a job comes in."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from sqlalchemy import Connection, select

from thebes.server import store as db
from thebes.server.errors import Invalid
from thebes.server.principal import Principal
from thebes.server.schema import ALIVE_STATES, attempts, jobs


def last_instant_s(c: Connection) -> float:
    """The latest instant that was written down: time does not go back behind it."""
    newest = list(c.scalars(select(jobs.c.submit_s).order_by(jobs.c.seq.desc()).limit(1)))
    newest += [entry.time_s for entry in db.list_decisions(c, limit=1)]
    return max(newest, default=0.0)


def last_checkpoints(c: Connection, job_id: str | None = None) -> dict[str, tuple[int | None, str]]:
    """Step and path of the last checkpoint that each living job told; or this one, whether it lives or not."""
    whose = jobs.c.state.in_(ALIVE_STATES) if job_id is None else jobs.c.id == job_id
    found = c.execute(
        select(attempts.c.job_id, attempts.c.checkpoint_step, attempts.c.checkpoint_path)
        .join(jobs, jobs.c.id == attempts.c.job_id)
        .where(whose, attempts.c.checkpoint_path.is_not(None))
        .order_by(attempts.c.incarnation)
    )
    return {row.job_id: (row.checkpoint_step, row.checkpoint_path) for row in found}


def named(c: Connection, name: str) -> list[db.JobRow]:
    """The job of this id, or all members of the array."""
    one = db.get_job(c, name)
    return [one] if one is not None else db.members(c, name)


def unfinished_dependencies(
    c: Connection, rows: Collection[db.JobRow]
) -> tuple[dict[str, set[str]], dict[str, tuple[str, str]]]:
    """Of each job, those it comes after that have not ended; and one that ended otherwise than completed."""
    comes_after = db.dependencies_of_all(c, {row.array_id or row.id for row in rows})
    others = {number: [other for name in names for other in named(c, name)] for number, names in comes_after.items()}
    waits_for: dict[str, set[str]] = {}
    failed: dict[str, tuple[str, str]] = {}
    for row in rows:
        for other in others.get(row.array_id or row.id, ()):
            if not other.terminal:
                waits_for.setdefault(row.id, set()).add(other.id)
            elif other.state != "completed":
                failed[row.id] = other.id, other.state
    return waits_for, failed


def check_dependencies(
    c: Connection, after: Collection[str], principal: Principal
) -> tuple[set[str], tuple[str, str] | None]:
    """What is not completed yet of the jobs to come after; and the one that never will be, with its state."""
    waits_for: set[str] = set()
    failed: tuple[str, str] | None = None
    for name in after:
        rows = named(c, name)
        if not rows or not (principal.is_admin or rows[0].user == principal.user):
            raise Invalid(f"--after {name}: there is no such job", hint="`thebes ps -a` lists yours")
        for row in rows:
            if row.terminal and row.state != "completed":
                failed = row.id, row.state
            elif not row.terminal:
                waits_for.add(row.id)
    return waits_for, failed


def newest_job(folder: Path) -> int:
    """The highest number of a job that has a folder of its own there."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - there may be a hundred thousand
    except OSError:
        return 0
    return max((int(number) for name in names if (number := name.partition("_")[0]).isdecimal()), default=0)
