"""Which job holds which GPU, with an index that finds "the fullest node with room for w" in constant time.

For each node kind and each number of free GPUs there is a set of nodes, kept as a two-level bitmap: the lowest node of
a set is found in a few word operations even with 100,000 nodes, and always the same node is found. All functions are
compiled; they work on one `Machine`, a tuple of arrays, in place. To try something out, copy it first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.compiled import Records, compiled, inlined, inner, maker, plain

FREE = -1
UNKNOWN_GPU_MEMORY_GIB = 32.0  # it matters only where jobs share a GPU
BLOCKED = -2  # the owner of GPUs on a node that is down or drained: they cannot be had
# Typed constants, because Numba would compile a function again for each literal in a call.
ZERO: Any = np.int64(0)
NONE: Any = np.int64(-1)


NODE = np.dtype(
    [
        ("first", np.int64),  # its first GPU, which the others follow
        ("gpus", np.int64),
        ("node_kind", np.int64),
        ("rack", np.int64),
        ("free", np.int64),
        ("cpus", np.float64),  # infinite where the cluster does not say, so that no job can have too many
        ("host_gib", np.float64),
    ]
)
GPU = np.dtype(
    [
        ("node", np.int64),
        ("group", np.int64),
        ("owner", np.int64),  # a job row, or FREE, or BLOCKED
        ("clear_s", np.float64),  # until then the last owner still writes its state out
    ]
)
KIND = np.dtype(
    [("gpus_per_node", np.int64), ("total", np.int64), ("free", np.int64), ("memory_gib", np.float64)]  # of each GPU
)


class Machine(NamedTuple):
    """Records per node, GPU and kind, then the index. All integers have 64 bits, so one compiled version is enough."""

    nodes: Records
    gpus: Records
    kinds: Records
    rack_free: NDArray[np.int64]  # [rack, kind] -> GPUs
    rack_level: NDArray[np.int64]  # [rack, kind, free GPUs] -> nodes
    level_nodes: NDArray[np.int64]  # [kind, free GPUs] -> nodes
    words: NDArray[np.uint64]  # [kind, free GPUs, node // 64]: the sets
    summary: NDArray[np.uint64]  # [kind, free GPUs, word // 64]: which words are not empty


def machine_of(cluster: Cluster) -> Machine:
    """The cluster with every GPU free."""
    count, racks = cluster.num_nodes, cluster.num_racks
    top = int(cluster.node_gpus.max()) + 1
    num_words = -(-count // 64)
    nodes = np.recarray(count, dtype=NODE)
    nodes.first, nodes.gpus = cluster.node_first_gpu, cluster.node_gpus
    nodes.node_kind, nodes.rack, nodes.free = cluster.node_kind, cluster.node_rack, 0
    nodes.cpus = np.array([kind.cpus or np.inf for kind in cluster.kinds])[cluster.node_kind]
    nodes.host_gib = np.array([kind.memory_gib or np.inf for kind in cluster.kinds])[cluster.node_kind]
    gpus = np.recarray(cluster.total_gpus, dtype=GPU)
    gpus.node, gpus.group, gpus.owner, gpus.clear_s = cluster.gpu_node, cluster.gpu_group, FREE, -np.inf
    kinds = np.recarray(len(cluster.kinds), dtype=KIND)
    kinds.gpus_per_node = [kind.gpus for kind in cluster.kinds]
    kinds.total, kinds.free = cluster.kind_gpus, 0
    kinds.memory_gib = [kind.gpu_memory_gib or UNKNOWN_GPU_MEMORY_GIB for kind in cluster.kinds]
    machine = Machine(
        nodes=plain(nodes),
        gpus=plain(gpus),
        kinds=plain(kinds),
        rack_free=np.zeros((racks, len(kinds)), dtype=np.int64),
        rack_level=np.zeros((racks, len(kinds), top), dtype=np.int64),
        level_nodes=np.zeros((len(kinds), top), dtype=np.int64),
        words=np.zeros((len(kinds), top, num_words), dtype=np.uint64),
        summary=np.zeros((len(kinds), top, -(-num_words // 64)), dtype=np.uint64),
    )
    _index_all(machine)
    return machine


def copy_of(machine: Machine) -> Machine:
    """An independent copy, on which to try a decision out."""
    return Machine._make(array.copy() for array in machine)


@maker
def copy_state(source: Machine, target: Machine) -> None:
    """Make `target`, of the same cluster, equal to `source`.

    Number by number: to assign a whole array compiles a second and a half of checks on shapes, and their messages.
    """
    for i in range(source.gpus.size):
        target.gpus[i].owner = source.gpus[i].owner
    for i in range(source.nodes.size):
        target.nodes[i].free = source.nodes[i].free
    for i in range(source.kinds.size):
        target.kinds[i].free = source.kinds[i].free
        target.kinds[i].total = source.kinds[i].total
    racks, kinds, levels = source.rack_level.shape
    for kind in range(kinds):
        for rack in range(racks):
            target.rack_free[rack, kind] = source.rack_free[rack, kind]
            for level in range(levels):
                target.rack_level[rack, kind, level] = source.rack_level[rack, kind, level]
        for level in range(levels):
            target.level_nodes[kind, level] = source.level_nodes[kind, level]
            for at in range(source.words.shape[2]):
                target.words[kind, level, at] = source.words[kind, level, at]
            for at in range(source.summary.shape[2]):
                target.summary[kind, level, at] = source.summary[kind, level, at]


_ONE, _ZERO, _ALL = np.uint64(1), np.uint64(0), np.uint64(2**64 - 1)


@inner
def _lowest_bit(word: np.uint64) -> int:
    """Position of the lowest set bit: the number of ones below it, counted in parallel."""
    x = (word & (~word + _ONE)) - _ONE
    x = x - ((x >> _ONE) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    count: Any = np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))
    return count


@compiled
def _index_all(m: Machine) -> None:
    for node in range(m.nodes.size):
        _insert(m, node, ZERO)
        set_free(m, node, m.nodes[node].gpus)


@inner
def _insert(m: Machine, node: int, level: int) -> None:
    kind, word = m.nodes[node].node_kind, node >> 6
    m.words[kind, level, word] |= _ONE << np.uint64(node & 63)
    m.summary[kind, level, word >> 6] |= _ONE << np.uint64(word & 63)
    m.level_nodes[kind, level] += 1
    m.rack_level[m.nodes[node].rack, kind, level] += 1


@inlined
def _remove(m: Machine, node: int, level: int) -> None:
    kind, word = m.nodes[node].node_kind, node >> 6
    m.words[kind, level, word] &= ~(_ONE << np.uint64(node & 63))
    if m.words[kind, level, word] == _ZERO:
        m.summary[kind, level, word >> 6] &= ~(_ONE << np.uint64(word & 63))
    m.level_nodes[kind, level] -= 1
    m.rack_level[m.nodes[node].rack, kind, level] -= 1


@inner
def listed_as(m: Machine, node: int, level: int) -> bool:
    """Whether the index has this node among those with so many free GPUs."""
    word = m.words[m.nodes[node].node_kind, level, node >> 6]
    return (word >> np.uint64(node & 63)) & _ONE == _ONE


@compiled
def set_free(m: Machine, node: int, free: int) -> None:
    """Record that `node` now has `free` free GPUs."""
    _remove(m, node, m.nodes[node].free)
    change = free - m.nodes[node].free
    m.nodes[node].free = free
    m.kinds[m.nodes[node].node_kind].free += change
    m.rack_free[m.nodes[node].rack, m.nodes[node].node_kind] += change
    _insert(m, node, free)


@compiled
def next_node(m: Machine, kind: int, level: int, start: int) -> int:
    """The lowest node from `start` on, of this kind, with exactly `level` free GPUs; -1 if there is none."""
    num_words = m.words.shape[2]
    word = start >> 6
    if word >= num_words:
        return -1
    bits = m.words[kind, level, word] & (_ALL << np.uint64(start & 63))
    if bits != _ZERO:
        return (word << 6) + _lowest_bit(bits)
    word += 1
    if word >= num_words:
        return -1
    top = word >> 6
    mask = m.summary[kind, level, top] & (_ALL << np.uint64(word & 63))
    while mask == _ZERO:
        top += 1
        if top >= m.summary.shape[2]:
            return -1
        mask = m.summary[kind, level, top]
    word = (top << 6) + _lowest_bit(mask)
    return (word << 6) + _lowest_bit(m.words[kind, level, word])


@compiled
def take(m: Machine, job: int, node: int, count: int, out: NDArray[np.int64], at: int) -> int:
    """Give `count` free GPUs of `node` to `job`, written to `out` from `at` on; returns the next position.

    Inside the node the best-fitting NVLink group is filled first, so that a small job sits in one group.
    """
    first, last = m.nodes[node].first, m.nodes[node].first + m.nodes[node].gpus
    need = count
    one_group = m.gpus[first].group == m.gpus[last - 1].group
    while need > 0:
        group = m.gpus[first].group
        if not one_group:
            group = _best_group(m, first, last, need)
        for gpu in range(first, last):
            if need > 0 and m.gpus[gpu].owner == FREE and (one_group or m.gpus[gpu].group == group):
                m.gpus[gpu].owner = job
                out[at] = gpu
                at += 1
                need -= 1
    set_free(m, node, m.nodes[node].free - count)
    return at


@inlined
def _best_group(m: Machine, first: int, last: int, need: int) -> int:
    """The group with the fewest free GPUs that still holds all of `need`, else the group with the most."""
    best, best_free = -1, 0
    gpu = first
    while gpu < last:
        group, free = m.gpus[gpu].group, 0
        while gpu < last and m.gpus[gpu].group == group:
            free += m.gpus[gpu].owner == FREE
            gpu += 1
        fits, best_fits = free >= need, best_free >= need
        better = (fits and (not best_fits or free < best_free)) or (not fits and not best_fits and free > best_free)
        if free > 0 and (best < 0 or better):
            best, best_free = group, free
    return best


@compiled
def release(m: Machine, gpus: NDArray[np.int64]) -> None:
    """Free these GPUs."""
    _assign(m, gpus, FREE, 1)


@compiled
def occupy(m: Machine, job: int, gpus: NDArray[np.int64]) -> None:
    """Give exactly these free GPUs to `job`."""
    _assign(m, gpus, job, -1)


@inner
def _assign(m: Machine, gpus: NDArray[np.int64], owner: int, sign: int) -> None:
    i = 0
    while i < gpus.size:  # GPUs of one node stand together, so that each node is indexed again only once
        node, start = m.gpus[gpus[i]].node, i
        while i < gpus.size and m.gpus[gpus[i]].node == node:
            m.gpus[gpus[i]].owner = owner
            i += 1
        set_free(m, node, m.nodes[node].free + sign * (i - start))


@inner
def all_free(m: Machine, gpus: NDArray[np.int64]) -> bool:
    for gpu in gpus:  # noqa: SIM110 - Numba compiles no generators
        if m.gpus[gpu].owner != FREE:
            return False
    return True


@compiled
def nodes_spanned(m: Machine, gpus: NDArray[np.int64]) -> int:
    """Distinct nodes of a sorted set of GPUs."""
    count, last = 0, -1
    for gpu in gpus:
        if m.gpus[gpu].node != last:
            last = m.gpus[gpu].node
            count += 1
    return count


@compiled
def tier_spanned(m: Machine, gpus: NDArray[np.int64]) -> int:
    """The index into TIERS of the widest network that these GPUs have to cross."""
    tier = 0
    group, node = m.gpus[gpus[0]].group, m.gpus[gpus[0]].node
    for gpu in gpus:
        if m.nodes[m.gpus[gpu].node].rack != m.nodes[node].rack:
            return 3
        if m.gpus[gpu].node != node:
            tier = 2
        elif tier == 0 and m.gpus[gpu].group != group:
            tier = 1
    return tier
