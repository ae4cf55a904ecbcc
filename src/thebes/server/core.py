"""The controller without I/O: what happens to jobs when something happens.

Messages go in through methods (a job arrived, a node reports, a user cancels, time passes); what comes out is collected
as `writes` (functions on the store, to be committed together) and then `commands` (for the engine, to be carried out
after the commit). So nothing is done that is not written down, and whatever is written down can be done again.
The ledger says what the policy wants; the attempts say what really lives on the GPUs. A gang is launched when its GPUs
are clear of everybody else and no earlier incarnation of it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from sqlalchemy import Connection

from thebes.engine.contract import Gpu, Launch, Mechanism, NodeFacts, Part, Report
from thebes.model.decision import HOLDS
from thebes.model.errors import UserError
from thebes.node import packing as sharing
from thebes.node.packing import Packing, Rules, Sample, window
from thebes.server import store as db
from thebes.server.array_limits import Places, kept_back
from thebes.server.errors import Conflict, NotFound
from thebes.server.ledger import UNTOLD, Ledger, Planned
from thebes.server.outcome import RESUMABLE, Outcome, Why, judge, lost_work_s
from thebes.server.spec import JobSpec, must_complete

MAX_SAMPLES = 300  # reports remembered of a job that may be packed
RATE_NEWS = 0.05  # a rate alone is told anew when it has changed by so much
CANCEL_GRACE_S = 5.0  # between SIGTERM and SIGKILL of a cancelled job
MAX_LOSSES = 20  # an incarnation lost so many times in a row has a cause that we do not see
MAX_YIELDS = 20  # exits with "resume me", unasked and soon after the start, in a row: it would go on so for ever
YIELD_SOON_S = 10.0
MAX_REASONS = 1000  # that a decision's entry in the journal tells
SMOOTHING = 0.5  # weight of the newest measurement of what suspending or resuming a job takes

Write = Callable[[Connection], None]
Phase = Literal["launching", "running", "stopping", "suspending", "suspended", "resuming"]
Verb = Literal["launch", "notice", "terminate", "kill", "suspend", "resume", "forget"]


@dataclass(frozen=True)
class Command:
    """Something for the engine to do, after the commit."""

    verb: Verb
    job_id: str
    incarnation: int
    grace_s: float = 0.0
    mechanism: Mechanism = "checkpoint"
    launch: Launch | None = None
    snapshot: str | None = None  # the work directory to unpack first


@dataclass
class Attempt:
    """An incarnation that lives, or may live."""

    incarnation: int
    gpus: tuple[int, ...]
    parts: tuple[Part, ...]
    phase: Phase
    created_s: float
    why: Why = ""
    mechanism: Mechanism = "checkpoint"
    started_s: float | None = None
    stop_asked_s: float | None = None
    ready: bool = False  # it has made its first step
    heard_s: float = 0.0  # when a node told of it last
    sure: bool = True  # its phase is what its nodes say; after a crash they have to be asked
    reports: dict[str, Report] = field(default_factory=dict)
    unknown_on: set[str] = field(default_factory=set)  # nodes that were asked and know nothing of it
    samples: list[Sample] = field(default_factory=list)  # where it was when, if it may be packed


@dataclass
class LiveJob:
    """A job that has not ended."""

    id: str
    seq: int
    user: str
    tenant: str
    spec: JobSpec = field(repr=False)
    array_index: int | None
    submit_s: float
    state: str
    incarnation: int
    preemptions: int
    failures: int
    losses: int
    run_s: float
    lost_gpu_s: float
    first_start_s: float | None
    hold: bool
    cancelled: bool = False
    waits_for: set[str] = field(default_factory=set)
    target: tuple[int, ...] | None = None  # the GPUs that the policy gives it
    attempts: dict[int, Attempt] = field(default_factory=dict)
    checkpoint_step: int | None = None
    checkpoint_path: str = ""
    suspend_s: float = 0.0
    resume_s: float = 0.0
    takes_part: bool = False  # it has told a checkpoint: the handshake works with it
    step: int | None = None
    steps_per_s: float | None = None
    losses_in_a_row: int = 0
    yields_in_a_row: int = 0
    expected_start_s: float | None = None  # as estimated when it first had to wait
    asked_when: bool = False  # whether that was tried
    best_steps_per_s: float = 0.0
    guest: bool = False  # it shares the GPU of another job
    alone_from_s: float = 0.0
    judged_s: float = 0.0

    @property
    def active(self) -> Attempt | None:
        """The incarnation that is meant to run."""
        return next((a for a in self.attempts.values() if a.phase in ("launching", "running", "resuming")), None)

    @property
    def limited_array(self) -> str | None:
        """The array that it shares a limit with, if there is one."""
        limited = self.array_index is not None and self.spec.array_limit is not None
        return self.id.partition("_")[0] if limited else None


@lru_cache(maxsize=64)
def _spec_of(text: str) -> JobSpec:
    """Members of an array share one: it lists all of their indices, and there may be ten thousand."""
    return JobSpec.model_validate_json(text)


def live_job(row: db.JobRow) -> LiveJob:
    return LiveJob(
        id=row.id,
        seq=row.seq,
        user=row.user,
        tenant=row.tenant,
        spec=_spec_of(row.spec),
        array_index=row.array_index,
        submit_s=row.submit_s,
        state=row.state,
        incarnation=row.incarnation,
        preemptions=row.preemptions,
        failures=row.failures,
        losses=row.losses,
        run_s=row.run_s,
        lost_gpu_s=row.lost_gpu_s,
        first_start_s=row.first_start_s,
        hold=row.hold,
    )


@dataclass(frozen=True)
class Settings:
    """What the core needs of the configuration."""

    grace_s: float = 30.0
    log_limit_bytes: int = 64 << 20
    checkpoint_root: str = ""  # the folder that holds one folder per job


class PolicyFailed(Exception):  # noqa: N818 - reads as what it says
    """The policy, perhaps one of the user's own, has no answer or a wrong one."""


class Figures:
    """What the core counts for the metrics; the real one is thebes.server.metrics.Metrics."""

    def preempted(self, policy: str) -> None: ...
    def lost(self, cause: str, gpu_seconds: float) -> None: ...
    def ended(self, tenant: str, state: str, jct_s: float) -> None: ...
    def started(self, tenant: str, *, queue_delay_s: float | None = None, took_s: float | None = None) -> None: ...
    def suspended(self, mechanism: str, took_s: float) -> None: ...
    def resumed(self, mechanism: str, took_s: float) -> None: ...
    def eta_error(self, error_s: float) -> None: ...
    def slowdown(self, ratio: float) -> None: ...


