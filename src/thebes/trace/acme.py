"""Acme (Shanghai AI Laboratory; Hu et al., NSDI'24; InternLM/AcmeTrace): LLM clusters Seren (Slurm) and Kalos
(Kubernetes).

`trace_seren.csv` and `trace_kalos.csv` share
job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time, duration,queue,gpu_time; Kalos adds
memory, fail_time and stop_time. Times carry a zone. `duration` is documented as end minus start, but in Kalos rows
it holds the queueing time too; so run times are computed from start and end where both are known, and the stated
column is kept as `stated_duration`.
"""

from __future__ import annotations

from dataclasses import replace

from thebes.trace.draft import Draft, count, draft_of_table
from thebes.trace.source import Source
from thebes.trace.table import parse

COLUMNS = ("job_id", "gpu_num", "type", "state", "submit_time", "start_time", "end_time", "duration")
CALLED = {"num_gpus": "gpu_num", "num_nodes": "node_num", "status": "state"}


def read(source: Source) -> Draft:
    table = parse(source)
    table.require(COLUMNS, "an Acme trace")
    stated = table.number("duration")
    ran = table.stamp("end_time") - table.stamp("start_time")
    duration = ran.zip_with(ran.is_not_null(), stated)
    differ = int(((duration - stated).abs() > 1.0).sum())
    notes = (
        (f"{count(differ, 'stated duration')} differed from end minus start; the difference is used.",)
        if differ
        else ()
    )
    columns = {
        "job_id": table.text("job_id"),
        "submit_time": table.stamp("submit_time"),
        "duration": duration,
        "num_gpus": table.number("gpu_num"),
        "user": table.text("user"),
        "status": table.text("state"),
    }
    if table.has("node_num"):
        columns["num_nodes"] = table.number("node_num")
    draft = draft_of_table(table, columns, called=CALLED, calendar=True, lenient=True, derived=True, notes=notes)
    return replace(draft, extras={**draft.extras, "stated_duration": stated})
