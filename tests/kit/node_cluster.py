"""A real agent on a folder of its own, and a real engine talking to it: what the tests of node and engine stand on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from kit.waiting import PATIENCE_S, until, until_async
from thebes.engine.local import LocalEngine
from thebes.node import processes
from thebes.protocol.contract import Launch, NodeChange, Part, Report
from thebes.protocol.instance import Instance


def make_folder(folder: Path, nodes: dict[str, int]) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = {"version": 1, "nodes": [{"name": name, "gpus": gpus, "virtual": True} for name, gpus in nodes.items()]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def start_agent(folder: Path, node: str = "n0", *options: str) -> subprocess.Popen[bytes]:
    """A new agent; returns when it listens."""
    (folder / "run" / f"agent-{node}.sock").unlink(missing_ok=True)
    command = [sys.executable, "-m", "thebes.node.agent", str(folder), node, *options]
    agent = subprocess.Popen(command, start_new_session=True)
    until(lambda: (folder / "run" / f"agent-{node}.sock").exists() or agent.poll() is not None)
    assert agent.poll() is None, "the agent has ended"
    return agent


@contextmanager
def agents(folder: Path, *nodes: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Agents of these nodes, and nothing of theirs left behind: supervisors and jobs are killed at the end."""
    found = {node: start_agent(folder, node) for node in nodes or ("n0",)}
    try:
        yield found
    finally:
        for agent in found.values():
            agent.kill()
            agent.wait()
        kill_everything_below(folder)


def kill_everything_below(folder: Path) -> None:
    """Supervisors by their locks, ranks by their environment."""
    mark = f"THEBES_ATTEMPT_DIR={folder}/".encode()
    while True:
        found = [attempt.pid for attempt in Instance(folder).live_attempts()]
        found += [
            pid
            for pid in processes.all_pids()
            if any(entry.startswith(mark) for entry in processes.environment(pid).split(b"\0"))
        ]
        if not found:
            return
        processes.kill_all(found)
        processes.wait_gone(found, 5.0)


def alive(pid: int) -> bool:
    """A zombie is not."""
    stat = processes.read_stat(pid)
    return stat is not None and stat.alive


def launch(job_id: str, *command: str, incarnation: int = 1, gpus: int = 1, **more: Any) -> Launch:
    defaults: dict[str, Any] = {
        "parts": (Part("n0", tuple(range(gpus))),),
        "workdir": "/",
        "grace_s": 5.0,
    }
    return Launch(job_id=job_id, incarnation=incarnation, command=command, **{**defaults, **more})


def shell(job_id: str, script: str, **more: Any) -> Launch:
    return launch(job_id, "/bin/bash", "-c", script, **more)


def python(job_id: str, script: str, **more: Any) -> Launch:
    return launch(job_id, sys.executable, "-I", "-S", "-c", script, **more)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 3 * PATIENCE_S))


class Cluster:
    """An engine with everything it has told, newest last."""

    def __init__(self, folder: Path, engine: LocalEngine) -> None:
        self.folder = folder
        self.engine = engine
        self.heard: list[Report | NodeChange] = []

    def listen(self, change: Report | NodeChange) -> None:
        self.heard.append(change)

    def attempt(self, job_id: str, incarnation: int = 1, node: str = "n0") -> Path:
        return self.folder / "nodes" / node / "attempts" / f"{job_id}.{incarnation}"

    def state(self, job_id: str, incarnation: int = 1, node: str = "n0") -> dict[str, Any]:
        return json.loads((self.attempt(job_id, incarnation, node) / "state.json").read_text())

    async def log(self, job_id: str, incarnation: int = 1, rank: int = 0) -> str:
        data, _ = await self.engine.read_log(job_id, incarnation, rank, 0, 1 << 20)
        return data.decode()

    async def until(self, look: Callable[[], Any], what: str = "what was waited for") -> Any:
        return await until_async(look, what, told=lambda: f"heard: {self.heard[-5:]}")

    async def met(self, *pids: int | None) -> None:
        """Wait until the engine talks with these agents: what is asked of one that is just coming up is refused."""
        links = self.engine._links.values()
        await self.until(lambda: {*pids} <= {link.facts.pid for link in links if link.ready.is_set()})

    def latest(self, job_id: str, incarnation: int = 1, node: str = "n0") -> Report | None:
        for one in reversed(self.heard):
            if isinstance(one, Report) and (one.job_id, one.incarnation, one.node) == (job_id, incarnation, node):
                return one
        return None

    async def report(self, job_id: str, state: str, incarnation: int = 1, node: str = "n0") -> Report:
        """Wait until the engine has told that it is in this state."""

        def there() -> Report | None:
            found = self.latest(job_id, incarnation, node)
            return found if found and found.state == state else None

        return await self.until(there)

    async def ended(self, job_id: str, incarnation: int = 1, node: str = "n0") -> Report:
        return await self.report(job_id, "exited", incarnation, node)

    async def printed(self, job_id: str, text: str, incarnation: int = 1, rank: int = 0) -> str:
        """Wait for a text in the log."""

        async def there() -> str:
            found = await self.log(job_id, incarnation, rank)
            return found if text in found else ""

        return await until_async(there, f"{text!r} is in the log")


@asynccontextmanager
async def connected(folder: Path, *nodes: str) -> AsyncIterator[Cluster]:
    """An engine that talks with the agents of these nodes, as far as they live."""
    nodes = nodes or ("n0",)
    cluster = Cluster(folder, LocalEngine(folder, nodes))
    await cluster.engine.open(cluster.listen)
    try:
        pids = [Instance(folder).holder_pid(f"agent-{node}") for node in nodes]
        await cluster.met(*(pid for pid in pids if pid is not None))
        yield cluster
    finally:
        await cluster.engine.close()


def kill_hard(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
