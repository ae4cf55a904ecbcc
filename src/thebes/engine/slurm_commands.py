"""Slurm by its command line: what to call, what the answers mean, and one place that runs it all.

The first half is pure: argument lists and parsers, tested on recorded output. The second half, `Slurm`, runs a bounded
number of commands at a time and turns every way to fail into one `SlurmError` that says what is the matter. We use the
commands, not the REST interface: they are on every site, and version 22.05 of the latter cannot ask for exact nodes.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thebes.node.shims import without_shims

AT_ONCE = 8  # commands that run at a time
ANSWER_S = 20.0
SEPARATOR = "|"
QUEUE_FORMAT = SEPARATOR.join(("%A", "%i", "%T", "%j", "%U", "%r", "%N"))
OVER = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    }
)

Trouble = Literal["missing", "silent", "busy", "unknown-job", "partition", "reservation", "account", "denied", "other"]


class SlurmError(OSError):
    """A Slurm command that did not do what it was asked to."""

    def __init__(self, message: str, trouble: Trouble = "other") -> None:
        super().__init__(message)
        self.message = message
        self.trouble: Trouble = trouble

    def __str__(self) -> str:
        return self.message


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
    """`scontrol -d -o show job`: who has which GPUs."""

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


# What to call --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Nodes of an allocation that all give the same: one component of the Slurm job."""

    nodes: tuple[str, ...]
    gres: str  # empty: whole nodes
    cpus: int
    memory_mib: int = 0  # 0: the site does not hand out memory


@dataclass(frozen=True)
class Terms:
    """On which terms Slurm is asked for anything; what is empty is left to the site."""

    partition: str = ""
    reservation: str = ""
    account: str = ""
    qos: str = ""

    def args(self) -> list[str]:
        return [f"--{name}={value}" for name, value in vars(self).items() if value]


@dataclass(frozen=True)
class Request:
    """One allocation: what `salloc` is asked for."""

    name: str
    comment: str
    groups: tuple[Group, ...]
    wait_s: int
    terms: Terms = Terms()
    time: str = ""  # as Slurm reads it; empty: what the partition gives
    whole_nodes: bool = False


def salloc_args(request: Request) -> list[str]:
    """`--immediate`: it gives up after a while rather than waiting behind other people's jobs.

    It is not requeued by Slurm either: only batch jobs are.
    """
    args = ["salloc", "--no-shell", f"--immediate={request.wait_s}"]
    for index, group in enumerate(request.groups):
        args += [":"] if index else []
        args += [f"--job-name={request.name}", f"--comment={request.comment}"]
        args += request.terms.args()
        args += [f"--time={request.time}"] if request.time else []
        args += [f"--nodes={len(group.nodes)}", f"--nodelist={','.join(group.nodes)}", "--ntasks-per-node=1"]
        args += ["--exclusive"] if request.whole_nodes else [f"--cpus-per-task={group.cpus}"]
        args += [f"--gres={group.gres}"] if group.gres else []
        args += [f"--mem={group.memory_mib}M"] if group.memory_mib and not request.whole_nodes else []
    return args


def srun_args(job: int, groups: Sequence[Group], command: Sequence[str], *, output: str, whole: bool) -> list[str]:
    """One task per node of the allocation, under one srun; nobody is killed because another has ended."""
    args = ["srun", f"--jobid={job}", "--quiet"]
    for index, group in enumerate(groups):
        args += [":"] if index else []
        args += [f"--het-group={index}"] if len(groups) > 1 else []
        args += [f"--nodes={len(group.nodes)}", f"--ntasks={len(group.nodes)}", "--ntasks-per-node=1"]
        args += [] if whole else [f"--cpus-per-task={group.cpus}"]
        args += ["--mpi=none", "--input=none", "--kill-on-bad-exit=0", "--wait=0", "--unbuffered"]
        args += [f"--output={output}", f"--error={output}", "--open-mode=append", "--job-name=thebes"]
        args += command
    return args


def scancel_args(jobs: Iterable[int], *, signal_name: str = "") -> list[str]:
    args = ["scancel", "--quiet"]
    args += ["--full", f"--signal={signal_name}"] if signal_name else []
    return args + [str(job) for job in jobs]


def squeue_args(*, uid: int | None = None, over_too: bool = False, jobs: Iterable[int] = ()) -> list[str]:
    args = ["squeue", "--noheader", "--all", f"--format={QUEUE_FORMAT}"]
    args += [f"--user={uid}"] if uid is not None else []
    args += ["--states=all"] if over_too else []
    listed = ",".join(str(job) for job in jobs)
    return args + ([f"--jobs={listed}"] if listed else [])


