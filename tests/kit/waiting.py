"""How tests wait: for a condition that is written down, and with a patience that is the same everywhere.

Patience costs nothing where things go as they should. It is long because machines of CI are slow and stall; a test
whose point is that something happens *soon* measures that itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 120.0
IMPORT_PATIENCE_S = 600.0  # PyTorch on a busy machine takes minutes to import
EVERY_S = 0.01  # between two looks


def until(
    look: Callable[[], T],
    what: str = "what was waited for",
    patience_s: float = PATIENCE_S,
    *,
    every_s: float = EVERY_S,
    told: Callable[[], object] = str,
) -> T:
    """The first answer that is not empty. `told` adds to the complaint what is known by then."""
    deadline_s = time.monotonic() + patience_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, _complaint(what, patience_s, told)
        time.sleep(every_s)
    return found


async def until_async(
    look: Callable[[], T | Awaitable[T]],
    what: str = "what was waited for",
    patience_s: float = PATIENCE_S,
    *,
    every_s: float = EVERY_S,
    told: Callable[[], object] = str,
) -> T:
    """The same beside other tasks of the loop; `look` may itself have to be awaited."""
    deadline_s = time.monotonic() + patience_s
    while not (found := await _answer(look)):
        assert time.monotonic() < deadline_s, _complaint(what, patience_s, told)
        await asyncio.sleep(every_s)
    return found


async def _answer(look: Callable[[], T | Awaitable[T]]) -> T:
    found = look()
    return await found if isinstance(found, Awaitable) else found


def _complaint(what: str, patience_s: float, told: Callable[[], object]) -> str:
    return f"not within {patience_s:g} s: {what}; {told()}".rstrip("; ")
