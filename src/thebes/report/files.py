"""Files that a report writes, and errors that tell users what to do if that fails."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

from thebes.model.errors import UserError

INSTALL_HINT = "Install it with: pip install 'thebes[report]'"


def load(module: str, *, needed_for: str) -> ModuleType:
    """A library of the `report` extra, loaded only when it is needed."""
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0].capitalize()
        raise UserError(f"{needed_for} needs {name}, which is not installed.", hint=INSTALL_HINT) from error


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8 with line feeds, and make the folders on the way."""
    make_folder(path.parent)
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except IsADirectoryError as error:
        hint = f"Give a file name, for example {path / 'report.html'}"
        raise UserError(f"cannot write {path}: it is a folder.", hint=hint) from error
    except OSError as error:
        raise unwritable(path, error) from error


PLOTS = (".html", ".png", ".pdf")


def plot_target(plot: str | None) -> Path | None:
    """Where `--plot` is to write; a wrong name is found before anything is computed."""
    if plot is None:
        return None
    path = Path(plot)
    if path.suffix.lower() not in PLOTS:
        raise UserError(f"--plot {plot}: the name must end in {', '.join(PLOTS)}", hint=f"write {path.stem}.html")
    check_target(path)
    return path


def check_target(path: Path) -> None:
    """Find out before a long run, and not after it, that its result cannot be written there."""
    make_folder(path.parent)
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder.", hint="Give a file name.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"cannot write {path}: permission denied.", hint="Choose a place that you may write to.")


def make_folder(path: Path) -> None:
    """Make a folder and the folders above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(
            f"cannot make the folder {path}: a file has that name.", hint="Choose another folder."
        ) from error
    except NotADirectoryError as error:
        raise UserError(
            f"cannot make the folder {path}: a part of the path is a file.", hint="Choose another folder."
        ) from error
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> UserError:
    """The error for a path that cannot be written, with what the system said."""
    reason = (error.strerror or "unknown error").lower()
    return UserError(f"cannot write {path}: {reason}.", hint="Choose a place that you may write to and that has room.")
