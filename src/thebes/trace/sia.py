"""Workloads of Pollux and Sia (Jayaram Subramanya et al., SOSP'23; siasosp23/artifacts `workloads/*.csv`).

name,time,application,num_replicas,batch_size: submission in seconds, one GPU per replica, and no run time, since
their schedulers choose GPUs and batch size as they go. Here a run time is looked up in `data/sia_durations.csv`
(full training on T4 GPUs with the GPUs and batch size as asked, see its SOURCE), with straight lines between table
entries in log-log scale. A `duration` column that the user has added takes precedence.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from thebes.model.errors import UserError, nearest
from thebes.trace.draft import Draft, draft_of_table
from thebes.trace.shipped import data_table
from thebes.trace.source import Source
from thebes.trace.table import Table, parse

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
CALLED = {"job_id": "name", "submit_time": "time", "num_gpus": "num_replicas", "model": "application"}


def read(source: Source) -> Draft:
    table = parse(source)
    table.require(COLUMNS, "a Sia workload")
    stated = table.has("duration")
    notes = () if stated else ("Run times are full training on T4 GPUs as profiled by Pollux; the file has none.",)
    columns = {
        "job_id": table.text("name"),
        "submit_time": table.number("time"),
        "duration": table.number("duration") if stated else _durations(table),
        "num_gpus": table.number("num_replicas"),
        "model": table.text("application"),
    }
    return draft_of_table(table, columns, called=CALLED, notes=notes)


def _durations(table: Table) -> pl.Series:
    wanted = pl.DataFrame(
        {"app": table.text("application"), "batch": table.number("batch_size"), "gpus": table.number("num_replicas")}
    ).with_row_index("row")
    seconds = np.full(wanted.height, np.nan)
    for (app, batch), group in wanted.group_by("app", "batch"):
        rows, gpus = group["row"].to_numpy(), group["gpus"].fill_null(0.0).to_numpy()
        if not (gpus > 0.0).any():
            continue  # `draft` leaves such a job out, or refuses it, with its own message
        known = _profile(table, int(rows[0]), app, batch)
        x, y = np.log(known["num_gpus"].to_numpy()), np.log(known["duration_s"].to_numpy())
        seconds[rows] = np.exp(np.interp(np.log(np.maximum(gpus, 1e-9)), x, y)).round()
    return pl.Series("duration", seconds, nan_to_null=True)


def _profile(table: Table, row: int, app: object, batch: object) -> pl.DataFrame:
    profiles = data_table("sia_durations.csv")
    hint = "Add a `duration` column in seconds to the file."
    known = profiles.filter(pl.col("application") == str(app))
    if known.is_empty():
        names = profiles["application"].unique().to_list()
        where = table.source.at(table.locate(row), "application")
        raise UserError(f"{where}: no profile of '{app}'; {nearest(str(app), names)}", hint=hint)
    sizes = known["batch_size"].unique().sort().to_list()
    if batch not in sizes:
        where = table.source.at(table.locate(row), "batch_size")
        shown = "a blank" if batch is None else f"{batch:g}"
        raise UserError(
            f"{where}: '{app}' was not profiled at batch size {shown}, only at {', '.join(map(str, sizes))}.", hint=hint
        )
    return known.filter(pl.col("batch_size") == batch).sort("num_gpus")
