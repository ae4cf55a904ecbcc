"""How far a job is and how fast it goes, as live reports tell it: late, after a suspension, after a crash, from a
checkpoint. The policy sees what was told, reckoned on while the job ran."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.cluster_in_a_test import LiveCluster, live_cluster


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


async def reports(c: LiveCluster, job: str, incarnation: int = 1, *, told_late_s: float = 0.0, **facts: Any) -> None:
    """The job reports what it did up to now; the controller hears of it so much later."""
    one = c.engine.living[job, incarnation]
    node = one.launch.parts[0].node
    said = replace(one.reports[node], step_s=c.clock(), **facts)
    c.clock.time_s += told_late_s
    c.engine._tell(one, said)
    await c.quiet()


def shown(c: LiveCluster, job: str) -> tuple[float, float, float]:
    """Progress, speed and iteration of the job as the policy sees them now."""
    ledger = c.controller.core.ledger
    view = ledger.view(c.controller.clock.now_s())
    at = int(np.flatnonzero(view.jobs.rows == ledger.row_of[job])[0])
    return float(view.jobs.progress_s[at]), float(view.jobs.speed[at]), float(view.jobs.iteration_s[at])


def test_a_first_report_that_comes_late_counts_no_work_twice(tmp_path: Path) -> None:
    """Ten steps by 20 s, the first at 10 s, told at 50 s: after 50 s more the job has done 10 + 80."""

    async def story() -> None:
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            await c.pass_time(20.0)
            await reports(c, job, told_late_s=30.0, step=10, steps_per_s=1.0, first_step_s=c.clock() - 10.0)
            await c.pass_time(50.0)
            assert shown(c, job) == pytest.approx((90.0, 1.0, 1.0))

    run(story())


def test_a_report_from_before_a_suspension_counts_no_wait_as_work(tmp_path: Path) -> None:
    """Given a job that was frozen for 500 s, when its last report from before comes, the 500 s are no work."""

    async def story() -> None:
        async with live_cluster(tmp_path) as c:
            job = await c.submit(8, mechanism="freeze")
            await c.pass_time(10.0)
            await reports(c, job, step=10, steps_per_s=1.0, first_step_s=c.clock() - 10.0)
            await c.pass_time(90.0)
            one = c.engine.living[job, 1]
            last = replace(one.reports["n0"], step=100, step_s=c.clock(), steps_per_s=0.5)
            urgent = await c.submit(8, priority=5)
            assert c.state(job) == "suspended"
            assert shown(c, job)[0] == pytest.approx(100.0)
            await c.pass_time(500.0)
            c.engine.end(urgent, 1, 0)
            await c.quiet()
            assert c.state(job) == "running"
            c.engine._tell(one, last)
            await c.pass_time(10.0)
            assert shown(c, job) == pytest.approx((110.0, 1.0, 1.0))

    run(story())


def test_speed_stays_relative_to_the_best_when_the_controller_starts_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            await c.pass_time(10.0)
            await reports(c, job, step=20, steps_per_s=2.0, first_step_s=c.clock() - 10.0)
            await c.pass_time(10.0)
            await reports(c, job, step=30, steps_per_s=1.0)
            assert shown(c, job) == pytest.approx((15.0, 0.5, 1.0))
            await c.crash()
            await c.open()
            await c.pass_time(10.0)
            await reports(c, job, step=40, steps_per_s=1.0)
            assert shown(c, job) == pytest.approx((20.0, 0.5, 1.0))

    run(story())


def test_an_incarnation_that_goes_back_to_a_checkpoint_tells_how_far_it_is(tmp_path: Path) -> None:
    """Given a job that made 100 steps and lost 60 of them, when it runs again at the same rate, it has done 40."""

    async def story() -> None:
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            await c.pass_time(100.0)
            await reports(c, job, step=100, steps_per_s=1.0, first_step_s=c.clock() - 100.0)
            c.engine.end(job, 1, -9, cause="lost")
            await c.quiet()
            assert c.incarnation(job) == 2
            await c.pass_time(5.0)
            await reports(c, job, 2, step=40, steps_per_s=1.0, first_step_s=c.clock())
            assert shown(c, job)[0] == pytest.approx(40.0)

    run(story())


def test_a_start_that_is_expected_later_does_not_move_the_clock_of_the_ledger(tmp_path: Path) -> None:
    """A job that took 100 s to load when it was resumed before will take as long again: its work begins in 100 s."""

    async def story() -> None:
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            await c.pass_time(10.0)
            core = c.controller.core
            core.jobs[job].resume_s = 100.0
            c.engine.end(job, 1, -9, cause="lost")
            await c.quiet()
            assert c.incarnation(job) == 2
            now_s = c.controller.clock.now_s()
            assert core.ledger.now_s <= now_s
            began_s = float(core.ledger.table.jobs["run_from_s"][core.ledger.row_of[job]])
            assert began_s == pytest.approx(now_s + 100.0, abs=1.0)
            await c.pass_time(20.0)
            await reports(c, job, 2, step=1, steps_per_s=1.0, first_step_s=c.clock())  # it was quicker this time
            began_s = float(core.ledger.table.jobs["run_from_s"][core.ledger.row_of[job]])
            assert began_s == pytest.approx(now_s + 20.0, abs=1.0)

    run(story())


def test_every_second_of_a_hold_is_in_the_account(tmp_path: Path) -> None:
    """GPUs given at 0, clear at 20 s (others saved), first step at 30 s, a report at 60 s, the end at 100 s."""

    async def story() -> None:
        async with live_cluster(tmp_path) as c:
            first = await c.submit(8)
            urgent = await c.submit(8, priority=5)
            row = c.controller.core.ledger.row_of[urgent]
            await c.pass_time(20.0)
            c.engine.end(first, 1, 85)
            await c.quiet()
            await c.pass_time(40.0)
            await reports(c, urgent, step=30, steps_per_s=1.0, first_step_s=c.clock() - 30.0)
            await c.pass_time(40.0)
            c.engine.end(urgent, 1, 0)
            await c.quiet()
            account = c.controller.core.ledger.table.jobs[row]
            named = ("idle_gpu_s", "overhead_gpu_s", "useful_gpu_s")
            assert [float(account[name]) for name in named] == pytest.approx([8 * 20.0, 8 * 10.0, 8 * 70.0])

    run(story())
