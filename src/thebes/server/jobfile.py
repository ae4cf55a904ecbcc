"""From what people write to a JobSpec: YAML job files, scripts (`sbatch.py`), options of a command line.

Each source becomes a Draft: texts, each with its place ("job.yaml, line 3: gpus"), so that an error can say where it
comes from. Drafts are laid over each other, later ones win, and turned into the fields of a JobSpec. Scalars stay text
until their field is known: YAML alone would read `time: 1:30:00` as 5400 and `after: 12_3` as 123.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thebes.model.errors import UserError, nearest

if TYPE_CHECKING:
    from thebes.server.spec import JobSpec

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0
UNITS_S = {"s": 1.0, "sec": 1.0, "m": MINUTE_S, "min": MINUTE_S, "h": HOUR_S, "d": DAY_S, "w": 7 * DAY_S}
MAX_ARRAY = 10_000


@dataclass(frozen=True)
class Given:
    """One value as it was written, and where. A value is a text, a list or a mapping of further ones, or nothing."""

    value: str | list[Given] | dict[str, Given] | None
    place: str


@dataclass
class Draft:
    """What one source says about a job, by the names of the job file."""

    given: dict[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # to be told to the user: what was not understood, or changed
    folder: Path | None = None  # relative work directories of a job file start here

    def put(self, name: str, value: str | Iterable[str], place: str) -> None:
        words = value if isinstance(value, str) else [Given(word, place) for word in value]
        self.given[name] = Given(words, place)


# ---------------------------------------------------------------------------------------------------------- values


def parse_duration_s(text: str, *, bare_s: float, place: str = "") -> float:
    """Seconds from 90s, 10m, 1h30m, 1.5h, 2d, MM:SS, H:MM:SS, D-HH[:MM[:SS]]; a bare number counts in `bare_s`."""
    clean = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", clean):
        return float(clean) * bare_s
    if re.fullmatch(r"(\d+(\.\d+)?\s*[a-z]+\s*)+", clean):
        parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", clean)
        names = [_unit(unit) for _, unit in parts]
        if None not in names:
            return sum(float(number) * UNITS_S[unit] for (number, _), unit in zip(parts, names, strict=True) if unit)
    days, dash, clock = clean.rpartition("-")
    numbers = clock.split(":")
    if all(re.fullmatch(r"\d+", number) for number in numbers) and (not dash or days.isdigit()) and len(numbers) <= 3:
        # As Slurm reads it: with days the first number is hours, without days two numbers are minutes and seconds.
        sizes = (HOUR_S, MINUTE_S, 1.0) if dash or len(numbers) == 3 else (MINUTE_S, 1.0)
        total = sum(int(number) * size for number, size in zip(numbers, sizes, strict=False))
        return total + (int(days) * DAY_S if dash else 0.0)
    raise UserError(
        f"{_at(place)}'{text}' is not a length of time.",
        hint="Write 90s, 10m, 2h, 1h30m, 1:30:00 or 1-12:00:00 (days-hours:minutes:seconds).",
    )


def _unit(word: str) -> str | None:
    plural = {"secs": "s", "second": "s", "seconds": "s", "mins": "m", "minute": "m", "minutes": "m", "hr": "h"}
    plural |= {"hrs": "h", "hour": "h", "hours": "h", "day": "d", "days": "d", "week": "w", "weeks": "w"}
    return word if word in UNITS_S else plural.get(word)


def parse_array(text: str, place: str = "") -> list[int]:
    """Indices from 1-50, 0-10:2, 1,3,5-7; sorted, each once."""
    indices: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+)(?::(\d+))?)?\s*", part)
        if found is None:
            raise UserError(f"{_at(place)}'{text}' is not a list of array indices.", hint=_array_hint(part))
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or step == 0:
            fault = "the step is 0" if step == 0 else f"{first} is greater than {last}"
            raise UserError(f"{_at(place)}'{part.strip()}' names no array index: {fault}.", hint=_array_hint(""))
        if last > 999_999:
            raise UserError(f"{_at(place)}array index {last} is too large.", hint="Indices go up to 999999.")
        indices.update(range(first, last + 1, step))
        if len(indices) > MAX_ARRAY:
            raise UserError(
                f"{_at(place)}'{text}' has more than {MAX_ARRAY:,} indices.", hint="Submit several smaller arrays."
            )
    return sorted(indices)


def _array_hint(part: str) -> str:
    if "%" in part:
        return "A limit comes once and last, as in 0-99%4; beside a list of indices write array_limit: 4."
    return "Write 1-50, 0-10:2 (every second one) or 1,3,5-7."


def split_limit(text: str, place: str = "") -> tuple[str, str | None]:
    """Indices and limit of 0-99%4, as Slurm writes it: at most four of them at a time."""
    indices, percent, limit = text.partition("%")
    if not percent:
        return text, None
    if "%" in limit or "," in limit:
        raise UserError(f"{_at(place)}'{text}' is not an array.", hint=_array_hint(text))
    if not re.fullmatch(r"\s*0*[1-9]\d{0,5}\s*", limit):
        raise UserError(
            f"{_at(place)}'{text}': the limit after % is not a number from 1 to 999,999.",
            hint="As in 0-99%4: at most 4 jobs of the array at a time.",
        )
    return indices, limit.strip()


def parse_assignment(text: str, place: str = "", environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """KEY=VALUE; a KEY alone takes its value from the environment, as with docker."""
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UserError(f"{_at(place)}'{text}' is not an environment variable.", hint="Write KEY=VALUE.")
    if equals:
        return name, value
    found = (os.environ if environ is None else environ).get(name)
    if found is None:
        raise UserError(
            f"{_at(place)}{name} has no value here.", hint=f"Write {name}=VALUE, or export {name} before you submit."
        )
    return name, found


def _at(place: str) -> str:
    return f"{place}: " if place else ""


# ---------------------------------------------------------------------------------------------------- job file keys


def text_of(given: Given) -> str:
    if not isinstance(given.value, str):
        kind = {list: "a list", dict: "a mapping"}.get(type(given.value), "nothing")
        raise UserError(f"{given.place}: one value is wanted here, not {kind}.")
    return given.value


def _whole(given: Given) -> int:
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
        if not named:  # as of --after "$JOB" where JOB is not set: to start at once is not what was meant
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
class Key:
    """A key of the job file: which field of a JobSpec it sets, and how its text is read."""

    field: str
    read: Callable[[Given], Any]


KEYS: dict[str, Key] = {
    "command": Key("command", _command),
    "run": Key("command", _command),
    "name": Key("name", text_of),
    "gpus": Key("gpus", _whole),
    "nodes": Key("nodes", _whole),
    "gpu_type": Key("gpu_type", text_of),
    "tenant": Key("tenant", text_of),
    "priority": Key("priority", _whole),
    "time": Key("time_s", _time),
    "time_s": Key("time_s", _seconds),
    "array": Key("array", _array),
    "array_limit": Key("array_limit", _whole),
    "after": Key("after", _after),
    "after_any": Key("after_any", _after),
    "hold": Key("hold", _yes),
    "env": Key("env", _env),
    "workdir": Key("workdir", text_of),
    "snapshot": Key("snapshot", _yes),
    "launcher": Key("launcher", text_of),
    "ranks_per_node": Key("ranks_per_node", _whole),
    "mechanism": Key("mechanism", text_of),
    "grace": Key("grace_s", _grace),
    "grace_s": Key("grace_s", _seconds),
    "retries": Key("max_retries", _whole),
    "max_retries": Key("max_retries", _whole),
    "progress": Key("progress_pattern", text_of),
    "progress_pattern": Key("progress_pattern", text_of),
    "model": Key("model", text_of),
    "pack": Key("pack", _yes),
}
ALIASES = ("time_s", "grace_s", "max_retries", "progress_pattern")  # the API's own names; not suggested

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


# -------------------------------------------------------------------------------------------------------- YAML file


def read_yaml(path: Path) -> Draft:
    """The draft in a job file; `-` reads standard input."""
    if str(path) == "-":
        import sys

        return parse_yaml(sys.stdin.read(), "<stdin>", Path.cwd())
    return parse_yaml(read_text(path), str(path), path.absolute().parent)


def parse_yaml(text: str, name: str, folder: Path | None = None) -> Draft:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise _yaml_error(error, name) from None
    finally:
        loader.dispose()
    if root is None:
        raise UserError(f"{name}: the job file is empty.", hint="It needs at least command: python train.py")
    if not isinstance(root, yaml.MappingNode):
        raise UserError(
            f"{name}, line {root.start_mark.line + 1}: a job file is a list of `key: value` lines.",
            hint="As in:\n      command: python train.py\n      gpus: 4",
        )
    draft = Draft(folder=folder)
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value)
        place = f"{name}, line {line}: {key}"
        if key not in KEYS:
            hint = FOREIGN.get(key) or nearest(key, [known for known in KEYS if known not in ALIASES])
            raise UserError(f"{name}, line {line}: unknown key '{key}'.", hint=hint)
        if key in draft.given:
            raise UserError(f"{place}: the key is there twice.", hint=f"First in {draft.given[key].place}.")
        given = _given(value_node, place, name)
        if given.value is not None:
            draft.given[key] = given
    for pair in (("command", "run"), ("time", "time_s"), ("grace", "grace_s"), ("retries", "max_retries")):
        if all(key in draft.given for key in pair):
            raise UserError(
                f"{draft.given[pair[1]].place}: says the same as '{pair[0]}'.", hint="Leave one of them out."
            )
    return draft


def _given(node: Any, place: str, name: str) -> Given:
    """A YAML node as texts. Two levels are enough for every key, so anchors cannot make it large."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        plain_null = node.tag == "tag:yaml.org,2002:null"
        return Given(None if plain_null else str(node.value), place)
    if isinstance(node, yaml.SequenceNode):
        return Given([_scalar(item, f"{place}[{row}]", name) for row, item in enumerate(node.value)], place)
    return Given({str(key.value): _scalar(item, f"{place}.{key.value}", name) for key, item in node.value}, place)


