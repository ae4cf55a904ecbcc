"""`thebes nodes`, `drain` and `undrain`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from thebes.cli.live import Folder, ShortFormat, ShortOutput, connect
from thebes.cli.screen import print_json, say

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="A node's name; `thebes nodes` lists them.")]
NODE_STYLES = {"up": "green", "down": "red", "drained": "yellow", "draining": "yellow"}


def nodes(output: ShortFormat = ShortOutput.table, folder: Folder = None) -> None:
    """List nodes, their GPUs and who holds them."""
    with connect(folder) as client:
        found = client.nodes()
    if output is ShortOutput.json:
        print_json({"nodes": found, "next": None})
    else:
        print("\n".join(node_table(found)))


def node_table(found: list[dict[str, Any]]) -> list[str]:
    return [str(node) for node in found]


def drain(
    node: NodeName,
    reason: Annotated[str, typer.Option(help="Why; shown to everybody.")] = "",
    preempt: Annotated[bool, typer.Option("--preempt", help="Move its jobs away now, by checkpoint.")] = False,
    folder: Folder = None,
) -> None:
    """Start nothing more on a node, for instance before maintenance; running jobs may end there."""
    with connect(folder) as client:
        client.drain(node, reason=reason, preempt=preempt)
    rest = "its jobs are asked to go" if preempt else "running jobs go on; --preempt moves them away"
    say(f"{node}: drained; {rest}. `thebes undrain {node}` takes it back.")


def undrain(node: NodeName, folder: Folder = None) -> None:
    """Use a drained node again."""
    with connect(folder) as client:
        client.undrain(node)
    say(f"{node}: in use again")
