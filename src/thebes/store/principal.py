"""The identity behind a request: a token proves a `Principal`; a `Viewer` also knows which tenants are open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Role = Literal["admin", "user"]
ROLES: tuple[Role, ...] = get_args(Role)


class Owned(Protocol):
    """Anything that belongs to a user and a tenant: a job."""

    @property
    def user(self) -> str: ...
    @property
    def tenant(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Principal:
    """A person or program behind a request."""

    user: str
    role: Role
    tenant: str

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"


@dataclass(frozen=True, slots=True)
class Viewer:
    """What somebody may see: an admin everything, a user the own jobs, and those of the own tenant if that is open."""

    user: str
    role: Role
    tenant: str
    open_tenants: frozenset[str] = frozenset()

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"

    @property
    def sees_tenant(self) -> bool:
        return self.tenant in self.open_tenants

    def sees(self, job: Owned) -> bool:
        return self.is_admin or job.user == self.user or (self.sees_tenant and job.tenant == self.tenant)


EVERYTHING = Viewer(user="", role="admin", tenant="")
