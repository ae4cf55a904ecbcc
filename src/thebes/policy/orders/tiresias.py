"""Tiresias (Gu et al., NSDI'19), section 3: discretised two-dimensional attained service.

Jobs stand in K queues by the service they have attained (GPUs x time). Queues are served in order; a job enters the
first and is demoted when its service reaches the queue's limit. A job that has waited PROMOTEKNOB times as long as it
has run returns to the first queue and its age starts anew. Inside a queue:
Tiresias-L (nothing known): in order of start, so that no two jobs of a queue take turns preempting each other.
Tiresias-G (distribution known): by Gittins index, looking ahead to the queue's limit.
Demotions and promotions happen at their exact instants. The defaults are those of the authors' released simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from thebes.model.errors import UserError
from thebes.model.parameters import parameter
from thebes.policy.orders.gittins import DistributionPolicy
from thebes.policy.orders.priority import FIRST_START, GITTINS, START, SUBMIT, PriorityPolicy, Rule, make_rule

ORDERS = {"start": START, "first-start": FIRST_START, "submit": SUBMIT}
LIMITS_DOC = "upper limits of all queues but the last, ascending, in GPU-seconds"
KNOB_DOC = "PROMOTEKNOB: promote after waiting so many times the time run; 0: never"
FLOOR_DOC = "shortest wait that earns a promotion, in seconds: keeps long jobs from doing nothing but switching"


def _ascending(limits: tuple[float, ...]) -> tuple[float, ...]:
    if any(low >= high for low, high in pairwise(limits)):
        text = ",".join(f"{limit:g}" for limit in limits)
        raise UserError(
            f"tiresias: queue_limits={text} do not ascend", hint="write the smallest limit first, as in 3250,7200"
        )
    return limits


@dataclass(frozen=True)
class TiresiasL(PriorityPolicy):
    """Tiresias-L: discretised 2D least attained service. It needs no knowledge of the jobs."""

    name: ClassVar[str] = "tiresias-l"
    paper: ClassVar[str] = "Tiresias (NSDI'19), discretised 2D-LAS; `dlas-gpu` of its simulator, corrected"

    queue_limits: tuple[float, ...] = parameter((3250.0, 7200.0), LIMITS_DOC, low=1e-3)
    gpu_time: bool = parameter(True, "service counts GPUs x time; no: time alone (`dlas`), and the limits are seconds")
    order: str = parameter("start", "inside a queue: start, first-start or submit (docs/policies.md)")
    promote_knob: float = parameter(0.0, KNOB_DOC, low=0)
    promote_floor_s: float = parameter(14400.0, FLOOR_DOC, low=0)

    def __post_init__(self) -> None:
        _ascending(self.queue_limits)
        if self.order not in ORDERS:
            raise UserError(f"tiresias-l: order={self.order} is unknown", hint=f"order is {', '.join(ORDERS)}")

    def rule(self) -> Rule:
        return make_rule(
            ORDERS[self.order],
            by_gpu_time=self.gpu_time,
            limits=self.queue_limits,
            promote_knob=self.promote_knob,
            promote_floor_s=self.promote_floor_s,
        )


@dataclass(frozen=True)
class TiresiasG(DistributionPolicy):
    """Tiresias-G: queues as in Tiresias-L, inside them the job most likely to end within the queue goes first."""

    name: ClassVar[str] = "tiresias-g"
    paper: ClassVar[str] = "Tiresias (NSDI'19), discretised 2D-Gittins; `dlas-gpu-gittins` of its simulator, corrected"

    queue_limits: tuple[float, ...] = parameter((3250.0, 7200.0), LIMITS_DOC, low=1e-3)
    quantum_s: float = parameter(
        600.0, "time between two readings of the running jobs' service, in seconds; 0: at each event", low=0
    )
    promote_knob: float = parameter(0.0, KNOB_DOC, low=0)
    promote_floor_s: float = parameter(14400.0, FLOOR_DOC, low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ascending(self.queue_limits)

    def rule(self) -> Rule:
        return make_rule(
            GITTINS,
            limits=self.queue_limits,
            quantum_s=self.quantum_s,
            promote_knob=self.promote_knob,
            promote_floor_s=self.promote_floor_s,
        )
