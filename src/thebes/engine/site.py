"""What an engine must know of the cluster that it runs on, and of the controller that it works for."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class EngineSite:
    """Slurm or Ray, some of its nodes, and how those find us."""

    instance_id: str  # short and unique: names what is ours on a cluster that others use, too
    key: bytes = field(repr=False)
    epoch: int
    gpus: dict[str, int]  # of each node that is ours to use, in rack order
    gpu_types: dict[str, str]
    shared_dir: Path  # the same folder on all nodes
    lease_s: float
    home_host: str = ""  # at which nodes reach this controller
    home_port: int = 0
    other_homes: tuple[str, ...] = ()  # of controllers that may take over
    partition: str = ""
    reservation: str = ""
    account: str = ""
    qos: str = ""
    time_limit: str = ""  # of our Slurm jobs
    ray_address: str = ""
    python: str = sys.executable

    def home(self, port: int) -> str:
        """HOST:PORT for nodes to call, given the port that we got."""
        host = self.home_host or socket.getfqdn()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
