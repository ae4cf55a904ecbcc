"""The engine of a Slurm cluster: one Slurm job per incarnation, one step in it, one `node/step.py` per node.

`salloc --no-shell` takes exactly the nodes (and where the site allows it exactly the GPUs) that were decided, at once
or not at all; `srun` starts a step there whose tasks call home; when all have called, all are told to start. The step
keeps its own lease and writes its result into the folder that all nodes share, so neither this process nor slurmctld is
needed for a job to go on. What Slurm says of nodes and jobs is asked for every second or so. Nothing is decided here.

After a crash of the controller everything is found again: an incarnation that was told to start has a record in the
shared folder; a Slurm job of ours without one has not started anything and is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from thebes.engine.link import CALL_S
from thebes.engine.silence import Silence
from thebes.engine.site import EngineSite
from thebes.engine.slurm.calls import Calls
from thebes.engine.slurm.client import Slurm
from thebes.engine.slurm.facts import SlurmFacts
from thebes.engine.slurm.gang import SharedFolder, SlurmGang
from thebes.engine.slurm.gangs import Gangs
from thebes.engine.slurm.launching import Launching
from thebes.engine.slurm.looking import Looking
from thebes.engine.slurm.losses import Losses
from thebes.engine.slurm.releases import Releases
from thebes.node import old_attempts
from thebes.protocol.attempt import AttemptDir
from thebes.protocol.contract import PARKED_LEASE_S, AttemptKey, Launch, Listener, Mechanism, NodeFacts, Refused, Report
from thebes.protocol.log_file import read_log
from thebes.protocol.messages import Park
from thebes.protocol.tasks import Tasks

LOG = logging.getLogger(__name__)
OPEN_WITHIN_S = 2.0
KILLED_WITHIN_S = 5.0  # or Slurm does it


class SlurmEngine:
    """`Engine` over Slurm's commands and the steps that call home: what the controller asks, handed to its parts."""

    def __init__(self, site: EngineSite, slurm: Slurm | None = None) -> None:
        self.site = site
        self.slurm = slurm or Slurm()
        self.shared = SharedFolder(site.shared_dir)
        self.tasks = Tasks(lambda error: LOG.error("slurm engine", exc_info=error))
        self.gangs = Gangs()
        self.silence = Silence(site.lease_s)
        self.releases = Releases(self.slurm, self.tasks)
        self.calls = Calls(site, self.shared, self.gangs, self.releases, self.tasks)
        self.facts = SlurmFacts(site, self.slurm, self.gangs, self.releases)
        self.looking = Looking(self.calls, self.facts, Losses(self.calls, self.facts, self.silence))
        self.launching = Launching(self.calls, self.facts, self.looking)

    @property
    def homes(self) -> list[str]:
        """Where nodes find us, and the controllers that may take over."""
        return self.calls.homes

    # Life ------------------------------------------------------------------------------------------------------------

    async def open(self, listener: Listener, *, parked_s: float = 0.0) -> None:
        self.gangs.listener = listener
        self.looking.begin()
        self.silence.begin(parked_s)
        await asyncio.to_thread(self.shared.make)
        self.launching.script = await asyncio.to_thread(self.shared.install_step)
        await self.calls.open()
        for gang in await asyncio.to_thread(lambda: list(self.shared.load())):
            await self._adopt(gang)
        looking = self.tasks.spawn(self.looking.keep_looking())
        self.tasks.spawn(self.silence.stay_awake())
        self.tasks.spawn(old_attempts.keep_tidy(self._remove_old))
        links = [link for gang in self.gangs for link in gang.links.values()]
        # A controller that takes over must answer soon: what needs longer is told when it is there.
        with suppress(TimeoutError):
            async with asyncio.timeout(OPEN_WITHIN_S):
                await asyncio.gather(self.looking.looked.wait(), *(link.looked.wait() for link in links))
        if looking.done():
            looking.result()

    async def _adopt(self, gang: SlurmGang) -> None:
        """One that an earlier controller has started."""
        self.gangs.add(gang)
        for node in gang.nodes:
            gang.reports[node] = await asyncio.to_thread(self.shared.report, gang, node)
        if not gang.alive:
            gang.phase = "over"
            return
        if gang.lease_s < self.site.lease_s:  # written down before they are told
            gang.lease_s = self.site.lease_s
            await self.shared.save_durably(gang)
        self.calls.expect(gang, gang.alive)

    async def _remove_old(self, before_s: float, limit: int) -> int:
        """What is too old to be kept goes, as it does on nodes that have an agent."""
        with suppress(OSError):
            return await asyncio.to_thread(self.shared.remove_old, before_s, self.launching.script, limit)
        return limit  # the file system is away: again soon

    async def close(self) -> None:
        await self.releases.close()
        await self.tasks.cancel_all()
        await self.calls.close()

    async def leave(self) -> None:
        park = Park(for_s=PARKED_LEASE_S)
        links = self.gangs.links_of_living()
        await asyncio.gather(*(link.call("park", park) for link in links), return_exceptions=True)

    async def unparked(self) -> None:
        """Returns when no step goes by what it was told when the last controller left."""
        await self.silence.unparked(self.gangs.links_of_living())

    # What is there ---------------------------------------------------------------------------------------------------

    async def nodes(self) -> list[NodeFacts]:
        return list(self.facts.by_node.values())

    async def reports(self) -> list[Report]:
        return [report for gang in self.gangs if gang.phase != "launching" for report in gang.reports.values()]

    async def read_log(self, job_id: str, incarnation: int, rank: int, offset: int, limit: int) -> tuple[bytes, int]:
        """FileNotFoundError when no node has a log of this rank."""
        return await asyncio.to_thread(self._read_log, (job_id, incarnation), rank, offset, limit)

    def _read_log(self, key: AttemptKey, rank: int, offset: int, limit: int) -> tuple[bytes, int]:
        gang = self.gangs.get(key)
        for node in gang.nodes if gang is not None else self.site.gpus:
            with suppress(FileNotFoundError):
                return read_log(self.shared.attempt(node, key).log(rank), offset, limit)
        raise FileNotFoundError(f"there is no log of rank {rank} of job {key[0]}, incarnation {key[1]}")

    # Launching and ending --------------------------------------------------------------------------------------------

    async def launch(self, launch: Launch) -> None:
        """All parts or none. If one cannot start, the others end with "launch-failed" as it does."""
        if AttemptDir.named(self.shared.nodes, f"{launch.job_id}.{launch.incarnation}") is None:
            raise Refused(f"'{launch.job_id}' is not a job id")
        async with self.gangs.lock(launch.job_id):
            if self.gangs.get((launch.job_id, launch.incarnation)) is not None:
                return
            newest = await asyncio.to_thread(self.shared.fences.newest, launch.job_id)
            if launch.incarnation < newest:
                raise Refused(
                    f"incarnation {launch.incarnation} of job {launch.job_id} is older than {newest}, "
                    "the newest that this cluster has seen"
                )
            await self.launching.launch(launch, self._remove_others)

    async def _remove_others(self, job_id: str) -> None:
        """Kill what lives of a job and wait until it is gone."""
        for gang in [gang for gang in self.gangs if gang.job_id == job_id and gang.alive]:
            await self._kill(gang)
            if not await self._until_over(gang, KILLED_WITHIN_S + 15.0):
                raise Refused(f"incarnation {gang.incarnation} of job {gang.job_id} cannot be ended")

    async def _until_over(self, gang: SlurmGang, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while gang.alive:
                    await gang.changed.wait()
        return not gang.alive

    async def notice(self, job_id: str, incarnation: int, grace_s: float) -> None:
        await self._each(self.gangs.living(job_id, incarnation), "notice", grace_s=grace_s)

    async def terminate(self, job_id: str, incarnation: int, grace_s: float) -> None:
        await self._each(self.gangs.living(job_id, incarnation), "terminate", grace_s=grace_s)

    async def kill(self, job_id: str, incarnation: int) -> None:
        gang = self.gangs.get((job_id, incarnation))
        if gang is None:
            if not (self.shared.gangs / f"{job_id}.{incarnation}.json").exists():
                # Its start may still be on the way: it must not come to life after this.
                await asyncio.to_thread(self.shared.raise_fence, job_id, incarnation + 1)
            return
        if gang.alive:
            await self._kill(gang)

    async def _kill(self, gang: SlurmGang) -> None:
        gang.kill_asked = True
        with suppress(Refused, OSError, TimeoutError):
            await self._each(gang, "kill")
            self.tasks.spawn(self._insist(gang))
            return
        self._let_slurm_end(gang)

    async def _insist(self, gang: SlurmGang) -> None:
        if not await self._until_over(gang, KILLED_WITHIN_S):
            self._let_slurm_end(gang)

    def _let_slurm_end(self, gang: SlurmGang) -> None:
        if gang.slurm_job:
            self.releases.release(gang, at_once=True)
            self.calls.look.set()

    async def suspend(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        """Never: a job that stands still keeps its GPUs as far as Slurm is concerned, so nobody else could use them."""
        self.gangs.living(job_id, incarnation)
        raise Refused(f"'{mechanism}' makes no room under Slurm: it would not give the GPUs to another job")

    async def resume(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        self.gangs.living(job_id, incarnation)
        raise Refused(f"nothing is suspended by '{mechanism}' under Slurm")

    async def forget(self, job_id: str, incarnation: int) -> None:
        gang = self.gangs.get((job_id, incarnation))
        if gang is None:
            return
        if gang.alive:
            raise Refused(f"job {job_id} is alive on node {gang.alive[0]}: it cannot be forgotten")
        await asyncio.to_thread(self.shared.drop, gang)
        self.gangs.drop(gang)
        self.gangs.drop_lock(job_id)

    async def _each(self, gang: SlurmGang, op: str, timeout_s: float = CALL_S, **more: Any) -> None:
        """To every part that has not ended; the first error is raised after all have answered."""
        links = [gang.links[node] for node in gang.alive]
        answers = await asyncio.gather(*(link.call(op, more, timeout_s) for link in links), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
