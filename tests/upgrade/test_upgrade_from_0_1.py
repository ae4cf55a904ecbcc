"""A cluster of version 0.1 goes on with this version, from the files that it left when everything was killed.

`data/` holds two folders of clusters that really ran (see `make_files.py`): jobs that run, are suspended in place,
share a GPU, were preempted, are queued, held, kept back by an array's limit or wait for others, that failed and were
cancelled; a journal with snapshots, entries and a policy's memory; the store with its log as a crash leaves it.
"""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kit.fault_cluster import FaultCluster
from kit.waiting import until
from thebes import store as db
from thebes.client import Client
from thebes.live.config import live_policy, load
from thebes.live.journal import restored
from thebes.live.replay import replay_store
from thebes.model.errors import UserError
from thebes.node import processes
from thebes.protocol.instance import Instance
from thebes.store import Store, migrations

DATA = Path(__file__).with_name("data")
ENDED_BEFORE = {"4": "failed", "11": "cancelled"}
HELD = "8"


@pytest.fixture
def old(tmp_path: Path) -> Iterator[FaultCluster]:
    """The files of the cluster that ran tiresias-l; whatever the test starts on them is gone afterwards."""
    cluster = FaultCluster(unpacked("tiresias-l", tmp_path))
    yield cluster
    cluster.clean_up()


