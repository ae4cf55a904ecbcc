"""Jobs over HTTP: submit once, wait, read logs by offset, see no secrets, stay within the limits."""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kit.api_world import World, running_world
from kit.waiting import until
from thebes.live.limits import Limits, RateLimit

JOB = {"command": ["python", "train.py"], "workdir": "/"}


@pytest.fixture(autouse=True)
def nothing_left(world: World) -> Any:
    yield
    world.clear()


class TestSubmit:
    def test_answer_names_the_job(self, world: World) -> None:
        with world.http("ann") as http:
            response = http.post("/v1/jobs", json=JOB)
            assert response.status_code == 201
            job_id = response.json()["id"]
            assert response.json() == {"id": job_id, "ids": [job_id]}
            shown = http.get(f"/v1/jobs/{job_id}").json()
        assert shown["user"] == "ann"
        assert shown["tenant"] == "closed"
        assert shown["command"] == "python train.py"

    def test_array(self, world: World) -> None:
        with world.http("ann") as http:
            told = http.post("/v1/jobs", json=JOB | {"array": [1, 5, 7]}).json()
            number = told["id"]
            assert told["ids"] == [f"{number}_1", f"{number}_5", f"{number}_7"]
            shown = http.get(f"/v1/jobs/{number}").json()
            assert shown["array"] is True
            assert sum(shown["states"].values()) == 3
            assert [member["array_index"] for member in shown["members"]] == [1, 5, 7]
            assert http.get(f"/v1/jobs/{number}_5").json()["array_index"] == 5
            assert http.get(f"/v1/jobs/{number}_2").status_code == 404
            assert set(http.post(f"/v1/jobs/{number}/cancel").json()["ids"]) == set(told["ids"])

    def test_same_key_same_job(self, world: World) -> None:
        with world.http("ann") as http:
            first = http.post("/v1/jobs", json=JOB, headers={"idempotency-key": "k1"})
            again = http.post("/v1/jobs", json=JOB, headers={"idempotency-key": "k1"})
            other = http.post("/v1/jobs", json=JOB, headers={"idempotency-key": "k2"})
            assert first.json() == again.json()
            assert other.json() != first.json()
            wrong = http.post("/v1/jobs", json=JOB | {"gpus": 2}, headers={"idempotency-key": "k1"})
        assert wrong.status_code == 409
        assert "was used for another job" in wrong.json()["error"]

    def test_a_key_belongs_to_its_user(self, world: World) -> None:
        ids = set()
        for who in ("ann", "bob"):
            with world.http(who) as http:
                ids.add(http.post("/v1/jobs", json=JOB, headers={"idempotency-key": "mine"}).json()["id"])
        assert len(ids) == 2

    def test_many_at_once_with_one_key(self, world: World) -> None:
        with world.http("ann") as http, ThreadPoolExecutor(8) as pool:

            def send(_: int) -> str:
                return http.post("/v1/jobs", json=JOB, headers={"idempotency-key": "race"}).json()["id"]

            assert len(set(pool.map(send, range(24)))) == 1

    @pytest.mark.parametrize("key", ["", "x" * 201, "a b", "é".encode()])
    def test_odd_keys(self, world: World, key: Any) -> None:
        with world.http("ann") as http:
            response = http.post("/v1/jobs", json=JOB, headers={"idempotency-key": key})
        assert response.status_code == 422
        assert "Idempotency-Key" in response.json()["error"]

    def test_what_can_never_run(self, world: World) -> None:
        with world.http("ann") as http:
            response = http.post("/v1/jobs", json=JOB | {"gpus": 100})
            assert response.status_code == 422
            assert "can never run" in response.json()["error"]
            assert http.post("/v1/jobs/plan", json=JOB | {"gpus": 100}).json()["starts"] == "never"

    def test_snapshot_that_was_not_uploaded(self, world: World) -> None:
        with world.http("ann") as http:
            response = http.post("/v1/jobs", json=JOB | {"snapshot": "0" * 64})
        assert response.status_code in (404, 422)
        assert "snapshot" in response.json()["error"]

    def test_plan_submits_nothing(self, world: World) -> None:
        with world.http("ann") as http:
            before = http.get("/v1/jobs").json()["jobs"]
            plan = http.post("/v1/jobs/plan", json=JOB | {"gpus": 3}).json()
            assert plan["starts"] == "now"
            assert sum(len(gpus) for gpus in plan["nodes"].values()) == 3
            assert http.get("/v1/jobs").json()["jobs"] == before


