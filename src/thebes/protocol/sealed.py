"""Lines that are sealed on the way: what the controller's door and its callers read from and write to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from thebes.protocol.seal import LineSeal


class SealedReader:
    """Lines as they were before they were sealed."""

    def __init__(self, reader: asyncio.StreamReader, seal: LineSeal, heard: Callable[[], None] | None = None) -> None:
        self._reader, self._seal, self._heard = reader, seal, heard

    async def readline(self) -> bytes:
        line = await self._reader.readline()
        if not line:
            return b""
        text = self._seal.unwrap(line)
        if self._heard is not None:
            self._heard()
        return text


class SealedWriter:
    """A writer of whole lines."""

    def __init__(self, writer: asyncio.StreamWriter, seal: LineSeal) -> None:
        self._writer, self._seal = writer, seal
        self.transport = writer.transport

    def write(self, data: bytes) -> None:
        self._writer.write(self._seal.wrap(data.rstrip(b"\n")))

    async def drain(self) -> None:
        await self._writer.drain()

    def is_closing(self) -> bool:
        return self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    @property
    def peer(self) -> str:
        """The address from which the caller has called."""
        found = self._writer.get_extra_info("peername")
        return str(found[0]) if found else ""
