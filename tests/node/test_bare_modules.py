"""The scripts beside every job: they stay small because of what they do not load, and they run without the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from thebes.node import bare

HEAVY = ("re", "json", "signal", "subprocess", "socket", "pathlib", "contextlib", "functools", "dataclasses", "typing")


def imports(path: Path) -> set[str]:
    """Modules of ours that a file names, also where only a type checker looks."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("thebes"):
            found.add(str(node.module))
    return found


@pytest.mark.parametrize("files", [bare.SUPERVISOR_FILES, bare.STEP_FILES], ids=["supervisor", "step"])
def test_what_is_installed_is_all_that_is_needed_and_all_of_it_is_small(tmp_path: Path, files: tuple[str, ...]) -> None:
    script = bare.install(files, tmp_path)
    root, module = bare.installed_in(script), "thebes." + files[0].replace("/", ".")
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & set(HEAVY)
    ours = {"thebes." + name.replace("/", ".") for name in files}
    assert {name for name in loaded if name.count(".") == 2 and name.startswith("thebes.")} == ours


@pytest.mark.parametrize("name", bare.STEP_FILES)
def test_a_bare_module_names_only_bare_modules(name: str) -> None:
    allowed = {"thebes." + other.replace("/", ".") for other in bare.STEP_FILES}
    assert imports(bare.PACKAGE / f"{name}.py") <= allowed


def test_a_version_is_installed_once_and_another_lies_beside_it(tmp_path: Path) -> None:
    first = bare.install(bare.SUPERVISOR_FILES, tmp_path)
    written_ns = first.stat().st_mtime_ns
    assert bare.install(bare.SUPERVISOR_FILES, tmp_path) == first
    assert first.stat().st_mtime_ns == written_ns
    assert bare.installed_in(bare.install(bare.STEP_FILES, tmp_path)) != bare.installed_in(first)
    assert sorted(path.name[:4] for path in tmp_path.iterdir()) == ["bin-", "bin-"]  # and no draft is left
