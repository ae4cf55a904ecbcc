"""The nodes of a Slurm cluster as Thebes sees them: GPUs, racks, states, and what other people's jobs have.

Pure, but for `discover`, which `thebes up --engine slurm` calls.
"""

from __future__ import annotations

import asyncio
import getpass
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from thebes.engine.slurm.client import Slurm
from thebes.engine.slurm.commands import SlurmError
from thebes.engine.slurm.records import JobRecord, NodeRecord, Partition, Reservation
from thebes.model.errors import UserError
from thebes.protocol.contract import Gpu, NodeFacts

VIRTUAL_FEATURE = "thebes-virtual"  # nodes that carry it have fake GPUs: a site's test nodes
WHOLE_NODES = "Slurm gives whole nodes here"
_AWAY = (
    *("DOWN", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "REBOOT", "REBOOT_ISSUED", "UNKNOWN"),
    *("FUTURE", "INVAL", "INVALID_REG", "PLANNED_DOWN"),
)
_EMPTIED = ("DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING")

GpuGranting = Literal["exact", "counts", "whole"]


def kinds_of(record: NodeRecord) -> list[str]:
    """The gres type of each GPU of a node, by number."""
    return [gres.kind for gres in record.gpus for _ in range(gres.count)]


def has_exact_ids(record: NodeRecord) -> bool:
    """Each GPU has a type of its own, so that one can be asked for by its type."""
    kinds = kinds_of(record)
    return len(set(kinds)) == len(kinds)


def mode_of(records: Iterable[NodeRecord], partition: Partition | None, config: Mapping[str, str]) -> GpuGranting:
    """How exactly Slurm can be asked for GPUs."""
    if config.get("SelectType", "").endswith("linear") or (partition is not None and partition.exclusive):
        return "whole"
    return "exact" if all(has_exact_ids(record) for record in records if record.gpus) else "counts"


def gres_for(record: NodeRecord, gpus: Sequence[int]) -> str:
    """What to ask for to get these GPUs, or as many of their types: `gpu:g3:1,gpu:g5:1`, `gpu:a100:2`, `gpu:2`."""
    kinds = kinds_of(record)
    wanted = Counter(kinds[number] for number in sorted(gpus))
    return ",".join(f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in wanted.items())


@dataclass(frozen=True)
class SiteLimits:
    """What the site lets one job have of a node, or all jobs of a partition; 0 for no limit."""

    cpus_per_node: int = 0
    memory_per_cpu_mib: int = 0
    memory_per_node_mib: int = 0


NO_LIMITS = SiteLimits()


def limits_of(partition: Partition | None, config: Mapping[str, str]) -> SiteLimits:
    """The partition's own, or else those of the whole cluster."""
    everywhere = [
        int(word) if (word := config.get(key, "")).isdigit() else 0 for key in ("MaxMemPerCPU", "MaxMemPerNode")
    ]
    if partition is None:
        return SiteLimits(0, *everywhere)
    own = (partition.max_memory_per_cpu_mib, partition.max_memory_per_node_mib)
    return SiteLimits(partition.max_cpus_per_node, *(own if any(own) else everywhere))


