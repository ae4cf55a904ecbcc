"""How an incarnation ended, judged by the exit codes and causes of all its parts, and by what we had asked of it.

Exit 0 is done, 85 is "preempted, resume me", other codes are failures of the job's own. What the cluster did to a job
(preempted it, lost its supervisor) is never counted as a failure of the job.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from thebes.protocol.contract import GANG_NOT_STARTED, PREEMPTED_EXIT_CODE, Report

OutcomeKind = Literal["completed", "preempted", "failed", "timeout", "cancelled", "lost"]

# Why an incarnation was asked to stop; empty if it was not.
Why = Literal["", "preempt", "migrate", "hold", "requeue", "cancel", "shutdown", "gang", "taken"]
TAKEN_DOWN = (-15, -9)  # a rank ends with these when it is stopped because of another
NOT_STARTED = "not started: "
RESUMABLE = ("preempt", "migrate", "hold", "requeue", "shutdown", "taken")


@dataclass(frozen=True)
class Outcome:
    kind: OutcomeKind
    exit_code: int | None
    detail: str
    saved: bool  # the exit code of the job says that its state is safe


def judge(parts: Collection[Report], why: Why) -> Outcome:
    """The outcome of an incarnation all of whose parts have exited."""
    codes = {rank: code for part in parts for rank, code in part.codes.items()}
    if why == "cancel":
        return Outcome("cancelled", None, "cancelled", saved=False)
    for part in parts:
        if part.cause == "launch-failed" and not part.detail.startswith(GANG_NOT_STARTED):
            return Outcome("failed", None, part.detail or "it could not be started", saved=False)
    if codes and all(code == 0 for code in codes.values()) and all(part.cause == "exit" for part in parts):
        return Outcome("completed", 0, "", saved=True)
    if any(part.cause == "timeout" for part in parts):
        return Outcome("timeout", _first_failure(codes), "it reached its time limit", saved=_saved(codes))
    if _saved(codes):
        return Outcome("preempted", PREEMPTED_EXIT_CODE, "it saved its state and made room", saved=True)
    if why == "taken":
        return Outcome("preempted", None, NOT_STARTED + next((part.detail for part in parts), ""), saved=False)
    if why in RESUMABLE:
        return Outcome("preempted", _first_failure(codes), "it was stopped before it had saved", saved=False)
    own = [(rank, code) for part in parts if part.cause == "exit" for rank, code in part.codes.items() if code != 0]
    if own:
        # When one rank has failed, the others are taken down with it, so the one to name is the one that began. Codes
        # are in the order in which the ranks of a node ended.
        innocent = (*TAKEN_DOWN, PREEMPTED_EXIT_CODE)
        rank, code = next((one for one in own if one[1] not in innocent), own[0])
        return Outcome("failed", code, f"rank {rank} {describe(code)}", saved=False)
    lost = next((part for part in parts if part.cause in ("lost", "killed", "launch-failed")), None)
    detail = (lost.detail if lost and lost.detail else "") or "its processes were killed from outside"
    return Outcome("lost", _first_failure(codes), detail, saved=False)


def describe(code: int) -> str:
    """An exit code in words."""
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"


def _first_failure(codes: dict[int, int]) -> int | None:
    return next((code for _, code in sorted(codes.items()) if code != 0), None)


def _saved(codes: dict[int, int]) -> bool:
    """Whether at least one rank says that the state is saved, and the others ended or were taken down with it."""
    return PREEMPTED_EXIT_CODE in codes.values() and all(
        code in (0, PREEMPTED_EXIT_CODE) or code < 0 for code in codes.values()
    )


def lost_work_s(parts: Collection[Report], outcome: Outcome) -> float:
    """Running time that must be done again: since the last checkpoint told, or all of it."""
    if outcome.kind == "completed" or outcome.saved:
        return 0.0
    started = [part for part in parts if part.started_s is not None and part.exited_s is not None]
    # One rank saves for the whole gang.
    saved_s = max((part.checkpoint_s for part in started if part.checkpoint_s is not None), default=None)
    lost_s = 0.0
    for part in started:
        since_s = part.run_s
        if saved_s is not None and part.exited_s is not None and part.started_s is not None:
            since_s = min(since_s, max(0.0, part.exited_s - max(saved_s, part.started_s)))
        lost_s = max(lost_s, since_s)
    return lost_s
