"""Job files in YAML: read into drafts, each value with its line, and described by a JSON Schema.

Scalars stay text until their field is known: YAML alone would read `time: 1:30:00` as 5400 and `after: 12_3` as 123.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thebes.jobspec.draft import ALIASES, FOREIGN, KEYS, Given, JobDraft
from thebes.model.errors import UserError, nearest


def read_yaml(path: Path) -> JobDraft:
    """The draft in a job file; `-` reads standard input."""
    if str(path) == "-":
        import sys

        return parse_yaml(sys.stdin.read(), "<stdin>", Path.cwd())
    return parse_yaml(read_text(path), str(path), path.absolute().parent)


def parse_yaml(text: str, name: str, folder: Path | None = None) -> JobDraft:
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
    draft = JobDraft(folder=folder)
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
    """A YAML node as texts. It goes two levels deep, which is enough for every key, so anchors cannot make it large."""
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


def file_schema() -> dict[str, Any]:
    """The JSON Schema of a job file: the job's own schema, and the forms that people write."""
    from thebes.jobspec.spec import job_schema

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
