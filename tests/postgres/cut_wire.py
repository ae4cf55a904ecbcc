"""A line to the server that can be cut at an exact moment."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Wire:
    """Stands between a client and the server, and can cut the line around a COMMIT."""

    def __init__(self, port: int) -> None:
        self.server_port = port
        self.cut_next: str | None = None  # "before" or "after" the server has heard of it
        self.cuts = 0
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(("127.0.0.1", self.server_port))
                self._open += [near, far]
                state = {"cut": False}
                threading.Thread(target=self._up, args=(near, far, state), daemon=True).start()
                threading.Thread(target=self._down, args=(near, far, state), daemon=True).start()

    def _up(self, near: socket.socket, far: socket.socket, state: dict[str, bool]) -> None:
        with suppress(OSError):
            while data := near.recv(65536):
                if b"COMMIT\0" in data and self.cut_next is not None:
                    when, self.cut_next = self.cut_next, None
                    self.cuts += 1
                    if when == "before":
                        break
                    state["cut"] = True
                far.sendall(data)
        _end(near, *(() if state["cut"] else (far,)))

    def _down(self, near: socket.socket, far: socket.socket, state: dict[str, bool]) -> None:
        with suppress(OSError):
            while data := far.recv(65536):
                if state["cut"]:  # the server has done it, and nobody hears of it
                    break
                near.sendall(data)
        _end(near, far)

    def close(self) -> None:
        _end(self._door, *self._open)


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
