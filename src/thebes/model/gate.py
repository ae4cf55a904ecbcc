"""The gate is the one place that refuses a Decision, in simulation and live.

A policy is code that people write, so its answer can be anything. A Decision that passes the gate names jobs and GPUs
that exist, whole gangs, queues and reasons that can be written down, an instant in the future, and nothing that the
world behind the gate cannot carry out. Any other answer is refused with one error that says what is wrong.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thebes.model.decision import (
    FAULTS,
    NO_SUCH_FATE,
    NO_SUCH_QUEUE,
    UNPLANNED,
    Decision,
    Execution,
    Workspace,
    fault_in,
)
from thebes.model.errors import UserError
from thebes.model.jobs import WAITING, JobTable
from thebes.model.machine import Machine
from thebes.model.view import View

SHOWN_CHARACTERS = 2000  # characters of a policy's own words in an error


class DecisionRefused(UserError):  # noqa: N818 - reads as what it says
    """The error for a Decision that cannot be carried out."""


@dataclass(frozen=True)
class Abilities:
    """What a world can carry out, beyond whole GPUs in the number that each job asked for."""

    world: str  # in words, for people
    counts: bool = False
    shares: bool = False
    plans: bool = False


def answer_of(decide: Callable[[View], Any], view: View, label: str) -> object:
    """The policy's answer. An exception of it becomes one error, also one that is meant to end the process."""
    try:
        return decide(view)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise DecisionRefused(f"policy {label}: decide failed: {in_words(error)}", hint=_FIX) from error


_WHOLE_GANGS = "a Decision names whole gangs on free GPUs; `thebes.fill(view, order)` makes one from an order"
_HINTS = {
    NO_SUCH_FATE: "fates are HOLDS or a reason of thebes.model.decision.REASONS",
    NO_SUCH_QUEUE: "the first queue is number 0",
}
_FIX = "this is a fault of the policy; nothing was changed"


def in_words(error: BaseException) -> str:
    """The kind, message and place of an error, even if it fails to give its own text."""
    try:
        said = str(error)[:SHOWN_CHARACTERS]
    except BaseException:
        said = ""
    found = error.__traceback__
    while found is not None and found.tb_next is not None:
        found = found.tb_next
    where = "" if found is None else f" ({Path(found.tb_frame.f_code.co_filename).name}, line {found.tb_lineno})"
    return f"{type(error).__name__}: {said}{where}" if said else f"{type(error).__name__}{where}"


def pickled(memory: object, label: str) -> bytes | None:
    """What a policy wants to remember, as the journal keeps it; refused if it cannot be written and read again."""
    if memory is None:
        return None
    try:
        text = pickle.dumps(memory, protocol=5)
        pickle.loads(text)
    except BaseException as error:
        raise DecisionRefused(
            f"policy {label}: what it wants to remember cannot be written down: {in_words(error)}",
            hint="Decision.memory is plain data: numbers, text, tuples, dicts, arrays, dataclasses of a module",
        ) from error
    return text


def admit(
    answer: object,
    now_s: float,
    alive: NDArray[np.int64],
    table: JobTable,
    machine: Machine,
    room: Workspace,
    *,
    label: str,
    shares: bool,
    able: Abilities,
    execution: Execution = UNPLANNED,
    name_of: Callable[[int], str] = lambda row: f"job row {row}",
) -> Decision:
    """The policy's answer as a sound Decision; anything else is refused.

    `alive` are the rows of the View. These and the tables are the world's own, whatever the policy did to those that
    it was shown. `shares` says whether the policy declares that it shares GPUs.
    """

    def refuse(what: str, hint: str = _WHOLE_GANGS) -> DecisionRefused:
        return DecisionRefused(f"policy {label}: its decision at {now_s:g} s {what}", hint=hint)

    if not isinstance(answer, Decision):
        raise DecisionRefused(
            f"policy {label}: decide returned {type(answer).__name__}, not a Decision",
            hint="end it with `return thebes.fill(view, order)`",
        )
    decision = taken(answer, label)
    fault, row = fault_in(table, machine, decision, room, execution)
    if fault:
        what = f"{FAULTS[fault]} ({name_of(row)})" if row >= 0 else FAULTS[fault]
        raise refuse(what, _HINTS.get(fault, _WHOLE_GANGS))
    _refuse_what_is_not_carried_out(decision, table, shares, able, refuse)
    jobs = len(alive)
    if len(decision.fate) != jobs:
        raise refuse(f"tells the fate of {len(decision.fate)} jobs, but {jobs} are alive", "fate has one per job")
    _refuse_queues(decision, alive, table, refuse, name_of)
    refuse_wake(decision.wake_s, now_s, label)
    return decision


def refuse_wake(wake_s: float, now_s: float, label: str) -> None:
    """Refuse a policy that wants to be woken now or at no real instant, because it would be asked for ever."""
    if not wake_s > now_s:
        raise DecisionRefused(
            f"policy {label}: at {now_s:g} s it asks to be woken at {wake_s:g} s",
            hint="wake_s is an instant after view.now_s; leave it out if nothing changes by itself",
        )


