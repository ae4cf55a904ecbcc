"""What a reader hands over, and the one place where it becomes a `Trace`.

Every rule that holds for all formats lives here: which values are errors, which jobs are left out and noted, how
times are counted, in which order the rows and columns stand. A reader only says where its columns come from.

Some jobs are left out, with a note: jobs without GPUs, and jobs without a known positive run time (they never started,
still run, or did not end after their start). These are errors: a negative or impossible number that the source itself
states, and a blank or doubled id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import polars as pl

from thebes.model.errors import UserError, nearest
from thebes.model.trace import REQUIRED_COLUMNS, TRACE_SCHEMA, Trace
from thebes.trace.source import Source
from thebes.trace.table import Table

ROW = "__row"
LATEST_S = 1e11  # 3,000 years: a larger number is in milliseconds, or noise
MOST_GPUS = 1e7
EXAMPLES = 3


@dataclass(frozen=True)
class Draft:
    """Columns of the schema (absent ones are unknown) and the source's own, row by row as in the file."""

    source: Source
    columns: Mapping[str, pl.Series]
    extras: Mapping[str, pl.Series] = field(default_factory=dict)
    locate: Callable[[int], str] = lambda row: f"row {row + 1}"
    called: Mapping[str, str] = field(default_factory=dict)  # our column → its name in the source, for messages
    calendar: bool = False  # submit_time counts from 1970 and has to be moved to the first job
    lenient: bool = False  # a blank submit_time or num_gpus is normal in this source, and such jobs are left out
    derived: bool = False  # duration is a difference of two times: if negative, the log has a gap, and it is no error
    notes: tuple[str, ...] = ()


def draft_of_table(
    table: Table,
    columns: Mapping[str, pl.Series],
    *,
    called: Mapping[str, str] | None = None,
    calendar: bool = False,
    lenient: bool = False,
    derived: bool = False,
    notes: tuple[str, ...] = (),
) -> Draft:
    """A draft from a table. Columns that were not used (by name in `called`, or by our own name) become extras."""
    named = dict(called or {})
    used = set(named.values()) | {name for name in columns if name not in named}
    return Draft(table.source, columns, table.rest(used), table.locate, named, calendar, lenient, derived, notes)


def finish(
    draft: Draft, format_name: str, *, duration_column: str = "duration", gpus_column: str = "num_gpus"
) -> Trace:
    """Check the draft, leave jobs out, sort, and say in notes what was changed."""
    draft = _take_column(draft, "duration", duration_column)
    draft = _take_column(draft, "num_gpus", gpus_column)
    frame = _frame(draft)
    _refuse_bad_ids(draft, frame)
    _refuse_bad_numbers(draft, frame)
    notes = list(draft.notes)
    frame = _leave_out(frame, notes, lenient=draft.lenient)
    if frame.height == 0:
        raise UserError(
            f"{draft.source.name}: no job is left to schedule.",
            hint=" ".join(notes) or "Every job must have a submission time, a run time and at least one GPU.",
        )
    if draft.calendar:
        frame = _from_first_job(frame, notes)
    if not frame["submit_time"].is_sorted():
        frame = frame.sort("submit_time", maintain_order=True)
        notes.append("Jobs were not in order of submission; they are sorted now.")
    return Trace(draft.source.name, frame.drop(ROW), format_name, tuple(notes))


