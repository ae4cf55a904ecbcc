"""Jobs of Thebes in Slurm's words: states, reasons, and lines such as `12_[3-7]` for members that wait."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thebes.cli.slurm.options import Stop, folded, natural, ranges

if TYPE_CHECKING:
    from thebes.client import Client

PARTITION = "thebes"  # there are none; a column that is always there needs something
SUBMITTED = "# sbatch\n"  # how the few lines begin that set up the output of a job
PAGE = 1000
RECENT_S = 300.0  # how long a job that has ended is listed: Slurm's MinJobAge
LONGEST_LIST = 64  # of array indices, as Slurm shows it

# Our state: Slurm's short one, its long one, and where squeue sorts it.
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
# States of Slurm that no job of Thebes is ever in; they may be asked for all the same.
OTHER_STATES = {
    "NF": "NODE_FAIL", "PR": "PREEMPTED", "BF": "BOOT_FAIL", "DL": "DEADLINE", "OOM": "OUT_OF_MEMORY", "RS": "RESIZING",
    "RD": "RESV_DEL_HOLD", "RQ": "REQUEUED", "RF": "REQUEUE_FED", "RH": "REQUEUE_HOLD", "RV": "REVOKED",
    "SI": "SIGNALING", "SE": "SPECIAL_EXIT", "SO": "STAGE_OUT", "ST": "STOPPED",
}  # fmt: skip

# What a job that waits says, and Slurm's word for it. A test holds these against the reasons of policies.
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
class Job:
    """A line of squeue: one job, or the members of an array that wait."""

    facts: dict[str, Any]
    indices: list[int] = field(default_factory=list)  # of several members
    details: dict[str, Any] | None = None  # what only the single job tells: limit, folder, starts

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
        """The start of the present incarnation; of one that waits, the expected one."""
        if self.waits:
            return self.facts["expected_start_s"]
        attempts = (self.details or {}).get("attempts") or []
        if attempts and attempts[-1]["started_s"] is not None:
            return attempts[-1]["started_s"]
        return self.facts["first_start_s"]

    def ran_s(self) -> float:
        """As squeue counts: the present start, or the last one."""
        started_s = None if self.waits else self.started_s()
        if started_s is None or self.state == "starting":
            return 0.0
        return max(0.0, (self.facts["end_s"] or time.time()) - started_s)

    def command(self) -> str:
        """The script, for a job that came by sbatch; else its command, shortened."""
        words = self.spec.get("command") or []
        if words[:2] != ["bash", "-c"] or not words[2].startswith(SUBMITTED):
            return str(self.facts["command"])
        return "(null)" if words[3] == "wrap" else str(Path(self.spec.get("workdir") or "", words[3]))

    def comes_after(self, mark: str = "") -> str:
        """What it waits for, in Slurm's words."""
        kinds = (("afterok", "after"), ("afterany", "after_any"))
        return ",".join(f"{kind}:{one}{mark}" for kind, key in kinds for one in self.spec.get(key) or ()) or "(null)"

    def reason(self) -> str:
        return reason_of(self.state, str(self.facts["reason"] or ""))


def reason_of(state: str, text: str) -> str:
    """Slurm's word for why a job is where it is."""
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
    """Our states behind a list of Slurm's, short or long; `all` is every one."""
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


ID = re.compile(r"(\d{1,12})(?:_(\d{1,6}|\[[\d,:-]+(?:%\d+)?\]))?")  # the limit as squeue shows it says nothing here


def ids_of(command: str, words: Iterable[str]) -> list[tuple[str, list[int] | None]]:
    """(id, indices) of 12, 12_3 and 12_[1-4,7]; None: the job itself, or the whole array."""
    found: list[tuple[str, list[int] | None]] = []
    for word in words:
        match = ID.fullmatch(word.strip())
        if match is None or match[1].startswith("0"):
            raise Stop(f"{command}: error: Invalid job id{':' if command == 'squeue' else ''} {word}")
        if match[2] is None:
            found.append((match[1], None))
            continue
        from thebes.model.errors import UserError
        from thebes.server.jobfile import parse_array

        try:
            found.append((match[1], parse_array(match[2].strip("[]").partition("%")[0])))
        except UserError:
            raise Stop(f"{command}: error: Invalid job id{':' if command == 'squeue' else ''} {word}") from None
    return found


