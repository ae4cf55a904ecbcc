"""What a speed model is: it gives the seconds of one iteration of a model on GPUs of one kind, in every shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.perf.models import Model, assign, catalogue


class Gang(NamedTuple):
    """The question to a speed model: one model on so many GPUs of one node kind, in every shape."""

    cluster: Cluster
    kind: int
    model: str | None
    gpus: int
    nodes: NDArray[np.int64]  # over how many nodes each shape is spread
    tier: NDArray[np.int64]  # which tier each shape spans


class Times(NamedTuple):
    """One iteration of a gang, in seconds, per shape (see thebes.model.profiles)."""

    compute_s: NDArray[np.float64]
    inner_s: NDArray[np.float64]  # communication inside nodes, where other jobs have no traffic
    wire_s: NDArray[np.float64]  # communication over the wires between nodes, which neighbours share


@dataclass(frozen=True)
class SpeedModel:
    """Base of all speed models; the docstring is what `thebes perf` prints."""

    name: ClassVar[str] = ""
    # Whether speed 1 is compute alone (as in ArtISt-sim) and not the best placement on an idle cluster.
    relative_to_compute: ClassVar[bool] = False

    @property
    def overlap_gamma(self) -> float:
        """How well communication hides behind compute: at 1 not at all, at 10 almost all of the shorter of the two."""
        return 1.0

    def models(self) -> Mapping[str, Model]:
        """The models that can be trained, by name."""
        return catalogue()

    def assign(self, gpus: NDArray[np.int64], seed: int) -> list[str]:
        """A model for each job of a trace that names none, from its number of GPUs and the seed."""
        return assign(len(gpus), seed)

    def check(self, cluster: Cluster) -> None:
        """Raise a UserError if this cluster does not say what the speed model has to know of it."""

    def knows(self, model: str) -> bool:
        """Whether it can say how fast this model runs; other models are refused before the run starts."""
        return True

    def times(self, gang: Gang) -> Times:
        """The seconds of one iteration of the gang in each of its shapes."""
        raise NotImplementedError
