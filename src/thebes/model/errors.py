"""The one kind of error that a user is meant to read.

Anything that a person can cause (a bad file, an unknown name, a job that can never fit) raises `UserError`: one message
that says what is wrong, where, and what to do next. The command line prints it without a traceback and exits with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in the input, told in one message; `hint` says what to do about it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


def nearest(word: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest valid name, or the list of valid names if none is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"valid names: {', '.join(names)}" if names else "there are no valid names here"
