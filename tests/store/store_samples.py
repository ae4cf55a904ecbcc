"""Small jobs for the tests of the store, and work for processes that are killed while they write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from thebes import store as db

SPEC = json.dumps({"command": ["python", "train.py"], "gpus": 1, "env": {"API_KEY": "hunter2"}})


def submit(c: db.Connection, *, spec: str = SPEC, **changes: Any) -> list[db.JobRow]:
    """create_jobs with everything given that a test does not care about."""
    values: dict[str, Any] = {
        "user": "ann",
        "tenant": "lab",
        "name": "train",
        "gpus": 1,
        "nodes": None,
        "priority": 0,
        "submit_s": 100.0,
        "client_key": None,
    }
    return db.create_jobs(c, spec, **(values | changes))


def one(**changes: Any) -> Callable[[db.Connection], str]:
    """A change that submits one job and gives its id."""
    return lambda c: submit(c, **changes)[0].id


def write_until_killed(path: Path | str, told: Pipe) -> None:
    """Submit jobs without end and tell each id when it is acknowledged."""
    store = db.Store.open(path)
    number = 0
    while True:
        number += 1
        job_id = store.change_blocking(one(client_key=f"{os.getpid()}-{number}"))
        told.send(job_id)


def write_and_crash(path: Path | str, told: Pipe, crash_at: str, rounds: int) -> None:
    """A scripted workload, one commit per change, that dies at the given one."""
    os.environ["THEBES_CRASH_AT_WRITE"] = crash_at
    store = db.Store.open(path)
    for number in range(rounds):
        told.send(store.change_blocking(one(client_key=str(number)), must=True))
    store.close()
    told.send("done")
