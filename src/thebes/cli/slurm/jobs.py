"""Jobs of Thebes in Slurm's words: states, reasons, and lines such as `12_[3-7]` for waiting members of an array."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thebes.cli.slurm.options import Stop, folded, natural, ranges

if TYPE_CHECKING:
    from thebes.client import Client

PARTITION = "thebes"  # Thebes has no partitions, but Slurm's tables always have this column
SUBMITTED = "# sbatch\n"  # the few lines that set up the output of a job begin with this
PAGE = 1000
RECENT_S = 300.0  # a job that has ended stays in the list for so long, as with Slurm's MinJobAge
LONGEST_LIST = 64  # Slurm shows at most so many array indices

# For each of our states: Slurm's short name, its long name, and its place when squeue sorts.
STATES = {
    "queued": ("PD", "PENDING", 0),
    "held": ("PD", "PENDING", 0),
    "running": ("R", "RUNNING", 1),
    "preempting": ("CG", "COMPLETING", 1),
    "starting": ("CF", "CONFIGURING", 1),
    "suspended": ("S", "SUSPENDED", 2),
    "completed": ("CD", "COMPLETED", 3),
    "cancelled": ("CA", "CANCELLED", 4),
    "failed": ("F", "FAILED", 5),
    "timeout": ("TO", "TIMEOUT", 6),
}
ALIVE = ("queued", "held", "starting", "running", "preempting", "suspended")
# No job of Thebes is ever in one of these states, but people may ask for them all the same.
OTHER_STATES = {
    "NF": "NODE_FAIL", "PR": "PREEMPTED", "BF": "BOOT_FAIL", "DL": "DEADLINE", "OOM": "OUT_OF_MEMORY", "RS": "RESIZING",
    "RD": "RESV_DEL_HOLD", "RQ": "REQUEUED", "RF": "REQUEUE_FED", "RH": "REQUEUE_HOLD", "RV": "REVOKED",
    "SI": "SIGNALING", "SE": "SPECIAL_EXIT", "SO": "STAGE_OUT", "ST": "STOPPED",
}  # fmt: skip

# What a waiting job says, and Slurm's word for it. A test compares this list with the reasons that policies give.
REASONS = {
    "the GPUs it could use go to jobs before it in the order": "Resources",
    "enough GPUs are free, but not where the placement rule wants them": "Resources",
    "an earlier job must start first (strict order)": "Priority",
    "the policy did not choose it": "Priority",
    "its tenant's quota goes to jobs before it in the order": "AssocGrpGRES",
    "it takes turns with the jobs on its GPUs, and it is another one's turn": "Priority",
    "it still waits for GPUs that lie closer together (its delay timer runs)": "Resources",
    "the auction gave the GPUs to jobs that are worse off": "Priority",
    "its organisation has no more GPUs on lease": "AssocGrpGRES",
}


@dataclass
class QueueLine:
    """A line of squeue: one job, or the waiting members of an array."""

    facts: Mapping[str, Any]
    indices: list[int] = field(default_factory=list)  # where the line stands for several members
    details: Mapping[str, Any] | None = None  # limit, folder and starts, which a list of jobs does not contain

    @property
    def id(self) -> str:
        if not self.indices:
            return str(self.facts["id"])
        inside = ranges(self.indices)
        if len(inside) > LONGEST_LIST:
            inside = inside[: LONGEST_LIST - 3] + "..."
        limit = self.facts.get("array_limit")
        return f"{self.facts['array_id']}_[{inside}{f'%{limit}' if limit else ''}]"

    @property
    def state(self) -> str:
        return str(self.facts["state"])

    @property
    def waits(self) -> bool:
        return self.state in ("queued", "held")

    @property
    def spec(self) -> dict[str, Any]:
        return (self.details or {}).get("spec", {})

    @property
    def limit_s(self) -> float | None:
        return self.spec.get("time_s")

    def node_names(self) -> str:
        return folded(list(self.facts.get("gpus_held") or {}) or self._last_nodes())

    def _last_nodes(self) -> list[str]:
        attempts = (self.details or {}).get("attempts") or []
        return [node for node, _ in attempts[-1]["parts"]] if attempts and not self.waits else []

    def nodes(self) -> int:
        return len(self.facts.get("gpus_held") or {}) or int(self.facts["nodes"] or 1)

    def started_s(self) -> float | None:
        """The start of the present incarnation; for a waiting job, the expected start."""
        if self.waits:
            return self.facts["expected_start_s"]
        attempts = (self.details or {}).get("attempts") or []
        if attempts and attempts[-1]["started_s"] is not None:
            return attempts[-1]["started_s"]
        return self.facts["first_start_s"]

    def ran_s(self) -> float:
        """The run time as squeue counts it: that of the present incarnation, or of the last one."""
        started_s = None if self.waits else self.started_s()
        if started_s is None or self.state == "starting":
            return 0.0
        return max(0.0, (self.facts["end_s"] or time.time()) - started_s)

    def command(self) -> str:
        """The script of a job that came by sbatch; the shortened command of any other job."""
        words = self.spec.get("command") or []
        if words[:2] != ["bash", "-c"] or not words[2].startswith(SUBMITTED):
            return str(self.facts["command"])
        return "(null)" if words[3] == "wrap" else str(Path(self.spec.get("workdir") or "", words[3]))

    def comes_after(self, mark: str = "") -> str:
        """What the job waits for, in Slurm's words."""
        kinds = (("afterok", "after"), ("afterany", "after_any"))
        return ",".join(f"{kind}:{one}{mark}" for kind, key in kinds for one in self.spec.get(key) or ()) or "(null)"

    def reason(self) -> str:
        return reason_of(self.state, str(self.facts["reason"] or ""))


