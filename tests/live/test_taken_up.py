"""A controller starts, and what its nodes say is not what the store says: the nodes have the last word."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kit.cluster_in_a_test import ADMIN, live_cluster
from kit.waiting import until_async
from thebes.jobspec.spec import JobSpec
from thebes.live import controller as controller_module
from thebes.live.config import NodeConfig


def run(story):
    asyncio.run(story)


def found(cluster, job, state, *nodes):
    """The engine will say that the job is in this state, on these nodes or on all of its own."""
    one = cluster.engine.living[job, cluster.incarnation(job)]
    one.state = state
    one.reports = {n: replace(r, state=state) if not nodes or n in nodes else r for n, r in one.reports.items()}


async def starts_anew(cluster):
    await cluster.crash()
    await cluster.open()


def test_what_was_suspended_stays_so_and_is_resumed_when_its_turn_comes(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            low = await c.submit(8, mechanism="freeze")
            high = await c.submit(8, priority=5)
            found(c, low, "frozen")
            await starts_anew(c)
            assert (c.state(low), c.state(high)) == ("suspended", "running")
            assert {job for holders in c.controller.core.on_gpu.values() for job, _ in holders} == {high}
            c.engine.end(high, 1, 0)
            await c.quiet()
            assert (c.state(low), c.incarnation(low)) == ("running", 1)

    run(story())


def test_who_was_suspended_unheard_makes_room_for_whom_it_was_suspended_for(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            low = await c.submit(8, mechanism="freeze")
            c.engine.late["suspend"] = asyncio.Event()  # it is frozen, and nobody hears of it
            (high,) = await c.controller.submit(JobSpec(command=["x"], gpus=8, workdir="/", priority=5), ADMIN)
            await until_async(lambda: c.engine.living[low, 1].state == "frozen", "it is frozen")
            found(c, low, "frozen")
            await starts_anew(c)
            assert (c.state(low), c.state(high)) == ("suspended", "running")
            c.engine.end(high, 1, 0)
            await c.quiet()
            assert (c.state(low), c.incarnation(low)) == ("running", 1)

    run(story())


def test_a_gang_of_which_a_part_sleeps_is_woken_as_a_whole(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(8, mechanism="freeze")
            found(c, job, "frozen", "n0")
            await starts_anew(c)
            assert ("resume", job, 1) in c.engine.calls
            assert (c.state(job), c.engine.living[job, 1].state) == ("running", "running")
            assert "resumed" in [event.kind for event in c.events() if event.job_id == job]

    run(story())


def test_a_job_that_runs_though_it_was_suspended_is_suspended_again(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            low = await c.submit(8, mechanism="freeze")
            high = await c.submit(8, priority=5)
            found(c, low, "running")  # somebody on the node has let it go on
            await starts_anew(c)
            assert c.engine.calls.count(("suspend", low, 1)) == 2
            assert (c.state(low), c.state(high)) == ("suspended", "running")

    run(story())


def test_a_job_that_runs_though_it_was_suspended_and_has_another_place_goes_there(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 2}) as c:
            c.engine.check = lambda: None  # it does not know that virtual GPUs are all alike
            low, other = await c.submit(1, mechanism="freeze"), await c.submit(1, priority=1)
            urgent = await c.submit(1, priority=5)
            assert c.state(low) == "suspended"
            await c.controller.act("hold", other, ADMIN)  # its GPU is promised to `low`, and not clear yet
            await c.quiet()
            found(c, low, "running")
            await starts_anew(c)
            assert (c.state(low), c.state(urgent)) == ("starting", "running")
            c.engine.end(other, 1, 85)
            await c.quiet()
            assert (c.state(low), c.state(other), c.state(urgent)) == ("running", "held", "running")
            attempt = c.controller.core.jobs[low].active
            assert attempt is not None
            assert (attempt.incarnation, attempt.gpus) == (1, c.controller.core.jobs[low].target)
            assert sorted(len(holders) for holders in c.controller.core.on_gpu.values()) == [1, 1]

    run(story())


def test_nodes_that_come_back_together_are_both_heard_before_a_gang_is_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(controller_module, "NODES_WAIT_S", 0.05)

    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(8)
            for node in ("n0", "n1"):
                c.engine.node_down(node)
            await starts_anew(c)  # it does not wait for ever for nodes that are away
            assert [node["alive"] for node in c.controller.nodes()] == [False, False]
            assert c.state(job) == "running"  # nothing is known of it, so it is left alone
            for node in ("n0", "n1"):
                c.engine.node_up(node)
            await c.quiet()
            row = c.row(job)
            assert (row.state, row.incarnation, row.losses) == ("running", 1, 0)
            assert all(node["alive"] for node in c.controller.nodes())

    run(story())


def test_a_launch_that_no_node_has_heard_of_is_no_loss_when_its_node_has_gone(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(4)
            c.engine.unreachable = True
            (job,) = await c.controller.submit(JobSpec(command=["x"], gpus=4, workdir="/"), ADMIN)
            await until_async(lambda: ("launch", job, 1) in c.engine.calls, "its launch is tried")
            await c.crash()
            c.engine.unreachable = False
            stays = c.engine.living[first, 1].launch.parts[0].node
            c.engine.sizes, c.engine.up = {stays: 4}, {stays: True}
            nodes = [NodeConfig(name=stays, gpus=4, virtual=True)]
            c.config = c.config.model_copy(update={"nodes": nodes})
            await c.open()
            row = c.row(job)
            assert (row.state, row.losses, row.failures) == ("queued", 0, 0)
            assert c.state(first) == "running"
            c.engine.end(first, 1, 0)
            await c.quiet()
            assert (c.state(job), c.incarnation(job)) == ("running", 2)

    run(story())
