"""Everything that is particular to SQLite: connections, transactions, which errors mean "the disk", checks, copies.

`postgres.py` is the same for PostgreSQL. Connections are in the driver's autocommit mode; transactions are begun and
ended here explicitly, so that nothing is committed by accident.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from thebes.model.errors import UserError
from thebes.store.database import Database, WriteSide
from thebes.store.errors import StoreUnavailable

Error = sqlite3.Error

HEADER = b"SQLite format 3\0"
BUSY_TIMEOUT_MS = 5_000
QUICK_CHECK_S = 0.5  # a large store is checked only for so long, because a restart must not take minutes

# Errors that say something about disk, file or memory and nothing about the change that met them.
FULL = "disk full"
FAULTS = {
    sqlite3.SQLITE_FULL: FULL,
    sqlite3.SQLITE_IOERR: "the disk reports an error",
    sqlite3.SQLITE_NOMEM: "memory is exhausted",
    sqlite3.SQLITE_READONLY: "the file or its folder is read-only",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened",
    sqlite3.SQLITE_PERM: "access is denied",
    sqlite3.SQLITE_AUTH: "access is denied",
    sqlite3.SQLITE_CORRUPT: "the file is damaged",
    sqlite3.SQLITE_NOTADB: "the file is damaged",
    sqlite3.SQLITE_BUSY: "another process holds it locked",
    sqlite3.SQLITE_LOCKED: "another process holds it locked",
    sqlite3.SQLITE_PROTOCOL: "another process holds it locked",
}


def fault_of(error: BaseException | None) -> str | None:
    """What is wrong with the storage, if this error says so; None for an error of the change itself."""
    if isinstance(error, DBAPIError):
        error = error.orig
    if not isinstance(error, sqlite3.Error):
        return None
    code = getattr(error, "sqlite_errorcode", None)
    # An extended code carries the primary one in its low byte.
    return None if code is None else FAULTS.get(code & 0xFF)


def writer_engine(path: Path) -> Engine:
    """An engine with one connection at a time, for the writer thread and for migrations."""
    return create_engine(
        "sqlite://",
        creator=lambda: _connect(path, writes=True),
        poolclass=NullPool,
        isolation_level="AUTOCOMMIT",
        hide_parameters=True,  # parameters may be environment values, and errors are logged
    )


def reader_engine(path: Path) -> Engine:
    """An engine whose connections cannot write; there may be many, from any thread."""
    return create_engine(
        "sqlite://",
        creator=lambda: _connect(path, writes=False),
        poolclass=QueuePool,
        pool_size=8,
        max_overflow=-1,
        isolation_level="AUTOCOMMIT",
        hide_parameters=True,
    )


def inspect_engine(path: Path) -> Engine:
    """An engine for a first look at a file that may not be ours: it does not change a byte, nor fold the log in."""
    uri = f"file:{urllib.parse.quote(str(path.absolute()))}?mode=ro"
    return create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None),
        poolclass=NullPool,
        isolation_level="AUTOCOMMIT",
        hide_parameters=True,
    )


def _connect(path: Path, *, writes: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False)
    try:
        if writes:
            _use_log(connection)
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute(f"PRAGMA journal_size_limit={64 << 20}")
            connection.execute("PRAGMA cache_size=-32000")
        else:
            connection.execute("PRAGMA query_only=ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_log(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. Unlike other statements, this does not wait for another process that does it."""
    until = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.005)


def driver(connection: Connection) -> sqlite3.Connection:
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    return raw


def begin_write(raw: sqlite3.Connection) -> None:
    # IMMEDIATE takes the write lock now; at the first change it would be too late to wait for it.
    raw.execute("BEGIN IMMEDIATE")


def begin_read(raw: sqlite3.Connection) -> None:
    raw.execute("BEGIN")


def prepare_file(path: Path) -> bool:
    """Check that `path` is SQLite's or may become so; returns True if new or empty. It changes no foreign file."""
    try:
        with path.open("rb") as file:
            head = file.read(len(HEADER))
    except FileNotFoundError:
        _create(path)
        return True
    except OSError as error:
        raise UserError(f"the store {path} cannot be read: {error.strerror}", hint=_access_hint(path)) from None
    if not head:
        _require_writable(path)
        return True
    if head != HEADER:
        raise UserError(
            f"{path} is not a Thebes store: it does not begin like a SQLite file",
            hint="It was left as it is. Move it away to start with an empty store, or put a good copy in its place.",
        )
    _require_writable(path)
    return False


