"""`thebes top`: one screen with GPUs, who holds them, and the queue. The one live command that is worth Rich."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.jobs import ran_s, waited_s, why
from thebes.cli.live import ACTIVE, WAITING, Folder, connect
from thebes.cli.nodes import NODE_STYLES, holders, node_state
from thebes.cli.screen import STATE_STYLES, clean, duration, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from thebes.client import Client

# Neighbouring jobs should differ at a glance; the same job keeps its colour from frame to frame.
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "bright_green", "bright_magenta")
ROWS = 200  # jobs asked for; a screen holds fewer


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.2, max=60, metavar="SECONDS", help="Refresh.")] = 1.0,
    folder: Folder = None,
) -> None:
    """Show GPUs, who holds them, and the queue, live. q or Ctrl-C leaves."""
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


@contextmanager
def _keys() -> Iterator[Any]:
    """Read single keys: `pressed(s)` waits so long and says whether it was q."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield lambda wait_s: bool(time.sleep(wait_s))
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


def _headline(status: dict[str, Any], nodes: list[dict[str, Any]]) -> RenderableType:
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


def _gpu_map(nodes: list[dict[str, Any]]) -> RenderableType:
    """A row per node, a cell per GPU with the id of whoever holds it."""
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
            elif gpu.get("taken"):  # by somebody whose work is not ours
                cells.append(Text("×", style="yellow"))
            else:
                cells.append(Text("·", style="dim"))
        grid.add_row(*cells)
    return grid


def _job_table(title: str, jobs: list[dict[str, Any]], room: int | None, runs: bool) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    shown = jobs if room is None else jobs[:room]
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), expand=True)
    grid.add_column(title, no_wrap=True, min_width=12)
    grid.add_column("name", no_wrap=True)
    grid.add_column("user", no_wrap=True)
    grid.add_column("state", no_wrap=True)
    grid.add_column("GPUs", justify="right", no_wrap=True)
    grid.add_column("ran" if runs else "waited", justify="right", no_wrap=True)
    grid.add_column("why", no_wrap=True, ratio=1)
    now_s = time.time()
    for job in shown:
        grid.add_row(
            Text(job["id"], style=f"bold {colour_of(job['id'])}" if runs else "bold"),
            Text(clean(job["name"] or "–")),
            Text(clean(job["user"])),
            Text(job["state"], style=STATE_STYLES.get(job["state"], "")),
            str(job["gpus"]),
            duration(ran_s(job, now_s) if runs else waited_s(job, now_s)),
            Text(clean(why(job)), style="dim"),
        )
    if len(jobs) > len(shown):
        grid.add_row(Text("…", style="dim"), Text(f"{len(jobs) - len(shown):,} more", style="dim"))
    return grid
