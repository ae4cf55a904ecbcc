"""`thebes ps` lists jobs, and `thebes show` tells everything about one of them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.live import (
    ACTIVE,
    STATES,
    TERMINAL,
    WAITING,
    Folder,
    JobArgument,
    Output,
    OutputOption,
    ShortOutput,
    ShortOutputOption,
    connect,
    job_id,
)
from thebes.cli.screen import (
    STATE_STYLES,
    TableColumn,
    clean,
    clock,
    duration,
    paint,
    plural,
    print_json,
    table_of,
    terminal_width,
    watch,
)
from thebes.model.errors import UserError, nearest

if TYPE_CHECKING:
    from thebes.client import Client
    from thebes.client_types import JobInfo

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
    output: OutputOption = Output.table,
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
    """One page of up to three lists: running, waiting in order, ended lately. `next` names a list and a place in it."""
    if states:
        stages = [(tuple(states), False, False)]
    elif every_state:
        stages = [((), False, False)]
    else:
        stages = [(ACTIVE, False, False), (WAITING, True, False), (TERMINAL, False, True)]
    stage, place = _place(cursor, len(stages))
    jobs: list[JobInfo] = []
    while stage < len(stages):
        wanted, oldest, recent = stages[stage]
        query: dict[str, Any] = {**chosen, "state": wanted, "oldest": oldest}
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


def job_columns(now_s: float, *, wide: bool = False) -> list[TableColumn]:
    """All columns that a list of jobs can have, in `ps` and in `top`."""
    return [
        TableColumn("ID", lambda job: job["id"]),
        TableColumn("NAME", lambda job: job["name"] or "–"),
        TableColumn("USER", lambda job: job["user"]),
        TableColumn("STATE", lambda job: job["state"]),
        TableColumn("GPUS", lambda job: str(job["gpus"]), right=True),
        TableColumn("NODES", lambda job: _where(job, wide)),
        TableColumn("RAN", lambda job: duration(ran_s(job, now_s)) if job["incarnation"] else "–", right=True),
        TableColumn("WAITED", lambda job: duration(waited_s(job, now_s)), right=True),
        TableColumn("TENANT", lambda job: job["tenant"], wide=True),
        TableColumn("PRIORITY", lambda job: str(job["priority"]), right=True, wide=True),
        TableColumn("SUBMITTED", lambda job: clock(job["submit_s"], now_s), wide=True),
        TableColumn("STARTS", lambda job: str(job["incarnation"]), right=True, wide=True),
        TableColumn("PREEMPTED", lambda job: str(job["preemptions"]), right=True, wide=True),
        TableColumn("LOST", lambda job: lost(job["lost_gpu_s"]), right=True, wide=True),
        TableColumn("WHY", why),
    ]


def job_table(jobs: Sequence[Mapping[str, Any]], *, wide: bool = False) -> list[str]:
    if not jobs:
        return ["no jobs"]
    several_users = wide or len({job["user"] for job in jobs}) > 1
    columns = [
        column
        for column in job_columns(time.time(), wide=wide)
        if (wide or not column.wide) and (several_users or column.title != "USER")
    ]
    return table_of(columns, jobs, width=None if wide else terminal_width())


def _where(job: Mapping[str, Any], wide: bool) -> str:
    held = job.get("gpus_held") or {}
    parts = [f"{node}:{','.join(map(str, gpus))}" if wide else node for node, gpus in held.items()]
    return (" " if wide else ",").join(parts) or "–"


def ran_s(job: Mapping[str, Any], now_s: float) -> float:
    """Run time so far. The server adds an incarnation when it ends; while the first one runs, we know its start."""
    if job["state"] in ("running", "preempting") and job["incarnation"] == 1 and job["first_start_s"] is not None:
        return max(job["run_s"], now_s - job["first_start_s"])
    return float(job["run_s"])


def waited_s(job: Mapping[str, Any], now_s: float) -> float:
    """Time in the queue: all the time in which the job was alive but did not run."""
    return max(0.0, (job["end_s"] or now_s) - job["submit_s"] - ran_s(job, now_s))


def lost(gpu_s: float) -> str:
    return "–" if not gpu_s else f"{duration(gpu_s)}"


def why(job: Mapping[str, Any]) -> str:
    """Why a job waits, or how it ended; for a running job, what has happened to it."""
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


def show(job: JobArgument, output: ShortOutputOption = ShortOutput.table, folder: Folder = None) -> None:
    """Show everything about one job: state and reason, attempts, lost work, last checkpoint."""
    with connect(folder) as client:
        found = client.job(job_id(job))
    if output is ShortOutput.json:
        print_json(found)
    else:
        print("\n".join(array_lines(found) if "members" in found else job_lines(found)))


def job_lines(job: Mapping[str, Any]) -> list[str]:
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


def _request(job: Mapping[str, Any], spec: dict[str, Any]) -> str:
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


def _starts(job: Mapping[str, Any]) -> str:
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
    columns = [
        TableColumn("START", lambda one: str(one["incarnation"])),
        TableColumn("STATE", lambda one: one["state"]),
        TableColumn(
            "NODE:GPUS", lambda one: " ".join(f"{node}:{','.join(map(str, held))}" for node, held in one["parts"])
        ),
        TableColumn("AT", lambda one: clock(one["started_s"], now_s)),
        TableColumn("RAN", lambda one: duration(_ran_in(one, now_s)), right=True),
        TableColumn("STEP", lambda one: "–" if one["step"] is None else f"{one['step']:,}", right=True),
        TableColumn("LOST", lambda one: lost(one["lost_s"]), right=True),
        TableColumn("ENDED BY", _end_of),
    ]
    return table_of(columns, attempts, width=terminal_width())


def _ran_in(attempt: Mapping[str, Any], now_s: float) -> float:
    if attempt["ended_s"] is None and attempt["started_s"] is not None and attempt["state"] == "running":
        return max(attempt["run_s"], now_s - attempt["started_s"])
    return float(attempt["run_s"])


def _end_of(attempt: Mapping[str, Any]) -> str:
    codes = attempt["codes"]
    bad = {rank: code for rank, code in codes.items() if code != 0}
    if str(attempt["detail"]).startswith("not started"):  # an incarnation that was not started cannot have lost work
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


def array_lines(array: Mapping[str, Any]) -> list[str]:
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
    columns = [
        TableColumn("ID", lambda one: one["id"]),
        TableColumn("STATE", lambda one: one["state"]),
        TableColumn("CODE", lambda one: "–" if one["exit_code"] is None else str(one["exit_code"]), right=True),
        TableColumn("WHY", lambda one: one["reason"]),
    ]
    members = table_of(columns, array["members"], width=terminal_width())
    return [*(f"{paint(label.ljust(16), 'dim')}{value}" for label, value in facts), "", *members]
