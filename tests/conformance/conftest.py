"""Each test of this folder runs in every world: here, on Slurm (`make test-slurm`) and on Ray (`make test-ray`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.engine_worlds import WORLDS, World, world_of


@pytest.fixture(
    scope="module",
    params=[kind if kind == "local" else pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in WORLDS],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world_of(request.param, tmp_path_factory.mktemp("world")) as found:
        yield found
