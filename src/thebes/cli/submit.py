"""`thebes submit` makes one job of options, job file and script; the id, and nothing else, goes to stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.live import Folder, ShortOutput, ShortOutputOption, connect, job_id
from thebes.cli.quick import QuickCommand
from thebes.cli.screen import clean, duration, plural, print_json, say
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from thebes.client import Client
    from thebes.jobspec.draft import JobDraft
    from thebes.jobspec.merge import Merged

# Options of ours that scripts have as well, with a meaning of their own: no reason to wonder where they stand.
ALSO_OF_SCRIPTS = frozenset({"--dir", "--env", "--file", "--key", "--model", "--output", "--progress"})


class SubmitCommand(QuickCommand):
    """Options end at the first word of the command; a `--` in front of it makes a script a plain command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("words") or []
        ctx.meta["thebes.dashes"] = 0 < len(words) < len(given) and given[-len(words) - 1] == "--"
        return rest


SETTINGS: dict[str, Any] = {"cls": SubmitCommand, "context_settings": {"allow_interspersed_args": False}}


def _print_schema(wanted: bool) -> None:
    if wanted:
        from thebes.jobspec.jobfile import file_schema

        print_json(file_schema())
        raise typer.Exit


def submit(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--] COMMAND… | SCRIPT [ARG…]", help="After --: a command. Else: a script or job file."
        ),
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="JOB.YAML", help="Job file; options override it. - for stdin.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="N", help="GPUs in all; default 1.")] = None,
    min_gpus: Annotated[
        str | None, typer.Option(metavar="N", help="Elastic: the fewest GPUs that it can run on.")
    ] = None,
    max_gpus: Annotated[str | None, typer.Option(metavar="N", help="Elastic: the most GPUs that it can use.")] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N", help="Spread evenly over exactly N nodes.")] = None,
    name: Annotated[str | None, typer.Option(help="A name, for people.")] = None,
    tenant: Annotated[str | None, typer.Option(help="On whose account.")] = None,
    priority: Annotated[str | None, typer.Option(metavar="N", help="Higher goes first; default 0.")] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Run time limit: 90s, 10m, 2h, 1:30:00. Bare number: minutes. Then it is asked to go, with its grace.",
        ),
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="1-50[:STEP][,…][%N]", help="One job per index, in THEBES_ARRAY_INDEX; %N: at most N at a time."
        ),
    ] = None,
    after: Annotated[
        list[str] | None, typer.Option(metavar="JOB", help="Start when this job has completed. Repeat for more.")
    ] = None,
    after_any: Annotated[
        list[str] | None, typer.Option(metavar="JOB", help="Start when this job has ended, in whatever way. Repeat.")
    ] = None,
    hold: Annotated[
        bool | None, typer.Option("--hold/--no-hold", help="Do not start it before `thebes release`.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Environment variable; K alone takes yours. Repeat.")
    ] = None,
    export: Annotated[
        str | None, typer.Option(metavar="ALL|NONE|K,…", help="What of your environment goes along; default ALL.")
    ] = None,
    workdir: Annotated[str | None, typer.Option(metavar="DIR", help="Where it runs; default: here.")] = None,
    snapshot: Annotated[
        bool | None, typer.Option("--snapshot/--no-snapshot", help="Run in a copy of the work directory, made now.")
    ] = None,
    gpu_type: Annotated[str | None, typer.Option(metavar="TYPE", help="GPU types that will do, as A100|H100.")] = None,
    launcher: Annotated[
        str | None, typer.Option(metavar="NAME", help="plain (one process per GPU) or torchrun.")
    ] = None,
    ranks_per_node: Annotated[
        str | None, typer.Option(metavar="N", help="plain: processes per node instead of one per GPU.")
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option(metavar="NAME", help="How it may be suspended: auto, checkpoint, freeze, cuda.")
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time to save before it is killed: 30s, 2m. Bare number: seconds."),
    ] = None,
    retries: Annotated[str | None, typer.Option(metavar="N", help="Restarts after failures of its own.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model, for placement.")] = None,
    progress: Annotated[
        str | None, typer.Option(metavar="PATTERN", help=r"Finds the step in log lines, as 'step (\d+)'.")
    ] = None,
    pack: Annotated[
        bool | None,
        typer.Option("--pack/--no-pack", help="It may share its GPU with another such job while that pays."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Submitting again with the same key gives the same job.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only tell where and when it would start, and which jobs it would preempt."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has ended; exit code 1 if it failed.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show its output until it has ended.")] = False,
    output: ShortOutputOption = ShortOutput.table,
    folder: Folder = None,
    schema: Annotated[
        bool,
        typer.Option("--schema", is_eager=True, callback=_print_schema, help="Print the JSON Schema of job files."),
    ] = False,
) -> None:
    """Queue a job and print its id.

    thebes submit --gpus 2 -- python train.py --epochs 3

    thebes submit -f job.yaml        thebes submit train.sh     (reads #SBATCH lines)
    """
    from thebes.jobspec.draft import KEYS, JobDraft
    from thebes.jobspec.merge import merge

    options = JobDraft()
    for option, value in ctx.params.items():
        if value is not None and (option in KEYS or option == "export"):  # others say what to do with it
            options.put(option, str(value) if isinstance(value, bool) else value, f"--{option.replace('_', '-')}")
    drafts = [*_sources(file, words or [], bool(ctx.meta.get("thebes.dashes"))), options]
    _warn_of_own_options(words or [], own_options(ctx))
    merged = merge(drafts, cwd=Path.cwd(), environ=os.environ)
    for note in merged.notes:
        say(f"note: {note}")
    with connect(folder) as client:
        if dry_run:
            _dry_run(client, merged, output)
            return
        job = _send(client, merged, key)
        if output is ShortOutput.json:
            print_json({"id": job.id, "ids": list(job.ids)})
        else:
            print(job.id, flush=True)
            _confirm(job, merged)
        if follow or wait:
            _stay(client, job.id, follow)


