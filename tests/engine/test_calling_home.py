"""Agents on other machines: they call home, prove who they are, obey the newest leader and stop when cut off."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kit.node_cluster import Cluster, alive, kill_everything_below, make_folder, python, shell
from kit.scripts import SAVES
from kit.waiting import until
from thebes.engine.agents import AgentEngine
from thebes.engine.door import EPHEMERAL_RANGE, HomeDoor, free_port
from thebes.engine.link import CALLED_DOWN_AFTER_S, NodeLink
from thebes.protocol.clock import boot_s
from thebes.protocol.contract import Listener, NodeChange, Report
from thebes.protocol.lease import KILL_AT, over_s
from thebes.protocol.seal import parse_address
from thebes.protocol.sealed import SealedReader, SealedWriter

KEY = bytes(range(32))
NEVER_ENDS = "while true; do sleep 0.05; done"


class CalledEngine(AgentEngine):
    """The engine of agents that call home, with nothing around it."""

    def __init__(self, nodes: list[str], *, port: int = 0, key: bytes = KEY, epoch: int = 1, lease_s: float = 60.0):
        super().__init__()
        self._names, self._port, self._lease_s = nodes, port, lease_s
        self.home = HomeDoor(key, epoch, self._called)
        self.refused: list[str] = []

    async def open(self, listener: Listener, *, parked_s: float = 0.0) -> None:
        self._listener = listener
        for name in self._names:
            link = self._links[name] = NodeLink(name, self._heard, down_after_s=CALLED_DOWN_AFTER_S)
            link.greeting = {"lease_s": self._lease_s}
            link.ping_every_s = self._lease_s / 6
            link.expect()
        await self.home.open("127.0.0.1", self._port)

    async def _called(self, who: str, reader: SealedReader, writer: SealedWriter) -> None:
        await self._links[who.removeprefix("node:")].attach(reader, writer)

    async def close(self) -> None:
        await self.home.close()
        await super().close()


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


async def shorten(cluster: Cluster, lease_s: float) -> float:
    """Give the node this lease from now on; the time before that. Not earlier: a stall would cost us the jobs."""
    link, began_s = cluster.engine._link("n0"), boot_s()
    await link.call("ping", {"heard_s": began_s})
    await link.call("hello", {"lease_s": lease_s})
    return began_s


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
            await cluster.until(lambda: any(isinstance(one, NodeChange) for one in cluster.heard))
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
            await old.until(lambda: any(isinstance(one, NodeChange) for one in old.heard))
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
    lease_s = 12.0  # half of it is the time that they have to save, on a machine that may stall

    async def start(port: int) -> tuple[int, float]:
        async with at_home(folder, port=port, lease_s=600.0) as cluster:
            await cluster.until(lambda: up(cluster))
            await cluster.engine.launch(python("1", SAVES))
            await cluster.engine.launch(shell("2", NEVER_ENDS))
            await cluster.printed("1", "ready")
            await cluster.report("2", "running")
            return cluster.state("2")["pids"]["0"], await shorten(cluster, lease_s)

    async def later(port: int) -> dict[str, Report]:
        async with at_home(folder, port=port) as cluster:
            return {job: await cluster.ended(job) for job in ("1", "2")}

    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}", lease_s=600.0):  # the shorter one that it is told holds at once
        pid, heard_s = asyncio.run(start(port))
        until(lambda: not alive(pid))
        found = asyncio.run(later(port))
    assert (found["1"].cause, found["1"].codes) == ("exit", {0: 85})  # it has saved: nothing is lost
    assert (found["2"].cause, found["2"].detail.split(":")[0]) == ("lost", "cut off")
    assert found["2"].exited_s is not None
    assert found["2"].exited_s - heard_s > lease_s  # not before it was over


def test_while_the_head_vouches_for_the_node_jobs_go_on(folder: Path, tmp_path: Path) -> None:
    lease_s = 4.0
    head_file = tmp_path / "head"
    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}", head_file=head_file):
        pid, _ = asyncio.run(running_job(port, folder, lease_s))
        until_s = boot_s() + KILL_AT * lease_s + 1.0
        while boot_s() < until_s:
            head_file.write_text(str(boot_s()))
            assert alive(pid)
            time.sleep(0.1)
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


async def running_job(port: int, folder: Path, lease_s: float) -> tuple[int, float]:
    """Start a job that never ends, and leave without a word; the pid of its rank, and when its lease began."""
    async with at_home(folder, port=port) as cluster:
        await cluster.until(lambda: up(cluster))
        await cluster.engine.launch(shell("1", NEVER_ENDS))
        await cluster.report("1", "running")
        return cluster.state("1")["pids"]["0"], await shorten(cluster, lease_s)


def dead_by(pid: int, at_s: float) -> None:
    """The job is gone before a controller may take it for lost. While the machine stalls, neither of them acts."""
    looked_s = boot_s()
    while alive(pid):
        now_s = boot_s()
        at_s += max(0.0, now_s - looked_s - 0.1)
        looked_s = now_s
        assert now_s < at_s, "it lives longer than its lease"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_jobs_end_with_the_lease_of_their_node_also_when_its_agent_is_frozen_or_dead(
    folder: Path, number: signal.Signals
) -> None:
    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}") as agent:
        pid, heard_s = asyncio.run(running_job(port, folder, 3.0))
        os.kill(agent.pid, number)
        dead_by(pid, boot_s() + over_s(3.0))
        assert boot_s() - heard_s > 3.0
        path = folder / "nodes/n0/attempts/1.1/state.json"
        state = until(lambda: (found := json.loads(path.read_text()))["state"] == "exited" and found)
        assert (state["cause"], state["detail"].split(":")[0]) == ("lost", "cut off")


def test_a_new_agent_gets_no_new_lease_and_obeys_no_older_leader(folder: Path) -> None:
    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}", lease_s=60.0) as agent:
        pid, _ = asyncio.run(running_job(port, folder, 4.0))
        gone_s = boot_s()
        time.sleep(3.0)
        os.kill(agent.pid, signal.SIGKILL)
        agent.wait()
        with calling_agent(folder, f"127.0.0.1:{port}", lease_s=60.0):
            dead_by(pid, gone_s + over_s(4.0))

            async def too_old() -> None:
                async with at_home(folder, port=port, epoch=0) as old:
                    await old.until(lambda: any(isinstance(one, NodeChange) for one in old.heard))
                    assert not up(old)

            asyncio.run(too_old())


def test_an_agent_that_wakes_up_late_does_not_do_what_it_was_told_long_ago(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told_in_vain(port: int, agent: subprocess.Popen[bytes]) -> None:
        async with at_home(folder, port=port, lease_s=2.0) as cluster:
            await cluster.until(lambda: up(cluster))
            monkeypatch.setattr("thebes.engine.link.PING_S", 1.0)
            os.kill(agent.pid, signal.SIGSTOP)
            with pytest.raises((OSError, TimeoutError)):
                await cluster.engine.launch(shell("1", NEVER_ENDS))

    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}") as agent:
        asyncio.run(told_in_vain(port, agent))
        monkeypatch.undo()
        os.kill(agent.pid, signal.SIGCONT)
        log = folder / "log" / "agent-n0.jsonl"
        until(lambda: "has been cut off: nothing starts there until a controller is back" in log.read_text())
        assert not (folder / "nodes/n0/attempts/1.1").exists()

        async def back() -> None:
            async with at_home(folder, port=port) as cluster:
                await cluster.until(lambda: up(cluster))
                await cluster.engine.launch(shell("1", "exit 3"))
                assert (await cluster.ended("1")).codes == {0: 3}

        asyncio.run(back())


def test_nodes_that_were_left_on_purpose_go_on_until_a_controller_is_back(folder: Path) -> None:
    async def start_and_leave(port: int) -> int:
        async with at_home(folder, port=port) as cluster:
            await cluster.until(lambda: up(cluster))
            await cluster.engine.launch(shell("1", NEVER_ENDS))
            await cluster.report("1", "running")
            await shorten(cluster, 1.0)
            await cluster.engine.leave()
            await cluster.engine._link("n0").call("ping", {"heard_s": boot_s()})  # it is still there for a moment
            return cluster.state("1")["pids"]["0"]

    async def be_back(port: int) -> None:
        async with at_home(folder, port=port, lease_s=1.0) as cluster:
            await cluster.report("1", "running")

    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}"):
        pid = asyncio.run(start_and_leave(port))
        time.sleep(over_s(1.0) + 0.5)
        assert alive(pid)
        asyncio.run(be_back(port))
        dead_by(pid, boot_s() + over_s(1.0))


def test_an_agent_that_does_not_answer_does_not_look_like_one_that_knows_nothing(folder: Path) -> None:
    async def test(port: int, agent: subprocess.Popen[bytes]) -> None:
        async with at_home(folder, port=port) as cluster:
            await cluster.until(lambda: up(cluster))
            await cluster.engine.launch(shell("1", NEVER_ENDS))
            os.kill(agent.pid, signal.SIGSTOP)
            assert [one.job_id for one in await cluster.engine.reports()] == ["1"]
            os.kill(agent.pid, signal.SIGCONT)
            await cluster.engine.kill("1", 1)
            assert [one.cause for one in await cluster.engine.reports()] in ([""], ["killed"])
            await cluster.ended("1")
            await cluster.engine.forget("1", 1)
            assert await cluster.engine.reports() == []

    port = free_port()
    with calling_agent(folder, f"127.0.0.1:{port}") as agent:
        asyncio.run(test(port, agent))


def test_a_port_that_is_taken_in_between_is_chosen_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            taken, free = other.getsockname()[1], free_port()
            monkeypatch.setattr("thebes.engine.door.free_port", iter([taken, taken, free]).__next__)
            home = HomeDoor(KEY, 1, lambda *_: None)  # type: ignore[arg-type, return-value]
            await home.open("127.0.0.1", 0)
            assert home.port == free
            await home.close()
            with pytest.raises(OSError, match="in use"):
                await HomeDoor(KEY, 1, lambda *_: None).open("127.0.0.1", taken)  # type: ignore[arg-type, return-value]

    asyncio.run(test())


def test_a_port_that_is_kept_is_not_one_that_linux_hands_out(tmp_path: Path) -> None:
    """Else a connection of anybody may have it when the controller comes, or comes back."""
    last = int(EPHEMERAL_RANGE.read_text().split()[1])
    assert last > 65_000 or all(free_port() > last for _ in range(20))
    given = tmp_path / "range"
    given.write_text("32768\t65500\n")
    assert all(free_port(given) > 65_500 for _ in range(20))
    for words in ("1024\t65535\n", "", "?"):  # all of them are handed out, or nobody says which
        given.write_text(words)
        assert 1024 <= free_port(given) <= 65_535
    assert 1024 <= free_port(tmp_path / "none") <= 65_535


def test_addresses() -> None:
    assert parse_address("login1:7400") == ("login1", 7400)
    assert parse_address("[::1]:7400") == ("::1", 7400)
