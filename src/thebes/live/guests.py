"""A waiting job is invited to the GPU of a running one; both are measured, and the guest stays while that pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thebes.live import entries, recording
from thebes.live.job import Attempt, LiveJob
from thebes.live.packing import Packing, StepSample, judge, window

if TYPE_CHECKING:
    from thebes.live.core import Core

MAX_SAMPLES = 300  # so many reports are remembered of a job that may be packed
RATE_NEWS = 0.05  # a rate alone is recorded again when it has changed by this part


def invite(core: Core, guest: LiveJob, host_id: str, now_s: float) -> None:
    """Put a waiting job beside a running one."""
    guest.guest, guest.target = True, core.ledger.gpus_of(host_id)
    core.unlaunched[guest.id] = None
    core.packings[guest.id] = Packing((host_id, guest.id))
    guest.judged_s = now_s
    core.event(now_s, "packed", guest, beside=host_id, on=core.where(guest.target))
    core.settle(guest, now_s)


def measure(core: Core, job: LiveJob, attempt: Attempt, sample: StepSample, now_s: float) -> None:
    """Measure how fast a job runs alone and, for two jobs that share a GPU, whether that pays."""
    if not attempt.samples or sample.step > attempt.samples[-1].step:
        attempt.samples.append(sample)
    del attempt.samples[:-MAX_SAMPLES]
    guest = job.id if job.guest else next((g for g, host in core.ledger.guests.items() if host == job.id), None)
    if guest is None:
        if attempt.phase == "running" and attempt.started_s is not None:
            since_s = max(attempt.started_s, job.alone_from_s) + core.rules.settle_s
            alone, known = window(attempt.samples, since_s, now_s), core.ledger.rates.get(job.id, 0.0)
            if alone.long_enough(core.rules) and abs(alone.steps_per_s - known) > RATE_NEWS * known:
                recording.record(core, entries.Rate(now_s, job.id, alone.steps_per_s))
        return
    packing, host = core.packings.get(guest), core.ledger.guests.get(guest, "")
    pair = [core.jobs[name] for name in (host, guest) if name in core.jobs]
    running = {one.id: one.active for one in pair if one.active is not None and one.active.started_s is not None}
    if packing is None or len(running) < 2:
        return
    since_s = max(*(attempt.started_s or 0.0 for attempt in running.values()), *(one.judged_s for one in pair))
    since_s += core.rules.settle_s
    together = {name: window(attempt.samples, since_s, now_s) for name, attempt in running.items()}
    verdict = judge(packing, core.ledger.rates, together, core.rules)
    if verdict.action == "measure":
        return
    if verdict.action == "undo":
        core.event(now_s, "unpacked", core.jobs[guest], beside=pair[0].id, reason=verdict.reason)
        recording.record(core, entries.LeaveHost(now_s, guest, undone=True))
        return
    if not packing.paid:
        core.event(now_s, "packing-pays", core.jobs[guest], beside=pair[0].id, reason=verdict.reason)
    core.packings[guest] = verdict.after
    for one in pair:
        one.judged_s = now_s  # the next window begins here
