"""A controller starts: it takes up what the store says, and then what the nodes say lives; and a node that was away."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, get_args

from thebes import store as db
from thebes.live import answers, arrivals, endings, entries, launching, outages, recording, stopping
from thebes.live.commands import LaunchGang, Resume
from thebes.live.job import Attempt, LiveJob, live_job
from thebes.live.outcomes import Why
from thebes.live.packing import Packing
from thebes.live.phases import taken_up
from thebes.protocol.contract import NodeFacts, Part, Report

if TYPE_CHECKING:
    from thebes.live.core import Core


def load(
    core: Core,
    rows: Iterable[db.JobRow],
    attempts: Iterable[db.AttemptRow],
    waits_for: Mapping[str, Collection[str]],
    failed: Mapping[str, tuple[str, str]],
    drained: Mapping[str, str],
    now_s: float,
) -> None:
    """Take up what the store says. `reconcile` follows, when the nodes have told what lives."""
    core.drained = dict(drained)
    for row in rows:
        core.jobs[row.id] = live_job(row)
    # A job whose dependencies were satisfied once never waits for them again, even if one of them runs again.
    waiting = [job for job in core.jobs.values() if not core.ledger.knows(job.id) and not job.incarnation]
    for job in waiting:
        arrivals.wait_for(core, job, waits_for.get(job.id, ()))
    for job in waiting:
        if job.id in failed and job.id in core.jobs:
            endings.end(core, job, "cancelled", endings.failed_dependency(*failed[job.id]), None, now_s)
    for row in attempts:
        if row.job_id in core.jobs:
            _load_attempt(core, core.jobs[row.job_id], row, now_s)
    for job_id in [job_id for job_id in core.ledger.row_of if job_id not in core.jobs]:
        recording.record(core, entries.Leave(now_s, job_id))
    for job in core.jobs.values():
        _load_target(core, job, now_s)


def _load_attempt(core: Core, job: LiveJob, row: db.AttemptRow, now_s: float) -> None:
    """Take up an attempt as the store has it; its nodes may know better (see `take_up`)."""
    parts = tuple(Part(node, gpus) for node, gpus in row.parts)
    gpus = tuple(gpu for part in parts for gpu in numbers(core, part))
    attempt = Attempt(row.incarnation, gpus, parts, taken_up(row.state), row.created_s)
    attempt.mechanism = row.mechanism if row.mechanism in ("freeze", "cuda") else "checkpoint"
    attempt.started_s = row.started_s
    attempt.ready = row.startup_s is not None
    attempt.sure = False
    if attempt.phase == "stopping":
        attempt.why, attempt.stop_asked_s = _as_why(row.detail), now_s
        job.cancelled = attempt.why == "cancel"
    job.attempts[row.incarnation] = attempt
    if attempt.phase != "suspended":
        core.occupy(job, attempt)


def _load_target(core: Core, job: LiveJob, now_s: float) -> None:
    """Take up the GPUs that the ledger says a job has, or its place in line."""
    if arrivals.has_place(core, job.id) and (places := core.places_of(job)) is not None:
        places.inside.add(job.id)
    job.suspend_s, job.resume_s = core.ledger.costs_of(job.id)
    host = core.ledger.guests.get(job.id)
    if host is not None:
        job.guest, job.target = True, core.ledger.gpus_of(host)
        core.packings[job.id] = Packing((host, job.id))
    elif core.ledger.holds(job.id):
        job.target = core.ledger.gpus_of(job.id)
    elif not job.cancelled:
        arrivals.admit(core, job, now_s)
        return
    if job.target is not None and job.active is None:
        core.unlaunched[job.id] = None


def numbers(core: Core, part: Part) -> list[int]:
    """The GPUs of a part that still exist, as the cluster may have another configuration now."""
    at = core.ledger.node_index.get(part.node)
    if at is None:
        return []
    return [core.ledger.gpu_number(part.node, gpu) for gpu in part.gpus if gpu < core.ledger.nodes[at].gpus]


def note_checkpoints(core: Core, told: Mapping[str, tuple[int | None, str]]) -> None:
    """The last checkpoint that each job told, from the attempts in the store."""
    for job_id, (step, path) in told.items():
        job = core.jobs.get(job_id)
        if job is not None:
            job.checkpoint_step, job.checkpoint_path, job.takes_part = step, path, True


def reconcile(core: Core, reports: Collection[Report], nodes: Collection[NodeFacts], now_s: float) -> None:
    """Make one picture of what the nodes say lives, and go on."""
    outages.nodes_changed(core, nodes, now_s)
    for report in reports:
        answers.report(core, report, now_s)
    asked, ordered = {facts.name for facts in nodes if facts.alive}, launches_ordered(core)
    for job in list(core.jobs.values()):
        for attempt in list(job.attempts.values()):
            if (job.id, attempt.incarnation) in ordered:
                continue
            attempt.unknown_on |= {part.node for part in attempt.parts} & asked - attempt.reports.keys()
            reconcile_one(core, job, attempt, now_s)
    outages.block(core, now_s)
    for job in list(core.jobs.values()):
        core.settle(job, now_s)
    launching.launch_what_can(core, now_s)
    core.dirty = True


def heard_of(core: Core, node: str) -> set[tuple[str, int]]:
    """The incarnations that this node has told of."""
    return {(j.id, a.incarnation) for j in core.jobs.values() for a in j.attempts.values() if node in a.reports}


def node_back(
    core: Core,
    node: str,
    reports: Collection[Report],
    heard_of: Collection[tuple[str, int]],
    on_the_way: Collection[tuple[str, int]],
    now_s: float,
) -> None:
    """One node is back after its agent was away: what it had told of and does not know any more is lost.

    It knows nothing yet of incarnations whose launch is still on the way. To take these for lost would start them again
    elsewhere, beside the one that is about to come to life.
    """
    known = {(r.job_id, r.incarnation, r.node) for r in reports}
    on_the_way = {*on_the_way, *launches_ordered(core)}
    for job in list(core.jobs.values()):
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
            reconcile_one(core, job, attempt, now_s)


def launches_ordered(core: Core) -> set[tuple[str, int]]:
    """Incarnations for which the reports heard just now have made room: no node can know of them yet."""
    return {(c.job_id, c.incarnation) for c in core.commands if isinstance(c, LaunchGang)}


def reconcile_one(core: Core, job: LiveJob, attempt: Attempt, now_s: float) -> None:
    missing: list[Part] = []
    for part in attempt.parts:
        facts = core.nodes.get(part.node)
        there = part.node in core.ledger.node_index
        if there and (facts is None or not facts.alive):
            return  # it was not heard of yet, so nothing can be said
        if part.node in attempt.reports:
            continue
        if there and part.node not in attempt.unknown_on:
            return  # this node is just back, too, and about to tell what it knows; its part may live
        missing.append(part)
    if not missing:
        take_up(core, job, attempt, now_s)
        if attempt.phase == "stopping":
            core.commands.append(stopping.farewell(core, job, attempt))
        elif attempt.phase in ("launching", "running") and job.target != attempt.gpus and not job.cancelled:
            if job.target is not None:
                core.unlaunched[job.id] = None
            stopping.stop(core, job, attempt, "preempt", now_s)
        return
    gone = [part for part in missing if part.node not in core.ledger.node_index]
    if attempt.phase == "launching" and not gone and not attempt.reports and job.target == attempt.gpus:
        attempt.unknown_on.clear()
        launching.order_launch(core, job, attempt)  # it was committed, but the engine had not heard of it
        return
    if attempt.phase == "launching" and not attempt.reports:
        attempt.why = "preempt"  # it has not run and is not to run
    for part in missing:
        detail = "its node is no longer part of the cluster" if part in gone else "its node knows nothing of it"
        attempt.reports[part.node] = Report(
            job.id, attempt.incarnation, part.node, "exited", cause="lost", detail=detail, exited_s=now_s
        )
    if all(part.node in attempt.reports and attempt.reports[part.node].state == "exited" for part in attempt.parts):
        endings.ended(core, job, attempt, now_s)
    else:
        stopping.ask_to_leave(core, job, attempt, "gang", now_s)


def take_up(core: Core, job: LiveJob, attempt: Attempt, now_s: float) -> None:
    """Find out whether an attempt was suspended or resumed while the store was a step behind the nodes."""
    if attempt.sure:
        return
    attempt.sure = True
    asleep = [attempt.reports[part.node].state in ("frozen", "suspended") for part in attempt.parts]
    if attempt.phase not in ("launching", "running", "suspended"):
        return
    if all(asleep):
        if attempt.phase != "suspended":
            core.vacate(job, attempt)
            core.move(job, attempt, "suspended", now_s, corrects=True)
            core.update_attempt(job, attempt, state="suspended")
            if job.target is not None:
                core.unlaunched[job.id] = None
    elif attempt.phase == "suspended" or any(asleep):
        core.occupy(job, attempt)
        core.update_attempt(job, attempt, state="running")
        resumes = any(asleep) and job.target == attempt.gpus
        core.move(job, attempt, "resuming" if resumes else "running", now_s, corrects=True)
        if resumes:
            core.unlaunched.pop(job.id, None)
            core.commands.append(Resume(job.id, attempt.incarnation, attempt.mechanism))


def _as_why(text: str) -> Why:
    """The reason for which the store says that an attempt was asked to stop."""
    known: tuple[Why, ...] = get_args(Why)
    names: dict[str, Why] = {why: why for why in known if why}
    return names.get(text, "preempt")
