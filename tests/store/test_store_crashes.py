"""kill -9 at any moment: what was acknowledged is there, what is there is whole. And a crash at each exact commit."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_samples import write_and_crash, write_until_killed

from thebes import store as db

TRIALS = 40


@pytest.fixture(scope="module")
def processes() -> Any:
    """Children of a clean process that has imported the store once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thebes.store"])
    return context


def told_until_death(processes: Any, work: Callable[..., None], *args: object, kill_after_s: float | None) -> list[str]:
    ours, theirs = processes.Pipe(duplex=False)
    path, *rest = args
    child = processes.Process(target=work, args=(path, theirs, *rest))
    child.start()
    theirs.close()
    told: list[str] = []
    deadline = None
    while True:
        wait_s = 120.0 if deadline is None else max(0.0, deadline - time.monotonic())
        if not ours.poll(wait_s):
            assert deadline is not None, "the child says nothing"
            child.kill()
            deadline = time.monotonic() + 30
            continue
        try:
            told.append(ours.recv())
        except EOFError:
            break
        if deadline is None and kill_after_s is not None:
            deadline = time.monotonic() + kill_after_s  # from its first acknowledgement on
    child.join()
    assert child.exitcode in (-signal.SIGKILL, 0)
    return told


def check_whole(c: db.Connection) -> list[db.JobRow]:
    if c.dialect.name == "sqlite":
        assert c.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        assert c.exec_driver_sql("PRAGMA foreign_key_check").all() == []
    alive = db.alive_jobs(c)
    assert len(alive) == sum(db.count_by_state(c, db.EVERYTHING).values())
    assert len({(row.user, row.client_key) for row in alive}) == len(alive)
    return alive


def test_kill_9_loses_nothing_that_was_acknowledged(processes: Any, place: Path | str) -> None:
    rng, path, acknowledged = random.Random(3), place, []
    trials = TRIALS if isinstance(place, Path) else TRIALS // 2
    for _ in range(trials):  # one store through all of them: every start recovers from the last crash
        acknowledged += told_until_death(processes, write_until_killed, path, kill_after_s=rng.uniform(0.0, 0.12))
    assert len(set(acknowledged)) == len(acknowledged) > trials
    with db.Store.open(path) as store, store.read() as c:
        stored = {row.id for row in check_whole(c)}
    assert set(acknowledged) <= stored
    assert len(stored) <= len(acknowledged) + trials  # one change was under way in each


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_crash_at_an_exact_commit(processes: Any, place: Path | str, at: int, side: str) -> None:
    path = place
    told = told_until_death(processes, write_and_crash, path, f"{at}:{side}", 6, kill_after_s=None)
    assert told == [str(i) for i in range(1, at)]
    with db.Store.open(path) as store, store.read() as c:
        assert len(check_whole(c)) == (at if side == "after" else at - 1)
    # The client tries again with the same keys: every job is there once.
    again = told_until_death(processes, write_and_crash, path, "", 6, kill_after_s=None)
    assert again == [*(str(i) for i in range(1, 7)), "done"]
    with db.Store.open(path) as store, store.read() as c:
        assert len(check_whole(c)) == 6
