"""The lease: who may take it over and when, whatever clocks do; and what a leader of the past can still do: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.postgres_server import PostgresServer
from kit.waiting import until
from thebes import store as db
from thebes.store import leader
from thebes.store.leader import (
    LEASE_S,
    LOOK_S,
    SILENT_S,
    WATCH_FIRST_S,
    KnownController,
    LeaderLease,
    Leading,
    Seen,
    Watch,
    identity_of,
)
from thebes.store.postgres import Postgres


@pytest.fixture
def lease(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LeaderLease]:
    """Neither leases nor questions run out because this machine is slow."""
    monkeypatch.setattr(leader, "LEASE_S", 600.0)
    monkeypatch.setattr(leader, "GONE_S", 600.0)
    monkeypatch.setattr(leader, "TIMEOUT_S", 60)
    return lambda name: LeaderLease(
        Postgres(url), KnownController(name, f"machine {name}", f"http://{name}", f"{name}:1")
    )


def taken_after_s(watch: Watch, seen: Seen, began_s: float = 0.0) -> float:
    """How long a standby that looks as often as it does finds nothing new before it takes the lease."""
    looks = 0
    while not watch.may_take(seen, began_s + looks * LOOK_S):
        looks += 1
    return looks * LOOK_S


def test_a_lease_that_is_renewed_is_not_taken() -> None:
    watch = Watch("b")
    for second in range(100):
        assert not watch.may_take(Seen(1, "a", second, False), float(second))


def test_one_that_has_run_out_is_taken_after_a_short_look() -> None:
    watch = Watch("b")
    # Not at once: the database has just come back, and its leader may, too.
    assert taken_after_s(watch, Seen(1, "a", 7, True)) == pytest.approx(WATCH_FIRST_S, abs=2 * LOOK_S)


def test_a_standby_that_stood_still_lets_the_leader_go_first() -> None:
    """They may share a machine that stood still: the lease has run out, and nobody is dead."""
    watch = Watch("b")
    assert not watch.may_take(Seen(1, "a", 7, False), 0.0)
    assert not watch.may_take(Seen(1, "a", 7, True), 60.0)
    assert not watch.may_take(Seen(1, "a", 8, False), 60.2)
    assert taken_after_s(watch, Seen(1, "a", 8, True), 120.0) > WATCH_FIRST_S / 2  # it is dead after all


def test_while_the_database_was_away_nobody_could_renew() -> None:
    watch = Watch("b")
    watch.may_take(Seen(1, "a", 7, False), 0.0)
    watch.forget()
    assert not watch.may_take(Seen(1, "a", 7, True), 60.0)
    assert not watch.may_take(Seen(1, "a", 8, False), 61.0)


def test_a_clock_of_the_database_that_was_set_back_does_not_keep_it_for_ever() -> None:
    after_s = taken_after_s(Watch("b"), Seen(1, "a", 7, False))
    assert after_s == pytest.approx(SILENT_S, abs=2 * LOOK_S)
    assert after_s > LEASE_S


def test_what_was_given_back_or_is_our_own_is_taken_at_once() -> None:
    assert Watch("b").may_take(Seen(1, "", 7, True), 0.0)
    assert Watch("b").may_take(Seen(1, "b", 7, False), 0.0)


def test_only_one_of_many_takes_it(lease: Callable[[str], LeaderLease]) -> None:
    ones = [lease(name) for name in "abcd"]
    seen = ones[0].look()
    taken = [one.take(seen) for one in ones]
    assert sorted(epoch for epoch in taken if epoch) == [1]
    winner = next(one for one, epoch in zip(ones, taken, strict=True) if epoch)
    assert winner.renew(1)
    assert not any(one.renew(1) for one in ones if one is not winner)
    winner.register()
    assert [(member.name, member.leads) for member in ones[3].members()] == [(winner.me.name, True)]
    winner.release(1)
    assert ones[1].look().holder == ""
    winner.leave()
    assert ones[1].members() == []
    for one in ones:
        one.close()


def test_a_clock_that_jumps_forward_deposes_and_nothing_is_written_by_two(
    postgres: PostgresServer, url: str, lease: Callable[[str], LeaderLease]
) -> None:
    first, second = lease("a"), lease("b")
    old = db.Store.open(url)
    deposed: list[str] = []
    epoch = first.take(first.look())
    assert epoch == 1
    old.lead(epoch, deposed.append)
    old.change_blocking(lambda c: db.set_meta(c, "who", "a"))
    # An hour has passed for the database.
    postgres.sql("UPDATE leader SET expires_s = expires_s - 3600", url.rpartition("/")[2])
    second.register()
    seen = second.look()
    assert seen.expired
    assert second.take(seen) == 2
    with pytest.raises(db.StoreUnavailable, match="nothing was accepted"):
        old.change_blocking(lambda c: db.set_meta(c, "who", "a again"))
    until(lambda: bool(deposed))
    assert deposed[0] == "another controller leads the cluster now (machine b at http://b, epoch 2; ours was 1)"
    new = db.Store.open(url)
    new.lead(2, lambda why: None)
    new.change_blocking(lambda c: db.set_meta(c, "more", "b"))
    with new.read() as c:
        assert (db.get_meta(c, "who"), db.get_meta(c, "more")) == ("a", "b")
    for each in (old, new):
        each.close()


def test_a_transaction_of_the_past_that_is_still_open_is_ended(
    url: str, lease: Callable[[str], LeaderLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader frozen in the middle of a commit holds rows: the next one does not wait for it."""
    monkeypatch.setattr("thebes.store.postgres.IDLE_IN_TRANSACTION_S", 0)  # the server itself would never end it
    first, second = lease("a"), lease("b")
    old = db.Store.open(url)
    epoch = first.take(first.look())
    assert epoch is not None
    old.lead(epoch, lambda why: None)
    old.change_blocking(lambda c: db.set_meta(c, "x", "1"))
    side = old._writer._side
    connection = side.begin()
    db.set_meta(connection, "x", "2")
    connection.exec_driver_sql(f"SELECT epoch FROM leader WHERE epoch = {epoch} FOR KEY SHARE")
    assert second.take(second.look()) == epoch + 1
    new = db.Store.open(url)
    new.change_blocking(lambda c: db.set_meta(c, "x", "3"))
    with new.read() as c:
        assert db.get_meta(c, "x") == "3"
    side.roll_back()
    new.close()
    old.close()


