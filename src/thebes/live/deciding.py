"""The policy decides, and its answer begins to be carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thebes import store as db
from thebes.live import arrivals, guests, launching, recording
from thebes.live.ledger import Planned
from thebes.model.decision import HOLDS
from thebes.model.errors import UserError
from thebes.model.gate import in_words

if TYPE_CHECKING:
    from thebes.live.core import Core

MAX_REASONS = 1000  # the journal's entry of a decision names at most so many


class PolicyFailed(Exception):  # noqa: N818 - reads as what it says
    """The policy, perhaps one of the user's own, has no answer or a wrong one."""


def decide(core: Core, now_s: float) -> Planned:
    """Ask the policy and begin to carry its answer out. After PolicyFailed nothing has been decided."""
    arrivals.let_in(core, now_s)
    core.dirty = False
    try:
        planned, _ = core.ledger.decide(now_s)
        entry = planned.entry()
    except UserError as error:
        raise PolicyFailed(error.message) from error
    except BaseException as error:  # even one that is meant to end a process must not stop a controller
        raise PolicyFailed(f"policy {core.ledger.policy.label}: {in_words(error)}") from error
    rows = planned.rows
    news = (planned.fates != HOLDS) & (planned.fates != core.ledger.fates[rows])
    told = zip(rows[news][:MAX_REASONS].tolist(), planned.fates[news][:MAX_REASONS].tolist(), strict=True)
    reasons = {core.ledger.ids[row]: core.ledger.reason(fate) for row, fate in told}
    core.ledger.apply(entry)
    recording.part_with_guests(core, now_s, but=[job for job, _ in planned.start])
    body = entry.to_json() | {"ids": len(rows), "reasons": reasons}
    core.writes.append(lambda c: recording.void(db.append_journal(c, planned.now_s, "decision", body)))
    core.journalled += 1
    for job_id in planned.promote:
        core.event(now_s, "promoted", core.jobs[job_id])
    for job_id in planned.suspend:
        job = core.jobs[job_id]
        for_whom = [other for other, _ in planned.start]
        core.event(now_s, "preempted", job, for_jobs=for_whom[:8], policy=core.ledger.policy.label)
        job.preemptions += 1
        core.figures.preempted(core.ledger.policy.label)
        core.update(job, preemptions=job.preemptions)
        launching.unassign(core, job, "preempt", now_s)
    for job_id, gpus in planned.migrate:
        core.event(now_s, "migrating", core.jobs[job_id], to=core.where(gpus))
        launching.unassign(core, core.jobs[job_id], "migrate", now_s)
        launching.assign(core, core.jobs[job_id], gpus, now_s)
    for job_id, gpus in planned.start:
        launching.assign(core, core.jobs[job_id], gpus, now_s)
    for guest, host in planned.guests:
        guests.invite(core, core.jobs[guest], host, now_s)
    launching.launch_what_can(core, now_s)
    return planned
