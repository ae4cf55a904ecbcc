"""From names and `--set` texts to the objects of a run.

A setting `KEY=VALUE` belongs to the policy; `placement.KEY`, `perf.KEY` and `cost.KEY` to the other models, and
`NAME.KEY` to one policy out of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thebes.model.errors import UserError, nearest
from thebes.model.parameters import configure, parameters_of
from thebes.perf import find as find_perf
from thebes.perf.contention import Contention
from thebes.perf.interference import Interference
from thebes.placement import find as find_placement
from thebes.policy import Policy
from thebes.policy import find as find_policy
from thebes.sim.costs import Costs
from thebes.sim.simulate import PREFIXES, Options, default_placement


@dataclass(frozen=True)
class Choice:
    policy: Policy
    options: Options
    name: str  # as the user gave it: another process finds the policy's class by it


@dataclass(frozen=True)
class Setting:
    prefix: str  # empty: the policy
    key: str
    value: str


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    settings: list[Setting] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--set {text}: not KEY=VALUE", hint="write for instance --set promote_knob=8")
        prefix, dot, key = name.rpartition(".")
        settings.append(Setting(prefix if dot else "", key, value))
    return settings


def choose(
    policy: str,
    settings: Sequence[Setting],
    *,
    placement: str | None = None,
    perf: str = "tiers",
    contention: bool = False,
    seed: int = 0,
    limit: int | None = None,
    skip_oversize: bool = False,
    fractional: bool = False,
    ignore_gpu_type: bool = False,
    checks: bool = True,
) -> Choice:
    """One policy with its options."""
    kind = find_policy(policy)
    label = kind.name or policy
    for setting in settings:
        if setting.prefix not in ("", label, *PREFIXES):
            raise UserError(
                f"--set {setting.prefix}.{setting.key}: there is no '{setting.prefix}' in this run",
                hint=nearest(setting.prefix, [*PREFIXES, label]),
            )
    if fractional:  # no engine of ours shares GPUs yet; a policy that does will say so with `shares`
        raise UserError(
            f"--fractional: policy {label} does not share a GPU between jobs",
            hint="leave --fractional out: requests are rounded up to whole GPUs",
        )

    def of(*prefixes: str) -> dict[str, str]:
        return {s.key: s.value for s in settings if s.prefix in prefixes}

    chosen: Policy = configure(kind, of("", label), what=f"policy {label}")
    where = find_placement(placement) if placement else type(default_placement(chosen))
    speed = find_perf(perf)
    options = Options(
        placement=configure(where, of("placement"), what=f"placement {where.name}"),
        perf=configure(speed, of("perf"), what=f"performance model {perf}"),
        costs=configure(Costs, of("cost"), what="the cost model"),
        contention=configure(
            Contention, {"on": str(contention).lower()} | of("contention"), what="the contention model"
        ),
        interference=configure(Interference, of("interference"), what="the interference model"),
        seed=seed,
        limit=limit,
        skip_oversize=skip_oversize,
        ignore_gpu_type=ignore_gpu_type,
        checks=checks,
    )
    return Choice(chosen, options, policy)


def choose_several(
    policies: Sequence[str],
    settings: Sequence[Setting],
    *,
    placement: str | None = None,
    **others: bool | int | str | None,
) -> list[Choice]:
    """Several policies under the same options; a setting without a prefix goes to every policy that knows it."""
    if not policies:
        raise UserError("--policies names no policy", hint="write --policies fifo,srtf,tiresias-l")
    repeated = sorted({name for name in policies if policies.count(name) > 1})
    if repeated:
        raise UserError(f"--policies names '{repeated[0]}' twice", hint="name each policy once")
    kinds = {name: find_policy(name) for name in policies}
    labels = {name: kind.name or name for name, kind in kinds.items()}
    known = {key for kind in kinds.values() for key in parameters_of(kind)}
    for setting in settings:
        if setting.prefix == "" and setting.key.replace("-", "_") not in known:
            raise UserError(f"none of these policies has a parameter '{setting.key}'", hint=nearest(setting.key, known))
        if setting.prefix not in ("", *PREFIXES, *labels.values()):
            raise UserError(
                f"--set {setting.prefix}.{setting.key}: there is no '{setting.prefix}' in this run",
                hint=nearest(setting.prefix, [*PREFIXES, *labels.values()]),
            )
    return [
        choose(
            name,
            [
                s
                for s in settings
                if s.prefix in (*PREFIXES, labels[name])
                or (s.prefix == "" and s.key.replace("-", "_") in parameters_of(kinds[name]))
            ],
            placement=placement,
            **others,  # type: ignore[arg-type]
        )
        for name in policies
    ]
