"""What the API takes and gives, as pydantic models. They are the published contract.

Values of a job's environment leave the server only through `Environment`; everywhere else they are masked.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from thebes import store as db
from thebes.jobspec.spec import JOB_ID, NAME
from thebes.store.arrays import Light
from thebes.store.principal import Role

MASK = "***"
MAX_SHOWN_COMMAND = 200

JobId = Annotated[str, Field(pattern=JOB_ID, examples=["17", "17_3"])]
JobState = Literal[
    "queued", "held", "starting", "running", "preempting", "suspended", "completed", "failed", "cancelled", "timeout"
]  # fmt: skip


class In(BaseModel):
    """A request body. It refuses fields that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Out(BaseModel):
    """An answer."""

    model_config = ConfigDict(frozen=True)


class Fault(Out):
    """What went wrong, and what to do about it."""

    error: str
    hint: str = ""


class SubmittedAnswer(Out):
    """The id to go on with (of an array, the one that names all its members), and all ids."""

    id: JobId
    ids: list[JobId]


class Acted(Out):
    """The jobs that were acted on."""

    ids: list[JobId]


class JobInfo(Out):
    """A job in a list. Times are Unix seconds."""

    id: JobId
    array_id: str | None
    array_index: int | None
    user: str
    tenant: str
    name: str | None
    state: JobState
    reason: str = Field(description="Why it waits, or how it ended.")
    gpus: int
    nodes: int | None
    priority: int
    submit_s: float
    first_start_s: float | None
    end_s: float | None
    incarnation: int = Field(description="How often it was started.")
    exit_code: int | None
    preemptions: int
    failures: int
    losses: int = Field(description="Incarnations lost by fault of the cluster.")
    run_s: float
    lost_gpu_s: float
    hold: bool
    array_limit: int | None = Field(description="At most so many jobs of its array run at a time.")
    command: str = Field(description="Shortened, for people.")
    expected_start_s: float | None = Field(description="Of a job that waits: as estimated when it began to wait.")
    gpus_held: dict[str, list[int]] = Field(description="Nodes, and the GPUs of each that it holds now.")
    step: int | None = Field(description="How far it is, if it tells.")
    steps_per_s: float | None


class AttemptInfo(Out):
    """One incarnation of a job."""

    incarnation: int
    state: str
    parts: list[tuple[str, list[int]]] = Field(description="Nodes and the GPUs held there.")
    mechanism: str
    created_s: float
    started_s: float | None
    ended_s: float | None
    cause: str
    codes: dict[str, int] = Field(description="Exit codes by rank; negative: a signal.")
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


class JobDetail(JobInfo):
    """Everything about one job."""

    spec: dict[str, Any] = Field(description="As submitted; values of `env` are masked.")
    attempts: list[AttemptInfo]
    after: list[str] = Field(description="Jobs that must have completed before.")
    after_any: list[str] = Field(description="Jobs that must have ended before, in whatever way.")


class MemberInfo(Out):
    """One member of an array."""

    id: JobId
    array_index: int
    state: JobState
    reason: str
    exit_code: int | None


class ArrayDetail(Out):
    """A job array: one specification, many jobs."""

    id: JobId
    array: Literal[True] = True
    user: str
    tenant: str
    name: str | None
    gpus: int
    submit_s: float
    states: dict[JobState, int]
    members: list[MemberInfo]
    spec: dict[str, Any]


class JobPage(Out):
    """Some jobs, and where the next page begins."""

    jobs: list[JobInfo]
    next: str | None = Field(description="Pass it as `cursor` for the next page; null: this was the last.")


class WaitAnswer(Out):
    """The state of a job, or of an array as a whole."""

    id: JobId
    done: bool
    state: JobState
    exit_code: int | None
    reason: str
    states: dict[JobState, int]


class EnvironmentAnswer(Out):
    """The environment with which a job was submitted."""

    env: dict[str, str]


class EventInfo(Out):
    """Something that happened."""

    seq: int
    time_s: float
    job_id: str | None
    node: str | None
    kind: str
    actor: str
    detail: dict[str, Any]


class EventsAnswer(Out):
    """Events, oldest first; go on with `after` = the last seq."""

    events: list[EventInfo]


