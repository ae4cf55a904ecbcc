"""`thebes plan` shows the best execution plan of a model and its throughput, for every allocation.

The imports stand inside the command, because `thebes --help` must not wait for NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.files import EverythingFile, NodeSize, PlotFile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from thebes.model.plan import Plan
    from thebes.perf.plans.site import Site
    from thebes.perf.plans.survey import Survey

ROOMY, WIDE = 120, 140  # columns of a screen


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="llama-2-7b, gpt-2, …, or a file: my-model.toml, config.json.")
    ],
    gpus: Annotated[str, typer.Option(metavar="GPUS", help="Numbers of GPUs: 1..64, 1-64, 1,2,4,8.")] = "1..64",
    node_size: NodeSize = 8,
    nodes: Annotated[int | None, typer.Option(help="Spread over so many nodes; default: as few as hold them.")] = None,
    cpus: Annotated[int | None, typer.Option(help="CPUs per GPU; default: the GPU's share of its node.")] = None,
    gpu_type: Annotated[str, typer.Option(help="A800-80GB, A100-40GB, H100, V100, …")] = "A800-80GB",
    batch: Annotated[int | None, typer.Option(help="Global batch; default: the model's own.")] = None,
    why: Annotated[int | None, typer.Option(metavar="GPUS", help="All plans on so many GPUs, and why not.")] = None,
    json: EverythingFile = None,
    plot: PlotFile = None,
) -> None:
    """Show the best execution plan of a model and its throughput, for every allocation."""
    from thebes.perf.plans.survey import refuse, survey
    from thebes.perf.plans.transformer import find
    from thebes.report.files import plot_target

    target = plot_target(plot)
    if json not in (None, "-"):
        from thebes.report.files import check_target

        check_target(Path(json))
    counts = [_positive("--why", why)] if why is not None else gpu_counts(gpus)
    what = find(model, batch)
    site = _site(gpu_type, node_size)
    each = _cpus(cpus, site, counts, nodes)
    found = survey(what, site, counts, each, nodes)
    if not found.rows and why is None:
        raise refuse(found, counts, each, nodes)
    if json != "-":
        if why is None:
            _print_survey(found)
        else:
            _print_plans(found, why, each, nodes)
    if json is not None:
        _write_json(found, each, nodes, json)
    if target is not None:
        from thebes.report.plans import write_plot

        if not found.rows:
            raise refuse(found, counts, each, nodes)
        write_plot(found, target)
        typer.echo(f"plot: {target}", err=True)


def gpu_counts(text: str) -> list[int]:
    """`1..4,8,16-18` -> [1, 2, 3, 4, 8, 16, 17, 18]."""
    from thebes.model.errors import UserError
    from thebes.perf.plans.survey import MOST_GPUS

    hint = "write a list such as 1,2,4,8 or a range such as 1..64"
    counts: set[int] = set()
    for word in text.replace(" ", "").split(","):
        found = re.fullmatch(r"(\d+)(?:(?:\.\.|-)(\d+))?", word)
        if found is None:
            raise UserError(f"--gpus: '{word}' is neither a number nor a range", hint=hint)
        first, last = int(found[1]), int(found[2] or found[1])
        if first > last:
            raise UserError(f"--gpus: {word} runs backwards", hint=f"write {last}..{first}")
        if not 1 <= first <= last <= MOST_GPUS:
            raise UserError(f"--gpus: {word} is not between 1 and {MOST_GPUS:,}", hint=hint)
        counts |= set(range(first, last + 1))
    return sorted(counts)


def _positive(option: str, value: int) -> int:
    from thebes.model.errors import UserError
    from thebes.perf.plans.survey import MOST_GPUS

    if not 1 <= value <= MOST_GPUS:
        raise UserError(f"{option} {value} is not between 1 and {MOST_GPUS:,}", hint=f"write {option} 8")
    return value


def _site(gpu_type: str, node_size: int) -> Site:
    from thebes.perf.plans.site import site_of_gpu

    site = site_of_gpu(gpu_type)
    size = _positive("--node-size", node_size)
    # A smaller node has fewer CPUs and less memory: each GPU keeps its share.
    return replace(site, node_gpus=size, node_cpus=size * site.cpus_per_gpu, node_gib=size * site.host_gib)


def _cpus(cpus: int | None, site: Site, counts: Sequence[int], nodes: int | None) -> int:
    from thebes.model.errors import UserError

    if nodes is not None:
        _positive("--nodes", nodes)
    if cpus is None:
        return site.cpus_per_gpu
    held = min(-(-count // (nodes or site.fewest_nodes(count))) for count in counts)
    if not 1 <= cpus * held <= site.node_cpus:
        raise UserError(
            f"--cpus {cpus}: a node has {site.node_cpus} CPUs for {site.node_gpus} GPUs",
            hint=f"from 1 to {site.cpus_per_gpu} per GPU, up to {site.node_cpus // held} with {held} on a node",
        )
    return cpus


# Output for people.


def _print_survey(found: Survey) -> None:
    console = _console()
    model, site = found.model, found.site
    console.print(
        f"[bold]{model.name}[/bold]: {_count(model.parameters)} parameters, {model.layers} layers of {model.hidden}, "
        f"{model.heads} heads, sequences of {model.sequence}, global batch {model.global_batch}",
        highlight=False,
    )
    console.print(
        f"on nodes of {site.node_gpus} x {site.gpu_type}, {site.node_cpus} CPUs, {site.node_gib:,.0f} GiB",
        highlight=False,
        style="dim",
    )
    console.print(_survey_table(found, console.width >= ROOMY))
    if any(row.instead != row.gpus for row in found.rows):
        console.print("≈ N: N GPUs are as fast, or within 1 %; schedulers give these.", style="dim", highlight=False)
    for reason, counts in _unusable(found).items():
        console.print(f"not {_ranges(counts)}: {reason}", style="dim", highlight=False)
    some = found.rows[-1].gpus
    so_many = f"{some} GPU{'s' * (some != 1)}"
    tell = "CPUs: more per GPU bring less than 1 %" + ("" if console.width >= ROOMY else "; no: plans rejected")
    console.print(f"{tell}. `--why {some}` shows every plan on {so_many}.", style="dim", highlight=False)


def _survey_table(found: Survey, roomy: bool) -> Table:
    """A row per allocation. A wide screen shows rejected plans by reason, a narrow one only their number."""
    from rich import box
    from rich.table import Table

    offload = any(row.best.host_gib for row in found.rows)
    marked = any(row.instead != row.gpus for row in found.rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1) if roomy else (0, 0), collapse_padding=True)
    for name in ("GPUs", "nodes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best plan", style="bold", no_wrap=True)
    growth = roomy or not (offload and marked)  # a full table on a narrow screen can best do without this column
    figures = ("s/iter", "samples/s", *(["speedup"] if growth else []), "GPU GiB", *(["host GiB"] if offload else []))
    for name in (*figures, "CPUs"):
        table.add_column(name, justify="right", no_wrap=True)
    if marked:
        table.add_column("1 %", no_wrap=True)
    table.add_column("rejected" if roomy else "no", style="dim", justify="left" if roomy else "right")
    for row in found.rows:
        best = row.best
        no = ", ".join(f"{count} {obstacle}" for obstacle, count in row.rejected.items()) or "none"
        table.add_row(
            str(row.gpus),
            str(row.nodes),
            str(best.plan),
            _figure(best.iteration_s),
            _figure(best.samples_s),
            *([f"{best.samples_s / found.rows[0].best.samples_s:.1f}x"] if growth else []),
            f"{best.gpu_gib:.1f}",
            *([f"{best.host_gib:.1f}" if best.host_gib else "–"] if offload else []),
            str(row.useful_cpus),
            *([f"≈ {row.instead}" if row.instead != row.gpus else ""] if marked else []),
            no if roomy else str(sum(row.rejected.values())),
            style="dim" if row.instead != row.gpus else None,
        )
    return table


def _figure(value: float) -> str:
    """A number with three digits, never with a power of ten."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:#.3g}"


