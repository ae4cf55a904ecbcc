"""`thebes engine check ray`: what a Ray cluster offers to Thebes, and what would be lost on it."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections import Counter
from typing import Any

from thebes.engine.finding import SiteFinding
from thebes.engine.ray import nodes as ray_nodes
from thebes.model.errors import UserError

CHECK_S = 90.0
STORAGE_HINT = (
    "start the head with RAY_gcs_storage=rocksdb RAY_gcs_storage_path=DIR (Ray 2.60 or newer), or with "
    "RAY_REDIS_ADDRESS=HOST:PORT"
)


def check(address: str, home_host: str = "") -> list[SiteFinding]:
    """Ask the cluster; whatever keeps us from asking is the only finding then."""
    try:
        found = _ask(address, home_host)
    except UserError as error:
        return [SiteFinding("problem", "Ray cluster", error.message, error.hint)]
    nodes: list[dict[str, Any]] = found["nodes"]
    return [
        SiteFinding("ok", "versions", f"Ray {found['ray']}, Python {found['python']}, here and on the cluster"),
        *_nodes(nodes),
        _gpus(nodes),
        *_others(nodes),
        _storage(nodes),
        _racks(nodes),
        *_conduct(nodes, found["home"]),
    ]


def _nodes(nodes: list[dict[str, Any]]) -> list[SiteFinding]:
    with_gpus = [node for node in nodes if node["gpus"]]
    names = Counter(map(ray_nodes.name_of, with_gpus))
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        return [
            SiteFinding(
                "problem",
                "nodes",
                f"several nodes are called '{twice[0]}'",
                "give each a label of its own: ray start --labels=host=NAME",
            )
        ]
    found = [SiteFinding("ok", "nodes", f"{len(with_gpus)} with GPUs, {len(nodes)} in all: {_some(names)}")]
    mute = [ray_nodes.name_of(node) for node in nodes if node["said"] is None]
    if mute:
        found.append(
            SiteFinding(
                "problem",
                "workers",
                f"no worker of Ray starts on {_some(mute)}",
                "Ray's logs on that node (/tmp/ray/session_latest/logs) tell why",
            )
        )
    return found


def _gpus(nodes: list[dict[str, Any]]) -> SiteFinding:
    real = sum(node["gpus"] for node in nodes if node["gpu_type"])
    virtual = sum(node["gpus"] for node in nodes if not node["gpu_type"])
    if not real and not virtual:
        return SiteFinding(
            "problem",
            "GPUs",
            f"none of the {len(nodes)} nodes has a GPU",
            "Ray finds GPUs when it starts on a node; to try Thebes without any: ray start --num-gpus=8",
        )
    kinds = ", ".join(sorted({node["gpu_type"] for node in nodes if node["gpu_type"]}))
    if virtual:
        told = f"{virtual} GPUs exist only as numbers: Ray was told of them (--num-gpus) and has found no device"
        return SiteFinding("warning", "GPUs", (f"{real} of type {kinds}; " if real else "") + told)
    return SiteFinding("ok", "GPUs", f"{real} of type {kinds}; Thebes chooses exactly which a job gets")


def _others(nodes: list[dict[str, Any]]) -> list[SiteFinding]:
    held = {ray_nodes.name_of(node): node["gpus"] - node["free_gpus"] for node in nodes if node["gpus"]}
    held = {name: gpus for name, gpus in held.items() if gpus > 0}
    if not held:
        return [
            SiteFinding(
                "ok", "reserving", "all GPUs are free: Thebes reserves them, so that Ray gives them to no other"
            )
        ]
    told = ", ".join(f"{gpus} on {name}" for name, gpus in list(held.items())[:4])
    return [
        SiteFinding(
            "warning",
            "reserving",
            f"others in Ray (or a running Thebes) hold GPUs: {told}",
            "Thebes leaves them alone and takes each as soon as it is free",
        )
    ]


def _storage(nodes: list[dict[str, Any]]) -> SiteFinding:
    said = next((node["said"] for node in nodes if node["head"] and node["said"]), {})
    storage = said.get("storage", "")
    if storage in ("rocksdb", "redis"):
        return SiteFinding("ok", "head", f"keeps its state in {storage}: a restart of the head disturbs nobody")
    if storage == "memory":
        return SiteFinding(
            "warning",
            "head",
            "keeps its state in memory: if it restarts, Ray's nodes have to join anew. Running jobs go on, and Thebes "
            "takes them over when the nodes are back",
            STORAGE_HINT,
        )
    return SiteFinding("warning", "head", "what it keeps its state in cannot be seen from inside", STORAGE_HINT)


def _racks(nodes: list[dict[str, Any]]) -> SiteFinding:
    racks = {ray_nodes.rack_of(node) for node in nodes if node["gpus"]}
    unnamed = [ray_nodes.name_of(node) for node in nodes if node["gpus"] and not ray_nodes.rack_of(node)]
    if unnamed:
        return SiteFinding(
            "warning",
            "racks",
            f"{_some(unnamed)} {'have' if len(unnamed) > 1 else 'has'} no label that tells the rack: taken as one rack",
            "ray start --labels=host=NAME,rack=RACK",
        )
    return SiteFinding("ok", "racks", f"{len(racks)}: {_some(sorted(racks))}")


def _conduct(nodes: list[dict[str, Any]], home: str) -> list[SiteFinding]:
    found: list[SiteFinding] = []
    said = {ray_nodes.name_of(node): node["said"] for node in nodes if node["said"] and node["gpus"]}
    cut = {name: words["home"] for name, words in said.items() if words["home"]}
    if cut:
        name, why = next(iter(cut.items()))
        found.append(
            SiteFinding(
                "problem",
                "calling home",
                f"{_some(cut)} cannot reach this machine at {home}: {name} says: {why}",
                "--home HOST[:PORT] names an address that nodes reach; a firewall may have to let the port through",
            )
        )
    elif said:
        found.append(
            SiteFinding("ok", "calling home", f"{len(said)} nodes reach this machine at {home.rpartition(':')[0]}")
        )
    bound = [name for name, words in said.items() if words["subreaper"]]
    if bound:
        found.append(
            SiteFinding(
                "warning",
                "survival",
                f"on {_some(bound)} Ray ends whatever its workers have started: jobs die with the actor of Thebes",
                "unset RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper and restart Ray there",
            )
        )
    else:
        found.append(SiteFinding("ok", "survival", "jobs outlive Ray's workers, raylets and head"))
    return found


def _some(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
    return ", ".join(listed[:6]) + more


def _ask(address: str, home_host: str) -> dict[str, Any]:
    """The answer of a driver process; a door of ours stands open meanwhile, for nodes to try."""
    with socket.create_server(("", 0)) as door:
        home = f"{home_host}:{door.getsockname()[1]}"
        process = subprocess.Popen(
            ray_nodes.driver_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(CHECK_S, process.kill)
        timer.start()
        try:
            first = {"address": address, "instance": "check"}
            process.stdin.write(json.dumps(first) + "\n" + json.dumps({"id": 1, "op": "check", "home": home}) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                said = json.loads(line)
                if said.get("push") == "error":
                    raise UserError(said["message"], hint=said["hint"])
                if said.get("id") == 1:
                    if "error" in said:
                        raise UserError(f"the Ray cluster could not be looked at: {said['detail']}")
                    return said["result"]
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
            process.kill()
            process.wait()
    raise UserError(
        f"the Ray cluster at {address or 'auto'} has not told about itself within {CHECK_S:g} s",
        hint="`ray status` tells whether its head is well",
    )
