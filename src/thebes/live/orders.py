"""What users and admins order: cancel, hold, release, requeue, preempt, quotas, and stopping the whole cluster."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from thebes import store as db
from thebes.live import arrivals, endings, entries, launching, recording, stopping
from thebes.live.errors import Conflict, NotFound
from thebes.live.job import LiveJob, live_job
from thebes.live.outcomes import Why

if TYPE_CHECKING:
    from thebes.live.core import Core


def cancel(core: Core, job_id: str, actor: str, now_s: float) -> None:
    if job_id in core.jobs and core.jobs[job_id].cancelled:
        return  # it was asked again, perhaps because the first answer was lost
    job = _job(core, job_id, "cancelled")
    core.event(now_s, "cancel-asked", job, actor=actor)
    job.cancelled = True
    if core.ledger.knows(job.id):
        recording.record(core, entries.Leave(now_s, job.id))
        core.dirty = True
    job.target = None
    core.unlaunched.pop(job.id, None)
    if not job.attempts:
        endings.end(core, job, "cancelled", f"cancelled by {actor}", None, now_s)
        return
    for attempt in list(job.attempts.values()):
        stopping.stop(core, job, attempt, "cancel", now_s)
    core.settle(job, now_s)


def hold(core: Core, job_id: str, actor: str, now_s: float) -> None:
    job = _job(core, job_id, "held")
    if job.hold:
        raise Conflict(f"job {job_id} is held already", hint=f"`thebes release {job_id}` lets it go on")
    job.hold = True
    core.update(job, hold=True)
    core.event(now_s, "hold", job, actor=actor)
    recording.give_back(core, job, now_s)
    if core.ledger.knows(job.id):
        recording.record(core, entries.Hold(now_s, job.id))
    launching.unassign(core, job, "hold", now_s)
    core.dirty = True


def release(core: Core, job_id: str, actor: str, now_s: float) -> None:
    job = _job(core, job_id, "released")
    if not job.hold:
        raise Conflict(f"job {job_id} is not held", hint=f"it is {job.state}")
    job.hold = False
    core.update(job, hold=False)
    core.event(now_s, "release", job, actor=actor)
    arrivals.admit(core, job, now_s)
    core.settle(job, now_s)


def requeue(
    core: Core, job_id: str, actor: str, now_s: float, *, why: Why = "requeue", grace_s: float | None = None
) -> None:
    """Stop a running job by the handshake; it goes back in line."""
    job = _job(core, job_id, "preempted" if why == "preempt" else "requeued")
    attempt = job.active
    if attempt is None:
        raise Conflict(f"job {job_id} is {job.state}, not running", hint="only a running job can be stopped so")
    core.event(now_s, "preempt-asked" if why == "preempt" else "requeue", job, actor=actor)
    if why == "preempt":
        job.preemptions += 1
        core.update(job, preemptions=job.preemptions)
    recording.give_back(core, job, now_s)
    stopping.ask_to_leave(core, job, attempt, why, now_s, grace_s=grace_s)
    core.settle(job, now_s)
    core.dirty = True


def requeue_ended(core: Core, row: db.JobRow, waits_for: Collection[str], actor: str, now_s: float) -> None:
    """Run a job again that has ended. Its checkpoints are still there; its time limit starts again."""
    job = core.jobs[row.id] = replace(live_job(row), state="", failures=0, run_s=0.0, hold=False)
    core.update(job, reason="", end_s=None, exit_code=None, failures=0, run_s=0.0, hold=False)
    core.event(now_s, "requeue", job, actor=actor)
    arrivals.wait_for(core, job, waits_for)
    arrivals.admit(core, job, now_s)
    core.settle(job, now_s)


def _job(core: Core, job_id: str, done: str) -> LiveJob:
    job = core.jobs.get(job_id)
    if job is None:
        raise NotFound(f"there is no job {job_id}")
    if job.cancelled:
        raise Conflict(f"job {job_id} is being cancelled: it cannot be {done}")
    return job


def set_quota(core: Core, tenant: str, gpus: int | None, now_s: float) -> None:
    recording.record(core, entries.Quota(now_s, tenant, gpus))


def stop_all(core: Core, mode: Literal["checkpoint", "kill"], now_s: float) -> list[str]:
    """Stop all jobs because the cluster goes down: they save or are killed, and stay in line for the next start."""
    core.closing = True
    stopped: list[str] = []
    for job in list(core.jobs.values()):
        recording.give_back(core, job, now_s)
        for attempt in list(job.attempts.values()):
            stopped.append(job.id)
            if mode == "kill":
                stopping.kill(core, job, attempt, "shutdown", now_s)
            elif attempt.phase != "stopping":
                stopping.ask_to_leave(core, job, attempt, "shutdown", now_s)
        core.settle(job, now_s)
    return stopped