def _console() -> Console:
    """A console as wide as the screen; what goes into a file or a pipe is not cut."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def _print_plans(found: Survey, gpus: int, cpus: int, nodes: int | None) -> None:
    """Print everything about one number of GPUs."""
    from rich import box
    from rich.table import Table

    from thebes.perf.plans.book import PlanBook
    from thebes.perf.plans.survey import rejected

    book = PlanBook((found.model,), found.site)
    spread = nodes or found.site.fewest_nodes(gpus)
    fitting = book.all_that_fit(0, gpus, spread, cpus)
    console = _console()
    where = f"{gpus} GPU{'s' * (gpus != 1)} on {spread} node{'s' * (spread != 1)}"
    console.print(f"[bold]{found.model.name}[/bold] on {where}, {cpus} CPUs per GPU", highlight=False)
    if fitting:
        real = [_measured(found, one.plan, spread, cpus) for one in fitting]
        fit = f"{len(fitting)} plan{'s fit' if len(fitting) != 1 else ' fits'}"
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=fit, title_justify="left")
        table.add_column("plan", style="bold", no_wrap=True)
        for name in ("s/iter", *(["measured"] if any(real) else []), "samples/s", "GPU GiB", "host GiB"):
            table.add_column(name, justify="right")
        for one, seconds in zip(fitting, real, strict=True):
            table.add_row(
                str(one.plan),
                _figure(one.iteration_s),
                *([_figure(seconds) if seconds else ""] if any(real) else []),
                _figure(one.samples_s),
                f"{one.gpu_gib:.1f}",
                f"{one.host_gib:.1f}" if one.host_gib else "–",
            )
        console.print(table)
    else:
        console.print(f"no plan fits: {found.unusable[gpus]}", highlight=False)
    no = rejected(book, gpus, spread, cpus)
    if no:
        title = f"{len(no)} plan{'s' * (len(no) != 1)} rejected"
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
        table.add_column("plan", no_wrap=True)
        table.add_column("why")
        for plan, rejection in no:
            table.add_row(str(plan), rejection.words)
        console.print(table)


def _measured(found: Survey, plan: Plan, nodes: int, cpus: int) -> float | None:
    """Seconds per iteration where somebody has measured this plan on this kind of GPU."""
    from thebes.perf.plans.measured import as_where_measured, measured_of

    return measured_of(found.model, plan, nodes, cpus) if as_where_measured(found.site) else None


def _unusable(found: Survey) -> dict[str, list[int]]:
    """Numbers of GPUs for which there is no plan, by reason."""
    said: dict[str, list[int]] = {}
    for gpus, reason in found.unusable.items():
        said.setdefault(reason, []).append(gpus)
    return said


def _ranges(counts: Sequence[int]) -> str:
    """[3, 5, 6, 7] -> `3, 5-7`."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and count == runs[-1][-1] + 1:
            runs[-1].append(count)
        else:
            runs.append([count])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"


