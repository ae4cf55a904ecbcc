"""Thebes from Python: submit jobs, wait for them, read their logs. `Client` blocks, `AsyncClient` is awaited.

    import thebes
    job = thebes.Client().submit(["python", "train.py"], gpus=2)
    print(job.wait()["state"])

Every call is described once, in `_Calls`; the two clients differ in how they carry a call out. What takes several
requests (pages, following a log, waiting) is a generator of requests without I/O, driven by either client. While the
controller restarts or another one takes over, calls are repeated for up to 15 s; a submit carries a key, so a repeat
never makes a second job. A controller that only stands by names the leader, who is then asked.
"""

from __future__ import annotations

import json
import os
import shlex
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thebes.client_target import Target, find_target, not_running
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

RETRY_FOR_S = 15.0
LONG_POLL_S = 25.0
PAGE = 200
LOG_CHUNK_BYTES = 1 << 20


class ServerError(UserError):
    """What the server answered when it did not do what was asked; `status` is the HTTP status."""

    def __init__(self, message: str, *, hint: str = "", status: int = 500) -> None:
        super().__init__(message, hint=hint)
        self.status = status


@dataclass(frozen=True)
class Call:
    """One request and how to read its answer. `repeatable`: doing it twice is the same as doing it once."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    repeatable: bool = True
    wait_s: float = 0.0  # how long the server may hold the request on purpose
    read: Callable[[httpx.Response], Any] = lambda response: response.json()


@dataclass(frozen=True)
class Item:
    """Something a flow hands to the caller, as opposed to a Call that it wants carried out."""

    value: Any


Flow = Generator[Call | Item, Any, Any]


@dataclass(frozen=True)
class Job:
    """A submitted job. With an AsyncClient, await what the methods return."""

    client: Any = field(repr=False)
    id: str
    ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.id  # so that `client.wait(client.submit(...))` does what it says

    def info(self) -> Any:
        """Everything known about it."""
        return self.client.job(self.id)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Until it has ended, or `timeout_s` have passed: see `done` and `state` of what comes back."""
        return self.client.wait(self.id, timeout_s)

    def logs(self, rank: int = 0, *, follow: bool = False) -> Any:
        """Its output, in pieces of bytes."""
        return self.client.logs(self.id, rank, follow=follow)

    def cancel(self) -> Any:
        """End it."""
        return self.client.cancel(self.id)


