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
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.errors import UserError, nearest
from thebes.model.links import NETWORKS, TIERS, Link, check_links, network
from thebes.model.parameters import parameter
from thebes.model.profiles import TIER_GROUP, TIER_NODE, TIER_RACK
from thebes.perf.base import SpeedModel, Times
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
UNNAMED = "resnet50"  # what a job trains whose line of the trace names no model, though others do

# NCCL's tuning constants, Simple protocol: what starting a collective costs, and the part of the bandwidth a tree gets.
START_S = 8.4e-6
TREE_EFFICIENCY = 0.92
# Microseconds per step where a link does not say: NVLink, PCIe, and the network twice.
USUAL_LATENCY_US = (3.4, 5.7, 14.0, 14.0)


class Hop(NamedTuple):
    """One step of a collective over a link: seconds, and bytes per second of one GPU's or one card's link."""

    latency_s: float
    bytes_per_s: float


class Talk(NamedTuple):
    """Seconds of one collective: inside the units (groups or nodes), and between them."""

    inside_s: float
    between_s: float

    @property
    def total_s(self) -> float:
        return self.inside_s + self.between_s


def ring(gpus: int, units: int, inside: Hop, between: Hop, lanes: int, size: float) -> Talk:
    """One ring through all GPUs: 2(n-1) steps, 2(units-1) of them between units; the slowest link sets the pace."""
    steps, crossing = 2 * (gpus - 1), 2 * (units - 1) if units > 1 else 0
    waiting_s = START_S + (steps - crossing) * inside.latency_s
    if not crossing:
        return Talk(waiting_s + steps / gpus * size / inside.bytes_per_s, 0.0)
    pace = min(inside.bytes_per_s, lanes * between.bytes_per_s)
    return Talk(waiting_s, crossing * between.latency_s + steps / gpus * size / pace)


def tree(gpus: int, units: int, inside: Hop, between: Hop, lanes: int, size: float) -> Talk:
    """Up and down a tree: a chain inside each unit, a binary tree between them; everything passes twice, pipelined."""
    per_unit = math.ceil(gpus / units)
    waiting_s = START_S + 2 * (per_unit - 1) * inside.latency_s
    if units == 1:
        return Talk(waiting_s + 2 * size / (TREE_EFFICIENCY * inside.bytes_per_s), 0.0)
    pace = TREE_EFFICIENCY * min(inside.bytes_per_s, lanes * between.bytes_per_s)
    return Talk(waiting_s, 2 * math.log2(units) * between.latency_s + 2 * size / pace)


def two_level(gpus: int, units: int, inside: Hop, between: Hop, lanes: int, size: float) -> Talk:
    """Reduce-scatter in each unit, one ring per rail between units on its share, all-gather in each unit.

    The rails share the unit's `lanes` links; a rail never gets more than one.
    """
    per_unit = math.ceil(gpus / units)
    inside_s = START_S + 2 * (per_unit - 1) * (inside.latency_s + size / (per_unit * inside.bytes_per_s))
    rail = between.bytes_per_s * min(1.0, lanes / per_unit)
    # (1/per_unit - 1/gpus) is (units - 1)/gpus for even gangs.
    between_s = 2 * (units - 1) * between.latency_s + 2 * size * (1 / per_unit - 1 / gpus) / rail
    return Talk(inside_s, between_s if units > 1 else 0.0)


_COSTS = {"ring": ring, "tree": tree, "two-level": two_level}


@cache
def network_models() -> dict[str, Model]:
    """Every model of known size and step time; Gavel's job types with the step times of their batch sizes."""
    return known_names() | gavel_models()


