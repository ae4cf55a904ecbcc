"""Jobs, attempts, nodes, small facts: what is written comes back, retries find their first answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from store_samples import SPEC, one, submit

from thebes import store as db
from thebes.model.errors import UserError
from thebes.store import schema


def test_a_job_comes_back_as_it_was_submitted(store: db.Store) -> None:
    made = store.change_blocking(lambda c: submit(c, nodes=2, gpus=8, priority=5, held=True, client_key="k"))
    with store.read() as c:
        assert db.get_job(c, "1") == made[0]
    assert (made[0].id, made[0].state, made[0].hold, made[0].array_id) == ("1", "held", True, None)
    assert (made[0].gpus, made[0].nodes, made[0].priority, made[0].incarnation) == (8, 2, 5, 0)
    assert made[0].spec == SPEC
    assert made[0].hold is True
    assert not made[0].terminal


def test_members_of_an_array_share_a_number_and_one_specification(store: db.Store) -> None:
    made = store.change_blocking(lambda c: submit(c, members=[7, 3, 5]))
    assert [row.id for row in made] == ["1_7", "1_3", "1_5"]
    assert [row.array_index for row in made] == [7, 3, 5]
    assert store.change_blocking(one()) == "2"
    with store.read() as c:
        assert db.members(c, "1") == made
        assert db.get_job(c, "1") is None
        assert db.get_job(c, "1_3") == made[1]
        assert db.members(c, "2") == []
        assert c.exec_driver_sql("SELECT count(*) FROM specs").scalar() == 2


def test_an_index_zero_is_an_array(store: db.Store) -> None:
    assert [row.id for row in store.change_blocking(lambda c: submit(c, members=[0]))] == ["1_0"]


@pytest.mark.parametrize("wrong", [[], [1, 1], [None, 2]])
def test_members_are_one_job_or_distinct_indices(store: db.Store, wrong: list[int | None]) -> None:
    with pytest.raises(ValueError, match="distinct"):
        store.change_blocking(lambda c: submit(c, members=wrong))


def test_a_retry_with_its_key_finds_the_first_answer(store: db.Store) -> None:
    first = store.change_blocking(lambda c: submit(c, client_key="k"))
    store.change_blocking(lambda c: db.update_job(c, "1", state="running"))
    again = store.change_blocking(lambda c: submit(c, client_key="k", submit_s=999.0))
    assert [row.id for row in again] == [row.id for row in first] == ["1"]
    assert again[0].state == "running"
    array = store.change_blocking(lambda c: submit(c, client_key="a", members=[2, 1]))
    assert store.change_blocking(lambda c: submit(c, client_key="a", members=[2, 1])) == array
    with store.read() as c:
        assert sum(db.count_by_state(c, db.EVERYTHING).values()) == 3


def test_retries_at_the_same_time_make_one_job(store: db.Store) -> None:
    async def both() -> list[str]:
        return await asyncio.gather(*(store.change(one(client_key="k"), must=False) for _ in range(50)))

    assert set(asyncio.run(both())) == {"1"}


def test_keys_belong_to_their_user(store: db.Store) -> None:
    assert store.change_blocking(one(client_key="k", user="ann")) == "1"
    assert store.change_blocking(one(client_key="k", user="bob")) == "2"


def test_the_order_of_keys_in_the_specification_is_no_difference(store: db.Store) -> None:
    turned = json.dumps(dict(reversed(json.loads(SPEC).items())))
    assert turned != SPEC
    assert store.change_blocking(one(client_key="k")) == store.change_blocking(one(client_key="k", spec=turned))


@pytest.mark.parametrize("other", [{"spec": "{}"}, {"members": [1]}, {"held": True}, {"tenant": "other"}])
def test_a_key_used_for_another_job_is_refused(store: db.Store, other: dict[str, object]) -> None:
    store.change_blocking(one(client_key="k"))
    with pytest.raises(db.StoreConflict, match=r"the key 'k' was used for another job \(1\)") as refused:
        store.change_blocking(one(client_key="k", **other))
    assert "new key" in refused.value.hint
    assert isinstance(refused.value, UserError)
    assert refused.value.status == 409


def test_the_database_itself_refuses_a_key_twice(store: db.Store) -> None:
    store.change_blocking(one(client_key="k"))

    def copy(c: db.Connection) -> None:
        columns = [column.name for column in schema.jobs.c if column.name not in ("seq", "id")]
        names = ", ".join(f'"{name}"' for name in columns)
        c.exec_driver_sql(f"INSERT INTO jobs (id, {names}) SELECT 'x', {names} FROM jobs")

    with pytest.raises(IntegrityError):
        store.change_blocking(copy)


def test_updates(store: db.Store) -> None:
    store.change_blocking(one())
    store.change_blocking(
        lambda c: db.update_job(c, "1", state="completed", reason="done", end_s=5.0, exit_code=0, hold=True, run_s=2.5)
    )
    with store.read() as c:
        row = db.get_job(c, "1")
    assert row is not None
    assert (row.state, row.reason, row.end_s, row.exit_code, row.hold, row.run_s) == (
        "completed",
        "done",
        5.0,
        0,
        True,
        2.5,
    )
    assert row.terminal
    store.change_blocking(lambda c: db.update_job(c, "1"))


def test_updates_that_cannot_be(store: db.Store) -> None:
    store.change_blocking(one())
    with pytest.raises(KeyError, match="9"):
        store.change_blocking(lambda c: db.update_job(c, "9", state="running"))
    with pytest.raises(TypeError, match="a job's seq, spec cannot be set"):
        store.change_blocking(lambda c: db.update_job(c, "1", seq=4, spec="{}"))
    with pytest.raises(IntegrityError):
        store.change_blocking(lambda c: db.update_job(c, "1", state="asleep"))
    with store.read() as c:
        assert db.count_by_state(c, db.EVERYTHING)["queued"] == 1


def test_environment_values_are_never_printed(store: db.Store) -> None:
    made = store.change_blocking(lambda c: submit(c, members=[1, 2]))
    assert "hunter2" in made[0].spec
    assert "hunter2" not in repr(made)
    # Nor by the errors of the database, which show parameters unless told otherwise.
    with pytest.raises(SQLAlchemyError) as failed:
        store.change_blocking(lambda c: submit(c, user=None))
    assert "hunter2" not in str(failed.value)
    with pytest.raises(SQLAlchemyError) as failed:
        store.change_blocking(lambda c: submit(c, user=None, members=[1, 2]))
    assert "hunter2" not in str(failed.value)


def test_alive_jobs_are_those_that_have_not_ended_in_order(store: db.Store) -> None:
    for state in db.STATES:
        job_id = store.change_blocking(one())
        store.change_blocking(lambda c, job_id=job_id, state=state: db.update_job(c, job_id, state=state))
    with store.read() as c:
        assert [row.state for row in db.alive_jobs(c)] == list(db.ALIVE_STATES)
    assert set(db.ALIVE_STATES) | set(db.TERMINAL_STATES) == set(db.STATES)


def test_more_specifications_than_fit_in_one_question(store: db.Store) -> None:
    store.change_blocking(lambda c: [submit(c, spec=json.dumps({"n": i})) for i in range(1203)])
    with store.read() as c:
        assert [json.loads(row.spec)["n"] for row in db.alive_jobs(c)] == list(range(1203))


def test_dependencies(store: db.Store) -> None:
    store.change_blocking(lambda c: submit(c, members=[1, 2]))
    store.change_blocking(one(after=["1", "1"]))
    store.change_blocking(lambda c: submit(c, members=[1, 2], after=["1_2", "2"]))
    with store.read() as c:
        assert db.dependencies_of(c, "2") == ["1"]
        assert db.dependencies_of(c, "3_2") == ["1_2", "2"]
        assert db.dependencies_of(c, "1_1") == []
        assert db.dependents_of(c, "1_2") == ["2", "3"]
        assert db.dependents_of(c, "1_1") == ["2"]
        assert db.dependents_of(c, "2") == ["3"]


def test_attempts(store: db.Store) -> None:
    store.change_blocking(one())
    parts = (("n0", (0, 1)), ("n1", (2,)))
    store.change_blocking(lambda c: db.insert_attempt(c, "1", 1, created_s=1.0, parts=[("n0", [0, 1]), ("n1", [2])]))
    with store.read() as c:
        fresh = db.get_attempt(c, "1", 1)
        assert fresh is not None
        assert db.open_attempts(c) == db.attempts_of(c, "1") == [fresh]
    assert (fresh.state, fresh.parts, fresh.codes, fresh.mechanism) == ("starting", parts, {}, "checkpoint")
    store.change_blocking(
        lambda c: db.update_attempt(c, "1", 1, state="exited", ended_s=9.0, cause="exit", codes={0: 0, 1: -9}, step=7)
    )
    store.change_blocking(lambda c: db.update_attempt(c, "1", 1))
    store.change_blocking(lambda c: db.insert_attempt(c, "1", 2, created_s=10.0, parts=parts, mechanism="cuda"))
    with store.read() as c:
        assert [(row.incarnation, row.codes) for row in db.attempts_of(c, "1")] == [(1, {0: 0, 1: -9}), (2, {})]
        assert [row.incarnation for row in db.open_attempts(c)] == [2]
        assert db.get_attempt(c, "1", 3) is None


def test_attempts_that_cannot_be(store: db.Store) -> None:
    store.change_blocking(one())
    store.change_blocking(lambda c: db.insert_attempt(c, "1", 1, created_s=1.0))
    with pytest.raises(IntegrityError):
        store.change_blocking(lambda c: db.insert_attempt(c, "1", 1, created_s=1.0))
    with pytest.raises(IntegrityError):  # no such job
        store.change_blocking(lambda c: db.insert_attempt(c, "5", 1, created_s=1.0))
    with pytest.raises(KeyError, match=r"1\.2"):
        store.change_blocking(lambda c: db.update_attempt(c, "1", 2, state="exited"))
    with pytest.raises(TypeError, match="colour"):
        store.change_blocking(lambda c: db.update_attempt(c, "1", 1, colour="red"))


def test_drained_nodes(store: db.Store) -> None:
    store.change_blocking(lambda c: db.set_drained(c, "n1", True, "fan"))
    store.change_blocking(lambda c: db.set_drained(c, "n0", True, "disk"))
    store.change_blocking(lambda c: db.set_drained(c, "n1", True, "fans"))
    with store.read() as c:
        assert db.drained_nodes(c) == {"n0": "disk", "n1": "fans"}
    store.change_blocking(lambda c: db.set_drained(c, "n0", False))
    with store.read() as c:
        assert db.drained_nodes(c) == {"n1": "fans"}


def test_meta(store: db.Store) -> None:
    with store.read() as c:
        assert db.get_meta(c, "epoch") is None
    store.change_blocking(lambda c: db.set_meta(c, "epoch", "1"))
    store.change_blocking(lambda c: db.set_meta(c, "epoch", "2"))
    with store.read() as c:
        assert db.get_meta(c, "epoch") == "2"
