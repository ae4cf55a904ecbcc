"""The state of an instance, for `thebes status`. Locks tell which parts live, so it works with any part dead."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thebes.instance.asking import ANSWER_S, ask
from thebes.instance.wanted import shown_store
from thebes.live.config import (
    Config,
    load,
)
from thebes.model.errors import UserError
from thebes.protocol.instance import Instance, LockHeld

if TYPE_CHECKING:
    pass

STRANGE_S = 0.5  # a part that has just died, or has not yet written its name, is no stranger


def check_here(instance: Instance) -> None:
    """Refuse a folder of another machine: a network file system shows locks to all machines, but not processes."""
    deadline_s = time.monotonic() + STRANGE_S
    while strangers := [pid for pid in living_parts(instance).values() if not Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline_s:
            raise UserError(
                f"the cluster in {instance.dir} runs on another machine (pid {strangers[0]} is not here)",
                hint="log in there; or choose a folder on a local disk with --dir or THEBES_DIR",
            )
        time.sleep(0.05)


def alone(instance: Instance) -> Any:
    try:
        return instance.hold_lock("up", wait_s=60.0)
    except LockHeld as held:
        raise UserError(
            f"another `thebes up` or `thebes down` (pid {held.pid}) is at work in {instance.dir}",
            hint="wait for it, or end it",
        ) from None


def not_alive(instance: Instance, config: Config) -> list[str]:
    answer = ask(instance, "GET", "/v1/nodes", with_token=True, timeout_s=ANSWER_S)
    if answer is None or answer.status != 200:
        return config.node_names
    alive = {node["name"] for node in answer.body.get("nodes", []) if node.get("alive")}
    return [name for name in config.node_names if name not in alive]


def agent_names(instance: Instance) -> list[str]:
    """Nodes that have or had an agent. The folder is asked, so that a damaged configuration does not matter."""
    return sorted(path.name.removeprefix("agent-").removesuffix(".lock") for path in instance.run.glob("agent-*.lock"))


def living_parts(instance: Instance) -> dict[str, int]:
    """The pids of the keeper, the controller and the agents that live."""
    names = ("keeper", "standby", "controller", *(f"agent-{node}" for node in agent_names(instance)))
    found = {name: instance.holder_pid(name) for name in names}
    return {name: pid for name, pid in found.items() if pid is not None}


def describe(instance: Instance) -> dict[str, Any]:
    """The state of an instance, for `thebes status`; what cannot be known is None."""
    config = load(instance.config)
    parts = living_parts(instance)
    endpoint = instance.read_endpoint() or {}
    healthy, told, role, leader, silent = False, None, None, None, None
    controllers: Any = None
    if "controller" in parts:
        health = ask(instance, "GET", "/v1/healthz", timeout_s=ANSWER_S)
        healthy = health is not None and health.status == 200
        if health is not None and healthy:
            role, leader = health.body.get("role"), health.body.get("leader")
            controllers = health.body.get("controllers")
        if healthy and role != "standby":
            told = ask(instance, "GET", "/v1/status", with_token=True, timeout_s=ANSWER_S)
            silent = not_alive(instance, config)
    facts = told.body if told is not None and told.status == 200 else {}
    gpus: dict[str, Any] = facts["gpus"] if isinstance(facts.get("gpus"), dict) else {}
    return {
        "dir": str(instance.dir),
        "url": endpoint.get("url") if "controller" in parts else None,
        "policy": config.policy,
        "placement": config.placement,
        "keeper": {"pid": parts.get("keeper")},
        "controller": {"pid": parts.get("controller"), "healthy": healthy, "role": role},
        "store": shown_store(config.store) or None,
        "leader": leader,
        "controllers": controllers or facts.get("controllers"),
        "engine": config.engine,
        "agents": [{"node": node, "pid": parts.get(f"agent-{node}")} for node in config.node_names]
        if config.engine == "local"
        else [],  # Slurm or Ray start what is needed
        "nodes": {"total": len(config.nodes), "silent": silent},
        "gpus": {
            "total": gpus.get("total", config.gpus),
            "busy": gpus.get("busy"),
            "virtual": all(node.virtual for node in config.nodes),
        },
        "jobs": facts.get("jobs"),
        "trouble": facts.get("trouble"),
    }
