"""A real Slurm on this machine: slurmctld, one slurmd per node, munge, fake GPUs, racks, and every way to break it.

    with slurm_cluster(nodes=64, namespaced=("n5",)) as slurm:
        os.environ.update(slurm.env)              # SLURM_CONF: all that salloc, srun and our engine need
        slurm.kill_slurmd("n3"); slurm.start_slurmd("n3")
        slurm.kill_slurmctld();  slurm.start_slurmctld()
        slurm.cut_off("n5");     slurm.heal("n5")      # a node in a network namespace of its own
        slurm.drain("n4", "new disk"); slurm.resume("n4")
        slurm.queue()                              # every Slurm job that is not over: [(id, state, name, nodes)]
        slurm.leftovers()                          # [(pid, command line)]: what still runs besides the daemons

Nodes are n1, n2, ... with `gpus` GPUs each, in `switches` racks of equal size (rack1, rack2, ...). `exact_ids` gives
each GPU a gres type of its own (g0, g1, ...), so that a job can ask for exact ones; without it all are `gpu:a100`.
`whole_nodes` makes the partition exclusive. Partition `main` has all nodes; `cpu` has one node without GPUs, down.
Nodes carry the feature `thebes-virtual`: their GPUs are virtual, so jobs there can be frozen; unless `devices` names
real GPUs (/dev/nvidia0, ...). `slurm.address` is an
address of this machine that every node can call.

All daemons and whatever they start descend from one host process, a subreaper: it ends them all when we leave, also if
this process is killed. Root is needed (mknod, network namespaces, daemons that change user).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "salloc", "srun", "scancel", "squeue", "sinfo")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
PORTS = range(10_000, 19_900, 100)  # below MASTER_PORT's and below what Linux hands out
PR_SET_CHILD_SUBREAPER = 36


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurmctld slurmd slurm-client munge)"
    if os.geteuid() != 0:
        return "the fake cluster needs root (mknod, daemons)"
    return ""


class SlurmCluster:
    """What the fixture hands out; see the module's text."""

    def __init__(self, folder: Path, host: _Host, options: dict[str, Any]) -> None:
        self.dir = folder
        self.conf = folder / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf)}
        self.names = [f"n{number}" for number in range(1, options["nodes"] + 1)]
        self.gpus: int = options["gpus"]
        self.namespaced: tuple[str, ...] = tuple(options["namespaced"])
        self.address: str = options["address"]
        self.addresses: dict[str, str] = options["addresses"]
        self._links: dict[str, str] = options["links"]
        self._host = host

    # Breaking and mending

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL; the steps on that node go on."""
        self._host.ask(kill=f"slurmd-{node}")

    def start_slurmd(self, node: str) -> None:
        argv = ["slurmd", "-D", "-N", node, "-f", str(self.conf)]
        if node in self.namespaced:
            argv = ["ip", "netns", "exec", self._links[node], *argv]
        self._host.ask(start=f"slurmd-{node}", argv=argv)

    def kill_slurmctld(self) -> None:
        self._host.ask(kill="slurmctld")

    def start_slurmctld(self, *, wait: bool = True) -> None:
        self._host.ask(start="slurmctld", argv=["slurmctld", "-D", "-f", str(self.conf)])
        if wait:
            self.until(lambda: self._try("scontrol", "ping"), "slurmctld to answer")

    def cut_off(self, node: str) -> None:
        """Nothing gets through between this node and anybody else."""
        _run("ip", "link", "set", self._links[node], "down")

    def heal(self, node: str) -> None:
        """Its slurmd is told to look around, or slurmctld would find out by itself within a minute or two."""
        _run("ip", "link", "set", self._links[node], "up")
        self._host.ask(kill=f"slurmd-{node}", signal=signal.SIGHUP)

    def drain(self, node: str, reason: str = "a person drains it") -> None:
        self._update(node, "drain", f"reason={reason}")

    def resume(self, node: str) -> None:
        self._update(node, "resume")

    def _update(self, node: str, state: str, *more: str) -> None:
        """A slurmctld that is busy may have done it without an answer in time; a second `resume` is refused then."""
        update = ("scontrol", "update", f"nodename={node}", f"state={state}", *more)
        drained = state == "drain"
        self.until(lambda: self._try(*update) or ("drain" in self.states()[node]) is drained, f"{state} of {node}")

    # Looking

    def command(self, *argv: str, user: str | None = None, timeout: float = 60.0) -> str:
        """A Slurm command's output; raises subprocess.CalledProcessError."""
        if user:
            argv = ("runuser", "-u", user, "--", *argv)
        return subprocess.run(argv, env=self._env(), check=True, capture_output=True, text=True, timeout=timeout).stdout

    def queue(self) -> list[tuple[str, str, str, str]]:
        """Jobs that are not over: id, state, name, nodes."""
        lines = self.command("squeue", "-h", "-a", "-o", "%i|%T|%j|%N").splitlines()
        return [tuple(line.split("|", 3)) for line in lines]  # type: ignore[misc]

    def states(self) -> dict[str, str]:
        """State of each node as sinfo writes it: idle, mixed, allocated, down*, drained..."""
        lines = self.command("sinfo", "-h", "-a", "-N", "-o", "%N|%T").splitlines()
        found = dict(line.split("|", 1) for line in lines)
        return {name: found.get(name, "unknown") for name in self.names}

    def leftovers(self) -> list[tuple[int, str]]:
        """Processes that belong to this cluster besides its daemons: steps, ranks, and clients such as srun."""
        return [(pid, line) for pid, line in self._host.ask(leftovers=True)]

    def until(self, true: Callable[[], Any], what: str, told: Callable[[], object] = str) -> Any:
        """The first true answer. A command that a busy slurmctld has not answered in time is asked again."""
        from kit.waiting import until  # not above: this file is also a program, which finds no `kit`

        def look() -> Any:
            with suppress(subprocess.SubprocessError):
                return true()
            return None

        return until(look, what, every_s=0.05, told=lambda: f"{told()} see {self.dir}/log")

    def all_idle(self) -> bool:
        return set(self.states().values()) == {"idle"}

    def cancel_all(self) -> None:
        """End every job, whoever it belongs to, and wait until the queue is empty."""
        ids = [job.split("+")[0] for job, *_ in self.queue()]
        if ids:
            with suppress(subprocess.CalledProcessError):
                self.command("scancel", "--full", "-s", "KILL", *ids)
            with suppress(subprocess.CalledProcessError):
                self.command("scancel", *ids)
        self.until(lambda: not self.queue(), "an empty queue")

    def _env(self) -> dict[str, str]:
        return {"PATH": PATH, "HOME": "/root", **self.env}

    def _try(self, *argv: str) -> bool:
        try:
            return "DOWN" not in self.command(*argv)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False


