"""The HTTP API under /v1: it parses, finds the asker, calls controller or store, and answers. It decides nothing.

`create_app` puts it together: the gate (tokens, limits, errors, times), the routes, and one OpenAPI description.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from thebes import __version__
from thebes.api import answers
from thebes.api.admin import admin_routes
from thebes.api.base import Api
from thebes.api.cluster import cluster_routes
from thebes.api.gate import Gate
from thebes.api.jobs import job_routes
from thebes.jobspec.spec import JobSpec
from thebes.live.errors import error_body, headers_of, invalid, status_of
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from thebes.live.config import Config
    from thebes.live.controller import Controller
    from thebes.store import Store

IN_MODELS: tuple[type[BaseModel], ...] = (JobSpec, *answers.IN_MODELS)


def create_app(controller: Controller, store: Store, config: Config) -> FastAPI:
    """The whole API of one instance."""
    api = Api(controller, store, config, controller.shared.dir)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await api.close()

    app = FastAPI(
        title="Thebes",
        version=__version__,
        description="GPU cluster scheduler. Every error is {error, hint}. Send the token as `Authorization: Bearer`.",
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.api = api
    api.metrics.on_scrape(controller.refresh_metrics)
    for routes in (job_routes, cluster_routes, admin_routes):
        app.router.routes.extend(routes(api).routes)  # flat, because each level would cost every request time
    app.add_middleware(Gate, access=api.access, limits=api.limits, metrics=api.metrics)
    app.add_exception_handler(UserError, _on_user_error)
    app.add_exception_handler(RequestValidationError, _on_bad_parameter)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _on_user_error(_: Request, error: Any) -> Response:
    body = error_body(error.message, error.hint)
    return Response(body, status_of(error), headers_of(error), media_type="application/json")


async def _on_bad_parameter(request: Request, error: Any) -> Response:
    return await _on_user_error(request, invalid(error.errors()))


async def _on_http_error(request: Request, error: Any) -> Response:
    said = {
        404: (f"there is nothing at {request.url.path[:200]}", "see /v1/openapi.json"),
        405: (f"{request.method} cannot be used there", "see /v1/openapi.json"),
    }
    message, hint = said.get(error.status_code, (str(error.detail), ""))
    headers = dict(error.headers or {})
    return Response(error_body(message, hint), error.status_code, headers, media_type="application/json")


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with the token and the bodies that routes parse by themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, bodies = models_json_schema(
            [(kind, "validation") for kind in IN_MODELS], ref_template="#/components/schemas/{model}"
        )
        components = schema.setdefault("components", {})
        components.setdefault("schemas", {}).update(bodies["$defs"])
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["security"] = [] if path == "/v1/healthz" else [{"token": []}]
        app.openapi_schema = schema
    return app.openapi_schema
