"""How agents and steps prove to the controller that they are its own, and how every line between them is sealed.

Both ends know one secret key. Each proves it by a keyed hash over two fresh numbers; every line after that carries one
over its direction, its number and its text, so that nothing can be added, changed, left out or played again. The text
is not hidden: it travels like the traffic of Slurm or Ray itself. Imports nothing heavy: `step.py` uses it, too.
"""

from __future__ import annotations

try:
    from _sha256 import sha256  # Python 3.11
except ImportError:
    from _sha2 import sha256  # type: ignore[import-not-found, no-redef]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 1
NONCE_BYTES = 16
_BLOCK = 64
_MAC_HEX = 32  # 128 bits are enough for a line
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))


class BadSeal(ValueError):  # noqa: N818 - reads as what it says
    """A line that does not come from somebody who knows the key, or not in its turn."""


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


class Handshake:
    """The three lines at the beginning, as both ends compute them. `door` is the controller's end.

    caller: {"thebes", "who", "nonce"}   door: {"nonce", "epoch", "proof"}   caller: {"proof"}
    """

    def __init__(self, key: bytes, who: str, caller_nonce: str, door_nonce: str, epoch: int) -> None:
        words = (who.encode(), caller_nonce.encode(), door_nonce.encode(), b"%d" % epoch)
        self.door_proof = mac(key, b"door", *words)
        self.caller_proof = mac(key, b"caller", *words)
        self.session = bytes.fromhex(mac(key, b"session", *words))


class Seal:
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


def check_door(key: bytes, who: str, caller_nonce: str, answer: dict[str, Any]) -> Handshake:
    """What the caller does with the door's answer; BadSeal if the door does not know the key."""
    shaken = Handshake(key, who, caller_nonce, str(answer.get("nonce")), int(answer.get("epoch") or 0))
    if not same(str(answer.get("proof")), shaken.door_proof):
        raise BadSeal("this is not our controller: it does not know our key")
    return shaken
