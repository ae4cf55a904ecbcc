"""Each test of this folder runs in every world: here, on Slurm (`make test-slurm`) and on Ray (`make test-ray`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent, HERE.parent / "node", HERE.parent / "slurm", HERE.parent / "ray"):
    sys.path.insert(0, str(folder))

from worlds import WORLDS, World, world_of  # noqa: E402


@pytest.fixture(
    scope="module",
    params=[kind if kind == "local" else pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in WORLDS],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world_of(request.param, tmp_path_factory.mktemp("world")) as found:
        yield found
