"""Arrays and bytes as the journal keeps them: compressed, in letters."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray

from thebes.model.arrays import Ints


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def packed_small(values: Ints) -> str:
    return packed(values.astype(np.int16).tobytes())


def unpacked_small(text: str) -> NDArray[np.int16]:
    return np.frombuffer(unpacked(text), dtype=np.int16)
