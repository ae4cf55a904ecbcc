"""A script as sbatch would take it: its `#SBATCH` lines become a JobDraft, and its present text becomes the command.

Slurm's options keep their meaning: GPUs per node or per task are multiplied, a bare time is in minutes, and the last of
two equal options counts. Options that mean nothing here are named in one note. A script runs once, not once per GPU.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from thebes.jobspec.draft import Given, JobDraft, text_of
from thebes.jobspec.jobfile import read_text
from thebes.jobspec.slurm_options import GPU_OPTIONS, LONG_NAMES, takes_next_word
from thebes.jobspec.values import MINUTE_S, parse_duration_s
from thebes.model.errors import UserError

SCRIPT_LIMIT_BYTES = 120 << 10  # Linux accepts no single argument above 128 KiB

DEPENDENCIES = {"afterok": "after", "afterany": "after_any"}

# Variables that a script may read under Slurm's names, in terms of what each rank gets from Thebes.
SLURM_VARIABLES = {
    "SLURM_JOB_ID": "$THEBES_JOB_ID",
    "SLURM_JOBID": "$THEBES_JOB_ID",
    "SLURM_ARRAY_TASK_ID": "$THEBES_ARRAY_INDEX",
    "SLURM_ARRAY_JOB_ID": "${THEBES_JOB_ID%%_*}",
    "SLURM_NNODES": "$THEBES_NODES",
    "SLURM_JOB_NUM_NODES": "$THEBES_NODES",
    "SLURM_NODEID": "$NODE_RANK",
    "SLURM_GPUS_ON_NODE": "$THEBES_GPUS_PER_NODE",
    "SLURM_RESTART_COUNT": "$((THEBES_INCARNATION - 1))",
    "SLURM_SUBMIT_DIR": "",  # the folder of submission is filled in
    "SLURM_JOB_NAME": "",  # the name is filled in
}


@dataclass(frozen=True)
class Directive:
    option: str  # the long name, without dashes
    value: str
    place: str


def read_script(path: Path, arguments: Iterable[str] = (), *, cwd: Path | None = None) -> JobDraft:
    """A script as sbatch would take it: its #SBATCH lines, and a command that runs its present text once."""
    return parse_script(read_text(path), str(path), tuple(arguments), cwd=cwd or Path.cwd())


def parse_script(
    text: str,
    name: str,
    arguments: tuple[str, ...] = (),
    *,
    cwd: Path,
    options: Iterable[Directive] | None = None,
) -> JobDraft:
    """The same as read_script, for a text. `options` replace its #SBATCH lines, for callers that have read those."""
    draft = JobDraft()
    _apply(draft, list(directives(text, name) if options is None else options), name)
    draft.given.setdefault("name", Given(_as_name(Path(name).name), name))
    draft.given.setdefault("nodes", Given("1", name))
    draft.put("ranks_per_node", "1", name)
    nodes = int(text_of(draft.given["nodes"]))
    if nodes > 1:
        draft.notes.append(f"{name} will run once on each of its {nodes} nodes (sbatch runs it on the first only).")
    if re.search(r"^\s*(srun|mpirun)\b", text, re.MULTILINE):
        draft.notes.append(
            f"{name} calls srun or mpirun, which know nothing of Thebes; for ranks, `thebes submit -- python …` "
            "starts one process per GPU, and `torchrun` works inside a script."
        )
    draft.put("command", _script_command(draft, text, name, arguments, cwd), name)
    return draft


def directives(text: str, name: str) -> Iterable[Directive]:
    """The #SBATCH options up to the first line that is neither empty nor a comment, as sbatch reads them."""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            return
        if not re.match(r"#SBATCH\s", line):
            continue
        place = f"{name}, line {number}"
        try:
            words = shlex.split(line[len("#SBATCH") :], comments=True)
        except ValueError as error:
            raise UserError(f"{place}: {str(error).lower()} in an #SBATCH line.", hint="Close the quotes.") from None
        yield from _options(words, place)