def _scalar(node: Any, place: str, name: str) -> Given:
    import yaml

    line = node.start_mark.line + 1
    where = f"{name}, line {line}: {place.partition(': ')[2]}"
    if not isinstance(node, yaml.ScalarNode):
        raise UserError(f"{where}: one value is wanted here.", hint="Put it in quotes if it is a text.")
    return Given(None if node.tag == "tag:yaml.org,2002:null" else str(node.value), where)


def _yaml_error(error: Any, name: str) -> UserError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f"{name}, line {mark.line + 1}" if mark is not None else name
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    hint = "Check the spaces in front of the keys, and put texts with ': ' or '{' in quotes."
    if "tab" in problem or "\\t" in problem:
        hint = "YAML does not take tabs: use spaces in front of the keys."
    return UserError(f"{where}: this is not YAML: {problem}.", hint=hint)


def read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        here = [p.name for p in path.parent.iterdir() if p.is_file()] if path.parent.is_dir() else []
        hint = nearest(path.name, here) if here else ""
        raise UserError(
            f"{path}: there is no such file.", hint=hint if hint.startswith("did") else "Check the path."
        ) from None
    except OSError as failure:
        raise UserError(f"{path}: cannot be read: {failure.strerror or failure}.") from None
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file.", hint="Job files and scripts are UTF-8 text.") from None


