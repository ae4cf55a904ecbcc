"""Thebes from Python: submit jobs, wait for them, read their logs. `Client` blocks, `AsyncClient` is awaited.

    import thebes
    job = thebes.Client().submit(["python", "train.py"], gpus=2)
    print(job.wait()["state"])

`thebes.client_calls` says which request each call is, `thebes.client_types` what it gives back; the two clients differ
in how they carry a call out. While the controller restarts or another one takes over, calls are repeated for up to
15 s; a submit carries a key, so a repeat never makes a second job. A controller that only stands by names the leader,
and the client asks that one.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thebes import client_calls as calls
from thebes.client_calls import Answer, Call, Handed, Item
from thebes.client_target import Target, find_target, not_running
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TypeAlias, Unpack

    import httpx

    from thebes.client_calls import Flow
    from thebes.client_types import (
        ArrayDetail,
        ClusterStatus,
        DecisionInfo,
        DrainAnswer,
        EnvironmentAnswer,
        EventInfo,
        JobDetail,
        JobFields,
        JobInfo,
        JobPage,
        Json,
        NewToken,
        NodeInfo,
        PlanAnswer,
        Role,
        TenantInfo,
        TokenInfo,
        WaitAnswer,
    )

    JobRef: TypeAlias = "str | Job | AsyncJob"  # an id, or what submit has returned

RETRY_FOR_S = 15.0


class ServerError(UserError):
    """The server's answer when it did not do what was asked; `status` is the HTTP status."""

    def __init__(self, message: str, *, hint: str = "", status: int = 500) -> None:
        super().__init__(message, hint=hint)
        self.status = status


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    client: Client = field(repr=False)
    id: str
    ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.id  # so that `client.wait(client.submit(...))` does what it says

    def info(self) -> JobDetail | ArrayDetail:
        """Everything known about it."""
        return self.client.job(self.id)

    def wait(self, timeout_s: float | None = None) -> WaitAnswer:
        """Wait until it has ended, or `timeout_s` have passed; `done` and `state` of the answer tell which."""
        return self.client.wait(self.id, timeout_s)

    def logs(self, rank: int = 0, *, follow: bool = False) -> Iterator[bytes]:
        """Its output, in pieces of bytes."""
        return self.client.logs(self.id, rank, follow=follow)

    def cancel(self) -> list[str]:
        """End it."""
        return self.client.cancel(self.id)


@dataclass(frozen=True)
class AsyncJob:
    """A job submitted by an AsyncClient: the same as `Job`, to be awaited."""

    client: AsyncClient = field(repr=False)
    id: str
    ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.id

    async def info(self) -> JobDetail | ArrayDetail:
        """Everything known about it."""
        return await self.client.job(self.id)

    async def wait(self, timeout_s: float | None = None) -> WaitAnswer:
        """Wait until it has ended, or `timeout_s` have passed; `done` and `state` of the answer tell which."""
        return await self.client.wait(self.id, timeout_s)

    def logs(self, rank: int = 0, *, follow: bool = False) -> AsyncGenerator[bytes, None]:
        """Its output, in pieces of bytes."""
        return self.client.logs(self.id, rank, follow=follow)

    async def cancel(self) -> list[str]:
        """End it."""
        return await self.client.cancel(self.id)


class _Connection:
    """What both clients know: the addresses to ask, and the form of a call on the wire."""

    def __init__(
        self, url: str | None = None, token: str | None = None, dir: str | os.PathLike[str] | None = None
    ) -> None:
        self._where = (url, token, dir)
        self._target: Target | None = None
        self._turn = 0  # which of several addresses is asked

    def _aim(self) -> Target:
        self._target = find_target(*self._where, turn=self._turn)
        return self._target

    def _missed(self) -> None:
        """Ask the next address, because this one did not answer."""
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

    def _request(self, call: Call[Any], target: Target) -> dict[str, Any]:
        params = {name: value for name, value in call.params.items() if value is not None}
        request: dict[str, Any] = {"params": params, "timeout": 30.0 + call.wait_s}
        headers = {"authorization": f"Bearer {target.token}", **call.headers}
        if call.body is not None:
            request["content"] = json.dumps(call.body).encode()
            headers["content-type"] = "application/json"
        return {**request, "headers": headers}

    def _result(self, call: Call[Answer], response: httpx.Response) -> Answer:
        if response.status_code >= 400:
            raise _server_error(response)
        return call.read(response)


