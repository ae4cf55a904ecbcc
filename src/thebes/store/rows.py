"""The rows that the store returns; they are frozen. A specification holds environment values and is never printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thebes.store.principal import Principal, Role
from thebes.store.schema import TERMINAL_STATES

Parts = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job; a member of an array is a job of its own."""

    seq: int
    id: str
    array_id: str | None
    array_index: int | None
    user: str
    tenant: str
    name: str | None
    state: str
    reason: str
    gpus: int
    nodes: int | None
    priority: int
    submit_s: float
    first_start_s: float | None
    end_s: float | None
    incarnation: int
    exit_code: int | None
    preemptions: int
    failures: int
    losses: int
    run_s: float
    lost_gpu_s: float
    hold: bool
    client_key: str | None
    submission: str | None
    spec: str = field(repr=False)

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL_STATES


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One incarnation of a job."""

    job_id: str
    incarnation: int
    state: str
    parts: Parts
    mechanism: str
    created_s: float
    started_s: float | None
    ended_s: float | None
    cause: str
    codes: Mapping[int, int]
    detail: str
    checkpoint_step: int | None
    checkpoint_path: str | None
    checkpoint_s: float | None
    step: int | None
    steps_per_s: float | None
    run_s: float
    startup_s: float | None
    stop_s: float | None
    lost_s: float


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened, for people."""

    seq: int
    time_s: float
    job_id: str | None
    node: str | None
    kind: str
    actor: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Something that went into or came out of a decision, for replay."""

    seq: int
    time_s: float
    kind: str
    body: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class TenantRow:
    """A group of users. A `gpu_quota` of None means no limit."""

    name: str
    gpu_quota: int | None
    open: bool


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token without its text, which only its holder has."""

    id: int
    user: str
    role: Role
    tenant: str
    created_s: float
    expires_s: float | None
    revoked: bool

    @property
    def principal(self) -> Principal:
        return Principal(self.user, self.role, self.tenant)
