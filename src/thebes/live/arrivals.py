"""Jobs arrive: they wait for other jobs, or for a place of their array, and are then shown to the policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING

from thebes import store as db
from thebes.live import entries, recording
from thebes.live.job import LiveJob, live_job

if TYPE_CHECKING:
    from thebes.live.core import Core


def arrived(core: Core, rows: Iterable[db.JobRow], waits_for: Collection[str], now_s: float) -> None:
    """Take in jobs that were just committed to the store."""
    for row in rows:
        job = core.jobs[row.id] = live_job(row)
        core.event(now_s, "submitted", job, actor=job.user, gpus=job.spec.gpus)
        if job.hold:
            core.event(now_s, "hold", job, actor=job.user)
        wait_for(core, job, waits_for)
        admit(core, job, now_s)


def wait_for(core: Core, job: LiveJob, waits_for: Collection[str]) -> None:
    job.waits_for = set(waits_for)
    for other in waits_for:
        core.dependents.setdefault(other, set()).add(job.id)


def admit(core: Core, job: LiveJob, now_s: float) -> None:
    """Show a job to the policy, if it waits only for GPUs; a member of an array with a limit first needs a place."""
    if job.waits_for or job.hold or core.shown(job):
        return
    places = core.places_of(job)
    if places is None:
        show(core, job, now_s)
        return
    places.wait(job.id, job.array_index or 0, begun=job.incarnation > 0)
    core.note_place(job)
    core.dirty = True


def show(core: Core, job: LiveJob, now_s: float) -> None:
    """Put a job into the ledger or, if the user had held it, back among those that may be scheduled."""
    if core.ledger.knows(job.id):
        recording.record(core, entries.Release(now_s, job.id))
        return
    spec = job.spec
    recording.record(
        core,
        entries.Arrive(
            now_s,
            job=job.id,
            gpus=spec.gpus,
            nodes=spec.nodes,
            gpu_type=spec.gpu_type,
            model=spec.model,
            priority=spec.priority,
            tenant=job.tenant,
            submit_s=job.submit_s,
            suspend_s=job.suspend_s,
            resume_s=job.resume_s,
            min_gpus=spec.min_gpus,
            max_gpus=spec.max_gpus,
        ),
    )


def let_in(core: Core, now_s: float) -> None:
    """Fill the free places of arrays with a limit. This is done once for all that has happened, so that the member with
    the lowest index comes first, whatever the order in which they came."""
    for array in sorted(core.crowded, key=int):
        places = core.places[array]
        for job_id in places.let_in(partial(has_place, core), partial(may_enter, core)):
            show(core, core.jobs[job_id], now_s)
        if places.deserted:
            del core.places[array]
    core.crowded.clear()


def has_place(core: Core, job_id: str) -> bool:
    """Whether a member has a place. It keeps the place while it waits again after a preemption, but not while its user
    holds it: then it has the place only until it has left its GPUs."""
    job = core.jobs.get(job_id)
    return job is not None and (core.shown(job) or any(a.phase != "suspended" for a in job.attempts.values()))


def may_enter(core: Core, job_id: str) -> bool:
    job = core.jobs.get(job_id)
    return not (job is None or job.hold or job.cancelled or job.waits_for or core.shown(job))
