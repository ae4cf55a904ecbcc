"""Every role against every endpoint. The routes are asked of the app itself: one without a line here fails the test."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kit.api_world import World
from kit.waiting import until
from thebes.api import access

STRANGERS = (None, "nonsense", "expired", "revoked")
JOB = {"command": ["true"], "workdir": "/"}


@dataclass(frozen=True)
class Line:
    """What a request answers, by who asks: admin, the owner, somebody else, somebody else of an open tenant."""

    admin: int
    owner: int
    other: int
    open: int
    body: Any = None
    query: str = ""
    content: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


SEEN = {"admin": 200, "owner": 200, "other": 404, "open": 200}
OWN = {"admin": 200, "owner": 200, "other": 404, "open": 403}
ALL = {"admin": 200, "owner": 200, "other": 200, "open": 200}
ADMIN = {"admin": 200, "owner": 403, "other": 403, "open": 403}
MADE = {"admin": 201, "owner": 201, "other": 201, "open": 201}
# A conflict shows that the asker was let through: the job is not in the state for it.
HELD = {"admin": 409, "owner": 409, "other": 404, "open": 403}

TABLE = {
    "POST /v1/jobs": Line(**MADE, body=JOB),
    "POST /v1/jobs/plan": Line(**ALL, body=JOB),
    "GET /v1/jobs": Line(**ALL),
    "GET /v1/jobs/{job_id}": Line(**SEEN),
    "GET /v1/jobs/{job_id}/events": Line(**SEEN),
    "GET /v1/jobs/{job_id}/wait": Line(**SEEN, query="?timeout_s=0"),
    "GET /v1/jobs/{job_id}/logs": Line(**SEEN),
    "GET /v1/jobs/{job_id}/environment": Line(**OWN),
    "POST /v1/jobs/{job_id}/cancel": Line(**HELD),
    "POST /v1/jobs/{job_id}/hold": Line(**HELD),
    "POST /v1/jobs/{job_id}/release": Line(**HELD),
    "POST /v1/jobs/{job_id}/requeue": Line(**OWN),
    "POST /v1/jobs/{job_id}/preempt": Line(**HELD),
    "GET /v1/nodes": Line(**ALL),
    "POST /v1/nodes/{name}/drain": Line(**ADMIN),
    "POST /v1/nodes/{name}/undrain": Line(**ADMIN),
    "GET /v1/events": Line(**ALL),
    "GET /v1/stream": Line(**ALL),
    "GET /v1/status": Line(**ALL),
    "GET /v1/schema/job": Line(**ALL),
    "GET /v1/healthz": Line(**ALL),
    "GET /v1/openapi.json": Line(**ALL),
    "GET /metrics": Line(**ADMIN),
    "POST /v1/snapshots": Line(admin=422, owner=422, other=422, open=422, content=b"not an archive"),
    "GET /v1/tenants": Line(**ALL),
    "GET /v1/tenants/{tenant}": Line(**SEEN),
    "PUT /v1/tenants/{tenant}": Line(**ADMIN, body={"open": True}),
    "DELETE /v1/tenants/{tenant}": Line(admin=409, owner=403, other=403, open=403),
    "POST /v1/tokens": Line(admin=201, owner=403, other=403, open=403, body={"user": "eve"}),
    "GET /v1/tokens": Line(**ADMIN),
    "DELETE /v1/tokens/{token_id}": Line(**ADMIN),
    "GET /v1/decisions": Line(**ADMIN),
    "GET /v1/decisions/{seq}": Line(**ADMIN),
    "POST /v1/shutdown": Line(**ADMIN, body={"mode": "keep"}),
}
OPEN_TO_ALL = {"GET /v1/healthz", "GET /v1/openapi.json"}
PEOPLE = {"admin": "admin", "owner": "cat", "open": "dan", "other": "ann"}  # cat's tenant is open, dan is in it


def routes_of(app: Any) -> set[str]:
    """Every method and path that the app answers."""
    return {f"{method} {route.path}" for route in app.routes for method in route.methods if method != "HEAD"}


def spelled(operation: str) -> str:
    return operation.replace("/v1/tenants/{name}", "/v1/tenants/{tenant}")


def test_the_table_is_complete(world: World) -> None:
    told = {
        f"{method.upper()} {path}" for path, operations in world.app.openapi()["paths"].items() for method in operations
    } | {"GET /v1/openapi.json"}
    assert {spelled(one) for one in routes_of(world.app)} == set(TABLE)
    assert {spelled(one) for one in told} == set(TABLE)


@pytest.fixture(scope="module")
def facts(world: World) -> dict[str, str]:
    """A job of cat that has ended, and other things to ask for."""
    job = world.client("cat").submit("true", env={"SECRET": "7h3"})
    world.end(job.id)
    assert job.wait(60)["state"] == "completed"
    admin = world.client("admin")
    admin.submit("true", tenant="shared", gpus=8)
    return {
        "job_id": job.id,
        "name": "n0",
        "tenant": "shared",
        "token_id": "",
        "seq": str(admin.decisions()[0]["seq"]),
    }


def ask(world: World, who: str | None, operation: str, facts: dict[str, str]) -> tuple[int, Any]:
    method, path = operation.split(" ")
    line = TABLE[operation]
    if "{token_id}" in path:
        facts = facts | {"token_id": str(world.client("admin").create_token("victim")["id"])}
    if operation == "POST /v1/nodes/{name}/undrain":
        world.http("admin").post("/v1/nodes/n0/drain", json={})
    content = (
        line.content if line.content is not None else None if line.body is None else json.dumps(line.body).encode()
    )
    with world.http(who) as http, http.stream(method, path.format(**facts) + line.query, content=content) as response:
        if response.headers["content-type"].startswith("text/event-stream"):
            return response.status_code, None  # it has no end
        response.read()
        return response.status_code, response


@pytest.mark.parametrize("operation", TABLE)
@pytest.mark.parametrize("role", PEOPLE)
def test_role_against_endpoint(world: World, facts: dict[str, str], role: str, operation: str) -> None:
    try:
        status, response = ask(world, PEOPLE[role], operation, facts)
        assert status == getattr(TABLE[operation], role), response.text if response is not None else ""
        if status >= 400:
            assert set(response.json()) == {"error", "hint"}
            assert response.json()["error"]
    finally:
        if "drain" in operation:
            world.http("admin").post("/v1/nodes/n0/undrain", json={})
        if operation.endswith("requeue"):
            until(lambda: world.http("admin").post(f"/v1/jobs/{facts['job_id']}/cancel").status_code == 409)


@pytest.mark.parametrize("operation", TABLE)
@pytest.mark.parametrize("who", STRANGERS)
def test_strangers(world: World, facts: dict[str, str], who: str | None, operation: str) -> None:
    status, response = ask(world, who, operation, facts)
    if operation in OPEN_TO_ALL:
        assert status == 200
        return
    assert status == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert set(response.json()) == {"error", "hint"}


@pytest.mark.parametrize("header", ["", "Bearer", "Basic abc", "Bearer " + "x" * 5000, "bearer\tx", "Bearer \xe9\xe9"])
def test_odd_headers(world: World, header: str) -> None:
    with world.http(None) as http:
        response = http.get("/v1/status", headers={"authorization": header.encode("latin-1")})
    assert response.status_code == 401


@pytest.mark.parametrize("what", ["", "/events", "/wait?timeout_s=0", "/logs", "/environment"])
def test_foreign_and_unknown_look_the_same(world: World, facts: dict[str, str], what: str) -> None:
    with world.http("ann") as http:
        foreign = http.get(f"/v1/jobs/{facts['job_id']}{what}")
        unknown = http.get(f"/v1/jobs/999999{what}")
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text.replace(facts["job_id"], "?") == unknown.text.replace("999999", "?")


@pytest.mark.parametrize("verb", ["cancel", "hold", "release", "requeue", "preempt"])
def test_foreign_and_unknown_act_the_same(world: World, facts: dict[str, str], verb: str) -> None:
    with world.http("ann") as http:
        foreign = http.post(f"/v1/jobs/{facts['job_id']}/{verb}")
        unknown = http.post(f"/v1/jobs/999999/{verb}")
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text.replace(facts["job_id"], "?") == unknown.text.replace("999999", "?")


def test_lists_hold_only_what_one_may_see(world: World) -> None:
    mine = {name: world.client(name).submit("true", gpus=8).id for name in ("ann", "bob", "cat", "dan")}

    def seen_by(name: str) -> set[str]:
        return {job["user"] for job in world.client(name).jobs()}

    assert seen_by("ann") == {"ann"}
    assert seen_by("bob") == {"bob"}
    assert {"cat", "dan"} <= seen_by("cat") == seen_by("dan")
    assert not seen_by("cat") & {"ann", "bob"}
    assert {"ann", "bob", "cat", "dan"} <= seen_by("admin")
    assert list(world.client("ann").jobs(user="bob")) == []

    def told_to(name: str) -> set[str]:
        return {event["job_id"] for event in world.client(name).events(limit=10_000) if event["job_id"]}

    until(lambda: set(mine.values()) <= told_to("admin"), "the controller has told of all four")
    assert mine["ann"] in told_to("ann")
    assert mine["bob"] not in told_to("ann")
    assert {mine["cat"], mine["dan"]} <= told_to("dan")
    for name, job_id in mine.items():
        world.client(name).cancel(job_id)


def test_nodes_show_no_strangers_job(world: World) -> None:
    world.clear()
    job = world.client("cat").submit("true", gpus=4, nodes=1)
    until(lambda: world.is_running(job.id))

    def held(name: str) -> list[tuple[bool, str | None, str | None]]:
        gpus = [gpu for node in world.client(name).nodes() for gpu in node["gpus"] if gpu["busy"]]
        return [(gpu["busy"], gpu["job"], gpu["user"]) for gpu in gpus]

    assert held("cat") == held("dan") == held("admin") == [(True, job.id, "cat")] * 4
    assert held("ann") == [(True, None, None)] * 4
    job.cancel()
    assert job.wait(60)["state"] == "cancelled"


def test_closing_a_tenant_takes_effect_at_once(world: World) -> None:
    job = world.client("cat").submit("true", gpus=8)
    admin, dan = world.client("admin"), world.http("dan")
    assert dan.get(f"/v1/jobs/{job.id}").status_code == 200
    admin.put_tenant("shared", open=False)
    assert dan.get(f"/v1/jobs/{job.id}").status_code == 404
    admin.put_tenant("shared", open=True)
    assert dan.get(f"/v1/jobs/{job.id}").status_code == 200
    job.cancel()


def test_a_revoked_token_is_out_at_once(world: World) -> None:
    admin = world.client("admin")
    made = admin.create_token("eve", tenant="closed")
    with world.http(None) as http:
        headers = {"authorization": f"Bearer {made['token']}"}
        assert http.get("/v1/status", headers=headers).status_code == 200
        admin.revoke_token(made["id"])
        assert http.get("/v1/status", headers=headers).status_code == 401


def test_a_token_expires_while_it_is_in_use(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world.client("admin").create_token("eve", expires_in_s=3600)
    with world.http(None) as http:
        headers = {"authorization": f"Bearer {made['token']}"}
        assert http.get("/v1/status", headers=headers).status_code == 200
        later = SimpleNamespace(time=lambda: time.time() + 3601, monotonic=time.monotonic)
        monkeypatch.setattr(access, "time", later)
        assert http.get("/v1/status", headers=headers).status_code == 401


def test_the_text_of_a_token_is_told_once(world: World) -> None:
    admin = world.client("admin")
    made = admin.create_token("eve")
    assert made["token"] not in json.dumps(admin.tokens())
    assert "hash" not in json.dumps(admin.tokens())


def test_users_look_at_their_own_tenant_only(world: World) -> None:
    assert [one["name"] for one in world.client("ann").tenants()] == ["closed"]
    assert {one["name"] for one in world.client("admin").tenants()} >= {"closed", "shared"}
    with world.http("ann") as http:
        assert http.get("/v1/tenants/closed").json()["gpu_quota"] == 8
        assert http.get("/v1/tenants/shared").status_code == 404


def test_a_user_cannot_submit_for_another_tenant(world: World) -> None:
    with world.http("ann") as http:
        response = http.post("/v1/jobs", json=JOB | {"tenant": "shared"})
        assert response.status_code == 403
        foreign = world.client("cat").submit("true", gpus=8)
        assert http.post("/v1/jobs", json=JOB | {"after": [foreign.id]}).status_code in (404, 422)
        foreign.cancel()


def test_the_last_admin_stays(world: World) -> None:
    admin = world.client("admin")
    others = [one["id"] for one in admin.tokens() if one["role"] == "admin" and not one["revoked"]]
    with world.http("admin") as http:
        answers = [http.delete(f"/v1/tokens/{number}") for number in reversed(others)]
    assert [one.status_code for one in answers[:-1]].count(200) == len(answers) - 1
    assert answers[-1].status_code == 409
    assert "last token of an admin" in answers[-1].json()["error"]
