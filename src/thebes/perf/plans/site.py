"""A site is what a plan runs on: the GPUs, the links between them and the host beside them, of one kind of node.

`A800` is the cluster of Rubick's evaluation (arXiv 2408.08586, artifact README): nodes of 8 A800-80GB, 96 vCPUs and
1,600 GB. What a cluster does not say of itself follows from its GPU type, or else is taken from `A800`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from thebes.model.cluster import Cluster
from thebes.model.errors import UserError, nearest

CPUS_PER_GPU = 12  # a node that does not say has as many as the paper's nodes
HOST_GIB_PER_GPU = 200.0
_BITS = 8


@dataclass(frozen=True)
class Site:
    """One kind of node. Bandwidths are for one direction, in gigabytes per second."""

    gpu_type: str
    gpu_gib: float
    node_gpus: int
    node_cpus: int
    node_gib: float
    inner_gb_s: float  # per GPU, inside a node
    wire_gb_s: float  # per node, between nodes
    pcie_gb_s: float  # per GPU, to the host
    tflops: float  # dense arithmetic in half precision

    @property
    def host_gib(self) -> float:
        """One GPU's share of its host's memory, on which a job may count whatever its neighbours are."""
        return self.node_gib / self.node_gpus

    @property
    def cpus_per_gpu(self) -> int:
        """One GPU's share of its host's CPUs."""
        return max(1, self.node_cpus // self.node_gpus)

    def fewest_nodes(self, gpus: int) -> int:
        return -(-gpus // self.node_gpus)


def _site(name: str, gib: float, inner: float, pcie: float, tflops: float, wire: float = 100.0) -> Site:
    return Site(name, gib, 8, 8 * CPUS_PER_GPU, 8 * HOST_GIB_PER_GPU, inner, wire, pcie, tflops)


# Memory and peak are from NVIDIA's data sheets (without sparsity); NVLink is one way, PCIe is what a copy reaches.
_KNOWN = (
    _site("A800-80GB", 80, 200, 25, 312),
    _site("A100-80GB", 80, 300, 25, 312),
    _site("A100-40GB", 40, 300, 25, 312),
    _site("H100-80GB", 80, 450, 50, 989),
    _site("H800-80GB", 80, 200, 50, 989),
    _site("H200-141GB", 141, 450, 50, 989),
    _site("V100-32GB", 32, 150, 12, 125, wire=12.5),
    _site("V100-16GB", 16, 150, 12, 125, wire=12.5),
    _site("L40S-48GB", 48, 25, 25, 362, wire=50),
    _site("A40-48GB", 48, 56, 25, 150, wire=25),
    _site("A10-24GB", 24, 25, 25, 125, wire=12.5),
    _site("T4-16GB", 16, 12, 12, 65, wire=6.25),
)
A800 = _KNOWN[0]


def known_gpus() -> tuple[str, ...]:
    return tuple(site.gpu_type for site in _KNOWN)


def site_of_gpu(name: str) -> Site:
    """Nodes of eight such GPUs with the usual links; `A100` alone means the one with more memory."""
    found = _match(name)
    if found is None:
        raise UserError(f"unknown GPU type '{name}'", hint=nearest(name, (known.lower() for known in known_gpus())))
    return found


def site_of(cluster: Cluster, kind: int = 0) -> Site:
    """What the cluster says of its nodes of this kind, and what is usual where it says nothing."""
    node = cluster.kinds[kind]
    base = _match(node.gpu_type) or A800
    return replace(
        base,
        gpu_type=base.gpu_type if _match(node.gpu_type) or not node.gpu_type else node.gpu_type,
        gpu_gib=node.gpu_memory_gib or base.gpu_gib,
        node_gpus=node.gpus,
        node_cpus=node.cpus or CPUS_PER_GPU * node.gpus,
        node_gib=node.memory_gib or HOST_GIB_PER_GPU * node.gpus,
        inner_gb_s=_narrowest(cluster, ("group", "node")) or base.inner_gb_s,
        wire_gb_s=_narrowest(cluster, ("rack", "cluster")) or base.wire_gb_s,
    )


def _match(name: str) -> Site | None:
    """`nvidia-a100-sxm4-80gb` matches A100-80GB; a name without memory matches the first of its type."""
    words: Mapping[str, None] = dict.fromkeys(re.split(r"[-_ ]", re.sub(r"^(nvidia|tesla)[-_ ]*", "", name.lower())))
    first = next(iter(words))
    same = [site for site in _KNOWN if site.gpu_type.lower().split("-")[0] == first]
    return next((site for site in same if site.gpu_type.lower().split("-")[1] in words), same[0] if same else None)


def _narrowest(cluster: Cluster, tiers: tuple[str, ...]) -> float | None:
    """Gigabytes per second of the slowest named link among these tiers."""
    given = [link.bandwidth_gbps for tier, link in cluster.links.items() if tier in tiers]
    known = [gbps for gbps in given if gbps is not None]
    return min(known) / _BITS if known else None