@contextmanager
def slurm_cluster(
    folder: Path | None = None,
    *,
    nodes: int = 64,
    gpus: int = 8,
    exact_ids: bool = True,
    whole_nodes: bool = False,
    switches: int = 4,
    namespaced: Sequence[str] = (),
    max_time: str = "INFINITE",
    slurmd_timeout_s: int = 30,
    kill_wait_s: int = 5,
    shape: str = "CPUs=64 Sockets=2 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=64000",
    devices: Sequence[str] = (),
    conf: Sequence[str] = (),
) -> Iterator[SlurmCluster]:
    """A running cluster with every node idle. `conf`: further lines of slurm.conf. The folder is removed at the end.

    Who wants nodes to be found dead soon says so by `slurmd_timeout_s`; others are safe from a machine that is slow.
    """
    own = Path(tempfile.mkdtemp(prefix="thebes-slurm-", dir="/tmp")) if folder is None else Path(folder)
    own.mkdir(parents=True, exist_ok=True)
    own.chmod(0o755)  # other users run jobs here too
    for name in ("state", "log", "run", "dev"):
        (own / name).mkdir(exist_ok=True)
    with _Ports(nodes + 1) as ports, _Host(own) as host:
        options = {
            "nodes": nodes,
            "gpus": gpus,
            "namespaced": tuple(namespaced),
            "exact_ids": exact_ids,
            "whole_nodes": whole_nodes,
            "switches": switches,
            "max_time": max_time,
            "slurmd_timeout_s": slurmd_timeout_s,
            "kill_wait_s": kill_wait_s,
            "shape": shape,
            "devices": tuple(devices),
            "conf": tuple(conf),
            "ports": ports,
            "address": "127.0.0.1",
            "addresses": {f"n{number}": "127.0.0.1" for number in range(1, nodes + 1)},
            "links": {},
        }
        _make_network(host, options)
        _make_files(own, options)
        cluster = SlurmCluster(own, host, options)
        host.ask(
            start="munged",
            argv=[
                *("munged", "-F", "--force", f"--socket={own}/run/munge.sock", f"--key-file={own}/munge.key"),
                *(
                    f"--pid-file={own}/run/munged.pid",
                    f"--log-file={own}/log/munged.log",
                    f"--seed-file={own}/run/seed",
                ),
            ],
        )
        cluster.until((own / "run/munge.sock").exists, "munged")
        cluster.start_slurmctld(wait=False)
        for name in cluster.names:
            cluster.start_slurmd(name)
        cluster.until(lambda: cluster._try("scontrol", "ping"), "slurmctld to answer")
        cluster.until(cluster.all_idle, "every node to be idle")
        try:
            yield cluster
        finally:
            for name in cluster.namespaced:
                with suppress(RuntimeError):
                    cluster.heal(name)
            with suppress(subprocess.SubprocessError, AssertionError, OSError):
                cluster.cancel_all()  # a slurmstepd that cannot tell its result tries for ever
    if folder is None:
        shutil.rmtree(own, ignore_errors=True)


