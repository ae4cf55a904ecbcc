"""Traces are written as CSV, gzipped CSV or Parquet, by the ending of the name. What is written reads back the same.

Whole numbers are written without a decimal point and gzip carries no time, so that equal traces give equal bytes.
"""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import polars as pl

from thebes.model.errors import UserError
from thebes.model.trace import Trace

ENDINGS = (".csv", ".csv.gz", ".parquet")


def write(trace: Trace, path: str | Path) -> None:
    """Write `trace` in our normalised form: first the columns of the schema, then the extras."""
    place = Path(path)
    ending = next((end for end in reversed(ENDINGS) if place.name.endswith(end)), None)
    if ending is None:
        raise UserError(
            f"{path}: cannot tell the format to write from this name.", hint=f"End it in {', '.join(ENDINGS)}."
        )
    frame = trace.jobs if ending == ".parquet" else trace.jobs.with_columns(_plain_whole_numbers(trace.jobs))
    buffer = io.BytesIO()
    if ending == ".parquet":
        frame.write_parquet(buffer)
    else:
        frame.write_csv(buffer)
    data = buffer.getvalue()
    if ending == ".csv.gz":
        data = gzip.compress(data, mtime=0)
    try:
        place.write_bytes(data)
    except OSError as failure:
        raise UserError(
            f"{path}: cannot be written: {failure.strerror or failure}.",
            hint="Check that the folder exists and is yours.",
        ) from None


def _plain_whole_numbers(frame: pl.DataFrame) -> list[pl.Series]:
    """Float columns of the schema as integers if every value is whole, so that files have `12`, not `12.0`."""
    columns = [frame[name] for name in ("submit_time", "duration", "num_gpus")]
    return [cells.cast(pl.Int64) for cells in columns if (cells == cells.round()).all()]
