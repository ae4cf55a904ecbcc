"""Speeds as measured by others: Gavel's throughputs (OSDI'20), and the placements of Pollux and Sia (OSDI'21, SOSP'23).

At a measured point the table's figure comes out. Between two points, seconds are interpolated on logarithmic scales in
GPUs, nodes and batch size. Beyond the largest gang that was measured, the trend of that curve goes on: a power of the
number of GPUs between 0 and 1, fitted by least squares. A model that was not measured is refused before the run starts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.errors import UserError, nearest
from thebes.model.parameters import parameter
from thebes.model.profiles import TIER_RACK
from thebes.perf.base import Gang, SpeedModel, Times
from thebes.perf.models import GANGS, Model, assign_by_gang, batch_in, gpu_type_of, known_names

ProfileKey = tuple[str, str, int]  # model, GPU type, batch size


@dataclass(frozen=True)
class MeasuredCurve:
    """Seconds against a whole number (GPUs, nodes), measured at some of them."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    steady: bool = False  # beyond the last point, seconds stay the same

    @cached_property
    def trend(self) -> float:
        """The power of the count with which seconds grow, between 0 and 1; 0 where only one point is known."""
        known = [(c, s) for c, s in zip(self.counts, self.seconds, strict=True) if c > 1 and s > 0]
        if self.steady or len(known) < 2:
            return 0.0
        counts, seconds = np.log(np.array(known)).T
        return min(1.0, max(0.0, float(np.polyfit(counts, seconds, 1)[0])))

    def at(self, count: int) -> float:
        if count <= self.counts[0]:
            return self.seconds[0]
        if count > self.counts[-1]:
            return self.seconds[-1] * (count / self.counts[-1]) ** self.trend
        upper = bisect_left(self.counts, count)
        if self.counts[upper] == count:
            return self.seconds[upper]
        low, high = self.counts[upper - 1], self.counts[upper]
        return between(self.seconds[upper - 1], self.seconds[upper], math.log(count / low) / math.log(high / low))


def between(low: float, high: float, part: float) -> float:
    """Interpolate on a logarithmic scale where both values allow it, or else on a plain one."""
    if low > 0 and high > 0:
        return low ** (1 - part) * high**part
    return (1 - part) * low + part * high


def bracket(known: Sequence[int], wanted: float) -> tuple[int, int, float]:
    """The two known values around the wanted one, and how far it lies between them, measured in logarithms."""
    at = min(max(bisect_left(known, wanted), 1), len(known) - 1) if len(known) > 1 else 0
    low, high = known[max(0, at - 1)], known[at]
    part = 0.0 if low == high else (math.log(wanted) - math.log(low)) / (math.log(high) - math.log(low))
    return low, high, min(1.0, max(0.0, part))


def _blend(low: Times, high: Times, part: float) -> Times:
    if part in (0.0, 1.0):
        return high if part else low
    compute_s = low.compute_s ** (1 - part) * high.compute_s**part
    whole = [t.compute_s + t.inner_s + t.wire_s for t in (low, high)]
    talk_s = np.maximum(0.0, whole[0] ** (1 - part) * whole[1] ** part - compute_s)
    on_wires = low.wire_s + high.wire_s > 0
    return Times(compute_s, np.where(on_wires, 0.0, talk_s), np.where(on_wires, talk_s, 0.0))


def _read(text_or_path: Any, columns: Sequence[str], where: str) -> pl.DataFrame:
    try:
        frame = pl.read_csv(text_or_path, infer_schema_length=None)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{where}: cannot be read: {error}", hint=f"expected CSV with {','.join(columns)}") from None
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise UserError(f"{where}: no column '{missing[0]}'", hint=f"expected {','.join(columns)}")
    return frame


def _shipped(folder: str, name: str) -> bytes:
    return (files("thebes") / "data" / "profiles" / folder / name).read_bytes()


