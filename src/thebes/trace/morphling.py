"""Morphling / Rubick workloads (AlibabaPAI/reconfigurable-dl-scheduler): large models with an execution plan each.

name,submission_time,duration,application,num_gpus,num_cpus,bandwidth,exec_plan,steps,is_sla; seconds. Plan, CPUs and
service class become the columns that performance model `plans` reads. The digits of a plan are pipeline, tensor and
data parallel sizes: optimiser times measured for them fall with the product of the first two.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

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
    draft = draft_of_table(table, columns, called=CALLED)
    extras = dict(draft.extras)
    extras["plan"] = pl.Series("plan", [_plan(text) for text in table.text("exec_plan").to_list()], dtype=pl.String)
    if table.has("num_cpus"):
        extras["cpus"] = (table.number("num_cpus") // columns["num_gpus"]).cast(pl.Int64, strict=False).alias("cpus")
    if table.has("is_sla"):
        extras["guaranteed"] = table.number("is_sla").cast(pl.Int64, strict=False).alias("guaranteed")
    return replace(draft, extras=extras)


def _plan(text: str | None) -> str | None:
    """A plan in our words: `244` is dp4+tp4+pp2, `ga` is data parallel, `gc` is data parallel with checkpointing."""
    if text and len(text) == 3 and text.isdigit():
        pp, tp, dp = text
        return f"dp{dp}" + f"+tp{tp}" * (tp != "1") + f"+pp{pp}" * (pp != "1")
    return {"ga": "dp", "gc": "dp+gc"}.get(text or "", text)
