"""Which driver calls are made from which state, what follows from each return code, and what is refused before any."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from thebes.node import cuda, cuda_decisions, host_memory, nvidia_driver
from thebes.node.cuda_decisions import CudaFailed, CudaRefused, DriverState, Facts

GIB = 1 << 30
PID = 4711
GPU = "GPU-1"


class StandIn:
    """Stands in for the NVIDIA driver: one process on one GPU, its state, and the return codes that a test wants."""

    def __init__(
        self, state: DriverState = DriverState.RUNNING, held_bytes: int | None = 8 * GIB, host_bytes: int = 64 * GIB
    ) -> None:
        self.now = state
        self.held_bytes = held_bytes
        self.host_bytes = host_bytes
        self.gpu_free = 100 * GIB
        self.known = True
        self.calls: list[str] = []
        self.codes: dict[str, int] = {}  # what a call returns instead of 0
        self.after: dict[
            str, DriverState | None
        ] = {}  # the state that such a call leaves behind; None: the process is gone

    def state(self, pid: int) -> tuple[int, int]:
        return (0, self.now) if self.known and pid == PID else (1, -1)

    def call(self, call: cuda_decisions.DriverCall, pid: int, timeout_ms: int) -> int:
        self.calls.append(call)
        if call in self.codes:
            after = self.after.get(call, self.now)
            if after is None:
                self.known = False
            else:
                self.now = after
            return self.codes[call]
        self.now = {
            "lock": DriverState.LOCKED,
            "checkpoint": DriverState.CHECKPOINTED,
            "restore": DriverState.LOCKED,
            "unlock": DriverState.RUNNING,
        }[call]
        return 0

    def gpu_bytes(self) -> dict[int, dict[str, int | None]]:
        return {} if self.now is DriverState.CHECKPOINTED or not self.known else {PID: {GPU: self.held_bytes}}

    def gpu_free_bytes(self) -> dict[str, int]:
        return {GPU: self.gpu_free}

    def host_free_bytes(self, pid: int) -> int:
        return self.host_bytes


def test_suspend_and_resume_make_the_calls_in_order() -> None:
    driver = StandIn()
    assert cuda.suspend(PID, driver=driver) >= 0
    assert driver.calls == ["lock", "checkpoint"]
    assert cuda.state(PID, driver=driver) is DriverState.CHECKPOINTED
    assert cuda.resume(PID, driver=driver) >= 0
    assert driver.calls == ["lock", "checkpoint", "restore", "unlock"]
    assert cuda.state(PID, driver=driver) is DriverState.RUNNING


def test_repeats_change_nothing() -> None:
    driver = StandIn(DriverState.CHECKPOINTED)
    assert cuda.suspend(PID, driver=driver) == 0.0
    driver = StandIn(DriverState.RUNNING)
    assert cuda.resume(PID, driver=driver) == 0.0
    assert driver.calls == []


@pytest.mark.parametrize(("follow", "calls"), [(cuda.suspend, ["checkpoint"]), (cuda.resume, ["unlock"])])
def test_a_suspend_cut_short_after_the_lock_is_taken_up(follow, calls) -> None:
    driver = StandIn(DriverState.LOCKED)
    follow(PID, driver=driver)
    assert driver.calls == calls


def test_a_process_without_cuda_is_refused() -> None:
    driver = StandIn()
    with pytest.raises(CudaRefused, match=r"not a CUDA process .*\(1 invalid value\)"):
        cuda.suspend(1, driver=driver)
    with pytest.raises(CudaRefused, match="not a CUDA process"):
        cuda.state(1, driver=driver)
    with pytest.raises(CudaRefused, match="not a CUDA process"):
        cuda.resume(1, driver=driver)
    assert driver.calls == []


def test_host_memory_is_checked_before_the_lock() -> None:
    driver = StandIn(host_bytes=11 * GIB)
    with pytest.raises(CudaRefused, match=r"host memory is too small: 11.0 GiB free, needed are 8.0 GiB .* 4.0 GiB"):
        cuda.suspend(PID, driver=driver)
    assert driver.calls == []
    cuda.suspend(PID, driver=driver, margin_bytes=3 * GIB)
    assert driver.now is DriverState.CHECKPOINTED


def test_memory_can_be_told_by_the_caller_and_is_needed() -> None:
    driver = StandIn(held_bytes=None)
    with pytest.raises(CudaRefused, match="NVML does not tell"):
        cuda.suspend(PID, driver=driver)
    with pytest.raises(CudaRefused, match="host memory is too small"):
        cuda.suspend(PID, driver=driver, device_bytes=80 * GIB)
    assert driver.calls == []
    cuda.suspend(PID, driver=driver, device_bytes=8 * GIB)
    assert driver.now is DriverState.CHECKPOINTED


def test_a_locked_process_is_unlocked_when_the_memory_is_too_small() -> None:
    driver = StandIn(DriverState.LOCKED, host_bytes=0)
    with pytest.raises(CudaRefused, match="host memory"):
        cuda.suspend(PID, driver=driver)
    assert (driver.calls, driver.now) == (["unlock"], DriverState.RUNNING)


def test_two_suspends_at_once_do_not_count_on_the_same_memory() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(StandIn):
        def call(self, call: cuda_decisions.DriverCall, pid: int, timeout_ms: int) -> int:
            inside.set()
            assert go_on.wait(10)
            return super().call(call, pid, timeout_ms)

    first = threading.Thread(target=lambda: cuda.suspend(PID, driver=Slow(host_bytes=16 * GIB)))
    first.start()
    assert inside.wait(10)
    second = StandIn(host_bytes=16 * GIB)
    try:
        with pytest.raises(CudaRefused, match=r"8.0 GiB free"):
            cuda.suspend(PID, driver=second)
    finally:
        go_on.set()
        first.join()
    cuda.suspend(PID, driver=second)  # what was held back is free again


@pytest.mark.parametrize("left", [DriverState.RUNNING, DriverState.LOCKED])
def test_a_lock_that_times_out_is_undone_and_refused(left: DriverState) -> None:
    driver = StandIn()
    driver.codes["lock"], driver.after["lock"] = 600, left
    with pytest.raises(CudaRefused, match="lock: 600 not ready: timed out"):
        cuda.suspend(PID, driver=driver)
    assert driver.now is DriverState.RUNNING


def test_a_process_under_mps_is_refused_and_goes_on() -> None:
    driver = StandIn()
    driver.codes["lock"] = 801
    with pytest.raises(CudaRefused, match=r"lock: 801 not supported; .* MPS"):
        cuda.suspend(PID, driver=driver)
    assert (driver.calls, driver.now) == (["lock"], DriverState.RUNNING)


def test_a_checkpoint_that_is_refused_is_unlocked() -> None:
    driver = StandIn()
    driver.codes["checkpoint"] = 801  # managed memory
    with pytest.raises(CudaRefused, match="checkpoint: 801"):
        cuda.suspend(PID, driver=driver)
    assert (driver.calls, driver.now) == (["lock", "checkpoint", "unlock"], DriverState.RUNNING)


@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore", "unlock"])
def test_failed_is_told_as_such(call: str) -> None:
    driver = StandIn(DriverState.RUNNING if call in ("lock", "checkpoint") else DriverState.CHECKPOINTED)
    driver.codes[call], driver.after[call] = 999, DriverState.FAILED
    with pytest.raises(CudaFailed, match=f"{call}: 999"):
        (cuda.suspend if call in ("lock", "checkpoint") else cuda.resume)(PID, driver=driver)
    with pytest.raises(CudaFailed, match="has failed"):
        cuda.suspend(PID, driver=driver)
    with pytest.raises(CudaFailed, match="has failed"):
        cuda.resume(PID, driver=driver)


def test_a_process_that_cannot_be_unlocked_has_failed() -> None:
    driver = StandIn()
    driver.codes |= {"checkpoint": 304, "unlock": 401}
    with pytest.raises(CudaFailed, match=r"checkpoint: 304 .*then unlock: 401 .*left locked"):
        cuda.suspend(PID, driver=driver)


def test_a_process_that_dies_meanwhile_has_failed() -> None:
    driver = StandIn()
    driver.codes["checkpoint"], driver.after["checkpoint"] = 304, None
    with pytest.raises(CudaFailed, match="gone"):
        cuda.suspend(PID, driver=driver)


def test_resume_waits_for_room_on_the_gpu() -> None:
    driver = StandIn()
    cuda.suspend(PID, driver=driver)
    driver.gpu_free = 7 * GIB
    with pytest.raises(CudaRefused, match=r"cannot be resumed yet: GPU-1 has 7.0 GiB free and it needs 8.0 GiB"):
        cuda.resume(PID, driver=driver)
    assert driver.now is DriverState.CHECKPOINTED
    driver.gpu_free = 8 * GIB
    cuda.resume(PID, driver=driver)
    assert driver.now is DriverState.RUNNING


def test_a_caller_started_anew_brings_what_the_process_needs() -> None:
    driver = StandIn(DriverState.CHECKPOINTED)
    with pytest.raises(CudaRefused, match=r"needs 101.0 GiB"):
        cuda.resume(PID, needs={GPU: 101 * GIB}, driver=driver)
    with pytest.raises(CudaRefused, match="GPU-2 is not on this node"):
        cuda.resume(PID, needs={"GPU-2": GIB}, driver=driver)
    cuda.resume(PID, needs={GPU: 8 * GIB}, driver=driver)
    assert driver.now is DriverState.RUNNING


def test_a_restore_that_ran_out_of_memory_is_not_tried_again() -> None:
    driver = StandIn(DriverState.CHECKPOINTED)
    driver.codes["restore"] = 2
    with pytest.raises(CudaFailed, match="restore: 2 out of memory; the process is left checkpointed"):
        cuda.resume(PID, needs={}, driver=driver)


def test_an_unlock_that_complains_but_worked_is_fine() -> None:
    driver = StandIn(DriverState.LOCKED)
    driver.codes["unlock"], driver.after["unlock"] = 401, DriverState.RUNNING
    cuda.resume(PID, driver=driver)


def test_an_unknown_state_is_refused() -> None:
    driver = StandIn()
    driver.now = 7  # type: ignore[assignment]
    for follow in (cuda.suspend, cuda.resume):
        with pytest.raises(CudaRefused, match="state 7, which this version does not know"):
            follow(PID, driver=driver)


def test_cuda_processes_are_found_running_and_suspended() -> None:
    driver = StandIn()
    assert cuda.cuda_pids([1, PID], driver=driver) == [PID]
    assert cuda.gpu_bytes(PID, driver=driver) == {GPU: 8 * GIB}
    cuda.suspend(PID, driver=driver)
    assert cuda.gpu_bytes(PID, driver=driver) == {}
    assert cuda.single_cuda_pid([1, PID, 2], driver=driver) == PID


def test_jobs_with_no_or_several_cuda_processes_are_refused() -> None:
    driver = StandIn()
    with pytest.raises(CudaRefused, match="no process that uses a GPU"):
        cuda.single_cuda_pid([1, 2], driver=driver)
    with pytest.raises(CudaRefused, match="2 processes that use a GPU"):
        cuda.single_cuda_pid([PID, PID], driver=driver)


def test_objections_are_none_for_a_process_that_fits_exactly() -> None:
    assert cuda_decisions.objection(Facts(PID, 0, DriverState.RUNNING, 8 * GIB, 12 * GIB)) is None
    assert cuda_decisions.objection(Facts(PID, 0, DriverState.RUNNING, 8 * GIB, 12 * GIB - 1)) is not None
    assert "MPS" in (cuda_decisions.objection(Facts(PID, 801, -1, None, 0)) or "")


def test_the_quantum_follows_from_the_measured_costs() -> None:
    assert cuda_decisions.next_quantum_s(1.4, 0.6) == 60.0
    assert cuda_decisions.next_quantum_s(4.7, 2.3) == pytest.approx(140.0)
    assert cuda_decisions.next_quantum_s(4.7, 2.3, overhead=0.02) == pytest.approx(350.0)


def test_a_driver_before_570_is_too_old() -> None:
    assert cuda_decisions.too_old(12080, True) is None
    assert cuda_decisions.too_old(13000, True) is None
    assert "it knows CUDA 12.4, and suspending needs 12.8 (driver 570)" in (cuda_decisions.too_old(12040, False) or "")
    assert cuda_decisions.too_old(13000, False) is not None


def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(CudaRefused, match=r"no NVIDIA driver on this machine: .*no-such-library"):
        nvidia_driver.NvidiaDriver(cuda="libno-such-library.so.1")


def host(tmp_path: Path, group: str, limits: dict[str, tuple[str, int, int]]) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / str(PID)).mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       2000 kB\nMemAvailable:   1000 kB\nHugePages_Free: 0\n")
    (proc / str(PID) / "cgroup").write_text(f"0::{group}\n")
    (groups / group.lstrip("/")).mkdir(parents=True)
    for name, (limit, used, cache) in limits.items():
        folder = groups / name
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon {used}\ninactive_file {cache}\n")
    return proc, groups


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({}, 1_024_000),
        ({"a/b": ("max", 5, 0)}, 1_024_000),
        ({"a/b": ("max", 5, 0), "a": ("600000", 200_000, 0)}, 400_000),
        ({"a/b": ("500000", 300_000, 50_000), "a": ("600000", 200_000, 0)}, 250_000),
        ({"a/b": ("9000000", 1, 0)}, 1_024_000),
    ],
)
def test_host_memory_is_the_least_of_machine_and_control_groups(tmp_path: Path, limits, free: int) -> None:
    proc, groups = host(tmp_path, "/a/b", limits)
    assert host_memory.host_free_bytes(PID, proc=proc, cgroups=groups) == free


def test_host_memory_of_a_process_that_is_gone(tmp_path: Path) -> None:
    proc, groups = host(tmp_path, "/", {})
    assert host_memory.host_free_bytes(1, proc=proc, cgroups=groups) == 1_024_000
