"""The stream of changes: in order, complete, only what one may see; a slow reader comes back and misses nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kit.api_world import World, running_world
from kit.waiting import until
from thebes.api.streams import Bulletin, event_stream
from thebes.live import changes
from thebes.live.limits import Limits
from thebes.store.principal import EVERYTHING, Viewer


class Reader:
    """Collects a stream in a thread."""

    def __init__(self, world: World, who: str, after: int | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.ended = threading.Event()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._headers = {} if after is None else {"last-event-id": str(after)}
        self._world, self._who = world, who
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        try:
            self._read_all()
        finally:
            self.ended.set()

    def _read_all(self) -> None:
        with self._world.http(self._who) as http, http.stream("GET", "/v1/stream", headers=self._headers) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                self._ready.set()
                self.lines.append(line)
                if line.startswith("data: "):
                    self.events.append(json.loads(line[6:]))
                if self._stop.is_set():
                    return

    def __enter__(self) -> Reader:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def of(self, job_id: str) -> list[str]:
        return [event["kind"] for event in self.events if event["job_id"] == job_id]


@pytest.fixture
def quiet(world: World) -> Iterator[None]:
    yield
    world.clear()


def test_live_events_are_those_of_the_store_in_order(world: World, quiet: None) -> None:
    client = world.client("ann")
    with Reader(world, "ann") as reader:
        for _ in range(5):
            job = client.submit("true")
            world.end(job.id)
            job.wait(60)
        stored = client.events(limit=10_000)
        until(lambda: reader.events and reader.events[-1]["seq"] >= stored[-1]["seq"])
    told = [event for event in stored if event["seq"] >= reader.events[0]["seq"]]
    assert reader.events[: len(told)] == told
    assert [event["seq"] for event in told] == sorted({event["seq"] for event in told})
    assert reader.of(job.id)[0] == "submitted"
    assert reader.of(job.id)[-1] == "completed"


def test_frames(world: World, quiet: None) -> None:
    with Reader(world, "ann") as reader:
        world.client("ann").submit("true")
        until(lambda: len(reader.events) >= 2)
    first = reader.events[0]
    at = reader.lines.index(f"id: {first['seq']}")
    assert reader.lines[at + 1] == f"event: {first['kind']}"
    assert reader.lines[at + 2].startswith("data: {")
    assert reader.lines[at + 3] == ""


def test_coming_back_misses_nothing_and_doubles_nothing(world: World, quiet: None) -> None:
    client = world.client("cat")
    start = max(event["seq"] for event in world.client("admin").events(limit=10_000))
    seen: list[int] = []
    for _ in range(4):  # in pieces, while things go on
        job = client.submit("true")
        with Reader(world, "cat", seen[-1] if seen else start) as reader:
            world.end(job.id)
            job.wait(60)
            last = client.events(limit=10_000)[-1]["seq"]
            until(lambda: reader.events and reader.events[-1]["seq"] >= last)  # noqa: B023 - used at once
        seen += [event["seq"] for event in reader.events]
    stored = [event["seq"] for event in client.events(after=start, limit=10_000)]
    assert seen == [seq for seq in stored if seq <= seen[-1]]


def test_strangers_events_are_not_told(world: World, quiet: None) -> None:
    with Reader(world, "ann") as ann, Reader(world, "dan") as dan, Reader(world, "admin") as admin:
        jobs = {name: world.client(name).submit("true", gpus=8).id for name in ("ann", "bob", "cat")}
        world.client("admin").drain("n1", reason="test")
        world.client("admin").undrain("n1")
        until(lambda: all(job in [event["job_id"] for event in admin.events] for job in jobs.values()))
        until(lambda: admin.events[-1]["kind"] == "undrain" or "undrain" in [e["kind"] for e in admin.events])
        until(lambda: "undrain" in [event["kind"] for event in dan.events])
        until(lambda: "undrain" in [event["kind"] for event in ann.events])
    assert {event["job_id"] for event in ann.events} <= {jobs["ann"], None}
    assert {event["job_id"] for event in dan.events} <= {jobs["cat"], None}, "an open tenant's jobs are seen"
    assert jobs["cat"] in {event["job_id"] for event in dan.events}
    assert all(set(event) == {"seq", "time_s", "job_id", "node", "kind", "actor", "detail"} for event in ann.events)


def test_the_latest_events(world: World, quiet: None) -> None:
    jobs = {name: [world.client(name).submit("true") for _ in range(4)] for name in ("ann", "cat")}
    for name, submitted in jobs.items():
        for job in submitted:
            until(lambda: world.client(name).job(job.id)["state"] == "running")  # noqa: B023 - used at once
    for who in ("ann", "cat", "dan", "admin"):
        client = world.client(who)
        every = client.events(limit=10_000)
        for limit in (1, 5, len(every), 10_000):
            assert client.events(limit=limit, latest=True) == every[-limit:]
    of_one = world.client("ann").events(jobs["ann"][0].id)
    assert world.client("ann").events(jobs["ann"][0].id, limit=2, latest=True) == of_one[-2:]


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 19])
def test_odd_last_event(world: World, last: str) -> None:
    with world.http("ann") as http:
        assert http.get("/v1/stream", headers={"last-event-id": last}).status_code == 422


def test_streams_are_counted_and_given_back(tmp_path: Path) -> None:
    with running_world(tmp_path / "i", Limits(streams_per_token=2)) as world:
        for _ in range(3):
            with Reader(world, "ann"), Reader(world, "ann"), world.http("ann") as http:
                assert http.get("/v1/stream").status_code == 429
            # A reader that has gone is noticed with the next event, or the next sign of life.
            world.client("ann").submit("true")
            until(lambda: not world.app.state.api.places._open)


def test_the_server_stops_with_streams_open(tmp_path: Path) -> None:
    with running_world(tmp_path / "i", goodbye_s=600) as world:
        job = world.client("ann").submit("true")
        readers = [Reader(world, "ann").__enter__() for _ in range(3)]
        pool = ThreadPoolExecutor(1)
        answer = pool.submit(world.http("ann").get, f"/v1/jobs/{job.id}/wait?timeout_s=60")
        until(lambda: job.id in world.app.state.api.bulletin._waiting)
    # The server waits for requests that are under way far longer than we wait for the server.
    assert answer.result(60).json()["done"] is False
    for reader in readers:
        assert reader.ended.wait(60)


# ---- without a server


@contextmanager
def small_queues(monkeypatch: pytest.MonkeyPatch, room: int) -> Iterator[changes.Changes]:
    monkeypatch.setattr(changes, "QUEUE_ROOM", room)
    yield changes.Changes()


def happened(seq: int, **more: Any) -> dict[str, Any]:
    plain = {"seq": seq, "time_s": 0.0, "job_id": "1", "node": None, "kind": "state", "actor": "", "detail": {}}
    return {**plain, "user": "ann", "tenant": "closed", **more}


def seqs(blocks: list[bytes]) -> list[int]:
    return [int(block.split()[1]) for block in blocks if block.startswith(b"id: ")]


def test_who_lags_is_told_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> tuple[list[bytes], list[bytes]]:
        with small_queues(monkeypatch, 10) as changes:
            log: list[dict[str, Any]] = []

            def publish(count: int) -> None:
                for _ in range(count):
                    log.append(happened(len(log) + 1))
                    changes.publish(log[-1])

            async def stored(seq: int) -> list[dict[str, Any]]:
                return [event for event in log if event["seq"] > seq][:500]

            closing = asyncio.Event()
            stream = event_stream(changes, None, stored, EVERYTHING, closing)
            first = [await anext(stream)]
            publish(50)  # nobody reads meanwhile
            first += [block async for block in stream]
            again = event_stream(changes, seqs(first)[-1], stored, EVERYTHING, closing)
            second = [await anext(again)]
            for _ in range(40):
                second.append(await anext(again))
            publish(3)
            for _ in range(3):
                second.append(await anext(again))
            await again.aclose()
            assert not changes._queues, "subscriptions are given back"
            return first, second

    first, second = asyncio.run(story())
    assert first[-1].startswith(b"event: lagged")
    assert seqs(first) + seqs(second) == list(range(1, 54))


def test_an_event_that_comes_by_both_ways_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> list[bytes]:
        with small_queues(monkeypatch, 100) as changes:

            async def stored(seq: int) -> list[dict[str, Any]]:
                for number in range(1, 6):  # committed and published while the store is read
                    changes.publish(happened(number))
                return [happened(number) for number in range(1, 6)]

            stream = event_stream(changes, 0, stored, EVERYTHING, asyncio.Event())
            blocks = [await anext(stream) for _ in range(6)]
            changes.publish(happened(6))
            blocks.append(await anext(stream))
            await stream.aclose()
            return blocks

    assert seqs(asyncio.run(story())) == [1, 2, 3, 4, 5, 6]


def test_a_user_hears_of_own_jobs_and_nodes_live(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> list[bytes]:
        with small_queues(monkeypatch, 100) as changes:
            viewer = Viewer("ann", "user", "closed", frozenset({"shared"}))
            stream = event_stream(changes, None, lambda seq: None, viewer, asyncio.Event())
            blocks = [await anext(stream)]
            changes.publish(happened(1, user="bob"))
            changes.publish(happened(2, user="cat", tenant="shared"))
            changes.publish(happened(3))
            changes.publish(happened(4, job_id=None, user=None, tenant=None, node="n0"))
            changes.publish(happened(5, job_id=None, user=None, tenant=None))
            changes.publish(happened(6))
            blocks += [await anext(stream) for _ in range(3)]
            await stream.aclose()
            return blocks

    assert seqs(asyncio.run(story())) == [3, 4, 6]


def test_the_bulletin_wakes_members_and_arrays_and_survives_a_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        with small_queues(monkeypatch, 5) as changes:
            bulletin = Bulletin(changes, asyncio.Event())
            with bulletin.watch("17") as array, bulletin.watch("17_3") as member, bulletin.watch("18") as other:
                await asyncio.sleep(0)
                changes.publish(happened(1, job_id="17_3"))
                await bulletin.wait(array, 60)
                assert array.is_set()
                assert member.is_set()
                assert not other.is_set()
                for number in range(20):  # too much at once
                    changes.publish(happened(number, job_id="99"))
                await bulletin.wait(other, 60)
                assert other.is_set(), "after a lag everybody looks again"
                other.clear()
                changes.publish(happened(30, job_id="18"))
                await bulletin.wait(other, 60)
                assert other.is_set()
            await bulletin.close()
            assert not changes._queues
            assert not bulletin._waiting

    asyncio.run(story())
