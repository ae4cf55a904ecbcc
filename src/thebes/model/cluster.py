"""The cluster as a scheduler sees it: racks of nodes, nodes of GPUs, groups of well-linked GPUs inside a node.

Three notations give a `Cluster`: a short form (`8x8`, `4x8x8`), the Tiresias simulator's CSV, and a TOML file for real
clusters. The parsers here take text, so that they stay free of I/O; `thebes.trace.read_cluster` opens files.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from thebes.model.errors import UserError, nearest
from thebes.model.links import TIERS, Link, check_links, preset

MAX_GPUS = 10_000_000
Number = TypeVar("Number", int, float)
MAX_KINDS = 62  # allowed kinds are the bits of one integer


@dataclass(frozen=True)
class NodeKind:
    """What one machine holds. `groups` are the sizes of its NVLink groups or sockets; they add up to `gpus`."""

    gpus: int
    gpu_type: str = ""  # empty if unknown, which suits every job
    gpu_memory_gib: float | None = None
    groups: tuple[int, ...] = ()
    cpus: int | None = None
    memory_gib: float | None = None


@dataclass(frozen=True, eq=False)
class Cluster:
    """Nodes in rack order; GPUs are numbered node by node, so that a node's GPUs are a contiguous range."""

    name: str
    kinds: tuple[NodeKind, ...]
    node_kind: NDArray[np.int32]
    node_rack: NDArray[np.int32]
    node_names: tuple[str, ...]
    links: Mapping[str, Link] = field(default_factory=lambda: dict[str, Link]())

    @property
    def num_nodes(self) -> int:
        return len(self.node_kind)

    @property
    def num_racks(self) -> int:
        return int(self.node_rack.max()) + 1

    @cached_property
    def node_gpus(self) -> NDArray[np.int32]:
        return np.array([kind.gpus for kind in self.kinds], dtype=np.int32)[self.node_kind]

    @cached_property
    def node_first_gpu(self) -> NDArray[np.int32]:
        return np.concatenate(([0], np.cumsum(self.node_gpus)[:-1])).astype(np.int32)

    @cached_property
    def gpu_node(self) -> NDArray[np.int32]:
        return np.repeat(np.arange(self.num_nodes, dtype=np.int32), self.node_gpus)

    @cached_property
    def gpu_group(self) -> NDArray[np.int32]:
        """Cluster-wide number of the NVLink group (or socket) of each GPU; a node without groups is one group."""
        labels: list[NDArray[np.int32]] = []
        next_group = 0
        for kind_index in self.node_kind:
            sizes = self.kinds[kind_index].groups or (self.kinds[kind_index].gpus,)
            labels.append(np.repeat(np.arange(next_group, next_group + len(sizes), dtype=np.int32), sizes))
            next_group += len(sizes)
        return np.concatenate(labels)

    @cached_property
    def kind_gpus(self) -> NDArray[np.int64]:
        """GPUs of each kind in the whole cluster."""
        return np.bincount(self.node_kind, weights=self.node_gpus, minlength=len(self.kinds)).astype(np.int64)

    @property
    def total_gpus(self) -> int:
        return int(self.node_gpus.sum())

    def describe(self) -> str:
        """One line for reports, such as `64 GPUs: 8 nodes x 8, 1 rack`."""
        counts = np.bincount(self.node_kind, minlength=len(self.kinds))
        parts = [
            f"{count} node{'s' * (count != 1)} x {kind.gpus}{' ' + kind.gpu_type if kind.gpu_type else ''}"
            for kind, count in zip(self.kinds, counts.tolist(), strict=True)
        ]
        racks = self.num_racks
        return f"{self.total_gpus} GPUs: {', '.join(parts)}, {racks} rack{'s' * (racks != 1)}"


def build(name: str, groups: list[tuple[NodeKind, int, list[int]]], links: Mapping[str, Link] | None = None) -> Cluster:
    """A cluster from (kind, number of nodes, rack of each node); nodes are ordered by rack, then as given."""
    kinds: list[NodeKind] = []
    node_kind: list[int] = []
    node_rack: list[int] = []
    for given, count, racks in groups:
        at = _same_for_gangs(given, kinds)
        if at == len(kinds):
            kinds.append(given)
        kinds[at] = replace(
            given, cpus=_least(given.cpus, kinds[at].cpus), memory_gib=_least(given.memory_gib, kinds[at].memory_gib)
        )
        node_kind += [at] * count
        node_rack += racks
    if len(kinds) > MAX_KINDS:
        raise UserError(f"{name}: more than {MAX_KINDS} kinds of node", hint="describe equal nodes by equal tables")
    order = np.argsort(np.array(node_rack), kind="stable")
    return Cluster(
        name=name,
        kinds=tuple(kinds),
        node_kind=np.array(node_kind, dtype=np.int32)[order],
        node_rack=np.array(node_rack, dtype=np.int32)[order],
        node_names=tuple(f"n{i}" for i in range(len(order))),
        links=dict(links or {}),
    )


