"""Reading a log that somebody else writes and may cut: for people who follow it, and for step numbers in its lines."""

from __future__ import annotations

import os


def read_log(path: str | os.PathLike[str], offset: int, limit: int) -> tuple[bytes, int]:
    """Up to `limit` bytes from `offset`, and the offset after them. Beyond the end (it was cut): go on at the end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        start = max(0, size + offset) if offset < 0 else min(offset, size)
        data = os.pread(fd, limit, start)
        return data, start + len(data)
    finally:
        os.close(fd)
