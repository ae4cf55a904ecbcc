"""What to call: the argument lists of Slurm's commands, and what their last words mean when they fail. Pure.

We use the commands, not the REST interface: they are on every site, and version 22.05 of the latter cannot ask for
exact nodes.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from thebes.engine.slurm.records import QUEUE_FORMAT

Trouble = Literal["missing", "silent", "busy", "unknown-job", "partition", "reservation", "account", "denied", "other"]


class SlurmError(OSError):
    """A Slurm command that did not do what it was asked to."""

    def __init__(self, message: str, trouble: Trouble = "other") -> None:
        super().__init__(message)
        self.message = message
        self.trouble: Trouble = trouble

    def __str__(self) -> str:
        return self.message


# What to call --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of an allocation that all give the same: one component of the Slurm job."""

    nodes: tuple[str, ...]
    gres: str  # empty: whole nodes
    cpus: int
    memory_mib: int = 0  # 0: the site does not hand out memory


@dataclass(frozen=True)
class SlurmTerms:
    """On which terms Slurm is asked for anything; what is empty is left to the site."""

    partition: str = ""
    reservation: str = ""
    account: str = ""
    qos: str = ""

    def args(self) -> list[str]:
        return [f"--{name}={value}" for name, value in vars(self).items() if value]


@dataclass(frozen=True)
class AllocationRequest:
    """One allocation: what `salloc` is asked for."""

    name: str
    comment: str
    groups: tuple[NodeGroup, ...]
    wait_s: int
    terms: SlurmTerms = SlurmTerms()
    time: str = ""  # as Slurm reads it; empty: what the partition gives
    whole_nodes: bool = False


def salloc_args(request: AllocationRequest) -> list[str]:
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


def srun_args(job: int, groups: Sequence[NodeGroup], command: Sequence[str], *, output: str, whole: bool) -> list[str]:
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


def failure(program: str, code: int, stderr: str) -> SlurmError:
    """The error of a command that failed."""
    words, trouble = last_words(stderr), trouble_of(stderr)
    if code < 0:
        return SlurmError(f"{program} was ended by {signal.Signals(-code).name}", "other")
    if trouble == "silent":
        return SlurmError(f"slurmctld does not answer ({words})", "silent")
    return SlurmError(f"{program}: {words or f'exit code {code}'}", trouble)
