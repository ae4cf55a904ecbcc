"""What a Ray cluster says about itself, asked from inside: run by the driver process for `thebes engine check ray`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PROBE_S = 40.0
SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"


def look_around(ray: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Each living node, and the head's storage. `home` is HOST:PORT for nodes to try; without a host, ours in Ray."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from thebes.engine.ray.driver import entry

    home = request["home"]
    session = sys.modules["ray._private.worker"].global_worker.node.session_name
    if home.startswith(":"):
        home = f"{ray.util.get_node_ip_address()}{home}"
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    probe = ray.remote(_probe)
    table = [entry(one) for one in ray.nodes() if one["Alive"]]
    free = sys.modules["ray._private.state"].available_resources_per_node()
    asked = {}
    for one in table:
        where = NodeAffinitySchedulingStrategy(one["id"], soft=False)
        task = probe.options(num_cpus=0, num_gpus=0, max_retries=1, scheduling_strategy=where)
        asked[one["id"]] = task.remote(home, session if one["head"] else "")
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=PROBE_S)
    for one in table:
        one["free_gpus"] = int(free.get(one["id"], {}).get("GPU", 0))
        one["said"] = None
        with suppress(ray.exceptions.RayError):
            one["said"] = ray.get(asked[one["id"]], timeout=0.1)
    return {"ray": ray.__version__, "python": sys.version.split()[0], "home": home, "nodes": table}


def _probe(home: str, session: str) -> dict[str, Any]:
    """On a node; travels by value."""
    import socket

    said: dict[str, Any] = {"home": "", "subreaper": os.environ.get(SUBREAPER, "0").lower() in ("1", "true")}
    host, _, port = home.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
    except OSError as error:
        said["home"] = str(error)
    if session:
        said["storage"] = _storage(session)
    return said


def _storage(session: str) -> str:
    """What the GCS of this machine keeps its state in: memory, rocksdb or redis; empty if it cannot be seen."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (path / "cmdline").read_bytes().split(b"\0")
            if not command[0].endswith(b"gcs_server") or session.encode() not in b" ".join(command):
                continue
            environ = (path / "environ").read_bytes().split(b"\0")
            if b"RAY_gcs_storage=rocksdb" in environ:
                return "rocksdb"
            redis = [word for word in command if word.startswith(b"--redis_address=") and len(word) > 16]
            return "redis" if redis else "memory"
    return ""
