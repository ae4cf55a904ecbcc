"""The commands that show what a job prints and what happens to it: logs, attach and events."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.act import exit_code_of, tell_end
from thebes.cli.live import ACTIVE, TERMINAL, Folder, JobArgument, ShortOutput, ShortOutputOption, connect, job_id
from thebes.cli.screen import clean, clock, duration, paint, plural, print_json, say
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from thebes.client import Client

TAIL_BYTES_PER_LINE = 240


def logs(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    rank: Annotated[int, typer.Option(min=0, help="Output of this rank.")] = 0,
    incarnation: Annotated[int | None, typer.Option(min=1, help="Only of this start; default: of all.")] = None,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=0, help="Only the last N lines.")] = None,
    folder: Folder = None,
) -> None:
    """Show what a job has printed, over all its starts."""
    with connect(folder) as client:
        show_output(client, job_id(job), follow=follow, rank=rank, incarnation=incarnation, lines=lines)
        info = client.job(job_id(job))
        if (
            "state" in info and info["state"] == "failed" and info["exit_code"] is None
        ):  # it never ran: there is nothing else to read
            say(f"job {job} failed: {info['reason']}")


def show_output(
    client: Client,
    job: str,
    *,
    follow: bool = False,
    rank: int = 0,
    incarnation: int | None = None,
    lines: int | None = None,
) -> None:
    """Copy a job's output to stdout: earlier starts first, then the current one, with a line between them on stderr."""
    found = client.job(job)
    if "members" in found:
        first = found["members"][0]["id"]
        raise UserError(f"{job} is an array of {len(found['members']):,} jobs.", hint=f"Name one of them: {first}")
    current = found["incarnation"]
    if not current:
        reason = f": {clean(found['reason'])}" if found["reason"] else ""
        say(f"job {job} has not started yet ({found['state']}{reason})")
        if not follow or found["state"] in TERMINAL:
            return
    if lines is not None:
        last = incarnation or current or None
        _copy(_last_lines(client, job, rank, last, lines, follow))
        return
    if incarnation is not None:
        _copy(client.logs(job, rank, incarnation=incarnation, follow=follow))
        return
    for past in range(1, current):
        _copy(client.logs(job, rank, incarnation=past))
        say(paint(f"── start {past} of job {job} ended ──", "dim", on=sys.stderr.isatty()))
    _copy(client.logs(job, rank, incarnation=current or None, follow=follow))


def _copy(pieces: Iterable[bytes]) -> None:
    sys.stdout.flush()
    for piece in pieces:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def _last_lines(
    client: Client, job: str, rank: int, incarnation: int | None, lines: int, follow: bool
) -> Iterator[bytes]:
    """The last lines and, with follow, what comes after them. Long lines make it read further back from the end."""
    if lines == 0 and not follow:
        return
    reach = max(1 << 14, lines * TAIL_BYTES_PER_LINE)
    while True:
        pieces = client.logs(job, rank, incarnation=incarnation, follow=follow, offset=-reach)
        head = next(pieces, b"")
        if len(head) < reach or reach >= 1 << 20 or head.count(b"\n") > lines:
            break
        reach = min(1 << 20, reach * 8)
    kept = head.splitlines(keepends=True)
    yield b"".join(kept[max(0, len(kept) - lines) :] if lines else [])
    yield from pieces


def events(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Of this job only.")] = None,
    watching: Annotated[bool, typer.Option("-w", "--watch", help="Go on with what happens, until Ctrl-C.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most so many.")] = 100,
    after: Annotated[int | None, typer.Option(metavar="SEQ", help="Only those after this number.")] = None,
    output: ShortOutputOption = ShortOutput.table,
    folder: Folder = None,
) -> None:
    """Tell what happened lately, oldest first: to one job, or to all. --after 0 begins at the beginning."""
    with connect(folder) as client:
        wanted = None if job is None else job_id(job)
        found = client.events(wanted, after=after or 0, limit=limit, latest=after is None)
        if output is ShortOutput.json and not watching:
            following = found[-1]["seq"] if after is not None and len(found) == limit else None
            print_json({"events": found, "next": following})
            return
        for event in found:
            if output is ShortOutput.json or event["kind"] != "state":  # other events tell the same in better words
                print(_event_line(event, output, wanted))
        if not found and not watching:
            say("nothing yet")
        if watching:
            _watch_events(client, wanted, found[-1]["seq"] if found else after, output)


