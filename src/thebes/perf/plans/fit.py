"""A fit turns measured iterations into the seven constants of a model (Rubick, arXiv 2408.08586).

It is a least-squares fit of logarithms, so that every sample counts by its relative error. Large errors count less than
by their square, since measured rows have outliers. Each constant is held within bounds and, weakly, near what is usual,
so that a constant that the samples do not determine stays there. Everything is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from thebes.model.errors import UserError
from thebes.model.plan import ZERO_OFFLOAD, Plan
from thebes.perf.plans.site import Site
from thebes.perf.plans.timing import (
    ENVIRONMENT,
    Constants,
    Environment,
    Floats,
    PlanArrays,
    forward_s,
    iteration_s,
    plan_arrays,
)
from thebes.perf.plans.transformer import Transformer

LEAST_SAMPLES = len(Constants._fields)
LEAST_OFFLOAD = 3  # one for each constant that only offload determines
REFIT_ABOVE = 0.1  # relative difference of measured and predicted speeds
NOISE = 0.03  # relative error of a measured iteration; samples that are further off count less

# What is usual (the medians of the measured models), by how much models differ (a factor of e to this power), and the
# bounds of what is possible.
USUAL = Constants()
SPREAD = Constants(0.3, 0.7, 1.0, 1.5, 0.7, 0.7, 1.0)
LEAST = Constants(1.0, 1.0, 1e-4, 1e-2, 1.0, 1.0, 1e-5)
MOST = Constants(10.0, 20.0, 2.0, 1e3, 20.0, 20.0, 10.0)
FORWARD_SPREAD = 0.7
FORWARD_RANGE = 10.0

EXPONENTS = ("k_sync", "k_off", "k_swap")
OFFLOAD_ONLY = ("k_opt_off", "k_off", "k_swap")
BOUND = 1e-3  # a value this near to a bound counts as on it
UNDETERMINED = 0.6  # a constant is undetermined if this share of the usual spread is left after the fit


@dataclass(frozen=True)
class Sample:
    """One measured iteration. `cpus` is per GPU; `fewest`: GPUs on the node with the smallest part of the gang."""

    plan: Plan
    gpus: int
    nodes: int
    cpus: float
    iteration_s: float
    fewest: int = 0  # 0 means that the gang is spread evenly
    batch: int = 0  # 0 means the model's own
    where: str = ""  # file and line, for messages


class FamilyError(NamedTuple):
    """Relative errors of the samples of one kind of plan."""

    kind: str
    samples: int
    mean: float
    worst: float


@dataclass(frozen=True)
class Fit:
    """Constants, and how far predictions with them are from the samples to which they were fitted."""

    model: str
    constants: Constants
    forward_s: float
    forward_fitted: bool
    samples: tuple[Sample, ...]
    predicted_s: tuple[float, ...]
    at_bounds: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative errors, above 0 where the prediction is too slow."""
        return tuple(p / s.iteration_s - 1 for p, s in zip(self.predicted_s, self.samples, strict=True))

    @property
    def mean_error(self) -> float:
        return float(np.mean(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        return float(np.max(np.abs(self.errors)))

    @property
    def kinds(self) -> tuple[FamilyError, ...]:
        return errors_by_kind(self.samples, self.errors)


def kind_of(plan: Plan) -> str:
    """The family of a plan, and whether it computes activations twice."""
    return f"{plan.family}+gc" if plan.gc else plan.family


def errors_by_kind(samples: Sequence[Sample], errors: Sequence[float]) -> tuple[FamilyError, ...]:
    kinds: dict[str, list[float]] = {}
    for sample, error in zip(samples, errors, strict=True):
        kinds.setdefault(kind_of(sample.plan), []).append(abs(error))
    return tuple(FamilyError(k, len(v), float(np.mean(v)), max(v)) for k, v in sorted(kinds.items()))


def predict(
    model: Transformer,
    site: Site,
    constants: Constants,
    samples: Sequence[Sample],
    environment: Environment = ENVIRONMENT,
) -> Floats:
    """The predicted seconds per iteration of every sample."""
    return _Asked.of(model, samples).seconds(model, site, constants, environment)


class _Asked(NamedTuple):
    """The samples as arrays."""

    plans: PlanArrays
    gpus: NDArray[np.int64]
    nodes: NDArray[np.int64]
    cpus: Floats
    fewest: NDArray[np.int64]
    batch: NDArray[np.int64]

    @classmethod
    def of(cls, model: Transformer, samples: Sequence[Sample]) -> _Asked:
        return cls(
            plan_arrays([s.plan for s in samples]),
            np.array([s.gpus for s in samples], dtype=np.int64),
            np.array([s.nodes for s in samples], dtype=np.int64),
            np.array([s.cpus for s in samples], dtype=np.float64),
            np.array([s.fewest or max(1, s.gpus // s.nodes) for s in samples], dtype=np.int64),
            np.array([s.batch or model.global_batch for s in samples], dtype=np.int64),
        )

    def seconds(self, model: Transformer, site: Site, constants: Constants, environment: Environment) -> Floats:
        return iteration_s(
            model,
            site,
            constants,
            self.plans,
            self.gpus,
            self.nodes,
            self.cpus,
            fewest=self.fewest,
            batch=self.batch,
            environment=environment,
        )


class _Problem(NamedTuple):
    """What is fitted: the free constants (by position) and, if it was not measured, the forward pass."""

    model: Transformer
    site: Site
    environment: Environment
    centre: Constants  # the usual constants
    free: tuple[int, ...]
    forward_free: bool
    forward_usual: float

    @property
    def usual(self) -> Floats:
        return np.log([self.centre[i] for i in self.free] + [self.forward_usual] * self.forward_free)

    @property
    def spread(self) -> Floats:
        return np.array([SPREAD[i] for i in self.free] + [FORWARD_SPREAD] * self.forward_free)

    @property
    def bounds(self) -> tuple[Floats, Floats]:
        low = [LEAST[i] for i in self.free] + [self.forward_usual / FORWARD_RANGE] * self.forward_free
        high = [MOST[i] for i in self.free] + [self.forward_usual * FORWARD_RANGE] * self.forward_free
        return np.log(low), np.log(high)

    def constants(self, x: Floats) -> Constants:
        values = dict(zip((Constants._fields[i] for i in self.free), np.exp(x[: len(self.free)]).tolist(), strict=True))
        return self.centre._replace(**values)

    def forward(self, x: Floats) -> float:
        return float(np.exp(x[-1])) if self.forward_free else self.forward_usual

    def log_seconds(self, asked: _Asked, x: Floats) -> Floats:
        model = with_forward(self.model, self.site, self.forward(x)) if self.forward_free else self.model
        return np.log(asked.seconds(model, self.site, self.constants(x), self.environment))


def with_forward(model: Transformer, site: Site, seconds: float) -> Transformer:
    """The model with this forward pass of one sample on the site's GPUs."""
    others = tuple(pair for pair in model.forward_s_per_sample if pair[0] != site.gpu_type)
    return replace(model, forward_s_per_sample=((site.gpu_type, seconds), *others))


def _problem(
    model: Transformer, site: Site, samples: Sequence[Sample], environment: Environment, usual: Constants
) -> _Problem:
    plans = [s.plan for s in samples]
    fixed: set[str] = set()
    if not any(p.zero == ZERO_OFFLOAD for p in plans):
        fixed |= set(OFFLOAD_ONLY)
    if all(p.zero == ZERO_OFFLOAD for p in plans):
        fixed.add("k_opt")
    if all(p.dp == 1 for p in plans):
        fixed.add("k_sync")
    measured = any(gpu_type == site.gpu_type for gpu_type, _ in model.forward_s_per_sample)
    # Without checkpointing, only the sum of forward and backward pass can be known.
    if not measured and not any(p.gc for p in plans):
        fixed.add("k_bwd")
    free = tuple(i for i, name in enumerate(Constants._fields) if name not in fixed)
    return _Problem(model, site, environment, usual, free, not measured, forward_s(model, site, environment))


def fit(
    model: Transformer,
    site: Site,
    samples: Sequence[Sample],
    environment: Environment = ENVIRONMENT,
    usual: Constants = USUAL,
    noise: float = NOISE,
) -> Fit:
    """The constants that explain the samples best. Where the samples say nothing, they are the usual ones (`usual`).

    `noise` is the relative error of samples and model; the smaller it is, the less the usual constants count.
    """
    check_samples(model, site, samples)
    problem = _problem(model, site, samples, environment, usual)
    asked = _Asked.of(model, samples)
    measured = np.log([s.iteration_s for s in samples])
    low, high = problem.bounds
    centre, spread = problem.usual, problem.spread

    def residuals(x: Floats) -> Floats:
        off = (problem.log_seconds(asked, x) - measured) / noise
        return np.concatenate((_tamed(off), (x - centre) / spread))

    found = min(
        (
            least_squares(residuals, np.clip(start, low + 1e-9, high - 1e-9), bounds=(low, high))
            for start in _starts(problem)
        ),
        key=_cost,
    )
    x = np.asarray(found.x, dtype=np.float64)
    names = [Constants._fields[i] for i in problem.free]
    at_bounds = [n for n, v, a, b in zip(names, x, low, high, strict=False) if v - a < BOUND or b - v < BOUND]
    return Fit(
        model.name,
        problem.constants(x),
        problem.forward(x),
        problem.forward_free,
        tuple(samples),
        tuple(np.exp(problem.log_seconds(asked, x)).tolist()),
        tuple(at_bounds),
        _warnings(problem, samples, np.asarray(found.jac, dtype=np.float64)),
    )


def _cost(outcome: Any) -> float:
    return float(outcome.cost)


def _tamed(off: Floats) -> Floats:
    """Residuals whose squares grow only as fast as the residual itself once it is large."""
    return np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))


def _starts(problem: _Problem) -> Iterable[Floats]:
    """Starting points of the search: the usual values, little overlap, and much overlap."""
    exponents = [n for n, i in enumerate(problem.free) if Constants._fields[i] in EXPONENTS]
    for k in (None, 1.05, 5.0):
        start = problem.usual.copy()
        if k is not None:
            start[exponents] = math.log(k)
        yield start


def _warnings(problem: _Problem, samples: Sequence[Sample], jacobian: Floats) -> tuple[str, ...]:
    said: list[str] = []
    missing = [name for i, name in enumerate(Constants._fields) if i not in problem.free]
    offload = sum(s.plan.zero == ZERO_OFFLOAD for s in samples)
    if not offload:
        said.append(f"no sample with ZeRO-Offload: {', '.join(OFFLOAD_ONLY)} keep their usual values")
    elif offload < LEAST_OFFLOAD:
        said.append(f"{offload} samples with ZeRO-Offload, {LEAST_OFFLOAD} determine {', '.join(OFFLOAD_ONLY)}")
    if "k_bwd" in missing:
        said.append("no sample with gradient checkpointing and no profiled forward pass: k_bwd keeps its usual value")
    said += [f"{name} keeps its usual value" for name in missing if name not in OFFLOAD_ONLY and name != "k_bwd"]
    if problem.forward_free:
        said.append(f"nobody profiled the forward pass on {problem.site.gpu_type}: it is fitted as well")
    # What is left of the usual spread are the posterior's standard deviations in a Gaussian approximation.
    deviation = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    vague = [
        Constants._fields[i] for n, i in enumerate(problem.free) if deviation[n] > UNDETERMINED * problem.spread[n]
    ]
    if vague:
        said.append(f"the samples hardly determine {', '.join(vague)}")
    return tuple(said)


def refit(
    before: Fit,
    model: Transformer,
    site: Site,
    samples: Sequence[Sample],
    above: float = REFIT_ABOVE,
    environment: Environment = ENVIRONMENT,
) -> Fit:
    """Fit again with these samples added if one of them is further than `above` from its prediction; else `before`."""
    known = with_forward(model, site, before.forward_s)
    measured = np.array([s.iteration_s for s in samples])
    if not len(samples) or np.all(
        np.abs(predict(known, site, before.constants, samples, environment) / measured - 1) <= above
    ):
        return before
    return fit(model, site, (*before.samples, *samples), environment)


def choose_samples(
    model: Transformer,
    site: Site,
    candidates: Sequence[Sample],
    count: int = LEAST_SAMPLES,
    environment: Environment = ENVIRONMENT,
    *,
    for_constants: bool = False,
) -> list[int]:
    """Which configurations to measure: positions of the `count` candidates that together tell most about all others.

    This is a greedy design for prediction (I-optimal): the model's sensitivities at the usual constants say by how much
    a sample would lower the uncertainty of all candidates' predictions, given those already chosen. `for_constants`
    chooses what determines the constants themselves best (D-optimal). At least three of the choices have offload, if
    there are any. Measured times are not looked at.
    """
    problem = _problem(model, site, candidates, environment, USUAL)
    asked = _Asked.of(model, candidates)
    x, step = problem.usual, 1e-4
    slopes = np.stack(
        [
            (problem.log_seconds(asked, x + step * e) - problem.log_seconds(asked, x - step * e)) / (2 * step * NOISE)
            for e in np.eye(len(x))
        ],
        axis=1,
    )
    known = np.diag(problem.spread**-2.0)
    offload = np.array([s.plan.zero == ZERO_OFFLOAD for s in candidates])
    chosen: list[int] = []
    while len(chosen) < min(count, len(candidates)):
        allowed = np.ones(len(candidates), dtype=bool)
        allowed[chosen] = False
        wanted = min(LEAST_OFFLOAD, int(offload.sum())) - int(offload[chosen].sum())
        if wanted >= count - len(chosen):
            allowed &= offload
        # By how much each row would lower the summed variance of all predictions (Sherman and Morrison's formula).
        through = slopes @ np.linalg.inv(known)
        told = np.sum(through * slopes, axis=1)
        gain = told if for_constants else np.sum((through @ slopes.T) ** 2, axis=0) / (1 + told)
        best = int(np.argmax(np.where(allowed, gain, -1.0)))
        chosen.append(best)
        known = known + np.outer(slopes[best], slopes[best])
    return sorted(chosen)


# --- Samples that no fit can use --------------------------------------------------------------------------------------


def check_samples(model: Transformer, site: Site, samples: Sequence[Sample]) -> None:
    for number, sample in enumerate(samples, 1):
        check_sample(model, site, sample, sample.where or f"sample {number}")
    if len(samples) < LEAST_SAMPLES:
        missing = LEAST_SAMPLES - len(samples)
        raise UserError(
            f"{model.name}: {len(samples)} samples for {LEAST_SAMPLES} constants, {missing} too few",
            hint=f"measure {missing} more, other plans or placements; {LEAST_OFFLOAD} of all with ZeRO-Offload",
        )


def check_sample(model: Transformer, site: Site, sample: Sample, where: str) -> None:
    for field in ("iteration_s", "gpus", "nodes", "cpus"):
        value = float(getattr(sample, field))
        if not math.isfinite(value) or value <= 0:
            raise UserError(f"{where}: {field} = {value:g}", hint=f"{field} is a finite number above 0")
    plan = sample.plan
    if plan.gpus != sample.gpus:
        raise UserError(
            f"{where}: plan {plan} uses {plan.gpus} GPUs, but gpus = {sample.gpus}",
            hint=f"write gpus = {plan.gpus}, or a plan whose dp x tp x pp is {sample.gpus}",
        )
    if not sample.gpus / site.node_gpus <= sample.nodes <= sample.gpus:
        least = -(-sample.gpus // site.node_gpus)
        raise UserError(
            f"{where}: {sample.gpus} GPUs on {sample.nodes} nodes of {site.node_gpus}",
            hint=f"nodes from {least} to {sample.gpus}, or another --node-size",
        )
    batch = sample.batch or model.global_batch
    if batch % (plan.dp * plan.ga):
        raise UserError(
            f"{where}: global batch {batch} is not divisible by dp x ga = {plan.dp * plan.ga} of plan {plan}",
            hint=f"another plan, or a batch such as {-(-batch // (plan.dp * plan.ga)) * plan.dp * plan.ga}",
        )
