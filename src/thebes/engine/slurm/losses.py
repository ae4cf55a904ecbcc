"""Does Slurm think of a gang as we do? What is said and done when it does not; and when a part counts as lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress

from thebes.engine.link import NodeLink
from thebes.engine.silence import Silence
from thebes.engine.slurm.calls import Calls
from thebes.engine.slurm.facts import SlurmFacts
from thebes.engine.slurm.gang import SlurmGang
from thebes.engine.slurm.records import Queued
from thebes.protocol.contract import Refused

LOG = logging.getLogger(__name__)
GONE_S = 2.0  # after which a Slurm job that is over has told all it will: file systems are slow at times


class Losses:
    """The rules of leases: at most one incarnation lives, also when a node is cut off."""

    def __init__(self, calls: Calls, facts: SlurmFacts, silence: Silence) -> None:
        self.calls, self.facts, self.silence = calls, facts, silence
        self.shared, self.releases, self.tasks = calls.shared, calls.releases, calls.tasks

    async def compare(self, gang: SlurmGang, mine: Collection[Queued]) -> None:
        """Compare a gang with its entries in Slurm's queue. It reports `lost` where nothing else can be."""
        now = asyncio.get_running_loop().time()
        if any(not one.over for one in mine):
            gang.gone_s = None
            if any(one.state in ("RUNNING", "SUSPENDED") for one in mine):
                self._end_the_silent(gang)
            return
        gang.gone_s = now if gang.gone_s is None else gang.gone_s
        state = next((one.state for one in mine), "gone")
        for node in gang.alive:
            report = await asyncio.to_thread(self.shared.report, gang, node)
            if report.state == "exited":
                self.calls.note(gang, report)
                continue
            link = gang.links.get(node)
            if link is not None and link.ready.is_set():
                await self._fence(gang, link, state)
            elif self._is_surely_dead(gang, node, state, now):
                cause = "killed" if gang.kill_asked else "lost"
                detail = "" if gang.kill_asked else f"Slurm job {gang.slurm_job} is {in_words(state)} (node {node})"
                self.calls.note(gang, await asyncio.to_thread(self.shared.write_lost, gang, node, cause, detail))

    async def _fence(self, gang: SlurmGang, link: NodeLink, state: str) -> None:
        """Slurm's job is over and its step lives: a slurmd was down. It shall save and go."""
        if gang.gone_s is None or gang.fenced or asyncio.get_running_loop().time() - gang.gone_s < GONE_S:
            return
        grace_s = min(gang.grace_s, self.calls.site.lease_s / 2)
        because = f"Slurm job {gang.slurm_job} is {in_words(state)}"
        gang.fenced = True
        with suppress(Refused, OSError, TimeoutError):
            await link.call("fence", {"grace_s": grace_s, "because": because})

    def _is_surely_dead(self, gang: SlurmGang, node: str, state: str, now: float) -> bool:
        assert gang.gone_s is not None
        if node not in self.facts.down_since and state != "NODE_FAIL":
            return now - gang.gone_s >= GONE_S  # slurmd has said that all processes are gone
        link = gang.links[node]
        # A node that is up again has been told by slurmctld to end what it should not have.
        since_s = self.facts.down_since.get(node, gang.gone_s)
        return self.silence.over(link, max(link.heard_s, since_s), gang.lease_s)

    def _end_the_silent(self, gang: SlurmGang) -> None:
        """Slurm runs it, and we hear nothing: Slurm shall end it. Or nobody is left of it: srun has ended."""
        if gang.slurm_job in self.releases:
            return
        if gang.srun_ended.is_set() and not any(link.writer for link in gang.links.values()):
            if gang.gone_s is None:
                self.tasks.spawn(self._wind_up(gang))
            return
        for node in gang.alive:
            link = gang.links.get(node)
            if link is None or link.ready.is_set() or node in self.facts.down_since:
                continue
            if self.silence.over(link, link.heard_s, gang.lease_s):
                LOG.warning("%s is silent: Slurm shall end job %d", link.who, gang.slurm_job)
                self.releases.release(gang, at_once=True)
                return

    async def _wind_up(self, gang: SlurmGang) -> None:
        """All tasks have ended; what they have written is the result."""
        await asyncio.sleep(GONE_S)
        for node in gang.alive:
            report = await asyncio.to_thread(self.shared.report, gang, node)
            if report.state == "exited":
                self.calls.note(gang, report)
        if gang.phase == "started":
            self.releases.release(gang, at_once=True)


def in_words(state: str) -> str:
    """What a state of Slurm's means to people who wait for a job."""
    known = {
        "TIMEOUT": "at the time limit of its partition",
        "PREEMPTED": "preempted by the site",
        "CANCELLED": "cancelled",
        "NODE_FAIL": "over because a node failed",
        "gone": "over",
    }
    return known.get(state, f"over ({state})")