class PlanAnswer(Out):
    """What would become of a job if it were submitted now."""

    model_config = ConfigDict(frozen=True, extra="allow")

    starts: Literal["now", "later", "never"]
    start_in_s: float | None = Field(None, description="Null: cannot be said.")
    nodes: dict[str, list[int]] = Field(default_factory=dict, description="Where: nodes and their GPUs.")
    preempts: list[str] = Field(default_factory=list, description="Jobs that would have to make room.")
    position: int | None = Field(None, description="In the queue; 0: starts at once.")
    reason: str = ""
    estimate: str = Field("", description="What the start time rests on, or why there is none.")
    note: str = Field("", description="What else there is to know, of an array with a limit.")


class GpuInfo(Out):
    """One GPU. `job` and `user` are null for jobs that you may not see, also while it is busy."""

    model_config = ConfigDict(frozen=True, extra="allow")

    index: int
    busy: bool
    job: str | None
    user: str | None
    uuid: str = ""
    name: str = ""
    memory_gib: float = 0.0
    virtual: bool = False
    healthy: bool = True
    taken: str = Field("", description="What holds it on a cluster that others use too; our jobs cannot have it now.")


class NodeInfo(Out):
    """A node, its GPUs and the jobs that hold them."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    alive: bool
    drained: bool
    reason: str
    gpus_total: int
    gpus_busy: int
    gpus: list[GpuInfo]
    rack: str = ""
    pid: int | None = Field(None, description="Of the agent there.")
    mechanisms: list[str] = Field(default_factory=list, description="How jobs there may be suspended.")


class NodesAnswer(Out):
    """All nodes."""

    nodes: list[NodeInfo]


class DrainAnswer(Out):
    """A node after drain or undrain."""

    name: str
    drained: bool


class BusyGpus(Out):
    """How many GPUs there are, and how many are held."""

    total: int
    busy: int


class TokenHolder(Out):
    """The owner of this token."""

    user: str
    role: Role
    tenant: str


class ControllerInfo(Out):
    """One of several controllers of a cluster."""

    name: str
    url: str
    leads: bool
    seen_ago_s: float


class ClusterStatus(Out):
    """The state of the cluster."""

    model_config = ConfigDict(frozen=True, extra="allow")

    policy: str
    placement: str
    gpus: BusyGpus
    jobs: dict[str, int] = Field(description="Jobs by state: for admins the living ones, for users all own ones.")
    time_s: float
    trouble: str | None = Field(description="What keeps the cluster from working as it should.")
    closing: bool
    you: TokenHolder
    controllers: list[ControllerInfo] | None = Field(None, description="Null where there can be only one.")


class DecisionInfo(Out):
    """One decision of the policy, as journalled."""

    seq: int
    time_s: float
    kind: str
    body: dict[str, Any]


class DecisionsAnswer(Out):
    """Decisions, newest first; go on with `before` = the last seq."""

    decisions: list[DecisionInfo]


class TenantInfo(Out):
    """A group of users. If it is `open`, its members see each other's jobs."""

    name: str
    gpu_quota: int | None
    open: bool


class TenantsAnswer(Out):
    """All tenants that you may see."""

    tenants: list[TenantInfo]


class TokenInfo(Out):
    """A token without its text."""

    id: int
    user: str
    role: Role
    tenant: str
    created_s: float
    expires_s: float | None
    revoked: bool


class TokensAnswer(Out):
    """All tokens."""

    tokens: list[TokenInfo]


class NewToken(TokenInfo):
    """A token with its text, shown this one time."""

    token: str


class SnapshotAnswer(Out):
    """An upload: name its digest in the field `snapshot` of a job."""

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int


class Health(Out):
    """The server answers."""

    ok: bool
    role: str = Field(default="leader", description="leader, or standby: then another controller has to be asked.")


class NothingIn(In):
    """A request without options."""


class PreemptIn(In):
    """Options of preempt."""

    grace_s: float | None = Field(None, ge=0, le=86_400, description="Instead of the job's own grace.")


class DrainIn(In):
    """Options of drain."""

    reason: str = Field("", max_length=500, description="Shown to everybody.")
    preempt: bool = Field(False, description="Move its jobs away now instead of letting them end.")


class ShutdownIn(In):
    """What becomes of running jobs."""

    mode: Literal["checkpoint", "keep", "kill"] = Field(
        description="checkpoint: they save and are queued again; keep: they run on; kill: they are ended at once."
    )


class TenantIn(In):
    """A tenant as it is to be."""

    gpu_quota: int | None = Field(None, ge=0, le=10_000_000, description="GPUs at the same time; null: no limit.")
    open: bool = Field(False, description="Members see each other's jobs.")