def unpacked(policy: str, folder: Path) -> Path:
    with tarfile.open(DATA / f"0.1-{policy}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (folder / "instance").chmod(0o700)
    return folder / "instance"


def states(folder: Path) -> dict[str, str]:
    with closing(Client(dir=folder)) as client:
        return {job["id"]: job["state"] for job in client.jobs()}


def diary(folder: Path, job: str) -> list[str]:
    path = folder / "jobs" / job / "checkpoint" / "diary"
    return path.read_text().splitlines() if path.exists() else []


def steps(folder: Path, job: str) -> int:
    path = folder / "jobs" / job / "checkpoint" / "step"
    return int(path.read_text()) if path.exists() else 0


def all_end(cluster: FaultCluster, but: set[str]) -> dict[str, str]:
    folder = cluster.instance.dir
    (folder / "finish").touch()  # for which their jobs look at every step
    ended = ("completed", "failed", "cancelled", "timeout")

    def done() -> bool:
        return all(state in ended for job, state in states(folder).items() if job not in but)

    until(done, "all jobs end", told=lambda: (states(folder), cluster.logs()))
    return states(folder)


@pytest.mark.parametrize("policy", ["tiresias-l", "dally"])
def test_thebes_up_goes_on_with_the_jobs_and_nothing_is_lost_or_run_twice(policy: str, tmp_path: Path):
    folder = unpacked(policy, tmp_path)
    cluster = FaultCluster(folder)
    held, ended = ({HELD}, ENDED_BEFORE) if policy == "tiresias-l" else (set[str](), dict[str, str]())
    names = [path.parent.parent.name for path in (folder / "jobs").glob("*/checkpoint/diary")]
    before = {job: (steps(folder, job), diary(folder, job)) for job in names}
    begun = {job: int(lines[-1].split()[1]) for job, (_, lines) in before.items() if lines[-1].startswith("start")}
    assert len(begun) >= 3
    try:
        cluster.up()
        # Those that ran when everything was killed are started again, from where they were.
        until(lambda: "running" in states(folder).values(), "a job runs again", told=cluster.logs)
        after = all_end(cluster, held)
        assert {job: after[job] for job in ended} == ended
        assert all(after[job] == "held" for job in held)
        for job in held:
            cluster.client.release(job)
        after = all_end(cluster, set())
        assert {state for job, state in after.items() if job not in ended} == {"completed"}, after
        for job, (reached, told) in before.items():
            lines = diary(folder, job)
            assert lines[: len(told)] == told  # what version 0.1 had done is still there
            assert not any(line.startswith("twice") for line in lines), lines
            starts = [int(line.split()[1]) for line in lines if line.startswith("start")]
            assert starts == sorted(set(starts)), lines  # each incarnation once, and none of the old ones again
            assert lines[-1].startswith("end"), (job, lines)
            assert steps(folder, job) >= reached
        for job, incarnation in begun.items():
            # Each attempt that was killed has ended once; that of a guest may have been asked to leave with its host.
            gone = [e for e in cluster.client.events(job) if e["kind"] in ("lost", "stopped-unsaved")]
            assert [e["detail"]["incarnation"] for e in gone].count(incarnation) == 1, (job, gone)
    finally:
        cluster.clean_up()


@pytest.mark.parametrize("policy", ["tiresias-l", "dally"])
def test_the_old_journal_is_replayed_and_says_which_version_decided(policy: str, tmp_path: Path):
    replayed = replay_store(unpacked(policy, tmp_path))
    assert len(replayed) >= 30
    assert sum(bool(one.entry["start"]) for one in replayed) >= 5
    assert {one.version for one in replayed} == {"0.1"}
    assert not any("digest" in one.differs for one in replayed)  # that of the View is of the version that decided
    if policy == "tiresias-l":  # it remembers nothing: the same GPUs to the same jobs, for the same reasons
        assert not [(one.seq, one.differs) for one in replayed if not one.same]


def test_a_keeper_of_version_0_1_starts_our_controller_by_the_name_it_knows(old: FaultCluster):
    """It lives through the upgrade of the package and starts `python -m thebes.server.standby DIR` when one dies."""
    child = subprocess.Popen(
        [sys.executable, "-m", "thebes.server.standby", str(old.instance.dir)], stdout=subprocess.DEVNULL
    )
    try:
        controller = until(lambda: old.pid("controller"), "a controller", told=old.logs)
        assert controller != child.pid
        until(lambda: old.instance.read_endpoint() and _answers(old), "the controller answers", told=old.logs)
        assert states(old.instance.dir).keys() >= {"1", "2", "3", HELD}
    finally:
        child.terminate()
        assert child.wait(30) in (0, 3, -15)
    until(lambda: old.pid("controller") is None, "the controller has gone with it")


def test_the_plain_door_of_a_keeper_of_version_0_1_leads_to_our_controller(old: FaultCluster):
    child = subprocess.Popen(
        [sys.executable, "-m", "thebes.server.main", str(old.instance.dir)], stdout=subprocess.DEVNULL
    )
    try:
        until(lambda: _answers(old), "the controller answers", told=old.logs)
        assert old.pid("controller") == child.pid
    finally:
        child.terminate()
        child.wait(30)


def _answers(cluster: FaultCluster) -> bool:
    try:
        return bool(states(cluster.instance.dir))
    except Exception:
        return False


def test_the_files_are_as_a_crash_leaves_them(tmp_path: Path):
    """With a write-ahead log that was never merged, and no process that they name alive."""
    folder = unpacked("tiresias-l", tmp_path)
    assert (folder / "store.db-wal").stat().st_size > 0
    assert not any(str(folder).encode() in processes.environment(pid) for pid in processes.all_pids())
    with closing(Store.open(Instance(folder).store)) as store, store.read() as c:
        alive = {row.id: row.state for row in db.alive_jobs(c)}
        assert {"running", "suspended", "queued", "held"} <= set(alive.values())
        assert len(db.open_attempts(c)) == 5


def test_its_store_is_lifted_to_version_3_and_0_1_refuses_it_from_then_on(tmp_path: Path):
    """The journal has entries now that 0.1 does not know: it would take the cluster over and die of them."""
    path = Instance(unpacked("tiresias-l", tmp_path)).store
    before = migrations.UPGRADES[:1]  # those that 0.1 has
    assert _version(path) == 1 + len(before) == 2
    with closing(Store.open(path)) as store, store.read() as c:
        alive = {row.id: row.state for row in db.alive_jobs(c)}
    assert _version(path) == 3
    assert _version(path.with_name("store.db.v2")) == 2  # the way back
    with pytest.raises(UserError) as refused:
        Store.open(path, upgrades=before)
    assert refused.value.message == (
        f"the store {path} was written by a newer Thebes (version 3 of the tables; this one knows 2)"
    )
    assert "Upgrade Thebes" in refused.value.hint
    with closing(Store.open(path.with_name("store.db.v2"), upgrades=before)) as store, store.read() as c:
        assert {row.id: row.state for row in db.alive_jobs(c)} == alive


def _version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as c:
        return int(c.execute("SELECT version FROM schema_version").fetchone()[0])


def test_what_a_policy_of_version_0_1_remembered_is_not_taken_for_what_ours_remembers(tmp_path: Path):
    """Its memory was a class of another module, by row numbers that no snapshot kept."""
    folder = unpacked("dally", tmp_path)
    with closing(Store.open(Instance(folder).store)) as store, store.read() as c:
        journal, rows = list(db.journal_since_snapshot(c)), db.alive_jobs(c)
    config = load(Instance(folder).config)
    assert any(entry.body.get("memory") for entry in journal)
    ledger = restored(journal, rows, config, *live_policy(config))
    assert ledger.memory is None
    planned, _ = ledger.decide(ledger.now_s + 1.0)
    assert planned.memory is not None  # it begins anew, and goes on


def test_the_command_says_that_another_version_decided(tmp_path: Path, thebes: Callable[..., Any]):
    ran = thebes("replay", "--dir", str(unpacked("tiresias-l", tmp_path)))
    assert "39 decisions by version 0.1: what was done is compared" in ran.out
    assert re.search(r"39 decisions made again( \(.* per second\))?: all the same", ran.out)
    assert ran.code == 0
