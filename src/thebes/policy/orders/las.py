"""Least attained service, continuous: it has no queues and needs no knowledge.

Tiresias (Gu et al., NSDI'19), section 3.1: the job that has received least goes first, counted in two
dimensions, GPUs x time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thebes.model.parameters import parameter
from thebes.policy.orders.priority import ATTAINED, PriorityPolicy, Rule, make_rule


@dataclass(frozen=True)
class LeastAttainedService(PriorityPolicy):
    """2D-LAS: the job with the least attained service (GPUs x time) goes first. It needs no knowledge of the jobs.

    Without a quantum, two jobs of equal service would take turns in no time at all; so the service of running
    jobs is read once per quantum. Ties go to the earlier submission.
    """

    name: ClassVar[str] = "las"
    paper: ClassVar[str] = "Tiresias (NSDI'19) section 3.1, 2D-LAS"

    quantum_s: float = parameter(600.0, "time between two readings of the running jobs' service, in seconds", low=1e-3)
    gpu_time: bool = parameter(True, "service counts GPUs x time; no: time alone (one-dimensional LAS)")

    def rule(self) -> Rule:
        return make_rule(ATTAINED, by_gpu_time=self.gpu_time, quantum_s=self.quantum_s)
