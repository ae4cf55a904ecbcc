"""The nodes of a Ray cluster as Thebes sees them: names, racks and GPUs, from Ray's table and the nodes' labels.

A node is called by its label `host` or `name` (`ray start --labels=host=gpu07,rack=r2`), else by its address. Its rack
is the label `rack`, else Ray's own `ray.io/availability-zone`; without either all nodes are in one rack.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from thebes.model.errors import UserError
from thebes.protocol.contract import Gpu, NodeFacts

DISCOVER_S = 60.0
NAME_LABELS = ("host", "name")
RACK_LABELS = ("rack", "ray.io/availability-zone")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def name_of(entry: Mapping[str, Any]) -> str:
    """How Thebes calls the node."""
    for label in NAME_LABELS:
        if _NAME.fullmatch(entry["labels"].get(label, "")):
            return entry["labels"][label]
    return "ip-" + re.sub(r"[^A-Za-z0-9]+", "-", entry["address"])


def rack_of(entry: Mapping[str, Any], rack_label: str = "") -> str:
    labels = (rack_label,) if rack_label else RACK_LABELS
    return next((entry["labels"][label] for label in labels if entry["labels"].get(label)), "")


def facts_of(entry: Mapping[str, Any], rack_label: str = "") -> NodeFacts:
    """GPUs without a type are virtual: Ray was told of them, and its look for real ones found none."""
    virtual = not entry["gpu_type"]
    name = "virtual" if virtual else entry["gpu_type"]
    return NodeFacts(
        name_of(entry),
        tuple(Gpu(index, name=name, virtual=virtual) for index in range(entry["gpus"])),
        alive=entry["alive"],
        rack=rack_of(entry, rack_label),
        address=entry["address"],
    )


def living(table: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Nodes that Ray calls alive and that have GPUs, by name."""
    found: dict[str, Mapping[str, Any]] = {}
    for entry in table:
        if not entry["alive"] or not entry["gpus"]:
            continue
        name = name_of(entry)
        if name in found:
            raise UserError(
                f"two nodes of the Ray cluster are called '{name}': {found[name]['address']} and {entry['address']}",
                hint="give each a label of its own: ray start --labels=host=NAME",
            )
        found[name] = entry
    return found


def discover(address: str, rack_label: str = "") -> list[NodeFacts]:
    """The nodes with GPUs, in the order of their names. Asked of a child process, for Ray may end the one it is in."""
    table = ask_once(address)
    found = living(table)
    if not found:
        alive = sum(entry["alive"] for entry in table)
        raise UserError(
            f"none of the {alive} nodes of the Ray cluster has a GPU",
            hint="Ray finds GPUs when it starts on a node; to try Thebes without any: ray start --num-gpus=8",
        )
    return [facts_of(found[name], rack_label) for name in sorted(found, key=_natural)]


def _natural(name: str) -> list[tuple[int, str]]:
    """n2 before n10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]


def driver_command() -> list[str]:
    return [sys.executable, "-m", "thebes.engine.ray.driver"]


def ask_once(address: str, *, timeout_s: float = DISCOVER_S) -> list[dict[str, Any]]:
    """Ray's table of nodes."""
    wanted = json.dumps({"address": address, "instance": "", "once": True})
    try:
        done = subprocess.run(
            driver_command(), input=wanted + "\n", capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"the Ray cluster at {address or 'auto'} has not answered within {timeout_s:g} s",
            hint="`ray status` tells whether its head is well",
        ) from None
    for line in done.stdout.splitlines():
        said = json.loads(line)
        if said.get("push") == "error":
            raise UserError(said["message"], hint=said["hint"])
        if said.get("push") == "nodes":
            return said["nodes"]
    words = [line for line in done.stderr.splitlines() if line.strip()]
    raise UserError(
        f"Ray's library has ended the process that asked {address or 'auto'}: {words[-1] if words else 'no word'}",
        hint="`ray status` tells whether its head is well",
    )
