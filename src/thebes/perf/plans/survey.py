"""A survey of a model's plans over many allocations, for `thebes plan` to show.

For each number of GPUs it has the fastest plan, the fastest of each family, whether fewer GPUs come within 1 %, and why
the other plans were rejected. Where nothing fits at all, an error says what would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from thebes.model.errors import UserError
from thebes.model.plan import FAMILIES, NO_ZERO, SPLIT, ZERO_DP, ZERO_OFFLOAD, Plan
from thebes.perf.plans.book import MOST_CUT, NEAR_EQUAL, OBSTACLES, Outlook, PlanBook, Rejection, cheapest, divisors
from thebes.perf.plans.site import Site
from thebes.perf.plans.timing import Breakdown, Constants, breakdown
from thebes.perf.plans.transformer import Transformer, with_batch

MOST_GPUS = 4096  # the largest survey; a search for a usable number of GPUs ends here, too


class Rejected(NamedTuple):
    plan: Plan
    rejection: Rejection


class SurveyRow(NamedTuple):
    """One allocation on which the model can be trained."""

    gpus: int
    nodes: int
    cpus: int  # per GPU, as asked
    useful_cpus: int  # the fewest CPUs per GPU that come within 1 %
    best: Outlook
    by_family: dict[str, Outlook]
    parts: Breakdown
    instead: int  # GPUs that come within 1 % of it, or its own number if none do
    fitting: int  # plans that fit
    rejected: dict[str, int]  # plans by obstacle


class Survey(NamedTuple):
    model: Transformer
    site: Site
    rows: tuple[SurveyRow, ...]
    unusable: dict[int, str]  # why no plan uses so many GPUs


def survey(model: Transformer, site: Site, gpus: Sequence[int], cpus: int, nodes: int | None = None) -> Survey:
    """The best plans on each of these numbers of GPUs, over `nodes` nodes or as few as hold them."""
    most = max(gpus)
    book = PlanBook((model,), site, most)
    samples = np.zeros((most + 1, 2))
    for count in range(1, most + 1):
        best = book.best(0, count, nodes or site.fewest_nodes(count), cpus)
        samples[count, 1] = best.samples_s if best else 0.0
    instead, _ = cheapest(samples)
    rows: list[SurveyRow] = []
    unusable: dict[int, str] = {}
    for count in dict.fromkeys(gpus):
        spread = nodes or site.fewest_nodes(count)
        fitting = book.all_that_fit(0, count, spread, cpus)
        if not fitting:
            unusable[count] = why_none(book, count, spread, cpus)
            continue
        best = fitting[0]
        rows.append(
            SurveyRow(
                count,
                spread,
                cpus,
                _useful_cpus(book, count, spread, cpus),
                best,
                {family: found for family in FAMILIES if (found := _first_of(fitting, family))},
                breakdown(model, site, model.constants or Constants(), best.plan, spread, cpus),
                int(instead[count, 1]),
                len(fitting),
                obstacles(rejected(book, count, spread, cpus)),
            )
        )
    return Survey(model, site, tuple(rows), unusable)


def _first_of(fitting: Sequence[Outlook], family: str) -> Outlook | None:
    return next((outlook for outlook in fitting if outlook.plan.family == family), None)


def _useful_cpus(book: PlanBook, gpus: int, nodes: int, cpus: int) -> int:
    """The fewest CPUs per GPU whose best plan comes within 1 % of what `cpus` bring."""
    found = [book.best(0, gpus, nodes, few) for few in range(1, cpus + 1)]
    speeds = [0.0 if outlook is None else outlook.samples_s for outlook in found]
    return next(few for few, speed in enumerate(speeds, start=1) if speed >= NEAR_EQUAL * speeds[-1])


def every_plan(model: Transformer, gpus: int) -> list[Plan]:
    """Every way to divide a model over so many GPUs, also those that fail; accumulation only where it is possible."""
    plans: list[Plan] = []
    for dp in divisors(gpus):
        steps = divisors(model.global_batch // dp) if model.global_batch % dp == 0 else (1,)
        for tp in divisors(gpus // dp):
            pp = gpus // dp // tp
            if max(tp, pp) > MOST_CUT:
                continue
            kinds = (NO_ZERO, ZERO_DP, ZERO_OFFLOAD) if tp == pp == 1 else (NO_ZERO,)
            plans += [Plan(dp, tp, pp, zero, ga, gc) for zero in kinds for ga in steps for gc in (False, True)]
    return plans


def rejected(book: PlanBook, gpus: int, nodes: int, cpus: int) -> list[Rejected]:
    """The plans on so many GPUs that cannot run, each with its reason."""
    found = ((plan, book.rejection(0, plan, nodes, cpus)) for plan in every_plan(book.models[0], gpus))
    return [Rejected(plan, rejection) for plan, rejection in found if rejection is not None]


def obstacles(plans: Sequence[Rejected]) -> dict[str, int]:
    """How many plans each obstacle stopped, in a fixed order."""
    counts = Counter(one.rejection.obstacle for one in plans)
    return {obstacle: counts[obstacle] for obstacle in OBSTACLES if counts[obstacle]}


# Errors for surveys in which nothing fits.


def why_none(book: PlanBook, gpus: int, nodes: int, cpus: int) -> str:
    """Why no plan runs on exactly these GPUs, in one line."""
    model, site = book.models[0], book.site
    needs = book.candidates(0, gpus).memory
    if not len(needs.gpu_gib):
        return no_division(model)
    least = float(needs.gpu_gib.min())
    if least > site.gpu_gib:
        return f"the most frugal plan needs {least:.1f} GiB on each GPU, has {site.gpu_gib:g}"
    if not book.candidates(0, gpus).fits.any():
        roomy = float(needs.host_gib[needs.gpu_gib <= site.gpu_gib].min())
        return f"plans that fit the GPU need {roomy:.1f} GiB of host memory per GPU, has {site.host_gib:g}"
    found = rejected(book, gpus, nodes, cpus)
    return next(one.rejection.words for one in found if one.rejection.obstacle in ("nodes", "CPUs"))


def no_division(model: Transformer) -> str:
    split = f", {model.heads} heads and {model.layers} layers" if SPLIT in model.families else ""
    return f"no plan divides batch {model.global_batch}{split} over so many GPUs"


def refuse(found: Survey, gpus: Sequence[int], cpus: int, nodes: int | None) -> UserError:
    """The error for a survey without a single row: what is in the way, and what would help."""
    model, site = found.model, found.site
    book = PlanBook((model,), site)
    usable = [count for count in range(1, MOST_GPUS + 1) if book.candidates(0, count).fits.any()]
    divided = [count for count in gpus if len(book.candidates(0, count).fits)]
    which = _asked(gpus)
    roomy = [count for count in gpus if count in usable]
    if roomy:  # the model itself would fit, so the fault is how it is spread
        option = f"--cpus {cpus}" if nodes is None else f"--nodes {nodes}"
        return UserError(f"{option}: {found.unusable[roomy[0]]}", hint=f"leave {option.split()[0]} out for the usual")
    if divided:
        frugal = min(divided, key=lambda count: float(book.candidates(0, count).memory.gpu_gib.min()))
        nearest = f"{_few(usable, gpus)} GPUs would do" if usable else "a GPU with more memory, or a smaller model"
        return UserError(
            f"{model.name} is too large for {which} of type {site.gpu_type}: {found.unusable[frugal]}",
            hint=nearest,
        )
    hints = [f"{_few(usable, gpus)} GPUs would do"] if usable else []
    batches = _batches(model, gpus[0]) if len(gpus) == 1 else ""
    if batches:
        hints.append(f"or a global batch of {batches} (--batch)")
    return UserError(
        f"{model.name} cannot use {which}: {found.unusable[gpus[0]]}",
        hint=", ".join(hints) or "another number of GPUs",
    )


def _asked(gpus: Sequence[int]) -> str:
    if len(gpus) == 1:
        return f"{gpus[0]} GPU{'s' * (gpus[0] != 1)}"
    whole = gpus[-1] - gpus[0] == len(gpus) - 1
    return f"{gpus[0]} to {gpus[-1]} GPUs" if whole else f"{', '.join(map(str, gpus[:-1]))} or {gpus[-1]} GPUs"


def _few(usable: Sequence[int], gpus: Sequence[int]) -> str:
    """The usable numbers nearest to the first that was asked for."""
    below = [count for count in usable if count < gpus[0]][-1:]
    above = [count for count in usable if count > gpus[0]][:1]
    return " or ".join(str(count) for count in (*below, *above))


def _batches(model: Transformer, gpus: int) -> str:
    """The nearest global batches that these GPUs could divide evenly."""
    lower = model.global_batch // gpus * gpus
    near = [batch for batch in (lower, lower + gpus) if batch > 0]
    good = [batch for batch in near if PlanBook((with_batch(model, batch),), _ANY).candidates(0, gpus).fits.any()]
    return " or ".join(str(batch) for batch in good)


_ANY = Site("", 1e9, 8, 8, 1e9, 1.0, 1.0, 1.0, 1.0)  # it has room for everything, so that only divisibility counts
