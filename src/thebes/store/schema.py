"""The tables of the store, as SQLAlchemy Core objects, and the states that a job can be in.

Times are cluster time in seconds (close to Unix time). No path of this machine is stored, so an instance folder can be
moved. A job's specification lies in a table of its own: the members of an array share one, and lists stay small.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    func,
)
from sqlalchemy import (
    Integer as _Integer,
)
from sqlalchemy import (
    Text as _Text,
)

ALIVE_STATES: tuple[str, ...] = ("queued", "held", "starting", "running", "preempting", "suspended")
TERMINAL_STATES: tuple[str, ...] = ("completed", "failed", "cancelled", "timeout")
STATES: tuple[str, ...] = ALIVE_STATES + TERMINAL_STATES

JOURNAL_KINDS = ("snapshot", "input", "decision")

# SQLite's integers have 64 bits and it sorts texts by their bytes; PostgreSQL is asked for the same.
Integer = _Integer().with_variant(BigInteger(), "postgresql")
Text = _Text().with_variant(_Text(collation="C"), "postgresql")

metadata = MetaData()


def _one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(value) for value in values)})")


def _only(condition: ColumnElement[bool]) -> dict[str, Any]:
    """The condition of an index that covers only these rows, in either database."""
    return {"sqlite_where": condition, "postgresql_where": condition}


schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

# The last number given out, for each kind of thing. Members of an array share their number, so jobs.seq is another one.
counters = Table("counters", metadata, Column("name", Text, primary_key=True), Column("value", Integer, nullable=False))

specs = Table("specs", metadata, Column("id", Integer, primary_key=True), Column("body", Text, nullable=False))

jobs = Table(
    "jobs",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("array_id", Text),
    Column("array_index", Integer),
    Column("user", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("name", Text),
    Column("state", Text, _one_of("state", STATES), nullable=False),
    Column("reason", Text, nullable=False),
    Column("spec_id", Integer, ForeignKey("specs.id"), nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("nodes", Integer),
    Column("priority", Integer, nullable=False),
    Column("submit_s", Float, nullable=False),
    Column("first_start_s", Float),
    Column("end_s", Float),
    Column("incarnation", Integer, nullable=False),
    Column("exit_code", Integer),
    Column("preemptions", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("losses", Integer, nullable=False),
    Column("run_s", Float, nullable=False),
    Column("lost_gpu_s", Float, nullable=False),
    Column("hold", Boolean, nullable=False),
    Column("client_key", Text),
    Column("submission", Text),
    sqlite_autoincrement=True,
)
# Every list is a merge of a few ranges of one of these indexes, each read in the order of seq. The columns after seq
# let the other filters be answered from the index alone.
Index("jobs_by_state", jobs.c.state, jobs.c.seq)
Index("jobs_by_user", jobs.c.user, jobs.c.state, jobs.c.seq, jobs.c.tenant, jobs.c.name)
Index("jobs_by_tenant", jobs.c.tenant, jobs.c.state, jobs.c.seq, jobs.c.user, jobs.c.name)
Index(
    "jobs_by_name",
    jobs.c.name,
    jobs.c.state,
    jobs.c.seq,
    sqlite_where=jobs.c.name.is_not(None),
    postgresql_where=jobs.c.name.is_not(None),
)
Index(
    "jobs_by_array",
    jobs.c.array_id,
    jobs.c.seq,
    sqlite_where=jobs.c.array_id.is_not(None),
    postgresql_where=jobs.c.array_id.is_not(None),
)
# In a plain UNIQUE two NULLs differ, but a single job has NULL as its array index.
Index(
    "jobs_by_client_key",
    jobs.c.user,
    jobs.c.client_key,
    func.coalesce(jobs.c.array_index, -1),
    unique=True,
    **_only(jobs.c.client_key.is_not(None)),
)

# The number of jobs of each sort, kept up by create_jobs and update_job, because counting would take longer and longer.
job_counts = Table(
    "job_counts",
    metadata,
    Column("user", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("number", Integer, nullable=False),
    PrimaryKeyConstraint("user", "tenant", "state"),
)

# `job_id` is the number shared by an array, or the id of a single job; `after_id` may name an array too.
dependencies = Table(
    "dependencies",
    metadata,
    Column("job_id", Text, nullable=False),
    Column("after_id", Text, nullable=False),
    PrimaryKeyConstraint("job_id", "after_id"),
)
Index("dependencies_by_after", dependencies.c.after_id)

attempts = Table(
    "attempts",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.id"), nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("parts", Text, nullable=False),
    Column("mechanism", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("started_s", Float),
    Column("ended_s", Float),
    Column("cause", Text, nullable=False),
    Column("codes", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("checkpoint_step", Integer),
    Column("checkpoint_path", Text),
    Column("checkpoint_s", Float),
    Column("step", Integer),
    Column("steps_per_s", Float),
    Column("run_s", Float, nullable=False),
    Column("startup_s", Float),
    Column("stop_s", Float),
    Column("lost_s", Float, nullable=False),
    PrimaryKeyConstraint("job_id", "incarnation"),
)
Index(
    "attempts_open",
    attempts.c.created_s,
    sqlite_where=attempts.c.ended_s.is_(None),
    postgresql_where=attempts.c.ended_s.is_(None),
)

# `user` and `tenant` are copied from the job, so that the right to see an event is known without reading the job.
events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("time_s", Float, nullable=False),
    Column("job_id", Text),
    Column("node", Text),
    Column("kind", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("user", Text),
    Column("tenant", Text),
    sqlite_autoincrement=True,
)
Index("events_by_job", events.c.job_id, events.c.seq)
Index("events_by_user", events.c.user, events.c.seq)
Index("events_by_tenant", events.c.tenant, events.c.seq)

journal = Table(
    "journal",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("time_s", Float, nullable=False),
    Column("kind", Text, _one_of("kind", JOURNAL_KINDS), nullable=False),
    Column("body", LargeBinary, nullable=False),
    sqlite_autoincrement=True,
)
Index("journal_by_kind", journal.c.kind, journal.c.seq)

tenants = Table(
    "tenants",
    metadata,
    Column("name", Text, primary_key=True),
    Column("gpu_quota", Integer),
    Column("open", Boolean, nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("hash", Text, nullable=False, unique=True),
    Column("user", Text, nullable=False),
    Column("role", Text, _one_of("role", ("admin", "user")), nullable=False),
    Column("tenant", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("expires_s", Float),
    Column("revoked", Boolean, nullable=False),
    sqlite_autoincrement=True,
)

nodes = Table(
    "nodes",
    metadata,
    Column("name", Text, primary_key=True),
    Column("drained", Boolean, nullable=False),
    Column("reason", Text, nullable=False),
)

# There is one row. `epoch` grows whenever a controller begins to lead, even if there is only one. It is the key, so
# that a commit can hold it (FOR KEY SHARE) without keeping the leader from renewing its lease.
leader = Table(
    "leader",
    metadata,
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("holder", Text, nullable=False),
    Column("beats", Integer, nullable=False),
    Column("expires_s", Float, nullable=False),  # by the clock of the database
)
FIRST_LEADER = {"epoch": 0, "holder": "", "beats": 0, "expires_s": 0.0}

controllers = Table(
    "controllers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("home", Text, nullable=False),
    Column("seen_s", Float, nullable=False),  # by the clock of the database
)

# The number of the last commit of each writer. It tells whether a commit was made whose answer was lost.
commits = Table(
    "commits",
    metadata,
    Column("writer", Text, primary_key=True),
    Column("number", Integer, nullable=False),
    Column("seen_s", Float, nullable=False),
)
