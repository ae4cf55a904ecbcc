"""`thebes down` takes an instance down.

It works with any part dead: the controller ends the jobs if it answers, or else their supervisors do so alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from thebes.instance.asking import ANSWER_S, ask
from thebes.instance.state import agent_names, alone, check_here, living_parts
from thebes.live.config import (
    Config,
    load,
)
from thebes.model.errors import UserError
from thebes.node.keeper import stop_instance
from thebes.protocol.contract import PREEMPTED_EXIT_CODE
from thebes.protocol.instance import Instance, LivingAttempt, stop_process

if TYPE_CHECKING:
    pass

LATER = "goes on from its last checkpoint at the next `thebes up`"
DownMode = Literal["checkpoint", "keep", "kill"]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Ending:
    """What became of one running job when the cluster went down."""

    job_id: str
    outcome: str


def take_down(instance: Instance, mode: DownMode, tell: Tell) -> list[Ending]:
    """Stop everything; returns what became of each running job. Queued jobs stay in the store."""
    if not instance.dir.is_dir() or not instance.run.is_dir():
        raise UserError(f"there is no instance in {instance.dir}", hint="name its folder with --dir or THEBES_DIR")
    with alone(instance):
        check_here(instance)
        heirs = _heirs(instance, mode)
        if heirs:
            tell(f"the cluster goes on without this controller: {', '.join(heirs)}")
            mode = "keep"
        endings = _end_through_controller(instance, mode, tell) if living_parts(instance) and not heirs else []
        going_on = _running_elsewhere(instance) if mode == "keep" and not heirs else []
        for name in stop_instance(instance, agent_names(instance)):
            tell(f"{name} did not stop by itself and was killed")
        known = {ending.job_id for ending in endings}
        if mode == "keep":
            rest = [
                Ending(job_id, "runs on; the next `thebes up` takes it over")
                for job_id in dict.fromkeys([*_job_ids(instance), *going_on])
                if job_id not in known
            ]
        else:
            rest = [end for end in end_attempts(instance, mode, tell) if end.job_id not in known]
        return sorted([*endings, *rest], key=lambda ending: [int(n) for n in ending.job_id.split("_")])


def _heirs(instance: Instance, mode: DownMode) -> list[str]:
    """Other controllers of this cluster. They go on with the jobs, so this one only leaves."""
    answer = ask(instance, "GET", "/v1/healthz", timeout_s=2.0)
    if answer is None or answer.status != 200:
        return []
    if answer.body.get("role") == "standby":
        others = [answer.body["leader"]] if answer.body.get("leader") else []
    else:
        told = ask(instance, "GET", "/v1/status", with_token=True, timeout_s=ANSWER_S)
        found = told.body.get("controllers") or [] if told is not None else []
        others = [str(one["name"]) for one in found if not one["leads"] and one["seen_ago_s"] < 5.0]
    if others and mode == "kill":
        raise UserError(
            f"other controllers of this cluster would start the jobs again: {', '.join(others)}",
            hint="cancel the jobs (`thebes cancel`), or take the others down first",
        )
    return others


def _running_elsewhere(instance: Instance) -> list[str]:
    """Jobs that run on other machines, of which our folder knows nothing."""
    with suppress(UserError):
        if load(instance.config).engine == "local":
            return []
    answer = ask(instance, "GET", "/v1/jobs?state=running&limit=1000", with_token=True, timeout_s=ANSWER_S)
    return [str(job["id"]) for job in answer.body.get("jobs", [])] if answer is not None else []


def _job_ids(instance: Instance) -> list[str]:
    return list(dict.fromkeys(attempt.job_id for attempt in instance.live_attempts()))


def _end_through_controller(instance: Instance, mode: DownMode, tell: Tell) -> list[Ending]:
    """Let the controller end the jobs, so that the results are stored. If it is dead, others end them later."""
    deadline_s = time.monotonic() + (8.0 if instance.holder_pid("keeper") is not None else 2.0)
    while (answer := ask(instance, "GET", "/v1/healthz", timeout_s=1.0)) is None or answer.status != 200:
        if time.monotonic() > deadline_s:
            tell("the controller does not answer: jobs are ended through their supervisors")
            return []
        time.sleep(0.05)
    grace_s = _grace_s(instance)
    if mode == "checkpoint" and _job_ids(instance):
        tell(f"asking running jobs to save their state (up to {grace_s:g} s) …")
    answer = ask(
        instance,
        "POST",
        "/v1/shutdown",
        body={"mode": mode},
        with_token=True,
        timeout_s=_longest_grace_s(instance) + 30.0,
    )
    if answer is None or answer.status != 200:
        why = answer.body.get("error", answer.status) if answer else "no answer"
        tell(f"the controller could not end the jobs ({why}): they are ended through their supervisors")
        return []
    stopped = dict.fromkeys(str(job_id) for job_id in answer.body.get("stopped", []))
    return [Ending(job_id, _outcome_of(instance, job_id)) for job_id in stopped]


def _outcome_of(instance: Instance, job_id: str) -> str:
    answer = ask(instance, "GET", f"/v1/jobs/{job_id}", with_token=True, timeout_s=ANSWER_S)
    if answer is None or answer.status != 200:
        return "was stopped"
    job = answer.body
    if job["state"] in ("completed", "failed", "cancelled", "timeout"):
        return job["state"]
    last = job["attempts"][-1] if job["attempts"] else {}
    if last.get("ended_s") is None:
        return "has not ended yet"
    return outcome(last["cause"], set(last["codes"].values()), last["checkpoint_step"])


def _grace_s(instance: Instance) -> float:
    try:
        return load(instance.config).grace_s
    except UserError:
        return Config.model_fields["grace_s"].default


def _longest_grace_s(instance: Instance) -> float:
    """The longest grace of any job; a job may have asked for more time than the cluster gives by itself."""
    graces = [_grace_s(instance)]
    for attempt in instance.live_attempts():
        with suppress(OSError, ValueError, KeyError, TypeError):
            graces.append(float(json.loads((attempt.dir / "launch.json").read_bytes())["grace_s"]))
    return max(graces)


def end_attempts(instance: Instance, mode: DownMode, tell: Tell) -> list[Ending]:
    """End what still runs through its supervisors alone. They store the results, and the next controller reads them."""
    attempts = list(instance.live_attempts())
    if not attempts:
        return []
    grace_s = _longest_grace_s(instance)
    command = "kill" if mode == "kill" else f"notice {grace_s:g}"
    for attempt in attempts:
        attempt.command(command)
    patience_s = 10.0 if mode == "kill" else grace_s + 10.0
    deadline_s = time.monotonic() + patience_s
    for attempt in attempts:
        while attempt.lives and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if attempt.lives:
            tell(f"job {attempt.job_id}: its supervisor does not answer and is killed")
            stop_process(attempt.pid, attempt.dir / "lock", patience_s=0.0)
    return [Ending(attempt.job_id, _outcome(attempt)) for attempt in _one_per_job(attempts)]


def _one_per_job(attempts: Sequence[LivingAttempt]) -> list[LivingAttempt]:
    return list({attempt.job_id: attempt for attempt in attempts}.values())


def _outcome(attempt: LivingAttempt) -> str:
    state = attempt.state()
    if state.get("state") != "exited":
        return f"lost its supervisor; {LATER}"
    return outcome(state.get("cause", ""), set(state.get("codes", {}).values()), None)


def outcome(cause: str, codes: set[int], step: int | None) -> str:
    """How an incarnation ended when the cluster went down, in a few words."""
    if cause == "exit" and codes == {0}:
        return "completed"
    if PREEMPTED_EXIT_CODE in codes:
        saved = "saved its state" if step is None else f"saved its state at step {step}"
        return f"{saved}; goes on at the next `thebes up`"
    if step is not None:
        return f"stopped; goes on from step {step} at the next `thebes up`"
    return f"{'killed' if cause == 'killed' else 'ended'} without saving; {LATER}"
