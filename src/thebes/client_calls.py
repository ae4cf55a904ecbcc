"""Every call of the clients, in one place: which request it is, and what its answer holds. There is no I/O here.

A call that takes several requests (pages, following a log, waiting, uploading before submitting) is a *flow*: a
generator that yields the calls to be carried out and the items for the caller. Both clients drive the same flows.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from thebes.client_types import (
        ArrayDetail,
        ClusterStatus,
        DecisionInfo,
        DrainAnswer,
        EnvironmentAnswer,
        EventInfo,
        JobDetail,
        JobInfo,
        JobPage,
        Json,
        NewToken,
        NodeInfo,
        PlanAnswer,
        Role,
        SnapshotAnswer,
        SubmittedAnswer,
        TenantInfo,
        TokenInfo,
        WaitAnswer,
    )

LONG_POLL_S = 25.0
PAGE = 200
LOG_CHUNK_BYTES = 1 << 20

Answer = TypeVar("Answer")
Handed = TypeVar("Handed")


def _whole(response: httpx.Response) -> Any:
    return response.json()


@dataclass(frozen=True)
class Call(Generic[Answer]):
    """One request, and how to read its answer. If it is `repeatable`, doing it twice is the same as doing it once."""

    method: str
    path: str
    params: Mapping[str, object] = field(default_factory=dict[str, object])
    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    file: Path | None = None
    repeatable: bool = True
    wait_s: float = 0.0  # the server may hold the request for so long on purpose
    read: Callable[[httpx.Response], Answer] = _whole


@dataclass(frozen=True)
class Item(Generic[Handed]):
    """Something that a flow gives to the caller, in contrast to a Call that is to be carried out."""

    value: Handed


if TYPE_CHECKING:
    # What a flow gives out, and what it returns at its end. It gets the answer of each Call that it yields.
    Flow = Generator[Call[Any] | Item[Handed], Any, Answer]

# --- jobs ------------------------------------------------------------------------------------------------------------


def submission(spec: Mapping[str, object], key: str, snapshot: str | bool | None) -> Flow[None, SubmittedAnswer]:
    wanted = _complete(spec)
    if snapshot is True:
        uploaded = yield snapshot_of(str(wanted["workdir"]))
        wanted["snapshot"] = uploaded["digest"]
    elif snapshot:
        wanted["snapshot"] = snapshot
    return (yield Call("POST", "/v1/jobs", body=wanted, headers={"idempotency-key": key}))


def plan(command: str | Sequence[str] | Mapping[str, object], fields: Mapping[str, object]) -> Call[PlanAnswer]:
    spec = command if isinstance(command, Mapping) else {"command": words(command)}
    return Call("POST", "/v1/jobs/plan", body=_complete({**spec, **fields}))


def job(job_id: object) -> Call[JobDetail | ArrayDetail]:
    return Call("GET", f"/v1/jobs/{_quoted(job_id)}")


def jobs_page(chosen: Mapping[str, object], limit: int, cursor: str | None) -> Call[JobPage]:
    return Call("GET", "/v1/jobs", params={**chosen, "limit": limit, "cursor": cursor})


def chosen_jobs(
    state: str | Sequence[str] | None, user: str | None, tenant: str | None, name: str | None, oldest: bool
) -> dict[str, object]:
    """The parameters that tell the server which jobs a list is about."""
    states = [state] if isinstance(state, str) else list(state or ())
    return {"state": states, "user": user, "tenant": tenant, "name": name, "oldest": oldest or None}


def pages(chosen: Mapping[str, object], limit: int | None) -> Flow[JobInfo, None]:
    left, cursor = limit, None
    while left is None or left > 0:
        size = PAGE if left is None else min(PAGE, left)
        page: JobPage = yield jobs_page(chosen, size, cursor)
        for job in page["jobs"]:
            yield Item(job)
        left = None if left is None else left - len(page["jobs"])
        cursor = page["next"]
        if cursor is None:
            return


def waiting(job_id: object, timeout_s: float | None) -> Flow[None, WaitAnswer]:
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        hold_s = LONG_POLL_S if until_s is None else min(LONG_POLL_S, max(0.0, until_s - time.monotonic()))
        path = f"/v1/jobs/{_quoted(job_id)}/wait"
        answer: WaitAnswer = yield Call("GET", path, params={"timeout_s": round(hold_s, 3)}, wait_s=hold_s)
        if answer["done"] or (until_s is not None and time.monotonic() >= until_s):
            return answer


def log_pieces(job_id: object, rank: int, follow: bool, incarnation: int | None, offset: int) -> Flow[bytes, None]:
    path = f"/v1/jobs/{_quoted(job_id)}/logs"
    wait_s = LONG_POLL_S if follow else 0.0
    while True:
        params = {"rank": rank, "incarnation": incarnation, "offset": offset, "limit": LOG_CHUNK_BYTES}
        piece: _LogPiece = yield Call("GET", path, params={**params, "wait_s": wait_s}, wait_s=wait_s, read=_read_piece)
        if piece.content:
            yield Item(piece.content)
        incarnation, offset = piece.incarnation or incarnation, piece.offset
        if piece.final or (not follow and (piece.done or not piece.content)):
            return
        if piece.done:
            incarnation, offset = (incarnation or 0) + 1, 0


@dataclass(frozen=True)
class _LogPiece:
    content: bytes
    offset: int
    incarnation: int
    done: bool  # nothing more will come from this incarnation
    final: bool  # nor from a later one


def _read_piece(response: httpx.Response) -> _LogPiece:
    said = response.headers
    return _LogPiece(
        response.content,
        int(said["x-thebes-offset"]),
        int(said["x-thebes-incarnation"]),
        said["x-thebes-done"] == "1",
        said["x-thebes-final"] == "1",
    )


def environment(job_id: object) -> Call[EnvironmentAnswer]:
    return Call("GET", f"/v1/jobs/{_quoted(job_id)}/environment")


def events(job_id: object | None, after: int, limit: int, latest: bool) -> Call[list[EventInfo]]:
    path = "/v1/events" if job_id is None else f"/v1/jobs/{_quoted(job_id)}/events"
    return Call("GET", path, params={"after": after, "limit": limit, "latest": latest or None}, read=_field("events"))


def act(verb: str, job_id: object, *, repeatable: bool = True, grace_s: float | None = None) -> Call[list[str]]:
    body = {} if grace_s is None else {"grace_s": grace_s}
    return Call("POST", f"/v1/jobs/{_quoted(job_id)}/{verb}", body=body, repeatable=repeatable, read=_field("ids"))


# --- the cluster -----------------------------------------------------------------------------------------------------


def nodes() -> Call[list[NodeInfo]]:
    return Call("GET", "/v1/nodes", read=_field("nodes"))


def drain(node: str, reason: str, preempt: bool) -> Call[DrainAnswer]:
    return Call("POST", f"/v1/nodes/{_quoted(node)}/drain", body={"reason": reason, "preempt": preempt})


def undrain(node: str) -> Call[DrainAnswer]:
    return Call("POST", f"/v1/nodes/{_quoted(node)}/undrain", body={})


def status() -> Call[ClusterStatus]:
    return Call("GET", "/v1/status")


def decisions(limit: int, before: int | None) -> Call[list[DecisionInfo]]:
    return Call("GET", "/v1/decisions", params={"limit": limit, "before": before}, read=_field("decisions"))


def decision(seq: int) -> Call[DecisionInfo]:
    return Call("GET", f"/v1/decisions/{int(seq)}")


def job_schema() -> Call[dict[str, Json]]:
    return Call("GET", "/v1/schema/job")


# --- tenants, tokens, snapshots --------------------------------------------------------------------------------------


def tenants() -> Call[list[TenantInfo]]:
    return Call("GET", "/v1/tenants", read=_field("tenants"))


def put_tenant(name: str, gpu_quota: int | None, open: bool) -> Call[TenantInfo]:
    return Call("PUT", f"/v1/tenants/{_quoted(name)}", body={"gpu_quota": gpu_quota, "open": open})


def delete_tenant(name: str) -> Call[TenantInfo]:
    return Call("DELETE", f"/v1/tenants/{_quoted(name)}")


def tokens() -> Call[list[TokenInfo]]:
    return Call("GET", "/v1/tokens", read=_field("tokens"))


def create_token(user: str, role: Role, tenant: str | None, expires_in_s: float | None) -> Call[NewToken]:
    body = {"user": user, "role": role, "tenant": tenant, "expires_in_s": expires_in_s}
    return Call("POST", "/v1/tokens", body=body, repeatable=False)


def revoke_token(token_id: int) -> Call[TokenInfo]:
    return Call("DELETE", f"/v1/tokens/{int(token_id)}")


def snapshot_of(path: str | os.PathLike[str]) -> Call[SnapshotAnswer]:
    """The upload of a folder, packed into a file here; the client that carries the call out deletes that file."""
    from thebes.client_snapshot import pack

    packed, digest = pack(path)
    headers = {"content-type": "application/gzip", "x-thebes-digest": digest}
    return Call("POST", "/v1/snapshots", headers=headers, file=packed, wait_s=120.0)


def uploading(path: str | os.PathLike[str]) -> Flow[None, str]:
    uploaded = yield snapshot_of(path)
    return uploaded["digest"]


# --- parts -----------------------------------------------------------------------------------------------------------


def words(command: str | Sequence[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else [str(word) for word in command]


def _complete(spec: Mapping[str, object]) -> dict[str, object]:
    """A job's fields with a work directory: it runs where it was submitted, unless it says otherwise."""
    return {**spec, "workdir": str(spec.get("workdir") or os.getcwd())}  # noqa: PTH109 - pathlib is slow to import


def _field(name: str) -> Callable[[httpx.Response], Any]:
    return lambda response: response.json()[name]


def _quoted(word: object) -> str:
    from urllib.parse import quote

    return quote(str(word), safe="")
