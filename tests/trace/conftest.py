"""A short way to write a small file and read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from thebes.model.errors import UserError
from thebes.model.trace import Trace
from thebes.trace import read


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Trace]:
    """Write text (or bytes) to a file and read it as a trace."""

    def write_and_read(content: str | bytes, name: str = "trace.csv", **options: str) -> Trace:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read(path, **options)

    return write_and_read


@pytest.fixture
def complaint(load: Callable[..., Trace], tmp_path: Path) -> Callable[..., str]:
    """The message for a bad file, without the folder it lies in."""

    def message(content: str | bytes, name: str = "trace.csv", **options: str) -> str:
        with pytest.raises(UserError) as caught:
            load(content, name, **options)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return message
