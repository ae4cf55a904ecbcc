"""A live cluster of its own for a measurement: bring it up, talk to it over bare HTTP, look at its processes."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from thebes.client import Client
from thebes.instance.down import take_down
from thebes.instance.standby import rehearse
from thebes.instance.state import describe
from thebes.instance.up import bring_up
from thebes.instance.wanted import UpOptions
from thebes.protocol.instance import Instance

TICKS = os.sysconf("SC_CLK_TCK")


class Wire:
    """One kept connection to the controller, with no more than the standard library: costs the client little."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, bytes]:
        self._connection.request(method, path, body, {**self._headers, **headers})
        response = self._connection.getresponse()
        return response.status, response.read()

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class LiveCluster:
    """A cluster that is up."""

    instance: Instance
    url: str

    def wire(self) -> Wire:
        return Wire(self.url, self.instance.read_token())

    def client(self) -> Client:
        return Client(dir=self.instance.dir)

    def status(self) -> dict[str, Any]:
        return describe(self.instance)

    def metrics(self) -> dict[str, float]:
        """Every series of /metrics by name and labels."""
        wire = self.wire()
        text = wire.ask("GET", "/metrics")[1].decode()
        wire.close()
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def parts(self) -> dict[str, list[psutil.Process]]:
        """Its processes by what they are; supervisors hold the locks of attempts, what they run is the jobs'."""
        holders = {path.stem: self.instance.holder_pid(path.stem) for path in self.instance.run.glob("*.lock")}
        known = {name: [psutil.Process(pid)] for name, pid in holders.items() if pid}
        agents = [process for name, found in known.items() if name.startswith("agent-") for process in found]
        known["nursery"] = [child for agent in agents for child in agent.children()]
        known["supervisors"] = [psutil.Process(attempt.pid) for attempt in self.instance.live_attempts() if attempt.pid]
        return known


@contextmanager
def cluster(gpus: int, *, folder: Path | None = None, policy: str = "tiresias-l") -> Iterator[LiveCluster]:
    """Up with so many virtual GPUs on one node, in a folder that is removed at the end unless it was given."""
    home = folder or Path(tempfile.mkdtemp(prefix="thebes-bench-"))
    instance = Instance(home)
    try:
        brought = bring_up(instance, UpOptions(policy=policy, virtual_gpus=gpus), rehearse)
        yield LiveCluster(instance, brought.url)
    finally:
        take_down(instance, "kill", lambda text: None)
        if folder is None:
            shutil.rmtree(home, ignore_errors=True)


def wait_until(true: Callable[[], Any], *, timeout_s: float, every_s: float = 0.01) -> float:
    """Seconds until it was true."""
    began = time.perf_counter()
    while not true():
        if time.perf_counter() - began > timeout_s:
            raise TimeoutError("a condition was not met in time")
        time.sleep(every_s)
    return time.perf_counter() - began


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def memory_mb(process: psutil.Process) -> tuple[float, float]:
    """Resident, and the share that is its own when shared pages are divided among those who share them (PSS)."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    found = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    return found["Rss"] / 1024, found["Pss"] / 1024


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def spread_ms(seconds: list[float]) -> dict[str, float]:
    return {
        "median_ms": 1e3 * percentile(seconds, 0.5),
        "p95_ms": 1e3 * percentile(seconds, 0.95),
        "p99_ms": 1e3 * percentile(seconds, 0.99),
        "max_ms": 1e3 * max(seconds),
    }


def job_body(command: list[str], **fields: Any) -> str:
    return json.dumps({"command": command, "workdir": "/", **fields})
