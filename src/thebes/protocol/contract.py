"""What the controller asks of an engine, and what an engine tells it. Nothing here decides and nothing here does I/O.

An engine starts whole gangs, passes notices on, suspends, kills and reports. Any call can be repeated: the controller
repeats after a crash whatever it cannot be sure of. An incarnation is named by (job_id, incarnation); an engine refuses
one that is older than the newest it has seen of that job, so at most one incarnation of a job lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from thebes.protocol.refused import Refused as Refused

PREEMPTED_EXIT_CODE = 85  # "I have saved my state: resume me"
GANG_NOT_STARTED = "another part of the gang could not start"  # begins the detail of parts that did nothing wrong

AttemptKey = tuple[str, int]  # job, incarnation
PartState = Literal["starting", "running", "frozen", "suspended", "exited"]
Cause = Literal["", "exit", "killed", "timeout", "launch-failed", "lost"]
Mechanism = Literal["checkpoint", "freeze", "cuda"]
MECHANISMS: tuple[Mechanism, ...] = ("checkpoint", "freeze", "cuda")


PARKED_LEASE_S = 86_400.0  # how long nodes go on alone after a controller has left them on purpose


class GpusTaken(Refused):
    """Somebody outside was faster: the cluster that we share has given these GPUs away. Nothing has started."""


@dataclass(frozen=True)
class Part:
    """What one node contributes to a gang: GPUs by their number on that node."""

    node: str
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One incarnation of a job, with everything needed to start it."""

    job_id: str
    incarnation: int
    parts: tuple[Part, ...]  # in rank order
    command: tuple[str, ...]
    workdir: str
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # values are secrets: never logged
    launcher: Literal["plain", "torchrun"] = "plain"
    ranks_per_node: int | None = None  # plain: None means one rank per GPU
    checkpoint_dir: str = ""
    resume_from: str = ""
    resumes: bool = False
    grace_s: float = 30.0
    limit_s: float | None = None  # run time left of its limit
    log_limit_bytes: int = 64 << 20
    progress_pattern: str | None = None  # a regular expression with one group: the step number in a log line
    array_index: int | None = None
    packs: bool = False  # it may share its GPU: on real GPUs it runs under MPS


@dataclass(frozen=True)
class Report:
    """The state of one part of an incarnation, as its node knows it. Times are CLOCK_BOOTTIME seconds."""

    job_id: str
    incarnation: int
    node: str
    state: PartState
    cause: Cause = ""
    detail: str = ""
    codes: Mapping[int, int] = field(default_factory=dict)  # exit code by rank; negative: the signal
    started_s: float | None = None
    exited_s: float | None = None
    run_s: float = 0.0  # running time so far or in all; frozen and suspended time does not count
    acknowledged: bool = False  # the job has seen the notice
    checkpoint_step: int | None = None
    checkpoint_path: str | None = None
    checkpoint_s: float | None = None
    step: int | None = None  # progress, from thebes.job.report or from log lines
    step_s: float | None = None
    first_step_s: float | None = None  # when this incarnation made its first step: start-up ends there
    steps_per_s: float | None = None
    suspend_took_s: float | None = None  # last freeze or cuda suspend
    resume_took_s: float | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU of a node."""

    index: int
    uuid: str = ""
    name: str = ""
    memory_gib: float = 0.0
    virtual: bool = False
    healthy: bool = True
    taken: str = ""  # the holder, on a cluster that we share: no job of ours can have it now


@dataclass(frozen=True)
class NodeFacts:
    """A node as the engine sees it."""

    name: str
    gpus: tuple[Gpu, ...]
    alive: bool = True
    detail: str = ""  # why it is not
    pid: int | None = None  # of its agent, where there is one
    mechanisms: tuple[Mechanism, ...] = ("checkpoint",)
    rack: str = ""  # or leaf switch: nodes of one rack are near to each other
    address: str = ""  # at which other nodes reach it
    drained: str = ""  # why the site wants it empty: nothing new goes there, and what is there shall move


@dataclass(frozen=True)
class NodeChange:
    """A node went away or came back; its reports follow when it is back."""

    facts: NodeFacts


Listener = Callable[[Report | NodeChange], None]


class Engine(Protocol):
    """Async throughout. Calls raise Refused, or OSError/TimeoutError when a node cannot be reached."""

    async def open(self, listener: Listener, *, parked_s: float = 0.0) -> None:
        """Connect; from now on the listener hears of every change, from the event loop's own thread.

        The nodes may have been told to go on alone for `parked_s` from now: until then one that is silent may be alive.
        """
        ...

    async def close(self) -> None:
        """Let go. Jobs go on, as long as their leases last."""
        ...

    async def leave(self) -> None:
        """There will be no controller for a while, on purpose: nodes shall go on alone for PARKED_LEASE_S."""
        ...

    async def nodes(self) -> list[NodeFacts]: ...

    async def reports(self) -> list[Report]:
        """Every incarnation that is not forgotten, alive or ended: what the controller reconciles with."""
        ...

    async def launch(self, launch: Launch) -> None:
        """Start all parts or none. Returns when the supervisors have taken over; what happens then is reported."""
        ...

    async def notice(self, job_id: str, incarnation: int, grace_s: float) -> None:
        """Ask the job to save and go; it is killed `grace_s` from now."""
        ...

    async def terminate(self, job_id: str, incarnation: int, grace_s: float) -> None:
        """SIGTERM now, SIGKILL `grace_s` from now: for jobs that nobody wants to resume."""
        ...

    async def kill(self, job_id: str, incarnation: int) -> None: ...

    async def suspend(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        """freeze or cuda. Returns when the job is suspended; Refused when it cannot be: nothing has changed then."""
        ...

    async def resume(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        """Refused when it cannot be resumed: the controller then restarts it from its last checkpoint."""
        ...

    async def forget(self, job_id: str, incarnation: int) -> None:
        """The controller has the result in its store: the engine need not report it again. Logs stay."""
        ...

    async def read_log(self, job_id: str, incarnation: int, rank: int, offset: int, limit: int) -> tuple[bytes, int]:
        """Up to `limit` bytes from `offset` (negative: so many bytes before the end), and the offset after them."""
        ...


class Parks(Protocol):
    """An engine whose nodes may have been told to go on alone."""

    async def unparked(self) -> None:
        """Returns when no node can be left that still does: all of them have heard of us, or the time is over."""
        ...


class Retires(Protocol):
    """An engine that keeps processes of its own on the nodes between jobs."""

    async def retire(self) -> None:
        """No job is left and the cluster is taken down: what we keep on the nodes goes, too."""
        ...
