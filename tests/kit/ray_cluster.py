"""A real Ray cluster on this machine: a head and some nodes with 8 GPUs each that exist only as numbers.

It lives in a child process (this file, run as a program), which does what it is told line by line and is a subreaper:
so whatever a raylet or an agent leaves behind stays below it and is found. Nothing is ever killed by its name.

    with RayCluster() as cluster:
        cluster.kill_raylet("n1")
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from thebes.engine.door import free_port
from thebes.node import processes

GPUS = 8
OBJECT_STORE_BYTES = 80_000_000  # else every node takes a third of the machine's memory
RACKS = {"n1": "r0", "n2": "r0", "n3": "r1", "n4": "r1"}
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",  # a raylet on a slow machine is not dead
    "RAY_health_check_failure_threshold": "4",
    "RAY_enable_metrics_collection": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_num_prestart_python_workers": "0",
}
START_S = 120.0
PR_SET_CHILD_SUBREAPER = 36


class RayCluster:
    """`with` brings it up and takes it down again, whatever happened in between."""

    def __init__(
        self,
        racks: Mapping[str, str] | None = None,
        *,
        storage: str = "rocksdb",
        gpus: int = GPUS,
        cpus: int = 8,
        strange: bool = False,
    ) -> None:
        """`strange`: Python on the nodes finds another `thebes`, which does not load."""
        self.racks = dict(RACKS if racks is None else racks)
        self.storage = storage
        self.gpus = gpus
        self.cpus = cpus
        self.strange = strange
        self.folder = Path(tempfile.mkdtemp(prefix="thr-", dir="/tmp"))  # socket paths must be short
        self.address = ""
        self.raylets: dict[str, int] = {}
        self.seen: set[int] = set()  # all pids that were ever below the child

    def __enter__(self) -> RayCluster:
        env = {**os.environ, **SETTINGS, "RAY_TMPDIR": str(self.folder)}
        env["THEBES_RAY_DIR"] = str(self.folder / "nodes")
        env.pop("RAY_ADDRESS", None)
        if self.strange:
            package = self.folder / "strange" / "thebes"
            package.mkdir(parents=True)
            (package / "__init__.py").write_text("raise ImportError('this is not the thebes that you look for')\n")
            env["RAY_CLUSTER_PYTHONPATH"] = str(package.parent)
        if self.storage == "rocksdb":
            env |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.folder / "gcs")}
        self.child = subprocess.Popen(
            [sys.executable, __file__],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "stderr").open("wb"),
            start_new_session=True,
            bufsize=0,
        )
        try:
            self.address = self._ask("head")
            for node in self.racks:
                self.start_raylet(node, wait=False)
            self._ask("wait", nodes=1 + len(self.racks))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, op: str, timeout_s: float = 90.0, **more: Any) -> Any:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps({"op": op, **more}).encode() + b"\n")
        line = self.child.stdout.readline()
        self.below()
        if not line:
            raise RuntimeError(f"the process of the Ray cluster has ended: {self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{op}: {answer['error']}: {self._tail()}")
        return answer["result"]

    def _tail(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")[-2000:]

    # Nodes -----------------------------------------------------------------------------------------------------------

    def ip(self, node: str) -> str:
        return f"127.0.0.{10 + list(self.racks).index(node) + 1}"

    def start_raylet(self, node: str, *, wait: bool = True) -> None:
        """The node joins, or joins again under a new id."""
        labels = {"host": node, "rack": self.racks[node]}
        self.raylets[node] = self._ask(
            "start", node=node, ip=self.ip(node), labels=labels, gpus=self.gpus, cpus=self.cpus, wait=wait
        )

    def kill_raylet(self, node: str) -> None:
        """kill -9: a node's Ray crashes. What it had started is on its own."""
        os.kill(self.raylets[node], signal.SIGKILL)
        self._ask("died", node=node)

    def freeze_raylet(self, node: str) -> None:
        os.kill(self.raylets[node], signal.SIGSTOP)

    def thaw_raylet(self, node: str) -> None:
        os.kill(self.raylets[node], signal.SIGCONT)

    def forget_raylet(self, node: str) -> None:
        """One that was called dead ends by itself when it hears so."""
        assert processes.wait_gone([self.raylets[node]], 120.0)
        self._ask("died", node=node)

    def kill_gcs(self) -> None:
        self._ask("kill_gcs")

    def start_gcs(self) -> None:
        self._ask("start_gcs")

    # Others who use the same cluster: a process of its own, for it loads Ray -----------------------------------------

    def hold_gpus(self, node: str, gpus: int) -> list[int]:
        """Somebody else's actor takes so many GPUs of the node; which."""
        command = [sys.executable, "-c", _OTHER, self.address, node, str(gpus)]
        self.other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.other.stdout is not None
        return json.loads(self.other.stdout.readline())

    def let_go(self) -> None:
        assert self.other.stdin is not None
        self.other.stdin.close()
        self.other.wait(120)

    def pretend_version(self, ray: str, python: str) -> None:
        """The head tells everybody from now on that it is of these versions."""
        self._ask("pretend_version", ray=ray, python=python)

    def free_gpus(self, node: str) -> int:
        """As Ray sees it."""
        return self._ask("free_gpus", node=node)

    def restart_gcs(self) -> None:
        self.kill_gcs()
        self.start_gcs()

    def nodes(self) -> dict[str, bool]:
        """Whether Ray calls them alive, by name."""
        return self._ask("nodes")

    def wait_for(self, node: str, *, alive: bool) -> float:
        """Until the head says so; how long it took."""
        from kit.waiting import until  # not above: this file is also a program, which finds no `kit`

        begun_s = time.monotonic()
        until(lambda: self.nodes().get(node, False) is alive, f"Ray says alive={alive} of {node}", every_s=0.05)
        return time.monotonic() - begun_s

    def usage_mib(self) -> dict[str, float]:
        """Proportional set size of everything below each raylet, and of the head."""
        found = {node: sum(map(_pss_mib, [pid, *processes.descendants(pid)])) for node, pid in self.raylets.items()}
        total = sum(map(_pss_mib, [self.child.pid, *self.below()]))
        return {**found, "head": total - sum(found.values())}

    # The end ---------------------------------------------------------------------------------------------------------

    def below(self) -> list[int]:
        found = processes.descendants(self.child.pid)
        self.seen.update(found)
        return found

    def leftovers(self, marks: tuple[str, ...] = ("thebes.node",)) -> list[str]:
        """Command lines of living processes of ours below the cluster (agents, supervisors, jobs)."""
        found = [_command(pid) for pid in self.below()]
        return [line for line in found if any(mark in line for mark in marks)]

    def close(self) -> None:
        with suppress(OSError, RuntimeError):
            for pid in self.raylets.values():
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:  # the child reaps; new ones may appear while others die
            found = self.below()
            if not found:
                break
            processes.kill_all(found)
            processes.wait_gone(found, 1.0)
        self.child.kill()
        self.child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _pss_mib(pid: int) -> float:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024
    return 0.0


