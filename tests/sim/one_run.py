"""Runs a fixed set of small simulations and prints everything about them as one line of JSON each.

Called as a program by the tests, in processes of its own: with another hash seed, or with the compiler switched off.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import polars as pl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit.workloads import MODELS, trace_of
from thebes import Decision, Policy, View, fill, simulate
from thebes.placement import Skew
from thebes.policy import find
from thebes.policy.orders.tiresias import TiresiasG, TiresiasL


class SmallestWaitFirst(Policy):
    """A policy as a user would write it: least attained service, then fewest GPUs; asked again every 15 s."""

    def decide(self, view: View) -> Decision:
        order = np.lexsort((view.jobs.gpus, view.jobs.attained_gpu_s.round(3)))
        return fill(view, order, wake_s=view.now_s + 15.0)


def all_runs() -> list[str]:
    jobs = [(1.5 * i, 1 + (5 * i) % 4, 4.0 + (7 * i) % 23) for i in range(45)]
    trace = trace_of(*jobs, model=[MODELS[i % 4] for i in range(45)])
    policies: list[Policy] = [
        TiresiasL(queue_limits=(10.0, 30.0), promote_knob=2.0, promote_floor_s=8.0),
        TiresiasG(queue_limits=(10.0, 30.0), quantum_s=10.0),
        find("srtf")(),
        SmallestWaitFirst(),
    ]
    lines: list[str] = []
    for policy in policies:
        for placement in ("consolidate", Skew(learn=True)):
            result = simulate(trace, "2x2x2", policy, placement=placement)
            metrics = {name: value for name, value in result.metrics.items() if name != "wall_seconds"}
            frames = (result.jobs, result.events.with_columns(pl.col("kind").cast(pl.String)), result.timeline)
            lines.append(json.dumps([metrics, *(frame.write_json() for frame in frames)]))
    return lines


if __name__ == "__main__":
    print("\n".join(all_runs()))
