"""Who runs, when, on how much: one file per published system. `find` gives a policy by its name.

Policies of other packages join through the entry-point group `thebes.policies`.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from thebes.model.errors import UserError, nearest
from thebes.policy.base import Policy
from thebes.policy.fifo import Backfill, Fifo, LongestPendingFirst
from thebes.policy.fill import fill
from thebes.policy.gittins import Gittins, ShortestExpected
from thebes.policy.las import LeastAttainedService
from thebes.policy.multi_dlas import MultiDlas
from thebes.policy.shortest import ShortestRemainingService, ShortestRemainingTime, SmallestJobFirst
from thebes.policy.tiresias import TiresiasG, TiresiasL
from thebes.policy.tiresias_compat import TiresiasCompat

__all__ = ["Policy", "fill", "find", "registry"]

BUILT_IN: tuple[type[Policy], ...] = (
    Fifo,
    Backfill,
    LongestPendingFirst,
    SmallestJobFirst,
    ShortestRemainingTime,
    ShortestRemainingService,
    LeastAttainedService,
    Gittins,
    ShortestExpected,
    TiresiasL,
    TiresiasG,
    MultiDlas,
    TiresiasCompat,
)


def registry() -> dict[str, type[Policy]]:
    """All policies that are installed, by name."""
    found = {policy.name: policy for policy in BUILT_IN}
    for entry in entry_points(group="thebes.policies"):
        found[entry.name] = entry.load()
    return found


def find(name: str) -> type[Policy]:
    policies = registry()
    if name not in policies:
        raise UserError(f"unknown policy '{name}'", hint=nearest(name, policies))
    return policies[name]
