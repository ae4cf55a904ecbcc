"""The state of the live scheduler, without I/O: jobs that have not ended, the ledger, what is to be written and done.

Messages come in through functions of the rooms beside this one: a job arrives (`arrivals`), a node or the engine
answers (`answers`), a user orders something (`orders`), nodes come and go (`outages`), a controller starts
(`recovery`), the policy decides (`deciding`). What comes out is collected here as `writes` (functions on the store, to
be committed together) and then `commands` (for the engine, to be carried out after the commit). So everything that is
done has been written down before, and everything that is written down can be done again.
The ledger says what the policy wants; the attempts say what really lives on the GPUs. A gang is launched when its GPUs
are clear of all other jobs and no earlier incarnation of it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from thebes import store as db
from thebes.live.array_limits import Places, kept_back
from thebes.live.commands import Command
from thebes.live.job import Attempt, LiveJob, some_of
from thebes.live.ledger import UNTOLD, Ledger
from thebes.live.packing import Packing, PackingRules
from thebes.live.phases import IllegalMove, Phase, legal
from thebes.model.decision import HOLDS
from thebes.protocol.contract import NodeFacts

Write = Callable[[Connection], None]


@dataclass(frozen=True)
class Settings:
    """What the core needs of the configuration."""

    grace_s: float = 30.0
    log_limit_bytes: int = 64 << 20
    checkpoint_root: str = ""  # the folder that holds one folder per job
    strict: bool = True  # an illegal move of phases raises; a cluster in use only reports it


class Tally:
    """What the core counts for the metrics; the real one is thebes.live.metrics.Metrics."""

    def preempted(self, policy: str) -> None: ...
    def lost(self, cause: str, gpu_seconds: float) -> None: ...
    def ended(self, tenant: str, state: str, jct_s: float) -> None: ...
    def started(self, tenant: str, *, took_s: float, queue_delay_s: float | None = None) -> None: ...
    def suspended(self, mechanism: str, took_s: float) -> None: ...
    def resumed(self, mechanism: str, took_s: float) -> None: ...
    def eta_error(self, error_s: float) -> None: ...
    def slowdown(self, ratio: float) -> None: ...


class Core:
    """All jobs that have not ended, the ledger, and what must be written and done."""

    def __init__(self, ledger: Ledger, settings: Settings, figures: Tally | None = None) -> None:
        self.ledger = ledger
        self.settings = settings
        self.figures = figures or Tally()
        self.jobs: dict[str, LiveJob] = {}
        self.dependents: dict[str, set[str]] = {}
        self.places: dict[str, Places] = {}  # by array, for arrays with a limit
        self.crowded: set[str] = set()  # arrays in which a member may have got or lost a place since the last decision
        self.nodes: dict[str, NodeFacts] = {}
        self.drained: dict[str, str] = {}
        self.unlaunched: dict[str, None] = {}  # jobs that were given GPUs and are not launched yet, in that order
        self.on_gpu: dict[int, set[tuple[str, int]]] = {}
        self.rules = PackingRules()  # they say when packing pays
        self.packings: dict[str, Packing] = {}  # by guest
        self.writes: list[Write] = []
        self.commands: list[Command] = []
        self.events: list[dict[str, Any]] = []  # events, with their numbers once they are committed
        self.journalled = 0
        self.dirty = False  # whether the policy should be asked
        self.closing = False

    def take(self) -> tuple[list[Write], list[Command], list[dict[str, Any]]]:
        """Return what has been collected, and start collecting again."""
        taken = self.writes, self.commands, self.events
        self.writes, self.commands, self.events = [], [], []
        return taken

    def find(self, job_id: str, incarnation: int) -> tuple[LiveJob | None, Attempt | None]:
        job = self.jobs.get(job_id)
        return job, None if job is None else job.attempts.get(incarnation)

    def shown(self, job: LiveJob) -> bool:
        """Whether the policy may choose it."""
        return self.ledger.knows(job.id) and job.id not in self.ledger.held_by_user

    def places_of(self, job: LiveJob) -> Places | None:
        """The places that it shares with the other members of its array; None if there is no limit."""
        array, limit = job.limited_array, job.spec.array_limit
        return None if array is None or limit is None else self.places.setdefault(array, Places(limit))

    def packs(self, job: LiveJob) -> bool:
        return self.ledger.packing and job.spec.pack and job.spec.gpus == 1

    def grace_s(self, job: LiveJob) -> float:
        return self.settings.grace_s if job.spec.grace_s is None else job.spec.grace_s

    def where(self, gpus: Iterable[int]) -> dict[str, list[int]]:
        return {node: list(numbers) for node, numbers in self.ledger.parts(gpus)}

    def occupy(self, job: LiveJob, attempt: Attempt) -> None:
        for gpu in attempt.gpus:
            self.on_gpu.setdefault(gpu, set()).add((job.id, attempt.incarnation))

    def vacate(self, job: LiveJob, attempt: Attempt) -> None:
        for gpu in attempt.gpus:
            holders = self.on_gpu.get(gpu)
            if holders is not None:
                holders.discard((job.id, attempt.incarnation))
                if not holders:
                    del self.on_gpu[gpu]

    def move(self, job: LiveJob, attempt: Attempt, to: Phase, now_s: float, *, corrects: bool = False) -> None:
        """Bring an attempt to another phase; with `corrects`, because its nodes have told so after a crash."""
        before = attempt.phase
        if not legal(before, to, corrects=corrects):
            if self.settings.strict:
                raise IllegalMove(f"job {job.id}, incarnation {attempt.incarnation}: from {before} to {to}")
            # This is a mistake of ours. The job goes on, since the nodes have the last word, but the story must not
            # hide it.
            self.event(now_s, "illegal-move", job, incarnation=attempt.incarnation, before=before, after=to)
        attempt.phase = to

    def settle(self, job: LiveJob, now_s: float) -> None:
        """Bring the state that people see up to date."""
        if job.id not in self.jobs:
            return
        self.note_place(job)
        phases = {attempt.phase for attempt in job.attempts.values()}
        if job.active is not None:
            state = "running" if job.active.phase == "running" else "starting"
        elif "stopping" in phases or "suspending" in phases:
            state = "preempting"
        elif job.target is not None:
            state = "starting"
        elif "suspended" in phases:
            state = "suspended"
        else:
            state = "held" if job.hold else "queued"
        if state != job.state:
            job.state = state
            self.update(job, state=state, reason="")
            self.event(now_s, "state", job, state=state)

    def note_place(self, job: LiveJob) -> None:
        """Something has happened to a job: if it has a place, another member may have it at the next decision."""
        array = job.limited_array
        if array is not None and array in self.places:
            self.crowded.add(array)

    def ran_s(self, job: LiveJob, now_s: float) -> float:
        """The running time of all its incarnations, up to now."""
        ran_s = job.run_s
        for attempt in job.attempts.values():
            ran_s += max((report.run_s for report in attempt.reports.values()), default=0.0)
            if attempt.phase in ("running", "stopping") and attempt.reports:
                ran_s += max(0.0, now_s - attempt.heard_s)
        return ran_s

    def reason(self, job: LiveJob) -> str:
        """Why a job is not running, as of the last decision."""
        if job.hold:
            return "held by its user"
        if job.waits_for:
            return f"waits for job {some_of(job.waits_for)}"
        if job.target is not None and job.active is None:
            mine = {attempt.incarnation for attempt in job.attempts.values()}
            if mine:
                return "its last incarnation is still saving its state"
            busy = {holder for gpu in job.target for holder, _ in self.on_gpu.get(gpu, ())}
            return f"its GPUs are being cleared by job {some_of(busy)}" if busy else "is being started"
        if job.limited_array is not None and not (job.cancelled or self.shown(job)):
            return kept_back(job.spec.array_limit or 0)
        fate = self.ledger.fate_of(job.id)
        return "" if fate in (HOLDS, UNTOLD) else self.ledger.reason(fate)

    def update(self, job: LiveJob, **columns: Any) -> None:
        self.writes.append(lambda c: db.update_job(c, job.id, **columns))

    def update_attempt(self, job: LiveJob, attempt: Attempt, **columns: Any) -> None:
        incarnation = attempt.incarnation
        self.writes.append(lambda c: db.update_attempt(c, job.id, incarnation, **columns))

    def event(
        self, time_s: float, kind: str, job: LiveJob | None, *, node: str | None = None, actor: str = "", **detail: Any
    ) -> None:
        event: dict[str, Any] = {
            "seq": 0,
            "time_s": time_s,
            "job_id": None if job is None else job.id,
            "user": None if job is None else job.user,
            "tenant": None if job is None else job.tenant,
            "node": node,
            "kind": kind,
            "actor": actor,
            "detail": detail,
        }
        self.events.append(event)

        def write(c: Connection) -> None:
            event["seq"] = db.add_event(c, time_s, kind, job_id=event["job_id"], node=node, actor=actor, detail=detail)

        self.writes.append(write)
