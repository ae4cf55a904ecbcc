"""A real Ray cluster per module, and engines on it with short leases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def ray_is_here() -> None:
    from kit.components import require

    require("ray")


@pytest.fixture(scope="module")
def ray_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from kit.ray_worlds import RayWorld

    with RayWorld(tmp_path_factory.mktemp("shared")) as world:
        yield world
