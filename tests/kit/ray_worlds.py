"""Engines on a Ray cluster of the tests, and looks at what they keep on its nodes."""

from __future__ import annotations

import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

from kit.ray_cluster import RayCluster
from thebes.engine.door import free_port
from thebes.engine.ray.engine import RayEngine
from thebes.engine.site import EngineSite
from thebes.node import processes
from thebes.protocol.contract import Launch
from thebes.protocol.instance import Instance

LEASE_S = 30.0  # longer than any machine stalls
SHORT_LEASE_S = 6.0  # for those who wait for its end
_numbers = count(1)
_worlds = count(1)


def job_name() -> str:
    """Other suites on this machine number their jobs, too."""
    return f"ray{os.getpid()}x{next(_numbers)}"


class RayWorld:
    """A world as the conformance tests know them, and what breaks in it."""

    name = "ray"

    def __init__(self, shared: Path, *, lease_s: float = LEASE_S, **cluster: Any) -> None:
        self.shared, self.lease_s = shared, lease_s
        self.cluster = RayCluster(**cluster)
        self.nodes = list(self.cluster.racks)
        self.instance_id = f"t{os.getpid()}w{next(_worlds)}"
        self.port = free_port()
        self._epochs = count(1)

    def __enter__(self) -> RayWorld:
        self.cluster.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.close()

    def engine(self, **more: Any) -> RayEngine:
        site = EngineSite(
            instance_id=self.instance_id,
            key=bytes(32),
            epoch=next(self._epochs),
            gpus=dict.fromkeys(self.nodes, self.cluster.gpus),
            gpu_types=dict.fromkeys(self.nodes, ""),
            shared_dir=self.shared,
            lease_s=self.lease_s,
            home_host="127.0.0.1",
            home_port=self.port,
            ray_address=self.cluster.address,
        )
        return RayEngine(site, **more)

    # On the nodes ----------------------------------------------------------------------------------------------------

    def folder(self, node: str) -> Path:
        return self.cluster.folder / "nodes" / self.instance_id / node

    def agent(self, node: str) -> int | None:
        return Instance(self.folder(node)).holder_pid(f"agent-{node}")

    def actor(self, node: str) -> int | None:
        """The worker of Ray in which our actor of this node lives."""
        below = processes.descendants(self.cluster.raylets[node])
        found = [pid for pid in below if (stat := processes.read_stat(pid)) and stat.name.startswith("ray::Bootstrap")]
        return found[0] if found else None

    def kill_agent(self, node: str) -> int:
        pid = self.agent(node)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid

    def crash(self, node: str) -> None:
        """The whole machine is gone: Ray, our agent, supervisors and jobs."""
        agent, actor = self.agent(node), self.actor(node)
        processes.kill_all([pid for pid in (actor, agent) if pid])  # first: they must not see the others go
        self.cluster.kill_raylet(node)
        mark = os.fsencode(f"{self.folder(node)}/")
        while True:
            found = [pid for pid in [*self.cluster.below(), *processes.all_pids()] if self._of(pid, mark)]
            if not found:
                return
            processes.kill_all(found)
            processes.wait_gone(found, 1.0)

    def _of(self, pid: int, mark: bytes) -> bool:
        stat = processes.read_stat(pid)
        if stat is None or not stat.alive or pid == os.getpid():
            return False
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return mark in command or mark.rstrip(b"/") + b"\0" in command or mark in processes.environment(pid)


def where(launch: Launch) -> list[str]:
    return [part.node for part in launch.parts]
