"""The agent's end of the line home, where the controller is on another machine: it calls, and calls again.

Several controllers may be known; whichever opens the door and knows the key is talked to, unless it is an older leader
than one that was heard of before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from thebes.protocol import wire
from thebes.protocol.seal import (
    AGAIN_FIRST_S,
    AGAIN_LAST_S,
    CONNECT_S,
    HANDSHAKE_S,
    SILENT_S,
    Caller,
    LineSeal,
    parse_address,
)
from thebes.protocol.sealed import SealedReader, SealedWriter

Conversation = Callable[[Any, Any], Awaitable[None]]


class _Impatient:
    """Hears the end of the line when nothing was said for too long."""

    def __init__(self, reader: SealedReader) -> None:
        self._reader = reader

    async def readline(self) -> bytes:
        try:
            async with asyncio.timeout(SILENT_S):
                return await self._reader.readline()
        except TimeoutError:
            return b""


class CallHome:
    """One conversation with the controller that leads, kept up through breaks."""

    def __init__(
        self, who: str, homes: Sequence[str], key: bytes, talk: Conversation, heard: Callable[[], None] = lambda: None
    ) -> None:
        self.caller = Caller(who, key)
        self.homes = list(homes)
        self._talk, self._heard = talk, heard
        self.address = ""  # ours, as seen on the way to the controller
        self.trouble = ""

    async def keep_up(self) -> None:
        """For ever."""
        pause_s = AGAIN_FIRST_S
        while True:
            for home in list(self.homes):
                try:
                    await self._call(home)
                    pause_s = AGAIN_FIRST_S  # we have talked
                except (OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
                    self.trouble = f"{home}: {error}"
            await asyncio.sleep(pause_s)
            pause_s = min(AGAIN_LAST_S, 2 * pause_s)

    async def _call(self, home: str) -> None:
        host, port = parse_address(home)
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=wire.LINE_LIMIT_BYTES)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                seal = await self._shake_hands(reader, writer)
            self.address = str(writer.get_extra_info("sockname")[0])
            self._heard()
            await self._talk(_Impatient(SealedReader(reader, seal, self._heard)), SealedWriter(writer, seal))
        finally:
            with suppress(OSError):
                writer.close()

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> LineSeal:
        writer.write(wire.encode(self.caller.hello()))
        line = await reader.readline()
        if not line:
            raise OSError("the door was shut")
        answer, seal = self.caller.answer(json.loads(line))
        writer.write(wire.encode(answer))
        return seal
