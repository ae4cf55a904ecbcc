"""Suspends and resumes unmodified CUDA processes through the driver's checkpoint calls (driver 570 or newer, Linux).

A suspended process keeps running on the CPU until its next CUDA call; its GPU memory lies in host memory and the GPU is
free. `cuda_decisions` says from which state which calls follow and what follows from each return code; `nvidia_driver`
makes the calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

from thebes.node.cuda_decisions import (
    MARGIN_BYTES,
    RESUME,
    SUSPEND,
    CallOutcome,
    CudaDriver,
    CudaFailed,
    CudaRefused,
    DriverCall,
    DriverState,
    Facts,
    no_room,
    no_state,
    objection,
    outcome,
)
from thebes.node.nvidia_driver import nvidia_driver

LOCK_TIMEOUT_MS = 10_000


def state(pid: int, *, driver: CudaDriver | None = None) -> DriverState:
    """The driver's word on this process. Refused when it is not a CUDA process, or there is no driver."""
    code, value = (driver or nvidia_driver()).state(pid)
    if code:
        raise CudaRefused(no_state(pid, code))
    try:
        return DriverState(value)
    except ValueError:
        raise CudaRefused(f"process {pid} is in state {value}, which this version does not know") from None


def cuda_pids(pids: Iterable[int], *, driver: CudaDriver | None = None) -> list[int]:
    """Those of these processes that use a GPU, running or suspended, in the order given.

    A suspended process is not in NVML's list any more, so the others are asked for their state.
    """
    driver = driver or nvidia_driver()
    using = driver.gpu_bytes()
    return [pid for pid in pids if pid in using or driver.state(pid) in _HELD]


_HELD = tuple((0, held) for held in (DriverState.LOCKED, DriverState.CHECKPOINTED, DriverState.FAILED))


def single_cuda_pid(pids: Iterable[int], *, driver: CudaDriver | None = None) -> int:
    """The one CUDA process of a job; refused when there is none yet, or more than one."""
    found = cuda_pids(pids, driver=driver)
    if len(found) == 1:
        return found[0]
    if not found:
        raise CudaRefused("the job has no process that uses a GPU")
    raise CudaRefused(
        f"the job has {len(found)} processes that use a GPU; the driver suspends single-process jobs only"
    )


def gpu_bytes(pid: int, *, driver: CudaDriver | None = None) -> dict[str, int]:
    """What the process holds on each GPU, by UUID. Empty when it is suspended, uses no GPU, or NVML does not tell."""
    held = (driver or nvidia_driver()).gpu_bytes().get(pid, {})
    return {gpu: size for gpu, size in held.items() if size is not None}


def suspend(
    pid: int,
    *,
    device_bytes: int | None = None,
    lock_timeout_ms: int = LOCK_TIMEOUT_MS,
    margin_bytes: int = MARGIN_BYTES,
    driver: CudaDriver | None = None,
) -> float:
    """Move the process off the GPU into host memory; returns the seconds it took, 0 if it was suspended already.

    It blocks for about half a second per GiB, so call it from a thread. A refused process goes on running.
    """
    driver = driver or nvidia_driver()
    code, now = driver.state(pid)
    if code == 0 and now == DriverState.FAILED:
        raise CudaFailed(f"the driver says that process {pid} has failed")
    held = driver.gpu_bytes().get(pid, {}) if code == 0 else {}
    needs = {gpu: size for gpu, size in held.items() if size is not None}
    if device_bytes is None and held and len(needs) == len(held):
        device_bytes = sum(needs.values())
    with _reserve(device_bytes or 0) as reserved_by_others:
        free = driver.host_free_bytes(pid) - reserved_by_others
        why = objection(Facts(pid, code, now, device_bytes, free), margin_bytes)
        if why is not None:
            if code == 0 and now == DriverState.LOCKED:
                _carry_out(RESUME[DriverState.LOCKED], pid, lock_timeout_ms, driver)
            raise CudaRefused(why)
        took_s = _carry_out(SUSPEND[DriverState(now)], pid, lock_timeout_ms, driver)
    if needs:
        _needs[pid] = needs
    return took_s


def resume(pid: int, *, needs: Mapping[str, int] | None = None, driver: CudaDriver | None = None) -> float:
    """Bring the process back onto its GPU; the seconds it took, 0 when it was running.

    Refused while its GPU has too little free memory: it stays suspended and can be resumed later. This is asked before
    the restore, since a restore that runs out of memory loses the process. `needs` is what `gpu_bytes` said before the
    suspend; without it, what this process remembers of that; a caller that has been started anew must keep it.
    """
    driver = driver or nvidia_driver()
    now = state(pid, driver=driver)
    if now is DriverState.FAILED:
        raise CudaFailed(f"the driver says that process {pid} has failed")
    if now is DriverState.CHECKPOINTED:
        why = no_room(pid, _needs.get(pid, {}) if needs is None else needs, driver.gpu_free_bytes())
        if why is not None:
            raise CudaRefused(why)
    took_s = _carry_out(RESUME[now], pid, LOCK_TIMEOUT_MS, driver)
    _needs.pop(pid, None)
    return took_s


_needs: dict[int, dict[str, int]] = {}  # of the processes that were suspended from here: bytes by GPU


def _carry_out(calls: tuple[DriverCall, ...], pid: int, timeout_ms: int, driver: CudaDriver) -> float:
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


def _result(call: DriverCall, pid: int, timeout_ms: int, driver: CudaDriver) -> CallOutcome:
    code = driver.call(call, pid, timeout_ms)
    if code == 0:
        return CallOutcome("on")
    try:
        after = state(pid, driver=driver)
    except CudaRefused:
        after = None
    return outcome(call, code, after)


_reserved_bytes = 0
_reserving = threading.Lock()


@contextmanager
def _reserve(size: int) -> Generator[int, None, None]:
    """Hold host memory for a suspend under way, so that two at once cannot both count on the same free memory."""
    global _reserved_bytes
    with _reserving:
        others = _reserved_bytes
        _reserved_bytes += size
    try:
        yield others
    finally:
        with _reserving:
            _reserved_bytes -= size
