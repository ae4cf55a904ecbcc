"""The compile cache, of which every edit to anything that is compiled in makes a new one; and who may make arrays."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray

import thebes
from thebes.model.compiled import compiled, compiled_sources, inner, returns_arrays

PACKAGE = Path(thebes.__file__).parent


def _package(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_compiled_code_in_sub_folders_counts(tmp_path: Path) -> None:
    package = _package(tmp_path, {"policy/dally/tuner.py": "@inner\ndef f(): ...\n"})
    assert set(compiled_sources(package)) == {package / "policy/dally/tuner.py"}


@pytest.mark.parametrize(
    "line",
    [
        "from thebes.model.limits import MOST",
        "from thebes.model.limits import (\n    MOST,\n)",
        "from thebes.model import limits",
        "    from thebes.model.limits import MOST",
    ],
)
def test_a_file_whose_constant_is_compiled_in_counts(tmp_path: Path, line: str) -> None:
    package = _package(
        tmp_path,
        {
            "sim/hot.py": f"{line}\n\n\n@compiled\ndef f(): ...\n",
            "model/limits.py": "from thebes.model.deeper import LEAST\nMOST = 16\n",
            "model/deeper.py": "LEAST = 1\n",
            "model/other.py": "MOST = 17\n",
        },
    )
    names = {path.relative_to(package).as_posix() for path in compiled_sources(package)}
    assert names == {"sim/hot.py", "model/limits.py", "model/deeper.py"}


def test_all_that_we_compile_lies_in_the_cache_of_its_version() -> None:
    """Numba's own cache lies beside the source, outlives an upgrade, and fails on a class that was renamed."""
    package = Path(thebes.__file__).parent
    own = [path for path in package.rglob("*.py") if "njit" in path.read_text(encoding="utf-8")]
    assert own == [package / "model" / "compiled.py"]


def test_of_our_own_package_all_compiled_files_count() -> None:
    found = {path.relative_to(PACKAGE).as_posix() for path in compiled_sources(PACKAGE)}
    holders = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(line.startswith(("@compiled", "@inner", "@maker", "@inlined")) for line in path.read_text().splitlines())
    }
    assert holders <= found
    assert "policy/dally/tuner.py" in found
    assert not any(name.startswith(("cli/", "api/", "store/", "live/", "node/", "engine/")) for name in found)


# --- who may make arrays ----------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: NDArray[np.int64]
    count: int


def _array() -> NDArray[np.int64]: ...
def _in_tuple() -> tuple[int, NDArray[np.float64]]: ...
def _in_named_tuple() -> Pair: ...
def _number() -> tuple[int, float]: ...


@pytest.mark.parametrize("function", [_array, _in_tuple, _in_named_tuple])
def test_a_function_that_works_in_place_returns_no_array(function: Callable[[], Any]) -> None:
    """What it returned would be freed while somebody still looks at it."""
    assert returns_arrays(function)
    for decorator in (compiled, inner):
        with pytest.raises(TypeError, match=rf"{function.__name__} returns arrays: decorate it with @maker"):
            decorator(function)


def test_a_function_that_returns_numbers_may_work_in_place() -> None:
    assert not returns_arrays(_number)


def _compiled_functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for source in compiled_sources(PACKAGE):
        name = ".".join(("thebes", *source.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for function in vars(importlib.import_module(name)).values():
            if isinstance(function, Dispatcher):
                found[f"{function.py_func.__module__}.{function.py_func.__name__}"] = function
    return found


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing is compiled")
def test_whoever_works_in_place_is_handed_no_new_array() -> None:
    """Nobody would free it. (A function that is inlined follows its caller's ways.)"""
    functions = _compiled_functions()
    assert len(functions) > 200
    for name, function in functions.items():
        if function.targetoptions.get("_nrt", True):
            continue
        code, names = function.py_func.__code__, function.py_func.__globals__
        modules = [names[used] for used in code.co_names if isinstance(names.get(used), ModuleType)]
        called = [getattr(place, used, None) for used in code.co_names for place in modules]
        called += [names.get(used) for used in code.co_names]
        hand_out = [
            other.py_func.__name__
            for other in called
            if isinstance(other, Dispatcher)
            and returns_arrays(other.py_func)
            and other.targetoptions.get("inline") != "always"
        ]
        assert not hand_out, f"{name} works in place, but {hand_out} return arrays: decorate it with @maker"


@inner
def _added(x: int, y: int) -> int:
    return x + y


@compiled
def _with_constants(x: int) -> int:
    return _added(x, 1) + _added(x, -1) + _added(x, x) + _added(y=2, x=x)


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing is compiled")
def test_a_function_is_compiled_once_whatever_constants_its_callers_write_down() -> None:
    assert _with_constants(5) == 6 + 4 + 10 + 7
    _with_constants.recompile()  # type: ignore[attr-defined] - else it may come from the cache, without what it calls
    assert len(_added.overloads) == 1  # type: ignore[attr-defined]
