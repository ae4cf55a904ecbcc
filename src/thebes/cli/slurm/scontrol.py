"""scontrol: show job, show node, hold, release, requeue. For all else that Slurm's can do, there is `thebes`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from thebes.cli.slurm.formats import clock, long_span
from thebes.cli.slurm.jobs import PARTITION, STATES, QueueLine, ids_of, split_ids
from thebes.cli.slurm.options import Stop, folded, natural, parse, unfolded, warn_of_unused
from thebes.cli.slurm.sinfo import STATES as NODE_STATES
from thebes.cli.slurm.sinfo import gres_of, state_of
from thebes.jobspec.slurm_options import Option

OPTIONS = {
    "all": Option("a", unused=True),
    "details": Option("d", unused=True),
    "help": Option("h"),
    "hide": Option("", unused=True),
    "oneliner": Option("o"),
    "quiet": Option("Q", unused=True),
    "verbose": Option("v", unused=True),
    "version": Option("V"),
}
ABOUT = (
    "scontrol of Thebes: show job [ID], show node [NAME], show hostnames LIST, hold IDS, release IDS, requeue IDS.\n"
    "Other keywords: see `thebes --help` (drain, undrain, preempt, status)."
)
INSTEAD = {
    "update": "`thebes drain NODE` and `thebes undrain NODE` change a node; a job is submitted anew",
    "suspend": "`thebes preempt JOB` asks a job to save and go; the policy decides when it goes on",
    "resume": "the policy decides when a job goes on",
    "reconfigure": "`thebes down` and `thebes up`",
    "shutdown": "`thebes down`",
    "ping": "`thebes status`",
    "requeuehold": "`scontrol requeue`, then `scontrol hold`",
    "uhold": "`scontrol hold`",
    "top": "`thebes submit --priority`",
    "reboot": "`thebes drain NODE --preempt`, then reboot it",
}


def scontrol(connect: Callable[[], Any], words: list[str]) -> int:
    """Carry the command out; returns the exit code."""
    given = parse("scontrol", words, OPTIONS, mixed=False)
    if not given.words:
        raise Stop("scontrol: error: the prompt of scontrol is not there in Thebes; name a command: show job 12.")
    verb, *rest = given.words
    verb = verb.lower()
    if verb == "show":
        return _show(connect, rest, given.has("oneliner"), given.unused)
    if verb not in ("hold", "release", "requeue"):
        if verb in INSTEAD:
            raise Stop(f"scontrol: error: {verb} is not supported by Thebes: {INSTEAD[verb]}. Nothing was done.")
        raise Stop(f"invalid keyword: {verb}")
    if not rest:
        raise Stop(f"too few arguments for keyword:{verb}")
    jobs = [one for number, indices in ids_of("scontrol", split_ids(rest))
            for one in ([number] if indices is None else [f"{number}_{index}" for index in indices])]  # fmt: skip
    warn_of_unused("scontrol", given.unused)
    with connect() as client:
        return _act(client, verb, jobs)


def _act(client: Any, verb: str, jobs: list[str]) -> int:
    from thebes.client import ServerError

    code = 0
    for job in jobs:
        try:
            getattr(client, verb)(job)
        except ServerError as error:
            if error.status == 0:
                raise
            code = 1
            why = "Invalid job id specified" if error.status == 404 else error.message
            print(f"{why} for job {job}", file=sys.stderr)
    return code


def _show(connect: Callable[[], Any], words: list[str], one_line: bool, unused: list[str]) -> int:
    if not words:
        raise Stop("too few arguments for keyword:show")
    what, name = words[0].lower(), words[1] if len(words) > 1 else None
    what, equals, value = what.partition("=")
    name = value if equals else name
    if what in ("hostnames", "hostname"):
        print("\n".join(_hosts(name or "")))
        return 0
    if what in ("hostlist", "hostlistsorted"):
        print(folded([one for one in (name or "").split(",") if one]))
        return 0
    if what not in ("job", "jobs", "jobid", "node", "nodes", "nodename"):
        raise Stop(f"scontrol: error: show {words[0]} is not supported by Thebes. Nothing was done.")
    warn_of_unused("scontrol", unused)
    with connect() as client:
        blocks = _jobs(client, name) if what.startswith("job") else _nodes(client, name)
    for block in blocks:
        print(" ".join(block) if one_line else "\n   ".join(block))
        if not one_line:
            print()
    return 0


def _hosts(text: str) -> list[str]:
    try:
        return unfolded(text)
    except ValueError:
        raise Stop(f"Invalid hostlist: {text}") from None


def _jobs(client: Any, name: str | None) -> list[list[str]]:
    from thebes.client import ServerError

    if name is None:
        found = [client.job(one["id"]) for one in client.jobs(state=[s for s, (_, _, n) in STATES.items() if n < 3])]
        return [_job(one) for one in sorted(found, key=lambda one: natural(one["id"]))]
    blocks = []
    for number, indices in ids_of("scontrol", split_ids([name])):
        wanted = [number] if indices is None else [f"{number}_{index}" for index in indices]
        for one in wanted:
            try:
                found = client.job(one)
            except ServerError as error:
                if error.status != 404:
                    raise
                raise Stop("slurm_load_jobs error: Invalid job id specified") from None
            members = [client.job(m["id"]) for m in found["members"]] if found.get("array") else [found]
            blocks += [_job(member) for member in members]
    return blocks


def _job(found: dict[str, Any]) -> list[str]:
    job, spec = QueueLine(found, details=found), found["spec"]
    array = f" ArrayJobId={found['array_id']} ArrayTaskId={found['array_index']}" if found["array_id"] else ""
    array += f" ArrayTaskThrottle={spec['array_limit']}" if spec.get("array_limit") else ""
    code = found["exit_code"] or 0
    ended = f"{code}:0" if code >= 0 else f"0:{-code}"
    limit_s, started_s = spec.get("time_s"), job.started_s()
    end_s = found["end_s"] or (started_s + limit_s if started_s and limit_s else None)
    after = job.comes_after("(unfulfilled)") if job.waits else "(null)"
    kind = f"{spec['gpu_type']}:" if spec.get("gpu_type") else ""
    return [
        f"JobId={found['id']}{array} JobName={found['name'] or '(null)'}",
        f"UserId={found['user']} Account={found['tenant']} Priority={found['priority']}",
        f"JobState={STATES[job.state][1]} Reason={job.reason()} Dependency={after}",
        f"Requeue=1 Restarts={max(0, found['incarnation'] - 1)} BatchFlag=1 ExitCode={ended}",
        f"RunTime={long_span(job.ran_s())} TimeLimit={long_span(limit_s)}",
        f"SubmitTime={clock(found['submit_s'])}",
        f"StartTime={clock(started_s, 'Unknown')} EndTime={clock(end_s, 'Unknown')}",
        f"Partition={PARTITION}",
        f"NodeList={job.node_names()}",
        f"NumNodes={job.nodes()} TRES=node={job.nodes()},gres/gpu={found['gpus']}",
        f"TresPerNode=gres:gpu:{kind}{found['gpus'] // job.nodes()}",
        f"Command={job.command()}",
        f"WorkDir={spec.get('workdir') or ''}",
        *([f"Comment={found['reason']}"] if found["reason"] else []),
    ]


def _nodes(client: Any, name: str | None) -> list[list[str]]:
    nodes = {node["name"]: node for node in client.nodes()}
    wanted = sorted(nodes, key=natural) if name is None else _hosts(name)
    for one in wanted:
        if one not in nodes:
            raise Stop(f"Node {one} not found")
    return [_node(nodes[one]) for one in wanted]


def _node(node: dict[str, Any]) -> list[str]:
    state = state_of(node)
    base = {"drain": "IDLE+DRAIN", "drng": "MIXED+DRAIN", "down*": "DOWN*"}.get(state, NODE_STATES[state][0].upper())
    return [
        f"NodeName={node['name']}",
        f"Gres={gres_of(node)}",
        f"State={base}",
        f"Partitions={PARTITION}",
        f"CfgTRES=gres/gpu={node['gpus_total']}",
        f"AllocTRES=gres/gpu={node['gpus_busy']}",
        *([f"Reason={node['reason']}"] if node["reason"] else []),
    ]
