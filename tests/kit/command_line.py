"""Runs a command of Thebes in this process, as a person would type it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from thebes.cli import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def run(args: Sequence[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ran:
    monkeypatch.setattr(sys, "argv", ["thebes", *map(str, args)])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return Ran(code, captured.out, captured.err)