def reason_of(state: str, text: str) -> str:
    """Slurm's word for the reason why a job is in this state."""
    if state == "held":
        return "JobHeldUser"
    if state == "queued":
        if text.startswith("waits for job"):
            return "Dependency"
        if text.startswith("its array runs at most"):
            return "JobArrayTaskLimit"
        if text.startswith(("is being started", "its last incarnation")) or not text:
            return "None"
        return REASONS.get(text, "Resources")
    if state == "timeout":
        return "TimeLimit"
    return "NonZeroExitCode" if state == "failed" else "None"


def states_of(command: str, words: Iterable[str]) -> set[str]:
    """Our states behind a list of Slurm's names, short or long; `all` means every state."""
    wanted: set[str] = set()
    for word in words:
        upper = word.upper()
        if upper == "ALL":
            return set(STATES)
        found = {ours for ours, (short, long, _) in STATES.items() if upper in (short, long)}
        if not found and upper not in OTHER_STATES and upper not in OTHER_STATES.values():
            valid = dict.fromkeys([long for _, long, _ in STATES.values()] + list(OTHER_STATES.values()))
            raise Stop(
                f"{command}: error: Invalid job state specified: {word}\n"
                f"{command}: error: Valid job states include: {','.join(valid)}\n"
            )
        wanted |= found
    return wanted


ID = re.compile(r"(\d{1,12})(?:_(\d{1,6}|\[[\d,:-]+(?:%\d+)?\]))?")  # squeue shows a limit behind %, which is ignored


def ids_of(command: str, words: Iterable[str]) -> list[tuple[str, list[int] | None]]:
    """(id, indices) of 12, 12_3 and 12_[1-4,7]. Indices of None mean the job itself, or the whole array."""
    found: list[tuple[str, list[int] | None]] = []
    for word in words:
        match = ID.fullmatch(word.strip())
        if match is None or match[1].startswith("0"):
            raise Stop(f"{command}: error: Invalid job id{':' if command == 'squeue' else ''} {word}")
        if match[2] is None:
            found.append((match[1], None))
            continue
        from thebes.jobspec.values import parse_array
        from thebes.model.errors import UserError

        try:
            found.append((match[1], parse_array(match[2].strip("[]").partition("%")[0])))
        except UserError:
            raise Stop(f"{command}: error: Invalid job id{':' if command == 'squeue' else ''} {word}") from None
    return found


