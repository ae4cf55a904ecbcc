"""Suspends and resumes unmodified CUDA processes through the driver's checkpoint calls (driver 570 or newer, Linux).

A suspended process keeps running on the CPU until its next CUDA call; its GPU memory lies in host memory and the GPU is
free. The first half of this file is pure: from which state which calls follow, and what follows from each return code.
The second half reaches the driver and NVML by ctypes and needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal, Protocol

FIRST_CUDA_VERSION = 12080  # what driver 570 reports: the first whose checkpoint calls carry PyTorch
MARGIN_BYTES = 4 << 30  # host memory that must stay free beside the image
LOCK_TIMEOUT_MS = 10_000

Call = Literal["lock", "checkpoint", "restore", "unlock"]


class State(IntEnum):
    """What the driver says of a process."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class CudaRefused(Exception):  # noqa: N818 - reads as what it says
    """It cannot be done, and the process is as it was before the call: running, or still suspended."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CudaFailed(Exception):  # noqa: N818 - the driver's own word for it
    """The process is beyond repair: kill it and start it again from its last checkpoint."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# The pure half -------------------------------------------------------------------------------------------------------

# A process found LOCKED belongs to a suspend that was cut short (its caller was killed): both ways go on from there.
SUSPEND: Mapping[State, tuple[Call, ...]] = {
    State.RUNNING: ("lock", "checkpoint"),
    State.LOCKED: ("checkpoint",),
    State.CHECKPOINTED: (),
}
RESUME: Mapping[State, tuple[Call, ...]] = {
    State.CHECKPOINTED: ("restore", "unlock"),
    State.LOCKED: ("unlock",),
    State.RUNNING: (),
}

CODES = {
    1: "invalid value",
    2: "out of memory",
    3: "driver not initialised",
    100: "no device",
    101: "invalid device",
    304: "operating system call failed",
    400: "invalid handle",
    401: "illegal state",
    600: "not ready: timed out",
    800: "not permitted",
    801: "not supported",
    802: "system not ready",
    999: "unknown error",
}


def code_text(code: int) -> str:
    """`801 not supported`."""
    return f"{code} {CODES[code]}" if code in CODES else str(code)


def too_old(cuda_version: int, has_calls: bool) -> str | None:
    """Why a driver cannot suspend; None when it can. The version is as the driver tells it: 12080 for CUDA 12.8."""
    if cuda_version >= FIRST_CUDA_VERSION and has_calls:
        return None
    known = f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"
    return f"the NVIDIA driver is too old: it knows CUDA {known}, and suspending needs 12.8 (driver 570)"


@dataclass(frozen=True)
class Facts:
    """What is known of a process before anything is done to it."""

    pid: int
    state_code: int  # what GetState returned: not 0 for a process without CUDA
    state: int
    device_bytes: int | None
    host_free_bytes: int


def objection(facts: Facts, margin_bytes: int = MARGIN_BYTES) -> str | None:
    """Why this process may not be suspended; None when it may."""
    if facts.state_code:
        return _no_state(facts.pid, facts.state_code)
    if facts.state == State.CHECKPOINTED:
        return None
    if facts.state not in SUSPEND:
        return f"process {facts.pid} is in state {facts.state}, which this version does not know"
    if facts.device_bytes is None:
        return f"process {facts.pid} uses no GPU, or NVML does not tell how much memory it holds there"
    if facts.host_free_bytes < facts.device_bytes + margin_bytes:
        return (
            f"host memory is too small: {_gib(facts.host_free_bytes)} free, needed are {_gib(facts.device_bytes)} "
            f"for the image of process {facts.pid} and {_gib(margin_bytes)} of margin"
        )
    return None


@dataclass(frozen=True)
class Outcome:
    """What follows from one driver call. After `refused` the undo calls bring the process back to where it was."""

    kind: Literal["on", "refused", "failed"]
    reason: str = ""
    undo: tuple[Call, ...] = ()


