"""The real controller on a real store, with a fake engine and a fake clock: `async with live_cluster(folder) as c`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kit.fake_engine import FakeClock, FakeEngine
from thebes.jobspec.spec import JobSpec
from thebes.live.clock import ClusterClock
from thebes.live.config import Config
from thebes.live.controller import Controller
from thebes.protocol.instance import Instance
from thebes.store import Store
from thebes.store.principal import Principal

ADMIN = Principal("root", "admin", "default")


class LiveCluster:
    """What a test does with a controller."""

    def __init__(self, folder: Path, engine: FakeEngine, config: Config) -> None:
        self.folder, self.engine, self.config = folder, engine, config
        self.clock = engine.clock
        self.instance = Instance(folder)
        self.instance.create()
        self.place: Path | str = self.instance.store

    async def open(self) -> None:
        self.store = Store.open(self.place)
        self.controller = Controller(
            self.store,
            self.engine,
            self.config,
            self.instance,
            clock=lambda kept, last_s: ClusterClock(1e9, "boot", self.clock),
            strict=True,
        )
        await self.controller.open()
        await self.quiet()

    async def close(self) -> None:
        await self.controller.close()
        self.store.close()

    async def crash(self) -> None:
        """The controller is gone at once: what was not committed is lost, what lives on the nodes goes on."""
        task = self.controller._loop
        assert task is not None
        for other in [*self.controller.dispatch.tasks.values(), *self.controller._background_work]:
            other.cancel()
        while not task.done():  # `wait_for` of Python 3.11 loses a cancellation that comes together with its result
            task.cancel()
            await asyncio.wait([task], timeout=0.1)
        await asyncio.gather(task, return_exceptions=True)
        self.engine.listener = None
        self.store.close()

    async def quiet(self) -> None:
        """Wait until the controller has done all that it can do now."""
        still = 0
        while still < 3:
            await asyncio.sleep(0.001)
            still = still + 1 if self.controller.idle else 0

    async def submit(self, gpus: int = 1, principal: Principal = ADMIN, **fields: object) -> str:
        spec = JobSpec(command=["train"], gpus=gpus, workdir="/", **fields)  # type: ignore[arg-type]
        ids = await self.controller.submit(spec, principal)
        await self.quiet()
        return ids[0]

    async def pass_time(self, seconds: float) -> None:
        self.clock.time_s += seconds
        self.engine.tick()
        self.controller._bell.set()
        self.controller.core.dirty = True
        await self.quiet()

    async def make_steps(self, rates: dict[str, float], seconds: int) -> None:
        """Jobs make so many steps per second, and tell of them every second."""
        for _ in range(seconds):
            await self.pass_time(1.0)
            for job, rate in rates.items():
                if self.incarnation(job):
                    self.engine.progressed(job, self.incarnation(job), rate)
            await self.quiet()

    def state(self, job_id: str) -> str:
        from thebes import store as db

        with self.store.read() as c:
            row = db.get_job(c, job_id)
            assert row is not None
            return row.state

    def row(self, job_id: str):
        from thebes import store as db

        with self.store.read() as c:
            return db.get_job(c, job_id)

    def events(self):
        from thebes import store as db

        with self.store.read() as c:
            return db.events_after(c, seq=0, viewer=db.EVERYTHING, limit=10_000)

    def incarnation(self, job_id: str) -> int:
        return max((inc for job, inc in self.engine.living if job == job_id), default=0)


@asynccontextmanager
async def live_cluster(
    folder: Path, nodes: dict[str, int] | None = None, *, place: Path | str | None = None, **config: object
) -> AsyncIterator[LiveCluster]:
    """`place`: of a store elsewhere than in the folder, perhaps in another database."""
    nodes = nodes or {"n0": 4, "n1": 4}
    listed = [{"name": name, "gpus": gpus, "virtual": True} for name, gpus in nodes.items()]
    made = Config(nodes=listed, **config)  # type: ignore[arg-type]
    cluster = LiveCluster(folder, FakeEngine(FakeClock(), nodes), made)
    cluster.place = place or cluster.place
    await cluster.open()
    try:
        yield cluster
    finally:
        await cluster.close()
