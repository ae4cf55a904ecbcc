"""sbatch: a script with its #SBATCH lines, the environment's SBATCH_ variables and the command line become a job.

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
from thebes.cli.slurm.options import MAYBE, NEEDED, Given, Option, Stop, parse, take, warn_of_unused
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from thebes.server.jobfile import Merged
    from thebes.server.sbatch import Directive

GPUS_ONLY = "Thebes gives out GPUs"
PLACES = "the policy decides which nodes a job gets"
ONE = "it is one cluster"
UNUSED = Option("", NEEDED, unused=True)

OPTIONS = {
    # understood
    "account": Option("A", NEEDED),
    "array": Option("a", NEEDED),
    "chdir": Option("D", NEEDED),
    "dependency": Option("d", NEEDED),
    "error": Option("e", NEEDED),
    "export": Option("", NEEDED),
    "gpus": Option("G", NEEDED),
    "gpus-per-node": Option("", NEEDED),
    "gpus-per-task": Option("", NEEDED),
    "gres": Option("", NEEDED),
    "help": Option("h"),
    "hold": Option("H"),
    "input": Option("i", NEEDED),
    "job-name": Option("J", NEEDED),
    "nodes": Option("N", NEEDED),
    "ntasks": Option("n", NEEDED),
    "ntasks-per-node": Option("", NEEDED),
    "open-mode": Option("", NEEDED),
    "output": Option("o", NEEDED),
    "parsable": Option(),
    "quiet": Option("Q"),
    "requeue": Option(),
    "signal": Option("", NEEDED),
    "test-only": Option(),
    "time": Option("t", NEEDED),
    "usage": Option(),
    "version": Option("V"),
    "wait": Option("W"),
    "wrap": Option("", NEEDED),
    # of no consequence here: how much of the CPU and memory of a node, whom to write to, in which line to stand
    "acctg-freq": UNUSED,
    "comment": UNUSED,
    "cores-per-socket": UNUSED,
    "cpus-per-gpu": UNUSED,
    "cpus-per-task": Option("c", NEEDED, unused=True),
    "export-file": Option("", NEEDED, unsupported="use --export"),
    "extra": UNUSED,
    "extra-node-info": Option("B", NEEDED, unused=True),
    "gpu-bind": UNUSED,
    "hint": UNUSED,
    "kill-on-invalid-dep": UNUSED,
    "mail-type": UNUSED,
    "mail-user": UNUSED,
    "mem": UNUSED,
    "mem-bind": UNUSED,
    "mem-per-cpu": UNUSED,
    "mem-per-gpu": UNUSED,
    "mincpus": UNUSED,
    "nice": Option("", MAYBE, unused=True),
    "ntasks-per-core": UNUSED,
    "ntasks-per-gpu": Option("", NEEDED, unsupported="a script runs once on each node; start ranks with torchrun"),
    "ntasks-per-socket": UNUSED,
    "partition": Option("p", NEEDED, unused=True),
    "priority": UNUSED,
    "profile": UNUSED,
    "propagate": Option("", MAYBE, unused=True),
    "qos": Option("q", NEEDED, unused=True),
    "sockets-per-node": UNUSED,
    "threads-per-core": UNUSED,
    "tmp": UNUSED,
    "verbose": Option("v", unused=True),
    "wait-all-nodes": UNUSED,
    "wckey": UNUSED,
    # would change what runs, where or when
    "batch": Option("", NEEDED, unsupported=PLACES),
    "bb": Option("", NEEDED, unsupported="there are no burst buffers"),
    "bbf": Option("", NEEDED, unsupported="there are no burst buffers"),
    "begin": Option("b", NEEDED, unsupported="submit it when it may run, or make it depend on a job"),
    "cluster-constraint": Option("", NEEDED, unsupported=ONE),
    "clusters": Option("M", NEEDED, unsupported=ONE),
    "constraint": Option("C", NEEDED, unsupported="name a GPU type: --gres=gpu:TYPE:N"),
    "container": Option("", NEEDED, unsupported="start the container in the script"),
    "contiguous": Option("", unsupported=PLACES),
    "core-spec": Option("S", NEEDED, unsupported=GPUS_ONLY),
    "cpu-freq": Option("", NEEDED, unsupported=GPUS_ONLY),
    "deadline": Option("", NEEDED, unsupported="use --time"),
    "delay-boot": Option("", NEEDED, unsupported="nodes are not booted"),
    "distribution": Option("m", NEEDED, unsupported="ranks follow the topology"),
    "exclude": Option("x", NEEDED, unsupported=PLACES),
    "exclusive": Option("", MAYBE, unsupported="GPUs are always a job's own; for whole nodes ask for all their GPUs"),
    "get-user-env": Option("", MAYBE, unsupported="use --export"),
    "gid": Option("", NEEDED, unsupported="a job runs as who submits it"),
    "gpu-freq": Option("", NEEDED, unsupported="GPUs run at their own speed"),
    "gpus-per-socket": Option("", NEEDED, unsupported="use --gpus-per-node"),
    "ignore-pbs": Option("", unused=True),
    "licenses": Option("L", NEEDED, unsupported="there are no licenses"),
    "network": Option("", NEEDED, unsupported=PLACES),
    "no-kill": Option("k", MAYBE, unsupported="a job that loses a node is started again"),
    "no-requeue": Option("", unsupported="a job may be preempted and is then started again"),
    "nodefile": Option("F", NEEDED, unsupported=PLACES),
    "nodelist": Option("w", NEEDED, unsupported=PLACES),
    "overcommit": Option("O", unsupported=GPUS_ONLY),
    "oversubscribe": Option("s", unsupported="`thebes submit --pack` lets jobs share a GPU"),
    "power": Option("", NEEDED, unsupported="power is not managed"),
    "prefer": Option("", NEEDED, unsupported=PLACES),
    "reboot": Option("", unsupported="nodes are not booted"),
    "reservation": Option("", NEEDED, unsupported="there are no reservations"),
    "spread-job": Option("", unsupported=PLACES),
    "switches": Option("", NEEDED, unsupported=PLACES),
    "thread-spec": Option("", NEEDED, unsupported=GPUS_ONLY),
    "time-min": Option("", NEEDED, unsupported="use --time"),
    "tres-per-task": Option("", NEEDED, unsupported="use --gpus-per-task"),
    "uid": Option("", NEEDED, unsupported="a job runs as who submits it"),
    "use-min-nodes": Option("", unused=True),
}
ABOUT = "sbatch of Thebes: sbatch [OPTIONS] SCRIPT [ARG…] | sbatch [OPTIONS] --wrap=COMMAND"
GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")
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
    """Options from all sources, the later ones last, and how to name each in a message."""

    options: list[Directive] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        return next((one.value for one in reversed(self.options) if one.option == name), None)

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def add(self, found: Iterable[Directive]) -> None:
        """A source: where it counts GPUs in its own way, the way of earlier sources is dropped."""
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
        raise Stop(_told(error), NOT_UNDERSTOOD) from None
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


def _told(error: UserError) -> str:
    return f"sbatch: error: {error.message}" + (f"\n  → {error.hint}" if error.hint else "")


def _script(given: Given) -> tuple[str, str]:
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


def wanted_of(given: Given, text: str, name: str) -> Wanted:
    from thebes.server.sbatch import Directive, directives

    wanted = Wanted()
    try:
        listed = list(directives(text, name))
    except UserError as error:
        raise Stop(_told(error), NOT_UNDERSTOOD) from None
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
    """Options of a script or the environment, held against those that there are."""
    kept: list[Directive] = []
    for one in found:
        if one.option not in OPTIONS:
            shown = f"-{one.option}" if len(one.option) == 1 else f"--{one.option}"
            problem = f"sbatch: unrecognized option '{shown}' ({one.place.partition(': ')[0]})"
            raise Stop(f'{problem}\nTry "sbatch --help" for more information', NOT_UNDERSTOOD)
        noted = Given()
        take("sbatch", one.option, one.value, one.place, OPTIONS, noted)
        wanted.unused += [f"--{one.option}" for _ in noted.unused]
        kept += [one for _ in noted.options]
    return kept


def job_of(wanted: Wanted, text: str, name: str, arguments: tuple[str, ...]) -> Merged:
    from thebes.server.jobfile import Given as Value
    from thebes.server.jobfile import merge, text_of
    from thebes.server.sbatch import UNDERSTOOD, parse_script

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
    """The command with its output where sbatch would put it. bash becomes the command: its process stays the same."""
    mode = wanted.get("open-mode") or "truncate"
    if mode not in ("append", "truncate", "a", "t"):
        raise UserError(f"--open-mode: '{mode}' is neither append nor truncate.")
    out = _file(wanted.get("output") if wanted.has("output") else "slurm-%j.out", name)
    err = _file(wanted.get("error"), name) if wanted.has("error") else None
    lines = [f"o={out} e={err or ''}"]
    lines.append("[[ $o == /* ]] || o=$PWD/$o; [[ ! $e || $e == /* ]] || e=$PWD/$e")
    lines.append('echo "sbatch: output goes to $o${e:+, errors to $e}"')
    if mode in ("truncate", "t"):
        # A later start goes on in the same file: what the job said before it was preempted stays.
        lines.append('if [ "$THEBES_INCARNATION.$NODE_RANK" = 1.0 ]; then : >"$o"; [ -z "$e" ] || : >"$e"; fi')
    if wanted.has("array"):  # a script of bash gets it from its own first line, others from here
        lines.append("export SLURM_ARRAY_TASK_ID=$THEBES_ARRAY_INDEX")
    if wanted.has("input"):
        lines.append(f"exec <{_file(wanted.get('input'), name)} || exit 1")
    lines.append('exec >>"$o" 2>>"${e:-$o}" || exit 1')
    lines.append('unset o e; exec "$@"')
    return ["bash", "-c", SUBMITTED + "\n".join(lines), script, *command]


def _file(pattern: str | None, name: str) -> str:
    """A name with Slurm's % marks as an expression of bash, to be worked out where the job runs."""
    text = pattern or ""
    if not text or "\0" in text or "\n" in text:
        raise UserError(f"'{text}' is not the name of a file for output.")
    if "\\" in text:  # Slurm's way to say that nothing shall be replaced
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
    from thebes.server.jobfile import check

    try:
        return client.submit_spec(merged.fields)
    except UserError:
        check(merged)  # says in which line the fault lies
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