# ------------------------------------------------------------------------------------------------------ environment

# What belongs to the session of the one who submits, or to the machine, or is set for each rank by Thebes.
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


# ------------------------------------------------------------------------------------------------- drafts to a spec


@dataclass(frozen=True)
class Merged:
    """The fields of a JobSpec, and where each of them was written."""

    fields: dict[str, Any]
    places: dict[str, str]
    notes: list[str]
    snapshot: bool  # the work directory shall be copied


def merge(drafts: Iterable[Draft], *, cwd: Path, environ: Mapping[str, str]) -> Merged:
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
    """The same, where an array's text says its limit (0-99%4): under the name that the limit has."""
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

    from thebes.server.spec import JobSpec

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


# ----------------------------------------------------------------------------------------------------------- schema


def file_schema() -> dict[str, Any]:
    """The JSON Schema of a job file: the job's own schema with the forms that people write."""
    from thebes.server.spec import job_schema

    schema = job_schema()
    own = schema["properties"]
    text, number = {"type": "string"}, {"type": "number"}
    duration = {"anyOf": [text, number]}
    command = {"anyOf": [{**text, "minLength": 1}, own["command"]]}
    properties: dict[str, Any] = {}
    for name, key in KEYS.items():
        properties[name] = dict(own[key.field])
    properties["command"] = {
        **command,
        "description": "A text is run by bash; a list is the program and its arguments.",
    }
    properties["run"] = {**command, "description": "The same as command."}
    properties["time"] = {
        **duration,
        "description": "Run time limit: 90s, 10m, 2h, 1:30:00, 1-12:00:00; a bare number is minutes, as in Slurm.",
    }
    properties["grace"] = {
        **duration,
        "description": "Time between notice and kill: 30s, 2m; a bare number is seconds.",
    }
    properties["array"] = {
        "anyOf": [text, {"type": "integer"}, {"type": "array", "items": {"anyOf": [text, {"type": "integer"}]}}],
        "description": "One job per index, which it finds in THEBES_ARRAY_INDEX: 1-50, 0-10:2, 1,3,5-7, or a list. "
        "0-99%4: at most 4 of them at a time.",
    }
    word = {"anyOf": [text, {"type": "integer"}]}
    for name in ("after", "after_any"):
        properties[name] = {
            "anyOf": [word, {"type": "array", "items": word}],
            "description": own[name]["description"],
        }
    scalar = {"type": ["string", "number", "boolean", "null"]}
    properties["env"] = {
        "anyOf": [{"type": "object", "additionalProperties": scalar}, {"type": "array", "items": text}],
        "description": "Environment of the job: NAME: value, or a list of NAME=value.",
    }
    properties["workdir"] = {**text, "description": "Where it runs; relative to the folder of this file."}
    properties["snapshot"] = {"type": "boolean", "description": "Run in a copy of the work directory, made now."}
    for alias in ALIASES:
        properties[alias]["description"] += " (The API's name.)"
    schema["properties"] = properties
    schema.pop("required", None)
    schema["anyOf"] = [{"required": ["command"]}, {"required": ["run"]}]
    schema["title"] = "Thebes job file"
    return schema
