"""The default network model: all-reduce of the gradients by latency and bandwidth, tier by tier.

The cost forms are the textbook ones that NCCL's own tuner uses (ring, tree, two levels), paid once per bucket of 25 MB
as PyTorch's DDP sends them; communication hides behind compute by the power form of Pollux (OSDI'21). Every GPU trains
a batch of fixed size, so more GPUs mean the same compute and more communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.errors import UserError, nearest
from thebes.model.links import NETWORKS, TIERS, Link, check_links, network
from thebes.model.parameters import parameter
from thebes.model.profiles import TIER_GROUP, TIER_NODE, TIER_RACK
from thebes.perf.base import Gang, SpeedModel, Times
from thebes.perf.measured import gavel_models
from thebes.perf.models import (
    GANGS,
    REFERENCE_GPU,
    Model,
    assign_by_gang,
    gpu_speeds,
    gpu_type_of,
    known_names,
    large_catalogue,
)

ALGORITHMS = ("auto", "ring", "tree", "two-level")
DEFAULT_NETWORK = "100gbe"
UNNAMED = "resnet50"  # the model of a job whose line in the trace names none, while other lines do

# Constants of NCCL's tuner, Simple protocol: the cost of starting a collective, and the share of bandwidth for a tree.
START_S = 8.4e-6
TREE_EFFICIENCY = 0.92
# Microseconds per step where a link does not say: NVLink, PCIe, and twice the network.
USUAL_LATENCY_US = (3.4, 5.7, 14.0, 14.0)


Numbers = NDArray[np.floating[Any]] | float
Counts = NDArray[np.int64] | int


class Hop(NamedTuple):
    """One step of a collective over a link: seconds, and bytes per second of one GPU's or one card's link."""

    latency_s: Numbers
    bytes_per_s: Numbers


class Talk(NamedTuple):
    """Seconds of one collective: inside the units (groups or nodes), and between them."""

    inside_s: Numbers
    between_s: Numbers

    @property
    def total_s(self) -> Numbers:
        return self.inside_s + self.between_s


def ring(gpus: int, units: Counts, inside: Hop, between: Hop, lanes: Counts, size: float) -> Talk:
    """One ring through all GPUs: 2(n-1) steps, 2(units-1) of them between units; the slowest link sets the pace."""
    steps, crossing = 2 * (gpus - 1), 2 * (units - 1)
    pace = np.where(crossing > 0, np.minimum(inside.bytes_per_s, lanes * between.bytes_per_s), inside.bytes_per_s)
    waiting_s = START_S + (steps - crossing) * inside.latency_s
    return _where_the_bytes_are(waiting_s, crossing * between.latency_s, steps / gpus * size / pace, units)


def tree(gpus: int, units: Counts, inside: Hop, between: Hop, lanes: Counts, size: float) -> Talk:
    """Up and down a tree: a chain inside each unit, a binary tree between units; all bytes pass twice, pipelined."""
    pace = np.where(units > 1, np.minimum(inside.bytes_per_s, lanes * between.bytes_per_s), inside.bytes_per_s)
    waiting_s = START_S + 2 * (_share(gpus, units) - 1) * inside.latency_s
    bytes_s = 2 * size / (TREE_EFFICIENCY * pace)
    return _where_the_bytes_are(waiting_s, 2 * np.log2(units) * between.latency_s, bytes_s, units)


def two_level(gpus: int, units: Counts, inside: Hop, between: Hop, lanes: Counts, size: float) -> Talk:
    """Reduce-scatter in each unit, one ring per rail between units on its share, all-gather in each unit.

    The rails share the `lanes` links of the unit, but no rail gets more than one.
    """
    share = _share(gpus, units)
    inside_s = START_S + 2 * (share - 1) * (inside.latency_s + size / (share * inside.bytes_per_s))
    rail = between.bytes_per_s * np.minimum(1.0, lanes / share)
    # For even gangs (1/share - 1/gpus) is (units - 1)/gpus.
    between_s = 2 * (units - 1) * between.latency_s + 2 * size * (1 / share - 1 / gpus) / rail
    return Talk(inside_s, np.where(units > 1, between_s, 0.0))


def _share(gpus: int, units: Counts) -> Counts:
    """How many GPUs of a gang its fullest unit holds."""
    return -(-gpus // units)


def _where_the_bytes_are(inside_s: Numbers, between_s: Numbers, bytes_s: Numbers, units: Counts) -> Talk:
    """The slowest link carries all bytes; if there are wires between units, they are the slowest."""
    return Talk(inside_s + np.where(units > 1, 0.0, bytes_s), between_s + np.where(units > 1, bytes_s, 0.0))


_COSTS = {"ring": ring, "tree": tree, "two-level": two_level}


@cache
def network_models() -> dict[str, Model]:
    """Every model of known size and step time. Gavel's job types have the step times of their batch sizes."""
    return known_names() | gavel_models()


