"""What a policy answers: the state it wants, why the other jobs wait, and when it wants to be asked again.

`diff` compares the wanted state with the actual one and names the actions; `faults` is the checker that every Decision
passes before anything is done about it, in tests, in the simulator and live.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Records, entry, maker, plain
from thebes.model.errors import UserError
from thebes.model.jobs import HELD, NEVER, WAITING, JobTable, gpus_of
from thebes.model.machine import BLOCKED, Machine

# The fate of a job in a Decision: it holds GPUs, or the constraint that left it out.
HOLDS, NO_GPUS, NO_PLACE, BEHIND, NOT_CHOSEN, OVER_QUOTA, NOT_ITS_TURN, BETTER_PLACE, OUTBID, NOT_LEASED = range(10)
REASONS = (
    "holds its GPUs",
    "the GPUs it could use go to jobs before it in the order",
    "enough GPUs are free, but not where the placement rule wants them",
    "an earlier job must start first (strict order)",
    "the policy did not choose it",
    "its tenant's quota goes to jobs before it in the order",
    "it takes turns with the jobs on its GPUs, and it is another one's turn",
    "it still waits for GPUs that lie closer together (its delay timer runs)",
    "the auction gave the GPUs to jobs that are worse off",
    "its organisation has no more GPUs on lease",
)


def _no_rows() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


def _shares(values: Any) -> NDArray[np.float64]:
    array = np.ascontiguousarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iuf"):
        raise UserError(
            f"a Decision's shares are a list of numbers, not {array.dtype} in {array.ndim} dimensions",
            hint="one share per row, between 0 and 1; leave them out if nobody shares",
        )
    return array.astype(np.float64)


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
    """The wanted state. Rows are rows of the job table; the GPUs of one job are sorted."""

    rows: NDArray[np.int64]  # the jobs that are to hold GPUs, ascending
    gpus: NDArray[np.int64]  # their GPUs, job by job
    fate: NDArray[np.int64]  # for each job of the View: HOLDS, or why it does not
    wake_s: float = NEVER  # when the answer could change by itself
    promote: NDArray[np.int64] = field(default_factory=_no_rows)  # rows whose attained service starts again
    queues: NDArray[np.int64] | None = None  # for each job of the View, its feedback queue, for the record
    memory: object = None  # what the policy must remember; it comes back in the next View
    counts: NDArray[np.int64] | None = None  # for each row, how many GPUs; None means what each asked for
    shares: NDArray[np.float64] | None = None  # for each row, its share of each of its GPUs; None if no job shares
    plans: NDArray[np.int64] | None = None  # for each row, the code of its execution plan; None if each keeps its own
    cpus: NDArray[np.int64] | None = None  # for each row, CPUs for each of its GPUs; None means what each asked for

    def __post_init__(self) -> None:
        # Compiled code takes these as they lie in memory, so everything that a policy gives becomes whole numbers.
        for name in ("rows", "gpus", "fate", "promote"):
            object.__setattr__(self, name, _whole_numbers(getattr(self, name), name))
        for name in ("queues", "counts", "plans", "cpus"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _whole_numbers(getattr(self, name), name))
        if self.shares is not None:
            object.__setattr__(self, "shares", _shares(self.shares))
        for name in ("counts", "shares", "plans", "cpus"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.rows):
                raise UserError(
                    f"a Decision names {len(self.rows)} rows but {len(given)} {name}", hint=f"one of {name} per row"
                )

    def reason(self, position: int) -> str:
        """Why the job at this position of the View holds GPUs or does not."""
        return REASONS[self.fate[position]]


@dataclass(frozen=True, eq=False)
class Actions:
    """The difference between the wanted state and the actual one, in row order."""

    suspend: NDArray[np.int64]
    start: NDArray[np.int64]  # from waiting: a first start or a resume
    migrate: NDArray[np.int64]  # to other GPUs, to another number of them, or to another execution plan
    offset: NDArray[np.int64]  # where `decision.gpus` has the GPUs of each row of `decision.rows`
    counts: NDArray[np.int64]  # how many GPUs each row has


MAX_SHARERS = 16  # that may share one GPU
MOST_QUEUES = 2**15  # the journal keeps queues and reasons as 16-bit numbers
_FATES = len(REASONS)

# What `faults` can find. The texts say which promise a policy broke.
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
    "gives a share that is not above 0 and at most 1",
    "gives the jobs on a GPU more memory than it has",
    f"puts more than {MAX_SHARERS} jobs on one GPU",
    "gives the jobs on a node more CPUs than it has, or fewer than none",
    "gives the jobs on a node more host memory than it has",
    "tells a fate that does not exist",
    f"names a queue outside 0 … {MOST_QUEUES - 1}",
)
SOUND, TWICE, NOT_WHOLE, NOT_ALIVE, NO_SUCH_GPU, WRONG_KIND, NOT_SORTED, NOT_TO_BE_HAD, BEYOND_QUOTA, BAD_SHARE = range(
    10
)
NO_MEMORY, CROWDED, NO_CPUS, NO_HOST_MEMORY, NO_SUCH_FATE, NO_SUCH_QUEUE = range(10, 16)
_OVER = 1.0 + 1e-9  # three thirds are one whole GPU, in spite of rounding


def counts_of(table: JobTable, decision: Decision) -> NDArray[np.int64]:
    """GPUs per row of the Decision; a row that names no job gets none, so that the checker finds it."""
    if decision.counts is not None:
        return decision.counts
    rows = decision.rows
    known = (rows >= 0) & (rows < len(table.jobs))
    return np.where(known, table.jobs["gpus"][np.where(known, rows, 0)], 0)


def shares_of(decision: Decision) -> NDArray[np.float64]:
    return np.ones(len(decision.rows)) if decision.shares is None else decision.shares


class Execution(NamedTuple):
    """The plan of each row of a Decision, and what it takes; it is empty where jobs have no plans."""

    plan: NDArray[np.int64]  # codes
    profile: NDArray[np.int64]  # the first row of profiles of the plan with these CPUs
    cpus: NDArray[np.int64]  # for each GPU
    host_gib: NDArray[np.float64]  # for each GPU
    memory_gib: NDArray[np.float64]  # of each GPU


UNPLANNED = Execution(_no_rows(), _no_rows(), _no_rows(), np.zeros(0), np.zeros(0))
_NONE, _NO_SHARES = _no_rows(), np.zeros(0)


_GPU_CELL = np.dtype([("turn", np.int64), ("share", np.float64), ("memory_gib", np.float64), ("jobs", np.int64)])
_NODE_CELL = np.dtype([("turn", np.int64), ("cpus", np.float64), ("host_gib", np.float64)])


class Workspace(NamedTuple):
    """Room for the checker to work in: what the Decision has handed out so far.

    A cell counts only if it was written in this turn, so that the cost of a check does not grow with the cluster.
    """

    gpus: Records
    nodes: Records
    turn: NDArray[np.int64]  # one cell: the number of checks so far


def workspace_for(m: Machine) -> Workspace:
    gpus, nodes = np.zeros(len(m.gpus), _GPU_CELL), np.zeros(len(m.nodes), _NODE_CELL)
    return Workspace(plain(gpus.view(np.recarray)), plain(nodes.view(np.recarray)), turn=np.zeros(1, dtype=np.int64))


def fault_in(
    table: JobTable, m: Machine, decision: Decision, room: Workspace, execution: Execution = UNPLANNED
) -> tuple[int, int]:
    """Design rule 3: returns (fault, row), where fault 0 means sound."""
    return _find_faults(
        table,
        m,
        decision.rows,
        _NONE if decision.counts is None else decision.counts,
        _NO_SHARES if decision.shares is None else decision.shares,
        decision.gpus,
        decision.fate,
        _NONE if decision.queues is None else decision.queues,
        execution,
        room,
    )


@maker
def faults(
    table: JobTable,
    m: Machine,
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    shares: NDArray[np.float64],
    gpus: NDArray[np.int64],
    fate: NDArray[np.int64],
    queues: NDArray[np.int64],
    execution: Execution,
    room: Workspace,
) -> tuple[int, int]:
    """Without `counts` all get what they asked for, without `shares` whole GPUs."""
    room.turn[0] += 1
    turn = room.turn[0]
    planned = execution.plan.size > 0
    at = 0
    for i in range(rows.size):
        row = rows[i]
        if row < 0 or row >= table.jobs.size or (i > 0 and row <= rows[i - 1]):
            return NOT_SORTED, row
        job = table.jobs[row]
        if job.phase != HELD and job.phase != WAITING:
            return NOT_ALIVE, row
        count = counts[i] if counts.size > 0 else np.int64(job.gpus)
        share = shares[i] if shares.size > 0 else 1.0
        if count < job.min_gpus or count > job.max_gpus or at + count > gpus.size:
            return NOT_WHOLE, row
        if not (share > 0.0 and share <= 1.0):
            return BAD_SHARE, row
        last, kind = -1, -1
        for gpu in gpus[at : at + count]:
            if gpu <= last or gpu >= m.gpus.size:
                return NO_SUCH_GPU, row
            last = gpu
            node, cell = m.gpus[gpu].node, room.gpus[gpu]
            gpu_kind = m.nodes[node].node_kind
            if cell.turn != turn:
                cell.turn, cell.share, cell.memory_gib, cell.jobs = turn, 0.0, 0.0, 0
            cell.share += share
            if cell.share > _OVER:
                return TWICE, row
            cell.jobs += 1
            if cell.jobs > MAX_SHARERS:
                return CROWDED, row
            cell.memory_gib += execution.memory_gib[i] if planned else job.memory_gib
            if cell.jobs > 1 and cell.memory_gib > m.kinds[gpu_kind].memory_gib * _OVER:
                return NO_MEMORY, row  # a job that is alone on its GPU may ask for whatever its user wants
            if m.gpus[gpu].owner == BLOCKED:
                return NOT_TO_BE_HAD, row
            if not (job.kinds >> gpu_kind) & 1 or (kind >= 0 and kind != gpu_kind):
                return WRONG_KIND, row
            kind = gpu_kind
            if planned:
                there = room.nodes[node]
                if there.turn != turn:
                    there.turn, there.cpus, there.host_gib = turn, 0.0, 0.0
                there.cpus += share * execution.cpus[i]  # jobs that share a GPU share the CPUs that go with it
                there.host_gib += execution.host_gib[i]
                if execution.cpus[i] < 0 or there.cpus > m.nodes[node].cpus * _OVER:
                    return NO_CPUS, row
                if there.host_gib > m.nodes[node].host_gib * _OVER:
                    return NO_HOST_MEMORY, row
        at += count
    if at != gpus.size:
        return NOT_WHOLE, -1
    left = table.quotas.copy()
    for i in range(rows.size):
        job = table.jobs[rows[i]]
        left[job.tenant] -= counts[i] if counts.size > 0 else np.int64(job.gpus)
    for row in rows:  # a quota below what runs stops no job, but none starts beyond it
        if table.jobs[row].phase == WAITING and left[table.jobs[row].tenant] < 0:
            return BEYOND_QUOTA, row
    for told in fate:
        if told < 0 or told >= _FATES:
            return NO_SUCH_FATE, -1
    for queue in queues:
        if queue < 0 or queue >= MOST_QUEUES:
            return NO_SUCH_QUEUE, -1
    return SOUND, -1


def diff(table: JobTable, alive: NDArray[np.int64], decision: Decision, execution: Execution = UNPLANNED) -> Actions:
    """The actions that lead from what is to what a sound Decision wants. Other CPUs alone are none: they are free."""
    counts = table.jobs["gpus"][decision.rows] if decision.counts is None else decision.counts
    found = _compare(table, alive, decision.rows, counts, decision.gpus, execution.plan)
    suspend, start, migrate, offset = found
    return Actions(suspend, start, migrate, offset, counts)


@maker
def _diff(
    table: JobTable,
    alive: NDArray[np.int64],
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    gpus: NDArray[np.int64],
    plans: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    jobs = table.jobs
    suspend, start = np.empty(alive.size, dtype=np.int64), np.empty(rows.size, dtype=np.int64)
    migrate, offset = np.empty(rows.size, dtype=np.int64), np.empty(rows.size, dtype=np.int64)
    suspends, starts, migrates, wanted, at = 0, 0, 0, 0, 0
    for row in alive:  # both lists ascend, so that one walk compares them
        if wanted < rows.size and rows[wanted] == row:
            count = counts[wanted]
            offset[wanted] = at
            if jobs[row].phase == WAITING:
                start[starts] = wanted
                starts += 1
            elif count != jobs[row].width or (plans.size > 0 and plans[wanted] != jobs[row].plan):
                migrate[migrates] = wanted
                migrates += 1
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


_compare, _find_faults = entry(_diff), entry(faults)
