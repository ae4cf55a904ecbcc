"""The world of the LWF / Ada-SRSF paper (arXiv 2002.10105): four models profiled on V100 GPUs, all-reduce over 10 GbE.

An iteration computes for t_f + t_b on every worker; if the job spans nodes, one all-reduce of the whole model follows,
which takes b per MB whatever the number of nodes. Run times of a trace count as compute alone. It is only for
reproducing that paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.errors import UserError
from thebes.model.parameters import parameter
from thebes.perf.base import Gang, SpeedModel, Times
from thebes.perf.models import Model


@dataclass(frozen=True)
class HkbuProfile:
    """One model as the paper measured it, at one batch size."""

    size_mb: float  # what one all-reduce moves
    forward_ms: float
    backward_ms: float
    memory_mb: float
    tensors_mb: tuple[float, ...]  # the largest tensors, then the sum of all others

    @property
    def compute_s(self) -> float:
        return (self.forward_ms + self.backward_ms) / 1000.0


# The batch is 16, for the LSTM 64. The sizes of the largest tensors follow from the architectures.
PROFILES: Mapping[str, HkbuProfile] = MappingProxyType(
    {
        "vgg16": HkbuProfile(526.4, 36.0, 54.0, 4527.0, (392.0, 134.4)),
        "resnet50": HkbuProfile(99.2, 25.0, 37.0, 3213.0, (9.0, 90.2)),
        "inception-v3": HkbuProfile(103.0, 35.0, 52.0, 3291.0, (8.0, 95.0)),
        "lstm-ptb": HkbuProfile(251.8, 32.0, 47.0, 2751.0, (68.7, 68.7, 57.2, 57.2)),
    }
)
_MODELS: Mapping[str, Model] = MappingProxyType(
    {name: Model(name, profile.tensors_mb, memory_gib=profile.memory_mb / 1024.0) for name, profile in PROFILES.items()}
)


@dataclass(frozen=True)
class Hkbu(SpeedModel):
    """VGG16, ResNet-50, Inception-v3 and LSTM-PTB as in the Ada-SRSF paper: compute, then one all-reduce per iteration.

    Run times of the trace are compute alone; a gang that spans nodes adds b times the model's size per iteration.
    """

    name: ClassVar[str] = "hkbu"
    relative_to_compute: ClassVar[bool] = True

    b_ms_per_mb: float = parameter(0.856, "all-reduce time per MB without contention; 0.856 is 10 GbE, 7.8125 1 GbE")

    def __post_init__(self) -> None:
        if not self.b_ms_per_mb > 0 or not np.isfinite(self.b_ms_per_mb):
            raise UserError(
                f"perf hkbu: b_ms_per_mb={self.b_ms_per_mb:g} is no bandwidth", hint="10 GbE has 0.856, 1 GbE 7.8125"
            )

    def models(self) -> Mapping[str, Model]:
        return _MODELS

    def knows(self, model: str) -> bool:
        return model in PROFILES

    def assign(self, gpus: NDArray[np.int64], seed: int) -> list[str]:
        names = list(PROFILES)
        return [names[i] for i in np.random.default_rng(seed).integers(len(names), size=len(gpus))]

    def times(self, gang: Gang) -> Times:
        nodes, profile = gang.nodes, PROFILES[gang.model or "resnet50"]
        wire_s = self.b_ms_per_mb / 1000.0 * profile.size_mb
        return Times(np.full(len(nodes), profile.compute_s), np.zeros(len(nodes)), np.where(nodes > 1, wire_s, 0.0))
