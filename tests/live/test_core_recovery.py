"""Crashes, changed clusters and bad timing, one by one: what the state machine found, told as stories."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from sqlalchemy import select

from kit.cluster_in_a_test import ADMIN, live_cluster
from thebes.jobspec.spec import JobSpec
from thebes.live.config import NodeConfig
from thebes.store import schema


def run(story):
    asyncio.run(story)


def freeze_in_engine(cluster, job, incarnation):
    one = cluster.engine.living[job, incarnation]
    one.state = "frozen"
    one.reports = {node: replace(report, state="frozen") for node, report in one.reports.items()}


async def reconfigured(cluster, **sizes):
    """The same folder, opened again with other nodes."""
    await cluster.crash()
    cluster.engine.sizes = sizes
    cluster.engine.up = {name: cluster.engine.up.get(name, True) for name in sizes}
    nodes = [NodeConfig(name=name, gpus=gpus, virtual=True) for name, gpus in sizes.items()]
    cluster.config = cluster.config.model_copy(update={"nodes": nodes})
    await cluster.open()


def test_a_job_that_was_frozen_when_the_store_took_it_for_running_goes_on(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(8, mechanism="freeze")
            freeze_in_engine(c, job, 1)  # the controller dies before it hears of it, or before it resumes it
            await c.crash()
            await c.open()
            assert c.engine.living[job, 1].state == "running"
            assert c.state(job) == "running"

    run(story())


def test_a_frozen_job_comes_back_on_other_virtual_gpus_of_its_node_and_they_are_booked(tmp_path):
    async def story():
        async with live_cluster(tmp_path, nodes={"n0": 4}) as c:
            c.engine.check = lambda: None  # it does not know that virtual GPUs are all alike
            frozen = await c.submit(2, mechanism="freeze")
            other = await c.submit(2, priority=1)
            urgent = await c.submit(2, priority=5)
            assert c.state(frozen) == "suspended"
            before = c.controller.core.jobs[frozen].attempts[1].gpus
            c.engine.end(other, 1, 0)
            await c.quiet()
            core = c.controller.core
            assert c.state(frozen) == "running"
            held = {gpu: {job for job, _ in holders} for gpu, holders in core.on_gpu.items()}
            assert sorted(len(jobs) for jobs in held.values()) == [1, 1, 1, 1]
            assert core.jobs[frozen].attempts[1].gpus == core.jobs[frozen].target != before
            assert c.state(urgent) == "running"

    run(story())


def test_another_policy_is_no_reason_to_stop_anybody(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            jobs = [await c.submit(4), await c.submit(2), await c.submit(2)]
            await c.crash()
            c.config = c.config.model_copy(update={"policy": "fifo"})
            await c.open()
            assert [c.incarnation(job) for job in jobs] == [1, 1, 1]
            assert not [call for call in c.engine.calls if call[0] == "notice"]

    run(story())


def test_a_node_less_costs_only_those_who_were_there(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            jobs = [await c.submit(4), await c.submit(4)]
            where = {c.engine.living[job, 1].launch.parts[0].node: job for job in jobs}
            c.engine.living.pop((where["n1"], 1))
            await reconfigured(c, n0=4)
            assert c.incarnation(where["n0"]) == 1
            assert c.state(where["n0"]) == "running"
            assert (c.state(where["n1"]), c.row(where["n1"]).losses) == ("queued", 1)

    run(story())


def test_waiting_jobs_may_use_nodes_of_a_kind_that_came_later(tmp_path):
    async def story():
        async with live_cluster(tmp_path, nodes={"n0": 1}) as c:
            await c.submit(1)
            waiting = await c.submit(1)
            await reconfigured(c, n0=1, big=8)
            assert c.state(waiting) == "running"

    run(story())


def test_a_node_that_was_away_for_a_blink_and_forgot_is_believed(tmp_path):
    async def story():
        async with live_cluster(tmp_path, nodes={"n0": 4}) as c:
            job = await c.submit(4)
            c.engine.node_down("n0")
            del c.engine.living[job, 1]  # its disk is new
            c.engine.node_up("n0")  # both are heard of in the same moment
            await c.quiet()
            row = c.row(job)
            assert (row.state, row.incarnation, row.losses, row.failures) == ("running", 2, 1, 0)

    run(story())


def test_a_dependency_that_fails_while_the_job_comes_in_ends_it(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(1)
            coming = asyncio.ensure_future(
                c.controller.submit(JobSpec(command=["x"], after=[first], workdir="/"), ADMIN)
            )
            await asyncio.sleep(0)
            c.engine.end(first, 1, 1)
            (second,) = await coming
            await c.quiet()
            assert c.state(first) == "failed"
            assert c.state(second) == "cancelled"

    run(story())


def test_who_was_let_go_on_does_not_wait_again_when_the_first_runs_again(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(1)
            second = await c.submit(1, after=[first])
            c.engine.end(first, 1, 0)
            await c.quiet()
            await c.controller.act("requeue", first, ADMIN)
            await c.quiet()
            await c.crash()
            await c.open()
            c.engine.end(first, 2, 1)
            await c.quiet()
            assert (c.state(first), c.state(second)) == ("failed", "running")

    run(story())


def test_a_caller_that_gives_up_harms_nobody_and_its_job_is_not_lost(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            spec = JobSpec(command=["x"], workdir="/")
            asked = [
                asyncio.ensure_future(c.controller.submit(spec, ADMIN, client_key="k")),
                asyncio.ensure_future(c.controller.act("cancel", "77", ADMIN)),
                asyncio.ensure_future(c.controller.undrain("n0", "root")),  # will be refused
            ]
            await asyncio.sleep(0)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await c.quiet()
            (job,) = await c.controller.submit(spec, ADMIN, client_key="k")
            await c.quiet()
            assert c.state(job) == "running"

    run(story())


def test_a_retry_does_not_bring_an_ended_job_back(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            spec = JobSpec(command=["x"], workdir="/")
            (job,) = await c.controller.submit(spec, ADMIN, client_key="k")
            await c.quiet()
            again = asyncio.ensure_future(c.controller.submit(spec, ADMIN, client_key="k"))
            await asyncio.sleep(0)
            c.engine.end(job, 1, 0)
            assert await again == [job]
            await c.quiet()
            assert c.state(job) == "completed"
            assert not c.engine.living

    run(story())


def test_jobs_on_a_node_that_is_away_count_in_the_quota(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            await c.controller.set_quota("default", 4)
            job = await c.submit(4)
            node = c.engine.living[job, 1].launch.parts[0].node
            c.engine.node_down(node)
            await c.quiet()
            other = await c.submit(1)
            assert c.state(other) == "queued"
            assert "quota" in c.controller.live(other)["reason"]
            assert c.controller.quota("default") == 4

    run(story())


def test_the_controller_rests_while_the_cluster_goes_down(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            going = asyncio.ensure_future(c.controller.shutdown("checkpoint"))
            await c.quiet()  # it would never be quiet if it went on deciding
            assert not going.done()
            c.engine.end(job, 1, 85)
            assert (await going)["stopped"] == [job]

    run(story())


def test_when_the_cluster_has_gone_down_the_store_knows_how_jobs_ended(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            going = asyncio.ensure_future(c.controller.shutdown("checkpoint"))
            await c.quiet()
            slow = c.controller.store.change(lambda _: time.sleep(0.3), must=True)  # a database far away
            c.engine.end(job, 1, 85)
            await going
            with c.controller.store.read() as connection:
                (attempt,) = connection.execute(select(schema.attempts)).all()
            assert attempt.ended_s is not None
            await slow

    run(story())
