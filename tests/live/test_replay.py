"""Replay: every decision comes out again; one that does not is reported with what differs; errors say what to do."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kit.cluster_in_a_test import live_cluster
from thebes.live.config import live_policy, load, save
from thebes.live.replay import Replayed, replay, replay_store
from thebes.model.errors import UserError
from thebes.placement import Placement
from thebes.policy.base import Policy
from thebes.store import Store
from thebes.store.history import entries_from


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an instance in which a few things happened."""
    folder = tmp_path_factory.mktemp("recorded")

    async def story() -> None:
        async with live_cluster(folder) as c:
            save(c.instance.config, c.config)
            first = await c.submit(8)
            await c.submit(4)
            await c.submit(8, priority=5)
            c.engine.end(first, 1, 85)
            await c.pass_time(100)

    asyncio.run(story())
    return folder


@pytest.fixture
def instance(recorded: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    import shutil

    return Path(shutil.copytree(recorded, tmp_path / "instance"))


def tamper(folder: Path, kind: str, change: Callable[[dict[str, Any]], bool]) -> int:
    """Change the first entry of this kind that `change` wants; its number."""
    with sqlite3.connect(folder / "store.db") as db:
        for seq, body in db.execute("SELECT seq, body FROM journal WHERE kind = ? ORDER BY seq", (kind,)).fetchall():
            entry = json.loads(zlib.decompress(body))
            if change(entry):
                packed = zlib.compress(json.dumps(entry).encode())
                db.execute("UPDATE journal SET body = ? WHERE seq = ?", (packed, seq))
                return seq
    raise AssertionError(f"no {kind} to tamper with")


def test_every_decision_comes_out_again(instance):
    replayed = replay_store(instance)
    assert sum(bool(one.entry["start"]) for one in replayed) >= 2
    assert all(one.same for one in replayed)
    assert [one.seq for one in replayed] == sorted(one.seq for one in replayed)


def test_a_tampered_decision_is_reported_with_what_differs(instance):
    def give_other_gpus(entry: dict[str, Any]) -> bool:
        if len(entry["start"]) == 1 and len(entry["start"][0][1]) == 8:
            entry["start"][0][0] = "2"
            return True
        return False

    seq = tamper(instance, "decision", give_other_gpus)
    found = replay_store(instance, decision=seq)
    assert [(one.seq, one.differs) for one in found] == [(seq, ("start",))]
    assert found[0].entry["start"] != found[0].again["start"]
    assert not found[0].same


def test_an_entry_that_does_not_fit_is_named(instance):
    def of_nobody(entry: dict[str, Any]) -> bool:
        known = entry["op"] == "arrive" and entry["job"] == "1"
        entry["job"] = "77" if known else entry.get("job")
        return known

    tamper(instance, "input", of_nobody)
    with pytest.raises(UserError, match=r"entry \d+ of the journal does not fit what came before it") as raised:
        replay_store(instance)
    assert "changed by hand" in (raised.value.hint or "")


@pytest.mark.parametrize("fault", [{"op": "explode"}, {"t": "soon"}])
def test_an_entry_that_is_none_is_named(instance, fault):
    seq = tamper(instance, "input", lambda entry: bool(entry.update(fault) or True))
    with pytest.raises(UserError, match=rf"entry {seq} of the journal cannot be read \(") as raised:
        replay_store(instance)
    assert "by a later version of Thebes" in (raised.value.hint or "")


def test_what_comes_before_the_first_snapshot_is_passed_over(instance):
    """The start of a journal is pruned by and by."""

    def choose(chosen: Mapping[str, Any]) -> tuple[Policy, Placement]:
        return live_policy(load(instance / "config.json").model_copy(update=dict(chosen)))

    with Store.open(instance / "store.db") as store, store.read() as c:
        entries = list(entries_from(c, 1))
    assert entries[0].kind == "snapshot"
    first = next(entry for entry in entries if entry.kind == "input")
    whole, with_more_before = list(replay(entries, choose)), list(replay([first, *entries], choose))
    assert [one.seq for one in with_more_before] == [one.seq for one in whole] != []
    assert all(one.same for one in with_more_before)
    assert list(replay(entries[1:], choose)) == []


def test_a_tampered_input_changes_the_view_and_so_the_digest(instance):
    def more_important(entry: dict[str, Any]) -> bool:
        if entry["op"] == "arrive" and entry["job"] == "2":
            entry["priority"] = 9
            return True
        return False

    seq = tamper(instance, "input", more_important)
    first = next(one for one in replay_store(instance) if one.seq > seq)
    assert "digest" in first.differs
    assert {"suspend", "start"} <= set(first.differs)


def test_a_decision_is_picked_by_its_number_with_the_reasons_of_those_who_wait(instance):
    waiting = [one for one in replay_store(instance) if one.reasons]
    wanted = waiting[-1]
    found = replay_store(instance, decision=wanted.seq)
    assert [one.seq for one in found] == [wanted.seq]
    assert found[0].digest == wanted.digest
    assert found[0].reasons == wanted.reasons
    assert all(reason for reason in found[0].reasons.values())


def test_since_leaves_out_what_came_before_and_progress_is_told(instance):
    everything = replay_store(instance)
    told: list[Replayed] = []
    later = replay_store(instance, since=everything[2].seq, progress=told.append)
    assert [one.seq for one in later] == [one.seq for one in everything[2:]]
    assert told == later
    assert all(one.same for one in later)


def test_a_number_that_is_no_decision_is_refused(instance):
    with pytest.raises(UserError, match="there is no decision 99999 in the journal") as raised:
        replay_store(instance, decision=99_999)
    assert "pruned" in (raised.value.hint or "")
    with sqlite3.connect(instance / "store.db") as db:
        (an_input,) = db.execute("SELECT min(seq) FROM journal WHERE kind = 'input'").fetchone()
    with pytest.raises(UserError, match=f"no decision {an_input}"):
        replay_store(instance, decision=an_input)


def test_no_instance_no_store_and_an_empty_journal_are_told_apart(instance, tmp_path):
    with pytest.raises(UserError, match="there is no instance"):
        replay_store(tmp_path / "nowhere")
    with sqlite3.connect(instance / "store.db") as db:
        db.execute("DELETE FROM journal")
    with pytest.raises(UserError, match="the journal is empty"):
        replay_store(instance)
    with pytest.raises(UserError, match="no snapshot before entry 3"):
        replay_store(instance, decision=3)
    for file in instance.glob("store.db*"):
        file.unlink()
    with pytest.raises(UserError, match="there is no store"):
        replay_store(instance)


def test_a_change_of_policy_replays_each_part_with_its_own(tmp_path):
    async def story() -> None:
        async with live_cluster(tmp_path, policy="fifo") as c:
            job = await c.submit(8)
            await c.submit(8, priority=1)
            await c.crash()
            c.config = c.config.model_copy(update={"policy": "las"})
            await c.open()
            assert c.incarnation(job) == 1  # another policy is no reason to stop it
            await c.pass_time(500)
            await c.submit(8, priority=2)
            save(c.instance.config, c.config)

    asyncio.run(story())
    replayed = replay_store(tmp_path)
    assert len(replayed) >= 4
    assert all(one.same for one in replayed), [one.differs for one in replayed]
