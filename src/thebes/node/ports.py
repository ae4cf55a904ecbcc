"""Ports that nobody listens on, for ranks and for the controller. Nothing heavy is loaded here: steps use it, too."""

from __future__ import annotations

import _socket
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MASTER_PORTS = range(20_000, 32_000)  # below what Linux hands out by itself


def hold_port(
    taken: Iterable[int] = (), *, among: range = MASTER_PORTS, tries: int = 100
) -> tuple[int, _socket.socket]:
    """A port by lot, and a socket that holds it until it is closed. OSError if there is none.

    Ports that were given to other jobs of this node are `taken`: those jobs may not listen on them yet.
    """
    given = set(taken)
    for _ in range(tries):
        port = among[int.from_bytes(os.urandom(4), "big") % len(among)]
        if port in given:
            continue
        probe = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            probe.bind(("", port))
        except OSError:
            probe.close()
            continue
        return port, probe
    raise OSError(f"no free port between {among.start} and {among.stop} for MASTER_PORT")
