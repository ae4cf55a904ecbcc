"""What it costs to use a policy for the first time: the compile of each family of policies, in CPU and wall seconds.

    python -m benchmarks.compile [--policies NAME,NAME] [--repeats N] [--out FILE]

For one policy of each family (those that need the same compiled code) the ordinary command, `thebes simulate`, runs in
a process of its own: with an empty cache, with the cache that `make setup` leaves, and with one in which nothing is
left to compile. Each figure is that of the whole command with all its children, and the least of the repeats. What
`thebes up` compiles before it starts a controller, and `make setup` itself, are measured too.
Without --out and --policies the JSON goes to benchmarks/results/DATE-MACHINE-compile.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.run import ROOT, about_this_run
from thebes.model.facts import PLANS
from thebes.policy import find, registry
from thebes.sim.warmup import README, SECONDS, family_of

Figures = dict[str, Any]

EMPTY, SETUP, WARM = "empty", "setup", "warm"
OWN_POLICY = "examples/own_policy.py:HeadStart"  # stands for the policies that people write
LIVE = (
    "tiresias-l",
    "dally",
    "gandiva",
    "two-level",
)  # one of each family that needs nothing the live side cannot know
FROM_EMPTY_S, FROM_SETUP_S = 20.0, 15.0  # the goals, in CPU seconds

REHEARSE = """
from thebes.cli.instance import compile_ahead
from thebes.policy import find
policy = find({name!r})()
compile_ahead(policy, policy.default_placement())
"""


def families(names: Sequence[str]) -> dict[str, list[str]]:
    """The policies by what is compiled for them; those that need nothing are left out."""
    found: dict[str, list[str]] = {}
    for name in names:
        family = family_of(find(name)())
        if family is not None:
            found.setdefault(family, []).append(name)
    return found


def command_of(name: str) -> list[str]:
    """The ordinary command with a small workload of the kind that the policy is for."""
    plans = ":" not in name and PLANS in find(name).needs
    workload = ["rubick-406", "--perf", "plans"] if plans else ["philly-sample"]
    small = ("--limit", "20", "--cluster", "8x8")
    return [
        sys.executable,
        "-c",
        "from thebes.cli import main; main()",
        "simulate",
        *workload,
        *small,
        "--policy",
        name,
    ]


def timed(command: Sequence[str], cache: Path) -> Figures:
    """Wall and CPU seconds of a command and its children, and what it told about compiling."""
    environment = os.environ | {"THEBES_CACHE_DIR": str(cache)}
    with tempfile.TemporaryFile("w+") as told:
        load_average = os.getloadavg()[0]
        began_s = time.monotonic()
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=told, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.monotonic() - began_s
        told.seek(0)
        text = told.read()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {child.returncode}\n{text}")
    return {
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "wall_seconds": wall_s,
        "announced": re.findall(r"^Compil.*$", text, re.MULTILINE),
        "kernels": sum(1 for _ in cache.rglob("*.nbc")),
        "load_average": load_average,
    }


def least(runs: Sequence[Figures]) -> Figures:
    """The run that took the least CPU time, with the CPU times of all."""
    best = min(runs, key=lambda run: run["cpu_seconds"])
    return best | {"all_cpu_seconds": [run["cpu_seconds"] for run in runs]}


def first_uses(command: Sequence[str], setup: Path, repeats: int) -> Figures:
    """A command with an empty cache, with that of `make setup`, and with nothing left to compile."""
    runs: dict[str, list[Figures]] = {EMPTY: [], SETUP: [], WARM: []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            empty, after_setup = Path(folder, "empty"), Path(folder, "setup")
            runs[EMPTY].append(timed(command, empty))
            runs[WARM].append(timed(command, empty))
            shutil.copytree(setup, after_setup)
            runs[SETUP].append(timed(command, after_setup))
    return {f"from_{start}": least(of_start) for start, of_start in runs.items()}


def measure(names: Sequence[str], repeats: int, console: Console) -> Figures:
    results: Figures = about_this_run() | {"calibration": machine.calibrate(3), "notes": [], "readme": list(README)}
    results["goals"] = {"from_empty": FROM_EMPTY_S, "from_setup": FROM_SETUP_S, "announced": SECONDS}
    results["families"], results["live"] = [], []
    with tempfile.TemporaryDirectory() as folder:
        setup = Path(folder)
        with console.status("make setup"):
            results["setup"] = timed([sys.executable, "-m", "thebes.sim.warmup"], setup)
        for family, members in (families(names) | {"general": [OWN_POLICY]}).items():
            with console.status(f"{family}: {members[0]}"):
                figures = first_uses(command_of(members[0]), setup, repeats)
            results["families"].append({"family": family, "policies": members} | figures)
        for name in LIVE:
            with console.status(f"thebes up --policy {name}"):
                figures = first_uses([sys.executable, "-c", REHEARSE.format(name=name)], setup, repeats)
            results["live"].append({"policy": name} | figures)
    if max(case[f"from_{EMPTY}"]["load_average"] for case in results["families"]) > 1.5:
        results["notes"].append("other processes were at work: CPU seconds are upper bounds, wall seconds mean little")
    return results


def show(results: Figures, console: Console) -> None:
    table = Table("first use of", "from empty", "after setup", "warm", "wall from empty", "kernels")
    for case in [*results["families"], *results["live"]]:
        empty, setup, warm = (case[f"from_{start}"] for start in (EMPTY, SETUP, WARM))
        table.add_row(
            case["family"] if "family" in case else f"thebes up: {case['policy']}",
            *(f"{run['cpu_seconds']:.1f}" for run in (empty, setup, warm)),
            f"{empty['wall_seconds']:.1f}",
            str(warm["kernels"]),
        )
    console.print(table)
    console.print(
        f"make setup: {results['setup']['cpu_seconds']:.1f} s CPU, {results['setup']['wall_seconds']:.1f} s wall"
    )
    for missed in missed_goals(results):
        console.print(f"missed: {missed}")


def missed_goals(results: Figures) -> list[str]:
    """The first uses that take more CPU time than the goals say."""
    return [
        f"{case['family']} {start}: {case[start]['cpu_seconds']:.1f} s of at most {results['goals'][start]:g} s"
        for case in results["families"]
        for start in (f"from_{EMPTY}", f"from_{SETUP}")
        if case[start]["cpu_seconds"] > results["goals"][start]
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile", description="What a first use costs.")
    parser.add_argument("--policies", metavar="NAME,NAME", help="one family each of these (default: all that ship)")
    parser.add_argument("--repeats", type=int, default=2, help="the least of so many counts (default 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes")
    options = parser.parse_args(argv)
    console = Console()
    names = options.policies.split(",") if options.policies else list(registry())
    results = measure(names, options.repeats, console)
    show(results, console)
    out: Path | None = options.out
    if out is None and not options.policies:
        name = f"{results['date']}-{machine.short_name(results['machine'])}-compile.json"
        out = ROOT / "benchmarks" / "results" / name
    if out:
        out.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"written to {os.path.relpath(out)}")


if __name__ == "__main__":
    main()
