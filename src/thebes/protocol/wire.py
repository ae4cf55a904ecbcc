"""What travels between engine and agent: one JSON object per line, and the contract's types as plain dicts.

A request has `id` and `op`; its answer has the same `id` and either `result`, or `error` (`refused` or `failed`) with
`detail`. After `hello`, lines with `push` come unasked: `report` or `facts`. Socket paths may be longer than the 108
bytes that the kernel takes, so sockets are reached through their folder.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thebes.protocol.contract import Gpu, Launch, NodeFacts, Part, Report

LINE_LIMIT_BYTES = 16 << 20


def encode(message: Mapping[str, Any]) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def launch_to_dict(launch: Launch) -> dict[str, Any]:
    return {**dataclasses.asdict(launch), "env": dict(launch.env)}


def launch_from_dict(found: Mapping[str, Any]) -> Launch:
    parts = tuple(Part(part["node"], tuple(part["gpus"])) for part in found["parts"])
    given: dict[str, Any] = {**found, "parts": parts, "command": tuple(found["command"])}
    return Launch(**given)


def report_to_dict(report: Report) -> dict[str, Any]:
    return dataclasses.asdict(report)


def report_from_dict(found: Mapping[str, Any]) -> Report:
    given: dict[str, Any] = {**found, "codes": {int(rank): code for rank, code in found["codes"].items()}}
    return Report(**given)


def facts_to_dict(facts: NodeFacts) -> dict[str, Any]:
    return dataclasses.asdict(facts)


def facts_from_dict(found: Mapping[str, Any]) -> NodeFacts:
    gpus = tuple(Gpu(**gpu) for gpu in found["gpus"])
    given: dict[str, Any] = {**found, "gpus": gpus, "mechanisms": tuple(found["mechanisms"])}
    return NodeFacts(**given)


def listening_socket(path: Path) -> socket.socket:
    """A Unix socket at this path, for the owner alone; a stale one is replaced."""
    path.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        found.bind(f"/proc/self/fd/{folder}/{path.name}")
        path.chmod(0o600)
        found.listen(128)
    except BaseException:
        found.close()
        raise
    finally:
        os.close(folder)
    return found


async def connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams to the socket at this path."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{path.name}", limit=LINE_LIMIT_BYTES)
    finally:
        os.close(folder)
