"""`thebes top` shows GPUs, their jobs and the queue on one screen. It is the one live command that is worth Rich."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.jobs import job_columns
from thebes.cli.live import ACTIVE, WAITING, Folder, connect
from thebes.cli.nodes import NODE_STYLES, holders, node_state
from thebes.cli.screen import STATE_STYLES, clean, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from thebes.client import Client

# Neighbouring jobs should differ at a glance, and a job keeps its colour from frame to frame.
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "bright_green", "bright_magenta")
ROWS = 200  # so many jobs are asked for; a screen holds fewer


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.2, max=60, metavar="SECONDS", help="Refresh.")] = 1.0,
    folder: Folder = None,
) -> None:
    """Show GPUs, the jobs that hold them, and the queue, live. q or Ctrl-C leaves."""
    from rich.console import Console
    from rich.live import Live

    from thebes.client import ServerError

    console = Console(highlight=False)
    with connect(folder) as client:
        if once or not console.is_terminal:
            console.print(_screen(client, None))
            return
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    try:
                        live.update(_screen(client, console.height), refresh=True)
                    except ServerError as error:
                        live.update(f"[red]{clean(error.message)}[/red]\n  → {clean(error.hint)}", refresh=True)
                    if pressed(every):
                        return
            except KeyboardInterrupt:
                return


def _no_keys(wait_s: float) -> bool:
    time.sleep(wait_s)
    return False


@contextmanager
def _keys() -> Generator[Any, None, None]:
    """Read single keys: `pressed(s)` waits for so many seconds and returns whether the key was q."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield _no_keys
        return
    stream = sys.stdin.fileno()
    before = termios.tcgetattr(stream)

    def pressed(wait_s: float) -> bool:
        ready, _, _ = select.select([stream], [], [], wait_s)
        return bool(ready) and sys.stdin.read(1) in "qQ\x1b"

    try:
        tty.setcbreak(stream)
        yield pressed
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)


def _screen(client: Client, height: int | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    status, nodes = client.status(), client.nodes()
    running = client.jobs_page(limit=ROWS, state=list(ACTIVE))["jobs"]
    waiting = client.jobs_page(limit=ROWS, state=list(WAITING), oldest=True)
    counts = status.get("jobs") or {}
    room = None if height is None else max(2, (height - len(nodes) - 9) // 2)
    return Group(
        _headline(status, nodes),
        Text(),
        _gpu_map(nodes),
        Text(),
        _job_table(f"running  {sum(counts.get(state, 0) for state in ACTIVE) or len(running):,}", running, room, True),
        Text(),
        _job_table(
            f"waiting  {sum(counts.get(state, 0) for state in WAITING) or len(waiting['jobs']):,}",
            waiting["jobs"],
            room,
            False,
        ),
    )


def _headline(status: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.text import Text

    gpus = [gpu for node in nodes for gpu in node["gpus"]]
    busy = sum(1 for gpu in gpus if holders(gpu))
    line = Text.assemble(
        ("Thebes", "bold"),
        f"  {status.get('policy', '')}  ",
        (f"{busy} of {plural(len(gpus), 'GPU')} held", "green" if busy else "dim"),
        f"  {plural(len(nodes), 'node')}",
        (time.strftime("  %H:%M:%S"), "dim"),
    )
    if status.get("trouble"):
        line.append(f"\n{clean(status['trouble'])}", style="bold red")
    return line


def colour_of(job: str) -> str:
    if job == "?":
        return "white"
    number, _, member = job.partition("_")
    return COLOURS[(int(number) + int(member or 0)) % len(COLOURS)]


def _gpu_map(nodes: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A row per node, and a cell per GPU with the id of the job that holds it."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    for node in nodes:
        state = node_state(node)
        cells = [Text(clean(node["name"]), style="bold"), Text(state, style=NODE_STYLES.get(state, ""))]
        for gpu in node["gpus"]:
            held = holders(gpu)
            if not gpu.get("healthy", True):
                cells.append(Text("✗", style="red"))
            elif held:
                cells.append(Text("+".join(held), style=f"reverse {colour_of(held[0])}"))
            elif gpu.get("taken"):  # by work of other people, beside Thebes
                cells.append(Text("×", style="yellow"))
            else:
                cells.append(Text("·", style="dim"))
        grid.add_row(*cells)
    return grid


def _job_table(title: str, jobs: Sequence[Mapping[str, Any]], room: int | None, runs: bool) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    shown = jobs if room is None else jobs[:room]
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), expand=True)
    grid.add_column(title, no_wrap=True, min_width=12)  # the title stands where ID would
    known = {column.title: column for column in job_columns(time.time())}
    columns = [known[name] for name in ("NAME", "USER", "STATE", "GPUS", "RAN" if runs else "WAITED", "WHY")]
    for column in columns:
        title = column.title.lower() if column.title != "GPUS" else "GPUs"
        grid.add_column(
            title, no_wrap=True, justify="right" if column.right else "left", ratio=1 if column.title == "WHY" else None
        )
    for job in shown:
        styles = {"STATE": STATE_STYLES.get(job["state"], ""), "WHY": "dim"}
        grid.add_row(
            Text(job["id"], style=f"bold {colour_of(job['id'])}" if runs else "bold"),
            *(Text(clean(column.cell(job)), style=styles.get(column.title, "")) for column in columns),
        )
    if len(jobs) > len(shown):
        grid.add_row(Text("…", style="dim"), Text(f"{len(jobs) - len(shown):,} more", style="dim"))
    return grid
