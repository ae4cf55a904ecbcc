"""Morphling / Rubick workloads (AlibabaPAI/reconfigurable-dl-scheduler): large models with an execution plan each.

name,submission_time,duration,application,num_gpus,num_cpus,bandwidth,exec_plan,steps,is_sla; seconds. The plan,
steps and service class are kept as extra columns.
"""

from __future__ import annotations

from thebes.trace.draft import Draft, draft_of_table
from thebes.trace.source import Source
from thebes.trace.table import parse

COLUMNS = ("name", "submission_time", "duration", "application", "num_gpus", "exec_plan")
CALLED = {"job_id": "name", "submit_time": "submission_time", "model": "application"}


def read(source: Source) -> Draft:
    table = parse(source)
    table.require(COLUMNS, "a Morphling workload")
    columns = {
        "job_id": table.text("name"),
        "submit_time": table.number("submission_time"),
        "duration": table.number("duration"),
        "num_gpus": table.number("num_gpus"),
        "model": table.text("application"),
    }
    return draft_of_table(table, columns, called=CALLED)
