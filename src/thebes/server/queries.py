"""Jobs, their attempts and dependencies, drained nodes and small facts: what the controller writes and everybody reads.

Every function takes a connection first and commits nothing. Statements that are needed often are built once: to build
one costs more than to run it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, func, literal_column, or_, select, union

from thebes.model.errors import UserError
from thebes.server.database import Prepared
from thebes.server.principal import Viewer
from thebes.server.rows import AttemptRow, JobRow, Parts
from thebes.server.schema import (
    ALIVE_STATES,
    STATES,
    attempts,
    counters,
    dependencies,
    job_counts,
    jobs,
    meta,
    nodes,
    specs,
)
from thebes.server.store_errors import StoreConflict

MAX_PAGE = 1000
CHUNK = 500  # values in one IN (…): well below any database's limit on parameters

_JOB_COLUMNS = [jobs.c[field.name] for field in fields(JobRow) if field.name != "spec"]
_JOB = select(*_JOB_COLUMNS, jobs.c.spec_id)
_JOB_BY_ID = _JOB.where(jobs.c.id == bindparam("id"))
_JOBS_BY_ARRAY = _JOB.where(jobs.c.array_id == bindparam("id")).order_by(jobs.c.seq)
_JOBS_BY_KEY = _JOB.where(jobs.c.user == bindparam("user"), jobs.c.client_key == bindparam("client_key")).order_by(
    jobs.c.seq
)
_ALIVE = _JOB.where(jobs.c.state.in_(ALIVE_STATES)).order_by(jobs.c.seq)
_INSERT_JOBS, _INSERT_DEPENDENCY = jobs.insert(), dependencies.insert()
_INSERT_JOB = Prepared(
    jobs.insert().values({column.name: bindparam(column.name) for column in jobs.c if column.name != "seq"})
)
_INSERT_SPEC = Prepared(specs.insert().values(body=bindparam("body")))
_SPEC = select(specs.c.body).where(specs.c.id == bindparam("id"))
_SPECS = select(specs.c.id, specs.c.body).where(specs.c.id.in_(bindparam("ids", expanding=True)))
_DEPENDENCIES = select(dependencies.c.job_id, dependencies.c.after_id).where(
    dependencies.c.job_id.in_(bindparam("numbers", expanding=True))
)
_JOB_COUNTER = counters.c.name == literal_column("'job'")
_COUNT_UP = Prepared(counters.update().where(_JOB_COUNTER).values(value=counters.c.value + literal_column("1")))
_COUNT = Prepared(select(counters.c.value).where(_JOB_COUNTER))
_KIND_OF_JOB = Prepared(select(jobs.c.user, jobs.c.tenant, jobs.c.state).where(jobs.c.id == bindparam("id")))
_COUNT_MORE = Prepared(
    job_counts.update()
    .where(
        job_counts.c.user == bindparam("of_user"),
        job_counts.c.tenant == bindparam("of_tenant"),
        job_counts.c.state == bindparam("of_state"),
    )
    .values(number=job_counts.c.number + bindparam("more"))
)
_COUNT_FIRST = Prepared(
    job_counts.insert().values(
        user=bindparam("of_user"), tenant=bindparam("of_tenant"), state=bindparam("of_state"), number=bindparam("more")
    )
)
_KEY_IS_USED = Prepared(
    select(literal_column("1")).where(jobs.c.user == bindparam("user"), jobs.c.client_key == bindparam("client_key"))
)

_JOB_IS_FIXED = {"seq", "id", "array_id", "array_index", "user", "tenant", "client_key", "submission", "submit_s"}
_JOB_MAY_CHANGE = frozenset(column.name for column in _JOB_COLUMNS) - _JOB_IS_FIXED


# ---- jobs


def create_jobs(
    c: Connection,
    spec_json: str,
    *,
    members: Sequence[int | None] = (None,),
    user: str,
    tenant: str,
    name: str | None,
    gpus: int,
    nodes: int | None,
    priority: int,
    submit_s: float,
    client_key: str | None = None,
    held: bool = False,
    after: Iterable[str] = (),
) -> list[JobRow]:
    """A job, or one per array index. With a client key that was used before: the jobs that it made then."""
    if not members or (None in members and len(members) > 1) or len(set(members)) < len(members):
        raise ValueError("members: one None, or distinct array indices")
    submission = None
    if client_key is not None:
        submission = _submission_digest(spec_json, members, tenant, held)
        key = {"user": user, "client_key": client_key}
        if key_is_used(c, user, client_key):
            earlier = c.execute(_JOBS_BY_KEY, key).all()
            if earlier[0].submission != submission:
                raise StoreConflict(
                    f"the key {client_key!r} was used for another job ({earlier[0].array_id or earlier[0].id})",
                    hint="A key names one submission and makes its retries harmless; take a new key for a new job.",
                )
            return _with_specs(c, earlier)
    _COUNT_UP.run(c)
    number = str(_COUNT.run(c).fetchone()[0])
    spec_id = _INSERT_SPEC.insert(c, {"body": spec_json})
    common: dict[str, Any] = {
        "user": user,
        "tenant": tenant,
        "name": name,
        "state": "held" if held else "queued",
        "reason": "",
        "gpus": gpus,
        "nodes": nodes,
        "priority": priority,
        "submit_s": submit_s,
        "first_start_s": None,
        "end_s": None,
        "incarnation": 0,
        "exit_code": None,
        "preemptions": 0,
        "failures": 0,
        "losses": 0,
        "run_s": 0.0,
        "lost_gpu_s": 0.0,
        "hold": held,
        "client_key": client_key,
        "submission": submission,
    }
    _count(c, user, tenant, common["state"], len(members))
    if after_ids := list(dict.fromkeys(after)):
        c.execute(_INSERT_DEPENDENCY, [{"job_id": number, "after_id": after_id} for after_id in after_ids])
    if members[0] is None:
        values: dict[str, Any] = {"id": number, "array_id": None, "array_index": None, **common}
        seq = _INSERT_JOB.insert(c, {"spec_id": spec_id, **values})
        return [JobRow(seq=seq, spec=spec_json, **values)]
    c.execute(
        _INSERT_JOBS,
        [
            {"id": f"{number}_{index}", "array_id": number, "array_index": index, "spec_id": spec_id, **common}
            for index in members
        ],
    )
    return [_job(row, spec_json) for row in c.execute(_JOBS_BY_ARRAY, {"id": number})]


def key_is_used(c: Connection, user: str, client_key: str) -> bool:
    """Whether the user has submitted with this key before."""
    return _KEY_IS_USED.run(c, {"user": user, "client_key": client_key}).fetchone() is not None


def _submission_digest(spec_json: str, members: Sequence[int | None], tenant: str, held: bool) -> str:
    # The order of keys in the JSON is nobody's intention.
    said = json.dumps([json.loads(spec_json), list(members), tenant, held], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def update_job(c: Connection, job_id: str, **columns: Any) -> None:
    """Set columns of one job. KeyError when there is no such job, TypeError for a column that is not or may not."""
    if not columns:
        return
    if unknown := columns.keys() - _JOB_MAY_CHANGE:
        raise TypeError(f"a job's {', '.join(sorted(unknown))} cannot be set")
    before = _KIND_OF_JOB.run(c, {"id": job_id}).fetchone() if "state" in columns else None
    if _job_update(tuple(columns)).run(c, {"which": job_id, **columns}).rowcount != 1:
        raise KeyError(job_id)
    if before is not None and before[2] != columns["state"]:
        user, tenant, state = before
        _count(c, user, tenant, state, -1)
        _count(c, user, tenant, columns["state"], 1)


@lru_cache(maxsize=256)
def _job_update(names: tuple[str, ...]) -> Prepared:
    change = {name: bindparam(name) for name in names}
    return Prepared(jobs.update().where(jobs.c.id == bindparam("which")).values(change))


def _count(c: Connection, user: str, tenant: str, state: str, more: int) -> None:
    values = {"of_user": user, "of_tenant": tenant, "of_state": state, "more": more}
    if not _COUNT_MORE.run(c, values).rowcount:
        _COUNT_FIRST.run(c, values)


def get_job(c: Connection, job_id: str) -> JobRow | None:
    """One job; None also for the number of an array, which names its `members`."""
    row = c.execute(_JOB_BY_ID, {"id": job_id}).first()
    return None if row is None else _job(row, c.execute(_SPEC, {"id": row.spec_id}).scalar_one())


def members(c: Connection, array_id: str) -> list[JobRow]:
    """The jobs of an array in the order in which they were asked for; [] when there is none."""
    return _with_specs(c, c.execute(_JOBS_BY_ARRAY, {"id": array_id}).all())


def alive_jobs(c: Connection) -> list[JobRow]:
    """All jobs that have not ended, in the order of submission."""
    return _with_specs(c, c.execute(_ALIVE).all())


def _job(row: Any, spec: str) -> JobRow:
    *plain, _spec_id = row
    return JobRow(*plain, spec=spec)


def _with_specs(c: Connection, rows: Sequence[Row[Any]]) -> list[JobRow]:
    # Members of an array share one text, in memory too.
    bodies: dict[int, str] = {}
    for ids in _chunks(sorted({row[-1] for row in rows})):
        bodies.update((row[0], row[1]) for row in c.execute(_SPECS, {"ids": ids}))
    return [_job(row, bodies[row[-1]]) for row in rows]


def _chunks(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (values[i : i + CHUNK] for i in range(0, len(values), CHUNK))


def dependencies_of(c: Connection, job_id: str) -> list[str]:
    """Ids that this job (or its array) comes after."""
    number = job_id.partition("_")[0]
    return list(c.scalars(select(dependencies.c.after_id).where(dependencies.c.job_id == number)))


def dependencies_of_all(c: Connection, numbers: Iterable[str]) -> dict[str, list[str]]:
    """The same for many jobs and arrays at once; those that come after nobody are left out."""
    found: dict[str, list[str]] = {}
    for some in _chunks(sorted(numbers)):
        for job_id, after_id in c.execute(_DEPENDENCIES, {"numbers": some}):
            found.setdefault(job_id, []).append(after_id)
    return found


def dependents_of(c: Connection, after_id: str) -> list[str]:
    """Jobs and arrays that come after this one, or after the array that it belongs to."""
    names = {after_id, after_id.partition("_")[0]}
    found = c.scalars(select(dependencies.c.job_id).where(dependencies.c.after_id.in_(sorted(names))).distinct())
    return sorted(found, key=int)


# ---- lists


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

    The work does not grow with the number of jobs: a page is merged from a few index ranges, one per state and reason
    to see a job, each read in order and no further than the page is long.
    """
    limit = max(1, min(limit, MAX_PAGE))
    after_seq = _seq_of(cursor)
    wanted_states = None if states is None else tuple(sorted(set(states) & set(STATES)))
    scopes = _scopes(viewer, {"user": user, "tenant": tenant})
    if wanted_states == () or not scopes:
        return [], None
    filters = [scope | ({} if name is None else {"name": name}) for scope in scopes]
    if wanted_states is None and any(filters):
        wanted_states = STATES  # the indexes have the state before seq
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
    page = _with_specs(c, rows[:limit])
    return page, str(page[-1].seq) if len(rows) > limit else None


