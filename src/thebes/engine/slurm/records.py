"""What Slurm's commands print, as records: hosts, GPUs, nodes, jobs, partitions, the queue. Pure, and tested on
recorded output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SEPARATOR = "|"
QUEUE_FORMAT = SEPARATOR.join(("%A", "%i", "%T", "%j", "%U", "%r", "%N"))
OVER = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    }
)

# Lists of hosts, lists of GPUs ---------------------------------------------------------------------------------------


def expand_hosts(text: str) -> list[str]:
    """`n[1-3,07],gpu4` as single names, in order; a list that is not one is taken as it is."""
    found: list[str] = []
    for piece in _split_outside(text.strip(), "[", "]"):
        found += _expand(piece)
    return [one for one in found if one and one != "(null)"]


def _expand(text: str) -> list[str]:
    opening = text.find("[")
    closing = text.find("]", opening)
    if opening < 0 or closing < 0:
        return [text]
    head, tails = text[:opening], _expand(text[closing + 1 :])
    found: list[str] = []
    for piece in text[opening + 1 : closing].split(","):
        first, _, last = piece.partition("-")
        if last and first.isdigit() and last.isdigit():
            middles = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        else:
            middles = [piece]
        found += [head + middle + tail for middle in middles for tail in tails]
    return found


def _split_outside(text: str, opening: str, closing: str) -> list[str]:
    """At commas that are not between brackets."""
    pieces, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == opening) - (letter == closing)
        if letter == "," and depth == 0:
            pieces.append(text[begin:at])
            begin = at + 1
    pieces.append(text[begin:])
    return pieces


@dataclass(frozen=True)
class Gres:
    """GPUs of one type: so many, and their numbers where they are told."""

    kind: str  # as the site calls the type; empty where it has no types
    count: int
    ids: tuple[int, ...] = ()


_GRES = re.compile(r"(?:gres[:/])?gpu(?::(?P<kind>[^:()=]+))??(?:[:=](?P<count>\d+))?(?P<rest>\(.*\))?")
_IDX = re.compile(r"IDX:([\d,-]+)")


def parse_gres(text: str) -> list[Gres]:
    """The GPUs in `gpu:a100:2(IDX:0-1),gpu:g5:1(IDX:5),craynetwork:4`; anything else is left out."""
    found: list[Gres] = []
    for piece in _split_outside(text.strip(), "(", ")"):
        match = _GRES.fullmatch(piece.strip())
        if match is None:
            continue
        idx = _IDX.search(match["rest"] or "")
        ids = tuple(_numbers(idx[1])) if idx else ()
        found.append(Gres(match["kind"] or "", int(match["count"] or 1), ids))
    return found


def _numbers(text: str) -> Iterable[int]:
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last if last.isdigit() else first) + 1)


# Records of scontrol -------------------------------------------------------------------------------------------------

_KEY = re.compile(r"(?:^|\s+)([A-Za-z][\w/:]*)=")


def parse_record(line: str) -> list[tuple[str, str]]:
    """One line of `scontrol -o show ...` as keys and values, in order: some keys come once per node."""
    keys = list(_KEY.finditer(line))
    ends = [match.start() for match in keys[1:]] + [len(line)]
    return [(match[1], line[match.end() : end].strip()) for match, end in zip(keys, ends, strict=True)]


def _first(record: Iterable[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in record:
        found.setdefault(key, "" if value == "(null)" else value)
    return found


@dataclass(frozen=True)
class NodeRecord:
    """`scontrol -d -o show node`."""

    name: str
    address: str
    states: frozenset[str]  # IDLE, DRAIN, NOT_RESPONDING ...
    reason: str
    gpus: tuple[Gres, ...]
    used: tuple[int, ...]  # numbers of the GPUs that some job has
    used_count: int
    cpus: int  # hardware threads that jobs may have
    threads_per_core: int
    memory_mib: int  # that jobs may have
    features: tuple[str, ...]
    boot: str


_MARKS = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN", "@": "REBOOT"}


def parse_states(text: str) -> frozenset[str]:
    """`IDLE+DRAIN`, and `DOWN*` as older versions write it."""
    found: set[str] = set()
    for word in text.upper().split("+"):
        while word and not word[-1].isalpha():
            found.add(_MARKS.get(word[-1], word[-1]))
            word = word[:-1]
        found.add(word)
    return frozenset(found)


def parse_node(line: str) -> NodeRecord:
    record = parse_record(line)
    found = _first(record)
    used = parse_gres(found.get("GresUsed", ""))
    reason = found.get("Reason", "")
    if "Reason" in found:  # it is the last one, and people may write anything into it
        reason = line[line.rindex("Reason=") + len("Reason=") :] if line.count("Reason=") == 1 else reason
    return NodeRecord(
        name=found.get("NodeName", ""),
        address=found.get("NodeAddr", "") or found.get("NodeName", ""),
        states=parse_states(found.get("State", "UNKNOWN")),
        reason=re.sub(r"\s*\[[^\[\]]*@[^\[\]]*\]\s*$", "", reason.strip()),
        gpus=tuple(parse_gres(found.get("Gres", ""))),
        used=tuple(sorted({number for one in used for number in one.ids})),
        used_count=sum(one.count for one in used),
        cpus=_int(found.get("CPUEfctv") or found.get("CPUTot")),
        threads_per_core=_int(found.get("ThreadsPerCore")) or 1,
        memory_mib=max(0, _int(found.get("RealMemory")) - _int(found.get("MemSpecLimit"))),
        features=tuple(word for word in found.get("ActiveFeatures", "").split(",") if word),
        boot=found.get("BootTime", ""),
    )


@dataclass(frozen=True)
class JobRecord:
    """`scontrol -d -o show job`: which job has which GPUs."""

    job: int
    name: str
    user: str
    state: str
    gpus: Mapping[str, tuple[int, ...]]  # by node
    counts: Mapping[str, int]
    nodes: tuple[str, ...]
    exclusive: bool


def parse_job(line: str) -> JobRecord:
    record = parse_record(line)
    found = _first(record)
    gpus: dict[str, tuple[int, ...]] = {}
    counts: dict[str, int] = {}
    nodes: list[str] = []
    for key, value in record:  # a section per group of nodes that got the same: Nodes= ... GRES=
        if key == "Nodes":
            nodes = expand_hosts(value)
        elif key == "GRES":
            parts = parse_gres(value)
            for node in nodes:
                gpus[node] = tuple(sorted({number for one in parts for number in one.ids}))
                counts[node] = sum(one.count for one in parts)
    return JobRecord(
        job=_int(found.get("JobId")),
        name=found.get("JobName", ""),
        user=found.get("UserId", "").partition("(")[0],
        state=found.get("JobState", ""),
        gpus=gpus,
        counts=counts,
        nodes=tuple(expand_hosts(found.get("NodeList", ""))),
        exclusive=found.get("OverSubscribe") == "NO",
    )


def parse_topology(text: str) -> dict[str, str]:
    """Leaf switch of each node."""
    racks: dict[str, str] = {}
    for line in text.splitlines():
        found = _first(parse_record(line))
        if found.get("SwitchName") and found.get("Level") == "0":
            for node in expand_hosts(found.get("Nodes", "")):
                racks.setdefault(node, found["SwitchName"])
    return racks


@dataclass(frozen=True)
class Partition:
    """`scontrol -o show partition`."""

    name: str
    default: bool
    nodes: tuple[str, ...]
    up: bool
    max_time: str  # UNLIMITED, or as Slurm writes it: 1-00:00:00
    exclusive: bool  # whole nodes only
    preempt_mode: str
    grace_s: int
    default_time: str = "NONE"  # of jobs that do not say how long they take; NONE: max_time
    max_cpus_per_node: int = 0  # of these three: 0 for no limit
    max_memory_per_cpu_mib: int = 0
    max_memory_per_node_mib: int = 0


def parse_partition(line: str) -> Partition:
    found = _first(parse_record(line))
    return Partition(
        name=found.get("PartitionName", ""),
        default=found.get("Default") == "YES",
        nodes=tuple(expand_hosts(found.get("Nodes", ""))),
        up=found.get("State", "UP") == "UP",
        max_time=found.get("MaxTime", "UNLIMITED"),
        exclusive=found.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        preempt_mode=found.get("PreemptMode", "OFF"),
        grace_s=_int(found.get("GraceTime")),
        default_time=found.get("DefaultTime") or "NONE",
        max_cpus_per_node=_int(found.get("MaxCPUsPerNode")),
        max_memory_per_cpu_mib=_int(found.get("MaxMemPerCPU")),
        max_memory_per_node_mib=_int(found.get("MaxMemPerNode")),
    )


@dataclass(frozen=True)
class Reservation:
    """`scontrol -o show reservation`."""

    name: str
    nodes: tuple[str, ...]
    users: tuple[str, ...]
    accounts: tuple[str, ...]
    state: str


def parse_reservation(line: str) -> Reservation:
    found = _first(parse_record(line))
    return Reservation(
        name=found.get("ReservationName", ""),
        nodes=tuple(expand_hosts(found.get("Nodes", ""))),
        users=tuple(word for word in found.get("Users", "").split(",") if word),
        accounts=tuple(word for word in found.get("Accounts", "").split(",") if word),
        state=found.get("State", ""),
    )


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`: name and value."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip():
            found.setdefault(key.strip(), value.strip())
    return found


def seconds_of(text: str) -> float | None:
    """A time as Slurm writes it (`30 sec`, `90`, `15:00`, `1-12:00:00`); None for no limit."""
    text = text.strip().upper()
    if not text or text in ("UNLIMITED", "INFINITE", "NONE", "N/A", "PARTITION_LIMIT"):
        return None
    if match := re.fullmatch(r"(\d+)\s*(?:SEC)?", text):
        return float(match[1])
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":") if part.isdigit()]
    if not parts:
        return None
    if dash:  # days-hours[:minutes[:seconds]]
        parts += [0] * (3 - len(parts))
    while len(parts) < 3:
        parts.insert(0, 0)
    return (_int(days) * 24 + parts[0]) * 3600.0 + parts[1] * 60.0 + parts[2]


# The queue -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Queued:
    """One line of squeue. Parts of a heterogeneous job have one `leader`."""

    job: int
    leader: int
    state: str
    name: str
    uid: int
    reason: str
    nodes: tuple[str, ...]

    @property
    def over(self) -> bool:
        return self.state in OVER


def parse_queue(text: str) -> list[Queued]:
    found: list[Queued] = []
    for line in text.splitlines():
        head = line.split(SEPARATOR, 3)
        if len(head) < 4 or not head[0].isdigit():
            continue
        tail = head[3].rsplit(SEPARATOR, 3)  # a job's name may have the separator in it
        if len(tail) < 4:
            continue
        leader = head[1].split("+")[0].split("_")[0]
        found.append(
            Queued(
                job=int(head[0]),
                leader=_int(leader) or int(head[0]),
                state=head[2],
                name=tail[0],
                uid=_int(tail[1]),
                reason=tail[2],
                nodes=tuple(expand_hosts(tail[3])),
            )
        )
    return found


def _int(text: str | None) -> int:
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else 0
