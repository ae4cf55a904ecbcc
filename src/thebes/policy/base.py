"""What a policy is: a name, what it needs to know, its parameters, and one pure function from View to Decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from thebes.model.cluster import Cluster
from thebes.model.decision import Decision
from thebes.model.view import View
from thebes.placement import Consolidate, Placement

if TYPE_CHECKING:
    from thebes.policy.orders.priority import Ordering

# The grain at which the simulator plays a policy out.
DECISIONS = "decisions"  # the policy is asked once per event, as on a live cluster
ITERATIONS = "iterations"  # jobs on one GPU take turns iteration by iteration
REPLICA = "replica"  # the reproduced loop of a published simulator


class Policy:
    """Base of all policies. The class docstring is what `thebes policies show` prints.

    Parameters are dataclass fields made with `thebes.parameter`; without any, a policy need not be a dataclass. The
    same View gives the same Decision: it has no clock, no files, and no randomness except from a seed that is a
    parameter.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()  # facts (thebes.model.facts) without which it cannot run
    uses: ClassVar[Mapping[str, str]] = {}  # facts that it uses where they are known, and what it does without them
    shares: ClassVar[bool] = False  # whether it can put several jobs on one GPU
    resizes: ClassVar[bool] = False  # whether it can give a job another number of GPUs than it asked for
    grain: ClassVar[str] = DECISIONS

    def decide(self, view: View) -> Decision:
        raise NotImplementedError(f"{type(self).__name__} does not say how it decides: write decide(self, view)")

    def check(self, cluster: Cluster, tenants: tuple[str, ...]) -> None:
        """Refuse, with a UserError and before the first event, what cannot work on this cluster for these tenants."""

    def default_placement(self) -> Placement:
        """The placement if nobody chooses another one: the fewest nodes."""
        return Consolidate()

    def ignores(self) -> Mapping[str, str]:
        """What it ignores, and why: "placement", and of a simulation's settings "contention", "interference"."""
        return {}

    def one_order(self) -> Ordering | None:
        """The order, if the policy is only one: the simulator then runs it without View and Decision."""
        return None

    @property
    def reads_every_s(self) -> float:
        """The policy reads attained service at multiples of this time; 0 means at each decision."""
        return 0.0

    @property
    def label(self) -> str:
        """The name in reports."""
        return self.name or type(self).__name__