def outcome(call: Call, code: int, state: State | None) -> Outcome:
    """What follows from a return code and the state found after it (None: the driver does not know the process now)."""
    if code == 0:
        return Outcome("on")
    reason = f"{call}: {code_text(code)}"
    if state is None:
        return Outcome("failed", f"{reason}; the process is gone")
    if state is State.FAILED:
        return Outcome("failed", f"{reason}; the driver says that the process has failed")
    if call == "lock":
        return Outcome("refused", reason + _UNDER_MPS * (code == 801), RESUME[state])
    if call == "checkpoint":
        return Outcome("refused", reason, RESUME[state])
    # A restore that has failed once cannot be repeated, though the state says so (NVIDIA/cuda-checkpoint#44).
    if call == "unlock" and state is State.RUNNING:
        return Outcome("on")
    return Outcome("failed", f"{reason}; the process is left {state.name.lower()}")


def no_room(pid: int, needs: Mapping[str, int], free: Mapping[str, int]) -> str | None:
    """Why the process may not be resumed now: a GPU (by UUID) has less memory free than it held there. None: it may."""
    for gpu, size in sorted(needs.items()):
        if gpu not in free:
            return f"process {pid} cannot be resumed: {gpu} is not on this node any more"
        if free[gpu] < size:
            return f"process {pid} cannot be resumed yet: {gpu} has {_gib(free[gpu])} free and it needs {_gib(size)}"
    return None


def next_quantum_s(suspend_s: float, resume_s: float, overhead: float = 0.05, floor_s: float = 60.0) -> float:
    """The shortest slice in which one switch costs no more than this share of the time."""
    return max(floor_s, (suspend_s + resume_s) / overhead)


_UNDER_MPS = "; a process under MPS cannot be suspended by the driver"


def _no_state(pid: int, code: int) -> str:
    said = f"process {pid} is not a CUDA process that the driver can suspend ({code_text(code)})"
    return said + _UNDER_MPS * (code == 801)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


# What the caller uses ------------------------------------------------------------------------------------------------


class Driver(Protocol):
    """The driver's side: the real one below, or a stand-in for it where there is no GPU."""

    def state(self, pid: int) -> tuple[int, int]:
        """Return code of GetState, and the state."""
        ...

    def call(self, call: Call, pid: int, timeout_ms: int) -> int:
        """One checkpoint call; its return code. The timeout is for `lock`."""
        ...

    def gpu_bytes(self) -> dict[int, dict[str, int | None]]:
        """By pid, then by GPU: what each process with a CUDA context on this node holds; None where it is not told."""
        ...

    def gpu_free_bytes(self) -> dict[str, int]:
        """Free memory of each GPU of this node, by UUID."""
        ...

    def host_free_bytes(self, pid: int) -> int:
        """Host memory that this process may still fill."""
        ...


def state(pid: int, *, driver: Driver | None = None) -> State:
    """The driver's word on this process. Refused when it is not a CUDA process, or there is no driver."""
    code, value = (driver or nvidia_driver()).state(pid)
    if code:
        raise CudaRefused(_no_state(pid, code))
    try:
        return State(value)
    except ValueError:
        raise CudaRefused(f"process {pid} is in state {value}, which this version does not know") from None


def cuda_pids(pids: Iterable[int], *, driver: Driver | None = None) -> list[int]:
    """Those of these processes that use a GPU, running or suspended, in the order given.

    A suspended process is not in NVML's list any more, so the others are asked for their state.
    """
    driver = driver or nvidia_driver()
    using = driver.gpu_bytes()
    return [pid for pid in pids if pid in using or driver.state(pid) in _HELD]


_HELD = tuple((0, held) for held in (State.LOCKED, State.CHECKPOINTED, State.FAILED))


def single_cuda_pid(pids: Iterable[int], *, driver: Driver | None = None) -> int:
    """The one CUDA process of a job; refused when there is none yet, or more than one."""
    found = cuda_pids(pids, driver=driver)
    if len(found) == 1:
        return found[0]
    if not found:
        raise CudaRefused("the job has no process that uses a GPU")
    raise CudaRefused(
        f"the job has {len(found)} processes that use a GPU; the driver suspends single-process jobs only"
    )


def gpu_bytes(pid: int, *, driver: Driver | None = None) -> dict[str, int]:
    """What the process holds on each GPU, by UUID. Empty when it is suspended, uses no GPU, or NVML does not tell."""
    held = (driver or nvidia_driver()).gpu_bytes().get(pid, {})
    return {gpu: size for gpu, size in held.items() if size is not None}


