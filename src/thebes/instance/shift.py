"""A controller that shares its store with others: it stands by, and when its turn comes, it leads.

There is one HTTP server from the first moment on. A client that asks a standby gets 503 and the address of the leader,
which clients follow. When the lease is ours, the controller is opened on the store and takes the server over.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from thebes import store as db
from thebes.api.app import create_app
from thebes.instance.main import EXIT_DEPOSED, answer, keep_admin_token, url_of
from thebes.live.config import Config, from_cluster
from thebes.live.controller import Controller
from thebes.live.engines import identify, make_engine
from thebes.model.errors import UserError
from thebes.protocol.instance import Instance
from thebes.store.leader import (
    LEASE_S,
    RENEW_S,
    Fenced,
    KnownController,
    LeaderLease,
    Leading,
    WhoLeads,
    end_deposed,
    identity_of,
    wait_to_lead,
)
from thebes.store.postgres import Postgres

AGAIN_S = 0.5
CONFIG_KEY = "config"

log = logging.getLogger("thebes.leader")


class Door:
    """One ASGI application for the server, behind which the real one changes."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


class FollowerApp:
    """The answers of a controller that does not lead."""

    def __init__(self, standing: WhoLeads) -> None:
        self.standing = standing
        self.taking_over = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        leader = self.standing.leader
        url = leader.url if leader and not self.taking_over else None
        if scope["path"] == "/v1/healthz":
            controllers = [member.as_dict() for member in self.standing.members]
            body = {"ok": True, "role": "standby", "leader": url, "controllers": controllers}
            await _send(send, 200, {**body, "trouble": self.standing.trouble}, url)
            return
        if self.taking_over:
            said, hint = "this controller is about to lead the cluster", "ask again in a second"
        elif url:
            said, hint = f"this controller is a standby; {url} leads", "ask there"
        elif self.standing.trouble:
            said, hint = f"the store of the cluster does not answer: {self.standing.trouble}", "ask again later"
        else:
            said, hint = "this controller is a standby, and nobody leads at the moment", "ask again in a second"
        await _send(send, 503, {"error": said, "hint": hint, "leader": url}, url)


