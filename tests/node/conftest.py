"""One agent with virtual GPUs for the tests that leave it as they found it; the others start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.node_cluster import agents, make_folder


@pytest.fixture(scope="session")
def shared_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = make_folder(tmp_path_factory.mktemp("cluster"), {"n0": 8})
    with agents(folder):
        yield folder


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "cluster", {"n0": 8, "n1": 8})
