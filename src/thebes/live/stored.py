"""What the controller reads in the store: when it starts, and about dependencies when a job comes in."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from sqlalchemy import Connection, select

from thebes import store as db
from thebes.jobspec.spec import JobSpec, must_complete
from thebes.live.errors import Invalid
from thebes.store.principal import Principal
from thebes.store.schema import ALIVE_STATES, attempts, jobs


def last_instant_s(c: Connection) -> float:
    """The latest instant that was written down; cluster time does not go back behind it."""
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
    """For each job, the jobs before it that have not ended; and one that had to complete and ended otherwise."""
    specs = {row.array_id or row.id: row.spec for row in rows}
    stands: dict[str, tuple[set[str], tuple[str, str] | None]] = {}
    for number, names in db.dependencies_of_all(c, specs).items():
        others = [other for name in names for other in named(c, name)]
        stands[number] = _how_they_stand(others, json.loads(specs[number]).get("after", ()))
    waits_for: dict[str, set[str]] = {}
    failed: dict[str, tuple[str, str]] = {}
    for row in rows:
        unfinished, bad = stands.get(row.array_id or row.id, (None, None))
        if unfinished:
            waits_for[row.id] = unfinished
        if bad is not None:
            failed[row.id] = bad
    return waits_for, failed


def check_dependencies(c: Connection, spec: JobSpec, principal: Principal) -> tuple[set[str], tuple[str, str] | None]:
    """The jobs before it that have not ended; and one that had to complete and never will, with its state."""
    others: list[db.JobRow] = []
    for option, names in (("--after", spec.after), ("--after-any", spec.after_any)):
        for name in names:
            rows = named(c, name)
            if not rows or not (principal.is_admin or rows[0].user == principal.user):
                raise Invalid(f"{option} {name}: there is no such job", hint="`thebes ps -a` lists yours")
            others += rows
    return _how_they_stand(others, spec.after)


def _how_they_stand(others: Iterable[db.JobRow], after: Collection[str]) -> tuple[set[str], tuple[str, str] | None]:
    """Which jobs before it have not ended; and one of `after` that ended otherwise than completed."""
    waits_for: set[str] = set()
    failed: tuple[str, str] | None = None
    for other in others:
        if not other.terminal:
            waits_for.add(other.id)
        elif other.state != "completed" and must_complete(after, other.id):
            failed = other.id, other.state
    return waits_for, failed


def newest_job(folder: Path) -> int:
    """The highest number of a job that has a folder of its own there."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - there may be a hundred thousand
    except OSError:
        return 0
    return max((int(number) for name in names if (number := name.partition("_")[0]).isdecimal()), default=0)