class TestLists:
    def test_pages(self, world: World) -> None:
        with world.http("ann") as http:
            number = http.post("/v1/jobs", json=JOB | {"array": list(range(25)), "name": "pages"}).json()["id"]
            seen, cursor = [], None
            while True:
                page = http.get(
                    "/v1/jobs", params={"limit": 10, "name": "pages"} | ({"cursor": cursor} if cursor else {})
                )
                seen += [job["id"] for job in page.json()["jobs"]]
                cursor = page.json()["next"]
                if cursor is None:
                    break
            oldest = http.get("/v1/jobs", params={"oldest": True, "limit": 1, "name": "pages"}).json()["jobs"]
        assert seen == [f"{number}_{index}" for index in reversed(range(25))]
        assert oldest[0]["id"] == f"{number}_0"

    def test_by_state(self, world: World) -> None:
        with world.http("ann") as http:
            job = world.client("ann").submit("true", name="mine")
            world.end(job.id)
            job.wait(60)
            found = http.get("/v1/jobs?state=completed&state=failed&name=mine").json()["jobs"]
            assert [one["id"] for one in found] == [job.id]
            assert http.get("/v1/jobs?state=running&name=mine").json()["jobs"] == []

    def test_why_a_job_waits_is_in_the_list(self, world: World) -> None:
        client = world.client("ann")
        first, second = client.submit("true", gpus=8), client.submit("true", gpus=8)
        until(lambda: client.job(first.id)["state"] == "running")
        assert client.job(first.id)["gpus_held"] == {"n0": [0, 1, 2, 3], "n1": [0, 1, 2, 3]}
        assert until(lambda: client.job(second.id)["reason"])

    @pytest.mark.parametrize(
        ("query", "message"),
        [
            ("state=sleeping", "state"),
            ("limit=0", "limit"),
            ("limit=1001", "limit"),
            ("cursor=abc", "cursor"),
            ("stat=queued", "no parameter 'stat'"),
        ],
    )
    def test_wrong_parameters(self, world: World, query: str, message: str) -> None:
        with world.http("ann") as http:
            response = http.get(f"/v1/jobs?{query}")
        assert response.status_code == 422
        assert message in response.json()["error"]

    def test_unknown_parameter_has_a_hint(self, world: World) -> None:
        with world.http("ann") as http:
            assert http.get("/v1/jobs?stat=x").json()["hint"] == "did you mean 'state'?"


