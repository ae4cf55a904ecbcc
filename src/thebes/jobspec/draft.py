"""What one source says about a job (a job file, a script, options), and the keys by which all of them say it.

Each source becomes a JobDraft: texts, each with its place ("job.yaml, line 3: gpus"), so that an error can say where it
comes from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thebes.jobspec.values import MINUTE_S, parse_array, parse_assignment, parse_duration_s
from thebes.model.errors import UserError


@dataclass(frozen=True)
class Given:
    """One value as it was written, and its place. A value is a text, a list or mapping of further ones, or nothing."""

    value: str | list[Given] | dict[str, Given] | None
    place: str


@dataclass
class JobDraft:
    """What one source says about a job, by the names of the job file."""

    given: dict[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # for the user: what was not understood, or was changed
    folder: Path | None = None  # the folder from which relative paths of a job file start

    def put(self, name: str, value: str | Iterable[str], place: str) -> None:
        words = value if isinstance(value, str) else [Given(word, place) for word in value]
        self.given[name] = Given(words, place)


def text_of(given: Given) -> str:
    if not isinstance(given.value, str):
        names: dict[type, str] = {list: "a list", dict: "a mapping"}
        kind = names.get(type(given.value), "nothing")
        raise UserError(f"{given.place}: one value is wanted here, not {kind}.")
    return given.value


def whole_number(given: Given) -> int:
    text = text_of(given).strip()
    if not re.fullmatch(r"[+-]?\d{1,15}", text):
        raise UserError(f"{given.place}: '{text}' is not a whole number.", hint="Write digits, as in 4.")
    return int(text)


def _seconds(given: Given) -> float:
    try:
        return float(text_of(given))
    except ValueError:
        raise UserError(f"{given.place}: '{given.value}' is not a number of seconds.", hint="As in 90.") from None


def _time(given: Given) -> float:
    return parse_duration_s(text_of(given), bare_s=MINUTE_S, place=given.place)


def _grace(given: Given) -> float:
    return parse_duration_s(text_of(given), bare_s=1.0, place=given.place)


def _items(given: Given) -> list[Given]:
    return given.value if isinstance(given.value, list) else [Given(text_of(given), given.place)]


def _command(given: Given) -> list[str]:
    if isinstance(given.value, list):
        return [text_of(item) for item in given.value]
    text = text_of(given)
    if not text.strip():
        raise UserError(f"{given.place}: the command is empty.", hint="As in command: python train.py --epochs 3")
    return ["bash", "-c", text]


def _array(given: Given) -> list[int]:
    return sorted({index for item in _items(given) for index in parse_array(text_of(item), item.place)})


def _after(given: Given) -> list[str]:
    ids: list[str] = []
    for item in _items(given):
        named = [word for word in re.split(r"[,:\s]+", text_of(item)) if word]
        if not named:  # so it is with --after "$JOB" if JOB is not set, and to start at once is not what was meant
            raise UserError(
                f"{item.place}: '{text_of(item)}' does not name a job.", hint="As in 17, or 17_3 in an array."
            )
        ids += named
    for job in ids:
        if not re.fullmatch(r"[1-9]\d{0,11}(_\d{1,6})?", job):
            raise UserError(f"{given.place}: '{job}' is not a job id.", hint="Ids look like 17, or 17_3 in an array.")
    return list(dict.fromkeys(ids))


def _env(given: Given) -> dict[str, str]:
    if isinstance(given.value, dict):
        return {name: "" if item.value is None else text_of(item) for name, item in given.value.items()}
    return dict(parse_assignment(text_of(item), item.place) for item in _items(given))


def _yes(given: Given) -> bool:
    text = text_of(given).strip().lower()
    if text in ("true", "yes", "on"):
        return True
    if text in ("false", "no", "off"):
        return False
    raise UserError(f"{given.place}: '{given.value}' is neither true nor false.")


@dataclass(frozen=True)
class JobFileKey:
    """A key of the job file: which field of a JobSpec it sets, and how its text is read."""

    field: str
    read: Callable[[Given], Any]


KEYS: dict[str, JobFileKey] = {
    "command": JobFileKey("command", _command),
    "run": JobFileKey("command", _command),
    "name": JobFileKey("name", text_of),
    "gpus": JobFileKey("gpus", whole_number),
    "min_gpus": JobFileKey("min_gpus", whole_number),
    "max_gpus": JobFileKey("max_gpus", whole_number),
    "nodes": JobFileKey("nodes", whole_number),
    "gpu_type": JobFileKey("gpu_type", text_of),
    "tenant": JobFileKey("tenant", text_of),
    "priority": JobFileKey("priority", whole_number),
    "time": JobFileKey("time_s", _time),
    "time_s": JobFileKey("time_s", _seconds),
    "array": JobFileKey("array", _array),
    "array_limit": JobFileKey("array_limit", whole_number),
    "after": JobFileKey("after", _after),
    "after_any": JobFileKey("after_any", _after),
    "hold": JobFileKey("hold", _yes),
    "env": JobFileKey("env", _env),
    "workdir": JobFileKey("workdir", text_of),
    "snapshot": JobFileKey("snapshot", _yes),
    "launcher": JobFileKey("launcher", text_of),
    "ranks_per_node": JobFileKey("ranks_per_node", whole_number),
    "mechanism": JobFileKey("mechanism", text_of),
    "grace": JobFileKey("grace_s", _grace),
    "grace_s": JobFileKey("grace_s", _seconds),
    "retries": JobFileKey("max_retries", whole_number),
    "max_retries": JobFileKey("max_retries", whole_number),
    "progress": JobFileKey("progress_pattern", text_of),
    "progress_pattern": JobFileKey("progress_pattern", text_of),
    "model": JobFileKey("model", text_of),
    "pack": JobFileKey("pack", _yes),
}
ALIASES = ("time_s", "grace_s", "max_retries", "progress_pattern")  # the API's own names, which are not suggested
FOREIGN = {
    "resources": "Write gpus:, nodes: and gpu_type: at the top level.",
    "accelerators": "Write gpus: 8 and gpu_type: H100.",
    "num_gpus": "did you mean 'gpus'?",
    "num_nodes": "did you mean 'nodes'?",
    "envs": "did you mean 'env'?",
    "commands": "did you mean 'command'? It may have several lines, after `command: |`.",
    "script": "did you mean 'command'? It may have several lines, after `command: |`.",
    "setup": "Put it at the top of command:, which may have several lines, after `command: |`.",
    "queue": "did you mean 'tenant'?",
    "account": "did you mean 'tenant'?",
    "cpus": "Thebes gives out GPUs only; leave it out.",
    "memory": "Thebes gives out GPUs only; leave it out.",
    "apiVersion": "This looks like a Kubernetes manifest; a job file has command:, gpus: … at the top level.",
    "kind": "This looks like a Kubernetes manifest; a job file has command:, gpus: … at the top level.",
    "depends_on": "did you mean 'after'?",
    "dependency": "did you mean 'after'?",
    "time_limit": "did you mean 'time'?",
}
