"""What a supervisor needs to start one part of a gang: the command and the environment of each of its ranks. Pure.

The variables are those that PyTorch, its launchers and most training scripts look for, and our own with the prefix
THEBES_ (listed in docs).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thebes.protocol.contract import Gpu, Launch, Part, Refused
from thebes.protocol.inherited import inherited

TORCHRUN = Path(__file__).parents[1] / "node" / "torchrun.py"
_FLAGS_WITH_VALUE = ("-X", "-W")


@dataclass(frozen=True)
class RankLaunch:
    """One process to start. Under torchrun it is the launcher of a node, and its number is the node's."""

    rank: int
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class PartLaunch:
    """launch.json of an attempt."""

    job_id: str
    incarnation: int
    node: str
    command: tuple[str, ...]
    workdir: str
    env: Mapping[str, str] = field(repr=False)
    ranks: tuple[RankLaunch, ...]
    grace_s: float
    limit_s: float | None
    log_limit_bytes: int
    progress_pattern: str | None
    poke: str
    lease_file: str = ""  # until when this node may go on, where it is not the controller's own

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def part_launch(
    launch: Launch,
    index: int,
    *,
    gpus: Sequence[Gpu],
    base_env: Mapping[str, str],
    attempt_dir: str,
    poke: str,
    master_addr: str,
    master_port: int,
    more_env: Mapping[str, str] | None = None,
) -> PartLaunch:
    """Part `index` of the gang; `gpus` are those of its node, `base_env` is what every process of the node gets."""
    part = launch.parts[index]
    env = inherited(base_env)
    env.setdefault("PYTHONUNBUFFERED", "1")  # or `logs -f` shows nothing until a buffer is full
    env.update(launch.env)
    env.update(_common(launch, index, gpus, attempt_dir, master_addr, master_port))
    env.update(more_env or {})
    if launch.launcher == "torchrun":
        command = torchrun_command(
            launch.command,
            nodes=len(launch.parts),
            node_rank=index,
            ranks=launch.ranks_per_node or len(part.gpus),
            master_addr=master_addr,
            master_port=master_port,
        )
        ranks: tuple[RankLaunch, ...] = (RankLaunch(index),)
    else:
        command = launch.command
        ranks = tuple(_ranks(launch, index))
    return PartLaunch(
        job_id=launch.job_id,
        incarnation=launch.incarnation,
        node=part.node,
        command=command,
        workdir=launch.workdir,
        env=env,
        ranks=ranks,
        grace_s=launch.grace_s,
        limit_s=launch.limit_s,
        log_limit_bytes=launch.log_limit_bytes,
        progress_pattern=launch.progress_pattern,
        poke=poke,
    )


def ranks_of(launch: Launch, part: Part) -> int:
    """How many ranks a part has (plain launcher)."""
    return launch.ranks_per_node or len(part.gpus)


def _ranks(launch: Launch, index: int) -> Iterable[RankLaunch]:
    counts = [ranks_of(launch, part) for part in launch.parts]
    for local in range(counts[index]):
        rank = sum(counts[:index]) + local
        yield RankLaunch(
            rank,
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(sum(counts)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(counts[index]),
            },
        )


def _common(
    launch: Launch, index: int, gpus: Sequence[Gpu], attempt_dir: str, master_addr: str, master_port: int
) -> dict[str, str]:
    part = launch.parts[index]
    by_index = {gpu.index: gpu for gpu in gpus if gpu.virtual or gpu.uuid}  # the driver's numbers may be others
    missing = [number for number in part.gpus if number not in by_index]
    if missing:
        raise Refused(f"node {part.node} has no GPU {missing[0]}: it has {len(by_index)}")
    held = [by_index[number] for number in part.gpus]
    env = {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "NODE_RANK": str(index),
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid or str(gpu.index) for gpu in held),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "THEBES_JOB_ID": launch.job_id,
        "THEBES_INCARNATION": str(launch.incarnation),
        "THEBES_ATTEMPT": f"{launch.job_id}.{launch.incarnation}",
        "THEBES_ATTEMPT_DIR": attempt_dir,
        "THEBES_CHECKPOINT_DIR": launch.checkpoint_dir,
        "THEBES_RESUME": "1" if launch.resumes else "0",
        "THEBES_RESUME_FROM": launch.resume_from,
        "THEBES_GRACE_SECONDS": f"{launch.grace_s:g}",
        "THEBES_GPUS": str(sum(len(one.gpus) for one in launch.parts)),
        "THEBES_NODES": str(len(launch.parts)),
        "THEBES_NODE_RANK": str(index),
        "THEBES_NODE_NAMES": ",".join(one.node for one in launch.parts),
        "THEBES_GPUS_PER_NODE": str(len(part.gpus)),
        "THEBES_VIRTUAL_GPUS": "1" if all(gpu.virtual for gpu in held) else "0",
    }
    if launch.array_index is not None:
        env["THEBES_ARRAY_INDEX"] = str(launch.array_index)
    return env


def torchrun_command(
    command: Sequence[str], *, nodes: int, node_rank: int, ranks: int, master_addr: str, master_port: int
) -> tuple[str, ...]:
    """The command under torchrun: `python train.py` keeps its interpreter, anything else is run as it is."""
    options = (
        *("--nnodes", str(nodes), "--node-rank", str(node_rank), "--nproc-per-node", str(ranks)),
        *("--master-addr", master_addr, "--master-port", str(master_port)),
    )
    first = command[0]
    if first.endswith(".py"):
        return ("python", str(TORCHRUN), *options, *command)
    if not Path(first).name.startswith("python"):
        return ("python", str(TORCHRUN), *options, "--no-python", *command)
    flags: list[str] = []
    rest = list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        if rest[0] in ("-", "-c"):
            raise Refused(
                "torchrun needs a script or a module: `python train.py` or `python -m train`, not `python -c`"
            )
        flags.append(rest.pop(0))
        if flags[-1] in _FLAGS_WITH_VALUE and rest:
            flags.append(rest.pop(0))
    if not rest:
        raise Refused("torchrun needs a script: `python train.py`")
    return (first, *flags, str(TORCHRUN), *options, *rest)
