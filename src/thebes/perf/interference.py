"""Interference: how fast a job runs beside others on its node, and on its very GPUs.

Two jobs on one GPU each keep a part of their speed; the parts may add up to more than 1, since one job computes while
the other waits. Gavel measured them for every pair of its job types (OSDI'20). Jobs on one node compete for PCIe, host
memory and CPUs: Gandiva (OSDI'18) reports 19 % for two language models and nothing for ResNet-50 beside one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from thebes.model.errors import UserError, nearest
from thebes.model.parameters import parameter
from thebes.perf.measured import gavel_name
from thebes.perf.models import Model, known_names

SOURCES = ("utilisation", "gavel")
GPU_TYPES = ("K80", "P100", "V100")  # Gavel measured on these
LANGUAGE = "LM "  # how the names of Gavel's LSTM language models begin
# Two jobs that do not fit into a GPU's memory together page for ever. They crawl, so that a policy that packs notices.
PAGING_RATE = 0.05


@cache
def gavel_pairs() -> dict[str, dict[tuple[str, str], float]]:
    """GPU type -> (own job type, partner's) -> the part of its speed that the first keeps; 0 if the two do not fit."""
    table = pl.read_csv((files("thebes") / "data" / "profiles" / "gavel" / "pairs.csv.gz").read_bytes())
    pairs: dict[str, dict[tuple[str, str], float]] = {}
    for row in table.iter_rows(named=True):
        first, second = (gavel_name(row[f"model{i}"], row[f"batch_size{i}"] or 0) for i in (1, 2))
        feasible = row["rel1"] > 0 and row["rel2"] > 0
        rates = pairs.setdefault(row["gpu_type"], {})
        rates[first, second] = row["rel1"] if feasible else 0.0
        rates[second, first] = row["rel2"] if feasible else 0.0
    return pairs


def stand_in(model: Model | None) -> str:
    """The job type of Gavel that this model is, or that stands for it; empty if nothing is known of the model."""
    if model is None:
        return ""
    known = known_names().get(model.name)
    measured = (model.name, model.name) in gavel_pairs()["V100"]
    return model.name if measured else model.beside or (known.beside if known else "")


@dataclass(frozen=True)
class Interference:
    """What neighbours on a node or on a GPU cost."""

    name: ClassVar[str] = "interference"

    gpu: str = parameter(
        "utilisation", "jobs on one GPU: gavel for measured pairs, utilisation to add up how busy each keeps it"
    )
    gpu_type: str = parameter("V100", "the GPU on which Gavel's pairs were measured: V100, P100 or K80")
    pack_loss: float = parameter(
        0.05, "by utilisation: part of its speed that a job loses on a shared GPU, busy or not", low=0, high=0.99
    )
    node_loss: float = parameter(0.0, "part of its speed that a job loses per neighbour on its node", low=0, high=0.99)
    lm_loss: float = parameter(
        0.0, "part that a language model (LSTM) loses per language model on its node; 0.19 measured", low=0, high=0.99
    )

    def __post_init__(self) -> None:
        if self.gpu not in SOURCES:
            raise UserError(f"unknown interference.gpu '{self.gpu}'", hint=nearest(self.gpu, SOURCES))
        if self.gpu_type not in GPU_TYPES:
            raise UserError(f"unknown interference.gpu_type '{self.gpu_type}'", hint=nearest(self.gpu_type, GPU_TYPES))

    def node_rates(self, models: list[Model | None]) -> NDArray[np.float64]:
        """By [own model, neighbour's], the part of its speed that a job keeps beside one neighbour on its node."""
        if self.lm_loss == 0.0:  # the table of pairs tells which models are language models, but is not needed then
            return np.full((len(models), len(models)), 1.0 - self.node_loss)
        language = np.array([stand_in(model).startswith(LANGUAGE) for model in models])
        both = language[:, None] & language[None, :]
        return (1.0 - self.node_loss) * np.where(both, 1.0 - self.lm_loss, 1.0)

    def gpu_rates(self, models: list[Model | None]) -> NDArray[np.float64]:
        """By [own model, partner's], the part of its speed that a job keeps with one partner on its GPUs; never 0."""
        busy = np.array([1.0 if model is None else model.utilisation for model in models])
        rates = (1.0 - self.pack_loss) / np.maximum(1.0, busy[:, None] + busy[None, :])
        measured = self._measured(models)
        return np.where(np.isnan(measured), rates, np.maximum(measured, PAGING_RATE))

    def can_share(self, models: list[Model | None]) -> NDArray[np.bool_]:
        """By [one model, other model], whether two such jobs fit on one GPU, as far as pairs were measured."""
        return ~(self._measured(models) == 0.0)

    def _measured(self, models: list[Model | None]) -> NDArray[np.float64]:
        """Measured rates of all pairs; NaN where they are switched off or not known."""
        rates = np.full((len(models), len(models)), np.nan)
        if self.gpu == "gavel":
            pairs, names = gavel_pairs()[self.gpu_type], [stand_in(model) for model in models]
            for i, mine in enumerate(names):
                for j, other in enumerate(names):
                    rates[i, j] = pairs.get((mine, other), np.nan)
        return rates
