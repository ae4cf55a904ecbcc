"""How long it takes from a decision to running ranks, and how many jobs go through, on 64 nodes with 512 GPUs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kit.components import require
from kit.engine_worlds import Called, opened, python
from kit.slurm_cluster import slurm_cluster
from thebes.engine.slurm.engine import SlurmEngine
from thebes.protocol.contract import Part

require("slurm")
pytestmark = pytest.mark.slurm

RUN = "import time; time.sleep(0.05)"
NODES = 64


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Called]:
    with slurm_cluster(nodes=NODES) as slurm, pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.env.items():
            patch.setenv(name, value)
        # A hundred starts at once wait for each other on a slow machine.
        patch.setattr("thebes.engine.slurm.launching.CALLED_WITHIN_S", 240.0)
        patch.setattr("thebes.engine.slurm.asking.GIVEN_WITHIN_S", 120)
        folder = tmp_path_factory.mktemp("scale")
        yield Called("slurm", list(slurm.names), folder, SlurmEngine, home_host=slurm.address)
        slurm.until(lambda: not slurm.queue(), "no Slurm job left behind")


def test_a_gang_of_eight_nodes_and_a_stream_of_jobs(
    world: Called, record_property: pytest.RecordProperty, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> tuple[list[float], float]:
        async with opened(world) as told:
            took: list[float] = []
            for number in range(3):
                nodes = world.nodes[8 * number : 8 * number + 8]
                gang = replace(python(world, RUN), parts=tuple(Part(node, tuple(range(8))) for node in nodes))
                began_s = time.monotonic()
                await told.engine.launch(gang)  # returns when all ranks run
                took.append(time.monotonic() - began_s)
                for node in nodes:
                    await told.ended(gang, node)
            count = 100
            jobs = [
                replace(python(world, RUN), parts=(Part(world.nodes[at % NODES], (at // NODES,)),))
                for at in range(count)
            ]
            began_s = time.monotonic()
            await asyncio.gather(*(told.engine.launch(job) for job in jobs))
            for job in jobs:
                assert (await told.ended(job)).codes == {0: 0}
            return took, count / (time.monotonic() - began_s)

    took, jobs_per_s = asyncio.run(story())
    record_property("gang_s", min(took))
    record_property("jobs_per_s", jobs_per_s)
    with capsys.disabled():
        print(f"\n8 nodes, 64 ranks: {min(took):.2f} to {max(took):.2f} s from decision to all running")
        print(f"{jobs_per_s:.1f} jobs/s")