@dataclass(frozen=True)
class Network(SpeedModel):
    """All-reduce over the links that the cluster names: latency and bandwidth per tier, ring, tree or two levels.

    A cluster that names no links is taken as 100gbe (NVLink 2 inside nodes, 100 Gb/s Ethernet between them), nodes
    that name no GPU type as V100s. `perf.network` wires the cluster anew: the way to compare networks.
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

    def times(
        self,
        cluster: Cluster,
        kind: int,
        model: str | None,
        gpus: int,
        nodes: NDArray[np.int64],
        tier: NDArray[np.int64],
    ) -> Times:
        spec = cluster.kinds[kind]
        known = network_models()[model or UNNAMED]
        compute_s = np.full(len(nodes), known.compute_s(self._gpu_type(spec.gpu_type)))
        inner_s, wire_s = np.zeros(len(nodes)), np.zeros(len(nodes))
        if gpus == 1:
            return Times(compute_s, inner_s, wire_s)
        hops = _hops(self.links_of(cluster))
        size, group = known.parameters * self.gradient_bytes, max(spec.groups or (spec.gpus,))
        narrower_s = 0.0
        for at, (count, span) in enumerate(zip(nodes.tolist(), tier.tolist(), strict=True)):
            if span < TIER_RACK:
                # Inside a node, groups are what is linked well; each GPU has a link of its own to the other groups.
                units = 1 if span == TIER_GROUP or not spec.groups else min(gpus, max(2, math.ceil(gpus / group)))
                talk = self._all_reduce(gpus, units, hops[TIER_GROUP], hops[TIER_NODE], gpus, size)
                # Two levels can save a few steps of latency over one: that does not make a wider placement better.
                inner_s[at] = max(talk.total_s, narrower_s)
                narrower_s = inner_s[at] if gpus <= spec.gpus else 0.0
            else:
                inside = hops[TIER_GROUP if math.ceil(gpus / count) <= group else TIER_NODE]
                talk = self._all_reduce(gpus, count, inside, hops[span], self.nics_per_node, size)
                inner_s[at], wire_s[at] = talk.inside_s, max(talk.between_s, narrower_s - talk.inside_s)
        return Times(compute_s, inner_s, wire_s)

    def _all_reduce(self, gpus: int, units: int, inside: Hop, between: Hop, lanes: int, size: float) -> Talk:
        """All buckets of one iteration."""
        buckets = max(1, math.ceil(size / (self.bucket_mb * 1e6)))
        lanes = min(lanes, math.ceil(gpus / units))
        costs = _COSTS.values() if self.algorithm == "auto" else (_COSTS[self.algorithm],)
        best = min((cost(gpus, units, inside, between, lanes, size / buckets) for cost in costs), key=_total)
        return Talk(buckets * best.inside_s, buckets * best.between_s)


def _total(talk: Talk) -> float:
    return talk.total_s


def _tiers_in(cluster: Cluster) -> list[int]:
    """The tiers over which a gang of this cluster can talk."""
    tiers = [TIER_NODE] if any(kind.gpus > 1 for kind in cluster.kinds) else []
    if cluster.num_nodes > cluster.num_racks:
        tiers.append(TIER_RACK)
    return [*tiers, *([TIER_RACK + 1] if cluster.num_racks > 1 else [])]


def _bandwidth(links: Mapping[str, Link], tier: int) -> float | None:
    """Gb/s of a tier; where only one of two twins is given (group and node, rack and cluster), it stands for both."""
    twin = (TIER_NODE, TIER_GROUP, TIER_RACK + 1, TIER_RACK)[tier]
    for at in (tier, twin):
        link = links.get(TIERS[at])
        if link is not None and link.bandwidth_gbps is not None:
            return link.bandwidth_gbps
    return None


def _hops(links: Mapping[str, Link]) -> list[Hop]:
    """What each tier costs; a wider one is never better than a narrower one, whose links it passes through."""
    hops: list[Hop] = []
    latency_s, bytes_per_s = 0.0, math.inf
    for tier in range(len(TIERS)):
        link = links.get(TIERS[tier], Link())
        latency_us = USUAL_LATENCY_US[tier] if link.latency_us is None else link.latency_us
        latency_s = max(latency_s, latency_us * 1e-6)
        gbps = _bandwidth(links, tier)
        bytes_per_s = min(bytes_per_s, math.inf if gbps is None else gbps * 1e9 / 8)
        hops.append(Hop(latency_s, bytes_per_s))
    return hops
