"""Waiting for changes: a request that waits for a job is woken by its events, and a stream passes events on.

One subscription serves all requests that wait for a job. A stream has its own. When its reader is too slow, the stream
ends with "lagged", and the reader comes back with the last seq it has seen, so that nothing is missed or doubled.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from thebes.store.principal import Viewer

KEEP_ALIVE_S = 15.0
PAGE = 500
FIELDS = ("seq", "time_s", "job_id", "node", "kind", "actor", "detail")


class EventSource(Protocol):
    """What the controller offers: a queue of event dicts per subscriber, which ends with "lagged" when it overflows."""

    def subscribe(self) -> asyncio.Queue[dict[str, Any]]: ...

    def unsubscribe(self, queue: asyncio.Queue[dict[str, Any]]) -> None: ...


class Bulletin:
    """It wakes requests that wait for something to happen to a job; a member's events are also its array's."""

    def __init__(self, changes: EventSource, closing: asyncio.Event) -> None:
        self._changes = changes
        self._closing = closing
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, job_id: str) -> Generator[asyncio.Event, None, None]:
        """An event that is set whenever something has happened to the job; clear it before looking at the job."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(self._changes.subscribe()))
        bell = asyncio.Event()
        self._waiting[job_id].add(bell)
        try:
            yield bell
        finally:
            self._waiting[job_id].discard(bell)
            if not self._waiting[job_id]:
                del self._waiting[job_id]

    async def wait(self, bell: asyncio.Event, timeout_s: float) -> None:
        """Wait until the bell rings, the server closes or the time is over."""
        if not bell.is_set():
            await first_of([bell.wait(), self._closing.wait()], timeout_s)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, queue: asyncio.Queue[dict[str, Any]]) -> None:
        try:
            while True:
                change = await queue.get()
                if change.get("kind") == "lagged":
                    queue = self._changes.subscribe()
                    self._ring(list(self._waiting))
                elif job_id := change.get("job_id"):
                    self._ring([job_id, job_id.partition("_")[0]])
        finally:
            self._changes.unsubscribe(queue)

    def _ring(self, job_ids: list[str]) -> None:
        for job_id in job_ids:
            for bell in self._waiting.get(job_id, ()):
                bell.set()


async def first_of(waiting: Sequence[Coroutine[Any, Any, Any]], timeout_s: float) -> Any:
    """What the first of these returns, if it comes first and in time; else None."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


async def event_stream(
    changes: EventSource,
    after: int | None,
    stored: Callable[[int], Any],
    viewer: Viewer,
    closing: asyncio.Event,
) -> AsyncIterator[bytes]:
    """Server-sent events. `stored(seq)` awaits a page of the events after seq, as far as the viewer may see them.

    It subscribes first, then reads from the store, then goes on live; an event that comes by both ways is told once.
    """
    queue = changes.subscribe()
    try:
        yield b": thebes\n\n"
        last = after
        while last is not None:
            page = await stored(last)
            for event in page:
                yield _frame(event)
                last = event["seq"]
            if len(page) < PAGE:
                break
        while not closing.is_set():
            event = await _next(queue, closing)
            if event is None:
                yield b": still here\n\n"
                continue
            if event.get("kind") == "lagged":
                yield b'event: lagged\ndata: {"kind": "lagged"}\n\n'
                return
            if (last is None or event["seq"] > last) and visible(event, viewer):
                yield _frame(event)
    finally:
        changes.unsubscribe(queue)


async def _next(queue: asyncio.Queue[dict[str, Any]], closing: asyncio.Event) -> dict[str, Any] | None:
    """The next event; None if none came for a while, or if the server closes."""
    if not queue.empty():
        return queue.get_nowait()
    return await first_of([queue.get(), closing.wait()], KEEP_ALIVE_S)


def visible(event: Mapping[str, Any], viewer: Viewer) -> bool:
    """The rule of the store's `events_after`, for events as the controller tells them."""
    if viewer.is_admin:
        return True
    if event["job_id"] is None:
        return event["node"] is not None
    mine = event["user"] == viewer.user
    return mine or (viewer.sees_tenant and event["tenant"] == viewer.tenant)


def _frame(event: Mapping[str, Any]) -> bytes:
    data = json.dumps({name: event[name] for name in FIELDS}, default=str)  # JSON without line breaks
    return f"id: {event['seq']}\nevent: {event['kind']}\ndata: {data}\n\n".encode()