def split_ids(words: Iterable[str]) -> list[str]:
    """Split a list of ids at its commas, except those between brackets."""
    return [one for word in words for one in re.split(r",(?![^\[]*\])", word) if one]


def load(client: Client, states: Iterable[str], *, user: str | None = None, name: str | None = None) -> list[QueueLine]:
    """Jobs in these states, oldest first. Jobs that ended long ago are left out, as Slurm forgets them soon, too."""
    wanted = set(states)
    chosen = {key: value for key, value in (("user", user), ("name", name)) if value is not None}
    found = _pages(client, {**chosen, "state": sorted(wanted & set(ALIVE)), "oldest": True}, 0.0)
    ended = _pages(client, {**chosen, "state": sorted(wanted - set(ALIVE))}, time.time() - RECENT_S)
    return ended[::-1] + found


def _pages(client: Client, chosen: dict[str, Any], since_s: float) -> list[QueueLine]:
    """Jobs page by page, up to the first page on which all jobs ended before `since_s`."""
    found: list[QueueLine] = []
    cursor: str | None = None
    while chosen["state"]:
        page = client.jobs_page(limit=PAGE, cursor=cursor, **chosen)
        kept = [QueueLine(one) for one in page["jobs"] if one["end_s"] is None or one["end_s"] >= since_s]
        found += kept
        cursor = page["next"]
        if cursor is None or not kept:
            break
    return found


def named(client: Client, wanted: Sequence[tuple[str, list[int] | None]], states: set[str]) -> list[QueueLine]:
    """Jobs by id, also those that ended long ago. A single id that does not exist is an error, as with Slurm."""
    from thebes.client import ServerError

    found: list[QueueLine] = []
    for number, indices in wanted:
        try:
            details = client.job(number)
        except ServerError as error:
            if error.status != 404:
                raise
            if len(wanted) == 1:
                raise Stop("slurm_load_jobs error: Invalid job id specified") from None
            continue
        if "members" not in details:
            found += [QueueLine(details, details=details)] if indices is None and details["state"] in states else []
            continue
        members = {
            member["id"]
            for member in details["members"]
            if member["state"] in states and (indices is None or member["array_index"] in indices)
        }
        alive = [job for job in load(client, states & set(ALIVE), user=details["user"]) if job.facts["id"] in members]
        ended = sorted(members - {job.facts["id"] for job in alive}, key=natural)
        told = map(client.job, ended)  # a job may have ended since it was listed
        found += [QueueLine(one, details=one) for one in told if "state" in one and one["state"] in states] + alive
    return found


def add_details(client: Client, jobs: Sequence[QueueLine]) -> None:
    """Add what lists do not contain, with one request per job. Members of an array that have not started share one."""
    shared: dict[str, Mapping[str, Any]] = {}
    for job in jobs:
        if job.details is not None:
            continue
        key = str(job.facts["array_id"]) if job.facts["array_id"] and job.waits else str(job.facts["id"])
        if key not in shared:
            shared[key] = client.job(key)
        job.details = shared[key]


def together(jobs: Sequence[QueueLine]) -> list[QueueLine]:
    """Put the waiting members of an array into one line with the reason of the first, as squeue does."""
    lines: list[QueueLine] = []
    groups: dict[tuple[str, str], QueueLine] = {}
    for job in jobs:
        array = job.facts["array_id"]
        if array is None or not job.waits or job.facts["incarnation"]:
            lines.append(job)
            continue
        key = (str(array), job.state)
        if key in groups:
            groups[key].indices.append(int(job.facts["array_index"]))
            continue
        group = QueueLine(job.facts, [int(job.facts["array_index"])])
        groups[key] = group
        lines.append(group)
    for group in groups.values():
        group.indices.sort()
    return lines
