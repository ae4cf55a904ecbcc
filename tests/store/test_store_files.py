"""Opening: new, moved, older, newer, foreign, damaged, read-only. A file that is not ours is never touched."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import inspect
from store_samples import one, submit

from thebes import store as db
from thebes.model.errors import UserError
from thebes.store import migrations, schema, sqlite
from thebes.store.crash_points import CrashPoint


def test_a_new_store_is_empty_private_and_safe(tmp_path: Path) -> None:
    path = tmp_path / "a ?#%20 name" / "store.db"
    path.parent.mkdir()
    with db.Store.open(path) as store:
        store.change_blocking(one())

        def settings(c: db.Connection) -> list[object]:
            return [
                c.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous", "foreign_keys")
            ]

        assert store.change_blocking(settings) == ["wal", 2, 1]
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert [file.name for file in path.parent.iterdir()] == ["store.db"]


def test_an_instance_can_be_moved(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    with db.Store.open(first / "store.db") as store:
        store.change_blocking(one())
    shutil.move(first, tmp_path / "second")
    assert str(first).encode() not in (tmp_path / "second" / "store.db").read_bytes()
    with db.Store.open(str(tmp_path / "second" / "store.db")) as store:
        assert store.change_blocking(one()) == "2"


def test_two_that_create_it_at_once_make_one_store(tmp_path: Path) -> None:
    for trial in range(10):
        path = tmp_path / f"{trial}.db"
        with ThreadPoolExecutor(4) as threads:
            stores = list(threads.map(db.Store.open, [path] * 4))
        assert sorted(store.change_blocking(one()) for store in stores) == ["1", "2", "3", "4"]
        for store in stores:
            store.close()
        assert version(path) == 1 + len(migrations.UPGRADES)
        db.Store.open(path).close()


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / "store.db").touch()
    with db.Store.open(tmp_path / "store.db") as store:
        assert store.change_blocking(one()) == "1"


def test_the_tables_are_those_of_the_schema(tmp_path: Path) -> None:
    with db.Store.open(tmp_path / "store.db") as store, store.read() as c:
        found = inspect(c)
        assert set(found.get_table_names()) == set(schema.metadata.tables)
        for name, table in schema.metadata.tables.items():
            assert [column["name"] for column in found.get_columns(name)] == [column.name for column in table.columns]


# ---- older and newer


def add_project(c: db.Connection) -> None:
    c.exec_driver_sql("ALTER TABLE jobs ADD COLUMN project TEXT NOT NULL DEFAULT 'none'")
    c.exec_driver_sql("UPDATE jobs SET project = name")


def add_index(c: db.Connection) -> None:
    c.exec_driver_sql("CREATE INDEX jobs_by_project ON jobs (project)")


def version(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as c:
        return int(c.execute("SELECT version FROM schema_version").fetchone()[0])


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store of version 1 with a job."""
    with db.Store.open(tmp_path / "store.db", upgrades=()) as store:
        store.change_blocking(one())
    assert version(tmp_path / "store.db") == 1
    return tmp_path / "store.db"


def test_an_older_store_is_upgraded_step_by_step_and_a_copy_is_kept(old: Path) -> None:
    with db.Store.open(old, upgrades=(add_project, add_index)) as store:
        with store.read() as c:
            assert c.exec_driver_sql("SELECT id, project FROM jobs").all() == [("1", "train")]
            assert c.exec_driver_sql("SELECT 1 FROM sqlite_master WHERE name = 'jobs_by_project'").scalar() == 1
        assert store.change_blocking(one()) == "2"
    assert version(old) == 3
    copy = old.with_name("store.db.v1")
    assert version(copy) == 1
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with db.Store.open(copy, upgrades=()) as store, store.read() as c:
        assert [row.id for row in db.alive_jobs(c)] == ["1"]
    # Opened again there is nothing to do.
    with db.Store.open(old, upgrades=(add_project, add_index)) as store:
        assert store.change_blocking(one()) == "3"
    assert not old.with_name("store.db.v3").exists()


def test_the_copy_has_what_was_still_in_the_log(old: Path) -> None:
    with db.Store.open(old, upgrades=()) as store:
        store.change_blocking(one())
        # A second process upgrades while the log has not been folded into the file: only a real copy is complete.
        with db.Store.open(old, upgrades=(add_project,)):
            pass
    with sqlite3.connect(old.with_name("store.db.v1")) as c:
        assert c.execute("SELECT count(*) FROM jobs").fetchone() == (2,)


def test_an_upgrade_that_fails_leaves_the_store_as_it_was(old: Path) -> None:
    def fails(c: db.Connection) -> None:
        add_index(c)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        db.Store.open(old, upgrades=(add_project, fails))
    assert version(old) == 2  # the first step was complete
    with db.Store.open(old, upgrades=(add_project, add_index)) as store:
        assert store.change_blocking(one()) == "2"
    assert version(old) == 3
    assert version(old.with_name("store.db.v2")) == 2


