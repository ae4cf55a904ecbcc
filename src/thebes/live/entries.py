"""The entries of the journal: each change of the ledger has a class of its own, and nothing else changes the ledger.

`to_json` gives the form in which an entry is stored, `entry_of` reads it back. The stored form is that of version 0.1:
{"op": name, "t": seconds, …}. A field that is added later needs a default, which stands for what older journals do not
say; a key that this version does not know is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, get_args

JobAndGpus = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Entry:
    """What all entries have: a name in the journal, and the instant of cluster time at which they hold."""

    op: ClassVar[str]
    time_s: float

    def to_json(self) -> dict[str, Any]:
        """The form in which it is stored."""
        own = {field.name: _listed(getattr(self, field.name)) for field in fields(self)[1:]}
        return {"op": self.op, "t": self.time_s, **own}


@dataclass(frozen=True)
class Arrive(_Entry):
    """A job is to be scheduled from now on."""

    op: ClassVar[str] = "arrive"
    job: str
    gpus: int
    tenant: str
    submit_s: float
    nodes: int | None = None
    gpu_type: str | None = None
    model: str | None = None
    priority: int = 0
    suspend_s: float = 0.0  # the expected time to suspend and to resume the job
    resume_s: float = 0.0
    min_gpus: int | None = None  # an elastic job runs on anything between these two; None means what it asks for
    max_gpus: int | None = None


@dataclass(frozen=True)
class Leave(_Entry):
    """A job has ended, in whatever way; `completed` adds its service to what policies may learn from."""

    op: ClassVar[str] = "leave"
    job: str
    completed: bool = False


@dataclass(frozen=True)
class Ran(_Entry):
    """A job that was given GPUs has begun to run on them, at `run_from_s`, which may have been told late, or now."""

    op: ClassVar[str] = "ran"
    job: str
    run_from_s: float | None = None  # None means at the instant of the entry
    ready_s: float | None = None  # since when its GPUs were clear; None means since it was given them

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_json().items() if value is not None}


@dataclass(frozen=True)
class Measured(_Entry):
    """What a job's reports of its steps say: at this instant it had done so much work and went on at this speed."""

    op: ClassVar[str] = "measured"
    job: str
    progress_s: float  # work done so far, in seconds at its best speed
    speed: float  # relative to its best speed
    full_s: float  # one iteration at its best speed
    at_s: float | None = None  # None means at the instant of the entry


@dataclass(frozen=True)
class Rate(_Entry):
    """How fast a job that may be packed runs alone."""

    op: ClassVar[str] = "rate"
    job: str
    steps_per_s: float


@dataclass(frozen=True)
class LeaveHost(_Entry):
    """A guest leaves its host; `undone` if sharing did not pay."""

    op: ClassVar[str] = "part"
    job: str
    undone: bool = False


@dataclass(frozen=True)
class Back(_Entry):
    """A job that held GPUs waits again without a decision of the policy: it failed, was lost or was asked to leave."""

    op: ClassVar[str] = "back"
    job: str


@dataclass(frozen=True)
class Hold(_Entry):
    """A user holds a job: the ledger knows it, and the policy does not see it."""

    op: ClassVar[str] = "hold"
    job: str


@dataclass(frozen=True)
class Release(_Entry):
    """A user lets a held job go on."""

    op: ClassVar[str] = "release"
    job: str


@dataclass(frozen=True)
class Set(_Entry):
    """New facts about a job; None where there is nothing new."""

    op: ClassVar[str] = "set"
    job: str
    priority: int | None = None
    suspend_s: float | None = None
    resume_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_json().items() if value is not None}


@dataclass(frozen=True)
class Quota(_Entry):
    """A tenant may hold so many GPUs at once; None means no limit."""

    op: ClassVar[str] = "quota"
    tenant: str
    gpus: int | None


@dataclass(frozen=True)
class Nodes(_Entry):
    """These nodes are down or drained, and these GPUs sick: nothing new goes there, and what is there stays."""

    op: ClassVar[str] = "nodes"
    blocked: tuple[str, ...]
    sick: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decide(_Entry):
    """A decision that was made and checked. Arrays and the policy's memory are packed into texts when it is made, so
    that what cannot be written down is found before anything has changed."""

    op: ClassVar[str] = "decide"
    digest: str  # of the View from which it was made
    suspend: tuple[str, ...]
    start: tuple[JobAndGpus, ...]
    migrate: tuple[JobAndGpus, ...]
    promote: tuple[str, ...]
    queues: str | None
    fates: str
    wake_s: float | None  # None if the policy does not ask to be woken
    memory: str | None
    guests: tuple[tuple[str, str], ...] = ()  # (guest, host)
    shares: tuple[tuple[str, float], ...] = ()  # (job, its share of each of its GPUs), for jobs whose share changes
    format: int = 1  # 1 is that of version 0.1, whose memory was keyed by rows

    def to_json(self) -> dict[str, Any]:
        told = super().to_json()
        return told if self.format > 1 else {key: value for key, value in told.items() if key != "format"}


Entry = Arrive | Leave | Ran | Measured | Rate | LeaveHost | Back | Hold | Release | Set | Quota | Nodes | Decide

KINDS: dict[str, type[Entry]] = {kind.op: kind for kind in get_args(Entry)}

E = TypeVar("E", bound=Entry)


def entry_of(body: Mapping[str, Any]) -> Entry:
    """An entry from its stored form; a LookupError or TypeError if it is none."""
    return read(KINDS[body["op"]], body)


def read(kind: type[E], body: Mapping[str, Any]) -> E:
    """The same, if the kind is known."""
    known = {field.name: _frozen(body[field.name]) for field in fields(kind)[1:] if field.name in body}
    return kind(float(body["t"]), **known)


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value
