"""A policy of one's own that resizes or shares, under the real controller: the engine is told what it decided."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kit.cluster_in_a_test import LiveCluster, live_cluster

POLICIES = """
import numpy as np
import thebes


class Evenly(thebes.Policy):
    resizes = True

    def decide(self, view):
        jobs = view.jobs
        counts = np.clip(view.total_gpus // len(jobs), jobs.min_gpus, jobs.max_gpus)
        return thebes.fill(view, np.arange(len(jobs)), counts=counts)


class Halves(thebes.Policy):
    shares = True

    def decide(self, view):
        return thebes.fill(view, np.arange(len(view.jobs)), shares=np.full(len(view.jobs), 0.5))
"""


@pytest.fixture
def policies(tmp_path: Path) -> Path:
    file = tmp_path / "carried.py"
    file.write_text(POLICIES)
    return file


def gpus_of(cluster: LiveCluster, job: str) -> list[int]:
    """The GPUs of the incarnation that lives, as the engine was told."""
    launch = cluster.engine.living[job, cluster.incarnation(job)].launch
    return [gpu for part in launch.parts for gpu in part.gpus]


def test_a_resize_is_a_stop_and_a_launch_with_another_number_of_gpus(tmp_path: Path, policies: Path) -> None:
    async def story() -> None:
        async with live_cluster(tmp_path / "i", {"n0": 4}, policy=f"{policies}:Evenly") as cluster:
            one = await cluster.submit(2, min_gpus=1, max_gpus=4)
            assert gpus_of(cluster, one) == [0, 1, 2, 3]
            two = await cluster.submit(2, min_gpus=1, max_gpus=4)
            for _ in range(4):
                await cluster.pass_time(60.0)
            assert (gpus_of(cluster, one), gpus_of(cluster, two)) == ([0, 1], [2, 3])
            assert cluster.incarnation(one) == 2

    asyncio.run(story())


def test_two_jobs_live_on_one_gpu_when_the_decision_shares_it(tmp_path: Path, policies: Path) -> None:
    async def story() -> None:
        async with live_cluster(tmp_path / "i", {"n0": 1}, policy=f"{policies}:Halves") as cluster:
            one, two, three = [await cluster.submit(1, model="alexnet") for _ in range(3)]
            assert (gpus_of(cluster, one), gpus_of(cluster, two)) == ([0], [0])
            assert cluster.incarnation(three) == 0  # there are two halves

    asyncio.run(story())


# -- crashes -----------------------------------------------------------------------------------------------------------


def launches(cluster: LiveCluster) -> list[tuple[str, int]]:
    """Every incarnation that the engine ever began, once for each time that it did."""
    return sorted(key for key, times in cluster.engine.launches.items() for _ in range(times))


async def after_a_crash(cluster: LiveCluster) -> None:
    """The controller is gone at once, and another one begins from the store."""
    await cluster.crash()
    await cluster.open()


def test_two_jobs_on_one_gpu_go_on_side_by_side_after_a_crash(tmp_path: Path, policies: Path) -> None:
    async def story() -> None:
        async with live_cluster(tmp_path / "i", {"n0": 1}, policy=f"{policies}:Halves") as cluster:
            one, two, three = [await cluster.submit(1, model="alexnet") for _ in range(3)]
            await cluster.pass_time(30.0)
            await after_a_crash(cluster)
            await cluster.pass_time(60.0)
            assert (gpus_of(cluster, one), gpus_of(cluster, two)) == ([0], [0])
            assert launches(cluster) == [(one, 1), (two, 1)]
            assert not [call for call in cluster.engine.calls if call[0] in ("notice", "kill", "terminate", "suspend")]
            cluster.engine.end(one, 1, 0)  # its half is free, the other one stays where it is
            await cluster.quiet()
            assert (cluster.state(one), cluster.state(two), cluster.state(three)) == ("completed", "running", "running")
            assert launches(cluster) == [(one, 1), (two, 1), (three, 1)]
            await after_a_crash(cluster)
            for job in (two, three):
                cluster.engine.end(job, 1, 0)
            await cluster.quiet()
            assert (cluster.state(two), cluster.state(three)) == ("completed", "completed")
            assert cluster.controller.core.ledger.view(cluster.clock()).free_gpus == 1

    asyncio.run(story())


@pytest.mark.parametrize("crash", ["while it stops", "once it has stopped", "once it runs again"])
def test_a_resize_goes_on_after_a_crash_in_the_middle_of_it(tmp_path: Path, policies: Path, crash: str) -> None:
    async def story() -> None:
        async with live_cluster(tmp_path / "i", {"n0": 4}, policy=f"{policies}:Evenly") as cluster:
            one = await cluster.submit(2, min_gpus=1, max_gpus=4)
            two = await cluster.submit(2, min_gpus=1, max_gpus=4)  # the first is told to stop, and has not
            assert (cluster.incarnation(one), cluster.incarnation(two)) == (1, 0)
            assert ("notice", one, 1) in cluster.engine.calls
            if crash == "while it stops":
                await after_a_crash(cluster)
                assert launches(cluster) == [(one, 1)]
            if crash == "once it has stopped":  # and nobody was there to hear of it
                await cluster.crash()
                cluster.engine.end(one, 1, -9, cause="killed")
                await cluster.open()
            for _ in range(4):
                await cluster.pass_time(60.0)
            if crash == "once it runs again":
                await after_a_crash(cluster)
            assert (gpus_of(cluster, one), gpus_of(cluster, two)) == ([0, 1], [2, 3])
            assert launches(cluster) == [(one, 1), (one, 2), (two, 1)]
            assert (cluster.state(one), cluster.state(two)) == ("running", "running")

    asyncio.run(story())
