"""A controller's life: how it starts, what it writes down now and then, how it stops, and what it refuses."""

from __future__ import annotations

import asyncio

import pytest

from kit.cluster_in_a_test import ADMIN, live_cluster
from kit.waiting import until_async
from thebes import store as db
from thebes.jobspec.spec import JobSpec
from thebes.live import controller as controller_module
from thebes.live import requests
from thebes.live.config import save
from thebes.live.replay import replay_store
from thebes.live.stored import newest_job
from thebes.model.errors import UserError


def run(story):
    asyncio.run(story)


def kinds(cluster, job):
    return [event.kind for event in cluster.events() if event.job_id == job]


# -- starts


def test_a_store_from_a_backup_does_not_give_the_number_of_a_later_job_again(tmp_path):
    for name in ("7", "41_3", "lost+found"):
        (tmp_path / "jobs" / name).mkdir(parents=True)

    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            assert int(job) == 42  # the folder of 41 has the checkpoints and logs of another job
            assert c.state(job) == "running"

    run(story())
    assert newest_job(tmp_path / "nowhere") == 0


def test_an_engine_whose_nodes_never_go_on_alone_has_nothing_to_wait_for(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            await c.controller.shutdown("keep")
            c.engine.unparked = None  # as the local engine, which does not know the call
            await c.close()
            await c.open()
            assert c.state(job) == "running"
            with c.store.read() as connection:
                assert db.get_meta(connection, "left") == ""

    run(story())


# -- goes on


def test_the_ledger_is_written_down_now_and_then_and_the_next_controller_begins_there(tmp_path, monkeypatch):
    monkeypatch.setattr(controller_module, "SNAPSHOT_EVERY", 10)

    async def story():
        async with live_cluster(tmp_path) as c:
            save(c.instance.config, c.config)
            for _ in range(6):
                job = await c.submit(8)
                await c.pass_time(10)
                c.engine.end(job, 1, 0)
                await c.quiet()
            last, waiting = await c.submit(8), await c.submit(8)
            with c.store.read() as connection:
                written = list(db.journal_since_snapshot(connection))
            assert written[0].kind == "snapshot"
            assert written[0].seq > 10
            assert len(written) <= 20
            before = c.controller.core.ledger.snapshot(0.0)
            await c.crash()
            replayed = replay_store(tmp_path)
            assert len(replayed) >= 8
            assert all(one.same for one in replayed)
            await c.open()
            assert c.controller.core.ledger.snapshot(0.0) == before
            assert (c.state(last), c.state(waiting)) == ("running", "queued")

    run(story())


def test_work_in_the_background_that_fails_ends_the_controller_and_the_next_one_goes_on(tmp_path):
    """A job whose arrival depends on it would never be seen otherwise."""

    async def fails() -> None:
        raise OSError("the store cannot be read")

    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            c.controller.background(fails())
            with pytest.raises(OSError, match="the store cannot be read"):
                await asyncio.wait_for(c.controller.ended(), 60)
            await c.crash()
            await c.open()
            assert c.state(job) == "running"

    run(story())


def test_a_job_that_waited_too_long_is_promoted_and_told_so(tmp_path):
    async def story():
        settings = ["queue_limits=10", "promote_knob=1", "promote_floor_s=0"]
        async with live_cluster(tmp_path, {"n0": 1}, policy="tiresias-l", policy_settings=settings) as c:
            old = await c.submit(1, mechanism="freeze")
            await c.pass_time(20)  # it has had more than the first queue gives
            young = [await c.submit(1, mechanism="freeze") for _ in range(3)]  # somebody always has had less
            assert (c.state(old), c.state(young[0])) == ("suspended", "running")
            await c.pass_time(19)
            assert (c.state(old), c.state(young[1])) == ("suspended", "running")
            assert "promoted" not in kinds(c, old)
            await c.pass_time(2)  # it has waited for as long as it had run
            assert "promoted" in kinds(c, old)
            assert not [job for job in young if "promoted" in kinds(c, job)]

    run(story())


# -- stops


def test_a_cluster_that_is_killed_keeps_its_jobs_for_the_next_start_and_takes_no_new_ones(tmp_path):
    async def story():
        retired = []

        async def retire() -> None:
            retired.append(len(c.engine.living))

        async with live_cluster(tmp_path) as c:
            c.engine.retire = retire
            running, saving = await c.submit(4), await c.submit(4)
            await c.controller.act("preempt", saving, ADMIN)  # asked to save, and killed while it does
            done = await c.controller.shutdown("kill")
            assert sorted(done["stopped"]) == [running, saving]
            assert {("kill", running, 1), ("kill", saving, 1)} <= set(c.engine.calls)
            assert retired == [0]  # when nothing is left, not before
            with pytest.raises(UserError, match="the cluster is going down") as told:
                await c.controller.submit(JobSpec(command=["x"], workdir="/"), ADMIN)
            assert "thebes up" in told.value.hint
            assert c.controller.status()["closing"]
            await c.close()
            await c.open()
            assert [(c.state(job), c.row(job).failures) for job in (running, saving)] == [("running", 0)] * 2

    run(story())


def test_a_controller_that_closes_does_not_wait_for_a_node_that_cannot_be_reached(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            c.engine.unreachable = True
            (job,) = await c.controller.submit(JobSpec(command=["x"], workdir="/"), ADMIN)
            await until_async(lambda: ("launch", job, 1) in c.engine.calls, "its launch is tried")
            await asyncio.wait_for(c.close(), 30)
            assert not c.controller.dispatch.tasks
            c.engine.unreachable = False
            await c.open()
            assert (c.state(job), c.incarnation(job)) == ("running", 1)

    run(story())


# -- what users ask of jobs


def test_of_an_array_everything_is_done_that_can_be_and_the_rest_is_told_only_if_nothing_could(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 1}) as c:
            first = await c.submit(1, array=[0, 1, 2])
            array = first.partition("_")[0]
            await c.controller.act("hold", f"{array}_2", ADMIN)
            assert await c.controller.act("hold", array, ADMIN) == [f"{array}_0", f"{array}_1"]
            with pytest.raises(UserError, match=f"job {array}_2 is held already"):
                await c.controller.act("hold", array, ADMIN)

    run(story())


def test_an_order_that_does_not_exist_is_refused(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            with pytest.raises(UserError, match="there is no 'explode'") as told:
                await c.controller.act("explode", job, ADMIN)
            assert "requeue" in told.value.hint
            assert c.state(job) == "running"

    run(story())


def test_a_job_that_ends_while_it_is_requeued_once_more_is_not_run_twice(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            c.engine.end(job, 1, 0)
            await c.quiet()
            as_it_was = c.row(job)
            await c.controller.act("requeue", job, ADMIN)
            await c.quiet()
            refused: list[str] = []

            def again(now_s: float) -> None:
                try:
                    requests._act_on(c.controller, "requeue", as_it_was, "root", now_s)
                except UserError as error:
                    refused.append(error.message)

            c.engine.end(job, 2, 0)
            c.controller.tell(again)  # asked when it had ended once, heard when its second end is not written yet
            await c.quiet()
            assert refused == [f"job {job} has just ended"]
            assert (c.state(job), c.row(job).incarnation) == ("completed", 2)

    run(story())


# -- endings that reach others


def test_a_suspended_job_that_dies_waits_again_and_takes_nothing_from_whom_runs_in_its_place(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            low = await c.submit(8, mechanism="freeze")
            high = await c.submit(8, priority=5)
            c.engine.end(low, 1, -9, cause="lost")
            await c.quiet()
            assert (c.state(low), c.row(low).losses, c.state(high)) == ("queued", 1, "running")
            assert {job for holders in c.controller.core.on_gpu.values() for job, _ in holders} == {high}
            assert c.controller.status()["gpus"] == {"total": 8, "busy": 8}

    run(story())


def test_a_job_after_two_of_which_one_fails_because_of_the_other_is_cancelled_once(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(1)
            second = await c.submit(1, after=[first])
            third = await c.submit(1, after=[first, second])
            c.engine.end(first, 1, 1)
            await c.quiet()
            assert [c.state(job) for job in (first, second, third)] == ["failed", "cancelled", "cancelled"]
            assert kinds(c, third).count("cancelled") == 1

    run(story())


def test_what_was_to_begin_on_a_gpu_that_falls_sick_begins_elsewhere(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 1, "n1": 1}) as c:
            low, middle = await c.submit(1), await c.submit(1, priority=1)
            node = c.engine.living[low, 1].launch.parts[0].node
            high = await c.submit(1, priority=5)
            assert (c.state(low), c.state(high)) == ("preempting", "starting")
            c.engine.sicken(node, 0)
            await c.quiet()
            assert c.state(middle) == "preempting"
            c.engine.end(middle, 1, 85)
            await c.quiet()
            assert c.state(high) == "running"
            assert c.engine.living[high, 1].launch.parts[0].node != node

    run(story())
