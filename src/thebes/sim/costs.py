"""What it costs to start, suspend and resume a job, in seconds for which the job holds its GPUs.

The default adds up to 62 s per preemption and resume: on the Tiresias testbed 221 preemptions took 13,724 s in all
(NSDI'19, section 5.2.4). How that divides between saving and restoring is not published; the split is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Records, plain
from thebes.model.errors import UserError, nearest
from thebes.model.parameters import parameter
from thebes.sim.world import COSTS

LONGEST_S = 1e9  # about thirty years: finite, so that no sum becomes not-a-number
MECHANISMS = ("checkpoint", "cuda", "kill", "free")
# Suspending by the GPU's driver, per GiB of GPU memory held: the middle of our measurements on an H200 (docs/gpu.md).
CUDA_SUSPEND_S_PER_GIB, CUDA_RESUME_S_PER_GIB = 0.49, 0.2


@dataclass(frozen=True)
class Costs:
    """Seconds per action, and per GiB of state (weights and optimiser). A migration is suspend, transfer and resume."""

    name: ClassVar[str] = "cost"

    mechanism: str = parameter(
        "checkpoint",
        "checkpoint: saved on suspend; cuda: suspended by the driver, by the GPU memory held (0.49 and 0.2 s per GiB); "
        "kill: back to the last periodic checkpoint; free: no cost",
    )
    start_s: float = parameter(0.0, "first start; 0 since a trace's run times contain it", low=0, high=LONGEST_S)
    start_s_per_gib: float = parameter(0.0, "first start, per GiB of state", low=0, high=LONGEST_S)
    suspend_s: float = parameter(12.0, "saving the state", low=0, high=LONGEST_S)
    suspend_s_per_gib: float = parameter(0.0, "saving the state, per GiB", low=0, high=LONGEST_S)
    resume_s: float = parameter(50.0, "restarting from the state", low=0, high=LONGEST_S)
    resume_s_per_gib: float = parameter(0.0, "restarting from the state, per GiB", low=0, high=LONGEST_S)
    migrate_s: float = parameter(
        0.0, "moving the state to other nodes, on top of suspend and resume", low=0, high=LONGEST_S
    )
    migrate_s_per_gib: float = parameter(0.0, "moving the state to other nodes, per GiB", low=0, high=LONGEST_S)
    checkpoint_every_s: float = parameter(
        1800.0, "kill: running time between periodic checkpoints; 0: there are none", low=0
    )

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise UserError(f"unknown cost.mechanism '{self.mechanism}'", hint=nearest(self.mechanism, MECHANISMS))

    def record(self) -> Records:
        costs = np.recarray(1, dtype=COSTS)
        costs[0] = np.zeros(1, dtype=COSTS)[0]
        costs.saves = self.mechanism != "kill"
        if self.mechanism == "free":
            return plain(costs)
        costs.start_s, costs.start_s_per_gib = self.start_s, self.start_s_per_gib
        costs.migrate_s, costs.migrate_s_per_gib = self.migrate_s, self.migrate_s_per_gib
        costs.checkpoint_every_s = self.checkpoint_every_s
        return plain(costs)

    def suspend_and_resume_s(
        self, state_gib: NDArray[np.float64], memory_gib: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """For each job, what one suspension and one resume cost."""
        if self.mechanism == "free":
            return np.zeros(len(state_gib)), np.zeros(len(state_gib))
        if self.mechanism == "cuda":
            return CUDA_SUSPEND_S_PER_GIB * memory_gib, CUDA_RESUME_S_PER_GIB * memory_gib
        suspend_s = self.suspend_s + self.suspend_s_per_gib * state_gib
        saves = self.mechanism != "kill"
        return suspend_s * saves, self.resume_s + self.resume_s_per_gib * state_gib


FREE_OF_COST = Costs(mechanism="free")
