"""Jobs that share a GPU: what is measured of them alone, and how a guest comes to GPUs of its own."""

from __future__ import annotations

import asyncio

import pytest

from kit.cluster_in_a_test import ADMIN, live_cluster


def run(story):
    asyncio.run(story)


async def packed(c):
    """A host and a guest on one GPU, each measured at 10 steps per second alone; the other node is drained."""
    jobs = host, guest = [await c.submit(1, pack=True) for _ in range(2)]
    await c.make_steps(dict.fromkeys(jobs, 10.0), 20)
    node = c.engine.living[guest, 1].launch.parts[0].node
    await c.controller.drain(node, "", True, "root")
    c.engine.end(guest, 1, 85)
    await c.quiet()
    assert c.controller.core.ledger.guests == {guest: host}
    return host, guest, node


@pytest.mark.parametrize("ends", ["completed", "held", "lost"])
def test_how_fast_a_host_runs_alone_is_not_measured_from_when_it_had_a_guest(tmp_path, ends):
    async def story():
        async with live_cluster(tmp_path, {"n0": 1, "n1": 1}, packing=True) as c:
            host, guest, _ = await packed(c)
            await c.make_steps({host: 8.0, guest: 8.0}, 30)
            if ends == "completed":
                c.engine.end(guest, 2, 0)
            elif ends == "held":
                await c.controller.act("hold", guest, ADMIN)
                await c.make_steps({host: 8.0, guest: 8.0}, 15)  # it saves its state, and takes its time
                c.engine.end(guest, 2, 85)
            else:
                await c.controller.act("hold", guest, ADMIN)
                c.engine.end(guest, 2, -9, cause="lost")
            await c.make_steps({host: 10.0}, 20)
            core = c.controller.core
            assert core.ledger.rates[host] == pytest.approx(10.0, rel=0.01)
            assert core.packings == {}

    run(story())


def test_a_guest_moves_to_a_gpu_of_its_own_when_there_is_one(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 1, "n1": 1}, packing=True) as c:
            host, guest, node = await packed(c)
            await c.controller.undrain(node, "root")
            await c.quiet()
            core = c.controller.core
            assert core.ledger.guests == {}
            assert ("notice", guest, 2) in c.engine.calls
            assert (c.state(guest), c.incarnation(guest)) == ("preempting", 2)  # not two of it at once
            c.engine.end(guest, 2, 85)
            await c.quiet()
            assert c.state(guest) == c.state(host) == "running"
            assert c.engine.living[guest, 3].launch.parts[0].node == node
            assert c.engine.living[host, 1].launch.parts[0].node != node
            assert core.packings == {}
            assert c.row(guest).failures == 0

    run(story())


def test_a_guest_that_is_not_launched_yet_just_gets_a_gpu_of_its_own(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 1, "n1": 1}, packing=True) as c:
            jobs = host, guest = [await c.submit(1, pack=True) for _ in range(2)]
            await c.make_steps(dict.fromkeys(jobs, 10.0), 20)
            node = c.engine.living[guest, 1].launch.parts[0].node
            await c.controller.drain(node, "", True, "root")
            await c.quiet()
            assert c.controller.core.ledger.guests == {guest: host}  # invited while it still saves its state
            await c.controller.undrain(node, "root")
            await c.quiet()
            c.engine.end(guest, 1, 85)
            await c.quiet()
            assert c.state(guest) == c.state(host) == "running"
            assert c.engine.living[guest, 2].launch.parts[0].node == node

    run(story())