def _make_network(host: _Host, options: dict[str, Any]) -> None:
    """A bridge of our own with one namespace per named node; addresses only of ours."""
    if not options["namespaced"]:
        return
    tag = f"{os.getpid() % 0xFFFF:04x}{random.randrange(256):02x}"
    net = f"10.{random.randrange(64, 224)}.{random.randrange(256)}"
    bridge = f"thb{tag}"
    host.ask(undo=["ip", "link", "del", bridge])
    _run("ip", "link", "add", bridge, "type", "bridge")
    _run("ip", "addr", "add", f"{net}.1/24", "dev", bridge)
    _run("ip", "link", "set", bridge, "up")
    options["address"] = f"{net}.1"
    options["addresses"] = dict.fromkeys(options["addresses"], f"{net}.1")
    for number, node in enumerate(options["namespaced"], start=2):
        space = f"th{tag}n{number}"
        host.ask(undo=["ip", "netns", "del", space])
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", space, "master", bridge, "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "addr", "add", f"{net}.{number}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        options["addresses"][node] = f"{net}.{number}"
        options["links"][node] = space


def _make_files(own: Path, options: dict[str, Any]) -> None:
    key = own / "munge.key"
    key.write_bytes(random.randbytes(1024))
    key.chmod(0o400)
    for number in range(0 if options["devices"] else options["gpus"]):
        device = own / f"dev/nvidia{number}"
        with suppress(FileExistsError):
            os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))  # clones of /dev/null
    (own / "slurm.conf").write_text(slurm_conf(own, options))
    (own / "gres.conf").write_text(gres_conf(own, options))
    (own / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (own / "topology.conf").write_text(topology_conf(options))


def slurm_conf(own: Path, options: dict[str, Any]) -> str:
    ports = options["ports"]
    gres = "gpu:a100:" + str(options["gpus"])
    if options["exact_ids"]:
        gres = ",".join(f"gpu:g{number}:1" for number in range(options["gpus"]))
    shape, virtual = options["shape"], "" if options["devices"] else "Feature=thebes-virtual "
    lines = [
        "ClusterName=thebes",
        f"SlurmctldHost=localhost({options['address']})",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={own}/run/munge.sock",
        f"SlurmctldPort={ports[0]}",
        f"SlurmctldPidFile={own}/run/slurmctld.pid",
        f"SlurmdPidFile={own}/run/slurmd-%n.pid",
        f"StateSaveLocation={own}/state",
        f"SlurmdSpoolDir={own}/state/d-%n",
        f"SlurmctldLogFile={own}/log/slurmctld.log",
        f"SlurmdLogFile={own}/log/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "GresTypes=gpu",
        "ReturnToService=2",
        f"SlurmdTimeout={options['slurmd_timeout_s']}",
        f"KillWait={options['kill_wait_s']}",
        "MessageTimeout=5",
        "MinJobAge=60",
        "TreeWidth=128",
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=1000,bf_interval=1",
        "TopologyPlugin=topology/tree",
        *options["conf"],
    ]
    for number, (name, address) in enumerate(options["addresses"].items(), start=1):
        lines.append(
            f"NodeName={name} NodeHostname=localhost NodeAddr={address} Port={ports[number]} {shape} Gres={gres} "
            f"{virtual}State=UNKNOWN"
        )
    lines.append(f"NodeName=cpu1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[0] + 99} {shape} State=DOWN")
    limit = f"MaxTime={options['max_time']} State=UP"
    share = " OverSubscribe=EXCLUSIVE" if options["whole_nodes"] else ""
    lines.append(f"PartitionName=main Nodes=n[1-{options['nodes']}] Default=YES {limit}{share}")
    lines.append(f"PartitionName=cpu Nodes=cpu1 {limit}")
    return "\n".join(lines) + "\n"


def gres_conf(own: Path, options: dict[str, Any]) -> str:
    nodes, gpus = f"n[1-{options['nodes']}]", options["gpus"]
    files = options["devices"] or [f"{own}/dev/nvidia{number}" for number in range(gpus)]
    kinds = [f"g{number}" if options["exact_ids"] else "a100" for number in range(gpus)]
    return "".join(
        f"NodeName={nodes} Name=gpu Type={kind} File={file}\n" for kind, file in zip(kinds, files, strict=True)
    )


def topology_conf(options: dict[str, Any]) -> str:
    nodes, racks = options["nodes"], max(1, min(options["switches"], options["nodes"]))
    lines: list[str] = []
    for rack in range(racks):
        first, last = rack * nodes // racks + 1, (rack + 1) * nodes // racks
        lines.append(f"SwitchName=rack{rack + 1} Nodes=n[{first}-{last}]")
    lines.append(f"SwitchName=spine Switches=rack[1-{racks}]")
    return "\n".join(lines) + "\n"


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": PATH})
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


class _Ports:
    """A block of ports that nobody listens on, and that no other cluster of ours takes meanwhile."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.fd = -1

    def __enter__(self) -> list[int]:
        starts = list(PORTS)
        random.shuffle(starts)
        for start in starts:
            self.fd = os.open(f"/tmp/thebes-slurm-ports-{start}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ports = list(range(start, start + self.count))
                for port in ports:
                    with socket.socket() as probe:
                        probe.bind(("", port))
                return ports
            except OSError:
                os.close(self.fd)
        raise RuntimeError(f"there are no {self.count} free ports in a row")

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


class _Host:
    """The process that everything descends from, seen from the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> _Host:
        self.process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf"), "LC_ALL": "C.UTF-8"},
        )
        return self

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# The host process itself ---------------------------------------------------------------------------------------------


