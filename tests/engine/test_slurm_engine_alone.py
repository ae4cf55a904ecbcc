"""The Slurm engine without a Slurm: what it keeps in the shared folder, how long it looks at a large cluster."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from thebes.engine.site import EngineSite
from thebes.engine.slurm.engine import SlurmEngine
from thebes.engine.slurm.gang import SharedFolder, SlurmGang
from thebes.engine.slurm.records import Gres, JobRecord, NodeRecord, Partition, Queued
from thebes.protocol.contract import Part, Report

NODES, GANGS, GPUS = 1000, 2000, 8


class LargeSlurm:
    """What a large cluster answers."""

    env: dict[str, str]

    def __init__(self, gangs: list[SlurmGang]) -> None:
        self.env = {}
        used: dict[str, list[int]] = {}
        for gang in gangs:
            used.setdefault(gang.parts[0].node, []).extend(gang.parts[0].gpus)
        # One more everywhere belongs to somebody else.
        self.records = [
            NodeRecord(
                *(f"n{i}", f"n{i}", frozenset({"MIXED"}), "", tuple(Gres(f"g{j}", 1) for j in range(GPUS))),
                *((*used.get(f"n{i}", ()), GPUS - 1), 0, 64, 1, 1 << 20, (), ""),
            )
            for i in range(NODES)
        ]
        names = [f"thebes-big-{gang.name}" for gang in gangs]
        self.lines = [
            Queued(gang.slurm_job, gang.slurm_job, "RUNNING", name, os.getuid(), "", (gang.parts[0].node,))
            for gang, name in zip(gangs, names, strict=True)
        ]

    async def config(self) -> dict[str, str]:
        return {"SelectType": "select/cons_tres"}

    async def partitions(self) -> list[Partition]:
        return [Partition("all", True, (), True, "UNLIMITED", False, "OFF", 0)]

    async def queue(self, **_: object) -> list[Queued]:
        return self.lines

    async def nodes(self) -> list[NodeRecord]:
        return self.records

    async def racks(self) -> dict[str, str]:
        return {}

    async def jobs(self, *_: int) -> list[JobRecord]:
        return []


class Pen:
    """Takes what is written to a caller."""

    written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        pass


def site(folder: Path) -> EngineSite:
    names = [f"n{i}" for i in range(NODES)]
    return EngineSite(
        instance_id="big",
        key=bytes(32),
        epoch=1,
        gpus=dict.fromkeys(names, GPUS),
        gpu_types=dict.fromkeys(names, ""),
        shared_dir=folder,
        lease_s=60.0,
    )


def test_a_look_at_a_thousand_nodes_and_two_thousand_jobs_is_short(tmp_path: Path) -> None:
    async def story() -> None:
        gangs = [
            SlurmGang(
                str(i), 1, (Part(f"n{i % NODES}", tuple(range(3 * (i // NODES), 3 * (i // NODES) + 3))),), "started", i
            )
            for i in range(1, GANGS)
        ]
        slurm: Any = LargeSlurm(gangs)
        engine = SlurmEngine(site(tmp_path), slurm)
        engine.silence.begin(0.0)
        for gang in gangs:
            engine.gangs.add(gang)
            node = gang.parts[0].node
            gang.reports[node] = Report(gang.job_id, 1, node, "running")
            engine.calls.expect(gang, gang.nodes)
        await engine.looking.look_once()
        assert engine.facts.by_node["n1"].gpus[7].taken
        assert not engine.facts.by_node["n1"].gpus[0].taken
        took_s = float("inf")
        for _ in range(3):  # one of them is not disturbed
            began_s = time.process_time()
            await engine.looking.look_once()
            took_s = min(took_s, time.process_time() - began_s)
        for gang in gangs:
            for link in gang.links.values():
                await link.end()
        assert took_s < 0.5, f"{took_s:.2f} s of every {1.5} s"

    asyncio.run(story())


def test_a_step_of_an_earlier_launch_of_the_same_incarnation_is_nobodys(tmp_path: Path) -> None:
    """A controller that died in the middle of a launch may have left one, and it would start beside the new one."""

    async def story() -> None:
        slurm: Any = LargeSlurm([])
        engine = SlurmEngine(site(tmp_path), slurm)
        gang = SlurmGang("1", 1, (Part("n1", (0,)),), "started", 7, token="new")
        engine.gangs.add(gang)
        engine.calls.expect(gang, gang.nodes)
        line: Any = asyncio.StreamReader()
        line.feed_eof()
        pen: Any = Pen()
        for who in ("step:1.1:n1:old", "step:1.1:n1", "step:1.1:n2:new", "step:2.1:n1:new", "node:n1"):
            await engine.calls.called(who, line, pen)
            assert not pen.written  # there is nothing to be said to it
        await engine.calls.called("step:1.1:n1:new", line, pen)
        assert b"hello" in pen.written
        await gang.links["n1"].end()

    asyncio.run(story())


@pytest.fixture
def shared(tmp_path: Path) -> SharedFolder:
    found = SharedFolder(tmp_path)
    found.make()
    return found


def test_what_was_forgotten_long_ago_is_removed_from_the_shared_folder(shared: SharedFolder) -> None:
    script = shared.install_step()
    gangs = {job: SlurmGang(job, 1, (Part("n1", (0,)), Part("n2", (0,))), "started") for job in ("1", "2", "3")}
    for gang in gangs.values():
        for node in gang.nodes:
            shared.write_attempt(shared.attempt(node, gang), {}, {})
            shared.write_lost(gang, node, "lost", "")
        shared.raise_fence(gang.job_id, 1)
        (shared.logs / f"{gang.name}.log").write_text("srun: a word")
    shared.save(gangs["2"])  # not forgotten
    (shared.slurm / "bin-before").mkdir()
    for path in sorted(shared.dir.rglob("*"), reverse=True):
        if "3.1" not in str(path) and path.name != "3":  # that one is young
            os.utime(path, (0, 0))
    assert shared.remove_old(time.time() - 3600, script, limit=1) == 1
    assert shared.remove_old(time.time() - 3600, script, limit=100) == 1
    assert shared.remove_old(time.time() - 3600, script, limit=100) == 0
    for node in ("n1", "n2"):
        assert sorted(path.name for path in (shared.nodes / node / "attempts").iterdir()) == ["2.1", "3.1"]
    assert sorted(path.name for path in shared.fences.dir.iterdir()) == ["2", "3"]
    assert sorted(path.name for path in shared.logs.iterdir()) == ["2.1.log", "3.1.log"]
    assert [path.name for path in shared.slurm.glob("bin-*")] == [script.parents[2].name]


def test_nobody_else_can_read_the_key_or_the_values(shared: SharedFolder) -> None:
    gang = SlurmGang("1", 1, (Part("n1", (0,)),))
    attempt = shared.attempt("n1", gang)
    shared.write_attempt(attempt, {"env": {"TOKEN": "secret"}}, {"key": "secret"})
    assert attempt.path.stat().st_mode & 0o077 == 0
    for name in ("launch.json", "step.json"):
        assert (attempt.path / name).stat().st_mode & 0o077 == 0
    assert shared.install_step().parent.stat().st_mode & 0o022 == 0  # what runs on the nodes is ours alone to write
    assert "secret" not in repr(site(shared.dir)) + repr(gang)
