"""CPUs by slope: what a node has left goes, one CPU per GPU at a time, to the job that it speeds up most.

CPUs change hands without a restart, so they are dealt out again in every round. Every job begins with what its plan
needs (all but 1 % of the speed on its share of the node); only plans that offload to the host can use more.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from thebes.policy.rubick.board import Seat, SeatBoard
from thebes.policy.rubick.curves import NEAR, Footing

WithCpus = Callable[[int, int], Footing | None]  # (job, CPUs per GPU) -> what the job then does where it sits


def deal_cpus(board: SeatBoard, with_cpus: WithCpus) -> None:
    """Hand the free CPUs of all nodes out, steepest first, while one more CPU per GPU brings at least 1 %."""
    heap = [step for j, seat in enumerate(board.seats) if seat.nodes for step in [_step(board, j, with_cpus)] if step]
    heapify(heap)
    while heap:
        _, j, footing = heappop(heap)
        seat = board.seats[j]
        if _spare(board, seat) >= 1:
            board.put(j, Seat(seat.nodes, seat.counts, footing))
            step = _step(board, j, with_cpus)
            if step:
                heappush(heap, step)


def _spare(board: SeatBoard, seat: Seat) -> int:
    """CPUs that all nodes of a job could still give for each of its GPUs."""
    return min(board.free_cpus[node] // count for node, count in zip(seat.nodes, seat.counts, strict=True))


def _step(board: SeatBoard, j: int, with_cpus: WithCpus) -> tuple[float, int, Footing] | None:
    seat = board.seats[j]
    most = board.room.most_cpus(seat.gpus)
    if board.jobs[j].curve.cpus or seat.footing.cpus >= most or _spare(board, seat) < 1:
        return None
    more = with_cpus(j, seat.footing.cpus + 1)
    if more is None or more.rate * NEAR < seat.footing.rate or more.plan != seat.footing.plan:
        return None
    return -(more.rate - seat.footing.rate) / seat.gpus, j, more
