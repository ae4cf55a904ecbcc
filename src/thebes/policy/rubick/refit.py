"""Online refit: where measured and predicted iterations differ, Rubick fits the model again, to all that it has seen.

A few samples of a running job do not determine seven constants. What the book believed before goes in as well, with the
factor by which it was wrong on average: the new fit keeps the shape that was known and moves to what was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from thebes.model.plan import NO_ZERO, ZERO_DP, ZERO_OFFLOAD, Plan
from thebes.perf.plans.book import PlanBook

if TYPE_CHECKING:
    from thebes.perf.plans.fit import Sample

BELIEVED_ON = (1, 2, 4, 8, 16, 32, 64)  # GPUs
_TYPES = (None, *(Plan(zero=zero, gc=gc) for zero in (NO_ZERO, ZERO_DP, ZERO_OFFLOAD) for gc in (False, True)))


def refitted(book: PlanBook, number: int, samples: Sequence[Sample]) -> PlanBook | None:
    """The book with one model fitted to these samples; None if too little is known of it."""
    from thebes.perf.plans.fit import LEAST_SAMPLES  # it loads SciPy, which others need not wait for

    wrong_by: list[float] = []
    for sample in samples:
        expected = book.of(number, sample.plan, sample.nodes, max(1, round(sample.cpus)))
        if expected is not None:
            wrong_by.append(sample.iteration_s / expected.iteration_s)
    seen = {(sample.plan, sample.nodes) for sample in samples}
    believed = [one for one in _believed(book, number, median(wrong_by or [1.0])) if (one.plan, one.nodes) not in seen]
    if len(samples) + len(believed) < LEAST_SAMPLES:
        return None
    return book.with_samples(number, [*samples, *believed])


def with_model(book: PlanBook, number: int, other: PlanBook) -> PlanBook:
    """The book with one model as another book knows it."""
    models = (*book.models[:number], other.models[number], *book.models[number + 1 :])
    return replace(book, models=models)


def _believed(book: PlanBook, number: int, factor: float) -> list[Sample]:
    """What the book says of the best plan of every type on some numbers of GPUs, as if it had been measured."""
    from thebes.perf.plans.fit import Sample

    site, found = book.site, dict[Plan, Sample]()
    for gpus in BELIEVED_ON:
        nodes, cpus = site.fewest_nodes(gpus), site.cpus_per_gpu
        for like in _TYPES:
            best = book.best(number, gpus, nodes, cpus, like) if gpus <= book.gpus else None
            if best is not None:
                found[best.plan] = Sample(best.plan, gpus, nodes, cpus, best.iteration_s * factor)
    return list(found.values())
