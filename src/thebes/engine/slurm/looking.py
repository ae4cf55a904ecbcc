"""Slurm is looked at every second or so: its queue, its nodes, and whether both agree with what we know."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Collection
from contextlib import suppress

from thebes.engine.slurm.calls import Calls
from thebes.engine.slurm.commands import SlurmError
from thebes.engine.slurm.facts import SlurmFacts
from thebes.engine.slurm.gang import SlurmGang
from thebes.engine.slurm.losses import Losses
from thebes.engine.slurm.records import Queued

LOG = logging.getLogger(__name__)
POLL_S = 1.5
SILENT_S = 20.0  # slurmctld may be away for so long before its nodes count as down


class Looking:
    """One look after the other, for ever."""

    def __init__(self, calls: Calls, facts: SlurmFacts, losses: Losses) -> None:
        self.calls, self.facts, self.losses = calls, facts, losses
        self.site, self.gangs, self.releases = calls.site, calls.gangs, calls.releases
        self.looked = asyncio.Event()  # set and replaced after each look
        self._answered_s = 0.0  # when slurmctld last did

    def begin(self) -> None:
        self._answered_s = asyncio.get_running_loop().time()

    async def keep_looking(self) -> None:
        soon = self.calls.look
        while True:
            soon.clear()
            try:
                await self.look_once()
            except Exception:  # the next look may go better
                LOG.exception("looking at Slurm")
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await soon.wait()

    async def look_now(self) -> None:
        """Returns after a look that began after this call."""
        for _ in range(2):
            looked = self.looked
            self.calls.look.set()
            await looked.wait()

    async def look_once(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self.facts.learn_site()
            began_s = loop.time()
            queue = await self.facts.slurm.queue(uid=os.getuid(), over_too=True)
            await self.facts.learn_nodes()
        except SlurmError as error:
            if loop.time() - self._answered_s > SILENT_S or not self.facts.records:
                self.facts.refresh(silent=str(error))
            self._done()
            return
        self._answered_s = loop.time()
        await self._cancel_strays(queue, began_s)
        self.facts.refresh()
        by_job: dict[int, list[Queued]] = {}
        for one in queue:
            for number in {one.leader, one.job}:
                by_job.setdefault(number, []).append(one)
        for gang in self.gangs:
            if gang.phase == "started":
                await self.losses.compare(gang, by_job.get(gang.slurm_job, []))
        self._done()

    def _done(self) -> None:
        self.looked.set()
        self.looked = asyncio.Event()

    async def _cancel_strays(self, queue: Collection[Queued], began_s: float) -> None:
        """What Slurm has of ours that we know nothing of is cancelled; what is wound up is forgotten."""
        prefix = f"thebes-{self.site.instance_id}-"
        self.releases.forget_wound_up({one.leader for one in queue if not one.over}, began_s)
        known = {gang.slurm_job for gang in self.gangs if gang.phase != "over"} | self.releases.jobs
        launching = {prefix + gang.name for gang in self.gangs if gang.phase == "launching"}
        strays: dict[int, Queued] = {}
        for one in queue:
            ours = one.name.startswith(prefix) and not one.over and one.state != "COMPLETING"
            if ours and one.leader not in known and one.name not in launching:
                strays[one.leader] = one
        if strays and await asyncio.to_thread(self._leads):
            for one in strays.values():
                LOG.warning("Slurm job %d (%s) belongs to nothing that runs: it is cancelled", one.leader, one.name)
                self.releases.release(SlurmGang(one.name, 0, (), "over", one.leader), at_once=True)

    def _leads(self) -> bool:
        """Whether no newer controller has opened the same folder: what we do not know may be its own."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return json.loads(self.calls.shared.homes.read_bytes())["epoch"] == self.site.epoch
        return False
