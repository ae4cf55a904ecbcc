"""How hot code is compiled: by Numba, once per machine and version of the source.

`compiled` functions can be called from Python; `inner` ones only from compiled code, which saves the time to compile a
door that nobody uses. With NUMBA_DISABLE_JIT=1 both are plain Python functions that do exactly the same.

Numba's own cache looks only at the file of a function, not at the files of the functions that were compiled into it: an
edit or an upgrade could leave old code in force. So each version of our sources has a cache folder of its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

# Arrays of records and single records, whose fields are attributes. What a dtype holds cannot be said in Python's
# types; the dtypes themselves (JOB, NODE, …) are the reference.
Records = Any
Record = Any

COMPILED_ROOMS = ("model", "placement", "policy", "sim")
VERSIONS_KEPT = 4


@cache
def cache_folder() -> Path:
    """Where this version's compiled code is kept: below THEBES_CACHE_DIR, or the user's cache folder."""
    base = Path(
        os.environ.get("THEBES_CACHE_DIR")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "thebes"
    )
    folder = base / f"compiled-{_sources_hash()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.touch()
    except OSError:  # no home, or one that is read-only: compile again each time rather than fail
        return Path(tempfile.mkdtemp(prefix="thebes-"))
    versions = sorted(base.glob("compiled-*"), key=lambda old: old.stat().st_mtime, reverse=True)
    for old in versions[VERSIONS_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def is_cold(function: str) -> bool:
    """Whether `module.function` was not compiled yet for this version: the first run will take its time."""
    return not _settings.DISABLE_JIT and not any(cache_folder().glob(f"*/{function}-*.nbc"))


@cache
def _sources_hash() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    package = Path(__file__).parents[1]
    for room in COMPILED_ROOMS:
        for source in sorted((package / room).glob("*.py")):
            text = source.read_bytes()
            if b"\n@compiled\n" in text or b"\n@inner\n" in text:
                digest.update(source.name.encode() + text)
    return digest.hexdigest()[:16]


# Numba's settings and decorator, which its own type stubs describe only in part.
_settings: Any = import_module("numba.core.config")
_njit: Any = numba.njit


def _compile(function: F, **options: bool) -> F:
    before = _settings.CACHE_DIR
    _settings.CACHE_DIR = str(cache_folder())
    try:
        return _njit(cache=True, **options)(function)
    finally:
        _settings.CACHE_DIR = before


def plain(records: Records) -> Records:
    """Records as compiled code is given them: Numba recognises the type of a plain structured array much faster."""
    if _settings.DISABLE_JIT:
        return records
    return records.view(np.dtype(records.dtype.descr), np.ndarray)


def compiled(function: F) -> F:
    return _compile(function)


class entry:  # noqa: N801 - used like a decorator
    """A compiled function as a hot Python loop calls it.

    Before each call Numba looks up which compiled version fits the arguments, which takes longer than most of our calls
    do. Here the version of the first call is kept; only for functions that are always called with the same types.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._version: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._version is not None:
            return self._version(*args)
        result = self._function(*args)
        versions = list(getattr(self._function, "overloads", {}).values())
        self._version = versions[0].entry_point if len(versions) == 1 else self._function
        return result


def inner(function: F) -> F:
    return _compile(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)