async def _send(send: Any, status: int, body: dict[str, Any], leader: str | None) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if leader:
        headers.append((b"x-thebes-leader", leader.encode()))
    if status == 503:
        headers += [(b"retry-after", b"1"), (b"x-thebes-standby", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def public_url(config: Config, listener: socket.socket) -> str:
    """The address at which clients on other machines find us, as far as we can know."""
    url = url_of(config, listener)
    if config.host not in ("0.0.0.0", "::"):
        return url
    parts = urlsplit(url)
    return f"{parts.scheme}://{config.home_host or socket.getfqdn()}:{parts.port}"


def me(instance: Instance, config: Config, url: str) -> KnownController:
    home = ""
    if config.engine != "local":
        host = config.home_host or socket.getfqdn()
        home = f"[{host}]:{config.home_port}" if ":" in host else f"{host}:{config.home_port}"
    return KnownController(identity_of(instance.dir), f"{socket.gethostname()}:{instance.dir}", url, home)


async def serve_in_turn(instance: Instance, config: Config, listener: socket.socket, stop: asyncio.Event) -> None:
    """Stand by and lead, until told to stop."""
    shift = Shift(instance, config, public_url(config, listener), stop)
    work = asyncio.create_task(shift.work(), name="shift")
    work.add_done_callback(lambda _: shift.over.set())
    try:
        await answer(instance, config, listener, shift.door, shift.until_stopped)
    finally:
        stop.set()
        shift.answered.set()
        await work


class Shift:
    """One controller's way from standby to leader, and to its end."""

    def __init__(self, instance: Instance, config: Config, url: str, stop: asyncio.Event) -> None:
        self.instance, self.config, self.stop = instance, config, stop
        self.standing = WhoLeads()
        self.standby = FollowerApp(self.standing)
        self.door = Door(self.standby)
        self.over = asyncio.Event()  # no request is to be answered any more
        self.answered = asyncio.Event()  # the last request was answered
        self.me = me(instance, config, url)
        self._api: Any = None

    async def until_stopped(self) -> None:
        ways_to_end = {asyncio.ensure_future(self.stop.wait()), asyncio.ensure_future(self.over.wait())}
        await asyncio.wait(ways_to_end, return_when=asyncio.FIRST_COMPLETED)
        if self._api is not None:
            self._api.closing.set()  # streams and long polls end, because Uvicorn waits for them

    async def work(self) -> None:
        store = await self._open_store()
        if store is None:
            return
        try:
            assert isinstance(store.database, Postgres)
            lease = LeaderLease(store.database, self.me)
            await self._check_alone(lease)
            log.info("standing by", extra={"fields": {"store": store.database.label}})
            epoch = await wait_to_lead(lease, self.standing, self.stop)
            if epoch is None:
                with suppress(*lease.errors):
                    await asyncio.to_thread(lease.leave)
                lease.close()
                return
            await self._lead(store, lease, epoch)
        finally:
            await asyncio.to_thread(store.close)

    async def _open_store(self) -> db.Store | None:
        """Open the store. If the database is away we wait for it, because `thebes up` has talked to it before."""
        while not self.stop.is_set():
            try:
                store = await asyncio.to_thread(db.Store.open, self.config.store)
            except db.StoreUnavailable as error:
                if self.standing.trouble is None:
                    log.error(error.message)
                self.standing.trouble = error.message
            else:
                try:
                    await asyncio.to_thread(keep_admin_token, self.instance, store)
                    self.standing.trouble = None
                    return store
                except db.StoreUnavailable as error:
                    self.standing.trouble = error.message
                    await asyncio.to_thread(store.close)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), AGAIN_S)
        return None

    async def _check_alone(self, lease: LeaderLease) -> None:
        if self.config.engine != "local":
            return
        with suppress(*lease.errors):
            others = [member for member in await asyncio.to_thread(lease.members) if member.id != self.me.id]
            refuse_local(others)

    async def _lead(self, store: db.Store, lease: LeaderLease, epoch: int) -> None:
        began_s = time.monotonic()
        self.standby.taking_over = True
        log.warning("leading", extra={"fields": {"epoch": epoch}})
        deposed = end_deposed(EXIT_DEPOSED)
        store.lead(epoch, deposed)
        leading = Leading(lease, epoch, deposed)
        try:
            config = await asyncio.to_thread(cluster_config, store, self.config)
            identity = await asyncio.to_thread(identify, store, epoch)
            homes = [member.home for member in self.standing.members if member.home and member.id != self.me.id]
            engine = Fenced(make_engine(config, self.instance, identity, homes=homes), leading)
            controller = Controller(store, engine, config, self.instance)
            await controller.open()
            telling = asyncio.create_task(self._tell_homes(engine, leading, homes))
            try:
                app = create_app(controller, store, config)
                app.state.api.members = lambda: [member.as_dict() for member in leading.members]
                self._api = app.state.api
                self.door.app = app
                log.warning(
                    "leads and answers", extra={"fields": {"epoch": epoch, "took_s": time.monotonic() - began_s}}
                )
                ways_to_end = {asyncio.ensure_future(self.stop.wait()), asyncio.ensure_future(controller.ended())}
                done, _ = await asyncio.wait(ways_to_end, return_when=asyncio.FIRST_COMPLETED)
                self.over.set()
                await self.answered.wait()
                await self._api.close()
                for way in done:
                    way.result()  # it raises the error of the controller's loop
            finally:
                telling.cancel()
                await controller.close()
        finally:
            await asyncio.to_thread(store.close)  # before the lease, because the last writes need it
            await asyncio.to_thread(leading.close)

    async def _tell_homes(self, engine: Any, leading: Leading, told: Sequence[str]) -> None:
        """Tell agents about controllers that come and go."""
        tell = getattr(engine, "tell_homes", None)
        if tell is None or not self.me.home:
            return
        known = {self.me.home, *told}
        while True:
            homes = {member.home for member in leading.members if member.home} | {self.me.home}
            if leading.members and homes != known:
                with suppress(OSError, TimeoutError):
                    await tell([self.me.home, *sorted(homes - {self.me.home})])
                    known = homes
                    log.info("agents know where controllers are", extra={"fields": {"homes": sorted(homes)}})
            await asyncio.sleep(RENEW_S)


def refuse_local(others: Sequence[KnownController]) -> None:
    """Refuse the local engine: it runs jobs on one machine, from which no other controller could take them over."""
    for other in others:
        if other.alive:
            raise UserError(
                f"the store is in use by {other.name} ({other.url}), and the engine local runs jobs on its own machine "
                "alone: there is nothing that a second controller could take over",
                hint="several controllers need --engine slurm or ray; or take the other one down first",
            )


def cluster_config(store: db.Store, own: Config) -> Config:
    """What the controllers of this store have in common is kept there; the rest is our own."""
    with store.read() as c:
        kept = db.get_meta(c, CONFIG_KEY)
    return own if kept is None else from_cluster(json.loads(kept), own)


__all__ = ["LEASE_S", "cluster_config", "public_url", "refuse_local", "serve_in_turn"]
