"""The command line: thin. Each command parses, calls, prints; what it needs beyond Typer it imports when it runs.

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
class Entry:
    """A command, or a group of commands, and where it is written."""

    module: str
    attribute: str
    panel: str
    is_group: bool = False
    settings: str = ""  # name of a dict of further arguments for Typer
    hidden: bool = False  # not for people: other programs call it


COMMANDS = {
    "simulate": Entry("simulate", "simulate", SIMULATE),
    "compare": Entry("simulate", "compare", SIMULATE),
    "rehearse": Entry("rehearse", "rehearse", SIMULATE),
    "policies": Entry("catalogue", "policies", SIMULATE, is_group=True),
    "placements": Entry("catalogue", "placements", SIMULATE),
    "perf": Entry("catalogue", "perf", SIMULATE),
    "plan": Entry("plan", "plan", SIMULATE),
    "fit": Entry("fit", "fit", SIMULATE),
    "trace": Entry("trace", "app", SIMULATE, is_group=True),
    "import": Entry("import_history", "app", SIMULATE, is_group=True),
    "up": Entry("instance", "up", CLUSTER),
    "down": Entry("instance", "down", CLUSTER),
    "status": Entry("instance", "status", CLUSTER),
    "doctor": Entry("instance", "doctor", CLUSTER),
    "engine": Entry("engine", "app", CLUSTER, is_group=True),
    "top": Entry("top", "top", CLUSTER),
    "nodes": Entry("nodes", "nodes", CLUSTER),
    "events": Entry("follow", "events", CLUSTER),
    "submit": Entry("submit", "submit", JOBS, settings="SETTINGS"),
    "ps": Entry("jobs", "ps", JOBS),
    "show": Entry("jobs", "show", JOBS),
    "logs": Entry("follow", "logs", JOBS),
    "attach": Entry("follow", "attach", JOBS),
    "wait": Entry("act", "wait", JOBS),
    "cancel": Entry("act", "cancel", JOBS),
    "hold": Entry("act", "hold", JOBS),
    "release": Entry("act", "release", JOBS),
    "requeue": Entry("act", "requeue", JOBS),
    "preempt": Entry("act", "preempt", JOBS),
    "shims": Entry("slurm.commands", "app", JOBS, is_group=True),
    "slurm-shim": Entry("slurm.commands", "slurm_shim", JOBS, settings="SETTINGS", hidden=True),
    "drain": Entry("nodes", "drain", ADMIN),
    "undrain": Entry("nodes", "undrain", ADMIN),
    "backup": Entry("backup", "backup", ADMIN),
    "restore": Entry("backup", "restore", ADMIN),
    "replay": Entry("replay", "replay", ADMIN),
    "token": Entry("instance", "token", ADMIN, is_group=True),
    "tenant": Entry("instance", "tenant", ADMIN, is_group=True),
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
    """The command line as far as these words need it."""
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
            more = {"cls": QuickCommand, **(getattr(module, entry.settings) if entry.settings else {})}
            app.command(name, rich_help_panel=entry.panel, **more)(found)
    return app


def _name_of(command: Any) -> Callable[[], None]:
    """Stands for a command in the list of commands, where its options do not matter."""

    def stand_in() -> None: ...

    stand_in.__doc__ = command.info.help if isinstance(command, typer.Typer) else command.__doc__
    return stand_in


def __getattr__(name: str) -> typer.Typer:
    """`app`: the whole command line, for those who want to look at it."""
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
    except BrokenPipeError:  # the reader of our output has gone, for instance `| head`
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
    """If nobody reads what is left, Python shall not complain of that when it leaves."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
