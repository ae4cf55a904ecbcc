"""`make bench-engines`: what it costs to carry a decision out on Slurm and on Ray, on clusters made for the purpose.

    python -m benchmarks.engines [slurm] [ray] [--trials] [--out FILE]

On each: from the order to all ranks running for a gang on many nodes; jobs started and ended per second, so many at a
time; CPU time of the whole machine per job. Slurm: 64 nodes of 8 fake GPUs; Ray: 4 nodes of 8. The clusters are those
of the tests. Nothing else should run on the machine; what did is told by `busy_before`.

With `--trials` also the trials of tests/trials are run (1,000 jobs on Slurm under two policies while parts of it are
killed, 60 on Ray, the fidelity of 200 jobs), and their figures kept: a quarter of an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.run import ROOT, about_this_run
from thebes.protocol.contract import Launch, Part

TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))

from kit.engine_worlds import WORLDS, Told, World, opened, python  # noqa: E402

SIZES = {"slurm": (64, 8, 192), "ray": (4, 4, 32)}  # nodes, nodes of a gang, jobs
GANGS = 12
AT_ONCE = 8


def busy_s() -> float:
    """CPU seconds that this machine has spent on anything."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait


async def ended(told: Told, launch: Launch) -> None:
    for part in launch.parts:
        await told.ended(launch, part.node)
    await told.engine.forget(launch.job_id, launch.incarnation)


async def gang_start_s(told: Told, nodes: int, gpus: int) -> float:
    """From the order to the last rank's start, by the nodes' own clocks, shifted to ours."""
    from thebes.protocol.clock import boot_s

    launch = python(told.world, "import time; time.sleep(0.2)", *[tuple(range(gpus))] * nodes, ranks_per_node=1)
    ordered_s = boot_s()
    await told.engine.launch(launch)
    await ended(told, launch)
    starts = [told.latest(launch.job_id, 1, part.node) for part in launch.parts]
    return max(report.started_s or 0.0 for report in starts if report is not None) - ordered_s


async def throughput(told: Told, jobs: int) -> dict[str, float]:
    places = [Part(node, (gpu,)) for gpu in range(8) for node in told.world.nodes][:jobs]
    launches = [replace(python(told.world, "pass"), parts=(place,)) for place in places]
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(launch: Launch) -> None:
        async with gate:
            await told.engine.launch(launch)
            await ended(told, launch)

    began_s, cpu_s = time.monotonic(), busy_s()
    await asyncio.gather(*(one(launch) for launch in launches))
    took_s = time.monotonic() - began_s
    return {
        "jobs": len(launches),
        "at_once": AT_ONCE,
        "jobs_per_s": round(len(launches) / took_s, 2),
        "cpu_s_per_job": round((busy_s() - cpu_s) / len(launches), 4),
    }


async def measure(world: World, gang_nodes: int, jobs: int) -> dict[str, Any]:
    async with opened(world) as told:
        await gang_start_s(told, gang_nodes, 8)  # the first loads what the others find loaded
        starts = sorted([await gang_start_s(told, gang_nodes, 8) for _ in range(GANGS)])
        return {
            "nodes": len(world.nodes),
            "gang": {
                "nodes": gang_nodes,
                "gpus": 8 * gang_nodes,
                "starts": GANGS,
                "order_to_all_ranks_s_median": round(statistics.median(starts), 3),
                "order_to_all_ranks_s_worst": round(starts[-1], 3),
            },
            "single_gpu_jobs": await throughput(told, jobs),
        }


def run_trials(engines: list[str]) -> dict[str, Any]:
    """The figures of each trial by its name; a trial that fails is an error."""
    with tempfile.TemporaryDirectory() as folder:
        trials = [f"tests/trials/test_{name}_trial.py" for name in engines]
        trials += ["tests/trials/test_slurm_fidelity.py"] if "slurm" in engines else []
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", *trials]
        env = {**os.environ, "THEBES_TRIAL_DIR": folder, "THEBES_REQUIRE": ",".join(engines)}
        subprocess.run(command, cwd=ROOT, env=env, check=True)
        return {path.stem: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=" or ".join(SIZES))
    parser.add_argument("--trials", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    engines = options.engines or list(SIZES)
    if unknown := set(engines) - set(SIZES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {' and '.join(SIZES)}")
    found: dict[str, Any] = about_this_run()
    found["busy_before"] = round(psutil.cpu_percent(2.0) / 100, 3)
    for name in engines:
        nodes, gang_nodes, jobs = SIZES[name]
        with tempfile.TemporaryDirectory() as folder, WORLDS[name](Path(folder), nodes) as world:
            found[name] = asyncio.run(measure(world, gang_nodes, jobs))
            print(f"{name}: {json.dumps(found[name])}")
    if options.trials:
        found["trials"] = run_trials(engines)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
