"""Who runs, when, on how much: one file per published system. `find` gives a policy by its name.

Policies of other packages join through the entry-point group `thebes.policies`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from thebes.model.errors import UserError, nearest
from thebes.policy.ada_srsf import AdaSrsf, Srsf1, Srsf2, Srsf3
from thebes.policy.antman_like import AntManLike
from thebes.policy.base import Policy
from thebes.policy.dally import Dally, DallyConsolidated, DallyManual, DallyNoWait
from thebes.policy.fifo import Backfill, Fifo, LongestPendingFirst
from thebes.policy.fill import fill
from thebes.policy.ftf import Ftf
from thebes.policy.gandiva import Gandiva
from thebes.policy.gandiva_gavel import GandivaGavel
from thebes.policy.gittins import Gittins, ShortestExpected
from thebes.policy.las import LeastAttainedService
from thebes.policy.multi_dlas import MultiDlas
from thebes.policy.rubick import Rubick, RubickE, RubickN, RubickR
from thebes.policy.shortest import ShortestRemainingService, ShortestRemainingTime, SmallestJobFirst
from thebes.policy.sia_like import SiaLike
from thebes.policy.synergy_like import SynergyLike
from thebes.policy.themis import Themis
from thebes.policy.tiresias import TiresiasG, TiresiasL
from thebes.policy.tiresias_compat import TiresiasCompat
from thebes.policy.two_level import TwoLevel

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
    Dally,
    DallyManual,
    DallyNoWait,
    DallyConsolidated,
    Gandiva,
    GandivaGavel,
    TiresiasCompat,
    Themis,
    Ftf,
    AdaSrsf,
    Srsf1,
    Srsf2,
    Srsf3,
    TwoLevel,
    Rubick,
    RubickE,
    RubickR,
    RubickN,
    SiaLike,
    SynergyLike,
    AntManLike,
)


def registry() -> dict[str, type[Policy]]:
    """All policies that are installed, by name."""
    found = {policy.name: policy for policy in BUILT_IN}
    for entry in entry_points(group="thebes.policies"):
        found[entry.name] = entry.load()
    return found


def find(name: str) -> type[Policy]:
    """The policy of this name; `FILE.py:CLASS` and `package.module:CLASS` are policies of your own."""
    if ":" in name:
        return _own(name)
    policies = registry()
    if name not in policies:
        raise UserError(f"unknown policy '{name}'", hint=f"{nearest(name, policies)} (yours: FILE.py:CLASS)")
    return policies[name]


def _own(name: str) -> type[Policy]:
    place, _, class_name = name.rpartition(":")
    if not place or place.startswith("."):
        raise UserError(f"policy '{name}' names no file or module", hint="write FILE.py:CLASS or package.module:CLASS")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, class_name, None)
    if found is None:
        classes = [
            n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, Policy) and c is not Policy
        ]
        raise UserError(f"{place} has no class '{class_name}'", hint=nearest(class_name, classes))
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise UserError(f"{name} is not a policy", hint="derive the class from thebes.Policy")
    return found


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"policy file '{path}': no such file", hint="write FILE.py:CLASS")
    module_name = f"thebes_policy_file_{path.stem}"  # a file called random.py must not hide Python's own
    spec = spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # so that worker processes and dataclasses find it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"policy file '{path}' does not load: {type(error).__name__}: {error}",
            hint="run it with python to see where",
        ) from error
    return module


def _load_module(place: str) -> ModuleType:
    try:
        return import_module(place)
    except ImportError as error:
        raise UserError(
            f"policy module '{place}' does not load: {error}", hint="write FILE.py:CLASS or package.module:CLASS"
        ) from None
