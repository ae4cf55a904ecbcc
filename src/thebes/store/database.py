"""What the store asks of a database; `sqlite.py` and `postgres.py` are the two answers.

Statements are SQLAlchemy's and the same for both. `Prepared` compiles a statement once per kind of database and passes
it to the driver directly; that pays where every submit and every change of state does it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import Insert
from sqlalchemy.sql.elements import CompilerElement

from thebes.model.errors import UserError
from thebes.store.errors import StorageFault

POSTGRES_SCHEMES = ("postgresql://", "postgres://")


class WriteSide(ABC):
    """The one connection that writes, used by one thread. Every method may raise what `Database.fault_of` explains."""

    @abstractmethod
    def begin(self) -> Connection:
        """Begin a transaction, on a new connection if there is none."""

    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether the transaction still exists; some errors end it as a whole."""

    @abstractmethod
    def failed(self) -> bool:
        """Whether a statement has failed in such a way that only a rollback to a savepoint helps."""

    @abstractmethod
    def commit(self) -> None:
        """Commit durably. StorageFault with `in_doubt` if it is unknown whether that was done: then ask `was_kept`."""

    @abstractmethod
    def was_kept(self) -> bool:
        """Whether the commit in doubt has happened. After a False it will not happen any more."""

    @abstractmethod
    def roll_back(self) -> None:
        """Undo what is under way; a connection that cannot do even that is given up."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def execute(self, sql: str) -> None:
        """Run a statement about the transaction itself, such as a savepoint."""
        self.begun.connection.driver_connection.execute(sql)  # type: ignore[union-attr]

    @property
    @abstractmethod
    def begun(self) -> Connection:
        """The connection of the transaction that is under way."""

    def lead(self, epoch: int) -> None:  # noqa: B027 - a database that only one process can open needs no fence
        """From now on check at every commit that no later epoch has begun; Deposed if one has."""


class Database(ABC):
    """A place where a store is or may be."""

    label: str  # a path, or an address without its password, for people

    @abstractmethod
    def prepare(self, check_version: Callable[[Connection], object]) -> None:
        """Check, before anything is written, that this is ours or may become so. It changes nothing foreign."""

    @abstractmethod
    def migration_engine(self) -> Engine:
        """The engine that makes and upgrades tables."""

    @abstractmethod
    def write_side(self) -> WriteSide:
        """The write side, for the writer thread."""

    @abstractmethod
    def reader_engine(self) -> Engine:
        """An engine whose connections cannot write, for any thread."""

    @abstractmethod
    def begin_read(self, engine: Engine) -> Connection:
        """A connection in a transaction that sees the store at one moment."""

    @abstractmethod
    def begin_migration(self, connection: Connection) -> None:
        """Begin a transaction beside which no other migration runs."""

    @abstractmethod
    def keep_copy(self, connection: Connection, version: int) -> None:
        """Keep a copy before an upgrade, where that is possible."""

    @abstractmethod
    def fault_of(self, error: BaseException | None) -> str | None:
        """What is wrong with the storage, if this error says so; None for an error of the change itself."""

    @abstractmethod
    def explain_open_error(self, error: Exception) -> UserError:
        """The one clear message for a store that does not open."""

    @abstractmethod
    def foreign(self) -> UserError:
        """The error for a database that holds something else."""

    @property
    @abstractmethod
    def elsewhere(self) -> str:
        """How to choose another place, as the second half of a hint."""

    @property
    @abstractmethod
    def errors(self) -> tuple[type[Exception], ...]:
        """The errors that the driver raises."""


def database_at(where: Path | str) -> Database:
    """The database at a path, or at an address that begins with postgresql://."""
    if isinstance(where, str) and where.startswith(POSTGRES_SCHEMES):
        from thebes.store.postgres import Postgres

        return Postgres(where)
    from thebes.store.sqlite import SQLite

    return SQLite(Path(where))


def driver(connection: Connection) -> Any:
    """The driver's own connection."""
    return connection.connection.driver_connection


class Prepared:
    """A statement that is compiled once per kind of database and passed to the driver directly.

    SQLAlchemy's own way costs about 25 µs, seven times what SQLite needs. All parameters must be named, and rows come
    as the driver gives them: a boolean may be 0 or 1.
    """

    def __init__(self, statement: CompilerElement) -> None:
        self._statement = statement
        self._compiled: dict[tuple[str, bool], tuple[str, tuple[str, ...]]] = {}

    def run(self, c: Connection, values: Mapping[str, Any] | None = None, *, returning: bool = False) -> Any:
        """Run the statement; returns the driver's cursor."""
        sql, names = self._compiled.get((c.dialect.name, returning)) or self._compile(c, returning)
        parameters = [values[name] for name in names] if values else []
        try:
            return driver(c).execute(sql, parameters)
        except c.dialect.loaded_dbapi.IntegrityError as error:
            raise IntegrityError(sql, None, error, hide_parameters=True) from error

    def insert(self, c: Connection, values: Mapping[str, Any]) -> int:
        """Insert a row; returns its integer primary key."""
        if c.dialect.postfetch_lastrowid:  # type: ignore[attr-defined]
            return self.run(c, values).lastrowid
        return self.run(c, values, returning=True).fetchone()[0]

    def _compile(self, c: Connection, returning: bool) -> tuple[str, tuple[str, ...]]:
        statement = self._statement
        if returning:
            assert isinstance(statement, Insert)
            statement = statement.returning(*statement.table.primary_key)
        compiled = statement.compile(dialect=c.dialect)
        assert isinstance(compiled, SQLCompiler)
        found = str(compiled), tuple(compiled.positiontup or ())
        self._compiled[c.dialect.name, returning] = found
        return found


__all__ = ["Database", "Prepared", "StorageFault", "WriteSide", "database_at", "driver"]
