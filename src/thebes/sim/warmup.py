"""Compile the simulator ahead of its first run: `python -m thebes.sim.warmup`, once per version and machine."""

from __future__ import annotations

import numpy as np

from thebes.model.compiled import is_cold
from thebes.model.decision import Decision
from thebes.model.trace import Trace
from thebes.model.view import View
from thebes.policy import Policy, fill
from thebes.policy.ada_srsf import AdaSrsf
from thebes.policy.priority import PriorityPolicy
from thebes.policy.tiresias_compat import TiresiasCompat


class _InOrder(Policy):
    """Submission order, through View and Decision."""

    def decide(self, view: View) -> Decision:
        return fill(view, np.arange(len(view.jobs)))


def compile_fast_path() -> None:
    from thebes.sim.simulate import simulate

    simulate(_tiny(), "1x2", "tiresias-l")


def compile_general_path() -> None:
    from thebes.sim.simulate import simulate

    simulate(_tiny(), "1x2", _InOrder())


def compile_iterations() -> None:
    from thebes.sim.simulate import simulate

    simulate(_tiny(), "1x2", AdaSrsf())


def needs_compiling(policy: Policy) -> bool:
    """Whether a run under this policy would have to compile first."""
    if isinstance(policy, TiresiasCompat):
        return False
    if isinstance(policy, AdaSrsf):
        return is_cold("iterations.play")
    return is_cold("fast.run" if isinstance(policy, PriorityPolicy) else "fill.draw_up")


def compile_for(policy: Policy) -> None:
    """Compile what a run under this policy needs, if that was not done before."""
    if not needs_compiling(policy):
        return
    if isinstance(policy, AdaSrsf):
        compile_iterations()
    else:
        compile_fast_path() if isinstance(policy, PriorityPolicy) else compile_general_path()


def _tiny() -> Trace:
    """Three jobs that start, wait and preempt."""
    columns = {
        "job_id": ["a", "b", "c"],
        "submit_time": [0.0, 1.0, 2.0],
        "duration": [4e3, 5.0, 5.0],
        "num_gpus": [2.0, 1, 1],
    }
    return Trace.of("warm-up", columns)


if __name__ == "__main__":
    if is_cold("fast.run") or is_cold("fill.draw_up"):
        print("Compiling the simulator for this machine (once per version, about a minute) …")
        compile_fast_path()
        compile_general_path()