@dataclass(frozen=True)
class _MeasuredTables(SpeedModel):
    """What both tables share: models, GPU types and batch sizes are keys, and what is missing is refused."""

    gpu: str = parameter("", "GPU type of nodes that name none")
    file: Path | None = parameter(None, "a table of the same form to use instead of the one that ships")  # noqa: RUF009

    def batches(self) -> Mapping[tuple[str, str], Sequence[int]]:
        """(model, GPU type) -> the batch sizes that were measured, ascending."""
        raise NotImplementedError

    def wanted_batch(self, model: str, known: Sequence[int]) -> float:
        raise NotImplementedError

    def times_at(self, key: ProfileKey, gpus: int, nodes: NDArray[np.int64], tier: NDArray[np.int64]) -> Times:
        raise NotImplementedError

    def gpu_types(self) -> list[str]:
        return list(dict.fromkeys(gpu for _, gpu in self.batches()))

    def _gpu_type(self, text: str) -> str:
        return gpu_type_of(text or self.gpu, self.gpu_types(), f"performance model {self.name}")

    def check(self, cluster: Cluster) -> None:
        for kind in cluster.kinds:
            self._gpu_type(kind.gpu_type)

    def times(self, gang: Gang) -> Times:
        cluster, kind, model, gpus, nodes, tier = gang
        if model is None:
            raise UserError(f"performance model {self.name}: a job without a model", hint=nearest("", self.models()))
        gpu_type = self._gpu_type(cluster.kinds[kind].gpu_type)
        base = batch_in(model)[0]
        if (base, gpu_type) not in self.batches():
            raise UserError(
                f"performance model {self.name}: '{model}' was not measured on {gpu_type}",
                hint=f"measured there: {', '.join(sorted(m for m, g in self.batches() if g == gpu_type))}",
            )
        known = self.batches()[base, gpu_type]
        wanted = self.wanted_batch(model, known)
        if not known[0] <= wanted <= known[-1]:
            raise UserError(
                f"performance model {self.name}: '{model}' was not measured on {gpu_type}",
                hint=f"its batch sizes there are {', '.join(map(str, known))}",
            )
        low, high, part = bracket(known, wanted)
        first = self.times_at((base, gpu_type, low), gpus, nodes, tier)
        if part == 0.0:
            return first
        return _blend(first, self.times_at((base, gpu_type, high), gpus, nodes, tier), part)


# --- Gavel ------------------------------------------------------------------------------------------------------------

NO_BATCH = 0  # for job types that have no batch size
LARGE_BATCH = 64  # gangs of more than 4 GPUs draw from this size up
GAVEL_COLUMNS = ("model", "batch_size", "gpu_type", "num_gpus", "consolidated", "steps_per_s")


class GavelCurves(NamedTuple):
    """Seconds per iteration by number of GPUs; every worker takes one step in an iteration."""

    consolidated: MeasuredCurve
    spread: MeasuredCurve


@cache
def gavel_table(path: Path | None = None) -> dict[ProfileKey, GavelCurves]:
    """(model, GPU type, batch size) -> curves. Rows of 0 steps/s were not measured and are left out."""
    frame = _read(path or _shipped("gavel", "throughputs.csv"), GAVEL_COLUMNS, str(path or "gavel"))
    points: dict[ProfileKey, tuple[dict[int, float], dict[int, float]]] = {}
    for row in frame.filter(pl.col("steps_per_s") > 0).iter_rows(named=True):
        curves = points.setdefault((row["model"], row["gpu_type"], row["batch_size"] or NO_BATCH), ({}, {}))
        # steps_per_s counts the steps of all workers.
        curves[0 if row["consolidated"] else 1][row["num_gpus"]] = row["num_gpus"] / row["steps_per_s"]
    return {key: GavelCurves(_curve(near), _curve(far or near)) for key, (near, far) in points.items() if 1 in near}


def _curve(points: Mapping[int, float], *, steady: bool = False) -> MeasuredCurve:
    counts = tuple(sorted(points))
    return MeasuredCurve(counts, tuple(points[count] for count in counts), steady)


def gavel_name(model: str, batch: int) -> str:
    return model if batch == NO_BATCH else f"{model} (batch size {batch})"


@cache
def gavel_models(path: Path | None = None) -> dict[str, Model]:
    """Gavel's job types: size and memory are those of the model that is meant, step times are as measured."""
    models: dict[str, Model] = {}
    for (base, gpu_type, batch), curves in gavel_table(path).items():
        name = gavel_name(base, batch)
        usual = models.get(name) or replace(known_names().get(base, Model(base)), name=name, step_s={})
        models[name] = replace(usual, step_s={**usual.step_s, gpu_type: curves.consolidated.at(1)})
    return models


