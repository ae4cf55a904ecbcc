"""Where a gang sits inside one network tier; Dally's offers and Themis's bids are made of this.

It is a best fit: the fewest nodes, then the fewest racks, then the tightest fit. Dally's released code takes the first
instance that fits; its own comment says "smallest", and that is done here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, inner
from thebes.model.machine import FREE, NONE, ZERO, Machine, next_node, take
from thebes.model.profiles import TIER_CLUSTER, TIER_GROUP, TIER_NODE, TIER_RACK
from thebes.placement.strategies import emptiest, fullest_that_holds, nodes_needed, sort_gpus


@compiled
def place_within(m: Machine, job: int, kind: int, gpus: int, tier: int, out: NDArray[np.int64]) -> bool:
    """Give `gpus` free GPUs of `kind` inside one instance of this tier to `job`; on success `out` is sorted."""
    if m.kinds[kind].free < gpus:
        return False
    if tier == TIER_GROUP:
        placed = _in_a_group(m, job, kind, gpus, out)
    elif tier == TIER_NODE:
        placed = _in_a_node(m, job, kind, gpus, out)
    elif tier == TIER_RACK:
        placed = _in_a_rack(m, job, kind, gpus, out)
    else:
        placed = _anywhere(m, job, kind, gpus, out)
    if placed:
        sort_gpus(out[:gpus])
    return placed


@compiled
def narrowest_tier(m: Machine, kind: int, gpus: int) -> int:
    """The narrowest tier in which so many free GPUs lie together now; -1 if there are not enough."""
    if m.kinds[kind].free < gpus:
        return -1
    for level in range(gpus, m.kinds[kind].gpus_per_node + 1):
        node = next_node(m, kind, level, ZERO)
        while node >= 0:
            if _group_free(m, node, gpus):
                return TIER_GROUP
            node = next_node(m, kind, level, node + 1)
    for level in range(gpus, m.kinds[kind].gpus_per_node + 1):
        if m.level_nodes[kind, level] > 0:
            return TIER_NODE
    for rack in range(m.rack_free.shape[0]):
        if m.rack_free[rack, kind] >= gpus:
            return TIER_RACK
    return TIER_CLUSTER


@inner
def _group_free(m: Machine, node: int, gpus: int) -> bool:
    """Whether one NVLink group of this node has so many free GPUs."""
    first, last = m.nodes[node].first, m.nodes[node].first + m.nodes[node].gpus
    if m.gpus[first].group == m.gpus[last - 1].group:
        return m.nodes[node].free >= gpus
    count, group = 0, NONE
    for gpu in range(first, last):
        if m.gpus[gpu].group != group:
            group, count = m.gpus[gpu].group, 0
        if m.gpus[gpu].owner == FREE:
            count += 1
            if count >= gpus:
                return True
    return False


@inner
def _in_a_group(m: Machine, job: int, kind: int, gpus: int, out: NDArray[np.int64]) -> bool:
    for level in range(gpus, m.kinds[kind].gpus_per_node + 1):
        node = next_node(m, kind, level, ZERO)
        while node >= 0:
            if _group_free(m, node, gpus):  # `take` fills the best-fitting group first
                take(m, job, node, gpus, out, ZERO)
                return True
            node = next_node(m, kind, level, node + 1)
    return False


@inner
def _in_a_node(m: Machine, job: int, kind: int, gpus: int, out: NDArray[np.int64]) -> bool:
    for level in range(gpus, m.kinds[kind].gpus_per_node + 1):
        if m.level_nodes[kind, level] > 0:
            take(m, job, next_node(m, kind, level, ZERO), gpus, out, ZERO)
            return True
    return False


@inner
def _in_a_rack(m: Machine, job: int, kind: int, gpus: int, out: NDArray[np.int64]) -> bool:
    size, best, best_nodes = m.kinds[kind].gpus_per_node, NONE, ZERO
    for rack in range(m.rack_free.shape[0]):
        if m.rack_free[rack, kind] < gpus:
            continue
        needed = nodes_needed(m.rack_level[rack, kind], gpus, size)
        tighter = m.rack_free[rack, kind] < m.rack_free[best, kind]
        if best < 0 or needed < best_nodes or (needed == best_nodes and tighter):
            best, best_nodes = rack, needed
    if best < 0:
        return False
    _fill_up(m, job, kind, gpus, best, out, ZERO)
    return True


@inner
def _anywhere(m: Machine, job: int, kind: int, gpus: int, out: NDArray[np.int64]) -> bool:
    """Place the gang on one node, else in one rack if that costs no node more, else on the emptiest nodes, by rack."""
    if _in_a_node(m, job, kind, gpus, out):
        return True
    size = m.kinds[kind].gpus_per_node
    needed = nodes_needed(m.level_nodes[kind], gpus, size)
    for rack in range(m.rack_free.shape[0]):
        if m.rack_free[rack, kind] >= gpus and nodes_needed(m.rack_level[rack, kind], gpus, size) == needed:
            return _in_a_rack(m, job, kind, gpus, out)
    at = ZERO
    for level in range(size, 0, -1):
        while at < gpus and m.level_nodes[kind, level] > 0:
            if gpus - at <= level:  # the rest fits on one node, and the tightest fit is taken
                return _fill_up(m, job, kind, gpus, NONE, out, at) == gpus
            best = ZERO  # the rack with most nodes of this level, so that few racks are used up
            for rack in range(m.rack_free.shape[0]):
                if m.rack_level[rack, kind, level] > m.rack_level[best, kind, level]:
                    best = rack
            while m.rack_level[best, kind, level] > 0 and gpus - at >= level:
                at = take(m, job, emptiest(m, kind, level, best), level, out, at)
    return _fill_up(m, job, kind, gpus, NONE, out, at) == gpus


@inner
def _fill_up(m: Machine, job: int, kind: int, gpus: int, rack: int, out: NDArray[np.int64], at: int) -> int:
    """Use the fewest nodes of this rack (or of all): the emptiest ones, and for the rest the one that fits tightest."""
    size = m.kinds[kind].gpus_per_node
    while at < gpus:
        rest = gpus - at
        node = fullest_that_holds(m, kind, rest, size, rack)
        if node < 0:
            node = emptiest(m, kind, size, rack)
        at = take(m, job, node, min(rest, m.nodes[node].free), out, at)
    return at
