"""The ways in which a running job gives up its GPUs, and which of them a node offers.

`checkpoint` is the handshake: a notice, after which the job saves and ends; any node has it. `freeze` stops the
processes where they are: it frees no GPU memory, so it is for virtual GPUs. `cuda` moves GPU memory into host memory by
the driver's checkpoint calls, for jobs with a single CUDA process.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from thebes.node import cuda
from thebes.node.cuda_decisions import CudaFailed, CudaRefused
from thebes.node.nvidia_driver import nvidia_driver
from thebes.protocol.contract import Gpu, Mechanism, Refused


class Broken(Exception):  # noqa: N818 - reads as what it says
    """The process can neither go on nor be suspended: it must be killed and start again from its last checkpoint."""


def offered(gpus: Sequence[Gpu]) -> tuple[Mechanism, ...]:
    """What a node with these GPUs can do."""
    if all(gpu.virtual for gpu in gpus):
        return ("checkpoint", "freeze")
    try:
        nvidia_driver()
    except CudaRefused:
        return ("checkpoint",)
    return ("checkpoint", "cuda")


def check(mechanism: str, offers: Sequence[Mechanism]) -> None:
    """Refuse what this node does not offer."""
    if mechanism == "checkpoint":
        raise Refused("checkpoint is not a way to suspend in place: send a notice")
    if mechanism not in offers:
        raise Refused(f"this node does not offer '{mechanism}': it offers {', '.join(offers)}")


def cuda_needs(pids: Sequence[int]) -> dict[str, int]:
    """GPU memory that the one CUDA process among these holds, by GPU: to be kept until it comes back."""
    with _as_refusals():
        held = nvidia_driver().gpu_bytes().get(cuda.single_cuda_pid(pids), {})
    return {gpu: size for gpu, size in held.items() if size is not None}


def suspend_cuda(pids: Sequence[int]) -> float:
    """Move the one CUDA process among these off its GPU; returns seconds. It blocks. If Refused, nothing changed."""
    with _as_refusals():
        return cuda.suspend(cuda.single_cuda_pid(pids))


def resume_cuda(pids: Sequence[int], needs: Mapping[str, int] | None) -> float:
    """Bring it back; returns seconds. It blocks. If Refused, it is still suspended."""
    with _as_refusals():
        return cuda.resume(cuda.single_cuda_pid(pids), needs=needs)


@contextmanager
def _as_refusals() -> Generator[None, None, None]:
    """The driver's errors as the engine's."""
    try:
        yield
    except CudaRefused as error:
        raise Refused(error.reason) from None
    except CudaFailed as error:
        raise Broken(error.reason) from None
