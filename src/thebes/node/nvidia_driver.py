"""The calls of NVIDIA's driver and of NVML, through ctypes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping

from thebes.node.cuda_decisions import CudaRefused, DriverCall, code_text, too_old
from thebes.node.host_memory import host_free_bytes

_FUNCTIONS: Mapping[DriverCall, str] = {
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}
_NOT_AVAILABLE = (1 << 64) - 1  # NVML's "not available"


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
        self._must(self._nvml.nvmlInit_v2(), "nvmlInit")

    def state(self, pid: int) -> tuple[int, int]:
        value = ctypes.c_int(-1)
        code = self._cuda.cuCheckpointProcessGetState(ctypes.c_int(pid), ctypes.byref(value))
        return code, value.value

    def call(self, call: DriverCall, pid: int, timeout_ms: int) -> int:
        args = _LockArgs(timeout_ms=timeout_ms if call == "lock" else 0)
        return getattr(self._cuda, _FUNCTIONS[call])(ctypes.c_int(pid), ctypes.byref(args))

    def gpu_bytes(self) -> dict[int, dict[str, int | None]]:
        held: dict[int, dict[str, int | None]] = {}
        for gpu, device in self._devices().items():
            for process in self._processes(device):
                size = None if process.used_bytes == _NOT_AVAILABLE else int(process.used_bytes)
                held.setdefault(process.pid, {})[gpu] = size
        return held

    def gpu_free_bytes(self) -> dict[str, int]:
        free = {}
        for gpu, device in self._devices().items():
            info = _MemoryInfo()
            self._must(self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)), "nvmlDeviceGetMemoryInfo")
            free[gpu] = int(info.free)
        return free

    def host_free_bytes(self, pid: int) -> int:
        return host_free_bytes(pid)

    def _devices(self) -> dict[str, ctypes.c_void_p]:
        count = ctypes.c_uint()
        self._must(self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), "nvmlDeviceGetCount")
        devices = {}
        for index in range(count.value):
            device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            code = self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
            self._must(code, "nvmlDeviceGetHandleByIndex")
            self._must(self._nvml.nvmlDeviceGetUUID(device, uuid, ctypes.c_uint(96)), "nvmlDeviceGetUUID")
            devices[uuid.value.decode()] = device
        return devices

    def _processes(self, device: ctypes.c_void_p) -> list[_ProcessInfo]:
        count = ctypes.c_uint(64)
        while True:
            room = count.value
            infos = (_ProcessInfo * room)()
            code = self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), infos)
            if code != 7:  # 7: the room was too small, and `count` says how much is needed
                self._must(code, "nvmlDeviceGetComputeRunningProcesses")
                return list(infos[: count.value])
            count = ctypes.c_uint(max(count.value, room) * 2)

    def _must(self, code: int, name: str) -> None:
        if code:
            raise CudaRefused(f"NVML does not answer ({name}: {code})")


def _load(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CudaRefused(f"no NVIDIA driver on this machine: {error}") from error


@functools.cache
def nvidia_driver() -> NvidiaDriver:
    """The driver of this machine, opened once; CudaRefused where there is none that can suspend."""
    return NvidiaDriver()
