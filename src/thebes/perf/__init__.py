"""How fast a placed job runs: speed models by name. Speed 1 is the job's best placement on an idle cluster."""

from __future__ import annotations

from thebes.model.errors import UserError, nearest
from thebes.perf.artist import Artist
from thebes.perf.base import Gang, SpeedModel, Times
from thebes.perf.hkbu import Hkbu
from thebes.perf.measured import Gavel, Pollux
from thebes.perf.network import Network
from thebes.perf.plans.speed import Plans
from thebes.perf.tiers import Ideal, Tiers

__all__ = [
    "Artist",
    "Gang",
    "Gavel",
    "Hkbu",
    "Ideal",
    "Network",
    "Plans",
    "Pollux",
    "SpeedModel",
    "Tiers",
    "Times",
    "find",
    "registry",
]

_ALL: tuple[type[SpeedModel], ...] = (Tiers, Ideal, Network, Gavel, Pollux, Artist, Hkbu, Plans)


def registry() -> dict[str, type[SpeedModel]]:
    return {model.name: model for model in _ALL}


def find(name: str) -> type[SpeedModel]:
    if name not in registry():
        raise UserError(f"unknown performance model '{name}'", hint=nearest(name, registry()))
    return registry()[name]
