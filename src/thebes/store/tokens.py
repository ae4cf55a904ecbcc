"""Tokens and tenants: they say which people may come in, and in whose name.

A token is 256 random bits. The store holds its SHA-256 only, so a stolen copy of the store opens nothing; a plain hash
is enough, since nobody can guess 256 bits. The text of a token is shown once, when it is made.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from typing import Any

from sqlalchemy import Connection, bindparam, func, select

from thebes.model.errors import UserError, nearest
from thebes.store.database import Prepared
from thebes.store.errors import StoreConflict
from thebes.store.principal import ROLES, Principal, Role, Viewer
from thebes.store.rows import TenantRow, TokenRow
from thebes.store.schema import ALIVE_STATES, jobs, tenants, tokens

FORM = re.compile(r"thb_[A-Za-z0-9_-]{43}")

_TOKEN_COLUMNS = (
    tokens.c.id,
    tokens.c.user,
    tokens.c.role,
    tokens.c.tenant,
    tokens.c.created_s,
    tokens.c.expires_s,
    tokens.c.revoked,
)
_INSERT_TOKEN = Prepared(
    tokens.insert().values({column.name: bindparam(column.name) for column in tokens.c if column.name != "id"})
)


def create_token(
    c: Connection, user: str, role: Role, tenant: str, expires_s: float | None = None, *, now_s: float | None = None
) -> tuple[str, TokenRow]:
    """A new token: its text, which is not kept, and its row. Times are cluster time; by default this machine's."""
    if role not in ROLES:
        raise UserError(f"{role!r} is not a role", hint=nearest(str(role), ROLES))
    text = "thb_" + secrets.token_urlsafe(32)
    values: dict[str, Any] = {
        "user": user,
        "role": role,
        "tenant": tenant,
        "created_s": time.time() if now_s is None else now_s,
        "expires_s": expires_s,
        "revoked": False,
    }
    return text, TokenRow(id=_INSERT_TOKEN.insert(c, {"hash": _hash(text), **values}), **values)


def find_token(c: Connection, text: str, *, now_s: float | None = None) -> TokenRow | None:
    """The row of a token that is good at `now_s` (cluster time, or else this machine's); None for any other text."""
    if not FORM.fullmatch(text):
        return None
    digest = _hash(text)
    row = c.execute(select(*_TOKEN_COLUMNS, tokens.c.hash).where(tokens.c.hash == digest)).first()
    if row is None or not hmac.compare_digest(row.hash, digest):
        return None
    token = TokenRow(*row[:-1])
    expired = token.expires_s is not None and token.expires_s <= (time.time() if now_s is None else now_s)
    return None if token.revoked or expired else token


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def revoke_token(c: Connection, token_id: int) -> bool:
    """End a token from now on. False if there is no such token."""
    return c.execute(tokens.update().where(tokens.c.id == token_id).values(revoked=True)).rowcount == 1


def list_tokens(c: Connection, *, user: str | None = None) -> list[TokenRow]:
    """All tokens, or those of one user, oldest first; revoked and expired ones too."""
    statement = select(*_TOKEN_COLUMNS).order_by(tokens.c.id)
    if user is not None:
        statement = statement.where(tokens.c.user == user)
    return [TokenRow(*row) for row in c.execute(statement)]


# ---- tenants


def put_tenant(c: Connection, name: str, *, gpu_quota: int | None = None, open: bool = False) -> TenantRow:
    """Make a tenant or change it. `open`: its members see each other's jobs."""
    values = {"gpu_quota": gpu_quota, "open": open}
    if not c.execute(tenants.update().where(tenants.c.name == name).values(values)).rowcount:
        c.execute(tenants.insert().values(name=name, **values))
    return TenantRow(name, gpu_quota, open)


def get_tenant(c: Connection, name: str) -> TenantRow | None:
    row = c.execute(select(tenants).where(tenants.c.name == name)).first()
    return None if row is None else TenantRow(*row)


def list_tenants(c: Connection) -> list[TenantRow]:
    return [TenantRow(*row) for row in c.execute(select(tenants).order_by(tenants.c.name))]


def delete_tenant(c: Connection, name: str) -> bool:
    """Remove a tenant; False if there is none. Refused while its jobs live, as they would then have no limit."""
    alive = c.scalar(select(func.count()).where(jobs.c.tenant == name, jobs.c.state.in_(ALIVE_STATES)))
    if alive and get_tenant(c, name) is not None:
        raise StoreConflict(
            f"tenant {name} has {alive} job{'s' if alive > 1 else ''} that {'have' if alive > 1 else 'has'} not ended",
            hint="Wait for them or cancel them first.",
        )
    return c.execute(tenants.delete().where(tenants.c.name == name)).rowcount == 1


def viewer_of(c: Connection, principal: Principal) -> Viewer:
    """What this principal may see."""
    opened = frozenset(c.scalars(select(tenants.c.name).where(tenants.c.open)))
    return Viewer(principal.user, principal.role, principal.tenant, opened)
