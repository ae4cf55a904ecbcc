"""Everything that is particular to PostgreSQL: addresses, connections, transactions, which errors mean "the server".

The address goes to libpq as it is, so that everything libpq knows works: several hosts, sslmode, service, passfile. Its
password is never shown. Connections are in autocommit mode; transactions are begun and ended here explicitly.

A commit may have been made although its answer was lost with the connection. Each writer therefore has a row in the
table `commits`, in which every transaction writes its number; after a reconnect the row says whether it was made.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool, Pool, QueuePool

from thebes.model.errors import UserError
from thebes.store.database import Database, WriteSide, driver
from thebes.store.errors import Deposed, StorageFault, StoreUnavailable
from thebes.store.postgres_address import Address, load_driver

if TYPE_CHECKING:
    import psycopg


NOW = "extract(epoch FROM clock_timestamp())::float8"
OLDEST_SERVER = 120_000
MIGRATION_LOCK = 0x7468_6562_6573  # the word "thebes"
LOST = "the connection to the database was lost"
FULL = "disk full"

# A process that is frozen in the middle of a transaction must not hold its rows against the next leader.
IDLE_IN_TRANSACTION_S = 5
LOCK_TIMEOUT_S = 20
FORGET_WRITERS_S = 30 * 86_400

# An SQLSTATE, or its first two characters, that tells of the server and not of the change; and what it says.
FAULTS = {
    "08": LOST,
    "25006": "the server is read-only",
    "25P03": "the database broke a transaction off: it stood still for too long",
    "28": "access is denied",
    "3D000": "the database is gone",
    "40001": "the database broke a transaction off, for the sake of another one",
    "40P01": "the database broke a transaction off, for the sake of another one",
    "42501": "access is denied",
    "53100": FULL,
    "53200": "the database server is out of memory",
    "53300": "the database server has too many connections",
    "53": "the database server is short of something",
    "54": "the database server has reached one of its limits",
    "55P03": "somebody holds it locked",
    "57014": "the database broke a statement off",
    "57P01": "the database server has ended our session",
    "57": "the database server stops or starts",
    "58": "the disk of the database server reports an error",
    "F0": "the database server is misconfigured",
    "XX001": "the database is damaged",
    "XX002": "the database is damaged",
    "XX": "the database server reports an internal error",
}


class Postgres(Database):
    """A store in a database of a PostgreSQL server."""

    def __init__(self, url: str) -> None:
        self.address = Address(url)
        self.label = self.address.label
        self._psycopg = load_driver()

    # ---- connections

    def connect(self, purpose: str, *settings: str, timeout_s: int | None = None) -> psycopg.Connection[Any]:
        """A connection of the driver's own, in autocommit mode."""
        parameters = dict(self.address.parameters)
        parameters.setdefault("application_name", f"thebes {purpose}")
        if timeout_s is not None:
            parameters["connect_timeout"] = str(timeout_s)
        connection = self._psycopg.connect(autocommit=True, **parameters)
        try:
            connection.execute("; ".join(f"SET {setting}" for setting in (*settings, "client_encoding = 'UTF8'")))
        except BaseException:
            connection.close()
            raise
        return connection

    def _engine(self, creator: Callable[[], Any], pool: type[Pool], **options: Any) -> Engine:
        return create_engine(
            "postgresql+psycopg://",
            creator=creator,
            poolclass=pool,
            isolation_level="AUTOCOMMIT",
            paramstyle="format",
            use_native_hstore=False,
            hide_parameters=True,  # parameters may be environment values, and errors are logged
            **options,
        )

    def connect_writer(self) -> psycopg.Connection[Any]:
        connection = self.connect(
            "writer",
            f"idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'",
            f"lock_timeout = '{LOCK_TIMEOUT_S}s'",
            "default_transaction_isolation = 'read committed'",
            "default_transaction_read_only = off",
        )
        # Some servers have this switched off for speed, but what we acknowledge must be durable.
        connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
        return connection

    def writer_engine(self) -> Engine:
        return self._engine(self.connect_writer, NullPool)

    def migration_engine(self) -> Engine:
        return self._engine(lambda: self.connect("migration", "lock_timeout = '60s'"), NullPool)

    def write_side(self) -> WriteSide:
        return PostgresWriteSide(self)

    def reader_engine(self) -> Engine:
        return self._engine(
            lambda: self.connect("reader", "default_transaction_read_only = on"),
            QueuePool,
            pool_size=8,
            max_overflow=24,
        )

    def begin_read(self, engine: Engine) -> Connection:
        for last in (False, True):
            connection = engine.connect()
            try:
                driver(connection).execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            except BaseException as error:
                broken = driver(connection).closed
                if broken:
                    connection.invalidate(error)
                connection.close()
                if last or not (broken and isinstance(error, Exception)):
                    raise
                engine.dispose()  # the server was started again, so the other connections of the pool are dead, too
            else:
                return connection
        raise AssertionError

    # ---- opening

    def prepare(self, check_version: Callable[[Connection], object]) -> None:
        engine = self._engine(lambda: self.connect("check", "default_transaction_read_only = on"), NullPool)
        with engine.connect() as connection:
            raw = driver(connection)
            version = raw.info.server_version
            if version < OLDEST_SERVER:
                raise UserError(
                    f"the PostgreSQL server of {self.label} is too old (version {version // 10_000})",
                    hint=f"Thebes needs version {OLDEST_SERVER // 10_000} or newer",
                )
            encoding, replica = raw.execute("SELECT current_setting('server_encoding'), pg_is_in_recovery()").fetchone()
            if encoding != "UTF8":
                raise UserError(
                    f"the database {self.label} keeps its texts in {encoding}, not in UTF8",
                    hint=f"make another one: createdb --encoding=UTF8 --template=template0 {self.address.database}",
                )
            if replica:
                raise StoreUnavailable(
                    f"the store {self.label} cannot be written: its server is a read-only replica",
                    hint="give the address of the primary, or several hosts with ?target_session_attrs=read-write",
                )
            check_version(connection)

    def begin_migration(self, connection: Connection) -> None:
        driver(connection).execute("BEGIN")
        driver(connection).execute(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")

    def keep_copy(self, connection: Connection, version: int) -> None:
        """Keep no copy: tables are changed in one transaction here, and `thebes backup` makes copies."""
        if version < 2:
            return
        row = driver(connection).execute(f"SELECT holder, expires_s > {NOW} FROM leader").fetchone()
        if row is not None and row[0] and row[1]:
            raise UserError(
                f"the tables in {self.label} must be upgraded (from version {version}), and a controller is at work "
                "with them",
                hint="`thebes down --keep-jobs` wherever it runs, then start the new version: jobs go on meanwhile",
            )

    def foreign(self) -> UserError:
        return UserError(
            f"{self.label} is not a Thebes store: the database holds tables of another program",
            hint=f"It was left as it is. {self._how_to_create('thebes')}",
        )

    def _how_to_create(self, name: str) -> str:
        told = self.address.parameters
        options = "".join(
            f" {option} {str(told[key]).split(',')[0]}"
            for option, key in (("-h", "host"), ("-p", "port"))
            if told.get(key)
        )
        owner = f" -O {told['user']}" if told.get("user") else ""
        return f"Make one of its own: createdb{options}{owner} {name} (as a user who may, postgres for instance)."

    @property
    def elsewhere(self) -> str:
        return "choose another database (--store)"

    # ---- errors

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return (self._psycopg.Error, OSError)

    def fault_of(self, error: BaseException | None) -> str | None:
        if isinstance(error, DBAPIError):
            error = error.orig
        if not isinstance(error, self._psycopg.Error):
            return None
        state: str | None = error.sqlstate  # type: ignore[union-attr] - of psycopg.Error, which is loaded late
        if state is not None:
            return FAULTS.get(state) or FAULTS.get(state[:2])
        if isinstance(error, self._psycopg.errors.ConnectionTimeout):
            return "the database server does not answer"
        return LOST if isinstance(error, self._psycopg.OperationalError) else None

    def explain_open_error(self, error: Exception) -> UserError:
        cause = error.orig if isinstance(error, DBAPIError) else error
        detail = self.said(cause)
        name, user = self.address.database, self.address.parameters.get("user") or "this user"
        state = getattr(cause, "sqlstate", None)
        if state == "42501" or "permission denied" in detail:
            return UserError(
                f"the store {self.label} cannot be used: {detail}",
                hint=f'let {user} have rights there: ALTER DATABASE "{name}" OWNER TO {user}; or, as its owner, '
                f"GRANT ALL ON SCHEMA public TO {user}",
            )
        if re.search(r'database ".*" does not exist', detail):
            return UserError(f"there is no database {name} at {self.label}", hint=self._how_to_create(name))
        if re.search(r"password authentication failed|no password supplied|role \".*\" does not exist", detail):
            return UserError(
                f"the store {self.label} does not let us in: {detail}",
                hint="look at user and password: they may stand in the address, in ~/.pgpass or in PGPASSFILE",
            )
        if re.search(r"pg_hba|authentication failed|SSL|certificate", detail):
            return UserError(
                f"the store {self.label} does not let us in: {detail}",
                hint="pg_hba.conf on its server says who may connect from where and how; sslmode goes into the address",
            )
        if state is None and isinstance(cause, self._psycopg.OperationalError):
            return StoreUnavailable(
                f"the store {self.label} cannot be reached: {detail}",
                hint="does the server run, and does it listen at this address? `pg_isready` with the same host and "
                "port asks it",
            )
        fault = self.fault_of(error)
        return StoreUnavailable(
            f"the store {self.label} cannot be opened: {fault + ': ' if fault else ''}{detail}",
            hint="the log of the database server tells more",
        )

    def said(self, error: BaseException | None) -> str:
        """The last thing that libpq or the server said, in one line and without a password."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = [line for line in lines if "FATAL:" in line or "failed:" in line] or lines[:1] or [type(error).__name__]
        text = told[-1].rpartition("FATAL:")[2].strip().removeprefix("connection failed: ")
        text = re.sub(r"^connection (to server )?at (.*?) failed: ", "", text)
        return self.address.scrub(text)


class PostgresWriteSide(WriteSide):
    """The writer's connection, its number of commits, and the fence of a leader."""

    def __init__(self, database: Postgres) -> None:
        self._database = database
        self._engine = database.writer_engine()
        self._connection: Connection | None = None
        self._writer = uuid.uuid4().hex
        self._number = 0  # number of the last commit that is known to be made
        self._epoch: int | None = None
        self._known = False  # whether the table has a row for this writer

    def lead(self, epoch: int) -> None:
        self._epoch = epoch
        self._known = False

    @property
    def begun(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def begin(self) -> Connection:
        connection = self._connected()
        if not self._known:
            self._introduce()
        driver(connection).execute("BEGIN")
        return connection

    def _connected(self) -> Connection:
        if self._connection is not None and driver(self._connection).closed:
            self.close()
        if self._connection is None:
            self._connection = self._engine.connect()
            self._known = False
        return self._connection

    def _introduce(self) -> None:
        raw = driver(self.begun)
        if self._epoch is not None:
            raw.execute(f"SET application_name = 'thebes leader {self._epoch}'")  # the next one ends what is left of it
        raw.execute(f"DELETE FROM commits WHERE seen_s < {NOW} - {FORGET_WRITERS_S}")
        if self._number == 0:
            raw.execute(
                f"INSERT INTO commits (writer, number, seen_s) VALUES (%s, 0, {NOW}) ON CONFLICT DO NOTHING",
                [self._writer],
            )
        row = raw.execute("SELECT number FROM commits WHERE writer = %s", [self._writer]).fetchone()
        if row is None or row[0] != self._number:
            raise self._what_happened()
        self._known = True

    def in_transaction(self) -> bool:
        status = driver(self.begun).info.transaction_status.name
        return status in ("INTRANS", "INERROR")

    def failed(self) -> bool:
        return driver(self.begun).info.transaction_status.name == "INERROR"

    def commit(self) -> None:
        raw = driver(self.begun)
        values: list[object] = [self._number + 1, self._writer]
        if self._epoch is None:
            sql = f"UPDATE commits SET number = %s, seen_s = {NOW} WHERE writer = %s"
        else:
            # The next leader waits for this row until we have committed, or else we find that it was faster.
            sql = (
                "WITH fence AS (SELECT epoch FROM leader WHERE epoch = %s FOR KEY SHARE) "
                f"UPDATE commits SET number = %s, seen_s = {NOW} FROM fence WHERE writer = %s"
            )
            values.insert(0, self._epoch)
        if raw.execute(sql, values).rowcount != 1:
            raise self._what_happened()
        try:
            done = raw.execute("COMMIT").statusmessage
        except self._database.errors as error:
            if raw.closed:
                raise StorageFault(LOST, in_doubt=True) from error
            raise
        if done != "COMMIT":
            raise StorageFault("a transaction was broken off")
        self._number += 1

    def _what_happened(self) -> Deposed:
        raw = driver(self.begun)
        epoch, holder = raw.execute("SELECT epoch, holder FROM leader").fetchone()
        if self._epoch is not None and epoch != self._epoch:
            row = raw.execute("SELECT name, url FROM controllers WHERE id = %s", [holder]).fetchone()
            who = f"{row[0]} at {row[1]}" if row else "none at the moment"
            return Deposed(f"another controller leads the cluster now ({who}, epoch {epoch}; ours was {self._epoch})")
        return Deposed("the database has gone back to an earlier state: what it acknowledged is not there")

    def was_kept(self) -> bool:
        raw = driver(self._connected())
        # A transaction whose end is still under way holds the row, so this waits for it.
        row = raw.execute("SELECT number FROM commits WHERE writer = %s FOR UPDATE", [self._writer]).fetchone()
        number = row[0] if row else None
        if number == self._number + 1:
            self._number += 1
            return True
        if number == self._number:
            return False
        raise self._what_happened()

    def roll_back(self) -> None:
        connection = self._connection
        if connection is None:
            return
        raw = driver(connection)
        try:
            if not raw.closed:
                raw.rollback()
        except self._database.errors:
            self.close()
        if raw.closed:
            self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(SQLAlchemyError, *self._database.errors):
                connection.close()