def _options(words: list[str], place: str) -> Iterable[Directive]:
    row = 0
    while row < len(words):
        word, row = words[row], row + 1
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
        elif word.startswith("-") and len(word) > 1:
            option = LONG_NAMES.get(word[1], word[1])
            equals, value = ("=", word[2:].removeprefix("=")) if len(word) > 2 else ("", "")
        else:
            raise UserError(f"{place}: '{word}' is not an option.", hint="As in #SBATCH --gres=gpu:2 --time=1:00:00")
        if not equals and takes_next_word(option) and row < len(words) and not words[row].startswith("-"):
            value, row = words[row], row + 1
        shown = f"-{option}" if len(option) == 1 else f"--{option}"
        if option in UNDERSTOOD and takes_next_word(option) and not value:
            raise UserError(f"{place}: {shown} has no value.", hint=f"As in #SBATCH {shown}=VALUE")
        yield Directive(option, value, f"{place}: {shown}")


def _apply(draft: JobDraft, found: list[Directive], name: str) -> None:
    by_option = {item.option: item for item in found}  # the last one counts, as with sbatch
    ignored: list[str] = []
    for item in by_option.values():
        if item.option not in UNDERSTOOD:
            ignored.append(item.place.rpartition(": ")[2])
        elif item.option in _KEYS:
            key, read = _KEYS[item.option]
            if (value := read(item)) is not None:
                draft.put(key, value, item.place)
        elif item.option == "dependency":
            for key, jobs in _dependencies(item).items():
                draft.put(key, jobs, item.place)
    _apply_sizes(draft, by_option)
    if ignored:
        plural = "options are" if len(ignored) > 1 else "option is"
        hint = " Output is shown by `thebes logs`." if {"--output", "--error"} & set(ignored) else ""
        draft.notes.append(f"{name}: {len(ignored)} #SBATCH {plural} not used here: {', '.join(ignored)}.{hint}")


def _apply_sizes(draft: JobDraft, by_option: dict[str, Directive]) -> None:
    nodes = 1
    if (item := by_option.get("nodes")) is not None:
        nodes = _count(item.value.partition("-")[0], item.place)
        draft.put("nodes", str(nodes), item.place)
    tasks = nodes
    if (item := by_option.get("ntasks-per-node")) is not None:
        tasks = nodes * _count(item.value, item.place)
    if (item := by_option.get("ntasks")) is not None:
        tasks = _count(item.value, item.place)
    times = {"gpus-per-node": nodes, "gres": nodes, "gpus-per-task": tasks}
    for option in GPU_OPTIONS:
        if (item := by_option.get(option)) is None:
            continue
        kind, count = _gpus(item)
        if count is None:  # a gres that is no GPU
            continue
        draft.put("gpus", str(count * times.get(option, 1)), item.place)
        if kind:
            draft.put("gpu_type", kind, item.place)
        return


def _gpus(item: Directive) -> tuple[str, int | None]:
    """(type, count) of a text such as [gpu:][type:]count."""
    for entry in item.value.split(","):
        words = entry.partition("(")[0].split(":")
        if item.option == "gres":
            if words[0].removeprefix("gres/") != "gpu":
                continue
            words = words[1:]
        if not words:
            return "", 1
        if re.fullmatch(r"\d+", words[-1]):
            return ":".join(words[:-1]), _count(words[-1], item.place)
        if item.option == "gres" and len(words) == 1:
            return words[0], 1
        raise UserError(f"{item.place}: '{item.value}' is not a number of GPUs.", hint="As in 4, or a100:4.")
    return "", None


def _count(text: str, place: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text) or int(text) < 1:
        raise UserError(f"{place}: '{text}' is not a number of at least 1.")
    return int(text)


def _dependencies(item: Directive) -> dict[str, list[str]]:
    """The jobs of a dependency, by the key of the job file that means the same."""
    if "?" in item.value:
        raise UserError(
            f"{item.place}: '{item.value}' is not supported: '?' would start it after any one of them.",
            hint="With commas it starts after all of them: afterok:1,afterany:2.",
        )
    found: dict[str, list[str]] = {}
    for clause in item.value.split(","):
        kind, _, rest = clause.partition(":")
        if kind not in DEPENDENCIES:
            raise UserError(
                f"{item.place}: '{item.value}' is not supported.",
                hint="Only afterok:JOB[:JOB…] and afterany:JOB[:JOB…] are understood, with commas between them.",
            )
        if not all(jobs := rest.split(":")):
            raise UserError(f"{item.place}: '{clause}' does not name a job.", hint=f"As in {kind}:17 or {kind}:17:18.")
        found.setdefault(DEPENDENCIES[kind], []).extend(jobs)
    return found


