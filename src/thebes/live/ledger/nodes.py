"""The nodes of the live cluster, and the cluster that policies see in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thebes.model.cluster import Cluster, NodeKind, build


@dataclass(frozen=True)
class NodeSpec:
    """A node of the live cluster, as the ledger needs it."""

    name: str
    gpus: int
    gpu_type: str = ""
    memory_gib: float | None = None
    rack: str = ""


def cluster_of(nodes: Sequence[NodeSpec]) -> Cluster:
    """The cluster that policies see: the nodes in this order, which must be rack by rack."""
    racks = {rack: at for at, rack in enumerate(dict.fromkeys(n.rack for n in nodes))}
    groups = [(NodeKind(n.gpus, gpu_type=n.gpu_type, gpu_memory_gib=n.memory_gib), 1, [racks[n.rack]]) for n in nodes]
    built = build("live", groups)
    return Cluster(
        built.name, built.kinds, built.node_kind, built.node_rack, tuple(n.name for n in nodes), dict(built.links)
    )


def listed(node: NodeSpec) -> list[Any]:
    """A node in a snapshot; the rack only where there is one, as in those written before there were any."""
    return [node.name, node.gpus, node.gpu_type, node.memory_gib, *([node.rack] if node.rack else [])]
