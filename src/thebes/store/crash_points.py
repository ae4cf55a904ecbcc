"""Fault points for tests: the process kills itself at one exact store write.

`THEBES_CRASH_AT_WRITE=7:before` ends it with SIGKILL right before its 7th COMMIT since the store was opened, `7:after`
right after it, when the change is durable but no caller knows it yet. Without the variable nothing happens.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from typing import Literal

from thebes.model.errors import UserError

VARIABLE = "THEBES_CRASH_AT_WRITE"


@dataclass
class CrashPoint:
    """It counts commits and kills the process at the one chosen; `at` 0 means never."""

    at: int = 0
    side: Literal["before", "after"] = "before"
    commits: int = 0

    @classmethod
    def from_environment(cls) -> CrashPoint:
        text = os.environ.get(VARIABLE, "")
        if not text:
            return cls()
        if not (match := re.fullmatch(r"([1-9][0-9]*):(before|after)", text)):
            raise UserError(f"{VARIABLE}={text} is not a crash point", hint="write N:before or N:after, as in 7:after")
        return cls(int(match[1]), "after" if match[2] == "after" else "before")

    def before_commit(self) -> None:
        self.commits += 1
        self._die_at("before")

    def after_commit(self) -> None:
        self._die_at("after")

    def _die_at(self, side: str) -> None:
        if self.commits == self.at and self.side == side:
            os.kill(os.getpid(), signal.SIGKILL)