class Core:
    """All jobs that have not ended, the ledger, and what must be written and done."""

    def __init__(self, ledger: Ledger, settings: Settings, figures: Figures | None = None) -> None:
        self.ledger = ledger
        self.settings = settings
        self.figures = figures or Figures()
        self.jobs: dict[str, LiveJob] = {}
        self.dependents: dict[str, set[str]] = {}
        self.places: dict[str, Places] = {}  # by array, of those with a limit
        self.crowded: set[str] = set()  # arrays of which somebody may have got or lost a place since the last decision
        self.nodes: dict[str, NodeFacts] = {}
        self.drained: dict[str, str] = {}
        self.unlaunched: dict[str, None] = {}  # jobs with GPUs given that are not launched yet, in that order
        self.on_gpu: dict[int, set[tuple[str, int]]] = {}
        self.rules = Rules()  # when packing pays
        self.packings: dict[str, Packing] = {}  # by guest
        self.writes: list[Write] = []
        self.commands: list[Command] = []
        self.told: list[dict[str, Any]] = []  # events, with their numbers once they are committed
        self.journalled = 0
        self.dirty = False  # the policy should be asked
        self.closing = False

    def take(self) -> tuple[list[Write], list[Command], list[dict[str, Any]]]:
        """What has been collected, and start anew."""
        taken = self.writes, self.commands, self.told
        self.writes, self.commands, self.told = [], [], []
        return taken

    # -- jobs come ----------------------------------------------------------------------------------------------------

    def arrived(self, rows: Iterable[db.JobRow], waits_for: Collection[str], now_s: float) -> None:
        """Jobs that were just committed to the store."""
        for row in rows:
            if row.id in self.jobs:
                continue  # a retry with the same key
            job = self.jobs[row.id] = live_job(row)
            self._event(now_s, "submitted", job, actor=job.user, gpus=job.spec.gpus)
            if job.hold:
                self._event(now_s, "hold", job, actor=job.user)
            self._wait_for(job, waits_for)
            self._admit(job, now_s)

    def dependency_failed(self, rows: Iterable[db.JobRow], after_id: str, state: str, now_s: float) -> None:
        """Jobs whose dependency had ended otherwise than completed, before they came."""
        for row in rows:
            if row.id not in self.jobs:
                job = self.jobs[row.id] = live_job(row)
                self._event(now_s, "submitted", job, actor=job.user, gpus=job.spec.gpus)
                self._end(job, "cancelled", failed_dependency(after_id, state), None, now_s)

    def _wait_for(self, job: LiveJob, waits_for: Collection[str]) -> None:
        job.waits_for = set(waits_for)
        for other in waits_for:
            self.dependents.setdefault(other, set()).add(job.id)

    def _admit(self, job: LiveJob, now_s: float) -> None:
        """To the policy, if nothing but GPUs stands in the way; of an array with a limit, first in line for a place."""
        if job.waits_for or job.hold or self._shown(job):
            return
        places = self._places_of(job)
        if places is None:
            self._show(job, now_s)
            return
        places.wait(job.id, job.array_index or 0, begun=job.incarnation > 0)
        self._note_place(job)
        self.dirty = True

    def _places_of(self, job: LiveJob) -> Places | None:
        """The places that it shares with the other members of its array; None: there is no limit."""
        array, limit = job.limited_array, job.spec.array_limit
        return None if array is None or limit is None else self.places.setdefault(array, Places(limit))

    def _shown(self, job: LiveJob) -> bool:
        """Whether the policy may choose it."""
        return self.ledger.knows(job.id) and job.id not in self.ledger.held_by_user

    def _show(self, job: LiveJob, now_s: float) -> None:
        """Into the ledger, or back to those that may be scheduled, if the user had held it."""
        if self.ledger.knows(job.id):
            self._input({"op": "release", "t": now_s, "job": job.id})
            return
        spec = job.spec
        self._input(
            {
                "op": "arrive",
                "t": now_s,
                "job": job.id,
                "gpus": spec.gpus,
                "nodes": spec.nodes,
                "gpu_type": spec.gpu_type,
                "model": spec.model,
                "priority": spec.priority,
                "tenant": job.tenant,
                "submit_s": job.submit_s,
                "suspend_s": job.suspend_s,
                "resume_s": job.resume_s,
            }
        )

    def _let_in(self, now_s: float) -> None:
        """Fill the free places of arrays with a limit. Once for all that has happened: who comes first has the lowest
        index, whatever the order in which they came."""
        for array in sorted(self.crowded, key=int):
            places = self.places[array]
            for job_id in places.let_in(self._has_place, self._may_enter):
                self._show(self.jobs[job_id], now_s)
            if places.deserted:
                del self.places[array]
        self.crowded.clear()

    def _has_place(self, job_id: str) -> bool:
        """A member keeps its place while it waits again after a preemption, but not while its user holds it: then it
        has it only until it has left its GPUs."""
        job = self.jobs.get(job_id)
        return job is not None and (self._shown(job) or any(a.phase != "suspended" for a in job.attempts.values()))

    def _may_enter(self, job_id: str) -> bool:
        job = self.jobs.get(job_id)
        return not (job is None or job.hold or job.cancelled or job.waits_for or self._shown(job))

    # -- the policy decides -------------------------------------------------------------------------------------------

    def decide(self, now_s: float) -> Planned:
        """Ask the policy and begin to carry its answer out. After PolicyFailed nothing has been decided."""
        self._let_in(now_s)
        self.dirty = False
        try:
            planned, view = self.ledger.decide(now_s)
        except UserError as error:
            raise PolicyFailed(error.message) from error
        except Exception as error:
            raise PolicyFailed(f"{type(error).__name__}: {error}") from error
        rows = view.jobs.rows
        news = (planned.fates != HOLDS) & (planned.fates != self.ledger.fates[rows])
        told = zip(rows[news][:MAX_REASONS].tolist(), planned.fates[news][:MAX_REASONS].tolist(), strict=True)
        reasons = {self.ledger.ids[row]: self.ledger.reason(fate) for row, fate in told}
        entry = planned.entry()
        self.ledger.apply(entry)
        self._part_with_guests(now_s, but=[job for job, _ in planned.start])
        body = entry | {"ids": len(rows), "reasons": reasons}
        self.writes.append(lambda c: void(db.append_journal(c, planned.now_s, "decision", body)))
        self.journalled += 1
        for job_id in planned.promote:
            self._event(now_s, "promoted", self.jobs[job_id])
        for job_id in planned.suspend:
            job = self.jobs[job_id]
            for_whom = [other for other, _ in planned.start]
            self._event(now_s, "preempted", job, for_jobs=for_whom[:8], policy=self.ledger.policy.label)
            job.preemptions += 1
            self.figures.preempted(self.ledger.policy.label)
            self._update(job, preemptions=job.preemptions)
            self._unassign(job, "preempt", now_s)
        for job_id, gpus in planned.migrate:
            self._event(now_s, "migrating", self.jobs[job_id], to=self._where(gpus))
            self._unassign(self.jobs[job_id], "migrate", now_s)
            self._assign(self.jobs[job_id], gpus, now_s)
        for job_id, gpus in planned.start:
            self._assign(self.jobs[job_id], gpus, now_s)
        for guest, host in planned.guests:
            self._invite(self.jobs[guest], host, now_s)
        self._launch_what_can(now_s)
        return planned

    def _where(self, gpus: Iterable[int]) -> dict[str, list[int]]:
        return {node: list(numbers) for node, numbers in self.ledger.parts(gpus)}

    def _assign(self, job: LiveJob, gpus: Sequence[int], now_s: float) -> None:
        if job.guest:  # it has GPUs of its own now
            job.guest = False
            if job.active is not None:
                self._ask_to_leave(job, job.active, "migrate", now_s)
        job.target = tuple(gpus)
        self.unlaunched[job.id] = None
        self._settle(job, now_s)

    def _unassign(self, job: LiveJob, why: Why, now_s: float) -> None:
        job.target = None
        self.unlaunched.pop(job.id, None)
        attempt = job.active
        if attempt is not None:
            self._stop(job, attempt, why, now_s)
        self._settle(job, now_s)

    def _give_back(self, job: LiveJob, now_s: float) -> None:
        """The GPUs that the policy gave it, or that it shared, are the policy's again. What lives there is not told."""
        if job.guest:
            job.guest = False
            self.packings.pop(job.id, None)
            self._input({"op": "part", "t": now_s, "job": job.id})
        elif self.ledger.holds(job.id):
            self._input({"op": "back", "t": now_s, "job": job.id})
        job.target = None
        self.unlaunched.pop(job.id, None)

    def _launch_what_can(self, now_s: float) -> None:
        for job_id in list(self.unlaunched):
            self._advance(self.jobs[job_id], now_s)

    def _advance(self, job: LiveJob, now_s: float) -> None:
        """Launch or resume a job that was given GPUs, if they are clear and nothing of it lives elsewhere."""
        if job.target is None or self.closing:
            return
        attempts = list(job.attempts.values())
        suspended = next((a for a in attempts if a.phase == "suspended"), None)
        if len(attempts) == 1 and suspended is not None:
            if not self._can_resume_at(suspended, job.target):
                # It was given another place: it has to save itself (frozen) or start again from its last checkpoint.
                self._stop(job, suspended, "migrate", now_s)
            elif self._clear(job.target):
                self._resume(job, suspended, now_s)
            return
        host = self.ledger.guests.get(job.id) if job.guest else None
        if attempts or not self._clear(job.target, host) or any(not self._reachable(gpu) for gpu in job.target):
            return
        self._launch(job, job.target, now_s)

    def _clear(self, gpus: Iterable[int], host: str | None = None) -> bool:
        """Whether nobody is there; a guest may find its host."""
        return all(holder == host for gpu in gpus for holder, _ in self.on_gpu.get(gpu, ()))

    def _reachable(self, gpu: int) -> bool:
        node = self.nodes.get(self.ledger.local(gpu)[0])
        return node is not None and node.alive

    def _can_resume_at(self, attempt: Attempt, gpus: Sequence[int]) -> bool:
        if tuple(gpus) == attempt.gpus:
            return True
        if attempt.mechanism == "cuda" or not all(self._is_virtual(gpu) for gpu in (*gpus, *attempt.gpus)):
            return False
        # Virtual GPUs are all alike: so many on the same nodes will do.
        now = [(node, len(numbers)) for node, numbers in self.ledger.parts(gpus)]
        return now == [(part.node, len(part.gpus)) for part in attempt.parts]

    def _is_virtual(self, gpu: int) -> bool:
        node, number = self.ledger.local(gpu)
        facts = self.nodes.get(node)
        return facts is not None and number < len(facts.gpus) and facts.gpus[number].virtual

    def _launch(self, job: LiveJob, gpus: tuple[int, ...], now_s: float) -> None:
        job.incarnation += 1
        parts = tuple(Part(node, numbers) for node, numbers in self.ledger.parts(gpus))
        attempt = Attempt(job.incarnation, gpus, parts, "launching", now_s)
        job.attempts[job.incarnation] = attempt
        self._occupy(job, attempt)
        self.unlaunched.pop(job.id, None)
        where, incarnation = tuple((part.node, part.gpus) for part in parts), job.incarnation
        self.writes.append(lambda c: db.insert_attempt(c, job.id, incarnation, created_s=now_s, parts=where))
        self._update(job, incarnation=job.incarnation)
        self._command_launch(job, attempt)
        self._settle(job, now_s)

    def _command_launch(self, job: LiveJob, attempt: Attempt) -> None:
        spec = job.spec
        folder = f"{self.settings.checkpoint_root}/{job.id}"
        launch = Launch(
            job_id=job.id,
            incarnation=attempt.incarnation,
            parts=attempt.parts,
            command=tuple(spec.command),
            workdir=f"{folder}/snapshot" if spec.snapshot else spec.workdir or "/",
            env=spec.env,
            launcher=spec.launcher,
            ranks_per_node=spec.ranks_per_node,
            checkpoint_dir=f"{folder}/checkpoint",
            resume_from=job.checkpoint_path,
            resumes=attempt.incarnation > 1,
            grace_s=self._grace_s(job),
            limit_s=None if spec.time_s is None else max(1.0, spec.time_s - job.run_s),
            log_limit_bytes=self.settings.log_limit_bytes,
            progress_pattern=spec.progress_pattern,
            array_index=job.array_index,
            packs=self.ledger.packing and spec.pack,
        )
        self.commands.append(Command("launch", job.id, attempt.incarnation, launch=launch, snapshot=spec.snapshot))

    def _resume(self, job: LiveJob, attempt: Attempt, now_s: float) -> None:
        assert job.target is not None
        attempt.phase, attempt.gpus = "resuming", job.target
        attempt.parts = tuple(Part(node, numbers) for node, numbers in self.ledger.parts(job.target))
        self._occupy(job, attempt)
        self.unlaunched.pop(job.id, None)
        where = tuple((part.node, part.gpus) for part in attempt.parts)
        self._update_attempt(job, attempt, state="running", parts=where)
        self.commands.append(Command("resume", job.id, attempt.incarnation, mechanism=attempt.mechanism))
        self._settle(job, now_s)

    # -- packing ------------------------------------------------------------------------------------------------------

    def _packs(self, job: LiveJob) -> bool:
        return self.ledger.packing and job.spec.pack and job.spec.gpus == 1

    def _invite(self, guest: LiveJob, host_id: str, now_s: float) -> None:
        """Put a waiting job beside a running one."""
        guest.guest, guest.target = True, self.ledger.gpus_of(host_id)
        self.unlaunched[guest.id] = None
        self.packings[guest.id] = Packing((host_id, guest.id))
        guest.judged_s = now_s
        self._event(now_s, "packed", guest, beside=host_id, on=self._where(guest.target))
        self._settle(guest, now_s)

    def _part_with_guests(self, now_s: float, but: Collection[str] = ()) -> None:
        """Guests whose host is gone, or with whom it did not pay, make room."""
        if not self.ledger.packing:
            return
        for job in [job for job in self.jobs.values() if job.guest and job.id not in self.ledger.guests]:
            packing = self.packings.pop(job.id, None)
            for other in packing.jobs if packing else ():
                if other in self.jobs:
                    self.jobs[other].alone_from_s = now_s
            if job.id in but:
                continue  # it moves to GPUs of its own
            self._unassign(job, "preempt", now_s)
            job.guest = False

    def _judge_packing(self, job: LiveJob, attempt: Attempt, sample: Sample, now_s: float) -> None:
        """Measure how fast a job runs alone; and of two that share a GPU, whether that pays."""
        if not attempt.samples or sample.step > attempt.samples[-1].step:
            attempt.samples.append(sample)
        del attempt.samples[:-MAX_SAMPLES]
        guest = job.id if job.guest else next((g for g, host in self.ledger.guests.items() if host == job.id), None)
        if guest is None:
            if attempt.phase == "running" and attempt.started_s is not None:
                since_s = max(attempt.started_s, job.alone_from_s) + self.rules.settle_s
                alone, known = window(attempt.samples, since_s, now_s), self.ledger.rates.get(job.id, 0.0)
                if alone.long_enough(self.rules) and abs(alone.steps_per_s - known) > RATE_NEWS * known:
                    self._input({"op": "rate", "t": now_s, "job": job.id, "steps_per_s": alone.steps_per_s})
            return
        packing, host = self.packings.get(guest), self.ledger.guests.get(guest, "")
        pair = [self.jobs[name] for name in (host, guest) if name in self.jobs]
        running = {one.id: one.active for one in pair if one.active is not None and one.active.started_s is not None}
        if packing is None or len(running) < 2:
            return
        since_s = max(*(attempt.started_s or 0.0 for attempt in running.values()), *(one.judged_s for one in pair))
        since_s += self.rules.settle_s
        together = {name: window(attempt.samples, since_s, now_s) for name, attempt in running.items()}
        verdict = sharing.judge(packing, self.ledger.rates, together, self.rules)
        if verdict.action == "measure":
            return
        if verdict.action == "undo":
            self._event(now_s, "unpacked", self.jobs[guest], beside=pair[0].id, reason=verdict.reason)
            self._input({"op": "part", "t": now_s, "job": guest, "undone": True})
            return
        if not packing.paid:
            self._event(now_s, "packing-pays", self.jobs[guest], beside=pair[0].id, reason=verdict.reason)
        self.packings[guest] = verdict.after
        for one in pair:
            one.judged_s = now_s  # the next window begins here

    # -- stopping -----------------------------------------------------------------------------------------------------

    def _grace_s(self, job: LiveJob) -> float:
        return self.settings.grace_s if job.spec.grace_s is None else job.spec.grace_s

    def _mechanism(self, job: LiveJob, attempt: Attempt) -> Mechanism:
        """How to suspend it: as the user said, else by the handshake where the job takes part, else by the driver."""
        offered = [set(self.nodes[part.node].mechanisms) for part in attempt.parts if part.node in self.nodes]
        everywhere = set.intersection(*offered) if offered else set[Mechanism]()
        wanted = job.spec.mechanism
        ranks = job.spec.ranks_per_node or job.spec.gpus
        single = len(attempt.parts) == 1 and ranks == 1 and job.spec.launcher == "plain"
        if wanted == "auto":
            suits = single and "cuda" in everywhere and not job.takes_part and not self._packs(job)
            return "cuda" if suits else "checkpoint"
        if wanted == "cuda":
            return "cuda" if single and "cuda" in everywhere else "checkpoint"
        return wanted if wanted in everywhere else "checkpoint"

    def _stop(self, job: LiveJob, attempt: Attempt, why: Why, now_s: float) -> None:
        """Ask an incarnation to go, in the way that fits the reason."""
        if attempt.phase == "stopping":
            if why == "cancel" and attempt.why != "cancel":
                attempt.why = "cancel"
                self._update_attempt(job, attempt, state="stopping", detail="cancel")
                self.commands.append(Command("terminate", job.id, attempt.incarnation, grace_s=CANCEL_GRACE_S))
            return
        if why == "preempt" and attempt.phase in ("running", "resuming") and not job.guest:
            attempt.mechanism = self._mechanism(job, attempt)
            if attempt.mechanism != "checkpoint":
                attempt.phase, attempt.stop_asked_s = "suspending", now_s
                self._update_attempt(job, attempt, mechanism=attempt.mechanism)
                self.commands.append(Command("suspend", job.id, attempt.incarnation, mechanism=attempt.mechanism))
                return
        self._ask_to_leave(job, attempt, why, now_s)

    def _ask_to_leave(
        self, job: LiveJob, attempt: Attempt, why: Why, now_s: float, *, grace_s: float | None = None
    ) -> None:
        was_suspended_by_driver = attempt.phase == "suspended" and attempt.mechanism == "cuda"
        if attempt.phase == "suspended":
            self._occupy(job, attempt)  # it comes back to life to say good-bye
        attempt.phase, attempt.why, attempt.stop_asked_s = "stopping", why, now_s
        self._update_attempt(job, attempt, state="stopping", detail=why)
        if why == "cancel":
            command = Command("terminate", job.id, attempt.incarnation, grace_s=CANCEL_GRACE_S)
        elif was_suspended_by_driver or why == "gang":
            command = Command("kill", job.id, attempt.incarnation)
        else:
            grace_s = self._grace_s(job) if grace_s is None else grace_s
            command = Command("notice", job.id, attempt.incarnation, grace_s=grace_s)
        self.commands.append(command)

    # -- the engine answers -------------------------------------------------------------------------------------------

    def suspended(self, job_id: str, incarnation: int, now_s: float) -> None:
        """freeze or cuda: done."""
        job, attempt = self._find(job_id, incarnation)
        if job is None or attempt is None or attempt.phase != "suspending":
            return
        took_s = now_s - (attempt.stop_asked_s or now_s)
        attempt.phase = "suspended"
        self._vacate(job, attempt)
        self._update_attempt(job, attempt, state="suspended", stop_s=took_s)
        self._event(now_s, "suspended", job, mechanism=attempt.mechanism, took_s=round(took_s, 3))
        self._measured(job, now_s, suspend_s=took_s)
        self.figures.suspended(attempt.mechanism, took_s)
        self._settle(job, now_s)
        self._launch_what_can(now_s)
        self.dirty = True

    def suspend_refused(self, job_id: str, incarnation: int, why_not: str, now_s: float) -> None:
        """It cannot be suspended that way: by the handshake then."""
        job, attempt = self._find(job_id, incarnation)
        if job is None or attempt is None or attempt.phase != "suspending":
            return
        self._event(now_s, "suspend-refused", job, mechanism=attempt.mechanism, reason=why_not)
        attempt.mechanism = "checkpoint"
        self._update_attempt(job, attempt, mechanism="checkpoint")
        self._ask_to_leave(job, attempt, "preempt", now_s)
        self._settle(job, now_s)

    def resumed(self, job_id: str, incarnation: int, took_s: float, now_s: float) -> None:
        job, attempt = self._find(job_id, incarnation)
        if job is None or attempt is None or attempt.phase != "resuming":
            return
        attempt.phase = "running"
        self._input({"op": "ran", "t": now_s, "job": job.id})
        self._event(now_s, "resumed", job, mechanism=attempt.mechanism, took_s=round(took_s, 3))
        self._measured(job, now_s, resume_s=took_s)
        self.figures.resumed(attempt.mechanism, took_s)
        self._settle(job, now_s)

    def resume_refused(self, job_id: str, incarnation: int, why_not: str, now_s: float) -> None:
        """It cannot be brought back: it is killed, and starts again from its last checkpoint."""
        job, attempt = self._find(job_id, incarnation)
        if job is None or attempt is None or attempt.phase != "resuming":
            return
        self._event(now_s, "resume-refused", job, mechanism=attempt.mechanism, reason=why_not)
        attempt.phase, attempt.why, attempt.stop_asked_s = "stopping", "migrate", now_s
        self._update_attempt(job, attempt, state="stopping", detail="migrate")
        self.commands.append(Command("kill", job.id, attempt.incarnation))
        if job.target is not None:
            self.unlaunched[job.id] = None
        self._settle(job, now_s)

    def launch_refused(self, job_id: str, incarnation: int, why_not: str, now_s: float, *, taken: bool = False) -> None:
        """The engine would not start it (nothing runs): as if the incarnation had been lost.

        Unless its GPUs are `taken` by somebody outside: that is nobody's fault, and it goes back in line.
        """
        job, attempt = self._find(job_id, incarnation)
        if job is None or attempt is None:
            return
        if taken:
            self._event(now_s, "gpus-taken", job, reason=why_not)
            self._give_back(job, now_s)
            attempt.why = attempt.why or "taken"
        for part in attempt.parts:
            known = attempt.reports.get(part.node)
            if known is None or known.state != "exited":
                attempt.reports[part.node] = Report(
                    job_id, incarnation, part.node, "exited", cause="lost", detail=why_not, exited_s=now_s
                )
        self._ended(job, attempt, now_s)

    def report(self, report: Report, now_s: float) -> None:
        """A node tells how a part of an incarnation is. Times in it are cluster time."""
        job, attempt = self._find(report.job_id, report.incarnation)
        if job is None or attempt is None:
            # Not ours any more: an old incarnation, or a job whose end is in the store already.
            verb: Verb = "forget" if report.state == "exited" else "kill"
            self.commands.append(Command(verb, report.job_id, report.incarnation))
            return
        before = attempt.reports.get(report.node)
        if before is not None and before.state == "exited":
            return
        attempt.reports[report.node] = report
        attempt.unknown_on.discard(report.node)
        attempt.heard_s = now_s
        self._note_progress(job, attempt, report, now_s)
        parts = [attempt.reports.get(part.node) for part in attempt.parts]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts) and all(part.state != "starting" for part in known):
            started = [part.started_s for part in known if part.started_s is not None]
            if attempt.started_s is None and len(started) == len(parts):
                self._started(job, attempt, max(started), now_s)
        if all(part is not None and part.state == "exited" for part in parts):
            self._ended(job, attempt, now_s)
        elif report.state == "exited" and attempt.phase != "stopping" and _broken(report):
            self._event(now_s, "gang-broken", job, node=report.node, codes=dict(report.codes))
            self._ask_to_leave(job, attempt, "gang", now_s)

    def _started(self, job: LiveJob, attempt: Attempt, started_s: float, now_s: float) -> None:
        attempt.started_s = started_s
        if attempt.phase == "launching":
            attempt.phase = "running"
            # Loading is not service, and the first step is told later. A job that was resumed before will take as long.
            loaded_s = attempt.created_s + job.resume_s if attempt.incarnation > 1 else started_s
            self._input({"op": "ran", "t": max(started_s, loaded_s), "job": job.id})
        first = job.first_start_s is None
        if first:
            job.first_start_s = started_s
            self._update(job, first_start_s=started_s)
            if job.expected_start_s is not None:
                self.figures.eta_error(started_s - job.expected_start_s)
        self.figures.started(
            job.tenant,
            queue_delay_s=started_s - job.submit_s if first else None,
            took_s=max(0.0, started_s - attempt.created_s),
        )
        state = "stopping" if attempt.phase == "stopping" else "running"
        self._update_attempt(job, attempt, state=state, started_s=started_s)
        kind = "started" if attempt.incarnation == 1 else "restarted"
        self._event(started_s, kind, job, incarnation=attempt.incarnation, on=self._where(attempt.gpus))
        self._settle(job, now_s)
        self.dirty = True

    def _note_progress(self, job: LiveJob, attempt: Attempt, report: Report, now_s: float) -> None:
        if report.step is not None:
            job.step, job.steps_per_s = report.step, report.steps_per_s
            if self._packs(job) and report.step_s is not None:
                self._judge_packing(job, attempt, Sample(report.step_s, report.step), now_s)
        if report.checkpoint_path and (report.checkpoint_step, report.checkpoint_path) != (
            job.checkpoint_step,
            job.checkpoint_path,
        ):
            job.checkpoint_step, job.checkpoint_path, job.takes_part = (
                report.checkpoint_step,
                report.checkpoint_path,
                True,
            )
            self._update_attempt(
                job,
                attempt,
                checkpoint_step=report.checkpoint_step,
                checkpoint_path=report.checkpoint_path,
                checkpoint_s=report.checkpoint_s,
            )
            self._event(now_s, "checkpoint", job, step=report.checkpoint_step)
        if report.first_step_s is not None and not attempt.ready and report.started_s is not None:
            attempt.ready = True
            startup_s = max(0.0, report.first_step_s - attempt.created_s)
            self._update_attempt(job, attempt, startup_s=startup_s)
            if attempt.phase in ("launching", "running") and job.target is not None:
                # Loading the program and its state is not service yet: as in the simulator, that is overhead.
                self._input({"op": "ran", "t": report.first_step_s, "job": job.id})
            if attempt.incarnation > 1:
                self._measured(job, now_s, resume_s=startup_s)
                self.figures.resumed("checkpoint", startup_s)

    def _measured(self, job: LiveJob, now_s: float, **costs: float) -> None:
        """What suspending and resuming this job took: the policy sees it in its View."""
        for name, value in costs.items():
            known = getattr(job, name)
            setattr(job, name, value if not known else known + SMOOTHING * (value - known))
        if self.ledger.knows(job.id):
            self._input({"op": "set", "t": now_s, "job": job.id, "suspend_s": job.suspend_s, "resume_s": job.resume_s})

    # -- an incarnation ends ------------------------------------------------------------------------------------------

    def _ended(self, job: LiveJob, attempt: Attempt, now_s: float) -> None:
        reports = list(attempt.reports.values())
        outcome = judge(reports, attempt.why)
        ended_s = max((r.exited_s for r in reports if r.exited_s is not None), default=now_s)
        run_s = max((r.run_s for r in reports), default=0.0)
        lost_s = lost_work_s(reports, outcome)
        stop_s = None if attempt.stop_asked_s is None else max(0.0, ended_s - attempt.stop_asked_s)
        if job.steps_per_s:
            job.best_steps_per_s = max(job.best_steps_per_s, job.steps_per_s)
            self.figures.slowdown(job.best_steps_per_s / job.steps_per_s)
        if attempt.phase != "suspended":
            self._vacate(job, attempt)
        del job.attempts[attempt.incarnation]
        job.run_s += run_s
        job.lost_gpu_s += lost_s * job.spec.gpus
        self._update_attempt(
            job,
            attempt,
            state="ended",
            ended_s=ended_s,
            cause=reports[0].cause,
            codes={rank: code for r in reports for rank, code in r.codes.items()},
            detail=outcome.detail,
            run_s=run_s,
            lost_s=lost_s,
            stop_s=stop_s,
            step=job.step,
            steps_per_s=job.steps_per_s,
        )
        self._update(job, run_s=job.run_s, lost_gpu_s=job.lost_gpu_s)
        if lost_s:
            self.figures.lost(outcome.kind, lost_s * job.spec.gpus)
        self.commands.append(Command("forget", job.id, attempt.incarnation))
        self._after(job, attempt, outcome, stop_s, now_s)
        self._launch_what_can(now_s)
        self.dirty = True

    def _after(self, job: LiveJob, attempt: Attempt, outcome: Outcome, stop_s: float | None, now_s: float) -> None:
        """What becomes of the job."""
        told = {"incarnation": attempt.incarnation, "exit_code": outcome.exit_code, "detail": outcome.detail}
        job.losses_in_a_row = job.losses_in_a_row + 1 if outcome.kind == "lost" else 0
        ran_s = max((report.run_s for report in attempt.reports.values()), default=0.0)
        unasked = outcome.kind == "preempted" and attempt.why == "" and ran_s < YIELD_SOON_S
        job.yields_in_a_row = job.yields_in_a_row + 1 if unasked else 0
        if job.cancelled:
            self._end(job, "cancelled", "cancelled", None, now_s)
        elif outcome.kind == "completed":
            self._end(job, "completed", "", 0, now_s)
        elif outcome.kind == "timeout":
            self._end(job, "timeout", f"it reached its time limit of {job.spec.time_s:g} s", outcome.exit_code, now_s)
        elif job.yields_in_a_row >= MAX_YIELDS:
            code = outcome.exit_code
            why = f"it exited with code {code} {MAX_YIELDS} times in a row without having been asked to stop"
            self._end(job, "failed", why, code, now_s)
        elif outcome.kind == "preempted":
            kind = "yielded" if attempt.why == "" else "saved" if outcome.saved else "stopped-unsaved"
            if attempt.why != "taken":  # that was told, and nothing has run
                self._event(now_s, kind, job, **told)
            if stop_s is not None:
                self._measured(job, now_s, suspend_s=stop_s)
                self.figures.suspended("checkpoint", stop_s)
            self._wait_again(job, attempt, now_s)
        elif outcome.kind == "lost":
            job.losses += 1
            self._update(job, losses=job.losses)
            self._event(now_s, "lost", job, **told)
            if job.losses_in_a_row >= MAX_LOSSES:
                why = f"it was lost {MAX_LOSSES} times in a row: {outcome.detail}"
                self._end(job, "failed", why, outcome.exit_code, now_s)
            else:
                self._wait_again(job, attempt, now_s)
        elif job.failures < job.spec.max_retries:
            job.failures += 1
            self._update(job, failures=job.failures)
            self._event(now_s, "failed-will-retry", job, retries_left=job.spec.max_retries - job.failures, **told)
            self._wait_again(job, attempt, now_s)
        else:
            job.failures += 1
            self._update(job, failures=job.failures)
            self._end(job, "failed", outcome.detail, outcome.exit_code, now_s)

    def _wait_again(self, job: LiveJob, attempt: Attempt, now_s: float) -> None:
        """Back in line; or, if the policy has given it GPUs again meanwhile, on to those."""
        stopped_by_us = attempt.why in RESUMABLE
        if self.ledger.holds(job.id) and not stopped_by_us:
            self._input({"op": "back", "t": now_s, "job": job.id})
            job.target = None
            self.unlaunched.pop(job.id, None)
        elif job.target is not None:
            self.unlaunched[job.id] = None
        self._settle(job, now_s)

    def _end(self, job: LiveJob, state: str, reason: str, exit_code: int | None, now_s: float) -> None:
        """The job has ended for good."""
        job.guest = False
        if self.ledger.knows(job.id):
            self._input({"op": "leave", "t": now_s, "job": job.id, "completed": state == "completed"})
        job.target = None
        self.unlaunched.pop(job.id, None)
        job.state = state
        self._update(job, state=state, reason=reason, end_s=now_s, exit_code=exit_code)
        self._event(now_s, state, job, exit_code=exit_code, detail=reason)
        self.figures.ended(job.tenant, state, now_s - job.submit_s)
        del self.jobs[job.id]
        self._note_place(job)
        # In the order of submission: so they reach the policy, and the journal, the same way every time.
        waiting = [self.jobs[other] for other in self.dependents.pop(job.id, set()) if other in self.jobs]
        for dependent in sorted(waiting, key=lambda one: one.seq):
            if dependent.id not in self.jobs:
                continue  # it came after several of those that end here
            if state == "completed" or not must_complete(dependent.spec.after, job.id):
                dependent.waits_for.discard(job.id)
                self._admit(dependent, now_s)
            else:
                self._end(dependent, "cancelled", failed_dependency(job.id, state), None, now_s)
        self.dirty = True

    # -- what users ask for -------------------------------------------------------------------------------------------

    def cancel(self, job_id: str, actor: str, now_s: float) -> None:
        if job_id in self.jobs and self.jobs[job_id].cancelled:
            return  # asked again: the first answer may have been lost
        job = self._job(job_id, "cancelled")
        self._event(now_s, "cancel-asked", job, actor=actor)
        job.cancelled = True
        if self.ledger.knows(job.id):
            self._input({"op": "leave", "t": now_s, "job": job.id})
            self.dirty = True
        job.target = None
        self.unlaunched.pop(job.id, None)
        if not job.attempts:
            self._end(job, "cancelled", f"cancelled by {actor}", None, now_s)
            return
        for attempt in list(job.attempts.values()):
            self._stop(job, attempt, "cancel", now_s)
        self._settle(job, now_s)

    def hold(self, job_id: str, actor: str, now_s: float) -> None:
        job = self._job(job_id, "held")
        if job.hold:
            raise Conflict(f"job {job_id} is held already", hint=f"`thebes release {job_id}` lets it go on")
        job.hold = True
        self._update(job, hold=True)
        self._event(now_s, "hold", job, actor=actor)
        self._give_back(job, now_s)
        if self.ledger.knows(job.id):
            self._input({"op": "hold", "t": now_s, "job": job.id})
        self._unassign(job, "hold", now_s)
        self.dirty = True

    def release(self, job_id: str, actor: str, now_s: float) -> None:
        job = self._job(job_id, "released")
        if not job.hold:
            raise Conflict(f"job {job_id} is not held", hint=f"it is {job.state}")
        job.hold = False
        self._update(job, hold=False)
        self._event(now_s, "release", job, actor=actor)
        self._admit(job, now_s)
        self._settle(job, now_s)

    def requeue(
        self, job_id: str, actor: str, now_s: float, *, why: Why = "requeue", grace_s: float | None = None
    ) -> None:
        """Stop a running job by the handshake; it goes back in line."""
        job = self._job(job_id, "preempted" if why == "preempt" else "requeued")
        attempt = job.active
        if attempt is None:
            raise Conflict(f"job {job_id} is {job.state}, not running", hint="only a running job can be stopped so")
        self._event(now_s, "preempt-asked" if why == "preempt" else "requeue", job, actor=actor)
        if why == "preempt":
            job.preemptions += 1
            self._update(job, preemptions=job.preemptions)
        self._give_back(job, now_s)
        self._ask_to_leave(job, attempt, why, now_s, grace_s=grace_s)
        self._settle(job, now_s)
        self.dirty = True

    def requeue_ended(self, row: db.JobRow, waits_for: Collection[str], actor: str, now_s: float) -> None:
        """Run a job again that has ended. Its checkpoints are still there; its time limit counts anew."""
        job = self.jobs[row.id] = replace(live_job(row), state="", failures=0, run_s=0.0, hold=False)
        self._update(job, reason="", end_s=None, exit_code=None, failures=0, run_s=0.0, hold=False)
        self._event(now_s, "requeue", job, actor=actor)
        self._wait_for(job, waits_for)
        self._admit(job, now_s)
        self._settle(job, now_s)

    def _job(self, job_id: str, done: str) -> LiveJob:
        job = self.jobs.get(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}")
        if job.cancelled:
            raise Conflict(f"job {job_id} is being cancelled: it cannot be {done}")
        return job

    # -- nodes, tenants, the whole cluster ----------------------------------------------------------------------------

    def nodes_changed(self, changed: Collection[NodeFacts], now_s: float) -> None:
        """All of them at once: when a site is back, a thousand nodes are."""
        for facts in changed:
            self._node_changed(facts, now_s)
        self._block(now_s)
        if any(facts.alive for facts in changed):
            self._launch_what_can(now_s)

    def _node_changed(self, facts: NodeFacts, now_s: float) -> None:
        before = self.nodes.get(facts.name)
        self.nodes[facts.name] = facts
        if before is None or before.alive != facts.alive:
            kind = "node-up" if facts.alive else "node-down"
            self._event(now_s, kind, None, node=facts.name, detail=facts.detail)
        if facts.drained and (before is None or not before.drained):
            self._event(now_s, "site-drain", None, node=facts.name, reason=facts.drained)
            self._clear_out(facts.name, "the site", now_s, preempt=True)
        elif before is not None and before.drained and not facts.drained:
            self._event(now_s, "site-undrain", None, node=facts.name)

    def drain(self, node: str, reason: str, actor: str, now_s: float, *, preempt: bool) -> None:
        if node not in self.ledger.node_index:
            raise NotFound(f"there is no node '{node}'", hint=f"nodes: {', '.join(self.ledger.node_index)}")
        self.drained[node] = reason
        self.writes.append(lambda c: db.set_drained(c, node, True, reason))
        self._event(now_s, "drain", None, node=node, actor=actor, reason=reason)
        self._clear_out(node, actor, now_s, preempt=preempt)
        self._block(now_s)

    def _clear_out(self, node: str, actor: str, now_s: float, *, preempt: bool) -> None:
        """Nothing begins on this node any more; with `preempt`, what runs there saves and goes elsewhere."""
        if preempt:
            for job in list(self.jobs.values()):
                attempt = job.active
                if attempt is not None and not job.cancelled and any(part.node == node for part in attempt.parts):
                    self.requeue(job.id, actor, now_s)
        for job in list(self.jobs.values()):  # what was given GPUs there but has not begun shall begin elsewhere
            if (
                job.target is not None
                and job.active is None
                and any(n == node for n, _ in self.ledger.parts(job.target))
            ):
                self._give_back(job, now_s)

    def undrain(self, node: str, actor: str, now_s: float) -> None:
        if node not in self.ledger.node_index:
            raise NotFound(f"there is no node '{node}'", hint=f"nodes: {', '.join(self.ledger.node_index)}")
        if node not in self.drained:
            raise Conflict(f"node {node} is not drained")
        del self.drained[node]
        self.writes.append(lambda c: db.set_drained(c, node, False))
        self._event(now_s, "undrain", None, node=node, actor=actor)
        self._block(now_s)

    def _block(self, now_s: float) -> None:
        down = {name for name in self.ledger.node_index if name in self.nodes and not self.nodes[name].alive}
        emptied = {name for name, facts in self.nodes.items() if facts.drained}
        blocked = sorted(((set(self.drained) | emptied) & set(self.ledger.node_index)) | down)
        sick = self._sick_gpus()
        if blocked == sorted(self.ledger.blocked) and sick == sorted(self.ledger.sick):
            return
        for gpu in set(sick) - self.ledger.sick:
            node, number = self.ledger.local(gpu)
            if not self._gpu(gpu).taken:  # others come and go all the time
                self._event(now_s, "gpu-sick", None, node=node, gpu=number)
        for job in list(self.jobs.values()):  # what was to begin there shall begin elsewhere
            if job.target is not None and job.active is None and set(job.target) & set(sick):
                self._give_back(job, now_s)
        self._input({"op": "nodes", "t": now_s, "blocked": blocked, "sick": sick})

    def _gpu(self, number: int) -> Gpu:
        node, index = self.ledger.local(number)
        return next(gpu for gpu in self.nodes[node].gpus if gpu.index == index)

    def _sick_gpus(self) -> list[int]:
        """GPUs that nobody can be given: not healthy, or in the hands of others."""
        return sorted(
            self.ledger.gpu_number(name, gpu.index)
            for name, facts in self.nodes.items()
            if name in self.ledger.node_index
            for gpu in facts.gpus
            if (not gpu.healthy or gpu.taken) and gpu.index < self.ledger.nodes[self.ledger.node_index[name]].gpus
        )

    def set_quota(self, tenant: str, gpus: int | None, now_s: float) -> None:
        self._input({"op": "quota", "t": now_s, "tenant": tenant, "gpus": gpus})

    def stop_all(self, mode: Literal["checkpoint", "kill"], now_s: float) -> list[str]:
        """The cluster goes down: running jobs are asked to save, or killed; all stay in line for the next start."""
        self.closing = True
        stopped: list[str] = []
        for job in list(self.jobs.values()):
            self._give_back(job, now_s)
            for attempt in list(job.attempts.values()):
                stopped.append(job.id)
                if mode == "kill":
                    attempt.phase, attempt.why, attempt.stop_asked_s = "stopping", "shutdown", now_s
                    self._update_attempt(job, attempt, state="stopping", detail="shutdown")
                    self.commands.append(Command("kill", job.id, attempt.incarnation))
                elif attempt.phase != "stopping":
                    self._ask_to_leave(job, attempt, "shutdown", now_s)
            self._settle(job, now_s)
        return stopped

    # -- after a crash ------------------------------------------------------------------------------------------------

    def load(
        self,
        rows: Iterable[db.JobRow],
        attempts: Iterable[db.AttemptRow],
        waits_for: Mapping[str, Collection[str]],
        failed: Mapping[str, tuple[str, str]],
        drained: Mapping[str, str],
        now_s: float,
    ) -> None:
        """Take up what the store says. `reconcile` follows, when the nodes have told what lives."""
        self.drained = dict(drained)
        for row in rows:
            self.jobs[row.id] = live_job(row)
        # Who was let go on once waits no more, even if the job that it came after runs again.
        waiting = [job for job in self.jobs.values() if not self.ledger.knows(job.id) and not job.incarnation]
        for job in waiting:
            self._wait_for(job, waits_for.get(job.id, ()))
        for job in waiting:
            if job.id in failed and job.id in self.jobs:
                self._end(job, "cancelled", failed_dependency(*failed[job.id]), None, now_s)
        for row in attempts:
            job = self.jobs.get(row.job_id)
            if job is None:
                continue
            parts = tuple(Part(node, gpus) for node, gpus in row.parts)
            gpus = tuple(gpu for part in parts for gpu in self._numbers(part))
            phases: dict[str, Phase] = {"starting": "launching", "stopping": "stopping", "suspended": "suspended"}
            attempt = Attempt(row.incarnation, gpus, parts, phases.get(row.state, "running"), row.created_s)
            attempt.mechanism = row.mechanism if row.mechanism in ("freeze", "cuda") else "checkpoint"
            attempt.started_s = row.started_s
            attempt.ready = row.startup_s is not None
            attempt.sure = False
            if attempt.phase == "stopping":
                attempt.why, attempt.stop_asked_s = _as_why(row.detail), now_s
                job.cancelled = attempt.why == "cancel"
            job.attempts[row.incarnation] = attempt
            if attempt.phase != "suspended":
                self._occupy(job, attempt)
        for job_id in [job_id for job_id in self.ledger.row_of if job_id not in self.jobs]:
            self._input({"op": "leave", "t": now_s, "job": job_id})
        for job in self.jobs.values():
            if self._has_place(job.id) and (places := self._places_of(job)) is not None:
                places.inside.add(job.id)
            job.suspend_s, job.resume_s = self.ledger.costs_of(job.id)
            if job.id in self.ledger.guests:
                host = self.ledger.guests[job.id]
                job.guest, job.target = True, self.ledger.gpus_of(host)
                self.packings[job.id] = Packing((host, job.id))
                if job.active is None:
                    self.unlaunched[job.id] = None
            elif self.ledger.holds(job.id):
                job.target = self.ledger.gpus_of(job.id)
                if job.active is None:
                    self.unlaunched[job.id] = None
            elif not job.cancelled:
                self._admit(job, now_s)

    def _numbers(self, part: Part) -> list[int]:
        """The GPUs of a part that are still there: the cluster may have been configured anew."""
        at = self.ledger.node_index.get(part.node)
        if at is None:
            return []
        return [self.ledger.gpu_number(part.node, gpu) for gpu in part.gpus if gpu < self.ledger.nodes[at].gpus]

    def note_checkpoints(self, told: Mapping[str, tuple[int | None, str]]) -> None:
        """The last checkpoint that each job told, from the attempts in the store."""
        for job_id, (step, path) in told.items():
            job = self.jobs.get(job_id)
            if job is not None:
                job.checkpoint_step, job.checkpoint_path, job.takes_part = step, path, True

    def reconcile(self, reports: Collection[Report], nodes: Collection[NodeFacts], now_s: float) -> None:
        """The nodes have told what lives: make one picture of it, and go on."""
        self.nodes_changed(nodes, now_s)
        for report in reports:
            self.report(report, now_s)
        asked, ordered = {facts.name for facts in nodes if facts.alive}, self._launches_ordered()
        for job in list(self.jobs.values()):
            for attempt in list(job.attempts.values()):
                if (job.id, attempt.incarnation) in ordered:
                    continue
                attempt.unknown_on |= {part.node for part in attempt.parts} & asked - attempt.reports.keys()
                self._reconcile(job, attempt, now_s)
        self._block(now_s)
        for job in list(self.jobs.values()):
            self._settle(job, now_s)
        self._launch_what_can(now_s)
        self.dirty = True

    def heard_of(self, node: str) -> set[tuple[str, int]]:
        """The incarnations that this node has told of."""
        return {(j.id, a.incarnation) for j in self.jobs.values() for a in j.attempts.values() if node in a.reports}

    def node_back(
        self,
        node: str,
        reports: Collection[Report],
        heard_of: Collection[tuple[str, int]],
        on_the_way: Collection[tuple[str, int]],
        now_s: float,
    ) -> None:
        """One node is back after its agent was away: what it had told of and does not know any more is lost.

        Of those whose launch is still on the way it knows nothing yet. To take them for lost would be to start them
        again elsewhere beside the one that is about to come to life.
        """
        known = {(r.job_id, r.incarnation, r.node) for r in reports}
        on_the_way = {*on_the_way, *self._launches_ordered()}
        for job in list(self.jobs.values()):
            for attempt in list(job.attempts.values()):
                if not any(part.node == node for part in attempt.parts):
                    continue
                told = attempt.reports.get(node)
                key = (job.id, attempt.incarnation)
                if key in on_the_way:
                    continue
                if told is not None and told.state != "exited" and key in heard_of and (*key, node) not in known:
                    del attempt.reports[node]
                if node not in attempt.reports and (*key, node) not in known:
                    attempt.unknown_on.add(node)
                self._reconcile(job, attempt, now_s)

    def _launches_ordered(self) -> set[tuple[str, int]]:
        """Incarnations that the reports heard just now have made room for: no node can know of them yet."""
        return {(c.job_id, c.incarnation) for c in self.commands if c.verb == "launch"}

    def _reconcile(self, job: LiveJob, attempt: Attempt, now_s: float) -> None:
        missing: list[Part] = []
        for part in attempt.parts:
            facts = self.nodes.get(part.node)
            there = part.node in self.ledger.node_index
            if there and (facts is None or not facts.alive):
                return  # not heard of yet: nothing can be said
            if part.node in attempt.reports:
                continue
            if there and part.node not in attempt.unknown_on:
                return  # just back as well, and about to tell what it knows: its part may live
            missing.append(part)
        if not missing:
            self._take_up(job, attempt)
            if attempt.phase == "stopping":
                verb: Verb = "terminate" if attempt.why == "cancel" else "notice"
                grace_s = CANCEL_GRACE_S if attempt.why == "cancel" else self._grace_s(job)
                if attempt.why == "gang":
                    verb = "kill"
                self.commands.append(Command(verb, job.id, attempt.incarnation, grace_s=grace_s))
            elif attempt.phase in ("launching", "running") and job.target != attempt.gpus and not job.cancelled:
                if job.target is not None:
                    self.unlaunched[job.id] = None
                self._stop(job, attempt, "preempt", now_s)
            return
        gone = [part for part in missing if part.node not in self.ledger.node_index]
        if attempt.phase == "launching" and not gone and not attempt.reports and job.target == attempt.gpus:
            attempt.unknown_on.clear()
            self._command_launch(job, attempt)  # committed, but the engine had not heard of it
            return
        if attempt.phase == "launching" and not attempt.reports:
            attempt.why = "preempt"  # it has not run and shall not
        for part in missing:
            detail = "its node is no longer part of the cluster" if part in gone else "its node knows nothing of it"
            attempt.reports[part.node] = Report(
                job.id, attempt.incarnation, part.node, "exited", cause="lost", detail=detail, exited_s=now_s
            )
        if all(part.node in attempt.reports and attempt.reports[part.node].state == "exited" for part in attempt.parts):
            self._ended(job, attempt, now_s)
        else:
            self._ask_to_leave(job, attempt, "gang", now_s)

    def _take_up(self, job: LiveJob, attempt: Attempt) -> None:
        """After a crash the store may be a step behind the nodes: was it suspended or resumed meanwhile?"""
        if attempt.sure:
            return
        attempt.sure = True
        asleep = [attempt.reports[part.node].state in ("frozen", "suspended") for part in attempt.parts]
        if attempt.phase not in ("launching", "running", "suspended"):
            return
        if all(asleep):
            if attempt.phase != "suspended":
                self._vacate(job, attempt)
                attempt.phase = "suspended"
                self._update_attempt(job, attempt, state="suspended")
                if job.target is not None:
                    self.unlaunched[job.id] = None
        elif attempt.phase == "suspended" or any(asleep):
            self._occupy(job, attempt)
            self._update_attempt(job, attempt, state="running")
            attempt.phase = "running"
            if any(asleep) and job.target == attempt.gpus:
                attempt.phase = "resuming"
                self.unlaunched.pop(job.id, None)
                self.commands.append(Command("resume", job.id, attempt.incarnation, mechanism=attempt.mechanism))

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _find(self, job_id: str, incarnation: int) -> tuple[LiveJob | None, Attempt | None]:
        job = self.jobs.get(job_id)
        return job, None if job is None else job.attempts.get(incarnation)

    def _occupy(self, job: LiveJob, attempt: Attempt) -> None:
        for gpu in attempt.gpus:
            self.on_gpu.setdefault(gpu, set()).add((job.id, attempt.incarnation))

    def _vacate(self, job: LiveJob, attempt: Attempt) -> None:
        for gpu in attempt.gpus:
            holders = self.on_gpu.get(gpu)
            if holders is not None:
                holders.discard((job.id, attempt.incarnation))
                if not holders:
                    del self.on_gpu[gpu]

    def _settle(self, job: LiveJob, now_s: float) -> None:
        """Bring the state that people see up to date."""
        if job.id not in self.jobs:
            return
        self._note_place(job)
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
            self._update(job, state=state, reason="")
            self._event(now_s, "state", job, state=state)

    def _note_place(self, job: LiveJob) -> None:
        """Something has happened to it: if it has a place, others may have it at the next decision."""
        array = job.limited_array
        if array is not None and array in self.places:
            self.crowded.add(array)

    def ran_s(self, job: LiveJob, now_s: float) -> float:
        """Running time of all its incarnations, up to now."""
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
        if job.limited_array is not None and not (job.cancelled or self._shown(job)):
            return kept_back(job.spec.array_limit or 0)
        fate = self.ledger.fate_of(job.id)
        return "" if fate in (HOLDS, UNTOLD) else self.ledger.reason(fate)

    def _input(self, entry: dict[str, Any]) -> None:
        """Change the ledger, and write down how."""
        self.ledger.apply(entry)
        self.writes.append(lambda c: void(db.append_journal(c, entry["t"], "input", entry)))
        self.journalled += 1
        self.dirty = True
        if self.packings:
            self._part_with_guests(entry["t"])

    def _update(self, job: LiveJob, **columns: Any) -> None:
        self.writes.append(lambda c: db.update_job(c, job.id, **columns))

    def _update_attempt(self, job: LiveJob, attempt: Attempt, **columns: Any) -> None:
        incarnation = attempt.incarnation
        self.writes.append(lambda c: db.update_attempt(c, job.id, incarnation, **columns))

    def _event(
        self, time_s: float, kind: str, job: LiveJob | None, *, node: str | None = None, actor: str = "", **detail: Any
    ) -> None:
        told: dict[str, Any] = {
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
        self.told.append(told)

        def write(c: Connection) -> None:
            told["seq"] = db.add_event(c, time_s, kind, job_id=told["job_id"], node=node, actor=actor, detail=detail)

        self.writes.append(write)


def void(_: object) -> None:
    return None


def some_of(job_ids: Iterable[str], most: int = 5) -> str:
    """The first of them, for people."""
    ordered = sorted(job_ids, key=lambda job_id: [int(word) for word in job_id.split("_")])
    return ", ".join(ordered[:most]) + (", …" if len(ordered) > most else "")


def failed_dependency(job_id: str, state: str) -> str:
    return f"job {job_id}, after which it was to run, ended as {state}"


def _broken(report: Report) -> bool:
    """Whether the other parts of a gang cannot go on: this one did not end well."""
    return report.cause != "exit" or any(code != 0 for code in report.codes.values())


def _as_why(text: str) -> Why:
    known: tuple[Why, ...] = ("preempt", "migrate", "hold", "requeue", "cancel", "shutdown", "gang", "taken")
    return next((why for why in known if why == text), "preempt")
