"""sbatch makes a job of a script with its #SBATCH lines, the environment's SBATCH_ variables and the command line.

As with Slurm, output goes to slurm-JOB.out in the work directory unless -o says otherwise. A job that was preempted and
starts again goes on in the same file.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thebes.cli.slurm.formats import clock
from thebes.cli.slurm.jobs import PARTITION, SUBMITTED
from thebes.cli.slurm.options import GivenOptions, Stop, parse, take, warn_of_unused
from thebes.jobspec.slurm_options import GPU_OPTIONS, OPTIONS
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from thebes.jobspec.merge import Merged
    from thebes.jobspec.sbatch import Directive

ABOUT = "sbatch of Thebes: sbatch [OPTIONS] SCRIPT [ARG…] | sbatch [OPTIONS] --wrap=COMMAND"
FROM_ENVIRONMENT = {
    "SBATCH_ACCOUNT": "account", "SBATCH_ARRAY_INX": "array", "SBATCH_CLUSTERS": "clusters",
    "SBATCH_CONSTRAINT": "constraint", "SBATCH_EXCLUSIVE": "exclusive", "SBATCH_EXPORT": "export",
    "SBATCH_GPUS": "gpus", "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SBATCH_GRES": "gres", "SBATCH_JOB_NAME": "job-name", "SBATCH_NO_REQUEUE": "no-requeue",
    "SBATCH_OPEN_MODE": "open-mode", "SBATCH_PARTITION": "partition", "SBATCH_QOS": "qos",
    "SBATCH_REQUEUE": "requeue", "SBATCH_RESERVATION": "reservation", "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time", "SBATCH_WAIT": "wait",
}  # fmt: skip
NOT_UNDERSTOOD = 255  # Slurm's exit code for a command line that makes no sense


@dataclass
class Wanted:
    """Options from all sources, the later ones last, with the name of each for messages."""

    options: list[Directive] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        return next((one.value for one in reversed(self.options) if one.option == name), None)

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def add(self, found: Iterable[Directive]) -> None:
        """Add a source. If it counts GPUs in a way of its own, the counts of earlier sources are dropped."""
        more = list(found)
        if any(one.option in GPU_OPTIONS for one in more):
            self.options = [one for one in self.options if one.option not in GPU_OPTIONS]
        self.options += more


def sbatch(connect: Callable[[], Any], words: list[str]) -> int:
    """Carry the command out; returns the exit code."""
    given = parse("sbatch", words, OPTIONS, mixed=False, code=NOT_UNDERSTOOD)
    text, name = _script(given)
    wanted = wanted_of(given, text, name)
    try:
        merged = job_of(wanted, text, name, tuple(given.words[1:]))
    except UserError as error:
        raise Stop(_error_text(error), NOT_UNDERSTOOD) from None
    warn_of_unused("sbatch", wanted.unused)
    for note in merged.notes:
        print(f"sbatch: note: {note}", file=sys.stderr)
    with connect() as client:
        if wanted.has("test-only"):
            return _test_only(client, merged)
        job = _submit(client, merged)
        if wanted.has("parsable"):
            print(job.id, flush=True)
        elif not wanted.has("quiet"):
            print(f"Submitted batch job {job.id}", flush=True)
        if not wanted.has("wait"):
            return 0
        ended = client.wait(job.id)
        failed = 0 if ended["state"] == "completed" else 1
        return int(ended["exit_code"] or failed) & 0xFF


def _error_text(error: UserError) -> str:
    return f"sbatch: error: {error.message}" + (f"\n  → {error.hint}" if error.hint else "")


def _script(given: GivenOptions) -> tuple[str, str]:
    """The text to run, and what to call it."""
    command = given.get("wrap")
    if command is not None:
        if given.words:
            raise Stop("sbatch: error: Script arguments not permitted with --wrap option")
        return f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{command}\n", "wrap"
    name = given.words[0] if given.words else "sbatch"
    if given.words:
        try:
            text = Path(name).read_bytes().decode()
        except OSError:
            raise Stop(f"sbatch: error: Unable to open file {name}") from None
        except UnicodeDecodeError:
            raise Stop(f"sbatch: error: {name} is not a text file.") from None
    else:
        text = sys.stdin.read()
    if not text.strip():
        raise Stop("sbatch: error: Batch script is empty!")
    if not text.startswith("#!"):
        raise Stop(
            "sbatch: error: This does not look like a batch script.  The first\n"
            "sbatch: error: line must start with #! followed by the path to an interpreter.\n"
            "sbatch: error: For instance: #!/bin/sh"
        )
    return text, name


def wanted_of(given: GivenOptions, text: str, name: str) -> Wanted:
    from thebes.jobspec.sbatch import Directive, directives

    wanted = Wanted()
    try:
        listed = list(directives(text, name))
    except UserError as error:
        raise Stop(_error_text(error), NOT_UNDERSTOOD) from None
    wanted.add(_checked(listed, wanted))
    from_environment = [
        Directive(option, value, variable)
        for variable, option in FROM_ENVIRONMENT.items()
        if (value := os.environ.get(variable)) is not None
    ]
    wanted.add(_checked(from_environment, wanted))
    wanted.add(Directive(option, value, f"--{option}") for option, value in given.options if option != "wrap")
    wanted.unused += given.unused
    return wanted


def _checked(found: Iterable[Directive], wanted: Wanted) -> list[Directive]:
    """Options of a script or of the environment, after a check that they exist."""
    kept: list[Directive] = []
    for one in found:
        if one.option not in OPTIONS:
            shown = f"-{one.option}" if len(one.option) == 1 else f"--{one.option}"
            problem = f"sbatch: unrecognized option '{shown}' ({one.place.partition(': ')[0]})"
            raise Stop(f'{problem}\nTry "sbatch --help" for more information', NOT_UNDERSTOOD)
        noted = GivenOptions()
        take("sbatch", one.option, one.value, one.place, OPTIONS, noted)
        wanted.unused += [f"--{one.option}" for _ in noted.unused]
        kept += [one for _ in noted.options]
    return kept


def job_of(wanted: Wanted, text: str, name: str, arguments: tuple[str, ...]) -> Merged:
    from thebes.jobspec.draft import Given as Value
    from thebes.jobspec.draft import text_of
    from thebes.jobspec.merge import merge
    from thebes.jobspec.sbatch import UNDERSTOOD, parse_script

    options = [one for one in wanted.options if one.option in UNDERSTOOD]
    cwd = Path.cwd()
    draft = parse_script(text, name, arguments, cwd=cwd, options=options)
    if "gpus" not in draft.given:
        draft.notes.append("no GPUs are asked for; it gets one, for every job of Thebes holds at least one.")
    signal = (wanted.get("signal") or "USR1").partition("@")[0].rpartition(":")[2].upper().removeprefix("SIG")
    if signal not in ("USR1", "10", ""):
        draft.notes.append(f"--signal: the notice of Thebes is SIGUSR1, not SIG{signal}; the lead time is its grace.")
    command = draft.given["command"]
    assert isinstance(command.value, list)
    words = [text_of(one) for one in command.value]
    called = text_of(draft.given["name"])
    draft.given["command"] = Value(
        [Value(word, command.place) for word in _redirected(words, wanted, called, name)], name
    )
    return merge([draft], cwd=cwd, environ=os.environ)


def _redirected(command: list[str], wanted: Wanted, name: str, script: str) -> list[str]:
    """The command with its output where sbatch would put it. bash execs the command, so the process stays the same."""
    mode = wanted.get("open-mode") or "truncate"
    if mode not in ("append", "truncate", "a", "t"):
        raise UserError(f"--open-mode: '{mode}' is neither append nor truncate.")
    out = _file(wanted.get("output") if wanted.has("output") else "slurm-%j.out", name)
    err = _file(wanted.get("error"), name) if wanted.has("error") else None
    lines = [f"o={out} e={err or ''}"]
    lines.append("[[ $o == /* ]] || o=$PWD/$o; [[ ! $e || $e == /* ]] || e=$PWD/$e")
    lines.append('echo "sbatch: output goes to $o${e:+, errors to $e}"')
    if mode in ("truncate", "t"):
        # A later start goes on in the same file, so that what the job printed before its preemption stays.
        lines.append('if [ "$THEBES_INCARNATION.$NODE_RANK" = 1.0 ]; then : >"$o"; [ -z "$e" ] || : >"$e"; fi')
    if wanted.has("array"):  # a bash script gets this from its own first line, other programs get it here
        lines.append("export SLURM_ARRAY_TASK_ID=$THEBES_ARRAY_INDEX")
    if wanted.has("input"):
        lines.append(f"exec <{_file(wanted.get('input'), name)} || exit 1")
    lines.append('exec >>"$o" 2>>"${e:-$o}" || exit 1')
    lines.append('unset o e; exec "$@"')
    return ["bash", "-c", SUBMITTED + "\n".join(lines), script, *command]


def _file(pattern: str | None, name: str) -> str:
    """A file name with Slurm's % marks as an expression of bash, which is evaluated where the job runs."""
    text = pattern or ""
    if not text or "\0" in text or "\n" in text:
        raise UserError(f"'{text}' is not the name of a file for output.")
    if "\\" in text:  # a backslash is Slurm's way to say that nothing is to be replaced
        return shlex.quote(text.replace("\\", ""))
    from getpass import getuser

    job, node = '"${THEBES_JOB_ID}"', '"${THEBES_NODE_RANK}"'
    marks = {
        "j": job, "J": job, "A": '"${THEBES_JOB_ID%%_*}"', "a": '"${THEBES_ARRAY_INDEX}"', "x": shlex.quote(name),
        "u": shlex.quote(getuser()), "n": node, "t": '"${RANK:-0}"', "s": "batch",
        "b": '"$((${THEBES_ARRAY_INDEX:-0} % 10))"',
        "N": '"$(n=(${THEBES_NODE_NAMES//,/ }); echo "${n[THEBES_NODE_RANK]}")"',
    }  # fmt: skip
    parts: list[str] = []
    for literal, width, letter, percent in re.findall(r"([^%]+)|%(\d*)([A-Za-z])|(%%?)", text):
        if literal or percent:
            parts.append(shlex.quote(literal or "%"))
        elif letter not in marks:
            raise UserError(
                f"'{text}': %{letter} is not known.", hint="Known are %j %A %a %x %u %N %n %t %s %b and %%."
            )
        elif width and letter in "jJAant":
            value = marks["A"] if letter in "jJ" else marks[letter]
            parts.append(f'"$(printf %0{int(width[:2])}d {value})"')
        else:
            parts.append(marks[letter])
    return "".join(parts)


def _submit(client: Any, merged: Merged) -> Any:
    from thebes.jobspec.merge import check

    try:
        return client.submit_spec(merged.fields)
    except UserError:
        check(merged)  # it says in which line the fault lies
        raise


def _test_only(client: Any, merged: Merged) -> int:
    import time

    plan = client.plan(merged.fields)
    if plan["starts"] == "never":
        raise Stop(f"allocation failure: {plan['reason']}")
    gpus = f"{merged.fields.get('gpus', 1)} GPUs"
    if plan["starts"] == "later" and plan.get("start_in_s") is None:
        print(f"sbatch: Job to wait: {plan['reason']} ({plan.get('estimate') or 'no estimate'})", file=sys.stderr)
        return 0
    from thebes.cli.slurm.options import folded

    start = clock(time.time() + (plan["start_in_s"] or 0.0))
    where = folded(list(plan["nodes"]))
    print(f"sbatch: Job to start at {start} using {gpus} on nodes {where} in partition {PARTITION}", file=sys.stderr)
    return 0
