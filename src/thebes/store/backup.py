"""A backup is one file, and it is a SQLite store, whichever database it comes from or goes to.

So any SQLite tool can open a backup, and a cluster can move from one database to the other by it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, func, inspect, select, text

from thebes import store as db
from thebes.model.errors import UserError
from thebes.protocol.instance import explain
from thebes.store import schema, sqlite
from thebes.store.database import driver

AT_ONCE = 1000
# These belong to running controllers, and not to the cluster.
PASSING = (schema.controllers, schema.commits, schema.schema_version)
# Agents follow the highest epoch that they have seen, and a backup may be older than that.
EPOCHS_AHEAD = 1_000_000


def _tables() -> list[Table]:
    return [table for table in schema.metadata.sorted_tables if table not in PASSING]


def _numbered() -> list[Table]:
    """Tables whose numbers are never used twice, not even when the last row is gone."""
    return [table for table in _tables() if table.dialect_options["sqlite"]["autoincrement"]]


def save(where: Path | str, target: Path) -> int:
    """Write a backup, whole or not at all, also while a controller is at work; returns its size in bytes."""
    if isinstance(where, Path) and not where.exists():
        raise UserError(f"there is no store at {where}", hint="name the folder of an instance with --dir")
    unfinished = target.with_name(target.name + ".tmp")
    try:
        unfinished.unlink(missing_ok=True)
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        with db.Store.open(where) as store, store.read() as c:
            if c.dialect.name == "sqlite":
                with contextlib.closing(sqlite3.connect(unfinished)) as copy:
                    driver(c).backup(copy)
            else:
                with db.Store.open(unfinished) as copied:
                    copied.change_blocking(lambda to: _copy(c, to))
        # The copy is to be one file, without a log beside it.
        with contextlib.closing(sqlite3.connect(unfinished)) as copy:
            copy.execute("PRAGMA journal_mode=DELETE")
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(target)
        return target.stat().st_size
    except OSError as error:
        raise explain(error, target, "cannot be written") from error
    finally:
        for path in (unfinished, *(Path(f"{unfinished}{end}") for end in ("-wal", "-shm"))):
            path.unlink(missing_ok=True)


def restore(source: Path, where: Path | str, *, force: bool = False) -> int:
    """Put a backup into an empty store, or with `force` into any store; returns the number of jobs."""
    if not source.is_file():
        raise UserError(f"there is no file {source}", hint="name one that `thebes backup` has written")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "store.db"
        shutil.copyfile(source, copy)
        sqlite.prepare_file(copy)  # it raises a UserError if this is no SQLite file
        with db.Store.open(copy) as backup, db.Store.open(where) as store, backup.read() as c:
            _check_unused(store)
            with store.read() as there:
                if not force and _in_use(there):
                    raise UserError(
                        f"the store {store.database.label} is not empty ({_jobs(db.jobs_ever(there))} so far)",
                        hint="choose another one; or --force: what is there now is gone then",
                    )
            store.change_blocking(lambda to: _copy(c, to))
            return int(c.scalar(select(func.count()).select_from(schema.jobs)) or 0)


def _in_use(c: Connection) -> bool:
    return bool(db.jobs_ever(c)) or c.execute(select(schema.events.c.seq).limit(1)).first() is not None


def _check_unused(store: db.Store) -> None:
    from thebes.store.database import POSTGRES_SCHEMES

    if not store.database.label.startswith(POSTGRES_SCHEMES):
        return  # locks in the folder tell which processes use a file
    from thebes.store.leader import KnownController, LeaderLease
    from thebes.store.postgres import Postgres

    assert isinstance(store.database, Postgres)
    lease = LeaderLease(store.database, KnownController("", "", ""))
    try:
        alive = [member for member in lease.members() if member.alive]
    finally:
        lease.close()
    if alive:
        raise UserError(
            f"the store {store.database.label} is in use by {alive[0].name} ({alive[0].url})",
            hint="take all its controllers down first: `thebes down --keep-jobs`",
        )


def _copy(source: Connection, target: Connection) -> None:
    """Copy all rows, in place of those in the target."""
    before = int(target.execute(select(schema.leader.c.epoch)).scalar_one())
    for table in reversed(_tables()):
        target.execute(table.delete())
    for table in _tables():
        for rows in _rows(source, table):
            target.execute(table.insert(), rows)
    epoch = max(before, int(source.execute(select(schema.leader.c.epoch)).scalar_one())) + EPOCHS_AHEAD
    target.execute(schema.leader.update().values(epoch=epoch, holder="", beats=0, expires_s=0.0))
    for table in _numbered():
        _set_last(target, table, _last(source, table))
    if target.dialect.name == "postgresql":
        for table in (schema.specs,):  # PostgreSQL numbers these, too
            _set_last(target, table, _last(source, table))


def _rows(c: Connection, table: Table) -> Iterator[list[dict[str, Any]]]:
    keys = list(table.primary_key) or list(table.c)
    found = c.execution_options(yield_per=AT_ONCE).execute(select(table).order_by(*keys)).mappings()
    for part in found.partitions(AT_ONCE):
        yield [dict(row) for row in part]


def _last(c: Connection, table: Table) -> int:
    """The last number that was given out, also if its row is gone."""
    (key,) = table.primary_key
    newest = int(c.scalar(select(func.max(key))) or 0)
    if c.dialect.name == "postgresql":
        told = c.scalar(text(f"SELECT last_value FROM {_sequence(c, table)}"))
    elif inspect(c).has_table("sqlite_sequence"):
        told = c.scalar(text("SELECT seq FROM sqlite_sequence WHERE name = :name"), {"name": table.name})
    else:
        told = None
    return max(newest, int(told or 0))


def _set_last(c: Connection, table: Table, number: int) -> None:
    if c.dialect.name == "postgresql":
        c.execute(text(f"SELECT setval('{_sequence(c, table)}', :number, :used)"), _value(number))
        return
    c.execute(text("DELETE FROM sqlite_sequence WHERE name = :name"), {"name": table.name})
    c.execute(text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :seq)"), {"name": table.name, "seq": number})


def _value(number: int) -> dict[str, Any]:
    return {"number": max(number, 1), "used": number > 0}  # a sequence begins with 1, whether that was used or not


def _sequence(c: Connection, table: Table) -> str:
    (key,) = table.primary_key
    return str(c.scalar(text("SELECT pg_get_serial_sequence(:name, :key)"), {"name": table.name, "key": key.name}))


def _jobs(count: int) -> str:
    return f"{count} job{'' if count == 1 else 's'}"