def _host_main(folder: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    undo: list[list[str]] = []
    try:
        for line in sys.stdin:
            request = json.loads(line)
            _reap(daemons)
            try:
                result = _host_do(folder, request, daemons, undo)
            except Exception as error:
                print(json.dumps({"error": repr(error)}), flush=True)
            else:
                print(json.dumps({"result": result}), flush=True)
    finally:
        _end_all(folder)
        for argv in reversed(undo):
            subprocess.run(argv, capture_output=True)


def _host_do(folder: str, request: dict[str, Any], daemons: dict[str, Any], undo: list[list[str]]) -> Any:
    match request:
        case {"start": name, "argv": argv}:
            if name in daemons and daemons[name].poll() is None:
                return daemons[name].pid
            with Path(folder, "log", f"{name}.out").open("ab") as log:
                daemons[name] = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            return daemons[name].pid
        case {"kill": name, "signal": number}:
            daemons[name].send_signal(number)
            return None
        case {"kill": name}:
            daemons[name].kill()
            daemons[name].wait()
            return None
        case {"undo": argv}:
            undo.append(argv)
            return None
        case {"leftovers": True}:
            known = {one.pid for one in daemons.values()} | {os.getpid()}
            found = [[pid, line] for pid, line in _belonging(folder) if pid not in known]
            return [one for one in found if "slurmscriptd" not in one[1]]  # a child of slurmctld
    raise ValueError(f"what is {request}?")


def _reap(daemons: dict[str, subprocess.Popen[bytes]]) -> None:
    """Orphans that ended; daemons are their Popen's to reap."""
    known = {one.pid for one in daemons.values()}
    for pid in _children(os.getpid()):
        if pid not in known:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


def _belonging(folder: str) -> list[tuple[int, str]]:
    """Our descendants, and whoever has our slurm.conf in its environment. Zombies do not count."""
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        for child in _children(queue.pop()):
            found.add(child)
            queue.append(child)
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    answer: list[tuple[int, str]] = []
    for pid in sorted(found):
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                answer.append((pid, line.strip()))
    return answer


def _end_all(folder: str) -> None:
    """Descendants only: a client elsewhere that merely knows of us ends by itself when we are gone."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found: list[int] = []
        queue = [os.getpid()]
        while queue:
            children = _children(queue.pop())
            found += children
            queue += children
        if not found:
            return
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


if __name__ == "__main__":
    _host_main(sys.argv[1])