def test_leading_renews_and_gives_back(lease: Callable[[str], LeaderLease]) -> None:
    mine, other = lease("a"), lease("b")
    epoch = mine.take(mine.look())
    assert epoch is not None
    deposed: list[str] = []
    leading = Leading(mine, epoch, deposed.append)
    beats = other.look().beats
    until(lambda: other.look().beats > beats)
    assert leading.good
    until(lambda: [member.id for member in leading.members] == ["a"])
    asyncio.run(asyncio.wait_for(leading.held(), 60.0))
    leading.close()
    assert other.look().holder == ""
    assert not deposed


def test_who_is_deposed_is_told_within_moments(lease: Callable[[str], LeaderLease]) -> None:
    mine, other = lease("a"), lease("b")
    epoch = mine.take(mine.look())
    assert epoch is not None
    deposed: list[str] = []
    leading = Leading(mine, epoch, deposed.append)
    taken = None
    while taken is None:
        taken = other.take(other.look())
    until(lambda: bool(deposed))
    assert "our epoch was 1" in deposed[0]
    leading._good_until_s = 0.0  # its lease has run out
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(leading.held(), 0.2))


def test_a_folder_has_one_identity(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert identity_of(tmp_path / "a") == identity_of(tmp_path / "a") != identity_of(tmp_path / "b")
