"""Ray breaks, and jobs do not notice; or they are lost, and never live twice.

Where a lease has to end it is one of 6 s: cut off, a job is told at 6 s and killed at 9 s; the engine calls it lost at
11 s.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.components import require
from kit.engine_worlds import Told, opened, order_of_ends, processes_of, python
from kit.ray_worlds import SHORT_LEASE_S, RayWorld, job_name
from kit.scripts import SAVES
from kit.waiting import PATIENCE_S
from thebes.node import processes
from thebes.protocol.contract import Launch, NodeChange, NodeFacts, Part, Report
from thebes.protocol.lease import KILL_AT, over_s

pytestmark = pytest.mark.ray

TICKS = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)"


def run(story: Any) -> None:
    asyncio.run(story)


@pytest.fixture
def short_lease(ray_world: RayWorld, monkeypatch: pytest.MonkeyPatch) -> RayWorld:
    """Engines tell nodes a lease whose end can be waited for. A pause of this machine is one of its nodes, too."""
    monkeypatch.setattr(ray_world, "lease_s", SHORT_LEASE_S)
    monkeypatch.setattr("thebes.engine.silence.PAUSE_S", 1.5)
    return ray_world


async def started(told: Told, world: RayWorld, script: str = TICKS, *gpus: tuple[int, ...], **more: Any) -> Launch:
    launch = python(world, script, *gpus, job_id=job_name(), **more)
    await told.engine.launch(launch)
    for rank in range(len(launch.parts)):
        await told.printed(launch, "ready", rank)
    return launch


async def ended_by_us(told: Told, launch: Launch) -> None:
    await told.engine.kill(launch.job_id, launch.incarnation)
    for part in launch.parts:
        await told.ended(launch, part.node)
    await told.engine.forget(launch.job_id, launch.incarnation)


def facts(told: Told, node: str) -> NodeFacts:
    return next(one.facts for one in reversed(told.heard) if isinstance(one, NodeChange) and one.facts.name == node)


async def told_of(told: Told, node: str, *, alive: bool) -> NodeFacts:
    await told.until(lambda: facts(told, node).alive is alive, f"{node} alive={alive}")
    return facts(told, node)


def lost(told: Told) -> list[Report]:
    return [one for one in told.heard if isinstance(one, Report) and one.cause == "lost"]


def test_the_driver_is_killed_and_only_a_pause_is_noticed(ray_world: RayWorld) -> None:
    async def story() -> None:
        async with opened(ray_world) as told:
            engine: Any = told.engine
            launch = await started(told, ray_world)
            first = engine.driver.pid
            mark = len(told.heard)
            os.kill(first, signal.SIGKILL)
            other = await started(told, ray_world, TICKS, (1,))  # jobs start and end without it
            await told.until(lambda: engine.driver.pid != first and engine.driver.returncode is None, "a new driver")
            seen = engine.head_heard_s
            await told.until(lambda: engine.head_heard_s > seen, "news of nodes")
            assert not [one for one in told.heard[mark:] if isinstance(one, NodeChange) and not one.facts.alive]
            assert len(processes_of(launch)) == 1
            await ended_by_us(told, launch)
            await ended_by_us(told, other)

    run(story())


def test_an_agent_that_was_killed_is_started_again_and_adopts_its_jobs(ray_world: RayWorld) -> None:
    async def story() -> None:
        async with opened(ray_world) as told:
            launch = await started(told, ray_world)
            pids = processes_of(launch)
            killed = ray_world.kill_agent("n1")
            await told.until(lambda: facts(told, "n1").pid not in (None, killed), "another agent")
            assert (await told_of(told, "n1", alive=True)).pid == ray_world.agent("n1")
            assert processes_of(launch) == pids
            assert not lost(told)
            await ended_by_us(told, launch)

    run(story())


def test_a_worker_of_ray_is_killed_and_neither_agent_nor_jobs_notice(ray_world: RayWorld) -> None:
    async def story() -> None:
        async with opened(ray_world) as told:
            launch = await started(told, ray_world)
            agent, actor = ray_world.agent("n1"), await told.until(lambda: ray_world.actor("n1"), "the actor")
            os.kill(actor, signal.SIGKILL)
            await told.until(lambda: ray_world.actor("n1") not in (None, actor), "another actor")
            head = ray_world.folder("n1") / "run" / "head"
            before = head.read_text()
            await told.until(lambda: head.read_text() != before, "a word of the head")
            assert ray_world.agent("n1") == agent
            assert len(processes_of(launch)) == 1
            await ended_by_us(told, launch)

    run(story())


def test_a_raylet_is_killed_its_jobs_go_on_and_nothing_new_goes_there(short_lease: RayWorld) -> None:
    ray_world = short_lease

    async def story() -> None:
        async with opened(ray_world) as told:
            launch = await started(told, ray_world, TICKS, (0,), (0,))
            pids, agent = processes_of(launch), ray_world.agent("n1")
            begun_s = time.monotonic()
            ray_world.cluster.kill_raylet("n1")
            down = await told_of(told, "n1", alive=False)
            print(f"raylet killed: told after {time.monotonic() - begun_s:.2f} s")
            assert "Ray says that node n1 is dead" in down.detail
            await asyncio.sleep(over_s(SHORT_LEASE_S) + 1)  # the agent talks to us, so nothing is lost
            assert processes_of(launch) == pids
            assert not lost(told)
            ray_world.cluster.start_raylet("n1")
            up = await told_of(told, "n1", alive=True)
            assert up.pid == agent == ray_world.agent("n1")
            await told.until(lambda: ray_world.actor("n1"), "an actor on the node that is back")
            assert processes_of(launch) == pids
            await ended_by_us(told, launch)

    run(story())


def test_a_raylet_is_frozen_and_thawed(ray_world: RayWorld) -> None:
    async def story() -> None:
        async with opened(ray_world) as told:
            launch = await started(told, ray_world)
            pids = processes_of(launch)
            begun_s = time.monotonic()
            ray_world.cluster.freeze_raylet("n1")
            await told_of(told, "n1", alive=False)
            print(f"raylet frozen: told after {time.monotonic() - begun_s:.2f} s")
            assert processes_of(launch) == pids
            ray_world.cluster.thaw_raylet("n1")  # Ray ends it: it was called dead
            ray_world.cluster.forget_raylet("n1")
            ray_world.cluster.start_raylet("n1")
            await told_of(told, "n1", alive=True)
            assert processes_of(launch) == pids
            assert not lost(told)
            await ended_by_us(told, launch)

    run(story())


def test_the_head_is_restarted_and_nothing_happens(ray_world: RayWorld) -> None:
    async def story() -> None:
        async with opened(ray_world) as told:
            engine: Any = told.engine
            launch = await started(told, ray_world, TICKS, (0,), (0,), (0,), (0,))
            pids, mark = processes_of(launch), len(told.heard)
            ray_world.cluster.kill_gcs()
            other = await started(told, ray_world, TICKS, (1,))  # without a head
            ray_world.cluster.start_gcs()
            seen = engine.head_heard_s
            await told.until(lambda: engine.head_heard_s > seen, "news of nodes")
            await asyncio.sleep(2)
            assert not [one for one in told.heard[mark:] if isinstance(one, NodeChange) and not one.facts.alive]
            assert processes_of(launch) == pids
            await ended_by_us(told, launch)
            await ended_by_us(told, other)

    run(story())


def test_a_machine_that_is_gone_is_lost_when_its_lease_is_over_and_not_before(short_lease: RayWorld) -> None:
    ray_world = short_lease

    async def story() -> None:
        async with opened(ray_world) as told:
            launch = await started(told, ray_world, TICKS, (0,), (0,))
            begun_s = time.monotonic()
            ray_world.crash("n2")
            end = await told.ended(launch, "n2")
            took_s = time.monotonic() - begun_s
            print(f"machine gone: lost after {took_s:.2f} s")
            assert (end.cause, end.state) == ("lost", "exited")
            assert "silent" in end.detail
            assert took_s > KILL_AT * SHORT_LEASE_S
            await told.engine.kill(launch.job_id, 1)
            await told.ended(launch, "n1")
            await told.engine.forget(launch.job_id, 1)
            ray_world.cluster.start_raylet("n2")
            await told_of(told, "n2", alive=True)

    run(story())


def test_a_controller_that_starts_while_a_machine_is_gone_finds_out_what_was_there(short_lease: RayWorld) -> None:
    ray_world = short_lease

    async def story() -> None:
        async with opened(ray_world) as told:
            launch = await started(told, ray_world, TICKS, (), (0,))
        ray_world.crash("n2")
        async with opened(ray_world, wait=False) as told:
            end = await told.ended(launch, "n2")
            assert end.cause == "lost"
            assert [one.job_id for one in await told.engine.reports() if one.cause == "lost"] == [launch.job_id]
            await told.engine.forget(launch.job_id, 1)
            ray_world.cluster.start_raylet("n2")
            await told.all_up()

            def own_word() -> bool:  # from its files
                found = told.latest(launch.job_id, 1, "n2")
                return found is not None and found.state == "exited" and "supervisor was killed" in found.detail

            await told.until(own_word, "its own word")
            await told.engine.forget(launch.job_id, 1)

    run(story())


def test_cut_off_from_controller_and_head_a_node_stops_its_jobs_in_time(short_lease: RayWorld) -> None:
    ray_world = short_lease

    async def story() -> None:
        async with opened(ray_world) as told:
            saves = await started(told, ray_world, SAVES, (0,), grace_s=60.0)
            deaf = "import signal\nsignal.signal(15, signal.SIG_IGN)\n" + TICKS
            stubborn = await started(told, ray_world, deaf, (1,), grace_s=60.0)
            elsewhere = await started(told, ray_world, TICKS, (), (0,))
            begun_s = time.monotonic()
        ray_world.cluster.kill_raylet("n1")  # with it the actor goes, and so does the word of the head
        while processes_of(saves):
            assert time.monotonic() < begun_s + KILL_AT * SHORT_LEASE_S + PATIENCE_S
            await asyncio.sleep(0.05)
        assert time.monotonic() - begun_s > SHORT_LEASE_S / 2  # the death of Ray alone is no reason
        while processes_of(stubborn):
            assert time.monotonic() < begun_s + KILL_AT * SHORT_LEASE_S + PATIENCE_S
            await asyncio.sleep(0.05)
        print(f"cut off: fenced after {time.monotonic() - begun_s:.2f} s")
        await asyncio.sleep(SHORT_LEASE_S / 2)
        assert len(processes_of(elsewhere)) == 1  # the head still calls n2 alive: no controller, and no harm
        async with opened(ray_world, wait=False) as told:
            end = await told.ended(saves)
            assert (end.cause, end.codes) == ("exit", {0: 85})
            end = await told.ended(stubborn)
            assert end.cause == "lost"
            assert "cut off: no word from the controller" in end.detail
            ray_world.cluster.start_raylet("n1")
            await told.all_up()
            for launch in (saves, stubborn):
                await told.engine.forget(launch.job_id, 1)
            await ended_by_us(told, elsewhere)

    run(story())


def test_what_a_frozen_agent_has_left_is_gone_before_it_is_told_as_lost_and_starts_elsewhere(
    short_lease: RayWorld,
) -> None:
    """The worst case: nobody on the node can stop the job but its own supervisor."""
    ray_world = short_lease

    async def story() -> None:
        async with opened(ray_world) as told:
            launch = await started(told, ray_world)
            agent = ray_world.agent("n1")
            assert agent is not None
            os.kill(agent, signal.SIGSTOP)
            ray_world.cluster.kill_raylet("n1")
            try:
                seen_s, told_s = await order_of_ends(told, launch, "n1")
                print(f"the last process was seen {told_s - seen_s:.2f} s before it was told as lost")
                assert seen_s < told_s
                assert [one.cause for one in lost(told) if one.job_id == launch.job_id] == ["lost"]
                again = replace(launch, incarnation=2, parts=(Part("n2", (0,)),))
                await told.engine.launch(again)
                await told.printed(again, "ready")
            finally:
                os.kill(agent, signal.SIGCONT)  # and now it wakes up
                ray_world.cluster.start_raylet("n1")
            await told_of(told, "n1", alive=True)
            assert not processes_of(launch)
            assert len(processes_of(again)) == 1
            await told.engine.forget(launch.job_id, 1)
            await ended_by_us(told, again)

    run(story())


def test_another_machine_of_the_same_name_waits_until_the_lease_of_the_old_one_is_over(short_lease: RayWorld) -> None:
    ray_world = short_lease

    async def story() -> None:
        async with opened(ray_world) as told:
            launch = await started(told, ray_world)
            old = ray_world.agent("n1")
            assert old is not None
            os.kill(old, signal.SIGSTOP)  # cut off, as far as we can tell
            begun_s = time.monotonic()
            ray_world.cluster.kill_raylet("n1")
            elsewhere = ray_world.folder("n1").rename(ray_world.folder("n1").with_name("old-n1"))
            ray_world.cluster.start_raylet("n1")
            await told.until(lambda: facts(told, "n1").alive and facts(told, "n1").pid != old, "the new agent")
            assert time.monotonic() - begun_s > KILL_AT * SHORT_LEASE_S  # nothing of the old one can be alive
            processes.kill_all([*processes_of(launch), old])
            assert elsewhere.is_dir()
            await told.engine.forget(launch.job_id, 1)  # or the next controller waits for its lease, too

    run(story())


def test_gpus_of_others_are_left_to_them_and_ours_are_kept_from_them(ray_world: RayWorld) -> None:
    async def story() -> None:
        async with opened(ray_world) as told:
            await told.until(lambda: ray_world.cluster.free_gpus("n3") == 0, "all GPUs reserved")
            await told.engine.retire()  # type: ignore[attr-defined]
            await told.until(lambda: ray_world.cluster.free_gpus("n3") == 8, "all GPUs given back")
            await told.until(lambda: not ray_world.cluster.leftovers(), "nothing left")
        held = ray_world.cluster.hold_gpus("n3", 3)
        async with opened(ray_world) as told:

            def taken() -> list[int]:
                return [gpu.index for gpu in facts(told, "n3").gpus if gpu.taken]

            await told.until(lambda: taken() == held, f"GPUs {held} told as taken")
            assert {gpu.taken for gpu in facts(told, "n3").gpus} == {"", "other work in Ray"}
            launch = await started(told, ray_world, TICKS, (), (), (5,))
            ray_world.cluster.let_go()
            await told.until(lambda: taken() == [], "no GPU taken")
            await told.until(lambda: ray_world.cluster.free_gpus("n3") == 0, "all GPUs reserved")
            await ended_by_us(told, launch)

    run(story())


def test_an_agent_that_nobody_needs_goes(ray_world: RayWorld) -> None:
    async def story() -> None:
        told = Told(ray_world, ray_world.engine(alone_s=5.0))
        await told.engine.open(told.listen)
        await told.engine.retire()  # type: ignore[attr-defined]
        await told.engine.close()
        told = Told(ray_world, ray_world.engine(alone_s=5.0))
        await told.engine.open(told.listen)
        await told.all_up()
        busy = await started(told, ray_world)
        await told.engine.close()
        await told.until(lambda: not ray_world.agent("n2"), "an idle agent to go")
        await told.until(lambda: not ray_world.actor("n2"), "its actor to go")
        await told.until(lambda: ray_world.cluster.free_gpus("n2") == 8, "its GPUs to be free")
        assert ray_world.agent("n1")
        assert len(processes_of(busy)) == 1
        async with opened(ray_world) as told:
            await ended_by_us(told, busy)

    run(story())


def test_nodes_need_nothing_but_ray_and_a_head_without_storage_costs_no_job(tmp_path: Path) -> None:
    """Our code travels. A head that has forgotten everything ends the driver and Ray's nodes; jobs go on."""
    require("ray")

    async def story(world: RayWorld) -> None:
        async with opened(world) as told:
            engine: Any = told.engine
            launch = await started(told, world, TICKS, (3,))
            assert (world.cluster.folder / "nodes" / "code").is_dir()
            pids, driver = processes_of(launch), engine.driver.pid
            world.cluster.restart_gcs()
            await told.until(lambda: engine.driver.pid != driver, "the driver to be ended by Ray, and another")
            other = await started(told, world, TICKS, (4,))  # and jobs start: who carries them out is our agent
            assert processes_of(launch) == pids
            assert not lost(told)
            await ended_by_us(told, launch)
            await ended_by_us(told, other)

    with RayWorld(tmp_path, racks={"n1": ""}, storage="memory", strange=True) as world:
        run(story(world))
