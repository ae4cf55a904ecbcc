"""The command line: thin. Each command parses, calls, prints; what it needs beyond Typer it imports when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from thebes.cli import catalogue, simulate, trace

app = typer.Typer(
    name="thebes",
    help="Schedule deep-learning training on GPU clusters, and simulate it with the very same policies.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("simulate")(simulate.simulate)
app.command("compare")(simulate.compare)
app.add_typer(catalogue.policies, name="policies")
app.command("placements")(catalogue.placements)
app.add_typer(trace.app, name="trace")


def _version(wanted: bool) -> None:
    if wanted:
        from thebes import __version__

        typer.echo(f"thebes {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a UserError becomes one message on stderr and exit code 2."""
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, for instance `| head`
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        from thebes.model.errors import UserError

        if not isinstance(error, UserError):
            raise
        typer.echo(f"error: {error.message}", err=True)
        if error.hint:
            typer.echo(f"  → {error.hint}", err=True)
        sys.exit(2)
