"""Slurm by its command line: one place that runs the commands, a bounded number of them at a time.

Every way to fail becomes one `SlurmError` that says what is the matter.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from thebes.engine.slurm.commands import (
    AllocationRequest,
    SlurmError,
    failure,
    granted_job,
    salloc_args,
    scancel_args,
    squeue_args,
)
from thebes.engine.slurm.records import (
    JobRecord,
    NodeRecord,
    Partition,
    Queued,
    Reservation,
    parse_config,
    parse_job,
    parse_node,
    parse_partition,
    parse_queue,
    parse_reservation,
    parse_topology,
)
from thebes.protocol.shims import without_shims

AT_ONCE = 8  # commands that run at a time
ANSWER_S = 20.0


class Slurm:
    """Slurm's commands. A caller that starts many waits a little, because slurmctld has to serve others, too."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.env = clean_env(os.environ if env is None else env)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def run(self, args: Sequence[str], *, timeout_s: float = ANSWER_S) -> str:
        """Its output. SlurmError when it fails or takes too long."""
        return (await self._run(args, timeout_s))[0]

    async def _run(self, args: Sequence[str], timeout_s: float) -> tuple[str, str]:
        async with self._turns:
            process = await self.start(args)
            try:
                async with asyncio.timeout(timeout_s):
                    out, err = await process.communicate()
            except TimeoutError:
                raise SlurmError(f"{args[0]} has had no answer from slurmctld for {timeout_s:g} s", "silent") from None
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
        if process.returncode:
            raise failure(args[0], process.returncode, err.decode("utf-8", "replace"))
        return out.decode("utf-8", "replace"), err.decode("utf-8", "replace")

    async def start(self, args: Sequence[str]) -> asyncio.subprocess.Process:
        conf = self.env.get("SLURM_CONF")
        if conf and not Path(conf).exists():  # the commands would look for it for a minute
            raise SlurmError(f"SLURM_CONF names {conf}, which is not there", "silent")
        try:
            return await asyncio.create_subprocess_exec(
                *args,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self.env,
            )
        except FileNotFoundError:
            raise SlurmError(
                f"there is no `{args[0]}` in PATH: this is not a machine of a Slurm cluster", "missing"
            ) from None

    async def allocate(self, request: AllocationRequest) -> int:
        """The number of the new Slurm job. Trouble "busy" if Slurm does not give it; nothing is left behind then."""
        try:
            _, told = await self._wait(salloc_args(request), request.name, request.wait_s)
        except BaseException:
            with suppress(SlurmError):
                await self._give_up(request.name)
            raise
        if granted := granted_job(told):
            return granted
        found = [one for one in await self.queue(uid=os.getuid()) if one.name == request.name and not one.over]
        if not found:
            raise SlurmError(f"Slurm took the allocation {request.name} back at once", "busy")
        return min(one.leader for one in found)

    async def try_step(self, args: Sequence[str], *, name: str, wait_s: int) -> str:
        """What an srun of this name (`--job-name`) prints that waits for nodes as long as that (`--immediate`)."""
        return (await self._wait(args, name, wait_s))[0]

    async def _wait(self, args: Sequence[str], name: str, wait_s: int) -> tuple[str, str]:
        """A command that waits for a Slurm job of this name to be given what it asks for; if it is not, the error has
        the reason that Slurm has for it. (The command itself says that a connection has timed out.)"""
        asking = asyncio.create_task(self._why_it_waits(name, wait_s / 4))
        try:
            return await self._run(args, wait_s + ANSWER_S)
        except SlurmError as error:
            why = asking.result() if asking.done() and asking.exception() is None else ""
            if error.trouble != "busy" or not why:
                raise
            raise SlurmError(f"{args[0]}: not given within {wait_s} s: {why}", "busy") from None
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _why_it_waits(self, name: str, after_s: float) -> str:
        await asyncio.sleep(after_s)
        found = [one.reason for one in await self.queue(uid=os.getuid()) if one.name == name and one.state == "PENDING"]
        return next((reason for reason in found if reason not in ("", "None")), "")

    async def _give_up(self, name: str) -> None:
        found = {one.leader for one in await self.queue(uid=os.getuid()) if one.name == name and not one.over}
        if found:
            await self.cancel(found)

    async def cancel(self, jobs: Iterable[int], *, at_once: bool = False) -> None:
        """End them; at once: without the time that Slurm gives them. Those that are over do not matter."""
        listed = sorted(jobs)
        if at_once:
            await self._cancel(scancel_args(listed, signal_name="KILL"))
            # A step whose srun is told that all is over cannot tell it how it ended, and tries for ten seconds.
            for _ in range(20):
                if not sum([await self.steps(job) for job in listed]):
                    break
                await asyncio.sleep(0.1)
        await self._cancel(scancel_args(listed))

    async def _cancel(self, args: Sequence[str]) -> None:
        try:
            await self.run(args)
        except SlurmError as error:
            if error.trouble not in ("unknown-job", "other"):
                raise

    async def queue(self, *, uid: int | None = None, over_too: bool = False) -> list[Queued]:
        return parse_queue(await self.run(squeue_args(uid=uid, over_too=over_too)))

    async def nodes(self) -> list[NodeRecord]:
        text = await self.run(["scontrol", "--oneliner", "--details", "--all", "show", "node"])
        return [parse_node(line) for line in text.splitlines() if line.startswith("NodeName=")]

    async def jobs(self, job: int | None = None) -> list[JobRecord]:
        which = [] if job is None else [str(job)]
        text = await self.run(["scontrol", "--oneliner", "--details", "--all", "show", "job", *which])
        return [parse_job(line) for line in text.splitlines() if line.startswith("JobId=")]

    async def steps(self, job: int) -> int:
        """How many steps of this Slurm job run."""
        try:
            text = await self.run(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i"])
        except SlurmError as error:
            if error.trouble in ("silent", "missing"):
                raise
            return 0
        return len([line for line in text.splitlines() if re.match(rf"\s*{job}\.\d", line)])

    async def racks(self) -> dict[str, str]:
        """Leaf switches; empty where the site tells Slurm nothing of its network."""
        try:
            return parse_topology(await self.run(["scontrol", "--oneliner", "show", "topology"]))
        except SlurmError as error:
            if error.trouble in ("silent", "missing"):
                raise
            return {}

    async def partitions(self) -> list[Partition]:
        text = await self.run(["scontrol", "--oneliner", "--all", "show", "partition"])
        return [parse_partition(line) for line in text.splitlines() if line.startswith("PartitionName=")]

    async def reservations(self) -> list[Reservation]:
        text = await self.run(["scontrol", "--oneliner", "show", "reservation"])
        return [parse_reservation(line) for line in text.splitlines() if line.startswith("ReservationName=")]

    async def config(self) -> dict[str, str]:
        return parse_config(await self.run(["scontrol", "show", "config"]))


def clean_env(env: Mapping[str, str]) -> dict[str, str]:
    """Without our own variables, and without those of a Slurm job that we may run in: commands would obey them."""
    keep = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
    own = ("THEBES_", "SLURM_", "SLURMD_", "SALLOC_", "SRUN_", "SBATCH_", "SQUEUE_", "SINFO_", "SCANCEL_", "PMI_")
    found = {key: value for key, value in env.items() if key in keep or not key.startswith(own)}
    if "PATH" in found:
        found["PATH"] = without_shims(found["PATH"])  # `thebes shims install` may have put ours in front
    return found
