"""The placements by name, with their parameters: they say where a job's GPUs are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thebes.model.errors import UserError, nearest
from thebes.model.parameters import parameter
from thebes.placement.strategies import CONSOLIDATE, COUNT, LWF, RANDOM, RELAXED, SKEW, YARN, Strategy

__all__ = ["Placement", "find", "registry"]


@dataclass(frozen=True)
class Placement:
    """Base of all placements; the docstring is what `thebes placements` prints."""

    name: ClassVar[str] = ""
    code: ClassVar[int] = -1

    def strategy(self, seed: int) -> Strategy:
        return Strategy(self.code, np.array([np.inf]), seed)

    @property
    def learns(self) -> bool:
        return False


@dataclass(frozen=True)
class Count(Placement):
    """Any free GPUs, lowest number first: GPUs are only counted. It is for comparison with simulators of that kind."""

    name: ClassVar[str] = "count"
    code: ClassVar[int] = COUNT


@dataclass(frozen=True)
class Yarn(Placement):
    """One node, or whole idle nodes under one switch plus one node for the rest; a job waits rather than spread out."""

    name: ClassVar[str] = "yarn"
    code: ClassVar[int] = YARN


@dataclass(frozen=True)
class Consolidate(Placement):
    """The fewest nodes that can hold the job now, in one rack if that costs no node more; best fit. It never waits."""

    name: ClassVar[str] = "consolidate"
    code: ClassVar[int] = CONSOLIDATE


@dataclass(frozen=True)
class Relaxed(Placement):
    """Anywhere, small fragments first, so that whole nodes stay free for the jobs that need them."""

    name: ClassVar[str] = "relaxed"
    code: ClassVar[int] = RELAXED


@dataclass(frozen=True)
class Skew(Placement):
    """Tiresias: models dominated by one tensor get the fewest nodes possible or wait; all others go anywhere.

    The limit can be learned, as in the paper, from how fast jobs ran that were spread over more nodes than they needed.
    """

    name: ClassVar[str] = "skew"
    code: ClassVar[int] = SKEW

    pack_limit: float = parameter(
        0.3, "PACKLIMIT: consolidate models whose largest tensor has a larger share", low=0, high=1
    )
    learn: bool = parameter(False, "start by consolidating no job and learn the limit from speeds observed")

    def strategy(self, seed: int) -> Strategy:
        return Strategy(self.code, np.array([np.inf if self.learn else self.pack_limit]), seed)

    @property
    def learns(self) -> bool:
        return self.learn


@dataclass(frozen=True)
class Random(Placement):
    """Each GPU from a random node (by --seed): the worst that one could do without malice."""

    name: ClassVar[str] = "random"
    code: ClassVar[int] = RANDOM


@dataclass(frozen=True)
class Lwf(Placement):
    """LWF-kappa: gangs up to kappa take the GPUs with the least work left, larger ones the nodes with the least.

    Where GPUs are exclusive, free GPUs have no work left and the work on a node is its busy GPUs. `ada-srsf` uses the
    full rule, on GPUs that hold several jobs.
    """

    name: ClassVar[str] = "lwf"
    code: ClassVar[int] = LWF

    kappa: int = parameter(1, "gangs of up to so many GPUs are spread, larger ones consolidated", low=0)

    def __post_init__(self) -> None:
        if self.kappa < 0:
            raise UserError(
                f"placement lwf: kappa={self.kappa} is below 0", hint="kappa is a number of GPUs, such as 1"
            )

    def strategy(self, seed: int) -> Strategy:
        return Strategy(self.code, np.array([np.inf]), seed, self.kappa)


_ALL: tuple[type[Placement], ...] = (Consolidate, Relaxed, Skew, Yarn, Count, Random, Lwf)


def registry() -> dict[str, type[Placement]]:
    return {placement.name: placement for placement in _ALL}


def find(name: str) -> type[Placement]:
    if name not in registry():
        raise UserError(f"unknown placement '{name}'", hint=nearest(name, registry()))
    return registry()[name]
