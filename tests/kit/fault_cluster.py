"""A real cluster for fault tests: real processes, killed by what they hold, and nothing of it left at the end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from kit.waiting import PATIENCE_S
from thebes.client import Client
from thebes.instance.up import bring_up
from thebes.instance.wanted import UpOptions
from thebes.live.config import Config, save
from thebes.node import processes
from thebes.node.keeper import stop_instance
from thebes.protocol.instance import Instance, wait_gone

T = TypeVar("T")
JOB = Path(__file__).with_name("faulty_job.py")


def overload() -> float:
    """How many processes want each core; 1 and less is a machine that has time for us."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class FaultCluster:
    """An instance that is up, what lives in it, and how to hit it."""

    def __init__(self, folder: Path) -> None:
        self.instance = Instance(folder)
        self.client = Client(dir=folder)
        self.standby_killed_s = float("-inf")

    def up(self, **options: Any) -> None:
        for chance in range(3):  # more than 30 s to come up happens on a machine that is full
            try:
                bring_up(self.instance, UpOptions(**options))
                return
            except Exception:
                if chance == 2:
                    raise

    @property
    def nodes(self) -> list[str]:
        return [node["name"] for node in json.loads(self.instance.config.read_text())["nodes"]]

    def job_command(self, folder: Path, key: str, kind: str, steps: int, step_s: float) -> list[str]:
        return [sys.executable, str(JOB), str(folder), key, kind, str(steps), str(step_s)]

    # -- who lives

    def pid(self, part: str) -> int | None:
        with suppress(Exception):
            return self.instance.holder_pid(part)
        return None

    def nursery(self, node: str) -> int | None:
        """The agent's child that forks supervisors."""
        agent = self.pid(f"agent-{node}")
        for child in processes.children(agent) if agent else []:
            with suppress(OSError):
                if b"--nursery" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0") and (
                    os.getsid(child) == os.getsid(agent or 0)
                ):
                    return child
        return None

    def of_jobs(self) -> dict[int, dict[str, str]]:
        """Every process of any attempt of this instance, with its environment."""
        mark = f"THEBES_ATTEMPT_DIR={self.instance.dir}/".encode()
        found: dict[int, dict[str, str]] = {}
        for pid in processes.all_pids():
            raw = processes.environment(pid)
            if mark in raw:
                words = [entry.decode(errors="replace").partition("=") for entry in raw.split(b"\0")]
                found[pid] = {name: value for name, _, value in words}
        return found

    def of_instance(self) -> list[int]:
        """Every other process that names the folder in its command line: keeper, standby, controller, agents."""
        mark, found = str(self.instance.dir).encode(), []
        for pid in processes.all_pids():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                stat = processes.read_stat(pid)
                if mark in words and pid != os.getpid() and stat and stat.alive:
                    found.append(pid)
        return found

    # -- hitting

    def kill(self, pid: int) -> bool:
        """SIGKILL; whether there was somebody to hit. Returns when it is gone."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return wait_gone(pidfd, PATIENCE_S)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)

    # -- asking

    def answers(self) -> bool:
        """The controller answers and has all its agents."""
        with suppress(Exception), Client(dir=self.instance.dir) as client:
            alive = {node["name"]: node for node in client.nodes()}
            return all(
                name in alive and alive[name]["alive"] and alive[name]["pid"] == self.pid(f"agent-{name}")
                for name in self.nodes
            )
        return False

    def logs(self) -> str:
        """The end of every log, for a test that fails."""
        told = []
        for path in sorted(self.instance.log.glob("*")):
            with suppress(OSError):
                told.append(f"--- {path.name}\n" + path.read_text(errors="replace")[-3000:])
        return "\n".join(told)

    # -- the end

    def clean_up(self) -> None:
        """Whatever has happened: nothing lives on."""
        self.client.close()
        with suppress(Exception):
            stop_instance(self.instance, self.nodes)
        deadline = time.monotonic() + PATIENCE_S
        while (left := [*self.of_instance(), *self.supervisors(), *self.of_jobs()]) and time.monotonic() < deadline:
            processes.kill_all(left)
            processes.wait_gone(left, 1.0)

    def supervisors(self) -> list[int]:
        return [attempt.pid for attempt in self.instance.live_attempts()]


@contextmanager
def fault_cluster(folder: Path, *, log_limit_mib: int = 64, **options: Any) -> Iterator[FaultCluster]:
    """A cluster that is up; when the block ends nothing of it lives."""
    cluster = FaultCluster(folder)
    try:
        if log_limit_mib != 64:
            cluster.instance.create()
            nodes = [
                {"name": f"n{i}", "gpus": options.get("virtual_gpus", 2), "virtual": True}
                for i in range(options.get("nodes", 1))
            ]
            save(cluster.instance.config, Config(nodes=nodes, log_limit_mib=log_limit_mib))  # type: ignore[arg-type]
        cluster.up(**{"virtual_gpus": 2, **options})
        yield cluster
    finally:
        cluster.clean_up()
