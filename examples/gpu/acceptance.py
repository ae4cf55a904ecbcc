"""What suspending by the driver must do and must refuse, tried on a real GPU with unmodified PyTorch processes.

    python examples/gpu/acceptance.py [--gib 2] [--json OUT]

Prints one line per case. A refused process must go on running; nothing may be left locked.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import runs

from thebes.model.errors import UserError
from thebes.node import cuda, host_memory, mps
from thebes.node.cuda_decisions import CudaFailed, CudaRefused, DriverState, code_text
from thebes.node.nvidia_driver import nvidia_driver

LONG_KERNELS = """
import itertools, torch
for step in itertools.count(1):
    torch.cuda._sleep(2_000_000_000)  # about a second on the GPU
    torch.cuda.synchronize()
    print(f"step {step} loss 0", flush=True)
"""
HOG = """
import time, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - (768 << 20), dtype=torch.uint8, device="cuda")
print("step 1 loss 0", flush=True)
time.sleep(600)
"""
MANAGED = """
import ctypes, itertools, time
driver = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert driver.cuCtxSetCurrent(context) == 0
assert driver.cuMemAllocManaged(ctypes.byref(memory), ctypes.c_size_t(64 << 20), 1) == 0
for step in itertools.count(1):
    assert driver.cuMemsetD8_v2(memory, ctypes.c_ubyte(step % 251), ctypes.c_size_t(64 << 20)) == 0
    assert driver.cuCtxSynchronize() == 0
    print(f"step {step} loss 0", flush=True)
    time.sleep(0.05)