class _Calls:
    """What both clients can do. Client returns the value, AsyncClient an awaitable of it."""

    def __init__(
        self, url: str | None = None, token: str | None = None, dir: str | os.PathLike[str] | None = None
    ) -> None:
        self._where = (url, token, dir)
        self._target: Target | None = None
        self._http: Any = None
        self._turn = 0  # which of several addresses is asked

    def _call(self, call: Call) -> Any:
        raise NotImplementedError

    def _last(self, flow: Flow) -> Any:
        raise NotImplementedError

    def _items(self, flow: Flow) -> Any:
        raise NotImplementedError

    # jobs

    def submit(
        self, command: str | Sequence[str], *, key: str | None = None, snapshot: str | bool | None = None, **fields: Any
    ) -> Any:
        """Queue a job; returns a `Job` once it is safely stored. Fields are those of the job file.

        `snapshot=True` uploads a copy of the work directory, so that later edits do not change what runs.
        """
        return self.submit_spec({"command": _words(command), **fields}, key=key, snapshot=snapshot)

    def submit_spec(
        self, spec: Mapping[str, Any], *, key: str | None = None, snapshot: str | bool | None = None
    ) -> Any:
        """Queue a job given as a whole, as read from a job file."""
        return self._last(self._submitting(_complete(spec), key or uuid.uuid4().hex, snapshot))

    def _submitting(self, spec: dict[str, Any], key: str, snapshot: str | bool | None) -> Flow:
        if snapshot is True:
            answer = yield self._upload(spec["workdir"])
            spec["snapshot"] = answer["digest"]
        elif snapshot:
            spec["snapshot"] = snapshot
        answer = yield Call("POST", "/v1/jobs", body=spec, headers={"idempotency-key": key})
        return Job(self, answer["id"], tuple(answer["ids"]))

    def plan(self, command: str | Sequence[str] | Mapping[str, Any], **fields: Any) -> Any:
        """Where and when a job would start and whom it would preempt, without submitting it."""
        spec = command if isinstance(command, Mapping) else {"command": _words(command)}
        return self._call(Call("POST", "/v1/jobs/plan", body=_complete({**spec, **fields})))

    def job(self, job_id: str) -> Any:
        """Everything known about one job, with its attempts; of an array: its members and their states."""
        return self._call(Call("GET", f"/v1/jobs/{_quoted(job_id)}"))

    def jobs(
        self,
        *,
        state: str | Sequence[str] | None = None,
        user: str | None = None,
        tenant: str | None = None,
        name: str | None = None,
        limit: int | None = None,
        oldest: bool = False,
    ) -> Any:
        """Jobs, newest first, page by page as you go on; `limit` ends it."""
        states = [state] if isinstance(state, str) else list(state or ())
        chosen = {"state": states, "user": user, "tenant": tenant, "name": name, "oldest": oldest or None}
        return self._items(_pages(chosen, limit))

    def jobs_page(self, *, limit: int = 50, cursor: str | None = None, **chosen: Any) -> Any:
        """One page: {"jobs": […], "next": cursor or None}."""
        return self._call(Call("GET", "/v1/jobs", params={**chosen, "limit": limit, "cursor": cursor}))

    def wait(self, job_id: str, timeout_s: float | None = None) -> Any:
        """Until a job (or all of an array) has ended: {"id", "done", "state", "exit_code", "reason", "states"}."""
        return self._last(_waiting(job_id, timeout_s))

    def logs(
        self, job_id: str, rank: int = 0, *, follow: bool = False, incarnation: int | None = None, offset: int = 0
    ) -> Any:
        """The output of one rank in pieces of bytes; a negative `offset` begins so many bytes before the end.

        `follow` goes on until the job has ended, through all its later incarnations.
        """
        return self._items(_log_pieces(job_id, rank, follow, incarnation, offset))

    def environment(self, job_id: str) -> Any:
        """The environment a job was submitted with; for its owner and admins."""
        return self._call(Call("GET", f"/v1/jobs/{_quoted(job_id)}/environment"))

    def events(self, job_id: str | None = None, *, after: int = 0, limit: int = 1000, latest: bool = False) -> Any:
        """What happened, oldest first: to one job, or to all that you may see; `latest`: the last ones of it."""
        path = "/v1/events" if job_id is None else f"/v1/jobs/{_quoted(job_id)}/events"
        params = {"after": after, "limit": limit, "latest": latest or None}
        return self._call(Call("GET", path, params=params, read=_field("events")))

    def cancel(self, job_id: str) -> Any:
        """End a job (all of an array); returns the ids that were ended."""
        return self._act("cancel", job_id)

    def hold(self, job_id: str) -> Any:
        """Keep a waiting job from starting."""
        return self._act("hold", job_id)

    def release(self, job_id: str) -> Any:
        """Let a held job start again."""
        return self._act("release", job_id)

    def requeue(self, job_id: str) -> Any:
        """Run an ended job once more, or stop a running one and queue it again."""
        return self._act("requeue", job_id, repeatable=False)

    def preempt(self, job_id: str, *, grace_s: float | None = None) -> Any:
        """Try the preemption handshake on a running job."""
        return self._act("preempt", job_id, repeatable=False, grace_s=grace_s)

    def _act(self, verb: str, job_id: str, *, repeatable: bool = True, **options: Any) -> Any:
        options = {name: value for name, value in options.items() if value is not None}
        path = f"/v1/jobs/{_quoted(job_id)}/{verb}"
        return self._call(Call("POST", path, body=options, repeatable=repeatable, read=_field("ids")))

    # the cluster

    def nodes(self) -> Any:
        """The nodes, their GPUs and who holds them."""
        return self._call(Call("GET", "/v1/nodes", read=_field("nodes")))

    def drain(self, node: str, *, reason: str = "", preempt: bool = False) -> Any:
        """Start nothing more on a node; with `preempt`, move its jobs away now."""
        body = {"reason": reason, "preempt": preempt}
        return self._call(Call("POST", f"/v1/nodes/{_quoted(node)}/drain", body=body))

    def undrain(self, node: str) -> Any:
        """Use a node again."""
        return self._call(Call("POST", f"/v1/nodes/{_quoted(node)}/undrain", body={}))

    def status(self) -> Any:
        """How the cluster is."""
        return self._call(Call("GET", "/v1/status"))

    def decisions(self, *, limit: int = 50, before: int | None = None) -> Any:
        """The latest decisions of the policy; for admins."""
        params = {"limit": limit, "before": before}
        return self._call(Call("GET", "/v1/decisions", params=params, read=_field("decisions")))

    def decision(self, seq: int) -> Any:
        """One decision with its reasons and actions; for admins."""
        return self._call(Call("GET", f"/v1/decisions/{int(seq)}"))

    def job_schema(self) -> Any:
        """The JSON Schema of a job file."""
        return self._call(Call("GET", "/v1/schema/job"))

    # tenants and tokens

    def tenants(self) -> Any:
        """Tenants, their quotas and whether their members see each other's jobs."""
        return self._call(Call("GET", "/v1/tenants", read=_field("tenants")))

    def put_tenant(self, name: str, *, gpu_quota: int | None = None, open: bool = False) -> Any:
        """Make or change a tenant; for admins."""
        body = {"gpu_quota": gpu_quota, "open": open}
        return self._call(Call("PUT", f"/v1/tenants/{_quoted(name)}", body=body))

    def delete_tenant(self, name: str) -> Any:
        """Remove a tenant; for admins."""
        return self._call(Call("DELETE", f"/v1/tenants/{_quoted(name)}"))

    def tokens(self) -> Any:
        """Tokens (never their text); for admins."""
        return self._call(Call("GET", "/v1/tokens", read=_field("tokens")))

    def create_token(
        self, user: str, *, role: str = "user", tenant: str | None = None, expires_in_s: float | None = None
    ) -> Any:
        """A new token; its text is in "token", this one time; for admins."""
        body = {"user": user, "role": role, "tenant": tenant, "expires_in_s": expires_in_s}
        return self._call(Call("POST", "/v1/tokens", body=body, repeatable=False))

    def revoke_token(self, token_id: int) -> Any:
        """End a token; for admins."""
        return self._call(Call("DELETE", f"/v1/tokens/{int(token_id)}"))

    def upload_snapshot(self, path: str | os.PathLike[str]) -> Any:
        """Upload a copy of a folder; returns its digest, for the field `snapshot` of a job."""
        return self._last(self._uploading(path))

    def _uploading(self, path: str | os.PathLike[str]) -> Flow:
        answer = yield self._upload(path)
        return answer["digest"]

    def _upload(self, path: str | os.PathLike[str]) -> Call:
        from thebes.client_snapshot import pack

        packed, digest = pack(path)
        headers = {"content-type": "application/gzip", "x-thebes-digest": digest}
        return Call("POST", "/v1/snapshots", headers=headers, file=packed, wait_s=120.0)

    # carrying calls out: what both clients share

    def _aim(self) -> Target:
        self._target = find_target(*self._where, turn=self._turn)
        return self._target

    def _missed(self) -> None:
        """Nobody answered there: ask the next one."""
        self._target = None
        self._turn += 1

    def _sent_on(self, response: httpx.Response, target: Target, attempts: _Patience) -> float | None:
        """Seconds until the next try if this was a standby, which has done nothing; None for an answer that counts."""
        if response.status_code != 503 or "x-thebes-standby" not in response.headers:
            return None
        leader = response.headers.get("x-thebes-leader", "")
        pause_s = attempts.nobody_leads()
        if pause_s is None:
            return None
        if not leader:
            self._missed()
            return pause_s
        self._target = target.at(leader)
        return 0.0 if attempts.first_time(leader) else pause_s

    def _request(self, call: Call, target: Target) -> dict[str, Any]:
        params = {name: value for name, value in call.params.items() if value is not None}
        request: dict[str, Any] = {"params": params, "timeout": 30.0 + call.wait_s}
        headers = {"authorization": f"Bearer {target.token}", **call.headers}
        if call.body is not None:
            request["content"] = json.dumps(call.body).encode()
            headers["content-type"] = "application/json"
        return {**request, "headers": headers}

    def _result(self, call: Call, response: httpx.Response) -> Any:
        if response.status_code >= 400:
            raise _server_error(response)
        return call.read(response)


