"""What a node need not keep for ever: folders of attempts that were forgotten long ago, and fences of their jobs.

Finding is apart from removing, so that the remover can make sure that an attempt is not in use. Only
`nodes/NODE/attempts` and `nodes/NODE/fence` are looked at: checkpoints are the users'.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from thebes.protocol.attempt import AttemptDir, lock_holder

KEEP_ATTEMPTS_S = 30 * 86_400.0  # after their end; their logs go with them
TIDY_EVERY_S = 86_400.0
TIDY_AT_ONCE = 1000  # removals; what is left over waits for the next go
TIDY_AGAIN_S = 60.0


async def keep_tidy(remove: Callable[[float, int], Awaitable[int]]) -> None:
    """For ever: remove what is too old to be kept, at the start and then daily; in portions, so that nobody notices.

    `remove` is told before when (Unix seconds) and how many at most, and says how many it were.
    """
    while True:
        removed = await remove(time.time() - KEEP_ATTEMPTS_S, TIDY_AT_ONCE)
        await asyncio.sleep(TIDY_EVERY_S if removed < TIDY_AT_ONCE else TIDY_AGAIN_S)


def old_attempts(attempts: Path, opened: Path, *, before_s: float, limit: int) -> list[AttemptDir]:
    """Forgotten attempts whose result is older than this (Unix seconds), so many at most."""
    return list(islice(_old_attempts(attempts, opened, before_s), limit))


def _old_attempts(attempts: Path, opened: Path, before_s: float) -> Iterator[AttemptDir]:
    with suppress(OSError), os.scandir(attempts) as entries:
        for entry in entries:
            folder = AttemptDir.named(attempts, entry.name)
            if folder is not None and _written_s(folder.path) < before_s and not (opened / folder.name).exists():
                yield folder


def _written_s(attempt: Path) -> float:
    """When its state was written last; an attempt that was broken off before it had one: when its folder was made."""
    for path in (attempt / "state.json", attempt):
        with suppress(FileNotFoundError, NotADirectoryError):
            return path.stat().st_mtime
    return float("inf")  # just gone


def remove_attempt(folder: AttemptDir) -> bool:
    """Whether it is gone. One whose supervisor lives stays."""
    if lock_holder(folder.path / "lock") is not None:
        return False
    # The state goes last: a removal that is broken off is found again by it, and a repeated launch is known as done.
    for path in list(folder.path.iterdir()) if folder.path.is_dir() else []:
        if path.name != "state.json":
            _remove(path)
    shutil.rmtree(folder.path, ignore_errors=True)
    return not folder.path.exists()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def old_fences(fences: Path, attempts: Path, *, before_s: float, limit: int) -> list[Path]:
    """Fences older than this of jobs that have no attempt here any more, so many at most."""
    with suppress(OSError):
        jobs = {name.rpartition(".")[0] for name in os.listdir(attempts)}  # noqa: PTH208 - names are all that is wanted
        return list(
            islice((path for path in fences.iterdir() if path.name not in jobs and is_older(path, before_s)), limit)
        )
    return []


def is_older(path: Path, before_s: float) -> bool:
    with suppress(OSError):
        return path.stat().st_mtime < before_s
    return False
