"""The commands about nodes: `thebes nodes`, `drain` and `undrain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from thebes.cli.live import Folder, ShortOutput, ShortOutputOption, connect
from thebes.cli.screen import TableColumn, print_json, say, table_of, terminal_width

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="A node's name; `thebes nodes` lists them.")]
NODE_STYLES = {"up": "green", "down": "red", "drained": "yellow"}


def nodes(output: ShortOutputOption = ShortOutput.table, folder: Folder = None) -> None:
    """List nodes, their GPUs and the jobs that hold them."""
    with connect(folder) as client:
        found = client.nodes()
    if output is ShortOutput.json:
        print_json({"nodes": found, "next": None})
    else:
        print("\n".join(node_table(found)))


COLUMNS = (
    TableColumn("NODE", lambda node: node["name"]),
    TableColumn("STATE", lambda node: node_state(node)),
    TableColumn("GPUS", lambda node: str(len(node["gpus"])), right=True),
    TableColumn("FREE", lambda node: str(sum(1 for gpu in node["gpus"] if is_free(gpu))), right=True),
    TableColumn("TYPE", lambda node: "/".join(sorted({_kind(gpu) for gpu in node["gpus"]}))),
    TableColumn("JOB:GPUS", lambda node: _jobs(node["gpus"]) or "–"),
    TableColumn(
        "REASON", lambda node: str(node.get("reason") or node.get("detail") or "") or "; ".join(_others(node["gpus"]))
    ),
)


def node_table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per node: state, GPUs, and which of them each job holds."""
    return table_of(COLUMNS, found, width=terminal_width(), styles=NODE_STYLES)


def _jobs(gpus: Sequence[Mapping[str, Any]]) -> str:
    held: dict[str, list[str]] = {}
    for gpu in gpus:
        for job in holders(gpu):
            held.setdefault(job, []).append(str(gpu["index"]))
    return "  ".join(f"{job}:{','.join(places)}" for job, places in held.items())


def node_state(node: Mapping[str, Any]) -> str:
    if not node.get("alive", True):
        return "down"
    return "drained" if node.get("drained") else "up"


def holders(gpu: Mapping[str, Any]) -> list[str]:
    """What is on a GPU: the ids of jobs, with `?` for a job that we may not see."""
    if gpu.get("job"):
        return [str(gpu["job"])]
    return ["?"] if gpu.get("busy") else []


def is_free(gpu: Mapping[str, Any]) -> bool:
    return not holders(gpu) and not gpu.get("taken") and bool(gpu.get("healthy", True))


def _others(gpus: list[dict[str, Any]]) -> list[str]:
    """What keeps GPUs from us: other people's work, or a fault of the GPU."""
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        if not holders(gpu):
            why = str(gpu.get("taken") or "") or ("" if gpu.get("healthy", True) else "sick")
            if why:
                found.setdefault(why, []).append(str(gpu["index"]))
    return [f"GPU{'s' if len(places) > 1 else ''} {','.join(places)}: {why}" for why, places in found.items()]


def _kind(gpu: Mapping[str, Any]) -> str:
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
