"""Service distributions are read from a file with the total GPU-seconds of past jobs, one per line under a header."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thebes.model.errors import UserError


def read_samples(path: Path | None) -> NDArray[np.float64]:
    """The samples in a file such as the Tiresias simulator's `yarn-gput1000.csv`; empty without a file."""
    if path is None:
        return np.zeros(0)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(
            f"{path}: cannot read samples: {error.strerror}", hint="give a text file of GPU-seconds, one per line"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file", hint="give a text file of GPU-seconds, one per line") from None
    values: list[float] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or (number == 1 and not _is_number(text)):  # the first line may be a header
            continue
        if not _is_number(text) or float(text) <= 0:
            raise UserError(
                f"{path}, line {number}: '{text}' is not a positive number", hint="one sample per line, in GPU-seconds"
            )
        values.append(float(text))
    if not values:
        raise UserError(f"{path}: no samples", hint="one sample per line, in GPU-seconds")
    return np.array(values)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
