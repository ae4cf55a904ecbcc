"""ElasticFlow's traces (Gu et al., ASPLOS'23; pkusys/ElasticFlow): Philly jobs with assigned models and deadlines.

job_id,submit_time,real_iteration,model_name,ddl,batch_size,num_gpu,real_duration,duration,iteration; seconds.
`duration` is the run time on the GPUs asked for; `ddl` (deadline, seconds on the clock of the trace) and the rest
are kept as extras.
"""

from __future__ import annotations

from thebes.trace.draft import Draft, draft_of_table
from thebes.trace.source import Source
from thebes.trace.table import parse

COLUMNS = ("job_id", "submit_time", "duration", "num_gpu", "model_name", "ddl")
CALLED = {"num_gpus": "num_gpu", "model": "model_name"}


def read(source: Source) -> Draft:
    table = parse(source)
    table.require(COLUMNS, "an ElasticFlow trace")
    columns = {
        "job_id": table.text("job_id"),
        "submit_time": table.number("submit_time"),
        "duration": table.number("duration"),
        "num_gpus": table.number("num_gpu"),
        "model": table.text("model_name"),
    }
    return draft_of_table(table, columns, called=CALLED)
