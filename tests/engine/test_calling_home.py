"""Agents on other machines: they call home, prove who they are, obey the newest leader and stop when cut off."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from node_cluster import Cluster, alive, kill_everything_below, make_folder, python, shell, until

from thebes.engine.agents import AgentEngine
from thebes.engine.contract import Listener, NodeChange, Report
from thebes.engine.home import Home, SealedReader, SealedWriter, parse_address
from thebes.engine.link import CALLED_DOWN_AFTER_S, Link
from thebes.node.clock import boot_s

KEY = bytes(range(32))
NEVER_ENDS = "while true; do sleep 0.05; done"
SAVES = """
import os, signal, sys, time
def save(*_):
    print("saved", flush=True); sys.exit(85)
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
while True: time.sleep(0.05)
"""


class CalledEngine(AgentEngine):
    """The engine of agents that call home, with nothing around it."""

    def __init__(self, nodes: list[str], *, port: int = 0, key: bytes = KEY, epoch: int = 1, lease_s: float = 60.0):
        super().__init__()
        self._names, self._port, self._lease_s = nodes, port, lease_s
        self.home = Home(key, epoch, self._called)
        self.refused: list[str] = []

    async def open(self, listener: Listener, *, parked_s: float = 0.0) -> None:
        self._listener = listener
        for name in self._names:
            link = self._links[name] = Link(name, self._heard, down_after_s=CALLED_DOWN_AFTER_S)
            link.greeting = {"lease_s": self._lease_s}
            link.ping_every_s = self._lease_s / 6
            link.expect()
        await self.home.open("127.0.0.1", self._port)

    async def _called(self, who: str, reader: SealedReader, writer: SealedWriter) -> None:
        await self._links[who.removeprefix("node:")].attach(reader, writer)

    async def close(self) -> None:
        await self.home.close()
        await super().close()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def calling_agent(
    folder: Path, *homes: str, key: bytes = KEY, lease_s: float = 60.0, head_file: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "thebes.node.agent", str(folder), "n0", "--homes", ",".join(homes)]
    command += ["--lease", str(lease_s), *(["--head-file", str(head_file)] if head_file else [])]
    agent = subprocess.Popen(command, start_new_session=True, env={**os.environ, "THEBES_HOME_KEY": key.hex()})
    try:
        yield agent
    finally:
        agent.kill()
        agent.wait()
        kill_everything_below(folder)


@asynccontextmanager
async def at_home(folder: Path, **more: object) -> AsyncIterator[Cluster]:
    cluster = Cluster(folder, CalledEngine(["n0"], **more))  # type: ignore[arg-type]
    await cluster.engine.open(cluster.listen)
    try:
        yield cluster
    finally:
        await cluster.engine.close()


def up(cluster: Cluster) -> bool:
    return any(isinstance(one, NodeChange) and one.facts.alive for one in cluster.heard)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "c", {"n0": 4})


def test_an_agent_calls_home_runs_jobs_and_finds_the_next_controller(folder: Path) -> None:
    async def test(port: int) -> None:
        async with at_home(folder, port=port) as cluster:
            await cluster.until(lambda: up(cluster))
            facts = next(one.facts for one in cluster.heard if isinstance(one, NodeChange) and one.facts.alive)
            assert facts.address == "127.0.0.1"
            assert cluster.engine.master_address(cluster.engine._link("n0")) == "127.0.0.1"
            await cluster.engine.launch(python("1", SAVES))
            await cluster.printed("1", "ready")
        async with at_home(folder, port=port, epoch=2) as cluster:  # another controller, the same job
            await cluster.report("1", "running")
            await cluster.engine.notice("1", 1, 5.0)
            assert (await cluster.ended("1")).codes == {0: 85}
            await cluster.engine.leave()

    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}"):
        asyncio.run(test(port))


def test_only_those_with_the_key_are_let_in_and_only_the_newest_leader_is_obeyed(folder: Path) -> None:
    async def strangers(port: int) -> None:
        async with at_home(folder, port=port, key=b"?" * 32) as cluster:
            await cluster.until(lambda: any(isinstance(one, NodeChange) for one in cluster.heard), 10)
            assert not up(cluster)
            for words in (b"GET / HTTP/1.1\r\n", b'{"thebes":1}\n', b'{"thebes":1,"who":"node:n0","nonce":"1"}\n{}\n'):
                reader, writer = await asyncio.open_connection("127.0.0.1", cluster.engine.home.port)
                writer.write(words)
                writer.write_eof()
                assert b"result" not in await reader.read()
                writer.close()

    async def epochs(port: int) -> None:
        async with at_home(folder, port=port, epoch=7) as cluster:
            await cluster.until(lambda: up(cluster))
        async with at_home(folder, port=port, epoch=6) as old:
            await old.until(lambda: any(isinstance(one, NodeChange) for one in old.heard), 10)
            assert not up(old)
        async with at_home(folder, port=port, epoch=7) as again:
            await again.until(lambda: up(again))

    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}"):
        asyncio.run(strangers(port))
        asyncio.run(epochs(port))


def test_one_of_several_homes_is_enough_and_a_new_one_can_be_told(folder: Path) -> None:
    async def test(first: int, later: int) -> None:
        async with at_home(folder, port=first) as cluster:
            await cluster.until(lambda: up(cluster))
            await cluster.engine._link("n0").call("homes", {"homes": [f"127.0.0.1:{later}"]})
        async with at_home(folder, port=later) as cluster:
            await cluster.until(lambda: up(cluster))

    first, later, nobody = free_port(), free_port(), free_port()
    with calling_agent(folder, f"127.0.0.1:{nobody}", f"127.0.0.1:{first}"):
        asyncio.run(test(first, later))


def test_a_job_that_is_cut_off_is_asked_to_save_and_then_killed(folder: Path) -> None:
    async def start(port: int) -> int:
        async with at_home(folder, port=port, lease_s=2.0) as cluster:
            await cluster.until(lambda: up(cluster))
            await cluster.engine.launch(python("1", SAVES))
            await cluster.engine.launch(shell("2", NEVER_ENDS))
            await cluster.printed("1", "ready")
            await cluster.report("2", "running")
            return cluster.state("2")["pids"]["0"]

    async def later(port: int) -> dict[str, Report]:
        async with at_home(folder, port=port, lease_s=2.0) as cluster:
            return {job: await cluster.ended(job) for job in ("1", "2")}

    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}", lease_s=2.0):
        pid = asyncio.run(start(port))
        gone_s = boot_s()
        until(lambda: not alive(pid))
        assert boot_s() - gone_s < 2.0 * 1.5 + 10
        found = asyncio.run(later(port))
    assert (found["1"].cause, found["1"].codes) == ("exit", {0: 85})  # it has saved: nothing is lost
    assert (found["2"].cause, found["2"].detail.split(":")[0]) == ("lost", "cut off")
    assert found["2"].exited_s is not None
    assert found["2"].exited_s - gone_s > 2.0  # not before the lease was over


def test_while_the_head_vouches_for_the_node_jobs_go_on(folder: Path, tmp_path: Path) -> None:
    async def start(port: int) -> int:
        async with at_home(folder, port=port, lease_s=2.0) as cluster:
            await cluster.until(lambda: up(cluster))
            await cluster.engine.launch(shell("1", NEVER_ENDS))
            await cluster.report("1", "running")
            return cluster.state("1")["pids"]["0"]

    head_file = tmp_path / "head"
    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}", lease_s=2.0, head_file=head_file):
        pid = asyncio.run(start(port))
        until_s = boot_s() + 5.0
        while boot_s() < until_s:
            head_file.write_text(str(boot_s()))
            assert alive(pid)
            asyncio.run(asyncio.sleep(0.1))
        until(lambda: not alive(pid))  # now the head is silent as well


def test_a_frozen_agent_is_down_and_back_when_it_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(port: int, agent: subprocess.Popen[bytes]) -> None:
        monkeypatch.setattr("thebes.engine.link.PING_S", 0.5)
        async with at_home(folder, port=port, lease_s=3.0) as cluster:
            await cluster.until(lambda: up(cluster))
            os.kill(agent.pid, signal.SIGSTOP)
            await cluster.until(lambda: not cluster.heard[-1].facts.alive)  # type: ignore[union-attr]
            assert cluster.engine._link("n0").silent_s > 0.5
            os.kill(agent.pid, signal.SIGCONT)
            await cluster.until(lambda: cluster.heard[-1].facts.alive)  # type: ignore[union-attr]

    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}", lease_s=3.0) as agent:
        asyncio.run(test(port, agent))


def test_addresses() -> None:
    assert parse_address("login1:7400") == ("login1", 7400)
    assert parse_address("[::1]:7400") == ("::1", 7400)
