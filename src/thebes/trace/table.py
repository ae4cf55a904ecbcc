"""A table of text, with or without a header, whose cells are turned into numbers and times, with exact complaints.

Polars parses in bulk and never tells a line number. So the bulk path stays fast and, only when something is wrong, the
line is found by walking the file again. A Parquet file becomes the same kind of table, with typed columns.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import polars as pl

from thebes.model.errors import UserError
from thebes.trace.source import Source, refuse_huge_lines

# What tools write for "no value", compared in lower case.
BLANK_WORDS = ("", "none", "null", "nat", "n/a", "na", "unknown", "-")
POLARS_FAILURES = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError, OverflowError)


@dataclass(frozen=True)
class Table:
    """Cells as text (CSV) or typed (Parquet). `records` maps a row to its record in the file, blank lines counted."""

    source: Source
    frame: pl.DataFrame
    records: pl.Series
    delimiter: str = ","
    quoted: bool = True
    headless: bool = False

    @property
    def columns(self) -> list[str]:
        return self.frame.columns

    def require(self, names: Iterable[str], what: str) -> None:
        """Stop with the missing columns and, for each of them, the existing name that comes closest."""
        missing = [name for name in names if name not in self.columns]
        if not missing:
            return
        spare = [name for name in self.columns if name]
        parts = []
        for name in missing:
            close = get_close_matches(name, spare, n=1, cutoff=0.6)
            parts.append(f"'{name}'" + (f" (did you mean '{close[0]}'?)" if close else ""))
        plural = "s" if len(missing) > 1 else ""
        found = ", ".join(spare[:20]) + (", …" if len(spare) > 20 else "")
        raise UserError(
            f"{self.source.at(None if self.source.is_parquet else 1)}: missing column{plural} {', '.join(parts)} "
            f"for {what}.",
            hint=f"The file has: {found}. Rename or add the column{plural}.",
        )

    def has(self, name: str) -> bool:
        return name in self.columns

    def text(self, name: str) -> pl.Series:
        """Cells without surrounding space; blank cells are null. A column that is not there is all null."""
        if name not in self.columns:
            return pl.Series(name, [None] * self.frame.height, dtype=pl.String)
        return blank_to_null(self.frame[name])

    def number(self, name: str) -> pl.Series:
        """Finite numbers; blank cells are null; anything else stops with its line."""
        cells = self.frame[name]
        if cells.dtype.is_numeric():
            values = cells.cast(pl.Float64)
            bad = values.is_not_null() & ~values.is_finite()
        else:
            text = self.text(name)
            values = text.cast(pl.Float64, strict=False)
            bad = text.is_not_null() & ~(values.is_finite().fill_null(False))
            if bad.any():  # blanks that are spelled out are rare, so they are looked for only now
                spelled = text.str.to_lowercase().is_in(BLANK_WORDS).fill_null(False)
                values = values.set(spelled, None)
                bad = bad & ~spelled
        if bad.any():
            row = bad.arg_max() or 0
            raise UserError(
                f"{self.source.at(self.locate(row), name)}: '{_short(cells[row])}' is not a number.",
                hint="Correct the value, or remove the line.",
            )
        return values.rename(name)

    def stamp(self, name: str) -> pl.Series:
        """Calendar times as seconds since 1970; bare numbers are taken as such seconds; blank words are null."""
        cells = self.frame[name]
        if cells.dtype.is_temporal():
            return divided(cells.cast(pl.Datetime("us"), strict=False).dt.epoch("us"), 1e6)
        text = self.text(name)
        text = text.set(text.str.to_lowercase().is_in(BLANK_WORDS).fill_null(False), None)
        seconds = epoch_seconds(text)
        bad = text.is_not_null() & seconds.is_null()
        if bad.any():
            row = bad.arg_max() or 0
            raise UserError(
                f"{self.source.at(self.locate(row), name)}: '{_short(text[row])}' is not a time.",
                hint="Times look like 2020-03-18 04:01:39 (a T between, fractions and a zone such as +08:00 are fine).",
            )
        return seconds.rename(name)

    def rest(self, used: Collection[str]) -> dict[str, pl.Series]:
        """The columns from which no part of the schema was made, typed if all their cells agree."""
        spare = {name: self.frame[name] for name in self.columns if name and name not in used}
        if self.source.is_parquet:
            return {name: cells for name, cells in spare.items() if not cells.dtype.is_nested()}
        return {name: typed(blank_to_null(cells)) for name, cells in spare.items()}

    def locate(self, row: int) -> str:
        """The place of a row for messages: `line 7`, or `row 7` in a Parquet file."""
        record = int(self.records[row])
        if self.source.is_parquet:
            return f"row {record + 1}"
        return f"line {line_of_record(self.source, record, self.delimiter, self.quoted, self.headless)}"


def parse(
    source: Source, *, delimiter: str | None = None, names: Sequence[str] | None = None, quoted: bool = True
) -> Table:
    """Read the whole table. `names` are the columns of a file without a header line."""
    if source.is_parquet:
        return _parquet(source)
    refuse_huge_lines(source)
    mark = delimiter or source.delimiter
    headless = names is not None
    columns = _checked_header(source, tuple(names) if names is not None else source.header)
    body = source.data if headless else source.data[source.body_offset :]
    if not body.strip():
        raise UserError(
            f"{source.name}: there is a header line but no job below it.", hint="Check how the file was exported."
        )
    # `sacct -p` ends every line, also the header, with a separator: that makes a last column without name and values.
    closed = not headless and len(columns) > 1 and source.first_line.endswith(mark)
    places = [str(place) for place in range(len(columns) + closed)]
    try:
        # With a plain header of our own, Polars neither guesses the width from the first row nor trips over odd names.
        frame = pl.read_csv(
            io.BytesIO(mark.join(places).encode() + b"\n" + body),
            schema=dict.fromkeys(places, pl.String),
            separator=mark,
            quote_char='"' if quoted else None,
        )
    except POLARS_FAILURES:
        raise _ragged(source, len(columns), mark, quoted, headless) from None
    frame = frame.select(places[: len(columns)])
    frame.columns = list(columns)
    records = pl.int_range(frame.height, eager=True)
    empty = frame.select(pl.all_horizontal(pl.all().is_null() | (pl.all().str.strip_chars() == ""))).to_series()
    if empty.any():
        frame, records = frame.filter(~empty), records.filter(~empty)
    if frame.height == 0:
        raise UserError(f"{source.name}: no line holds a job.", hint="Check how the file was exported.")
    return Table(source, frame, records, mark, quoted, headless)


def blank_to_null(cells: pl.Series) -> pl.Series:
    text = cells.cast(pl.String, strict=False).str.strip_chars()
    return text.set(text == "", None)


def typed(text: pl.Series) -> pl.Series:
    """Int64 or Float64 where every cell is such a number written plainly (`007` stays text), else the text."""
    known = text.drop_nulls()
    if known.is_empty():
        return text
    whole = known.cast(pl.Int64, strict=False)
    if whole.null_count() == 0 and (whole.cast(pl.String) == known).all():
        return text.cast(pl.Int64)
    real = known.cast(pl.Float64, strict=False)
    plain = known.str.contains(r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$")
    return text.cast(pl.Float64) if real.null_count() == 0 and plain.all() and real.is_finite().all() else text


def epoch_seconds(text: pl.Series) -> pl.Series:
    """Seconds since 1970 of ISO-like times, with or without zone; null where the text is no time."""
    plain = text.str.replace("T", " ", literal=True)
    naive = plain.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="us", strict=False).dt.epoch("us")
    if naive.null_count() > text.null_count():
        zoned = plain.str.replace("Z$", "+00:00")
        aware = zoned.str.to_datetime("%Y-%m-%d %H:%M:%S%.f%:z", time_unit="us", strict=False).dt.epoch("us")
        naive = naive.zip_with(naive.is_not_null(), aware)
    seconds = divided(naive, 1e6)
    if seconds.null_count() > text.null_count():
        numbers = text.cast(pl.Float64, strict=False)
        seconds = seconds.zip_with(seconds.is_not_null(), numbers.set(~numbers.is_finite().fill_null(False), None))
    return seconds


def divided(cells: pl.Series, divisor: float) -> pl.Series:
    """Correctly rounded quotients. Polars multiplies by the reciprocal, so that 470 / 1000 becomes more than 0.47."""
    return pl.Series(cells.name, cells.cast(pl.Float64).to_numpy() / divisor, nan_to_null=True)


def line_of_record(source: Source, record: int, delimiter: str, quoted: bool, headless: bool) -> int:
    """The line, counted from 1, on which a record begins; quoted cells may contain line ends."""
    start = 0 if headless else source.body_offset
    before = source.data.count(b"\n", 0, start)
    lines = source.data[start:].decode("utf-8", "replace").split("\n")
    if not quoted:
        return before + record + 1
    reader = csv.reader((line + "\n" for line in lines), delimiter=delimiter)
    begins = 0
    try:
        for count, _ in enumerate(reader):
            if count == record:
                return before + begins + 1
            begins = reader.line_num
    except csv.Error:
        pass
    return before + record + 1


def _parquet(source: Source) -> Table:
    try:
        frame = pl.read_parquet(io.BytesIO(source.data))
    except POLARS_FAILURES:
        raise UserError(
            f"{source.name}: begins like Parquet but is damaged or cut off.", hint="Copy or write the file again."
        ) from None
    if frame.height == 0:
        raise UserError(f"{source.name}: the Parquet file holds no job.", hint="Check how it was written.")
    return Table(source, frame, pl.int_range(frame.height, eager=True))


def _checked_header(source: Source, columns: tuple[str, ...]) -> tuple[str, ...]:
    doubled = sorted({name for name in columns if columns.count(name) > 1})
    if doubled:
        what = f"column '{doubled[0]}' occurs more than once" if doubled[0] else "more than one column has no name"
        raise UserError(f"{source.at(1)}: {what}.", hint="Give every column a name of its own.")
    # An unnamed column (usually the index of a data frame) gets its place as a name.
    return tuple(name or f"column_{place}" for place, name in enumerate(columns, 1))


def _ragged(source: Source, width: int, delimiter: str, quoted: bool, headless: bool) -> UserError:
    """The error about the line at which the bulk parser failed: too many cells, or a quote that does not close."""
    start = 0 if headless else source.body_offset
    line = source.data.count(b"\n", 0, start) + 1
    rows = io.StringIO(source.data[start:].decode("utf-8", "replace"), newline="")
    reader = csv.reader(rows, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE, strict=True)
    begins, reason = 0, "the line cannot be split into cells"
    try:
        for cells in reader:
            if len([*cells[:width], *filter(str.strip, cells[width:])]) > width:
                reason = f"{len(cells)} values, but there are {width} columns"
                break
            begins = reader.line_num
    except csv.Error:
        reason = "a quotation mark is opened and not closed properly"
    return UserError(
        f"{source.at(line + begins)}: {reason}.",
        hint="Quote values that contain the separator; write a quotation mark inside a value twice.",
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"
