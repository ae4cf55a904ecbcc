"""The machine counted by hand: slow, plain, and right by inspection."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from thebes.model.cluster import Cluster, from_short_form, from_toml
from thebes.model.machine import FREE, Machine, machine_of, next_node, occupy

TOML = """
[[node]]
count = 2
gpus = 4
groups = [2, 2]
rack = "a"
[[node]]
count = 3
gpus = 2
rack = "b"
[[node]]
count = 2
gpus = 4
groups = [2, 2]
rack = "b"
[[node]]
gpus = 4
groups = [1, 3]
rack = "c"
"""
CLUSTERS: dict[str, Cluster] = {
    "1x4": from_short_form("1x4"),
    "5x3": from_short_form("5x3"),
    "2x3x4": from_short_form("2x3x4"),
    "3x2x2": from_short_form("3x2x2"),
    "mixed": from_toml(TOML, "mixed"),
}  # type: ignore[dict-item]


def occupied(cluster: Cluster, taken: Iterable[bool]) -> Machine:
    """A machine on which job 99 sits on some GPUs."""
    machine = machine_of(cluster)
    gpus = np.array([gpu for gpu, is_taken in enumerate(taken) if is_taken], dtype=np.int64)
    if len(gpus):
        occupy(machine, 99, gpus)
    return machine


def free_of(machine: Machine, cluster: Cluster) -> list[int]:
    """Free GPUs of each node, counted GPU by GPU."""
    free = [0] * cluster.num_nodes
    for gpu, node in enumerate(cluster.gpu_node.tolist()):
        free[node] += int(machine.gpus["owner"][gpu] == FREE)
    return free


def recount(machine: Machine, cluster: Cluster) -> None:
    """Every part of the index is what counting the GPUs gives."""
    free = free_of(machine, cluster)
    assert machine.nodes["free"].tolist() == free
    top = int(cluster.node_gpus.max()) + 1
    racks, kinds = cluster.num_racks, len(cluster.kinds)
    rack_free = np.zeros((racks, kinds), dtype=int)
    rack_level = np.zeros((racks, kinds, top), dtype=int)
    members: dict[tuple[int, int], list[int]] = {}
    for node, (kind, rack) in enumerate(zip(cluster.node_kind.tolist(), cluster.node_rack.tolist(), strict=True)):
        rack_free[rack, kind] += free[node]
        rack_level[rack, kind, free[node]] += 1
        members.setdefault((kind, free[node]), []).append(node)
    np.testing.assert_array_equal(machine.rack_free, rack_free)
    np.testing.assert_array_equal(machine.rack_level, rack_level)
    np.testing.assert_array_equal(machine.level_nodes, rack_level.sum(axis=0))
    np.testing.assert_array_equal(machine.kinds["free"], rack_free.sum(axis=0))
    for kind in range(kinds):
        for level in range(top):
            nodes = members.get((kind, level), [])
            words = [sum(1 << (n & 63) for n in nodes if n >> 6 == w) for w in range(machine.words.shape[2])]
            assert machine.words[kind, level].tolist() == words
            summary = [
                sum(1 << (w & 63) for w, word in enumerate(words) if word and w >> 6 == s)
                for s in range(machine.summary.shape[2])
            ]
            assert machine.summary[kind, level].tolist() == summary
            for start in range(cluster.num_nodes + 1) if cluster.num_nodes < 50 else (0, *nodes, cluster.num_nodes):
                expected = min((n for n in nodes if n >= start), default=-1)
                assert next_node(machine, kind, level, start) == expected
