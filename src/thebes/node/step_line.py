"""The step's end of the line home: it calls one controller after another until one opens the door and knows the key.

It is single-threaded and never waits: the step polls, says what is ready, and is told when to come back.
"""

from __future__ import annotations

import _socket
import errno
import os
import select

from thebes.protocol.plain_json import dump, parse, read_object
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Message = dict[str, Any]

RESOLVE_AGAIN_S = 30.0  # a name is asked for again after so long without success; asking may block
LINE_BYTES = 16 << 20


class Line:
    """It calls one controller after another until one opens the door and proves that it knows the key."""

    def __init__(
        self, who: str, key: bytes, homes: list[str], homes_file: str, heard: Callable[[Message], None]
    ) -> None:
        self.caller = Caller(who, key)
        self.homes, self.homes_file, self.heard = homes, homes_file, heard
        self.state = "away"  # connecting, shaking, talking
        self.socket: Any = None
        self.seal: LineSeal | None = None
        self.rest = b""
        self.unsent = b""
        self.turn = 0
        self.pause_s = AGAIN_FIRST_S
        self.dial_at = 0.0
        self.give_up_at = 0.0
        self.trouble = ""
        self.ever = False  # whether a controller has ever opened
        self.known: dict[str, tuple[Any, ...]] = {}  # address of each home, once found
        self.resolve_at: dict[str, float] = {}

    def events(self) -> int:
        wants_out = self.state == "connecting" or bool(self.unsent)
        return select.POLLIN | (select.POLLOUT if wants_out else 0)

    def next_s(self) -> float | None:
        return self.dial_at if self.state == "away" else self.give_up_at

    def go_on(self, now: float, ready: int) -> None:
        """Whatever can be done now without waiting."""
        try:
            if self.state == "away":
                if now >= self.dial_at:
                    self._dial(now)
                return
            if now >= self.give_up_at and not ready:
                # A controller whose machine is gone does not even hang up.
                raise OSError(errno.ETIMEDOUT, "no answer")
            if self.state == "connecting":
                if ready:
                    self._connected(now)
                return
            if ready & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read(now)
            self._send()
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.hang_up(now, str(error) or type(error).__name__)

    def _dial(self, now: float) -> None:
        told = read_object(self.homes_file).get("homes")
        if isinstance(told, list) and told:
            self.homes = [str(one) for one in told]
        if not self.homes:
            self.dial_at = now + AGAIN_LAST_S
            return
        home = self.homes[self.turn % len(self.homes)]
        self.turn += 1
        family, address = self._resolve(home, now)
        self.socket = _socket.socket(family, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC)
        self.socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self.state, self.give_up_at = "connecting", now + CONNECT_S
        try:
            self.socket.connect(address)
        except BlockingIOError:
            return
        self._connected(now)

    def _resolve(self, home: str, now: float) -> tuple[Any, ...]:
        known = self.known.get(home)
        if known is not None and now < self.resolve_at[home]:
            return known
        if known is None and now < self.resolve_at.get(home, 0.0):
            raise OSError(f"{home} is not known")
        self.resolve_at[home] = now + RESOLVE_AGAIN_S
        try:
            found = _socket.getaddrinfo(*parse_address(home), 0, _socket.SOCK_STREAM)[0]
        except OSError:
            if known is None:
                raise
            return known
        self.known[home] = (found[0], found[4])
        return self.known[home]

    def _connected(self, now: float) -> None:
        trouble = self.socket.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
        if trouble:
            raise OSError(trouble, os.strerror(trouble))
        self.state, self.give_up_at = "shaking", now + HANDSHAKE_S
        self.unsent = dump(self.caller.hello()).encode() + b"\n"
        self._send()

    def _read(self, now: float) -> None:
        while True:
            try:
                piece = self.socket.recv(65536)
            except BlockingIOError:
                break
            if not piece:
                raise OSError("hung up")
            self.rest += piece
            if len(self.rest) > LINE_BYTES:
                raise ValueError("too long a line")
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            if self.state == "shaking":
                self._shake_hands(parse(line.decode()), now)
            elif self.state == "talking" and self.seal is not None:
                self.give_up_at = now + SILENT_S
                self.heard(parse(self.seal.unwrap(line).decode()))

    def _shake_hands(self, answer: Message, now: float) -> None:
        ours, self.seal = self.caller.answer(answer)
        self.unsent += dump(ours).encode() + b"\n"
        self.state, self.pause_s, self.give_up_at = "talking", AGAIN_FIRST_S, now + SILENT_S
        self.ever = True

    def say(self, message: Message) -> None:
        if self.state == "talking" and self.seal is not None:
            self.unsent += self.seal.wrap(dump(message).encode())

    def _send(self) -> None:
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            if len(self.unsent) > LINE_BYTES:
                raise OSError("it does not listen") from None

    def hang_up(self, now: float, why: str) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket = self.seal = None
        if not self.ever and self.homes:  # the engine reads this when it has waited in vain
            told = f"{self.homes[(self.turn - 1) % len(self.homes)]}: {why}"
            if told != self.trouble:
                self.trouble = told
                os.write(2, (told + "\n").encode())
        self.state, self.rest, self.unsent = "away", b"", b""
        # Every home is tried before there is a pause.
        last = self.turn % max(1, len(self.homes)) == 0
        self.dial_at = now + (self.pause_s if last else 0.0)
        self.pause_s = min(AGAIN_LAST_S, 2 * self.pause_s) if last else self.pause_s
