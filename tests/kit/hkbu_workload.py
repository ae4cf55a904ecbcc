"""The workload of the Ada-SRSF paper, rebuilt from its description, and the table of its figures regenerated.

160 jobs of Philly-like sizes on 16 nodes of 4 V100 GPUs with 10 GbE: arrivals uniform over 1200 x scale ms, iterations
uniform in 1..6 x scale, one of four models each. `python tests/kit/hkbu_workload.py [seeds]` prints the table.
"""

from __future__ import annotations

import sys

import numpy as np

from thebes import Result, Trace, simulate
from thebes.model.cluster import Cluster, from_toml
from thebes.perf.hkbu import PROFILES
from thebes.policy.ada_srsf import AdaSrsf

SIZES = {1: 80, 2: 14, 4: 26, 8: 30, 16: 8, 32: 2}
CLUSTER = """
name = "hkbu"
[[node]]
count = 16
gpus = 4
gpu_type = "V100"
gpu_memory_gib = 32
"""

# What is compared: the settings, and the average JCT in seconds of the authors' code (seed 1 of theirs).
VARIANTS: dict[str, tuple[AdaSrsf, float]] = {
    "LWF-1 + Ada": (AdaSrsf(grain_s=0.0), 10.423),
    "LWF-2 + Ada": (AdaSrsf(grain_s=0.0, kappa=2), 12.313),
    "LWF-4 + Ada": (AdaSrsf(grain_s=0.0, kappa=4), 17.819),
    "LWF-32 + Ada": (AdaSrsf(grain_s=0.0, kappa=32), 19.885),
    "first-fit + Ada": (AdaSrsf(grain_s=0.0, placement="first-fit"), 17.356),
    "random + Ada": (AdaSrsf(grain_s=0.0, placement="random"), 26.964),
    "LWF-1 + SRSF(1)": (AdaSrsf(grain_s=0.0, admission="srsf", n=1), 13.371),
    "LWF-1 + SRSF(2)": (AdaSrsf(grain_s=0.0, admission="srsf", n=2), 15.191),
    "LWF-1 + SRSF(3)": (AdaSrsf(grain_s=0.0, admission="srsf", n=3), 16.613),
}


def hkbu_cluster() -> Cluster:
    return from_toml(CLUSTER, "hkbu.toml")


def hkbu_trace(seed: int, scale: int = 10) -> Trace:
    """Run times are compute alone: iterations x (t_f + t_b)."""
    random = np.random.default_rng(seed)
    gpus = random.permutation(np.repeat(list(SIZES), list(SIZES.values()))).astype(np.float64)
    submit_s = np.sort(random.integers(0, 1200 * scale, endpoint=True, size=len(gpus)) / 1000.0)
    iterations = random.integers(scale, 6 * scale, endpoint=True, size=len(gpus))
    models = [list(PROFILES)[i] for i in random.integers(len(PROFILES), size=len(gpus))]
    return Trace.of(
        f"hkbu-{seed}",
        {
            "job_id": [f"j{i}" for i in range(len(gpus))],
            "submit_time": submit_s,
            "duration": [n * PROFILES[m].compute_s for n, m in zip(iterations.tolist(), models, strict=True)],
            "num_gpus": gpus,
            "model": models,
        },
    )


def played(policy: AdaSrsf, seed: int, scale: int = 10) -> Result:
    return simulate(hkbu_trace(seed, scale), hkbu_cluster(), policy, perf="hkbu", seed=seed)


def mean_jct_s(policy: AdaSrsf, seeds: range, scale: int = 10) -> float:
    return float(np.mean([played(policy, seed, scale).jobs["jct_s"].to_numpy().mean() for seed in seeds]))


def main() -> None:
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
    print(f"{'':16} {'theirs s':>9} {'ours s':>9} {'p10..p90':>14} {'makespan s':>11} {'GPU util':>9}")
    for name, (policy, theirs_s) in VARIANTS.items():
        results = [played(policy, seed) for seed in seeds]
        jct_s = np.array([r.jobs["jct_s"].mean() for r in results], dtype=np.float64)
        makespan_s = np.array([r.jobs["finish_s"].max() - r.jobs["submit_s"].min() for r in results])
        computed = [(r.jobs["duration_s"] * r.jobs["gpus"]).sum() for r in results]
        low, high = np.percentile(jct_s, (10, 90))
        util = np.mean(np.array(computed) / (64 * makespan_s))
        ours = f"{jct_s.mean():9.2f} {low:6.1f}..{high:<6.1f} {makespan_s.mean():11.1f} {util:9.2f}"
        print(f"{name:16} {theirs_s:9.2f} {ours}")


if __name__ == "__main__":
    main()
