"""Alibaba spot GPU trace 2026 (alibaba/clusterdata `cluster-trace-v2026-spot-gpu`, `job_info_df.csv`).

`job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type`; seconds. A job
asks for gpu_request GPUs on each of worker_num workers; job_type is HP (guaranteed) or Spot.
"""

from __future__ import annotations

from thebes.trace.draft import Draft, draft_of_table
from thebes.trace.source import Source
from thebes.trace.table import parse

COLUMNS = ("job_name", "gpu_request", "worker_num", "submit_time", "duration", "job_type")
CALLED = {"job_id": "job_name", "vc": "organization", "gpu_type": "gpu_model", "num_gpus": "gpu_request"}


def read(source: Source) -> Draft:
    table = parse(source)
    table.require(COLUMNS, "an Alibaba spot trace")
    columns = {
        "job_id": table.text("job_name"),
        "submit_time": table.number("submit_time"),
        "duration": table.number("duration"),
        "num_gpus": table.number("gpu_request") * table.number("worker_num"),
        "vc": table.text("organization"),
        "gpu_type": table.text("gpu_model"),
    }
    return draft_of_table(table, columns, called=CALLED)
