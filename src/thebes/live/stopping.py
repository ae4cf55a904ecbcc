"""An attempt is to leave its GPUs: suspended in place, asked to save its state, terminated or killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thebes.live.commands import Kill, Notice, Suspend, Terminate
from thebes.live.job import Attempt, LiveJob
from thebes.live.outcomes import Why
from thebes.protocol.contract import Mechanism

if TYPE_CHECKING:
    from thebes.live.core import Core

CANCEL_GRACE_S = 5.0  # between SIGTERM and SIGKILL of a cancelled job


def mechanism(core: Core, job: LiveJob, attempt: Attempt) -> Mechanism:
    """How to suspend it: as the user said, or else by the handshake if the job takes part, or else by the driver."""
    offered = [set(core.nodes[part.node].mechanisms) for part in attempt.parts if part.node in core.nodes]
    everywhere = set.intersection(*offered) if offered else set[Mechanism]()
    wanted = job.spec.mechanism
    ranks = job.spec.ranks_per_node or job.spec.gpus
    single = len(attempt.parts) == 1 and ranks == 1 and job.spec.launcher == "plain"
    if wanted == "auto":
        suits = single and "cuda" in everywhere and not job.takes_part and not core.packs(job)
        return "cuda" if suits else "checkpoint"
    if wanted == "cuda":
        return "cuda" if single and "cuda" in everywhere else "checkpoint"
    return wanted if wanted in everywhere else "checkpoint"


def stop(core: Core, job: LiveJob, attempt: Attempt, why: Why, now_s: float) -> None:
    """Ask an incarnation to go, in the way that fits the reason."""
    if attempt.phase == "stopping":
        if why == "cancel" and attempt.why != "cancel":
            attempt.why = "cancel"
            core.update_attempt(job, attempt, state="stopping", detail="cancel")
            core.commands.append(Terminate(job.id, attempt.incarnation, CANCEL_GRACE_S))
        return
    if why == "preempt" and attempt.phase in ("running", "resuming") and not job.guest:
        attempt.mechanism = mechanism(core, job, attempt)
        if attempt.mechanism != "checkpoint":
            core.move(job, attempt, "suspending", now_s)
            attempt.stop_asked_s = now_s
            core.update_attempt(job, attempt, mechanism=attempt.mechanism)
            core.commands.append(Suspend(job.id, attempt.incarnation, attempt.mechanism))
            return
    ask_to_leave(core, job, attempt, why, now_s)


def ask_to_leave(
    core: Core, job: LiveJob, attempt: Attempt, why: Why, now_s: float, *, grace_s: float | None = None
) -> None:
    """Ask it to save its state if it can, and to go."""
    was_suspended_by_driver = attempt.phase == "suspended" and attempt.mechanism == "cuda"
    _begin_to_stop(core, job, attempt, why, now_s)
    if was_suspended_by_driver and why != "cancel":
        core.commands.append(Kill(job.id, attempt.incarnation))
    else:
        core.commands.append(farewell(core, job, attempt, grace_s=grace_s))


def farewell(core: Core, job: LiveJob, attempt: Attempt, *, grace_s: float | None = None) -> Terminate | Kill | Notice:
    """The command that ends an attempt which is asked to stop, by the reason for it."""
    if attempt.why == "cancel":
        return Terminate(job.id, attempt.incarnation, CANCEL_GRACE_S)
    if attempt.why == "gang":
        return Kill(job.id, attempt.incarnation)
    return Notice(job.id, attempt.incarnation, core.grace_s(job) if grace_s is None else grace_s)


def kill(core: Core, job: LiveJob, attempt: Attempt, why: Why, now_s: float) -> None:
    """End it at once."""
    _begin_to_stop(core, job, attempt, why, now_s)
    core.commands.append(Kill(job.id, attempt.incarnation))


def _begin_to_stop(core: Core, job: LiveJob, attempt: Attempt, why: Why, now_s: float) -> None:
    if attempt.phase == "suspended":
        core.occupy(job, attempt)  # it comes back to life to end itself
    core.move(job, attempt, "stopping", now_s)
    attempt.why, attempt.stop_asked_s = why, now_s
    core.update_attempt(job, attempt, state="stopping", detail=why)
