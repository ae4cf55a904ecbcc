"""A site's own history: the export of `sacct` as a trace, and what really became of each job.

The reader of format `slurm` makes a trace of the same file. This one does more, for `thebes import sacct`: it keeps
when each job really started and ended, merges the records of a job that was requeued or preempted, uses Slurm's word
for when a job could have started at all (Eligible), and reads `sacct --json` too. Notes say what it changes or leaves
out; a line that cannot be right is an error, with its number.

Times are taken as they stand. `sacct` writes local time without a zone, in which one hour a year comes twice, so it is
best run with TZ=UTC in front.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from thebes.model.errors import UserError, nearest
from thebes.model.trace import Trace
from thebes.trace.draft import Draft, count, finish
from thebes.trace.slurm import IDS, gpus_of, run_time_of
from thebes.trace.source import Source, open_source, refuse_huge_lines, source_of
from thebes.trace.table import Table, blank_to_null

FIELDS = (
    "JobID", "Submit", "Eligible", "Start", "End", "ElapsedRaw", "State", "User", "Account", "Partition", "AllocTRES",
    "ReqTRES", "NNodes", "JobName",
)  # fmt: skip
EXPORT = f"TZ=UTC sacct -a -X -D -P -S 2024-01-01 -o {','.join(FIELDS)} > jobs.txt"
# An earlier record of a job in one of these states is a start that Slurm itself took back.
TAKEN_BACK = ("REQUEUED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
ALIVE = ("RUNNING", "SUSPENDED", "COMPLETING", "STOPPED")
TENANTS = ("account", "partition", "user")
EXAMPLES = 3
HOUR_S = 3600.0

Arrival = Literal["eligible", "submit"]
Requeued = Literal["last", "sum"]


@dataclass(frozen=True)
class History:
    """A trace, with the columns start_time, end_time, earlier_run_s and restarts; and every start, also those that were
    taken back: `runs` has job (row in the trace), start_s and end_s, on the trace's clock."""

    trace: Trace
    runs: pl.DataFrame
    complete: bool  # Start and End were in the file, so that what really happened is known

    def head(self, n: int) -> History:
        """The first `n` jobs."""
        return self.only(pl.int_range(len(self.trace), eager=True) < n)

    def only(self, kept: pl.Series) -> History:
        """The jobs for which `kept` is true."""
        places = (kept.cast(pl.Int64).cum_sum() - 1).set(~kept, -1)
        runs = self.runs.with_columns(places.gather(self.runs["job"]).alias("job")).filter(pl.col("job") >= 0)
        return replace(self, trace=replace(self.trace, jobs=self.trace.jobs.filter(kept)), runs=runs)


def read_history(
    path: str, *, arrival: Arrival = "eligible", requeued: Requeued = "last", tenant: str | None = None
) -> History:
    """What a site ran, from a file of `sacct -P` or `sacct --json`; `-` is standard input.

    `arrival`: a job arrives when it was submitted, or when Slurm says it was eligible (after its dependencies and
    --begin). `requeued`: the run time of a job with several starts is that of the last, or that of all together.
    """
    if tenant is not None and tenant not in TENANTS:
        raise UserError(f"--tenant: there is no '{tenant}'; {nearest(tenant, TENANTS)}")
    source = source_of("<stdin>", sys.stdin.buffer.read()) if path == "-" else open_source(path)
    table = _json_table(source) if source.data.lstrip()[:1] == b"{" else _table(source)
    notes: list[str] = []
    records = _records(table, notes)
    jobs, runs = _merged(records, notes, requeued)
    jobs = _never_started(jobs, notes)
    jobs = _arrivals(jobs, notes, arrival)
    _tell_states(jobs, notes)
    trace = finish(_draft(source, table, jobs, notes, tenant), "slurm")
    return _history(trace, jobs, runs, complete=table.has("Start") and table.has("End"))


# ------------------------------------------------------------------------------------------------------- the table


