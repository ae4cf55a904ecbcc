"""`thebes simulate` and `thebes compare`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from thebes.model.cluster import Cluster
    from thebes.model.trace import Trace
    from thebes.policy import Policy
    from thebes.sim.result import Result

TraceFile = Annotated[
    str, typer.Argument(metavar="TRACE", help="A trace of any known format, or philly-sample (ships with Thebes).")
]
ClusterSpec = Annotated[
    str,
    typer.Option(
        "--cluster", "-c", metavar="SPEC", help="8x8 (nodes x GPUs), 4x8x8 (racks first), TOML or Tiresias CSV."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A parameter of the policy; placement.KEY, perf.KEY, cost.KEY for the others.",
    ),
]
PlacementName = Annotated[
    str | None, typer.Option("--placement", "-p", help="Where GPUs are taken (see `thebes placements`).")
]
PerfName = Annotated[str, typer.Option("--perf", help="How fast a placed job runs: tiers or ideal.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write the figures as JSON; - for stdout.")
]
ReportFile = Annotated[Path | None, typer.Option("--report", metavar="FILE.html", help="Write a one-file HTML report.")]
FigureFolder = Annotated[Path | None, typer.Option("--figures", metavar="DIR", help="Write the charts as PNG and PDF.")]
EventsFile = Annotated[
    Path | None, typer.Option("--events", metavar="FILE.parquet", help="Write every event: .parquet or .csv.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N jobs.")]
Seed = Annotated[
    int, typer.Option(min=0, max=2**63 - 1, help="For what is random: models of a trace without any, random placement.")
]
SkipOversize = Annotated[bool, typer.Option("--skip-oversize", help="Leave out jobs that can never fit, and go on.")]
Fractional = Annotated[
    bool, typer.Option("--fractional", help="Keep fractions of GPUs (only for policies that share GPUs).")
]
IgnoreType = Annotated[bool, typer.Option("--ignore-gpu-type", help="Any GPU will do, whatever type a job asks for.")]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Leave out the checker of every decision, for speed.")]
FormatName = Annotated[str | None, typer.Option("--format", help="Skip detection of the trace's format.")]
DurationColumn = Annotated[str, typer.Option(help="Take run times from this column of the trace.")]


def simulate(
    trace: TraceFile,
    cluster: ClusterSpec,
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="A name (see `thebes policies`) or FILE.py:CLASS.")
    ],
    settings: Settings = None,
    placement: PlacementName = None,
    perf: PerfName = "tiers",
    json: JsonFile = None,
    report: ReportFile = None,
    figures: FigureFolder = None,
    events: EventsFile = None,
    limit: Limit = None,
    seed: Seed = 0,
    skip_oversize: SkipOversize = False,
    fractional: Fractional = False,
    ignore_gpu_type: IgnoreType = False,
    no_check: NoCheck = False,
    format: FormatName = None,
    duration_column: DurationColumn = "duration",
) -> None:
    """Replay a trace on a cluster under one policy."""
    from thebes.report.metrics import to_json
    from thebes.report.tables import print_result
    from thebes.sim.choices import choose, parse_settings
    from thebes.sim.simulate import run

    choice = choose(
        policy,
        parse_settings(settings or []),
        placement=placement,
        perf=perf,
        seed=seed,
        limit=limit,
        skip_oversize=skip_oversize,
        fractional=fractional,
        ignore_gpu_type=ignore_gpu_type,
        checks=not no_check,
    )
    _check_outputs(json, report, figures, events)
    where, jobs = _inputs(cluster, trace, format, duration_column)
    _compile_for([choice.policy])
    with _progress([choice.policy.label]) as advance:
        result = run(jobs, where, choice.policy, choice.options, lambda done, of, _now: advance(0, done / of))
    if json != "-":
        print_result(result.metrics)
    _tell_notes([result])
    _write_json(json, to_json(result.metrics))
    _write_rest([result], report, figures, events)
    _leave_if_unfinished([result])


def compare(
    trace: TraceFile,
    cluster: ClusterSpec,
    policies: Annotated[str, typer.Option("--policies", metavar="A,B,C", help="Names, with commas between them.")],
    settings: Settings = None,
    placement: PlacementName = None,
    perf: PerfName = "tiers",
    json: JsonFile = None,
    report: ReportFile = None,
    figures: FigureFolder = None,
    limit: Limit = None,
    seed: Seed = 0,
    skip_oversize: SkipOversize = False,
    fractional: Fractional = False,
    ignore_gpu_type: IgnoreType = False,
    no_check: NoCheck = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes at a time; as many as there are cores.")] = None,
    format: FormatName = None,
    duration_column: DurationColumn = "duration",
) -> None:
    """Replay a trace under several policies, side by side. NAME.KEY=VALUE sets a parameter of one of them."""
    from thebes.report.tables import print_comparison
    from thebes.sim.choices import choose_several, parse_settings
    from thebes.sim.comparison import comparison_json, run_several

    choices = choose_several(
        [name.strip() for name in policies.split(",") if name.strip()],
        parse_settings(settings or []),
        placement=placement,
        perf=perf,
        seed=seed,
        limit=limit,
        skip_oversize=skip_oversize,
        fractional=fractional,
        ignore_gpu_type=ignore_gpu_type,
        checks=not no_check,
    )
    _check_outputs(json, report, figures, None)
    where, jobs = _inputs(cluster, trace, format, duration_column)
    _compile_for([choice.policy for choice in choices])
    with _progress([choice.policy.label for choice in choices]) as advance:
        results = run_several(jobs, where, choices, workers=workers, advance=advance)
    if json != "-":
        print_comparison([result.metrics for result in results])
    _tell_notes(results)
    _write_json(json, comparison_json(results))
    _write_rest(results, report, figures, None)
    _leave_if_unfinished(results)


def _inputs(cluster: str, trace: str, format: str | None, duration_column: str) -> tuple[Cluster, Trace]:
    from thebes.trace import read
    from thebes.trace.cluster_file import read_cluster

    return read_cluster(cluster), read(trace, format=format, duration_column=duration_column)


def _check_outputs(json: str | None, report: Path | None, figures: Path | None, events: Path | None) -> None:
    """Whatever would spoil the end of a run is said before it begins."""
    from thebes.report.files import check_target, load, make_folder

    if json is not None and json != "-":
        check_target(Path(json))
    if report is not None:
        check_target(report)
        load("plotly.offline", needed_for="The HTML report")
    if figures is not None:
        make_folder(figures)
        load("matplotlib", needed_for="Writing figures")
    if events is not None:
        from thebes.sim.result import check_events_ending

        check_events_ending(events)
        check_target(events)


def _compile_for(policies: Sequence[Policy]) -> None:
    from thebes.sim.warmup import compile_for, needs_compiling

    for policy in policies:
        if needs_compiling(policy):
            typer.echo("Compiling the simulator for this machine (once per version, about a minute) …", err=True)
            compile_for(policy)


@contextmanager
def _progress(labels: Sequence[str]) -> Iterator[Any]:
    """A bar per run with an estimate, on a terminal; yields advance(index, fraction done)."""
    if not sys.stderr.isatty():
        yield lambda index, fraction: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = [bars.add_task(label, total=1.0) for label in labels]
        yield lambda index, fraction: bars.update(tasks[index], completed=fraction)


def _tell_notes(results: Sequence[Result]) -> None:
    for note in dict.fromkeys(note for result in results for note in result.notes):
        typer.echo(f"note: {note}", err=True)


def _write_json(target: str | None, text: str) -> None:
    from thebes.report.files import write_text

    if target == "-":
        typer.echo(text.rstrip("\n"))
    elif target is not None:
        write_text(Path(target), text)


def _write_rest(results: Sequence[Result], report: Path | None, figures: Path | None, events: Path | None) -> None:
    if report is not None:
        from thebes.report.html import write_report

        write_report(results, report)
        typer.echo(f"report: {report}", err=True)
    if figures is not None:
        from thebes.report.figures import write_figures

        written = write_figures(results, figures)
        typer.echo(f"figures: {len(written)} files in {figures}", err=True)
    if events is not None:
        from thebes.sim.result import write_events

        write_events(results[0], events)
        typer.echo(f"events: {events}", err=True)


def _leave_if_unfinished(results: Sequence[Result]) -> None:
    """Only the reproduction of the released simulator can get here with jobs unfinished; a note has told so."""
    if any(result.metrics["completed"] != result.metrics["jobs"] for result in results):
        raise typer.Exit(1)
