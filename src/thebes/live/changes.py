"""Events as they are committed, for all subscribers."""

from __future__ import annotations

import asyncio
from typing import Any

QUEUE_ROOM = 10_000  # a subscriber may be so many events behind


class Changes:
    """Each subscriber has a queue of its own; one that is too slow is told so once, and dropped."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[dict[str, Any]]] = set()

    def subscribe(self) -> asyncio.Queue[dict[str, Any]]:
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(QUEUE_ROOM + 1)
        self._queues.add(queue)
        return queue

    def unsubscribe(self, queue: asyncio.Queue[dict[str, Any]]) -> None:
        self._queues.discard(queue)

    def publish(self, event: dict[str, Any]) -> None:
        for queue in list(self._queues):
            if queue.qsize() >= QUEUE_ROOM:
                queue.put_nowait({"kind": "lagged"})
                self._queues.discard(queue)
            else:
                queue.put_nowait(event)
