"""What `thebes doctor` looks at: the machine, its GPUs, the folder of the instance, the port and the store.

Each check tells what it found and, when that is not good, how to put it right. Nothing is changed.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from thebes.engine.finding import Level
from thebes.live.config import Config, check_listening, load
from thebes.model.errors import UserError
from thebes.protocol.instance import Instance

SUSPEND_DRIVER = 570  # the first driver that can suspend a CUDA process
LITTLE_SPACE = 1 << 30
NO_SPACE = 100 << 20
ENOUGH_FILES = 4096
ENOUGH_PROCESSES = 2048
SUSPICIOUS_CLOCK_S = 5.0
LOGIND = ("/etc/systemd/logind.conf", "/usr/lib/systemd/logind.conf.d/*.conf", "/etc/systemd/logind.conf.d/*.conf")
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "fuse.sshfs", "9p", "ceph", "beegfs"})


@dataclass(frozen=True)
class Finding:
    """One line of the answer."""

    check: str
    level: Level
    found: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def examine(instance: Instance) -> list[Finding]:
    """All checks, in the order in which they build on each other. A check that fails itself is told as a problem."""
    findings: list[Finding] = []
    for name, check in _CHECKS.items():
        try:
            findings.extend(check(instance))
        except UserError as error:
            findings.append(Finding(name, "problem", error.message, error.hint))
        except Exception as error:
            findings.append(Finding(name, "problem", f"the check failed: {type(error).__name__}: {error}"))
    return findings


def check_python(instance: Instance) -> Iterator[Finding]:
    version = platform.python_version()
    missing = [name for name in ("fastapi", "uvicorn", "sqlalchemy", "httpx", "pydantic") if not _importable(name)]
    if missing:
        yield Finding("python", "problem", f"not installed: {', '.join(missing)}", "pip install 'thebes[live]'")
        return
    yield Finding("python", "ok", f"Python {version}, all packages of a live cluster")


def _importable(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def check_kernel(instance: Instance) -> Iterator[Finding]:
    if not sys.platform.startswith("linux"):
        yield Finding("kernel", "problem", sys.platform, "a live cluster needs Linux; simulations run here")
        return
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        yield Finding("kernel", "problem", f"Linux {platform.release()} without pidfd", "Linux 5.3 or newer is needed")
        return
    yield Finding("kernel", "ok", f"Linux {platform.release()}")


def check_gpu(instance: Instance) -> Iterator[Finding]:
    from thebes.node.gpus import discover

    if instance.exists and (engine := load(instance.config).engine) != "local":
        yield Finding("gpu", "ok", f"on the nodes of {engine.capitalize()}: `thebes engine check {engine}` looks there")
        return
    try:
        gpus = discover()
    except UserError as error:
        yield Finding("gpu", "warning", error.message, error.hint)
        return
    names = sorted({gpu.name for gpu in gpus if gpu.name})
    broken = [str(gpu.index) for gpu in gpus if not gpu.healthy]
    if broken:
        fix = "look at `nvidia-smi -q`; a reset or a new card may be needed"
        yield Finding("gpu", "problem", f"not healthy: GPU {', '.join(broken)} of {len(gpus)}", fix)
    else:
        yield Finding("gpu", "ok", f"{len(gpus)} x {', '.join(names)}")
    yield _driver()
    yield _mps()


def _driver() -> Finding:
    import pynvml

    pynvml.nvmlInit()
    try:
        text = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    driver = text.decode() if isinstance(text, bytes) else str(text)
    major = driver.partition(".")[0]
    if major.isdigit() and int(major) >= SUSPEND_DRIVER:
        return Finding("driver", "ok", f"driver {driver}: can suspend CUDA processes")
    return Finding(
        "driver",
        "warning",
        f"driver {driver} cannot suspend CUDA processes: jobs are preempted by checkpoint alone",
        f"driver {SUSPEND_DRIVER} or newer can",
    )


def _mps() -> Finding:
    program = shutil.which("nvidia-cuda-mps-control")
    if program:
        return Finding("mps", "ok", f"{program}: jobs can be packed on one GPU")
    return Finding(
        "mps",
        "warning",
        "nvidia-cuda-mps-control is not in PATH: jobs are never packed on one GPU",
        "it comes with the driver's compute utilities (nvidia-compute-utils)",
    )


def check_folder(instance: Instance) -> Iterator[Finding]:
    path = instance.dir
    if not path.exists():
        parent = next(folder for folder in path.parents if folder.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            yield Finding("folder", "ok", f"{path} does not exist yet and can be made")
        else:
            yield Finding("folder", "problem", f"{parent} cannot be written to", "choose another folder with --dir")
        return
    if not path.is_dir():
        yield Finding("folder", "problem", f"{path} is not a folder", "choose another one with --dir")
        return
    status = path.stat()
    if status.st_uid != os.geteuid():
        yield Finding(
            "folder", "problem", f"{path} belongs to uid {status.st_uid}", "choose one of your own with --dir"
        )
        return
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield Finding("folder", "problem", f"{path} cannot be read and written", f"chmod 700 {path}")
        return
    if stat.S_IMODE(status.st_mode) & 0o077:
        yield Finding("folder", "warning", f"others can look into {path}", f"chmod 700 {path}")
    else:
        yield Finding("folder", "ok", f"{path}, yours alone")
    if instance.token.exists() and stat.S_IMODE(instance.token.stat().st_mode) & 0o077:
        yield Finding("token", "problem", "others can read the admin's token", f"chmod 600 {instance.token}")
    kind = file_system_of(path)
    if kind in NETWORK_FILE_SYSTEMS:
        yield Finding(
            "folder",
            "warning",
            f"{path} is on a network file system ({kind}), where SQLite is slow and unsafe",
            "choose a folder on a local disk with --dir",
        )


def file_system_of(path: Path) -> str:
    """The type of the file system that holds a path."""
    best, kind = "", ""
    try:
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, name, *_ = line.split(" ")
            place = place.replace("\\040", " ")
            if len(place) > len(best) and path.is_relative_to(place):
                best, kind = place, name
    except (OSError, ValueError):
        return ""
    return kind


def check_disk(instance: Instance) -> Iterator[Finding]:
    place = next(folder for folder in (instance.dir, *instance.dir.parents) if folder.exists())
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    shown = f"{free / (1 << 30):.1f} GiB free for {instance.dir}"
    if free < NO_SPACE:
        yield Finding("disk", "problem", shown, "free some space: nothing can be accepted when the disk is full")
    elif free < LITTLE_SPACE:
        yield Finding("disk", "warning", shown, "free some space: logs and checkpoints need it")
    elif status.f_files and status.f_favail < 10_000:
        yield Finding(
            "disk", "warning", f"only {status.f_favail} files can still be made", "remove files you do not need"
        )
    else:
        yield Finding("disk", "ok", shown)


def check_clock(instance: Instance) -> Iterator[Finding]:
    if time.gmtime().tm_year < 2024:
        yield Finding("clock", "problem", time.strftime("it is %F here"), "set the clock: timedatectl set-ntp true")
        return
    place = instance.run if os.access(instance.run, os.W_OK) else Path(tempfile.gettempdir())
    with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
        apart_s = os.fstat(file.fileno()).st_mtime - time.time()
    if abs(apart_s) > SUSPICIOUS_CLOCK_S:
        yield Finding(
            "clock",
            "warning",
            f"the clock of the file system is {apart_s:+.0f} s off ours",
            "let both machines take their time from one server",
        )
        return
    yield Finding("clock", "ok", time.strftime("%F %T %Z"))


def check_limits(instance: Instance) -> Iterator[Finding]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < ENOUGH_FILES:
        fix = f"raise it: ulimit -Hn {ENOUGH_FILES * 4} as root, or /etc/security/limits.conf"
        yield Finding("open files", "warning", f"at most {files} open files per process", fix)
    else:
        yield Finding("open files", "ok", "no limit" if files == resource.RLIM_INFINITY else f"up to {files}")
    found = {"ulimit -u": _soft_process_limit(), "the cgroup": _cgroup_number("pids.max")}
    limits = {name: number for name, number in found.items() if number is not None}
    name = min(limits, key=lambda name: limits[name]) if limits else ""
    if name and limits[name] < ENOUGH_PROCESSES:
        yield Finding(
            "processes",
            "warning",
            f"{name} allows {limits[name]} processes: each job takes several",
            f"raise it to {ENOUGH_PROCESSES} or more (limits.conf, or TasksMax of the systemd unit)",
        )
    else:
        yield Finding("processes", "ok", f"up to {limits[name]} ({name})" if name else "no limit")


def _soft_process_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_number(name: str) -> int | None:
    """A limit of our cgroup (version 2) or of one above it; the smallest counts."""
    found: list[int] = []
    try:
        line = next(x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / line.removeprefix("0::").lstrip("/")
        for place in (folder, *folder.parents):
            text = (place / name).read_text().strip() if (place / name).exists() else "max"
            if text.isdigit():
                found.append(int(text))
    except (OSError, StopIteration):
        return None
    return min(found, default=None)


def check_logout(instance: Instance) -> Iterator[Finding]:
    """On some machines systemd ends all processes of a user who logs out."""
    from thebes.instance.main import user_name

    user = user_name()
    if os.geteuid() == 0 or not _kills_at_logout(LOGIND) or Path(f"/var/lib/systemd/linger/{user}").exists():
        yield Finding("log-out", "ok", "the cluster outlives your session")
        return
    yield Finding(
        "log-out",
        "warning",
        "systemd here ends all processes of a user who logs out: the cluster and its jobs, too",
        "loginctl enable-linger, before `thebes up`",
    )


def _kills_at_logout(files: Sequence[str]) -> bool:
    """What logind's configuration says last about KillUserProcesses; the default is no."""
    answer = "no"
    for pattern in files:
        for path in sorted(Path("/").glob(pattern.lstrip("/"))):
            with suppress(OSError):
                for line in path.read_text(errors="replace").splitlines():
                    key, _, value = line.partition("=")
                    answer = value.strip().lower() if key.strip() == "KillUserProcesses" else answer
    return answer in ("yes", "true", "on", "1")


