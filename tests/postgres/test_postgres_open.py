"""Opening a store in PostgreSQL: what can be wrong is told in one clear error, and a password is never in it."""

from __future__ import annotations

import builtins
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import inspect

from kit.postgres_server import PostgresServer
from thebes import store as db
from thebes.engine.door import free_port
from thebes.model.errors import UserError
from thebes.store import migrations, schema
from thebes.store.leader import KnownController, LeaderLease
from thebes.store.postgres import Postgres
from thebes.store.postgres_address import Address, without_password

SECRET = "s3cr3t"
OF_0_1 = migrations.UPGRADES[:1]  # the upgrades that version 0.1 has


def refused(url: str) -> UserError:
    with pytest.raises(UserError) as error:
        db.Store.open(url)
    assert SECRET not in str(error.value) + error.value.hint + repr(error.value)
    assert error.value.hint
    return error.value


@pytest.fixture
def url_of_0_1(postgres: PostgresServer) -> str:
    """The address of a store that has the version of 0.1."""
    url = postgres.url(postgres.new_database())
    db.Store.open(url, upgrades=OF_0_1).close()
    return url


@pytest.fixture(scope="module")
def guarded(postgres: PostgresServer) -> PostgresServer:
    """A role that has a password."""
    postgres.sql(f"CREATE ROLE guarded LOGIN PASSWORD '{SECRET}'")
    return postgres


def test_the_tables_are_those_of_the_schema_and_there_is_one_of_each(postgres: PostgresServer) -> None:
    url = postgres.url(postgres.new_database())
    with ThreadPoolExecutor(4) as threads:  # four that make it at once
        stores = list(threads.map(db.Store.open, [url] * 4))
    with stores[0].read() as c:
        found = inspect(c)
        assert set(found.get_table_names()) == set(schema.metadata.tables)
        assert c.exec_driver_sql("SELECT version FROM schema_version").all() == [(1 + len(migrations.UPGRADES),)]
        assert c.exec_driver_sql("SELECT count(*) FROM leader").scalar() == 1
    for store in stores:
        store.close()


def test_an_older_store_is_upgraded_and_one_that_fails_stays_as_it_was(postgres: PostgresServer) -> None:
    url = postgres.url(postgres.new_database())
    db.Store.open(url, upgrades=()).close()

    def add(c: db.Connection) -> None:
        c.exec_driver_sql("ALTER TABLE jobs ADD COLUMN project TEXT NOT NULL DEFAULT 'none'")

    def fails(c: db.Connection) -> None:
        c.exec_driver_sql("ALTER TABLE jobs ADD COLUMN other TEXT")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        db.Store.open(url, upgrades=(add, fails))
    with db.Store.open(url, upgrades=(add,)) as store, store.read() as c:
        assert c.exec_driver_sql("SELECT version FROM schema_version").scalar() == 2
        columns = {column["name"] for column in inspect(c).get_columns("jobs")}
        assert "project" in columns
        assert "other" not in columns


def test_a_newer_store(url: str) -> None:
    db.Store.open(url, upgrades=(*migrations.UPGRADES, lambda c: None)).close()
    error = refused(url)
    assert "was written by a newer Thebes" in error.message
    assert "choose another database (--store)" in error.hint


def test_a_store_with_which_a_controller_of_version_0_1_works_is_left_alone(url_of_0_1: str) -> None:
    lease = LeaderLease(Postgres(url_of_0_1), KnownController("old", "old", "http://old"))
    epoch = lease.take(lease.look())
    assert epoch is not None
    error = refused(url_of_0_1)
    assert "must be upgraded (from version 2), and a controller is at work with them" in error.message
    assert "thebes down --keep-jobs" in error.hint
    assert lease.renew(epoch)  # it has noticed nothing
    lease.release(epoch)
    lease.close()
    db.Store.open(url_of_0_1).close()
    with pytest.raises(UserError, match="was written by a newer Thebes"):
        db.Store.open(url_of_0_1, upgrades=OF_0_1)


def test_a_database_of_another_program(postgres: PostgresServer) -> None:
    name = postgres.new_database()
    postgres.sql("CREATE TABLE photos (name text)", name)
    error = refused(postgres.url(name))
    assert "the database holds tables of another program" in error.message
    assert "createdb" in error.hint
    assert postgres.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'", name) == [("photos",)]


def test_no_such_database(guarded: PostgresServer) -> None:
    error = refused(guarded.url("nowhere", "guarded", SECRET))
    assert error.message == f"there is no database nowhere at {guarded.url('nowhere', 'guarded')}"
    assert f"createdb -h 127.0.0.1 -p {guarded.port} -O guarded nowhere" in error.hint


