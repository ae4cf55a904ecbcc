"""Slurm's `%` formats: %i, %.18i (right-aligned, 18 wide), %8j (left-aligned); and `-O name[:width],…`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thebes.cli.screen import clean
from thebes.cli.slurm.options import Stop

PIECE = re.compile(r"%(\.?)(\d*)([a-zA-Z])|%%|%")
WIDE = 20  # a column of -O that gives no width is this wide


@dataclass(frozen=True)
class Field:
    """A column: its heading, what it shows of an item, and whether it is cut to the width (times are not)."""

    heading: str
    show: Callable[[Any], str]
    cut: bool = True


@dataclass(frozen=True)
class Piece:
    """Plain text, or a field with its width (0 means as wide as the value)."""

    text: str = ""
    field: Field | None = None
    width: int = 0
    right: bool = False

    def put(self, item: Any, heading: bool) -> str:
        if self.field is None:
            return self.text
        words = clean(self.field.heading if heading else self.field.show(item))
        if self.width and (self.field.cut or heading):
            words = words[: self.width]
        return words.rjust(self.width) if self.right else words.ljust(self.width)


def parse_format(command: str, text: str, fields: Mapping[str, Field]) -> list[Piece]:
    """The pieces of a % format; an unknown field ends the command."""
    pieces: list[Piece] = []
    end = 0
    for found in PIECE.finditer(text):
        pieces.append(Piece(text[end : found.start()]))
        end = found.end()
        if found[0] == "%%":
            pieces.append(Piece("%"))
            continue
        field = fields.get(found[3] or "")
        if field is None:
            near = text[found.start() : found.start() + 4]
            raise Stop(f"{command}: error: --format: '{near}' is not a field that Thebes knows. Nothing was done.")
        pieces.append(Piece("", field, int(found[2] or 0), found[1] == "."))
    pieces.append(Piece(text[end:]))
    return [piece for piece in pieces if piece.field is not None or piece.text]


def parse_long_format(command: str, text: str, fields: Mapping[str, Field]) -> list[Piece]:
    """The pieces of -O, which lists names between commas, each with :width or :.width."""
    pieces: list[Piece] = []
    for word in text.split(","):
        name, _, size = word.partition(":")
        found = re.fullmatch(r"(\.?)(\d*)", size)
        field = fields.get(name.strip().lower().replace("-", ""))
        if field is None or found is None:
            raise Stop(f"{command}: error: --Format: '{word}' is not a field that Thebes knows. Nothing was done.")
        pieces.append(Piece("", field, int(found[2] or WIDE), found[1] == "."))
    return pieces


def lines_of(pieces: Sequence[Piece], items: Sequence[Any], *, heading: bool) -> list[str]:
    """A heading, if it is wanted, and a line for each item."""
    rows = [(None, True)] if heading else []
    rows += [(item, False) for item in items]
    return ["".join(piece.put(item, first) for piece in pieces) for item, first in rows]


def clock(time_s: float | None, unknown: str = "N/A") -> str:
    """An instant in local time, such as 2026-11-15T22:16:32."""
    return unknown if time_s is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time_s))


def span(seconds: float | None) -> str:
    """A run time as squeue writes it: [days-][hours:]minutes:seconds; None is UNLIMITED."""
    if seconds is None:
        return "UNLIMITED"
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86_400, whole % 86_400 // 3600, whole % 3600 // 60
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{whole % 60:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def long_span(seconds: float | None) -> str:
    """A duration as scontrol writes it: hours, minutes and seconds always have two digits."""
    if seconds is None:
        return "UNLIMITED"
    whole = max(0, int(seconds))
    days = f"{whole // 86_400}-" if whole >= 86_400 else ""
    return f"{days}{whole % 86_400 // 3600:02}:{whole % 3600 // 60:02}:{whole % 60:02}"
