"""`thebes nodes`, `drain` and `undrain`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from thebes.cli.live import Folder, ShortFormat, ShortOutput, connect
from thebes.cli.screen import coloured, print_json, say, table, terminal_width

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="A node's name; `thebes nodes` lists them.")]
NODE_STYLES = {"up": "green", "down": "red", "drained": "yellow"}


def nodes(output: ShortFormat = ShortOutput.table, folder: Folder = None) -> None:
    """List nodes, their GPUs and who holds them."""
    with connect(folder) as client:
        found = client.nodes()
    if output is ShortOutput.json:
        print_json({"nodes": found, "next": None})
    else:
        print("\n".join(node_table(found)))


def node_table(found: list[dict[str, Any]]) -> list[str]:
    """A line per node: state, GPUs, and which of them each job holds."""
    rows = []
    for node in found:
        gpus = node["gpus"]
        held: dict[str, list[str]] = {}
        for gpu in gpus:
            for job in holders(gpu):
                held.setdefault(job, []).append(str(gpu["index"]))
        names = sorted({_kind(gpu) for gpu in gpus})
        free = sum(1 for gpu in gpus if is_free(gpu))
        jobs = "  ".join(f"{job}:{','.join(places)}" for job, places in held.items())
        reason = str(node.get("reason") or node.get("detail") or "") or "; ".join(_others(gpus))
        rows.append([node["name"], node_state(node), str(len(gpus)), str(free), "/".join(names), jobs or "–", reason])
    columns = ["NODE", "STATE", "GPUS", "FREE", "TYPE", "JOB:GPUS", "REASON"]
    return table(columns, rows, right=("GPUS", "FREE"), width=terminal_width(), style=coloured(1, NODE_STYLES))


def node_state(node: dict[str, Any]) -> str:
    if not node.get("alive", True):
        return "down"
    return "drained" if node.get("drained") else "up"


def holders(gpu: dict[str, Any]) -> list[str]:
    """Who is on a GPU: a job's id, or `?` for one that we may not see."""
    if gpu.get("job"):
        return [str(gpu["job"])]
    return ["?"] if gpu.get("busy") else []


def is_free(gpu: dict[str, Any]) -> bool:
    return not holders(gpu) and not gpu.get("taken") and bool(gpu.get("healthy", True))


def _others(gpus: list[dict[str, Any]]) -> list[str]:
    """What keeps GPUs from us: somebody else's work, or that they are sick."""
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        if not holders(gpu):
            why = str(gpu.get("taken") or "") or ("" if gpu.get("healthy", True) else "sick")
            if why:
                found.setdefault(why, []).append(str(gpu["index"]))
    return [f"GPU{'s' if len(places) > 1 else ''} {','.join(places)}: {why}" for why, places in found.items()]


def _kind(gpu: dict[str, Any]) -> str:
    return "virtual" if gpu.get("virtual") else str(gpu.get("name") or "GPU")


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
