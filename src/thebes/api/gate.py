"""What every request passes before it reaches a route (token, rate limit, stopwatch), and what every error passes on
its way out. It is plain ASGI, since each of many submits goes through it.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thebes.api.access import Access, Asker
from thebes.live import jsonlog
from thebes.live.errors import TooLarge, Unauthorised, error_body, headers_of, status_of
from thebes.live.limits import Limits, RateLimit
from thebes.live.metrics import Metrics
from thebes.model.errors import UserError

OPEN_PATHS = frozenset({"/v1/healthz", "/v1/openapi.json"})
_ASKER = "thebes.asker"
log = jsonlog.get("api")


class Gate:
    """ASGI middleware: no request comes in without a token, and nothing goes out that is not an answer."""

    def __init__(self, app: ASGIApp, access: Access, limits: Limits, metrics: Metrics) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._metrics = metrics
        self._rate = RateLimit()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                scope[_ASKER] = self._let_in(scope)
            await self._app(scope, receive, watched)
        except UserError as error:
            status = status or await answer_error(send, error)
        except ClientDisconnect:
            status = 499  # the client has gone, so nothing can be told
        except Exception as error:
            number = secrets.token_hex(4)
            log.error(
                "internal error",
                exc_info=error,
                extra={"fields": {"id": number, "method": scope["method"], "route": _route(scope)}},
            )
            if not status:
                message, hint = f"internal error {number}", f"the log of the controller tells more: look for {number}"
                status = 500
                await _answer(send, status, error_body(message, hint), {})
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.request(method, _route(scope), status, time.perf_counter() - began_s)

    def _let_in(self, scope: Scope) -> Asker:
        now_s = time.monotonic()
        try:
            asker = self._access.asker(_header(scope, b"authorization"))
        except Unauthorised:
            client = scope.get("client")
            self._rate.take(f"from {client[0] if client else ''}", self._limits.stranger_requests_per_s, now_s)
            raise
        admin = asker.principal.is_admin
        per_s = self._limits.admin_requests_per_s if admin else self._limits.user_requests_per_s
        self._rate.take(asker.key, per_s, now_s)
        return asker


_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


def asker_of(request: Request) -> Asker:
    """The asker of this request, which the gate has checked."""
    return request.scope[_ASKER]


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body, if it is not too large; an announced length is enough to refuse it."""
    announced = request.headers.get("content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit_bytes:
        raise _body_too_large(limit_bytes)
    size, blocks = 0, []
    async for block in request.stream():
        size += len(block)
        if size > limit_bytes:
            raise _body_too_large(limit_bytes)
        blocks.append(block)
    return b"".join(blocks)


def _body_too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"the request is larger than {limit_bytes >> 10} KiB", hint="put what is large into a file")


async def answer_error(send: Send, error: UserError) -> int:
    status = status_of(error)
    await _answer(send, status, error_body(error.message, error.hint), headers_of(error))
    return status


async def _answer(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    plain = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in plain.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _route(scope: Scope) -> str:
    """The pattern of the route. The path itself would make a metrics series for each job."""
    route: Any = scope.get("route")
    return getattr(route, "path", "") or "unknown"