@dataclass(frozen=True)
class Gavel(_MeasuredTables):
    """Gavel's measured throughputs: 26 job types on V100, P100 and K80, 1 to 8 GPUs, consolidated or spread.

    A gang inside one node counts as consolidated, any other as spread. Where the table has the spread gang faster
    (noise), the two count as equal. Job types are written as in Gavel's traces: `ResNet-50 (batch size 64)`.
    """

    name: ClassVar[str] = "gavel"

    gpu: str = parameter("V100", "GPU type of nodes that name none")

    def models(self) -> Mapping[str, Model]:
        return gavel_models(self.file)

    def assign(self, gpus: NDArray[np.int64], seed: int) -> list[str]:
        table = gavel_table(self.file)
        gpu_types = {gpu for _, gpu, _ in table}
        # Only models that were measured as gangs on every GPU type: an assigned model must run on any cluster, and may
        # grow.
        names = [
            gavel_name(base, batch)
            for base, batch in dict.fromkeys((base, batch) for base, _, batch in table)
            if all((base, gpu, batch) in table for gpu in gpu_types)
            and all(table[base, gpu, batch].consolidated.counts[-1] > 1 for gpu in gpu_types)
        ]
        large = [name for name in names if (batch_in(name)[1] or 0) >= LARGE_BATCH]
        return assign_by_gang(gpus, seed, {GANGS[0]: names, GANGS[1]: names, GANGS[2]: large, GANGS[3]: large})

    def knows(self, model: str) -> bool:
        base, batch = batch_in(model)
        measured = [b for m, _, b in gavel_table(self.file) if m == base]
        if not measured:
            return False
        return min(measured) <= (batch or NO_BATCH) <= max(measured)

    def batches(self) -> Mapping[tuple[str, str], Sequence[int]]:
        return _gavel_batches(self.file)

    def wanted_batch(self, model: str, known: Sequence[int]) -> float:
        return batch_in(model)[1] or NO_BATCH

    def times_at(self, key: ProfileKey, gpus: int, nodes: NDArray[np.int64], tier: NDArray[np.int64]) -> Times:
        curves = gavel_table(self.file)[key]
        if gpus > 1 and curves.consolidated.counts[-1] == 1:
            base, gpu_type, batch = key
            raise UserError(
                f"performance model {self.name}: '{gavel_name(base, batch)}' was measured on one {gpu_type} only, "
                f"not on {gpus}",
                hint="give these jobs 1 GPU or another model",
            )
        near_s, alone_s = curves.consolidated.at(gpus), curves.consolidated.at(1)
        far_s = max(near_s, curves.spread.at(gpus))
        compute_s = min(alone_s, near_s)
        spans = tier >= TIER_RACK
        return Times(
            np.full(len(nodes), compute_s),
            np.where(spans, 0.0, near_s - compute_s),
            np.where(spans, far_s - compute_s, 0.0),
        )


@cache
def _gavel_batches(path: Path | None) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for base, gpu_type, batch in sorted(gavel_table(path)):
        found.setdefault((base, gpu_type), []).append(batch)
    return found


# --- Pollux and Sia ---------------------------------------------------------------------------------------------------

POLLUX_COLUMNS = ("model", "gpu_type", "cluster", "num_nodes", "num_gpus", "local_bsz", "step_time", "sync_time")
# The models that a trace without models gets, as in the categories of Pollux's workload: larger jobs, larger models.
POLLUX_GANGS = {
    "1": ("cifar10", "ncf"),
    "2-4": ("cifar10", "bert", "deepspeech2"),
    "5-8": ("bert", "deepspeech2", "yolov3"),
    "9+": ("yolov3", "imagenet"),
}


class PolluxCurves(NamedTuple):
    """By number of GPUs, for each measured number of nodes: seconds of compute, and of exposed synchronisation."""

    nodes: tuple[int, ...]
    compute: tuple[MeasuredCurve, ...]
    sync: tuple[MeasuredCurve, ...]

    def at(self, nodes: int, gpus: int) -> tuple[float, float]:
        """(compute, synchronisation) in seconds, over one node or over several."""
        if nodes == 1:
            return self.compute[0].at(gpus), self.sync[0].at(gpus)
        low, high, part = bracket(self.nodes[1:], nodes)
        first, second = self.nodes.index(low), self.nodes.index(high)
        compute_s, sync_s = (
            between(curves[first].at(gpus), curves[second].at(gpus), part) for curves in (self.compute, self.sync)
        )
        return compute_s, sync_s


