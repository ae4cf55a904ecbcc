"""Speed models that need no measurements: one in which placement is free, one with a slowdown per network tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thebes.model.cluster import TIERS
from thebes.model.errors import UserError
from thebes.model.parameters import parameter
from thebes.model.profiles import TIER_RACK
from thebes.perf.base import Gang, SpeedModel, Times
from thebes.perf.models import BALANCED

_SPEEDS_DOC = "relative speed inside an NVLink group, inside a node, inside a rack, across racks"


@dataclass(frozen=True)
class Ideal(SpeedModel):
    """Placement does not matter."""

    name: ClassVar[str] = "ideal"

    def times(self, gang: Gang) -> Times:
        silent = np.zeros(len(gang.nodes))
        return Times(np.ones(len(gang.nodes)), silent, silent)


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

    def times(self, gang: Gang) -> Times:
        """The cost of a tier counts as communication; between nodes it is on the wires, where others can disturb it."""
        known = self.models().get(gang.model or "")
        balanced = known is None or known.model_class == BALANCED
        talk_s = 1.0 / np.array(self.balanced if balanced else self.skewed)[gang.tier] - 1.0
        between = gang.tier >= TIER_RACK
        return Times(np.ones(len(gang.nodes)), np.where(between, 0.0, talk_s), np.where(between, talk_s, 0.0))
