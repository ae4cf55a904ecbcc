"""The real controller with a fake engine and a fake clock: what happens to jobs."""

from __future__ import annotations

import asyncio

import pytest

from kit.cluster_in_a_test import ADMIN, live_cluster
from kit.waiting import until_async
from thebes.jobspec.spec import JobSpec
from thebes.live import launching
from thebes.model.errors import UserError
from thebes.store.principal import Principal


def run(story):
    asyncio.run(story)


def test_a_job_runs_and_completes(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(2)
            assert c.state(job) == "running"
            await c.pass_time(10)
            c.engine.end(job, 1, 0)
            await c.quiet()
            row = c.row(job)
            assert (row.state, row.exit_code, row.incarnation) == ("completed", 0, 1)
            assert not c.controller.core.on_gpu
            assert not c.engine.ended  # forgotten once it is in the store

    run(story())


def test_higher_priority_preempts_by_the_handshake_and_the_victim_resumes(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            low = await c.submit(8)
            await c.pass_time(5)
            c.engine.checkpointed(low, 1, 17)
            high = await c.submit(8, priority=5)
            assert c.state(low) == "preempting"
            assert c.state(high) == "starting"  # its GPUs are promised, but not clear yet
            assert ("notice", low, 1) in c.engine.calls
            c.engine.end(low, 1, 85)
            await c.quiet()
            assert (c.state(low), c.state(high)) == ("queued", "running")
            c.engine.end(high, 1, 0)
            await c.quiet()
            assert c.state(low) == "running"
            launch = c.engine.living[low, 2].launch
            assert launch.resumes
            assert launch.resume_from == "/ckpt/17"
            c.engine.end(low, 2, 0)
            await c.quiet()
            row = c.row(low)
            assert (row.state, row.preemptions, row.failures, row.lost_gpu_s) == ("completed", 1, 0, 0.0)

    run(story())


def test_a_job_that_does_not_save_in_time_loses_what_it_did_since_its_checkpoint(tmp_path):
    async def story():
        async with live_cluster(tmp_path, grace_s=4.0) as c:
            low = await c.submit(8)
            await c.pass_time(100)
            c.engine.checkpointed(low, 1, 5)
            await c.pass_time(50)
            await c.submit(8, priority=5)
            await c.pass_time(5)  # the deadline passes, it is killed
            row = c.row(low)
            assert row.state == "queued"
            assert row.lost_gpu_s == pytest.approx(8 * 55)

    run(story())


def test_failures_use_up_the_retries_and_preemptions_do_not(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1, max_retries=1)
            c.engine.end(job, 1, 1)
            await c.quiet()
            assert c.state(job) == "running"
            c.engine.end(job, 2, 85)  # it asks to be resumed of its own accord
            await c.quiet()
            assert c.state(job) == "running"
            c.engine.end(job, 3, 3)
            await c.quiet()
            row = c.row(job)
            assert (row.state, row.exit_code, row.failures) == ("failed", 3, 2)
            assert "code 3" in row.reason

    run(story())


def test_a_lost_supervisor_is_not_the_jobs_fault(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            c.engine.end(job, 1, -9, cause="lost")
            await c.quiet()
            row = c.row(job)
            assert (row.state, row.losses, row.failures, row.incarnation) == ("running", 1, 0, 2)

    run(story())


def test_freeze_keeps_everything_and_resumes_in_place(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            low = await c.submit(8, mechanism="freeze")
            high = await c.submit(8, priority=5)
            assert (c.state(low), c.state(high)) == ("suspended", "running")
            c.engine.end(high, 1, 0)
            await c.quiet()
            assert c.state(low) == "running"
            assert c.incarnation(low) == 1
            c.engine.refuse_suspend = True
            await c.submit(8, priority=5)
            assert ("notice", low, 1) in c.engine.calls  # refused: by the handshake then

    run(story())


def test_cancel_hold_release_requeue_preempt(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            from kit.cluster_in_a_test import ADMIN

            act = c.controller.act
            job = await c.submit(1)
            await act("hold", job, ADMIN)
            await c.quiet()
            assert c.state(job) == "preempting"
            c.engine.end(job, 1, 85)
            await c.quiet()
            assert c.state(job) == "held"
            await act("release", job, ADMIN)
            await c.quiet()
            assert c.state(job) == "running"
            await act("preempt", job, ADMIN)
            await c.quiet()
            assert ("notice", job, 2) in c.engine.calls
            c.engine.end(job, 2, 85)
            await c.quiet()
            assert (c.state(job), c.incarnation(job)) == ("running", 3)
            await act("cancel", job, ADMIN)
            await c.quiet()
            assert c.state(job) == "cancelled"
            with pytest.raises(UserError, match="ended already"):
                await act("cancel", job, ADMIN)
            await act("requeue", job, ADMIN)
            await c.quiet()
            assert (c.state(job), c.incarnation(job)) == ("running", 4)
            with pytest.raises(UserError, match="no job 99"):
                await act("cancel", "99", ADMIN)

    run(story())


def test_dependencies_wait_go_on_and_fail_with_their_reason(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(1)
            second = await c.submit(1, after=[first])
            third = await c.submit(1, after=[second])
            assert c.state(second) == "queued"
            assert f"job {first}" in c.controller.live(second)["reason"]
            c.engine.end(first, 1, 0)
            await c.quiet()
            assert c.state(second) == "running"
            c.engine.end(second, 1, 1)
            await c.quiet()
            assert (c.state(second), c.state(third)) == ("failed", "cancelled")
            assert f"job {second}" in c.row(third).reason
            late = await c.submit(1, after=[second])
            assert c.state(late) == "cancelled"

    run(story())


def test_a_drained_node_gets_nothing_new_and_a_preempting_drain_empties_it(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(4)
            node = c.engine.living[job, 1].launch.parts[0].node
            await c.controller.drain(node, "fan", True, "root")
            c.engine.end(job, 1, 85)
            await c.quiet()
            assert c.engine.living[job, 2].launch.parts[0].node != node
            other = await c.submit(4)
            assert c.state(other) == "queued"
            await c.controller.undrain(node, "root")
            await c.quiet()
            assert c.state(other) == "running"

    run(story())


def test_what_can_never_run_is_refused_and_what_exceeds_a_quota_too(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            with pytest.raises(UserError, match="can never run: it asks for 9 GPUs"):
                await c.submit(9)
            await c.controller.set_quota("default", 2)
            with pytest.raises(UserError, match="quota of tenant 'default' is 2"):
                await c.submit(3)
            jobs = [await c.submit(1) for _ in range(3)]
            assert [c.state(job) for job in jobs] == ["running", "running", "queued"]
            assert "quota" in c.controller.live(jobs[2])["reason"]

    run(story())


def test_what_torchrun_cannot_start_is_refused_at_once(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            spec = JobSpec(command=["python", "-c", "print()"], launcher="torchrun", workdir="/")
            with pytest.raises(UserError, match="never run: torchrun needs a script or a module"):
                await c.controller.submit(spec, ADMIN)

    run(story())


def test_a_policy_that_fails_changes_nothing_and_is_told(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            running = await c.submit(4)
            ledger = c.controller.core.ledger
            decide = ledger.policy.decide

            def wrong(view):
                raise ZeroDivisionError("by the number of friends")

            object.__setattr__(ledger.policy, "decide", wrong)
            waiting = await c.submit(4)
            told = "policy tiresias-l: decide failed: ZeroDivisionError: by the number of friends"
            assert c.controller.status()["trouble"].startswith(told)
            assert [event.kind for event in c.events() if event.kind.startswith("policy")] == ["policy-failed"]
            assert (c.state(running), c.state(waiting)) == ("running", "queued")
            object.__setattr__(ledger.policy, "decide", decide)
            await c.pass_time(10)
            assert c.controller.status()["trouble"] is None
            assert c.state(waiting) == "running"

    run(story())


def test_an_error_of_our_own_while_deciding_ends_the_controller_instead_of_leaving_half_a_decision(
    tmp_path, monkeypatch
):
    async def story():
        async with live_cluster(tmp_path) as c:
            monkeypatch.setattr(launching, "launch_what_can", None)  # fails when the decision has been applied
            await c.controller.submit(JobSpec(command=["train"], workdir="/"), ADMIN)
            with pytest.raises(TypeError):
                await asyncio.wait_for(c.controller.ended(), 60)
            monkeypatch.undo()
            await c.crash()
            await c.open()
            assert c.state("1") == "running"

    run(story())


def test_after_a_crash_everything_goes_on(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            running, ended = await c.submit(4), await c.submit(4)
            waiting = await c.submit(8)
            await c.crash()
            c.engine.end(ended, 1, 0)  # while nobody listens
            await c.open()
            assert [c.state(job) for job in (running, ended, waiting)] == ["running", "completed", "queued"]
            assert c.incarnation(running) == 1  # it never noticed
            c.engine.end(running, 1, 0)
            await c.quiet()
            assert c.state(waiting) == "running"

    run(story())


def test_a_node_that_goes_and_comes_back_loses_nothing(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(8)
            c.engine.node_down("n0")
            await c.quiet()
            waiting = await c.submit(4)
            assert (c.state(job), c.state(waiting)) == ("running", "queued")
            c.engine.end(job, 1, 0)
            c.engine.node_up("n0")
            await c.quiet()
            assert (c.state(job), c.state(waiting)) == ("completed", "running")

    run(story())


def test_every_decision_can_be_made_again_from_the_journal(tmp_path):
    from thebes.live.replay import replay_store

    async def story():
        async with live_cluster(tmp_path) as c:
            from thebes.live.config import save

            save(c.instance.config, c.config)
            jobs = [await c.submit(gpus) for gpus in (4, 4, 8, 2)]
            await c.pass_time(5000)
            for job in jobs[:2]:
                if c.incarnation(job):
                    c.engine.end(job, c.incarnation(job), 85)
                    await c.quiet()
            await c.crash()
            await c.open()
            await c.submit(1, priority=3)

    run(story())
    replayed = replay_store(tmp_path)
    assert len(replayed) >= 2
    assert all(one.same for one in replayed), [one.differs for one in replayed]


def test_a_plan_tells_where_when_and_at_whose_expense(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            from kit.cluster_in_a_test import ADMIN
            from thebes.jobspec.spec import JobSpec

            async def plan(gpus, **more):
                return await c.controller.plan(JobSpec(command=["x"], gpus=gpus, **more), ADMIN)

            assert (await plan(4))["starts"] == "now"
            assert (await plan(9))["starts"] == "never"
            job = await c.submit(8, time_s=100.0)
            later = await plan(8)
            assert later["starts"] == "later"
            assert later["start_in_s"] == pytest.approx(100, abs=2)
            assert (await plan(8, priority=1))["preempts"] == [job]

    run(story())


@pytest.mark.parametrize(("rate", "pays"), [(8.0, True), (4.0, False)])
def test_two_jobs_share_a_gpu_as_long_as_measured_rates_say_that_it_pays(tmp_path, rate, pays):
    async def story():
        async with live_cluster(tmp_path, {"n0": 1, "n1": 1}, packing=True) as c:
            jobs = host, guest = [await c.submit(1, pack=True) for _ in range(2)]
            await c.make_steps(dict.fromkeys(jobs, 10.0), 20)  # each alone on its GPU
            assert c.controller.core.ledger.rates == pytest.approx(dict.fromkeys(jobs, 10.0))
            node = c.engine.living[guest, 1].launch.parts[0].node
            await c.controller.drain(node, "", True, "root")
            c.engine.end(guest, 1, 85)
            await c.quiet()
            assert c.controller.core.ledger.guests == {guest: host}
            assert c.state(guest) == "running"
            assert c.engine.living[guest, 2].launch.parts == c.engine.living[host, 1].launch.parts
            await c.make_steps(dict.fromkeys(jobs, rate), 30)
            kinds = [event.kind for event in c.events()]
            assert ("packing-pays" in kinds, "unpacked" in kinds) == (pays, not pays)
            if not pays:
                c.engine.end(guest, 2, 85)
                await c.quiet()
                assert (c.state(guest), c.controller.core.ledger.guests) == ("queued", {})
                await c.make_steps({host: 10.0}, 20)
                assert c.state(guest) == "queued"  # the two are not tried again
                return
            await c.crash()
            await c.open()  # the next controller knows who shares with whom
            assert c.controller.core.ledger.guests == {guest: host}
            c.engine.end(host, 1, 0)
            await c.quiet()
            c.engine.end(guest, 2, 85)  # it moves from the GPU that it shared to one of its own
            await c.quiet()
            assert c.controller.core.ledger.holds(guest)
            assert c.state(guest) == "running"

    run(story())


def test_a_guest_can_be_cancelled_held_and_preempted(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 1, "n1": 1}, packing=True) as c:
            jobs = host, guest = [await c.submit(1, pack=True) for _ in range(2)]
            await c.make_steps(dict.fromkeys(jobs, 10.0), 20)
            await c.controller.drain(c.engine.living[guest, 1].launch.parts[0].node, "", True, "root")
            c.engine.end(guest, 1, 85)
            await c.quiet()
            await c.controller.act("preempt", guest, ADMIN)
            c.engine.end(guest, 2, 85)
            await c.quiet()
            assert (c.state(guest), c.incarnation(guest)) == ("running", 3)  # invited again
            await c.controller.act("hold", guest, ADMIN)
            c.engine.end(guest, 3, 85)
            await c.quiet()
            assert (c.state(guest), c.controller.core.ledger.guests) == ("held", {})
            await c.controller.act("release", guest, ADMIN)
            await c.quiet()
            assert c.state(guest) == "running"
            await c.controller.act("cancel", guest, ADMIN)
            await c.quiet()
            assert (c.state(guest), c.state(host)) == ("cancelled", "running")
            assert c.controller.core.ledger.guests == {}

    run(story())


def test_a_job_that_waits_is_told_when_it_will_start_and_the_error_is_measured(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 1}) as c:
            first = await c.submit(1, time_s=60.0)
            await c.pass_time(10)
            second = await c.submit(1)
            assert c.controller.live(second)["expected_start_s"] == pytest.approx(c.controller.clock.now_s() + 50)
            await c.pass_time(20)
            c.engine.end(first, 1, 0)
            await c.quiet()
            assert c.state(second) == "running"
            assert c.controller.live(second)["expected_start_s"] is None
            text = c.controller.metrics.text().decode()
            assert 'thebes_eta_error_seconds_bucket{le="-10.0"} 1.0' in text  # 30 s earlier than said
            assert 'thebes_eta_error_seconds_bucket{le="-60.0"} 0.0' in text

    run(story())


def test_only_an_admin_can_put_a_job_before_all_others(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            alice = Principal("alice", "user", "default")
            with pytest.raises(UserError, match="only an admin"):
                await c.submit(1, alice, priority=1)
            assert c.state(await c.submit(1, alice, priority=-5)) == "running"

    run(story())


def test_a_job_that_asks_to_be_resumed_again_and_again_without_being_stopped_fails_at_last(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            for _ in range(30):
                if c.state(job) != "running":
                    break
                await c.pass_time(1)
                c.engine.end(job, c.incarnation(job), 85)
                await c.quiet()
            row = c.row(job)
            assert (row.state, row.incarnation, row.exit_code) == ("failed", 20, 85)
            assert row.reason == "it exited with code 85 20 times in a row without having been asked to stop"

    run(story())


def test_a_job_that_yields_now_and_then_may_do_so_for_ever(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            for _ in range(25):
                await c.pass_time(60)
                c.engine.end(job, c.incarnation(job), 85)
                await c.quiet()
            assert c.state(job) == "running"

    run(story())


def test_a_job_requeued_after_its_end_has_its_checkpoint_and_its_whole_time_limit(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1, time_s=100)
            await c.pass_time(60)
            c.engine.checkpointed(job, 1, 7)
            await c.pass_time(40)
            c.engine.end(job, 1, -15, cause="timeout")
            await c.quiet()
            assert c.state(job) == "timeout"
            await c.controller.act("requeue", job, ADMIN)
            await c.quiet()
            launch = c.engine.living[job, 2].launch
            assert (launch.resume_from, launch.limit_s) == ("/ckpt/7", 100)

    run(story())


def test_a_launch_on_its_way_to_a_node_that_was_away_does_not_come_to_life_beside_the_next(tmp_path):
    """It was preempted before it had reached its node: it is called off there, and only then started again."""

    async def story():
        async with live_cluster(tmp_path) as c:
            c.engine.up = dict.fromkeys(c.engine.up, False)  # and nobody has noticed yet
            ids = await c.controller.submit(JobSpec(command=["train"], gpus=4, workdir="/"), ADMIN)
            await until_async(lambda: c.state(ids[0]) == "starting")
            await c.controller.act("preempt", ids[0], ADMIN)
            for node in c.engine.up:
                c.engine.node_up(node)
            await c.quiet()
            assert sorted(c.engine.living) == [(ids[0], 2)]
            assert c.engine.launches == {(ids[0], 2): 1}
            assert c.engine.fence[ids[0]] == 2
            assert c.row(ids[0]).losses == 0

    run(story())


def test_what_a_node_has_not_forgotten_does_not_keep_a_job_from_running_elsewhere(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(4)
            home = c.engine.living[job, 1].launch.parts[0].node

            async def unreachable(job_id, incarnation):
                raise OSError("the node cannot be reached")

            forget, c.engine.forget = c.engine.forget, unreachable
            await c.controller.drain(home, "", False, "root")
            await c.controller.act("preempt", job, ADMIN)
            c.engine.end(job, 1, 85)
            await until_async(lambda: (job, 2) in c.engine.living)
            assert c.engine.living[job, 2].launch.parts[0].node != home
            c.engine.forget = forget
            c.engine.node_up(home)
            await c.quiet()
            assert not c.engine.ended  # it tells of it when it is back, and may forget it then

    run(story())


def test_a_sick_gpu_gets_no_jobs_and_what_runs_there_stays(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 2}) as c:
            running = await c.submit(1)
            gpu = c.engine.living[running, 1].launch.parts[0].gpus[0]
            c.engine.sicken("n0", gpu)
            await c.quiet()
            others = [await c.submit(1) for _ in range(2)]
            assert [c.state(job) for job in (running, *others)] == ["running", "running", "queued"]
            c.engine.end(running, 1, 0)
            await c.quiet()
            assert c.state(others[1]) == "queued"
            await c.crash()
            await c.open()
            assert c.state(others[1]) == "queued"
            c.engine.sicken("n0")
            await c.quiet()
            assert c.state(others[1]) == "running"
            assert "gpu-sick" in [event.kind for event in c.events()]

    run(story())


def test_a_job_cancelled_while_its_launch_cannot_reach_the_node_never_starts(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 1}) as c:
            c.engine.unreachable = True  # the node counts as up, but calls do not get through
            job = (await c.controller.submit(JobSpec(command=["x"], workdir="/"), ADMIN))[0]
            await until_async(lambda: any(call[0] == "launch" for call in c.engine.calls), "it is told to launch")
            await c.controller.act("cancel", job, ADMIN)
            c.engine.unreachable = False
            await c.quiet()
            assert c.state(job) == "cancelled"
            assert c.engine.launches == {}

    run(story())


def test_cancelling_twice_is_cancelling_once(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            c.engine.unreachable = True  # so that it cannot end in between
            for _ in range(2):
                assert await c.controller.act("cancel", job, ADMIN) == [job]
            with pytest.raises(UserError, match="is being cancelled"):
                await c.controller.act("hold", job, ADMIN)
            c.engine.unreachable = False
            await c.quiet()
            assert c.state(job) == "cancelled"

    run(story())
