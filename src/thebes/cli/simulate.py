"""`thebes simulate` and `thebes compare`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from thebes.cli.files import FiguresFile, FirstJobs, ReportFile, Workers

if TYPE_CHECKING:
    from thebes.model.cluster import Cluster
    from thebes.model.trace import Trace
    from thebes.policy import Policy
    from thebes.report.result import Result
    from thebes.sim.choices import Common

# The names are written out here because importing the models takes longer than all of `thebes --help`. A test compares.
PERFS = "tiers, ideal, network, gavel, pollux, artist, hkbu, plans"

TraceToRun = Annotated[
    str,
    typer.Argument(metavar="TRACE", help="A trace of any known format, or one that ships with Thebes: philly-sample."),
]
ClusterSpec = Annotated[
    str,
    typer.Option(
        "--cluster", "-c", metavar="SPEC", help="8x8 (nodes x GPUs), 4x8x8 (racks first), TOML or Tiresias CSV."
    ),
]


@dataclass(frozen=True)
class Shared:
    """The options that `simulate` and `compare` share; they are declared and read in one place."""

    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A parameter of the policy; placement.KEY, perf.KEY, cost.KEY, contention.KEY, interference.KEY for "
            "the others.",
        ),
    ] = None
    placement: Annotated[
        str | None, typer.Option("--placement", "-p", help="Where GPUs are taken (see `thebes placements`).")
    ] = None
    perf: Annotated[
        str, typer.Option("--perf", metavar="NAME", help=f"How fast a placed job runs: {PERFS} (see `thebes perf`).")
    ] = "tiers"
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="NAME", help="The links of the cluster by name (see `thebes perf`)."),
    ] = None
    contention: Annotated[
        bool, typer.Option("--contention", help="Transfers of different jobs that share a link slow each other down.")
    ] = False
    json: FiguresFile = None
    report: ReportFile = None
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Write the charts as PNG and PDF.")
    ] = None
    limit: FirstJobs = None
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, help="For what is random: models of a trace without any, random placement."),
    ] = 0
    skip_oversize: Annotated[
        bool, typer.Option("--skip-oversize", help="Leave out jobs that can never fit, and go on.")
    ] = False
    ignore_gpu_type: Annotated[
        bool, typer.Option("--ignore-gpu-type", help="Any GPU will do, whatever type a job asks for.")
    ] = False
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Leave out the checker of every decision, for speed.")
    ] = False
    measured_after_s: Annotated[
        float,
        typer.Option(
            "--measured-after",
            min=0,
            help="Show what is measured of a job to policies once it has run for this long, in s.",
        ),
    ] = 0.0
    format: Annotated[str | None, typer.Option("--format", help="Skip detection of the trace's format.")] = None
    duration_column: Annotated[str, typer.Option(help="Take run times from this column of the trace.")] = "duration"

    def common(self) -> Common:
        from thebes.sim.choices import Common

        return Common(
            placement=self.placement,
            perf=self.perf,
            contention=self.contention,
            seed=self.seed,
            limit=self.limit,
            skip_oversize=self.skip_oversize,
            ignore_gpu_type=self.ignore_gpu_type,
            checks=not self.no_check,
            measured_after_s=self.measured_after_s,
        )

    def inputs(self, cluster: str, trace: str) -> tuple[Cluster, Trace]:
        from thebes.trace import read
        from thebes.trace.cluster_file import read_cluster

        where = read_cluster(cluster)
        if self.network is not None:
            from thebes.model.links import with_network

            where = with_network(where, self.network)
        return where, read(trace, format=self.format, duration_column=self.duration_column)


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option per field of Shared, which the command gets as its last argument."""
    types = get_type_hints(command, include_extras=True) | get_type_hints(Shared, include_extras=True)
    own = {p.name: p.default for p in inspect.signature(command).parameters.values() if p.name != "shared"}
    defaults = own | {field.name: field.default for field in dataclasses.fields(Shared)}

    def run(**given: Any) -> None:
        command(**{name: given.pop(name) for name in own}, shared=Shared(**given))

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {name: types[name] for name in defaults} | {"return": None}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
            for name, default in defaults.items()
        ]
    )
    return run


@with_shared_options
def simulate(
    trace: TraceToRun,
    cluster: ClusterSpec,
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="A name (see `thebes policies`) or FILE.py:CLASS.")
    ],
    events: Annotated[
        Path | None, typer.Option("--events", metavar="FILE.parquet", help="Write every event: .parquet or .csv.")
    ] = None,
    *,
    shared: Shared,
) -> None:
    """Replay a trace on a cluster under one policy."""
    from thebes.report.metrics import to_json
    from thebes.report.tables import print_result
    from thebes.sim.choices import choose, parse_settings
    from thebes.sim.simulate import run

    choice = choose(policy, parse_settings(shared.settings or []), shared.common())
    _check_outputs(shared, events)
    where, jobs = shared.inputs(cluster, trace)
    compile_policies([choice.policy])
    with progress([choice.policy.label]) as advance:
        result = run(jobs, where, choice.policy, choice.options, lambda done, of, _now: advance(0, done / of))
    if shared.json != "-":
        print_result(result.metrics)
    _tell_notes([result])
    _write_json(shared.json, to_json(result.metrics))
    _write_rest([result], shared, events)
    _leave_if_unfinished([result])


