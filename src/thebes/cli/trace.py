"""`thebes trace` shows a trace, converts it into our own format, or makes a synthetic one.

The imports stand inside the commands, because `thebes --help` must not wait for Polars.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.files import FiguresFile

if TYPE_CHECKING:
    from rich.console import RenderableType

    from thebes.model.trace import Trace

app = typer.Typer(name="trace", help="Inspect, convert and generate workload traces.", no_args_is_help=True)


class Arrivals(StrEnum):
    poisson = "poisson"
    bursty = "bursty"
    diurnal = "diurnal"


class Durations(StrEnum):
    empirical = "empirical"
    lognormal = "lognormal"


TraceFile = Annotated[str, typer.Argument(metavar="TRACE", help="Trace file of any known format, plain or gzip.")]
OutFile = Annotated[Path, typer.Argument(metavar="OUT", help="File to write: .csv, .csv.gz or .parquet.")]
FormatName = Annotated[
    str | None, typer.Option("--format", help="Skip detection and read this format (see `thebes trace formats`).")
]
DurationColumn = Annotated[str, typer.Option(help="Take run times from this column of the source.")]
GpusColumn = Annotated[str, typer.Option(help="Take GPU counts from this column of the source.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite OUT if it exists.")]


@app.command()
def info(
    trace: TraceFile,
    format: FormatName = None,
    duration_column: DurationColumn = "duration",
    gpus_column: GpusColumn = "num_gpus",
    json: FiguresFile = None,
) -> None:
    """Show what a trace holds: jobs, load, run times, GPU demand."""
    from thebes.trace import describe, read

    found = read(trace, format=format, duration_column=duration_column, gpus_column=gpus_column)
    figures = describe(found)
    if json != "-":
        from rich.console import Console

        Console().print(summary(figures))
    _tell_notes(found)
    if json is not None:
        _write_json(figures, json)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="Trace file of any known format, plain or gzip.")],
    out: OutFile,
    format: FormatName = None,
    duration_column: DurationColumn = "duration",
    gpus_column: GpusColumn = "num_gpus",
    force: Force = False,
) -> None:
    """Turn any known trace into our normalised CSV, .csv.gz or Parquet."""
    from thebes.trace import read, write

    refuse_overwrite(out, force)
    found = read(source, format=format, duration_column=duration_column, gpus_column=gpus_column)
    write(found, out)
    _tell_notes(found)
    typer.echo(f"{out}: {len(found):,} jobs ({found.format} → normalised)", err=True)


@app.command()
def generate(
    out: OutFile,
    jobs: Annotated[int, typer.Option(min=1, help="Number of jobs.")] = 1000,
    arrivals: Annotated[Arrivals, typer.Option(help="How submissions are spread in time.")] = Arrivals.poisson,
    durations: Annotated[Durations, typer.Option(help="How run times are drawn.")] = Durations.empirical,
    like: Annotated[
        str | None, typer.Option(metavar="TRACE", help="Real trace to fit; the shipped Philly sample if not given.")
    ] = None,
    load: Annotated[
        float | None, typer.Option(help="Offered GPU-seconds as a share of the cluster; needs --gpus.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of the cluster; larger jobs are not drawn.")] = None,
    jobs_per_hour: Annotated[float | None, typer.Option(help="Arrival rate, in place of --load.")] = None,
    max_gpus: Annotated[int | None, typer.Option(help="Largest job.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal traces.")] = 0,
    force: Force = False,
) -> None:
    """Make a synthetic trace with the shape of a real one."""
    from thebes.trace import GeneratorSpec, read, write
    from thebes.trace import generate as make

    refuse_overwrite(out, force)
    made = make(
        GeneratorSpec(
            jobs=jobs,
            arrivals=arrivals.value,
            durations=durations.value,
            like=read(like) if like is not None else None,
            load=load,
            gpus=gpus,
            jobs_per_hour=jobs_per_hour,
            max_gpus=max_gpus,
            seed=seed,
        )
    )
    write(made, out)
    _tell_notes(made)
    typer.echo(f"{out}: {len(made):,} jobs", err=True)


@app.command()
def formats() -> None:
    """List the trace formats that can be read."""
    from rich.console import Console
    from rich.table import Table

    from thebes.trace import FORMATS

    table = Table(box=None, pad_edge=False)
    table.add_column("--format", style="bold", no_wrap=True)
    table.add_column("what it is")
    for known in sorted(FORMATS, key=lambda known: known.name):
        table.add_row(known.name, known.title)
    Console().print(table)
    typer.echo("The format is detected by content; gzip is accepted for each, Parquet for every table with a header.")


def refuse_overwrite(out: Path, force: bool) -> None:
    """Refuse to write over a file, unless that is allowed."""
    from thebes.model.errors import UserError

    if out.exists() and not force:
        raise UserError(f"{out}: the file exists.", hint="Add --force to overwrite it, or choose another name.")


def _tell_notes(trace: Trace) -> None:
    for note in trace.notes:
        typer.echo(f"note: {note}", err=True)


def _write_json(figures: dict[str, Any], target: str) -> None:
    import json

    from thebes.model.errors import UserError

    text = json.dumps(figures, indent=2, ensure_ascii=False)
    if target == "-":
        typer.echo(text)
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as failure:
        raise UserError(f"{target}: cannot be written: {failure.strerror or failure}.") from None


def summary(figures: dict[str, Any]) -> RenderableType:
    """What a trace holds, as a table for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, value in _facts(figures):
        facts.add_row(name, Text(value))
    return Group(facts, Text(), _demand_table(figures["gpu_demand"]))


