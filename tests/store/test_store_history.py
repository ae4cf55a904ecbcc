"""Events and journal: in order, complete since the last snapshot, and pruned without losing what replay needs."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import IntegrityError
from store_samples import one

from thebes import store as db


def test_an_event_comes_back_as_it_was_written(store: db.Store) -> None:
    store.change_blocking(one())
    seq = store.change_blocking(
        lambda c: db.add_event(c, 5.0, "started", job_id="1", node="n0", actor="ann", detail={"gpus": [0, 1]})
    )
    with store.read() as c:
        assert db.events_after(c) == [db.EventRow(seq, 5.0, "1", "n0", "started", "ann", {"gpus": [0, 1]})]
        assert db.events_after(c, seq=seq) == []
        assert db.events_after(c, job_id="1") == db.events_after(c)
        assert db.events_after(c, job_id="2") == []


def journal(store: db.Store, *kinds: str) -> list[int]:
    def write(c: db.Connection) -> list[int]:
        return [db.append_journal(c, float(i), kind, {"n": i, "text": "é" * 50}) for i, kind in enumerate(kinds)]

    return store.change_blocking(write)


def test_the_journal_begins_with_the_last_snapshot(store: db.Store) -> None:
    with store.read() as c:
        assert list(db.journal_since_snapshot(c)) == []
    seqs = journal(store, "input", "snapshot", "decision", "snapshot", "input", "decision")
    with store.read() as c:
        entries = list(db.journal_since_snapshot(c))
        assert [(entry.seq, entry.kind) for entry in entries] == list(
            zip(seqs[3:], ("snapshot", "input", "decision"), strict=True)
        )
        assert entries[0].body == {"n": 3, "text": "é" * 50}
        assert db.journal_entry(c, seqs[4]) == entries[1]
        assert db.journal_entry(c, 999) is None
        assert [entry.seq for entry in db.list_decisions(c, 10)] == [seqs[5], seqs[2]]
        assert [entry.seq for entry in db.list_decisions(c, 10, seqs[5])] == [seqs[2]]
        assert [entry.seq for entry in db.list_decisions(c, 1)] == [seqs[5]]


def test_without_a_snapshot_the_journal_is_all_there_is(store: db.Store) -> None:
    seqs = journal(store, "input", "decision")
    with store.read() as c:
        assert [entry.seq for entry in db.journal_since_snapshot(c)] == seqs


def test_the_journal_knows_three_kinds(store: db.Store) -> None:
    with pytest.raises(IntegrityError):
        journal(store, "gossip")


def test_pruning_the_journal_keeps_whole_stretches(store: db.Store) -> None:
    seqs = journal(store, *(["snapshot", "input", "decision"] * 4))
    assert store.change_blocking(lambda c: db.prune_journal(c, keep=5)) == 0
    dropped = [store.change_blocking(lambda c: db.prune_journal(c, keep=2, at_once=4)) for _ in range(3)]
    assert dropped == [4, 2, 0]
    with store.read() as c:
        assert db.journal_entry(c, seqs[5]) is None
        first = db.journal_entry(c, seqs[6])
        assert first is not None
        assert first.kind == "snapshot"
    # Not even "keep nothing" drops what a restart begins with, and numbers are not given out again.
    store.change_blocking(lambda c: db.prune_journal(c, keep=0))
    with store.read() as c:
        assert [entry.seq for entry in db.journal_since_snapshot(c)] == seqs[9:]
    store.change_blocking(lambda c: c.exec_driver_sql("DELETE FROM journal"))
    assert journal(store, "snapshot")[0] > seqs[-1]


def test_events_are_pruned_by_age_and_by_number(store: db.Store) -> None:
    store.change_blocking(lambda c: [db.add_event(c, float(day * 86_400), "tick", node="n0") for day in range(100)])
    now_s = 100 * 86_400.0
    prune = [store.change_blocking(lambda c: db.prune_events(c, now_s=now_s, at_once=6)) for _ in range(3)]
    assert prune == [6, 4, 0]
    with store.read() as c:
        assert db.events_after(c, limit=1)[0].time_s == 10 * 86_400.0
    assert store.change_blocking(lambda c: db.prune_events(c, now_s=now_s, keep=30)) == 60
    with store.read() as c:
        assert len(db.events_after(c, limit=1000)) == 30


def test_pruning_an_empty_store(store: db.Store) -> None:
    assert store.change_blocking(lambda c: db.prune_events(c, now_s=0.0)) == 0
    assert store.change_blocking(db.prune_journal) == 0
