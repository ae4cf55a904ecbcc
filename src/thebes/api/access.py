"""From the Authorization header to a principal, and from there to what that principal may see and touch.

A job that somebody may not see does not exist for them. A job that they see but do not own they may not touch. Tokens
and open tenants are remembered for a short while; a change through the API takes effect at once.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from thebes import store as db
from thebes.live.errors import Forbidden, NotFound, Unauthorised
from thebes.store.principal import Owned, Principal, Viewer

REMEMBER_S = 10.0
MAX_TOKEN_BYTES = 512


@dataclass(frozen=True, slots=True)
class Asker:
    """The principal behind a request; `key` names the token for limits (the token itself goes no further)."""

    principal: Principal
    viewer: Viewer
    key: str
    expires_s: float | None

    def must_see(self, job: Owned | None, job_id: str) -> None:
        if job is None or not self.viewer.sees(job):
            raise no_such_job(job_id)

    def must_own(self, job: Owned | None, job_id: str) -> None:
        self.must_see(job, job_id)
        assert job is not None
        if not self.principal.is_admin and job.user != self.principal.user:
            raise Forbidden(f"job {job_id} belongs to {job.user}", hint="only its owner or an admin can do this")

    def must_be_admin(self) -> None:
        if not self.principal.is_admin:
            raise Forbidden("this is for admins", hint="ask somebody whose token has the role admin")


class Access:
    """A memory of tokens and their askers."""

    def __init__(self, store: db.Store) -> None:
        self._store = store
        self._known: dict[bytes, tuple[Asker, float]] = {}  # by SHA-256 of a token; good until (monotonic)

    def forget(self) -> None:
        """Forget what is remembered, because tokens or tenants have changed."""
        self._known.clear()

    def asker(self, authorization: bytes | None) -> Asker:
        """The asker whose identity this header proves; Unauthorised if it proves none."""
        token = _bearer(authorization)
        digest = hashlib.sha256(token).digest()
        found, good_until = self._known.get(digest, (None, 0.0))
        if found is None or time.monotonic() > good_until:
            found = self._look_up(token)
            self._known[digest] = (found, time.monotonic() + REMEMBER_S)
        if found.expires_s is not None and time.time() >= found.expires_s:
            raise Unauthorised("the token has expired", hint="ask an admin for a new one")
        return found

    def _look_up(self, token: bytes) -> Asker:
        with self._store.read() as connection:
            row = db.find_token(connection, token.decode("ascii", "replace"))
            if row is None or row.revoked:
                raise Unauthorised("the token is not valid", hint="was it revoked, or is it of another cluster?")
            return Asker(row.principal, db.viewer_of(connection, row.principal), f"token-{row.id}", row.expires_s)


def no_such_job(job_id: str) -> NotFound:
    return NotFound(f"there is no job {job_id}", hint="`thebes ps -A` lists those that you can see")


def _bearer(authorization: bytes | None) -> bytes:
    if authorization is None:
        raise Unauthorised("no token", hint="send it as: Authorization: Bearer TOKEN")
    scheme, _, token = authorization.partition(b" ")
    token = token.strip()
    if scheme.lower() != b"bearer" or not token or len(token) > MAX_TOKEN_BYTES:
        raise Unauthorised("the Authorization header is not of the form: Bearer TOKEN")
    return token