def count(number: int, noun: str) -> str:
    """A number with its noun, such as `1 job` or `2,000 jobs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _take_column(draft: Draft, ours: str, wanted: str) -> Draft:
    """Let the user choose the column that holds the durations (or GPUs), for traces that have several."""
    if wanted in (ours, draft.called.get(ours)):
        return draft
    if wanted not in draft.extras:
        names = [name for name, cells in draft.extras.items() if cells.dtype.is_numeric()]
        raise UserError(
            f"{draft.source.name}: there is no column '{wanted}' to take {ours} from; "
            f"{nearest(wanted, [ours, *names])}",
            hint=f"Leave the option away to use '{draft.called.get(ours, ours)}'.",
        )
    cells = draft.extras[wanted]
    if not cells.dtype.is_numeric():
        raise UserError(f"{draft.source.at(column=wanted)}: holds text, not the numbers that {ours} needs.")
    note = f"Column {ours} is taken from '{wanted}'."
    return replace(
        draft,
        columns={**draft.columns, ours: cells.cast(pl.Float64)},
        called={**draft.called, ours: wanted},
        derived=draft.derived and ours != "duration",
        notes=(*draft.notes, note),
    )


def _frame(draft: Draft) -> pl.DataFrame:
    height = len(draft.columns["job_id"])
    columns: list[pl.Series] = []
    for name, dtype in TRACE_SCHEMA.items():
        cells = draft.columns.get(name)
        if cells is None:
            columns.append(pl.Series(name, [None], dtype=dtype).new_from_index(0, height))
        else:
            columns.append(cells.cast(dtype, strict=False).rename(name))
    extras = [cells.rename(name) for name, cells in draft.extras.items() if name not in TRACE_SCHEMA and name != ROW]
    # Adding 0.0 turns -0.0 into 0.0, which would otherwise survive into files and comparisons.
    return pl.DataFrame([*columns, *extras, pl.int_range(height, eager=True).alias(ROW)]).with_columns(
        pl.col("submit_time", "duration", "num_gpus") + 0.0
    )


def _refuse_bad_ids(draft: Draft, frame: pl.DataFrame) -> None:
    ids, column = frame["job_id"], draft.called.get("job_id", "job_id")
    if ids.null_count():
        row = ids.is_null().arg_max() or 0
        raise UserError(
            f"{draft.source.at(draft.locate(row), column)}: the job has no id.",
            hint="Every job needs an id of its own.",
        )
    if ids.n_unique() == len(ids):
        return
    later = (~ids.is_first_distinct()).arg_max() or 0
    first = (ids == ids[later]).arg_max() or 0
    total = len(ids) - ids.n_unique()
    more = f" ({count(total, 'id')} repeated in all)" if total > 1 else ""
    raise UserError(
        f"{draft.source.at(draft.locate(later), column)}: id '{ids[later]}' was already used on "
        f"{draft.locate(first)}{more}.",
        hint="Ids must be unique: remove the repeated job or give it another id.",
    )


def _refuse_bad_numbers(draft: Draft, frame: pl.DataFrame) -> None:
    limits = {"submit_time": (-LATEST_S, LATEST_S), "duration": (0.0, LATEST_S), "num_gpus": (0.0, MOST_GPUS)}
    for name, (low, high) in limits.items():
        values, column = frame[name], draft.called.get(name, name)
        if values.null_count() and not draft.lenient and name != "duration":
            row = values.is_null().arg_max() or 0
            raise UserError(
                f"{draft.source.at(draft.locate(row), column)}: the value is missing.",
                hint=f"Every job needs {', '.join(REQUIRED_COLUMNS)}.",
            )
        below, above = (values < low).fill_null(False), (values > high).fill_null(False)
        if name == "duration" and draft.derived:
            below = below & False  # such jobs are left out below, with a note
        if below.any() or above.any():
            row = (below | above).arg_max() or 0
            raise _out_of_range(draft.source.at(draft.locate(row), column), name, float(values[row]))


def _out_of_range(where: str, name: str, value: float) -> UserError:
    shown = f"{value:.15g}"
    if value < 0:
        if name == "submit_time":
            return UserError(f"{where}: {shown} is not a plausible time.", hint="Times are seconds.")
        unit = "seconds of run time" if name == "duration" else "a number of GPUs"
        return UserError(f"{where}: {shown} is negative; it must be {unit}.", hint="Correct or remove the line.")
    if name == "num_gpus":
        return UserError(f"{where}: {shown} is not a plausible number of GPUs.", hint="Correct or remove the line.")
    return UserError(
        f"{where}: {shown} is not a plausible number of seconds.",
        hint="If the times are milliseconds, divide them by 1000.",
    )


def _leave_out(frame: pl.DataFrame, notes: list[str], *, lenient: bool) -> pl.DataFrame:
    """Drop jobs that cannot be scheduled, in a fixed order of reasons, so that each job is counted once."""
    rules: list[tuple[str, pl.Expr]] = [("without GPUs", pl.col("num_gpus").fill_null(0.0) == 0.0)]
    if lenient:
        rules.append(("without a submission time", pl.col("submit_time").is_null()))
    rules += [
        ("without a known run time", pl.col("duration").is_null()),
        ("that ran for 0 s", pl.col("duration") == 0.0),
        ("whose end precedes the start", pl.col("duration") < 0.0),
    ]
    for what, condition in rules:
        gone = frame.filter(condition)
        if gone.height:
            frame = frame.filter(~condition)
            ids = ", ".join(gone["job_id"].head(EXAMPLES))
            more = ", …" if gone.height > EXAMPLES else ""
            notes.append(f"Left out {count(gone.height, 'job')} {what} ({ids}{more}).")
    return frame


def _from_first_job(frame: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    first = frame["submit_time"].min()
    assert isinstance(first, float)
    try:
        stamp = datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d %H:%M:%S")
        notes.append(f"Times are seconds since the first job, {stamp}.")
    except (ValueError, OverflowError, OSError):  # the calendar does not have such a year
        notes.append("Times are seconds since the first job.")
    return frame.with_columns(pl.col("submit_time") - first)
