"""The one thread that writes the store. It makes one commit of many changes.

Changes that arrive while a commit waits for the disk go into the next transaction together, each in a savepoint of its
own, in the order of arrival. A caller hears of its change after the commit, when it is durable. When the disk refuses,
changes that were not acknowledged are refused in turn; those that must happen stay, in order, and are tried again.
When the answer to a commit is lost, its callers hear nothing before it is known whether it was made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from thebes.store import schema
from thebes.store.crash_points import CrashPoint
from thebes.store.database import Database, WriteSide
from thebes.store.errors import Deposed, StorageFault, StoreUnavailable

FULL = "disk full"  # both databases call it this
MAX_BATCH = 512  # it limits how long the first change of a batch waits for the last
RETRY_FIRST_S, RETRY_LAST_S = 0.1, 2.0

log = logging.getLogger(__name__)

Fn = Callable[[Connection], Any]


@dataclass(slots=True, eq=False)
class Change:
    """One function to run on the store, and the future on which its caller waits."""

    fn: Fn
    must: bool
    future: asyncio.Future[Any] | Future[Any]
    loop: asyncio.AbstractEventLoop | None  # None if the future is one for threads
    result: Any = None
    error: BaseException | None = None


class Writer:
    """The owner of the thread, of the queue and of the only connection that writes."""

    def __init__(self, database: Database, crash_point: CrashPoint) -> None:
        self.trouble: str | None = None
        self._database = database
        self._side: WriteSide = database.write_side()
        self._doubt: list[Change] | None = None  # of a commit that may have been made; they come before `stuck`
        self._deposed: Callable[[str], None] = lambda _why: None
        self._crash_point = crash_point
        self._queue: SimpleQueue[Change | None] = SimpleQueue()  # None means close
        self._closing = False
        self._closed = False
        self._gate = threading.Lock()  # so that nothing is queued after the None that closes
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def put(self, change: Change) -> None:
        with self._gate:
            if not self._closed:
                self._queue.put(change)
                return
        change.error = StoreUnavailable("the store is closed; nothing was accepted", hint="Thebes is shutting down.")
        _answer([change])

    def lead(self, epoch: int, deposed: Callable[[str], None]) -> None:
        self._deposed = deposed
        self._side.lead(epoch)

    def close(self) -> None:
        """Write what is queued, then stop. Changes that the disk refuses even now are refused to their callers."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        stuck: deque[Change] = deque()  # they must happen, but the disk has refused them so far
        fresh: deque[Change] = deque()
        delay_s = RETRY_FIRST_S
        while True:
            try:
                self._collect(fresh, timeout_s=delay_s if self.trouble else None)
                if self._closing and not stuck and not fresh:
                    break
                if self._attempt(stuck, fresh):
                    delay_s = RETRY_FIRST_S
                elif self._closing:
                    _refuse([*stuck, *fresh], self.trouble or "")
                    break
                else:
                    delay_s = min(2 * delay_s, RETRY_LAST_S)
            except BaseException:  # the thread outlives every bug: without it nothing would ever be written again
                log.exception("store writer")
                time.sleep(RETRY_FIRST_S)
        self._side.close()

    def _collect(self, fresh: deque[Change], timeout_s: float | None) -> None:
        """Take what has arrived. With nothing to do, wait for the first change; in trouble, let `timeout_s` pass."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closing:
            try:
                if until is None:
                    change = self._queue.get(block=not fresh)
                else:
                    change = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return
            if change is None:
                self._closing = True
            else:
                fresh.append(change)

    def _attempt(self, stuck: deque[Change], fresh: deque[Change]) -> bool:
        """One round of writing; False if the disk refused. In trouble the oldest goes alone, as it needs the least."""
        try:
            if self._doubt is not None:
                self._resolve(stuck)
            if self.trouble:
                self._commit([stuck[0]] if stuck else [])
                if stuck:
                    _answer([stuck.popleft()])
                log.warning("store can be written again")
                self.trouble = None
            while stuck or fresh:
                source = stuck or fresh
                batch = [source[i] for i in range(min(MAX_BATCH, len(source)))]
                self._commit(batch)
                for _ in batch:
                    source.popleft()
                _answer(batch)
        except StorageFault as fault:
            if self.trouble != str(fault):
                log.error("store cannot be written: %s", fault)
            self.trouble = str(fault)
            doubted = set(map(id, self._doubt or ()))
            _refuse([change for change in fresh if not change.must and id(change) not in doubted], self.trouble)
            stuck.extend(change for change in fresh if change.must or id(change) in doubted)
            fresh.clear()
            if isinstance(fault, Deposed):
                self._deposed(str(fault))
            return False
        return True

    def _resolve(self, stuck: deque[Change]) -> None:
        """Find out whether a commit was made whose answer was lost, and tell its callers; StorageFault if it fails."""
        try:
            kept = self._side.was_kept()
        except (SQLAlchemyError, *self._database.errors) as error:
            self._side.roll_back()
            raise StorageFault(self._database.fault_of(error) or str(error)) from error
        doubted, self._doubt = self._doubt or [], None
        for _ in doubted:
            stuck.popleft()
        if kept:
            _answer(doubted)
        else:
            stuck.extendleft(reversed([change for change in doubted if change.must]))
            _refuse([change for change in doubted if not change.must], self.trouble or "")

    def _commit(self, batch: list[Change]) -> None:
        """Make all of a batch in one transaction, or StorageFault and nothing. An empty batch tests the storage."""
        try:
            connection = self._side.begin()
            if not batch:
                connection.execute(schema.counters.update().values(value=schema.counters.c.value))
            for change in batch:
                self._apply(connection, change)
            self._crash_point.before_commit()
            self._side.commit()
            self._crash_point.after_commit()
        except (SQLAlchemyError, *self._database.errors, StorageFault) as error:
            self._side.roll_back()
            if isinstance(error, StorageFault):
                if error.in_doubt:
                    self._doubt = batch
                raise
            raise StorageFault(self._database.fault_of(error) or str(error)) from error

    def _apply(self, connection: Connection, change: Change) -> None:
        """Run one change in a savepoint. Its own error stays with it; an error of the storage ends the whole batch."""
        side = self._side
        change.result = change.error = None
        side.execute("SAVEPOINT change")
        try:
            change.result = change.fn(connection)
        except BaseException as error:
            if fault := self._database.fault_of(error):
                raise StorageFault(fault) from error
            change.error = error
        if not side.in_transaction():
            # Some errors make SQLite give up a whole transaction, and a change could have swallowed the exception.
            raise StorageFault("a transaction was broken off")
        if change.error is None and side.failed():
            change.error = RuntimeError("a statement of the change failed, and the change did not say so")
        if change.error is not None:
            side.execute("ROLLBACK TO change")
        side.execute("RELEASE change")


def _refuse(changes: Iterable[Change], trouble: str) -> None:
    refused = list(changes)
    hint = "Make room on its disk" if trouble == FULL else "Look at its disk and its rights (`thebes doctor`)"
    for change in refused:
        change.result = None
        change.error = StoreUnavailable(
            f"the store cannot be written: {trouble}; nothing was accepted",
            hint=f"{hint}, then try again.",
        )
    _answer(refused)


def _answer(changes: list[Change]) -> None:
    """Answer all callers; an event loop is woken once, however many of them belong to it."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Change]] = {}
    for change in changes:
        if change.loop is None:
            _settle([change])
        else:
            by_loop.setdefault(change.loop, []).append(change)
    for loop, theirs in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits any more
            loop.call_soon_threadsafe(_settle, theirs)


def _settle(changes: list[Change]) -> None:
    for change in changes:
        future, error = change.future, change.error
        if future.done():  # the caller has given up waiting
            continue
        if error is None:
            future.set_result(change.result)
        elif isinstance(error, StopIteration):  # an asyncio future does not accept one
            future.set_exception(RuntimeError(f"a change raised {error!r}"))
        else:
            future.set_exception(error)
