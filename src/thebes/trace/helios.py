"""Helios (SenseTime; Hu et al., SC'21; S-Lab-System-Group/HeliosData): one `cluster_log.csv` per cluster, from Slurm.

job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue. Times are local calendar
times without zone; `duration` and `queue` are seconds. Half of the original rows are CPU jobs (gpu_num 0).
"""

from __future__ import annotations

from thebes.trace.draft import Draft, draft_of_table
from thebes.trace.source import Source
from thebes.trace.table import parse

COLUMNS = ("job_id", "gpu_num", "state", "submit_time", "duration")
CALLED = {"num_gpus": "gpu_num", "num_nodes": "node_num", "status": "state"}


def read(source: Source) -> Draft:
    table = parse(source)
    table.require(COLUMNS, "a Helios cluster log")
    columns = {
        "job_id": table.text("job_id"),
        "submit_time": table.stamp("submit_time"),
        "duration": table.number("duration"),
        "num_gpus": table.number("gpu_num"),
        "user": table.text("user"),
        "vc": table.text("vc"),
        "status": table.text("state"),
    }
    if table.has("node_num"):
        columns["num_nodes"] = table.number("node_num")
    return draft_of_table(table, columns, called=CALLED, calendar=True, lenient=True)