class Client(_Connection):
    """A client that blocks until the cluster has answered. It finds the cluster by `dir`, THEBES_DIR or THEBES_URL."""

    def __init__(
        self, url: str | None = None, token: str | None = None, dir: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(url, token, dir)
        self._http: httpx.Client | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close connections."""
        if self._http is not None:
            self._http.close()
            self._http = None

    # jobs

    def submit(
        self,
        command: str | Sequence[str],
        *,
        key: str | None = None,
        snapshot: str | bool | None = None,
        **fields: Unpack[JobFields],
    ) -> Job:
        """Queue a job; it is safely stored when this returns. Fields are those of the job file.

        `snapshot=True` uploads a copy of the work directory, so that later edits do not change what runs.
        """
        return self.submit_spec({"command": calls.words(command), **fields}, key=key, snapshot=snapshot)

    def submit_spec(
        self, spec: Mapping[str, object], *, key: str | None = None, snapshot: str | bool | None = None
    ) -> Job:
        """Queue a job given as a whole, as read from a job file."""
        stored = self._last(calls.submission(spec, key or uuid.uuid4().hex, snapshot))
        return Job(self, stored["id"], tuple(stored["ids"]))

    def plan(self, command: str | Sequence[str] | Mapping[str, object], **fields: Unpack[JobFields]) -> PlanAnswer:
        """Tell where and when a job would start and which jobs it would preempt, without submitting it."""
        return self._call(calls.plan(command, fields))

    def job(self, job_id: JobRef) -> JobDetail | ArrayDetail:
        """Everything known about one job, with its attempts; for an array, its members and their states."""
        return self._call(calls.job(job_id))

    def jobs(
        self,
        *,
        state: str | Sequence[str] | None = None,
        user: str | None = None,
        tenant: str | None = None,
        name: str | None = None,
        limit: int | None = None,
        oldest: bool = False,
    ) -> Iterator[JobInfo]:
        """Jobs, newest first, page by page as you iterate; `limit` ends it."""
        return self._items(calls.pages(calls.chosen_jobs(state, user, tenant, name, oldest), limit))

    def jobs_page(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        state: str | Sequence[str] | None = None,
        user: str | None = None,
        tenant: str | None = None,
        name: str | None = None,
        oldest: bool = False,
    ) -> JobPage:
        """One page of jobs, and the cursor of the next one."""
        return self._call(calls.jobs_page(calls.chosen_jobs(state, user, tenant, name, oldest), limit, cursor))

    def wait(self, job_id: JobRef, timeout_s: float | None = None) -> WaitAnswer:
        """Wait until a job (or all of an array) has ended, or `timeout_s` have passed; see `done` and `state`."""
        return self._last(calls.waiting(job_id, timeout_s))

    def logs(
        self, job_id: JobRef, rank: int = 0, *, follow: bool = False, incarnation: int | None = None, offset: int = 0
    ) -> Iterator[bytes]:
        """The output of one rank in pieces of bytes; a negative `offset` begins so many bytes before the end.

        `follow` goes on until the job has ended, through all its later incarnations.
        """
        return self._items(calls.log_pieces(job_id, rank, follow, incarnation, offset))

    def environment(self, job_id: JobRef) -> EnvironmentAnswer:
        """The environment with which a job was submitted; for its owner and admins."""
        return self._call(calls.environment(job_id))

    def events(
        self, job_id: JobRef | None = None, *, after: int = 0, limit: int = 1000, latest: bool = False
    ) -> list[EventInfo]:
        """Events, oldest first, of one job or of all that you may see; `latest` gives the last ones."""
        return self._call(calls.events(job_id, after, limit, latest))

    def cancel(self, job_id: JobRef) -> list[str]:
        """End a job (all of an array); returns the ids that were ended."""
        return self._call(calls.act("cancel", job_id))

    def hold(self, job_id: JobRef) -> list[str]:
        """Keep a waiting job from starting."""
        return self._call(calls.act("hold", job_id))

    def release(self, job_id: JobRef) -> list[str]:
        """Let a held job start again."""
        return self._call(calls.act("release", job_id))

    def requeue(self, job_id: JobRef) -> list[str]:
        """Run an ended job once more, or stop a running one and queue it again."""
        return self._call(calls.act("requeue", job_id, repeatable=False))

    def preempt(self, job_id: JobRef, *, grace_s: float | None = None) -> list[str]:
        """Try the preemption handshake on a running job."""
        return self._call(calls.act("preempt", job_id, repeatable=False, grace_s=grace_s))

    # the cluster

    def nodes(self) -> list[NodeInfo]:
        """The nodes, their GPUs and the jobs that hold them."""
        return self._call(calls.nodes())

    def drain(self, node: str, *, reason: str = "", preempt: bool = False) -> DrainAnswer:
        """Start nothing more on a node; with `preempt`, move its jobs away now."""
        return self._call(calls.drain(node, reason, preempt))

    def undrain(self, node: str) -> DrainAnswer:
        """Use a drained node again."""
        return self._call(calls.undrain(node))

    def status(self) -> ClusterStatus:
        """The state of the cluster."""
        return self._call(calls.status())

    def decisions(self, *, limit: int = 50, before: int | None = None) -> list[DecisionInfo]:
        """The latest decisions of the policy; for admins."""
        return self._call(calls.decisions(limit, before))

    def decision(self, seq: int) -> DecisionInfo:
        """One decision with its reasons and actions; for admins."""
        return self._call(calls.decision(seq))

    def job_schema(self) -> dict[str, Json]:
        """The JSON Schema of a job file."""
        return self._call(calls.job_schema())

    # tenants, tokens, snapshots

    def tenants(self) -> list[TenantInfo]:
        """Tenants, their quotas and whether their members see each other's jobs."""
        return self._call(calls.tenants())

    def put_tenant(self, name: str, *, gpu_quota: int | None = None, open: bool = False) -> TenantInfo:
        """Make or change a tenant; for admins."""
        return self._call(calls.put_tenant(name, gpu_quota, open))

    def delete_tenant(self, name: str) -> TenantInfo:
        """Remove a tenant; for admins."""
        return self._call(calls.delete_tenant(name))

    def tokens(self) -> list[TokenInfo]:
        """Tokens (without their text); for admins."""
        return self._call(calls.tokens())

    def create_token(
        self, user: str, *, role: Role = "user", tenant: str | None = None, expires_in_s: float | None = None
    ) -> NewToken:
        """Make a token; its text is in "token", this one time; for admins."""
        return self._call(calls.create_token(user, role, tenant, expires_in_s))

    def revoke_token(self, token_id: int) -> TokenInfo:
        """End a token; for admins."""
        return self._call(calls.revoke_token(token_id))

    def upload_snapshot(self, path: str | os.PathLike[str]) -> str:
        """Upload a copy of a folder; returns its digest, for the field `snapshot` of a job."""
        return self._last(calls.uploading(path))

    def stream(self, *, after: int | None = None) -> Iterator[EventInfo]:
        """Changes as they happen, without end; after a break it goes on where it was. `after`: a seq to begin after."""
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

    def _call(self, call: Call[Answer]) -> Answer:
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

    def _send(self, call: Call[Any], target: Target) -> httpx.Response:
        request = self._request(call, target)
        if call.file is None:
            return self._open(target).request(call.method, target.url + call.path, **request)
        with call.file.open("rb") as stream:
            return self._open(target).request(call.method, target.url + call.path, **request, content=stream)

    def _last(self, flow: Flow[None, Answer]) -> Answer:
        answer = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as end:
                return end.value
            answer = self._call(step) if isinstance(step, Call) else None

    def _items(self, flow: Flow[Handed, None]) -> Iterator[Handed]:
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


class AsyncClient(_Connection):
    """The same calls as Client has, to be awaited; iterators are `async for`."""

    def __init__(
        self, url: str | None = None, token: str | None = None, dir: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(url, token, dir)
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    # jobs

    async def submit(
        self,
        command: str | Sequence[str],
        *,
        key: str | None = None,
        snapshot: str | bool | None = None,
        **fields: Unpack[JobFields],
    ) -> AsyncJob:
        return await self.submit_spec({"command": calls.words(command), **fields}, key=key, snapshot=snapshot)

    async def submit_spec(
        self, spec: Mapping[str, object], *, key: str | None = None, snapshot: str | bool | None = None
    ) -> AsyncJob:
        stored = await self._last(calls.submission(spec, key or uuid.uuid4().hex, snapshot))
        return AsyncJob(self, stored["id"], tuple(stored["ids"]))

    async def plan(
        self, command: str | Sequence[str] | Mapping[str, object], **fields: Unpack[JobFields]
    ) -> PlanAnswer:
        return await self._call(calls.plan(command, fields))

    async def job(self, job_id: JobRef) -> JobDetail | ArrayDetail:
        return await self._call(calls.job(job_id))

    def jobs(
        self,
        *,
        state: str | Sequence[str] | None = None,
        user: str | None = None,
        tenant: str | None = None,
        name: str | None = None,
        limit: int | None = None,
        oldest: bool = False,
    ) -> AsyncGenerator[JobInfo, None]:
        return self._items(calls.pages(calls.chosen_jobs(state, user, tenant, name, oldest), limit))

    async def jobs_page(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        state: str | Sequence[str] | None = None,
        user: str | None = None,
        tenant: str | None = None,
        name: str | None = None,
        oldest: bool = False,
    ) -> JobPage:
        return await self._call(calls.jobs_page(calls.chosen_jobs(state, user, tenant, name, oldest), limit, cursor))

    async def wait(self, job_id: JobRef, timeout_s: float | None = None) -> WaitAnswer:
        return await self._last(calls.waiting(job_id, timeout_s))

    def logs(
        self, job_id: JobRef, rank: int = 0, *, follow: bool = False, incarnation: int | None = None, offset: int = 0
    ) -> AsyncGenerator[bytes, None]:
        return self._items(calls.log_pieces(job_id, rank, follow, incarnation, offset))

    async def environment(self, job_id: JobRef) -> EnvironmentAnswer:
        return await self._call(calls.environment(job_id))

    async def events(
        self, job_id: JobRef | None = None, *, after: int = 0, limit: int = 1000, latest: bool = False
    ) -> list[EventInfo]:
        return await self._call(calls.events(job_id, after, limit, latest))

    async def cancel(self, job_id: JobRef) -> list[str]:
        return await self._call(calls.act("cancel", job_id))

    async def hold(self, job_id: JobRef) -> list[str]:
        return await self._call(calls.act("hold", job_id))

    async def release(self, job_id: JobRef) -> list[str]:
        return await self._call(calls.act("release", job_id))

    async def requeue(self, job_id: JobRef) -> list[str]:
        return await self._call(calls.act("requeue", job_id, repeatable=False))

    async def preempt(self, job_id: JobRef, *, grace_s: float | None = None) -> list[str]:
        return await self._call(calls.act("preempt", job_id, repeatable=False, grace_s=grace_s))

    # the cluster

    async def nodes(self) -> list[NodeInfo]:
        return await self._call(calls.nodes())

    async def drain(self, node: str, *, reason: str = "", preempt: bool = False) -> DrainAnswer:
        return await self._call(calls.drain(node, reason, preempt))

    async def undrain(self, node: str) -> DrainAnswer:
        return await self._call(calls.undrain(node))

    async def status(self) -> ClusterStatus:
        return await self._call(calls.status())

    async def decisions(self, *, limit: int = 50, before: int | None = None) -> list[DecisionInfo]:
        return await self._call(calls.decisions(limit, before))

    async def decision(self, seq: int) -> DecisionInfo:
        return await self._call(calls.decision(seq))

    async def job_schema(self) -> dict[str, Json]:
        return await self._call(calls.job_schema())

    # tenants, tokens, snapshots

    async def tenants(self) -> list[TenantInfo]:
        return await self._call(calls.tenants())

    async def put_tenant(self, name: str, *, gpu_quota: int | None = None, open: bool = False) -> TenantInfo:
        return await self._call(calls.put_tenant(name, gpu_quota, open))

    async def delete_tenant(self, name: str) -> TenantInfo:
        return await self._call(calls.delete_tenant(name))

    async def tokens(self) -> list[TokenInfo]:
        return await self._call(calls.tokens())

    async def create_token(
        self, user: str, *, role: Role = "user", tenant: str | None = None, expires_in_s: float | None = None
    ) -> NewToken:
        return await self._call(calls.create_token(user, role, tenant, expires_in_s))

    async def revoke_token(self, token_id: int) -> TokenInfo:
        return await self._call(calls.revoke_token(token_id))

    async def upload_snapshot(self, path: str | os.PathLike[str]) -> str:
        return await self._last(calls.uploading(path))

    async def stream(self, *, after: int | None = None) -> AsyncGenerator[EventInfo, None]:
        """Changes as they happen, without end; after a break it goes on where it was. `after`: a seq to begin after."""
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

    async def _call(self, call: Call[Answer]) -> Answer:
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

    async def _send(self, call: Call[Any], target: Target) -> httpx.Response:
        request = self._request(call, target)
        if call.file is not None:
            request["content"] = _chunks(call.file)
        return await self._open(target).request(call.method, target.url + call.path, **request)

    async def _last(self, flow: Flow[None, Answer]) -> Answer:
        answer = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as end:
                return end.value
            answer = await self._call(step) if isinstance(step, Call) else None

    async def _items(self, flow: Flow[Handed, None]) -> AsyncGenerator[Handed, None]:
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


for _name, _method in vars(AsyncClient).items():  # both clients do the same, so it is described once
    if not _name.startswith("_") and _method.__doc__ is None:
        _method.__doc__ = getattr(Client, _name).__doc__


class _Patience:
    """How long to go on trying: 15 s in all, from 50 ms between tries to 1 s."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + RETRY_FOR_S
        self._pause_s = 0.05
        self._sent_to: set[str] = set()

    def after(self, error: httpx.TransportError, repeatable: bool, target: Target) -> float:
        """Seconds until the next try; it raises if there should be none."""
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
        """Seconds to wait because the server asked for it; None if the time is over."""
        try:
            asked_s = float(response.headers.get("retry-after", "1"))
        except ValueError:
            asked_s = 1.0
        return asked_s if time.monotonic() + asked_s <= self._until_s else None

    def nobody_leads(self) -> float | None:
        """Seconds until a standby is asked again; None if the time is over."""
        return self._next() if time.monotonic() + self._pause_s <= self._until_s else None

    def first_time(self, leader: str) -> bool:
        """Whether we are sent there for the first time; a second time it waits a little."""
        known = leader in self._sent_to
        self._sent_to.add(leader)
        return not known

    def _next(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(1.0, self._pause_s * 1.6)
        return pause_s


class _EventLines:
    """A reader of server-sent events, line by line."""

    def __init__(self, after: int | None) -> None:
        self.after = after
        self._data: list[str] = []

    def request(self, target: Target) -> dict[str, Any]:
        import httpx

        headers = {"authorization": f"Bearer {target.token}", "accept": "text/event-stream"}
        if self.after is not None:
            headers["last-event-id"] = str(self.after)
        return {"headers": headers, "timeout": httpx.Timeout(10.0, read=60.0)}

    def take(self, line: str) -> EventInfo | None:
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


def _discard(call: Call[Any]) -> None:
    if call.file is not None:
        call.file.unlink(missing_ok=True)


def _server_error(response: httpx.Response) -> ServerError:
    try:
        body = response.json()
        message, hint = str(body["error"]), str(body.get("hint", ""))
    except (ValueError, KeyError, TypeError):
        message, hint = f"the server answered {response.status_code} without saying why", ""
    return ServerError(message, hint=hint, status=response.status_code)
