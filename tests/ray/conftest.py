"""A real Ray cluster per module, and engines on it with short leases."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent, HERE.parent / "conformance", HERE.parent / "node"):
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="module", autouse=True)
def ray_is_here() -> None:
    from components import require

    require("ray")


@pytest.fixture(scope="module")
def ray_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from ray_worlds import RayWorld

    with RayWorld(tmp_path_factory.mktemp("shared")) as world:
        yield world