class Client(_Calls):
    """Talks to a Thebes cluster and blocks until it has answered. Finds it by `dir`, THEBES_DIR or THEBES_URL."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close connections."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def stream(self, *, after: int | None = None) -> Iterator[dict[str, Any]]:
        """Changes as they happen, without end; goes on where it was after a break. `after`: a seq to begin behind."""
        import httpx

        attempts = _Patience()
        while True:
            target = self._target or self._aim()
            lines = _EventLines(after)
            try:
                with self._open(target).stream("GET", target.url + "/v1/stream", **lines.request(target)) as response:
                    if response.status_code >= 400:
                        response.read()
                        if (pause := self._sent_on(response, target, attempts)) is not None:
                            time.sleep(pause)
                            continue
                        raise _server_error(response)
                    attempts = _Patience()
                    for line in response.iter_lines():
                        if (event := lines.take(line)) is not None:
                            after = lines.after
                            yield event
            except httpx.TransportError as error:
                time.sleep(attempts.after(error, True, target))
                self._missed()

    def _open(self, target: Target) -> httpx.Client:
        if self._http is None:
            import httpx

            self._http = httpx.Client(**_pool(target))
        return self._http

    def _call(self, call: Call) -> Any:
        import httpx

        attempts = _Patience()
        while True:
            target = self._target or self._aim()
            try:
                response = self._send(call, target)
                pause = self._sent_on(response, target, attempts)
                if pause is None and response.status_code == 429:
                    pause = attempts.slowed_down(response)
                if pause is None:
                    _discard(call)
                    return self._result(call, response)
            except httpx.TransportError as error:
                pause = attempts.after(error, call.repeatable, target)
                self._missed()
            time.sleep(pause)

    def _send(self, call: Call, target: Target) -> httpx.Response:
        request = self._request(call, target)
        if call.file is None:
            return self._open(target).request(call.method, target.url + call.path, **request)
        with call.file.open("rb") as stream:
            return self._open(target).request(call.method, target.url + call.path, **request, content=stream)

    def _last(self, flow: Flow) -> Any:
        answer = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as end:
                return end.value
            answer = self._call(step) if isinstance(step, Call) else None

    def _items(self, flow: Flow) -> Iterator[Any]:
        answer = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration:
                return
            if isinstance(step, Item):
                answer = None
                yield step.value
            else:
                answer = self._call(step)


class AsyncClient(_Calls):
    """The same calls, to be awaited; iterators are `async for`."""

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def stream(self, *, after: int | None = None) -> AsyncIterator[dict[str, Any]]:
        """Changes as they happen, without end; goes on where it was after a break. `after`: a seq to begin behind."""
        import httpx

        attempts = _Patience()
        while True:
            target = self._target or self._aim()
            lines = _EventLines(after)
            try:
                async with self._open(target).stream(
                    "GET", target.url + "/v1/stream", **lines.request(target)
                ) as response:
                    if response.status_code >= 400:
                        await response.aread()
                        if (pause := self._sent_on(response, target, attempts)) is not None:
                            await _sleep(pause)
                            continue
                        raise _server_error(response)
                    attempts = _Patience()
                    async for line in response.aiter_lines():
                        if (event := lines.take(line)) is not None:
                            after = lines.after
                            yield event
            except httpx.TransportError as error:
                await _sleep(attempts.after(error, True, target))
                self._missed()

    def _open(self, target: Target) -> httpx.AsyncClient:
        if self._http is None:
            import httpx

            self._http = httpx.AsyncClient(**_pool(target))
        return self._http

    async def _call(self, call: Call) -> Any:
        import httpx

        attempts = _Patience()
        while True:
            target = self._target or self._aim()
            try:
                response = await self._send(call, target)
                pause = self._sent_on(response, target, attempts)
                if pause is None and response.status_code == 429:
                    pause = attempts.slowed_down(response)
                if pause is None:
                    _discard(call)
                    return self._result(call, response)
            except httpx.TransportError as error:
                pause = attempts.after(error, call.repeatable, target)
                self._missed()
            await _sleep(pause)

    async def _send(self, call: Call, target: Target) -> httpx.Response:
        request = self._request(call, target)
        if call.file is not None:
            request["content"] = _chunks(call.file)
        return await self._open(target).request(call.method, target.url + call.path, **request)

    async def _last(self, flow: Flow) -> Any:
        answer = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as end:
                return end.value
            answer = await self._call(step) if isinstance(step, Call) else None

    async def _items(self, flow: Flow) -> AsyncIterator[Any]:
        answer = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration:
                return
            if isinstance(step, Item):
                answer = None
                yield step.value
            else:
                answer = await self._call(step)


class _Patience:
    """How long to go on trying: 15 s in all, from 50 ms between tries to 1 s."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + RETRY_FOR_S
        self._pause_s = 0.05
        self._sent_to: set[str] = set()

    def after(self, error: httpx.TransportError, repeatable: bool, target: Target) -> float:
        """Seconds until the next try; raises when there should be none."""
        import httpx

        what = str(error) or type(error).__name__
        reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        if reached and not repeatable:
            message = f"the connection to {target.url} broke before the answer came: {what}"
            hint = "it may have been done or not: look before you repeat it"
            raise ServerError(message, hint=hint, status=0) from None
        if "CERTIFICATE_VERIFY_FAILED" in what:
            message = f"{target.url} shows a certificate that nobody known has signed"
            hint = "if it is the cluster's own, name it: THEBES_CA_FILE=/path/to/certificate.pem"
            raise ServerError(message, hint=hint, status=0) from None
        if not target.may_come_back():
            raise not_running(target) from None
        if time.monotonic() + self._pause_s > self._until_s:
            hint = "is the cluster running? try: thebes status"
            raise ServerError(f"no answer from {target.url}: {what}", hint=hint, status=0) from None
        return self._next()

    def slowed_down(self, response: httpx.Response) -> float | None:
        """Seconds to wait because the server asked for it, or None when patience is at its end."""
        try:
            asked_s = float(response.headers.get("retry-after", "1"))
        except ValueError:
            asked_s = 1.0
        return asked_s if time.monotonic() + asked_s <= self._until_s else None

    def nobody_leads(self) -> float | None:
        """Seconds until a standby is asked again, or None when patience is at its end."""
        return self._next() if time.monotonic() + self._pause_s <= self._until_s else None

    def first_time(self, leader: str) -> bool:
        """Whether we are sent there for the first time; later ones wait a little."""
        known = leader in self._sent_to
        self._sent_to.add(leader)
        return not known

    def _next(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(1.0, self._pause_s * 1.6)
        return pause_s


class _EventLines:
    """Reads server-sent events line by line."""

    def __init__(self, after: int | None) -> None:
        self.after = after
        self._data: list[str] = []

    def request(self, target: Target) -> dict[str, Any]:
        import httpx

        headers = {"authorization": f"Bearer {target.token}", "accept": "text/event-stream"}
        if self.after is not None:
            headers["last-event-id"] = str(self.after)
        return {"headers": headers, "timeout": httpx.Timeout(10.0, read=60.0)}

    def take(self, line: str) -> dict[str, Any] | None:
        """The event that this line completes, if any. "lagged" only means to connect again."""
        if line.startswith("data:"):
            self._data.append(line[5:].strip())
            return None
        if line or not self._data:
            return None
        event, self._data = json.loads("\n".join(self._data)), []
        if event.get("kind") == "lagged":
            return None
        self.after = max(self.after or 0, event["seq"])
        return event


def _pages(chosen: dict[str, Any], limit: int | None) -> Flow:
    left, cursor = limit, None
    while left is None or left > 0:
        size = PAGE if left is None else min(PAGE, left)
        answer = yield Call("GET", "/v1/jobs", params={**chosen, "limit": size, "cursor": cursor})
        for job in answer["jobs"]:
            yield Item(job)
        left = None if left is None else left - len(answer["jobs"])
        cursor = answer["next"]
        if cursor is None:
            return


def _waiting(job_id: str, timeout_s: float | None) -> Flow:
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        hold_s = LONG_POLL_S if until_s is None else min(LONG_POLL_S, max(0.0, until_s - time.monotonic()))
        path = f"/v1/jobs/{_quoted(job_id)}/wait"
        answer = yield Call("GET", path, params={"timeout_s": round(hold_s, 3)}, wait_s=hold_s)
        if answer["done"] or (until_s is not None and time.monotonic() >= until_s):
            return answer


def _log_pieces(job_id: str, rank: int, follow: bool, incarnation: int | None, offset: int) -> Flow:
    path = f"/v1/jobs/{_quoted(job_id)}/logs"
    wait_s = LONG_POLL_S if follow else 0.0
    while True:
        params = {"rank": rank, "incarnation": incarnation, "offset": offset, "limit": LOG_CHUNK_BYTES}
        piece = yield Call("GET", path, params={**params, "wait_s": wait_s}, wait_s=wait_s, read=_read_piece)
        if piece.content:
            yield Item(piece.content)
        incarnation, offset = piece.incarnation or incarnation, piece.offset
        if piece.final or (not follow and (piece.done or not piece.content)):
            return
        if piece.done:
            incarnation, offset = (incarnation or 0) + 1, 0


@dataclass(frozen=True)
class _Piece:
    content: bytes
    offset: int
    incarnation: int
    done: bool  # nothing more will come from this incarnation
    final: bool  # nor from a later one


def _read_piece(response: httpx.Response) -> _Piece:
    said = response.headers
    return _Piece(
        response.content,
        int(said["x-thebes-offset"]),
        int(said["x-thebes-incarnation"]),
        said["x-thebes-done"] == "1",
        said["x-thebes-final"] == "1",
    )


def _field(name: str) -> Callable[[httpx.Response], Any]:
    return lambda response: response.json()[name]


def _words(command: str | Sequence[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else [str(word) for word in command]


def _complete(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A job runs where it was submitted, unless it says otherwise."""
    return {**spec, "workdir": str(spec.get("workdir") or os.getcwd())}  # noqa: PTH109 - pathlib is slow to import


def _quoted(word: str) -> str:
    from urllib.parse import quote

    return quote(str(word), safe="")


def _pool(target: Target) -> dict[str, Any]:
    import httpx

    limits = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=4.0)
    return {"limits": limits, "trust_env": False, "timeout": 30.0, "verify": target.tls()}


async def _sleep(pause_s: float) -> None:
    import asyncio

    await asyncio.sleep(pause_s)


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as stream:
        while block := stream.read(1 << 18):
            yield block


def _discard(call: Call) -> None:
    if call.file is not None:
        call.file.unlink(missing_ok=True)


def _server_error(response: httpx.Response) -> ServerError:
    try:
        body = response.json()
        message, hint = str(body["error"]), str(body.get("hint", ""))
    except (ValueError, KeyError, TypeError):
        message, hint = f"the server answered {response.status_code} without saying why", ""
    return ServerError(message, hint=hint, status=response.status_code)
