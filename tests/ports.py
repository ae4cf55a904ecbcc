"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_random = random.SystemRandom()  # two workers, or Hypothesis, may have seeded the other one alike


def free_port() -> int:
    """Above those that Linux hands out, and not among those of Slurm, Ray and MASTER_PORT, which lie below: nobody else
    gets it before we use it, or while the one who used it is away.
    """
    while True:
        port = _random.randrange(61_000, 65_536)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
