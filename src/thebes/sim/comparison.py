"""Several policies on one trace, each in a process of its own, and their figures side by side."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any

from thebes.model.cluster import Cluster
from thebes.model.trace import Trace
from thebes.policy import find as find_policy
from thebes.report.metrics import to_json
from thebes.report.result import Result
from thebes.sim.choices import Choice
from thebes.sim.simulate import run
from thebes.sim.warmup import compile_for

Advance = Callable[[int, float], None]  # (which run, which fraction of it is done)
POLL_S = 0.2

# Higher is better for these; ratios are always against the first policy.
RATIOS = ("avg_jct", "median_jct", "p95_jct", "p99_jct", "max_jct", "makespan", "avg_queue_delay", "gpu_utilization")

# What a worker process is given once, because sending it with every task would cost more than the task.
_shared: tuple[Trace, Cluster, Any] | None = None


def _tell_nobody(_index: int, _fraction: float) -> None:
    """Report no progress: the default of `advance`."""


def run_several(
    trace: Trace,
    cluster: Cluster,
    choices: Sequence[Choice],
    *,
    workers: int | None = None,
    advance: Advance | None = None,
) -> list[Result]:
    """Results in the order of the choices. With one core or one policy, no further process is started."""
    count = min(len(choices), workers or len(os.sched_getaffinity(0)))
    tell = advance or _tell_nobody
    for choice in choices:
        compile_for(choice.policy)  # here and once, because several processes would each compile the same
    if count == 1:
        return [_run_here(trace, cluster, choices, index, tell) for index in range(len(choices))]
    return _run_in_processes(trace, cluster, choices, count, tell)


def _run_here(trace: Trace, cluster: Cluster, choices: Sequence[Choice], index: int, tell: Advance) -> Result:
    choice = choices[index]
    return run(trace, cluster, choice.policy, choice.options, lambda done, of, _now: tell(index, done / of))


def _run_in_processes(
    trace: Trace, cluster: Cluster, choices: Sequence[Choice], count: int, tell: Advance
) -> list[Result]:
    context = multiprocessing.get_context("spawn")
    fractions = context.Array("d", len(choices), lock=False)
    shared = (trace, cluster, fractions, [choice.name for choice in choices])
    with ProcessPoolExecutor(count, mp_context=context, initializer=_share, initargs=shared) as pool:
        futures: list[Future[Result]] = [pool.submit(_run_there, choice, index) for index, choice in enumerate(choices)]
        try:
            while wait(futures, timeout=POLL_S, return_when="FIRST_EXCEPTION").not_done:
                for index, fraction in enumerate(fractions):
                    tell(index, fraction)
                if any(future.done() and future.exception() for future in futures):
                    break
        finally:
            for future in futures:  # after an error, the other runs need not go on
                future.cancel()
        return [future.result() for future in futures if not future.cancelled()]


def _share(trace: Trace, cluster: Cluster, fractions: Any, names: Sequence[str]) -> None:
    global _shared
    for name in names:
        find_policy(name)  # a policy from a file must be loaded before a task names its class
    _shared = (trace, cluster, fractions)


def _run_there(choice: Choice, index: int) -> Result:
    assert _shared is not None
    trace, cluster, fractions = _shared

    def tell(done: int, of: int, _now: float) -> None:
        fractions[index] = done / of

    return run(trace, cluster, choice.policy, choice.options, tell)


def comparison_json(results: Sequence[Result]) -> str:
    """All metrics, and each policy's ratios to the first."""
    first = results[0].metrics

    def ratio(result: Result, key: str) -> float | None:
        mine, base = result.metrics[key], first[key]
        return mine / base if isinstance(mine, float) and isinstance(base, float) and base else None

    comparison = {
        "results": [json.loads(to_json(result.metrics)) for result in results],
        "ratios_to_first": {result.policy: {key: ratio(result, key) for key in RATIOS} for result in results},
    }
    return json.dumps(comparison, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
