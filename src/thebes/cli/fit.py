"""`thebes fit` finds the constants of a model from measured iterations, and shows how well they explain these.

The imports stand inside the command, because `thebes --help` must not wait for NumPy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.files import EverythingFile, NodeSize, PlotFile

if TYPE_CHECKING:
    from thebes.perf.plans.fit import Fit, Sample
    from thebes.perf.plans.samples import SampleFile
    from thebes.perf.plans.site import Site
    from thebes.perf.plans.transformer import Transformer

MANY = 40  # of more samples than this, the table shows only the worst
WIDE = 120  # columns, where the output does not go to a screen


def fit(
    samples: Annotated[
        Path,
        typer.Argument(
            metavar="SAMPLES.csv",
            help="model,plan,gpus,nodes,cpus,iteration_s; or Rubick's placements.csv, or vTrain's CSV. Plain or gzip.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="llama-2-7b, …, or a file: my-model.toml, config.json. Default: as in the CSV."
        ),
    ] = None,
    gpu_type: Annotated[str | None, typer.Option(help="Default: as in the CSV, else A800-80GB.")] = None,
    node_size: NodeSize = 8,
    batch: Annotated[int | None, typer.Option(help="Global batch; default: the CSV's, else the model's own.")] = None,
    noise: Annotated[float, typer.Option(help="Relative error of a measured iteration.")] = 0.03,
    all_rows: Annotated[bool, typer.Option("--all", help="Show every sample, however many.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="Write the model for `thebes plan`.")] = None,
    json: EverythingFile = None,
    plot: PlotFile = None,
) -> None:
    """Fit the constants of a model to measured iterations, and show predicted against measured."""
    from thebes.model.errors import UserError
    from thebes.perf.plans.fit import fit as fitted
    from thebes.perf.plans.samples import parse_samples
    from thebes.report.files import plot_target

    target = plot_target(plot)
    if save is not None and save.suffix != ".toml":
        raise UserError(f"--save {save}: the name must end in .toml", hint=f"write {save.stem}.toml")
    if not 0 < noise < 1:
        raise UserError(f"--noise {noise:g} is not a share between 0 and 1", hint="write --noise 0.03 for 3 %")
    found = parse_samples(_read(samples), samples.name)
    what, rows = _model_and_samples(found, model, batch, samples.name)
    site = _site(gpu_type or found.gpu_type or "A800-80GB", node_size)
    result = fitted(what, site, rows, noise=noise)
    if json != "-":
        _print(result, site, all_rows)
    if json is not None:
        _write_json(result, site, json)
    if save is not None:
        from thebes.report.files import write_text

        write_text(save, as_toml(what, result, site))
        where = "" if site.gpu_type == "A800-80GB" else f" --gpu-type {site.gpu_type}"
        typer.echo(f"model: {save} (thebes plan {save}{where})", err=True)
    if target is not None:
        from thebes.report.fit import write_plot

        write_plot(result, site, target)
        typer.echo(f"plot: {target}", err=True)


def _read(path: Path) -> str:
    import gzip

    from thebes.model.errors import UserError

    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", hint="a CSV with model,plan,gpus,nodes,cpus,iteration_s") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}", hint="expected CSV in UTF-8, plain or gzip") from None


def _model_and_samples(
    found: SampleFile, asked: str | None, batch: int | None, where: str
) -> tuple[Transformer, list[Sample]]:
    """The model that is asked for, and its samples. If the file holds only one model, nobody needs to name it."""
    from thebes.model.errors import UserError
    from thebes.perf.plans.transformer import find, with_batch

    named = [name for name in found.samples if name]
    if not any(found.samples.values()):
        raise UserError(f"{where}: no samples", hint="a header and at least seven rows")
    if asked is None and not named:
        raise UserError(
            f"{where}: no column 'model'", hint="add it, or say --model llama-2-7b or --model my-model.toml"
        )
    if asked is None and len(found.samples) > 1:
        listed = ", ".join(f"{name or '(none)'} ({len(rows)})" for name, rows in found.samples.items())
        raise UserError(f"{where}: samples of {len(found.samples)} models: {listed}", hint=f"add --model {named[0]}")
    name = asked or named[0]
    key = _key_of(found, name, where)
    rows = list(found.samples[key])
    what = found.shapes[key] if key in found.shapes else find(name)
    if batch is not None:
        rows = [replace(row, batch=batch) for row in rows]
    batches = {row.batch for row in rows} - {0}
    return (with_batch(what, min(batches)) if len(batches) == 1 else what), rows


def _key_of(found: SampleFile, name: str, where: str) -> str:
    """The word that the file has for this model: the model's own name, an alias of it, or none at all."""
    from thebes.model.errors import UserError, nearest
    from thebes.perf.plans.transformer import catalogue

    if name in found.samples:
        return name
    if set(found.samples) == {""}:
        return ""
    known = catalogue()
    same = [key for key in found.samples if name in known and key in known and known[key].name == known[name].name]
    if same:
        return same[0]
    stem = Path(name).stem
    if stem in found.samples:
        return stem
    if name.endswith((".toml", ".json")) and len(found.samples) == 1:
        return next(iter(found.samples))
    raise UserError(f"{where}: no samples of model '{name}'", hint=nearest(name, list(found.samples)))


