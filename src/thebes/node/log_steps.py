"""Step numbers are read from the lines of a log by the job's own pattern, for scripts that do not import `thebes.job`.

What is found goes into the attempt's `progress` file, as if the job had written it. Agents and steps use this module;
`re` is loaded for jobs with a pattern only, since it costs a step 1 MB.
"""

# pathlib and contextlib would be loaded for these alone:
# ruff: noqa: PTH116
from __future__ import annotations

import os
from _signal import ITIMER_VIRTUAL, SIGVTALRM, setitimer, signal  # pyright: ignore[reportMissingImports]

from thebes.protocol.log_file import read_log

PIECE_BYTES = 1 << 20
LINE_BYTES = 4096
PATIENCE_S = 0.2  # of our CPU time: a pattern can take for ever on one line, and a busy machine is not its fault


class TooSlow(Exception):  # noqa: N818 - reads as what it says
    """The pattern takes too long: it is given up, or it would stop the agent."""


class LogSteps:
    """Follows one log. Not for threads: the time limit is an alarm signal."""

    def __init__(self, path: str | os.PathLike[str], pattern: str, *, from_end: bool = False) -> None:
        import re

        self.path = path
        self.pattern = re.compile(pattern)
        self._rest = b""
        self._offset = 0
        if from_end:  # the agent is new, the log is old: the last step is enough
            try:
                self._offset = max(0, os.stat(path).st_size - PIECE_BYTES)
            except OSError:
                self._offset = 0

    def newest(self) -> int | None:
        """The last step in the lines written since the last call; None when there is none."""
        try:
            if os.stat(self.path).st_size == self._offset:
                return None
            data, self._offset = read_log(self.path, self._offset, PIECE_BYTES)
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-LINE_BYTES:]
        found: int | None = None
        before = signal(SIGVTALRM, _ring)  # the regular expression engine looks for signals as it goes
        setitimer(ITIMER_VIRTUAL, PATIENCE_S)
        try:
            for line in lines:
                match = self.pattern.search(line[:LINE_BYTES].decode("utf-8", "replace"))
                step = _step(match.group(1)) if match else None
                found = found if step is None else step
        finally:
            setitimer(ITIMER_VIRTUAL, 0)
            signal(SIGVTALRM, before)
        return found


def _ring(*_: object) -> None:
    raise TooSlow


def _step(text: str | None) -> int | None:
    try:
        return int(float((text or "").replace(",", "").replace("_", "")))
    except (ValueError, OverflowError):
        return None
