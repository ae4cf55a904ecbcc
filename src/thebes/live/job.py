"""A job that has not ended, and its attempts: the incarnations of it that live or may live."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from thebes import store as db
from thebes.jobspec.spec import JobSpec
from thebes.live.outcomes import Why
from thebes.live.packing import StepSample
from thebes.live.phases import ACTIVE, Phase
from thebes.protocol.contract import Mechanism, Part, Report


@dataclass
class Attempt:
    """An incarnation that lives, or may live."""

    incarnation: int
    gpus: tuple[int, ...]
    parts: tuple[Part, ...]
    phase: Phase  # only Core.move changes it
    created_s: float
    why: Why = ""
    mechanism: Mechanism = "checkpoint"
    started_s: float | None = None
    stop_asked_s: float | None = None
    ready: bool = False  # whether it has made its first step
    paced: bool = False  # whether the ledger was told how far this incarnation is
    heard_s: float = 0.0  # when a node last reported on it
    sure: bool = True  # whether its phase is what its nodes say; after a crash they have to be asked
    reports: dict[str, Report] = field(default_factory=dict)
    unknown_on: set[str] = field(default_factory=set)  # nodes that were asked and do not know it
    samples: list[StepSample] = field(default_factory=list)  # its steps and their times, if it may be packed


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
    takes_part: bool = False  # whether it has named a checkpoint, so that the handshake works with it
    step: int | None = None
    steps_per_s: float | None = None
    losses_in_a_row: int = 0
    yields_in_a_row: int = 0
    expected_start_s: float | None = None  # the last estimate, while it waits for its first start
    first_expected_s: float | None = None  # the estimate when it began to wait
    estimated_in: int = 0  # the round of that estimate; 0 if there was none
    best_steps_per_s: float = 0.0
    guest: bool = False  # whether it shares the GPU of another job
    alone_from_s: float = 0.0
    judged_s: float = 0.0

    @property
    def active(self) -> Attempt | None:
        """The incarnation that is meant to run."""
        return next((a for a in self.attempts.values() if a.phase in ACTIVE), None)

    @property
    def limited_array(self) -> str | None:
        """The array with which it shares a limit, if there is one."""
        limited = self.array_index is not None and self.spec.array_limit is not None
        return self.id.partition("_")[0] if limited else None


@lru_cache(maxsize=64)
def _spec_of(text: str) -> JobSpec:
    """The specification. Members of an array share one, because it lists all of their indices, up to ten thousand."""
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


def some_of(job_ids: Iterable[str], most: int = 5) -> str:
    """The first of these ids, for people."""
    ordered = sorted(job_ids, key=lambda job_id: [int(word) for word in job_id.split("_")])
    return ", ".join(ordered[:most]) + (", …" if len(ordered) > most else "")
