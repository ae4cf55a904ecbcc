"""A workload: the jobs that people submitted, in the common columns that every reader produces.

The frame is the form for files, statistics and reports. The simulator turns it into flat arrays once, at its door.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import polars as pl

# Column order is the file order of our normalised CSV and Parquet. Blank (null) means unknown, never zero.
TRACE_SCHEMA: Mapping[str, pl.DataType] = {
    "job_id": pl.String(),
    "submit_time": pl.Float64(),  # seconds from the trace's own origin
    "duration": pl.Float64(),  # seconds of run time on the GPUs asked for, at full speed
    "num_gpus": pl.Float64(),  # whole numbers unless the trace shares GPUs
    "user": pl.String(),
    "vc": pl.String(),  # tenant: virtual cluster, partition, account
    "status": pl.String(),
    "gpu_type": pl.String(),  # allowed types joined by a bar
    "num_nodes": pl.Int64(),
    "model": pl.String(),  # what is trained, where the trace says so
}
REQUIRED_COLUMNS = ("job_id", "submit_time", "duration", "num_gpus")


@dataclass(frozen=True)
class Trace:
    """Jobs sorted by (submit_time, order in the file); `notes` tells the user what the reader had to change."""

    name: str  # as the user gave it, for reports
    jobs: pl.DataFrame  # TRACE_SCHEMA first, then the source's own extra columns
    format: str = "normalised"
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, name: str, columns: Mapping[str, Sequence[Any]]) -> Trace:
        """A trace from some of the columns, in order of submission; the others are unknown."""
        unknown = [
            pl.lit(None, dtype=kind).alias(other) for other, kind in TRACE_SCHEMA.items() if other not in columns
        ]
        return cls(name, pl.DataFrame(columns).with_columns(unknown))

    def __len__(self) -> int:
        return self.jobs.height

    def head(self, n: int) -> Trace:
        """The first `n` jobs to be submitted."""
        return replace(self, jobs=self.jobs.head(n))
