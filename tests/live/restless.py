"""A world in which the real controller is driven step by step: no threads, no real time, crashes at any point.

The event loop stands still unless the test steps it, and its clock is the cluster's fake clock. The store is the real
one, but it is written in the very step that asks for it, so that a test can say before or after which commit the
controller dies. The engine keeps its contract while nodes go away, jobs freeze, reports come late or twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sqlalchemy import Connection

from kit.fake_engine import FakeClock
from thebes.protocol.contract import (
    Cause,
    Gpu,
    Launch,
    Listener,
    Mechanism,
    NodeChange,
    NodeFacts,
    Part,
    PartState,
    Refused,
    Report,
)
from thebes.store import Store, StoreUnavailable

Key = tuple[str, int]


class Stepped(asyncio.SelectorEventLoop):
    """An event loop that does one round when told to, on a clock that the test turns."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.fake_clock = clock
        self.set_default_executor(_AtOnce())

    def time(self) -> float:
        return self.fake_clock()

    def step(self) -> None:
        self.call_soon(self.stop)
        self.run_forever()

    @property
    def at_rest(self) -> bool:
        timers = [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        return not self._ready and not any(timer.when() <= self.time() for timer in timers)  # type: ignore[attr-defined]

    def settle(self, longest: int = 20_000) -> None:
        """Until nothing can happen any more without time passing."""
        for _ in range(longest):
            self.step()
            if self.at_rest:
                return
        raise AssertionError("the controller does not come to rest")


class _AtOnce(ThreadPoolExecutor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


async def pause(steps: int) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)


class MortalStore:
    """The real store as one controller sees it, until that controller dies: before or after a commit, if so wished."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.dead = False
        self.full = False  # the disk takes nothing
        self.fuse: tuple[int, Literal["before", "after"]] | None = None  # dies at so many commits from now
        self._waiting: list[tuple[Callable[[Connection], Any], asyncio.Future[Any]]] = []

    @property
    def trouble(self) -> str | None:
        return "disk full" if self.full else self.store.trouble

    def read(self) -> AbstractContextManager[Connection]:
        return self.store.read()

    def change(self, fn: Callable[[Connection], Any], *, must: bool) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.full and not must:
            future.set_exception(StoreUnavailable("the store cannot be written: disk full; nothing was accepted"))
        elif self.full:
            self._waiting.append((fn, future))
        else:
            self._write(fn, future)
        return future

    def make_room(self) -> None:
        self.full = False
        waiting, self._waiting = self._waiting, []
        for fn, future in waiting:
            self._write(fn, future)

    def _write(self, fn: Callable[[Connection], Any], future: asyncio.Future[Any]) -> None:
        dies = self._burn()
        if self.dead or dies == "before":
            self.dead = True
            return
        try:
            result = self.store.change_blocking(fn, must=True)
        except Exception as error:
            self._soon(lambda error=error: future.done() or future.set_exception(error))
        else:
            self.dead = dies == "after"
            if not self.dead:
                self._soon(lambda: future.done() or future.set_result(result))

    def _burn(self) -> str | None:
        if self.fuse is None:
            return None
        left, side = self.fuse
        self.fuse = None if left == 0 else (left - 1, side)
        return side if left == 0 else None

    def _soon(self, done: Callable[[], Any], rounds: int = 2) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(done if rounds == 0 else lambda: self._soon(done, rounds - 1))


@dataclass
class Incarnation:
    """One that lives in the engine: each part has its own end."""

    launch: Launch
    parts: dict[str, Report]
    state: PartState = "running"
    leaves_s: float | None = None  # killed at this instant
    was_frozen: bool = False
    goodbye: bool = False  # it was frozen and has been thawed to save itself: others may be on its GPUs

    @property
    def living_parts(self) -> list[Part]:
        return [part for part in self.launch.parts if self.parts[part.node].state != "exited"]


@dataclass
class Restless:
    """Nodes and what lives on them; outlives every controller."""

    clock: FakeClock
    sizes: dict[str, int]
    up: dict[str, bool] = field(default_factory=dict)
    living: dict[Key, Incarnation] = field(default_factory=dict)
    ended: dict[Key, dict[str, Report]] = field(default_factory=dict)
    fence: dict[str, int] = field(default_factory=dict)
    wire: Wire | None = None
    refuse: set[str] = field(default_factory=set)  # verbs
    own_failures: dict[str, int] = field(default_factory=dict)
    misfortunes: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # promises, at an instant that may have passed since

    def __post_init__(self) -> None:
        self.up = dict.fromkeys(self.sizes, True)

    def facts(self, node: str) -> NodeFacts:
        gpus = tuple(Gpu(i, virtual=True) for i in range(self.sizes[node]))
        return NodeFacts(node, gpus, alive=self.up[node], mechanisms=("checkpoint", "freeze"))

    def tell(self, what: Report | NodeChange) -> None:
        node = what.node if isinstance(what, Report) else what.facts.name
        if self.wire is not None and (isinstance(what, NodeChange) or self.up.get(node, False)):
            self.wire.pass_on(what)

    # -- what the test does to jobs and nodes

    def end(self, key: Key, code: int, cause: Cause = "exit", *, node: str | None = None) -> None:
        """All ranks end, or those of one node."""
        one = self.living[key]
        rank = 0
        told: list[Report] = []
        for part in one.launch.parts:
            ranks = range(rank, rank + len(part.gpus))
            rank += len(part.gpus)
            before = one.parts[part.node]
            if before.state == "exited" or (node is not None and part.node != node):
                continue
            now_s = self.clock()
            run_s = now_s - (before.started_s or now_s)
            codes = dict.fromkeys(ranks, code)
            report = replace(before, state="exited", cause=cause, codes=codes, exited_s=now_s, run_s=run_s)
            one.parts[part.node] = report
            told.append(report)
        if not one.living_parts:
            self.ended[key] = self.living.pop(key).parts
        for report in told:
            self.tell(report)

    def checkpoint(self, key: Key, step: int) -> None:
        one = self.living[key]
        node = one.living_parts[0].node
        told = replace(
            one.parts[node],
            checkpoint_step=step,
            checkpoint_path=f"/{step}",
            checkpoint_s=self.clock(),
            step=step,
            step_s=self.clock(),
            first_step_s=one.parts[node].first_step_s or self.clock(),
            steps_per_s=1.0,
        )
        one.parts[node] = told
        self.tell(told)

    def tick(self) -> None:
        for key, one in list(self.living.items()):
            if one.leaves_s is not None and one.leaves_s <= self.clock():
                self.end(key, -9, "killed")

    def set_up(self, node: str, up: bool) -> None:
        self.up[node] = up
        self.tell(NodeChange(self.facts(node)))

    def reboot(self, node: str, *, forgets: bool) -> None:
        """Everything there is lost; with `forgets` the node does not even remember it."""
        for key, one in list(self.living.items()):
            if node not in {part.node for part in one.living_parts}:
                continue
            self.misfortunes[key[0]] = self.misfortunes.get(key[0], 0) + 1
            self.end(key, -9, "lost", node=node)
            if forgets:
                parts = one.parts if key in self.living else self.ended.pop(key)
                self.parts_gone(key, one, node, parts)

    def parts_gone(self, key: Key, one: Incarnation, node: str, parts: dict[str, Report]) -> None:
        left = {name: report for name, report in parts.items() if name != node}
        one.parts = dict(left)
        one.launch = replace(one.launch, parts=tuple(part for part in one.launch.parts if part.node != node))
        if key not in self.living and left:
            self.ended[key] = left

    def rebuild(self, sizes: dict[str, int]) -> None:
        """Another set of nodes: what lived on those that are gone, or on GPUs that are gone, is dead."""
        for node in self.sizes:
            if node not in sizes:
                self.reboot(node, forgets=True)
        self.sizes = sizes
        self.up = {node: self.up.get(node, True) for node in sizes}

    def check(self) -> None:
        """The promises that only an engine can see."""
        jobs = [job for job, _ in self.living]
        if len(jobs) != len(set(jobs)):
            self.broken.append(f"two incarnations of one job live: {sorted(self.living)}")
        used = dict.fromkeys(self.sizes, 0)
        exact: list[tuple[str, int]] = []
        for one in self.living.values():
            if one.state != "running" or one.goodbye:
                continue
            for part in one.living_parts:
                used[part.node] += len(part.gpus)
                if not one.was_frozen:  # virtual GPUs are all alike: a frozen job may come back on other ones
                    exact += [(part.node, gpu) for gpu in part.gpus]
        if len(exact) != len(set(exact)):
            self.broken.append(f"a GPU has two jobs: {sorted(exact)}")
        self.broken += [f"{node} has {count} GPUs in use" for node, count in used.items() if count > self.sizes[node]]


class Wire:
    """The engine as one controller sees it, until that controller dies. Every call takes a few steps."""

    def __init__(self, world: Restless) -> None:
        self.world = world
        self.dead = False
        self.listener: Listener | None = None
        self.holds_back = False
        self.held: list[Report] = []
        self.passed: list[Report] = []

    def pass_on(self, what: Report | NodeChange) -> None:
        if self.listener is None or self.dead:
            return
        if isinstance(what, Report):
            if self.holds_back:
                self.held.append(what)
                return
            self.passed = [*self.passed[-20:], what]
        self.listener(what)

    def let_through(self) -> None:
        self.holds_back = False
        held, self.held = self.held, []
        for report in held:
            self.pass_on(report)

    async def open(self, listener: Listener, *, parked_s: float = 0.0) -> None:
        self.listener = listener
        self.world.wire = self
        await self._travel()

    async def leave(self) -> None:
        return None

    async def close(self) -> None:
        self.listener = None

    async def nodes(self) -> list[NodeFacts]:
        await self._travel()
        return [self.world.facts(node) for node in self.world.sizes]

    async def reports(self) -> list[Report]:
        await self._travel()
        parts = [one.parts for one in self.world.living.values()] + list(self.world.ended.values())
        found = [report for one in parts for report in one.values() if self.world.up.get(report.node)]
        await self._travel()
        return found

    async def launch(self, launch: Launch) -> None:
        await self._travel()
        world, key = self.world, (launch.job_id, launch.incarnation)
        self._reach([part.node for part in launch.parts])
        if "launch" in world.refuse:
            world.refuse.discard("launch")
            world.misfortunes[key[0]] = world.misfortunes.get(key[0], 0) + 1
            raise Refused("not today")
        if launch.incarnation < world.fence.get(launch.job_id, 0):
            raise Refused("an older incarnation")
        world.fence[launch.job_id] = launch.incarnation
        if key not in world.living and key not in world.ended:
            now_s = world.clock()
            parts = {part.node: Report(*key, part.node, "running", started_s=now_s) for part in launch.parts}
            world.living[key] = Incarnation(launch, parts)
            world.check()
            for report in list(parts.values()):
                world.tell(report)
        await self._travel()

    async def notice(self, job_id: str, incarnation: int, grace_s: float) -> None:
        await self._leave((job_id, incarnation), grace_s)

    async def terminate(self, job_id: str, incarnation: int, grace_s: float) -> None:
        await self._leave((job_id, incarnation), grace_s)

    async def _leave(self, key: Key, grace_s: float) -> None:
        await self._travel()
        one = self._one(key)
        if one.state != "running":
            one.state, one.goodbye = "running", True
            self._tell_state(one)
        until_s = self.world.clock() + grace_s
        one.leaves_s = until_s if one.leaves_s is None else min(one.leaves_s, until_s)
        await self._travel()

    async def kill(self, job_id: str, incarnation: int) -> None:
        await self._travel()
        key = job_id, incarnation
        if key in self.world.living:
            self._one(key)
            self.world.end(key, -9, "killed")
        await self._travel()

    async def suspend(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        await self._travel()
        one = self._one((job_id, incarnation))
        if one.leaves_s is not None:
            raise Refused("it is ending")
        if "suspend" in self.world.refuse:
            self.world.refuse.discard("suspend")
            raise Refused("not this one")
        one.state, one.was_frozen = "frozen" if mechanism == "freeze" else "suspended", True
        self._tell_state(one)
        await self._travel()

    async def resume(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        await self._travel()
        one = self._one((job_id, incarnation))
        if "resume" in self.world.refuse:
            self.world.refuse.discard("resume")
            raise Refused("it cannot be brought back")
        one.state = "running"
        self.world.check()
        self._tell_state(one)
        await self._travel()

    async def forget(self, job_id: str, incarnation: int) -> None:
        await self._travel()
        parts = self.world.ended.get((job_id, incarnation), {})
        self._reach(list(parts))
        self.world.ended.pop((job_id, incarnation), None)

    async def read_log(self, job_id: str, incarnation: int, rank: int, offset: int, limit: int) -> tuple[bytes, int]:
        return b"", 0

    def _tell_state(self, one: Incarnation) -> None:
        for part in one.living_parts:
            one.parts[part.node] = replace(one.parts[part.node], state=one.state)
            self.world.tell(one.parts[part.node])

    async def _travel(self) -> None:
        await pause(2)
        if self.dead:
            await asyncio.Event().wait()

    def _one(self, key: Key) -> Incarnation:
        one = self.world.living.get(key)
        if one is None:
            raise Refused("no such incarnation lives")
        self._reach([part.node for part in one.living_parts])
        return one

    def _reach(self, nodes: list[str]) -> None:
        for node in nodes:
            if node not in self.world.sizes:
                raise Refused(f"there is no node '{node}'")
            if not self.world.up[node]:
                raise OSError("the node cannot be reached")


def tasks_of(loop: asyncio.AbstractEventLoop) -> Iterator[asyncio.Task[Any]]:
    yield from asyncio.all_tasks(loop)


Work = Callable[[], Awaitable[Any]]
