"""A test that fails must not leave its jobs running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attempts import STARTED


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
        process.communicate()