def split_ids(words: Iterable[str]) -> list[str]:
    """Words of a list of ids: commas separate, but not between brackets."""
    return [one for word in words for one in re.split(r",(?![^\[]*\])", word) if one]


def load(client: Client, states: Iterable[str], *, user: str | None = None, name: str | None = None) -> list[Job]:
    """Jobs in these states, oldest first; of those that have ended only the latest, as Slurm soon forgets them."""
    wanted = set(states)
    chosen = {key: value for key, value in (("user", user), ("name", name)) if value is not None}
    found = _pages(client, {**chosen, "state": sorted(wanted & set(ALIVE)), "oldest": True}, 0.0)
    ended = _pages(client, {**chosen, "state": sorted(wanted - set(ALIVE))}, time.time() - RECENT_S)
    return ended[::-1] + found


def _pages(client: Client, chosen: dict[str, Any], since_s: float) -> list[Job]:
    """Page by page, up to the first on which all jobs ended before then."""
    found: list[Job] = []
    cursor: str | None = None
    while chosen["state"]:
        page = client.jobs_page(limit=PAGE, cursor=cursor, **chosen)
        kept = [Job(one) for one in page["jobs"] if one["end_s"] is None or one["end_s"] >= since_s]
        found += kept
        cursor = page["next"]
        if cursor is None or not kept:
            break
    return found


def named(client: Client, wanted: Sequence[tuple[str, list[int] | None]], states: set[str]) -> list[Job]:
    """Jobs by id, also those that ended long ago. A single id that nobody knows is an error, as with Slurm."""
    from thebes.client import ServerError

    found: list[Job] = []
    for number, indices in wanted:
        try:
            details = client.job(number)
        except ServerError as error:
            if error.status != 404:
                raise
            if len(wanted) == 1:
                raise Stop("slurm_load_jobs error: Invalid job id specified") from None
            continue
        if not details.get("array"):
            found += [Job(details, details=details)] if indices is None and details["state"] in states else []
            continue
        members = {
            member["id"]
            for member in details["members"]
            if member["state"] in states and (indices is None or member["array_index"] in indices)
        }
        alive = [job for job in load(client, states & set(ALIVE), user=details["user"]) if job.facts["id"] in members]
        ended = sorted(members - {job.facts["id"] for job in alive}, key=natural)
        told = map(client.job, ended)  # one that was alive may have ended since it was listed
        found += [Job(one, details=one) for one in told if one["state"] in states] + alive
    return found


def add_details(client: Client, jobs: Sequence[Job]) -> None:
    """What lists do not tell, by one question per job; members of an array that have not started share one."""
    shared: dict[str, dict[str, Any]] = {}
    for job in jobs:
        if job.details is not None:
            continue
        key = str(job.facts["array_id"]) if job.facts["array_id"] and job.waits else str(job.facts["id"])
        if key not in shared:
            shared[key] = client.job(key)
        job.details = shared[key]


def together(jobs: Sequence[Job]) -> list[Job]:
    """Members of an array that wait, in one line with the reason of the first, as squeue shows them."""
    lines: list[Job] = []
    groups: dict[tuple[str, str], Job] = {}
    for job in jobs:
        array = job.facts["array_id"]
        if array is None or not job.waits or job.facts["incarnation"]:
            lines.append(job)
            continue
        key = (str(array), job.state)
        if key in groups:
            groups[key].indices.append(int(job.facts["array_index"]))
            continue
        group = Job(job.facts, [int(job.facts["array_index"])])
        groups[key] = group
        lines.append(group)
    for group in groups.values():
        group.indices.sort()
    return lines
