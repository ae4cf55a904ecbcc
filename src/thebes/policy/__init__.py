"""Policies say which jobs run, when and on how much; one file per published system. `find` gives a policy by its name.

Policies of other packages join through the entry-point group `thebes.policies`.
"""

from __future__ import annotations

import sys
import zlib
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from thebes.model.errors import UserError, nearest
from thebes.policy.ada_srsf import AdaSrsf, Srsf1, Srsf2, Srsf3
from thebes.policy.base import Policy
from thebes.policy.dally.dally import Dally, DallyConsolidated, DallyManual, DallyNoWait
from thebes.policy.fairness.ftf import Ftf
from thebes.policy.fairness.themis import Themis
from thebes.policy.fairness.two_level import TwoLevel
from thebes.policy.fill import fill
from thebes.policy.gandiva.gandiva import Gandiva
from thebes.policy.gandiva.gavel import GandivaGavel
from thebes.policy.orders.fifo import Backfill, Fifo, LongestPendingFirst
from thebes.policy.orders.gittins import Gittins, ShortestExpected
from thebes.policy.orders.las import LeastAttainedService
from thebes.policy.orders.multi_dlas import MultiDlas
from thebes.policy.orders.shortest import ShortestRemainingService, ShortestRemainingTime, SmallestJobFirst
from thebes.policy.orders.tiresias import TiresiasG, TiresiasL
from thebes.policy.orders.tiresias_compat import TiresiasCompat
from thebes.policy.rubick.antman_like import AntManLike
from thebes.policy.rubick.rubick import Rubick, RubickE, RubickN, RubickR
from thebes.policy.rubick.sia_like import SiaLike
from thebes.policy.rubick.synergy_like import SynergyLike
from thebes.policy.seating import place

__all__ = ["Policy", "fill", "find", "place", "registry"]

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
    """The policy of this name; `FILE.py:CLASS` and `package.module:CLASS` name policies of your own."""
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
    # A file called random.py must not hide Python's own, and two files of one name in two folders are two modules.
    folder = path.resolve().parent
    module_name = f"thebes_policy_file_{path.stem}_{zlib.crc32(str(folder).encode()):08x}"
    spec = spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # so that worker processes and dataclasses find it
    try:
        _meet_neighbours(folder)
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"policy file '{path}' does not load: {type(error).__name__}: {error}",
            hint="run it with python to see where",
        ) from error
    return module


_FOLDERS: list[str] = []  # folders of policy files that are on Python's path


def _meet_neighbours(folder: Path) -> None:
    """Let modules beside a policy's file be imported by their names, now and when its memory is read back.

    Python's own modules go first. A neighbour of the same name beside another policy's file gives way.
    """
    here = str(folder)
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None)
        beside_another = where is not None and any(_lies_in(where, other) for other in _FOLDERS if other != here)
        if beside_another and not name.startswith("thebes_policy_file_") and _is_neighbour(folder, name):
            del sys.modules[name]
    if here in _FOLDERS:
        _FOLDERS.remove(here)
        sys.path.remove(here)
    first = min((sys.path.index(other) for other in _FOLDERS if other in sys.path), default=len(sys.path))
    sys.path.insert(first, here)
    _FOLDERS.insert(0, here)


def _lies_in(file: str, folder: str) -> bool:
    """Whether a file is a module of this folder, or of a package in it; packages installed below it do not count."""
    path = Path(file).resolve()
    return str(path.parent) == folder or (path.name == "__init__.py" and str(path.parent.parent) == folder)


def _is_neighbour(folder: Path, name: str) -> bool:
    top = name.partition(".")[0]
    return (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()


def _load_module(place: str) -> ModuleType:
    try:
        return import_module(place)
    except ImportError as error:
        raise UserError(
            f"policy module '{place}' does not load: {error}", hint="write FILE.py:CLASS or package.module:CLASS"
        ) from None