def _sources(file: str | None, words: list[str], dashes: bool) -> list[JobDraft]:
    """Drafts from the job file and from the command or script; options come after them and count more."""
    from thebes.jobspec.draft import JobDraft
    from thebes.jobspec.jobfile import read_yaml
    from thebes.jobspec.sbatch import read_script

    drafts = [] if file is None else [_job_file(file)]
    if not words:
        return drafts
    path = Path(words[0])
    if not dashes and file is None and path.suffix in (".yaml", ".yml"):
        if len(words) > 1:
            raise UserError(
                f"'{words[1]}' comes after the job file.",
                hint=f"Options go before it: thebes submit {' '.join(words[1:])} {words[0]}",
            )
        return [read_yaml(path)]
    if not dashes and path.is_file() and not _is_program(path):
        return [*drafts, read_script(path, words[1:])]
    if not dashes and path.suffix in (".sh", ".sbatch", ".slurm", ".bash"):
        return [*drafts, read_script(path)]  # if the file does not exist, the error says so, with the nearest name
    command = JobDraft()
    command.put("command", words, "the command")
    return [*drafts, command]


def _job_file(file: str) -> JobDraft:
    from thebes.jobspec.jobfile import read_yaml

    path = Path(file)
    if file != "-" and path.is_file():
        with path.open("rb") as stream:
            if stream.read(2) == b"#!":
                raise UserError(f"{file} is a script, not a job file.", hint=f"Leave out the -f: thebes submit {file}")
    return read_yaml(path)


def _is_program(path: Path) -> bool:
    """Whether a file is a program but no shell script: for `thebes submit train.py` we must ask how to run it."""
    try:
        with path.open("rb") as stream:
            head = stream.read(4096)
    except OSError:
        return False  # reading the file as a script then says what is wrong
    if head.startswith(b"#!") or b"#SBATCH" in head or path.suffix in (".sh", ".bash", ".sbatch", ".slurm"):
        return False
    if path.suffix == ".py":
        raise UserError(f"{path} has no #! line.", hint=f"Say how to run it: thebes submit -- python {path}")
    return True


def own_options(ctx: typer.Context) -> frozenset[str]:
    """The long options of `submit` that nobody would expect a script to have."""
    given = {name for option in ctx.command.params for name in (*option.opts, *option.secondary_opts)}
    return frozenset(name for name in given - ALSO_OF_SCRIPTS if name.startswith("--"))


