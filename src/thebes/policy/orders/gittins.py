"""The Gittins index, continuous: there are no queues, but a distribution of how much service jobs take.

Tiresias (Gu et al., NSDI'19), section 3.1. G(a) is the chance that a job with service a so far ends within the next D,
per unit of service spent on it until it ends or D is used up; the job with the largest G goes first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.facts import DISTRIBUTION
from thebes.model.jobs import NEVER
from thebes.model.parameters import parameter
from thebes.policy.orders.priority import GITTINS, PriorityPolicy, Rule, make_rule
from thebes.policy.orders.samples import read_samples


@dataclass(frozen=True)
class DistributionPolicy(PriorityPolicy):
    """Base of policies that know how service is distributed: from a file, from jobs that finish, or from both.

    Until something is known (no file, fewer than 32 jobs finished) jobs go in order of first start.
    """

    needs: ClassVar[frozenset[str]] = frozenset({DISTRIBUTION})

    samples_file: Path | None = parameter(None, "file of past jobs' total GPU-seconds, one per line")  # noqa: RUF009
    learn: bool = parameter(True, "take the jobs that finished so far into the distribution")
    _samples: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_samples", read_samples(self.samples_file))

    def samples(self) -> NDArray[np.float64]:
        return self._samples


@dataclass(frozen=True)
class Gittins(DistributionPolicy):
    """2D-Gittins: the job most likely to end soon, given the service it has had, goes first.

    The definition takes the best D. On raw samples that always picks a D just large enough to reach the next sample, so
    the index jumps about; D is fixed here, as in the authors' simulator.
    """

    name: ClassVar[str] = "gittins"
    paper: ClassVar[str] = "Tiresias (NSDI'19) section 3.1, 2D-Gittins"

    delta_gpu_s: float = parameter(3250.0, "D: how far the index looks ahead, in GPU-seconds", low=1e-3)
    quantum_s: float = parameter(
        600.0, "time between two readings of the running jobs' service, in seconds; 0: at each event", low=0
    )

    def rule(self) -> Rule:
        return make_rule(GITTINS, quantum_s=self.quantum_s, horizon=self.delta_gpu_s)


@dataclass(frozen=True)
class ShortestExpected(DistributionPolicy):
    """Least expected remaining service first: E[S - a | S > a] over past jobs. Preemptive.

    It is the Gittins order with D infinite. (The released simulator compares means of totals and looks them up by time
    instead of service; `tiresias-compat` reproduces that.)
    """

    name: ClassVar[str] = "shortest-expected"
    paper: ClassVar[str] = "baseline; what `shortest-expected` of the Tiresias simulator was meant to be"

    quantum_s: float = parameter(
        600.0, "time between two readings of the running jobs' service, in seconds; 0: at each event", low=0
    )

    def rule(self) -> Rule:
        return make_rule(GITTINS, quantum_s=self.quantum_s, horizon=NEVER)