def share_of(record: NodeRecord, gpus: int, limits: SiteLimits = NO_LIMITS) -> tuple[int, int]:
    """CPUs and MiB that go with so many of the node's GPUs.

    Never more than a share, or the last GPU of a node would find no core or no memory left: Slurm gives whole cores,
    and more of them to a job that asks for more memory than a core may have.
    """
    every = max(1, len(kinds_of(record)))
    usable = min(record.cpus, limits.cpus_per_node or record.cpus)
    cpus = max(1, usable // record.threads_per_core * gpus // every) * record.threads_per_core
    memory_mib = record.memory_mib * gpus // every
    if limits.memory_per_cpu_mib:
        memory_mib = min(memory_mib, cpus * limits.memory_per_cpu_mib)
    if limits.memory_per_node_mib:
        memory_mib = min(memory_mib, limits.memory_per_node_mib)
    return cpus, memory_mib


@dataclass(frozen=True)
class Holder:
    """A Slurm job that is not ours, on one node."""

    job: int
    user: str
    gpus: tuple[int, ...]
    count: int

    def __str__(self) -> str:
        return f"Slurm job {self.job} of {self.user}"


def holders_by_node(jobs: Iterable[JobRecord], ours: Collection[int]) -> dict[str, list[Holder]]:
    """Other people's jobs that have GPUs, by node."""
    found: dict[str, list[Holder]] = {}
    for job in jobs:
        if job.job in ours or job.state == "PENDING":
            continue
        for node in dict.fromkeys(job.nodes):
            holder = Holder(job.job, job.user, job.gpus.get(node, ()), job.counts.get(node, 0))
            found.setdefault(node, []).append(holder)
    return found


def taken_gpus(
    record: NodeRecord,
    *,
    exact: bool,
    ours: Mapping[int, Iterable[int]],
    held: Iterable[int],
    holders: Sequence[Holder],
) -> dict[int, str]:
    """Which other jobs have which GPU.

    `ours`: the numbers that each of our Slurm jobs got here. `held`: those that our jobs hold as Thebes counts them;
    without exact ids the two differ, and so many of those that we do not hold are taken as others have.
    """
    mine = {number for numbers in ours.values() for number in numbers}
    foreign = [number for number in record.used if number not in mine]
    by_number = {number: str(holder) for holder in holders for number in holder.gpus}
    names = [by_number.get(number, "another Slurm job") for number in foreign]
    lacking = record.used_count - len(mine) - len(foreign)  # a site that tells counts only
    names += ["another Slurm job"] * max(0, lacking) if not record.used else []
    if exact:
        return dict(zip(foreign, names, strict=False))
    free = [number for number in range(len(kinds_of(record))) if number not in set(held)]
    preferred = [number for number in foreign if number in free]
    rest = [number for number in reversed(free) if number not in preferred]
    return dict(zip([*preferred, *rest], names, strict=False))


def taken_whole(record: NodeRecord, *, held: Collection[int], holders: Sequence[Holder]) -> dict[int, str]:
    """Which other jobs have which GPU, where Slurm gives whole nodes. `held`: the GPUs that our jobs hold."""
    every = range(len(kinds_of(record)))
    if held:
        return {number: WHOLE_NODES for number in every if number not in held}
    busy = record.states & {"ALLOCATED", "MIXED"}
    return dict.fromkeys(every, str(holders[0]) if holders else "another Slurm job") if busy else {}


def facts_of(record: NodeRecord, *, rack: str, taken: Mapping[int, str], silent: str = "") -> NodeFacts:
    """A node as the engine tells of it. `silent`: slurmctld itself does not answer."""
    virtual = VIRTUAL_FEATURE in record.features
    kinds = kinds_of(record)
    named = kinds if not has_exact_ids(record) or len(kinds) == 1 else [""] * len(kinds)  # g0, g1 are no models
    away = [state for state in _AWAY if state in record.states]
    emptied = any(state in record.states for state in _EMPTIED)
    detail = silent
    if away and not silent:
        detail = f"Slurm says {'+'.join(away)}" + (f": {record.reason}" if record.reason else "")
    return NodeFacts(
        name=record.name,
        gpus=tuple(
            Gpu(number, name=name, virtual=virtual, taken=taken.get(number, "")) for number, name in enumerate(named)
        ),
        alive=not away and not silent,
        detail=detail,
        rack=rack,
        address=record.address,
        drained=(record.reason or "the site drains it") if emptied else "",
    )


def choose_nodes(
    records: Sequence[NodeRecord],
    partitions: Sequence[Partition],
    reservations: Sequence[Reservation],
    *,
    partition: str,
    reservation: str,
    user: str,
) -> tuple[list[NodeRecord], Partition]:
    """The nodes that are ours to use, and their partition. A UserError says what is wrong with the choice."""
    if partition:
        found = next((one for one in partitions if one.name == partition), None)
        if found is None:
            known = ", ".join(one.name for one in partitions) or "none"
            raise UserError(f"Slurm has no partition '{partition}'", hint=f"it has: {known}")
    else:
        found = next((one for one in partitions if one.default), None) or (partitions[0] if partitions else None)
        if found is None:
            raise UserError("Slurm has no partition that we may use", hint="ask its administrator for one")
    if not found.up:
        raise UserError(f"partition '{found.name}' is not up", hint="choose another with --partition")
    names = set(found.nodes)
    if reservation:
        kept = next((one for one in reservations if one.name == reservation), None)
        if kept is None:
            known = ", ".join(one.name for one in reservations) or "none"
            raise UserError(f"Slurm has no reservation '{reservation}'", hint=f"it has: {known}")
        if kept.users and user not in kept.users:
            raise UserError(
                f"reservation '{reservation}' is for {', '.join(kept.users)}, not for {user}",
                hint="ask the administrator to add you, or leave --reservation out",
            )
        names &= set(kept.nodes)
        if not names:
            raise UserError(
                f"reservation '{reservation}' has no node of partition '{found.name}'",
                hint="name the partition of its nodes with --partition",
            )
    chosen = [record for record in records if record.name in names]
    if not any(record.gpus for record in chosen):
        with_gpus = sorted({one.name for one in partitions for r in records if r.gpus and r.name in one.nodes})
        raise UserError(
            f"partition '{found.name}' has no GPUs" + (f" in reservation '{reservation}'" if reservation else ""),
            hint=f"partitions with GPUs: {', '.join(with_gpus) or 'none'}",
        )
    return [record for record in chosen if record.gpus], found


def in_rack_order(records: Sequence[NodeRecord], racks: Mapping[str, str]) -> list[NodeRecord]:
    """Those under one switch together."""
    order = {rack: at for at, rack in enumerate(dict.fromkeys(racks.values()))}
    return sorted(
        records, key=lambda record: (order.get(racks.get(record.name, ""), len(order)), _natural(record.name))
    )


def _natural(name: str) -> tuple[tuple[int, str, int], ...]:
    """n2 before n10."""
    pieces: list[tuple[int, str, int]] = []
    word = number = ""
    for letter in [*name, ""]:
        if letter.isdigit() and letter.isascii():
            number += letter
        else:
            if number:
                pieces.append((0, word, int(number)))
                word = number = ""
            word += letter
    return (*pieces, (1, word, 0))


def discover(partition: str, reservation: str) -> list[NodeFacts]:
    """What the site has for us, rack by rack. A UserError says what is wrong."""
    try:
        return asyncio.run(_discover(partition, reservation))
    except SlurmError as error:
        raise explain(error) from None


async def _discover(partition: str, reservation: str) -> list[NodeFacts]:
    slurm = Slurm()
    records, partitions, reservations, racks = await asyncio.gather(
        slurm.nodes(), slurm.partitions(), slurm.reservations(), slurm.racks()
    )
    chosen, _ = choose_nodes(
        records, partitions, reservations, partition=partition, reservation=reservation, user=user_name()
    )
    ordered = in_rack_order(chosen, racks)
    return [facts_of(record, rack=racks.get(record.name, ""), taken={}) for record in ordered]


def user_name() -> str:
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return str(os.getuid())


def explain(error: SlurmError) -> UserError:
    """A failed Slurm command as a person needs it."""
    match error.trouble:
        case "missing":
            return UserError(error.message, hint="run this on a node of the cluster (a login node will do)")
        case "silent":
            return UserError(
                error.message, hint="`scontrol ping` must work here: is slurmctld up, and SLURM_CONF (if set) right?"
            )
        case _:
            return UserError(error.message, hint="`thebes engine check slurm` tells what the site supports")