def _facts(figures: dict[str, Any]) -> list[tuple[str, str]]:
    rate, demand = figures["arrivals_per_hour"], figures["mean_gpu_demand"]
    busiest = figures["busiest_hour_jobs"]
    status = ", ".join(f"{name} {number:,}" for name, number in list(figures["status"].items())[:6])
    rows = [
        ("trace", figures["trace"]),
        ("format", figures["format"]),
        ("jobs", f"{figures['jobs']:,}"),
        ("span", f"{figures['span_s'] / 86400:.1f} days of submissions"),
        ("arrivals", f"{rate:,.2f} per hour, {busiest:,} in the busiest" if rate else "at one instant"),
        ("GPU-hours", f"{figures['gpu_hours']:,.0f}"),
        ("GPU demand", (f"{demand:,.1f} on average, " if demand else "") + f"largest job {figures['max_gpus']:g}"),
    ]
    rows.append(("run time", " · ".join(f"{name} {_time(value)}" for name, value in figures["duration_s"].items())))
    if figures["fractional_gpu_jobs"]:
        rows.append(("shared GPUs", f"{figures['fractional_gpu_jobs']:,} jobs ask for a fraction of a GPU"))
    known = [
        f"{figures[name]:,} {label[: -1 if figures[name] == 1 else None]}" for name, label in KINDS if figures[name]
    ]
    rows.append(("told apart", ", ".join(known) or "no users, virtual clusters, models or GPU types"))
    rows.append(("status", status))
    if figures["extra_columns"]:
        rows.append(("extra columns", ", ".join(figures["extra_columns"])))
    return rows


KINDS = (("users", "users"), ("vcs", "virtual clusters"), ("models", "models"), ("gpu_types", "GPU types"))


def _demand_table(classes: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("GPUs", style="bold", no_wrap=True)
    for name in ("jobs", "of jobs", "GPU-hours", "of GPU-hours"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in classes:
        share = row["share_of_gpu_hours"]
        table.add_row(
            row["gpus"],
            f"{row['jobs']:,}",
            f"{row['share_of_jobs']:.1%}",
            f"{row['gpu_hours']:,.0f}",
            f"{share:.1%}",
            "█" * round(24 * share),
        )
    return table


def _time(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
