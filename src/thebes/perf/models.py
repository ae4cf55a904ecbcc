"""What is trained: tensor tables of nine CNNs, from which skew and state size follow.

Skew is the share of the largest tensor, what Tiresias's profiler reads from message sizes (NSDI'19, section 3.4). The
tables are those of the authors' simulator (`data/tiresias/SOURCE.md`): tensors of about 1 MB and more.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

# Model classes of the `tiers` speeds.
BALANCED, SKEWED = 0, 1
# Between the most skewed of the ResNets and Inceptions (0.14) and the least skewed of VGG and AlexNet (0.61).
SKEWED_ABOVE = 0.3
# A checkpoint holds the weights and the optimiser's two moments.
STATE_PER_WEIGHT = 3
UNKNOWN_STATE_GIB = 1.0
UNKNOWN_MEMORY_GIB = 4.0
UNKNOWN_UTILISATION = 0.8


@dataclass(frozen=True)
class Model:
    name: str
    tensors_mib: tuple[float, ...]
    memory_gib: float = UNKNOWN_MEMORY_GIB  # peak, on each GPU
    utilisation: float = UNKNOWN_UTILISATION  # share of a GPU's time that it computes when alone

    @property
    def skew(self) -> float:
        return max(self.tensors_mib) / sum(self.tensors_mib)

    @property
    def state_gib(self) -> float:
        return STATE_PER_WEIGHT * sum(self.tensors_mib) / 1024

    @property
    def model_class(self) -> int:
        return SKEWED if self.skew > SKEWED_ABOVE else BALANCED


@cache
def catalogue() -> dict[str, Model]:
    text = (files("thebes") / "data" / "tiresias" / "tensors.csv").read_text(encoding="utf-8")
    return {
        row["model"]: Model(row["model"], tuple(float(size) for size in row["tensors_mib"].split()))
        for row in csv.DictReader(text.splitlines())
    }


def assign(count: int, seed: int) -> list[str]:
    """A model for each of `count` jobs, by seed: traces seldom say what was trained."""
    names = list(catalogue())
    chosen: NDArray[np.int64] = np.random.default_rng(seed).integers(len(names), size=count)
    return [names[i] for i in chosen]
