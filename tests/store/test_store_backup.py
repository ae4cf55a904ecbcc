"""Backup and restore, in all four directions: everything comes back, numbers go on, nothing in use is overwritten."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select
from store_samples import one, submit

from thebes import store as db
from thebes.model.errors import UserError
from thebes.store import backup, schema

NewPlace = Callable[[], Path | str]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def other_place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    if request.param == "sqlite":
        (tmp_path / "other").mkdir()
        return tmp_path / "other" / "store.db"
    server = request.getfixturevalue("postgres")
    return server.url(server.new_database(request.getfixturevalue("postgres_template")))


def fill(c: db.Connection) -> None:
    submit(c, members=[1, 2, 3], client_key="k", name="naïve")
    submit(c, held=True, after=["1"])
    db.update_job(c, "1_1", state="running", incarnation=1)
    db.insert_attempt(c, "1_1", 1, created_s=5.0, parts=[("n0", (0, 1))], codes={0: -9}, detail="é")
    for i in range(5):
        db.add_event(c, float(i), "happened", job_id="1_1" if i % 2 else None, node="n0", detail={"i": i})
    db.append_journal(c, 1.0, "snapshot", {"a": [1, 2.5, None]})
    last = db.append_journal(c, 2.0, "decision", {"b": "x" * 1000})
    c.execute(schema.journal.delete().where(schema.journal.c.seq == last))
    db.put_tenant(c, "lab", gpu_quota=3, open=True)
    db.create_token(c, "ann", "admin", "lab", None, now_s=1.0)
    db.set_drained(c, "n1", True, "hot")
    db.set_meta(c, "clock", "{}")


def content(where: Path | str) -> dict[str, list[tuple[object, ...]]]:
    passing = {table.name for table in (*backup.PASSING, schema.leader)}
    found = {}
    with db.Store.open(where) as store, store.read() as c:
        for table in schema.metadata.sorted_tables:
            if table.name not in passing:
                keys = list(table.primary_key)
                found[table.name] = [tuple(row) for row in c.execute(select(table).order_by(*keys))]
    return found


def test_everything_comes_back_and_numbers_go_on(place: Path | str, other_place: Path | str, tmp_path: Path) -> None:
    file = tmp_path / "backup"
    with db.Store.open(place) as store:
        store.change_blocking(fill)
        assert backup.save(place, file) == file.stat().st_size  # while it is open
        after = store.change_blocking(lambda c: [db.append_journal(c, 3.0, "input", {}), db.add_event(c, 9.0, "x")])
        store.change_blocking(lambda c: c.execute(schema.journal.delete().where(schema.journal.c.seq == after[0])))
        store.change_blocking(lambda c: c.execute(schema.events.delete().where(schema.events.c.seq == after[1])))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("backup")] == ["backup"]
    assert backup.restore(file, other_place) == 4
    assert content(other_place) == content(place)
    with db.Store.open(other_place) as store:
        # The journal's last entry was pruned: its number is not used again.
        assert store.change_blocking(lambda c: db.append_journal(c, 3.0, "input", {})) == after[0]
        assert store.change_blocking(lambda c: db.add_event(c, 9.0, "x")) == after[1]
        assert store.change_blocking(one(client_key="k2")) == "3"
        with store.read() as c:
            assert c.execute(select(schema.leader.c.epoch)).scalar_one() >= backup.EPOCHS_AHEAD
    with closing(sqlite3.connect(file)) as c:  # plain SQLite, for any tool
        assert c.execute("SELECT count(*) FROM jobs").fetchone() == (4,)


def test_a_store_that_is_not_empty_is_kept_unless_told(place: Path | str, tmp_path: Path) -> None:
    with db.Store.open(tmp_path / "one.db") as store:
        store.change_blocking(fill)
    backup.save(tmp_path / "one.db", tmp_path / "file")
    with db.Store.open(place) as store:
        store.change_blocking(one())
    with pytest.raises(UserError, match=r"is not empty \(1 job so far\)") as refused:
        backup.restore(tmp_path / "file", place)
    assert "--force" in refused.value.hint
    assert len(content(place)["jobs"]) == 1
    assert backup.restore(tmp_path / "file", place, force=True) == 4
    assert content(place) == content(tmp_path / "one.db")


def test_what_is_no_backup(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        backup.restore(tmp_path / "nothing", tmp_path / "store.db")
    (tmp_path / "diary").write_text("dear diary")
    with pytest.raises(UserError, match="does not begin like a SQLite file"):
        backup.restore(tmp_path / "diary", tmp_path / "store.db")
    with pytest.raises(UserError, match="there is no store at"):
        backup.save(tmp_path / "nowhere.db", tmp_path / "file")


def test_a_backup_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with db.Store.open(tmp_path / "store.db") as store:
        store.change_blocking(one())
    with pytest.raises(UserError, match="cannot be written"):
        backup.save(tmp_path / "store.db", tmp_path / "no" / "file")
