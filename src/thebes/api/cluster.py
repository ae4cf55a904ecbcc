"""Routes about the cluster: nodes, events, the stream of changes, status, metrics, snapshots, health."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from thebes import store as db
from thebes.api import answers
from thebes.api.access import Asker
from thebes.api.base import Api, StrictRoute, faults, reply, takes
from thebes.api.events import After, EventLimit, Latest, events_page
from thebes.api.gate import asker_of
from thebes.api.streams import PAGE, event_stream
from thebes.jobspec.spec import job_schema
from thebes.live.errors import Invalid
from thebes.live.metrics import CONTENT_TYPE
from thebes.live.snapshots import DIGEST, too_large

NODE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$"
NodePath = Annotated[str, Path(pattern=NODE_NAME)]


def cluster_routes(api: Api) -> APIRouter:
    """Nodes, events, status."""
    router = APIRouter(tags=["cluster"], route_class=StrictRoute)
    schema = job_schema()

    @router.get("/v1/nodes", response_model=answers.NodesAnswer, responses=faults(), operation_id="nodes")
    async def nodes(request: Request) -> Response:
        """Nodes, their GPUs and the jobs that hold them. Jobs that you may not see are not named."""
        asker = asker_of(request)
        return reply(answers.NodesAnswer(nodes=[_node(api, asker, node) for node in api.controller.nodes()]))

    @router.post(
        "/v1/nodes/{name}/drain",
        response_model=answers.DrainAnswer,
        responses=faults(403, 404, 409, 413, 503),
        openapi_extra=takes(answers.DrainIn, required=False),
        operation_id="drain",
    )
    async def drain(request: Request, name: NodePath) -> Response:
        """Start nothing more on a node."""
        asker = asker_of(request)
        asker.must_be_admin()
        options = await api.body(request, answers.DrainIn)
        await api.controller.drain(name, options.reason, options.preempt, asker.principal.user)
        return reply(answers.DrainAnswer(name=name, drained=True))

    @router.post(
        "/v1/nodes/{name}/undrain",
        response_model=answers.DrainAnswer,
        responses=faults(403, 404, 409, 413, 503),
        openapi_extra=takes(answers.NothingIn, required=False),
        operation_id="undrain",
    )
    async def undrain(request: Request, name: NodePath) -> Response:
        """Use a drained node again."""
        asker = asker_of(request)
        asker.must_be_admin()
        await api.body(request, answers.NothingIn)
        await api.controller.undrain(name, asker.principal.user)
        return reply(answers.DrainAnswer(name=name, drained=False))

    @router.get("/v1/events", response_model=answers.EventsAnswer, responses=faults(), operation_id="events")
    async def events(
        request: Request,
        after: After = 0,
        limit: EventLimit = 1000,
        latest: Latest = False,
    ) -> Response:
        """Events, oldest first, as far as you may see them."""
        viewer = asker_of(request).viewer
        return reply(await api.read(lambda c: events_page(c, viewer, None, after, limit, latest)))

    @router.get(
        "/v1/stream",
        response_class=StreamingResponse,
        responses={
            200: {
                "description": "Server-sent events without end; `id` is the seq, `event` the kind, `data` an Event.",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            },
            **faults(),
        },
        openapi_extra={
            "parameters": [
                {
                    "name": "Last-Event-ID",
                    "in": "header",
                    "required": False,
                    "description": "Begin behind this seq; without it: with what happens from now on.",
                    "schema": {"type": "string", "pattern": "^[0-9]{1,18}$"},
                }
            ]
        },
        operation_id="stream",
    )
    async def stream(request: Request) -> Response:
        """Changes as they happen. A reader that is too slow gets "lagged" and should come back with its last seq."""
        asker = asker_of(request)
        after = _last_event(request.headers.get("last-event-id"))
        place = api.places.one(asker.key, "streams", api.limits.streams_per_token)
        place.__enter__()  # it is given back when the stream ends, not when this function does
        return StreamingResponse(
            _guarded(api, asker, after, place),
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )

    @router.get("/v1/status", response_model=answers.ClusterStatus, responses=faults(), operation_id="status")
    async def status(request: Request) -> Response:
        """The state of the cluster. Jobs are counted as far as you may see them."""
        asker = asker_of(request)
        who = asker.principal
        found: dict[str, Any] = {
            **api.controller.status(),
            "you": {"user": who.user, "role": who.role, "tenant": who.tenant},
        }
        if api.members is not None:
            found["controllers"] = api.members()
        if not asker.principal.is_admin:
            found["jobs"] = await api.read(lambda c: db.count_by_state(c, asker.viewer))
        return reply(answers.ClusterStatus(**found))

    @router.get(
        "/v1/schema/job",
        response_class=Response,
        responses={
            200: {
                "description": "JSON Schema of a job file.",
                "content": {"application/schema+json": {"schema": {"type": "object"}}},
            },
            **faults(),
        },
        operation_id="job_schema",
    )
    async def schema_of_job(request: Request) -> Response:
        """The JSON Schema of a job, for editors."""
        import json

        return Response(json.dumps(schema), media_type="application/schema+json")

    @router.get("/v1/healthz", response_model=answers.Health, operation_id="healthz")
    async def healthz(request: Request) -> Response:
        """Whether the server answers. It needs no token."""
        return reply(answers.Health(ok=True))

    @router.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {
                "description": "For Prometheus.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            },
            **faults(403),
        },
        operation_id="metrics",
    )
    async def metrics(request: Request) -> Response:
        """Figures for Prometheus. They are for admins, since they tell about all tenants."""
        asker_of(request).must_be_admin()
        return Response(api.metrics.text(), media_type=CONTENT_TYPE)

    @router.post(
        "/v1/snapshots",
        status_code=201,
        response_model=answers.SnapshotAnswer,
        responses=faults(413, 503),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}},
            },
            "parameters": [
                {
                    "name": "X-Thebes-Digest",
                    "in": "header",
                    "required": False,
                    "description": "SHA-256 of the archive, to be checked on arrival.",
                    "schema": {"type": "string", "pattern": f"^{DIGEST.pattern}$"},
                }
            ],
        },
        operation_id="upload_snapshot",
    )
    async def upload(request: Request) -> Response:
        """Upload a work directory as .tar.gz: files, folders and links that stay inside."""
        asker = asker_of(request)
        expected = request.headers.get("x-thebes-digest")
        if expected is not None and not DIGEST.fullmatch(expected):
            raise Invalid("X-Thebes-Digest: 64 hexadecimal digits")
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > api.limits.snapshot_bytes:
            raise too_large(api.limits.snapshot_bytes)
        with api.places.one(asker.key, "uploads", api.limits.uploads_per_token):
            digest, size = await api.snapshots.receive(request.stream(), expected)
            await api.prune_snapshots()
        return reply(answers.SnapshotAnswer(digest=digest, bytes=size), 201)

    return router


def _last_event(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Invalid("Last-Event-ID: the number of an event")
    return int(text)


async def _guarded(api: Api, asker: Asker, after: int | None, place: Any) -> AsyncIterator[bytes]:
    async def stored(seq: int) -> list[dict[str, Any]]:
        rows = await api.read(lambda c: db.events_after(c, seq=seq, viewer=asker.viewer, limit=PAGE))
        return [answers.event(row).model_dump() for row in rows]

    api.metrics.stream_opened()
    try:
        async for block in event_stream(api.controller.changes, after, stored, asker.viewer, api.closing):
            yield block
    finally:
        api.metrics.stream_closed()
        place.__exit__(None, None, None)


def _node(api: Api, asker: Asker, node: dict[str, Any]) -> answers.NodeInfo:
    def gpu(one: dict[str, Any]) -> answers.GpuInfo:
        job_id = one["job"]
        job = api.controller.core.jobs.get(job_id) if job_id is not None else None
        seen = asker.principal.is_admin or (job is not None and asker.viewer.sees(job))
        hidden = {} if seen else {"job": None, "user": None}
        return answers.GpuInfo.model_validate({**one, **hidden, "busy": job_id is not None})

    return answers.NodeInfo.model_validate({**node, "gpus": [gpu(one) for one in node["gpus"]]})
