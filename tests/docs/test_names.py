"""One name, one meaning: no two classes or types of the package share a name."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import thebes

PACKAGE = Path(thebes.__file__).parent
# The client says the server's own names of what both send: `tests/client/test_client_types.py` compares them.
MIRROR = "client_types.py"
# One class for each framework, under the name that its users look for.
BY_FRAMEWORK = {"PreemptionCallback": {"job/lightning.py", "job/transformers.py"}}


def is_type_name(name: str) -> bool:
    """`Ints` or `_Entry`, not `MASK` and not `log`."""
    return name.lstrip("_")[:1].isupper() and not name.isupper()


def types_in(text: str) -> Iterator[str]:
    """The classes and the aliases of types at the top of a module, private ones without their underscore."""
    for statement in ast.parse(text).body:
        match statement:
            case ast.ClassDef(name=name):
                yield name.lstrip("_")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if is_type_name(name):
                    yield name.lstrip("_")
            case _:
                pass


def test_types_are_found() -> None:
    text = "class Job: ...\nclass _Row: ...\nKey = tuple[str, int]\nAge: TypeAlias = float\nMASK = '*'\nlog = None\n"
    assert list(types_in(text)) == ["Job", "Row", "Key", "Age"]


def test_no_two_types_share_a_name() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name in types_in(path.read_text()):
            places[name].add(str(path.relative_to(PACKAGE)))
    assert len(places) > 500
    shared = {name: found - {MIRROR} for name, found in places.items() if len(found - {MIRROR}) > 1}
    assert shared == BY_FRAMEWORK, "give each meaning a name of its own"


SCRIPTS = [
    path for folder in ("examples", "benchmarks") for path in sorted((PACKAGE.parents[1] / folder).rglob("*.py"))
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_a_script_uses_of_ours_exists(script: Path) -> None:
    """Some scripts need a GPU or an hour, so no test runs them whole: a name that was changed is found here."""
    tree, modules = ast.parse(script.read_text(encoding="utf-8")), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "thebes":
            for alias in node.names:
                found = named(str(node.module), alias.name)
                if isinstance(found, ModuleType):
                    modules[alias.asname or alias.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert hasattr(modules[node.value.id], node.attr), f"line {node.lineno}: {node.value.id}.{node.attr}"


def named(module: str, name: str) -> object:
    whole = importlib.import_module(module)
    return getattr(whole, name) if hasattr(whole, name) else importlib.import_module(f"{module}.{name}")
