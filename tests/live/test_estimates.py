"""When will it start: told as soon as a job waits, and told anew when things have changed."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from kit.cluster_in_a_test import live_cluster
from kit.waiting import until_async as until
from thebes.live import estimates as estimates_module
from thebes.live import forecast as forecast_module


def run(story):
    asyncio.run(story)


def test_an_estimate_is_revised_when_the_job_before_it_ends_early(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates_module, "PAUSE_S", 0.0)

    async def story():
        async with live_cluster(tmp_path, policy="fifo") as c:
            first = await c.submit(8, time_s=1000.0)
            await c.submit(8, time_s=100.0)
            third = await c.submit(8, time_s=100.0)
            began_s = c.clock.time_s

            def expected_s() -> float:
                return round(c.controller.live(third)["expected_start_s"] - c.controller.clock.now_s())

            await until(lambda: c.controller.live(third)["expected_start_s"] is not None)
            assert expected_s() == 1100
            await c.pass_time(200)
            c.engine.end(first, 1, 0)
            await until(lambda: expected_s() < 200)  # the second one runs now
            assert expected_s() == 100
            assert c.clock.time_s - began_s == 200
            # The first estimate is kept apart: how far it was off is what the metrics tell.
            assert round(c.controller.core.jobs[third].first_expected_s - c.controller.clock.now_s()) == 900

    run(story())


def test_the_work_is_bounded_and_ends_when_all_estimates_are_new(tmp_path, monkeypatch):
    looks: list[float] = []
    looked = forecast_module.expected_start_s

    def count(core, job_id, now_s):
        looks.append(time.monotonic())
        return looked(core, job_id, now_s)

    monkeypatch.setattr(estimates_module, "expected_start_s", count)
    monkeypatch.setattr(estimates_module, "PAUSE_S", 0.1)

    async def story():
        async with live_cluster(tmp_path, policy="fifo") as c:
            for _ in range(4):
                await c.submit(8, time_s=100.0)
            await until(lambda: c.controller.estimates.pause_s() is None)
            done = len(looks)
            assert done >= 3
            await asyncio.sleep(0.5)
            assert len(looks) == done  # nothing has changed
            began = time.monotonic()
            c.engine.end("1", 1, 0)
            await c.quiet()
            await until(lambda: c.controller.estimates.pause_s() is None)
            again = [at for at in looks if at > began]
            assert 2 <= len(again) <= 2 + (time.monotonic() - began) / 0.1
            # The decision itself may ask for one at once; from then on they keep their distance.
            assert all(later - earlier >= 0.099 for earlier, later in pairwise(again[1:]))

    run(story())


def test_a_policy_that_fails_when_run_ahead_costs_the_estimate_and_nothing_else(tmp_path, monkeypatch):
    def fails(core, job_id, now_s):
        raise ZeroDivisionError("only in a world that never was")

    monkeypatch.setattr(estimates_module, "expected_start_s", fails)

    async def story():
        async with live_cluster(tmp_path, policy="fifo") as c:
            first, second = await c.submit(8, time_s=100.0), await c.submit(8, time_s=100.0)
            await until(lambda: c.controller.core.jobs[second].estimated_in > 0)
            assert c.controller.live(second)["expected_start_s"] is None
            c.engine.end(first, 1, 0)
            await c.quiet()
            assert c.state(second) == "running"

    run(story())
