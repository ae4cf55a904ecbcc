"""What a site gives and what it does not: reservations, time limits, cores, memory, accounts."""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from test_slurm_engine import NEVER_ENDS, SAVES, World, facts_of

from kit.components import require
from kit.engine_worlds import opened, python
from kit.slurm_cluster import slurm_cluster
from thebes.engine.slurm.engine import SlurmEngine
from thebes.protocol.contract import Engine, GpusTaken

require("slurm")
pytestmark = pytest.mark.slurm


class Others(World):
    """Another instance of Thebes on the same cluster."""

    def engine(self) -> Engine:
        made = super().engine()
        assert isinstance(made, SlurmEngine)
        return SlurmEngine(replace(made.site, instance_id="others"))


def test_a_reservation_is_ours_alone_and_the_partitions_time_limit_is_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm_cluster(nodes=2, max_time="1") as slurm:
        for name, value in slurm.env.items():
            monkeypatch.setenv(name, value)
        reserve = ("reservationname=ours", "starttime=now", "duration=infinite", "nodes=n1", "users=root")
        slurm.command("scontrol", "create", "reservation", *reserve)

        async def story() -> None:
            inside = World(slurm, tmp_path / "inside", partition="main", reservation="ours")
            outside = Others(slurm, tmp_path / "outside", partition="main")
            async with opened(inside) as told:
                saves, deaf = python(inside, SAVES, (0,)), python(inside, NEVER_ENDS, (1, 2))
                for launch in (saves, deaf):
                    await told.engine.launch(launch)
                    await told.printed(launch, "ready")
                async with opened(outside) as others:  # who is not in the reservation gets nothing there
                    with monkeypatch.context() as patch:
                        patch.setattr("thebes.engine.slurm.asking.GIVEN_WITHIN_S", 2)  # nor would they later
                        with pytest.raises(GpusTaken):
                            await others.engine.launch(python(outside, NEVER_ENDS, (5,)))
                    with pytest.raises(subprocess.CalledProcessError):
                        slurm.command("srun", "-p", "main", "-w", "n1", "--immediate=2", "--gres=gpu:g6:1", "true")
                # The limit of one minute ends both: the first has saved, the second could not. Neither has failed.
                limits = [line.split() for line in slurm.command("squeue", "-h", "-o", "%i %l").splitlines()]
                assert [limit for _, limit in limits] == ["1:00", "1:00"]
                for job, _ in limits:  # nobody has to wait for the whole of it
                    slurm.command("scontrol", "update", f"jobid={job}", "endtime=now+1seconds")
                await told.until(lambda: told.latest(saves.job_id, 1, "n1").state == "exited", "the limit", 150.0)
                assert (await told.ended(saves)).codes == {0: 85}
                lost = await told.ended(deaf)
                assert lost.cause in ("killed", "lost")
                again = replace(deaf, incarnation=2)
                await told.engine.launch(again)  # and it goes on
                await told.report(again, "running")
                await told.engine.kill(again.job_id, 2)
                await told.ended(again)

        asyncio.run(story())
        slurm.until(lambda: not slurm.queue(), "no Slurm job left behind")


def test_every_gpu_finds_its_share_of_cores_and_memory_and_what_slurm_refuses_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes whose cores do not divide by their GPUs, on a site that hands out memory too, and not all of it."""
    shape = "CPUs=20 Sockets=1 CoresPerSocket=10 ThreadsPerCore=2 RealMemory=8700 MemSpecLimit=700"
    memory = ("SelectTypeParameters=CR_Core_Memory", "MaxMemPerCPU=300")
    with slurm_cluster(nodes=1, gpus=8, switches=1, shape=shape, conf=memory) as slurm:
        for name, value in slurm.env.items():
            monkeypatch.setenv(name, value)

        async def story() -> None:
            world = World(slurm, tmp_path / "world", account="physics", time_limit="2:00")
            async with opened(world) as told:
                launches = [python(world, NEVER_ENDS, (number,)) for number in range(8)]
                for launch in launches:
                    await told.engine.launch(launch)
                for launch in launches:
                    await told.report(launch, "running")
                jobs = slurm.command("squeue", "-h", "-o", "%a %C %m %l").splitlines()
                assert sorted(set(jobs)) == ["physics 2 600M 2:00"]
                assert len(jobs) == 8
                await told.engine.kill(launches[3].job_id, 1)
                await told.ended(launches[3])

                # Where the site gives jobs less than it would let them have, we ask for all of it.
                slurm.command("scontrol", "update", "partition=main", "DefaultTime=1")
                unlimited = Others(slurm, tmp_path / "unlimited")
                async with opened(unlimited) as longest:
                    launch = python(unlimited, NEVER_ENDS, (3,))
                    await longest.engine.launch(launch)
                    assert "UNLIMITED" in slurm.command("squeue", "-h", "-o", "%l").split()
                    await longest.engine.kill(launch.job_id, 1)
                    await longest.ended(launch)
                # The next ones shall find the GPU free, or they would be told who has it.
                await asyncio.to_thread(slurm.until, lambda: len(slurm.queue()) == 7, "Slurm to have it back")

                slurm.command("scontrol", "update", "partition=main", "DefaultTime=1", "MaxTime=5")
                too_long = Others(slurm, tmp_path / "long", time_limit="10")
                async with opened(too_long) as others:
                    with pytest.raises(GpusTaken, match="salloc: not given within 10 s: PartitionTimeLimit"):
                        await others.engine.launch(python(too_long, NEVER_ENDS, (3,)))

                refused = Others(slurm, tmp_path / "refused", reservation="gone")
                async with opened(refused) as others:
                    with pytest.raises(GpusTaken, match="reservation"):
                        await others.engine.launch(python(refused, NEVER_ENDS, (3,)))
                    gpu = facts_of(others, "n1").gpus[3]
                    assert "Slurm does not give it (salloc: " in gpu.taken
                    assert "reservation" in gpu.taken.lower()

        asyncio.run(story())
        slurm.cancel_all()
