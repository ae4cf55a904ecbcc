"""sinfo shows the nodes by state, in Slurm's table. The state of a node follows from that of its GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thebes.cli.slurm.formats import Field, Piece, lines_of, parse_format
from thebes.cli.slurm.jobs import PARTITION
from thebes.cli.slurm.options import Stop, folded, natural, parse, unfolded, warn_of_unused
from thebes.jobspec.slurm_options import NEEDED, Option

DEFAULT = "%9P %.5a %.10l %.6D %.6t %N"
LONG = "%9P %.5a %.10l %.10s %.4r %.8h %.10g %.6D %.11T %N"
NODES = "%{0}N %.6D %.9P %6t"
NODES_LONG = "%{0}N %.6D %.9P %.11T %4c %.8z %.6m %.8d %.6w %.8f %20E"
SUMMARY = "%9P %.5a %.10l %.16F %N"
REASONS = "%20E %9u %19H %N"

# For each short state: the long one, and the number by which sinfo sorts (drained, mixed, allocated, then idle).
STATES = {
    "down*": ("down*", 0x401),
    "drng": ("draining", 0x203),
    "drain": ("drained", 0x202),
    "mix": ("mixed", 5),
    "alloc": ("allocated", 3),
    "idle": ("idle", 2),
}
# Further states that -t may name. No node of Thebes is ever in one of them.
WORDS = {
    "down": {"down*"}, "no_respond": {"down*"}, "draining": {"drng"}, "drng": {"drng"}, "drained": {"drain"},
    "drain": {"drain", "drng"}, "mixed": {"mix"}, "mix": {"mix"}, "allocated": {"alloc", "mix"},
    "alloc": {"alloc", "mix"}, "idle": {"idle"},
}  # fmt: skip
NEVER = ("unknown", "future", "reserved", "perfctrs", "cloud", "completing", "comp", "powering_down", "powered_down",
         "power_down", "powering_up", "fail", "failing", "maint", "reboot", "planned", "resv", "unk")  # fmt: skip

OPTIONS = {
    "all": Option("a", unused=True),
    "clusters": Option("M", NEEDED, unsupported="it is one cluster"),
    "dead": Option("d"),
    "exact": Option("e", unused=True),
    "federation": Option("", unused=True),
    "format": Option("o", NEEDED),
    "Format": Option("O", NEEDED, unsupported="use -o"),
    "help": Option(),
    "hide": Option("", unused=True),
    "iterate": Option("i", NEEDED, unsupported="use watch(1), or `thebes top`"),
    "json": Option("", unsupported="use `thebes nodes -o json`"),
    "list-reasons": Option("R"),
    "local": Option("", unused=True),
    "long": Option("l"),
    "noconvert": Option("", unused=True),
    "Node": Option("N"),
    "nodes": Option("n", NEEDED),
    "noheader": Option("h"),
    "partition": Option("p", NEEDED),
    "responding": Option("r"),
    "sort": Option("S", NEEDED, unsupported="the order is Slurm's usual one"),
    "states": Option("t", NEEDED),
    "summarize": Option("s"),
    "reservation": Option("T", unsupported="there are no reservations"),
    "usage": Option(),
    "verbose": Option("v", unused=True),
    "version": Option("V"),
    "yaml": Option("", unsupported="use `thebes nodes -o json`"),
}
ABOUT = "sinfo of Thebes: the nodes and their state."


@dataclass(frozen=True)
class SinfoLine:
    """Nodes that share a line; the line of an empty partition has no nodes."""

    nodes: tuple[dict[str, Any], ...]

    @property
    def state(self) -> str:
        return state_of(self.nodes[0]) if self.nodes else "n/a"


def state_of(node: dict[str, Any]) -> str:
    """The state of a node: idle, mix, alloc, drain, drng or down*."""
    if not node["alive"]:
        return "down*"
    busy, total = node["gpus_busy"], node["gpus_total"]
    if node["drained"]:
        return "drng" if busy else "drain"
    return "idle" if not busy else "mix" if busy < total else "alloc"


def gres_of(node: dict[str, Any]) -> str:
    """GPUs in Slurm's notation, such as gpu:a100:8; the type is left out if it cannot be a word of Slurm's."""
    names = {str(gpu.get("name") or "") for gpu in node["gpus"]} if node["gpus"] else set()
    kind = names.pop().lower().replace(" ", "_") if len(names) == 1 else ""
    virtual = any(gpu.get("virtual") for gpu in node["gpus"])
    return f"gpu:{kind + ':' if kind and not virtual else ''}{node['gpus_total']}"


def _same(group: SinfoLine, show: Callable[[dict[str, Any]], str]) -> str:
    found = sorted({show(node) for node in group.nodes}, key=natural)
    return found[0] + ("+" if len(found) > 1 else "") if found else ""


def _counts(group: SinfoLine) -> tuple[int, int, int, int]:
    states = [state_of(node) for node in group.nodes]
    used = sum(state in ("mix", "alloc", "drng") for state in states)
    idle = states.count("idle")
    return used, idle, len(states) - used - idle, len(states)


FIELDS = {
    "P": Field("PARTITION", lambda _group: f"{PARTITION}*"),
    "R": Field("PARTITION", lambda _group: PARTITION),
    "a": Field("AVAIL", lambda _group: "up"),
    "l": Field("TIMELIMIT", lambda _group: "infinite"),
    "D": Field("NODES", lambda group: str(len(group.nodes))),
    "t": Field("STATE", lambda group: group.state),
    "T": Field("STATE", lambda group: STATES[group.state][0] if group.nodes else "n/a"),
    "N": Field("NODELIST", lambda group: folded([node["name"] for node in group.nodes])),
    "n": Field("HOSTNAMES", lambda group: folded([node["name"] for node in group.nodes])),
    "G": Field("GRES", lambda group: _same(group, gres_of)),
    "E": Field("REASON", lambda group: _same(group, lambda node: str(node["reason"] or "none"))),
    "A": Field("NODES(A/I)", lambda group: "{}/{}".format(*_counts(group))),
    "F": Field("NODES(A/I/O/T)", lambda group: "{}/{}/{}/{}".format(*_counts(group))),
    "u": Field("USER", lambda _group: "Unknown"),
    "H": Field("TIMESTAMP", lambda _group: "Unknown"),
    "s": Field("JOB_SIZE", lambda _group: "1-infinite"),
    "r": Field("ROOT", lambda _group: "no"),
    "h": Field("OVERSUBSCRIBE", lambda _group: "NO"),
    "g": Field("GROUPS", lambda _group: "all"),
    "p": Field("PRIO_TIER", lambda _group: "1"),
    "M": Field("PREEMPT_MODE", lambda _group: "REQUEUE"),
    "w": Field("WEIGHT", lambda _group: "1"),
    "f": Field("AVAIL_FEATURES", lambda _group: "(null)"),
    "b": Field("ACTIVE_FEATURES", lambda _group: "(null)"),
    **{
        letter: Field(heading, lambda _group: "N/A")
        for letter, heading in (
            ("c", "CPUS"), ("C", "CPUS(A/I/O/T)"), ("m", "MEMORY"), ("e", "FREE_MEM"), ("O", "CPU_LOAD"),
            ("d", "TMP_DISK"), ("z", "S:C:T"), ("X", "SOCKETS"), ("Y", "CORES"), ("Z", "THREADS"),
        )
    },
}  # fmt: skip


def sinfo(connect: Callable[[], Any], words: list[str]) -> int:
    """Carry the command out; returns the exit code."""
    given = parse("sinfo", words, OPTIONS)
    if given.words:
        raise Stop(f'sinfo: error: Unrecognized option: {given.words[0]}\nTry "sinfo --help" for more information')
    warn_of_unused("sinfo", given.unused)
    states = _states(given.listed("states")) if given.has("states") else None
    hosts = _hosts(given.get("nodes"))
    if given.get("format") is not None:
        parse_format("sinfo", given.get("format") or "", FIELDS)  # a fault in the format is told before anything else
    with connect() as client:
        nodes = client.nodes()
    shown = [
        node
        for node in nodes
        if (states is None or state_of(node) in states)
        and (hosts is None or node["name"] in hosts)
        and (not given.has("dead") or not node["alive"])
        and (not given.has("responding") or node["alive"])
        and (not given.has("list-reasons") or state_of(node) in ("down*", "drng", "drain"))
    ]
    if given.has("partition") and PARTITION not in given.listed("partition"):
        groups: list[SinfoLine] = []
    else:
        groups = groups_of(given, shown)
    if given.has("long") and not given.has("noheader"):
        print(time.strftime("%a %b %d %H:%M:%S %Y"))
    for line in lines_of(pieces_for(given, nodes), groups, heading=not given.has("noheader")):
        print(line)
    return 0


def pieces_for(given: Any, nodes: Sequence[dict[str, Any]]) -> list[Piece]:
    longest = max([9, *(len(node["name"]) for node in nodes)])
    text = given.get("format")
    if text is None:
        text = DEFAULT
        if given.has("list-reasons"):
            text = REASONS
        elif given.has("summarize"):
            text = SUMMARY
        elif given.has("Node"):
            text = (NODES_LONG if given.has("long") else NODES).format(longest)
        elif given.has("long"):
            text = LONG
    return parse_format("sinfo", text, FIELDS)


def groups_of(given: Any, nodes: Sequence[dict[str, Any]]) -> list[SinfoLine]:
    if given.has("Node"):
        return [SinfoLine((node,)) for node in sorted(nodes, key=lambda node: natural(node["name"]))]
    if given.has("summarize"):
        return [SinfoLine(tuple(nodes))]
    by_kind: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for node in nodes:
        apart = [state_of(node)]
        if given.has("list-reasons"):
            apart = [str(node["reason"])]
        elif "%" in (given.get("format") or "") and any(mark in (given.get("format") or "") for mark in ("G", "E")):
            apart += [gres_of(node), str(node["reason"])]
        by_kind.setdefault(tuple(apart), []).append(node)
    groups = [SinfoLine(tuple(members)) for members in by_kind.values()]
    groups.sort(key=lambda group: -STATES[group.state][1])
    return groups or ([] if given.has("list-reasons") else [SinfoLine(())])


def _states(words: Sequence[str]) -> set[str]:
    wanted: set[str] = set()
    for word in words:
        lower = word.lower().rstrip("*")
        if lower == "all":
            return set(STATES)
        if lower not in WORDS and lower not in NEVER:
            raise Stop(
                f'sinfo: error: Bad state string: "{word}"\nsinfo: error: valid states: {",".join([*WORDS, *NEVER])}'
            )
        wanted |= WORDS.get(lower, set())
    return wanted


def _hosts(text: str | None) -> set[str] | None:
    try:
        return None if text is None else set(unfolded(text))
    except ValueError:
        raise Stop(f"sinfo: error: --nodes: '{text}' is not a list of nodes. Nothing was done.") from None
