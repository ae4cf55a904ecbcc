"""What people are told: why a job waits, what a plan says, and what becomes of a reader that is too slow."""

from __future__ import annotations

import asyncio

import pytest

from kit.cluster_in_a_test import ADMIN, live_cluster
from thebes.jobspec.spec import JobSpec
from thebes.live import changes as changes_module
from thebes.live import forecast as forecast_module
from thebes.live.changes import Changes


def run(story):
    asyncio.run(story)


def reason(cluster, job):
    return cluster.controller.live(job)["reason"]


def test_each_wait_has_its_reason(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(8)
            assert reason(c, first) == ""
            behind = await c.submit(8)
            assert "go to jobs before it" in reason(c, behind)
            after = await c.submit(1, after=[behind])
            assert reason(c, after) == f"waits for job {behind}"
            await c.controller.act("hold", behind, ADMIN)
            await c.quiet()
            assert reason(c, behind) == "held by its user"
            urgent = await c.submit(8, priority=5)
            assert reason(c, urgent) == f"its GPUs are being cleared by job {first}"
            assert c.state(first) == "preempting"
            c.engine.end(first, 1, 85)
            await c.quiet()
            assert reason(c, urgent) == ""
            assert "go to jobs before it" in reason(c, first)

    run(story())


def test_a_job_that_is_wanted_again_while_it_still_saves_says_so(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            low = await c.submit(8)
            await c.controller.act("preempt", low, ADMIN)
            await c.quiet()
            assert c.controller.core.jobs[low].target is not None  # nobody else wants the GPUs
            assert reason(c, low) == "its last incarnation is still saving its state"

    run(story())


def test_placement_and_quota_are_named(tmp_path):
    async def story():
        async with live_cluster(tmp_path, policy="backfill") as c:
            jobs = [await c.submit(3) for _ in range(2)]
            spread = await c.submit(2, nodes=1)
            assert {c.state(job) for job in jobs} == {"running"}
            assert "not where the placement rule wants them" in reason(c, spread)
            await c.controller.set_quota("vision", 1)
            await c.submit(1, tenant="vision")
            over = await c.submit(1, tenant="vision")
            assert "quota" in reason(c, over)

    run(story())


def test_strict_order_is_named(tmp_path):
    async def story():
        async with live_cluster(tmp_path, policy="fifo") as c:
            await c.submit(6)
            await c.submit(8)
            small = await c.submit(1)
            assert "an earlier job must start first" in reason(c, small)

    run(story())


def test_a_plan_without_anything_to_go_by_says_so_instead_of_guessing(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(8)

            async def plan(**more):
                return await c.controller.plan(JobSpec(command=["x"], **more), ADMIN)

            later = await plan(gpus=8)
            assert (later["starts"], later["start_in_s"]) == ("later", None)
            assert later["estimate"].startswith(f"no estimate: job {job} has no time limit")
            assert later["position"] == 1
            after = await plan(after=[job])
            assert after["reason"] == f"it waits for job {job}"
            refused = await plan(gpus=64)
            assert refused["starts"] == "never"
            assert "64 GPUs" in refused["reason"]

    run(story())


def test_a_plan_learns_from_jobs_that_have_ended(tmp_path):
    async def story():
        async with live_cluster(tmp_path, policy="backfill") as c:
            for _ in range(6):
                job = await c.submit(8)
                await c.pass_time(100)
                c.engine.end(job, 1, 0)
                await c.quiet()
            await c.submit(8)
            await c.pass_time(30)
            plan = await c.controller.plan(JobSpec(command=["x"], gpus=8), ADMIN)
            assert plan["starts"] == "later"
            assert plan["start_in_s"] == pytest.approx(70, abs=2)
            assert sum(len(gpus) for gpus in plan["nodes"].values()) == 8

    run(story())


def test_a_plan_that_takes_long_is_given_up_and_one_with_few_turns_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast_module, "LONGEST_S", 0.0)

    async def story():
        async with live_cluster(tmp_path, {"n0": 1}, policy="fifo") as c:
            await c.submit(1, time_s=100.0)
            soon = await c.controller.plan(JobSpec(command=["x"]), ADMIN)
            assert soon["start_in_s"] == pytest.approx(100, abs=2)
            for _ in range(10):
                await c.submit(1, time_s=100.0)
            late = await c.controller.plan(JobSpec(command=["x"]), ADMIN)
            assert (late["start_in_s"], late["estimate"]) == (None, "no estimate: too much would happen before")

    run(story())


def test_a_plan_goes_from_one_end_to_the_next_until_there_is_room(tmp_path):
    async def story():
        async with live_cluster(tmp_path, {"n0": 3}, policy="fifo") as c:
            for limit_s in (100.0, 200.0, 300.0):
                await c.submit(1, time_s=limit_s)
            plan = await c.controller.plan(JobSpec(command=["x"], gpus=2), ADMIN)
            assert plan["start_in_s"] == pytest.approx(200, abs=1)
            plan = await c.controller.plan(JobSpec(command=["x"], gpus=3), ADMIN)
            assert plan["start_in_s"] == pytest.approx(300, abs=1)

    run(story())


def test_a_plan_knows_when_the_policy_will_give_way_before_anybody_has_ended(tmp_path):
    async def story():
        settings = ["queue_limits=50"]
        async with live_cluster(tmp_path, {"n0": 1}, policy="tiresias-l", policy_settings=settings) as c:
            await c.submit(1, time_s=1000.0)
            plan = await c.controller.plan(JobSpec(command=["x"]), ADMIN)
            assert plan["starts"] == "later"
            assert plan["start_in_s"] == pytest.approx(50, abs=2)  # GPU-seconds, and the first job leaves its queue

    run(story())


FAILS_AHEAD = """
import numpy as np
import thebes


class Shortsighted(thebes.Policy):
    def decide(self, view):
        if (view.now_s - view.jobs.submit_s).max() > 1000.0:
            raise thebes.UserError("so late nothing can be said")
        return thebes.fill(view, np.arange(len(view.jobs)))
"""


def test_a_policy_that_fails_in_what_may_come_costs_the_estimate_and_is_no_trouble_now(tmp_path):
    (tmp_path / "own.py").write_text(FAILS_AHEAD)

    async def story():
        async with live_cluster(tmp_path / "instance", policy=f"{tmp_path}/own.py:Shortsighted") as c:
            now_s = c.controller.clock.now_s()
            first, second = await c.submit(8, time_s=5000.0), await c.submit(8)
            core = c.controller.core
            assert forecast_module.expected_start_s(core, second, now_s) is None
            assert (c.state(first), c.state(second)) == ("running", "queued")
            assert c.controller.status()["trouble"] is None
            assert c.controller.live(second)["expected_start_s"] is None

    run(story())


def test_a_plan_changes_nothing(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            await c.submit(8, time_s=50.0)
            before = c.controller.core.ledger.snapshot(0.0)
            for gpus in (1, 8):
                await c.controller.plan(JobSpec(command=["x"], gpus=gpus, priority=gpus), ADMIN)
            assert c.controller.core.ledger.snapshot(0.0) == before

    run(story())


def test_a_reader_that_is_too_slow_is_told_once_and_dropped(monkeypatch):
    monkeypatch.setattr(changes_module, "QUEUE_ROOM", 3)

    async def story():
        changes = Changes()
        slow, quick, gone = changes.subscribe(), changes.subscribe(), changes.subscribe()
        changes.unsubscribe(gone)
        heard = []
        for seq in range(6):
            changes.publish({"kind": "state", "seq": seq})
            heard.append(quick.get_nowait()["seq"])
        assert heard == list(range(6))
        left = [slow.get_nowait() for _ in range(slow.qsize())]
        assert [event.get("seq") for event in left] == [0, 1, 2, None]
        assert left[-1] == {"kind": "lagged"}
        changes.publish({"kind": "state", "seq": 6})
        assert slow.empty()
        assert gone.empty()

    run(story())


def test_events_carry_the_number_they_have_in_the_store(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            heard = c.controller.changes.subscribe()
            job = await c.submit(1)
            events = [heard.get_nowait() for _ in range(heard.qsize())]
            kinds = [event["kind"] for event in events if event["job_id"] == job]
            assert kinds[0] == "submitted"
            assert "started" in kinds
            numbers = [event["seq"] for event in events]
            assert numbers == sorted(set(numbers))
            assert all(numbers)

    run(story())


def test_a_controller_whose_loop_fails_says_so_and_the_next_one_goes_on(tmp_path):
    """Nothing of the failed turn was written; the process ends, and the keeper starts another."""

    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            c.controller.tell(lambda now_s: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(c.controller.ended(), 60)
            await c.crash()
            await c.open()
            assert c.state(job) == "running"

    run(story())
