"""squeue shows the waiting and running jobs, in Slurm's table."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from thebes.cli.slurm.formats import Field, Piece, clock, lines_of, parse_format, parse_long_format, span
from thebes.cli.slurm.jobs import (
    ALIVE,
    PARTITION,
    STATES,
    QueueLine,
    add_details,
    ids_of,
    load,
    named,
    split_ids,
    states_of,
    together,
)
from thebes.cli.slurm.options import Stop, natural, parse, ranges, unfolded, warn_of_unused
from thebes.jobspec.slurm_options import MAYBE, NEEDED, Option

DEFAULT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
LONG = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
START = "%.18i %.9P %.8j %.8u %.2t %.19S %.6D %20Y %R"

OPTIONS = {
    "all": Option("a", unused=True),
    "account": Option("A", NEEDED),
    "array": Option("r"),
    "array-unique": Option("", unused=True),
    "clusters": Option("M", NEEDED, unsupported="it is one cluster"),
    "federation": Option("", unused=True),
    "format": Option("o", NEEDED),
    "Format": Option("O", NEEDED),
    "help": Option(),
    "hide": Option("", unused=True),
    "iterate": Option("i", NEEDED),
    "jobs": Option("j", NEEDED),
    "json": Option(),
    "licenses": Option("L", NEEDED, unsupported="there are no licenses"),
    "local": Option("", unused=True),
    "long": Option("l"),
    "me": Option(),
    "name": Option("n", NEEDED),
    "noconvert": Option("", unused=True),
    "nodelist": Option("w", NEEDED),
    "noheader": Option("h"),
    "partition": Option("p", NEEDED),
    "priority": Option("P", unused=True),
    "qos": Option("q", NEEDED, unsupported="there is no QOS"),
    "reservation": Option("R", NEEDED, unsupported="there are no reservations"),
    "sibling": Option("", unused=True),
    "sort": Option("S", NEEDED),
    "start": Option(),
    "states": Option("t", NEEDED),
    "steps": Option("s", MAYBE, unsupported="jobs have no steps"),
    "usage": Option(),
    "user": Option("u", NEEDED),
    "verbose": Option("v", unused=True),
    "version": Option("V"),
    "yaml": Option("", unsupported="use --json"),
}
ABOUT = "squeue of Thebes: the jobs that wait and run."


def _ended(job: QueueLine) -> str:
    if job.facts["end_s"] is not None:
        return clock(job.facts["end_s"])
    started_s = job.started_s()
    if job.limit_s is None:
        return "NONE" if started_s else "N/A"
    return clock(None if started_s is None else started_s + job.limit_s)


def _left(job: QueueLine) -> str:
    return span(None if job.limit_s is None else max(0.0, job.limit_s - job.ran_s()))


def _where(job: QueueLine) -> str:
    if job.waits or job.state in ("failed", "timeout"):
        return f"({job.reason()})"
    return job.node_names()


def _each_node(job: QueueLine) -> str:
    kind = job.spec.get("gpu_type")
    return f"gres:gpu:{kind + ':' if kind else ''}{job.facts['gpus'] // job.nodes()}"


def _index(job: QueueLine) -> str:
    if job.indices:
        return ranges(job.indices)
    return "N/A" if job.facts["array_index"] is None else str(job.facts["array_index"])


FIELDS = {
    "i": Field("JOBID", lambda job: job.id),
    "A": Field("JOBID", lambda job: str(job.facts["array_id"] if job.indices else job.facts["id"])),
    "F": Field("ARRAY_JOB_ID", lambda job: str(job.facts["array_id"] or job.facts["id"])),
    "K": Field("ARRAY_TASK_ID", _index),
    "P": Field("PARTITION", lambda _job: PARTITION),
    "j": Field("NAME", lambda job: str(job.facts["name"] or "")),
    "u": Field("USER", lambda job: str(job.facts["user"])),
    "a": Field("ACCOUNT", lambda job: str(job.facts["tenant"])),
    "t": Field("ST", lambda job: STATES[job.state][0]),
    "T": Field("STATE", lambda job: STATES[job.state][1]),
    "M": Field("TIME", lambda job: span(job.ran_s()), cut=False),
    "l": Field("TIME_LIMIT", lambda job: span(job.limit_s), cut=False),
    "L": Field("TIME_LEFT", _left, cut=False),
    "D": Field("NODES", lambda job: str(job.nodes())),
    "C": Field("CPUS", lambda _job: "N/A"),
    "b": Field("TRES_PER_NODE", _each_node),
    "R": Field("NODELIST(REASON)", _where),
    "N": Field("NODELIST", lambda job: job.node_names()),
    "r": Field("REASON", lambda job: job.reason()),
    "S": Field("START_TIME", lambda job: clock(job.started_s())),
    "e": Field("END_TIME", _ended),
    "V": Field("SUBMIT_TIME", lambda job: clock(job.facts["submit_s"])),
    "Q": Field("PRIORITY", lambda job: str(job.facts["priority"])),
    "p": Field("PRIORITY", lambda job: str(job.facts["priority"])),
    "E": Field("DEPENDENCY", lambda job: job.comes_after()),
    "Z": Field("WORK_DIR", lambda job: str(job.spec.get("workdir") or "")),
    "o": Field("COMMAND", lambda job: job.command()),
    "Y": Field("SCHEDNODES", lambda _job: "(null)"),
    "q": Field("QOS", lambda _job: "(null)"),
    "k": Field("COMMENT", lambda _job: "(null)"),
    "v": Field("RESERVATION", lambda _job: "(null)"),
    "f": Field("FEATURES", lambda _job: "(null)"),
    "m": Field("MIN_MEMORY", lambda _job: "0"),
    "y": Field("NICE", lambda _job: "0"),
    "B": Field("EXEC_HOST", lambda job: job.node_names().partition(",")[0] if not job.waits else "n/a"),
}
LONG_NAMES = {
    "jobid": "A", "jobarrayid": "i", "arrayjobid": "F", "arraytaskid": "K", "partition": "P", "name": "j",
    "username": "u", "account": "a", "statecompact": "t", "state": "T", "timeused": "M", "timelimit": "l",
    "timeleft": "L", "numnodes": "D", "numcpus": "C", "tres": "b", "trespernode": "b", "gres": "b", "reasonlist": "R",
    "nodelist": "N", "reason": "r", "starttime": "S", "endtime": "e", "submittime": "V", "priority": "p",
    "prioritylong": "Q", "dependency": "E", "workdir": "Z", "command": "o", "schednodes": "Y", "qos": "q",
}  # fmt: skip
NEEDS_DETAILS = set("lLebEZo")
SORTS: dict[str, Callable[[QueueLine], Any]] = {
    "i": lambda job: natural(job.id),
    "j": lambda job: str(job.facts["name"] or ""),
    "u": lambda job: job.facts["user"],
    "t": lambda job: STATES[job.state][2],
    "T": lambda job: STATES[job.state][2],
    "M": lambda job: job.ran_s(),
    "D": lambda job: job.nodes(),
    "S": lambda job: job.started_s() or float("inf"),
    "V": lambda job: job.facts["submit_s"],
    "p": lambda job: job.facts["priority"],
    "Q": lambda job: job.facts["priority"],
    "P": lambda _job: 0,
    "N": lambda job: natural(job.node_names()),
}


def squeue(connect: Callable[[], Any], words: list[str]) -> int:
    """Carry the command out; returns the exit code."""
    given = parse("squeue", words, OPTIONS)
    if given.words:
        raise Stop(f'squeue: error: Unrecognized option: {given.words[0]}\nTry "squeue --help" for more information')
    warn_of_unused("squeue", given.unused)
    pieces = _pieces(given)
    every = given.get("iterate")
    if every is not None and not (every.isdigit() and int(every) > 0):
        raise Stop(f"squeue: error: Error: invalid entry for --iterate=|{every}|")
    with connect() as client:
        while True:
            _show(client, given, pieces)
            if every is None:
                return 0
            print("", flush=True)
            time.sleep(int(every))


def _pieces(given: Any) -> list[Piece]:
    if (text := given.get("Format")) is not None:
        return parse_long_format("squeue", text, {name: FIELDS[letter] for name, letter in LONG_NAMES.items()})
    text = given.get("format") or (START if given.has("start") else LONG if given.has("long") else DEFAULT)
    return parse_format("squeue", text, FIELDS)


def _show(client: Any, given: Any, pieces: Sequence[Piece]) -> None:
    jobs = _chosen(client, given)
    letters = {letter for letter, field in FIELDS.items() if any(piece.field is field for piece in pieces)}
    all_of_them = bool(letters & NEEDS_DETAILS) or given.has("json")
    lines = jobs if given.has("array") else together(jobs)
    add_details(client, [line for line in lines if all_of_them or _has_a_past(line, letters)])
    lines = sorted_jobs(lines, given.get("sort") or ("S,i" if given.has("start") else "P,t,-p"))
    if given.has("json"):
        print(json.dumps({"jobs": [as_json(job) for job in lines]}, indent=2, ensure_ascii=False))
        return
    if given.has("long") and not given.has("noheader"):
        print(time.strftime("%a %b %d %H:%M:%S %Y"))
    for line in lines_of(pieces, lines, heading=not given.has("noheader")):
        print(line)


def _has_a_past(job: QueueLine, letters: set[str]) -> bool:
    """Whether a job started more than once or ended, so that lists do not tell when it last began, and where."""
    again = job.facts["incarnation"] > 1 and not job.waits and letters & set("MLSe")
    return bool(again) or (bool(job.facts["end_s"] and job.facts["incarnation"]) and bool(letters & set("RNMB")))


def _chosen(client: Any, given: Any) -> list[QueueLine]:
    states: set[str] = states_of("squeue", given.listed("states")) if given.has("states") else set[str](ALIVE)
    if given.has("start"):
        states &= {"queued", "held"}
    if given.has("partition") and PARTITION not in given.listed("partition"):
        return []
    user: str | None = None
    users = given.listed("user")
    if given.has("me"):
        users = [client.status()["you"]["user"]]
    if len(users) == 1:
        user = users[0]
    names = given.listed("name")
    if any(not _may_be_a_name(name) for name in names):
        return []
    wanted = ids_of("squeue", split_ids([given.get("jobs") or ""])) if given.get("jobs") else None
    if wanted is not None:
        jobs = named(client, wanted, states)
    else:
        jobs = load(client, states, user=user, name=names[0] if len(names) == 1 else None)
    hosts = hosts_of(given.get("nodelist"))

    def passes(job: QueueLine) -> bool:
        facts = job.facts
        return (
            (not users or facts["user"] in users)
            and (not names or facts["name"] in names)
            and (not given.has("account") or facts["tenant"] in given.listed("account"))
            and (hosts is None or bool(hosts & set(facts["gpus_held"] or {})))
        )

    return [job for job in jobs if passes(job)]


def hosts_of(text: str | None) -> set[str] | None:
    if text is None:
        return None
    try:
        return set(unfolded(text))
    except ValueError:
        raise Stop(f"squeue: error: --nodelist: '{text}' is not a list of nodes. Nothing was done.") from None


def _may_be_a_name(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) is not None


def sorted_jobs(jobs: list[QueueLine], order: str) -> list[QueueLine]:
    held_last = [job for job in jobs if job.state != "held"] + [job for job in jobs if job.state == "held"]
    for word in reversed(order.split(",")):
        down, letter = word.startswith("-"), word.lstrip("+-").strip()
        if letter not in SORTS:
            raise Stop(f"squeue: error: --sort: '{word}' is not a field that Thebes sorts by. Nothing was done.")
        held_last.sort(key=SORTS[letter], reverse=down)
    return held_last


def as_json(job: QueueLine) -> dict[str, Any]:
    facts = job.facts
    return {
        "job_id": job.id,
        "array_job_id": facts["array_id"],
        "array_task_id": _index(job) if facts["array_id"] else None,
        "name": facts["name"],
        "user_name": facts["user"],
        "account": facts["tenant"],
        "partition": PARTITION,
        "job_state": STATES[job.state][1],
        "state_reason": job.reason(),
        "state_description": facts["reason"],
        "submit_time": facts["submit_s"],
        "start_time": job.started_s(),
        "end_time": facts["end_s"],
        "run_time": round(job.ran_s(), 3),
        "time_limit": job.limit_s,
        "node_count": job.nodes(),
        "nodes": job.node_names(),
        "gpus": facts["gpus"],
        "priority": facts["priority"],
        "restart_cnt": max(0, facts["incarnation"] - 1),
        "current_working_directory": job.spec.get("workdir"),
        "command": job.command(),
    }
