"""The step of a Slurm job without a Slurm: what it does with words of long ago, and with those of somebody else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kit.node_cluster import alive, kill_everything_below
from kit.waiting import until
from thebes.engine.door import HomeDoor
from thebes.engine.link import NodeLink
from thebes.engine.slurm.gang import SharedFolder, SlurmGang
from thebes.protocol.clock import boot_s
from thebes.protocol.contract import Gpu, Launch, NodeChange, Part, Report
from thebes.protocol.launch import part_launch
from thebes.protocol.lease import KILL_AT
from thebes.protocol.sealed import SealedReader, SealedWriter

KEY = bytes(range(32))
LEASE_S = 2.0
NEVER_ENDS = ("/bin/bash", "-c", "while true; do sleep 0.05; done")


class Started:
    """One step on this machine, and a controller that it calls."""

    def __init__(self, folder: Path) -> None:
        self.shared = SharedFolder(folder)
        self.shared.make()
        self.heard: list[Report | NodeChange] = []
        self.gang = SlurmGang("1", 1, (Part("n1", (0,)),))
        self.attempt = self.shared.attempt("n1", self.gang)
        self.link = NodeLink("n1", self.heard.append)
        self.link.greeting = {"lease_s": 600.0}
        self.link.ping_every_s = LEASE_S / 6
        self.home = HomeDoor(KEY, 1, self._called)
        self.callers: list[str] = []

    async def _called(self, who: str, reader: SealedReader, writer: SealedWriter) -> None:
        self.callers.append(who)
        await self.link.attach(reader, writer)

    def start(self) -> subprocess.Popen[bytes]:
        launch = Launch("1", 1, self.gang.parts, NEVER_ENDS, "/")
        part = part_launch(
            *(launch, 0),
            gpus=[Gpu(0, virtual=True)],
            base_env={},
            attempt_dir=str(self.attempt.path),
            poke="",
            master_addr="?",
            master_port=1,
        )
        step = {
            "key": KEY.hex(),
            "homes": [f"127.0.0.1:{self.home.port}"],
            "homes_file": str(self.shared.homes),
            "lease_s": 600.0,
            "start_within_s": 600.0,
            "unknown_port": 1,
            "unknown_address": "?",
        }
        self.shared.write_attempt(self.attempt, part.as_dict(), step)
        script = self.shared.install_step()
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(self.shared.nodes), "1.1", "f00d"],
            env={**os.environ, "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin"},
            start_new_session=True,
        )

    def state(self) -> dict[str, Any]:
        return json.loads((self.attempt.path / "state.json").read_text())


@asynccontextmanager
async def a_step(folder: Path) -> AsyncIterator[tuple[Started, subprocess.Popen[bytes]]]:
    started = Started(folder)
    await started.home.open("127.0.0.1", 0)
    started.link.expect()
    step = await asyncio.to_thread(started.start)
    try:
        yield started, step
    finally:
        await started.home.close()
        await started.link.end()
        step.kill()
        step.wait()
        kill_everything_below(folder)


async def running(started: Started) -> int:
    """Tell it to start; the pid of its rank."""
    await started.link.ready.wait()
    await started.link.call("start", {"master_addr": "127.0.0.1", "master_port": 29500})
    return int(started.state()["pids"]["0"])


async def frozen(started: Started, step: subprocess.Popen[bytes]) -> None:
    """It has a short lease, but not earlier: a stall would be the end of it."""
    await started.link.call("ping", {"heard_s": boot_s()})
    await started.link.call("hello", {"lease_s": LEASE_S})
    os.kill(step.pid, signal.SIGSTOP)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def test_a_step_that_wakes_up_late_stops_its_ranks_before_it_listens(folder: Path) -> None:
    """While it was frozen it was pinged: that lies in its buffer, and must not look like a word of now."""

    async def story() -> None:
        async with a_step(folder) as (started, step):
            pid = await running(started)
            await frozen(started, step)
            await asyncio.sleep(KILL_AT * LEASE_S + 0.5)
            os.kill(step.pid, signal.SIGCONT)
            await asyncio.to_thread(until, lambda: not alive(pid))
            await asyncio.to_thread(until, lambda: started.state()["state"] == "exited")
            found = started.state()
            assert (found["cause"], found["detail"].split(":")[0]) == ("lost", "cut off")

    asyncio.run(story())


def test_a_step_that_was_frozen_for_long_does_not_start_what_it_was_told_to(folder: Path) -> None:
    async def story() -> None:
        async with a_step(folder) as (started, step):
            await started.link.ready.wait()
            assert started.callers == ["step:1.1:n1:f00d"]
            await frozen(started, step)
            with pytest.raises((OSError, TimeoutError)):
                await started.link.call("start", {"master_addr": "127.0.0.1", "master_port": 29500}, 2 * LEASE_S)
            os.kill(step.pid, signal.SIGCONT)
            await asyncio.to_thread(until, lambda: (started.attempt.path / "state.json").exists())
            assert (started.state()["state"], started.state()["started_s"]) == ("exited", None)

    asyncio.run(story())
