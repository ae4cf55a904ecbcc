"""How fast a placed job runs: speed models by name. Speed 1 is the job's best placement on an idle cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import TIERS
from thebes.model.errors import UserError, nearest
from thebes.model.parameters import parameter

__all__ = ["Ideal", "SpeedModel", "Tiers", "find", "registry"]

_SPEEDS_DOC = "relative speed inside an NVLink group, inside a node, inside a rack, across racks"


@dataclass(frozen=True)
class SpeedModel:
    """Base of all speed models."""

    name: ClassVar[str] = ""

    def speeds(self) -> NDArray[np.float64]:
        """[model class, tier] -> speed."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ideal(SpeedModel):
    """Placement does not matter."""

    name: ClassVar[str] = "ideal"

    def speeds(self) -> NDArray[np.float64]:
        return np.ones((2, len(TIERS)))


@dataclass(frozen=True)
class Tiers(SpeedModel):
    """A job slows down with the widest network that its GPUs span, skewed models (VGG, AlexNet) much more.

    The defaults are our assumption, in the shape of the measurements behind Tiresias's placement rule: spreading VGG
    over machines costs about 40 %, spreading ResNet a few per cent. Set your own where you have measured them.
    """

    name: ClassVar[str] = "tiers"

    balanced: tuple[float, ...] = parameter(
        (1.0, 1.0, 0.95, 0.9), f"models without a dominant tensor: {_SPEEDS_DOC}", low=0.01, high=1
    )
    skewed: tuple[float, ...] = parameter((1.0, 0.95, 0.6, 0.5), f"models with one: {_SPEEDS_DOC}", low=0.01, high=1)

    def __post_init__(self) -> None:
        for key, values in (("balanced", self.balanced), ("skewed", self.skewed)):
            if len(values) != len(TIERS):
                raise UserError(
                    f"perf tiers: {key} needs {len(TIERS)} speeds ({', '.join(TIERS)}), not {len(values)}",
                    hint=f"write perf.{key}=1,1,0.95,0.9",
                )

    def speeds(self) -> NDArray[np.float64]:
        return np.array([self.balanced, self.skewed])


def registry() -> dict[str, type[SpeedModel]]:
    return {"tiers": Tiers, "ideal": Ideal}


def find(name: str) -> type[SpeedModel]:
    if name not in registry():
        raise UserError(f"unknown performance model '{name}'", hint=nearest(name, registry()))
    return registry()[name]