def suspend(
    pid: int,
    *,
    device_bytes: int | None = None,
    lock_timeout_ms: int = LOCK_TIMEOUT_MS,
    margin_bytes: int = MARGIN_BYTES,
    driver: Driver | None = None,
) -> float:
    """Move the process off the GPU into host memory; the seconds it took, 0 when it was suspended already.

    Blocks for about half a second per GiB: call it from a thread. A refused process goes on running.
    """
    driver = driver or nvidia_driver()
    code, now = driver.state(pid)
    if code == 0 and now == State.FAILED:
        raise CudaFailed(f"the driver says that process {pid} has failed")
    held = driver.gpu_bytes().get(pid, {}) if code == 0 else {}
    needs = {gpu: size for gpu, size in held.items() if size is not None}
    if device_bytes is None and held and len(needs) == len(held):
        device_bytes = sum(needs.values())
    with _reserve(device_bytes or 0) as reserved_by_others:
        free = driver.host_free_bytes(pid) - reserved_by_others
        why = objection(Facts(pid, code, now, device_bytes, free), margin_bytes)
        if why is not None:
            if code == 0 and now == State.LOCKED:
                _carry_out(RESUME[State.LOCKED], pid, lock_timeout_ms, driver)
            raise CudaRefused(why)
        took_s = _carry_out(SUSPEND[State(now)], pid, lock_timeout_ms, driver)
    if needs:
        _needs[pid] = needs
    return took_s


def resume(pid: int, *, needs: Mapping[str, int] | None = None, driver: Driver | None = None) -> float:
    """Bring the process back onto its GPU; the seconds it took, 0 when it was running.

    Refused while its GPU has too little free memory: it stays suspended and can be resumed later. This is asked before
    the restore, since a restore that runs out of memory loses the process. `needs` is what `gpu_bytes` said before the
    suspend; without it, what this process remembers of that; a caller that has been started anew must keep it.
    """
    driver = driver or nvidia_driver()
    now = state(pid, driver=driver)
    if now is State.FAILED:
        raise CudaFailed(f"the driver says that process {pid} has failed")
    if now is State.CHECKPOINTED:
        why = no_room(pid, _needs.get(pid, {}) if needs is None else needs, driver.gpu_free_bytes())
        if why is not None:
            raise CudaRefused(why)
    took_s = _carry_out(RESUME[now], pid, LOCK_TIMEOUT_MS, driver)
    _needs.pop(pid, None)
    return took_s


_needs: dict[int, dict[str, int]] = {}  # of the processes that were suspended from here: bytes by GPU


def _carry_out(calls: tuple[Call, ...], pid: int, timeout_ms: int, driver: Driver) -> float:
    begun_s = time.monotonic()
    for call in calls:
        follows = _result(call, pid, timeout_ms, driver)
        if follows.kind == "on":
            continue
        # Never leave a process locked: what cannot be finished is taken back before anyone is told.
        for back in follows.undo:
            undone = _result(back, pid, timeout_ms, driver)
            if undone.kind != "on":
                raise CudaFailed(f"process {pid}: {follows.reason}; then {undone.reason}")
        error = CudaRefused if follows.kind == "refused" else CudaFailed
        raise error(f"process {pid}: {follows.reason}")
    return time.monotonic() - begun_s if calls else 0.0


def _result(call: Call, pid: int, timeout_ms: int, driver: Driver) -> Outcome:
    code = driver.call(call, pid, timeout_ms)
    if code == 0:
        return Outcome("on")
    try:
        after = state(pid, driver=driver)
    except CudaRefused:
        after = None
    return outcome(call, code, after)


_reserved_bytes = 0
_reserving = threading.Lock()


@contextmanager
def _reserve(size: int) -> Iterator[int]:
    """Holds host memory for a suspend under way, so that two at once cannot both count on the same free memory."""
    global _reserved_bytes
    with _reserving:
        others = _reserved_bytes
        _reserved_bytes += size
    try:
        yield others
    finally:
        with _reserving:
            _reserved_bytes -= size


# Host memory ---------------------------------------------------------------------------------------------------------


