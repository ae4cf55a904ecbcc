"""One srun per gang: a process that outlives us, and what it has to say when its tasks do not come up."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

OVER = "Exited with exit code"  # so srun tells of a task


def start_apart(job: int, args: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process that outlives us: another session, its own files.

    When srun has ended, so have all tasks, and nobody needs the allocation: it goes back even if we are not there. Not
    if srun was killed, though: then they may live.
    """
    args = ["/bin/sh", "-c", f'"$@"; [ $? -gt 128 ] || exec scancel --quiet {job}', "thebes-srun", *args]
    with log.open("ab") as out:
        return subprocess.Popen(
            args, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd="/", start_new_session=True
        )


def has_failed(log: Path) -> bool:
    """Whether srun tells that a task has ended."""
    with suppress(OSError):
        return OVER in log.read_text("utf-8", "replace")
    return False


def first_words(logs: Iterable[Path]) -> str:
    """What the first of them says that says anything; the others are not read."""
    return next(filter(None, map(last_line, logs)), "")


def last_line(path: Path) -> str:
    """What was said last, but for srun's own words that something has ended."""
    with suppress(OSError):
        lines = path.read_text("utf-8", "replace").strip().splitlines()
        telling = [line for line in lines if OVER not in line]
        return (telling or lines or [""])[-1][:300]
    return ""
