"""Lists of jobs and all about one of them: `thebes ps` and `thebes show`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.live import (
    ACTIVE,
    STATES,
    TERMINAL,
    WAITING,
    Folder,
    Format,
    JobId,
    Output,
    ShortFormat,
    ShortOutput,
    connect,
    job_id,
)
from thebes.cli.screen import (
    STATE_STYLES,
    clean,
    clock,
    coloured,
    duration,
    paint,
    plural,
    print_json,
    table,
    terminal_width,
    watch,
)
from thebes.model.errors import UserError, nearest

if TYPE_CHECKING:
    from thebes.client import Client

RECENT_S = 3600.0


def ps(
    every_user: Annotated[bool, typer.Option("-A", "--all-users", help="Jobs of all users that you may see.")] = False,
    every_state: Annotated[bool, typer.Option("-a", "--all", help="Also those that ended long ago.")] = False,
    user: Annotated[str | None, typer.Option("-u", "--user", help="Jobs of this user.")] = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", metavar="STATE", help="Only this state; repeat or use commas.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only jobs of this name.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only jobs of this tenant.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Go on where a list ended: `next` of -o json.")] = None,
    watching: Annotated[bool, typer.Option("-w", "--watch", help="Show it again every second until Ctrl-C.")] = False,
    output: Format = Output.table,
    folder: Folder = None,
) -> None:
    """List jobs: those alive and those that ended within the hour; running first, then waiting, then ended."""
    states = _states(state or [])
    with connect(folder) as client:
        chosen = {"user": _whose(client, user, every_user), "name": name, "tenant": tenant}
        chosen = {key: value for key, value in chosen.items() if value is not None}

        def lines() -> list[str]:
            page = jobs_page(client, chosen, states, every_state, limit, cursor)
            return [*job_table(page["jobs"], wide=output is Output.wide), *_remarks(page, chosen)]

        if output is Output.json:
            print_json(jobs_page(client, chosen, states, every_state, limit, cursor))
        elif watching:
            watch(lines)
        else:
            print("\n".join(lines()))


def _states(given: Iterable[str]) -> list[str]:
    states = [word.lower() for text in given for word in text.split(",") if word]
    for word in states:
        if word not in STATES:
            raise UserError(f"--state: there is no state '{word}'.", hint=nearest(word, STATES))
    return states


def _whose(client: Client, user: str | None, every_user: bool) -> str | None:
    if user is not None or every_user:
        return user
    return client.status()["you"]["user"]


def jobs_page(
    client: Client,
    chosen: dict[str, str],
    states: Sequence[str],
    every_state: bool,
    limit: int,
    cursor: str | None = None,
) -> dict[str, Any]:
    """One page over what may be several lists: running, waiting in order, ended lately. `next` says list and place."""
    if states:
        stages = [(tuple(states), False, False)]
    elif every_state:
        stages = [((), False, False)]
    else:
        stages = [(ACTIVE, False, False), (WAITING, True, False), (TERMINAL, False, True)]
    stage, place = _place(cursor, len(stages))
    jobs: list[dict[str, Any]] = []
    while stage < len(stages):
        wanted, oldest, recent = stages[stage]
        query: dict[str, Any] = {**chosen, "state": list(wanted) or None, "oldest": oldest or None}
        page = client.jobs_page(limit=limit - len(jobs), cursor=place, **query)
        found = page["jobs"]
        if recent:
            horizon_s = time.time() - RECENT_S
            kept = [job for job in found if (job["end_s"] or 0) >= horizon_s]
            page["next"] = page["next"] if len(kept) == len(found) else None
            found = kept
        jobs += found
        place = page["next"]
        if place is None:
            stage += 1
        if len(jobs) >= limit:
            break
    if stage >= len(stages):
        return {"jobs": jobs, "next": None}
    return {"jobs": jobs, "next": f"{stage}.{place}" if place else f"{stage}"}


def _place(cursor: str | None, stages: int) -> tuple[int, str | None]:
    if cursor is None:
        return 0, None
    found = re.fullmatch(r"(\d)(?:\.(.+))?", cursor)
    if found is None or int(found[1]) >= stages:
        raise UserError(
            f"--cursor: '{cursor}' does not belong to this list.", hint="Use `next` of the same `ps -o json`."
        )
    return int(found[1]), found[2]


def job_table(jobs: Sequence[dict[str, Any]], *, wide: bool = False) -> list[str]:
    if not jobs:
        return ["no jobs"]
    now_s = time.time()
    several_users = wide or len({job["user"] for job in jobs}) > 1
    columns = ["ID", "NAME", *(["USER"] if several_users else []), "STATE", "GPUS", "NODES", "RAN", "WAITED"]
    if wide:
        columns += ["TENANT", "PRIORITY", "SUBMITTED", "STARTS", "PREEMPTED", "LOST"]
    columns.append("WHY")
    rows = []
    for job in jobs:
        row = [job["id"], job["name"] or "–", *([job["user"]] if several_users else []), job["state"], str(job["gpus"])]
        row += [_where(job, wide), duration(ran_s(job, now_s)) if job["incarnation"] else "–"]
        row.append(duration(waited_s(job, now_s)))
        if wide:
            row += [job["tenant"], str(job["priority"]), clock(job["submit_s"], now_s)]
            row += [str(job["incarnation"]), str(job["preemptions"]), lost(job["lost_gpu_s"])]
        rows.append([*row, why(job)])
    numbers = ("GPUS", "RAN", "WAITED", "PRIORITY", "STARTS", "PREEMPTED", "LOST")
    return table(
        columns, rows, right=numbers, width=None if wide else terminal_width(), style=coloured(columns.index("STATE"))
    )


def _where(job: dict[str, Any], wide: bool) -> str:
    held = job.get("gpus_held") or {}
    parts = [f"{node}:{','.join(map(str, gpus))}" if wide else node for node, gpus in held.items()]
    return (" " if wide else ",").join(parts) or "–"


def ran_s(job: dict[str, Any], now_s: float) -> float:
    """Run time so far. The server counts an incarnation when it has ended; of a first one we know when it began."""
    if job["state"] in ("running", "preempting") and job["incarnation"] == 1 and job["first_start_s"] is not None:
        return max(job["run_s"], now_s - job["first_start_s"])
    return float(job["run_s"])


def waited_s(job: dict[str, Any], now_s: float) -> float:
    """Time in the queue: all the time that it was alive but did not run."""
    return max(0.0, (job["end_s"] or now_s) - job["submit_s"] - ran_s(job, now_s))


def lost(gpu_s: float) -> str:
    return "–" if not gpu_s else f"{duration(gpu_s)}"


def why(job: dict[str, Any]) -> str:
    """Why it waits, or how it ended; for one that runs, what has happened to it."""
    if job["reason"]:
        return str(job["reason"])
    if job["exit_code"] not in (None, 0):
        return f"exit code {job['exit_code']}"
    words = []
    if job.get("step") is not None and job["state"] not in TERMINAL:
        rate = f" ({job['steps_per_s']:.3g}/s)" if job.get("steps_per_s") else ""
        words.append(f"step {job['step']:,}{rate}")
    if job["preemptions"] and job["state"] not in TERMINAL:
        words.append(f"preempted {job['preemptions']}×")
    return ", ".join(words)


def _remarks(page: dict[str, Any], chosen: dict[str, str]) -> list[str]:
    remarks = []
    if page["next"]:
        remarks.append(f"… there are more: --limit 1000, or --cursor {page['next']}")
    if not page["jobs"] and "user" in chosen:
        remarks.append(f"(of {chosen['user']}; -A shows all users, -a also those that ended long ago)")
    return [paint(remark, "dim") for remark in remarks]


def show(job: JobId, output: ShortFormat = ShortOutput.table, folder: Folder = None) -> None:
    """Everything about one job: state and reason, attempts, lost work, last checkpoint."""
    with connect(folder) as client:
        found = client.job(job_id(job))
    if output is ShortOutput.json:
        print_json(found)
    else:
        print("\n".join(array_lines(found) if found.get("array") else job_lines(found)))


def job_lines(job: dict[str, Any]) -> list[str]:
    now_s = time.time()
    spec = job["spec"]
    state = paint(job["state"], STATE_STYLES.get(job["state"], ""))
    facts = [
        ("job", f"{job['id']}  {paint(clean(job['name'] or ''), 'bold')}".rstrip()),
        ("state", f"{state}  {clean(why(job))}".rstrip()),
        ("user", clean(f"{job['user']}  (tenant {job['tenant']})")),
        ("command", clean(job["command"])),
        (
            "work directory",
            clean(spec.get("workdir") or "–") + ("  (a snapshot of it)" if spec.get("snapshot") else ""),
        ),
        ("asks for", _request(job, spec)),
        ("submitted", clock(job["submit_s"], now_s)),
        ("waited", duration(waited_s(job, now_s))),
        *(
            [("expected", f"to start at about {clock(start_s, now_s)}")]
            if (start_s := job.get("expected_start_s"))
            else []
        ),
        ("ran", duration(sum(_ran_in(attempt, now_s) for attempt in job["attempts"])) + _ran_of(spec)),
    ]
    if job["end_s"] is not None:
        code = "" if job["exit_code"] is None else f", exit code {job['exit_code']}"
        facts.append(("ended", clock(job["end_s"], now_s) + code))
    facts.append(("starts", _starts(job)))
    facts.append(("lost work", f"{duration(job['lost_gpu_s'])} of GPU time" if job["lost_gpu_s"] else "none"))
    if saved := _checkpoint(job["attempts"], now_s):
        facts.append(("last checkpoint", saved))
    if spec.get("after"):
        facts.append(("after", ", ".join(spec["after"])))
    if spec.get("after_any"):
        facts.append(("after the end", f"of {', '.join(spec['after_any'])}, in whatever way"))
    if spec.get("array_limit"):
        facts.append(("array limit", f"{spec['array_limit']} of its jobs at a time"))
    if spec.get("env"):
        facts.append(
            ("environment", f"{plural(len(spec['env']), 'variable')} (`thebes attach --shell` opens a shell with it)")
        )
    lines = [f"{paint(label.ljust(16), 'dim')}{value}" for label, value in facts]
    if job["attempts"]:
        lines += ["", *_attempt_table(job["attempts"], now_s)]
    return lines


def _request(job: dict[str, Any], spec: dict[str, Any]) -> str:
    text = plural(job["gpus"], "GPU")
    if spec.get("gpu_type"):
        text += f" of type {clean(spec['gpu_type'])}"
    if job["nodes"]:
        text += f" on {plural(job['nodes'], 'node')}"
    ranks = f"{spec['ranks_per_node']} per node" if spec.get("ranks_per_node") else "one process per GPU"
    text += f", {'torchrun' if spec.get('launcher') == 'torchrun' else ranks}"
    return text + (f", priority {job['priority']}" if job["priority"] else "")


def _ran_of(spec: dict[str, Any]) -> str:
    return f" of at most {duration(spec['time_s'])}" if spec.get("time_s") else ""


def _starts(job: dict[str, Any]) -> str:
    parts = [str(job["incarnation"])]
    for key, word in (("preemptions", "preempted"), ("failures", "failed"), ("losses", "lost by the cluster")):
        if job[key]:
            parts.append(f"{word} {job[key]}×")
    return ", ".join(parts)


def _checkpoint(attempts: Sequence[dict[str, Any]], now_s: float) -> str:
    for attempt in reversed(attempts):
        if attempt["checkpoint_s"] is not None:
            step = "" if attempt["checkpoint_step"] is None else f"step {attempt['checkpoint_step']:,}, "
            path = f"  {clean(attempt['checkpoint_path'])}" if attempt["checkpoint_path"] else ""
            return f"{step}{clock(attempt['checkpoint_s'], now_s)}{path}"
    return ""


def _attempt_table(attempts: Sequence[dict[str, Any]], now_s: float) -> list[str]:
    rows = []
    for attempt in attempts:
        step = "–" if attempt["step"] is None else f"{attempt['step']:,}"
        rows.append(
            [
                str(attempt["incarnation"]),
                attempt["state"],
                " ".join(f"{node}:{','.join(map(str, held))}" for node, held in attempt["parts"]),
                clock(attempt["started_s"], now_s),
                duration(_ran_in(attempt, now_s)),
                step,
                duration(attempt["lost_s"]) if attempt["lost_s"] else "–",
                _end_of(attempt),
            ]
        )
    columns = ["START", "STATE", "NODE:GPUS", "AT", "RAN", "STEP", "LOST", "ENDED BY"]
    return table(columns, rows, right=("RAN", "STEP", "LOST"), width=terminal_width(), style=coloured(1))


def _ran_in(attempt: dict[str, Any], now_s: float) -> float:
    if attempt["ended_s"] is None and attempt["started_s"] is not None and attempt["state"] == "running":
        return max(attempt["run_s"], now_s - attempt["started_s"])
    return float(attempt["run_s"])


def _end_of(attempt: dict[str, Any]) -> str:
    codes = attempt["codes"]
    bad = {rank: code for rank, code in codes.items() if code != 0}
    if str(attempt["detail"]).startswith("not started"):  # nothing of it was ever there to be lost
        return str(attempt["detail"])
    words = [attempt["cause"]] if attempt["cause"] else []
    if bad:
        rank, code = next(iter(bad.items()))
        words.append((f"rank {rank}: " if len(codes) > 1 else "") + (f"signal {-code}" if code < 0 else f"code {code}"))
    elif codes:
        words.append("code 0")
    if attempt["detail"]:
        words.append(str(attempt["detail"]))
    return ", ".join(words)


def array_lines(array: dict[str, Any]) -> list[str]:
    now_s = time.time()
    states = ", ".join(
        f"{number:,} {paint(name, STATE_STYLES.get(name, ''))}" for name, number in array["states"].items()
    )
    facts = [
        ("array", f"{array['id']}  {clean(array['name'] or '')}".rstrip()),
        ("members", f"{len(array['members']):,}: {states}"),
        ("user", clean(f"{array['user']}  (tenant {array['tenant']})")),
        ("each asks for", plural(array["gpus"], "GPU")),
        ("submitted", clock(array["submit_s"], now_s)),
    ]
    if limit := array["spec"].get("array_limit"):
        facts.append(("at a time", f"at most {limit}"))
    rows = [
        [m["id"], m["state"], "–" if m["exit_code"] is None else str(m["exit_code"]), m["reason"]]
        for m in array["members"]
    ]
    members = table(["ID", "STATE", "CODE", "WHY"], rows, right=("CODE",), width=terminal_width(), style=coloured(1))
    return [*(f"{paint(label.ljust(16), 'dim')}{value}" for label, value in facts), "", *members]
