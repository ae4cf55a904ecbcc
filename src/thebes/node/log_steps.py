"""Reads step numbers from the lines of a log by the job's own pattern, for scripts that do not import `thebes.job`.

What is found goes into the attempt's `progress` file, as if the job had written it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thebes.node.attempt import read_log

PIECE_BYTES = 1 << 20
LINE_BYTES = 4096
PATIENCE_S = 0.2  # of our CPU time: a pattern can take for ever on one line, and a busy machine is not its fault


class TooSlow(Exception):  # noqa: N818 - reads as what it says
    """The pattern takes too long: it is given up, or it would stop the agent."""


class LogSteps:
    """Follows one log. Not for threads: the time limit is an alarm signal."""

    def __init__(self, path: Path, pattern: str, *, from_end: bool = False) -> None:
        self.path = path
        self.pattern = re.compile(pattern)
        self._rest = b""
        self._offset = 0
        if from_end:  # the agent is new, the log is old: the last step is enough
            try:
                self._offset = max(0, path.stat().st_size - PIECE_BYTES)
            except OSError:
                self._offset = 0

    def newest(self) -> int | None:
        """The last step in the lines written since the last call; None when there is none."""
        try:
            if self.path.stat().st_size == self._offset:
                return None
            data, self._offset = read_log(self.path, self._offset, PIECE_BYTES)
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-LINE_BYTES:]
        found: int | None = None
        with _alarm(PATIENCE_S):
            for line in lines:
                match = self.pattern.search(line[:LINE_BYTES].decode("utf-8", "replace"))
                step = _step(match.group(1)) if match else None
                found = found if step is None else step
        return found


def _step(text: str | None) -> int | None:
    try:
        return int(float((text or "").replace(",", "").replace("_", "")))
    except (ValueError, OverflowError):
        return None


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, ring)  # the regular expression engine looks for signals as it goes
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
