"""The end of an incarnation, and what becomes of its job: it waits again, or ends for good and lets others go on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from thebes import store as db
from thebes.jobspec.spec import must_complete
from thebes.live import arrivals, entries, launching, recording
from thebes.live.commands import Forget
from thebes.live.job import Attempt, LiveJob, live_job
from thebes.live.outcomes import RESUMABLE, Outcome, judge, lost_work_s

if TYPE_CHECKING:
    from thebes.live.core import Core

MAX_LOSSES = 20  # after so many losses in a row there is a cause that we do not see
MAX_YIELDS = 20  # so many early exits with "resume me" in a row, unasked: it would go on so for ever
YIELD_SOON_S = 10.0


def dependency_failed(core: Core, rows: Iterable[db.JobRow], after_id: str, state: str, now_s: float) -> None:
    """Jobs whose dependency had not completed, but ended otherwise, before they came."""
    for row in rows:
        job = core.jobs[row.id] = live_job(row)
        core.event(now_s, "submitted", job, actor=job.user, gpus=job.spec.gpus)
        end(core, job, "cancelled", failed_dependency(after_id, state), None, now_s)


def ended(core: Core, job: LiveJob, attempt: Attempt, now_s: float) -> None:
    reports = list(attempt.reports.values())
    outcome = judge(reports, attempt.why)
    ended_s = max((r.exited_s for r in reports if r.exited_s is not None), default=now_s)
    run_s = max((r.run_s for r in reports), default=0.0)
    lost_s = lost_work_s(reports, outcome)
    stop_s = None if attempt.stop_asked_s is None else max(0.0, ended_s - attempt.stop_asked_s)
    if job.steps_per_s:
        job.best_steps_per_s = max(job.best_steps_per_s, job.steps_per_s)
        core.figures.slowdown(job.best_steps_per_s / job.steps_per_s)
    if attempt.phase != "suspended":
        core.vacate(job, attempt)
        for other in {holder for gpu in attempt.gpus for holder, _ in core.on_gpu.get(gpu, ())}:
            core.jobs[other].alone_from_s = now_s  # even if the two were parted: this one was still saving
    del job.attempts[attempt.incarnation]
    job.run_s += run_s
    job.lost_gpu_s += lost_s * len(attempt.gpus)
    core.update_attempt(
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
    core.update(job, run_s=job.run_s, lost_gpu_s=job.lost_gpu_s)
    if lost_s:
        core.figures.lost(outcome.kind, lost_s * len(attempt.gpus))
    core.commands.append(Forget(job.id, attempt.incarnation))
    after(core, job, attempt, outcome, stop_s, now_s)
    launching.launch_what_can(core, now_s)
    core.dirty = True


def after(core: Core, job: LiveJob, attempt: Attempt, outcome: Outcome, stop_s: float | None, now_s: float) -> None:
    """What becomes of the job."""
    told: dict[str, Any] = {
        "incarnation": attempt.incarnation,
        "exit_code": outcome.exit_code,
        "detail": outcome.detail,
    }
    job.losses_in_a_row = job.losses_in_a_row + 1 if outcome.kind == "lost" else 0
    ran_s = max((report.run_s for report in attempt.reports.values()), default=0.0)
    unasked = outcome.kind == "preempted" and attempt.why == "" and ran_s < YIELD_SOON_S
    job.yields_in_a_row = job.yields_in_a_row + 1 if unasked else 0
    if job.cancelled:
        end(core, job, "cancelled", "cancelled", None, now_s)
    elif outcome.kind == "completed":
        end(core, job, "completed", "", 0, now_s)
    elif outcome.kind == "timeout":
        end(core, job, "timeout", f"it reached its time limit of {job.spec.time_s:g} s", outcome.exit_code, now_s)
    elif job.yields_in_a_row >= MAX_YIELDS:
        code = outcome.exit_code
        why = f"it exited with code {code} {MAX_YIELDS} times in a row without having been asked to stop"
        end(core, job, "failed", why, code, now_s)
    elif outcome.kind == "preempted":
        kind = "yielded" if attempt.why == "" else "saved" if outcome.saved else "stopped-unsaved"
        if attempt.why != "taken":  # that was told, and nothing has run
            core.event(now_s, kind, job, **told)
        if stop_s is not None:
            recording.measured(core, job, now_s, suspend_s=stop_s)
            core.figures.suspended("checkpoint", stop_s)
        wait_again(core, job, attempt, now_s)
    elif outcome.kind == "lost":
        job.losses += 1
        core.update(job, losses=job.losses)
        core.event(now_s, "lost", job, **told)
        if job.losses_in_a_row >= MAX_LOSSES:
            why = f"it was lost {MAX_LOSSES} times in a row: {outcome.detail}"
            end(core, job, "failed", why, outcome.exit_code, now_s)
        else:
            wait_again(core, job, attempt, now_s)
    elif job.failures < job.spec.max_retries:
        job.failures += 1
        core.update(job, failures=job.failures)
        core.event(now_s, "failed-will-retry", job, retries_left=job.spec.max_retries - job.failures, **told)
        wait_again(core, job, attempt, now_s)
    else:
        job.failures += 1
        core.update(job, failures=job.failures)
        end(core, job, "failed", outcome.detail, outcome.exit_code, now_s)


def wait_again(core: Core, job: LiveJob, attempt: Attempt, now_s: float) -> None:
    """Put a job back in line or, if the policy has given it GPUs again meanwhile, start it there."""
    stopped_by_us = attempt.why in RESUMABLE
    if core.ledger.holds(job.id) and not stopped_by_us:
        recording.record(core, entries.Back(now_s, job.id))
        job.target = None
        core.unlaunched.pop(job.id, None)
    elif job.target is not None:
        core.unlaunched[job.id] = None
    core.settle(job, now_s)


def end(core: Core, job: LiveJob, state: str, reason: str, exit_code: int | None, now_s: float) -> None:
    """The job has ended for good."""
    job.guest = False
    recording.forget_packing(core, job, now_s)
    if core.ledger.knows(job.id):
        recording.record(core, entries.Leave(now_s, job.id, completed=state == "completed"))
    job.target = None
    core.unlaunched.pop(job.id, None)
    job.state = state
    core.update(job, state=state, reason=reason, end_s=now_s, exit_code=exit_code)
    core.event(now_s, state, job, exit_code=exit_code, detail=reason)
    core.figures.ended(job.tenant, state, now_s - job.submit_s)
    del core.jobs[job.id]
    core.note_place(job)
    # In the order of submission, so that they reach the policy, and the journal, in the same way every time.
    waiting = [core.jobs[other] for other in core.dependents.pop(job.id, set()) if other in core.jobs]
    for dependent in sorted(waiting, key=lambda one: one.seq):
        if dependent.id not in core.jobs:
            continue  # it came after several jobs that end here
        if state == "completed" or not must_complete(dependent.spec.after, job.id):
            dependent.waits_for.discard(job.id)
            arrivals.admit(core, dependent, now_s)
        else:
            end(core, dependent, "cancelled", failed_dependency(job.id, state), None, now_s)
    core.dirty = True


def failed_dependency(job_id: str, state: str) -> str:
    return f"job {job_id}, after which it was to run, ended as {state}"
