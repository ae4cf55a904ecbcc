"""Slurm accounting as `sacct -P` prints it, which any Slurm site can export today.

    sacct -a -X -P -S 2024-01-01 -o
JobID,Submit,Start,End,ElapsedRaw,State,User,Account,Partition,AllocTRES,NNodes,JobName

There is one line per job, with cells separated by `|`, and a header line with any of these fields in any order. GPUs
are gres/gpu in AllocTRES, or in ReqTRES where nothing was allocated; typed counts (gres/gpu:a100=8) tell the GPU type
and are not added to the total twice. Run time is ElapsedRaw, or Elapsed, or End minus Start. Job steps (123.batch,
123.0) are skipped; array tasks (12_3) are jobs; of a requeued job (`sacct -D`) the last record counts. `vc` is the
partition. Times are local and without zone.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from thebes.model.errors import UserError
from thebes.trace.draft import Draft, count, draft_of_table
from thebes.trace.source import Source
from thebes.trace.table import BLANK_WORDS, Table, parse

IDS = ("JobID", "JobIDRaw")
TRES = ("AllocTRES", "ReqTRES", "AllocGRES", "ReqGRES")  # the last two are from before Slurm 21.08
RUN_TIME = ("ElapsedRaw", "Elapsed", "Start and End")
EXPORT = (
    "sacct -a -X -P -o JobID,Submit,Start,End,ElapsedRaw,State,User,Account,Partition,AllocTRES,ReqTRES,NNodes,JobName"
)
CALLED = {"submit_time": "Submit", "user": "User", "vc": "Partition", "status": "State", "num_nodes": "NNodes"}
# TRES write `gres/gpu=4` and `gres/gpu:a100=4`; the older GRES fields write `gpu:4` and `gpu:a100:4`.
GPUS = r"(?:^|,)(?:gres/gpu=|(?:gres:)?gpu:)([0-9]+)(?:[,(]|$)"
TYPED_GPUS = r"(?:^|,)(?:gres/|gres:)?gpu:([^=,:]+)[=:]([0-9]+)"
DAYS = r"^(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)$"


def looks_like(source: Source) -> bool:
    names = set(source.header)
    return bool(names & set(IDS)) and bool(names & {"Submit", "State", *TRES})


def read(source: Source) -> Draft:
    table = parse(source, quoted=False)
    id_column = next((name for name in IDS if table.has(name)), IDS[0])
    table.require((id_column, "Submit"), "sacct output")
    table, notes = _jobs_only(table, id_column)
    gpus, kinds, gpu_column = gpus_of(table)
    duration, duration_column = run_time_of(table)
    state = table.text("State").str.split(" ").list.first()
    running = int((state == "RUNNING").sum())
    if running:
        notes.append(f"{count(running, 'job')} still running: the run time is what had passed.")
    columns = {
        "job_id": table.text(id_column),
        "submit_time": table.stamp("Submit"),
        "duration": duration,
        "num_gpus": gpus,
        "user": table.text("User"),
        "vc": table.text("Partition"),
        "status": state,
        "gpu_type": kinds,
    }
    if table.has("NNodes"):
        columns["num_nodes"] = table.number("NNodes")
    called = {**CALLED, "job_id": id_column, "num_gpus": gpu_column, "duration": duration_column}
    draft = draft_of_table(
        table,
        columns,
        called=called,
        calendar=True,
        lenient=True,
        derived=duration_column == "End",
        notes=tuple(notes),
    )
    return replace(draft, extras={snake(name): cells for name, cells in draft.extras.items()})


def _jobs_only(table: Table, id_column: str) -> tuple[Table, list[str]]:
    ids, notes = table.text(id_column), []
    keep = ~ids.str.contains(".", literal=True).fill_null(False)
    steps = len(ids) - int(keep.sum())
    if steps:
        notes.append(f"Skipped {count(steps, 'job step')}.")
    last = ids.is_last_distinct() | ids.is_null()
    requeued = int((keep & ~last).sum())
    if requeued:
        notes.append(f"{count(requeued, 'earlier record')} of requeued jobs dropped; the last one counts.")
    keep = keep & last
    kept = Table(
        table.source,
        table.frame.filter(keep),
        table.records.filter(keep),
        table.delimiter,
        table.quoted,
        table.headless,
    )
    if kept.frame.height == 0:
        raise UserError(f"{table.source.name}: only job steps, no job.", hint=f"Export with: {EXPORT}")
    return kept, notes


def gpus_of(table: Table) -> tuple[pl.Series, pl.Series, str]:
    """GPUs of each job, their types, and the name of the column that counts most."""
    present = [name for name in TRES if table.has(name)]
    if not present:
        raise UserError(
            f"{table.source.at(1)}: missing column 'AllocTRES' (or 'ReqTRES'), which tells the GPUs of a job.",
            hint=f"Export with: {EXPORT}",
        )
    tres = table.text(present[0])
    for name in present[1:]:
        tres = tres.zip_with(tres.is_not_null(), table.text(name))
    times = _nodes_counted(table, present)
    total = tres.str.extract(GPUS).cast(pl.Float64, strict=False)
    typed = pl.DataFrame({"tres": tres}).select(
        kinds=pl.col("tres").str.extract_all(TYPED_GPUS).list.eval(pl.element().str.extract(TYPED_GPUS, 1)),
        counts=pl.col("tres")
        .str.extract_all(TYPED_GPUS)
        .list.eval(pl.element().str.extract(TYPED_GPUS, 2).cast(pl.Float64, strict=False)),
    )
    by_type = typed["counts"].list.sum()
    kinds = typed["kinds"].list.unique(maintain_order=True).list.join("|")
    return total.zip_with(total.is_not_null(), by_type) * times, kinds.set(kinds == "", None), present[0]


def _nodes_counted(table: Table, present: list[str]) -> pl.Series:
    """The factor of each count: ReqGRES is what was asked for on each node, the other columns count in all."""
    ones = pl.repeat(1.0, table.frame.height, eager=True)
    if "ReqGRES" not in present or not table.has("NNodes"):
        return ones
    asked = table.text("ReqGRES").is_not_null()
    for name in present[:-1]:
        asked = asked & table.text(name).is_null()
    return table.number("NNodes").fill_null(1.0).zip_with(asked, ones)


def run_time_of(table: Table) -> tuple[pl.Series, str]:
    """Run times in seconds, and the column they come from."""
    if table.has("ElapsedRaw"):
        return table.number("ElapsedRaw"), "ElapsedRaw"
    if table.has("Elapsed"):
        return _clock(table, "Elapsed"), "Elapsed"
    if table.has("Start") and table.has("End"):
        return table.stamp("End") - table.stamp("Start"), "End"
    raise UserError(
        f"{table.source.at(1)}: no run time; sacct output needs one of {', '.join(RUN_TIME)}.",
        hint=f"Export with: {EXPORT}",
    )


def _clock(table: Table, name: str) -> pl.Series:
    """A duration written as `[days-][hours:]minutes:seconds`, in seconds."""
    text = table.text(name)
    text = text.set(text.str.to_lowercase().is_in(BLANK_WORDS).fill_null(False), None)
    parts = [text.str.extract(DAYS, group).cast(pl.Float64, strict=False) for group in (1, 2, 3, 4)]
    days, hours, minutes, seconds = parts
    total = days.fill_null(0.0) * 86400 + hours.fill_null(0.0) * 3600 + minutes * 60 + seconds
    bad = text.is_not_null() & total.is_null()
    if bad.any():
        row = bad.arg_max() or 0
        raise UserError(
            f"{table.source.at(table.locate(row), name)}: '{str(text[row])[:40]}' is not a run time.",
            hint="Slurm writes [days-]hours:minutes:seconds.",
        )
    return total


def snake(name: str) -> str:
    """`JobName` → `job_name`, `ReqTRES` → `req_tres`: extra columns are written like our own."""
    letters = [
        "_" + letter if letter.isupper() and place and name[place - 1].islower() else letter
        for place, letter in enumerate(name)
    ]
    return "".join(letters).lower()