def _table(source: Source) -> Table:
    """All lines as text. A line with too few or too many cells is named, except for job names that contain a bar."""
    if source.is_parquet:
        raise UserError(f"{source.name}: this is Parquet, not what sacct writes.", hint=f"Export with: {EXPORT}")
    refuse_huge_lines(source)
    _refuse_other_forms(source)
    mark, names = source.delimiter, source.header
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UserError(f"{source.at(1)}: column '{doubled[0]}' occurs more than once.", hint=f"Export with: {EXPORT}")
    closed = source.first_line.endswith(mark)
    _refuse_ragged(source, len(names) + closed, mark, named_last=names[-1] == "JobName")
    places = [str(place) for place in range(len(names) + closed)]
    frame = pl.read_csv(
        mark.join(places).encode() + b"\n" + source.data[source.body_offset :],
        schema=dict.fromkeys(places, pl.String),
        separator=mark,
        quote_char=None,
        truncate_ragged_lines=True,
    ).select(places[: len(names)])
    frame.columns = list(names)
    numbers = pl.int_range(frame.height, eager=True)
    kept = frame.select(pl.any_horizontal(pl.all().is_not_null())).to_series()
    return Table(source, frame.filter(kept), numbers.filter(kept), mark, quoted=False)


def _refuse_other_forms(source: Source) -> None:
    body = source.data[source.body_offset :].lstrip()
    first = source.first_line
    if body[:6] == b"------":
        raise UserError(
            f"{source.name}: this is sacct's table for people, which cuts its cells off.",
            hint=f"Export with -P: {EXPORT}",
        )
    if not set(source.header) & {*IDS, "Submit", "State"}:
        lines = "is a job" if first[:1].isdigit() else f"is '{first[:60]}'"
        raise UserError(
            f"{source.name}: there is no header line of sacct; the first line {lines}.",
            hint=f"Leave out -n (--noheader). Export with: {EXPORT}",
        )
    if not body.strip():
        raise UserError(
            f"{source.name}: there is a header line but no job below it.",
            hint="sacct shows your own jobs since midnight: add -a for all users and -S 2024-01-01 for the time.",
        )


def _refuse_ragged(source: Source, width: int, mark: str, *, named_last: bool) -> None:
    body = np.frombuffer(source.data[source.body_offset :], np.uint8)
    ends = np.flatnonzero(body == ord("\n"))
    if not len(ends) or ends[-1] != len(body) - 1:
        ends = np.append(ends, len(body))
    lengths = np.diff(ends, prepend=-1)
    cells = np.diff(np.searchsorted(np.flatnonzero(body == ord(mark)), ends), prepend=0) + 1
    blank = (lengths <= 1) | ((lengths == 2) & (body[np.maximum(ends - 1, 0)] == ord("\r")))
    wrong = ~blank & ((cells < width) | ((cells > width) & (not named_last)))
    if not wrong.any():
        return
    place = int(np.argmax(wrong))
    line = source.data.count(b"\n", 0, source.body_offset) + place + 1
    many = cells[place] > width
    more = f" ({count(int(wrong.sum()), 'such line')} in all)" if wrong.sum() > 1 else ""
    raise UserError(
        f"{source.at(line)}: {cells[place]} values, but there are {width} columns{more}.",
        hint=f"A job name may contain '{mark}': put JobName last. Export with: {EXPORT}"
        if many
        else "The line is cut off. Export again, or remove it.",
    )


@dataclass(frozen=True)
class _JsonTable(Table):
    def locate(self, row: int) -> str:
        return f"job {int(self.records[row]) + 1} of the list"


