"""When and where a job would start, and at whose expense: the same policy, run ahead on a copy of the ledger.

Nobody knows how long jobs run. A time limit is taken as the run time; without one, the median of what past jobs that
got so far still needed. Without either there is no estimate, and the answer says so instead of guessing.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import Any

from thebes.jobspec.spec import JobSpec
from thebes.live.core import Core
from thebes.live.entries import Arrive, Leave, Ran
from thebes.live.job import some_of
from thebes.live.ledger import Ledger
from thebes.model.errors import UserError
from thebes.model.jobs import NEVER

NAME = "(this job)"
# This is processor time, during which all others wait; a machine that is busy with other work costs us no answer.
LONGEST_S = 0.025
GLANCE_S = 0.02
FEWEST_ROUNDS = 4  # however long they take
FEWEST_SAMPLES = 5  # so many past jobs make a median that means something


def forecast(core: Core, spec: JobSpec, tenant: str, waits_for: Collection[str], now_s: float) -> dict[str, Any]:
    """What would become of this job if it were submitted now. `waits_for`: jobs before it that have not ended."""
    return _of_one(core, spec, tenant, waits_for, now_s) | {"note": _note(spec)}


def _note(spec: JobSpec) -> str:
    """What the plan of one job does not tell of the whole array."""
    members = len(set(spec.array or ()))
    if spec.array_limit is None or spec.array_limit >= members:
        return ""
    run = "runs" if spec.array_limit == 1 else "run"
    return f"of its {members} jobs at most {spec.array_limit} {run} at a time; the others follow in turn"


def _of_one(core: Core, spec: JobSpec, tenant: str, waits_for: Collection[str], now_s: float) -> dict[str, Any]:
    """The same for a single job, or the first member of an array."""
    if spec.hold or waits_for:
        reason = f"it waits for job {some_of(waits_for)}" if waits_for else ""
        if spec.hold:
            reason = "it is held until `thebes release`" + (f"; and {reason}" if reason else "")
        return {"starts": "later", "start_in_s": None, "nodes": {}, "preempts": [], "reason": reason}
    ledger = core.ledger.copy()
    ledger.apply(
        Arrive(
            now_s,
            job=NAME,
            gpus=spec.gpus,
            nodes=spec.nodes,
            gpu_type=spec.gpu_type,
            model=spec.model,
            priority=spec.priority,
            tenant=tenant,
            submit_s=now_s,
            min_gpus=spec.min_gpus,
            max_gpus=spec.max_gpus,
        )
    )
    planned, _ = ledger.decide(now_s, fingerprint=False)
    ledger.apply(planned.entry())
    if ledger.holds(NAME):
        gpus = ledger.gpus_of(NAME)
        victims = sorted(set(planned.suspend) - _suspended_anyway(core, now_s)) if planned.suspend else []
        busy = [gpu for gpu in gpus if core.on_gpu.get(gpu)]
        clearing_s = max(
            (core.jobs[job].suspend_s for gpu in busy for job, _ in core.on_gpu[gpu] if job in core.jobs), default=0.0
        )
        return {
            "starts": "now",
            "start_in_s": clearing_s,
            "nodes": {node: list(numbers) for node, numbers in ledger.parts(gpus)},
            "preempts": victims,
            "position": 0,
            "reason": "its GPUs must be cleared first" if busy else "",
        }
    answer: dict[str, Any] = {
        "starts": "later",
        "start_in_s": None,
        "nodes": {},
        "preempts": [],
        "position": len(ledger.row_of) - len(ledger.holders()),
        "reason": ledger.reason(ledger.fate_of(NAME)),
    }
    found = _look_ahead(core, ledger, NAME, now_s, LONGEST_S)
    if isinstance(found, str):
        return answer | {"estimate": found}
    start_s, gpus = found
    return answer | {
        "start_in_s": start_s - now_s,
        "nodes": {node: list(numbers) for node, numbers in ledger.parts(gpus)},
        "estimate": "if jobs run as long as their limits say, or as past jobs did",
    }


def _suspended_anyway(core: Core, now_s: float) -> set[str]:
    planned, _ = core.ledger.decide(now_s, fingerprint=False)
    return set(planned.suspend)


def expected_start_s(core: Core, job_id: str, now_s: float) -> float | None:
    """When a waiting job will start, as far as that can be told with little effort; None if it cannot."""
    try:
        found = _look_ahead(core, core.ledger.copy(), job_id, now_s, GLANCE_S)
    except UserError:  # the policy fails in what may come; whether it fails now is told elsewhere
        return None
    return None if isinstance(found, str) else found[0]


def _look_ahead(
    core: Core, ledger: Ledger, name: str, now_s: float, longest_s: float
) -> tuple[float, tuple[int, ...]] | str:
    """Go from one expected end to the next until the job holds GPUs; or return why that cannot be told."""
    samples = sorted(ledger.services)
    ends: dict[str, float] = {}
    give_up_at = time.thread_time() + longest_s
    rounds = 0
    while rounds < FEWEST_ROUNDS or time.thread_time() < give_up_at:
        rounds += 1
        holders = ledger.holders()
        for job in holders:
            if job not in ends:
                left_s = _left_s(core, ledger, job, samples, now_s)
                if left_s is None:
                    return f"no estimate: job {job} has no time limit, and too few jobs have ended to learn from"
                ends[job] = now_s + left_s
                if ledger.table.jobs["run_from_s"][ledger.row_of[job]] == NEVER:
                    ledger.apply(Ran(now_s, job))
        ends = {job: ends[job] for job in holders}
        next_end = _first(ends)
        now_s = min(next_end[1], max(ledger.wake_s, now_s))
        if now_s == NEVER:
            return "no estimate: nothing that is known makes room for it"
        if next_end[1] <= now_s:
            ledger.apply(Leave(now_s, next_end[0]))
            del ends[next_end[0]]
        planned, _ = ledger.decide(now_s, fingerprint=False)
        ledger.apply(planned.entry())
        if ledger.holds(name):
            return now_s, ledger.gpus_of(name)
    return "no estimate: too much would happen before"


def _first(ends: Mapping[str, float]) -> tuple[str, float]:
    """Which job ends first, and when."""
    return min(ends.items(), key=lambda item: item[1], default=("", NEVER))


def _left_s(core: Core, ledger: Ledger, job_id: str, samples: list[float], now_s: float) -> float | None:
    """How long a job will still run: up to its limit, or like past jobs that had got so far."""
    record = ledger.table.jobs[ledger.row_of[job_id]]
    ran_s = float(record["executed_s"]) + max(
        0.0, now_s - float(record["run_from_s"]) if record["run_from_s"] < NEVER else 0.0
    )
    job = core.jobs.get(job_id)
    if job is not None and job.spec.time_s is not None:
        return max(1.0, job.spec.time_s - ran_s)
    gpus, attained = int(record["gpus"]), ran_s * int(record["gpus"])
    longer = samples[bisect_right(samples, attained) :]
    if len(longer) < FEWEST_SAMPLES:
        return None
    return max(1.0, (longer[len(longer) // 2] - attained) / gpus)
