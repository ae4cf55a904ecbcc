"""The plan book gives, for every model and allocation, the fastest plan that fits (Rubick, arXiv 2408.08586).

It is pure, and cached by content: two books about the same model on the same site share what they have worked out, so a
refit of one model costs nothing for the others. All candidates of an allocation are weighed in one NumPy pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.arrays import Floats, Ints
from thebes.model.plan import DP, FAMILIES, NO_ZERO, OFFLOAD, SPLIT, ZERO, ZERO_DP, ZERO_OFFLOAD, Plan
from thebes.perf.plans.memory import Memories, memories, memory
from thebes.perf.plans.site import Site
from thebes.perf.plans.timing import Breakdowns, Constants, PlanArrays, breakdowns, plan_arrays
from thebes.perf.plans.transformer import Transformer

if TYPE_CHECKING:
    from thebes.perf.plans.fit import Sample

Element = TypeVar("Element", bound=np.generic)

OBSTACLES = ("family", "batch", "heads", "layers", "nodes", "CPUs", "GPU memory", "host memory")
MOST_DP, MOST_CUT = (1 << 14) - 1, (1 << 10) - 1  # the code of a plan has room for this dp, and for this tp and pp
NEAR_EQUAL = 0.99  # for the 1 % rule
MODELS_REMEMBERED = 4096


class Outlook(NamedTuple):
    """What to expect of a plan on an allocation; memory is per GPU, the safety margin included."""

    plan: Plan
    iteration_s: float
    samples_s: float
    gpu_gib: float
    host_gib: float
    wire_s: float  # the part of an iteration that is traffic between nodes


class PlanCurve(NamedTuple):
    """Throughput by GPUs (row, from 0) and CPUs per GPU (column, from 0), each on the fewest nodes.

    An entry is 0 where no plan uses exactly that many GPUs, or where a node does not have that many CPUs. `gpus_for`
    and `cpus_for` are the cheapest near-equal allocation by the 1 % rule; 0 where nothing fits.
    """

    samples_s: Floats
    gpus_for: Ints
    cpus_for: Ints


class Rejection(NamedTuple):
    """Why a plan cannot run: the obstacle, and a sentence for people."""

    obstacle: str  # one of OBSTACLES
    words: str


class Candidates(NamedTuple):
    """The plans on so many GPUs that divide batch, heads and layers; what they need, and which of them fit."""

    plans: PlanArrays
    memory: Memories
    fits: NDArray[np.bool_]


class _Page:
    """What is known about one model on one site; it grows with the questions."""

    def __init__(self, model: Transformer, site: Site) -> None:
        self.model = model
        self.site = site
        self.constants = model.constants or Constants()
        self.candidates: dict[int, Candidates] = {}
        self.best: dict[tuple[int, int, int, tuple[int, int, int, bool] | None], Outlook | None] = {}
        self.of: dict[tuple[int, int, int], Outlook | None] = {}
        self.curves: dict[tuple[int, int, tuple[int, int, int, bool] | None], PlanCurve] = {}

    def found(self, gpus: int) -> Candidates:
        if gpus not in self.candidates:
            self.candidates[gpus] = _candidates(self.model, self.site, gpus)
        return self.candidates[gpus]


@lru_cache(maxsize=MODELS_REMEMBERED)
def _page(model: Transformer, site: Site) -> _Page:
    return _Page(model, site)


@dataclass(frozen=True)
class PlanBook:
    """The plans of the models of a world, on one kind of node; `gpus` is the most that a job could be given."""

    models: tuple[Transformer, ...]
    site: Site
    gpus: int = 64
    pages: tuple[_Page, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pages", tuple(_page(model, self.site) for model in self.models))

    def best(self, number: int, gpus: int, nodes: int, cpus: int, like: Plan | None = None) -> Outlook | None:
        """The fastest plan that fits and uses exactly these GPUs, with `cpus` CPUs per GPU; None if there is none."""
        page = self.pages[number]
        key = (gpus, nodes, cpus, None if like is None else _type(like))
        if key not in page.best:
            page.best[key] = _best(page, gpus, nodes, cpus, key[3])
        return page.best[key]

    def of(self, number: int, plan: Plan, nodes: int, cpus: int) -> Outlook | None:
        """What to expect of this plan; None if it does not fit."""
        page = self.pages[number]
        key = (plan.code, nodes, cpus)
        if key not in page.of:
            fits = not self.why_not(number, plan, nodes, cpus)
            page.of[key] = _outlook(page, plan, nodes, cpus) if fits else None
        return page.of[key]

    def why_not(self, number: int, plan: Plan, nodes: int, cpus: int) -> str:
        """Why this plan cannot run on so many nodes, in words; empty if it can."""
        found = self.rejection(number, plan, nodes, cpus)
        return "" if found is None else found.words

    def rejection(self, number: int, plan: Plan, nodes: int, cpus: int) -> Rejection | None:
        """Why this plan cannot run on so many nodes: the obstacle, and words for it."""
        model = self.models[number]
        return (
            _cannot_divide(model, plan)
            or _cannot_spread(self.site, plan.gpus, nodes, cpus)
            or _leaves_the_node(self.site, plan)
            or _no_room(model, self.site, plan)
        )

    def candidates(self, number: int, gpus: int) -> Candidates:
        """Every plan on exactly these GPUs that divides batch, heads and layers."""
        return self.pages[number].found(gpus)

    def all_that_fit(self, number: int, gpus: int, nodes: int, cpus: int) -> list[Outlook]:
        """Every plan that fits on exactly these GPUs, fastest first."""
        page = self.pages[number]
        if gpus < 1 or _cannot_spread(self.site, gpus, nodes, cpus):
            return []
        found = page.found(gpus)
        rows = np.flatnonzero(found.fits)
        times = breakdowns(page.model, page.site, page.constants, _where(found.plans, rows), gpus, nodes, cpus)
        order = np.argsort(times.total, kind="stable")
        return [_outlook_at(page, found, times, rows, at) for at in order.tolist()]

    def curve(self, number: int, cpus: int | None = None, like: Plan | None = None) -> PlanCurve:
        """Throughput over GPUs and CPUs, up to `cpus` CPUs per GPU (by default a GPU's share of its node)."""
        page = self.pages[number]
        most = self.site.cpus_per_gpu if cpus is None else cpus
        key = (self.gpus, most, None if like is None else _type(like))
        if key not in page.curves:
            page.curves[key] = _curve(self, number, most, like)
        return page.curves[key]

    def most_gpus(self, number: int) -> int:
        """The largest number of GPUs that still makes a difference by the 1 % rule; 0 if the model does not fit."""
        return int(self.curve(number).gpus_for[-1].max())

    def with_constants(self, number: int, constants: Constants) -> PlanBook:
        """The same book with one model refitted."""
        return self._with(number, replace(self.models[number], constants=constants))

    def with_samples(self, number: int, samples: Sequence[Sample]) -> PlanBook:
        """The same book with one model fitted to measured samples."""
        from thebes.perf.plans.fit import fit, with_forward  # it loads SciPy, which others need not wait for

        found = fit(self.models[number], self.site, samples)
        model = with_forward(self.models[number], self.site, found.forward_s)
        return self._with(number, replace(model, constants=found.constants))

    def _with(self, number: int, model: Transformer) -> PlanBook:
        return replace(self, models=(*self.models[:number], model, *self.models[number + 1 :]))


@cache
def divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def _type(plan: Plan) -> tuple[int, int, int, bool]:
    """What two plans have in common that are `like` each other."""
    return plan.tp, plan.pp, plan.zero, plan.gc


def enumerate_plans(model: Transformer, gpus: int, most_tp: int) -> PlanArrays:
    """All plans of the model on exactly these GPUs that divide its batch, heads and layers."""
    rows: list[tuple[int, int, int, int, int, int]] = []
    checkpointing = (0, 1) if model.recompute else (0,)
    for dp in divisors(gpus) if SPLIT in model.families else (gpus,):
        if model.global_batch % dp or dp > MOST_DP:
            continue
        steps = divisors(model.global_batch // dp)
        for tp in divisors(gpus // dp):
            pp = gpus // dp // tp
            if tp > most_tp or model.heads % tp or model.layers % pp:
                continue
            kinds = (NO_ZERO,) if tp * pp > 1 else tuple(z for z, f in _ZERO_FAMILIES if f in model.families)
            rows += [(dp, tp, pp, zero, ga, gc) for zero in kinds for ga in steps for gc in checkpointing]
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(PlanArrays._fields)).T
    return PlanArrays(*columns)


_ZERO_FAMILIES = ((NO_ZERO, DP), (ZERO_DP, ZERO), (ZERO_OFFLOAD, OFFLOAD))


def _candidates(model: Transformer, site: Site, gpus: int) -> Candidates:
    plans = PlanArrays(*map(_sealed, enumerate_plans(model, gpus, site.node_gpus)))
    needs = Memories(*map(_sealed, memories(model, plans)))
    return Candidates(plans, needs, _sealed((needs.gpu_gib <= site.gpu_gib) & (needs.host_gib <= site.host_gib)))


def _sealed(array: NDArray[Element]) -> NDArray[Element]:
    """The array, made read-only because all books share pages, also those of other runs."""
    array.flags.writeable = False
    return array


def _where(plans: PlanArrays, rows: NDArray[np.bool_] | Ints) -> PlanArrays:
    return PlanArrays(*(column[rows] for column in plans))


def _plan_at(plans: PlanArrays, row: int) -> Plan:
    dp, tp, pp, zero, ga, gc = (int(column[row]) for column in plans)
    return Plan(dp, tp, pp, zero, ga, bool(gc))


def _of_type(plans: PlanArrays, kind: tuple[int, int, int, bool]) -> NDArray[np.bool_]:
    return (plans.tp == kind[0]) & (plans.pp == kind[1]) & (plans.zero == kind[2]) & (plans.gc == int(kind[3]))


def _best(page: _Page, gpus: int, nodes: int, cpus: int, kind: tuple[int, int, int, bool] | None) -> Outlook | None:
    if gpus < 1 or _cannot_spread(page.site, gpus, nodes, cpus):
        return None
    found = page.found(gpus)
    fits = found.fits if kind is None else found.fits & _of_type(found.plans, kind)
    rows = np.flatnonzero(fits)
    if not len(rows):
        return None
    times = breakdowns(page.model, page.site, page.constants, _where(found.plans, rows), gpus, nodes, cpus)
    return _outlook_at(page, found, times, rows, int(np.argmin(times.total)))


def _outlook_at(page: _Page, found: Candidates, times: Breakdowns, rows: Ints, at: int) -> Outlook:
    row, total = int(rows[at]), float(times.total[at])
    return Outlook(
        _plan_at(found.plans, row),
        total,
        page.model.global_batch / total,
        float(found.memory.gpu_gib[row]),
        float(found.memory.host_gib[row]),
        float(times.wire_s[at]),
    )


def _outlook(page: _Page, plan: Plan, nodes: int, cpus: int) -> Outlook:
    times = breakdowns(page.model, page.site, page.constants, plan_arrays([plan]), plan.gpus, nodes, cpus)
    needs = memory(page.model, plan)
    total = float(times.total[0])
    return Outlook(plan, total, page.model.global_batch / total, *needs, float(times.wire_s[0]))


# Reasons why a plan cannot run.


def _cannot_divide(model: Transformer, plan: Plan) -> Rejection | None:
    """The rejection of a plan that divides the model in a way that is not allowed or does not come out even."""
    if plan.family not in model.families:
        valid = ", ".join(family for family in FAMILIES if family in model.families)
        return Rejection("family", f"{model.name} does not accept {plan.family} plans: {valid} would do")
    if plan.gc and not model.recompute:
        return Rejection("family", f"{model.name} does not accept gradient checkpointing: leave gc out")
    batch = model.global_batch
    each = batch // plan.dp
    if batch % plan.dp:
        return Rejection("batch", f"global batch {batch} is not divisible by dp {plan.dp}: {_near(batch, plan.dp)}")
    if each % plan.ga:
        return Rejection("batch", f"a rank's {each} samples are not divisible by ga {plan.ga}: {_near(each, plan.ga)}")
    if model.heads % plan.tp:
        return Rejection("heads", f"tp {plan.tp} does not divide {model.heads} heads: {_near(model.heads, plan.tp)}")
    if model.layers % plan.pp:
        words = f"pp {plan.pp} does not divide {model.layers} layers: {_near(model.layers, plan.pp)}"
        return Rejection("layers", words)
    return None


def _cannot_spread(site: Site, gpus: int, nodes: int, cpus: int) -> Rejection | None:
    if not 1 <= nodes <= gpus:
        return Rejection("nodes", f"{gpus} GPU{'s' * (gpus != 1)} cannot lie on {nodes} node{'s' * (nodes != 1)}")
    if gpus > nodes * site.node_gpus:
        where = f"{nodes} node{'s' * (nodes != 1)} of {site.node_gpus}"
        return Rejection("nodes", f"{gpus} GPUs do not fit on {where}: {site.fewest_nodes(gpus)} would do")
    held = -(-gpus // nodes)
    if cpus < 1 or held * cpus > site.node_cpus:
        each = f"{cpus} CPUs for each of {held} GPUs of a node that has {site.node_cpus}"
        return Rejection("CPUs", f"{each}: 1 to {site.node_cpus // held} would do")
    return None


def _leaves_the_node(site: Site, plan: Plan) -> Rejection | None:
    """Tensor parallelism communicates in every layer; nobody runs it beyond one node, so there are no measurements."""
    if plan.tp <= site.node_gpus:
        return None
    return Rejection("heads", f"tp {plan.tp} is more than the {site.node_gpus} GPUs of a node: pp would do")


def _no_room(model: Transformer, site: Site, plan: Plan) -> Rejection | None:
    needs = memory(model, plan)
    if needs.gpu_gib > site.gpu_gib:
        return Rejection("GPU memory", f"needs {needs.gpu_gib:.1f} GiB on each GPU, has {site.gpu_gib:g}")
    if needs.host_gib > site.host_gib:
        words = f"needs {needs.host_gib:.1f} GiB of host memory per GPU, has {site.host_gib:g}"
        return Rejection("host memory", words)
    return None


def _near(number: int, wanted: int) -> str:
    """The divisors of `number` next to `wanted`, below and above, as in `2 or 4 would do`."""
    known = divisors(number)
    below = [d for d in known if d < wanted][-1:]
    above = [d for d in known if d > wanted][:1]
    return " or ".join(str(d) for d in (*below, *above)) + " would do"


# Curves.


def _curve(book: PlanBook, number: int, most_cpus: int, like: Plan | None) -> PlanCurve:
    shape = (book.gpus + 1, most_cpus + 1)
    samples = np.zeros(shape)
    for gpus in range(1, book.gpus + 1):
        samples[gpus] = _throughputs(book, number, gpus, most_cpus, like)
    gpus_for, cpus_for = cheapest(samples)
    return PlanCurve(_sealed(samples), _sealed(gpus_for), _sealed(cpus_for))


def _throughputs(book: PlanBook, number: int, gpus: int, most_cpus: int, like: Plan | None) -> Floats:
    """The best throughput of exactly these GPUs, by CPUs per GPU; 0 where a node does not have so many."""
    found = book.candidates(number, gpus)
    fits = found.fits if like is None else found.fits & _of_type(found.plans, _type(like))
    result = np.zeros(most_cpus + 1)
    nodes = book.site.fewest_nodes(gpus)
    there = min(most_cpus, book.site.node_cpus // -(-gpus // nodes))
    if not fits.any() or there < 1:
        return result
    page = book.pages[number]

    def seconds(rows: NDArray[np.bool_], cpus: Ints) -> Floats:
        """Seconds by [plan, CPUs], in one pass, because CPUs only matter to offload plans."""
        plans = PlanArrays(*(np.repeat(column[rows], len(cpus)) for column in found.plans))
        each = np.tile(cpus, int(rows.sum()))
        times = breakdowns(page.model, page.site, page.constants, plans, gpus, nodes, each)
        return times.total.reshape(-1, len(cpus))

    offload = fits & (found.plans.zero == ZERO_OFFLOAD)
    least = np.full(there, np.inf)
    if (fits & ~offload).any():
        least = np.minimum(least, seconds(fits & ~offload, np.ones(1, dtype=np.int64)).min())
    if offload.any():
        least = np.minimum(least, seconds(offload, np.arange(1, there + 1)).min(axis=0))
    result[1 : there + 1] = page.model.global_batch / least
    return result


def cheapest(samples: Floats) -> tuple[Ints, Ints]:
    """Apply the 1 % rule: an entry gives way to one with a unit less of GPUs or CPUs that comes within 1 % of it.

    The smaller entry may itself have given way to another. Then it is that one whose throughput has to come within 1 %,
    so that what a lookup returns never loses more than 1 %, however long the chain was.
    """
    gpus_for = np.zeros(samples.shape, dtype=np.int64)
    cpus_for = np.zeros(samples.shape, dtype=np.int64)
    for gpus in range(1, samples.shape[0]):
        if not samples[gpus].any():  # no plan uses so many, so the answer is that for one GPU less
            gpus_for[gpus], cpus_for[gpus] = gpus_for[gpus - 1], cpus_for[gpus - 1]
            continue
        for cpus in range(1, samples.shape[1]):
            own = samples[gpus, cpus]
            choice = (gpus, cpus) if own > 0 else (0, 0)
            for less in ((gpus, cpus - 1), (gpus - 1, cpus)):  # the last one counts: rather fewer GPUs
                smaller = (int(gpus_for[less]), int(cpus_for[less]))
                if samples[smaller] > 0 and samples[smaller] >= NEAR_EQUAL * own:
                    choice = smaller
            gpus_for[gpus, cpus], cpus_for[gpus, cpus] = choice
    return gpus_for, cpus_for
