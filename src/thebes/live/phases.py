"""The phases of an attempt and the moves between them, in one table. `Core.move` is the only code that makes a move.

An attempt is launched, runs, may be suspended in place and resumed, and is stopped; when it has ended its job has it no
longer. A move that is not in the table is a mistake of ours.
"""

from __future__ import annotations

from typing import Literal

Phase = Literal["launching", "running", "suspending", "suspended", "resuming", "stopping"]

MOVES: dict[Phase, frozenset[Phase]] = {
    "launching": frozenset({"running", "stopping"}),
    "running": frozenset({"suspending", "stopping"}),
    "suspending": frozenset({"suspended", "stopping"}),  # stopping follows if this way of suspending was refused
    "suspended": frozenset({"resuming", "stopping"}),  # stopping follows if it comes back to life only to leave
    "resuming": frozenset({"running", "suspending", "stopping"}),
    "stopping": frozenset({"stopping"}),  # it may be asked again, and harder
}

# After a crash the store may be a step behind the nodes, and then what they tell corrects it.
CORRECTIONS: dict[Phase, frozenset[Phase]] = {
    "launching": frozenset({"running", "suspended", "resuming"}),
    "running": frozenset({"running", "suspended", "resuming"}),  # resuming, if a part of the gang was found asleep
    "suspended": frozenset({"running", "resuming"}),
}

ACTIVE: frozenset[Phase] = frozenset({"launching", "running", "resuming"})  # the phases in which it is meant to run

# The state of an attempt in the store. An attempt that is being suspended or resumed is `running` there until that has
# succeeded: a controller that finds it so asks the nodes.
STORED: dict[Phase, str] = {
    "launching": "starting",
    "running": "running",
    "suspending": "running",
    "suspended": "suspended",
    "resuming": "running",
    "stopping": "stopping",
}
_TAKEN_UP: dict[str, Phase] = {"starting": "launching", "stopping": "stopping", "suspended": "suspended"}


class IllegalMove(Exception):  # noqa: N818 - reads as what it says
    """An attempt was about to move to a phase that does not follow on the one it is in."""


def legal(before: Phase, after: Phase, *, corrects: bool = False) -> bool:
    """Whether `after` follows on `before`; with `corrects`, because the nodes have told so after a crash."""
    return after in (CORRECTIONS.get(before, ()) if corrects else MOVES[before])


def taken_up(state: str) -> Phase:
    """The phase of an attempt that the store has in this state."""
    return _TAKEN_UP.get(state, "running")
