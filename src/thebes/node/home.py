"""The agent's end of the line home, where the controller is on another machine: it calls, and calls again.

Several controllers may be known; whichever opens the door and knows the key is talked to, unless it is an older leader
than one that was heard of before.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from thebes.engine import wire
from thebes.engine.home import HANDSHAKE_S, SealedReader, SealedWriter, parse_address
from thebes.node.seal import NONCE_BYTES, VERSION, BadSeal, Seal, check_door

CONNECT_S = 3.0
AGAIN_FIRST_S, AGAIN_LAST_S = 0.1, 1.0
# He says something every five seconds. One that is silent for longer is frozen or cut off, and another may lead by now.
SILENT_S = 12.0

Talk = Callable[[Any, Any], Awaitable[None]]


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
    """Keeps one conversation with whoever leads."""

    def __init__(
        self, who: str, homes: Sequence[str], key: bytes, talk: Talk, heard: Callable[[], None] = lambda: None
    ) -> None:
        self.who, self.homes, self._key = who, list(homes), key
        self._talk, self._heard = talk, heard
        self.epoch = 0  # the newest leader heard of
        self.address = ""  # ours, as seen on the way to him
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

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Seal:
        nonce = secrets.token_hex(NONCE_BYTES)
        writer.write(wire.encode({"thebes": VERSION, "who": self.who, "nonce": nonce}))
        line = await reader.readline()
        if not line:
            raise OSError("the door was shut")
        answer = json.loads(line)
        shaken = check_door(self._key, self.who, nonce, answer)
        if answer["epoch"] < self.epoch:
            raise BadSeal(f"a leader of the past: epoch {answer['epoch']}, we have heard of {self.epoch}")
        self.epoch = answer["epoch"]
        writer.write(wire.encode({"proof": shaken.caller_proof}))
        return Seal(shaken.session, is_door=False)
