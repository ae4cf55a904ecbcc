"""What the live commands share: options, the connection, and a way to do one thing to several jobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.screen import say
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from thebes.client import Client


class Output(StrEnum):
    table = "table"
    wide = "wide"
    json = "json"


class ShortOutput(StrEnum):
    table = "table"
    json = "json"


Folder = Annotated[
    str | None,
    typer.Option("--dir", metavar="DIR", help="Folder of the instance; default THEBES_DIR, then ~/.thebes."),
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="table, wide (all columns) or json.")]
ShortOutputOption = Annotated[ShortOutput, typer.Option("--output", "-o", help="table or json.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as 17, or 17_3 in an array.")]
JobsArgument = Annotated[list[str], typer.Argument(metavar="JOB…", help="Ids, as 17, or 17_3; 17 names a whole array.")]

TERMINAL = ("completed", "failed", "cancelled", "timeout")
ACTIVE = ("running", "starting", "preempting", "suspended")
WAITING = ("queued", "held")
STATES = (*ACTIVE, *WAITING, *TERMINAL)


def connect(folder: str | None) -> Client:
    """The client of the chosen instance. This sends nothing yet."""
    import sys

    # httpx would import Rich and Click for a command line of its own: a fifth of a second that nobody needs here.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    from thebes.client import Client

    return Client(dir=folder)


def job_id(text: str) -> str:
    """Check an id before it is sent. Forms that other tools print, such as `#17` and `17_[3]`, are understood."""
    clean = text.strip().lstrip("#")
    if not re.fullmatch(r"[1-9]\d{0,11}(_\d{1,6})?", clean):
        raise UserError(
            f"'{text}' is not a job id.", hint="Ids look like 17, or 17_3 in an array; `thebes ps -a` lists them."
        )
    return clean


def for_each(texts: Iterable[str], act: Callable[[str], Any]) -> None:
    """Do something for each of several jobs; each error names its job, and one error makes the exit code 1.

    If no cluster answers, that concerns all of the jobs, so it is not caught here and is told only once.
    """
    from thebes.client import ServerError

    failed = False
    for text in dict.fromkeys(texts):
        try:
            checked = job_id(text)
        except UserError as error:
            failed = True
            tell(error)
            continue
        try:
            act(checked)
        except ServerError as error:
            if error.status == 0:  # there was no answer at all
                raise
            failed = True
            tell(error, about=text)
    if failed:
        raise typer.Exit(1)


def tell(error: UserError, about: str = "") -> None:
    """Print an error that does not end the command. `about` is put in front, unless the message names it already."""
    named = not about or re.search(rf"(?<!\d){re.escape(about)}(?!\d)", error.message) is not None
    say(f"error: {error.message}" if named else f"error: {about}: {error.message}")
    if error.hint:
        say(f"  → {error.hint}")
