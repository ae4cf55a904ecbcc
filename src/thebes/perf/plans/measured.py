"""Iterations that were measured on the A800 cluster of Rubick's evaluation (arXiv 2408.08586): 420 rows of six models.

`data/plans/SOURCE.md` says where they come from, and which of them contradict the others. These are kept and marked,
but no prediction uses them.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from thebes.model.plan import ZERO_OFFLOAD, Plan, parse_plan
from thebes.perf.plans.fit import Sample
from thebes.perf.plans.site import A800, Site
from thebes.perf.plans.transformer import Transformer, shipped_name

GPU_TYPE = "A800-80GB"
MEASURED_CPUS = 12.0  # per GPU


class MeasuredRow(NamedTuple):
    model: str
    sample: Sample
    suspicious: bool


@cache
def rows() -> tuple[MeasuredRow, ...]:
    """Everything that was measured, in the order of the file."""
    text = (files("thebes") / "data" / "plans" / "a800.csv").read_text(encoding="utf-8")
    return tuple(_row(row) for row in csv.DictReader(text.splitlines()))


def _row(row: dict[str, str]) -> MeasuredRow:
    sample = Sample(
        parse_plan(row["plan"]),
        int(row["gpus"]),
        int(row["nodes"]),
        MEASURED_CPUS,
        float(row["iteration_s"]),
        min(map(int, row["placement"])),
        int(row["global_batch"]),
    )
    return MeasuredRow(row["model"], sample, row["suspicious"] == "1")


def samples_of(model: str, suspicious: bool = False) -> tuple[Sample, ...]:
    """The rows of a model. Rows that contradict the others are added only when asked for."""
    return tuple(row.sample for row in rows() if row.model == model and (suspicious or not row.suspicious))


@cache
def _by_place() -> dict[tuple[str, Plan, int], Sample]:
    """Where a plan was measured on several placements with as many nodes, the most even one counts."""
    found: dict[tuple[str, Plan, int], Sample] = {}
    for model, sample, suspicious in rows():
        key = (model, sample.plan, sample.nodes)
        if not suspicious and (key not in found or found[key].fewest < sample.fewest):
            found[key] = sample
    return found


def as_where_measured(site: Site) -> bool:
    """Whether the measurements hold here: the site has the same GPUs behind the same links."""
    return (site.gpu_type, site.inner_gb_s, site.wire_gb_s) == (GPU_TYPE, A800.inner_gb_s, A800.wire_gb_s)


def measured_of(model: Transformer, plan: Plan, nodes: int, cpus: float) -> float | None:
    """As `measured`, for a model that may be the user's own: one that only shares the name was not measured."""
    name = shipped_name(model)
    return None if name is None else measured(name, plan, plan.gpus, nodes, cpus=cpus, batch=model.global_batch)


def measured(
    model: str, plan: Plan, gpus: int, nodes: int, *, cpus: float = MEASURED_CPUS, batch: int = 0
) -> float | None:
    """Seconds per iteration of this plan, spread evenly over so many nodes; None if it was not measured."""
    known = _by_place().get((model, plan, nodes))
    if known is None or gpus != plan.gpus or batch not in (0, known.batch):
        return None
    return None if plan.zero == ZERO_OFFLOAD and cpus != MEASURED_CPUS else known.iteration_s