def _watch_events(client: Client, job: str | None, after: int | None, output: ShortOutput) -> None:
    try:
        for event in client.stream(after=after):
            about = str(event.get("job_id"))
            if event["kind"] == "state" and output is ShortOutput.table:
                continue
            if job is None or about == job or about.startswith(f"{job}_"):
                print(_event_line(event, output, job), flush=True)
    except KeyboardInterrupt:
        say("")


def _event_line(event: Mapping[str, Any], output: ShortOutput, job: str | None) -> str:
    if output is ShortOutput.json:
        import json

        return json.dumps(event, ensure_ascii=False)
    who = (
        []
        if job is not None and job == event.get("job_id")
        else [str(event.get("job_id") or event.get("node") or "").ljust(6)]
    )
    words = [*who, str(event["kind"]).ljust(14), event_words(event)]
    return "  ".join([paint(clock(event["time_s"], time.time()), "dim"), *map(clean, words)]).rstrip()


# What an event's details are called in a sentence. A detail that is not listed is shown as `name value`, and one with
# an empty word is shown without a name.
WORDS = {"on": "on", "to": "to", "for_jobs": "for job", "policy": "by", "reason": "", "detail": "", "state": ""}


def event_words(event: Mapping[str, Any]) -> str:
    """The details of an event in words."""
    parts = [f"on {event['node']}"] if event.get("node") and event.get("job_id") else []
    for key, value in (event.get("detail") or {}).items():
        if value in (None, "", [], {}):
            continue
        name = WORDS.get(key, key.removesuffix("_s").replace("_", " "))
        if key == "gpus":
            parts.append(plural(value, "GPU"))
        elif key.endswith("_s"):
            parts.append(f"{name} {duration(value) if value >= 10 else f'{value:.3g}s'}")
        else:
            parts.append(f"{name} {_value(value)}".strip())
    if event.get("actor"):
        parts.append(f"by {event['actor']}")
    return ", ".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return " ".join(f"{key}:{_value(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ",".join(_value(item) for item in value)
    return str(value)


def attach(
    job: JobArgument,
    shell: Annotated[bool, typer.Option("--shell", help="Open a shell with the job's environment and folder.")] = False,
    rank: Annotated[int, typer.Option(min=0, help="Output of this rank.")] = 0,
    folder: Folder = None,
) -> None:
    """Follow a job's output from its last lines on; Ctrl-C detaches, the job goes on."""
    with connect(folder) as client:
        wanted = job_id(job)
        if shell:
            _open_shell(client, wanted, folder)
            return
        try:
            show_output(client, wanted, follow=True, rank=rank, lines=20)
            ended = client.wait(wanted)
        except KeyboardInterrupt:
            say(f"\ndetached; job {wanted} goes on. `thebes cancel {wanted}` ends it.")
            return
    tell_end(ended)
    raise typer.Exit(exit_code_of([ended]))


def _open_shell(client: Client, job: str, folder: str | None) -> None:
    """Replace this process by a shell on the node where the job runs, with the environment of its submission."""
    found = client.job(job)
    if "members" in found:
        raise UserError(f"{job} is an array.", hint=f"Name one of its jobs: {found['members'][0]['id']}")
    env = client.environment(job)["env"]
    workdir = str(found["spec"].get("workdir") or ".")
    if found["spec"].get("snapshot"):
        from thebes.protocol.instance import Instance

        workdir = str(Instance.at(folder).jobs / job / "snapshot")
    held = found["attempts"][-1]["parts"] if found["attempts"] and found["state"] in ACTIVE else []
    marks = {"THEBES_JOB_ID": job, "THEBES_INCARNATION": str(found["incarnation"])}
    if held:
        marks["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, held[0][1]))
    try:
        os.chdir(workdir)
    except OSError as failure:
        raise UserError(f"the work directory {workdir} cannot be entered: {failure.strerror}.") from None
    program = os.environ.get("SHELL") or "/bin/sh"
    say(f"a shell in {workdir} with the environment of job {job}; the job does not notice. `exit` leaves it.")
    sys.stdout.flush()
    os.execvpe(program, [program], {**os.environ, **env, **marks})
