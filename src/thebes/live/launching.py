"""GPUs are given to jobs and taken away; a gang is launched or resumed as soon as its GPUs are clear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from thebes import store as db
from thebes.live import stopping
from thebes.live.commands import LaunchGang, Resume
from thebes.live.job import Attempt, LiveJob
from thebes.live.outcomes import Why
from thebes.protocol.contract import Launch, Part

if TYPE_CHECKING:
    from thebes.live.core import Core


def assign(core: Core, job: LiveJob, gpus: Sequence[int], now_s: float) -> None:
    if job.guest:  # it has GPUs of its own now
        job.guest = False
        if job.active is not None:
            stopping.ask_to_leave(core, job, job.active, "migrate", now_s)
    job.target = tuple(gpus)
    core.unlaunched[job.id] = None
    core.settle(job, now_s)


def unassign(core: Core, job: LiveJob, why: Why, now_s: float) -> None:
    job.target = None
    core.unlaunched.pop(job.id, None)
    attempt = job.active
    if attempt is not None:
        stopping.stop(core, job, attempt, why, now_s)
    core.settle(job, now_s)


def launch_what_can(core: Core, now_s: float) -> None:
    for job_id in list(core.unlaunched):
        advance(core, core.jobs[job_id], now_s)


def advance(core: Core, job: LiveJob, now_s: float) -> None:
    """Launch or resume a job that was given GPUs, if they are clear and nothing of it lives elsewhere."""
    if job.target is None or core.closing:
        return
    attempts = list(job.attempts.values())
    suspended = next((a for a in attempts if a.phase == "suspended"), None)
    if len(attempts) == 1 and suspended is not None:
        if not can_resume_at(core, suspended, job.target):
            # It was given another place, so it has to save itself (frozen) or start again from its last checkpoint.
            stopping.stop(core, job, suspended, "migrate", now_s)
        elif clear(core, job.target):
            resume(core, job, suspended, now_s)
        return
    host = core.ledger.guests.get(job.id) if job.guest else None
    if attempts or not clear(core, job.target, host) or any(not reachable(core, gpu) for gpu in job.target):
        return
    launch(core, job, job.target, now_s)


def clear(core: Core, gpus: Iterable[int], host: str | None = None) -> bool:
    """Whether only jobs are there with which the policy wants it to share; a guest may find its host."""
    return all(
        holder == host or (core.ledger.policy.shares and gpu in core.ledger.held_gpus(holder))
        for gpu in gpus
        for holder, _ in core.on_gpu.get(gpu, ())
    )


def reachable(core: Core, gpu: int) -> bool:
    node = core.nodes.get(core.ledger.local(gpu)[0])
    return node is not None and node.alive


def can_resume_at(core: Core, attempt: Attempt, gpus: Sequence[int]) -> bool:
    if tuple(gpus) == attempt.gpus:
        return True
    if attempt.mechanism == "cuda" or not all(is_virtual(core, gpu) for gpu in (*gpus, *attempt.gpus)):
        return False
    # Virtual GPUs are all alike, so that as many on the same nodes will do.
    now = [(node, len(numbers)) for node, numbers in core.ledger.parts(gpus)]
    return now == [(part.node, len(part.gpus)) for part in attempt.parts]


def is_virtual(core: Core, gpu: int) -> bool:
    node, number = core.ledger.local(gpu)
    facts = core.nodes.get(node)
    return facts is not None and number < len(facts.gpus) and facts.gpus[number].virtual


def launch(core: Core, job: LiveJob, gpus: tuple[int, ...], now_s: float) -> None:
    job.incarnation += 1
    parts = tuple(Part(node, numbers) for node, numbers in core.ledger.parts(gpus))
    attempt = Attempt(job.incarnation, gpus, parts, "launching", now_s)
    job.attempts[job.incarnation] = attempt
    core.occupy(job, attempt)
    core.unlaunched.pop(job.id, None)
    where, incarnation = tuple((part.node, part.gpus) for part in parts), job.incarnation
    core.writes.append(lambda c: db.insert_attempt(c, job.id, incarnation, created_s=now_s, parts=where))
    core.update(job, incarnation=job.incarnation)
    order_launch(core, job, attempt)
    core.settle(job, now_s)


def order_launch(core: Core, job: LiveJob, attempt: Attempt) -> None:
    spec = job.spec
    folder = f"{core.settings.checkpoint_root}/{job.id}"
    what = Launch(
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
        grace_s=core.grace_s(job),
        limit_s=None if spec.time_s is None else max(1.0, spec.time_s - job.run_s),
        log_limit_bytes=core.settings.log_limit_bytes,
        progress_pattern=spec.progress_pattern,
        array_index=job.array_index,
        packs=(core.ledger.packing and spec.pack) or core.ledger.shares_gpus(job.id),
    )
    core.commands.append(LaunchGang(job.id, attempt.incarnation, what, snapshot=spec.snapshot))


def resume(core: Core, job: LiveJob, attempt: Attempt, now_s: float) -> None:
    assert job.target is not None
    core.move(job, attempt, "resuming", now_s)
    attempt.gpus = job.target
    attempt.parts = tuple(Part(node, numbers) for node, numbers in core.ledger.parts(job.target))
    core.occupy(job, attempt)
    core.unlaunched.pop(job.id, None)
    where = tuple((part.node, part.gpus) for part in attempt.parts)
    core.update_attempt(job, attempt, state="running", parts=where)
    core.commands.append(Resume(job.id, attempt.incarnation, attempt.mechanism))
    core.settle(job, now_s)
