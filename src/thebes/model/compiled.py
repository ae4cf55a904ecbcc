"""How hot code is compiled: by Numba, once per machine and version of the source.

Python can call `compiled` functions; only compiled code can call `inner` ones, which saves the time to compile an entry
that nothing uses. Both work in place: they make no arrays and return none, so the arrays that they are lent outlive the
call, and references to them need not be counted. Numba counts them by default, and that took five sixths of the time of
a simulation. A function that makes arrays is a `maker` (or, inside, an `inner_maker`). A function that returns a part
of an array that it was lent is `inlined` into its callers.
With NUMBA_DISABLE_JIT=1 all of them are plain Python functions that do exactly the same.

What we compile are branches and look-ups, not loops over long arrays: LLVM's third level of optimisation makes none of
it faster than the second and takes longer; the first level slows a simulation down by a tenth. NUMBA_OPT sets another.
A function is compiled once for itself and once more in each of its callers. So one that is called in one place is
`inlined`. Arrays are copied number by number, since `a[:] = b` brings a second's worth of checks on shapes with it.

Numba's own cache looks only at the file of a function, not at the files of the functions that were compiled into it, so
that an edit or an upgrade could leave old code in force. So each version of our sources has a cache folder of its own.
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import GenericAlias
from typing import Any, TypeVar

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

# Arrays of records and single records, whose fields are attributes. Python's types cannot say what a dtype holds; the
# dtypes themselves (JOB, NODE, …) are the reference.
Records = Any
Record = Any

VERSIONS_KEPT = 4
OPTIMISATION = 2  # of LLVM's levels 0 to 3
OBJECTS_BETWEEN_COLLECTIONS = (50_000, 50, 100)  # costs 70 MB more and saves an eighth of the time
_HOLDS_COMPILED = re.compile(rb"^@(?:compiled|inner|maker|inner_maker|inlined)\b", re.MULTILINE)
_ARRAYS = re.compile(r"\b(?:NDArray|Records)\b")
_IMPORTS = re.compile(rb"^[ \t]*from thebes\.([\w.]+) import (\([^)]*\)|[^\n]*)", re.MULTILINE)


@cache
def cache_folder() -> Path:
    """The folder of this version's compiled code, below THEBES_CACHE_DIR or the user's cache folder."""
    base = Path(
        os.environ.get("THEBES_CACHE_DIR")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "thebes"
    )
    folder = base / f"compiled-{_sources_hash()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.touch()
    except OSError:  # there is no home, or it is read-only: compile again each time rather than fail
        return Path(tempfile.mkdtemp(prefix="thebes-"))
    versions = sorted(base.glob("compiled-*"), key=lambda old: old.stat().st_mtime, reverse=True)
    for old in versions[VERSIONS_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def is_cold(function: str) -> bool:
    """Whether `module.function` was not compiled yet for this version, so that the first run will take its time."""
    return compiles() and not any(cache_folder().glob(f"*/{function}-*.nbc"))


def compiles() -> bool:
    """Whether hot code is compiled at all, or runs as plain Python."""
    return not _settings.DISABLE_JIT


@cache
def _sources_hash() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    package = Path(__file__).parents[1]
    for source, text in sorted(compiled_sources(package).items()):
        digest.update(f"{source.relative_to(package)}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:16]


def compiled_sources(package: Path) -> dict[Path, bytes]:
    """Every file that ends up in compiled code: those that hold some, and all of ours that they import.

    A constant of a file without compiled code is compiled in where it is used, so such files count as well.
    """
    texts = {source: source.read_bytes() for source in package.rglob("*.py")}
    found: dict[Path, bytes] = {}
    waiting = [source for source, text in texts.items() if _HOLDS_COMPILED.search(text)]
    while waiting:
        source = waiting.pop()
        if source in found:
            continue
        found[source] = texts[source]
        for place, names in _IMPORTS.findall(texts[source]):
            module = package.joinpath(*place.decode().split("."))
            inside = (module / f"{name}.py" for name in re.findall(r"\w+", names.decode()))
            files = (module.with_suffix(".py"), module / "__init__.py", *inside)
            waiting.extend(file for file in files if file in texts)
    return found


# Numba's settings and decorator; its own type stubs describe them only in part.
_settings: Any = import_module("numba.core.config")
_njit: Any = numba.njit
_unliteral: Any = numba.types.unliteral


def _compile(function: F, **options: bool | str) -> F:
    before = _settings.CACHE_DIR
    _settings.CACHE_DIR = str(cache_folder())
    try:
        return _one_version(_at_our_level(_njit(cache=True, **options)(function)))
    finally:
        _settings.CACHE_DIR = before


def _at_our_level(function: Any) -> Any:
    """The setting holds for the whole process, so it is made while one of ours is compiled and then taken back."""
    if not hasattr(function, "get_call_template") or "NUMBA_OPT" in os.environ:
        return function
    compile_one = function.compile

    def compile_at_our_level(signature: Any) -> Any:
        before = _settings.OPT
        _settings.OPT = type(before)(OPTIMISATION)
        try:
            return compile_one(signature)
        finally:
            _settings.OPT = before

    function.compile = compile_at_our_level
    return function


@contextmanager
def rarely_collecting() -> Generator[None]:
    """While much is compiled: Python looks for garbage all the time, in a compiler's many objects that are none."""
    before = gc.get_threshold()
    gc.set_threshold(*OBJECTS_BETWEEN_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _one_version(function: Any) -> Any:
    """One version for all constants: by itself Numba compiles a function again for each constant that a caller has."""
    if not hasattr(function, "get_call_template"):  # compiling is switched off
        return function
    ask = function.get_call_template

    def template(args: Sequence[Any], named: dict[str, Any]) -> Any:
        return ask([_unliteral(arg) for arg in args], {name: _unliteral(arg) for name, arg in named.items()})

    function.get_call_template = template
    return function


def plain(records: Records) -> Records:
    """Records in the form for compiled code: Numba recognises the type of a plain structured array much faster."""
    if _settings.DISABLE_JIT:
        return records
    return records.view(np.dtype(records.dtype.descr), np.ndarray)


def compiled(function: F) -> F:
    return _compile(_in_place(function), _nrt=False)


def inner(function: F) -> F:
    return _compile(_in_place(function), _nrt=False, **_NO_DOOR)


def maker(function: F) -> F:
    return _compile(function, _nrt=True)


def inner_maker(function: F) -> F:
    return _compile(function, _nrt=True, **_NO_DOOR)


def inlined(function: F) -> F:
    return _compile(function, inline="always", **_NO_DOOR)


_NO_DOOR = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def _in_place(function: F) -> F:
    """Refuse a function that would return memory to which nothing holds a reference."""
    if returns_arrays(function):
        raise TypeError(
            f"{function.__module__}.{function.__name__} returns arrays: decorate it with @maker or @inner_maker"
            " if it makes them, or with @inlined if it returns a part of one that it was given"
        )
    return function


def returns_arrays(function: Callable[..., Any]) -> bool:
    """Whether a function returns an array, by its annotation; the fields of named tuples count."""
    return _holds_arrays(str(function.__annotations__.get("return", "")), function.__globals__)


def _holds_arrays(annotation: str, names: dict[str, Any]) -> bool:
    if _ARRAYS.search(annotation):
        return True
    for name in re.findall(r"\w+", annotation):
        named = names.get(name)
        if isinstance(named, GenericAlias) and named.__origin__ is np.ndarray:
            return True
        if hasattr(named, "_fields"):
            where = vars(sys.modules[named.__module__])
            if any(_holds_arrays(_source(field), where) for field in named.__annotations__.values()):
                return True
    return False


def _source(field: Any) -> str:
    """An annotation as it was written; NamedTuple wraps those that are strings."""
    return field if isinstance(field, str) else getattr(field, "__forward_arg__", str(field))


class entry:  # noqa: N801 - used like a decorator
    """A compiled function that a hot Python loop calls.

    Before each call Numba looks up which compiled version fits the arguments, which takes longer than most of our
    calls. This keeps the version of the first call, so it is only for functions that are always called with the same
    types.
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
