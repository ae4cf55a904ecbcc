"""Compile the simulator ahead of its first run, once per version and machine.

    python -m thebes.sim.warmup            what the README uses
    python -m thebes.sim.warmup --all      everything, for every policy that ships
    python -m thebes.sim.warmup NAME …     what these policies need

Policies come in families that need the same compiled code. A family is compiled by a run of a few jobs under one of its
policies, and a mark in the cache folder then says so. Several families are compiled side by side.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from thebes.model.compiled import cache_folder, compiles, rarely_collecting
from thebes.model.decision import Decision
from thebes.model.facts import PLANS
from thebes.model.trace import Trace
from thebes.model.view import View
from thebes.policy import Policy, find, registry
from thebes.policy.ada_srsf import AdaSrsf
from thebes.policy.base import ITERATIONS, REPLICA
from thebes.policy.fill import fill

# The families that all others build on: one for orders alone, one for any policy, one for the grain of iterations.
ORDER, GENERAL, GRAIN = "order", "general", "iterations"
README = ("tiresias-l", "dally", "gandiva", "rubick")
SECONDS = 20  # one family takes at most this long, on the machine of benchmarks/README.md


class _Anybody(Policy):
    """It stands for the policies that people write, which may want special jobs; first come, first served."""

    def decide(self, view: View) -> Decision:
        return fill(view, np.argsort(view.jobs.submit_s, kind="stable"))


def family_of(policy: Policy) -> str | None:
    """The family of compiled code that this policy needs; None if it needs none."""
    if policy.grain == REPLICA:
        return None
    if policy.grain == ITERATIONS:
        return GRAIN
    if policy.one_order() is not None:
        return ORDER
    module = type(policy).__module__
    return module.rpartition(".")[2] if module.startswith("thebes.policy.") else GENERAL


def needs_compiling(policy: Policy) -> bool:
    """Whether a run under this policy would have to compile first."""
    family = family_of(policy)
    return family is not None and compiles() and not _mark(family).exists()


def announcement(policies: Sequence[Policy]) -> str | None:
    """What to tell people before `compile_for` is called for each of these; None if nothing has to be compiled."""
    families = {family_of(policy) for policy in policies if needs_compiling(policy)}
    if not families:
        return None
    about = f"about {SECONDS * len(families)} s" if len(families) < 4 else "about a minute or two"
    return f"Compiling the simulator for this machine (once per version, {about}) …"


def compile_for(policy: Policy) -> None:
    """Compile what a run under this policy needs, unless that was done before."""
    family = family_of(policy)
    if family is None or not needs_compiling(policy):
        return
    if family == GRAIN:
        _play(AdaSrsf())
    elif family == ORDER:
        _play(find("tiresias-l")())
    elif family == GENERAL:
        _play(_Anybody())
    else:
        _play(type(policy)())
    _mark(family).touch()


def _mark(family: str) -> Path:
    return cache_folder() / f"compiled-for-{family}"


def _play(policy: Policy, *, fast: bool = True) -> None:
    from thebes.sim.simulate import simulate

    with rarely_collecting():
        simulate(_tiny(), "2x2", policy, perf="plans" if PLANS in policy.needs else "tiers", fast=fast)


def _tiny() -> Trace:
    """Four jobs of two users, so that jobs start, wait and preempt."""
    columns = {
        "job_id": ["a", "b", "c", "d"],
        "submit_time": [0.0, 1.0, 2.0, 3.0],
        "duration": [4e3, 5.0, 5.0, 6.0],
        "num_gpus": [2.0, 1, 1, 4],
        "user": ["u", "v", "u", "v"],
    }
    return Trace.of("warm-up", columns)


def one_of_each_family(names: Sequence[str]) -> list[str]:
    """A few of these policies that together need everything that any of them needs; the common ones come first."""
    chosen: dict[str, str] = {}
    for name in names:
        family = family_of(find(name)())
        if family is not None:
            chosen.setdefault(family, name)
    return sorted(chosen.values(), key=lambda name: family_of(find(name)()) != ORDER)


def compile_side_by_side(names: Sequence[str]) -> None:
    """Compile each family in a process of its own, as many at a time as there are cores; the common code goes first."""
    waiting = [name for name in one_of_each_family(names) if needs_compiling(find(name)())]
    if not waiting:
        return
    if any(family_of(find(name)()) not in (ORDER, GRAIN) for name in waiting) and needs_compiling(_Anybody()):
        first = [name for name in waiting if family_of(find(name)()) == ORDER]
        _in_processes([GENERAL, *first])
        waiting = [name for name in waiting if name not in first]
    _in_processes(waiting)


def _in_processes(names: Sequence[str]) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:  # its threads only wait for processes
        ended = list(pool.map(_in_a_process, names))
    if any(ended):
        raise SystemExit("The simulator could not be compiled; what went wrong stands above.")


def _in_a_process(name: str) -> int:
    return subprocess.run([sys.executable, "-m", "thebes.sim.warmup", "--here", name]).returncode


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--here"]:
        for name in arguments[1:]:
            compile_for(_Anybody() if name == GENERAL else find(name)())
        return
    names = list(registry()) if list(arguments) == ["--all"] else list(arguments) or list(README)
    message = announcement([find(name)() for name in names])
    if message:
        print(message, flush=True)
        compile_side_by_side(names)


if __name__ == "__main__":
    main(sys.argv[1:])
