"""Job traces of the Tiresias simulator (Gu et al., NSDI'19; SymbioticLab/Tiresias `simulator/*_job.csv`).

Times are seconds. `60_job.csv` has job_id,num_gpu,submit_time,iterations,model_name,duration,interval; the older
`tf_job.csv` has start_time,model_size,aggr_interval,model_scale instead (and, as released, the same job twice,
which is refused like any doubled id). Chronus published traces with the same columns and soft deadlines after them;
there the unit of time is not documented.
"""

from __future__ import annotations

from thebes.trace.draft import Draft, draft_of_table
from thebes.trace.source import Source
from thebes.trace.table import parse

COLUMNS = ("job_id", "num_gpu", "submit_time", "duration", "model_name")
CALLED = {"num_gpus": "num_gpu", "model": "model_name"}
CHRONUS = "expect_time_list"


def read(source: Source) -> Draft:
    table = parse(source)
    table.require(COLUMNS, "a Tiresias trace")
    notes: tuple[str, ...] = ()
    if table.has(CHRONUS):
        notes = ("This is a Chronus workload: its times are probably minutes; they are read as they stand.",)
    columns = {
        "job_id": table.text("job_id"),
        "submit_time": table.number("submit_time"),
        "duration": table.number("duration"),
        "num_gpus": table.number("num_gpu"),
        "model": table.text("model_name"),
        "user": table.text("user"),
    }
    return draft_of_table(table, columns, called=CALLED, notes=notes)
