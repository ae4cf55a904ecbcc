"""All incarnations under Slurm that are not forgotten, and the listener that hears of their changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from thebes.engine.link import NodeLink
from thebes.engine.slurm.gang import SlurmGang
from thebes.protocol.contract import AttemptKey, Listener, NodeChange, Refused, Report

LOG = logging.getLogger(__name__)


class Gangs:
    """By (job, incarnation)."""

    def __init__(self) -> None:
        self.by_key: dict[AttemptKey, SlurmGang] = {}
        self.listener: Listener | None = None
        self._locks: dict[str, asyncio.Lock] = {}

    def __iter__(self) -> Iterator[SlurmGang]:
        return iter(list(self.by_key.values()))

    def add(self, gang: SlurmGang) -> None:
        self.by_key[gang.key] = gang

    def get(self, key: AttemptKey) -> SlurmGang | None:
        return self.by_key.get(key)

    def drop(self, gang: SlurmGang) -> None:
        if self.by_key.get(gang.key) is gang:
            del self.by_key[gang.key]

    def living(self, job_id: str, incarnation: int) -> SlurmGang:
        """Refused unless it lives."""
        gang = self.by_key.get((job_id, incarnation))
        if gang is None:
            raise Refused(f"this cluster has no incarnation {incarnation} of job {job_id}")
        if not gang.alive:
            raise Refused(f"job {job_id} has ended")
        return gang

    def links_of_living(self) -> list[NodeLink]:
        """To every step that has not ended."""
        return [gang.links[node] for gang in self for node in gang.alive if node in gang.links]

    def lock(self, job_id: str) -> asyncio.Lock:
        """One launch of a job at a time."""
        return self._locks.setdefault(job_id, asyncio.Lock())

    def drop_lock(self, job_id: str) -> None:
        lock = self._locks.get(job_id)
        if lock is not None and not lock.locked():
            del self._locks[job_id]

    def tell(self, news: Report | NodeChange) -> None:
        if self.listener is not None:
            try:
                self.listener(news)
            except Exception:  # its own trouble: it must not cost us what follows
                LOG.exception("news could not be handled")
