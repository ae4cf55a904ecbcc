"""What `thebes engine check` has found out about a site: one finding per thing looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")


@dataclass(frozen=True)
class SiteFinding:
    """ok: works as it should; warning: works, but something is lost; problem: Thebes cannot work here like this."""

    level: Level
    what: str  # the thing looked at, in a word or two: "exact GPU ids"
    detail: str  # what is the case, and what is lost by it
    hint: str = ""  # what to do about it


def worst(findings: Iterable[SiteFinding]) -> Level:
    """The gravest level among them."""
    seen = {one.level for one in findings}
    found: list[Level] = [level for level in LEVELS if level in seen]
    return found[-1] if found else "ok"
