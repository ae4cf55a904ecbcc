"""Two unmodified PyTorch jobs share one GPU by slices: each is suspended by the driver while the other runs.

    python examples/gpu/time_slicing.py [--slices 6] [--slice-s 10] [--gib 8] [--json OUT]

Needs one NVIDIA GPU (driver 570 or newer), PyTorch, host memory for one image, and nothing else: no root, no changes to
the training script. Afterwards both jobs are run again without interruption, and the losses are compared step by step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import runs

from thebes.node import cuda
from thebes.node.cuda_decisions import CudaFailed, CudaRefused, next_quantum_s
from thebes.node.nvidia_driver import NvidiaDriver, nvidia_driver


@dataclass(frozen=True)
class Switch:
    """One job went off the GPU, the other came on. GPU memory in MiB."""

    off: str
    on: str
    suspend_s: float
    resume_s: float  # 0: it was started instead
    held_mib: float  # by the job, before
    process_mib_suspended: float  # what NVML still counts for it
    gpu_free_mib_suspended: float  # on the whole GPU, with both off it
    state_suspended: str


@dataclass(frozen=True)
class Slice:
    """One job ran, the other was suspended."""

    job: str
    steps_per_s: float
    other: str
    other_steps: int  # made while suspended: must be 0


def mib(bytes_by_gpu: Mapping[str, int]) -> float:
    return round(sum(bytes_by_gpu.values()) / (1 << 20), 1)


def compare(job: str, sliced: dict[int, str], straight: dict[int, str]) -> dict[str, object]:
    """Losses at equal steps, as printed."""
    common = sorted(sliced.keys() & straight.keys())
    differ = [step for step in common if sliced[step] != straight[step]]
    largest = max((abs(float(sliced[step]) - float(straight[step])) for step in differ), default=0.0)
    return {
        "job": job,
        "losses_compared": len(common),
        "last_step": common[-1] if common else 0,
        "differ": len(differ),
        "first_difference_at_step": differ[0] if differ else None,
        "largest_difference": largest,
        "first_loss": float(sliced[common[0]]) if common else None,
        "last_loss": float(sliced[common[-1]]) if common else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=6)
    parser.add_argument("--slice-s", type=float, default=10.0)
    parser.add_argument("--gib", type=float, default=8.0, help="training state of each job on the GPU")
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args()
    runs.need_torch()
    try:
        driver = nvidia_driver()
        figures = slices(driver, args.slices, args.slice_s, args.gib)
    except (CudaRefused, CudaFailed) as error:
        raise SystemExit(f"{type(error).__name__}: {error.reason}") from None
    runs.write(args.json, figures)
    if not figures["ok"]:
        raise SystemExit("FAILED: see above")


def slices(driver: NvidiaDriver, count: int, slice_s: float, gib: float) -> dict[str, object]:
    machine = runs.machine()
    print("machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    idle_mib = mib(driver.gpu_free_bytes())
    options = {"a": ("--seed", "1", "--gib", str(gib)), "b": ("--seed", "2", "--gib", str(gib))}
    jobs: dict[str, runs.Run] = {}
    switches: list[Switch] = []
    made: list[Slice] = []
    cold_start_s: list[float] = []
    suspended_at: dict[str, int] = {}
    try:
        for number in range(count):
            on, off = ("a", "b") if number % 2 == 0 else ("b", "a")
            if number:
                held = cuda.gpu_bytes(jobs[off].pid)
                suspend_s = cuda.suspend(jobs[off].pid)
                time.sleep(0.3)  # lines that were printed before are still on their way
                suspended_at[off] = jobs[off].step
                left = cuda.gpu_bytes(jobs[off].pid)
                free = driver.gpu_free_bytes()
                said = cuda.state(jobs[off].pid).name
                resume_s = cuda.resume(jobs[on].pid) if on in jobs else 0.0
                switches.append(Switch(off, on, suspend_s, resume_s, mib(held), mib(left), mib(free), said))
                how = f"resume {on} {resume_s:.2f} s" if resume_s else f"start {on}"
                print(
                    f"switch {number}: suspend {off} {suspend_s:.2f} s ({mib(held):.0f} MiB), {how}; while suspended: "
                    f"process {mib(left):.0f} MiB, GPU {mib(free):.0f} of {idle_mib:.0f} MiB free, {said}"
                )
            if on not in jobs:
                jobs[on] = runs.train(on, *options[on])
                cold_start_s.append(jobs[on].first_step())
            begun_s = time.monotonic()
            time.sleep(slice_s)
            rate = jobs[on].measure(begun_s, time.monotonic()).steps_per_s
            extra = jobs[off].step - suspended_at[off] if off in jobs else 0
            made.append(Slice(on, rate, off, extra))
            print(f"slice {number}: {on} {rate:.1f} steps/s, now at step {jobs[on].step}; {off} made {extra} steps")
        sliced = {name: job.losses() for name, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.end()

    print("the same jobs without interruption, for comparison ...")
    comparisons = []
    for name, losses in sliced.items():
        last = max(losses)
        reference = runs.train(f"reference {name}", *options[name], "--steps", str(last))
        try:
            reference.wait_for(lambda run, last=last: run.step >= last, 600.0)
        finally:
            reference.end()
        comparisons.append(compare(name, losses, reference.losses()))

    again = [switch for switch in switches if switch.resume_s]
    suspend_s = statistics.median(switch.suspend_s for switch in switches)
    resume_s = statistics.median(switch.resume_s for switch in again) if again else 0.0
    held_gib = statistics.median(switch.held_mib for switch in switches) / 1024
    ok = (
        all(one.other_steps == 0 for one in made)
        and all(switch.state_suspended == "CHECKPOINTED" for switch in switches)
        and all(result["losses_compared"] and not result["differ"] for result in comparisons)
    )
    print(f"\n{'GPU memory held by a job':<44}{held_gib:.1f} GiB")
    print(f"{'suspend, median':<44}{suspend_s:.2f} s ({suspend_s / held_gib:.2f} s/GiB)")
    print(f"{'resume, median':<44}{resume_s:.2f} s ({resume_s / held_gib:.2f} s/GiB)")
    print(f"{'cold start to the first line, for comparison':<44}{min(cold_start_s):.1f}-{max(cold_start_s):.1f} s")
    quantum_s = next_quantum_s(suspend_s, resume_s)
    print(f"{'slice in which a switch costs at most 5 %':<44}{quantum_s:.0f} s")
    rates = [one.steps_per_s for one in made]
    print(f"{'steps/s in the slices':<44}{', '.join(f'{rate:.1f}' for rate in rates)}")
    print(f"{'steps made while suspended':<44}{sum(one.other_steps for one in made)}")
    for result in comparisons:
        verdict = "all equal" if not result["differ"] else f"differ by up to {result['largest_difference']:.3g}"
        compared = f"{result['losses_compared']} compared up to step {result['last_step']}"
        print(f"losses of {result['job']}: {compared}: {verdict}")
    print("OK" if ok else "NOT OK")
    return {
        "what": "two unmodified PyTorch jobs share one GPU by driver suspend and resume",
        "machine": machine,
        "settings": {"slices": count, "slice_s": slice_s, "gib": gib},
        "gpu_free_mib_idle": idle_mib,
        "suspend_s_median": suspend_s,
        "resume_s_median": resume_s,
        "held_gib": held_gib,
        "cold_start_s": cold_start_s,
        "next_quantum_s": quantum_s,
        "switches": [asdict(switch) for switch in switches],
        "slices": [asdict(one) for one in made],
        "losses": comparisons,
        "ok": ok,
    }


if __name__ == "__main__":
    main()
