"""Slurm jobs of ours that go back: cancelled until slurmctld has heard it, and remembered until they are wound up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator

from thebes.engine.slurm.client import Slurm
from thebes.engine.slurm.commands import SlurmError
from thebes.engine.slurm.gang import SlurmGang
from thebes.engine.slurm.gangs import Gangs
from thebes.protocol.tasks import Tasks

LOG = logging.getLogger(__name__)
CLEANING_S = 10.0  # GPUs of a Slurm job that does not go away count as taken from then on
CLOSE_S = 5.0  # for allocations to go back


class Releases:
    """What Slurm has still to take back."""

    def __init__(self, slurm: Slurm, tasks: Tasks) -> None:
        self.slurm, self.tasks = slurm, tasks
        self._releasing: dict[int, tuple[SlurmGang, asyncio.Task[None]]] = {}
        self._cleaning: dict[
            int, tuple[SlurmGang, float]
        ] = {}  # Slurm jobs of ours that are being wound up, since when

    def __contains__(self, job: object) -> bool:
        """Whether this Slurm job is being wound up."""
        return job in self._cleaning

    @property
    def jobs(self) -> set[int]:
        """Slurm jobs that are being cancelled or wound up."""
        return self._cleaning.keys() | self._releasing.keys()

    def release(self, gang: SlurmGang, *, at_once: bool = False) -> asyncio.Task[None]:
        job = gang.slurm_job
        self._cleaning.setdefault(job, (gang, asyncio.get_running_loop().time()))
        if job not in self._releasing:
            self._releasing[job] = (gang, self.tasks.spawn(self._cancel(job, at_once=at_once)))
        return self._releasing[job][1]

    async def _cancel(self, job: int, *, at_once: bool = False) -> None:
        """Until slurmctld has heard it."""
        pause_s = 0.2
        try:
            while True:
                try:
                    return await self.slurm.cancel([job], at_once=at_once)
                except SlurmError as error:
                    LOG.warning("Slurm job %d cannot be cancelled yet: %s", job, error)
                await asyncio.sleep(pause_s)
                pause_s = min(5.0, 2 * pause_s)
        finally:
            self._releasing.pop(job, None)

    def touching(self, nodes: Iterable[str]) -> list[asyncio.Task[None]]:
        """What is being given back of these nodes."""
        wanted = set(nodes)
        return [task for gang, task in self._releasing.values() if wanted & set(gang.nodes)]

    def slow(self, now_s: float) -> Iterator[tuple[int, SlurmGang]]:
        """What Slurm winds up for so long that others must know."""
        for job, (gang, since_s) in self._cleaning.items():
            if now_s - since_s > CLEANING_S:
                yield job, gang

    def forget_wound_up(self, present: Collection[int], began_s: float) -> None:
        """Given what Slurm still had when it was asked, at that time."""
        for job, (_, since_s) in list(self._cleaning.items()):
            if job not in present and job not in self._releasing and since_s < began_s:
                del self._cleaning[job]

    def allocated(self, gangs: Gangs) -> Iterator[tuple[int, SlurmGang]]:
        """Slurm jobs of ours that have GPUs, or may have."""
        for gang in gangs:
            if gang.phase != "over":
                yield gang.slurm_job, gang
        yield from ((job, gang) for job, (gang, _) in self._cleaning.items() if gang.phase == "over")

    async def close(self) -> None:
        releasing = [task for _, task in self._releasing.values()]
        if releasing:
            await asyncio.wait(releasing, timeout=CLOSE_S)
