"""Jobs that are held from the first moment, and jobs that come after others however those end; also after a crash."""

from __future__ import annotations

import asyncio

import pytest

from kit.cluster_in_a_test import ADMIN, live_cluster
from thebes.jobspec.spec import JobSpec
from thebes.live.config import save
from thebes.live.errors import Conflict
from thebes.live.replay import replay_store
from thebes.model.errors import UserError
from thebes.store.principal import Principal


def run(story):
    asyncio.run(story)


async def end(c, job: str, code: int = 0) -> None:
    c.engine.end(job, c.incarnation(job), code)
    await c.quiet()


# --- held ------------------------------------------------------------------------------------------------------------


def test_a_job_submitted_held_never_starts_before_it_is_released(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            save(c.instance.config, c.config)
            job = await c.submit(1, hold=True)
            row = c.row(job)
            assert (row.state, row.hold, row.incarnation) == ("held", True, 0)
            assert c.controller.live(job)["reason"] == "held by its user"
            assert [event.kind for event in c.events() if event.job_id == job] == ["submitted", "hold"]
            await c.pass_time(5000)
            for _ in range(2):
                await c.crash()
                await c.open()
                assert (c.state(job), c.incarnation(job)) == ("held", 0)
            await c.controller.act("release", job, ADMIN)
            await c.quiet()
            assert c.state(job) == "running"
            await end(c, job, 1)
            await c.controller.act("requeue", job, ADMIN)
            await c.quiet()
            assert c.state(job) == "running", "it was released once"

    run(story())
    replayed = replay_store(tmp_path)
    assert replayed
    assert all(one.same for one in replayed)


def test_the_hold_is_in_the_same_commit_as_the_job(tmp_path):
    """A controller that dies right after the commit, before the job has arrived in its core."""

    async def story():
        async with live_cluster(tmp_path) as c:
            spec = JobSpec(command=["x"], workdir="/", hold=True)
            c.controller.tell = lambda message: None  # type: ignore[method-assign]
            (job,) = await c.controller.submit(spec, ADMIN, client_key="k")
            await c.crash()
            await c.open()
            assert (c.state(job), c.row(job).hold, c.incarnation(job)) == ("held", True, 0)
            assert await c.controller.submit(spec, ADMIN, client_key="k") == [job], "the same key is the same job"
            with pytest.raises(UserError, match="was used for another job"):
                await c.controller.submit(spec.model_copy(update={"hold": False}), ADMIN, client_key="k")

    run(story())


def test_a_held_job_can_be_cancelled_and_holding_it_again_is_told(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1, hold=True)
            with pytest.raises(UserError, match="is held already"):
                await c.controller.act("hold", job, ADMIN)
            await c.controller.act("cancel", job, ADMIN)
            assert c.state(job) == "cancelled"

    run(story())


def test_held_and_waiting_for_another_needs_both(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(1)
            one = await c.submit(1, hold=True, after=[first])
            two = await c.submit(1, hold=True, after=[first])
            await c.controller.act("release", one, ADMIN)
            await c.quiet()
            assert (c.state(one), c.state(two)) == ("queued", "held")
            assert c.controller.live(one)["reason"] == f"waits for job {first}"
            await end(c, first)
            assert (c.state(one), c.state(two)) == ("running", "held")
            await c.controller.act("release", two, ADMIN)
            await c.quiet()
            assert c.state(two) == "running"

    run(story())


def test_a_plan_of_a_held_job_says_so(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            plan = await c.controller.plan(JobSpec(command=["x"], hold=True), ADMIN)
            assert (plan["starts"], plan["reason"]) == ("later", "it is held until `thebes release`")
            two, three = await c.submit(1), await c.submit(1)
            plan = await c.controller.plan(JobSpec(command=["x"], hold=True, after_any=[three], after=[two]), ADMIN)
            assert plan["reason"] == f"it is held until `thebes release`; and it waits for job {two}, {three}"

    run(story())


def test_a_plan_looks_at_the_jobs_to_come_after(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:

            async def plan(**more):
                found = await c.controller.plan(JobSpec(command=["x"], **more), ADMIN)
                return found["starts"], found["reason"]

            runs, failed = await c.submit(1), await c.submit(1)
            await end(c, failed, 1)
            assert await plan(after_any=[runs]) == ("later", f"it waits for job {runs}")
            assert await plan(after_any=[failed]) == ("now", "")
            cancelled = f"it would be cancelled at once: job {failed}, after which it was to run, ended as failed"
            assert await plan(after=[failed, runs]) == ("never", cancelled)
            assert await plan(after_any=["99"]) == ("never", "--after-any 99: there is no such job")
            many = [await c.submit(1) for _ in range(9)]
            _, reason = await plan(after=many)
            assert reason == f"it waits for job {', '.join(many[:5])}, …"

    run(story())


def test_a_dependent_that_is_requeued_before_it_has_begun_still_waits(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(1)
            late, strict = await c.submit(1, after_any=[first]), await c.submit(1, after=[first])
            for job in (late, strict):
                await c.controller.act("cancel", job, ADMIN)
                await c.controller.act("requeue", job, ADMIN)
                await c.quiet()
                assert c.state(job) == "queued"
            assert c.controller.live(late)["reason"] == f"waits for job {first}"
            await end(c, first, 1)
            assert (c.state(late), c.state(strict)) == ("running", "cancelled")
            with pytest.raises(Conflict, match=f"job {strict} comes after job {first}, which is failed"):
                await c.controller.act("requeue", strict, ADMIN)
            await c.controller.act("requeue", first, ADMIN)
            await c.controller.act("requeue", strict, ADMIN)
            await c.quiet()
            assert c.state(strict) == "queued"
            await end(c, late, 1)
            await c.controller.act("requeue", late, ADMIN)  # it was let go on once, and waits no more
            await c.quiet()
            assert c.state(late) == "running"

    run(story())


def test_either_database_remembers_what_keeps_a_job_back(tmp_path, place):
    """Held, after any end, and a limited array that waits for both, through two crashes."""

    async def story():
        async with live_cluster(tmp_path, place=place) as c:
            first = await c.submit(1)
            member = await c.submit(1, array=[0, 1, 2], array_limit=1, hold=True, after=[first], after_any=[first])
            array = member.partition("_")[0]
            behind = await c.submit(1, after_any=[first, array])

            async def crash_and_tell() -> list[str]:
                await c.crash()
                await c.open()
                return [c.state(job) for job in (f"{array}_0", f"{array}_1", f"{array}_2", behind)]

            assert await crash_and_tell() == ["held", "held", "held", "queued"]
            await c.controller.act("release", array, ADMIN)
            await end(c, first)
            assert await crash_and_tell() == ["running", "queued", "queued", "queued"]
            await end(c, f"{array}_0", 1)
            await c.controller.act("hold", f"{array}_1", ADMIN)
            assert await crash_and_tell() == ["failed", "preempting", "queued", "queued"]
            await end(c, f"{array}_1", 85)
            assert await crash_and_tell() == ["failed", "held", "running", "queued"]
            await c.controller.act("cancel", f"{array}_1", ADMIN)
            await end(c, f"{array}_2")
            assert await crash_and_tell() == ["failed", "cancelled", "completed", "running"]

    run(story())


# --- after any end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["completed", "failed", "cancelled", "timeout"])
@pytest.mark.parametrize("crash", [False, True])
def test_any_end_will_do(tmp_path, how, crash):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(1, time_s=50.0)
            any_end = await c.submit(1, after_any=[first])
            strict = await c.submit(1, after=[first])
            assert c.controller.live(any_end)["reason"] == f"waits for job {first}"
            if crash:
                await c.crash()
                await c.open()
                assert (c.state(any_end), c.incarnation(any_end)) == ("queued", 0)
            if how == "cancelled":
                await c.controller.act("cancel", first, ADMIN)
                await c.pass_time(10)
            elif how == "timeout":
                c.engine.end(first, 1, -9, cause="timeout")
                await c.quiet()
            else:
                await end(c, first, 0 if how == "completed" else 1)
            assert c.state(first) == how
            assert c.state(any_end) == "running"
            assert c.state(strict) == ("running" if how == "completed" else "cancelled")
            late = await c.submit(1, after_any=[first])
            assert c.state(late) == "running", "it has ended before"

    run(story())


def test_what_ended_while_no_controller_was_there_counts(tmp_path):
    """The end is in the store, and the controller dies before the jobs behind it are let go on."""

    async def story():
        async with live_cluster(tmp_path) as c:
            from thebes import store as db

            first = await c.submit(1)
            any_end, strict = await c.submit(1, after_any=[first]), await c.submit(1, after=[first])
            await c.crash()
            c.engine.living.clear()
            from thebes.store import Store

            with Store.open(c.instance.store) as store:
                change = {"state": "failed", "reason": "x", "end_s": 1.0}
                store.change_blocking(lambda conn: db.update_job(conn, first, **change))
                store.change_blocking(lambda conn: db.update_attempt(conn, first, 1, state="ended", ended_s=1.0))
            await c.open()
            assert (c.state(any_end), c.state(strict)) == ("running", "cancelled")

    run(story())


def test_mixed_kinds_need_all_of_them(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            good, bad = await c.submit(1), await c.submit(1)
            both = await c.submit(1, after=[good], after_any=[bad])
            wrong = await c.submit(1, after=[bad], after_any=[good])
            twice = await c.submit(1, after=[bad], after_any=[bad])
            await end(c, bad, 1)
            assert c.state(both) == "queued"
            assert c.controller.live(both)["reason"] == f"waits for job {good}"
            assert (c.state(wrong), c.state(twice)) == ("cancelled", "cancelled"), "the stricter one counts"
            await end(c, good)
            assert c.state(both) == "running"

    run(story())


def test_a_whole_array_and_one_of_its_members(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            array = (await c.submit(1, array=[1, 2])).partition("_")[0]
            behind_all = await c.submit(1, after_any=[array])
            behind_one = await c.submit(1, after_any=[f"{array}_2"])
            picky = await c.submit(1, after=[f"{array}_1"], after_any=[array])
            await end(c, f"{array}_2", 1)
            assert (c.state(behind_all), c.state(behind_one), c.state(picky)) == ("queued", "running", "queued")
            await end(c, f"{array}_1")
            assert (c.state(behind_all), c.state(picky)) == ("running", "running")

    run(story())


def test_a_chain_goes_on_behind_a_job_that_was_cancelled_with_its_predecessor(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(1)
            second = await c.submit(1, after=[first])
            third = await c.submit(1, after_any=[second, first])
            await end(c, first, 1)
            assert (c.state(second), c.state(third)) == ("cancelled", "running")

    run(story())


def test_who_waits_for_one_job_comes_to_the_policy_in_the_order_of_submission(tmp_path):
    async def story():
        async with live_cluster(tmp_path, nodes={"n0": 1}, policy="fifo") as c:
            first = await c.submit(1)
            others = [await c.submit(1, after_any=[first]) for _ in range(30)]
            await end(c, first, 1)
            assert list(c.controller.core.ledger.row_of) == others

    run(story())


def test_the_end_comes_while_the_job_comes_in(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(1)
            spec = JobSpec(command=["x"], after_any=[first], workdir="/")
            coming = asyncio.ensure_future(c.controller.submit(spec, ADMIN))
            await asyncio.sleep(0)
            c.engine.end(first, 1, 1)
            (second,) = await coming
            await c.quiet()
            assert (c.state(first), c.state(second)) == ("failed", "running")

    run(story())


def test_unknown_jobs_and_those_of_others_are_refused_in_the_same_words(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            job = await c.submit(1)
            ann = Principal("ann", "user", "default")
            for fields, who in (({"after": ["99"]}, ADMIN), ({"after": [job]}, ann)):
                with pytest.raises(UserError) as strict:
                    await c.submit(1, principal=who, **fields)
                with pytest.raises(UserError) as any_end:
                    await c.submit(1, principal=who, after_any=fields["after"])
                assert any_end.value.message == strict.value.message.replace("--after ", "--after-any ")
                assert any_end.value.hint == strict.value.hint != ""
            with pytest.raises(UserError, match="--after-any 99: there is no such job"):
                await c.submit(1, after=[job], after_any=["99"])

    run(story())