def _same_for_gangs(kind: NodeKind, known: list[NodeKind]) -> int:
    """The position of a kind that differs only in CPUs and host memory, so that a gang may span both; else a new one.

    Such nodes count as having what the poorest of them has, so that no job is promised more.
    """
    for at, other in enumerate(known):
        if replace(other, cpus=kind.cpus, memory_gib=kind.memory_gib) == kind:
            return at
    return len(known)


def _least(one: Number | None, other: Number | None) -> Number | None:
    return other if one is None else one if other is None else min(one, other)


def uniform(name: str, racks: int, nodes_per_rack: int, kind: NodeKind) -> Cluster:
    """Racks of equal nodes."""
    nodes = racks * nodes_per_rack
    return build(name, [(kind, nodes, [i // nodes_per_rack for i in range(nodes)])])


def from_short_form(text: str) -> Cluster | None:
    """`8x8` is 8 nodes x 8 GPUs, `4x8x8` is 4 racks x 8 nodes x 8 GPUs; None if the text is not of that form."""
    if not re.fullmatch(r"\d{1,99}(x\d{1,99}){1,2}", text):
        return None
    numbers = [int(part) for part in text.split("x")]
    racks, nodes, gpus = numbers if len(numbers) == 3 else (1, *numbers)
    if not (racks and nodes and gpus):
        raise UserError(f"cluster '{text}' has no GPUs", hint="every number must be at least 1, as in 8x8")
    if racks * nodes * gpus > MAX_GPUS:
        raise UserError(f"cluster '{text}' has more than {MAX_GPUS:,} GPUs", hint="the order is nodes x GPUs per node")
    return uniform(text, racks, nodes, NodeKind(gpus))


TIRESIAS_COLUMNS = ("num_switch", "num_node_p_switch", "num_gpu_p_node", "num_cpu_p_node", "mem_p_node")


def from_tiresias_csv(text: str, name: str) -> Cluster:
    """The Tiresias simulator's cluster specification: one header line, one line of five integers."""
    try:
        rows = [row for row in csv.reader(text.splitlines()) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise UserError(f"{name}: not a CSV file: {error}", hint=f"expected {','.join(TIRESIAS_COLUMNS)}") from None
    header = [cell.strip() for cell in rows[0]]
    missing = [column for column in TIRESIAS_COLUMNS[:3] if column not in header]
    if missing:
        raise UserError(f"{name}, line 1: no column '{missing[0]}'", hint=f"expected {','.join(TIRESIAS_COLUMNS)}")
    if len(rows) < 2:
        raise UserError(f"{name}: a header but no data line", hint="add one line such as 1,8,8,64,256")
    values: dict[str, int] = {}
    for column, cell in zip(header, rows[1], strict=False):
        try:
            values[column] = int(cell)
        except ValueError:
            raise UserError(
                f"{name}, line 2, column '{column}': '{cell}' is not a whole number",
                hint="write it in digits, such as 8",
            ) from None
    for column in TIRESIAS_COLUMNS[:3]:
        if values.get(column, 0) < 1:
            raise UserError(f"{name}, line 2, column '{column}': must be at least 1", hint="a cluster needs GPUs")
    if values["num_switch"] * values["num_node_p_switch"] * values["num_gpu_p_node"] > MAX_GPUS:
        raise UserError(f"{name}: more than {MAX_GPUS:,} GPUs", hint="check the three numbers of line 2")
    kind = NodeKind(values["num_gpu_p_node"], cpus=values.get("num_cpu_p_node"), memory_gib=values.get("mem_p_node"))
    return uniform(name, values["num_switch"], values["num_node_p_switch"], kind)


_TOP_KEYS = ("name", "node", "link")
_NODE_KEYS = ("count", "rack", "racks", "gpus", "gpu_type", "gpu_memory_gib", "groups", "cpus", "memory_gib")
_LINK_KEYS = ("preset", "bandwidth_gbps", "latency_us")


def from_toml(text: str, name: str) -> Cluster:
    """A real cluster: `[[node]]` tables of equal nodes and `[link.TIER]` tables. docs/clusters.md has the reference."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name}: not valid TOML: {error}", hint="docs/clusters.md shows a complete example") from None
    _reject_unknown(data, _TOP_KEYS, f"{name}")
    tables = data.get("node")
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in cast("list[Any]", tables)):
        raise UserError(f"{name}: no [[node]] table", hint="add [[node]] with count = 8 and gpus = 8")
    rack_names: list[str] = []
    groups: list[tuple[NodeKind, int, list[int]]] = []
    total_gpus = 0
    for number, table in enumerate(cast("list[dict[str, Any]]", tables), start=1):
        where = f"{name}, [[node]] number {number}"
        _reject_unknown(table, _NODE_KEYS, where)
        kind = _kind(table, where)
        count = _whole(table, "count", where, default=1)
        total_gpus += kind.gpus * count
        if total_gpus > MAX_GPUS:
            raise UserError(f"{where}: more than {MAX_GPUS:,} GPUs", hint="check `count` and `gpus`")
        groups.append((kind, count, _racks(table, count, rack_names, where)))
    return build(str(data.get("name", name)), groups, _links(data.get("link", {}), name))


def _reject_unknown(table: Mapping[str, Any], valid: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in valid:
            raise UserError(f"{where}: unknown key '{key}'", hint=nearest(key, valid))


def _whole(table: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = table.get(key, default)
    if value is None:
        raise UserError(f"{where}: no '{key}'", hint=f"add {key} = 8")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{where}: {key} = {value!r} is not a whole number of at least 1", hint=f"write {key} = 8")
    return value


def _positive(table: Mapping[str, Any], key: str, where: str) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(
            f"{where}: {key} = {value!r} is not a positive number", hint=f"leave {key} out if it is unknown"
        )
    return float(value)


def _kind(table: Mapping[str, Any], where: str) -> NodeKind:
    gpus = _whole(table, "gpus", where)
    sizes = table.get("groups", [])
    if not isinstance(sizes, list) or not all(type(s) is int and s > 0 for s in cast("list[Any]", sizes)):
        raise UserError(f"{where}: groups = {sizes!r} is not a list of sizes", hint="write groups = [4, 4]")
    group_sizes = tuple(cast("list[int]", sizes))
    if group_sizes and sum(group_sizes) != gpus:
        raise UserError(f"{where}: groups add up to {sum(group_sizes)}, but gpus = {gpus}", hint="make them equal")
    gpu_type = table.get("gpu_type", "")
    if not isinstance(gpu_type, str):
        raise UserError(f"{where}: gpu_type = {gpu_type!r} is not a name", hint='write gpu_type = "A100"')
    return NodeKind(
        gpus=gpus,
        gpu_type=gpu_type,
        gpu_memory_gib=_positive(table, "gpu_memory_gib", where),
        groups=group_sizes,
        cpus=None if "cpus" not in table else _whole(table, "cpus", where),
        memory_gib=_positive(table, "memory_gib", where),
    )


def _racks(table: Mapping[str, Any], count: int, rack_names: list[str], where: str) -> list[int]:
    """Rack numbers of `count` nodes: all in the rack named, or dealt evenly over `racks` new ones, or all in one."""
    if "rack" in table and "racks" in table:
        raise UserError(f"{where}: both 'rack' and 'racks'", hint="name one rack, or say over how many to spread")
    if "racks" in table:
        racks = _whole(table, "racks", where)
        if count % racks:
            raise UserError(
                f"{where}: {count} nodes do not spread evenly over {racks} racks",
                hint="use one [[node]] table per rack",
            )
        first = len(rack_names)
        rack_names += [f"rack{first + i}" for i in range(racks)]
        return [first + i // (count // racks) for i in range(count)]
    label = str(table.get("rack", "rack"))
    if label not in rack_names:
        rack_names.append(label)
    return [rack_names.index(label)] * count


def _links(tables: Any, name: str) -> dict[str, Link]:
    if not isinstance(tables, dict):
        raise UserError(f"{name}: 'link' is not a set of tables", hint="write [link.node] and so on")
    links: dict[str, Link] = {}
    for tier, table in cast("dict[str, Any]", tables).items():
        if tier not in TIERS:
            raise UserError(f"{name}: unknown tier [link.{tier}]", hint=nearest(tier, TIERS))
        where = f"{name}, [link.{tier}]"
        if not isinstance(table, dict):
            raise UserError(f"{where} is not a table", hint="write bandwidth_gbps = 100 below it")
        values = cast("dict[str, Any]", table)
        _reject_unknown(values, _LINK_KEYS, where)
        named = values.get("preset")
        if named is not None and not isinstance(named, str):
            raise UserError(f"{where}: preset = {named!r} is not a name", hint='write preset = "hdr"')
        usual = Link() if named is None else preset(named, where)
        links[tier] = Link(
            _positive(values, "bandwidth_gbps", where) or usual.bandwidth_gbps,
            _positive(values, "latency_us", where) or usual.latency_us,
        )
    check_links(links, name)
    return links
