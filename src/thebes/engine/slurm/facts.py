"""The nodes as the engine tells of them: what Slurm says, what is ours there, what others have, what we avoid."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from thebes.engine.site import EngineSite
from thebes.engine.slurm import nodes as site_nodes
from thebes.engine.slurm.asking import SiteRules
from thebes.engine.slurm.client import Slurm
from thebes.engine.slurm.gang import SlurmGang
from thebes.engine.slurm.gangs import Gangs
from thebes.engine.slurm.records import JobRecord, NodeRecord, Partition
from thebes.engine.slurm.releases import Releases
from thebes.protocol.contract import Gpu, NodeChange, NodeFacts, Part

RACKS_EVERY_S = 60.0
HOLDERS_EVERY_S = 5.0  # the users of the other jobs are asked for

Ours = dict[str, list[tuple[int, SlurmGang, Part]]]  # Slurm jobs of ours by node, with what each has there


class SlurmFacts:
    """What is known of the site's nodes."""

    def __init__(self, site: EngineSite, slurm: Slurm, gangs: Gangs, releases: Releases) -> None:
        self.site, self.slurm, self.gangs, self.releases = site, slurm, gangs, releases
        self.mode: site_nodes.GpuGranting = "exact"
        self.partition: Partition | None = None
        self.config: dict[str, str] = {}
        self.records: dict[str, NodeRecord] = {}
        self.by_node = {
            name: NodeFacts(name, tuple(map(Gpu, range(gpus))), alive=False, detail="Slurm has not been asked yet")
            for name, gpus in site.gpus.items()
        }
        self.down_since: dict[str, float] = {}
        self._withheld: dict[tuple[str, int], tuple[float, str]] = {}  # GPUs that we avoid, until when and why
        self._racks: dict[str, str] = {}
        self._racks_at = float("-inf")
        self._holders: list[JobRecord] = []
        self._holders_at = float("-inf")

    @property
    def rules(self) -> SiteRules:
        """How the site must be asked for GPUs."""
        return SiteRules(self.mode, self.partition, self.config, self.records)

    # Asking Slurm ----------------------------------------------------------------------------------------------------

    async def learn_site(self) -> None:
        """What changes only when an administrator changes it, unless it is known."""
        if self.config and self.partition is not None:
            return
        self.config, partitions = await asyncio.gather(self.slurm.config(), self.slurm.partitions())
        wanted = self.site.partition
        self.partition = next((one for one in partitions if (one.name == wanted if wanted else one.default)), None)

    async def learn_nodes(self) -> None:
        now = asyncio.get_running_loop().time()
        records = {one.name: one for one in await self.slurm.nodes() if one.name in self.site.gpus}
        if now >= self._racks_at:
            self._racks = await self.slurm.racks()
            self._racks_at = asyncio.get_running_loop().time() + RACKS_EVERY_S
        self.records = records
        self.mode = site_nodes.mode_of(records.values(), self.partition, self.config)
        await self._learn_holders()

    async def _learn_holders(self) -> None:
        """Whose jobs have the GPUs that are in use and not ours; asked only when there are such."""
        now, ours = asyncio.get_running_loop().time(), self._ours()
        for record in self.records.values():
            known = sum(len(ids) for ids in self._ours_on(record.name, ours).values())
            if len(record.used) > known or self.mode == "whole":
                if now >= self._holders_at:
                    self._holders = await self.slurm.jobs()
                    self._holders_at = now + HOLDERS_EVERY_S
                return
        self._holders, self._holders_at = [], float("-inf")

    def forget_holders(self) -> None:
        """Ask for the holders at the next look, because somebody else was faster than we."""
        self._holders_at = float("-inf")

    # What is ours ----------------------------------------------------------------------------------------------------

    def _ours(self) -> Ours:
        """All of it by node: there may be thousands of either."""
        found: Ours = {}
        for job, gang in self.releases.allocated(self.gangs):
            for part in gang.parts:
                found.setdefault(part.node, []).append((job, gang, part))
        return found

    def _ours_on(self, node: str, ours: Ours) -> dict[int, tuple[int, ...]]:
        """The numbers by which Slurm knows the GPUs that it gave us on a node, by Slurm job."""
        found: dict[int, tuple[int, ...]] = {}
        for job, gang, part in ours.get(node, ()):
            known = self.mode == "exact" or node not in gang.ids
            found[job or -len(found) - 1] = part.gpus if known else gang.ids[node]
        return found

    # What we avoid ---------------------------------------------------------------------------------------------------

    def withhold(self, gpus: Iterable[tuple[str, int]], for_s: float, why: str) -> None:
        """Nothing is started on these for so long."""
        until = asyncio.get_running_loop().time() + for_s
        self._withheld |= dict.fromkeys(gpus, (until, why))

    def free_of_ours(self, nodes: Iterable[str], gang: SlurmGang) -> list[tuple[str, int]]:
        """GPUs of these nodes that no other gang of ours has."""
        others = [part for _, other in self.releases.allocated(self.gangs) if other is not gang for part in other.parts]
        held = {(part.node, number) for part in others for number in part.gpus}
        every = [(node, gpu.index) for node in nodes for gpu in self.by_node[node].gpus]
        return [gpu for gpu in every if gpu not in held]

    # Telling ---------------------------------------------------------------------------------------------------------

    def refresh(self, silent: str = "") -> None:
        """Put together what is known, and tell what is new. `silent` is why slurmctld has not answered for long."""
        now = asyncio.get_running_loop().time()
        self._withheld = {gpu: told for gpu, told in self._withheld.items() if told[0] > now}
        ours = self._ours()
        own_jobs = {job for job, _ in self.releases.allocated(self.gangs)}
        holders = site_nodes.holders_by_node(self._holders, own_jobs)
        for name, before in list(self.by_node.items()):
            record = self.records.get(name)
            if record is None:
                facts = replace(before, alive=False, detail=silent or f"Slurm has no node {name}")
            else:
                rack = self._racks.get(name, before.rack)
                taken = self._taken(record, ours, holders.get(name, []), now)
                facts = site_nodes.facts_of(record, rack=rack, taken=taken, silent=silent)
            if not facts.alive:
                self.down_since.setdefault(name, now)
            else:
                self.down_since.pop(name, None)
            if facts != before:
                self.by_node[name] = facts
                self.gangs.tell(NodeChange(facts))

    def _taken(
        self, record: NodeRecord, all_ours: Ours, holders: list[site_nodes.Holder], now: float
    ) -> dict[int, str]:
        name = record.name
        launching = [gang for _, gang, _ in all_ours.get(name, ()) if gang.phase == "launching"]
        if self.mode == "counts" and any(name not in gang.ids for gang in launching):
            # Which GPUs Slurm gives is about to be read.
            return {gpu.index: gpu.taken for gpu in self.by_node[name].gpus if gpu.taken}
        held = {number for _, _, part in all_ours.get(name, ()) for number in part.gpus}
        if self.mode == "whole":
            taken = site_nodes.taken_whole(record, held=held, holders=holders)
        else:
            ours = self._ours_on(name, all_ours)
            taken = site_nodes.taken_gpus(record, exact=self.mode == "exact", ours=ours, held=held, holders=holders)
        for job, gang in self.releases.slow(now):
            for part in gang.parts:
                if part.node == name:
                    taken |= dict.fromkeys(part.gpus, f"Slurm is still winding up its job {job}")
        taken |= {number: why for (node, number), (_, why) in self._withheld.items() if node == name}
        return taken
