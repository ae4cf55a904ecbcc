"""Several controllers share one PostgreSQL store, and one of them leads. Its lease is a row in the database.

The leader renews its lease every second. A standby looks at the row. When the lease has run out by the clock of the
database, or has not changed for longer than a lease by the standby's own clock (clocks can be set), the standby takes
it over with the next epoch. No clock decides what may be written: every commit of a leader checks its epoch inside the
transaction (`postgres.py`), and agents hang up on an older epoch. A leader that wakes up late therefore writes nothing.
Before it commands anything it checks that its own lease is good (`Fenced`); if it finds another leader, it ends itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thebes.protocol.contract import Engine, Launch, Listener, Mechanism, NodeFacts, Report
from thebes.store.postgres import LOST, NOW, Postgres

if TYPE_CHECKING:
    import psycopg

LEASE_S = 5.0
RENEW_S = 1.0
LOOK_S = 0.2
# After a restart of the database all leases have run out. The leader comes back within a second, so it may go first.
WATCH_FIRST_S = 2.0
# At most so much counts between two looks of a standby: it may have stood still itself, and the leader with it.
LOOK_COUNTS_S = 0.5
# For a clock of the database that was set back: then nothing renews the lease, and yet it looks good.
SILENT_S = LEASE_S + 1.5
GONE_S = 15.0  # a controller that was not seen for so long is no longer listed
TIMEOUT_S = 2

log = logging.getLogger("thebes.leader")


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # this clock goes on while the machine sleeps


@dataclass(frozen=True)
class KnownController:
    """A controller of this cluster."""

    id: str
    name: str
    url: str
    home: str = ""  # the address at which agents call it
    seen_ago_s: float = 0.0
    leads: bool = False

    @property
    def alive(self) -> bool:
        return self.seen_ago_s < LEASE_S

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "url": self.url, "leads": self.leads, "seen_ago_s": round(self.seen_ago_s, 1)}


@dataclass(frozen=True)
class Seen:
    """The lease at one moment."""

    epoch: int
    holder: str
    beats: int
    expired: bool  # by the clock of the database


def identity_of(folder: Path) -> str:
    """An id that all controllers in this folder of this machine have, one after the other, and no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    said = json.dumps([boot, socket.gethostname(), str(folder.absolute()), folder.stat().st_ino])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


