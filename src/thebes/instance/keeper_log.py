"""What the keeper has logged about parts that died, as errors that people can do something about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thebes.model.errors import UserError
from thebes.node.keeper import MISTAKES
from thebes.protocol.instance import Instance

if TYPE_CHECKING:
    pass

HOPELESS_DEATHS = 3


class LogMark:
    """A place in the keeper's log, and what was logged after it about parts that died."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0

    def entries(self) -> Iterator[dict[str, Any]]:
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                with suppress(ValueError):
                    yield json.loads(line)

    def deaths(self) -> Iterator[dict[str, Any]]:
        return (entry for entry in self.entries() if entry.get("event") == "died")

    def stopped(self) -> bool:
        """Whether the keeper was told to stop."""
        return any(entry.get("event") == "stopping" for entry in self.entries())

    def failure(self) -> UserError | None:
        """The reason why waiting longer makes no sense; None if there is none."""
        count: dict[str, int] = {}
        for death in self.deaths():
            part = death["part"]
            count[part] = count.get(part, 0) + 1
            if death["code"] in MISTAKES or count[part] >= HOPELESS_DEATHS:
                return _as_error(part, death, self.path.parent)
        return None

    def last_words(self) -> str:
        words = [f"{death['part']}: {death['said'].splitlines()[-1]}" for death in self.deaths() if death["said"]]
        return words[-1] if words else ""


def _as_error(part: str, death: dict[str, Any], log: Path) -> UserError:
    """The error that a part printed last."""
    said = death["said"]
    lines = [line for line in said.splitlines() if line.strip()]
    told = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if told:
        hint = lines[told[-1] + 1] if told[-1] + 1 < len(lines) else ""
        return UserError(lines[told[-1]].removeprefix("error: "), hint=hint.strip().removeprefix("→ "))
    last = lines[-1] if lines else f"exit code {death['code']}"
    return UserError(f"{part} does not start: {last}", hint=f"see {log / part}.stderr")


def last_said(instance: Instance, part: str) -> str:
    with suppress(OSError):
        return (instance.log / f"{part}.stderr").read_text(errors="replace").strip().removeprefix("error: ")
    return ""
