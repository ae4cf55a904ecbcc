"""What a policy is: a name, what it needs to know, its parameters, and one pure function from View to Decision."""

from __future__ import annotations

from typing import ClassVar

from thebes.model.cluster import Cluster
from thebes.model.decision import Decision
from thebes.model.view import View


class Policy:
    """Base of all policies. The class docstring is what `thebes policies show` prints.

    Parameters are dataclass fields made with `thebes.parameter`; without any, a policy need not be a dataclass. Same
    View, same Decision: no clock, no files, no randomness but from a seed that is a parameter.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    shares: ClassVar[bool] = False  # whether it can put several jobs on one GPU

    def decide(self, view: View) -> Decision:
        raise NotImplementedError(f"{type(self).__name__} does not say how it decides: write decide(self, view)")

    def check(self, cluster: Cluster, tenants: tuple[str, ...]) -> None:
        """Refuse, with a UserError and before the first event, what cannot work on this cluster for these tenants."""

    @property
    def reads_every_s(self) -> float:
        """The policy reads attained service at multiples of it; 0: whenever it decides."""
        return 0.0

    @property
    def label(self) -> str:
        """The name in reports."""
        return self.name or type(self).__name__
