"""Logs are kept below their limit: how much to cut, and when to look again."""

# pathlib and contextlib would be loaded for these alone:
# ruff: noqa: PTH116, SIM105
from __future__ import annotations

import os

CHUNK = 256 << 10


class LogWatch:
    """One log that is kept below its limit: head and tail stay, a line in between says how many bytes were dropped."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self.path = path
        self.limit = max(limit_bytes, 16 << 10)
        self.head_end = -1  # where the head ends, once cut
        self.tail_from = -1  # where the tail begins: after the line between them
        self.dropped = 0
        self.size = 0
        self.looked_s: float | None = None
        self.rate = 0.0

    def look(self, now: float) -> float | None:
        """Cut if it is too long. Seconds until the next look, or None when nothing was written since the last one."""
        try:
            size = os.stat(self.path).st_size
        except OSError:
            return None
        grown = size - self.size
        if self.looked_s is not None and now > self.looked_s:
            self.rate = max(0.0, grown / (now - self.looked_s))
        quiet = grown == 0
        self.looked_s = now
        if size > self.limit:
            try:
                size = self.cut()
            except OSError:
                pass  # no room, or it is gone: next time
        self.size = size
        if quiet:
            return None
        # It may overshoot by half its limit, at four times the rate seen and at 1 MB/s at the least.
        return min(2.0, max(0.02, (1.5 * self.limit - size) / (4 * self.rate + 1e6)))

    def cut(self) -> int:
        """Replace the middle in place, in small pieces; the writers go on appending meanwhile. The new size."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if self.head_end < 0:
                self.head_end = self.tail_from = _after_newline(fd, self.limit // 4)
            source = max(self.tail_from, _after_newline(fd, size - self.limit // 2))
            dropped = self.dropped + source - self.tail_from
            line = b"\n[thebes: %d bytes dropped here: the log limit is %d bytes]\n" % (dropped, self.limit)
            target = self.head_end
            os.pwrite(fd, line, target)
            target += len(line)
            tail_from = target
            last = size + self.limit // 4  # a writer that is faster than our copying is not followed for ever
            while source < last:
                piece = os.pread(fd, CHUNK, source)
                if not piece:
                    break
                os.pwrite(fd, piece, target)
                source += len(piece)
                target += len(piece)
            os.ftruncate(fd, target)
            self.dropped = dropped
            self.tail_from = tail_from
            return target
        finally:
            os.close(fd)


def _after_newline(fd: int, offset: int) -> int:
    """The first beginning of a line at or after the offset, if there is one near."""
    at = os.pread(fd, 4096, max(0, offset)).find(b"\n")
    return max(0, offset) + at + 1
