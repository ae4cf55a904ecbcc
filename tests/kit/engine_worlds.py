"""Three worlds in which the same engine tests run: this machine, Slurm, Ray. Four nodes of 8 GPUs each.

A world is made once per module. `world.engine()` makes a new engine on it, as a controller does when it starts: job ids
are never used twice, so tests do not see each other's jobs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from kit.components import require
from kit.waiting import PATIENCE_S, until_async
from thebes.engine.door import free_port
from thebes.engine.site import EngineSite
from thebes.node import processes
from thebes.protocol.contract import Engine, Launch, NodeChange, NodeFacts, Part, Report

GPUS = 8
KEY = bytes(range(32))
_numbers = count(os.getpid() * 1000)  # no other instance on this machine has such jobs


class World(Protocol):
    name: str
    nodes: list[str]
    shared: Path

    def engine(self) -> Engine: ...


class Local:
    """Agents on this machine."""

    name = "local"
    nodes: list[str]

    def __init__(self, folder: Path, nodes: list[str]) -> None:
        self.shared, self.nodes = folder, nodes

    def engine(self) -> Engine:
        from thebes.engine.local import LocalEngine

        return LocalEngine(self.shared, self.nodes)


class Called:
    """A cluster whose nodes call home: Slurm or Ray."""

    def __init__(
        self, name: str, nodes: list[str], shared: Path, make: Callable[[EngineSite], Engine], **site: Any
    ) -> None:
        self.name, self.nodes, self.shared, self._make, self._site = name, nodes, shared, make, site
        self._epochs = count(1)

    def engine(self) -> Engine:
        site = EngineSite(
            instance_id="conform1",
            key=KEY,
            epoch=next(self._epochs),
            gpus=dict.fromkeys(self.nodes, GPUS),
            gpu_types=dict.fromkeys(self.nodes, ""),
            shared_dir=self.shared,
            lease_s=20.0,
            **self._site,
        )
        return self._make(site)


@contextmanager
def local_world(folder: Path, nodes: int = 4) -> Iterator[World]:
    from kit.node_cluster import agents, make_folder

    names = [f"n{i}" for i in range(1, nodes + 1)]
    make_folder(folder, dict.fromkeys(names, GPUS))
    with agents(folder, *names):
        yield Local(folder, names)


@contextmanager
def slurm_world(folder: Path, nodes: int = 4) -> Iterator[World]:
    require("slurm")
    import pytest

    from kit.slurm_cluster import slurm_cluster
    from thebes.engine.slurm.engine import SlurmEngine

    with slurm_cluster(nodes=nodes, gpus=GPUS) as slurm, pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.env.items():
            patch.setenv(name, value)
        names = [f"n{i}" for i in range(1, nodes + 1)]
        yield Called("slurm", names, folder, SlurmEngine, home_host=slurm.address, home_port=free_port())


@contextmanager
def ray_world(folder: Path, nodes: int = 4) -> Iterator[World]:
    require("ray")
    from kit.ray_cluster import RayCluster
    from thebes.engine.ray.engine import RayEngine

    with RayCluster() as ray:
        names = [f"n{i}" for i in range(1, nodes + 1)]
        port = free_port()
        yield Called("ray", names, folder, RayEngine, ray_address=ray.address, home_host="127.0.0.1", home_port=port)


WORLDS = {"local": local_world, "slurm": slurm_world, "ray": ray_world}


def fresh_job() -> str:
    return str(next(_numbers))


class Told:
    """An open engine with everything it has told, newest last."""

    def __init__(self, world: World, engine: Engine) -> None:
        self.world, self.engine = world, engine
        self.heard: list[Report | NodeChange] = []
        self.heard_s: list[float] = []  # when

    def listen(self, news: Report | NodeChange) -> None:
        self.heard.append(news)
        self.heard_s.append(time.monotonic())

    def ended_at_s(self, launch: Launch, node: str) -> float | None:
        """When we were first told that a part has ended."""
        key = (launch.job_id, launch.incarnation, node)
        for one, at_s in zip(self.heard, self.heard_s, strict=True):
            if isinstance(one, Report) and (one.job_id, one.incarnation, one.node) == key and one.state == "exited":
                return at_s
        return None

    async def until(self, look: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
        return await until_async(look, what, patience_s, told=lambda: f"heard: {self.heard[-6:]}")

    def latest(self, job_id: str, incarnation: int, node: str) -> Report | None:
        for one in reversed(self.heard):
            if isinstance(one, Report) and (one.job_id, one.incarnation, one.node) == (job_id, incarnation, node):
                return one
        return None

    async def report(self, launch: Launch, state: str, node: str | None = None) -> Report:
        """Wait until the engine has told that a part (the first, unless said) is in this state."""
        where = node or launch.parts[0].node

        def there() -> Report | None:
            found = self.latest(launch.job_id, launch.incarnation, where)
            return found if found and found.state == state else None

        return await self.until(there, f"{launch.job_id}.{launch.incarnation} {state} on {where}")

    async def ended(self, launch: Launch, node: str | None = None) -> Report:
        return await self.report(launch, "exited", node)

    async def log(self, launch: Launch, rank: int = 0) -> str:
        data, _ = await self.engine.read_log(launch.job_id, launch.incarnation, rank, 0, 1 << 20)
        return data.decode()

    async def printed(self, launch: Launch, text: str, rank: int = 0) -> str:
        found = ""

        async def there() -> bool:
            nonlocal found
            with suppress(FileNotFoundError):
                found = await self.log(launch, rank)
            return text in found

        await until_async(there, f"{text!r} is in the log", told=lambda: repr(found[-500:]))
        return found

    async def all_up(self) -> list[NodeFacts]:
        """Wait until every node is there."""
        nodes: list[NodeFacts] = []

        async def there() -> bool:
            nodes[:] = await self.engine.nodes()
            return len(nodes) == len(self.world.nodes) and all(node.alive for node in nodes)

        await until_async(there, "all nodes are up", every_s=0.05, told=lambda: nodes)
        return nodes


@asynccontextmanager
async def opened(world: World, *, wait: bool = True) -> AsyncIterator[Told]:
    told = Told(world, world.engine())
    await told.engine.open(told.listen)
    try:
        if wait:
            await told.all_up()
        yield told
    finally:
        await told.engine.close()


def on(world: World, *gpus: tuple[int, ...]) -> tuple[Part, ...]:
    """Parts on the first nodes: these GPUs of the first, those of the second, …"""
    return tuple(Part(node, numbers) for node, numbers in zip(world.nodes, gpus, strict=False) if numbers)


def python(world: World, script: str, *gpus: tuple[int, ...], job_id: str = "", **more: Any) -> Launch:
    defaults: dict[str, Any] = {"incarnation": 1, "workdir": "/", "grace_s": 10.0}
    return Launch(
        job_id=job_id or fresh_job(),
        parts=on(world, *(gpus or ((0,),))),
        command=(sys.executable, "-I", "-S", "-c", script),
        **{**defaults, **more},
    )


def processes_of(launch: Launch) -> list[int]:
    """Every process of this incarnation on this machine, by its environment."""
    mark = f"THEBES_ATTEMPT={launch.job_id}.{launch.incarnation}".encode()
    return [pid for pid in processes.all_pids() if mark in processes.environment(pid).split(b"\0")]


async def order_of_ends(told: Told, launch: Launch, node: str) -> tuple[float, float]:
    """When the last process of an incarnation was seen, and when the engine said that its part on this node has ended:
    both by the clock of this machine. Looks on for a while after that.
    """
    seen_s, looks_after, deadline = 0.0, 20, time.monotonic() + 2 * PATIENCE_S
    while looks_after:
        assert time.monotonic() < deadline, f"it is not told as ended; heard: {told.heard[-6:]}"
        began_s = time.monotonic()
        if await asyncio.to_thread(processes_of, launch):
            seen_s = began_s
        looks_after -= told.ended_at_s(launch, node) is not None
        await asyncio.sleep(0.02)
    told_s = told.ended_at_s(launch, node)
    assert told_s is not None
    return seen_s, told_s


@contextmanager
def world_of(kind: str, folder: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield stack.enter_context(WORLDS[kind](folder))
