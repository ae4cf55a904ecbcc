"""Dally beside its own variants and Tiresias, in the mode of its paper and on a realistic network.

    python -m benchmarks.dally_reproduction [--gpus 128,256,512] [--perf artist,network] [--switches]

The authors' traces are not ours to ship: the 500 jobs are drawn anew from what is known of theirs (sizes, models, and
median, mean and maximum of the work). Figures are means over all jobs in 1,000 s, as in docs/reproduction.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import polars as pl

from thebes import Policy, Result, Trace, simulate
from thebes.policy import find
from thebes.sim.costs import Costs

SIZES = {1: 270, 2: 13, 4: 52, 8: 109, 16: 42, 32: 11, 40: 1, 48: 1, 56: 1}
MODELS = {"mobilenetv3": 125, "bert": 125, "resnet50": 125, "alexnet": 53, "resnet18": 38, "vgg11": 34}
HOUR_S, DAY_S = 3600.0, 86400.0
MEDIAN_H, MEAN_H, MAX_H = 15.6, 26.1, 324.0  # work on one GPU
# In every published run on 512 GPUs the last job ends at 800,000 s: no job on one GPU can be longer.
MAX_ONE_GPU_H = 222.0
CLUSTERS = {128: "2x8x8", 256: "4x8x8", 512: "8x8x8"}
# Tiresias as it is takes any GPUs and never moves; with `yarn` it waits for one machine or one rack, as Dally's does.
POLICIES = ("dally", "dally-manual", "dally-no-wait", "dally-consolidated", "tiresias-l", "tiresias-l+yarn")
# Freeing GPUs took one second each; nothing else cost anything.
COSTS = Costs(suspend_s=4.0, resume_s=0.0)
SWITCHES: dict[str, dict[str, object]] = {
    "as published": {},
    "keep_place": {"keep_place": True},
    "tuner_by_model": {"tuner_by_model": True},
    "skip_costly_waits": {"skip_costly_waits": True},
    "ageing=0.1": {"ageing": 0.1},
    "reserve_large": {"reserve_large": True},
}


def work_h(count: int, rng: np.random.Generator) -> np.ndarray:
    """Lognormal work with the published median and mean, cut at the published maximum."""
    sigma = np.sqrt(2 * np.log(MEAN_H / MEDIAN_H))
    return np.minimum(MEDIAN_H * np.exp(sigma * rng.standard_normal(count)), MAX_H)


def jobs(seed: int = 0, jobs_per_day: float | None = None) -> Trace:
    """500 jobs, all at once or as a Poisson process."""
    rng = np.random.default_rng(seed)
    gpus = rng.permutation(np.repeat(list(SIZES), list(SIZES.values())))
    models = rng.permutation(np.repeat(list(MODELS), list(MODELS.values())))
    hours = work_h(len(gpus), rng)
    hours *= MEAN_H / hours.mean()
    hours = np.where(gpus == 1, np.minimum(hours, MAX_ONE_GPU_H), np.minimum(hours, MAX_H))
    submit_s = np.zeros(len(gpus))
    if jobs_per_day:
        submit_s = np.cumsum(rng.exponential(DAY_S / jobs_per_day, len(gpus)))
    name = f"batch-500-{seed}" if jobs_per_day is None else f"poisson-{jobs_per_day:g}-{seed}"
    columns = {
        "job_id": [f"j{i}" for i in range(len(gpus))],
        "submit_time": submit_s,
        "num_gpus": gpus.astype(float),
        "duration": hours * HOUR_S / gpus,
        "model": models.tolist(),
    }
    return Trace.of(name, columns)


def run(trace: Trace, gpus: int, policy: Policy, perf: str = "artist", placement: str = "consolidate") -> Result:
    """One trace on so many GPUs; on the realistic network neighbours contend."""
    told = {"perf": perf, "placement": placement, "contention": perf == "network"}
    return simulate(trace, CLUSTERS[gpus], policy, costs=COSTS, **told)


def figures(result: Result) -> tuple[float, float, float]:
    """(makespan, mean JCT, mean communication) in 1,000 s."""
    span_s = result.jobs["finish_s"].max() - result.jobs["submit_s"].min()
    return span_s / 1e3, result.jobs["jct_s"].mean() / 1e3, result.jobs["comm_s"].mean() / 1e3


def realistic(trace: Trace) -> Trace:
    """The same jobs by the names of the network model; Dally's BERT is the large one."""
    named = {"bert": "bert-large"}
    return replace(trace, jobs=trace.jobs.with_columns(pl.col("model").replace(named)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", default="128,256,512")
    parser.add_argument("--perf", default="artist,network")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--switches", action="store_true", help="dally with each of its switches, instead of variants")
    told = parser.parse_args()
    policies: dict[str, Policy] = {name: find(name.partition("+")[0])() for name in told.policies.split(",")}
    if told.switches:
        policies = {name: find("dally")(**more) for name, more in SWITCHES.items()}
    print(
        f"{'trace':14s}{'perf':9s}{'GPUs':>5s}  {'policy':20s}{'makespan':>10s}{'avg JCT':>9s}{'comm':>8s}  (1,000 s)"
    )
    for perf in told.perf.split(","):
        for jobs_per_day in (None, 100.0):
            for gpus in map(int, told.gpus.split(",")):
                for name, policy in policies.items():
                    traces = [jobs(seed, jobs_per_day) for seed in range(told.seeds)]
                    traces = [realistic(t) if perf == "network" else t for t in traces]
                    where = name.partition("+")[2] or "consolidate"
                    runs = [figures(run(t, gpus, policy, perf, where)) for t in traces]
                    makespan, jct, comm = np.mean(runs, axis=0)
                    kind = "batch" if jobs_per_day is None else f"poisson-{jobs_per_day:g}"
                    print(f"{kind:14s}{perf:9s}{gpus:5d}  {name:20s}{makespan:10.0f}{jct:9.1f}{comm:8.1f}", flush=True)


if __name__ == "__main__":
    main()