def test_a_newer_store_is_refused(old: Path) -> None:
    with db.Store.open(old, upgrades=(add_project,)):
        pass
    before = old.read_bytes()
    with pytest.raises(UserError, match="was written by a newer Thebes") as refused:
        db.Store.open(old, upgrades=())
    assert "Upgrade Thebes" in refused.value.hint
    assert old.read_bytes() == before


def test_a_new_store_has_the_newest_version(tmp_path: Path) -> None:
    with db.Store.open(tmp_path / "store.db"):
        pass
    assert version(tmp_path / "store.db") == 1 + len(migrations.UPGRADES)


# ---- not ours, damaged, not accessible


def refused(path: Path) -> UserError:
    before = path.read_bytes()
    with pytest.raises(UserError) as error:
        db.Store.open(path)
    assert path.read_bytes() == before
    assert str(path) in error.value.message
    assert error.value.hint
    return error.value


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_text("my diary")
    assert "does not begin like a SQLite file" in refused(path).message
    path.write_bytes(b"SQLite format 2\0" + b"x" * 5000)
    refused(path)


@pytest.mark.parametrize("tables", ["photos (name)", "schema_version (version)", "schema_version (number)"])
def test_a_database_of_another_program(tmp_path: Path, tables: str) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as c:
        c.execute(f"CREATE TABLE {tables}")
    c.close()
    assert "another program" in refused(path).message


def test_a_header_without_a_database(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(sqlite.HEADER + b"\xff" * 3000)
    assert "is damaged" in refused(path).message


def test_a_crashed_store_that_is_newer_keeps_its_log(old: Path) -> None:
    """What is refused stays as it is, with the changes that are only in the log so far."""
    there = old.parent / "crashed"
    there.mkdir()
    with db.Store.open(old, upgrades=(*migrations.UPGRADES, add_project)) as store:
        store.change_blocking(one())
        for name in ("store.db", "store.db-wal"):
            shutil.copy(old.with_name(name), there / name)  # as a crash would leave them
    before = (there / "store.db-wal").read_bytes()
    assert before
    assert "newer" in refused(there / "store.db").message
    assert (there / "store.db-wal").read_bytes() == before


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_store(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "store.db"
    with db.Store.open(path) as store:
        store.change_blocking(lambda c: [submit(c, client_key=str(i)) for i in range(300)])
    content = bytearray(path.read_bytes())
    pages = len(content) // 4096
    assert pages > 20
    for page in range(1 + seed, pages, 5):  # the first page is the header's
        content[page * 4096 : page * 4096 + 200] = os.urandom(200)
    path.write_bytes(content)
    error = refused(path)
    assert "is damaged" in error.message
    assert ".recover" in error.hint


def test_a_store_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with db.Store.open(path) as store:
        store.change_blocking(lambda c: [submit(c) for _ in range(300)])
    path.write_bytes(path.read_bytes()[: 4096 * 10 + 100])
    assert "is damaged" in refused(path).message


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be created: No such file or directory") as error:
        db.Store.open(tmp_path / "nowhere" / "store.db")
    assert "--dir" in error.value.hint


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "store.db").mkdir()
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        db.Store.open(tmp_path / "store.db")


def as_nobody(work: object) -> str:
    """Run in a child that has no rights of root's; what it raised."""
    assert callable(work)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            work()
            said = "nothing was raised"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that everybody can look into. Pytest's are private, and every pytest that starts makes them so again."""
    with tempfile.TemporaryDirectory(prefix="thebes-store-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


def test_a_read_only_folder(reachable: Path) -> None:
    path = reachable / "store.db"
    reachable.chmod(0o555)
    said = as_nobody(lambda: db.Store.open(path))
    assert said.startswith(f"UserError: the store {path} cannot be created: Permission denied\nGive yourself")
    reachable.chmod(0o755)
    with db.Store.open(path) as store:
        store.change_blocking(one())
    path.chmod(0o666)
    reachable.chmod(0o555)
    said = as_nobody(lambda: db.Store.open(path))
    assert said.startswith(f"UserError: the store {path} cannot be written: {reachable} is read-only")
    reachable.chmod(0o777)
    path.chmod(0o444)
    said = as_nobody(lambda: db.Store.open(path))
    assert said.startswith(f"UserError: the store {path} cannot be written: {path} is read-only")
    path.chmod(0o000)
    said = as_nobody(lambda: db.Store.open(path))
    assert said.startswith(f"UserError: the store {path} cannot be read: Permission denied")


@pytest.mark.parametrize("text", ["7", "0:before", "x:after", "7:during", "7:before "])
def test_a_crash_point_is_a_number_and_a_side(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("THEBES_CRASH_AT_WRITE", text)
    with pytest.raises(UserError, match="is not a crash point"):
        CrashPoint.from_environment()
