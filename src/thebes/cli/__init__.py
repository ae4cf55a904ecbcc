"""The command line, which is thin: each command parses, calls and prints, and imports what it needs when it runs.

Only the command that was asked for is imported and built: with thirty of them, building all takes longer than most
answers. `thebes --help`, completion and typing errors build them all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer

from thebes.cli.quick import QuickCommand, QuickGroup

LIVE_PACKAGES = ("fastapi", "httpx", "prometheus_client", "psutil", "pydantic", "sqlalchemy", "uvicorn", "yaml")
SIMULATE, JOBS, CLUSTER, ADMIN = "Simulate", "Jobs", "Live cluster", "Administration"


@dataclass(frozen=True)
class LazyCommand:
    """A command, or a group of commands, and the module and function in which it is written."""

    module: str
    attribute: str
    panel: str
    is_group: bool = False
    settings: str = ""  # the name of a dict of further arguments for Typer
    hidden: bool = False  # other programs call it, not people


COMMANDS = {
    "simulate": LazyCommand("simulate", "simulate", SIMULATE),
    "compare": LazyCommand("simulate", "compare", SIMULATE),
    "rehearse": LazyCommand("rehearse", "rehearse", SIMULATE),
    "policies": LazyCommand("catalogue", "policies", SIMULATE, is_group=True),
    "placements": LazyCommand("catalogue", "placements", SIMULATE),
    "perf": LazyCommand("catalogue", "perf", SIMULATE),
    "plan": LazyCommand("plan", "plan", SIMULATE),
    "fit": LazyCommand("fit", "fit", SIMULATE),
    "trace": LazyCommand("trace", "app", SIMULATE, is_group=True),
    "import": LazyCommand("import_history", "app", SIMULATE, is_group=True),
    "up": LazyCommand("instance", "up", CLUSTER),
    "down": LazyCommand("instance", "down", CLUSTER),
    "status": LazyCommand("instance", "status", CLUSTER),
    "doctor": LazyCommand("instance", "doctor", CLUSTER),
    "engine": LazyCommand("engine", "app", CLUSTER, is_group=True),
    "top": LazyCommand("top", "top", CLUSTER),
    "nodes": LazyCommand("nodes", "nodes", CLUSTER),
    "events": LazyCommand("follow", "events", CLUSTER),
    "submit": LazyCommand("submit", "submit", JOBS, settings="SETTINGS"),
    "ps": LazyCommand("jobs", "ps", JOBS),
    "show": LazyCommand("jobs", "show", JOBS),
    "logs": LazyCommand("follow", "logs", JOBS),
    "attach": LazyCommand("follow", "attach", JOBS),
    "wait": LazyCommand("act", "wait", JOBS),
    "cancel": LazyCommand("act", "cancel", JOBS),
    "hold": LazyCommand("act", "hold", JOBS),
    "release": LazyCommand("act", "release", JOBS),
    "requeue": LazyCommand("act", "requeue", JOBS),
    "preempt": LazyCommand("act", "preempt", JOBS),
    "shims": LazyCommand("slurm.commands", "app", JOBS, is_group=True),
    "slurm-shim": LazyCommand("slurm.commands", "slurm_shim", JOBS, settings="SETTINGS", hidden=True),
    "drain": LazyCommand("nodes", "drain", ADMIN),
    "undrain": LazyCommand("nodes", "undrain", ADMIN),
    "backup": LazyCommand("backup", "backup", ADMIN),
    "restore": LazyCommand("backup", "restore", ADMIN),
    "replay": LazyCommand("replay", "replay", ADMIN),
    "token": LazyCommand("instance", "token", ADMIN, is_group=True),
    "tenant": LazyCommand("instance", "tenant", ADMIN, is_group=True),
}


def _version(wanted: bool) -> None:
    if wanted:
        from thebes import __version__

        typer.echo(f"thebes {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


def build(words: Sequence[str] = ()) -> typer.Typer:
    """The part of the command line that these words need."""
    app = typer.Typer(
        name="thebes",
        cls=QuickGroup,
        help="Schedule deep-learning training on GPU clusters, and simulate it with the very same policies.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    wanted = words[0] if words else ""
    only_names = list(words) in (["--help"], ["-h"])
    names = [wanted] if wanted in COMMANDS and "_THEBES_COMPLETE" not in os.environ else COMMANDS
    for name in names:
        entry = COMMANDS[name]
        if only_names and entry.hidden:
            continue
        module = import_module(f"thebes.cli.{entry.module}")
        found = getattr(module, entry.attribute)
        if only_names:
            app.command(name, rich_help_panel=entry.panel)(_name_of(found))
        elif entry.is_group:
            app.add_typer(found, name=name, rich_help_panel=entry.panel)
        else:
            more: dict[str, Any] = {"cls": QuickCommand, **(getattr(module, entry.settings) if entry.settings else {})}
            app.command(name, rich_help_panel=entry.panel, **more)(found)
    return app


def _name_of(command: Any) -> Callable[[], None]:
    """A function that stands for a command in the list of commands, where its options do not matter."""

    def stand_in() -> None: ...

    stand_in.__doc__ = command.info.help if isinstance(command, typer.Typer) else command.__doc__
    return stand_in


def __getattr__(name: str) -> typer.Typer:
    """`app` is the whole command line, for programs that want to look at it; building it takes time."""
    if name != "app":
        raise AttributeError(f"module 'thebes.cli' has no attribute '{name}'")
    return build()


def main() -> None:
    """Run the command line; a UserError becomes one message on stderr and exit code 2."""
    try:
        build(sys.argv[1:])()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the program that read our output has gone, for instance `| head`
        sys.exit(0)
    except Exception as error:
        from thebes.model.errors import UserError

        if isinstance(error, ModuleNotFoundError) and error.name in LIVE_PACKAGES:
            typer.echo(f"error: this command needs the package {error.name}.", err=True)
            typer.echo("  → pip install 'thebes[live]'", err=True)
            sys.exit(2)
        if not isinstance(error, UserError):
            raise
        typer.echo(f"error: {error.message}", err=True)
        if error.hint:
            typer.echo(f"  → {error.hint}", err=True)
        sys.exit(2)
    finally:
        _flush()


def _flush() -> None:
    """Flush what is left; if nothing reads it any more, Python must not complain of that when it exits."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
