"""What the tests of API and client share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_world import World, running_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One running server for all tests of a file."""
    with running_world(tmp_path_factory.mktemp("world") / "instance") as started:
        yield started
