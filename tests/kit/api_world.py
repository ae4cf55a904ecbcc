"""A real server for tests of API and client: real store, real controller, real sockets; only the engine is pretended.

The server runs in a thread with an event loop of its own, as a process would have. Jobs run until a test says how they
end, and write what a test says they write.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn

from kit.fake_engine import FakeEngine
from kit.waiting import until, until_async
from thebes import store as db
from thebes.api.app import create_app
from thebes.client import Client
from thebes.live.clock import boot_s
from thebes.live.config import Config, NodeConfig
from thebes.live.controller import Controller
from thebes.live.limits import Limits
from thebes.model.errors import UserError
from thebes.protocol.instance import Instance

T = TypeVar("T")
NODES = {"n0": 4, "n1": 4}
PATIENT = Limits(stranger_requests_per_s=10_000.0, plans_per_s=1000.0)  # tests are faster than people
PEOPLE = {  # name -> user, role, tenant
    "admin": ("root", "admin", "default"),
    "ann": ("ann", "user", "closed"),
    "bob": ("bob", "user", "closed"),
    "cat": ("cat", "user", "shared"),
    "dan": ("dan", "user", "shared"),
}


class WritingEngine(FakeEngine):
    """The fake engine in real time: jobs write what a test says, and whoever is asked to leave saves and leaves."""

    def __init__(self) -> None:
        super().__init__(boot_s, NODES, mechanisms=("checkpoint",))  # type: ignore[arg-type]
        self.logs: dict[tuple[str, int, int], bytes] = {}
        self.read_until: dict[tuple[str, int, int], int] = {}  # how far each log was read
        self.broken: Exception | None = None

    async def notice(self, job_id: str, incarnation: int, grace_s: float) -> None:
        await super().notice(job_id, incarnation, grace_s)
        self.end(job_id, incarnation, 85)

    async def read_log(self, job_id: str, incarnation: int, rank: int, offset: int, limit: int) -> tuple[bytes, int]:
        if self.broken is not None:
            raise self.broken
        if rank > 0 and (job_id, incarnation, rank) not in self.logs:
            raise FileNotFoundError(rank)
        data = self.logs.get((job_id, incarnation, rank), b"")
        start = max(0, len(data) + offset) if offset < 0 else min(offset, len(data))
        piece = data[start : start + limit]
        self.read_until[job_id, incarnation, rank] = start + len(piece)
        return piece, start + len(piece)


class World:
    """A running server, and the tokens of the people who use it."""

    def __init__(self, folder: Path, limits: Limits | None = None, goodbye_s: int = 10) -> None:
        self.folder = folder
        self.goodbye_s = goodbye_s  # for requests that are under way when the server stops
        self.limits = limits or PATIENT
        self.engine = WritingEngine()
        self.tokens: dict[str, str] = {"nonsense": "thb_" + "x" * 43}
        self._ready = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(120.0), "the server did not start"
        if self._fault is not None:
            raise self._fault

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.app.state.api.closing.set)
        self.server.should_exit = True
        self._thread.join(45.0)
        assert not self._thread.is_alive(), "the server did not stop"

    async def _live(self) -> None:
        try:
            await self._serve()
        except BaseException as fault:
            self._fault = fault
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        instance = Instance.at(self.folder)
        instance.create()
        nodes = [NodeConfig(name=name, gpus=gpus, virtual=True) for name, gpus in NODES.items()]
        config = Config(nodes=nodes, limits=self.limits)
        self.store = db.Store.open(instance.store)
        self.store.change_blocking(self._people)
        self.controller = Controller(self.store, self.engine, config, instance, strict=True)
        await self.controller.open()
        self.app = create_app(self.controller, self.store, config)
        settings = uvicorn.Config(
            self.app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=self.goodbye_s
        )
        self.server = uvicorn.Server(settings)
        serving = asyncio.create_task(self.server.serve())
        await until_async(lambda: self.server.started or serving.done(), "uvicorn starts")
        assert not serving.done(), "uvicorn ended"
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        instance.write_endpoint(self.url)
        instance.token.write_text(self.tokens["admin"])
        self._ready.set()
        await serving
        await self.controller.close()
        self.store.close()

    def _people(self, c: db.Connection) -> None:
        db.put_tenant(c, "closed", gpu_quota=8, open=False)
        db.put_tenant(c, "shared", gpu_quota=None, open=True)
        for name, (user, role, tenant) in PEOPLE.items():
            self.tokens[name] = db.create_token(c, user, role, tenant)[0]
        self.tokens["expired"] = db.create_token(c, "root", "admin", "default", time.time() - 1.0)[0]
        text, row = db.create_token(c, "root", "admin", "default")
        db.revoke_token(c, row.id)
        self.tokens["revoked"] = text

    # what tests do

    def client(self, who: str) -> Client:
        return Client(self.url, self.tokens[who])

    def http(self, who: str | None) -> httpx.Client:
        headers = {} if who is None else {"authorization": f"Bearer {self.tokens[who]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=90.0, trust_env=False, verify=False)

    def run(self, work: Callable[[], T | Awaitable[T]]) -> T:
        """Do something in the loop of the server."""

        async def there() -> Any:
            done = work()
            return await done if asyncio.iscoroutine(done) else done

        return asyncio.run_coroutine_threadsafe(there(), self.loop).result(60.0)

    def end(self, job_id: str, code: int = 0, incarnation: int | None = None) -> None:
        """Let a job end by itself, once it runs."""
        until(lambda: self.is_running(job_id, incarnation))
        chosen = incarnation or max(number for job, number in self.engine.living if job == job_id)
        self.run(lambda: self.engine.end(job_id, chosen, code))

    def is_running(self, job_id: str, incarnation: int | None = None) -> bool:
        return any(job == job_id and incarnation in (None, number) for job, number in list(self.engine.living))

    def clear(self) -> None:
        """End everything that is not over."""
        admin = self.client("admin")
        alive = {job["array_id"] or job["id"] for job in admin.jobs(state=list(db.ALIVE_STATES))}
        for job_id in alive:
            with suppress(UserError):  # it has just ended
                admin.cancel(job_id)
        for job_id in alive:
            assert admin.wait(job_id, 60)["done"]

    def write_log(self, job_id: str, data: bytes, incarnation: int = 1, rank: int = 0) -> None:
        key = (job_id, incarnation, rank)
        self.engine.logs[key] = self.engine.logs.get(key, b"") + data


@contextmanager
def running_world(folder: Path, limits: Limits | None = None, *, goodbye_s: int = 10) -> Iterator[World]:
    world = World(folder, limits, goodbye_s)
    world.start()
    try:
        yield world
    finally:
        world.stop()
