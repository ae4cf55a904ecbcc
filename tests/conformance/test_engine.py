"""What every engine does in the same way: starts whole gangs, passes notices on, kills, reports, outlives controllers.

One set of tests for local, Slurm and Ray. Nothing here knows which of them it talks to.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from kit.engine_worlds import GPUS, World, fresh_job, opened, processes_of, python
from kit.scripts import SAVES
from kit.waiting import PATIENCE_S, until_async
from thebes.protocol.contract import Launch, Refused

NEVER_ENDS = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)"
WORDS = """
import os
names = ("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK CUDA_VISIBLE_DEVICES THEBES_JOB_ID THEBES_INCARNATION "
         "THEBES_GPUS THEBES_NODES THEBES_NODE_NAMES THEBES_RESUME SECRET").split()
print(*(os.environ.get(name, "-") for name in names))
"""
MEET = """
import os, socket, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    server = socket.create_server(where)
    print(sorted(int(server.accept()[0].recv(10)) for _ in range(world - 1)), flush=True)
else:
    for _ in range(12000):
        try:
            socket.create_connection(where).sendall(str(rank).encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
"""


def run(story) -> None:  # type: ignore[no-untyped-def]
    asyncio.run(story)


def test_it_tells_its_nodes_and_their_gpus(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            nodes = {facts.name: facts for facts in await told.engine.nodes()}
            assert sorted(nodes) == sorted(world.nodes)
            for facts in nodes.values():
                assert [gpu.index for gpu in facts.gpus] == list(range(GPUS))
                assert "checkpoint" in facts.mechanisms
                assert not facts.drained
                assert all(gpu.healthy and not gpu.taken for gpu in facts.gpus)

    run(story())


def test_a_job_runs_on_the_gpus_it_was_given_and_its_end_is_told(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = python(world, WORDS, (3, 5), env={"SECRET": "x y"}, ranks_per_node=1)
            await told.engine.launch(launch)
            end = await told.ended(launch)
            assert (end.cause, end.codes) == ("exit", {0: 0})
            assert end.started_s is not None
            assert end.exited_s is not None
            assert end.exited_s >= end.started_s
            words = (await told.log(launch)).split()
            assert words == [
                "0",
                "1",
                "0",
                "1",
                "0",
                "3,5",
                launch.job_id,
                "1",
                "2",
                "1",
                world.nodes[0],
                "0",
                "x",
                "y",
            ]
            data, after = await told.engine.read_log(launch.job_id, 1, 0, -4, 100)
            assert (data, after) == (b"x y\n", len(await told.log(launch)))
            with pytest.raises(FileNotFoundError):
                await told.engine.read_log(launch.job_id, 1, 7, 0, 100)
            assert not processes_of(launch)

    run(story())


@pytest.mark.parametrize(("script", "codes"), [("raise SystemExit(3)", {0: 3}), ("import os; os.kill(0, 9)", {0: -9})])
def test_how_it_failed_is_told(world: World, script: str, codes: dict[int, int]) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = python(world, script)
            await told.engine.launch(launch)
            end = await told.ended(launch)
            assert (end.cause, end.codes) == ("exit", codes)

    run(story())


def test_a_program_or_folder_that_is_not_there_is_told(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            missing = replace(python(world, ""), command=("no-such-program",))
            astray = replace(python(world, ""), workdir="/no/such/folder")
            for launch, words in ((missing, "no-such-program"), (astray, "/no/such/folder")):
                await told.engine.launch(launch)
                end = await told.ended(launch)
                assert end.cause == "launch-failed"
                assert words in end.detail

    run(story())


def test_a_notice_reaches_the_job_and_it_saves(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = python(world, SAVES)
            await told.engine.launch(launch)
            await told.printed(launch, "ready")
            await told.engine.notice(launch.job_id, 1, 20.0)
            with suppress(Refused):  # it may have left already
                await told.engine.notice(launch.job_id, 1, 20.0)  # again: no harm, and no more time
            end = await told.ended(launch)
            assert (end.cause, end.codes) == ("exit", {0: 85})
            assert "saved" in await told.log(launch)

    run(story())


def test_who_does_not_heed_the_notice_is_killed(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = python(world, "import signal\nsignal.signal(15, signal.SIG_IGN)\n" + NEVER_ENDS)
            await told.engine.launch(launch)
            await told.printed(launch, "ready")
            await told.engine.notice(launch.job_id, 1, 0.5)
            end = await told.ended(launch)
            assert (end.cause, end.codes) == ("killed", {0: -9})
            assert not processes_of(launch)

    run(story())


@pytest.mark.parametrize("verb", ["terminate", "kill"])
def test_what_nobody_wants_any_more_is_gone_with_all_that_it_started(world: World, verb: str) -> None:
    async def story() -> None:
        async with opened(world) as told:
            daemon = "import os\nif os.fork() == 0: os.setsid()\n" + NEVER_ENDS
            launch = python(world, daemon, (0, 1), (0, 1))
            await told.engine.launch(launch)
            for rank in range(4):
                await told.printed(launch, "ready", rank)
            assert len(processes_of(launch)) >= 8
            if verb == "kill":
                await told.engine.kill(launch.job_id, 1)
            else:
                await told.engine.terminate(launch.job_id, 1, 5.0)
            for part in launch.parts:
                assert (await told.ended(launch, part.node)).cause == "killed"
            assert not processes_of(launch)

    run(story())


def test_the_ranks_of_an_uneven_gang_find_each_other_in_the_order_of_the_parts(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = python(world, WORDS + MEET, (1, 6), (2,), (0, 3, 4))
            await told.engine.launch(launch)
            ends = [await told.ended(launch, part.node) for part in launch.parts]
            assert [end.codes for end in ends] == [{0: 0, 1: 0}, {2: 0}, {3: 0, 4: 0, 5: 0}]
            assert (await told.log(launch, 0)).splitlines()[-1] == "[1, 2, 3, 4, 5]"
            for rank, local, size, node, gpus in ((1, 1, 2, 0, "1,6"), (2, 0, 1, 1, "2"), (5, 2, 3, 2, "0,3,4")):
                words = (await told.log(launch, rank)).split()
                assert words[:6] == [str(rank), "6", str(local), str(size), str(node), gpus]
                assert words[10] == ",".join(world.nodes[:3])

    run(story())


def test_one_part_that_cannot_start_fails_the_whole_gang(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = replace(python(world, "", (0,), (0,)), command=("no-such-program",))
            await told.engine.launch(launch)
            for part in launch.parts:
                assert (await told.ended(launch, part.node)).cause == "launch-failed"
            assert not processes_of(launch)

    run(story())


def test_a_launch_repeated_is_one_launch_and_an_older_incarnation_is_refused(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            job = fresh_job()
            second = python(world, NEVER_ENDS, job_id=job, incarnation=2)
            await asyncio.gather(told.engine.launch(second), told.engine.launch(second))
            await told.report(second, "running")
            await told.engine.launch(second)
            assert len(processes_of(second)) == 1
            with pytest.raises(Refused, match="older"):
                await told.engine.launch(replace(second, incarnation=1))
            third = replace(second, incarnation=3)
            await told.engine.launch(third)  # makes sure that the second is gone
            await told.report(third, "running")
            assert not processes_of(second)
            assert len(processes_of(third)) == 1
            await told.engine.kill(job, 3)
            await told.ended(third)

    run(story())


def test_what_was_killed_before_it_had_started_never_starts(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = python(world, NEVER_ENDS)
            await told.engine.kill(launch.job_id, 1)
            with pytest.raises(Refused):
                await told.engine.launch(launch)
            assert not processes_of(launch)
            again = replace(launch, incarnation=2)
            await told.engine.launch(again)
            await told.report(again, "running")
            await told.engine.kill(launch.job_id, 2)
            await told.ended(again)

    run(story())


def test_jobs_outlive_their_controller_and_the_next_one_finds_them(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            runs, ends = (
                python(world, SAVES, (0,), (0,)),
                python(world, "import time; time.sleep(1); raise SystemExit(4)", (1,)),
            )
            await told.engine.launch(runs)
            await told.engine.launch(ends)
            for rank in (0, 1):
                await told.printed(runs, "ready", rank)
            first = set(processes_of(runs))
        await until_async(lambda: not processes_of(ends), "it ends while there is no controller", every_s=0.05)
        async with opened(world) as told:
            known = {(r.job_id, r.node): r for r in await told.engine.reports()}
            for part in runs.parts:
                if (runs.job_id, part.node) not in known or known[runs.job_id, part.node].state != "running":
                    await told.report(runs, "running", part.node)
            assert set(processes_of(runs)) == first
            end = known.get((ends.job_id, world.nodes[0]))
            if end is None or end.state != "exited":  # its process was gone, and that not written down yet
                end = await told.ended(ends)
            assert (end.cause, end.codes) == ("exit", {0: 4})
            await told.engine.notice(runs.job_id, 1, 20.0)
            for part in runs.parts:
                assert set((await told.ended(runs, part.node)).codes.values()) == {85}

    run(story())


def test_what_is_forgotten_is_not_told_again_and_its_log_stays(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = python(world, "print('hello')")
            await told.engine.launch(launch)
            await told.ended(launch)
            assert launch.job_id in {report.job_id for report in await told.engine.reports()}
            await told.engine.forget(launch.job_id, 1)
            await told.engine.forget(launch.job_id, 1)
            assert launch.job_id not in {report.job_id for report in await told.engine.reports()}
        async with opened(world) as told:
            assert launch.job_id not in {report.job_id for report in await told.engine.reports()}
            assert await told.log(launch) == "hello\n"

    run(story())


def test_progress_and_checkpoints_are_told(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            script = """
import time
from thebes import job
for step in range(1, 6):
    job.report(step)
    time.sleep(0.1)
job.atomic_save(lambda file: file.write(b"5"), job.checkpoint_dir() / "five")
job.checkpointed(5, job.checkpoint_dir() / "five")
while not job.should_stop(): time.sleep(0.05)
job.exit_preempted()
"""
            folder = world.shared / "jobs" / "c" / "checkpoint"
            launch = python(world, script, checkpoint_dir=str(folder))
            launch = replace(launch, command=(launch.command[0], "-c", script))
            await told.engine.launch(launch)

            def saved() -> object:
                found = told.latest(launch.job_id, 1, world.nodes[0])
                return found if found and found.checkpoint_step == 5 and found.step == 5 else None

            report = await told.until(saved, "a checkpoint")
            assert report.checkpoint_path == str(folder / "five")
            assert report.first_step_s is not None
            assert abs(report.first_step_s - report.started_s) < PATIENCE_S  # on our clock, whichever machine it was
            await told.engine.notice(launch.job_id, 1, 20.0)
            end = await told.ended(launch)
            assert (end.codes, end.acknowledged) == ({0: 85}, True)

    run(story())


def test_a_time_limit_ends_it(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = python(world, NEVER_ENDS, limit_s=0.5, grace_s=0.5)
            await told.engine.launch(launch)
            assert (await told.ended(launch)).cause == "timeout"

    run(story())


def test_freezing_is_done_or_refused_and_never_half_done(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = python(world, NEVER_ENDS, (0,), (0,))
            await told.engine.launch(launch)
            for rank in (0, 1):
                await told.printed(launch, "ready", rank)
            offered = {facts.name: facts.mechanisms for facts in await told.engine.nodes()}
            if all("freeze" in offered[part.node] for part in launch.parts):
                await told.engine.suspend(launch.job_id, 1, "freeze")
                for part in launch.parts:
                    assert (await told.report(launch, "frozen", part.node)).state == "frozen"
                await told.engine.resume(launch.job_id, 1, "freeze")
            else:
                with pytest.raises(Refused):
                    await told.engine.suspend(launch.job_id, 1, "freeze")
            for part in launch.parts:
                await told.report(launch, "running", part.node)
            with pytest.raises(Refused):
                await told.engine.suspend(launch.job_id, 1, "cuda")  # there is no driver that could
            await told.engine.kill(launch.job_id, 1)
            for part in launch.parts:
                await told.ended(launch, part.node)

    run(story())


def test_many_at_once(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            parts = [(node, gpu) for node in world.nodes for gpu in range(GPUS)]
            launches: list[Launch] = []
            for node, gpu in parts:
                launch = python(world, "print('done')", (gpu,))
                launches.append(replace(launch, parts=(replace(launch.parts[0], node=node),)))
            await asyncio.gather(*(told.engine.launch(launch) for launch in launches))
            for launch in launches:
                assert (await told.ended(launch)).codes == {0: 0}
            for launch in launches:
                await told.engine.forget(launch.job_id, 1)

    run(story())


def test_orders_to_those_who_are_not_there_are_refused(world: World) -> None:
    async def story() -> None:
        async with opened(world) as told:
            launch = python(world, "pass")
            await told.engine.launch(launch)
            await told.ended(launch)
            for order in (told.engine.notice, told.engine.terminate):
                with pytest.raises(Refused):
                    await order(launch.job_id, 1, 1.0)
            await told.engine.kill(launch.job_id, 1)  # it is dead: done
            with pytest.raises(Refused, match="no node"):
                await told.engine.launch(replace(python(world, ""), parts=(replace(launch.parts[0], node="nowhere"),)))

    run(story())
