"""Measured iterations from files: our own columns, Rubick's placements.csv or vTrain's CSV, recognised by the header.

Rubick's published rows name a plan by three digits (pipeline, tensor and data-parallel size, in this order: the
measured optimiser time goes as 1 over the product of the first two) or by the name of one feature; vTrain's give every
size and the shape of the model itself.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thebes.model.errors import UserError
from thebes.model.plan import NO_ZERO, ZERO_DP, ZERO_OFFLOAD, Plan, parse_plan
from thebes.perf.plans.fit import Sample
from thebes.perf.plans.site import CPUS_PER_GPU
from thebes.perf.plans.transformer import Transformer

OWN_COLUMNS = ("plan", "gpus", "nodes", "iteration_s")
MORE_COLUMNS = ("model", "cpus", "placement", "global_batch")
VTRAIN_VOCABULARY = 51_200

_FEATURES = {
    "ga": (NO_ZERO, False),
    "gc": (NO_ZERO, True),
    "zero-dp": (ZERO_DP, False),
    "zero-offload": (ZERO_OFFLOAD, False),
}
# Rows of these models without checkpointing ran in micro-batches that fit the GPU: their forward times are multiples
# of that of 2 samples (GPT-2, 142 ms) and of 1 (LLaMA-2-7B, 374 ms). All other rows took their share at once.
_MICRO_BATCH = {"gpt2": 2, "llama7": 1}


@dataclass(frozen=True)
class SampleFile:
    """The samples of a file by model, and the models whose shape the file itself contains."""

    gpu_type: str  # empty if the file does not say
    samples: Mapping[str, Sequence[Sample]]
    shapes: Mapping[str, Transformer] = field(default_factory=lambda: dict[str, Transformer]())


def parse_samples(text: str, where: str) -> SampleFile:
    lines = text.splitlines()
    rows = csv.DictReader(lines)
    header = [name.strip() for name in rows.fieldnames or ()]
    if not header:
        raise UserError(f"{where}: empty", hint=f"expected CSV with {','.join(OWN_COLUMNS)}")
    if {"exec_plan", "iter_time"} <= set(header):
        return _rubick(list(rows), where)
    if {"micro_batch", "iter_time_ms"} <= set(header):
        return _vtrain(list(rows), where)
    missing = [name for name in OWN_COLUMNS if name not in header]
    if missing:
        raise UserError(
            f"{where}: no column '{missing[0]}'",
            hint=f"expected {','.join(OWN_COLUMNS)}, and if you like {','.join(MORE_COLUMNS)}",
        )
    return _own(list(rows), where)


def _number(row: Mapping[str, str], name: str, where: str) -> float:
    try:
        return float(row[name])
    except (TypeError, ValueError):
        raise UserError(f"{where}: {name} = {row[name]!r} is not a number", hint=f"write {name} as 8 or 0.25") from None


def _whole(row: Mapping[str, str], name: str, where: str) -> int:
    value = _number(row, name, where)
    if not (1 <= value <= 1e9 and value.is_integer()):
        raise UserError(f"{where}: {name} = {row[name]} is not a whole number above 0", hint=f"write {name} as 8")
    return int(value)


def _fewest(placement: str, gpus: int, nodes: int, where: str) -> int:
    """GPUs on the node that has the fewest; a placement such as `233` lists the GPUs on each node."""
    digits = [int(digit) for digit in placement if digit.isdigit()]
    if len(digits) != len(placement) or sum(digits) != gpus or len(digits) != nodes or 0 in digits:
        raise UserError(
            f"{where}: placement {placement} is not {gpus} GPUs on {nodes} nodes",
            hint="one digit per node: its GPUs, such as 44 for 8 GPUs on 2 nodes",
        )
    return min(digits)


def _own(rows: Sequence[Mapping[str, str]], where: str) -> SampleFile:
    found: dict[str, list[Sample]] = {}
    for number, row in enumerate(rows, 2):
        at = f"{where}, line {number}"
        gpus, nodes = _whole(row, "gpus", at), _whole(row, "nodes", at)
        sample = Sample(
            parse_plan(row["plan"] or "", f"{at}, plan"),
            gpus,
            nodes,
            _number(row, "cpus", at) if row.get("cpus") else float(CPUS_PER_GPU),
            _number(row, "iteration_s", at),
            _fewest(row["placement"], gpus, nodes, at) if row.get("placement") else 0,
            _whole(row, "global_batch", at) if row.get("global_batch") else 0,
            at,
        )
        found.setdefault((row.get("model") or "").strip(), []).append(sample)
    return SampleFile("", found)


def _rubick(rows: Sequence[Mapping[str, str]], where: str) -> SampleFile:
    found: dict[str, list[Sample]] = {}
    for number, row in enumerate(rows, 2):
        at = f"{where}, line {number}"
        gpus, nodes, batch = (_whole(row, name, at) for name in ("num_gpus", "num_nodes", "global_batch"))
        sample = Sample(
            rubick_plan(row["model"], row["exec_plan"], gpus, batch, at),
            gpus,
            nodes,
            float(CPUS_PER_GPU),
            _number(row, "iter_time", at),
            _fewest(row["placement"], gpus, nodes, at),
            batch,
            at,
        )
        found.setdefault(row["model"], []).append(sample)
    return SampleFile(rows[0].get("gpu_type", "") if rows else "", found)


def rubick_plan(model: str, text: str, gpus: int, batch: int, where: str = "exec_plan") -> Plan:
    """A plan of Rubick's files in our terms: `248` is dp8+tp4+pp2, and `zero-dp` on 8 GPUs is zero-dp8."""
    if len(text) == 3 and text.isdigit():
        pp, tp, dp = map(int, text)
        return Plan(dp, tp, pp)
    if text not in _FEATURES:
        raise UserError(
            f"{where}: exec_plan '{text}'", hint=f"three digits (pp, tp, dp), or one of {', '.join(_FEATURES)}"
        )
    zero, gc = _FEATURES[text]
    micro_batch = batch // gpus if gc else _MICRO_BATCH.get(model, batch // gpus)
    return Plan(dp=gpus, zero=zero, ga=max(1, batch // (gpus * max(1, micro_batch))), gc=gc)


def _vtrain(rows: Sequence[Mapping[str, str]], where: str) -> SampleFile:
    found: dict[str, list[Sample]] = {}
    shapes: dict[str, Transformer] = {}
    for number, row in enumerate(rows, 2):
        at = f"{where}, line {number}"
        dp, tp, pp, gpus, nodes, batch, micro_batch, hidden, layers, heads, sequence = (
            _whole(row, name, at)
            for name in (
                *("dp", "tp", "pp", "num_gpus", "num_nodes", "global_batch", "micro_batch"),
                *("hidden", "layers", "heads", "seq_len"),
            )
        )
        if batch % (dp * micro_batch):
            raise UserError(
                f"{at}: global_batch {batch} is not divisible by dp x micro_batch = {dp * micro_batch}",
                hint="another micro_batch",
            )
        name = f"gpt-h{hidden}-l{layers}"
        parameters = 12.0 * layers * hidden**2 + VTRAIN_VOCABULARY * hidden
        shapes.setdefault(
            name,
            Transformer(name, parameters, layers, hidden, heads, sequence, batch, vocabulary=VTRAIN_VOCABULARY),
        )
        plan = Plan(dp, tp, pp, ga=batch // (dp * micro_batch))
        seconds = _number(row, "iter_time_ms", at) / 1e3
        found.setdefault(name, []).append(Sample(plan, gpus, nodes, float(CPUS_PER_GPU), seconds, 0, batch, at))
    return SampleFile(rows[0].get("gpu_type", "") if rows else "", found, shapes)