def test_a_wrong_password(guarded: PostgresServer) -> None:
    for password in (f"{SECRET}-not", ""):
        error = refused(guarded.url("postgres", "guarded", password))
        assert "does not let us in" in error.message
        assert "PGPASSFILE" in error.hint


def test_nobody_there() -> None:
    error = refused(f"postgresql://ann:{SECRET}@127.0.0.1:{free_port()}/x")
    assert isinstance(error, db.StoreUnavailable)
    assert "cannot be reached: Connection refused" in error.message
    assert "pg_isready" in error.hint
    assert "cannot be reached" in refused(f"postgresql://ann:{SECRET}@no-such-host.invalid/x").message


def test_missing_rights(guarded: PostgresServer) -> None:
    name = guarded.new_database()
    error = refused(guarded.url(name, "guarded", SECRET))
    assert "permission denied for schema public" in error.message
    assert "GRANT ALL ON SCHEMA public TO guarded" in error.hint
    db.Store.open(guarded.url(name)).close()  # somebody else's tables
    assert "permission denied for table" in refused(guarded.url(name, "guarded", SECRET)).message


def test_a_database_in_another_encoding(postgres: PostgresServer) -> None:
    postgres.sql("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    error = refused(postgres.url("latin"))
    assert "keeps its texts in LATIN1" in error.message
    assert "--encoding=UTF8" in error.hint


def test_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def missing(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] == "psycopg":
            raise ImportError("No module named 'psycopg'")
        return plain(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    error = refused(f"postgresql://ann:{SECRET}@127.0.0.1/x")
    assert "needs the driver psycopg, which is not installed" in error.message
    assert "thebes[postgres]" in error.hint


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://ann:{SECRET}/x@127.0.0.1/db",
        f"postgresql://ann:1{SECRET}@@127.0.0.1/db",
        "postgresql://ann:12/s3cr3t@127.0.0.1/db",
        f"postgresql://127.0.0.1/db?pasword={SECRET}",
    ],
)
def test_an_address_that_is_misread_is_not_repeated(url: str) -> None:
    error = refused(url)
    assert "this is not an address of a PostgreSQL database" in error.message
    assert "%2F" in error.hint


def test_addresses_are_shown_without_a_password() -> None:
    assert without_password(f"postgresql://ann:{SECRET}@db1:5433/thebes?sslmode=require") == (
        "postgresql://ann@db1:5433/thebes"
    )
    assert without_password(f"postgres://ann:{SECRET}@db1:1,db2:2/x") == "postgresql://ann@db1:1,db2:2/x"
    assert without_password(f"postgresql:///x?host=/run/pg&password={SECRET}") == "postgresql:///x?host=/run/pg"
    assert without_password("postgresql://?service=ours") == "postgresql:///?service=ours"
    address = Address(f"postgresql://ann:{SECRET}@db1/x?sslmode=verify-full&connect_timeout=9")
    assert (address.parameters["sslmode"], address.parameters["connect_timeout"]) == ("verify-full", "9")
    assert address.scrub(f"oh {SECRET}!") == "oh ***!"


def test_the_password_may_lie_in_a_file(
    guarded: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pgpass"
    file.write_text(f"127.0.0.1:{guarded.port}:*:guarded:{SECRET}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    name = guarded.new_database()
    guarded.sql(f"ALTER DATABASE {name} OWNER TO guarded")
    db.Store.open(guarded.url(name, "guarded")).close()


def test_a_socket_in_the_file_system(postgres: PostgresServer) -> None:
    name = postgres.new_database()
    with db.Store.open(f"postgresql:///{name}?host={postgres.folder}&port={postgres.port}&user=postgres") as store:
        assert store.change_blocking(lambda c: db.set_meta(c, "a", "b")) is None


def test_the_password_vanishes_from_the_command_line(tmp_path: Path) -> None:
    url = f"postgresql://ann:{SECRET}@127.0.0.1:1/x"
    script = (
        "import sys; from pathlib import Path; from thebes.cli.instance import hide_password;"
        "hide_password(sys.argv[1]); print(Path('/proc/self/cmdline').read_text()); print(sys.argv[1])"
    )
    said = subprocess.run([sys.executable, "-c", script, url], capture_output=True, text=True, check=True).stdout
    shown, kept = said.split("\n")[:2]
    assert SECRET not in shown
    assert "ann:******@" in shown
    assert kept == url
