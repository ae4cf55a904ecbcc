"""The released Tiresias simulator, reproduced with its integer seconds, its schedules and its slips.

It is a yardstick, not a policy to use: it names a schedule of the published code, and the simulator then runs that
code's loop (thebes.sim.released_tiresias) instead of its own, so that published figures can be matched to the last
digit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thebes.model.decision import Decision
from thebes.model.errors import UserError
from thebes.model.facts import DISTRIBUTION, DURATIONS
from thebes.model.parameters import parameter
from thebes.model.view import View
from thebes.placement import Count, Placement
from thebes.policy.base import REPLICA, Policy


@dataclass(frozen=True)
class TiresiasCompat(Policy):
    """The released simulator of Tiresias, defects included. It is only for checks against published figures."""

    name: ClassVar[str] = "tiresias-compat"
    paper: ClassVar[str] = "SymbioticLab/Tiresias @ 959f9b0, folder simulator/"
    needs: ClassVar[frozenset[str]] = frozenset({DURATIONS, DISTRIBUTION})

    grain: ClassVar[str] = REPLICA

    schedule: str = parameter(
        "dlas-gpu", "the published --schedule: fifo, fjf, sjf, shortest, shortest-gpu, dlas, dlas-gpu, …"
    )
    variant: str = parameter("as-released", "as-released, memfix, gittins-distfix or corrected (docs/policies.md)")
    queue_limits: tuple[float, ...] = parameter((3250.0, 7200.0), "limits of all queues but the last", low=1, high=1e15)

    def default_placement(self) -> Placement:
        """The release only counts GPUs."""
        return Count()

    def decide(self, view: View) -> Decision:
        raise UserError(
            "tiresias-compat cannot decide on its own", hint="it runs only in the simulator: thebes simulate"
        )