"""


def python(name: str, code: str) -> runs.Run:
    run = runs.Run(name, (sys.executable, "-c", code))
    run.first_step()
    return run


@contextlib.contextmanager
def started(run: runs.Run) -> Iterator[runs.Run]:
    try:
        run.first_step()
        yield run
    finally:
        run.end()


def refusal(pid: int, **options: int) -> str:
    """The reason for which a suspend is refused; an error when it is not refused."""
    try:
        took_s = cuda.suspend(pid, **options)
    except CudaRefused as refused:
        return refused.reason
    cuda.resume(pid)
    raise AssertionError(f"it was suspended, in {took_s:.2f} s")


def still_runs(run: runs.Run) -> None:
    assert cuda.state(run.pid) is DriverState.RUNNING, cuda.state(run.pid).name
    run.more_steps()


def not_a_cuda_process() -> str:
    with subprocess.Popen(("sleep", "60")) as sleeper:
        try:
            return f"{refusal(sleeper.pid)}; and one with the driver open only: {refusal(os.getpid())}"
        finally:
            sleeper.kill()


def host_memory_too_small(job: runs.Run) -> str:
    reason = refusal(job.pid, margin_bytes=1 << 50)
    assert "host memory is too small" in reason, reason
    still_runs(job)
    return reason


def suspend_and_resume(job: runs.Run) -> str:
    rate = rate_of(job)
    held = sum(cuda.gpu_bytes(job.pid).values())
    suspend_s = cuda.suspend(job.pid)
    time.sleep(0.3)
    at = job.step
    assert cuda.suspend(job.pid) == 0.0, "a second suspend must change nothing"
    assert cuda.cuda_pids([os.getpid(), job.pid]) == [job.pid], "a suspended process must be found"
    time.sleep(2.0)
    left = sum(cuda.gpu_bytes(job.pid).values())
    assert cuda.state(job.pid) is DriverState.CHECKPOINTED
    assert job.step == at, f"{job.step - at} steps while suspended"
    assert left < 16 << 20, f"{left >> 20} MiB left on the GPU"
    resume_s = cuda.resume(job.pid)
    assert cuda.resume(job.pid) == 0.0, "a second resume must change nothing"
    still_runs(job)
    after = rate_of(job)
    assert after > 0.9 * rate, f"{rate:.1f} steps/s before, {after:.1f} after"
    return (
        f"{held >> 20} MiB to {left >> 20} MiB, suspend {suspend_s:.2f} s, resume {resume_s:.2f} s, "
        f"0 steps meanwhile, {rate:.1f} steps/s before and {after:.1f} after"
    )


def rate_of(job: runs.Run) -> float:
    begun_s = time.monotonic()
    time.sleep(3.0)
    return job.measure(begun_s, time.monotonic()).steps_per_s


def caller_killed_after_lock(job: runs.Run) -> str:
    driver = nvidia_driver()
    told = []
    for follow in (cuda.resume, cuda.suspend):
        code = driver.call("lock", job.pid, 10_000)
        assert code == 0, code_text(code)
        told.append(f"{cuda.state(job.pid).name} then {follow.__name__}")
        follow(job.pid)
        cuda.resume(job.pid)
        still_runs(job)
    return "; ".join(told)


def lock_timeout() -> str:
    with started(python("long kernels", LONG_KERNELS)) as job:
        try:
            took_s = cuda.suspend(job.pid, lock_timeout_ms=1)
            said = f"suspended in {took_s:.2f} s: the lock does not wait for a kernel of one second"
            cuda.resume(job.pid)
        except CudaRefused as refused:
            said = refused.reason
        still_runs(job)
        return said


def killed_while_suspended(gib: float) -> str:
    with started(runs.train("victim", "--gib", str(gib))) as job:
        before = host_memory.host_free_bytes(os.getpid())
        cuda.suspend(job.pid)
        during = host_memory.host_free_bytes(os.getpid())
        job.end()
        deadline_s = time.monotonic() + 10
        while host_memory.host_free_bytes(os.getpid()) < before and time.monotonic() < deadline_s:
            time.sleep(0.1)
        after = host_memory.host_free_bytes(os.getpid())
        assert after > during, "its host memory did not come back"
        return f"host memory free: {before >> 20} MiB, suspended {during >> 20} MiB, killed {after >> 20} MiB"


def gpu_full_at_resume(job: runs.Run) -> str:
    cuda.suspend(job.pid)
    with started(python("hog", HOG)):
        try:
            cuda.resume(job.pid)
            raise AssertionError("it was resumed although the GPU was full")
        except CudaRefused as refused:
            reason = refused.reason
    resume_s = cuda.resume(job.pid)
    still_runs(job)
    return f"refused: {reason}; resumed in {resume_s:.2f} s when there was room"


def gpu_full_at_restore(job: runs.Run) -> str:
    """The same without our check: why it is there."""
    cuda.suspend(job.pid)
    with started(python("hog", HOG)):
        try:
            cuda.resume(job.pid, needs={})
            raise AssertionError("it was resumed although the GPU was full")
        except CudaFailed as failed:
            reason = failed.reason
    again = nvidia_driver().call("restore", job.pid, 0)
    return f"failed: {reason}; a second restore, with room: {code_text(again)}"


def under_mps(gib: float) -> str:
    with tempfile.TemporaryDirectory(prefix="thebes-mps-") as folder:
        daemon = mps.start(Path(folder))
        try:
            assert mps.healthy(daemon)
            with started(runs.train("mps client", "--gib", str(gib), env=mps.client_env(daemon))) as job:
                reason = refusal(job.pid)
                listed = bool(cuda.gpu_bytes(job.pid))
                job.more_steps()
        finally:
            mps.stop(daemon)
        assert not mps.healthy(daemon)
        assert "801" in reason, reason
        return f"{reason}; NVML lists the client: {listed}"


def cuda_process_is_a_child(gib: float) -> str:
    command = " ".join(shlex.quote(word) for word in (*runs.TRAIN, "--gib", str(gib))) + "; true"
    run = runs.Run("shell", ("sh", "-c", command))
    children: list[int] = []
    try:
        run.first_step()
        children = [int(word) for word in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        found = cuda.single_cuda_pid([run.pid, *children])
        assert found in children
        cuda.suspend(found)
        assert cuda.single_cuda_pid([run.pid, *children]) == found
        cuda.resume(found)
        run.more_steps()
        return "found running and suspended"
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        run.end()


def managed_memory() -> str:
    with started(python("managed memory", MANAGED)) as job:
        try:
            cuda.suspend(job.pid)
            cuda.resume(job.pid)
            still_runs(job)
            return "suspended and resumed"
        except CudaRefused as refused:
            still_runs(job)
            return f"refused, and it goes on: {refused.reason}"
        except CudaFailed as failed:
            return f"failed, to be restarted: {failed.reason}"


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="training state of each job on the GPU")
    parser.add_argument("--json", help="write all results to this file")
    args = parser.parse_args()
    runs.need_torch()
    before_mib, begun_s = resident_mib(), time.monotonic()
    try:
        nvidia_driver()
    except CudaRefused as refused:
        raise SystemExit(refused.reason) from None
    opening = {
        "open_s": time.monotonic() - begun_s,
        "resident_mib_before": before_mib,
        "resident_mib_after": resident_mib(),
    }
    print("opening the driver: " + ", ".join(f"{key} {value:.2f}" for key, value in opening.items()))
    results: list[dict[str, object]] = []

    def case(name: str, try_it: Callable[[], str]) -> None:
        try:
            ok, detail = True, try_it()
        except UserError as error:
            ok, detail = False, f"not tried: {error}"
        except (AssertionError, CudaRefused, CudaFailed, SystemExit) as error:
            ok, detail = False, f"{type(error).__name__}: {error}"
        results.append({"case": name, "ok": ok, "detail": detail})
        print(f"{'ok    ' if ok else 'NOT OK'} {name}: {detail}")

    case("a process without CUDA is refused", not_a_cuda_process)
    job = runs.train("job", "--gib", str(args.gib))
    try:
        job.first_step()
        case("too little host memory: refused before the lock, the job goes on", lambda: host_memory_too_small(job))
        case("suspend and resume", lambda: suspend_and_resume(job))
        case("a caller killed after the lock: resume and suspend go on", lambda: caller_killed_after_lock(job))
        case("the GPU is full: refused before the restore, resumed later", lambda: gpu_full_at_resume(job))
        case("the GPU is full and nobody asked: the process is lost", lambda: gpu_full_at_restore(job))
    finally:
        job.end()
    case("a lock that times out leaves nothing locked", lock_timeout)
    case("the CUDA process is a child of the job's process", lambda: cuda_process_is_a_child(args.gib))
    case("killed while suspended", lambda: killed_while_suspended(args.gib))
    case("a job under MPS is refused and goes on", lambda: under_mps(args.gib))
    case("managed memory", managed_memory)
    runs.write(
        args.json,
        {
            "what": "acceptance of suspending by the driver",
            "machine": runs.machine(),
            "driver": opening,
            "cases": results,
        },
    )
    if not all(result["ok"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