def _create(path: Path) -> None:
    # Specifications hold environment values, so no other user may read the file. SQLite's side files get the same mode.
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise UserError(f"the store {path} cannot be created: {error.strerror}", hint=_access_hint(path)) from None


def _require_writable(path: Path) -> None:
    # The folder must be writable too, because SQLite keeps the write-ahead log beside the file.
    for place in (path, path.parent):
        if not os.access(place, os.W_OK):
            raise UserError(f"the store {path} cannot be written: {place} is read-only", hint=_access_hint(path))


def _access_hint(path: Path) -> str:
    return (
        f"Give yourself read and write access to {path.parent} and the files in it, or choose another folder (--dir)."
    )


def explain_open_error(path: Path, error: Exception) -> UserError:
    """The one clear message for a store that does not open."""
    detail = str(error.orig if isinstance(error, DBAPIError) else error)
    fault = fault_of(error) or detail
    if fault == FAULTS[sqlite3.SQLITE_CORRUPT]:
        return damaged(path, detail)
    return StoreUnavailable(f"the store {path} cannot be opened: {fault}", hint=_access_hint(path))


def damaged(path: Path, detail: str) -> UserError:
    return UserError(
        f"the store {path} is damaged: {detail}",
        hint=f"It was left as it is. Rescue what is readable with `sqlite3 {path.name} .recover`, put back a good "
        f"copy, or move {path.name}, {path.name}-wal and {path.name}-shm away to start with an empty store.",
    )


def check(connection: Connection, path: Path) -> None:
    """Look for damage, for at most QUICK_CHECK_S; raise a UserError that names the first."""
    raw = driver(connection)
    until = time.monotonic() + QUICK_CHECK_S
    raw.set_progress_handler(lambda: time.monotonic() > until, 10_000)
    try:
        verdict = raw.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        verdict = "ok"  # the time is over, and nothing was found
    finally:
        raw.set_progress_handler(None, 0)
    if verdict != "ok":
        raise damaged(path, str(verdict).splitlines()[-1])


def keep_copy(connection: Connection, copy: Path) -> None:
    """Write a complete copy of the store as it is now; the copy is durable when this returns."""
    unfinished = copy.with_name(copy.name + ".tmp")
    unfinished.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        with contextlib.closing(sqlite3.connect(unfinished)) as target:
            driver(connection).backup(target)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(copy)
    except BaseException:
        unfinished.unlink(missing_ok=True)  # an unfinished copy may have filled the disk
        raise


class SQLite(Database):
    """A store in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = str(path)

    def prepare(self, check_version: Callable[[Connection], object]) -> None:
        if prepare_file(self.path):
            return
        with inspect_engine(self.path).connect() as connection:
            check(connection, self.path)
            check_version(connection)

    def migration_engine(self) -> Engine:
        return writer_engine(self.path)

    def write_side(self) -> WriteSide:
        return _SQLiteWriteSide(writer_engine(self.path))

    def reader_engine(self) -> Engine:
        return reader_engine(self.path)

    def begin_read(self, engine: Engine) -> Connection:
        connection = engine.connect()
        try:
            begin_read(driver(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def begin_migration(self, connection: Connection) -> None:
        begin_write(driver(connection))

    def keep_copy(self, connection: Connection, version: int) -> None:
        keep_copy(connection, self.path.with_name(f"{self.path.name}.v{version}"))

    def fault_of(self, error: BaseException | None) -> str | None:
        return fault_of(error)

    def explain_open_error(self, error: Exception) -> UserError:
        return explain_open_error(self.path, error)

    def foreign(self) -> UserError:
        return UserError(
            f"{self.path} is not a Thebes store: it is a SQLite file of another program",
            hint="It was left as it is. Move it away, or choose another folder (--dir).",
        )

    @property
    def elsewhere(self) -> str:
        return "choose another folder (--dir)"

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return (sqlite3.Error, OSError)


class _SQLiteWriteSide(WriteSide):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None

    @property
    def begun(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def begin(self) -> Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
        begin_write(driver(self._connection))
        return self._connection

    def in_transaction(self) -> bool:
        return driver(self.begun).in_transaction

    def failed(self) -> bool:
        return False

    def commit(self) -> None:
        driver(self.begun).commit()

    def was_kept(self) -> bool:
        return False  # a function call always returns its answer, so nothing is in doubt

    def roll_back(self) -> None:
        try:
            if self._connection is not None:
                driver(self._connection).rollback()
        except sqlite3.Error:
            self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(SQLAlchemyError, sqlite3.Error):
                connection.close()