def _site(gpu_type: str, node_size: int) -> Site:
    from thebes.model.errors import UserError
    from thebes.perf.plans.site import site_of_gpu

    if not 1 <= node_size <= 1024:
        raise UserError(f"--node-size {node_size} is not between 1 and 1,024", hint="write --node-size 8")
    site = site_of_gpu(gpu_type)
    return replace(
        site, node_gpus=node_size, node_cpus=node_size * site.cpus_per_gpu, node_gib=node_size * site.host_gib
    )


# Output for people.

MEANING = {
    "k_bwd": "backward pass, in forward passes",
    "k_sync": "overlap of backward pass and gradient exchange (1: none)",
    "k_opt": "s per billion parameters: update on the GPU",
    "k_opt_off": "CPU-s per billion parameters: update on the host",
    "k_off": "overlap of gradient exchange and gradients to the host",
    "k_swap": "overlap of update on the host and weights to the GPU",
    "k_const": "s of every iteration",
}


def _print(result: Fit, site: Site, all_rows: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=WIDE)
    console.print(
        f"[bold]{result.model}[/bold] on {site.gpu_type}: {len(result.samples)} samples, mean error "
        f"{result.mean_error:.1%}, worst {result.worst_error:.1%}",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("constant", style="bold", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for name, value in result.constants._asdict().items():
        table.add_row(name, f"{value:.4g}", MEANING[name] + (", at its bound" if name in result.at_bounds else ""))
    how = "fitted too" if result.forward_fitted else "as profiled"
    table.add_row("forward", f"{result.forward_s:.4g}", f"s per sample on one GPU, {how}")
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("plans", style="bold", no_wrap=True)
    for name in ("samples", "mean error", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in result.kinds:
        table.add_row(kind.kind, str(kind.samples), f"{kind.mean:.1%}", f"{kind.worst:.1%}")
    console.print(table)
    order = range(len(result.samples))
    if len(result.samples) > MANY and not all_rows:
        order = sorted(sorted(order, key=lambda i: -abs(result.errors[i]))[:MANY])
        console.print(f"the {MANY} worst of {len(result.samples)} samples; --all shows them all", style="dim")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan", style="bold", no_wrap=True)
    for name in ("GPUs", "nodes", "CPUs", "measured s", "predicted s", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for i in order:
        sample, error = result.samples[i], result.errors[i]
        table.add_row(
            str(sample.plan),
            str(sample.gpus),
            str(sample.nodes),
            f"{sample.cpus:g}",
            f"{sample.iteration_s:.4g}",
            f"{result.predicted_s[i]:.4g}",
            f"{error:+.1%}",
            style="yellow" if abs(error) > 0.1 else None,
        )
    console.print(table)
    for warning in (*result.warnings, *_elsewhere(site)):
        typer.echo(f"note: {warning}", err=True)


def _elsewhere(site: Site) -> tuple[str, ...]:
    from thebes.perf.plans.site import A800

    if site.gpu_type == A800.gpu_type:
        return ()
    return (
        f"what links and kernels reach of their data sheets is known of {A800.gpu_type} only, not of {site.gpu_type}",
    )


# Output for programs.


def as_json(result: Fit, site: Site) -> dict[str, Any]:
    return {
        "model": result.model,
        "gpu_type": site.gpu_type,
        "constants": result.constants._asdict(),
        "forward_s": result.forward_s,
        "forward_fitted": result.forward_fitted,
        "at_bounds": list(result.at_bounds),
        "warnings": list(result.warnings),
        "mean_error": result.mean_error,
        "worst_error": result.worst_error,
        "plans": [kind._asdict() for kind in result.kinds],
        "samples": [
            {
                "plan": str(sample.plan),
                "gpus": sample.gpus,
                "nodes": sample.nodes,
                "cpus": sample.cpus,
                "measured_s": sample.iteration_s,
                "predicted_s": predicted,
                "error": error,
            }
            for sample, predicted, error in zip(result.samples, result.predicted_s, result.errors, strict=True)
        ],
    }


def _write_json(result: Fit, site: Site, target: str) -> None:
    import json

    text = json.dumps(as_json(result, site), indent=1)
    if target == "-":
        typer.echo(text)
        return
    from thebes.report.files import write_text

    write_text(Path(target), text + "\n")
    typer.echo(f"json: {target}", err=True)


def as_toml(model: Transformer, result: Fit, site: Site) -> str:
    """The model with its constants, in the form that `thebes plan` reads."""
    families = ", ".join(f'"{family}"' for family in sorted(model.families))
    lines = [
        f"# {len(result.samples)} samples on {site.gpu_type}: mean error {result.mean_error:.1%}, "
        f"worst {result.worst_error:.1%}",
        f'name = "{model.name}"',
        f"parameters = {model.parameters!r}",
        *(
            f"{key} = {getattr(model, key)}"
            for key in ("layers", "hidden", "heads", "sequence", "vocabulary", "global_batch")
        ),
        f"plans = [{families}]",
        f"recompute = {str(model.recompute).lower()}",
        f'forward_ms = {{ "{site.gpu_type}" = {1e3 * result.forward_s:.6g} }}',
        "",
        "[constants]",
        *(f"{name} = {value:.6g}" for name, value in result.constants._asdict().items()),
    ]
    return "\n".join(lines) + "\n"
