"""The reader decides by content alone which format a file has; the format's module reads it, and `draft` completes it.

The formats stand in the order in which they are tried: first those with a sign of their own, then tables by the
columns that only they have, from the most special to the most general, our own last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from thebes.model.errors import UserError, nearest
from thebes.model.trace import REQUIRED_COLUMNS, Trace
from thebes.trace import (
    acme,
    elasticflow,
    gavel,
    helios,
    morphling,
    muri,
    normalised,
    openb,
    pai,
    philly,
    pollux,
    sia,
    slurm,
    spot,
    swf,
    tiresias,
)
from thebes.trace.draft import Draft, finish
from thebes.trace.shipped import shipped_or_given
from thebes.trace.source import Source, open_source
from thebes.trace.table import parse


@dataclass(frozen=True)
class Format:
    """A trace format: its name for `--format`, what it is, how to recognise it and how to read it."""

    name: str
    title: str
    read: Callable[[Source], Draft]
    columns: tuple[str, ...] = ()  # the header columns by which it is recognised
    sign: Callable[[Source], bool] | None = None  # recognises formats whose header says nothing

    def matches(self, source: Source, header: Sequence[str]) -> bool:
        if self.sign is not None:
            return not source.is_parquet and self.sign(source)
        return set(self.columns) <= set(header)


FORMATS: tuple[Format, ...] = (
    Format("philly", "Philly cluster_job_log (JSON)", philly.read, sign=philly.looks_like),
    Format("swf", "Standard Workload Format (18 fields)", swf.read, sign=swf.looks_like),
    Format("slurm", "Slurm accounting, `sacct -P`", slurm.read, sign=slurm.looks_like),
    Format("gavel", "Gavel and Shockwave .trace (tab-separated)", gavel.read, sign=gavel.looks_like),
    Format("pai", "Alibaba PAI 2020 task table (file or folder)", pai.read, sign=pai.looks_like),
    Format("openb", "Alibaba openb 2023 pod list", openb.read, openb.COLUMNS),
    Format("spot", "Alibaba spot GPU 2026 job list", spot.read, spot.COLUMNS),
    Format("acme", "Acme, clusters Seren and Kalos", acme.read, acme.COLUMNS),
    Format("helios", "Helios cluster_log", helios.read, helios.COLUMNS),
    Format("morphling", "Morphling / Rubick workload", morphling.read, morphling.COLUMNS),
    Format("sia", "Pollux and Sia workloads (no run times)", sia.read, sia.COLUMNS),
    Format("pollux", "Pollux's Philly list", pollux.read, pollux.COLUMNS),
    Format("muri", "Muri (Tiresias columns, milliseconds)", muri.read, muri.COLUMNS),
    Format("elasticflow", "ElasticFlow (with deadlines)", elasticflow.read, elasticflow.COLUMNS),
    Format("tiresias", "Tiresias simulator jobs", tiresias.read, tiresias.COLUMNS),
    Format("normalised", "Thebes' own CSV, .csv.gz or Parquet", normalised.read, REQUIRED_COLUMNS),
)
BY_NAME = {known.name: known for known in FORMATS}
# A table with a smaller share of a format's columns is called unknown, not a damaged file of that format.
RESEMBLANCE = 0.5


def read(
    path: str | Path,
    *,
    format: str | None = None,
    duration_column: str = "duration",
    gpus_column: str = "num_gpus",
) -> Trace:
    """Read a trace of any known format; `philly-sample` is the one that ships with Thebes.

    `format` skips detection. `duration_column` and `gpus_column` take run times or GPUs from another numeric column
    of the source, for instance `duration_est` of the Helios trace or `allocated_processors` of an SWF log.
    """
    chosen = _named(format) if format is not None else None
    place = shipped_or_given(path)
    tables = pai.task_table_in(place) if _is_folder(place) else None
    source = open_source(tables or place)
    if chosen is None:
        chosen = detect(source)
    found = finish(chosen.read(source), chosen.name, duration_column=duration_column, gpus_column=gpus_column)
    return replace(found, name=str(path))


def detect(source: Source) -> Format:
    """The first format that the content fits; if none does, the one that was probably meant."""
    header = tuple(parse(source).columns) if source.is_parquet else source.header
    for known in FORMATS:
        if known.matches(source, header):
            return known
    likeness = {known: _likeness(known.columns, header) for known in FORMATS if known.columns}
    # Ties go to the later and more general format, which is ours.
    best = max(reversed(FORMATS), key=lambda known: likeness.get(known, 0.0))
    if likeness.get(best, 0.0) >= RESEMBLANCE:
        return best  # the reader of this format names the columns that are missing
    raise UserError(
        f"{source.name}: the format is not recognised; the first line is '{source.first_line[:80]}'."
        if not source.is_parquet
        else f"{source.name}: the format is not recognised; the columns are {', '.join(header[:10])}.",
        hint=f"A trace table needs at least {', '.join(REQUIRED_COLUMNS)}; `thebes trace formats` lists every format.",
    )


def _named(name: str) -> Format:
    if name not in BY_NAME:
        raise UserError(
            f"unknown trace format '{name}'; {nearest(name, BY_NAME)}", hint="`thebes trace formats` explains them."
        )
    return BY_NAME[name]


def _is_folder(place: Path) -> bool:
    try:
        return place.is_dir()
    except (OSError, ValueError):
        return False  # `open_source` will say what is wrong with it


def _likeness(columns: Sequence[str], header: Sequence[str]) -> float:
    """The share of the wanted columns that are there; a misspelt one counts half."""
    there = sum(1.0 if name in header else 0.5 * bool(get_close_matches(name, header, 1, 0.75)) for name in columns)
    return there / len(columns)
