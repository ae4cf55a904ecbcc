"""The attempts of jobs: one row per incarnation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select

from thebes.store.database import Prepared
from thebes.store.rows import AttemptRow, Parts
from thebes.store.schema import (
    attempts,
)

_ATTEMPT_COLUMNS = [attempts.c[field.name] for field in fields(AttemptRow)]
_ATTEMPT_NAMES = frozenset(column.name for column in _ATTEMPT_COLUMNS)
_ATTEMPT = select(*_ATTEMPT_COLUMNS)
_ATTEMPTS_OF = _ATTEMPT.where(attempts.c.job_id == bindparam("id")).order_by(attempts.c.incarnation)
_ATTEMPT_BY_ID = _ATTEMPT.where(attempts.c.job_id == bindparam("id"), attempts.c.incarnation == bindparam("number"))
_OPEN_ATTEMPTS = _ATTEMPT.where(attempts.c.ended_s.is_(None)).order_by(attempts.c.created_s, attempts.c.job_id)
_INSERT_ATTEMPT = Prepared(attempts.insert().values({name: bindparam(name) for name in _ATTEMPT_NAMES}))
_PARTS, _CODES = (list(_ATTEMPT_COLUMNS).index(attempts.c[name]) for name in ("parts", "codes"))
_ATTEMPT_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_ATTEMPT_NAMES),
    "state": "starting",
    "mechanism": "checkpoint",
    "parts": "[]",
    "codes": "{}",
    "cause": "",
    "detail": "",
    "run_s": 0.0,
    "lost_s": 0.0,
}


def insert_attempt(c: Connection, job_id: str, incarnation: int, *, created_s: float, **columns: Any) -> None:
    """Store a new incarnation; `parts` are pairs (node, GPUs). IntegrityError if it exists or the job does not."""
    values = {**_ATTEMPT_DEFAULTS, **_attempt_values(columns)}
    _INSERT_ATTEMPT.run(c, {**values, "job_id": job_id, "incarnation": incarnation, "created_s": created_s})


def update_attempt(c: Connection, job_id: str, incarnation: int, **columns: Any) -> None:
    """Set columns of one attempt. KeyError if there is no such attempt."""
    if not columns:
        return
    values = _attempt_values(columns)
    statement = _attempt_update(tuple(values))
    if statement.run(c, {"which": job_id, "number": incarnation, **values}).rowcount != 1:
        raise KeyError(f"{job_id}.{incarnation}")


@lru_cache(maxsize=256)
def _attempt_update(names: tuple[str, ...]) -> Prepared:
    which = (attempts.c.job_id == bindparam("which"), attempts.c.incarnation == bindparam("number"))
    return Prepared(attempts.update().where(*which).values({name: bindparam(name) for name in names}))


def _attempt_values(columns: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := columns.keys() - (_ATTEMPT_NAMES - {"job_id", "incarnation"}):
        raise TypeError(f"an attempt's {', '.join(sorted(unknown))} cannot be set")
    values = dict(columns)
    if "parts" in values:
        values["parts"] = json.dumps([[node, list(gpus)] for node, gpus in values["parts"]])
    if "codes" in values:
        values["codes"] = json.dumps(dict(values["codes"]))
    return values


def get_attempt(c: Connection, job_id: str, incarnation: int) -> AttemptRow | None:
    row = c.execute(_ATTEMPT_BY_ID, {"id": job_id, "number": incarnation}).first()
    return None if row is None else _attempt(row)


def attempts_of(c: Connection, job_id: str) -> list[AttemptRow]:
    """All incarnations of a job, first to last."""
    return [_attempt(row) for row in c.execute(_ATTEMPTS_OF, {"id": job_id})]


def open_attempts(c: Connection) -> list[AttemptRow]:
    """All attempts that have not ended, oldest first."""
    return [_attempt(row) for row in c.execute(_OPEN_ATTEMPTS)]


def _attempt(row: Row[Any]) -> AttemptRow:
    values = list(row)
    parts: Parts = tuple((node, tuple(gpus)) for node, gpus in json.loads(values[_PARTS]))
    values[_PARTS] = parts
    values[_CODES] = {int(rank): code for rank, code in json.loads(values[_CODES]).items()}
    return AttemptRow(*values)