def taken(answer: Decision, label: str) -> Decision:
    """The answer in arrays as compiled code takes them: being frozen keeps nobody from putting other things in."""
    try:
        if _in_order(answer):
            return answer
        given: dict[str, Any] = {field.name: getattr(answer, field.name) for field in fields(Decision)}
        given["wake_s"] = float(given["wake_s"])
        return Decision(**given)
    except UserError as error:
        raise DecisionRefused(f"policy {label}: {error.message}", hint=error.hint) from None
    except BaseException as error:
        raise DecisionRefused(f"policy {label}: its decision cannot be read: {in_words(error)}", hint=_FIX) from error


_WHOLE, _FRACTION = np.dtype(np.int64), np.dtype(np.float64)


def _in_order(answer: Decision) -> bool:
    """Whether nothing has to be changed, which is so of what a Decision's own constructor has seen."""
    if type(answer) is not Decision or type(answer.wake_s) is not float or answer.plans is not None:
        return False
    for array in (answer.rows, answer.gpus, answer.fate, answer.promote):
        if not _lies_flat(array, _WHOLE):
            return False
    rows = len(answer.rows)
    for array in (answer.queues, answer.counts, answer.cpus):
        if array is not None and not _lies_flat(array, _WHOLE):
            return False
        if array is not None and array is not answer.queues and len(array) != rows:
            return False
    return answer.shares is None or (_lies_flat(answer.shares, _FRACTION) and len(answer.shares) == rows)


def _lies_flat(array: object, of: np.dtype[Any]) -> bool:
    return type(array) is np.ndarray and array.dtype == of and array.ndim == 1 and array.flags.c_contiguous


Refuse = Callable[..., DecisionRefused]


def _refuse_what_is_not_carried_out(
    decision: Decision, table: JobTable, shares: bool, able: Abilities, refuse: Refuse
) -> None:
    if decision.shares is not None and (decision.shares < 1).any():
        if not shares:
            raise refuse("shares GPUs, but the policy does not say that it does", "write shares = True in its class")
        if not able.shares:
            raise refuse(f"shares GPUs, which {able.world} does not carry out", "give every job whole GPUs")
    if not able.counts and decision.counts is not None:
        asked: NDArray[np.int64] = table.jobs["gpus"][decision.rows]
        if (decision.counts != asked).any():
            raise refuse(
                f"gives a job another number of GPUs than it asked for, which {able.world} does not carry out",
                "leave counts out",
            )
    if not able.plans and (decision.plans is not None or decision.cpus is not None):
        raise refuse(
            f"names execution plans or CPUs, which {able.world} does not carry out",
            "leave plans and cpus out, or simulate with --perf plans",
        )


def _refuse_queues(
    decision: Decision, alive: NDArray[np.int64], table: JobTable, refuse: Refuse, name_of: Callable[[int], str]
) -> None:
    if len(decision.promote):
        wrong = np.setdiff1d(decision.promote, alive[table.jobs["phase"][alive] == WAITING])
        if len(wrong):
            row = int(wrong[0])
            known = 0 <= row < len(table.jobs)
            raise refuse(f"promotes a job that is not waiting ({name_of(row) if known else f'job row {row}'})")
        if len(np.unique(decision.promote)) != len(decision.promote):
            raise refuse("promotes a job twice")
    queues = decision.queues
    if queues is None:
        return
    if len(queues) != len(alive):
        raise refuse(f"names the queues of {len(queues)} jobs, but {len(alive)} are alive", "queues has one per job")


class WriteWatch:
    """It notices if a policy wrote to a View, which is for reading. It takes time, so it looks at some Views only."""

    OFTEN, SELDOM, GPUS_PER_VIEW = 16, 64, 32  # the first views, and then one in 64; fewer for large clusters

    def __init__(self) -> None:
        self.asked = 0
        self._sum: int | None = None

    def begin(self, alive: NDArray[np.int64], table: JobTable, machine: Machine) -> None:
        self.asked += 1
        look = self.asked <= self.OFTEN or self.asked % max(self.SELDOM, len(machine.gpus) // self.GPUS_PER_VIEW) == 0
        self._sum = _checksum(alive, table, machine) if look else None

    @property
    def looks(self) -> bool:
        """Whether the decision that is being made is one of those that are looked at closely."""
        return self._sum is not None

    def seen(self, alive: NDArray[np.int64], table: JobTable, machine: Machine) -> bool:
        return self.looks and self._sum != _checksum(alive, table, machine)


def _checksum(alive: NDArray[np.int64], table: JobTable, machine: Machine) -> int:
    found = zlib.crc32(table.jobs[alive].tobytes())
    for array in (table.quotas, machine.gpus, machine.nodes, machine.kinds):
        found = zlib.crc32(array.tobytes(), found)
    return found


WROTE = "changed the View that it was shown"
