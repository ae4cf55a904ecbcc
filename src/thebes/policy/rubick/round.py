"""One round of Rubick's policy on a `SeatBoard`: Schedule() for waiting jobs, Expand() for jobs that gain most.

Guaranteed jobs come first and are given the fewest GPUs that keep their promise; best-effort jobs follow, steepest
curve first; then what is free goes GPU by GPU to the steepest curve, until the best gain is below 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from thebes.policy.rubick.board import BY_SLOPE, NOWHERE, PROMISED, STARVED, Seat, SeatBoard
from thebes.policy.rubick.curves import NEAR, SLACK, DemandCurve

TRIES = 3  # a best-effort job looks for victims at its steepest levels, so many
_LEAST_GAIN = 1.0 / NEAR - 1.0  # Expand ends below this gain


class Rules(NamedTuple):
    """Parameters of the policy that a round needs."""

    shrink: bool = True  # whether anything is ever taken from a running job
    worth_moving: float = 0.1  # a running job is reconfigured only for so much more speed
    headroom: int = 0  # GPUs that Expand leaves for the next job
    worth_starting: float = 0.5  # of its best throughput per GPU; with less, a best-effort job does not start


def schedule(
    board: SeatBoard, guaranteed: Sequence[int], starved: Sequence[int], best_effort: Sequence[int], rules: Rules
) -> list[int]:
    """Schedule(): seats for waiting jobs, each list in its order; returns starved jobs that took GPUs by force."""
    stuck: set[tuple[DemandCurve, int]] = set()
    for j in guaranteed:
        kind = board.jobs[j].curve, board.jobs[j].tenant
        if kind not in stuck and not seat_guaranteed(board, j, rules):
            stuck.add(kind)  # what others leave only gets less, so that equal jobs would fail, too
    forced: list[int] = []
    for at, j in enumerate(starved):
        if _start(board, j, rules.worth_starting):
            continue
        if rules.shrink and _claim(board, j, 0.0, STARVED):
            forced.append(j)
        elif not _start(board, j, 0.0):
            # The first in line goes on waiting; no job behind it takes by force, or its turn might never come.
            best_effort = [*starved[at:], *best_effort]
            break
    refused: dict[object, int] = {}
    displaced = board.mark()
    for j in best_effort:
        job = board.jobs[j]
        kind = (job.curve, job.least, job.most, job.tenant)
        if refused.get(kind) == displaced:
            continue  # as for the one before it
        if _start(board, j, rules.worth_starting):
            continue
        if rules.shrink and _claim(board, j, rules.worth_starting, BY_SLOPE):
            displaced = board.mark()  # others may have been made smaller than needed, so they are looked at again
            continue
        refused[kind] = displaced
    for j in dict.fromkeys(v for v, _ in board.log):  # a job that lost everything may go on elsewhere
        if board.jobs[j].running and board.seats[j] is NOWHERE:
            _start(board, j, rules.worth_starting)
    return forced


def mend(board: SeatBoard, rules: Rules) -> None:
    """Guaranteed jobs that run below their promise come before everything else, even before their own guard."""
    for j, seat in enumerate(board.seats):
        curve = board.jobs[j].curve
        if not seat.nodes or curve.sla <= 0.0 or seat.footing.rate >= curve.sla * (1.0 - SLACK):
            continue
        if not _replan(board, j, 0.0):
            seat_guaranteed(board, j, rules)


def replan(board: SeatBoard, rules: Rules) -> None:
    """Give jobs a better plan on the same GPUs, where it is worth a restart and the guard allows one."""
    for j, seat in enumerate(board.seats):
        job = board.jobs[j]
        if seat.nodes and job.running and not job.rooted and not board.touched(j):
            _replan(board, j, rules.worth_moving)


def _replan(board: SeatBoard, j: int, least_gain: float) -> bool:
    seat = board.seats[j]
    if min(seat.counts) != max(seat.counts):
        return False
    footing = board.jobs[j].curve.footing((len(seat.nodes), seat.counts[0]))
    if footing is None or footing.plan == seat.footing.plan or footing.rate < seat.footing.rate * (1.0 + least_gain):
        return False
    mark = board.mark()
    board.put(j, NOWHERE)
    if not all(board.has_room(node, seat.counts[0], footing) for node in seat.nodes):
        board.rollback(mark)
        return False
    board.put(j, Seat(seat.nodes, seat.counts, footing))
    return True


def seat_guaranteed(board: SeatBoard, j: int, rules: Rules) -> bool:
    """Seat a job on the fewest GPUs that keep the promise, free ones if possible."""
    levels = board.jobs[j].curve.levels
    if any(board.settle(j, level) for level in levels):
        return True
    return rules.shrink and any(board.claim(j, level, PROMISED) for level in levels[:TRIES])


def _start(board: SeatBoard, j: int, worth_starting: float) -> bool:
    """Start a job on free GPUs, at the level with the most throughput per GPU that they allow."""
    return any(board.settle(j, level) for level in _worthwhile(board, j, worth_starting))


def _claim(board: SeatBoard, j: int, worth_starting: float, force: int) -> bool:
    levels = _worthwhile(board, j, worth_starting)
    return any(board.claim(j, level, force) for level in (levels if force else levels[:TRIES]))


def _worthwhile(board: SeatBoard, j: int, worth_starting: float) -> list[int]:
    """Levels with enough throughput per GPU, best first."""
    ups = board.jobs[j].curve.ups(0)
    return [level for slope, level in ups if slope >= worth_starting * ups[0][0]]


def expand(board: SeatBoard, rules: Rules) -> None:
    """Expand(): the next GPUs go to the steepest curve; only newcomers also take them from flatter ones."""
    spare = board.total_free > rules.headroom
    able = [j for j, seat in enumerate(board.seats) if seat.nodes and (spare or not board.jobs[j].running)]
    heap = [step for j in able for step in [_step(board, j, 0)] if step]
    heapify(heap)
    while heap:
        _, j, at = heappop(heap)
        job, seat = board.jobs[j], board.seats[j]
        level = job.curve.ups(seat.gpus)[at][1]
        if _grow(board, j, level, rules):
            at = -1
        step = _step(board, j, at + 1)
        if step:
            heappush(heap, step)


def _step(board: SeatBoard, j: int, at: int) -> tuple[float, int, int] | None:
    """The next way in which a job can grow, in the form that the heap sorts: steepest first."""
    job = board.jobs[j]
    ups = job.curve.ups(board.seats[j].gpus)
    if at >= len(ups) or (job.running and job.rooted and not board.touched(j)):
        return None
    return -ups[at][0], j, at


def _grow(board: SeatBoard, j: int, level: int, rules: Rules) -> bool:
    job, seat = board.jobs[j], board.seats[j]
    moves = job.running and not board.touched(j)
    goal = seat.footing.rate * (1.0 + (rules.worth_moving if moves else _LEAST_GAIN))
    if job.curve.rate(level) < goal:
        return False
    if level - seat.gpus <= board.total_free - rules.headroom and board.settle(j, level, above=goal):
        return True
    newcomer = not job.running
    return newcomer and rules.shrink and board.claim_more(j, level)
