"""`thebes import sacct` reads a site's own history as a trace, and tells what each policy would have done with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from thebes.cli.files import FiguresFile, FirstJobs, ReportFile, Workers

if TYPE_CHECKING:
    from thebes.model.cluster import Cluster
    from thebes.report.result import Result
    from thebes.sim.choices import Choice
    from thebes.trace.sacct import History

app = typer.Typer(name="import", help="Turn a site's own history into a trace, and try policies on it.")

POLICIES = "fifo,las,srtf,tiresias-l"


@app.callback()
def _group() -> None:
    """Keep `sacct` a subcommand, although it is the only one."""


@app.command()
def sacct(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Output of sacct -P or sacct --json; - for stdin.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="TRACE", help="Write the trace: .csv, .csv.gz or .parquet.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", "-c", metavar="SPEC", help="8x8, TOML …; default: guessed from the peak use."),
    ] = None,
    policies: Annotated[str, typer.Option(metavar="A,B,C", help="Policies to try, with commas between.")] = POLICIES,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Try policies on it, or only read it.")
    ] = True,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter, as in `thebes compare`.")
    ] = None,
    perf: Annotated[str, typer.Option(metavar="NAME", help="How fast a placed job runs (`thebes perf`).")] = "tiers",
    arrival: Annotated[
        Literal["eligible", "submit"],
        typer.Option(help="A job arrives when it was eligible (dependencies met), or at its submission."),
    ] = "eligible",
    requeued: Annotated[
        Literal["last", "sum"],
        typer.Option(help="Run time of a job with several starts: of the last, or of all together."),
    ] = "last",
    tenant: Annotated[
        str | None, typer.Option(metavar="WHAT", help="What makes a tenant: account (default), partition or user.")
    ] = None,
    limit: FirstJobs = None,
    json: FiguresFile = None,
    report: ReportFile = None,
    workers: Workers = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite TRACE if it exists.")] = False,
) -> None:
    """Read what a Slurm site ran, and replay it under several policies beside what really happened.

    TZ=UTC sacct -a -X -D -P -S 2024-01-01 -o JobID,Submit,Eligible,Start,End,ElapsedRaw,State,User,Account,Partition,\
AllocTRES,ReqTRES,NNodes,JobName > jobs.txt
    """
    from thebes.cli.trace import refuse_overwrite, summary
    from thebes.model.errors import UserError
    from thebes.trace import describe, write
    from thebes.trace.sacct import read_history

    if out is not None:
        refuse_overwrite(out, force)
    if not compare and (json is not None or report is not None):
        raise UserError("--json and --report tell of a comparison.", hint="Leave out --no-compare.")
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if compare:
        _chosen(names, settings or [], perf)  # faults in these are told before the file is read, which takes long
    _check_outputs(json, report)
    history = read_history(file, arrival=arrival, requeued=requeued, tenant=tenant)
    if limit is not None:
        history = history.head(limit)
    if json != "-":
        from rich.console import Console

        Console().print(summary(describe(history.trace)))
    for note in history.trace.notes:
        typer.echo(f"note: {note}", err=True)
    if out is not None:
        write(history.trace, out)
        typer.echo(f"{out}: {len(history.trace):,} jobs (sacct → normalised)", err=True)
    if compare:
        results = _compare(history, cluster, lambda any_type: _chosen(names, settings or [], perf, any_type), workers)
        if json != "-":
            from thebes.report.tables import print_comparison

            typer.echo("")
            print_comparison([result.metrics for result in results])
        _write(results, json, report)


def _chosen(names: list[str], settings: list[str], perf: str, any_type: bool = True) -> list[Choice]:
    from thebes.sim.choices import Common, choose_several, parse_settings

    common = Common(perf=perf, ignore_gpu_type=any_type)
    return choose_several(names, parse_settings(settings), common)


def _check_outputs(json: str | None, report: Path | None) -> None:
    from thebes.report.files import check_target, load

    if json is not None and json != "-":
        check_target(Path(json))
    if report is not None:
        check_target(report)
        load("plotly.offline", needed_for="The HTML report")


def _compare(
    history: History, spec: str | None, choose: Callable[[bool], list[Choice]], workers: int | None
) -> list[Result]:
    """What happened, then what each policy would have done; the notes are printed on the way."""
    from thebes.cli.simulate import compile_policies, progress
    from thebes.sim.comparison import run_several

    cluster, history, notes = _cluster_for(history, spec)
    # A guessed cluster has no GPU types, nor has one in short form. Types count only if a cluster file names them.
    typed = spec is not None and {kind.gpu_type for kind in cluster.kinds} & _types(history)
    choices = choose(not typed)
    compile_policies([choice.policy for choice in choices])
    with progress([choice.policy.label for choice in choices]) as advance:
        results = run_several(history.trace, cluster, choices, workers=workers, advance=advance)
    first, more = _what_happened(history, cluster)
    results = [*first, *results]
    told = set(history.trace.notes)
    for note in dict.fromkeys([*notes, *more, *(note for result in results for note in result.notes)]):
        if note not in told:
            typer.echo(f"note: {note}", err=True)
    return results


def _types(history: History) -> set[str]:
    kinds = history.trace.jobs["gpu_type"].drop_nulls().unique()
    return {kind for kind_list in kinds for kind in str(kind_list).split("|")}


def _cluster_for(history: History, spec: str | None) -> tuple[Cluster, History, list[str]]:
    """The cluster to replay on, and the jobs that it can hold at all."""
    from thebes.trace.cluster_file import read_cluster
    from thebes.trace.draft import count
    from thebes.trace.sacct import guessed_cluster, peak_gpus

    peak = peak_gpus(history)
    if spec is None:
        nodes, gpus = guessed_cluster(history)
        guess = f"{nodes}x{gpus}"
        note = f"The cluster is guessed: {guess}, for at most {peak:,} GPUs were in use at once. --cluster names it."
        return read_cluster(guess), history, [note]
    cluster, notes = read_cluster(spec), []
    if peak > cluster.total_gpus:
        notes.append(
            f"The site had {peak:,} GPUs in use at once, the cluster has {cluster.total_gpus:,}: no fair comparison "
            "with what really happened."
        )
    large = history.trace.jobs["num_gpus"] > cluster.total_gpus
    if large.any():
        notes.append(f"Left out {count(int(large.sum()), 'job')} of more GPUs than the cluster has.")
        history = history.only(~large)
    return cluster, history, notes


def _what_happened(history: History, cluster: Cluster) -> tuple[list[Result], list[str]]:
    from thebes.report.actual import actual

    if not history.complete:
        return [], ["What really happened cannot be told: the export lacks Start or End."]
    return [actual(history.trace, history.runs, cluster)], []


def _write(results: list[Result], json: str | None, report: Path | None) -> None:
    from thebes.report.files import write_text
    from thebes.sim.comparison import comparison_json

    text = comparison_json(results)
    if json == "-":
        typer.echo(text.rstrip("\n"))
    elif json is not None:
        write_text(Path(json), text)
    if report is not None:
        from thebes.report.html import write_report

        write_report(results, report)
        typer.echo(f"report: {report}", err=True)
