"""Alibaba openb 2023 (Weng et al., ATC'23; alibaba/clusterdata `cluster-trace-gpu-v2023`): a pod list with shared GPUs.

name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time;
seconds. A pod on one GPU may ask for a share of it (gpu_milli / 1000), so num_gpus is fractional here. Run time is
deletion minus scheduling; for pods that were never scheduled it is deletion minus creation, with a note. The
variant lists without times (multigpu50 and others) are bags of tasks for packing tests: they cannot be replayed and
lack the columns asked for here.
"""

from __future__ import annotations

from thebes.trace.draft import Draft, count, draft_of_table
from thebes.trace.source import Source
from thebes.trace.table import divided, parse

COLUMNS = ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time")
CALLED = {
    "job_id": "name",
    "submit_time": "creation_time",
    "num_gpus": "num_gpu",
    "gpu_type": "gpu_spec",
    "status": "pod_phase",
}


def read(source: Source) -> Draft:
    table = parse(source)
    table.require(COLUMNS, "an openb pod list")
    whole, share = table.number("num_gpu"), divided(table.number("gpu_milli"), 1000.0)
    created, scheduled = table.number("creation_time"), table.number("scheduled_time")
    waiting = scheduled.is_null()
    begun = scheduled.zip_with(~waiting, created)
    notes: tuple[str, ...] = ()
    if waiting.any():
        notes = (f"{count(int(waiting.sum()), 'pod')} never scheduled: run time is deletion minus creation.",)
    columns = {
        "job_id": table.text("name"),
        "submit_time": created,
        "duration": table.number("deletion_time") - begun,
        "num_gpus": share.zip_with(whole == 1.0, whole),
        "status": table.text("pod_phase"),
        "gpu_type": table.text("gpu_spec"),
    }
    return draft_of_table(table, columns, called=CALLED, lenient=True, derived=True, notes=notes)
