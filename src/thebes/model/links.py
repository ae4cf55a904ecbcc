"""Links by name, and whole networks made of them: the bandwidth and latency of each tier of a cluster.

Bandwidths are one direction, in gigabits per second (bits, as networks are sold): they are what a transfer really gets,
not what the label says. Inside a node the figure is per GPU, between nodes it is per network card. Latency is one step
of a collective over the link, with the library's own work, in the order of NCCL's tuning constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from thebes.model.errors import UserError, nearest

if TYPE_CHECKING:
    from thebes.model.cluster import Cluster

# How far apart the GPUs of one job sit, nearest first. This is the unit of every distance in Thebes.
TIERS = ("group", "node", "rack", "cluster")

_BITS = 8  # per byte


@dataclass(frozen=True)
class Link:
    """The network inside one tier."""

    bandwidth_gbps: float | None = None
    latency_us: float | None = None


def _usable(gigabytes_per_s: float, latency_us: float) -> Link:
    return Link(gigabytes_per_s * _BITS, latency_us)


# GB/s that a transfer gets, and microseconds per step. NVLink, PCIe and InfiniBand are as in NCCL's tuning tables
# (Simple protocol); Ethernet has RDMA from 100 Gb/s up, and TCP below. 10 GbE is as measured behind Ada-SRSF
# (arXiv 2002.10105): 0.856 ms per MB, about 0.7 ms for an all-reduce that goes round eight nodes.
PRESETS: Mapping[str, Link] = {
    "nvlink2": _usable(120, 3.4),
    "nvlink3": _usable(235, 3.4),
    "nvlink4": _usable(370, 3.4),
    "pcie3": _usable(12, 5.7),
    "pcie4": _usable(24, 5.7),
    "pcie5": _usable(48, 5.7),
    "hdr": _usable(24, 14),
    "ndr": _usable(48, 14),
    "10gbe": _usable(1.17, 50),
    "25gbe": _usable(2.6, 40),
    "100gbe": _usable(11, 15),
    "200gbe": _usable(22, 15),
    "400gbe": _usable(44, 15),
}

# Network -> (link inside nodes, link between nodes in a rack and across racks).
NETWORKS: Mapping[str, tuple[str, str]] = {
    "10gbe": ("pcie3", "10gbe"),
    "25gbe": ("pcie3", "25gbe"),
    "100gbe": ("nvlink2", "100gbe"),
    "200gbe": ("nvlink3", "200gbe"),
    "400gbe": ("nvlink4", "400gbe"),
    "nvlink+hdr": ("nvlink3", "hdr"),
    "nvlink4+ndr": ("nvlink4", "ndr"),
}


def preset(name: str, where: str = "link") -> Link:
    if name not in PRESETS:
        raise UserError(f"{where}: unknown preset '{name}'", hint=nearest(name, PRESETS))
    return PRESETS[name]


def network(name: str) -> dict[str, Link]:
    """The links of a named network, by tier."""
    if name not in NETWORKS:
        raise UserError(f"unknown network '{name}'", hint=nearest(name, NETWORKS))
    inside, between = (PRESETS[link] for link in NETWORKS[name])
    return dict(zip(TIERS, (inside, inside, between, between), strict=True))


def with_network(cluster: Cluster, name: str) -> Cluster:
    """The same nodes with the links of the named network, whatever their own links were."""
    return replace(cluster, links=network(name))


def check_links(links: Mapping[str, Link], where: str) -> None:
    """Refuse links that cannot be: not positive, or faster though wider.

    What leaves a node passes the links inside it first (a network card hangs on PCIe), so no wider tier can carry more
    than a narrower one.
    """
    given = [(tier, links[tier]) for tier in TIERS if tier in links]
    for tier, link in given:
        for key, value in (("bandwidth_gbps", link.bandwidth_gbps), ("latency_us", link.latency_us)):
            if value is not None and not 0 < value < float("inf"):
                raise UserError(
                    f"{where}, [link.{tier}]: {key} = {value:g} is not a positive number",
                    hint=f"leave {key} out if it is unknown",
                )
    known = [(tier, link.bandwidth_gbps) for tier, link in given if link.bandwidth_gbps is not None]
    for (inner, inner_gbps), (outer, outer_gbps) in pairwise(known):
        if outer_gbps > inner_gbps:
            raise UserError(
                f"{where}: [link.{outer}] with {outer_gbps:g} Gb/s is faster than [link.{inner}] with "
                f"{inner_gbps:g} Gb/s",
                hint=f"traffic of the {outer} tier passes the {inner} tier's links first: give both in gigabits "
                "per second, or leave one out",
            )
