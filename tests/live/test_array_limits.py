"""Arrays with a limit: never more at a time, in the order of their indices, nobody forgotten, and all of it after a
crash as before."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kit.cluster_in_a_test import ADMIN, live_cluster
from thebes.jobspec.spec import JobSpec
from thebes.live.array_limits import Places, kept_back
from thebes.live.config import save
from thebes.live.replay import replay_store

KEPT_BACK = "its array runs at most 2 of its jobs at a time"


def run(story):
    asyncio.run(story)


# --- who has a place -------------------------------------------------------------------------------------------------


def yes(_job_id: str) -> bool:
    return True


def test_places_are_filled_in_the_order_of_indices_whoever_came_first():
    places = Places(2)
    for index in (7, 10, 3, 9):
        places.wait(f"1_{index}", index, begun=False)
    assert places.let_in(yes, yes) == ["1_3", "1_7"]
    assert places.let_in(yes, yes) == []
    assert places.let_in(lambda job: job != "1_7", yes) == ["1_9"]
    assert places.let_in(lambda job: False, yes) == ["1_10"]


def test_who_has_begun_goes_before_who_has_not():
    places = Places(1)
    places.wait("1_1", 1, begun=False)
    places.wait("1_9", 9, begun=True)
    assert places.let_in(yes, yes) == ["1_9"]


def test_who_may_not_enter_takes_no_place_and_can_get_in_line_again():
    places = Places(1)
    for index in (1, 2):
        places.wait(f"1_{index}", index, begun=False)
    assert places.let_in(yes, lambda job: job != "1_1") == ["1_2"]
    places.wait("1_1", 1, begun=False)
    places.wait("1_1", 1, begun=False)  # twice is once
    assert places.let_in(lambda job: False, yes) == ["1_1"]
    assert not places.line
    assert not places.deserted
    assert places.let_in(lambda job: False, yes) == []
    assert places.deserted


def test_a_long_line_costs_nothing_while_nothing_is_free():
    places, asked = Places(4), []

    def note(job: str) -> bool:
        asked.append(job)
        return True

    indices = list(range(10_000))
    random.Random(1).shuffle(indices)
    for index in indices:
        places.wait(f"1_{index}", index, begun=False)
    places.let_in(note, note)
    asked.clear()
    for _ in range(100):
        assert places.let_in(note, note) == []
    assert len(asked) == 400, "only those with a place are looked at"


@given(
    limit=st.integers(1, 4),
    events=st.lists(st.tuples(st.sampled_from(["come", "leave", "hold", "look"]), st.integers(0, 9))),
)
def test_never_more_than_the_limit_and_no_place_stays_empty(limit, events):
    places, inside, held, wanting = Places(limit), set[int](), set[int](), set[int]()
    for kind, index in [*events, ("look", 0)]:
        if kind == "come" and index not in inside:
            held.discard(index)
            wanting.add(index)
            places.wait(f"1_{index}", index, begun=False)
        elif kind == "leave":
            inside.discard(index)
        elif kind == "hold":
            inside.discard(index)
            held.add(index)
        elif kind == "look":
            names, kept_out = {f"1_{one}" for one in inside}, {f"1_{one}" for one in held | inside}
            entered = places.let_in(names.__contains__, lambda job, kept_out=kept_out: job not in kept_out)
            inside.update(int(job[2:]) for job in entered)
            wanting -= inside | held
            assert len(inside) <= limit
            assert len(inside) == limit or not wanting


# --- a live cluster --------------------------------------------------------------------------------------------------


def states(c, array: str, indices) -> list[str]:
    return [c.state(f"{array}_{index}") for index in indices]


def seen(c) -> set[str]:
    """The jobs that the policy sees."""
    ledger = c.controller.core.ledger
    return ledger.row_of.keys() - ledger.held_by_user


async def array_of(c, indices, limit: int, **more) -> str:
    first = await c.submit(1, array=list(indices), array_limit=limit, **more)
    return first.partition("_")[0]


async def end(c, job: str, code: int = 0) -> None:
    c.engine.end(job, c.incarnation(job), code)
    await c.quiet()


def test_the_others_are_not_shown_to_the_policy_and_follow_in_turn(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            a = await array_of(c, [5, 1, 4, 2, 3], 2)  # not in order: the API takes any
            assert states(c, a, range(1, 6)) == ["running", "running", "queued", "queued", "queued"]
            assert seen(c) == {f"{a}_1", f"{a}_2"}
            reasons = [c.controller.live(f"{a}_{index}")["reason"] for index in range(1, 6)]
            assert reasons == ["", "", KEPT_BACK, KEPT_BACK, KEPT_BACK]
            await end(c, f"{a}_2")
            assert states(c, a, range(1, 6)) == ["running", "completed", "running", "queued", "queued"]
            await end(c, f"{a}_1", 1)  # failed: that makes room, too
            assert states(c, a, range(1, 6)) == ["failed", "completed", "running", "running", "queued"]
            await end(c, f"{a}_3")
            await end(c, f"{a}_4")
            await end(c, f"{a}_5")
            assert not c.controller.core.places, "nothing is remembered of an array that has ended"

    run(story())


def test_others_are_not_held_up_and_two_arrays_have_limits_of_their_own(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            a, b = await array_of(c, range(4), 1), await array_of(c, range(4), 2)
            single = await c.submit(1)
            assert states(c, a, range(4)).count("running") == 1
            assert states(c, b, range(4)).count("running") == 2
            assert c.state(single) == "running"
            free = await c.submit(1, array=[1, 2, 3])
            assert states(c, free.partition("_")[0], (1, 2, 3)) == ["running"] * 3, "no limit, no places"

    run(story())


def test_held_and_cancelled_members_do_not_block_the_others(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            act = c.controller.act
            a = await array_of(c, range(6), 2)
            await act("hold", f"{a}_2", ADMIN)  # waits for a place
            await act("cancel", f"{a}_3", ADMIN)
            await end(c, f"{a}_0")
            assert states(c, a, range(6)) == ["completed", "running", "held", "cancelled", "running", "queued"]
            await act("hold", f"{a}_1", ADMIN)  # runs
            await c.quiet()
            assert states(c, a, (1, 5)) == ["preempting", "queued"], "it is still there"
            await end(c, f"{a}_1", 85)
            assert states(c, a, (1, 5)) == ["held", "running"]
            await act("release", f"{a}_1", ADMIN)
            await act("release", f"{a}_2", ADMIN)
            await c.quiet()
            assert states(c, a, (1, 2)) == ["queued", "queued"], "their places are taken"
            assert c.controller.live(f"{a}_1")["reason"] == KEPT_BACK
            assert seen(c) == {f"{a}_4", f"{a}_5"}
            await end(c, f"{a}_5")
            assert states(c, a, (1, 2)) == ["running", "queued"], "who has begun goes first"
            await end(c, f"{a}_4")
            assert states(c, a, (1, 2)) == ["running", "running"]

    run(story())


def test_a_member_cancelled_while_it_runs_has_its_place_until_it_has_gone(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            a = await array_of(c, range(3), 1)
            c.engine.unreachable = True
            await c.controller.act("cancel", f"{a}_0", ADMIN)
            await asyncio.sleep(0.01)
            assert c.state(f"{a}_1") == "queued"
            assert f"{a}_1" not in seen(c)
            c.engine.unreachable = False
            await c.quiet()
            await c.pass_time(10)
            assert states(c, a, range(3)) == ["cancelled", "running", "queued"]

    run(story())


@pytest.mark.parametrize("mechanism", ["checkpoint", "freeze"])
def test_a_preempted_member_keeps_its_place(tmp_path, mechanism):
    async def story():
        async with live_cluster(tmp_path, nodes={"n0": 2}) as c:
            a = await array_of(c, range(4), 2, mechanism=mechanism)
            urgent = await c.submit(1, priority=5)
            await c.pass_time(1)
            victim = next(f"{a}_{i}" for i in (0, 1) if c.state(f"{a}_{i}") != "running")
            if mechanism == "checkpoint":
                await end(c, victim, 85)
            assert c.state(victim) == ("suspended" if mechanism == "freeze" else "queued")
            assert c.state(urgent) == "running"
            assert "go to jobs before it" in c.controller.live(victim)["reason"]
            await c.pass_time(10)
            assert states(c, a, (2, 3)) == ["queued", "queued"], "nobody has taken the place meanwhile"
            await end(c, urgent)
            assert c.state(victim) == "running"

    run(story())


def test_members_that_fail_and_are_tried_again_or_are_lost_keep_their_places(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            a = await array_of(c, range(3), 1, max_retries=1)
            await end(c, f"{a}_0", 1)
            assert (c.state(f"{a}_0"), c.incarnation(f"{a}_0")) == ("running", 2)
            await end(c, f"{a}_0", 1)
            assert states(c, a, range(3)) == ["failed", "running", "queued"]
            await c.controller.act("requeue", f"{a}_0", ADMIN)  # it comes again, and its place is taken
            await c.quiet()
            assert states(c, a, range(3)) == ["queued", "running", "queued"]
            await end(c, f"{a}_1")
            assert states(c, a, range(3)) == ["running", "completed", "queued"]

    run(story())


def test_after_a_crash_all_is_as_before(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            save(c.instance.config, c.config)
            a = await array_of(c, range(8), 2)
            act = c.controller.act
            await act("hold", f"{a}_0", ADMIN)
            await end(c, f"{a}_0", 85)
            await act("release", f"{a}_0", ADMIN)  # in line, although the ledger knows it
            await act("hold", f"{a}_3", ADMIN)
            await c.quiet()
            before = states(c, a, range(8)), seen(c)
            assert before[0] == ["queued", "running", "running", "held", "queued", "queued", "queued", "queued"]
            for _ in range(2):
                await c.crash()
                await c.open()
                assert (states(c, a, range(8)), seen(c)) == before
            await end(c, f"{a}_1")
            assert states(c, a, (0, 2, 4)) == ["running", "running", "queued"]
            await c.crash()
            c.config = c.config.model_copy(update={"policy": "fifo"})  # the ledger is drawn up anew
            await c.open()
            assert states(c, a, (0, 2, 4)) == ["running", "running", "queued"]
            await end(c, f"{a}_2")
            await end(c, f"{a}_0")
            assert states(c, a, range(8)) == ["completed"] * 3 + ["held", "running", "running", "queued", "queued"]
            save(c.instance.config, c.config)

    run(story())
    replayed = replay_store(tmp_path)
    assert replayed
    assert all(one.same for one in replayed), [one.differs for one in replayed]


def test_with_the_journal_gone_those_who_had_begun_are_let_in_first(tmp_path):
    """A store from a backup knows the jobs and not what the policy had seen of them."""
    from thebes.store import schema

    async def story():
        async with live_cluster(tmp_path) as c:
            a = await array_of(c, range(5), 2, hold=True)
            for index in (2, 3, 0, 1, 4):  # 2 and 3 begin
                await c.controller.act("release", f"{a}_{index}", ADMIN)
                await c.quiet()
            assert states(c, a, range(5)) == ["queued", "queued", "running", "running", "queued"]
            await c.store.change(lambda store: store.execute(schema.journal.delete()) and None, must=True)
            await c.crash()
            await c.open()
            assert not seen(c), "they still run, but nobody has given them GPUs"
            for index in (2, 3):
                await end(c, f"{a}_{index}", 85)
            assert states(c, a, range(5)) == ["queued", "queued", "running", "running", "queued"]
            assert seen(c) == {f"{a}_2", f"{a}_3"}

    run(story())


def test_members_that_wait_for_others_come_in_the_order_of_their_indices(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            first = await c.submit(1)
            a = await array_of(c, range(20), 2, after=[first])
            assert f"waits for job {first}" in c.controller.live(f"{a}_0")["reason"]
            await end(c, first)
            assert states(c, a, range(20)) == ["running"] * 2 + ["queued"] * 18

    run(story())


def test_a_held_array_with_a_limit_is_released_as_a_whole(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            a = await array_of(c, range(5), 2, hold=True)
            assert states(c, a, range(5)) == ["held"] * 5
            await c.controller.act("release", a, ADMIN)
            await c.quiet()
            assert states(c, a, range(5)) == ["running"] * 2 + ["queued"] * 3

    run(story())


def test_a_plan_tells_of_the_limit(tmp_path):
    async def story():
        async with live_cluster(tmp_path) as c:
            spec = JobSpec(command=["x"], array=list(range(9)), array_limit=4)
            plan = await c.controller.plan(spec, ADMIN)
            assert (plan["starts"], plan["note"]) == (
                "now",
                "of its 9 jobs at most 4 run at a time; the others follow in turn",
            )
            plan = await c.controller.plan(spec.model_copy(update={"array_limit": 9}), ADMIN)
            assert plan["note"] == ""

    run(story())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"array_limit": 2}, "there is no array whose jobs it could limit"),
        ({"array": [1, 2], "array_limit": 0}, "greater than or equal to 1"),
        ({"array": [1, 2], "array_limit": "some"}, "valid integer"),
    ],
)
def test_limits_that_the_api_refuses(fields, told):
    with pytest.raises(ValidationError, match=told):
        JobSpec(command=["x"], **fields)


def test_the_sentence_that_squeue_knows():
    assert kept_back(2) == KEPT_BACK
