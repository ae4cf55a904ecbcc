"""Interference: how fast a job runs beside others on its node, and on its very GPUs.

Two jobs on one GPU each keep a part of their speed; the parts may add up to more than 1, since one computes while the
other waits. Beside each other on a node they compete for PCIe, host memory and CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.parameters import parameter
from thebes.perf.models import Model


@dataclass(frozen=True)
class Interference:
    """What neighbours on a node or on a GPU cost."""

    name: ClassVar[str] = "interference"

    node_loss: float = parameter(0.0, "part of its speed that a job loses per neighbour on its node", low=0, high=0.99)
    pack_loss: float = parameter(0.05, "part of its speed that a job loses on a shared GPU, busy or not", low=0, high=1)

    def node_rates(self, models: list[Model | None]) -> NDArray[np.float64]:
        """[mine, neighbour's] -> the part of its speed that a job keeps beside one neighbour on its node."""
        return np.full((len(models), len(models)), 1.0 - self.node_loss)

    def gpu_rates(self, models: list[Model | None]) -> NDArray[np.float64]:
        """[mine, partner's] -> the part of its speed that a job keeps with one partner on its GPUs; 0: cannot be."""
        busy = np.array([1.0 if model is None else model.utilisation for model in models])
        return (1.0 - self.pack_loss) / np.maximum(1.0, busy[:, None] + busy[None, :])
