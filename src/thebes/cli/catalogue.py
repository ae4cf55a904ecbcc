"""`thebes policies`, `thebes placements` and `thebes perf` list what there is to choose from, and its parameters."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

policies = typer.Typer(help="List the policies, or show one.", invoke_without_command=True)


@policies.callback()
def list_policies(ctx: typer.Context) -> None:
    """List the policies, or show one: `thebes policies show tiresias-l`."""
    if ctx.invoked_subcommand is not None:
        return
    from rich import box
    from rich.table import Table

    from thebes.live.config import CARRIED
    from thebes.model.facts import DURATIONS
    from thebes.policy import registry
    from thebes.policy.admission import runs_live_on

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", style="bold", no_wrap=True)
    table.add_column("what it does")
    table.add_column("needs to know")
    table.add_column("runs live")
    for name, policy in registry().items():
        need = "durations (oracle)" if DURATIONS in policy.needs else ", ".join(sorted(policy.needs)) or "nothing"
        table.add_row(name, _first_sentence(policy), need, runs_live_on(policy(), CARRIED))
    console = _console()
    console.print(table)
    console.print("`thebes policies show NAME` tells more; docs/policies.md has it all.", style="dim", highlight=False)


@policies.command("show")
def show_policy(name: Annotated[str, typer.Argument(help="A policy's name.")]) -> None:
    """Show what a policy is, its paper, its parameters, and what it needs to know."""
    from thebes.live.config import CARRIED
    from thebes.model.facts import NEEDS
    from thebes.policy import find
    from thebes.policy.admission import runs_live_on

    policy = find(name)
    console = _console()
    console.print(f"[bold]{policy.name or name}[/bold]", highlight=False)
    console.print(inspect.cleandoc(policy.__doc__ or ""), highlight=False)
    console.print()
    if policy.paper:
        console.print(f"[dim]paper:[/dim] {policy.paper}", highlight=False)
    needs = "; ".join(NEEDS.get(need, need) for need in sorted(policy.needs)) or "nothing beyond what it has seen"
    console.print(f"[dim]needs to know:[/dim] {needs}", highlight=False)
    for fact, instead in policy.uses.items():
        console.print(f"[dim]where {fact} is not known:[/dim] {instead}", highlight=False)
    console.print(f"[dim]runs live:[/dim] {runs_live_on(policy(), CARRIED)}", highlight=False)
    console.print(f"[dim]shares a GPU between jobs:[/dim] {'yes' if policy.shares else 'no'}", highlight=False)
    _print_parameters(console, policy, "")


def placements() -> None:
    """List the placements: where a job's GPUs are taken from."""
    from thebes.placement import registry

    console = _console()
    for name, placement in registry().items():
        console.print(f"[bold]{name}[/bold]  {inspect.cleandoc(placement.__doc__ or '')}", highlight=False)
        _print_parameters(console, placement, "placement.")


def perf() -> None:
    """List the models of how fast a placed job runs, contention and interference, and the networks by name."""
    from thebes.perf import registry
    from thebes.perf.contention import Contention
    from thebes.perf.interference import Interference

    console = _console()
    for name, model in registry().items():
        console.print(f"[bold]{name}[/bold]  {inspect.cleandoc(model.__doc__ or '')}", highlight=False)
        _print_parameters(console, model, "perf.")
    console.print("[bold]With any of them:[/bold]", highlight=False)
    for name, wrapper in (("contention", Contention), ("interference", Interference)):
        console.print(f"[bold]{name}[/bold]  {inspect.cleandoc(wrapper.__doc__ or '')}", highlight=False)
        _print_parameters(console, wrapper, f"{name}.")
    _print_networks(console)


def _print_networks(console: Console) -> None:
    from rich import box
    from rich.table import Table

    from thebes.model.links import NETWORKS, PRESETS

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("--network", style="bold", no_wrap=True)
    table.add_column("inside a node")
    table.add_column("between nodes")
    for name, links in NETWORKS.items():
        table.add_row(name, *(f"{link}, {PRESETS[link].bandwidth_gbps:,.0f} Gb/s" for link in links))
    console.print(table)


def _print_parameters(console: Console, owner: type, prefix: str) -> None:
    from rich import box
    from rich.table import Table

    from thebes.model.parameters import parameters_of, show_value

    known = parameters_of(owner)
    if not known:
        console.print("[dim]parameters:[/dim] none" if not prefix else "", highlight=False)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("--set", style="bold", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("meaning")
    for info in known.values():
        table.add_row(prefix + info.name, show_value(info.default), info.doc)
    console.print(table)


def _first_sentence(owner: type) -> str:
    text = " ".join(inspect.cleandoc(owner.__doc__ or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".") + "."


def _console() -> Console:
    from rich.console import Console

    return Console()
