"""The newest incarnation of each job, one small file per job: nothing older starts, even after a crash."""

from __future__ import annotations

import os
from pathlib import Path


class Fences:
    """A folder of fences. Blocking."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder

    def newest(self, job_id: str) -> int:
        try:
            return int((self.dir / job_id).read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def raise_to(self, job_id: str, incarnation: int, *, durable: bool) -> Path:
        """From now on nothing older starts. If it is not written durably, `sync` makes it survive a power cut."""
        path = self.dir / job_id
        if incarnation > self.newest(job_id):
            draft = self.dir / f".{job_id}.new"
            with draft.open("w") as file:
                file.write(f"{incarnation}\n")
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            draft.replace(path)
            if durable:
                _sync_one(self.dir)
        return path


def sync(path: Path) -> None:
    """Make a file and its name durable."""
    for one in (path, path.parent):
        _sync_one(one)


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
