"""The command line as a person meets it: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from thebes.cli import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def thebes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    def run(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["thebes", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
