"""The harness of the node tests, for the engine: agents of two nodes on one machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.node_cluster import agents, make_folder


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = make_folder(tmp_path_factory.mktemp("two"), {"n0": 4, "n1": 4})
    with agents(folder, "n0", "n1"):
        yield folder
