"""Jobs and their dependencies, drained nodes and small facts: what the controller writes and everybody reads.

Every function takes a connection first and commits nothing. Statements that are needed often are built once: to build
one costs more than to run it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Row, bindparam, literal_column, select

from thebes.store.database import Prepared
from thebes.store.errors import StoreConflict
from thebes.store.rows import JobRow
from thebes.store.schema import (
    ALIVE_STATES,
    counters,
    dependencies,
    job_counts,
    jobs,
    meta,
    nodes,
    specs,
)

CHUNK = 500  # values in one IN (…), well below any database's limit on parameters
_JOB_COLUMNS = [jobs.c[field.name] for field in fields(JobRow) if field.name != "spec"]
JOB = select(*_JOB_COLUMNS, jobs.c.spec_id)
_JOB_BY_ID = JOB.where(jobs.c.id == bindparam("id"))
_JOBS_BY_ARRAY = JOB.where(jobs.c.array_id == bindparam("id")).order_by(jobs.c.seq)
_JOBS_BY_KEY = JOB.where(jobs.c.user == bindparam("user"), jobs.c.client_key == bindparam("client_key")).order_by(
    jobs.c.seq
)
_ALIVE = JOB.where(jobs.c.state.in_(ALIVE_STATES)).order_by(jobs.c.seq)
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
    """Store a job, or one per array index. With a client key that was used before, return the jobs made then."""
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
            return with_specs(c, earlier)
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
    # The order of keys in the JSON means nothing.
    said = json.dumps([json.loads(spec_json), list(members), tenant, held], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def update_job(c: Connection, job_id: str, **columns: Any) -> None:
    """Set columns of one job. KeyError if there is no such job, TypeError for a column that must not be set."""
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
    """The jobs of an array in the order in which they were asked for; [] if there is no such array."""
    return with_specs(c, c.execute(_JOBS_BY_ARRAY, {"id": array_id}).all())


def alive_jobs(c: Connection) -> list[JobRow]:
    """All jobs that have not ended, in the order of submission."""
    return with_specs(c, c.execute(_ALIVE).all())


def _job(row: Any, spec: str) -> JobRow:
    *plain, _spec_id = row
    return JobRow(*plain, spec=spec)


def with_specs(c: Connection, rows: Sequence[Row[Any]]) -> list[JobRow]:
    # Members of an array share one text, also in memory.
    bodies: dict[int, str] = {}
    for ids in chunks(sorted({row[-1] for row in rows})):
        bodies.update((row[0], row[1]) for row in c.execute(_SPECS, {"ids": ids}))
    return [_job(row, bodies[row[-1]]) for row in rows]


def chunks(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (values[i : i + CHUNK] for i in range(0, len(values), CHUNK))


def dependencies_of(c: Connection, job_id: str) -> list[str]:
    """The ids after which this job (or its array) comes."""
    number = job_id.partition("_")[0]
    return list(c.scalars(select(dependencies.c.after_id).where(dependencies.c.job_id == number)))


def dependencies_of_all(c: Connection, numbers: Iterable[str]) -> dict[str, list[str]]:
    """The same for many jobs and arrays at once; those without dependencies are left out."""
    found: dict[str, list[str]] = {}
    for some in chunks(sorted(numbers)):
        for job_id, after_id in c.execute(_DEPENDENCIES, {"numbers": some}):
            found.setdefault(job_id, []).append(after_id)
    return found


def dependents_of(c: Connection, after_id: str) -> list[str]:
    """Jobs and arrays that come after this one, or after the array that it belongs to."""
    names = {after_id, after_id.partition("_")[0]}
    found = c.scalars(select(dependencies.c.job_id).where(dependencies.c.after_id.in_(sorted(names))).distinct())
    return sorted(found, key=int)


def set_drained(c: Connection, node: str, drained: bool, reason: str = "") -> None:
    """Remember that a node is to get no new jobs, or that it may get jobs again."""
    values = {"drained": drained, "reason": reason}
    if not c.execute(nodes.update().where(nodes.c.name == node).values(values)).rowcount:
        c.execute(nodes.insert().values(name=node, **values))


def drained_nodes(c: Connection) -> dict[str, str]:
    """The reason why each drained node is drained, by its name."""
    rows = c.execute(select(nodes.c.name, nodes.c.reason).where(nodes.c.drained).order_by(nodes.c.name))
    return {row.name: row.reason for row in rows}


def get_meta(c: Connection, key: str) -> str | None:
    return c.scalar(select(meta.c.value).where(meta.c.key == key))


def set_meta(c: Connection, key: str, value: str) -> None:
    if not c.execute(meta.update().where(meta.c.key == key).values(value=value)).rowcount:
        c.execute(meta.insert().values(key=key, value=value))


def pass_over_jobs(c: Connection, newest: int) -> None:
    """Give out no numbers up to this one, because other jobs had them."""
    c.execute(counters.update().where(_JOB_COUNTER, counters.c.value < newest).values(value=newest))


def jobs_ever(c: Connection) -> int:
    """How many numbers of jobs were given out; 0 for a store that was never used."""
    return int(_COUNT.run(c).fetchone()[0])
