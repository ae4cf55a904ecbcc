"""The one door through which every trace file enters: it makes clean bytes of a path.

A path can name nothing, a folder, a broken gzip, a picture or a text in an old encoding; each of these is told
apart here, once, so that the readers of single formats only ever see text (or Parquet) that can be read.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

import numpy as np

from thebes.model.errors import UserError
from thebes.trace.shipped import SAMPLES

LONGEST_LINE = 1 << 20  # bytes; no job record is so long, but a file without line ends is
GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
# Containers that people really hand over; an error that names them is more useful.
OTHER_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive"),
    (b"\xfd7zXZ\x00", "an xz file"),
    (b"BZh", "a bzip2 file"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file"),
    (b"7z\xbc\xaf", "a 7-Zip archive"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"%PDF", "a PDF document"),
    (b"\x89PNG", "a PNG picture"),
    (b"\x80\x04\x95", "a Python pickle"),
)
# UTF-16 is what "Unicode text" means to some spreadsheets.
UTF16_MAGIC = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class Source:
    """One input file, unpacked. `name` is the path as the user wrote it, for messages and reports."""

    name: str
    path: Path
    data: bytes

    @property
    def is_parquet(self) -> bool:
        return self.data[:4] == PARQUET_MAGIC

    @cached_property
    def first_line(self) -> str:
        """The first line that is not blank, without its line end."""
        start, end = self._first_line_span
        return self.data[start:end].decode("utf-8", "replace").strip("\r\n\ufeff ")

    @property
    def body_offset(self) -> int:
        """The position at which the line after the first non-blank line begins."""
        return min(self._first_line_span[1] + 1, len(self.data))

    @cached_property
    def _first_line_span(self) -> tuple[int, int]:
        size, start = len(self.data), 0
        while start < size and self.data[start : start + 1].isspace():
            start += 1
        start = self.data.rfind(b"\n", 0, start) + 1
        end = self.data.find(b"\n", start)
        return start, size if end < 0 else end

    @cached_property
    def delimiter(self) -> str:
        """The separator that divides the header into the most pieces; a comma if none does."""
        return max(",\t|;", key=lambda mark: (self.first_line.count(mark), mark == ","))

    @cached_property
    def header(self) -> tuple[str, ...]:
        """The first line as column names, by which most formats are recognised."""
        if self.is_parquet:
            return ()  # only its table knows the columns of a Parquet file
        return split_header(self.first_line, self.delimiter)

    def at(self, line: int | str | None = None, column: str | None = None) -> str:
        """The beginning of every message, such as `FILE, line 7, column 'duration'`."""
        parts = [self.name]
        if line is not None:
            parts.append(line if isinstance(line, str) else f"line {line}")
        if column is not None:
            parts.append(f"column '{column}'")
        return ", ".join(parts)


def split_header(line: str, delimiter: str) -> tuple[str, ...]:
    """Column names of a header line. `sacct -p` ends each line with a separator, so a blank last name is dropped."""
    try:
        names = next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        names = line.split(delimiter)
    names = [name.strip() for name in names]
    if len(names) > 1 and not names[-1]:
        names.pop()
    return tuple(names)


def open_source(path: str | Path) -> Source:
    """Read and unpack one file, or say plainly why that cannot be done."""
    return source_of(str(path), _bytes(str(path), Path(path)), Path(path))


def source_of(name: str, data: bytes, place: Path = Path("-")) -> Source:
    """Bytes from anywhere, standard input for instance, as a Source like that of a file."""
    data = _unpacked(name, data)
    if not data.strip():
        raise UserError(f"{name}: the file is empty.", hint="A trace needs a header line and at least one job.")
    if data[:4] != PARQUET_MAGIC:
        data = data.removeprefix(codecs.BOM_UTF8)
        _refuse_binary(name, data)
    return Source(name, place, data)


def refuse_huge_lines(source: Source) -> None:
    """Refuse a line beyond 1 MiB in line-based formats: it means that the file is not what it seems."""
    ends = np.flatnonzero(np.frombuffer(source.data, np.uint8) == ord("\n"))
    lengths = np.diff(ends, prepend=-1, append=len(source.data))
    if lengths.max() > LONGEST_LINE:
        line = int(np.argmax(lengths)) + 1
        raise UserError(
            f"{source.at(line)}: the line is {lengths.max() / LONGEST_LINE:.1f} MiB long; no job record is.",
            hint="Check that the file is a trace with one job per line and that its line ends were not lost.",
        )


def _bytes(name: str, place: Path) -> bytes:
    try:
        if place.is_dir():
            raise UserError(
                f"{name}: this is a folder, not a trace file.",
                hint="Name the file inside it. (Only the Alibaba PAI 2020 tables are read as a folder: it must hold "
                "pai_task_table.csv.)",
            )
        return place.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{name}: there is no such file.", hint=_near_names(place)) from None
    except NotADirectoryError:
        raise UserError(f"{name}: a part of this path is a file, not a folder.", hint="Check the path.") from None
    except PermissionError:
        raise UserError(
            f"{name}: permission denied.", hint="Ask its owner for read access, or copy it to where you may read it."
        ) from None
    except (OSError, ValueError) as failure:  # ValueError comes from a NUL character in the path
        reason = getattr(failure, "strerror", None) or str(failure)
        raise UserError(f"{name}: cannot be read: {reason}.", hint="Check the path and the disk.") from None


def _near_names(place: Path) -> str:
    folder = place.parent
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return f"The folder {folder} does not exist either."
    close = get_close_matches(place.name, names, n=3, cutoff=0.6) or get_close_matches(place.name, SAMPLES, cutoff=0.8)
    return f"Did you mean {' or '.join(close)}?" if close else f"No file in {folder} has a similar name."


def _unpacked(name: str, data: bytes) -> bytes:
    if data[:2] != GZIP_MAGIC:
        if data and name.endswith(".gz"):
            raise UserError(
                f"{name}: ends in .gz but is not gzip data.",
                hint="If it is plain text, rename it without .gz; otherwise download it again.",
            )
        return data
    unpack: Callable[[bytes], bytes] = gzip.decompress
    try:
        return unpack(data)
    except EOFError:
        reason = "the gzip data is cut off"
    except (gzip.BadGzipFile, zlib.error, OSError) as failure:
        reason = f"the gzip data is damaged ({str(failure).rstrip('.')})"
    raise UserError(f"{name}: {reason}.", hint="Copy or download the file again; `gzip -t` tests it.")


def _refuse_binary(name: str, data: bytes) -> None:
    for magic, what in OTHER_MAGIC:
        if data.startswith(magic):
            raise UserError(f"{name}: this is {what}, not a trace.", hint="Unpack it and name the trace file inside.")
    if data.startswith(UTF16_MAGIC):
        raise UserError(f"{name}: the text is UTF-16.", hint="Save it as UTF-8, for instance with `iconv -f UTF-16`.")
    nul = data.find(b"\x00")
    if nul >= 0:
        raise UserError(
            f"{name}: binary data (a zero byte at offset {nul}), not a trace.",
            hint="`thebes trace formats` lists what can be read.",
        )
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as failure:
        line = data.count(b"\n", 0, failure.start) + 1
        raise UserError(
            f"{name}, line {line}: byte 0x{data[failure.start]:02x} is not UTF-8 text.",
            hint="Text in an older encoding can be converted: `iconv -f LATIN1 -t UTF-8`. Else it is not a trace.",
        ) from None