def check_config(instance: Instance) -> Iterator[Finding]:
    if not instance.exists:
        yield Finding("instance", "ok", "none here yet: `thebes up` makes one")
        return
    config = load(instance.config)
    check_listening(config)
    yield Finding("instance", "ok", f"policy {config.policy}, {_nodes(config)}, {config.gpus} GPUs")


def _nodes(config: Config) -> str:
    of = "" if config.engine == "local" else f" of {config.engine.capitalize()}"
    return f"{len(config.nodes)} node{'' if len(config.nodes) == 1 else 's'}{of}"


def check_processes(instance: Instance) -> Iterator[Finding]:
    from thebes.instance.asking import ANSWER_S, ask
    from thebes.instance.state import living_parts

    if not instance.exists:
        return
    config = load(instance.config)
    agents = config.node_names if config.engine == "local" else []  # Slurm or Ray start what is needed
    expected = {"keeper", "controller", *(f"agent-{name}" for name in agents)}
    alive = living_parts(instance)
    missing = sorted(expected - set(alive))
    if not alive:
        yield Finding("running", "ok", "the cluster is down: `thebes up` starts it")
    elif missing:
        yield Finding("running", "warning", f"does not run: {', '.join(missing)}", "`thebes up` starts what is missing")
    else:
        health = ask(instance, "GET", "/v1/healthz", timeout_s=ANSWER_S)
        if health is not None and health.status == 200:
            yield Finding("running", "ok", f"{len(alive)} processes, and the controller answers")
        else:
            yield Finding(
                "running", "problem", "the controller does not answer", f"see {instance.log / 'controller.jsonl'}"
            )


