"""Commits on a server that goes away: each change is made once or not at all, and who asked is told which."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cut_wire import Wire

from kit.postgres_server import PostgresServer
from kit.waiting import until
from thebes import store as db

SPEC = '{"command": ["true"]}'


def one(key: str, spec: str = SPEC) -> Callable[[db.Connection], str]:
    def change(c: db.Connection) -> str:
        return db.create_jobs(
            c, spec, user="ann", tenant="lab", name=None, gpus=1, nodes=None, priority=0, submit_s=1.0, client_key=key
        )[0].id

    return change


def count(c: db.Connection) -> int:
    """A change that shows when it is made twice."""
    text = str(int(db.get_meta(c, "n") or 0) + 1)
    db.set_meta(c, "n", text)
    return int(text)


def counted(store: db.Store) -> int:
    with store.read() as c:
        return int(db.get_meta(c, "n") or 0)


def through(url: str, wire: Wire) -> str:
    return url.replace(f":{wire.server_port}/", f":{wire.port}/") + "?sslmode=disable&gssencmode=disable"


@pytest.mark.parametrize("must", [True, False])
def test_a_commit_whose_answer_was_lost_is_found_out_and_not_repeated(url: str, wire: Wire, must: bool) -> None:
    with db.Store.open(through(url, wire)) as store:
        assert store.change_blocking(count) == 1
        for expected in (2, 3):
            wire.cut_next = "after"
            assert store.change_blocking(count, must=must) == expected
        assert wire.cuts == 2
        until(lambda: store.trouble is None)
        assert counted(store) == 3


def test_a_commit_that_never_reached_the_server_is_repeated_or_refused(url: str, wire: Wire) -> None:
    with db.Store.open(through(url, wire)) as store:
        wire.cut_next = "before"
        assert store.change_blocking(count, must=True) == 1
        wire.cut_next = "before"
        with pytest.raises(db.StoreUnavailable, match="nothing was accepted") as refused:
            store.change_blocking(count)
        assert refused.value.status == 503
        until(lambda: store.trouble is None)
        assert counted(store) == 1
        assert wire.cuts == 2


def test_what_came_behind_a_commit_in_doubt_keeps_its_order(url: str, wire: Wire) -> None:
    with db.Store.open(through(url, wire)) as store:
        store.change_blocking(count)
        results: dict[int, int] = {}

        def work(number: int) -> None:
            results[number] = store.change_blocking(count, must=True)

        wire.cut_next = "after"
        threads = []
        for number in range(2, 8):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
        for thread in threads:
            thread.join(60)
        assert sorted(results.values()) == list(range(2, 8))
        assert counted(store) == 7


def test_sessions_that_an_administrator_ends_are_opened_again(postgres: PostgresServer, store: db.Store) -> None:
    assert store.change_blocking(count) == 1
    assert counted(store) == 1
    ours = f"application_name LIKE 'thebes %' AND datname = '{store.database.label.rpartition('/')[2]}'"
    postgres.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}")
    until(lambda: not postgres.sql(f"SELECT pid FROM pg_stat_activity WHERE {ours}"))  # it takes them a moment
    assert counted(store) == 1  # a reader does not even notice
    assert store.change_blocking(count, must=True) == 2
    assert counted(store) == 2


def test_a_deadlock_or_a_conflict_is_the_servers_and_not_the_changes(store: db.Store) -> None:
    tries = []

    def unlucky(c: db.Connection) -> int:
        tries.append(1)
        if len(tries) == 1:
            c.exec_driver_sql("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40P01'; END $$")
        if len(tries) == 2:
            c.exec_driver_sql("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40001'; END $$")
        return count(c)

    assert store.change_blocking(unlucky, must=True) == 1
    tries.clear()
    with pytest.raises(db.StoreUnavailable, match="broke a transaction off, for the sake of another one"):
        store.change_blocking(unlucky)


def test_an_error_that_a_change_hides_is_not_believed(store: db.Store) -> None:
    def hides(c: db.Connection) -> str:
        count(c)
        try:
            c.exec_driver_sql("SELECT 1/0")
        except Exception:
            return "fine"
        return "better"

    with pytest.raises(RuntimeError, match="failed, and the change did not say so"):
        store.change_blocking(hides)
    assert counted(store) == 0
    assert store.change_blocking(count) == 1
    assert store.trouble is None


def test_a_server_that_turns_read_only(postgres: PostgresServer, store: db.Store) -> None:
    def refused(c: db.Connection) -> None:
        c.exec_driver_sql("SET TRANSACTION READ ONLY")
        count(c)

    with pytest.raises(db.StoreUnavailable, match="the server is read-only"):
        store.change_blocking(refused)
    assert store.change_blocking(count, must=True) == 1


def test_texts_with_nul_and_numbers_of_64_bits(store: db.Store) -> None:
    def change(c: db.Connection) -> None:
        one("k")(c)
        db.insert_attempt(c, "1", 1, created_s=1.0, detail="bad\0words", step=1 << 40)

    store.change_blocking(change)
    with store.read() as c:
        attempt = db.get_attempt(c, "1", 1)
        assert attempt is not None
        assert attempt.detail == "bad\N{REPLACEMENT CHARACTER}words"
        assert attempt.step == 1 << 40


def test_lists_are_sorted_by_bytes_as_in_sqlite(store: db.Store, tmp_path: Path) -> None:
    names = ["b", "B", "a", "A", "é", "_", "Z", "ä", "a b", "a-b", "ab", "10", "9"]

    def fill(c: db.Connection) -> None:
        for name in names:
            db.put_tenant(c, name)
            db.set_drained(c, name, True, "x")

    with db.Store.open(tmp_path / "store.db") as other:
        for each in (store, other):
            each.change_blocking(fill)
        with store.read() as ours, other.read() as theirs:
            assert [row.name for row in db.list_tenants(ours)] == [row.name for row in db.list_tenants(theirs)]
            assert list(db.drained_nodes(ours)) == list(db.drained_nodes(theirs)) == sorted(names, key=str.encode)


def test_the_disk_of_the_server_is_full(own_server: PostgresServer, tmp_path: Path) -> None:
    """A tablespace on a real file system of 8 MiB, which a file of ours fills up."""
    disk = own_server.folder / "disk"
    disk.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m,mode=0777", "tmpfs", disk], capture_output=True
        ).returncode
    ):
        pytest.skip("a small file system cannot be mounted here")
    try:
        shutil.chown(disk, own_server.identity["user"])
        own_server.sql(f"CREATE TABLESPACE small LOCATION '{disk}'")
        own_server.sql("CREATE DATABASE small TABLESPACE small")
        with db.Store.open(own_server.url("small")) as store:
            big = '{"env": "' + "".join(os.urandom(30_000).hex()) + '"}'
            assert store.change_blocking(one("first", big)) == "1"
            ballast = disk / "ballast"
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)

            def use_up() -> None:
                for i in range(200):  # there is some room left inside the files
                    store.change_blocking(one(f"k{i}", big))

            with pytest.raises(db.StoreUnavailable, match="disk full; nothing was accepted") as refused:
                use_up()
            assert "Make room" in refused.value.hint
            done: list[str] = []
            thread = threading.Thread(target=lambda: done.append(store.change_blocking(one("must", big), must=True)))
            thread.start()
            until(lambda: store.trouble == "disk full")
            assert not done
            ballast.unlink()
            thread.join(60)
            assert done
            with store.read() as c:
                assert db.get_job(c, done[0]) is not None
    finally:
        own_server.stop()
        subprocess.run(["umount", disk], check=True)


def test_kill_9_of_the_server_under_load_loses_nothing_and_makes_nothing_twice(own_server: PostgresServer) -> None:
    name = own_server.new_database()
    store = db.Store.open(own_server.url(name))
    told: dict[str, str] = {}  # key to id, of what was acknowledged
    refused: set[str] = set()
    stop = threading.Event()

    def client(number: int) -> None:
        must, i = number % 2 == 0, 0
        while not stop.is_set():
            key, i = f"{number}-{i}", i + 1
            try:
                told[key] = store.change_blocking(one(key), must=must)
            except db.StoreUnavailable:
                refused.add(key)
                time.sleep(0.02)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        before = len(told)
        until(lambda before=before: len(told) > before + 100)
        own_server.crash()
        time.sleep(0.1)
        own_server.start()
    before = len(told)
    until(lambda: len(told) > before + 100)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    until(lambda: store.trouble is None)
    with store.read() as c:
        kept: dict[Any, str] = {row.client_key: row.id for row in db.alive_jobs(c)}
        assert sum(db.count_by_state(c, db.EVERYTHING).values()) == len(kept)
    assert kept == told
    assert not refused & kept.keys()
    store.close()


def test_a_database_that_was_put_back_is_noticed(postgres: PostgresServer, url: str) -> None:
    """As after a failover to a copy that lags behind: what was acknowledged is not there any more."""
    store = db.Store.open(url)
    store.change_blocking(count)
    deposed: list[str] = []
    store._writer._deposed = deposed.append
    postgres.sql("DELETE FROM commits", url.rpartition("/")[2])
    with pytest.raises(db.StoreUnavailable, match="the database has gone back to an earlier state"):
        store.change_blocking(count)
    until(lambda: bool(deposed))
    store.close()
