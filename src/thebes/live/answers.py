"""Answers of the engine and the nodes: what was suspended, resumed or refused, and the state of each part of a gang."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thebes.live import endings, entries, guests, launching, recording, stopping
from thebes.live.commands import Forget, Kill
from thebes.live.job import Attempt, LiveJob
from thebes.live.packing import StepSample
from thebes.protocol.contract import Report

if TYPE_CHECKING:
    from thebes.live.core import Core


def suspended(core: Core, job_id: str, incarnation: int, now_s: float) -> None:
    """The incarnation was suspended by freeze or cuda."""
    job, attempt = core.find(job_id, incarnation)
    if job is None or attempt is None or attempt.phase != "suspending":
        return
    took_s = now_s - (attempt.stop_asked_s or now_s)
    core.move(job, attempt, "suspended", now_s)
    core.vacate(job, attempt)
    core.update_attempt(job, attempt, state="suspended", stop_s=took_s)
    core.event(now_s, "suspended", job, mechanism=attempt.mechanism, took_s=round(took_s, 3))
    recording.measured(core, job, now_s, suspend_s=took_s)
    core.figures.suspended(attempt.mechanism, took_s)
    core.settle(job, now_s)
    launching.launch_what_can(core, now_s)
    core.dirty = True


def suspend_refused(core: Core, job_id: str, incarnation: int, why_not: str, now_s: float) -> None:
    """It cannot be suspended that way, so it is asked to leave by the handshake."""
    job, attempt = core.find(job_id, incarnation)
    if job is None or attempt is None or attempt.phase != "suspending":
        return
    core.event(now_s, "suspend-refused", job, mechanism=attempt.mechanism, reason=why_not)
    attempt.mechanism = "checkpoint"
    core.update_attempt(job, attempt, mechanism="checkpoint")
    stopping.ask_to_leave(core, job, attempt, "preempt", now_s)
    core.settle(job, now_s)


def resumed(core: Core, job_id: str, incarnation: int, took_s: float, now_s: float) -> None:
    job, attempt = core.find(job_id, incarnation)
    if job is None or attempt is None or attempt.phase != "resuming":
        return
    core.move(job, attempt, "running", now_s)
    recording.record(core, entries.Ran(now_s, job.id))
    core.event(now_s, "resumed", job, mechanism=attempt.mechanism, took_s=round(took_s, 3))
    recording.measured(core, job, now_s, resume_s=took_s)
    core.figures.resumed(attempt.mechanism, took_s)
    core.settle(job, now_s)


def resume_refused(core: Core, job_id: str, incarnation: int, why_not: str, now_s: float) -> None:
    """It cannot be brought back, so it is killed and starts again from its last checkpoint."""
    job, attempt = core.find(job_id, incarnation)
    if job is None or attempt is None or attempt.phase != "resuming":
        return
    core.event(now_s, "resume-refused", job, mechanism=attempt.mechanism, reason=why_not)
    stopping.kill(core, job, attempt, "migrate", now_s)
    if job.target is not None:
        core.unlaunched[job.id] = None
    core.settle(job, now_s)


def launch_refused(
    core: Core, job_id: str, incarnation: int, why_not: str, now_s: float, *, taken: bool = False
) -> None:
    """The engine did not start it, and nothing runs: this counts as if the incarnation had been lost.

    An exception are GPUs that are `taken` by other people's work: that is nobody's fault, and the job waits again.
    """
    job, attempt = core.find(job_id, incarnation)
    if job is None or attempt is None:
        return
    if taken:
        core.event(now_s, "gpus-taken", job, reason=why_not)
        recording.give_back(core, job, now_s)
        attempt.why = attempt.why or "taken"
    for part in attempt.parts:
        known = attempt.reports.get(part.node)
        if known is None or known.state != "exited":
            attempt.reports[part.node] = Report(
                job_id, incarnation, part.node, "exited", cause="lost", detail=why_not, exited_s=now_s
            )
    endings.ended(core, job, attempt, now_s)


def report(core: Core, report: Report, now_s: float) -> None:
    """A node reports on a part of an incarnation. Times in the report are cluster time."""
    job, attempt = core.find(report.job_id, report.incarnation)
    if job is None or attempt is None:
        # It is not ours any more: an old incarnation, or a job whose end is in the store already.
        answer = Forget if report.state == "exited" else Kill
        core.commands.append(answer(report.job_id, report.incarnation))
        return
    before = attempt.reports.get(report.node)
    if before is not None and before.state == "exited":
        return
    attempt.reports[report.node] = report
    attempt.unknown_on.discard(report.node)
    attempt.heard_s = now_s
    note_progress(core, job, attempt, report, now_s)
    parts = [attempt.reports.get(part.node) for part in attempt.parts]
    known = [part for part in parts if part is not None]
    if len(known) == len(parts) and all(part.state != "starting" for part in known):
        started = [part.started_s for part in known if part.started_s is not None]
        if attempt.started_s is None and len(started) == len(parts):
            begun(core, job, attempt, max(started), now_s)
    if all(part is not None and part.state == "exited" for part in parts):
        endings.ended(core, job, attempt, now_s)
    elif report.state == "exited" and attempt.phase != "stopping" and _broken(report):
        core.event(now_s, "gang-broken", job, node=report.node, codes=dict(report.codes))
        stopping.ask_to_leave(core, job, attempt, "gang", now_s)


def begun(core: Core, job: LiveJob, attempt: Attempt, started_s: float, now_s: float) -> None:
    attempt.started_s = started_s
    if attempt.phase == "launching":
        core.move(job, attempt, "running", now_s)
        if not attempt.ready:
            # Loading is not service, and the first step is told later. A job that was resumed before will take as long
            # again.
            loaded_s = attempt.created_s + job.resume_s if attempt.incarnation > 1 else started_s
            _record_start(core, job, attempt, max(started_s, loaded_s), now_s)
    first = job.first_start_s is None
    if first:
        job.first_start_s = started_s
        core.update(job, first_start_s=started_s)
        if job.first_expected_s is not None:
            core.figures.eta_error(started_s - job.first_expected_s)
    core.figures.started(
        job.tenant,
        queue_delay_s=started_s - job.submit_s if first else None,
        took_s=max(0.0, started_s - attempt.created_s),
    )
    state = "stopping" if attempt.phase == "stopping" else "running"
    core.update_attempt(job, attempt, state=state, started_s=started_s)
    kind = "started" if attempt.incarnation == 1 else "restarted"
    core.event(started_s, kind, job, incarnation=attempt.incarnation, on=core.where(attempt.gpus))
    core.settle(job, now_s)
    core.dirty = True


def note_progress(core: Core, job: LiveJob, attempt: Attempt, report: Report, now_s: float) -> None:
    if report.step is not None:
        job.step, job.steps_per_s = report.step, report.steps_per_s
        if core.packs(job) and report.step_s is not None:
            guests.measure(core, job, attempt, StepSample(report.step_s, report.step), now_s)
    if report.checkpoint_path and (report.checkpoint_step, report.checkpoint_path) != (
        job.checkpoint_step,
        job.checkpoint_path,
    ):
        job.checkpoint_step, job.checkpoint_path, job.takes_part = (
            report.checkpoint_step,
            report.checkpoint_path,
            True,
        )
        core.update_attempt(
            job,
            attempt,
            checkpoint_step=report.checkpoint_step,
            checkpoint_path=report.checkpoint_path,
            checkpoint_s=report.checkpoint_s,
        )
        core.event(now_s, "checkpoint", job, step=report.checkpoint_step)
    if report.first_step_s is not None and not attempt.ready and report.started_s is not None:
        attempt.ready = True
        startup_s = max(0.0, report.first_step_s - attempt.created_s)
        core.update_attempt(job, attempt, startup_s=startup_s)
        if attempt.phase in ("launching", "running") and job.target is not None:
            # Loading the program and its state is not service yet: it is overhead, as in the simulator.
            _record_start(core, job, attempt, report.first_step_s, now_s)
        if attempt.incarnation > 1:
            recording.measured(core, job, now_s, resume_s=startup_s)
            core.figures.resumed("checkpoint", startup_s)
    _record_pace(core, job, attempt, report, now_s)  # the start of the run is told before the progress


def _record_start(core: Core, job: LiveJob, attempt: Attempt, run_from_s: float, now_s: float) -> None:
    """Tell the ledger now when the work of this hold began, or will begin. Its clock stays the real one."""
    recording.record(core, entries.Ran(now_s, job.id, run_from_s=run_from_s, ready_s=attempt.created_s))


def _record_pace(core: Core, job: LiveJob, attempt: Attempt, report: Report, now_s: float) -> None:
    """Tell the ledger how far a job is and how fast it goes, when that is news; in between it computes this itself."""
    if report.step is None or not report.steps_per_s or not core.ledger.holds(job.id):
        return
    known = core.ledger.pace_of(job.id)  # NaN as long as nothing is known; then everything is news
    best_before = 1.0 / known[1] if known[1] > 0.0 else 0.0  # a controller that has just started knows no other
    job.best_steps_per_s = max(job.best_steps_per_s, best_before, report.steps_per_s)
    speed, full_s = report.steps_per_s / job.best_steps_per_s, 1.0 / job.best_steps_per_s
    same = all(abs(new - old) <= guests.RATE_NEWS * old for new, old in zip((speed, full_s), known, strict=True))
    if same and attempt.paced:
        return
    attempt.paced = True  # an incarnation begins at a checkpoint, and the ledger cannot know how far that is
    at_s = now_s if report.step_s is None else min(now_s, report.step_s)
    dirty = core.dirty
    recording.record(core, entries.Measured(now_s, job.id, report.step * full_s, speed, full_s, at_s))
    core.dirty = dirty  # a measurement alone is no reason to decide again


def _broken(report: Report) -> bool:
    """Whether the other parts of a gang cannot go on, because this one did not end well."""
    return report.cause != "exit" or any(code != 0 for code in report.codes.values())
