"""Every change of the ledger is made and written down through `record`, except the decisions."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from thebes import store as db
from thebes.live import entries, launching
from thebes.live.entries import Entry
from thebes.live.job import LiveJob

if TYPE_CHECKING:
    from thebes.live.core import Core

SMOOTHING = 0.5  # weight of the newest measurement of the time to suspend or resume a job


def record(core: Core, entry: Entry) -> None:
    """Change the ledger, and write down how."""
    core.ledger.apply(entry)
    core.writes.append(lambda c: void(db.append_journal(c, entry.time_s, "input", entry.to_json())))
    core.journalled += 1
    core.dirty = True
    if core.packings:
        part_with_guests(core, entry.time_s)


def measured(core: Core, job: LiveJob, now_s: float, **costs: float) -> None:
    """Note how long suspending and resuming this job took; the policy sees it in its View."""
    for name, value in costs.items():
        known = getattr(job, name)
        setattr(job, name, value if not known else known + SMOOTHING * (value - known))
    if core.ledger.knows(job.id):
        record(core, entries.Set(now_s, job.id, suspend_s=job.suspend_s, resume_s=job.resume_s))


def give_back(core: Core, job: LiveJob, now_s: float) -> None:
    """Give the GPUs that a job was given, or that it shared, back to the policy. What lives there is not told."""
    if job.guest:
        job.guest = False
        forget_packing(core, job, now_s)
        record(core, entries.LeaveHost(now_s, job.id))
    elif core.ledger.holds(job.id):
        record(core, entries.Back(now_s, job.id))
    job.target = None
    core.unlaunched.pop(job.id, None)


def part_with_guests(core: Core, now_s: float, but: Collection[str] = ()) -> None:
    """Let guests make room whose host is gone, or for which sharing did not pay."""
    if not core.ledger.packing:
        return
    for job in [job for job in core.jobs.values() if job.guest and job.id not in core.ledger.guests]:
        forget_packing(core, job, now_s)
        if job.id in but:
            continue  # it moves to GPUs of its own
        launching.unassign(core, job, "preempt", now_s)
        job.guest = False


def forget_packing(core: Core, guest: LiveJob, now_s: float) -> None:
    """End a pair of guest and host; their rates alone are measured from now on."""
    packing = core.packings.pop(guest.id, None)
    for other in packing.jobs if packing else ():
        core.jobs[other].alone_from_s = now_s


def void(_: object) -> None:
    return None