# Output for programs.


def as_json(found: Survey, cpus: int, nodes: int | None) -> dict[str, Any]:
    from thebes.perf.plans.book import PlanBook
    from thebes.perf.plans.survey import rejected

    book = PlanBook((found.model,), found.site)
    model = {name: getattr(found.model, name) for name in _MODEL_FIELDS}
    rows: list[dict[str, Any]] = []
    for gpus in sorted([*(row.gpus for row in found.rows), *found.unusable]):
        spread = nodes or found.site.fewest_nodes(gpus)
        row = next((row for row in found.rows if row.gpus == gpus), None)
        rows.append(
            {
                "gpus": gpus,
                "nodes": spread,
                "cpus_per_gpu": cpus,
                "useful_cpus_per_gpu": row.useful_cpus if row else None,
                "near_equal_gpus": row.instead if row else None,
                "why_none": found.unusable.get(gpus),
                "breakdown_s": row.parts._asdict() if row else None,
                "plans": [{**one._asdict(), "plan": str(one.plan)} for one in book.all_that_fit(0, gpus, spread, cpus)],
                "rejected": [
                    {"plan": str(plan), "obstacle": obstacle, "why": words}
                    for plan, (obstacle, words) in rejected(book, gpus, spread, cpus)
                ],
            }
        )
    site = {name: getattr(found.site, name) for name in found.site.__dataclass_fields__}
    return {"model": model | {"families": sorted(found.model.families)}, "site": site, "allocations": rows}


_MODEL_FIELDS = ("name", "parameters", "layers", "hidden", "heads", "sequence", "global_batch", "recompute")


def _write_json(found: Survey, cpus: int, nodes: int | None, target: str) -> None:
    import json

    text = json.dumps(as_json(found, cpus, nodes), indent=1)
    if target == "-":
        typer.echo(text)
        return
    from thebes.report.files import write_text

    write_text(Path(target), text + "\n")
    typer.echo(f"json: {target}", err=True)
