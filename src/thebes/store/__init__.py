"""The store is one database, SQLite's or PostgreSQL's, that remembers everything the controller must not forget.

`Store` opens it, writes through one thread with group commit, and reads through a pool. The functions that change and
ask the tables take a connection first; all of them are here by name, so callers say `from thebes import store as db`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from thebes.store.attempts import attempts_of, get_attempt, insert_attempt, open_attempts, update_attempt
from thebes.store.crash_points import CrashPoint
from thebes.store.database import Database, database_at, driver
from thebes.store.errors import StoreConflict, StoreUnavailable
from thebes.store.history import (
    add_event,
    append_journal,
    events_after,
    journal_entry,
    journal_since_snapshot,
    list_decisions,
    prune_events,
    prune_journal,
)
from thebes.store.listing import count_by_state, list_jobs
from thebes.store.migrations import UPGRADES, Upgrade, migrate, version_of
from thebes.store.principal import EVERYTHING, Principal, Viewer
from thebes.store.queries import (
    alive_jobs,
    create_jobs,
    dependencies_of,
    dependencies_of_all,
    dependents_of,
    drained_nodes,
    get_job,
    get_meta,
    jobs_ever,
    key_is_used,
    members,
    pass_over_jobs,
    set_drained,
    set_meta,
    update_job,
)
from thebes.store.rows import AttemptRow, EventRow, JobRow, JournalEntry, TenantRow, TokenRow
from thebes.store.schema import ALIVE_STATES, STATES, TERMINAL_STATES
from thebes.store.tokens import (
    create_token,
    delete_tenant,
    find_token,
    get_tenant,
    list_tenants,
    list_tokens,
    put_tenant,
    revoke_token,
    viewer_of,
)
from thebes.store.writer import Change, Writer

__all__ = [
    "ALIVE_STATES",
    "EVERYTHING",
    "STATES",
    "TERMINAL_STATES",
    "AttemptRow",
    "Connection",
    "EventRow",
    "JobRow",
    "JournalEntry",
    "Principal",
    "Store",
    "StoreConflict",
    "StoreUnavailable",
    "TenantRow",
    "TokenRow",
    "Viewer",
    "add_event",
    "alive_jobs",
    "append_journal",
    "attempts_of",
    "count_by_state",
    "create_jobs",
    "create_token",
    "delete_tenant",
    "dependencies_of",
    "dependencies_of_all",
    "dependents_of",
    "drained_nodes",
    "events_after",
    "find_token",
    "get_attempt",
    "get_job",
    "get_meta",
    "get_tenant",
    "insert_attempt",
    "jobs_ever",
    "journal_entry",
    "journal_since_snapshot",
    "key_is_used",
    "list_decisions",
    "list_jobs",
    "list_tenants",
    "list_tokens",
    "members",
    "open_attempts",
    "pass_over_jobs",
    "prune_events",
    "prune_journal",
    "put_tenant",
    "revoke_token",
    "set_drained",
    "set_meta",
    "update_attempt",
    "update_job",
    "viewer_of",
]

T = TypeVar("T")


class Store:
    """An open store. Only one process at a time should write it; a lock ensures that, or a lease (`leader.py`)."""

    def __init__(self, database: Database, writer: Writer, readers: Engine) -> None:
        self.database = database
        self._writer = writer
        self._readers = readers

    @classmethod
    def open(cls, where: Path | str, *, upgrades: Sequence[Upgrade] = UPGRADES) -> Store:
        """Open the store, or create it, or upgrade it. UserError for one that is damaged, foreign, newer or read-only.

        `where` is the path of a SQLite file or the address of a PostgreSQL database (postgresql://…).
        """
        crash_point = CrashPoint.from_environment()
        database = database_at(where)
        try:
            database.prepare(lambda connection: version_of(connection, database, 1 + len(upgrades)))
            with database.migration_engine().connect() as connection:
                migrate(connection, database, upgrades)
        except (DBAPIError, *database.errors) as error:
            raise database.explain_open_error(error) from error
        return cls(database, Writer(database, crash_point), database.reader_engine())

    @property
    def path(self) -> Path:
        """The path of the file; it exists only for a store in a file."""
        return Path(self.database.label)

    def close(self) -> None:
        """Finish what is queued, then release the file. It may be called twice."""
        self._writer.close()
        self._readers.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def trouble(self) -> str | None:
        """What keeps the store from being written at the moment, in a few words; None if nothing does."""
        return self._writer.trouble

    def lead(self, epoch: int, deposed: Callable[[str], None]) -> None:
        """From now on check at every commit that `epoch` is the latest one; if it is not, call `deposed` (once)."""
        self._writer.lead(epoch, deposed)

    def change(self, fn: Callable[[Connection], T], *, must: bool) -> asyncio.Future[T]:
        """Run `fn` in the writer thread; the future resolves when the change is durable.

        `fn` may run more than once (each time on a store without its earlier effects), so it should do nothing but
        change the store, and it must not commit. If it raises, only its own effects are undone. When the disk refuses,
        `must=False` raises StoreUnavailable, and `must=True` waits, in order, until the store can be written.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._writer.put(Change(fn, must, future, loop))
        return future

    def change_blocking(
        self, fn: Callable[[Connection], T], *, must: bool = False, timeout_s: float | None = None
    ) -> T:
        """The same as `change`, for threads. After a TimeoutError the change may still be made."""
        future: Future[T] = Future()
        self._writer.put(Change(fn, must, future, None))
        return future.result(timeout_s)

    @contextmanager
    def read(self) -> Generator[Connection, None, None]:
        """A connection that cannot write, and that sees the store at one moment; writers do not wait for it."""
        try:
            with self.database.begin_read(self._readers) as connection:
                try:
                    yield connection
                finally:
                    driver(connection).rollback()
        except (DBAPIError, *self.database.errors) as error:
            if fault := self.database.fault_of(error):
                raise StoreUnavailable(f"the store cannot be read: {fault}") from error
            raise
