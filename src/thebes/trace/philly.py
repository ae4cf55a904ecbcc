"""Philly (Microsoft; Jeon et al., ATC'19; msr-fiddle/philly-traces): `cluster_job_log`, a JSON list of job records.

A record has jobid, vc, user, status, submitted_time and attempts; an attempt has start_time, end_time and detail, a
list of machines with the GPUs used on each. Missing times are the string "None" (null and "" occur too); attempts
may be empty, or have a start without an end or the reverse. Run time is the sum over the attempts whose two times
are known; GPUs and nodes are those of the largest attempt. Jobs that never ran have neither and are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import polars as pl

from thebes.model.errors import UserError
from thebes.model.trace import TRACE_SCHEMA
from thebes.trace.draft import Draft, count
from thebes.trace.source import Source
from thebes.trace.table import BLANK_WORDS

HINT = "Expected is Philly's cluster_job_log: a JSON list of records with jobid, submitted_time and attempts."
KEYS = ("jobid", "submitted_time", "attempts")
CALLED = {"job_id": "jobid", "submit_time": "submitted_time"}


@dataclass(frozen=True)
class AttemptsTogether:
    """What the attempts of one job add up to."""

    seconds: float | None
    gpus: int
    nodes: int
    half_open: int  # attempts with only one of the two times


def looks_like(source: Source) -> bool:
    return source.first_line[:1] in ("[", "{")


def read(source: Source) -> Draft:
    rows: list[tuple[Any, ...]] = []
    half_open = attempts = 0
    for place, record in enumerate(_records(source), 1):
        where = f"record {place}"
        _check_keys(source, where, record)
        ran = _ran(source, where, record["attempts"] or [])
        half_open += ran.half_open
        attempts += len(record["attempts"] or [])
        submitted = _time(source, where, "submitted_time", record["submitted_time"])
        text = [_word(record.get(key)) for key in ("jobid", "user", "vc", "status")]
        rows.append((text[0], submitted, ran.seconds, ran.gpus, *text[1:], ran.nodes or None))
    names = ("job_id", "submit_time", "duration", "num_gpus", "user", "vc", "status", "num_nodes")
    columns = {
        name: pl.Series(name, cells, dtype=TRACE_SCHEMA[name])
        for name, cells in zip(names, zip(*rows, strict=True), strict=True)
    }
    notes: tuple[str, ...] = ()
    if half_open:
        notes = (f"{count(half_open, 'attempt')} of {attempts:,} without start or end: not counted in the run time.",)
    return Draft(
        source,
        columns,
        locate=lambda row: f"record {row + 1}",
        called=CALLED,
        calendar=True,
        lenient=True,
        derived=True,
        notes=notes,
    )


def _records(source: Source) -> Sequence[Any]:
    try:
        found = json.loads(source.data)
    except json.JSONDecodeError as failure:
        raise UserError(
            f"{source.name}, line {failure.lineno}, character {failure.colno}: not valid JSON ({failure.msg}).",
            hint="The file may be cut off; download it again.",
        ) from None
    except (RecursionError, ValueError) as failure:
        raise UserError(f"{source.name}: the JSON cannot be read ({failure}).", hint=HINT) from None
    if not isinstance(found, list):
        raise UserError(f"{source.name}: a JSON {_kind(found)}, not a list of jobs.", hint=HINT)
    if not found:
        raise UserError(f"{source.name}: the JSON list is empty.", hint=HINT)
    return found


def _check_keys(source: Source, where: str, record: object) -> None:
    if not isinstance(record, dict):
        raise UserError(f"{source.at(where)}: a {_kind(record)}, not a job record.", hint=HINT)
    missing = [key for key in KEYS if key not in record]
    if missing:
        raise UserError(f"{source.at(where)}: without {', '.join(missing)}.", hint=HINT)
    attempts = record["attempts"]
    if attempts is not None and not (isinstance(attempts, list) and all(isinstance(one, dict) for one in attempts)):
        raise UserError(f"{source.at(where)}: 'attempts' is not a list of records.", hint=HINT)


def _ran(source: Source, where: str, attempts: Sequence[Mapping[str, Any]]) -> AttemptsTogether:
    seconds, complete, half_open, gpus, nodes = 0.0, 0, 0, 0, 0
    for attempt in attempts:
        start = _time(source, where, "start_time", attempt.get("start_time"))
        end = _time(source, where, "end_time", attempt.get("end_time"))
        if start is not None and end is not None:
            seconds += end - start
            complete += 1
        else:
            half_open += 1
        machines = attempt.get("detail") or []
        if not isinstance(machines, list) or not all(isinstance(machine, dict) for machine in machines):
            raise UserError(f"{source.at(where)}: 'detail' is not a list of machines.", hint=HINT)
        used = [len(machine["gpus"]) for machine in machines if isinstance(machine.get("gpus"), list)]
        if sum(used) > gpus:
            gpus, nodes = sum(used), len([number for number in used if number])
    return AttemptsTogether(seconds if complete else None, gpus, nodes, half_open)


def _time(source: Source, where: str, key: str, value: object) -> float | None:
    if value is None or (isinstance(value, str) and value.strip().lower() in BLANK_WORDS):
        return None
    try:
        moment = datetime.fromisoformat(str(value).strip())
    except ValueError:
        raise UserError(
            f"{source.at(where)}, '{key}': '{str(value)[:40]}' is not a time.",
            hint="Times look like 2017-10-07 01:11:39.",
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _word(value: object) -> str | None:
    text = "" if value is None else str(value).strip()
    return text if text and text != "None" else None


def _kind(value: object) -> str:
    names: dict[type, str] = {dict: "record", list: "list", str: "text", bool: "truth value", type(None): "null"}
    return names.get(type(value), "number")
