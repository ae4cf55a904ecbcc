"""What the calls of the clients return, key by key, for type checkers and editors.

At run time the answers are the plain dictionaries that the server has sent; nothing here is loaded for a call. Times
are Unix seconds. A test compares every class with the model in `thebes.api.answers` that the server answers with.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

JobState: TypeAlias = Literal[
    "queued", "held", "starting", "running", "preempting", "suspended", "completed", "failed", "cancelled", "timeout"
]  # fmt: skip
Role: TypeAlias = Literal["admin", "user"]
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class JobFields(TypedDict, total=False):
    """What `submit` and `plan` take beside the command: the fields of a job file, all of them optional."""

    gpus: int
    min_gpus: int | None
    max_gpus: int | None
    nodes: int | None
    gpu_type: str | None
    name: str | None
    tenant: str | None
    priority: int
    time_s: float | None
    after: list[str]
    after_any: list[str]
    array: list[int] | None
    array_limit: int | None
    hold: bool
    env: dict[str, str]
    workdir: str | None
    launcher: Literal["plain", "torchrun"]
    ranks_per_node: int | None
    mechanism: Literal["auto", "checkpoint", "freeze", "cuda"]
    grace_s: float | None
    max_retries: int
    progress_pattern: str | None
    pack: bool
    model: str | None


class SubmittedAnswer(TypedDict):
    """The id to go on with (of an array, the one that names all its members), and all ids."""

    id: str
    ids: list[str]


class JobInfo(TypedDict):
    """A job in a list."""

    id: str
    array_id: str | None
    array_index: int | None
    user: str
    tenant: str
    name: str | None
    state: JobState
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
    array_limit: int | None
    command: str
    expected_start_s: float | None
    gpus_held: dict[str, list[int]]
    step: int | None
    steps_per_s: float | None


class AttemptInfo(TypedDict):
    """One incarnation of a job."""

    incarnation: int
    state: str
    parts: list[tuple[str, list[int]]]
    mechanism: str
    created_s: float
    started_s: float | None
    ended_s: float | None
    cause: str
    codes: dict[str, int]
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
    """Everything about one job; the values of `env` in `spec` are masked."""

    spec: dict[str, Json]
    attempts: list[AttemptInfo]
    after: list[str]
    after_any: list[str]


class MemberInfo(TypedDict):
    """One member of an array."""

    id: str
    array_index: int
    state: JobState
    reason: str
    exit_code: int | None


class ArrayDetail(TypedDict):
    """A job array: one specification, many jobs. The key `array` tells it from a `JobDetail`."""

    id: str
    array: Literal[True]
    user: str
    tenant: str
    name: str | None
    gpus: int
    submit_s: float
    states: dict[JobState, int]
    members: list[MemberInfo]
    spec: dict[str, Json]


class JobPage(TypedDict):
    """Some jobs, and the cursor of the next page, which is None on the last one."""

    jobs: list[JobInfo]
    next: str | None


class WaitAnswer(TypedDict):
    """The state of a job, or of an array as a whole."""

    id: str
    done: bool
    state: JobState
    exit_code: int | None
    reason: str
    states: dict[JobState, int]


class EnvironmentAnswer(TypedDict):
    """The environment with which a job was submitted."""

    env: dict[str, str]


class EventInfo(TypedDict):
    """Something that happened."""

    seq: int
    time_s: float
    job_id: str | None
    node: str | None
    kind: str
    actor: str
    detail: dict[str, Json]


class EventsAnswer(TypedDict):
    """Events, oldest first."""

    events: list[EventInfo]


class PlanAnswer(TypedDict):
    """What would become of a job if it were submitted now; `start_in_s` is None if that cannot be told."""

    starts: Literal["now", "later", "never"]
    start_in_s: float | None
    nodes: dict[str, list[int]]
    preempts: list[str]
    position: int | None
    reason: str
    estimate: str
    note: str


class GpuInfo(TypedDict):
    """One GPU. `job` and `user` are None for jobs that you may not see, also while it is busy."""

    index: int
    busy: bool
    job: str | None
    user: str | None
    uuid: str
    name: str
    memory_gib: float
    virtual: bool
    healthy: bool
    taken: str


class NodeInfo(TypedDict):
    """A node, its GPUs and the jobs that hold them."""

    name: str
    alive: bool
    drained: bool
    reason: str
    gpus_total: int
    gpus_busy: int
    gpus: list[GpuInfo]
    rack: str
    pid: int | None
    mechanisms: list[str]


class NodesAnswer(TypedDict):
    """All nodes."""

    nodes: list[NodeInfo]


class DrainAnswer(TypedDict):
    """A node after drain or undrain."""

    name: str
    drained: bool


class BusyGpus(TypedDict):
    """How many GPUs there are, and how many are held."""

    total: int
    busy: int


class TokenHolder(TypedDict):
    """The owner of this token."""

    user: str
    role: Role
    tenant: str


class ControllerInfo(TypedDict):
    """One of several controllers of a cluster."""

    name: str
    url: str
    leads: bool
    seen_ago_s: float


class ClusterStatus(TypedDict):
    """The state of the cluster. `controllers` is None where there can be only one."""

    policy: str
    placement: str
    gpus: BusyGpus
    jobs: dict[str, int]
    time_s: float
    trouble: str | None
    closing: bool
    you: TokenHolder
    controllers: list[ControllerInfo] | None


class DecisionInfo(TypedDict):
    """One decision of the policy, as journalled."""

    seq: int
    time_s: float
    kind: str
    body: dict[str, Json]


class DecisionsAnswer(TypedDict):
    """Decisions, newest first."""

    decisions: list[DecisionInfo]


class TenantInfo(TypedDict):
    """A group of users. If it is `open`, its members see each other's jobs."""

    name: str
    gpu_quota: int | None
    open: bool


class TenantsAnswer(TypedDict):
    """All tenants that you may see."""

    tenants: list[TenantInfo]


class TokenInfo(TypedDict):
    """A token without its text."""

    id: int
    user: str
    role: Role
    tenant: str
    created_s: float
    expires_s: float | None
    revoked: bool


class TokensAnswer(TypedDict):
    """All tokens."""

    tokens: list[TokenInfo]


class NewToken(TokenInfo):
    """A token with its text, shown this one time."""

    token: str


class SnapshotAnswer(TypedDict):
    """An upload; its digest belongs into the field `snapshot` of a job."""

    digest: str
    bytes: int
