"""The door at which agents and steps on other machines call: one TCP port of the controller.

Only who knows the cluster's key is let in (`node/seal.py`). Who called is handed on by name; what is said then is the
business of `Link`. Callers are told the epoch of this controller, and hang up on one older than they have seen.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from thebes.engine import wire
from thebes.node.seal import NONCE_BYTES, VERSION, BadSeal, Handshake, Seal, same

LOG = logging.getLogger(__name__)
HANDSHAKE_S = 10.0
MAX_STRANGERS = 1024  # conversations that are not over the threshold yet


class SealedReader:
    """Lines as they were before they were sealed."""

    def __init__(self, reader: asyncio.StreamReader, seal: Seal, heard: Callable[[], None] | None = None) -> None:
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
    """Takes whole lines."""

    def __init__(self, writer: asyncio.StreamWriter, seal: Seal) -> None:
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
        """The address he called from."""
        found = self._writer.get_extra_info("peername")
        return str(found[0]) if found else ""


Called = Callable[[str, SealedReader, SealedWriter], Awaitable[None]]


class Home:
    """The door. `called` talks with one caller until one of them hangs up."""

    def __init__(self, key: bytes, epoch: int, called: Called) -> None:
        self._key, self.epoch, self._called = key, epoch, called
        self._server: asyncio.Server | None = None
        self._strangers = 0
        self._talking: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self, host: str, port: int) -> None:
        """OSError when the port is taken."""
        while self._server is None:
            self.port = port or free_port()
            try:
                self._server = await asyncio.start_server(
                    self._meet, host or None, self.port, limit=wire.LINE_LIMIT_BYTES
                )
            except OSError as error:
                if port or error.errno != errno.EADDRINUSE:  # else somebody took it in between: another one
                    raise

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._talking):
            task.cancel()
        await asyncio.gather(*self._talking, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._strangers >= MAX_STRANGERS:
            writer.close()
            return
        self._talking.add(task)
        try:
            self._strangers += 1
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    who, seal = await self._shake_hands(reader, writer)
            finally:
                self._strangers -= 1
            await self._called(who, SealedReader(reader, seal), SealedWriter(writer, seal))
        except (OSError, TimeoutError, ValueError, KeyError, TypeError, asyncio.IncompleteReadError) as error:
            LOG.info("a caller was turned away: %r", error)
        except asyncio.CancelledError:
            pass  # we close, or he has called again
        finally:
            self._talking.discard(task)
            with suppress(Exception):
                writer.close()

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, Seal]:
        said = json.loads(await reader.readline())
        if said.get("thebes") != VERSION:
            raise BadSeal("not one of ours, or of another version")
        who, nonce = str(said["who"]), secrets.token_hex(NONCE_BYTES)
        shaken = Handshake(self._key, who, str(said["nonce"]), nonce, self.epoch)
        writer.write(wire.encode({"nonce": nonce, "epoch": self.epoch, "proof": shaken.door_proof}))
        answer = json.loads(await reader.readline())
        if not same(str(answer.get("proof")), shaken.caller_proof):
            raise BadSeal(f"{who} does not know our key")
        return who, Seal(shaken.session, is_door=True)


def free_port() -> int:
    """The same one for every address family."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT; a host with colons stands in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