def check_port(instance: Instance) -> Iterator[Finding]:
    config = load(instance.config) if instance.exists else None
    if config is None or config.port == 0:
        yield Finding("port", "ok", "any free one is taken")
        return
    if instance.holder_pid("controller") is not None:
        endpoint = instance.read_endpoint() or {}
        yield Finding("port", "ok", f"the controller has it: {endpoint.get('url', config.port)}")
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            yield Finding(
                "port",
                "problem",
                f"port {config.port} on {config.host}: {(error.strerror or str(error)).lower()}",
                "choose another with `thebes up --port`, or end the program that has it",
            )
            return
    yield Finding("port", "ok", f"{config.port} is free")


def check_store(instance: Instance) -> Iterator[Finding]:
    url = ""
    with suppress(UserError):  # another check tells what is wrong with the configuration
        url = load(instance.config).store
    if url:
        from thebes.store import Store

        with Store.open(url) as store:
            yield Finding("store", "ok", f"{store.database.label} answers")
        return
    if not instance.store.exists():
        yield Finding("store", "ok", "none yet")
        return
    from thebes.store import sqlite

    sqlite.prepare_file(instance.store)
    engine = sqlite.reader_engine(instance.store)
    try:
        with engine.connect() as connection:
            sqlite.check(connection, instance.store)
    except sqlite.Error as error:
        raise sqlite.explain_open_error(instance.store, error) from error
    finally:
        engine.dispose()
    yield Finding("store", "ok", f"{instance.store.stat().st_size / (1 << 20):.1f} MiB, no damage found")


_CHECKS: dict[str, Callable[[Instance], Iterator[Finding]]] = {
    "python": check_python,
    "kernel": check_kernel,
    "gpu": check_gpu,
    "folder": check_folder,
    "disk": check_disk,
    "clock": check_clock,
    "limits": check_limits,
    "log-out": check_logout,
    "instance": check_config,
    "running": check_processes,
    "port": check_port,
    "store": check_store,
}