# Troubles ------------------------------------------------------------------------------------------------------------

_BUSY = (
    "nodes are busy",
    "unable to allocate resources",
    "job allocation has been revoked",
    "required node not available",
    "nodes required for job are down",
    "requested node configuration is not available",
    "job/step already completing or completed",
    "timed out waiting",
)
_SILENT = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "slurm backup controller in standby",
    "zero bytes were transmitted",
    "unable to establish controller",
    "unable to process configuration file",
    "cannot stat file",
    "protocol authentication error",
    "munge",
)


def trouble_of(stderr: str) -> Trouble:
    """What kind of failure a command's last words tell of."""
    text = stderr.lower()
    if "unable to allocate resources: connection timed out" in text:
        return "busy"  # nobody has given it what it asked for in time
    if any(words in text for words in _SILENT):
        return "silent"
    if "invalid partition" in text:
        return "partition"
    if "reservation is invalid" in text or "access denied to requested reservation" in text:
        return "reservation"
    if "invalid account" in text or "invalid qos" in text:
        return "account"
    if "invalid job id" in text or "already finished" in text or "job is no longer" in text:
        return "unknown-job"
    if "permission denied" in text or "access/permission" in text or "not permitted to use" in text:
        return "denied"
    if any(words in text for words in _BUSY):
        return "busy"
    return "other"


def granted_job(stderr: str) -> int:
    """The job that salloc says it got; 0 if it does not say so."""
    match = re.search(r"Granted job allocation (\d+)", stderr)
    return int(match[1]) if match else 0


