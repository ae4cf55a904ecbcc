"""What the routes of the API share: the way to the store, bodies, answers, and what OpenAPI says about both.

Pydantic reads bodies from their bytes, and answers are written once. A route has to say in OpenAPI what it takes, since
FastAPI does not parse it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from thebes import store as db
from thebes.api import answers
from thebes.api.access import Access
from thebes.api.gate import read_body
from thebes.api.streams import Bulletin
from thebes.live.errors import Invalid, invalid
from thebes.live.limits import RateLimit, TokenPlaces
from thebes.live.metrics import Metrics
from thebes.live.snapshots import Snapshots
from thebes.model.errors import nearest
from thebes.store import Store

if TYPE_CHECKING:
    from thebes.live.config import Config
    from thebes.live.controller import Controller

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
READERS = 4


class Api:
    """What the routes share."""

    def __init__(self, controller: Controller, store: Store, config: Config, folder: Path) -> None:
        self.controller = controller
        self.store = store
        self.limits = limits = config.limits
        self.metrics: Metrics = controller.metrics
        self.access = Access(store)
        self.places = TokenPlaces()
        self.rate = RateLimit()
        self.members: Callable[[], list[dict[str, Any]]] | None = None  # controllers, if there may be several
        self.snapshots = Snapshots(folder, limits)
        self.closing = (
            asyncio.Event()
        )  # ends streams and long polls, so that a server that stops need not wait for them
        self.bulletin = Bulletin(controller.changes, self.closing)
        self.next_prune_s = 0.0
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="api-read")

    async def read(self, ask: Callable[[Connection], T]) -> T:
        """Ask the store in a thread, so that a slow disk stops no other request."""

        def asked() -> T:
            with self.store.read() as connection:
                return ask(connection)

        return await asyncio.get_running_loop().run_in_executor(self._readers, asked)

    async def prune_snapshots(self) -> None:
        """Once an hour, remove archives older than a day that no living job names. A started job has its own copy."""
        if time.monotonic() < self.next_prune_s:
            return
        self.next_prune_s = time.monotonic() + 3600.0
        if await asyncio.to_thread(self.snapshots.any_older):
            keep = await self.read(_named_snapshots)
            await asyncio.to_thread(self.snapshots.prune, keep)

    async def body(self, request: Request, kind: type[M], *, what: str = "the request") -> M:
        """A body of this kind; an empty one stands for all defaults."""
        return parse(kind, await read_body(request, self.limits.body_bytes) or b"{}", what=what)

    async def close(self) -> None:
        self.closing.set()
        await self.bulletin.close()
        self._readers.shutdown(wait=False, cancel_futures=True)


def _named_snapshots(c: Connection) -> set[str]:
    specs = {row.spec for row in db.alive_jobs(c) if '"snapshot"' in row.spec}
    return {digest for spec in specs if (digest := json.loads(spec).get("snapshot"))}


def parse(kind: type[M], raw: bytes, *, what: str = "the request") -> M:
    """Validate once, from the bytes. A fault becomes one sentence."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        raise invalid(faults, known=list(kind.model_fields), what=what) from None
    except RecursionError:
        raise Invalid(f"{what} is nested too deeply") from None


class StrictRoute(APIRoute):
    """A route that refuses parameters it does not know, because a typing error would go unnoticed otherwise.

    A route that takes nothing but the request is called directly: the search for arguments and dependencies by FastAPI
    would cost a submit as much as everything that we do ourselves.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        super().__init__(path, endpoint, **settings)
        if list(signature(endpoint).parameters) == ["request"]:
            self.app = _called_directly(endpoint)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = sorted(str(parameter.alias) for parameter in self.dependant.query_params)

        async def strict(request: Request) -> Response:
            if request.scope["query_string"]:
                for name in request.query_params:
                    if name not in known:
                        raise Invalid(f"there is no parameter '{name[:100]}' here", hint=nearest(name, known))
            return await handle(request)

        return strict


def _called_directly(endpoint: Callable[[Request], Coroutine[Any, Any, Response]]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        for name in request.query_params if scope["query_string"] else ():
            raise Invalid(f"there is no parameter '{name[:100]}' here")
        response = await endpoint(request)
        await response(scope, receive, send)

    return app


def reply(answer: BaseModel, status: int = 200) -> Response:
    """An answer, written once. It needs no check, because the models were checked when they were made."""
    return Response(answer.model_dump_json(), status, media_type="application/json")


def takes(
    kind: type[BaseModel], *, required: bool = True, headers: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """OpenAPI's description of a body that a route parses by itself."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    body = {"required": required, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body, **({"parameters": headers} if headers else {})}


_TELLING = {
    400: "Not understood.",
    401: "No token, or not a good one.",
    403: "Not for this role, or somebody else's job.",
    404: "There is no such thing, or you may not see it.",
    409: "Not in this state.",
    413: "Too large.",
    422: "Not valid: the message names the field.",
    429: "Too many requests; see Retry-After.",
    503: "The store or a node cannot be reached at the moment.",
}


def faults(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of the errors of a route, besides those that any route has."""
    return {status: {"model": answers.Fault, "description": _TELLING[status]} for status in (401, 422, 429, *statuses)}