@dataclass(frozen=True)
class Network(SpeedModel):
    """All-reduce over the links that the cluster names: latency and bandwidth per tier; ring, tree or two levels.

    A cluster that names no links counts as 100gbe (NVLink 2 inside nodes, 100 Gb/s Ethernet between them), nodes
    that name no GPU type as V100s. `perf.network` replaces the links of the cluster, to compare networks.
    """

    name: ClassVar[str] = "network"

    network: str = parameter(
        "", f"wire the cluster as this network instead of its own links: {', '.join(NETWORKS)}; none: its own"
    )
    algorithm: str = parameter("auto", "all-reduce: ring, tree, two-level, or auto for whichever is fastest")
    bucket_mb: float = parameter(25.0, "gradients are sent in buckets of this size, in MB", low=0.001, high=1e6)
    gradient_bytes: float = parameter(4.0, "bytes per parameter: 4 single, 2 half precision", low=0.1, high=8)
    nics_per_node: int = parameter(1, "network cards per node, shared by the GPUs that a job has there", low=1, high=64)
    gamma: float = parameter(
        2.0, "how well communication hides behind compute: 1 not at all, 10 almost all of the shorter", low=1, high=10
    )
    gpu: str = parameter(REFERENCE_GPU, "GPU type of nodes that name none")

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise UserError(f"unknown perf.algorithm '{self.algorithm}'", hint=nearest(self.algorithm, ALGORITHMS))
        if self.network not in ("", "none", *NETWORKS):
            raise UserError(f"unknown perf.network '{self.network}'", hint=nearest(self.network, NETWORKS))
        gpu_type_of(self.gpu, list(gpu_speeds()), "perf.gpu")

    @property
    def overlap_gamma(self) -> float:
        return self.gamma

    def models(self) -> Mapping[str, Model]:
        return network_models()

    def assign(self, gpus: NDArray[np.int64], seed: int) -> list[str]:
        choices = {gang: [m.name for m in large_catalogue().values() if gang in m.gangs] for gang in GANGS}
        return assign_by_gang(gpus, seed, choices)

    def knows(self, model: str) -> bool:
        return model in network_models()

    def check(self, cluster: Cluster) -> None:
        check_links(cluster.links, cluster.name)
        links = self.links_of(cluster)
        for tier in _tiers_in(cluster):
            if _bandwidth(links, tier) is None:
                raise UserError(
                    f"{cluster.name}: no bandwidth for the {TIERS[tier]} tier: [link.{TIERS[tier]}] is missing",
                    hint='give every tier of the cluster a bandwidth_gbps or a preset = "hdr", or name no links at all',
                )
        for kind in cluster.kinds:
            self._gpu_type(kind.gpu_type)

    def _gpu_type(self, text: str) -> str:
        return gpu_type_of(text or self.gpu, list(gpu_speeds()), f"performance model {self.name}")

    def links_of(self, cluster: Cluster) -> Mapping[str, Link]:
        if self.network not in ("", "none"):
            return network(self.network)
        return cluster.links or network(DEFAULT_NETWORK)

    def times(self, gang: Gang) -> Times:
        cluster, kind, model, gpus, nodes, tier = gang
        spec = cluster.kinds[kind]
        known = network_models()[model or UNNAMED]
        compute_s = np.full(len(nodes), known.compute_s(self._gpu_type(spec.gpu_type)))
        if gpus == 1:
            return Times(compute_s, np.zeros(len(nodes)), np.zeros(len(nodes)))
        links, size = _hops(self.links_of(cluster)), known.parameters * self.gradient_bytes
        group = max(spec.groups or (spec.gpus,))
        spans, share = tier >= TIER_RACK, -(-gpus // nodes)
        # Inside a node the units are groups, and each GPU has a link of its own to the other groups. Between nodes the
        # units are nodes, and the GPUs of a gang on one node share its network cards.
        groups = 1 if not spec.groups else min(gpus, max(2, math.ceil(gpus / group)))
        units = np.where(spans, nodes, np.where(tier == TIER_GROUP, 1, groups))
        inside = np.where(spans & (share > group), TIER_NODE, TIER_GROUP)
        lanes = np.minimum(np.where(spans, self.nics_per_node, gpus), -(-gpus // units))
        talk = self._all_reduce(gpus, units, links.at(inside), links.at(np.maximum(tier, TIER_NODE)), lanes, size)
        inner_s = np.where(spans, talk.inside_s, talk.total_s)
        # Two levels can save a few steps of latency over one, but that must not make a wider placement the better one.
        inner_s[1] = max(inner_s[0], inner_s[1])
        narrower_s = inner_s[1] if gpus <= spec.gpus else 0.0
        wire_s = np.where(spans, np.maximum(talk.between_s, narrower_s - inner_s), 0.0)
        return Times(compute_s, inner_s, wire_s)

    def _all_reduce(
        self, gpus: int, units: NDArray[np.int64], inside: Hop, between: Hop, lanes: NDArray[np.int64], size: float
    ) -> Talk:
        """The seconds for all buckets of one iteration; each shape uses its fastest algorithm, or the one chosen."""
        buckets = max(1, math.ceil(size / (self.bucket_mb * 1e6)))
        costs = list(_COSTS.values()) if self.algorithm == "auto" else [_COSTS[self.algorithm]]
        talks = [cost(gpus, units, inside, between, lanes, size / buckets) for cost in costs]
        inside_s, between_s = (np.array([talk[part] for talk in talks]) for part in (0, 1))
        fastest = (inside_s + between_s).argmin(0), np.arange(len(units))
        return Talk(buckets * inside_s[fastest], buckets * between_s[fastest])


def _tiers_in(cluster: Cluster) -> list[int]:
    """The tiers over which a gang of this cluster can communicate."""
    tiers = [TIER_NODE] if any(kind.gpus > 1 for kind in cluster.kinds) else []
    if cluster.num_nodes > cluster.num_racks:
        tiers.append(TIER_RACK)
    return [*tiers, *([TIER_RACK + 1] if cluster.num_racks > 1 else [])]


def _bandwidth(links: Mapping[str, Link], tier: int) -> float | None:
    """Gb/s of a tier. Of the twins group and node, or rack and cluster, one that is given stands for both."""
    twin = (TIER_NODE, TIER_GROUP, TIER_RACK + 1, TIER_RACK)[tier]
    for at in (tier, twin):
        link = links.get(TIERS[at])
        if link is not None and link.bandwidth_gbps is not None:
            return link.bandwidth_gbps
    return None


class _TierCosts(NamedTuple):
    """The cost of a step in each tier."""

    latency_s: NDArray[np.float64]
    bytes_per_s: NDArray[np.float64]

    def at(self, tier: NDArray[np.int64]) -> Hop:
        return Hop(self.latency_s[tier], self.bytes_per_s[tier])


def _hops(links: Mapping[str, Link]) -> _TierCosts:
    """The cost of each tier. A wider tier is never better than a narrower one, because it passes through its links."""
    given = [links.get(tier, Link()).latency_us for tier in TIERS]
    latency_us = [usual if us is None else us for us, usual in zip(given, USUAL_LATENCY_US, strict=True)]
    gbps = [_bandwidth(links, tier) or math.inf for tier in range(len(TIERS))]
    return _TierCosts(np.maximum.accumulate(latency_us) * 1e-6, np.minimum.accumulate(gbps) * 1e9 / 8)
