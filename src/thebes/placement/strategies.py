"""Where a gang sits: one compiled function per strategy, and `place`, which calls the one chosen.

Each strategy takes GPUs of one node kind (a gang trains on one type of GPU), writes them to `out` and says whether the
gang was placed; a gang that is refused leaves the machine untouched. Given the same machine they choose the same GPUs.
References: Tiresias (NSDI'19) section 3.4 for `skew`; the authors' simulator for `count` and `yarn`; Wang et al.
(arXiv 2002.10105) for `lwf`, whose full form, for GPUs that hold several jobs, is in thebes.placement.lwf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import compiled, inlined, inner
from thebes.model.machine import NONE, ZERO, Machine, next_node, take

ONE: Any = np.int64(1)
LENIENT: Any = np.bool_(False)
STRICT: Any = np.bool_(True)
COUNT, YARN, CONSOLIDATE, RELAXED, SKEW, RANDOM, LWF = range(7)


class Strategy(NamedTuple):
    """A placement with its parameters, in the form that compiled code takes."""

    code: int
    pack_limit: NDArray[np.float64]  # one cell, because `skew` may learn it while it runs
    seed: int
    kappa: int = 1  # for `lwf`: gangs up to this size are spread


@compiled
def place(
    m: Machine,
    s: Strategy,
    row: int,
    job_id: int,
    attempt: int,
    kind: int,
    gpus: int,
    nodes: int,
    skew: float,
    out: NDArray[np.int64],
) -> bool:
    """Try to give `gpus` GPUs of `kind` to the job in this row of the table; on success `out` is sorted.

    What is drawn is drawn by `job_id` and `attempt`: rows are numbered anew, and that must not move a job.
    `nodes` other than 0 is the user's own request for so many nodes, evenly, which no strategy overrules.
    """
    if m.kinds[kind].free < gpus:
        return False
    if nodes > 0:
        placed = _on_so_many_nodes(m, row, kind, gpus, nodes, out)
    elif s.code == COUNT:
        placed = _first_free(m, row, kind, gpus, out)
    elif s.code == YARN:
        placed = _under_one_switch(m, row, kind, gpus, out)
    elif s.code == CONSOLIDATE:
        placed = _fewest_nodes(m, row, kind, gpus, out, LENIENT)
    elif s.code == SKEW:
        if skew > s.pack_limit[0]:
            placed = _fewest_nodes(m, row, kind, gpus, out, STRICT)
        else:
            placed = _fill_fragments(m, row, kind, gpus, out)
    elif s.code == RELAXED:
        placed = _fill_fragments(m, row, kind, gpus, out)
    elif s.code == LWF:
        placed = _least_work_first(m, s.kappa, row, kind, gpus, out)
    else:
        placed = _random(m, s.seed, row, job_id, attempt, kind, gpus, out)
    if placed:
        sort_gpus(out[:gpus])
    return placed


@inner
def sort_gpus(values: NDArray[np.int64]) -> None:
    """An insertion sort, because strategies write nearly sorted runs, and most gangs are small."""
    for i in range(1, values.size):
        value, j = values[i], i - 1
        while j >= 0 and values[j] > value:
            values[j + 1] = values[j]
            j -= 1
        values[j + 1] = value


@inlined
def _on_so_many_nodes(m: Machine, job: int, kind: int, gpus: int, nodes: int, out: NDArray[np.int64]) -> bool:
    """Put an equal part on each of `nodes` nodes; those with the least room to spare come first."""
    share, size = gpus // nodes, m.kinds[kind].gpus_per_node
    roomy = 0
    for level in range(share, size + 1):
        roomy += m.level_nodes[kind, level]
    if roomy < nodes:
        return False
    at, level = ZERO, share
    while at < gpus:  # a node that gave its part falls below this level, so that no node is taken twice
        node = next_node(m, kind, level, ZERO)
        if node < 0:
            level += 1
        else:
            at = take(m, job, node, share, out, at)
    return True


@inner
def _first_free(m: Machine, job: int, kind: int, gpus: int, out: NDArray[np.int64]) -> bool:
    """`count`: GPUs are interchangeable, and the lowest-numbered free ones are taken."""
    at, start = ZERO, ZERO
    while at < gpus:
        node = NONE
        for level in range(1, m.kinds[kind].gpus_per_node + 1):
            candidate = next_node(m, kind, level, start)
            if candidate >= 0 and (node < 0 or candidate < node):
                node = candidate
        at = take(m, job, node, min(gpus - at, m.nodes[node].free), out, at)
        start = node + 1
    return True


@inlined
def _under_one_switch(m: Machine, job: int, kind: int, gpus: int, out: NDArray[np.int64]) -> bool:
    """`yarn`: first fit on one node, or idle nodes and one for the rest under the first switch with room; or wait."""
    size = m.kinds[kind].gpus_per_node
    if gpus <= size:
        node = NONE
        for level in range(gpus, size + 1):
            candidate = next_node(m, kind, level, ZERO)
            if candidate >= 0 and (node < 0 or candidate < node):
                node = candidate
        if node < 0:
            return False
        take(m, job, node, gpus, out, ZERO)
        return True
    whole, rest = gpus // size, gpus % size
    for rack in range(m.rack_free.shape[0]):
        idle = m.rack_level[rack, kind, size]
        roomy = 0
        for level in range(max(rest, 1), size + 1):
            roomy += m.rack_level[rack, kind, level]
        if idle < whole or (rest > 0 and roomy < whole + 1):
            continue
        at, node = ZERO, ZERO
        for _ in range(whole):
            node = _next_in_rack(m, kind, size, rack, node)
            at = take(m, job, node, size, out, at)
        if rest > 0:
            chosen = NONE
            for level in range(rest, size + 1):
                candidate = _next_in_rack(m, kind, level, rack, ZERO)
                if candidate >= 0 and (chosen < 0 or candidate < chosen):
                    chosen = candidate
            take(m, job, chosen, rest, out, at)
        return True
    return False


@inner
def _next_in_rack(m: Machine, kind: int, level: int, rack: int, start: int) -> int:
    node = next_node(m, kind, level, start)
    while node >= 0 and m.nodes[node].rack != rack:
        node = next_node(m, kind, level, node + 1)
    return node


@inner
def _fewest_nodes(m: Machine, job: int, kind: int, gpus: int, out: NDArray[np.int64], strict: bool) -> bool:
    """`consolidate`: the fewest nodes that can hold the gang now, best fit; in one rack where that costs no node more.

    A strict one refuses unless the gang fits on as few nodes as on an idle cluster.
    """
    size = m.kinds[kind].gpus_per_node
    for level in range(gpus, size + 1):
        if m.level_nodes[kind, level] > 0:
            take(m, job, next_node(m, kind, level, ZERO), gpus, out, ZERO)
            return True
    needed = nodes_needed(m.level_nodes[kind], gpus, size)
    if strict and needed > -(-gpus // size):
        return False
    rack = NONE
    if m.rack_free.shape[0] > 1:
        for candidate in range(m.rack_free.shape[0]):
            free = m.rack_free[candidate, kind]
            fits = free >= gpus and nodes_needed(m.rack_level[candidate, kind], gpus, size) == needed
            if fits and (rack < 0 or free < m.rack_free[rack, kind]):
                rack = candidate
    at = ZERO
    while at < gpus:
        rest = gpus - at
        node = fullest_that_holds(m, kind, rest, size, rack)
        if node < 0:
            node = emptiest(m, kind, size, rack)
        at = take(m, job, node, min(rest, m.nodes[node].free), out, at)
    return True


@inner
def nodes_needed(level_nodes: NDArray[np.int64], gpus: int, size: int) -> int:
    """How many nodes `gpus` GPUs take when the emptiest nodes are used first."""
    needed, rest = 0, gpus
    for level in range(size, 0, -1):
        use = min(level_nodes[level], -(-rest // level))
        needed += use
        rest -= use * level
        if rest <= 0:
            return needed
    return needed


@inner
def _pick(m: Machine, kind: int, level: int, rack: int) -> int:
    if rack < 0:
        return next_node(m, kind, level, ZERO) if m.level_nodes[kind, level] > 0 else NONE
    return _next_in_rack(m, kind, level, rack, ZERO) if m.rack_level[rack, kind, level] > 0 else NONE


@inner
def fullest_that_holds(m: Machine, kind: int, gpus: int, size: int, rack: int) -> int:
    for level in range(gpus, size + 1):
        node = _pick(m, kind, level, rack)
        if node >= 0:
            return node
    return NONE


@inner
def emptiest(m: Machine, kind: int, size: int, rack: int) -> int:
    for level in range(size, 0, -1):
        node = _pick(m, kind, level, rack)
        if node >= 0:
            return node
    return NONE


@inner
def _fill_fragments(m: Machine, job: int, kind: int, gpus: int, out: NDArray[np.int64]) -> bool:
    """`relaxed`: anywhere, with the smallest fragments first, so that whole nodes stay whole for others."""
    size = m.kinds[kind].gpus_per_node
    at, level = ZERO, ONE
    while at < gpus:
        rest = gpus - at
        if rest <= size and m.level_nodes[kind, rest] > 0:  # an exact fit leaves no new fragment
            at = take(m, job, next_node(m, kind, rest, ZERO), rest, out, at)
            continue
        while level < min(rest, size) and m.level_nodes[kind, level] == 0:
            level += 1
        node = next_node(m, kind, level, ZERO) if level < rest else NONE
        if node < 0:
            node = fullest_that_holds(m, kind, rest, size, NONE)
        at = take(m, job, node, min(rest, m.nodes[node].free), out, at)
    return True


@inlined
def _least_work_first(m: Machine, kappa: int, job: int, kind: int, gpus: int, out: NDArray[np.int64]) -> bool:
    """`lwf` where GPUs are exclusive: a free GPU has no work left, and the work on a node is its busy GPUs.

    So gangs up to kappa take the lowest-numbered free GPUs, larger ones walk the nodes from the least busy on.
    """
    if gpus <= kappa:
        return _first_free(m, job, kind, gpus, out)
    at = ZERO
    while at < gpus:
        node = emptiest(m, kind, m.kinds[kind].gpus_per_node, NONE)
        at = take(m, job, node, min(gpus - at, m.nodes[node].free), out, at)
    return True


@inner
def mix(x: np.uint64) -> np.uint64:
    """SplitMix64: a random number that depends only on its argument, so that placement stays a pure function."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inlined
def _random(
    m: Machine, seed: int, row: int, job_id: int, attempt: int, kind: int, gpus: int, out: NDArray[np.int64]
) -> bool:
    """`random`: each GPU comes from a random node, or from the next node with a free one."""
    nodes = m.nodes.size
    state = mix(np.uint64(seed) ^ mix(np.uint64(job_id) ^ mix(np.uint64(attempt))))
    for at in range(gpus):
        state = mix(state)
        node: Any = np.int64(state % np.uint64(nodes))
        while m.nodes[node].node_kind != kind or m.nodes[node].free == 0:
            node = (node + 1) % nodes
        take(m, row, node, ONE, out, at)
    return True


def largest_gangs(m: Machine, code: int) -> list[int]:
    """For each kind, the largest gang that the strategy can ever place, on an idle cluster."""
    kinds = range(len(m.kinds))
    if code != YARN:
        return [int(m.kinds["total"][kind]) for kind in kinds]
    here = [m.nodes["node_kind"] == kind for kind in kinds]
    return [int(np.bincount(m.nodes["rack"][mine], weights=m.nodes["gpus"][mine]).max()) for mine in here]
