"""Alibaba PAI 2020 (Weng et al., NSDI'22; alibaba/clusterdata `cluster-trace-gpu-v2020`): tables without header lines.

`pai_task_table.csv`: job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type.
Each task is one gang here: inst_num instances of plan_gpu per cent of a GPU, so num_gpus = inst_num x plan_gpu /
100 is often fractional. The task table knows only when a task was launched. If `pai_job_table.csv` lies beside it
(job_name,inst_id,user,status, start_time,end_time), its start_time, which is the submission, and its user are taken
from there. Times are seconds from a hidden origin; a blank end_time means that the task still ran. A folder that holds
the tables is accepted in place of a file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl

from thebes.trace.draft import Draft, count, draft_of_table
from thebes.trace.source import Source, open_source
from thebes.trace.table import Table, divided, parse

TASK_COLUMNS = (
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
)
JOB_COLUMNS = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
TASK_TABLE, JOB_TABLE = "pai_task_table", "pai_job_table"
ENDINGS = (".csv", ".csv.gz")
CALLED = {"num_gpus": "plan_gpu", "submit_time": "start_time", "job_id": "job_name"}


def looks_like(source: Source) -> bool:
    """Whether a line has ten cells whose instances, times and plans are numbers or blank, or is the known header."""
    cells = [cell.strip() for cell in source.first_line.split(",")]
    if tuple(cells) == TASK_COLUMNS:
        return True
    return len(cells) == 10 and all(cells[:2]) and _numeric(cells[2]) and all(map(_blank_or_numeric, cells[4:9]))


def task_table_in(folder: Path) -> Path | None:
    """The path of the task table in a PAI folder, or None."""
    return next((folder / (TASK_TABLE + end) for end in ENDINGS if (folder / (TASK_TABLE + end)).is_file()), None)


def read(source: Source) -> Draft:
    tasks = _table(source, TASK_COLUMNS)
    tasks.require(TASK_COLUMNS, "a PAI task table")
    start = tasks.number("start_time")
    jobs = _job_table_beside(source)
    users, submitted, note = _from_jobs(tasks, jobs) if jobs else (None, None, _NO_JOBS)
    columns = {
        "job_id": tasks.text("job_name") + "/" + tasks.text("task_name").fill_null("task"),
        "submit_time": start if submitted is None else submitted.zip_with(submitted.is_not_null(), start),
        "duration": tasks.number("end_time") - start,
        "num_gpus": divided(tasks.number("inst_num") * tasks.number("plan_gpu"), 100.0),
        "status": tasks.text("status"),
        "gpu_type": tasks.text("gpu_type"),
    }
    if users is not None:
        columns["user"] = users
    draft = draft_of_table(tasks, columns, called=CALLED, lenient=True, derived=True, notes=(note,))
    return replace(draft, extras={**draft.extras, "job_name": tasks.text("job_name"), "start_time": start})


_NO_JOBS = "No pai_job_table beside the file: submission is taken as the start of the task, users are unknown."


def _table(source: Source, names: tuple[str, ...]) -> Table:
    headed = tuple(cell.strip() for cell in source.first_line.split(",")) == names
    return parse(source, delimiter=",") if headed else parse(source, delimiter=",", names=names)


def _job_table_beside(source: Source) -> Table | None:
    beside = source.path.with_name(source.path.name.replace(TASK_TABLE, JOB_TABLE))
    if beside.name == source.path.name:
        return None
    for path in (beside, beside.with_suffix(""), beside.with_name(beside.name + ".gz")):
        if JOB_TABLE in path.name and path.is_file():
            return _table(open_source(path), JOB_COLUMNS)
    return None


def _from_jobs(tasks: Table, jobs: Table) -> tuple[pl.Series, pl.Series, str]:
    known = pl.DataFrame(
        {"job_name": jobs.text("job_name"), "user": jobs.text("user"), "submitted": jobs.number("start_time")}
    ).unique("job_name", keep="first", maintain_order=True)
    joined = pl.DataFrame({"job_name": tasks.text("job_name")}).join(
        known, on="job_name", how="left", maintain_order="left"
    )
    found = int(joined["submitted"].is_not_null().sum())
    note = f"Submission and user of {count(found, 'task')} of {joined.height:,} from {jobs.source.path.name}."
    return joined["user"], joined["submitted"], note


def _numeric(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _blank_or_numeric(cell: str) -> bool:
    return not cell or _numeric(cell)
