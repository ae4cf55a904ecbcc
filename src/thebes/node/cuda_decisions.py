"""What the driver's states and codes mean, and what is done about them: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

FIRST_CUDA_VERSION = 12080  # what driver 570 reports: the first whose checkpoint calls carry PyTorch
MARGIN_BYTES = 4 << 30  # host memory that must stay free beside the image
DriverCall = Literal["lock", "checkpoint", "restore", "unlock"]


class DriverState(IntEnum):
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


# A process found LOCKED belongs to a suspend that was cut short (its caller was killed): both ways go on from there.
SUSPEND: Mapping[DriverState, tuple[DriverCall, ...]] = {
    DriverState.RUNNING: ("lock", "checkpoint"),
    DriverState.LOCKED: ("checkpoint",),
    DriverState.CHECKPOINTED: (),
}
RESUME: Mapping[DriverState, tuple[DriverCall, ...]] = {
    DriverState.CHECKPOINTED: ("restore", "unlock"),
    DriverState.LOCKED: ("unlock",),
    DriverState.RUNNING: (),
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
        return no_state(facts.pid, facts.state_code)
    if facts.state == DriverState.CHECKPOINTED:
        return None
    if facts.state not in SUSPEND:
        return f"process {facts.pid} is in state {facts.state}, which this version does not know"
    if facts.device_bytes is None:
        return f"process {facts.pid} uses no GPU, or NVML does not tell how much memory it holds there"
    if facts.host_free_bytes < facts.device_bytes + margin_bytes:
        return (
            f"host memory is too small: {in_gib(facts.host_free_bytes)} free, needed are {in_gib(facts.device_bytes)} "
            f"for the image of process {facts.pid} and {in_gib(margin_bytes)} of margin"
        )
    return None


@dataclass(frozen=True)
class CallOutcome:
    """What follows from one driver call. After `refused` the undo calls bring the process back to where it was."""

    kind: Literal["on", "refused", "failed"]
    reason: str = ""
    undo: tuple[DriverCall, ...] = ()


def outcome(call: DriverCall, code: int, state: DriverState | None) -> CallOutcome:
    """What follows from a return code and the state found after it (None: the driver does not know the process now)."""
    if code == 0:
        return CallOutcome("on")
    reason = f"{call}: {code_text(code)}"
    if state is None:
        return CallOutcome("failed", f"{reason}; the process is gone")
    if state is DriverState.FAILED:
        return CallOutcome("failed", f"{reason}; the driver says that the process has failed")
    if call == "lock":
        return CallOutcome("refused", reason + UNDER_MPS * (code == 801), RESUME[state])
    if call == "checkpoint":
        return CallOutcome("refused", reason, RESUME[state])
    # A restore that has failed once cannot be repeated, though the state says so (NVIDIA/cuda-checkpoint#44).
    if call == "unlock" and state is DriverState.RUNNING:
        return CallOutcome("on")
    return CallOutcome("failed", f"{reason}; the process is left {state.name.lower()}")


def no_room(pid: int, needs: Mapping[str, int], free: Mapping[str, int]) -> str | None:
    """Why the process may not be resumed now: a GPU (by UUID) has less memory free than it held there. None: it may."""
    for gpu, size in sorted(needs.items()):
        if gpu not in free:
            return f"process {pid} cannot be resumed: {gpu} is not on this node any more"
        if free[gpu] < size:
            return (
                f"process {pid} cannot be resumed yet: {gpu} has {in_gib(free[gpu])} free and it needs {in_gib(size)}"
            )
    return None


def next_quantum_s(suspend_s: float, resume_s: float, overhead: float = 0.05, floor_s: float = 60.0) -> float:
    """The shortest slice in which one switch costs no more than this share of the time."""
    return max(floor_s, (suspend_s + resume_s) / overhead)


UNDER_MPS = "; a process under MPS cannot be suspended by the driver"


def no_state(pid: int, code: int) -> str:
    said = f"process {pid} is not a CUDA process that the driver can suspend ({code_text(code)})"
    return said + UNDER_MPS * (code == 801)


def in_gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


class CudaDriver(Protocol):
    """The driver's side: the real one below, or a stand-in for it where there is no GPU."""

    def state(self, pid: int) -> tuple[int, int]:
        """Return code of GetState, and the state."""
        ...

    def call(self, call: DriverCall, pid: int, timeout_ms: int) -> int:
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
