"""What a policy answers: the state it wants, why the others wait, and when it wants to be asked again.

`diff` compares the wanted state with the actual one and names the actions; `faults` is the checker that every Decision
passes before anything is done about it, in tests, in the simulator and live.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, entry
from thebes.model.errors import UserError
from thebes.model.jobs import HELD, NEVER, WAITING, JobTable, gpus_of
from thebes.model.machine import BLOCKED, Machine

# The fate of a job in a Decision: it holds GPUs, or the constraint that left it out.
HOLDS, NO_GPUS, NO_PLACE, BEHIND, NOT_CHOSEN, OVER_QUOTA = range(6)
REASONS = (
    "holds its GPUs",
    "the GPUs it could use go to jobs before it in the order",
    "enough GPUs are free, but not where the placement rule wants them",
    "an earlier job must start first (strict order)",
    "the policy did not choose it",
    "its tenant's quota goes to jobs before it in the order",
)


def _no_rows() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


def _whole_numbers(values: Any, name: str) -> NDArray[np.int64]:
    array = np.ascontiguousarray(values)
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(
            f"a Decision's {name} is a list of whole numbers, not {array.dtype} in {array.ndim} dimensions",
            hint="`thebes.fill(view, order)` makes a Decision from an order",
        )
    return array.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Decision:
    """The wanted state. Rows are rows of the job table; GPUs of one job are sorted."""

    rows: NDArray[np.int64]  # the jobs that shall hold GPUs, ascending
    gpus: NDArray[np.int64]  # their GPUs, one job's after the other's
    fate: NDArray[np.int64]  # per job of the View: HOLDS or why not
    wake_s: float = NEVER  # when the answer could change by itself
    promote: NDArray[np.int64] = field(default_factory=_no_rows)  # rows whose attained service starts again
    queues: NDArray[np.int64] | None = None  # per job of the View: its feedback queue, for the record
    memory: object = None  # comes back in the next View: what a policy must remember, in the open

    def __post_init__(self) -> None:
        # Compiled code takes these as they lie in memory: whatever a policy hands over becomes rows of whole numbers.
        for name in ("rows", "gpus", "promote"):
            object.__setattr__(self, name, _whole_numbers(getattr(self, name), name))
        if self.queues is not None:
            object.__setattr__(self, "queues", _whole_numbers(self.queues, "queues"))

    def reason(self, position: int) -> str:
        """Why the job at this position of the View holds GPUs or does not."""
        return REASONS[self.fate[position]]


@dataclass(frozen=True, eq=False)
class Actions:
    """Wanted minus actual, in row order."""

    suspend: NDArray[np.int64]
    start: NDArray[np.int64]  # from waiting: a first start or a resume
    migrate: NDArray[np.int64]
    offset: NDArray[np.int64]  # where each row of `decision.rows` has its GPUs in `decision.gpus`


# What `faults` can find; the texts say which promise a policy broke.
FAULTS = (
    "",
    "gives a GPU twice",
    "gives a job another number of GPUs than it asked for",
    "names a job that is not alive",
    "gives a GPU that does not exist or a list that is not sorted",
    "gives GPUs of a kind that the job did not ask for, or of two kinds",
    "names a job twice or out of order",
    "gives a GPU of a node that is down or drained",
    "starts a job beyond its tenant's quota",
)
SOUND, TWICE, NOT_WHOLE, NOT_ALIVE, NO_SUCH_GPU, WRONG_KIND, NOT_SORTED, NOT_TO_BE_HAD, BEYOND_QUOTA = range(9)


@compiled
def faults(
    table: JobTable, m: Machine, rows: NDArray[np.int64], gpus: NDArray[np.int64], taken: NDArray[np.bool_]
) -> tuple[int, int]:
    """Design rule 3: (fault, row), where fault 0 means sound. `taken` is room to work in, one cell per GPU."""
    taken[:] = False
    at = 0
    for i in range(rows.size):
        row = rows[i]
        if row < 0 or row >= table.jobs.size or (i > 0 and row <= rows[i - 1]):
            return NOT_SORTED, row
        job = table.jobs[row]
        if job.phase != HELD and job.phase != WAITING:
            return NOT_ALIVE, row
        if at + job.gpus > gpus.size:
            return NOT_WHOLE, row
        last, kind = -1, -1
        for gpu in gpus[at : at + job.gpus]:
            if gpu <= last or gpu >= taken.size:
                return NO_SUCH_GPU, row
            last = gpu
            if taken[gpu]:
                return TWICE, row
            taken[gpu] = True
            if m.gpus[gpu].owner == BLOCKED:
                return NOT_TO_BE_HAD, row
            gpu_kind = m.nodes[m.gpus[gpu].node].node_kind
            if not (job.kinds >> gpu_kind) & 1 or (kind >= 0 and kind != gpu_kind):
                return WRONG_KIND, row
            kind = gpu_kind
        at += job.gpus
    if at != gpus.size:
        return NOT_WHOLE, -1
    left = table.quotas.copy()
    for row in rows:
        left[table.jobs[row].tenant] -= table.jobs[row].gpus
    for row in rows:  # a quota that was lowered below what runs stops nobody, but nobody starts beyond it
        if table.jobs[row].phase == WAITING and left[table.jobs[row].tenant] < 0:
            return BEYOND_QUOTA, row
    return SOUND, -1


def diff(table: JobTable, alive: NDArray[np.int64], decision: Decision) -> Actions:
    """The actions that lead from what is to what is wanted."""
    return Actions(*_compare(table, alive, decision.rows, decision.gpus))


@compiled
def _diff(
    table: JobTable, alive: NDArray[np.int64], rows: NDArray[np.int64], gpus: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    jobs = table.jobs
    suspend, start = np.empty(alive.size, dtype=np.int64), np.empty(rows.size, dtype=np.int64)
    migrate, offset = np.empty(rows.size, dtype=np.int64), np.empty(rows.size, dtype=np.int64)
    suspends, starts, migrates, wanted, at = 0, 0, 0, 0, 0
    for row in alive:  # both lists ascend, so one walk compares them
        if wanted < rows.size and rows[wanted] == row:
            count = jobs[row].gpus
            offset[wanted] = at
            if jobs[row].phase == WAITING:
                start[starts] = wanted
                starts += 1
            else:
                here = gpus_of(table, row)
                for i in range(count):
                    if here[i] != gpus[at + i]:
                        migrate[migrates] = wanted
                        migrates += 1
                        break
            at += count
            wanted += 1
        elif jobs[row].phase == HELD:
            suspend[suspends] = row
            suspends += 1
    return suspend[:suspends], start[:starts], migrate[:migrates], offset


_compare = entry(_diff)
