"""The steps that call home: whose call it is, what they report, and what follows when all of a gang have ended."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from thebes.engine.door import HomeDoor
from thebes.engine.link import CALLED_DOWN_AFTER_S, NodeLink
from thebes.engine.site import EngineSite
from thebes.engine.slurm.gang import SharedFolder, SlurmGang
from thebes.engine.slurm.gangs import Gangs
from thebes.engine.slurm.releases import Releases
from thebes.model.errors import UserError
from thebes.protocol.attempt import AttemptDir
from thebes.protocol.contract import NodeChange, Refused, Report
from thebes.protocol.instance import write_json
from thebes.protocol.messages import StartStep
from thebes.protocol.sealed import SealedReader, SealedWriter
from thebes.protocol.tasks import Tasks

LOG = logging.getLogger(__name__)
START_S = 40.0


class Calls:
    """The door, and a link to each step behind it."""

    def __init__(self, site: EngineSite, shared: SharedFolder, gangs: Gangs, releases: Releases, tasks: Tasks) -> None:
        self.site, self.shared, self.gangs, self.releases, self.tasks = site, shared, gangs, releases, tasks
        self.door = HomeDoor(site.key, site.epoch, self.called)
        self.homes: list[str] = []
        self.look = asyncio.Event()  # set when Slurm should be looked at soon

    async def open(self) -> None:
        try:
            await self.door.open("", self.site.home_port)
        except OSError as error:
            raise UserError(
                f"port {self.site.home_port}, at which nodes call, cannot be used: {error.strerror or error}",
                hint="choose another with `thebes up --home HOST:PORT`",
            ) from None
        self.homes = [self.site.home(self.door.port), *self.site.other_homes]
        await asyncio.to_thread(write_json, self.shared.homes, {"homes": self.homes, "epoch": self.site.epoch})

    async def close(self) -> None:
        for gang in self.gangs:
            await asyncio.gather(*(link.end() for link in gang.links.values()))
        await self.door.close()

    # Calls -----------------------------------------------------------------------------------------------------------

    def expect(self, gang: SlurmGang, nodes: Iterable[str]) -> None:
        """Steps of this gang will call from these nodes."""
        for node in nodes:
            link = NodeLink(
                node,
                functools.partial(self._heard, gang, node),
                who=f"the step of job {gang.job_id} on node {node}",
                down_after_s=CALLED_DOWN_AFTER_S,
            )
            link.greeting = {"homes": self.homes, "lease_s": self.site.lease_s}
            link.ping_every_s = min(5.0, self.site.lease_s / 6)
            link.expect()
            gang.links[node] = link

    async def called(self, who: str, reader: SealedReader, writer: SealedWriter) -> None:
        kind, _, rest = who.partition(":")
        name, _, whose = rest.partition(":")
        node, _, token = whose.partition(":")
        folder = AttemptDir.named(self.shared.nodes, name) if kind == "step" else None
        gang = self.gangs.get((folder.job_id, folder.incarnation)) if folder else None
        if gang is None or node not in gang.links or token != gang.token:
            LOG.info("%s called, and is not known any more", who)
            self.look.set()  # its Slurm job is cancelled if it is still there
            return
        await gang.links[node].attach(reader, writer)

    # Reports ---------------------------------------------------------------------------------------------------------

    def _heard(self, gang: SlurmGang, node: str, news: Report | NodeChange) -> None:
        """From the step of a gang on a node. That the line is there or not concerns us alone."""
        if isinstance(news, NodeChange):
            gang.tell()
            return
        self.note(gang, replace(news, node=node))
        if gang.phase == "started" and news.state == "starting" and gang.master is not None:
            self.tasks.spawn(self._start_late(gang, node))

    async def _start_late(self, gang: SlurmGang, node: str) -> None:
        """An earlier controller has said `start` to others, or died when it was about to."""
        async with self.gangs.lock(gang.job_id):
            link = gang.links.get(node)
            if link is None or gang.master is None or gang.reports[node].state != "starting":
                return
            address, port = gang.master
            with suppress(Refused, OSError, TimeoutError):
                await link.call("start", StartStep(master_addr=address, master_port=port), START_S)

    def note(self, gang: SlurmGang, report: Report) -> None:
        """A report is news, and may be the last."""
        before = gang.reports.get(report.node)
        if before is not None and before.state == "exited":
            return
        gang.reports[report.node] = report
        if gang.phase != "launching":
            self.gangs.tell(report)
        if report.state == "exited":
            link = gang.links.get(report.node)
            if link is not None and link.writer is not None:
                self.tasks.spawn(self._say_done(link))
        gang.tell()
        if gang.phase == "started" and not gang.alive:
            self._over(gang)

    async def _say_done(self, link: NodeLink) -> None:
        with suppress(Refused, OSError, TimeoutError):
            await link.call("done", {}, 2.0)

    def _over(self, gang: SlurmGang) -> None:
        """All parts have ended: the allocation goes back."""
        gang.phase = "over"
        if gang.slurm_job:
            self.releases.release(gang)
        self.tasks.spawn(self._let_go(gang))

    async def _let_go(self, gang: SlurmGang) -> None:
        """Its steps hang up when they have heard that we know."""
        with suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                for link in gang.links.values():
                    while link.writer is not None:
                        await asyncio.sleep(0.05)
        for link in gang.links.values():
            await link.end()
