"""Inside a reservation, and in a partition whose time limit is shorter than the job."""

from __future__ import annotations

import asyncio
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import slurm_cluster
from test_slurm_engine import NEVER_ENDS, SAVES, World
from worlds import opened, python

from components import require
from thebes.engine.contract import Engine, GpusTaken
from thebes.engine.slurm import SlurmEngine

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
                began = time.monotonic()
                for launch in (saves, deaf):
                    await told.engine.launch(launch)
                    await told.printed(launch, "ready")
                async with opened(outside) as others:  # who is not in the reservation gets nothing there
                    with pytest.raises(GpusTaken):
                        await others.engine.launch(python(outside, NEVER_ENDS, (5,)))
                    with pytest.raises(subprocess.CalledProcessError):
                        slurm.command("srun", "-p", "main", "-w", "n1", "--immediate=2", "--gres=gpu:g6:1", "true")
                # The limit of one minute ends both: the first has saved, the second could not. Neither has failed.
                end = await told.until(lambda: told.latest(saves.job_id, 1, "n1").state == "exited", "the limit", 150.0)
                assert end
                assert time.monotonic() - began > 45
                report = told.latest(saves.job_id, 1, "n1")
                assert report is not None
                assert report.codes == {0: 85}
                lost = await told.ended(deaf)
                assert lost.cause in ("killed", "lost")
                again = replace(deaf, incarnation=2)
                await told.engine.launch(again)  # and it goes on
                await told.report(again, "running")
                await told.engine.kill(again.job_id, 2)
                await told.ended(again)

        asyncio.run(story())
        slurm.until(lambda: not slurm.queue(), "no Slurm job left behind", 30.0)
