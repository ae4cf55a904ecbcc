"""The Python client against a real server: both kinds do the same, in fewer lines than it takes to explain."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import thebes
from kit.api_world import World
from kit.waiting import until
from thebes.client import AsyncClient, Client, ServerError


@pytest.fixture(autouse=True)
def nothing_left(world: World) -> Iterator[None]:
    yield
    world.clear()


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class Either:
    """Calls one of the two clients and gives plain values back, so that each test is written once."""

    def __init__(self, kind: str, world: World, who: str) -> None:
        make = Client if kind == "sync" else AsyncClient
        self.client: Any = make(world.url, world.tokens[who])
        self._loop = asyncio.new_event_loop() if kind == "async" else None

    def do(self, value: Any) -> Any:
        return value if self._loop is None else self._loop.run_until_complete(value)

    def all(self, items: Any, count: int | None = None) -> list[Any]:
        if self._loop is None:
            return [item for _, item in zip(range(count or 1 << 60), items, strict=False)]

        async def collect() -> list[Any]:
            found: list[Any] = []
            async for item in items:
                found.append(item)
                if len(found) == count:
                    break
            await items.aclose()
            return found

        return self._loop.run_until_complete(collect())

    def close(self) -> None:
        self.do(self.client.close())
        if self._loop is not None:
            self._loop.close()


@pytest.fixture
def ann(kind: str, world: World) -> Iterator[Either]:
    either = Either(kind, world, "ann")
    yield either
    either.close()


def test_submit_wait_logs(ann: Either, world: World) -> None:
    job = ann.do(ann.client.submit("python train.py --name 'a b'", gpus=2, name="first"))
    assert job.ids == (job.id,)
    until(lambda: world.is_running(job.id))
    info = ann.do(job.info())
    assert info["spec"]["command"] == ["python", "train.py", "--name", "a b"]
    assert info["spec"]["workdir"] == str(Path.cwd())
    world.write_log(job.id, b"one\n")
    world.write_log(job.id, b"two\n")
    world.end(job.id)
    assert ann.do(job.wait(60))["state"] == "completed"
    assert b"".join(ann.all(job.logs())) == b"one\ntwo\n"
    assert ann.do(ann.client.wait(job))["state"] == "completed"  # the job itself will do where an id will


def test_wait_gives_up_in_time(ann: Either) -> None:
    job = ann.do(ann.client.submit("true"))
    began_s = time.monotonic()
    assert ann.do(job.wait(0.2))["done"] is False
    assert time.monotonic() - began_s < 20, "it was told when a long poll was over"


def test_follow_goes_through_incarnations(ann: Either, world: World) -> None:
    job = ann.do(ann.client.submit("true"))
    helper = world.client("ann")

    def live() -> None:
        until(lambda: world.is_running(job.id, 1))
        world.write_log(job.id, b"first life\n", 1)
        until(lambda: world.engine.read_until.get((job.id, 1, 0)) == len(b"first life\n"))
        helper.preempt(job.id)
        until(lambda: world.is_running(job.id, 2))
        world.write_log(job.id, b"second life\n", 2)
        world.end(job.id, incarnation=2)

    thread = threading.Thread(target=live)
    thread.start()
    assert b"".join(ann.all(job.logs(follow=True))) == b"first life\nsecond life\n"
    thread.join()


def test_logs_from_the_end(ann: Either, world: World) -> None:
    job = ann.do(ann.client.submit("true"))
    until(lambda: world.is_running(job.id))
    world.write_log(job.id, b"x" * 3_000_000 + b"the end")
    assert b"".join(ann.all(ann.client.logs(job.id, offset=-7))) == b"the end"
    assert len(b"".join(ann.all(ann.client.logs(job.id)))) == 3_000_007


def test_pages_are_read_as_one_goes(ann: Either, kind: str) -> None:
    many = f"many-{kind}"
    ann.do(ann.client.submit("true", array=list(range(450)), name=many))
    found = ann.all(ann.client.jobs(name=many))
    assert [job["array_index"] for job in found] == list(reversed(range(450)))
    assert len(ann.all(ann.client.jobs(name=many, limit=203))) == 203
    assert [job["array_index"] for job in ann.all(ann.client.jobs(name=many, oldest=True, limit=2))] == [0, 1]
    page = ann.do(ann.client.jobs_page(limit=3, name=many))
    assert len(page["jobs"]) == 3
    assert page["next"]


def test_acts_and_questions(ann: Either, world: World) -> None:
    client = ann.client
    job = ann.do(client.submit("true", gpus=8))
    waiting = ann.do(client.submit("true", gpus=8, env={"A": "b"}))
    assert ann.do(client.hold(waiting.id)) == [waiting.id]
    assert ann.do(client.release(waiting.id)) == [waiting.id]
    assert ann.do(client.environment(waiting.id)) == {"env": {"A": "b"}}
    assert ann.do(client.plan("true", gpus=1))["starts"] in ("now", "later")
    assert ann.do(client.plan({"command": ["true"]}, gpus=1))["starts"] in ("now", "later")
    assert [node["name"] for node in ann.do(client.nodes())] == ["n0", "n1"]
    assert ann.do(client.status())["you"] == {"user": "ann", "role": "user", "tenant": "closed"}
    assert ann.do(client.events(job.id))[0]["kind"] == "submitted"
    assert ann.do(client.job_schema())["title"] == "Thebes job"
    assert ann.do(client.tenants())[0]["name"] == "closed"
    assert ann.do(client.cancel(waiting.id)) == [waiting.id]
    assert ann.do(job.cancel()) == [job.id]


def test_admins_calls(kind: str, world: World) -> None:
    admin = Either(kind, world, "admin")
    client = admin.client
    assert admin.do(client.drain("n1", reason="fan"))["drained"] is True
    assert admin.do(client.undrain("n1"))["drained"] is False
    assert admin.do(client.put_tenant("lab", gpu_quota=4))["gpu_quota"] == 4
    made = admin.do(client.create_token("eve", tenant="lab", expires_in_s=60))
    assert made["id"] in [one["id"] for one in admin.do(client.tokens())]
    assert admin.do(client.revoke_token(made["id"]))["revoked"] is True
    assert admin.do(client.delete_tenant("lab"))["name"] == "lab"
    job = admin.do(client.submit("true"))
    until(lambda: world.is_running(job.id))
    seq = admin.do(client.decisions(limit=1))[0]["seq"]
    assert admin.do(client.decision(seq))["kind"] == "decision"
    admin.close()


def test_stream(ann: Either, world: World) -> None:
    start = world.client("admin").events(latest=True, limit=1)[0]["seq"]
    job = ann.do(ann.client.submit("true"))
    world.end(job.id)
    world.client("ann").wait(job.id, 60)
    stored = world.client("ann").events(job.id)
    assert ann.all(ann.client.stream(after=start), len(stored)) == stored


def test_snapshot_is_uploaded_with_the_job(ann: Either, world: World, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    job = ann.do(ann.client.submit("python train.py", workdir=tmp_path, snapshot=True))
    until(lambda: world.is_running(job.id))
    (tmp_path / "train.py").write_text("print(2)")
    launch = world.engine.living[job.id, 1].launch
    assert (Path(launch.workdir) / "train.py").read_text() == "print(1)"
    assert Path(launch.workdir) == world.folder / "jobs" / job.id / "snapshot"
    digest = ann.do(ann.client.upload_snapshot(tmp_path))
    assert len(digest) == 64


def test_a_retry_never_doubles_a_job(ann: Either, kind: str) -> None:
    first = ann.do(ann.client.submit("true", key=f"the-same-{kind}"))
    second = ann.do(ann.client.submit("true", key=f"the-same-{kind}"))
    assert first.id == second.id


@pytest.mark.parametrize(
    ("call", "message", "hint", "status"),
    [
        (lambda c: c.job("999999"), "there is no job 999999", "thebes ps", 404),
        (lambda c: c.submit("true", gpu=1), "a job has no field 'gpu'", "did you mean 'gpus'?", 422),
        (lambda c: c.job("../../etc"), "", "", 404),
        (lambda c: c.job("seventeen"), "'seventeen' is not the id of a job", "as in 17", 422),
        (lambda c: c.tokens(), "this is for admins", "role admin", 403),
        (lambda c: c.drain("n0"), "this is for admins", "", 403),
    ],
)
def test_errors_carry_message_and_hint(ann: Either, call: Any, message: str, hint: str, status: int) -> None:
    with pytest.raises(thebes.UserError) as caught:
        ann.do(call(ann.client))
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert isinstance(caught.value, ServerError)
    assert caught.value.status == status


def test_wrong_token(world: World, kind: str) -> None:
    either = Either(kind, world, "nonsense")
    with pytest.raises(thebes.UserError, match="token is not valid"):
        either.do(either.client.status())
    with pytest.raises(thebes.UserError, match="token is not valid"):
        either.all(either.client.stream())
    either.close()


def test_names_at_the_door() -> None:
    assert thebes.Client is Client
    assert thebes.AsyncClient is AsyncClient


def test_import_is_light() -> None:
    """`thebes submit` should not wait for httpx before it has read its options, nor load pydantic or the server."""
    heavy = "{'httpx', 'pydantic', 'fastapi', 'sqlalchemy', 'numpy', 'asyncio', 'ssl'}"
    code = f"import sys, thebes.client; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_with_statement(world: World) -> None:
    with Client(world.url, world.tokens["ann"]) as client:
        assert client.status()["trouble"] is None

    async def both() -> None:
        async with AsyncClient(world.url, world.tokens["ann"]) as client:
            found = await asyncio.gather(*(client.status() for _ in range(5)))
            assert len(found) == 5

    asyncio.run(both())
