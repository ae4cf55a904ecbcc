"""Muri's traces (Zhao et al., SIGCOMM'22; Rivendile/Muri `trace-data/*.csv`): Tiresias columns in milliseconds.

The jobs come from Philly virtual clusters; models, batch sizes and the time that each stage takes of one resource
(resource_time_0..2, milliseconds per iteration) were assigned by Muri's authors and are kept as extra columns.
"""

from __future__ import annotations

from thebes.trace.draft import Draft, draft_of_table
from thebes.trace.source import Source
from thebes.trace.table import divided, parse

COLUMNS = ("job_id", "num_gpu", "submit_time", "duration", "model_name", "iteration_time", "resource_time_0")
CALLED = {"num_gpus": "num_gpu", "model": "model_name"}


def read(source: Source) -> Draft:
    table = parse(source)
    table.require(COLUMNS, "a Muri trace")
    columns = {
        "job_id": table.text("job_id"),
        "submit_time": divided(table.number("submit_time"), 1000.0),
        "duration": divided(table.number("duration"), 1000.0),
        "num_gpus": table.number("num_gpu"),
        "model": table.text("model_name"),
    }
    return draft_of_table(table, columns, called=CALLED)