class LeaderLease:
    """The lease and the list of controllers, over a connection of its own. Methods block and raise psycopg's errors."""

    def __init__(self, database: Postgres, me: KnownController) -> None:
        self.me = me
        self._database = database
        self._connection: psycopg.Connection[Any] | None = None

    def _run(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        if self._connection is None or self._connection.closed:
            self._connection = self._database.connect(
                "lease",
                f"statement_timeout = '{TIMEOUT_S}s'",
                f"lock_timeout = '{TIMEOUT_S}s'",
                "default_transaction_read_only = off",
                timeout_s=TIMEOUT_S,
            )
        try:
            cursor = self._connection.execute(sql, values)  # type: ignore[arg-type] - all of it is written here
            return cursor.fetchall() if cursor.description else []
        except BaseException:
            with contextlib.suppress(Exception):
                self._connection.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()

    def register(self) -> None:
        """Say in the list that this controller is here."""
        me = self.me
        self._run(
            f"INSERT INTO controllers (id, name, url, home, seen_s) VALUES (%s, %s, %s, %s, {NOW}) "
            "ON CONFLICT (id) DO UPDATE SET name = EXCLUDED.name, url = EXCLUDED.url, home = EXCLUDED.home, "
            "seen_s = EXCLUDED.seen_s",
            [me.id, me.name, me.url, me.home],
        )

    def members(self) -> list[KnownController]:
        """The controllers that were seen lately, the leader first."""
        rows = self._run(
            f"SELECT c.id, c.name, c.url, c.home, {NOW} - c.seen_s, l.holder = c.id AND l.expires_s > {NOW} "
            f"FROM controllers c, leader l WHERE c.seen_s > {NOW} - {GONE_S} ORDER BY c.name, c.id"
        )
        found = [KnownController(id, name, url, home, max(0.0, ago), leads) for id, name, url, home, ago, leads in rows]
        return sorted(found, key=lambda member: not member.leads)

    def look(self) -> Seen:
        return Seen(*self._run(f"SELECT epoch, holder, beats, expires_s <= {NOW} FROM leader")[0])

    def take(self, seen: Seen) -> int | None:
        """Begin to lead, if nothing has changed since; returns the new epoch, or None."""
        # A leader that is frozen in the middle of a commit holds the row, so its session is ended first.
        with contextlib.suppress(self._database.errors[0]):
            self._run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid() AND application_name LIKE 'thebes leader %%'"
            )
        rows = self._run(
            f"UPDATE leader SET epoch = epoch + 1, holder = %s, beats = 0, expires_s = {NOW} + {LEASE_S} "
            "WHERE epoch = %s AND holder = %s AND beats = %s RETURNING epoch",
            [self.me.id, seen.epoch, seen.holder, seen.beats],
        )
        return int(rows[0][0]) if rows else None

    def renew(self, epoch: int) -> bool:
        """Renew the lease; False if another controller leads."""
        return bool(
            self._run(
                f"UPDATE leader SET beats = beats + 1, expires_s = {NOW} + {LEASE_S} "
                "WHERE epoch = %s AND holder = %s RETURNING epoch",
                [epoch, self.me.id],
            )
        )

    def release(self, epoch: int) -> None:
        """Give the lease back, so that the next leader need not wait."""
        self._run("UPDATE leader SET holder = '', expires_s = 0 WHERE epoch = %s AND holder = %s", [epoch, self.me.id])

    def leave(self) -> None:
        """Remove this controller from the list."""
        self._run("DELETE FROM controllers WHERE id = %s", [self.me.id])

    def said(self, error: BaseException) -> str:
        return self._database.said(error)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return self._database.errors


