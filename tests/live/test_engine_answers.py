"""What engine and nodes answer, in good time, late or with a refusal; and what then becomes of the job."""

from __future__ import annotations

import asyncio
import io
import tarfile
from dataclasses import replace

import pytest

from kit.cluster_in_a_test import ADMIN, live_cluster
from kit.waiting import until_async
from thebes.jobspec.spec import JobSpec
from thebes.live.endings import MAX_LOSSES
from thebes.model.errors import UserError
from thebes.protocol.contract import Launch, Refused


def run(story):
    asyncio.run(story)


def told(cluster, job):
    """The kinds of events of a job, in order, but for changes of its state."""
    return [event.kind for event in cluster.events() if event.job_id == job and event.kind != "state"]


async def ask_for(cluster, gpus=1, **fields):
    """Submit without waiting until all is quiet."""
    spec = JobSpec(command=["train"], gpus=gpus, workdir="/", **fields)
    return (await cluster.controller.submit(spec, ADMIN))[0]


async def called(cluster, *call):
    await until_async(lambda: call in cluster.engine.calls, f"the engine is asked: {call}")


# -- a gang ends part by part


def test_a_part_that_fails_takes_the_rest_of_the_gang_with_it_and_is_the_one_to_be_named(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(8)
            c.engine.end_part(job, 1, "n1", 3)
            await c.quiet()
            assert ("kill", job, 1) in c.engine.calls
            assert ("notice", job, 1) not in c.engine.calls  # what would it save
            row = c.row(job)
            assert (row.state, row.exit_code, row.reason) == ("failed", 3, "rank 4 exited with code 3")
            [broken] = [event for event in c.events() if event.kind == "gang-broken"]
            assert broken.node == "n1"
            assert not c.controller.core.on_gpu

    run(story())


def test_a_part_that_is_done_waits_for_the_others_whatever_its_node_repeats(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(8)
            running = c.engine.living[job, 1].reports["n0"]
            c.engine.end_part(job, 1, "n0", 0)
            c.engine.listener(replace(running, step=3))  # told before, and heard after
            await c.quiet()
            assert c.state(job) == "running"
            assert c.controller.live(job)["step"] is None
            c.engine.end_part(job, 1, "n1", 0)
            await c.quiet()
            assert c.state(job) == "completed"

    run(story())


# -- suspended and resumed, or not


def test_a_job_that_cannot_be_brought_back_is_killed_and_starts_from_its_checkpoint(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            low = await c.submit(8, mechanism="freeze")
            c.engine.checkpointed(low, 1, 17)
            high = await c.submit(8, priority=5)
            assert c.state(low) == "suspended"
            c.engine.refuse_resume = True
            c.engine.end(high, 1, 0)
            await c.quiet()
            assert ("kill", low, 1) in c.engine.calls
            assert c.engine.living[low, 2].launch.resume_from == "/ckpt/17"
            row = c.row(low)
            assert (row.state, row.incarnation, row.losses, row.failures) == ("running", 2, 0, 0)
            [refused] = [event for event in c.events() if event.kind == "resume-refused"]
            assert refused.detail == {"mechanism": "freeze", "reason": "its GPU has gone"}

    run(story())


def test_what_cannot_be_brought_back_and_is_cancelled_meanwhile_does_not_start_again(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            low = await c.submit(8, mechanism="freeze")
            high = await c.submit(8, priority=5)
            c.engine.late["resume"] = asyncio.Event()
            c.engine.end(high, 1, 0)
            await called(c, "resume", low, 1)
            await c.controller.act("cancel", low, ADMIN)
            c.engine.late["resume"].set()
            await c.quiet()
            assert c.state(low) == "cancelled"
            assert "resumed" not in told(c, low)
            assert not c.controller.core.on_gpu

    run(story())


def test_a_job_cancelled_while_it_is_being_suspended_is_not_kept_suspended(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            low = await c.submit(8, mechanism="freeze")
            c.engine.late["suspend"] = asyncio.Event()
            high = await ask_for(c, 8, priority=5)
            await called(c, "suspend", low, 1)
            await c.controller.act("cancel", low, ADMIN)
            c.engine.late["suspend"].set()
            await c.quiet()
            assert (c.state(low), c.state(high)) == ("cancelled", "running")
            assert "suspended" not in told(c, low)

    run(story())


def test_a_job_given_its_gpus_back_before_they_are_clear_is_resumed_when_they_are(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            low = await c.submit(8, mechanism="freeze")
            high = await c.submit(8, priority=5)
            await c.controller.act("hold", high, ADMIN)
            await c.quiet()
            assert (c.state(low), c.state(high)) == ("starting", "preempting")
            assert ("resume", low, 1) not in c.engine.calls
            c.engine.end(high, 1, 85)
            await c.quiet()
            assert (c.state(low), c.state(high)) == ("running", "held")
            assert ("resume", low, 1) in c.engine.calls

    run(story())


def test_the_driver_suspends_single_processes_and_gangs_save_themselves(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 2}) as c:
            c.engine.mechanisms = ("checkpoint", "cuda")
            c.engine.tell_of("n0")
            single, other = await c.submit(1, mechanism="cuda"), await c.submit(1, mechanism="cuda")
            gang = await c.submit(2, mechanism="cuda", priority=1)
            assert [c.state(job) for job in (single, other, gang)] == ["suspended", "suspended", "running"]
            await c.submit(2, priority=5)
            assert c.state(gang) == "preempting"
            assert ("notice", gang, 1) in c.engine.calls

    run(story())


def test_what_the_driver_has_suspended_cannot_move_and_is_started_again_elsewhere(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 1, "n1": 1}) as c:
            c.engine.mechanisms = ("checkpoint", "cuda")
            for node in ("n0", "n1"):
                c.engine.tell_of(node)
            low = await c.submit(1, mechanism="cuda")
            other = await c.submit(1, priority=1)
            before = c.engine.living[low, 1].launch.parts
            await c.submit(1, priority=5)
            assert c.state(low) == "suspended"
            c.engine.end(other, 1, 0)
            await c.quiet()
            assert ("kill", low, 1) in c.engine.calls  # it has no memory on a GPU to save
            assert ("notice", low, 1) not in c.engine.calls
            assert (c.state(low), c.incarnation(low)) == ("running", 2)
            assert c.engine.living[low, 2].launch.parts != before

    run(story())


# -- launches that go wrong


def test_an_engine_that_fails_costs_an_incarnation_and_too_many_in_a_row_the_job(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 2}) as c:
            c.engine.faults["launch"] = RuntimeError("out of order")
            job = await ask_for(c)
            await until_async(lambda: c.row(job).losses >= 2, "it is tried again")
            del c.engine.faults["launch"]
            await c.quiet()
            assert c.state(job) == "running"
            c.engine.faults["launch"] = RuntimeError("out of order")
            other = await c.submit(1)
            row = c.row(other)
            assert (row.state, row.losses, row.incarnation) == ("failed", MAX_LOSSES, MAX_LOSSES)
            assert row.reason == f"it was lost {MAX_LOSSES} times in a row: RuntimeError: out of order"
            assert c.state(job) == "running"

    run(story())


def test_a_launch_refused_after_its_end_was_told_is_lost_once(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 1}) as c:
            launch = c.engine.launch

            async def ends_at_once(what: Launch) -> None:
                await launch(what)
                c.engine.launch = launch
                c.engine.end(what.job_id, what.incarnation, -9, cause="lost")
                await until_async(lambda: c.row(what.job_id).losses, "the end is heard of")
                raise Refused("it ended while it was being started")

            c.engine.launch = ends_at_once
            job = await c.submit(1)
            row = c.row(job)
            assert (row.state, row.losses, row.incarnation) == ("running", 1, 2)

    run(story())


def test_a_launch_refused_when_one_part_had_ended_tells_how_that_one_ended(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            launch = c.engine.launch

            async def half(what: Launch) -> None:
                await launch(what)
                c.engine.end_part(what.job_id, what.incarnation, "n0", 7)
                del c.engine.living[what.job_id, what.incarnation]
                raise Refused("n1 would not")

            c.engine.launch = half
            job = await c.submit(8)
            row = c.row(job)
            assert (row.state, row.exit_code, row.reason) == ("failed", 7, "rank 0 exited with code 7")

    run(story())


def test_a_work_directory_that_has_gone_is_named_as_the_reason(tmp_path):
    async def story():
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            tar.addfile(tarfile.TarInfo("train.py"))

        async def blocks():
            yield packed.getvalue()

        async with live_cluster(tmp_path) as c:
            digest, _ = await c.controller.snapshots.receive(blocks())
            job = await c.submit(1, snapshot=digest)
            assert c.state(job) == "running"
            assert (tmp_path / "jobs" / job / "snapshot" / "train.py").exists()
            held = await c.submit(1, snapshot=digest, hold=True)
            c.controller.snapshots.path(digest).unlink()
            await c.controller.act("release", held, ADMIN)
            await c.quiet()
            row = c.row(held)
            assert row.state == "failed"
            assert row.reason.endswith(f"snapshot {digest[:12]} is not here")
            with pytest.raises(UserError, match="the snapshot named was not uploaded"):
                await c.submit(1, snapshot=digest)

    run(story())
