"""How much does the queue limit of Tiresias matter? A sweep from Python, as a table.

python examples/sweep.py                         # the Philly sample that ships with Thebes, on 64 GPUs
python examples/sweep.py my_trace.csv 16x8
"""

from __future__ import annotations

import argparse

import thebes
from thebes.policy.orders.tiresias import TiresiasL

LIMITS = (3_250, 18_000, 57_600, 200_000, 1_000_000)  # GPU-seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Sweep the limit between the two queues of tiresias-l.")
    parser.add_argument("trace", nargs="?", default="philly-sample")
    parser.add_argument("cluster", nargs="?", default="8x8")
    parser.add_argument("--jobs", type=int, help="only the first N jobs")
    chosen = parser.parse_args(arguments)

    trace = thebes.read_trace(chosen.trace)  # read once, simulate often
    cluster = thebes.read_cluster(chosen.cluster)
    print(f"{'limit (GPU-s)':>13} {'avg JCT (h)':>12} {'median (h)':>11} {'p95 (h)':>9} {'preemptions':>12}")
    for limit in LIMITS:
        policy = TiresiasL(queue_limits=(limit,))
        figures = thebes.simulate(trace, cluster, policy, limit=chosen.jobs).metrics
        print(
            f"{limit:>13,} {figures['avg_jct'] / 3600:>12,.1f} {figures['median_jct'] / 3600:>11,.2f}"
            f" {figures['p95_jct'] / 3600:>9,.1f} {figures['preemptions']:>12,}"
        )


if __name__ == "__main__":
    main()