class Watch:
    """When a standby may take over, judged by what it has seen so far. It is pure; `now_s` is its own clock."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._last: tuple[int, str, int] | None = None
        self._unchanged_s = 0.0
        self._looked_s = 0.0

    def forget(self) -> None:
        """Begin again, because the database did not answer."""
        self._last = None

    def may_take(self, seen: Seen, now_s: float) -> bool:
        state = (seen.epoch, seen.holder, seen.beats)
        if state == self._last:
            self._unchanged_s += min(now_s - self._looked_s, LOOK_COUNTS_S)
        else:
            self._last, self._unchanged_s = state, 0.0
        self._looked_s = now_s
        if seen.holder in ("", self._me):  # it was released, or is ours from before a restart
            return True
        return (seen.expired and self._unchanged_s >= WATCH_FIRST_S) or self._unchanged_s >= SILENT_S


class WhoLeads:
    """What a standby knows, to answer questions."""

    def __init__(self) -> None:
        self.members: list[KnownController] = []
        self.trouble: str | None = None  # why the database does not answer

    @property
    def leader(self) -> KnownController | None:
        return next((member for member in self.members if member.leads), None)


async def wait_to_lead(lease: LeaderLease, standing: WhoLeads, stop: asyncio.Event) -> int | None:
    """Wait until we lead, and return the epoch; None if told to stop. A database that is away is waited for."""
    watch, registered_s = Watch(lease.me.id), 0.0
    while not stop.is_set():
        try:
            if _now() - registered_s >= RENEW_S:
                await asyncio.to_thread(lease.register)
                standing.members = await asyncio.to_thread(lease.members)
                registered_s = _now()
            seen = await asyncio.to_thread(lease.look)
            if standing.trouble is not None:
                log.warning("the database answers again")
            standing.trouble = None
            if watch.may_take(seen, _now()):
                epoch = await asyncio.to_thread(lease.take, seen)
                if epoch is not None:
                    return epoch
        except lease.errors as error:
            told = lease.said(error)
            if standing.trouble is None:
                log.error("the database does not answer: %s", told)
            standing.trouble = told or LOST
            watch.forget()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)
    return None


class Leading:
    """It keeps the lease from a thread of its own, because the event loop may be busy for longer than a lease lasts."""

    def __init__(self, lease: LeaderLease, epoch: int, deposed: Callable[[str], None]) -> None:
        self.epoch = epoch
        self.members: list[KnownController] = []
        self._lease = lease
        self._deposed = deposed
        self._good_until_s = _now() + LEASE_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    @property
    def good(self) -> bool:
        """Whether no other controller can have begun to lead, as far as our own clock tells."""
        return _now() < self._good_until_s

    async def held(self) -> None:
        """Return if the lease is good; else wait until it is again, perhaps for ever."""
        while not self.good:
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Give the lease back."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(*self._lease.errors):
            self._lease.release(self.epoch)
            self._lease.leave()
        self._lease.close()

    def _keep(self) -> None:
        well = True
        while not self._stop.is_set():
            began_s = _now()
            try:
                if not self._lease.renew(self.epoch):
                    self._deposed(f"another controller leads the cluster now; our epoch was {self.epoch}")
                    return
                self._good_until_s = began_s + LEASE_S
                self._lease.register()
                self.members = self._lease.members()
                if not well:
                    log.warning("the lease is renewed again")
                well = True
            except self._lease.errors as error:
                if well:
                    log.error("the lease cannot be renewed: %s", self._lease.said(error))
                well = False
            self._stop.wait(max(0.0, RENEW_S - (_now() - began_s)) if well else LOOK_S)


def end_deposed(exit_code: int) -> Callable[[str], None]:
    """What a leader does when another one leads: it prints one clear line and ends at once. It tidies nothing up,
    because it must not write or command anything any more. Its keeper starts it again, as a standby.
    """

    def deposed(why: str) -> None:
        log.error("deposed: %s; this controller ends", why)
        for handler in logging.getLogger().handlers:
            with contextlib.suppress(Exception):
                handler.flush()
        os._exit(exit_code)

    return deposed


class Fenced:
    """An engine that delays every command until the lease is good: a leader that was frozen commands nothing."""

    def __init__(self, engine: Engine, leading: Leading) -> None:
        self._engine, self._leading = engine, leading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def open(self, listener: Listener, *, parked_s: float = 0.0) -> None:
        await self._engine.open(listener, parked_s=parked_s)

    async def close(self) -> None:
        await self._engine.close()

    async def leave(self) -> None:
        await self._leading.held()
        await self._engine.leave()

    async def nodes(self) -> list[NodeFacts]:
        return await self._engine.nodes()

    async def reports(self) -> list[Report]:
        return await self._engine.reports()

    async def launch(self, launch: Launch) -> None:
        await self._leading.held()
        await self._engine.launch(launch)

    async def notice(self, job_id: str, incarnation: int, grace_s: float) -> None:
        await self._leading.held()
        await self._engine.notice(job_id, incarnation, grace_s)

    async def terminate(self, job_id: str, incarnation: int, grace_s: float) -> None:
        await self._leading.held()
        await self._engine.terminate(job_id, incarnation, grace_s)

    async def kill(self, job_id: str, incarnation: int) -> None:
        await self._leading.held()
        await self._engine.kill(job_id, incarnation)

    async def suspend(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        await self._leading.held()
        await self._engine.suspend(job_id, incarnation, mechanism)

    async def resume(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        await self._leading.held()
        await self._engine.resume(job_id, incarnation, mechanism)

    async def forget(self, job_id: str, incarnation: int) -> None:
        await self._leading.held()
        await self._engine.forget(job_id, incarnation)

    async def read_log(self, job_id: str, incarnation: int, rank: int, offset: int, limit: int) -> tuple[bytes, int]:
        return await self._engine.read_log(job_id, incarnation, rank, offset, limit)
