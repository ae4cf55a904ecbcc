"""A store in a file, for what is particular to SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from thebes import store as db


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[db.Store]:
    with db.Store.open(tmp_path / "store.db") as opened:
        yield opened