@lru_cache(maxsize=256)
def _page(shape: tuple[tuple[str, ...], ...], states: int, continued: bool, oldest_first: bool) -> Select[Any]:
    """The statement for a page: per branch, which columns are given; how many states (0: any)."""
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
    return _JOB.where(jobs.c.seq.in_(seqs)).order_by(order)


def _scopes(viewer: Viewer, wanted: Mapping[str, str | None]) -> list[dict[str, str]]:
    """Sets of equalities; what the viewer may see and wants to see is what satisfies one of them."""
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


# ---- attempts

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
    """A new incarnation; `parts` are pairs (node, GPUs). IntegrityError if it exists or the job does not."""
    values = {**_ATTEMPT_DEFAULTS, **_attempt_values(columns)}
    _INSERT_ATTEMPT.run(c, {**values, "job_id": job_id, "incarnation": incarnation, "created_s": created_s})


def update_attempt(c: Connection, job_id: str, incarnation: int, **columns: Any) -> None:
    """Set columns of one attempt. KeyError when there is no such attempt."""
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


# ---- nodes, small facts


def set_drained(c: Connection, node: str, drained: bool, reason: str = "") -> None:
    """Remember that a node shall get no new jobs, or that it may again."""
    values = {"drained": drained, "reason": reason}
    if not c.execute(nodes.update().where(nodes.c.name == node).values(values)).rowcount:
        c.execute(nodes.insert().values(name=node, **values))


def drained_nodes(c: Connection) -> dict[str, str]:
    """The reason, by name of the node."""
    rows = c.execute(select(nodes.c.name, nodes.c.reason).where(nodes.c.drained).order_by(nodes.c.name))
    return {row.name: row.reason for row in rows}


def get_meta(c: Connection, key: str) -> str | None:
    return c.scalar(select(meta.c.value).where(meta.c.key == key))


def set_meta(c: Connection, key: str, value: str) -> None:
    if not c.execute(meta.update().where(meta.c.key == key).values(value=value)).rowcount:
        c.execute(meta.insert().values(key=key, value=value))


def pass_over_jobs(c: Connection, newest: int) -> None:
    """Numbers up to this one are not given out: somebody has had them."""
    c.execute(counters.update().where(_JOB_COUNTER, counters.c.value < newest).values(value=newest))


def jobs_ever(c: Connection) -> int:
    """How many numbers of jobs were given out: 0 for a store that was never used."""
    return int(_COUNT.run(c).fetchone()[0])