def _json_table(source: Source) -> Table:
    """`sacct --json`, of data parser 0.0.38 to 0.0.41: times are numbers, or {"set", "infinite", "number"}."""
    try:
        listed = json.loads(source.data)["jobs"]
        rows = [_json_row(job) for job in listed]
    except json.JSONDecodeError as fault:
        raise UserError(
            f"{source.at(fault.lineno)}: not valid JSON ({fault.msg}).", hint="Export again with sacct --json."
        ) from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UserError(
            f"{source.name}: JSON, but not that of `sacct --json`.", hint=f"This form is always read: {EXPORT}"
        ) from None
    if not rows:
        raise UserError(f"{source.name}: the list of jobs is empty.", hint="Add -a for all users and -S for the time.")
    frame = pl.DataFrame(rows, schema=dict.fromkeys(FIELDS, pl.String))
    return _JsonTable(source, frame, pl.int_range(frame.height, eager=True))


def _json_row(job: Mapping[str, Any]) -> dict[str, str | None]:
    times, array, het = job["time"], job["array"], job.get("het") or {}
    own, task = _number(job["job_id"]), _number(array.get("task_id"))
    name = str(own)
    if _number(array.get("job_id")) and task is not None:
        name = f"{_number(array['job_id'])}_{task}"
    elif _number(het.get("job_id")):
        name = f"{_number(het['job_id'])}+{_number(het.get('job_offset')) or 0}"
    state = job["state"]["current"]
    text = {
        "JobID": name,
        "Submit": _number(times["submission"]),
        "Eligible": _number(times["eligible"]) or None,
        "Start": _number(times["start"]) or None,
        "End": _number(times["end"]) or None,
        "ElapsedRaw": _number(times["elapsed"]),
        "State": state[0] if isinstance(state, list) else state,
        "User": job.get("user") or (job.get("association") or {}).get("user"),
        "Account": job.get("account"),
        "Partition": job.get("partition"),
        "AllocTRES": _tres(job["tres"].get("allocated")),
        "ReqTRES": _tres(job["tres"].get("requested")),
        "NNodes": _number(job.get("allocation_nodes")) or None,
        "JobName": job.get("name"),
    }
    return {key: None if value is None else str(value) for key, value in text.items()}


def _number(value: Any) -> int | None:
    if isinstance(value, Mapping):
        return int(value["number"]) if value.get("set") and not value.get("infinite") else None
    return None if value is None else int(value)


def _tres(listed: Sequence[Mapping[str, Any]] | None) -> str | None:
    words = [
        f"{one['type']}{'/' + one['name'] if one.get('name') else ''}={_number(one['count'])}"
        for one in listed or ()
        if _number(one.get("count")) is not None
    ]
    return ",".join(words) or None


# ------------------------------------------------------------------------------------------------ records to jobs


def _records(table: Table, notes: list[str]) -> pl.DataFrame:
    """A row per record of a job, without steps, with numbers as numbers."""
    name = next((known for known in IDS if table.has(known)), IDS[0])
    table.require((name, "Submit"), "sacct output")
    ids = table.text(name)
    steps = ids.str.contains(".", literal=True).fill_null(False)
    if steps.any():
        notes.append(f"Skipped {count(int(steps.sum()), 'job step')}.")
        kept = replace(table, frame=table.frame.filter(~steps), records=table.records.filter(~steps))
        if kept.frame.height == 0:
            raise UserError(f"{table.source.name}: only job steps, no job.", hint=f"Export with: {EXPORT}")
        table, ids = kept, ids.filter(~steps)
    if ids.null_count():
        row = ids.is_null().arg_max() or 0
        raise UserError(
            f"{table.source.at(table.locate(row), name)}: the job has no id.", hint=f"Export with: {EXPORT}"
        )
    unknown = pl.Series([None], dtype=pl.Float64).new_from_index(0, len(ids))
    start, end = (table.stamp(one) if table.has(one) else unknown for one in ("Start", "End"))
    gpus, kinds, _ = gpus_of(table)
    elapsed, elapsed_column = run_time_of(table)
    _refuse_negative(table, elapsed, elapsed_column)
    if elapsed_column == "End":
        elapsed = elapsed.clip(0.0)
    names = table.text("JobName")
    frame = pl.DataFrame(
        {
            "id": ids,
            "submit": table.stamp("Submit"),
            "eligible": table.stamp("Eligible") if table.has("Eligible") else unknown,
            "start": start,
            "end": end,
            "elapsed": elapsed,
            "gpus": gpus,
            "nodes": table.number("NNodes") if table.has("NNodes") else unknown,
            "kinds": kinds,
            "state": table.text("State").str.split(" ").list.first().str.strip_chars_end("+").str.to_uppercase(),
            "user": table.text("User"),
            "account": table.text("Account"),
            "partition": table.text("Partition"),
            "job_name": names,
            "record": table.records,
        }
    )
    return _whole_gangs(frame, notes)


