"""How fast a gang runs in every shape that it could take: tables that compiled code reads.

A *shape* is what a placement looks like to the network: inside one NVLink group, inside one node, or over so many nodes
of one rack or of several. A *profile* is one model on so many GPUs of one node kind; it holds, for each shape, the
seconds that one iteration computes, talks inside its nodes, and talks over the wires between them. Speed models
(`thebes.perf`) fill the table in once, before the first event; contention only stretches the time on the wires.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, inner

# The shapes of a profile, in this order: 0 one group, 1 one node, then for n = 2, 3, … nodes: in one rack, across
# racks.
GROUP_SHAPE, NODE_SHAPE = 0, 1
# The narrowest tier to which each pair of shapes belongs: positions in thebes.model.cluster.TIERS.
TIER_GROUP, TIER_NODE, TIER_RACK, TIER_CLUSTER = range(4)


class Profiles(NamedTuple):
    """Row r has its shapes from `first[r]` to `first[r + 1]`."""

    first: NDArray[np.int64]
    compute_s: NDArray[np.float64]
    inner_s: NDArray[np.float64]
    wire_s: NDArray[np.float64]
    gamma: NDArray[np.float64]  # one cell: how well communication hides behind compute; 1 means not at all


@compiled
def shape_of(nodes: int, tier: int) -> int:
    """The shape of a placement on so many nodes that spans this tier."""
    if nodes <= 1:
        return GROUP_SHAPE if tier == TIER_GROUP else NODE_SHAPE
    return 2 * (nodes - 1) + (1 if tier == TIER_CLUSTER else 0)


def shape_table(most_nodes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(nodes, tier) of each shape of a gang that can span up to so many nodes."""
    count = 2 * max(1, most_nodes)
    shape = np.arange(count)
    nodes = shape // 2 + 1
    tier = np.where(nodes == 1, shape % 2, 2 + shape % 2)
    return nodes, tier


@inner
def iteration_s(p: Profiles, row: int, shape: int, slow: float) -> float:
    """Seconds of one iteration when transfers over the wires take `slow` times as long as alone.
    This is the power form of Pollux (OSDI'21): gamma 1 adds compute and communication, a large one hides the shorter.
        The power form of Pollux (OSDI'21): gamma 1 adds compute and communication up, a large gamma hides the shorter.
    """
    at = p.first[row] + shape
    compute_s: Any = p.compute_s[at]
    talk_s: Any = p.inner_s[at] + p.wire_s[at] * slow
    gamma: Any = p.gamma[0]
    if talk_s <= 0.0:
        return compute_s
    if gamma == 1.0:
        return compute_s + talk_s
    if compute_s <= 0.0:
        return talk_s
    long_s, short_s = max(compute_s, talk_s), min(compute_s, talk_s)
    return long_s * (1.0 + (short_s / long_s) ** gamma) ** (1.0 / gamma)


@inner
def profile_row(first_row: int, min_gpus: int, gpus: int, kinds: int, kind: int) -> int:
    """The row of a job's profile on so many GPUs of this kind: rows are ordered by GPUs, then by kind."""
    return first_row + (gpus - min_gpus) * kinds + kind