def _warn_of_own_options(words: list[str], own: frozenset[str]) -> None:
    for word in words[1:]:
        if word == "--":
            return
        if word.partition("=")[0] in own:
            say(f"note: {word} comes after {words[0]} and is passed to it; options of thebes go before it.")
            return


def _send(client: Client, merged: Merged, key: str | None) -> Any:
    """Submit. The server judges the job; if it refuses, the same check here can say in which line the fault lies.

    To check here first would import pydantic at every submit, which takes a quarter of a second.
    """
    from thebes.jobspec.merge import check

    if merged.snapshot:
        check(merged)  # a fault is told before the upload, which may take long
    try:
        return client.submit_spec(merged.fields, key=key, snapshot=True if merged.snapshot else None)
    except UserError:
        check(merged)
        raise


def _confirm(job: Any, merged: Merged) -> None:
    fields = merged.fields
    size = plural(fields.get("gpus", 1), "GPU")
    if fields.get("nodes", 1) > 1:
        size += f" on {fields['nodes']} nodes"
    many = f", {len(job.ids)} jobs" if fields.get("array") else ""
    many += f", {fields['array_limit']} at a time" if fields.get("array_limit") else ""
    limit = f", at most {duration(fields['time_s'])}" if fields.get("time_s") else ""
    what = f"array {job.id}" if fields.get("array") else f"job {job.id}"
    say(f"{what}: {size}{many}{limit}. Follow it with `thebes logs -f {job.ids[0] if job.ids else job.id}`.")
    if fields.get("hold"):
        say(f"note: it is held; `thebes release {job.id}` lets it start.")
    if not Path(fields["workdir"]).is_dir():
        say(f"note: the work directory {fields['workdir']} does not exist on this machine.")


def _dry_run(client: Client, merged: Merged, output: ShortOutput) -> None:
    from thebes.jobspec.merge import check

    try:
        plan = client.plan(merged.fields)
    except UserError:
        check(merged)
        raise
    if output is ShortOutput.json:
        print_json(plan)
    else:
        for line in plan_lines(plan):
            print(line)
    if plan.get("starts") == "never":
        raise typer.Exit(1)


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """A plan in words."""
    starts, after_s = plan.get("starts"), plan.get("start_in_s")
    if starts == "now":
        lines = ["would start now" + (f", in {duration(after_s)}" if after_s and after_s >= 1 else "")]
    elif starts == "never":
        lines = ["would never start"]
    else:
        lines = ["would wait" + (f", about {duration(after_s)}" if after_s is not None else "")]
        if plan.get("position") is not None:
            lines[0] += f"; place {plan['position']} in the queue"
    where = plan.get("nodes") or {}
    if where:
        parts = [f"{node} (GPU {', '.join(map(str, held))})" if isinstance(held, list) else f"{node} ({held} GPUs)"
                 for node, held in where.items()]  # fmt: skip
        lines.append(f"  on         {', '.join(parts)}")
    victims = plan.get("preempts") or []
    if victims:
        shown = [clean(victim.get("id", victim) if isinstance(victim, dict) else victim) for victim in victims]
        lines.append(f"  preempts   {', '.join(shown)}")
    elif starts == "now":
        lines.append("  preempts   no job")
    if plan.get("reason"):
        lines.append(f"  because    {clean(plan['reason'])}")
    if plan.get("estimate") and starts == "later":
        lines.append(f"  estimate   {clean(plan['estimate'])}")
    if plan.get("note"):
        lines.append(f"  note       {clean(plan['note'])}")
    return lines


def _stay(client: Client, job: str, follow: bool) -> None:
    """Carry out --wait and --follow: the terminal stays with the job, but Ctrl-C never ends the job."""
    from thebes.cli.act import exit_code_of, tell_end
    from thebes.cli.follow import show_output

    try:
        if follow:
            show_output(client, job, follow=True)
        ended = client.wait(job_id(job))
    except KeyboardInterrupt:
        say(f"\ndetached; job {job} goes on. `thebes attach {job}` comes back, `thebes cancel {job}` ends it.")
        raise typer.Exit(130) from None
    sys.stdout.flush()
    tell_end(ended)
    raise typer.Exit(exit_code_of([ended]))
