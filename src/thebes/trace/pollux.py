"""Pollux's Philly list (Qiao et al., OSDI'21; petuum/adaptdl `simulator/traces/philly.csv`).

timestamp,duration,num_gpus,gpu_time,cluster: calendar times without zone, seconds, GPU-seconds, virtual cluster.
Jobs have no id (the row number is used) and are not in order of time.
"""

from __future__ import annotations

import polars as pl

from thebes.trace.draft import Draft, draft_of_table
from thebes.trace.source import Source
from thebes.trace.table import parse

COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")
CALLED = {"submit_time": "timestamp", "vc": "cluster"}


def read(source: Source) -> Draft:
    table = parse(source)
    table.require(COLUMNS, "a Pollux trace")
    columns = {
        "job_id": pl.int_range(table.frame.height, eager=True).cast(pl.String),
        "submit_time": table.stamp("timestamp"),
        "duration": table.number("duration"),
        "num_gpus": table.number("num_gpus"),
        "vc": table.text("cluster"),
    }
    return draft_of_table(table, columns, called=CALLED, calendar=True)
