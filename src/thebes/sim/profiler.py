"""The profiler's part in placement: it learns PACKLIMIT from the speeds of gangs that were spread out.

Tiresias (NSDI'19), section 3.4, has a simple linear classifier over past placements and the speed they gave, which is
fitted again from time to time. It has one feature, the model's skew, so here the classifier is a cut.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thebes.sim.world import World

REFIT_EVERY = 20
SLOWED_BELOW = 0.95  # a spread-out gang that runs slower than this should have been consolidated
ROUNDING = 1e-9  # 1 / (1 / 0.95) may come out slightly below 0.95


def refit_pack_limit(world: World, refit_at: int) -> int:
    """Fit the limit again if enough was observed; returns the number of observations at which the next fit is due."""
    seen = int(world.clock["observed"][0])
    if seen < refit_at:
        return refit_at
    window = world.observations[: min(seen, len(world.observations))]
    world.strategy.pack_limit[0] = learned_pack_limit(window["skew"], window["speed"])
    return seen + REFIT_EVERY


def learned_pack_limit(skew: NDArray[np.float64], speed: NDArray[np.float64]) -> float:
    """The cut that misjudges the fewest placements: above it gangs were slowed down, below it they were not.

    Cuts lie between neighbouring skews. The limit is infinite (nothing is consolidated) while no gang was slowed down,
    and below all skews when every gang was. Of equally good cuts the lowest is taken, which consolidates more.
    """
    order = np.argsort(skew, kind="stable")
    skews, slowed = skew[order], speed[order] < SLOWED_BELOW - ROUNDING
    wrong = np.concatenate(([0], np.cumsum(slowed))) + np.concatenate((np.cumsum(~slowed[::-1])[::-1], [0]))
    cuts = np.concatenate(([-1.0], 0.5 * (skews[1:] + skews[:-1]), [np.inf]))
    possible = np.concatenate(([True], skews[1:] > skews[:-1], [True]))
    return float(cuts[possible][np.argmin(wrong[possible])])
