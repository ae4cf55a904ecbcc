"""The door at which agents and steps on other machines call: one TCP port of the controller.

Only a caller that knows the cluster's key is let in (`protocol/seal.py`). The caller is handed on by name; what is
said then is the business of `NodeLink`. Callers are told the epoch of this controller, and hang up on one older than
they have seen.
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
from pathlib import Path

from thebes.node.ports import hold_port
from thebes.protocol import wire
from thebes.protocol.seal import HANDSHAKE_S, NONCE_BYTES, VERSION, BadSeal, LineSeal, Proofs, same
from thebes.protocol.sealed import SealedReader, SealedWriter

LOG = logging.getLogger(__name__)
MAX_STRANGERS = 1024  # conversations that are not over the threshold yet
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


Called = Callable[[str, SealedReader, SealedWriter], Awaitable[None]]


class HomeDoor:
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
            pass  # we close, or the caller has called again
        finally:
            self._talking.discard(task)
            with suppress(Exception):
                writer.close()

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, LineSeal]:
        said = json.loads(await reader.readline())
        if said.get("thebes") != VERSION:
            raise BadSeal("not one of ours, or of another version")
        who, nonce = str(said["who"]), secrets.token_hex(NONCE_BYTES)
        proofs = Proofs(self._key, who, str(said["nonce"]), nonce, self.epoch)
        writer.write(wire.encode({"nonce": nonce, "epoch": self.epoch, "proof": proofs.door_proof}))
        answer = json.loads(await reader.readline())
        if not same(str(answer.get("proof")), proofs.caller_proof):
            raise BadSeal(f"{who} does not know our key")
        return who, LineSeal(proofs.session, is_door=True)


def free_port(range_file: Path = EPHEMERAL_RANGE) -> int:
    """A port that stays ours while nobody listens on it, between the choice and the start and between two controllers:
    not one of those that Linux hands out to connections, if there are others.
    """
    if above := _above_those_of_linux(range_file):
        with suppress(OSError):
            port, probe = hold_port(among=above)
            probe.close()
            return port
    with socket.socket() as probe:  # the same one for every address family
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _above_those_of_linux(range_file: Path) -> range:
    """They are nobody's by custom. There may be none."""
    try:
        return range(int(range_file.read_text().split()[1]) + 1, 65_536)
    except (OSError, ValueError, IndexError):
        return range(0)  # not Linux, or hidden from us
