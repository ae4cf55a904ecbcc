"""Arrays of which only so many members may be at work at a time (`0-99%4`): which members have places, which is next.

A member that has no place is not shown to the policy, so policies know nothing of limits. All of it follows from what
is known of the members, and is worked out again when a controller starts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

PlaceInLine = tuple[bool, int, str]  # never begun, array index, id: a begun job goes first, then the lowest index


@dataclass
class Places:
    """The places of one array. That a member has lost its place, or wants none, is found out when it matters."""

    limit: int
    inside: set[str] = field(default_factory=set)  # members that have a place, and some that had one
    line: list[PlaceInLine] = field(default_factory=list)  # a heap
    in_line: set[str] = field(default_factory=set)

    def wait(self, job_id: str, index: int, *, begun: bool) -> None:
        """Put a member in line; doing it twice is the same as once."""
        if job_id not in self.in_line:
            self.in_line.add(job_id)
            heapq.heappush(self.line, (not begun, index, job_id))

    def let_in(self, has_place: Callable[[str], bool], may_enter: Callable[[str], bool]) -> list[str]:
        """Fill the places that are free, in turn. A member that may not enter (any more) is removed from the line.

        The cost depends on the places and the newcomers, not on the length of the line.
        """
        self.inside = {job_id for job_id in self.inside if has_place(job_id)}
        entered: list[str] = []
        while self.line and len(self.inside) < self.limit:
            _, _, job_id = heapq.heappop(self.line)
            self.in_line.discard(job_id)
            if may_enter(job_id):
                self.inside.add(job_id)
                entered.append(job_id)
        return entered

    @property
    def deserted(self) -> bool:
        return not (self.inside or self.line)


def kept_back(limit: int) -> str:
    """Why a member without a place waits."""
    return f"its array runs at most {limit} of its jobs at a time"