def last_words(stderr: str) -> str:
    """The line of an error output that says most, without the program's name before it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith("Try ")]
    told = [line for line in lines if "error:" in line or "fatal:" in line] or lines
    return re.sub(r"^\w+: (?:(?:error|fatal): )?", "", told[-1]) if told else ""


# Running it ----------------------------------------------------------------------------------------------------------


class Slurm:
    """Runs the commands. Whoever starts many waits a little: slurmctld has to serve others too."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.env = clean_env(os.environ if env is None else env)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def run(self, args: Sequence[str], *, timeout_s: float = ANSWER_S) -> str:
        """Its output. SlurmError when it fails or takes too long."""
        return (await self._run(args, timeout_s))[0]

    async def _run(self, args: Sequence[str], timeout_s: float) -> tuple[str, str]:
        async with self._turns:
            process = await self.start(args)
            try:
                async with asyncio.timeout(timeout_s):
                    out, err = await process.communicate()
            except TimeoutError:
                raise SlurmError(f"{args[0]} has had no answer from slurmctld for {timeout_s:g} s", "silent") from None
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
        if process.returncode:
            raise failure(args[0], process.returncode, err.decode("utf-8", "replace"))
        return out.decode("utf-8", "replace"), err.decode("utf-8", "replace")

    async def start(self, args: Sequence[str]) -> asyncio.subprocess.Process:
        conf = self.env.get("SLURM_CONF")
        if conf and not Path(conf).exists():  # the commands would look for it for a minute
            raise SlurmError(f"SLURM_CONF names {conf}, which is not there", "silent")
        try:
            return await asyncio.create_subprocess_exec(
                *args,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self.env,
            )
        except FileNotFoundError:
            raise SlurmError(
                f"there is no `{args[0]}` in PATH: this is not a machine of a Slurm cluster", "missing"
            ) from None

    async def allocate(self, request: Request) -> int:
        """The number of the new Slurm job. Trouble "busy" if Slurm does not give it; nothing is left behind then."""
        try:
            _, told = await self._wait(salloc_args(request), request.name, request.wait_s)
        except BaseException:
            with suppress(SlurmError):
                await self._give_up(request.name)
            raise
        if granted := granted_job(told):
            return granted
        found = [one for one in await self.queue(uid=os.getuid()) if one.name == request.name and not one.over]
        if not found:
            raise SlurmError(f"Slurm took the allocation {request.name} back at once", "busy")
        return min(one.leader for one in found)

    async def try_step(self, args: Sequence[str], *, name: str, wait_s: int) -> str:
        """What an srun of this name (`--job-name`) prints that waits for nodes as long as that (`--immediate`)."""
        return (await self._wait(args, name, wait_s))[0]

    async def _wait(self, args: Sequence[str], name: str, wait_s: int) -> tuple[str, str]:
        """A command that waits for a Slurm job of this name to be given what it asks for; if it is not, the error has
        the reason that Slurm has for it. (The command itself says that a connection has timed out.)"""
        asking = asyncio.create_task(self._why_it_waits(name, wait_s / 4))
        try:
            return await self._run(args, wait_s + ANSWER_S)
        except SlurmError as error:
            why = asking.result() if asking.done() and asking.exception() is None else ""
            if error.trouble != "busy" or not why:
                raise
            raise SlurmError(f"{args[0]}: not given within {wait_s} s: {why}", "busy") from None
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _why_it_waits(self, name: str, after_s: float) -> str:
        await asyncio.sleep(after_s)
        found = [one.reason for one in await self.queue(uid=os.getuid()) if one.name == name and one.state == "PENDING"]
        return next((reason for reason in found if reason not in ("", "None")), "")

    async def _give_up(self, name: str) -> None:
        found = {one.leader for one in await self.queue(uid=os.getuid()) if one.name == name and not one.over}
        if found:
            await self.cancel(found)

    async def cancel(self, jobs: Iterable[int], *, at_once: bool = False) -> None:
        """End them; at once: without the time that Slurm gives them. Those that are over do not matter."""
        listed = sorted(jobs)
        if at_once:
            await self._cancel(scancel_args(listed, signal_name="KILL"))
            # A step whose srun is told that all is over cannot tell it how it ended, and tries for ten seconds.
            for _ in range(20):
                if not sum([await self.steps(job) for job in listed]):
                    break
                await asyncio.sleep(0.1)
        await self._cancel(scancel_args(listed))

    async def _cancel(self, args: Sequence[str]) -> None:
        try:
            await self.run(args)
        except SlurmError as error:
            if error.trouble not in ("unknown-job", "other"):
                raise

    async def queue(self, *, uid: int | None = None, over_too: bool = False) -> list[Queued]:
        return parse_queue(await self.run(squeue_args(uid=uid, over_too=over_too)))

    async def nodes(self) -> list[NodeRecord]:
        text = await self.run(["scontrol", "--oneliner", "--details", "--all", "show", "node"])
        return [parse_node(line) for line in text.splitlines() if line.startswith("NodeName=")]

    async def jobs(self, job: int | None = None) -> list[JobRecord]:
        which = [] if job is None else [str(job)]
        text = await self.run(["scontrol", "--oneliner", "--details", "--all", "show", "job", *which])
        return [parse_job(line) for line in text.splitlines() if line.startswith("JobId=")]

    async def steps(self, job: int) -> int:
        """How many steps of this Slurm job run."""
        try:
            text = await self.run(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i"])
        except SlurmError as error:
            if error.trouble in ("silent", "missing"):
                raise
            return 0
        return len([line for line in text.splitlines() if re.match(rf"\s*{job}\.\d", line)])

    async def racks(self) -> dict[str, str]:
        """Leaf switches; empty where the site tells Slurm nothing of its network."""
        try:
            return parse_topology(await self.run(["scontrol", "--oneliner", "show", "topology"]))
        except SlurmError as error:
            if error.trouble in ("silent", "missing"):
                raise
            return {}

    async def partitions(self) -> list[Partition]:
        text = await self.run(["scontrol", "--oneliner", "--all", "show", "partition"])
        return [parse_partition(line) for line in text.splitlines() if line.startswith("PartitionName=")]

    async def reservations(self) -> list[Reservation]:
        text = await self.run(["scontrol", "--oneliner", "show", "reservation"])
        return [parse_reservation(line) for line in text.splitlines() if line.startswith("ReservationName=")]

    async def config(self) -> dict[str, str]:
        return parse_config(await self.run(["scontrol", "show", "config"]))


def failure(program: str, code: int, stderr: str) -> SlurmError:
    """The error of a command that failed."""
    words, trouble = last_words(stderr), trouble_of(stderr)
    if code < 0:
        return SlurmError(f"{program} was ended by {signal.Signals(-code).name}", "other")
    if trouble == "silent":
        return SlurmError(f"slurmctld does not answer ({words})", "silent")
    return SlurmError(f"{program}: {words or f'exit code {code}'}", trouble)


def clean_env(env: Mapping[str, str]) -> dict[str, str]:
    """Without our own variables, and without those of a Slurm job that we may run in: commands would obey them."""
    keep = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
    own = ("THEBES_", "SLURM_", "SLURMD_", "SALLOC_", "SRUN_", "SBATCH_", "SQUEUE_", "SINFO_", "SCANCEL_", "PMI_")
    found = {key: value for key, value in env.items() if key in keep or not key.startswith(own)}
    if "PATH" in found:
        found["PATH"] = without_shims(found["PATH"])  # `thebes shims install` may have put ours in front
    return found


def _int(text: str | None) -> int:
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else 0