class TestSecrets:
    def test_values_of_the_environment_show_nowhere_else(self, world: World) -> None:
        secret = "hunter2-7h3-v4lu3"
        cat = world.client("cat")
        job = cat.submit("true", env={"TOKEN": secret, "EMPTY": ""})
        until(lambda: world.is_running(job.id))
        array = cat.submit("true", env={"TOKEN": secret}, array=[1, 2])
        assert cat.environment(job.id) == {"env": {"TOKEN": secret, "EMPTY": ""}}
        assert world.client("admin").environment(array.id)["env"]["TOKEN"] == secret
        assert cat.job(job.id)["spec"]["env"] == {"TOKEN": "***", "EMPTY": "***"}
        paths = [
            "/v1/jobs",
            f"/v1/jobs/{job.id}",
            f"/v1/jobs/{array.id}",
            f"/v1/jobs/{job.id}/events",
            f"/v1/jobs/{job.id}/wait?timeout_s=0",
            "/v1/events?limit=10000",
            "/v1/nodes",
            "/v1/status",
            "/metrics",
            "/v1/decisions?limit=1000",
        ]
        with world.http("admin") as http:
            for path in paths:
                response = http.get(path)
                assert response.status_code == 200
                assert secret not in response.text, path
        with world.http("dan") as http:  # sees the job, is not its owner
            assert http.get(f"/v1/jobs/{job.id}").json()["spec"]["env"]["TOKEN"] == "***"
            assert http.get(f"/v1/jobs/{job.id}/environment").status_code == 403

    def test_a_wrong_environment_is_not_repeated(self, world: World) -> None:
        with world.http("ann") as http:
            response = http.post("/v1/jobs", json=JOB | {"env": {"TOKEN": 12345678}})
        assert response.status_code == 422
        assert "12345678" not in response.text

    def test_secrets_are_not_logged(self, world: World, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("DEBUG"), world.http("ann") as http:
            http.post("/v1/jobs", json=JOB | {"env": {"TOKEN": "s3cr3t-v4lu3"}})
            http.post("/v1/jobs", json=JOB | {"env": {"TOKEN": "s3cr3t-v4lu3"}, "wrong": 1})
        told = [record.getMessage() + json.dumps(vars(record), default=str) for record in caplog.records]
        assert not any("s3cr3t-v4lu3" in line for line in told)
        assert not any(world.tokens["ann"] in line for line in told)


class TestWait:
    def test_answers_when_the_job_ends(self, world: World) -> None:
        job = world.client("ann").submit("true")
        with world.http("ann") as http, ThreadPoolExecutor(1) as pool:
            began_s = time.monotonic()
            answer = pool.submit(lambda: http.get(f"/v1/jobs/{job.id}/wait?timeout_s=60").json())
            world.end(job.id, 3)
            told = answer.result(90)
        assert time.monotonic() - began_s < 45.0, "it was told when its time was over"
        assert told["done"] is True
        assert told["state"] == "failed"
        assert told["exit_code"] == 3

    def test_answers_when_the_time_is_over(self, world: World) -> None:
        job = world.client("ann").submit("true")
        with world.http("ann") as http:
            told = http.get(f"/v1/jobs/{job.id}/wait?timeout_s=0.2").json()
        assert told["done"] is False

    def test_array_is_done_when_all_are(self, world: World) -> None:
        array = world.client("ann").submit("true", array=[0, 1, 2])
        for member, code in zip(array.ids, (0, 4, 0), strict=True):
            assert not world.client("ann").wait(array.id, 0.0)["done"]
            world.end(member, code)
        told = world.client("ann").wait(array.id, 60)
        assert told["done"]
        assert told["states"] == {"completed": 2, "failed": 1}
        assert (told["state"], told["exit_code"]) == ("failed", 4)

    def test_three_hundred_wait_at_once(self, world: World) -> None:
        job = world.client("ann").submit("true")
        asks = [socket.create_connection(("127.0.0.1", int(world.url.rpartition(":")[2]))) for _ in range(300)]
        line = (
            f"GET /v1/jobs/{job.id}/wait?timeout_s=60 HTTP/1.0\r\nAuthorization: Bearer {world.tokens['ann']}\r\n\r\n"
        )
        for ask in asks:
            ask.sendall(line.encode())
        watch = world.app.state.api.bulletin
        until(lambda: len(watch._waiting.get(job.id, ())) == 300)
        world.end(job.id)
        for ask in asks:
            ask.settimeout(60)
            with ask, ask.makefile("rb") as answer:
                assert b'"done":true' in answer.read()
        until(lambda: job.id not in watch._waiting)


class TestLogs:
    @pytest.fixture
    def job(self, world: World) -> Any:
        job = world.client("ann").submit("true")
        until(lambda: world.is_running(job.id))
        return job

    def ask(self, world: World, job: Any, query: str = "") -> Any:
        with world.http("ann") as http:
            return http.get(f"/v1/jobs/{job.id}/logs?{query}")

    def test_offsets(self, world: World, job: Any) -> None:
        world.write_log(job.id, b"0123456789")
        first = self.ask(world, job, "limit=4")
        assert (first.content, first.headers["x-thebes-offset"], first.headers["x-thebes-done"]) == (b"0123", "4", "0")
        assert first.headers["x-thebes-incarnation"] == "1"
        assert first.headers["content-type"] == "text/plain; charset=utf-8"
        second = self.ask(world, job, "offset=4")
        assert (second.content, second.headers["x-thebes-offset"]) == (b"456789", "10")
        beyond = self.ask(world, job, "offset=1000")
        assert (beyond.content, beyond.headers["x-thebes-offset"]) == (b"", "10")
        assert self.ask(world, job, "offset=-3").content == b"789"
        assert self.ask(world, job, "offset=-300").content == b"0123456789"

    def test_bytes_come_as_they_are(self, world: World, job: Any) -> None:
        data = bytes(range(256)) * 40
        world.write_log(job.id, data, rank=0)
        world.write_log(job.id, b"other", rank=3)
        assert self.ask(world, job).content == data
        assert self.ask(world, job, "rank=3").content == b"other"

    def test_a_rank_that_there_is_not(self, world: World, job: Any) -> None:
        response = until(lambda: (got := self.ask(world, job, "rank=7")).status_code == 404 and got)
        assert "has no log of rank 7" in response.json()["error"]
        client = world.client("ann")
        client.submit("true", gpus=8)
        waiting = client.submit("true", gpus=8)
        assert self.ask(world, waiting, "rank=7").status_code == 200, "nobody knows yet"

    def test_done_only_after_the_last_byte(self, world: World, job: Any) -> None:
        world.write_log(job.id, b"last words")
        world.end(job.id)
        job.wait(60)
        first = self.ask(world, job)
        assert (first.content, first.headers["x-thebes-done"]) == (b"last words", "0")
        second = self.ask(world, job, f"offset={first.headers['x-thebes-offset']}&wait_s=60")
        assert second.headers["x-thebes-done"] == second.headers["x-thebes-final"] == "1"

    def test_long_poll_hears_of_new_lines(self, world: World, job: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.ask, world, job, "wait_s=60")
            until(lambda: (job.id, 1, 0) in world.engine.read_until)  # it has looked in vain
            world.write_log(job.id, b"at last")
            assert answer.result(90).content == b"at last"

    def test_long_poll_hears_of_the_end(self, world: World, job: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.ask, world, job, "wait_s=60")
            world.end(job.id)
            assert answer.result(90).headers["x-thebes-done"] == "1"

    def test_each_incarnation_has_its_own(self, world: World, job: Any) -> None:
        client = world.client("ann")
        world.write_log(job.id, b"first life", 1)
        assert client.preempt(job.id) == [job.id]
        until(lambda: world.is_running(job.id, 2))
        world.write_log(job.id, b"second life", 2)
        assert self.ask(world, job, "incarnation=1").content == b"first life"
        assert self.ask(world, job).content == b"second life"
        ended = self.ask(world, job, "incarnation=1&offset=10")
        assert (ended.headers["x-thebes-done"], ended.headers["x-thebes-final"]) == ("1", "0")
        coming = self.ask(world, job, "incarnation=3")
        assert (coming.content, coming.headers["x-thebes-done"]) == (b"", "0")

    def test_never_started(self, world: World) -> None:
        client = world.client("ann")
        client.submit("true", gpus=8)
        waiting = client.submit("true", gpus=8)
        response = self.ask(world, waiting)
        assert (response.content, response.headers["x-thebes-incarnation"]) == (b"", "0")
        assert response.headers["x-thebes-done"] == "0"
        client.cancel(waiting.id)
        waiting.wait(60)
        assert self.ask(world, waiting).headers["x-thebes-final"] == "1"

    def test_array_has_no_log_of_its_own(self, world: World) -> None:
        array = world.client("ann").submit("true", array=[3])
        response = self.ask(world, array)
        assert response.status_code == 409
        assert f"{array.id}_3" in response.json()["hint"]

    @pytest.mark.parametrize("fault", [OSError("no route to n0"), TimeoutError("n0 is silent")])
    def test_node_cannot_be_reached(self, world: World, job: Any, fault: Exception) -> None:
        world.engine.broken = fault
        try:
            response = self.ask(world, job)
        finally:
            world.engine.broken = None
        assert response.status_code == 503
        assert "cannot be read now" in response.json()["error"]


class TestActs:
    def test_cancel_hold_release_requeue_preempt(self, world: World) -> None:
        client = world.client("ann")
        blocker, job = client.submit("true", gpus=8), client.submit("true", gpus=8)
        until(lambda: client.job(blocker.id)["state"] == "running")
        assert client.hold(job.id) == [job.id]
        assert client.job(job.id)["state"] == "held"
        assert client.release(job.id) == [job.id]
        assert client.job(job.id)["state"] == "queued"
        assert client.cancel(blocker.id) == [blocker.id]
        until(lambda: world.is_running(job.id))
        assert client.preempt(job.id, grace_s=1.0) == [job.id]
        until(lambda: world.is_running(job.id, 2))
        world.end(job.id)
        assert job.wait(60)["state"] == "completed"
        assert client.requeue(job.id) == [job.id]
        until(lambda: world.is_running(job.id, 3))

    def test_options_are_checked(self, world: World) -> None:
        job = world.client("ann").submit("true")
        with world.http("ann") as http:
            assert http.post(f"/v1/jobs/{job.id}/cancel", json={"now": True}).status_code == 422
            assert http.post(f"/v1/jobs/{job.id}/preempt", json={"grace_s": -1}).status_code == 422
            assert http.post(f"/v1/jobs/{job.id}/cancel", content=b"{").status_code == 422
            assert http.post(f"/v1/jobs/{job.id}/cancel", content=b"").status_code == 200

    def test_drain(self, world: World) -> None:
        admin = world.client("admin")
        assert admin.drain("n0", reason="new fan") == {"name": "n0", "drained": True}
        shown = {node["name"]: node for node in world.client("ann").nodes()}
        assert (shown["n0"]["drained"], shown["n0"]["reason"]) == (True, "new fan")
        assert admin.undrain("n0") == {"name": "n0", "drained": False}
        with world.http("admin") as http:
            assert http.post("/v1/nodes/nowhere/drain").status_code == 404
            assert http.post("/v1/nodes/..%2F..%2Fetc/drain").status_code in (404, 422)

    def test_quota_takes_effect_at_once(self, world: World) -> None:
        admin = world.client("admin")
        admin.put_tenant("closed", gpu_quota=1)
        try:
            with world.http("ann") as http:
                response = http.post("/v1/jobs", json=JOB | {"gpus": 2})
            assert response.status_code == 422
            assert "quota" in response.json()["error"]
        finally:
            admin.put_tenant("closed", gpu_quota=8)


class TestLimits:
    def test_large_bodies(self, world: World) -> None:
        with world.http("ann") as http:
            large = json.dumps(JOB | {"env": {"A": "x" * (2 << 20)}}).encode()
            response = http.post("/v1/jobs", content=large)
            assert response.status_code == 413
            assert "larger than 1024 KiB" in response.json()["error"]

            def endless() -> Any:
                for _ in range(100):
                    yield b" " * (1 << 16)

            assert http.post("/v1/jobs", content=endless()).status_code == 413
            assert http.post("/v1/tokens", content=large).status_code == 403
        with world.http("admin") as http:
            assert http.post("/v1/tokens", content=large).status_code == 413
            assert http.put("/v1/tenants/x", content=large).status_code == 413

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/jobs/..%2f..%2ftoken",
            "/v1/jobs/%2e%2e",
            "/v1/jobs/1%00",
            "/v1/jobs/1;x",
            "/v1/jobs/01",
            "/v1/jobs/1_",
            "/v1/jobs/1_2_3",
            "/v1/jobs/" + "9" * 400,
            "/v1/jobs/-1",
            "/v1/jobs/1%0a",
            "/v1/jobs/",
            "/v1/nothing",
            "/",
            "/v1/tenants/..",
            "/v1/decisions/0",
            "/v1/decisions/99999999999999999999999",
        ],
    )
    def test_odd_paths(self, world: World, path: str) -> None:
        with world.http("admin") as http:
            response = http.get(path)
        assert response.status_code in (404, 422)
        assert set(response.json()) == {"error", "hint"}

    def test_wrong_method(self, world: World) -> None:
        with world.http("admin") as http:
            response = http.put("/v1/jobs")
        assert response.status_code == 405
        assert "PUT" in response.json()["error"]

    def test_rates(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        limits = Limits(user_requests_per_s=20, admin_requests_per_s=200, stranger_requests_per_s=5, plans_per_s=2)
        take, now_s = RateLimit.take, time.monotonic()  # for who counts time stands still, however slow this machine is
        monkeypatch.setattr(RateLimit, "take", lambda self, key, per_s, _: take(self, key, per_s, now_s))
        with running_world(tmp_path / "i", limits) as world:

            def burst(who: str | None, count: int) -> list[Any]:
                with world.http(who) as http:
                    return [http.get("/v1/schema/job") for _ in range(count)]

            statuses = [response.status_code for response in burst("ann", 30)]
            assert statuses == [200] * 20 + [429] * 10
            refused = burst("ann", 1)
            assert int(refused[0].headers["retry-after"]) >= 1
            assert "requests per second" in refused[0].json()["error"]
            assert [one.status_code for one in burst("bob", 10)] == [200] * 10, "each token has its own"
            assert [one.status_code for one in burst("nonsense", 8)] == [401] * 5 + [429] * 3
            assert [one.status_code for one in burst("admin", 50)] == [200] * 50
            with world.http("admin") as http:
                plans = [http.post("/v1/jobs/plan", json=JOB).status_code for _ in range(6)]
            assert plans == [200] * 2 + [429] * 4

    def test_uploads_are_streamed_to_disk_and_bounded(self, tmp_path: Path) -> None:
        limits = Limits(snapshot_bytes=1 << 20)
        with running_world(tmp_path / "i", limits) as world, world.http("ann") as http:

            def noise(size: int) -> Any:
                for _ in range(size >> 16):
                    yield bytes(1 << 16)

            response = http.post("/v1/snapshots", content=noise(4 << 20))
            assert response.status_code == 413
            response = http.post("/v1/snapshots", content=bytes(2 << 20))
            assert response.status_code == 413
            response = http.post("/v1/snapshots", content=gzip.compress(b"no archive"))
            assert response.status_code == 422
            assert list((tmp_path / "i/snapshots").iterdir()) == []

    def test_old_snapshots_go_unless_a_waiting_job_names_them(self, world: World, tmp_path: Path) -> None:
        client, snapshots = world.client("ann"), world.app.state.api.snapshots
        digests = []
        for name in ("used", "unused", "fresh"):
            (tmp_path / "which").write_text(name)
            digests.append(client.upload_snapshot(tmp_path))
        client.submit("true", gpus=8)
        client.submit("true", gpus=8, workdir=str(tmp_path), snapshot=digests[0])
        for digest in digests[:2]:
            os.utime(snapshots.path(digest), (time.time() - 90_000,) * 2)
        world.app.state.api.next_prune_s = 0.0
        assert client.upload_snapshot(tmp_path) == digests[2]
        assert [snapshots.has(digest) for digest in digests] == [True, False, True]


class TestServer:
    def test_an_internal_error_tells_a_number_and_no_more(self, world: World, caplog: pytest.LogCaptureFixture) -> None:
        job = world.client("ann").submit("true")
        until(lambda: world.is_running(job.id))
        world.engine.broken = RuntimeError("secret of the house")
        try:
            with caplog.at_level("ERROR"), world.http("ann") as http:
                response = http.get(f"/v1/jobs/{job.id}/logs")
        finally:
            world.engine.broken = None
        assert response.status_code == 500
        assert "secret" not in response.text
        assert "Traceback" not in response.text
        number = response.json()["error"].removeprefix("internal error ")
        record = next(one for one in caplog.records if one.message == "internal error")
        assert vars(record)["fields"]["id"] == number
        assert record.exc_info is not None

    def test_a_full_disk_accepts_nothing_and_says_so(self, world: World) -> None:
        def limit_pages(pages: int) -> None:
            world.store.change_blocking(lambda c: c.exec_driver_sql(f"PRAGMA max_page_count={pages}").scalar())

        with world.store.read() as c:
            used = int(c.exec_driver_sql("PRAGMA page_count").scalar_one())
        before = len(list(world.client("ann").jobs()))
        with world.http("ann") as http:
            limit_pages(used + 20)  # enough for whatever else is written meanwhile
            try:
                response = http.post("/v1/jobs", json=JOB | {"env": {"A": "x" * 200_000}})
            finally:
                limit_pages(1 << 30)
            assert response.status_code == 503
            assert "disk full" in response.json()["error"]
            assert len(list(world.client("ann").jobs())) == before
            assert http.post("/v1/jobs", json=JOB).status_code == 201

    def test_requests_are_in_the_metrics_by_route(self, world: World) -> None:
        with world.http("admin") as http:
            http.get("/v1/jobs/424242")
            http.request("BREW", "/v1/jobs")
            http.get("/v1/no-such-place/17")
            text = http.get("/metrics").text
        assert 'thebes_http_request_seconds_count{method="GET",route="/v1/jobs/{job_id}",status="404"}' in text
        assert "424242" not in text
        assert "no-such-place" not in text
        assert "BREW" not in text

    def test_gauges_follow_the_cluster(self, world: World) -> None:
        job = world.client("cat").submit("true", gpus=3)
        until(lambda: world.client("cat").job(job.id)["state"] == "running")
        with world.http("admin") as http:
            text = http.get("/metrics").text
        assert 'thebes_jobs{state="running",tenant="shared"} 1.0' in text
        assert 'thebes_gpus{node="n0",state="busy"} 3.0' in text

    def test_status(self, world: World) -> None:
        job = world.client("ann").submit("true", gpus=2)
        until(lambda: world.is_running(job.id))
        status = world.client("ann").status()
        assert status["gpus"] == {"total": 8, "busy": 2}
        assert status["jobs"]["running"] + status["jobs"]["starting"] == 1
        assert status["trouble"] is None

    def test_somebody_hangs_up_while_sending(self, world: World) -> None:
        port = int(world.url.rpartition(":")[2])
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as ask:
                head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {world.tokens['ann']}\r\n"
                ask.sendall((head + "Content-Length: 1000\r\n\r\n{").encode())
        assert world.client("ann").status()["trouble"] is None

    def test_threads_do_not_pile_up(self, world: World) -> None:
        client, before = world.client("ann"), threading.active_count()
        for _ in range(30):
            client.status()
            list(client.jobs(limit=1))
        assert threading.active_count() < before + 15