def _refuse_negative(table: Table, elapsed: pl.Series, column: str) -> None:
    below = (elapsed < 0).fill_null(False)
    if below.any() and column != "End":
        row = below.arg_max() or 0
        raise UserError(
            f"{table.source.at(table.locate(row), column)}: {elapsed[row]:g} is negative; it must be seconds of run "
            "time.",
            hint="Correct or remove the line.",
        )


def _whole_gangs(frame: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """The components of a heterogeneous job (12+0, 12+1) run together, so they become one job with all their GPUs."""
    parts = frame["id"].str.contains("+", literal=True)
    if not parts.any():
        return frame
    own = pl.col("id").str.replace(r"\+\d+$", "")
    whole = (
        frame.filter(parts)
        .with_columns(own)
        .group_by("id", "submit", "start", maintain_order=True)
        .agg(pl.col("gpus", "nodes").sum(), pl.exclude("gpus", "nodes").first())
        .select(frame.columns)
    )
    notes.append(
        f"{count(int(parts.sum()), 'component')} of heterogeneous jobs joined into {count(whole.height, 'job')}."
    )
    return pl.concat([frame.filter(~parts), whole]).sort("record")


def _merged(frame: pl.DataFrame, notes: list[str], requeued: Requeued) -> tuple[pl.DataFrame, pl.DataFrame]:
    """A row per job, and all starts. Several records of one id are one job that was started again. If the earlier one
    had ended by itself, they are two jobs: Slurm counts ids from the beginning when its state is lost."""
    frame = _ends(frame)
    if frame["id"].n_unique() == frame.height:
        jobs = frame.with_columns(pl.lit(0).alias("restarts"), pl.lit(0.0).alias("earlier"))
    else:
        # This is done by hand because .over("id") takes a minute for a million ids.
        same = (pl.col("id") == pl.col("id").shift(1)).fill_null(False)
        fresh = same & ~pl.col("state").is_in(TAKEN_BACK).fill_null(False).shift(1)
        lives = fresh.cast(pl.Int64).cum_sum()
        life = lives - pl.when(~same).then(lives).forward_fill()
        named = pl.when(pl.col("life") > 0).then(pl.format("{}#{}", "id", pl.col("life") + 1)).otherwise(pl.col("id"))
        frame = (
            frame.sort("id", "submit", "start", "record", nulls_last=True)
            .with_columns(life.alias("life"))
            .with_columns(named.alias("id"))
        )
        jobs = _one_row_each(frame, notes, requeued)
        again = int((frame["life"] > 0).sum())
        if again:
            notes.append(
                f"{count(again, 'record')} use the id of an earlier job that had ended: jobs of their own (#2)."
            )
    runs = frame.filter(pl.col("start").is_not_null() & pl.col("end").is_not_null()).select("id", "start", "end")
    return jobs, runs


def _one_row_each(frame: pl.DataFrame, notes: list[str], requeued: Requeued) -> pl.DataFrame:
    ran = pl.col("elapsed").filter(pl.col("elapsed") > 0)
    kept = [name for name in frame.columns if name not in ("id", "submit", "eligible", "start", "elapsed", "life")]
    jobs = (
        frame.group_by("id", maintain_order=True)
        .agg(
            pl.col("submit", "eligible").first(),
            pl.col("start").min(),
            *(pl.col(name).drop_nulls().last() for name in kept),
            (ran.sum() if requeued == "sum" else ran.last().fill_null(0.0)).alias("elapsed"),
            (pl.len() - 1).cast(pl.Int32).alias("restarts"),
            (ran.sum() if requeued == "last" else pl.lit(0.0)).alias("earlier"),
        )
        .with_columns(
            pl.col("earlier") - pl.col("elapsed") if requeued == "last" else pl.col("earlier"),
        )
        .sort("record")
    )
    merged = jobs.filter(pl.col("restarts") > 0)
    if merged.height:
        starts = int(merged["restarts"].sum())
        hours = float((merged["earlier"] * merged["gpus"].fill_null(0.0)).sum()) / HOUR_S
        told = (
            f"the run time is that of the last start, and {hours:,.1f} GPU-hours of earlier ones are not replayed"
            if requeued == "last"
            else "the run time is that of all starts together"
        )
        notes.append(
            f"{count(starts, 'earlier record')} of {count(merged.height, 'requeued or preempted job')} merged: {told}."
        )
    return jobs


def _ends(frame: pl.DataFrame) -> pl.DataFrame:
    """Ends as they must have been: now for a job that still runs, and by Elapsed where the clock was put back."""
    ended = pl.col("start") + pl.col("elapsed")
    return frame.with_columns(pl.when(pl.col("start").is_not_null()).then(pl.max_horizontal("end", ended)).alias("end"))


def _never_started(jobs: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    never = (pl.col("gpus").fill_null(0.0) > 0) & pl.col("start").is_null() & (pl.col("elapsed").fill_null(0.0) == 0.0)
    gone = jobs.filter(never) if jobs["start"].null_count() < jobs.height else jobs.head(0)
    if not gone.height:
        return jobs
    waits = int((gone["state"] == "PENDING").sum())
    parts = [(gone.height - waits, "cancelled"), (waits, "still waiting")]
    told = ", ".join(f"{number:,} {what}" for number, what in parts if number)
    ids = ", ".join(gone["id"].head(EXAMPLES)) + (", …" if gone.height > EXAMPLES else "")
    notes.append(f"Left out {count(gone.height, 'job')} that never started: {told} ({ids}).")
    return jobs.filter(~never)


def _arrivals(jobs: pl.DataFrame, notes: list[str], arrival: Arrival) -> pl.DataFrame:
    early = int((jobs["start"] < jobs["submit"]).fill_null(False).sum())
    later = int(((jobs["eligible"] > jobs["submit"] + 1.0) & (jobs["gpus"] > 0)).fill_null(False).sum())
    came = pl.max_horizontal("submit", "eligible") if arrival == "eligible" else pl.col("submit")
    if arrival == "eligible" and later:
        notes.append(
            f"{count(later, 'job')} could not start when submitted (dependencies, --begin, holds): they arrive when "
            "Slurm says they were eligible."
        )
    if early:
        notes.append(
            f"{count(early, 'job')} started before submission by the clock: they count as submitted at their start."
        )
    off = (jobs["end"] - jobs["start"] - jobs["elapsed"]).abs()
    shifted = int((off == HOUR_S).fill_null(False).sum())
    if shifted:
        notes.append(
            f"For {count(shifted, 'job')} Elapsed and End minus Start differ by exactly an hour: a change to or from "
            "summer time. TZ=UTC in front of sacct avoids it."
        )
    return jobs.with_columns(pl.min_horizontal(came, pl.col("start")).alias("arrival"))


def _tell_states(jobs: pl.DataFrame, notes: list[str]) -> None:
    ran = jobs.filter((pl.col("gpus") > 0) & (pl.col("elapsed") > 0))
    alive = int(ran["state"].is_in(ALIVE).sum())
    if alive:
        notes.append(f"{count(alive, 'job')} had not ended yet: counted as if they ended at the time of the export.")
    other = ran.filter(~pl.col("state").is_in(["COMPLETED", *ALIVE]) & pl.col("state").is_not_null())
    if other.height:
        kinds = other["state"].value_counts(sort=True).iter_rows()
        told = ", ".join(f"{state} {number:,}" for state, number in kinds)
        notes.append(f"{count(other.height, 'job')} did not complete ({told}): replayed for as long as they ran.")


# --------------------------------------------------------------------------------------------------- jobs to trace


def _draft(source: Source, table: Table, jobs: pl.DataFrame, notes: list[str], tenant: str | None) -> Draft:
    chosen = tenant or next((name for name in TENANTS[:2] if jobs[name].null_count() < jobs.height), "partition")
    owner = jobs[chosen]
    notes.append(f"Tenants are Slurm's {chosen}s.")
    columns = {
        "job_id": jobs["id"],
        "submit_time": jobs["arrival"],
        "duration": jobs["elapsed"],
        "num_gpus": jobs["gpus"],
        "user": jobs["user"],
        "vc": owner,
        "status": jobs["state"],
        "gpu_type": jobs["kinds"],
        "num_nodes": jobs["nodes"],
    }
    extras: dict[str, pl.Series] = {}
    for name in ("account", "partition", "job_name"):
        if name != chosen and jobs[name].null_count() < jobs.height:
            extras[name] = blank_to_null(jobs[name])
    extras |= {
        "start_time": jobs["start"],
        "end_time": jobs["end"],
        "earlier_run_s": jobs["earlier"],
        "restarts": jobs["restarts"],
        "arrived": jobs["arrival"],
    }
    records = jobs["record"]

    def locate(row: int) -> str:
        return replace(table, records=records).locate(row)

    called = {"job_id": "JobID", "submit_time": "Submit", "duration": "ElapsedRaw", "num_gpus": "AllocTRES"}
    return Draft(source, columns, extras, locate, called, calendar=True, lenient=True, notes=tuple(notes))


def _history(trace: Trace, jobs: pl.DataFrame, runs: pl.DataFrame, *, complete: bool) -> History:
    """The history on one clock, which begins with the first job."""
    origin = float(trace.jobs["arrived"][0]) - float(trace.jobs["submit_time"][0])
    frame = trace.jobs.with_columns(pl.col("start_time", "end_time") - origin).drop("arrived")
    places = pl.DataFrame({"id": frame["job_id"], "job": pl.int_range(frame.height, eager=True)})
    starts = runs.join(places, on="id", how="inner").select(
        "job", start_s=pl.col("start") - origin, end_s=pl.col("end") - origin
    )
    known = complete and frame["start_time"].null_count() == 0
    return History(replace(trace, jobs=frame), starts.sort("job", "start_s"), known)


# --------------------------------------------------------------------------------------------------- a cluster for it


def peak_gpus(history: History) -> int:
    """The most GPUs that were in use at one instant."""
    times, change = _changes(history)
    return int(np.cumsum(change).max()) if len(times) else int(history.trace.jobs["num_gpus"].max() or 0)  # type: ignore[arg-type]


def _changes(history: History) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    gpus = history.trace.jobs["num_gpus"].gather(history.runs["job"]).to_numpy()
    times = np.concatenate((history.runs["start_s"].to_numpy(), history.runs["end_s"].to_numpy()))
    change = np.concatenate((gpus, -gpus))
    order = np.lexsort((change, times))  # at one instant, ends make room before starts take it
    return times[order], change[order]


def guessed_cluster(history: History) -> tuple[int, int]:
    """(nodes, GPUs of each): as many GPUs as were ever in use at once, in nodes as large as the jobs suggest."""
    jobs = history.trace.jobs
    each = (jobs["num_gpus"] / jobs["num_nodes"].fill_null(1).clip(1)).filter(jobs["num_nodes"].is_not_null())
    size = int(np.ceil(each.max())) if len(each) else min(8, peak_gpus(history))  # type: ignore[arg-type]
    nodes = max(-(-peak_gpus(history) // size), int(jobs["num_nodes"].max() or 1))  # type: ignore[arg-type]
    return nodes, size
