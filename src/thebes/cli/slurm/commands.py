"""`thebes shims install|remove` and `thebes slurm-shim NAME …`, which the installed programs call."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from thebes.cli.screen import say
from thebes.cli.slurm.options import Stop, help_text
from thebes.jobspec.slurm_options import Option
from thebes.model.errors import UserError
from thebes.protocol.shims import MARK, NAMES, is_shim

SRUN = (
    "srun: error: Thebes has no srun: a script runs once on each of its nodes. Nothing was done.\n"
    "  → inside a script, start ranks with torchrun; from a shell: thebes submit --follow --gpus 2 -- python train.py"
)

app = typer.Typer(
    name="shims", help="Slurm's commands (sbatch, squeue, scancel, sinfo, scontrol) for Thebes.", no_args_is_help=True
)
Where = Annotated[Path, typer.Argument(metavar="DIR", help="A folder for the commands, for instance ~/.thebes/bin.")]
SETTINGS: dict[str, Any] = {
    "hidden": True,
    "context_settings": {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    },
}


@app.command()
def install(folder: Where) -> None:
    """Write the commands into a folder, and tell how to put that folder into the PATH. This changes nothing else."""
    place = folder.expanduser().absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
        foreign = [name for name in NAMES if (place / name).exists() and not is_shim(place / name)]
        if foreign:
            raise UserError(
                f"{place}: there is another {', '.join(foreign)}.", hint="Choose a folder of its own, as ~/.thebes/bin."
            )
        for name in NAMES:
            target = place / name
            target.write_text(_program(name), encoding="utf-8")
            target.chmod(0o755)
    except OSError as failure:
        raise UserError(f"{place}: cannot be written: {failure.strerror or failure}.") from None
    say(f"{place}: {', '.join(NAMES)}")
    real = {path for name in NAMES if (path := real_command(name, besides=place)) is not None}
    if real:
        say(f"note: a real Slurm is installed ({', '.join(sorted(real))}); with this PATH its names mean Thebes:")
    print(f'export PATH={shlex.quote(str(place))}:"$PATH"')


@app.command()
def remove(folder: Where) -> None:
    """Remove the commands again, but only those that `install` made."""
    place = folder.expanduser().absolute()
    mine = [name for name in NAMES if is_shim(place / name)]
    if not mine:
        raise UserError(f"{place}: there is nothing that `thebes shims install` made.")
    for name in mine:
        try:
            (place / name).unlink()
        except OSError as failure:
            raise UserError(f"{place / name}: cannot be removed: {failure.strerror or failure}.") from None
    say(f"{place}: removed {', '.join(mine)}")


def real_command(name: str, besides: Path | None = None) -> str | None:
    """The first program of this name in the PATH that is Slurm's own."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        path = Path(folder or ".", name)
        if path.parent != besides and os.access(path, os.X_OK) and not is_shim(path):
            return str(path)
    return None


def _program(name: str) -> str:
    """The text of a shim. It names the present program by its path, so that `thebes` need not be in the PATH."""
    own = Path(sys.executable).parent / "thebes"
    if own.exists():
        program = shlex.quote(str(own))
    else:
        program = f"{shlex.quote(sys.executable)} -c 'import thebes.cli; thebes.cli.main()'"
    return f'#!/bin/sh\n{MARK} `thebes shims remove` takes it away.\nexec {program} slurm-shim {name} "$@"\n'


def slurm_shim(ctx: typer.Context) -> None:
    """What the commands of `thebes shims install` call: slurm-shim NAME [OPTIONS]."""
    raise typer.Exit(run(list(ctx.args)))


def run(words: list[str]) -> int:
    """Carry out one of Slurm's commands; returns its exit code."""
    if not words or words[0] not in NAMES:
        raise UserError("slurm-shim: the first word is one of " + ", ".join(NAMES) + ".")
    name, *rest = words
    try:
        if name == "srun":
            raise Stop(SRUN)
        module = import_module(f"thebes.cli.slurm.{name}")
        if (told := _asked_about(name, rest, module)) is not None:
            print(told)
            return 0
        command: Callable[[Callable[[], Any], list[str]], int] = getattr(module, name)
        return command(_connect, rest)
    except Stop as stop:
        print(stop.message, file=sys.stderr)
        return stop.code
    except UserError as error:
        say(f"{name}: error: {error.message}" + (f"\n  → {error.hint}" if error.hint else ""))
        return 1


def _asked_about(name: str, words: list[str], module: Any) -> str | None:
    """The answer to --help, --usage and --version, wherever Slurm's own would answer."""
    known: Mapping[str, Option] = module.OPTIONS
    first = words[0] if words else ""
    if first in ("--version", "-V"):
        from thebes import __version__

        return f"thebes {__version__} (as {name})"
    if first in ("--help", "--usage") or (first == "-h" and known["help"].short == "h"):
        return help_text(name, module.ABOUT, known)
    return None


def _connect() -> Any:
    from thebes.cli.live import connect

    return connect(None)
