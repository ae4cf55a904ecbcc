"""Gavel's `.trace` files (Narayanan et al., OSDI'20; stanford-futuredata/gavel) and Shockwave's (Zheng et al.,
NSDI'23).

The files are tab-separated, without header and ids (the number of a line is used). There are three layouts, told apart
by the number of columns:
 7 (traces/msr): job_type, command, num_steps_arg, needs_data_dir, total_steps, arrival_time, scale_factor
10 (traces/physical_cluster): a working_dir after the command; at the end total_steps, scale_factor, priority, SLO,
   arrival_time
12 (Shockwave): total_steps, scale_factor, mode, priority, SLO, duration, arrival_time
scale_factor is the number of GPUs. Work is given in steps; seconds are steps divided by Gavel's V100 rate of the
job type (`data/gavel_steps_per_s.csv`), which restores the run times the traces were made from. Shockwave states
them itself.
"""

from __future__ import annotations

import polars as pl

from thebes.model.errors import UserError, nearest
from thebes.trace.draft import Draft, draft_of_table
from thebes.trace.shipped import data_table
from thebes.trace.source import Source
from thebes.trace.table import Table, parse

COMMAND = ("job_type", "command")
WORK = ("num_steps_arg", "needs_data_dir", "total_steps")
LAYOUTS: dict[int, tuple[str, ...]] = {
    7: (*COMMAND, *WORK, "arrival_time", "scale_factor"),
    10: (*COMMAND, "working_dir", *WORK, "scale_factor", "priority", "slo", "arrival_time"),
    12: (*COMMAND, "working_dir", *WORK, "scale_factor", "mode", "priority", "slo", "stated_duration", "arrival_time"),
}
CALLED = {"submit_time": "arrival_time", "num_gpus": "scale_factor", "model": "job_type"}

NOTE = "Run times are steps over Gavel's V100 rates."


def looks_like(source: Source) -> bool:
    cells = source.first_line.split("\t")
    return len(cells) in LAYOUTS and "python" in cells[1]


def read(source: Source) -> Draft:
    width = source.first_line.count("\t") + 1
    if width not in LAYOUTS:
        raise UserError(
            f"{source.at(1)}: {width} tab-separated columns; Gavel traces have 7, 10 or 12.",
            hint="Check that tabs were not turned into spaces.",
        )
    table = parse(source, delimiter="\t", names=LAYOUTS[width], quoted=False)
    duration = table.number("stated_duration") if width == 12 else _seconds(table, "msr" if width == 7 else "physical")
    columns = {
        "job_id": pl.int_range(table.frame.height, eager=True).cast(pl.String),
        "submit_time": table.number("arrival_time"),
        "duration": duration,
        "num_gpus": table.number("scale_factor"),
        "model": table.text("job_type"),
    }
    if width == 12:
        return draft_of_table(table, columns, called={**CALLED, "duration": "stated_duration"})
    return draft_of_table(table, columns, called={**CALLED, "duration": "total_steps"}, notes=(NOTE,))


def _seconds(table: Table, traces: str) -> pl.Series:
    """Steps divided by rate. The msr traces use a rate per job type, the others one per job type and number of GPUs."""
    rates = data_table("gavel_steps_per_s.csv").filter(pl.col("traces") == traces).drop("traces")
    work = pl.DataFrame(
        {
            "job_type": table.text("job_type"),
            "num_gpus": table.number("scale_factor").cast(pl.Int64, strict=False),
            "steps": table.number("total_steps"),
        }
    )
    if traces == "msr":
        joined = work.join(rates.drop("num_gpus"), on="job_type", how="left", maintain_order="left")
    else:
        joined = work.join(rates, on=["job_type", "num_gpus"], how="left", maintain_order="left")
    unknown = joined["steps_per_s"].is_null() & (work["num_gpus"].fill_null(0) != 0)
    if unknown.any():
        row = unknown.arg_max() or 0
        job_type, gpus = work["job_type"][row], work["num_gpus"][row]
        where = table.source.at(table.locate(row), "job_type")
        if job_type in rates["job_type"]:
            raise UserError(
                f"{where}: Gavel has no V100 rate for '{job_type}' on {gpus} GPUs.",
                hint="Convert the trace to a normalised CSV with a duration column.",
            )
        raise UserError(
            f"{where}: Gavel has no V100 rate for '{job_type}'; {nearest(str(job_type), rates['job_type'].unique())}",
            hint="Convert the trace to a normalised CSV with a duration column.",
        )
    return (joined["steps"] / joined["steps_per_s"]).round(3)