def host_free_bytes(pid: int, *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What the process may still fill: the host's available memory, or less where a control group limits it.

    Images of suspended processes are ordinary memory of theirs, so they are counted already.
    """
    available = _fields(proc / "meminfo")["MemAvailable"] * 1024
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return available
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    group = cgroups / path.lstrip("/")
    while group != cgroups and cgroups in group.parents:
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                used = int((group / "memory.current").read_text())
                cache = _fields(group / "memory.stat").get("inactive_file", 0)
                available = min(available, int(limit) - used + cache)
        except OSError:
            pass  # no memory controller at this level
        group = group.parent
    return available


def _fields(path: Path) -> dict[str, int]:
    words = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


# The NVIDIA driver ---------------------------------------------------------------------------------------------------

_FUNCTIONS: Mapping[Call, str] = {
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}
_NOT_TOLD = (1 << 64) - 1  # NVML's "not available"


class _LockArgs(ctypes.Structure):
    # Every argument struct of these calls has 64 bytes, with zero for "default"; the rest is room for newer drivers.
    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved", ctypes.c_char * 252))


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvidiaDriver:
    """libcuda and libnvidia-ml by ctypes. It creates no CUDA context, so it takes no GPU memory."""

    def __init__(self, cuda: str = "libcuda.so.1", nvml: str = "libnvidia-ml.so.1") -> None:
        self._cuda = _load(cuda)
        self._nvml = _load(nvml)
        version = ctypes.c_int()
        self._cuda.cuDriverGetVersion(ctypes.byref(version))
        old = too_old(version.value, hasattr(self._cuda, "cuCheckpointProcessLock"))
        if old is not None:
            raise CudaRefused(old)
        # Without persistence mode the driver must be held open by someone for a restore to find it.
        code = self._cuda.cuInit(0)
        if code:
            raise CudaRefused(f"no usable NVIDIA GPU (cuInit: {code_text(code)})")
        self._told(self._nvml.nvmlInit_v2(), "nvmlInit")

    def state(self, pid: int) -> tuple[int, int]:
        value = ctypes.c_int(-1)
        code = self._cuda.cuCheckpointProcessGetState(ctypes.c_int(pid), ctypes.byref(value))
        return code, value.value

    def call(self, call: Call, pid: int, timeout_ms: int) -> int:
        args = _LockArgs(timeout_ms=timeout_ms if call == "lock" else 0)
        return getattr(self._cuda, _FUNCTIONS[call])(ctypes.c_int(pid), ctypes.byref(args))

    def gpu_bytes(self) -> dict[int, dict[str, int | None]]:
        held: dict[int, dict[str, int | None]] = {}
        for gpu, device in self._devices().items():
            for process in self._processes(device):
                size = None if process.used_bytes == _NOT_TOLD else int(process.used_bytes)
                held.setdefault(process.pid, {})[gpu] = size
        return held

    def gpu_free_bytes(self) -> dict[str, int]:
        free = {}
        for gpu, device in self._devices().items():
            info = _MemoryInfo()
            self._told(self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)), "nvmlDeviceGetMemoryInfo")
            free[gpu] = int(info.free)
        return free

    def host_free_bytes(self, pid: int) -> int:
        return host_free_bytes(pid)

    def _devices(self) -> dict[str, ctypes.c_void_p]:
        count = ctypes.c_uint()
        self._told(self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), "nvmlDeviceGetCount")
        devices = {}
        for index in range(count.value):
            device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            code = self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
            self._told(code, "nvmlDeviceGetHandleByIndex")
            self._told(self._nvml.nvmlDeviceGetUUID(device, uuid, ctypes.c_uint(96)), "nvmlDeviceGetUUID")
            devices[uuid.value.decode()] = device
        return devices

    def _processes(self, device: ctypes.c_void_p) -> list[_ProcessInfo]:
        count = ctypes.c_uint(64)
        while True:
            room = count.value
            infos = (_ProcessInfo * room)()
            code = self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), infos)
            if code != 7:  # 7: the room was too small, and `count` says how much is needed
                self._told(code, "nvmlDeviceGetComputeRunningProcesses")
                return list(infos[: count.value])
            count = ctypes.c_uint(max(count.value, room) * 2)

    def _told(self, code: int, name: str) -> None:
        if code:
            raise CudaRefused(f"NVML does not answer ({name}: {code})")


def _load(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CudaRefused(f"no NVIDIA driver on this machine: {error}") from error


@functools.cache
def nvidia_driver() -> NvidiaDriver:
    """The driver of this machine, opened once. Raises CudaRefused where there is none that can suspend."""
    return NvidiaDriver()
