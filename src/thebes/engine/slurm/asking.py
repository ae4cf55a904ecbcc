"""What Slurm is asked for, for one gang: nodes, GPUs, CPUs, memory, time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thebes.engine.site import EngineSite
from thebes.engine.slurm import nodes as site_nodes
from thebes.engine.slurm.commands import AllocationRequest, NodeGroup, SlurmTerms
from thebes.engine.slurm.gang import SlurmGang
from thebes.engine.slurm.records import NodeRecord, Partition

GIVEN_WITHIN_S = 10  # an allocation, or somebody else was faster


@dataclass(frozen=True)
class SiteRules:
    """What decides how a site must be asked."""

    mode: site_nodes.GpuGranting
    partition: Partition | None
    config: Mapping[str, str]
    records: Mapping[str, NodeRecord]


def groups_of(gang: SlurmGang, rules: SiteRules) -> tuple[NodeGroup, ...]:
    """Nodes that give the same are one component of the Slurm job."""
    with_memory = "MEMORY" in rules.config.get("SelectTypeParameters", "").upper()
    limits = site_nodes.limits_of(rules.partition, rules.config)
    found: dict[tuple[str, int, int], list[str]] = {}
    for part in gang.parts:
        record = rules.records[part.node]
        gpus = range(len(site_nodes.kinds_of(record))) if rules.mode == "whole" else part.gpus
        cpus, memory_mib = site_nodes.share_of(record, len(gpus), limits)
        shape = (site_nodes.gres_for(record, list(gpus)), cpus, memory_mib if with_memory else 0)
        found.setdefault(shape, []).append(part.node)
    return tuple(NodeGroup(tuple(nodes), *shape) for shape, nodes in found.items())


def wait_s(groups: int, config: Mapping[str, str]) -> int:
    """Heterogeneous jobs start only when the backfill scheduler comes round."""
    if groups == 1:
        return GIVEN_WITHIN_S
    words = config.get("SchedulerParameters", "").split(",")
    interval = next((word.partition("=")[2] for word in words if word.startswith("bf_interval=")), "30")
    return GIVEN_WITHIN_S + int(interval if interval.isdigit() else 30)


def time_limit(site: EngineSite, partition: Partition | None) -> str:
    """As long as the partition lets a job run, where it would give less by itself. Else nothing: then a QOS that
    allows less than the partition has its say.
    """
    if site.time_limit or partition is None:
        return site.time_limit
    return partition.max_time if partition.default_time != "NONE" else ""


def request_for(gang: SlurmGang, site: EngineSite, rules: SiteRules) -> AllocationRequest:
    groups = groups_of(gang, rules)
    return AllocationRequest(
        name=f"thebes-{site.instance_id}-{gang.name}",
        comment=f"Thebes job {gang.job_id}",
        groups=groups,
        wait_s=wait_s(len(groups), rules.config),
        terms=SlurmTerms(site.partition, site.reservation, site.account, site.qos),
        time=time_limit(site, rules.partition),
        whole_nodes=rules.mode == "whole",
    )
