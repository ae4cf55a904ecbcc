"""The small data files that ship with the package. Beside each lies a `.SOURCE.md` with its origin and licence."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

import polars as pl


def data_path(name: str) -> Path:
    return Path(str(files("thebes"))) / "data" / name


def sample_path() -> Path:
    """The Philly sample of the demo: one virtual cluster, fit for 64 GPUs."""
    return data_path("philly_sample.csv.gz")


# Traces that can be named in place of a file.
SAMPLES = {
    "philly-sample": "philly_sample.csv.gz",
    "philly-small-jobs": "philly_small_jobs.csv.gz",
    "philly-three-tenants": "philly_three_tenants.csv.gz",
    "helios-sample": "helios_sample.csv.gz",
    "elastic-sample": "elastic_sample.csv.gz",
    "rubick-406": "rubick_406.csv.gz",
    "rubick-406-bp": "rubick_406_bp.csv.gz",
}


def shipped_or_given(name: str | Path) -> Path:
    """The file behind the name of a shipped trace, unless a file of that name exists; any other path as it is."""
    if str(name) in SAMPLES and not Path(name).exists():
        return data_path(SAMPLES[str(name)])
    return Path(name)


@cache
def data_table(name: str) -> pl.DataFrame:
    return pl.read_csv(data_path(name))