def _signal_lead(item: Directive) -> str:
    _, at, lead = item.value.partition("@")
    return str(_count(lead, item.place)) if at else "60"  # the lead that Slurm gives by default


def _time_limit(item: Directive) -> str | None:
    if item.value.lower() in ("0", "unlimited", "infinite"):
        return None
    return f"{parse_duration_s(item.value, bare_s=MINUTE_S, place=item.place)}s"


def _as_name(text: str) -> str:
    """A job name that we accept: Slurm takes any text, ours has letters, digits, '_', '.', '-'."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).lstrip("_.-")[:64] or "script"


def _script_command(draft: JobDraft, text: str, name: str, arguments: tuple[str, ...], cwd: Path) -> list[str]:
    """A command that runs the text as submitted, not the file as it will be later. `$0` is the script's given name."""
    first = text.partition("\n")[0]
    interpreter = shlex.split(first[2:]) if first.startswith("#!") else ["/bin/bash"]
    program = Path(interpreter[-1 if len(interpreter) > 1 and interpreter[0].endswith("/env") else 0]).name
    if program not in ("bash", "sh", "dash", "zsh", "ksh") or len(text.encode()) > SCRIPT_LIMIT_BYTES:
        return [*interpreter, str(Path(cwd, name)), *arguments]
    prologue = _slurm_prologue(draft, text, name, cwd)
    rest = text.partition("\n")[2] if first.startswith("#!") else text
    # It takes the place of the #! line, so that the line numbers of error messages stay true.
    separator = "\n" if first.startswith("#!") else "; " if prologue else ""
    return [
        *interpreter,
        "-c",
        f"{prologue or ('#' if first.startswith('#!') else '')}{separator}{rest}",
        name,
        *arguments,
    ]


def _slurm_prologue(draft: JobDraft, text: str, name: str, cwd: Path) -> str:
    """Assignments of the SLURM_ variables that the script mentions. Only the array index is exported: libraries that
    see SLURM_ variables believe that srun has started them."""
    mentioned = set(re.findall(r"\bSLURM_[A-Z_]+\b", text))
    words = []
    for variable in sorted(mentioned & SLURM_VARIABLES.keys()):
        value = SLURM_VARIABLES[variable]
        if variable == "SLURM_SUBMIT_DIR":
            value = shlex.quote(str(cwd))
        elif variable == "SLURM_JOB_NAME":
            value = shlex.quote(text_of(draft.given["name"]))
        words.append(f"{variable}={value}")
    if "array" in draft.given:
        words = [word for word in words if not word.startswith("SLURM_ARRAY_TASK_ID=")]
        words.append("export SLURM_ARRAY_TASK_ID=$THEBES_ARRAY_INDEX")
    if unknown := sorted(mentioned - SLURM_VARIABLES.keys()):
        draft.notes.append(f"{name} mentions {', '.join(unknown)}: not set here.")
    return "; ".join(words)


# What an option is called in a job file, and how its value is read; None: nothing is said.
_KEYS: Mapping[str, tuple[str, Callable[[Directive], str | None]]] = {
    "account": ("tenant", lambda item: item.value),
    "array": ("array", lambda item: item.value),
    "chdir": ("workdir", lambda item: item.value),
    "export": ("export", lambda item: item.value),
    "hold": ("hold", lambda item: "true"),
    "job-name": ("name", lambda item: _as_name(item.value)),
    "signal": ("grace", _signal_lead),
    "time": ("time", _time_limit),
}
# A job of ours is always started again, so `requeue` asks for what happens anyway.
UNDERSTOOD = frozenset({*_KEYS, *GPU_OPTIONS, "nodes", "ntasks", "ntasks-per-node", "dependency", "requeue"})
