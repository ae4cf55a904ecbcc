"""How agents and steps prove to the controller that they are its own, and how every line between them is sealed.

Both ends know one secret key. Each proves it by a keyed hash over two fresh numbers; every line after that carries one
over its direction, its number and its text, so that nothing can be added, changed, left out or played again. The text
is not hidden: it travels like the traffic of Slurm or Ray itself. This module imports nothing heavy: steps use it, too
(see `node/bare.py`).
"""

from __future__ import annotations

import os

try:
    from _sha256 import sha256  # pyright: ignore[reportMissingImports] - Python 3.11
except ImportError:
    from _sha2 import sha256  # type: ignore[import-not-found, no-redef]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 1
NONCE_BYTES = 16
CONNECT_S = 3.0
HANDSHAKE_S = 10.0
# The controller says something every five seconds. One that is silent for longer is frozen, cut off or gone, and
# another may lead by now.
SILENT_S = 12.0
AGAIN_FIRST_S, AGAIN_LAST_S = 0.1, 1.0  # between two calls
_BLOCK = 64
_MAC_HEX = 32  # 128 bits are enough for a line
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))


class BadSeal(ValueError):  # noqa: N818 - reads as what it says
    """A line of a stranger that does not know the key, or a line that is not in its turn."""


def mac(key: bytes, *parts: bytes) -> str:
    """HMAC-SHA256 (RFC 2104) over the parts, each with its length in front, in hexadecimal."""
    if len(key) > _BLOCK:
        key = sha256(key).digest()
    key = key.ljust(_BLOCK, b"\0")
    inner = sha256(key.translate(_INNER))
    for part in parts:
        inner.update(b"%d:" % len(part))
        inner.update(part)
    return sha256(key.translate(_OUTER) + inner.digest()).hexdigest()


def same(one: str, other: str) -> bool:
    """Compare without telling by the time it takes where they differ."""
    if len(one) != len(other):
        return False
    different = 0
    for a, b in zip(one.encode(), other.encode(), strict=True):
        different |= a ^ b
    return different == 0


class Proofs:
    """The three lines at the beginning, as both ends compute them. `door` is the controller's end.

    caller: {"thebes", "who", "nonce"}   door: {"nonce", "epoch", "proof"}   caller: {"proof"}
    """

    def __init__(self, key: bytes, who: str, caller_nonce: str, door_nonce: str, epoch: int) -> None:
        words = (who.encode(), caller_nonce.encode(), door_nonce.encode(), b"%d" % epoch)
        self.door_proof = mac(key, b"door", *words)
        self.caller_proof = mac(key, b"caller", *words)
        self.session = bytes.fromhex(mac(key, b"session", *words))


class LineSeal:
    """One end of a sealed conversation: wraps what it says, unwraps what it hears, counts both."""

    def __init__(self, session: bytes, *, is_door: bool) -> None:
        self._session = session
        self._says, self._hears = (b"door", b"caller") if is_door else (b"caller", b"door")
        self._said = self._heard = 0

    def wrap(self, line: bytes) -> bytes:
        """A line (without its newline) as it travels (with one)."""
        found = mac(self._session, self._says, b"%d" % self._said, line)[:_MAC_HEX]
        self._said += 1
        return found.encode() + b" " + line + b"\n"

    def unwrap(self, line: bytes) -> bytes:
        text = line.rstrip(b"\n")
        told, space, body = text[:_MAC_HEX], text[_MAC_HEX : _MAC_HEX + 1], text[_MAC_HEX + 1 :]
        wanted = mac(self._session, self._hears, b"%d" % self._heard, body)[:_MAC_HEX]
        if space != b" " or not same(told.decode("latin-1"), wanted):
            raise BadSeal("a line with a wrong seal")
        self._heard += 1
        return body


def check_door(key: bytes, who: str, caller_nonce: str, answer: dict[str, Any]) -> Proofs:
    """What the caller does with the door's answer; BadSeal if the door does not know the key."""
    shaken = Proofs(key, who, caller_nonce, str(answer.get("nonce")), int(answer.get("epoch") or 0))
    if not same(str(answer.get("proof")), shaken.door_proof):
        raise BadSeal("this is not our controller: it does not know our key")
    return shaken


class Caller:
    """The caller's side of the handshake, without I/O. It remembers the newest leader that it has heard of."""

    def __init__(self, who: str, key: bytes) -> None:
        self.who, self._key = who, key
        self.epoch = 0
        self._nonce = ""

    def hello(self) -> dict[str, Any]:
        """The first line of a call."""
        self._nonce = os.urandom(NONCE_BYTES).hex()
        return {"thebes": VERSION, "who": self.who, "nonce": self._nonce}

    def answer(self, said: dict[str, Any]) -> tuple[dict[str, Any], LineSeal]:
        """Given the door's line: our next one, and the seal of all that follows. BadSeal if we must not talk to it."""
        proofs = check_door(self._key, self.who, self._nonce, said)
        if said["epoch"] < self.epoch:
            raise BadSeal(f"a leader of the past: epoch {said['epoch']}, we have heard of {self.epoch}")
        self.epoch = said["epoch"]
        return {"proof": proofs.caller_proof}, LineSeal(proofs.session, is_door=False)


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT; a host with colons stands in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
