"""scancel ends jobs by id, or all jobs that fit a filter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from thebes.cli.slurm.jobs import ALIVE, PARTITION, ids_of, load, split_ids
from thebes.cli.slurm.options import Stop, parse, warn_of_unused
from thebes.jobspec.slurm_options import NEEDED, Option

SIGNAL = "a job is ended with its notice and its grace; `thebes preempt` sends the notice alone"
OPTIONS = {
    "account": Option("A", NEEDED),
    "batch": Option("b", unsupported="it sends a signal to the script alone"),
    "clusters": Option("M", NEEDED, unsupported="it is one cluster"),
    "ctld": Option("", unused=True),
    "full": Option("f", unused=True),
    "help": Option(),
    "hurry": Option("H", unused=True),
    "interactive": Option("i", unsupported="it would ask about each job"),
    "jobname": Option("n", NEEDED),
    "me": Option(),
    "name": Option("", NEEDED),
    "nodelist": Option("w", NEEDED, unsupported="use `thebes drain --preempt` to move jobs off a node"),
    "partition": Option("p", NEEDED),
    "qos": Option("q", NEEDED, unsupported="there is no QOS"),
    "quiet": Option("Q"),
    "reservation": Option("R", NEEDED, unsupported="there are no reservations"),
    "sibling": Option("", NEEDED, unsupported="it is one cluster"),
    "signal": Option("s", NEEDED, unsupported=SIGNAL),
    "state": Option("t", NEEDED),
    "usage": Option(),
    "user": Option("u", NEEDED),
    "verbose": Option("v"),
    "version": Option("V"),
    "wckey": Option("", NEEDED, unsupported="there are no wckeys"),
}
ABOUT = "scancel of Thebes: end jobs, waiting or running."
STATES = {"PENDING": {"queued", "held"}, "PD": {"queued", "held"}, "RUNNING": {"running", "starting", "preempting"},
          "R": {"running", "starting", "preempting"}, "SUSPENDED": {"suspended"}, "S": {"suspended"}}  # fmt: skip


def scancel(connect: Callable[[], Any], words: list[str]) -> int:
    """Carry the command out; returns the exit code."""
    given = parse("scancel", words, OPTIONS)
    filters = [name for name in ("account", "jobname", "name", "me", "partition", "state", "user") if given.has(name)]
    ids = ids_of("scancel", split_ids(given.words))
    if not ids and not filters:
        raise Stop("scancel: error: No job identification provided")
    states = _states(given.get("state"))
    warn_of_unused("scancel", given.unused)
    with connect() as client:
        targets = _by_id(client, ids) if not filters else _by_filter(client, given, ids, states)
        return _end(client, targets, given)


def _states(word: str | None) -> set[str]:
    if word is None:
        return set(ALIVE)
    if word.upper() not in STATES:
        raise Stop(f"Invalid job state specified: {word}\nValid job states are PENDING, RUNNING, and SUSPENDED")
    return STATES[word.upper()]


def _by_id(client: Any, ids: list[tuple[str, list[int] | None]]) -> list[str]:
    return [one for number, indices in ids for one in _names(number, indices)]


def _names(number: str, indices: list[int] | None) -> list[str]:
    return [number] if indices is None else [f"{number}_{index}" for index in indices]


def _by_filter(client: Any, given: Any, ids: list[tuple[str, list[int] | None]], states: set[str]) -> list[str]:
    if given.has("partition") and given.get("partition") != PARTITION:
        return []
    user = client.status()["you"]["user"] if given.has("me") else given.get("user")
    name = given.get("jobname") or given.get("name")
    jobs = [
        job.facts
        for job in load(client, states, user=user)
        if (name is None or job.facts["name"] in name.split(","))
        and (not given.has("account") or job.facts["tenant"] == given.get("account"))
    ]
    if not ids:
        return [str(job["id"]) for job in jobs]
    chosen = set(_by_id(client, ids))
    return [str(job["id"]) for job in jobs if job["id"] in chosen or job["array_id"] in chosen]


def _end(client: Any, targets: list[str], given: Any) -> int:
    from thebes.client import ServerError

    failed = False
    for job in targets:
        if given.has("verbose"):
            print(f"scancel: Terminating job {job}", file=sys.stderr)
        try:
            client.cancel(job)
        except ServerError as error:
            if error.status == 0:
                raise
            done = error.status in (404, 409)  # Slurm does not count these as failures either
            failed = failed or not done
            if not given.has("quiet"):
                why = "Invalid job id specified" if error.status == 404 else error.message
                print(f"scancel: error: Kill job error on job id {job}: {why}", file=sys.stderr)
    return 1 if failed else 0