# The child -----------------------------------------------------------------------------------------------------------


_OTHER = """
import json, sys, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
address, node, gpus = sys.argv[1], sys.argv[2], int(sys.argv[3])
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
found = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Labels"].get("host") == node)
@ray.remote(num_cpus=0, num_gpus=gpus, scheduling_strategy=On(found, soft=False))
class Other:
    def gpus(self):
        return sorted(int(gpu) for gpu in ray.get_gpu_ids())
other = Other.remote()
print(json.dumps(ray.get(other.gpus.remote())), flush=True)
sys.stdin.read()
"""


class _Served:
    def __init__(self) -> None:
        self.nodes_by_name: dict[str, Any] = {}

    def head(self) -> str:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(shutdown_at_exit=False)
        args = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        self.cluster.add_node(**args, gcs_server_port=free_port())  # one that is still free when it is restarted
        return self.cluster.address

    def start(self, node: str, ip: str, labels: dict[str, str], gpus: int, cpus: int, wait: bool) -> int:
        found = self.cluster.add_node(
            wait=False,
            num_cpus=cpus,
            num_gpus=gpus,
            object_store_memory=OBJECT_STORE_BYTES,
            node_ip_address=ip,
            labels=labels,
        )
        self.nodes_by_name[node] = found
        if wait:
            self.cluster._wait_for_node(found, START_S)
        return found.all_processes["raylet"][0].process.pid

    def died(self, node: str) -> None:
        found = self.nodes_by_name.pop(node)
        self.cluster.worker_nodes.discard(found)

    def wait(self, nodes: int) -> None:
        deadline = time.monotonic() + START_S
        while sum(self.nodes().values()) < nodes - 1:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.nodes()}")
            time.sleep(0.1)

    def nodes(self) -> dict[str, bool]:
        """The newest entry of each name counts: a node that joins again has a new id."""
        found: dict[str, bool] = {}
        for one in self.cluster.global_state.node_table():
            name = (one.get("Labels") or {}).get("host")
            if name:
                found[name] = found.get(name, False) or bool(one["Alive"])
        return found

    def pretend_version(self, ray: str, python: str) -> None:
        from ray._common.usage import usage_constants, usage_lib

        client = self.cluster.head_node.get_gcs_client()
        said = {**usage_lib.get_cluster_metadata(client), "ray_version": ray, "python_version": python}
        key = usage_constants.CLUSTER_METADATA_KEY
        client.internal_kv_put(key, json.dumps(said).encode(), True, b"cluster")

    def free_gpus(self, node: str) -> int:
        state = self.cluster.global_state
        found = next(
            one["NodeID"]
            for one in state.node_table()
            if one["Alive"] and (one.get("Labels") or {}).get("host") == node
        )
        return int(state.available_resources_per_node().get(found, {}).get("GPU", 0))

    def kill_gcs(self) -> None:
        self.cluster.head_node.kill_gcs_server()

    def start_gcs(self) -> None:
        self.cluster.head_node.start_gcs_server()


def _serve() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    if "RAY_CLUSTER_PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.environ.pop("RAY_CLUSTER_PYTHONPATH")
    served = _Served()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(served, request.pop("op"))(**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": repr(error)}
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