@with_shared_options
def compare(
    trace: TraceToRun,
    cluster: ClusterSpec,
    policies: Annotated[str, typer.Option("--policies", metavar="A,B,C", help="Names, with commas between them.")],
    workers: Workers = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Run on a Ray cluster, one task per policy: HOST:PORT of its head, or auto.",
        ),
    ] = None,
    *,
    shared: Shared,
) -> None:
    """Replay a trace under several policies, side by side. NAME.KEY=VALUE sets a parameter of one of them."""
    from thebes.report.tables import print_comparison
    from thebes.sim.choices import choose_several, parse_settings
    from thebes.sim.comparison import comparison_json, run_several

    names = [name.strip() for name in policies.split(",") if name.strip()]
    choices = choose_several(names, parse_settings(shared.settings or []), shared.common())
    _check_outputs(shared, None)
    where, jobs = shared.inputs(cluster, trace)
    if ray is None:
        compile_policies([choice.policy for choice in choices])
    with progress([choice.policy.label for choice in choices]) as advance:
        if ray is None:
            results = run_several(jobs, where, choices, workers=workers, advance=advance)
        else:
            from thebes.sim.ray_sweep import run_on_ray

            results = run_on_ray(jobs, where, choices, ray, workers=workers, advance=advance)
    if shared.json != "-":
        print_comparison([result.metrics for result in results])
    _tell_notes(results)
    _write_json(shared.json, comparison_json(results))
    _write_rest(results, shared, None)
    _leave_if_unfinished(results)


def _check_outputs(shared: Shared, events: Path | None) -> None:
    """Find what would spoil the end of a run before the run begins."""
    from thebes.report.files import check_target, load, make_folder

    if shared.json is not None and shared.json != "-":
        check_target(Path(shared.json))
    if shared.report is not None:
        check_target(shared.report)
        load("plotly.offline", needed_for="The HTML report")
    if shared.figures is not None:
        make_folder(shared.figures)
        load("matplotlib", needed_for="Writing figures")
    if events is not None:
        from thebes.report.result import check_events_ending

        check_events_ending(events)
        check_target(events)


def compile_policies(policies: Sequence[Policy]) -> None:
    """Compile what has not been compiled on this machine yet, and say so."""
    from thebes.sim.warmup import announcement, compile_for

    message = announcement(policies)
    if message is None:
        return
    typer.echo(message, err=True)
    began_s = time.monotonic()
    for policy in policies:
        compile_for(policy)
    typer.echo(f"Compiled in {time.monotonic() - began_s:.0f} s.", err=True)


@contextmanager
def progress(labels: Sequence[str]) -> Generator[Any, None, None]:
    """On a terminal, a bar per run with an estimate of the time left; yields advance(index, fraction done)."""
    if not sys.stderr.isatty():
        yield _no_bar
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

        def advance(index: int, fraction: float) -> None:
            bars.update(tasks[index], completed=fraction)

        yield advance


def _no_bar(_index: int, _fraction: float) -> None:
    """Show no progress, because the output is not a terminal."""


def _tell_notes(results: Sequence[Result]) -> None:
    for note in dict.fromkeys(note for result in results for note in result.notes):
        typer.echo(f"note: {note}", err=True)


def _write_json(target: str | None, text: str) -> None:
    from thebes.report.files import write_text

    if target == "-":
        typer.echo(text.rstrip("\n"))
    elif target is not None:
        write_text(Path(target), text)


def _write_rest(results: Sequence[Result], shared: Shared, events: Path | None) -> None:
    if shared.report is not None:
        from thebes.report.html import write_report

        write_report(results, shared.report)
        typer.echo(f"report: {shared.report}", err=True)
    if shared.figures is not None:
        from thebes.report.figures import write_figures

        written = write_figures(results, shared.figures)
        typer.echo(f"figures: {len(written)} files in {shared.figures}", err=True)
    if events is not None:
        from thebes.report.result import write_events

        write_events(results[0], events)
        typer.echo(f"events: {events}", err=True)


def _leave_if_unfinished(results: Sequence[Result]) -> None:
    """Exit with an error if jobs are unfinished, as can happen in the reproduction of the released simulator."""
    if any(result.metrics["completed"] != result.metrics["jobs"] for result in results):
        raise typer.Exit(1)
