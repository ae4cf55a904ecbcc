"""The commands that do something to jobs (cancel, hold, release, requeue, preempt), and the one that waits for them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from thebes.cli.live import TERMINAL, Folder, JobsArgument, ShortOutput, ShortOutputOption, connect, for_each, job_id
from thebes.cli.screen import STATE_STYLES, clean, paint, plural, print_json, say

EXIT_TIMEOUT = 124  # timeout(1) uses the same code


def cancel(jobs: JobsArgument, folder: Folder = None) -> None:
    """End jobs, waiting or running. An array's id ends all its members."""
    _act("cancel", "cancelled", jobs, folder)


def hold(jobs: JobsArgument, folder: Folder = None) -> None:
    """Keep waiting jobs from starting until they are released."""
    _act("hold", "held", jobs, folder)


def release(jobs: JobsArgument, folder: Folder = None) -> None:
    """Let held jobs start again."""
    _act("release", "released", jobs, folder)


def requeue(jobs: JobsArgument, folder: Folder = None) -> None:
    """Run jobs that have ended once more, or stop running ones and queue them again."""
    _act("requeue", "queued again", jobs, folder)


def preempt(
    jobs: JobsArgument,
    grace: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time to save, instead of the job's own: 30s, 2m. Bare: seconds.")
    ] = None,
    folder: Folder = None,
) -> None:
    """Preempt running jobs by hand, to try the handshake: notice, checkpoint, exit, resume."""
    options: dict[str, Any] = {}
    if grace is not None:
        from thebes.jobspec.values import parse_duration_s

        options["grace_s"] = parse_duration_s(grace, bare_s=1.0, place="--grace")
    _act("preempt", "asked to make room", jobs, folder, **options)


def _act(verb: str, done: str, jobs: Sequence[str], folder: str | None, **options: Any) -> None:
    with connect(folder) as client:

        def act(job: str) -> None:
            ids = getattr(client, verb)(job, **options)
            many = f" ({plural(len(ids), 'job')})" if ids != [job] else ""
            say(f"{job}: {done}{many}" if ids else f"{job}: nothing to do")

        for_each(jobs, act)


def wait(
    jobs: JobsArgument,
    timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="Give up after 90s, 10m, 2h … Bare number: seconds.")
    ] = None,
    output: ShortOutputOption = ShortOutput.table,
    folder: Folder = None,
) -> None:
    """Wait until jobs have ended. Exit code 0: all completed; 1: one did not; 124: time out."""
    until_s = None
    if timeout is not None:
        from thebes.jobspec.values import parse_duration_s

        until_s = time.monotonic() + parse_duration_s(timeout, bare_s=1.0, place="--timeout")
    ids = [job_id(text) for text in dict.fromkeys(jobs)]
    ended = []
    with connect(folder) as client:
        for job in ids:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            ended.append(client.wait(job, left_s))
            if output is ShortOutput.table:
                tell_end(ended[-1])
    if output is ShortOutput.json:
        print_json({"jobs": ended})
    raise typer.Exit(exit_code_of(ended))


def tell_end(ended: Mapping[str, Any]) -> None:
    """Print one sentence on stderr about a job that was waited for."""
    states = ended["states"]
    on = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    if sum(states.values()) > 1:
        text = ", ".join(f"{number} {name}" for name, number in states.items())
    else:
        text = paint(ended["state"], STATE_STYLES.get(ended["state"], ""), on=on)
        if ended["exit_code"] not in (None, 0):
            text += f", exit code {ended['exit_code']}"
        if ended["reason"] and ended["state"] != "completed":
            text += f": {clean(ended['reason'])}"
    say(f"{ended['id']}: {'' if ended['done'] else 'not ended yet: '}{text}")


def exit_code_of(ended: Sequence[Mapping[str, Any]]) -> int:
    if any(state in TERMINAL and state != "completed" for job in ended for state in job["states"]):
        return 1
    return 0 if all(job["done"] for job in ended) else EXIT_TIMEOUT
