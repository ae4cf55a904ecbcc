"""Two jobs on one GPU: alone, together, together under MPS. Packed jobs that do not pay are taken apart again.

    python examples/gpu/packing.py [--window-s 10] [--json OUT]

Step rates are read from the jobs' log lines; the verdict is that of `thebes.live.packing`, as in the live cluster. Two
pairs are tried: two jobs that fill the GPU, and two whose kernels are small.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import runs

from thebes.live import packing
from thebes.model.errors import UserError
from thebes.node import mps
from thebes.node.cuda_decisions import CudaRefused
from thebes.node.nvidia_driver import nvidia_driver

PAIRS = {
    "large kernels": ("--gib", "4", "--width", "8192", "--batch", "8192", "--every", "5"),
    "small kernels": ("--gib", "0.05", "--width", "512", "--batch", "64", "--every", "50"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window-s", type=float, default=10.0, help="how long each rate is measured")
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args()
    runs.need_torch()
    rules = packing.PackingRules(min_window_s=args.window_s)
    try:
        nvidia_driver()
        machine = runs.machine()
        print("machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()))
        with tempfile.TemporaryDirectory(prefix="thebes-mps-") as folder:
            daemon = mps.start(Path(folder))
            try:
                pairs = [pair(name, options, daemon, rules) for name, options in PAIRS.items()]
            finally:
                mps.stop(daemon)
    except (CudaRefused, UserError) as error:
        raise SystemExit(str(error)) from None
    print(f"\n{'pair':<16}{'mode':<14}{'alone a':>9}{'alone b':>9}{'a':>9}{'b':>9}{'sum':>7}  verdict")
    for one in pairs:
        for mode in one["modes"]:
            alone, rate = one["alone_steps_per_s"], mode["together_steps_per_s"]
            print(
                f"{one['pair']:<16}{mode['mode']:<14}{alone['a']:>9.1f}{alone['b']:>9.1f}{rate['a']:>9.1f}"
                f"{rate['b']:>9.1f}{mode['normalised_sum']:>7.2f}  {mode['verdict']}"
            )
    runs.write(args.json, {"what": "packing of two jobs on one GPU", "machine": machine, "pairs": pairs})


def pair(name: str, options: tuple[str, ...], daemon: mps.Mps, rules: packing.PackingRules) -> dict[str, object]:
    print(f"\n{name}: {' '.join(options)}")
    alone = {}
    for job, seed in (("a", "1"), ("b", "2")):
        run = runs.train(job, "--seed", seed, *options)
        try:
            alone[job] = rate_of(run, rules)
        finally:
            run.end()
        print(f"  {job} alone: {alone[job]:.1f} steps/s")
    modes = [
        together("without MPS", options, {}, alone, rules),
        together("with MPS", options, mps.client_env(daemon), alone, rules),
    ]
    return {"pair": name, "options": options, "alone_steps_per_s": alone, "modes": modes}


def rate_of(run: runs.Run, rules: packing.PackingRules) -> float:
    """Steps per second over one window, once the job has settled."""
    run.first_step()
    from_s = time.monotonic() + rules.settle_s
    run.wait_for(lambda run: run.measure(from_s, time.monotonic()).long_enough(rules), 20 * rules.min_window_s)
    return run.measure(from_s, time.monotonic()).steps_per_s


def together(
    mode: str, options: tuple[str, ...], env: Mapping[str, str], alone: Mapping[str, float], rules: packing.PackingRules
) -> dict[str, object]:
    """Packs both jobs, judges, and lets one leave when it does not pay."""
    jobs = {job: runs.train(job, "--seed", seed, *options, env=env) for job, seed in (("a", "1"), ("b", "2"))}
    try:
        for run in jobs.values():
            run.first_step()
        verdict = judge_live(jobs, alone, rules)
        rates = {job: verdict.shares[job] * alone[job] for job in jobs}
        print(f"  together {mode}: {rates['a']:.1f} + {rates['b']:.1f} steps/s; {verdict.reason}: {verdict.action}")
        result: dict[str, object] = {
            "mode": mode,
            "together_steps_per_s": rates,
            "normalised_sum": verdict.total,
            "verdict": verdict.action,
            "reason": verdict.reason,
        }
        if verdict.leaves:
            jobs[verdict.leaves].end()
            stays = next(job for job in jobs if job != verdict.leaves)
            recovered = rate_of(jobs[stays], rules)
            share = recovered / alone[stays]
            print(f"  {verdict.leaves} leaves; {stays} is back at {recovered:.1f} steps/s ({share:.2f} of alone)")
            result |= {"leaves": verdict.leaves, "stays_steps_per_s": recovered, "stays_share_of_alone": share}
        return result
    finally:
        for run in jobs.values():
            run.end()


def judge_live(
    jobs: Mapping[str, runs.Run], alone: Mapping[str, float], rules: packing.PackingRules
) -> packing.Verdict:
    pack = packing.Packing(tuple(jobs))
    from_s = time.monotonic() + rules.settle_s
    deadline_s = from_s + 20 * rules.min_window_s
    while True:
        now_s = time.monotonic()
        verdict = packing.judge(pack, alone, {job: run.measure(from_s, now_s) for job, run in jobs.items()}, rules)
        if verdict.action != "measure":
            return verdict
        if now_s > deadline_s:
            raise SystemExit(f"no verdict: {verdict.reason}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
