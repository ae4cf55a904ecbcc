"""What is trained: tensor tables of nine CNNs, and what else is known of these and of larger models.

Skew is the share of the largest tensor, which Tiresias's profiler reads from message sizes (NSDI'19, section 3.4). The
tables are those of the authors' simulator (`data/tiresias/SOURCE.md`): tensors of about 1 MB and more. Sizes and step
times of the others are in `data/models`, with their origins.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from thebes.model.errors import UserError, nearest

# Model classes that the `tiers` model tells apart.
BALANCED, SKEWED = 0, 1
# This lies between the most skewed of the ResNets and Inceptions (0.14) and the least skewed of VGG and AlexNet (0.61).
SKEWED_ABOVE = 0.3
# A checkpoint holds the weights and the optimiser's two moments.
STATE_PER_WEIGHT = 3
UNKNOWN_STATE_GIB = 1.0
UNKNOWN_MEMORY_GIB = 4.0
UNKNOWN_UTILISATION = 0.8

WEIGHT_BYTES = 4
REFERENCE_GPU = "V100"
REFERENCE_TFLOPS = 125.0  # dense arithmetic in half precision
PASSES = 3  # the forward pass, and a backward pass that takes twice as long

# Classes of demand: traces seldom say what was trained, but large gangs train large models.
GANGS = ("1", "2-4", "5-8", "9+")
_GANG_ENDS = (1, 4, 8)


@dataclass(frozen=True)
class Model:
    name: str
    tensors_mib: tuple[float, ...] = ()
    memory_gib: float = UNKNOWN_MEMORY_GIB  # the peak on each GPU
    utilisation: float = UNKNOWN_UTILISATION  # the share of a GPU's time in which it computes when alone
    parameters: float = 0.0
    step_s: Mapping[str, float] = field(default_factory=lambda: dict[str, float]())  # by GPU type, as measured
    gangs: tuple[str, ...] = ()  # classes of demand for which a trace without models draws it
    beside: str = ""  # the job type of Gavel that stands for it where two jobs share a GPU

    @property
    def skew(self) -> float:
        return max(self.tensors_mib) / sum(self.tensors_mib) if self.tensors_mib else 0.0

    @property
    def state_gib(self) -> float:
        if self.tensors_mib:
            return STATE_PER_WEIGHT * sum(self.tensors_mib) / 1024
        return STATE_PER_WEIGHT * WEIGHT_BYTES * self.parameters / 2**30

    @property
    def model_class(self) -> int:
        return SKEWED if self.skew > SKEWED_ABOVE else BALANCED

    def compute_s(self, gpu_type: str) -> float:
        """The seconds of one iteration on one GPU of this type: as measured, or scaled from those of a V100."""
        known = self.step_s.get(gpu_type)
        return self.step_s[REFERENCE_GPU] / gpu_speeds()[gpu_type] if known is None else known


def facts_of(model: Model | None) -> tuple[float, float, float, float]:
    """Skew, GiB of state, GiB on each GPU and utilisation of a model, or what is assumed if it is not known."""
    if model is None:
        return 0.0, UNKNOWN_STATE_GIB, UNKNOWN_MEMORY_GIB, UNKNOWN_UTILISATION
    return model.skew, model.state_gib, model.memory_gib, model.utilisation


def _table(folder: str, name: str) -> list[dict[str, str]]:
    text = (files("thebes") / "data" / folder / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def catalogue() -> dict[str, Model]:
    """The nine CNNs whose tensor tables are known."""
    facts = {row["model"]: row for row in _table("models", "models.csv")}
    return {
        row["model"]: Model(
            row["model"],
            tuple(float(size) for size in row["tensors_mib"].split()),
            memory_gib=float(facts[row["model"]]["memory_gib"]),
            utilisation=float(facts[row["model"]]["utilisation"]),
        )
        for row in _table("tiresias", "tensors.csv")
    }


def assign(count: int, seed: int) -> list[str]:
    """One of the nine CNNs for each of `count` jobs, by the seed, because traces seldom say what was trained."""
    names = list(catalogue())
    chosen: NDArray[np.int64] = np.random.default_rng(seed).integers(len(names), size=count)
    return [names[i] for i in chosen]


@cache
def gpu_speeds() -> dict[str, float]:
    """GPU types with their speeds relative to a V100."""
    return {row["gpu_type"]: float(row["speed"]) for row in _table("models", "gpus.csv")}


def gpu_type_of(text: str, known: Sequence[str], where: str) -> str:
    """The known GPU type that a text means, as A100 for `a100-sxm4-80gb`; a type without measurements is refused."""
    asked = _bare(text)
    matches = [n for n in known if n.lower() == text.lower()] or [n for n in known if _bare(n) == asked]
    if not matches:
        raise UserError(f"{where} does not know GPU type '{text}'", hint=nearest(asked, known))
    return matches[0]


def _bare(gpu_type: str) -> str:
    """The name of a GPU type without vendor, socket and memory."""
    return re.split(r"[-_ ]", re.sub(r"^(nvidia|tesla)[-_ ]*", "", gpu_type.lower()))[0]


@cache
def large_catalogue() -> dict[str, Model]:
    """Every model whose size and step time are known, by its own name."""
    return {row["model"]: _large(row) for row in _table("models", "models.csv")}


def _large(row: dict[str, str]) -> Model:
    measured = {gpu: float(row[key]) / 1e3 for gpu, key in _MEASURED.items() if row[key]}
    if REFERENCE_GPU not in measured:
        if row["mfu"]:
            gflop = PASSES * float(row["gflop"]) * int(row["batch"])
            measured[REFERENCE_GPU] = gflop / (1e3 * REFERENCE_TFLOPS * float(row["mfu"]))
        else:
            gpu, step_s = next(iter(measured.items()))
            measured[REFERENCE_GPU] = step_s * gpu_speeds()[gpu]
    tensors = catalogue()[row["model"]].tensors_mib if row["model"] in catalogue() else ()
    return Model(
        row["model"],
        tensors,
        memory_gib=float(row["memory_gib"]),
        utilisation=float(row["utilisation"]),
        parameters=float(row["parameters_m"]) * 1e6,
        step_s=measured,
        gangs=tuple(row["gangs"].split()),
        beside=row["beside"],
    )


_MEASURED = {"V100": "v100_ms", "A100": "a100_ms", "H100": "h100_ms"}


@cache
def known_names() -> dict[str, Model]:
    """The large catalogue, by its own names and by those in published traces."""
    large, also = large_catalogue(), _table("models", "names.csv")
    return large | {row["name"]: replace(large[row["model"]], name=row["name"]) for row in also}


def batch_in(name: str) -> tuple[str, int | None]:
    """`ResNet-50 (batch size 64)`, as Gavel's traces write it -> (`ResNet-50`, 64)."""
    found = re.fullmatch(r"(.+?) \(batch size (\d+)\)", name)
    return (found[1], int(found[2])) if found else (name, None)


def gang_class(gpus: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each number of GPUs, its position in GANGS."""
    return np.searchsorted(np.array(_GANG_ENDS), gpus, side="left")


def assign_by_gang(gpus: NDArray[np.int64], seed: int, choices: Mapping[str, Sequence[str]]) -> list[str]:
    """A model for each job, by the seed, out of the list for its class of demand (`GANGS`)."""
    draws = np.random.default_rng(seed).random(len(gpus))
    lists = [choices[gang] for gang in GANGS]
    return [
        lists[at][int(draw * len(lists[at]))]
        for at, draw in zip(gang_class(gpus).tolist(), draws.tolist(), strict=True)
    ]