class TokenIn(In):
    """A token to make."""

    user: str = Field(pattern=NAME)
    role: Role = "user"
    tenant: str | None = Field(None, pattern=NAME, description="Default: the tenant of the asker.")
    expires_in_s: float | None = Field(None, gt=0, le=10 * 366 * 86_400.0, allow_inf_nan=False)


IN_MODELS: tuple[type[BaseModel], ...] = (NothingIn, PreemptIn, DrainIn, ShutdownIn, TenantIn, TokenIn)


_STORED = tuple(
    name for name in JobInfo.model_fields if name in {field.name for field in dataclasses.fields(db.JobRow)}
)


def masked(spec: str) -> dict[str, Any]:
    """A job's specification for other people: the names of its environment without the values."""
    shown: dict[str, Any] = json.loads(spec)
    shown["env"] = dict.fromkeys(shown.get("env") or {}, MASK)
    return shown


@lru_cache(maxsize=128)  # members of an array share one specification
def said_in(spec: str) -> dict[str, Any]:
    """What lists tell of a specification."""
    said = json.loads(spec)
    text = shlex.join(said["command"])
    short = text if len(text) <= MAX_SHOWN_COMMAND else text[: MAX_SHOWN_COMMAND - 1] + "…"
    return {"command": short, "array_limit": said.get("array_limit")}


def job_fields(row: db.JobRow, live: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a job. `live` is what the controller knows beyond the store, as long as the job is alive."""
    shown = {name: getattr(row, name) for name in _STORED}
    now = {
        "gpus_held": {},
        "expected_start_s": None,
        "step": None,
        "steps_per_s": None,
        "reason": row.reason,
        **(live or {}),
    }
    return {**shown, **now, "reason": now["reason"] or row.reason, **said_in(row.spec)}


def job(row: db.JobRow, live: Mapping[str, Any] | None) -> JobInfo:
    return JobInfo(**job_fields(row, live))


def attempt(row: db.AttemptRow) -> AttemptInfo:
    shown = {name: getattr(row, name) for name in AttemptInfo.model_fields}
    shown["parts"] = [(node, list(gpus)) for node, gpus in row.parts]
    shown["codes"] = {str(rank): code for rank, code in row.codes.items()}
    return AttemptInfo(**shown)


def job_detail(
    row: db.JobRow, attempts: Iterable[db.AttemptRow], after: list[str], live: Mapping[str, Any] | None
) -> JobDetail:
    shown, spec = [attempt(one) for one in attempts], masked(row.spec)
    must: set[str] = set(spec.get("after") or ())
    return JobDetail(
        **job_fields(row, live),
        spec=spec,
        attempts=shown,
        after=[one for one in after if one in must],
        after_any=[one for one in after if one not in must],
    )


def array_detail(array_id: str, first: db.JobRow, members: Sequence[Light]) -> ArrayDetail:
    names = ("id", "array_index", "state", "reason", "exit_code")
    return ArrayDetail(
        id=array_id,
        user=first.user,
        tenant=first.tenant,
        name=first.name,
        gpus=first.gpus,
        submit_s=first.submit_s,
        states=Counter(state for _, _, state, _, _ in members),  # type: ignore[arg-type]
        members=[MemberInfo.model_validate(dict(zip(names, member, strict=True))) for member in members],
        spec=masked(first.spec),
    )


def waited(job_id: str, telling: db.JobRow, states: Mapping[str, int]) -> WaitAnswer:
    """The state of a job or array. `telling` is the job itself, or the member that stands for its array."""
    return WaitAnswer(
        id=job_id,
        done=telling.terminal,
        state=telling.state,  # type: ignore[arg-type]
        exit_code=telling.exit_code,
        reason=telling.reason,
        states=dict(states),  # type: ignore[arg-type]
    )


def event(row: db.EventRow) -> EventInfo:
    return EventInfo(
        **{name: getattr(row, name) for name in EventInfo.model_fields if name != "detail"}, detail=dict(row.detail)
    )


def tenant(row: db.TenantRow) -> TenantInfo:
    return TenantInfo(name=row.name, gpu_quota=row.gpu_quota, open=row.open)


def token(row: db.TokenRow) -> TokenInfo:
    return TokenInfo(**{name: getattr(row, name) for name in TokenInfo.model_fields})


def decision(entry: db.JournalEntry) -> DecisionInfo:
    return DecisionInfo(seq=entry.seq, time_s=entry.time_s, kind=entry.kind, body=dict(entry.body))
