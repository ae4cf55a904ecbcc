"""The writer: order, one commit for many, errors that stay with their change, a disk that refuses and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_samples import one, submit

from kit.waiting import until, until_async
from thebes import store as db


def number_of_jobs(store: db.Store) -> int:
    with store.read() as c:
        return sum(db.count_by_state(c, db.EVERYTHING).values())


def test_changes_run_in_the_order_in_which_they_were_asked_for(store: db.Store) -> None:
    async def many() -> list[str]:
        return await asyncio.gather(*(store.change(one(), must=i % 2 == 0) for i in range(700)))

    assert asyncio.run(many()) == [str(i) for i in range(1, 701)]


def test_many_changes_share_a_commit_and_wake_the_loop_once(store: db.Store) -> None:
    async def many() -> list[int]:
        loop = asyncio.get_running_loop()
        wakes, plain = 0, loop.call_soon_threadsafe

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return plain(*args, **options)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        gate = threading.Event()
        changes = [store.change(lambda c: gate.wait(60), must=False)]
        changes += [store.change(one(), must=False) for _ in range(100)]
        before = store._writer._crash_point.commits
        gate.set()
        await asyncio.gather(*changes)
        return [wakes, store._writer._crash_point.commits - before]

    # The first may have been taken alone, before the others were there.
    assert asyncio.run(many()) in ([1, 1], [2, 2])


def test_a_change_that_raises_is_undone_alone(store: db.Store) -> None:
    def half(c: db.Connection) -> None:
        submit(c)
        raise ValueError("changed my mind")

    async def three() -> list[Any]:
        changes = [store.change(change, must=True) for change in (one(), half, one())]
        return await asyncio.gather(*changes, return_exceptions=True)

    first, second, third = asyncio.run(three())
    assert (first, third) == ("1", "2")
    assert isinstance(second, ValueError)
    assert number_of_jobs(store) == 2
    assert store.trouble is None


@pytest.mark.parametrize("error", [StopIteration(), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), MemoryError()])
def test_nothing_that_a_change_raises_ends_the_writer(store: db.Store, error: BaseException) -> None:
    def change(c: db.Connection) -> None:
        raise error

    expected = RuntimeError if isinstance(error, StopIteration) else type(error)  # a future takes no StopIteration
    with pytest.raises(expected):
        store.change_blocking(change)
    assert store.change_blocking(one()) == "1"

    async def awaited() -> None:
        # An event loop ends on some of these, so they are looked at and not awaited.
        future = store.change(change, must=False)
        await until_async(future.done, "the change is done", every_s=0.001)
        assert isinstance(future.exception(), expected)

    asyncio.run(awaited())
    assert store.change_blocking(one()) == "2"


def test_callers_that_gave_up_harm_nobody(store: db.Store) -> None:
    async def impatient() -> str:
        gate = threading.Event()
        slow = store.change(lambda c: gate.wait(60), must=False)
        given_up = store.change(one(), must=False)
        given_up.cancel()
        kept = store.change(one(), must=False)
        gate.set()
        await slow
        return await kept

    assert asyncio.run(impatient()) == "2"

    gate = threading.Event()

    async def leaves() -> None:
        store.change(lambda c: gate.wait(60), must=False)

    asyncio.run(leaves())  # its loop is closed before the change is made
    gate.set()
    assert store.change_blocking(one()) == "3"


def test_a_reader_sees_one_moment_and_neither_waits_nor_is_waited_for(store: db.Store) -> None:
    store.change_blocking(one())
    inside, go = threading.Event(), threading.Event()

    def slow(c: db.Connection) -> None:
        submit(c)
        inside.set()
        go.wait(60)

    with store.read() as c:
        assert len(db.alive_jobs(c)) == 1
        writing = threading.Thread(target=store.change_blocking, args=(slow,))
        writing.start()
        assert inside.wait(60)
        assert len(db.alive_jobs(c)) == 1
        with store.read() as other:
            assert len(db.alive_jobs(other)) == 1
        go.set()
        writing.join()
        assert len(db.alive_jobs(c)) == 1
    assert number_of_jobs(store) == 2


def test_a_reader_cannot_write(store: db.Store) -> None:
    # SQLite's "read-only" is how it refuses, and the same as for a disk that has become so.
    with pytest.raises(db.StoreUnavailable, match="read-only"), store.read() as c:
        submit(c)
    assert number_of_jobs(store) == 0


def test_many_threads_read_and_write(store: db.Store) -> None:
    def work() -> None:
        for _ in range(20):
            job_id = store.change_blocking(one())
            with store.read() as c:
                assert db.get_job(c, job_id) is not None

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert number_of_jobs(store) == 240


def test_closing_finishes_what_is_queued(place: Path | str) -> None:
    async def use() -> list[str]:
        store = db.Store.open(place)
        changes = [store.change(one(), must=False) for _ in range(50)]
        store.close()
        store.close()
        ids = await asyncio.gather(*changes)
        with pytest.raises(db.StoreUnavailable, match="the store is closed; nothing was accepted"):
            await store.change(one(), must=True)
        return ids

    assert len(asyncio.run(use())) == 50
    with db.Store.open(place) as store:
        assert number_of_jobs(store) == 50


# ---- a disk that refuses


class Disk:
    """A limit on the pages of the store that every change looks up, so that a test can lift it."""

    def __init__(self, store: db.Store) -> None:
        self.pages = 0
        with store.read() as c:
            self.used = int(c.exec_driver_sql("PRAGMA page_count").scalar_one())

    def fills(self, fn: Callable[[db.Connection], Any]) -> Callable[[db.Connection], Any]:
        def change(c: db.Connection) -> Any:
            c.exec_driver_sql(f"PRAGMA max_page_count={self.pages or 1 << 30}")
            return fn(c)

        return change


def big(**changes: Any) -> Callable[[db.Connection], str]:
    """A job that cannot do without new pages."""
    return one(spec='{"env": "' + "x" * 20_000 + '"}', **changes)


def test_a_full_disk_refuses_what_was_not_promised_and_keeps_the_rest_in_order(sqlite_store: db.Store) -> None:
    store = sqlite_store
    store.change_blocking(one())
    disk = Disk(store)
    disk.pages = disk.used

    async def full() -> list[Any]:
        small = store.change(disk.fills(one()), must=False)  # in one batch with what does not fit
        promised = [store.change(disk.fills(big(client_key=f"p{i}")), must=True) for i in range(5)]
        asked = store.change(disk.fills(big()), must=False)
        with pytest.raises(
            db.StoreUnavailable, match="the store cannot be written: disk full; nothing was accepted"
        ) as refused:
            await asked
        assert "Make room" in refused.value.hint
        assert refused.value.status == 503
        assert store.trouble == "disk full"
        later = store.change(disk.fills(big(client_key="later")), must=True)
        with pytest.raises(db.StoreUnavailable):
            await store.change(disk.fills(one()), must=False)
        assert not any(future.done() for future in promised)
        disk.pages = 0
        ids = await asyncio.gather(*promised, later)
        assert store.trouble is None
        return [await asyncio.gather(small, return_exceptions=True), ids]

    small, ids = asyncio.run(full())
    # The small one was alone in the first batch or refused with the others: both are told truly.
    first = 2 if isinstance(small[0], db.StoreUnavailable) else 3
    assert ids == [str(first + i) for i in range(6)]
    with store.read() as c:
        assert [row.client_key for row in db.alive_jobs(c)][-6:] == ["p0", "p1", "p2", "p3", "p4", "later"]
        assert len(db.alive_jobs(c)) == first + 5
        assert c.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"


def test_trouble_ends_by_itself_when_nobody_waits(sqlite_store: db.Store) -> None:
    store = sqlite_store
    disk = Disk(store)
    disk.pages = disk.used
    with pytest.raises(db.StoreUnavailable):
        store.change_blocking(disk.fills(big()))
    until(lambda: store.trouble is None)  # what it tries by itself needs no new page
    assert store.change_blocking(one()) == "1"


def test_a_change_that_hides_the_error_is_not_believed(store: db.Store) -> None:
    def swallows(c: db.Connection) -> str:
        submit(c)
        c.connection.rollback()  # as SQLite does by itself on some errors
        return "fine"

    with pytest.raises(db.StoreUnavailable, match="broken off"):
        store.change_blocking(swallows)
    until(lambda: store.trouble is None)
    assert number_of_jobs(store) == 0


def test_closing_a_store_that_cannot_be_written_tells_everybody(sqlite_store: db.Store) -> None:
    store = sqlite_store
    disk = Disk(store)
    disk.pages = disk.used

    async def use() -> None:
        promised = store.change(disk.fills(big()), must=True)
        await until_async(lambda: store.trouble, "the disk is known to be full")
        await asyncio.to_thread(store.close)
        with pytest.raises(db.StoreUnavailable, match="disk full"):
            await promised

    asyncio.run(use())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB, where the machine lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True).returncode == 0
    )
    if not mounted:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    with db.Store.open(small_disk / "store.db") as store:
        acknowledged = [store.change_blocking(one(client_key=str(i))) for i in range(5)]
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)

        def use_up() -> None:
            for i in range(200):  # there is some room left inside the files
                acknowledged.append(store.change_blocking(big(client_key=f"full{i}")))

        with pytest.raises(db.StoreUnavailable, match="disk full"):
            use_up()
        promised: list[str] = []
        threads = []
        for i in range(3):
            change = big(client_key=f"promised{i}")
            threads.append(
                threading.Thread(target=lambda change=change: promised.append(store.change_blocking(change, must=True)))
            )
            threads[-1].start()
        until(lambda: store.trouble == "disk full")
        assert not promised
        with store.read() as c:  # reading goes on
            assert {row.id for row in db.alive_jobs(c)} == set(acknowledged)
        ballast.unlink()
        for thread in threads:
            thread.join(timeout=60)
        assert store.trouble is None
        assert len(promised) == 3
    with db.Store.open(small_disk / "store.db") as store, store.read() as c:
        assert {row.id for row in db.alive_jobs(c)} == {*acknowledged, *promised}


# ---- speed


@pytest.mark.slow
def test_submits_at_the_same_time_share_commits(sqlite_store: db.Store) -> None:
    store = sqlite_store

    def change(key: str) -> Callable[[db.Connection], int]:
        return lambda c: db.add_event(c, 1.0, "submitted", job_id=submit(c, client_key=key)[0].id)

    async def client(name: int) -> None:
        for i in range(250):
            await store.change(change(f"{time.monotonic_ns()}-{name}-{i}"), must=False)

    async def sixteen() -> None:
        await asyncio.gather(*(client(name) for name in range(16)))

    before = store._writer._crash_point.commits
    asyncio.run(sixteen())
    # About one in eight; how long it takes is for `make bench`.
    assert store._writer._crash_point.commits - before < 16 * 250 / 2
