"""The objects of a run are made here, from names and from the texts of `--set`.

A setting `KEY=VALUE` belongs to the policy; `placement.KEY`, `perf.KEY`, `cost.KEY`, `contention.KEY` and
`interference.KEY` to the other models, and `NAME.KEY` to one policy out of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thebes.model.errors import UserError, nearest
from thebes.model.facts import withholding
from thebes.model.parameters import configure, parameters_of
from thebes.perf import find as find_perf
from thebes.perf.contention import Contention
from thebes.perf.interference import Interference
from thebes.placement import find as find_placement
from thebes.policy import Policy
from thebes.policy import find as find_policy
from thebes.sim.costs import Costs
from thebes.sim.simulate import PREFIXES, SimulationOptions


@dataclass(frozen=True)
class Choice:
    policy: Policy
    options: SimulationOptions
    name: str  # as the user gave it: another process finds the policy's class by it


@dataclass(frozen=True)
class Setting:
    prefix: str  # empty for the policy
    key: str
    value: str

    @property
    def name(self) -> str:
        """The parameter's name; `--set` accepts hyphens in place of underscores."""
        return self.key.replace("-", "_")


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    settings: list[Setting] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--set {text}: not KEY=VALUE", hint="write for instance --set promote_knob=8")
        prefix, dot, key = name.rpartition(".")
        settings.append(Setting(prefix if dot else "", key, value))
    return settings


@dataclass(frozen=True)
class Common:
    """What holds for every policy of a run, by name or as a plain value."""

    placement: str | None = None  # None means the policy's own default
    perf: str = "tiers"
    contention: bool = False
    seed: int = 0
    limit: int | None = None
    skip_oversize: bool = False
    ignore_gpu_type: bool = False
    checks: bool = True
    measured_after_s: float = 0.0


def choose(policy: str, settings: Sequence[Setting], common: Common) -> Choice:
    """One policy with its options."""
    label = find_policy(policy).name or policy
    _check_prefixes(settings, [label])
    return _choice(policy, settings, common)


def choose_several(policies: Sequence[str], settings: Sequence[Setting], common: Common) -> list[Choice]:
    """Several policies under the same options; a setting without a prefix goes to every policy that knows it."""
    if not policies:
        raise UserError("--policies names no policy", hint="write --policies fifo,srtf,tiresias-l")
    repeated = sorted({name for name in policies if policies.count(name) > 1})
    if repeated:
        raise UserError(f"--policies names '{repeated[0]}' twice", hint="name each policy once")
    own = {name: set(parameters_of(find_policy(name))) for name in policies}
    known = set().union(*own.values())
    _check_prefixes(settings, [find_policy(name).name or name for name in policies])
    for setting in settings:
        if setting.prefix == "" and setting.name not in known:
            raise UserError(f"none of these policies has a parameter '{setting.key}'", hint=nearest(setting.key, known))
    return [_choice(name, [s for s in settings if s.prefix or s.name in own[name]], common) for name in policies]


def _check_prefixes(settings: Sequence[Setting], labels: Sequence[str]) -> None:
    for setting in settings:
        if setting.prefix not in ("", *PREFIXES, *labels):
            raise UserError(
                f"--set {setting.prefix}.{setting.key}: there is no '{setting.prefix}' in this run",
                hint=nearest(setting.prefix, [*PREFIXES, *labels]),
            )


def _choice(policy: str, settings: Sequence[Setting], common: Common) -> Choice:
    kind = find_policy(policy)
    label = kind.name or policy

    def of(*prefixes: str) -> dict[str, str]:
        return {s.key: s.value for s in settings if s.prefix in prefixes}

    chosen: Policy = configure(kind, of("", label), what=f"policy {label}")
    where = find_placement(common.placement) if common.placement else type(chosen.default_placement())
    contention = {"on": "yes" if common.contention else "no"} | of("contention")
    options = SimulationOptions(
        placement=configure(where, of("placement"), what=f"placement {where.name}"),
        perf=configure(find_perf(common.perf), of("perf"), what=f"performance model {common.perf}"),
        costs=configure(Costs, of("cost"), what="the cost model"),
        contention=configure(Contention, contention, what="the contention model"),
        interference=configure(Interference, of("interference"), what="the interference model"),
        seed=common.seed,
        limit=common.limit,
        skip_oversize=common.skip_oversize,
        ignore_gpu_type=common.ignore_gpu_type,
        checks=common.checks,
        knowledge=withholding(common.measured_after_s),
    )
    return Choice(chosen, options, policy)
