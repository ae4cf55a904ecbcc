"""Drafts laid over each other, later ones win, and turned into the fields of a JobSpec."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thebes.jobspec.draft import KEYS, Given, JobDraft
from thebes.jobspec.values import parse_assignment, split_limit
from thebes.model.errors import UserError, nearest

if TYPE_CHECKING:
    from thebes.jobspec.spec import JobSpec

# What belongs to the submitter's session or to the machine, or what Thebes sets for each rank.
NOT_EXPORTED = re.compile(
    r"""^(?:
        HOME|USER|LOGNAME|SHELL|MAIL|PWD|OLDPWD|SHLVL|_|PS[0-9]|HOSTNAME|HOSTTYPE|TERM.*|COLORTERM|COLUMNS|LINES|LS_COLORS
        |LESS.*|DISPLAY|WAYLAND_DISPLAY|WINDOWID|TMUX.*|STY|SSH_.*|XDG_.*|DBUS_.*|GPG_.*|VSCODE_.*|GIT_.*|EDITOR|VISUAL
        |PAGER|HIST.*|PROMPT.*|BASH.*|ZSH.*|INVOCATION_ID|JOURNAL_STREAM|SUDO_.*|SLURM_.*|SBATCH_.*|THEBES_.*
        |CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NVIDIA_VISIBLE_DEVICES
        |MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|TORCHELASTIC_.*
    )$""",
    re.VERBOSE,
)


def exported(export: str | None, environ: Mapping[str, str], place: str = "--export") -> dict[str, str]:
    """The part of the submitter's environment that goes with a job: ALL (default), NONE, or NAME[=VALUE],…"""
    words = [word for word in (export or "ALL").split(",") if word]
    found: dict[str, str] = {}
    for word in words:
        if word.upper() in ("NONE", "NIL"):
            continue
        if word.upper() == "ALL":
            found |= {
                name: value
                for name, value in environ.items()
                if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and not NOT_EXPORTED.match(name)
            }
            continue
        name, value = parse_assignment(word, place, environ)
        found[name] = value
    return found


@dataclass(frozen=True)
class Merged:
    """The fields of a JobSpec, and the place where each of them was written."""

    fields: dict[str, Any]
    places: dict[str, str]
    notes: list[str]
    snapshot: bool  # whether the work directory is to be copied


def merge(drafts: Iterable[JobDraft], *, cwd: Path, environ: Mapping[str, str]) -> Merged:
    """Lay drafts over each other; later ones win, and environments are joined."""
    fields: dict[str, Any] = {}
    places: dict[str, str] = {}
    notes: list[str] = []
    env: dict[str, str] = {}
    export = Given(None, "")
    snapshot = False
    for draft in drafts:
        notes += draft.notes
        if "array" in draft.given and "array" in fields:  # it replaces an earlier one as a whole, with its limit
            fields.pop("array_limit", None)
            places.pop("array_limit", None)
        for name, given in _with_limit(draft.given).items():
            if name == "export":
                export = given
                continue
            key = KEYS[name]
            value = key.read(given)
            if key.field == "env":
                env |= value
            elif key.field == "snapshot":
                snapshot = value
            elif key.field == "workdir":
                value = str(Path(os.path.normpath((draft.folder or cwd) / Path(value).expanduser())))
            if key.field != "snapshot":
                fields[key.field] = value
                places[key.field] = given.place
    if "command" not in fields:
        raise UserError(
            "there is no command to run.",
            hint="As in: thebes submit --gpus 2 -- python train.py\n    or: thebes submit -f job.yaml\n    or: "
            "thebes submit train.sh",
        )
    text = export.value if isinstance(export.value, str) else None
    fields["env"] = {**exported(text, environ, export.place), **env}
    fields.setdefault("workdir", str(cwd))
    return Merged(fields, places, notes, snapshot)


def _with_limit(given: Mapping[str, Given]) -> Mapping[str, Given]:
    """The same values; where an array's text contains its limit (0-99%4), the limit gets its own name."""
    array = given.get("array")
    if array is None or not isinstance(array.value, str):
        return given
    indices, limit = split_limit(array.value, array.place)
    if limit is None:
        return given
    if "array_limit" in given:
        raise UserError(
            f"{given['array_limit'].place}: '{array.value}' has a limit already.", hint="Leave one of them out."
        )
    return {**given, "array": Given(indices, array.place), "array_limit": Given(limit, array.place)}


def check(merged: Merged) -> JobSpec:
    """The JobSpec, or an error that names the place where the wrong value was written."""
    from pydantic import ValidationError

    from thebes.jobspec.spec import JobSpec

    try:
        return JobSpec(**merged.fields)
    except ValidationError as error:
        raise _spec_error(error.errors(include_url=False)[0], merged.places) from None


def _spec_error(fault: Any, places: Mapping[str, str]) -> UserError:
    name = str(fault["loc"][0]) if fault["loc"] else ""
    if not name and "evenly" in fault["msg"]:
        name = "nodes"
    if not name and "array_limit: " in fault["msg"]:
        name, fault = "array_limit", {**fault, "msg": fault["msg"].replace("array_limit: ", "")}
    where = places.get(name, name)
    limits, kind, shown = fault.get("ctx", {}), fault["type"], repr(fault.get("input"))[:60]
    hint = ""
    if kind == "greater_than_equal":
        text = f"must be at least {limits['ge']}, not {shown}"
        if name == "gpus":
            hint = "Every job holds at least one GPU."
    elif kind == "greater_than":
        text = f"must be more than {limits['gt']}, not {shown}"
    elif kind == "less_than_equal":
        text = f"must be at most {limits['le']:,}, not {shown}"
    elif kind == "literal_error":
        choices = re.findall(r"'([^']+)'", limits.get("expected", ""))
        text, hint = f"{shown} is not known", nearest(str(fault.get("input")), choices)
    elif kind == "string_pattern_mismatch":
        text = f"{shown} is not a valid name"
        hint = "Letters, digits, '_', '.' and '-', beginning with a letter or digit, at most 64."
    else:
        text = fault["msg"].removeprefix("Value error, ")
    return UserError(f"{where}: {text}." if where else f"{text}.", hint=hint)
