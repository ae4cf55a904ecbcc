"""Checkpoint files that are whole or do not exist: written beside their place, made durable, then renamed into it.

A run that is killed while it saves leaves a temporary file, never half a checkpoint under a good name. This module
needs only the standard library.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_NUMBER = re.compile(r"\d+")


def atomic_save(write: Callable[[BinaryIO], object], path: str | os.PathLike[str]) -> Path:
    """Call `write` with an open file; when it returns, its bytes are durable and become `path` in one step.

    `atomic_save(lambda file: torch.save(state, file), path)`. If `write` raises, `path` is as it was before.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The name contains process and thread, so that two of them that save the same path do not mix their bytes.
    temporary = target.parent / f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(target.parent)
    return target


def latest(folder: str | os.PathLike[str], pattern: str = "*") -> Path | None:
    """The newest checkpoint in `folder`, a file or a folder: the one with the highest last number, then the youngest.

    Hidden and temporary entries do not count. It is None if there is none, or no such folder.
    """
    found = _checkpoints(Path(folder), pattern)
    return found[-1] if found else None


def prune(folder: str | os.PathLike[str], keep: int = 2, pattern: str = "step-*") -> list[Path]:
    """Delete all but the newest `keep` checkpoint files of `pattern`, and what killed runs left half written.

    Only files are deleted, never folders. Call it from one rank, after a save. Returns what was deleted.
    """
    if keep < 1:
        raise ValueError("keep at least one checkpoint")
    place = Path(folder)
    doomed = [path for path in _checkpoints(place, pattern) if path.is_file()][:-keep]
    doomed += [path for path in place.glob(f".{pattern}.tmp") if f".{os.getpid()}-" not in path.name]
    for path in doomed:
        path.unlink(missing_ok=True)
    return doomed


def sync(path: Path) -> None:
    """Make a file durable, or a folder with everything in it. FileNotFoundError if there is no such file."""
    if path.is_dir():
        for folder, _, names in os.walk(path):
            for name in names:
                _sync(Path(folder) / name)
            _sync(Path(folder))
    else:
        _sync(path)
    _sync(path.parent)


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool) -> None:
    """Replace `path` in one step, so that a reader sees the old text or the new."""
    text = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    if durable:
        atomic_save(lambda file: file.write(text), path)
        return
    temporary = path.parent / f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp"
    temporary.write_bytes(text)
    temporary.replace(path)


def _checkpoints(folder: Path, pattern: str) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found: list[tuple[int, int, str, Path]] = []
    for path in folder.glob(pattern) if folder.is_dir() else ():
        if path.name.startswith(".") or path.name.endswith(".tmp"):
            continue
        try:
            written_ns = path.stat().st_mtime_ns
        except FileNotFoundError:  # it was deleted while we looked
            continue
        numbers = _NUMBER.findall(path.name)
        found.append((int(numbers[-1]) if numbers else -1, written_ns, path.name, path))
    return [path for *_, path in sorted(found)]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