@cache
def pollux_table(path: Path | None = None) -> dict[ProfileKey, PolluxCurves]:
    """(model, GPU type, batch per GPU) -> curves. Placements with equally many nodes and GPUs are averaged.

    Rows in which synchronising takes longer than the step are noise and left out. Of two clusters with the same GPU,
    the one with more rows is taken; of the batch sizes, those that were measured over the largest number of nodes.
    """
    frame = _read(path or _shipped("pollux", "placements.csv.gz"), POLLUX_COLUMNS, str(path or "pollux"))
    frame = frame.filter((pl.col("step_time") > 0) & (pl.col("sync_time") < pl.col("step_time")))
    most = (
        frame.group_by("model", "gpu_type", "cluster").len().sort("len", "cluster", descending=True)
        .unique(["model", "gpu_type"], keep="first", maintain_order=True)
    )  # fmt: skip
    frame = frame.join(most, on=["model", "gpu_type", "cluster"], how="semi")
    keys = ("model", "gpu_type", "local_bsz", "num_nodes", "num_gpus")
    means = frame.group_by(keys).agg(pl.col("step_time", "sync_time").mean()).sort(keys)
    points: dict[ProfileKey, dict[int, tuple[dict[int, float], dict[int, float]]]] = {}
    for model, gpu_type, batch, nodes, gpus, step_s, sync_s in means.iter_rows():
        computes, syncs = points.setdefault((model, gpu_type, batch), {}).setdefault(nodes, ({}, {}))
        syncs[gpus] = 0.0 if gpus == 1 else sync_s
        computes[gpus] = step_s - syncs[gpus]
    widest: dict[tuple[str, str], int] = {}
    for (model, gpu_type, _), by_nodes in points.items():
        widest[model, gpu_type] = max(widest.get((model, gpu_type), 0), len(by_nodes))
    return {
        key: PolluxCurves(
            tuple(sorted(by_nodes)),
            tuple(_curve(by_nodes[n][0], steady=True) for n in sorted(by_nodes)),
            tuple(_curve(by_nodes[n][1]) for n in sorted(by_nodes)),
        )
        for key, by_nodes in points.items()
        if 1 in by_nodes and len(by_nodes) == widest[key[:2]]
    }


@dataclass(frozen=True)
class Pollux(_MeasuredTables):
    """Step and synchronisation times by placement, as measured for Pollux and Sia: bert, cifar10, imagenet and others.

    The T4 figures of Pollux ship with Thebes; `perf.file` reads Sia's table (placements.csv) with A100, V100 and
    RTX2080Ti. The measured clusters had one network, so in a rack and across racks are alike. Where a spread gang was
    faster than one inside a node (noise), the two count as equal.
    """

    name: ClassVar[str] = "pollux"

    gpu: str = parameter("T4", "GPU type of nodes that name none")
    batch: float = parameter(
        0.5, "batch per GPU: 0 the smallest that was measured, 1 the largest, between them in logarithms", low=0, high=1
    )

    def models(self) -> Mapping[str, Model]:
        return _pollux_models(self.file)

    def assign(self, gpus: NDArray[np.int64], seed: int) -> list[str]:
        known = self.models()
        choices = {gang: [m for m in names if m in known] or list(known) for gang, names in POLLUX_GANGS.items()}
        return assign_by_gang(gpus, seed, choices)

    def knows(self, model: str) -> bool:
        return model in self.models()

    def batches(self) -> Mapping[tuple[str, str], Sequence[int]]:
        return _pollux_batches(self.file)

    def wanted_batch(self, model: str, known: Sequence[int]) -> float:
        return min(known[-1], max(known[0], between(known[0], known[-1], self.batch)))

    def times_at(self, key: ProfileKey, gpus: int, nodes: NDArray[np.int64], tier: NDArray[np.int64]) -> Times:
        curves = pollux_table(self.file)[key]
        compute_s, sync_s = np.array([self._step(key, curves, int(count), gpus) for count in nodes]).T
        spans = tier >= TIER_RACK
        return Times(compute_s, np.where(spans, 0.0, sync_s), np.where(spans, sync_s, 0.0))

    def _step(self, key: ProfileKey, curves: PolluxCurves, nodes: int, gpus: int) -> tuple[float, float]:
        if nodes > 1 and len(curves.nodes) == 1:
            raise UserError(
                f"performance model {self.name}: '{key[0]}' was measured on one node of {key[1]} only",
                hint="use a cluster of one node, another GPU type, or perf.file with more rows",
            )
        compute_s, sync_s = curves.at(nodes, gpus)
        if nodes > 1 and gpus <= curves.compute[0].counts[-1]:
            sync_s += max(0.0, sum(curves.at(1, gpus)) - compute_s - sync_s)
        return compute_s, sync_s


@cache
def _pollux_batches(path: Path | None) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for model, gpu_type, batch in sorted(pollux_table(path)):
        found.setdefault((model, gpu_type), []).append(batch)
    return found


@cache
def _pollux_models(path: Path | None) -> dict[str, Model]:
    names = dict.fromkeys(model for model, _, _ in pollux_table(path))
    return {name: replace(known_names().get(name, Model(name)), name=name) for name in names}
