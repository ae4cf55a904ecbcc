"""Routes for admins: tenants, tokens, decisions, shutdown. A user may look at the own tenant."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from thebes import store as db
from thebes.api import answers
from thebes.api.base import Api, StrictRoute, faults, reply, takes
from thebes.api.gate import asker_of
from thebes.jobspec.spec import NAME
from thebes.live.errors import Conflict, NotFound

MAX_SEQ = 1 << 60
TenantPath = Annotated[str, Path(pattern=NAME)]


def admin_routes(api: Api) -> APIRouter:
    """Tenants, tokens, decisions, shutdown."""
    router = APIRouter(tags=["admin"], route_class=StrictRoute)

    @router.get("/v1/tenants", response_model=answers.TenantsAnswer, responses=faults(), operation_id="list_tenants")
    async def list_tenants(request: Request) -> Response:
        """All tenants; users get only their own."""
        who = asker_of(request).principal
        rows = await api.read(db.list_tenants)
        seen = [row for row in rows if who.is_admin or row.name == who.tenant]
        return reply(answers.TenantsAnswer(tenants=[answers.tenant(row) for row in seen]))

    @router.get(
        "/v1/tenants/{name}", response_model=answers.TenantInfo, responses=faults(404), operation_id="show_tenant"
    )
    async def show_tenant(request: Request, name: TenantPath) -> Response:
        """One tenant; users may only ask for their own."""
        who = asker_of(request).principal
        row = await api.read(lambda c: db.get_tenant(c, name))
        if row is None or not (who.is_admin or who.tenant == name):
            raise _no_tenant(name)
        return reply(answers.tenant(row))

    @router.put(
        "/v1/tenants/{name}",
        response_model=answers.TenantInfo,
        responses=faults(403, 413, 503),
        openapi_extra=takes(answers.TenantIn),
        operation_id="put_tenant",
    )
    async def put_tenant(request: Request, name: TenantPath) -> Response:
        """Make a tenant or change it."""
        asker_of(request).must_be_admin()
        wanted = await api.body(request, answers.TenantIn, what="a tenant")
        row = await api.store.change(
            lambda c: db.put_tenant(c, name, gpu_quota=wanted.gpu_quota, open=wanted.open), must=False
        )
        api.access.forget()
        await api.controller.set_quota(name, row.gpu_quota)
        return reply(answers.tenant(row))

    @router.delete(
        "/v1/tenants/{name}",
        response_model=answers.TenantInfo,
        responses=faults(403, 404, 409, 503),
        operation_id="delete_tenant",
    )
    async def delete_tenant(request: Request, name: TenantPath) -> Response:
        """Remove a tenant that has no living jobs; answers with what it was."""
        asker_of(request).must_be_admin()

        def change(c: Connection) -> db.TenantRow:
            row = db.get_tenant(c, name)
            if row is None:
                raise _no_tenant(name)
            db.delete_tenant(c, name)
            return row

        row = await api.store.change(change, must=False)
        api.access.forget()
        await api.controller.set_quota(name, None)
        return reply(answers.tenant(row))

    @router.post(
        "/v1/tokens",
        status_code=201,
        response_model=answers.NewToken,
        responses=faults(403, 413, 503),
        openapi_extra=takes(answers.TokenIn),
        operation_id="create_token",
    )
    async def create_token(request: Request) -> Response:
        """A new token. Its text is in the answer and nowhere else."""
        asker = asker_of(request)
        asker.must_be_admin()
        wanted = await api.body(request, answers.TokenIn, what="a token")
        now_s = time.time()
        expires_s = None if wanted.expires_in_s is None else now_s + wanted.expires_in_s
        tenant = wanted.tenant or asker.principal.tenant
        text, row = await api.store.change(
            lambda c: db.create_token(c, wanted.user, wanted.role, tenant, expires_s, now_s=now_s), must=False
        )
        return reply(answers.NewToken(**answers.token(row).model_dump(), token=text), 201)

    @router.get("/v1/tokens", response_model=answers.TokensAnswer, responses=faults(403), operation_id="list_tokens")
    async def list_tokens(request: Request) -> Response:
        """All tokens, without their texts."""
        asker_of(request).must_be_admin()
        rows = await api.read(db.list_tokens)
        return reply(answers.TokensAnswer(tokens=[answers.token(row) for row in rows]))

    @router.delete(
        "/v1/tokens/{token_id}",
        response_model=answers.TokenInfo,
        responses=faults(403, 404, 409, 503),
        operation_id="revoke_token",
    )
    async def revoke_token(request: Request, token_id: Annotated[int, Path(ge=1, le=MAX_SEQ)]) -> Response:
        """End a token. The last one of an admin stays."""
        asker_of(request).must_be_admin()
        row = await api.store.change(lambda c: _revoke(c, token_id), must=False)
        api.access.forget()
        return reply(answers.token(row))

    @router.get(
        "/v1/decisions", response_model=answers.DecisionsAnswer, responses=faults(403), operation_id="list_decisions"
    )
    async def list_decisions(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
        before: Annotated[int | None, Query(ge=1, le=MAX_SEQ)] = None,
    ) -> Response:
        """Decisions of the policy, newest first."""
        asker_of(request).must_be_admin()
        rows = await api.read(lambda c: db.list_decisions(c, limit, before))
        return reply(answers.DecisionsAnswer(decisions=[answers.decision(row) for row in rows]))

    @router.get(
        "/v1/decisions/{seq}",
        response_model=answers.DecisionInfo,
        responses=faults(403, 404),
        operation_id="show_decision",
    )
    async def show_decision(request: Request, seq: Annotated[int, Path(ge=1, le=MAX_SEQ)]) -> Response:
        """One decision with its reasons and actions."""
        asker_of(request).must_be_admin()
        entry = await api.read(lambda c: db.journal_entry(c, seq))
        if entry is None or entry.kind != "decision":
            raise NotFound(f"there is no decision {seq}", hint="old ones are pruned; /v1/decisions lists the rest")
        return reply(answers.decision(entry))

    @router.post(
        "/v1/shutdown",
        response_model=dict[str, Any],
        responses=faults(403, 413),
        openapi_extra=takes(answers.ShutdownIn),
        operation_id="shutdown",
    )
    async def shutdown(request: Request) -> Response:
        """Say, before the cluster is stopped, what becomes of running jobs."""
        asker_of(request).must_be_admin()
        wanted = await api.body(request, answers.ShutdownIn)
        return JSONResponse(await api.controller.shutdown(wanted.mode))

    return router


def _revoke(c: Connection, token_id: int) -> db.TokenRow:
    now_s = time.time()
    rows = {row.id: row for row in db.list_tokens(c)}
    row = rows.get(token_id)
    if row is None:
        raise NotFound(f"there is no token {token_id}", hint="GET /v1/tokens lists them")

    def good_admin(one: db.TokenRow) -> bool:
        return one.role == "admin" and not one.revoked and (one.expires_s is None or one.expires_s > now_s)

    if good_admin(row) and sum(good_admin(one) for one in rows.values()) == 1:
        raise Conflict("this is the last token of an admin", hint="make another one first: POST /v1/tokens")
    db.revoke_token(c, token_id)
    return next(one for one in db.list_tokens(c) if one.id == token_id)


def _no_tenant(name: str) -> NotFound:
    return NotFound(f"there is no tenant {name}", hint="GET /v1/tenants lists those that you can see")
