"""The commands about an instance and its users: `thebes up`, `down`, `status`, `doctor`, `token` and `tenant`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.live import Folder, ShortOutput, ShortOutputOption, connect
from thebes.cli.screen import LEVEL_STYLES, paint, plural, print_json, say, table, terminal_width
from thebes.cli.site_options import (
    SITE,
    AccountOption,
    HomeOption,
    PartitionOption,
    QosOption,
    RayAddressOption,
    ReservationOption,
)
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from thebes.instance.keeper_log import LogMark
    from thebes.placement import Placement
    from thebes.policy import Policy
    from thebes.protocol.instance import Instance

token = typer.Typer(help="Tokens: who may use the cluster.", no_args_is_help=True)
tenant = typer.Typer(help="Tenants: whose account jobs run on, and how many GPUs they may hold.", no_args_is_help=True)

DECIDING, SERVING = "What is decided", "As a service"


def up(
    ctx: typer.Context,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The policy (`thebes policies`), or FILE.py:CLASS. Default tiresias-l."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What runs the jobs: local (this machine, the default), slurm or ray."),
    ] = None,
    virtual_gpus: Annotated[
        int | None,
        typer.Option(min=1, max=1024, metavar="N", help="So many virtual GPUs on each node, instead of real ones."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="So many nodes of virtual GPUs. Default 1.")
    ] = None,
    folder: Folder = None,
    partition: PartitionOption = None,
    reservation: ReservationOption = None,
    account: AccountOption = None,
    qos: QosOption = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            "--time",
            metavar="LIMIT",
            rich_help_panel=SITE,
            help="Slurm: their time limit; they go on in a new one. Default: the partition's.",
        ),
    ] = None,
    address: RayAddressOption = None,
    shared: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=SITE,
            help="A folder that all nodes see, for checkpoints and logs. Default: that of --dir.",
        ),
    ] = None,
    home: HomeOption = None,
    lease_s: Annotated[
        float | None,
        typer.Option(
            "--lease",
            min=2,
            metavar="SECONDS",
            rich_help_panel=SITE,
            help="How long jobs go on at a node that is cut off. Default 60.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            rich_help_panel=DECIDING,
            help="A parameter of the policy; placement.KEY for the placement.",
        ),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            "--placement",
            "-p",
            metavar="NAME",
            rich_help_panel=DECIDING,
            help="Where GPUs are taken (`thebes placements`). Default consolidate.",
        ),
    ] = None,
    grace_s: Annotated[
        float | None,
        typer.Option(
            "--grace",
            min=0,
            metavar="SECONDS",
            rich_help_panel=DECIDING,
            help="From the notice of a preemption to the kill. Default 30.",
        ),
    ] = None,
    packing: Annotated[
        bool | None,
        typer.Option(
            "--packing/--no-packing",
            rich_help_panel=DECIDING,
            help="Put two jobs that allow it on one GPU (MPS) when GPUs are short, as long as it pays. Default no.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", rich_help_panel=SERVING, help="Where to listen; others can connect. Default 127.0.0.1."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, metavar="N", rich_help_panel=SERVING, help="Default: any free one, kept from then on."
        ),
    ] = None,
    tls_cert: Annotated[
        str | None,
        typer.Option(metavar="FILE", rich_help_panel=SERVING, help="Certificate (PEM), to listen publicly."),
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(metavar="FILE", rich_help_panel=SERVING, help="Its key (PEM), without a password.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            rich_help_panel=SERVING,
            help="postgresql://…, for several controllers (or THEBES_STORE). Default: a file in --dir.",
        ),
    ] = None,
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground", rich_help_panel=SERVING, help="Stay until the cluster is taken down, for systemd."
        ),
    ] = False,
) -> None:
    """Start a cluster here, on Slurm or on Ray, or what is missing of it. Options not given stay as they were."""
    from thebes.instance.up import bring_up
    from thebes.instance.wanted import UpOptions
    from thebes.live.config import unused_placement
    from thebes.protocol.instance import Instance

    if store is not None:
        hide_password(store)
    else:
        store = os.environ.get("THEBES_STORE") or None
    instance = Instance.at(folder)
    said: dict[str, Any] = {one.name: ctx.params[one.name] for one in fields(UpOptions)}
    said.update(settings=settings or (), store=store)
    brought = bring_up(instance, UpOptions(**said), compile_ahead)
    config = brought.config
    gpus = plural(config.gpus, "virtual GPU" if config.nodes[0].virtual else "GPU")
    print(paint("Thebes is up already" if brought.was_up else "Thebes is up", "bold") + f"  {brought.url}")
    if brought.leader is not None:
        print(f"  standby  {brought.leader} leads; this one takes over when it is gone")
    print(f"  folder   {instance.dir}")
    print(f"  policy   {config.policy}, placement {config.placement}")
    where = "" if config.engine == "local" else f" of {config.engine.capitalize()}"
    print(f"  nodes    {plural(len(config.nodes), 'node')}{where}, {gpus}")
    if unused := unused_placement(config):
        say(f"note: {unused}")
    if brought.trouble:
        say(f"warning: {brought.trouble}. `thebes nodes` tells when they can.")
    elsewhere = folder is not None and Instance.at(None) != instance
    print()
    print("Run something:")
    if elsewhere:
        print(f"  export THEBES_DIR={_quoted(str(instance.dir))}")
    print("  thebes submit --gpus 1 -- python train.py", flush=True)
    if foreground:
        stay(instance, brought.log)


def stay(instance: Instance, log: LogMark) -> None:
    """Wait until the cluster is taken down.

    A keeper that was killed is an error, so that the program that started us (such as systemd) starts us again.
    """
    from thebes.instance.up import wait_for_keeper

    if not wait_for_keeper(instance, log):
        raise UserError("the keeper has ended without having been told to", hint="`thebes up` takes everything over")


def hide_password(url: str) -> None:
    """Overwrite a password in our own command line, because everybody on this machine can read command lines."""
    import ctypes
    from pathlib import Path

    head, at, _ = url.rpartition("@")
    _, colon, password = head.partition("://")[2].partition(":")
    if not (at and colon and password):
        return
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # where the arguments begin and end
        arguments = ctypes.string_at(start, end - start)
        secret = password.encode()
        where = arguments.find(secret)
        while where >= 0:
            ctypes.memset(start + where, ord("*"), len(secret))
            where = arguments.find(secret, where + len(secret))
    except (OSError, ValueError, IndexError):
        pass  # this is not Linux as we know it; a file ~/.pgpass is the better place for a password anyway


def compile_ahead(policy: Policy, placement: Placement) -> None:
    """Compile what the policy needs now, so that the controller need not do it while people wait for its answers."""
    from thebes.model.compiled import is_cold

    ordered = policy.one_order() is not None
    if is_cold("fill.draw_up") or (ordered and is_cold("priority.survey")):
        from thebes.instance.standby import rehearse

        say("Compiling the policies for this machine (once per version, about 20 s) …")
        rehearse(policy, placement)


def _quoted(text: str) -> str:
    from shlex import quote

    return quote(text)


def down(
    folder: Folder = None,
    keep_jobs: Annotated[
        bool, typer.Option("--keep-jobs", help="Running jobs run on; the next `thebes up` takes them over.")
    ] = False,
    now: Annotated[bool, typer.Option("--now", help="Kill running jobs, without time to save.")] = False,
) -> None:
    """Stop the cluster. Running jobs are asked to save their state first; all jobs go on at the next `thebes up`."""
    from thebes.instance.down import take_down
    from thebes.instance.state import living_parts
    from thebes.protocol.instance import Instance

    if keep_jobs and now:
        raise UserError("--keep-jobs and --now contradict each other", hint="give one of them")
    instance = Instance.at(folder)
    was_up = bool(living_parts(instance))
    endings = take_down(instance, "keep" if keep_jobs else "kill" if now else "checkpoint", say)
    for ending in endings:
        print(f"job {ending.job_id}  {ending.outcome}")
    if not was_up and not endings:
        print(f"nothing runs in {instance.dir}")
    else:
        print(f"Thebes is down  {instance.dir}")


def status(folder: Folder = None, output: ShortOutputOption = ShortOutput.table) -> None:
    """Show what runs, where it answers, and how busy it is. It works with any part of the cluster dead."""
    from thebes.instance.state import describe
    from thebes.protocol.instance import Instance

    state = describe(Instance.at(folder))
    if output == ShortOutput.json:
        print_json(state)
        return
    lines = _status_lines(state)
    width = max(len(name) for name, _, _ in lines) + 1
    for name, text, style in lines:
        print(f"{paint(name.ljust(width), 'dim')}{paint(text, style)}")


def _count(total: int, missing: list[str], what: str) -> tuple[str, str]:
    """How many of these parts are there, which are missing, and the colour for that."""
    few = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
    return f"{total - len(missing)} of {total}" + (f" ({what}: {few})" if missing else ""), "yellow" if missing else ""


def _site_line(state: dict[str, Any]) -> tuple[str, str, str]:
    nodes = state["nodes"]
    name = f"{state['engine'].capitalize()} nodes"
    return (
        (name, "?", "yellow") if nodes["silent"] is None else (name, *_count(nodes["total"], nodes["silent"], "down"))
    )


def _status_lines(state: dict[str, Any]) -> list[tuple[str, str, str]]:
    keeper, controller, agents = state["keeper"]["pid"], state["controller"], state["agents"]
    dead = [agent["node"] for agent in agents if agent["pid"] is None]
    parts = [keeper, controller["pid"], *(agent["pid"] for agent in agents)]
    if not any(parts):
        overall, style = "down", "yellow"
    elif all(parts) and controller["healthy"]:
        overall, style = "up", "green"
    else:
        overall, style = "parts are missing: `thebes up` starts them", "red"
    answers = "answers" if controller["healthy"] else "does not answer"
    gpus, jobs = state["gpus"], state["jobs"]
    busy = "?" if gpus["busy"] is None else gpus["busy"]
    lines = [
        ("cluster", overall, style),
        ("folder", state["dir"], ""),
        ("url", state["url"] or "–", ""),
        ("policy", f"{state['policy']}, placement {state['placement']}", ""),
        *_controller_lines(state),
        ("keeper", f"pid {keeper}" if keeper else "dead", "" if keeper else "yellow"),
        (
            "controller",
            f"pid {controller['pid']}, {answers}" if controller["pid"] else "dead",
            "" if controller["healthy"] else "yellow",
        ),
        ("agents", *_count(len(agents), dead, "dead")) if state["engine"] == "local" else _site_line(state),
        ("GPUs", f"{busy} of {gpus['total']} busy" + (" (virtual)" if gpus["virtual"] else ""), ""),
    ]
    if jobs is not None:
        told = [f"{count} {name}" for name, count in jobs.items() if count]
        lines.append(("jobs", " · ".join(told) or "none", ""))
    if state["trouble"]:
        lines.append(("trouble", str(state["trouble"]), "red"))
    return lines


def _controller_lines(state: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Lines about the store and about the controller that leads, where several controllers may share a store."""
    if not state["store"]:
        return []
    lines = [("store", state["store"], "")]
    controllers = state["controllers"] or []
    leaders = [one for one in controllers if one["leads"]]
    lines.append(
        ("leader", f"{leaders[0]['name']}  {leaders[0]['url']}" if leaders else "none", "" if leaders else "red")
    )
    waiting = [f"{one['name']}  {one['url']}" for one in controllers if not one["leads"]]
    return lines + [("standby", text, "") for text in waiting or ["none"]]


def doctor(folder: Folder = None, output: ShortOutputOption = ShortOutput.table) -> None:
    """Check GPUs, driver, port, disk, permissions and the store of this machine, and say how to fix what is wrong."""
    from thebes.instance.doctor import examine
    from thebes.protocol.instance import Instance

    findings = examine(Instance.at(folder))
    if output == ShortOutput.json:
        print_json([finding.as_dict() for finding in findings])
    else:
        for finding in findings:
            print(f"{paint(f'{finding.level:<8}', LEVEL_STYLES[finding.level])} {finding.check:<10}  {finding.found}")
            if finding.fix and finding.level != "ok":
                print(f"{'':<21}→ {finding.fix}")
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


# Tokens.


@token.command("create")
def create_token(
    user: Annotated[str, typer.Argument(help="Whose token it is.")],
    admin: Annotated[bool, typer.Option("--admin", help="Its owner may do everything, to all jobs.")] = False,
    of_tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="On whose account its jobs run.")
    ] = None,
    expires: Annotated[str | None, typer.Option(metavar="TIME", help="It ends after so long: 12h, 30d.")] = None,
    folder: Folder = None,
    output: ShortOutputOption = ShortOutput.table,
) -> None:
    """Make a token for somebody. It is shown this one time."""
    expires_in_s = None
    if expires is not None:
        from thebes.jobspec.values import parse_duration_s

        expires_in_s = parse_duration_s(expires, bare_s=86_400.0, place="--expires")
    made = connect(folder).create_token(
        user, role="admin" if admin else "user", tenant=of_tenant, expires_in_s=expires_in_s
    )
    if output == ShortOutput.json:
        print_json(made)
        return
    print(made["token"])
    say(f"token {made['id']} of {user}: shown this one time, so keep it. It is used as THEBES_TOKEN.")


@token.command("list")
def list_tokens(folder: Folder = None, output: ShortOutputOption = ShortOutput.table) -> None:
    """List tokens and their owners. The text of a token is not shown again."""
    tokens = connect(folder).tokens()
    if output == ShortOutput.json:
        print_json(tokens)
        return
    rows = [
        (str(entry["id"]), entry["user"], entry["role"], entry["tenant"] or "–", _validity(entry)) for entry in tokens
    ]
    print(*table(("id", "user", "role", "tenant", "good until"), rows, right=("id",), width=terminal_width()), sep="\n")


def _validity(entry: Mapping[str, Any]) -> str:
    from time import localtime, strftime, time

    if entry.get("revoked"):
        return "revoked"
    expires_s = entry.get("expires_s")
    if expires_s is None:
        return "revoked by hand"
    shown = strftime("%F %T", localtime(expires_s))
    return f"{shown} (over)" if expires_s < time() else shown


@token.command("revoke")
def revoke_token(
    token_id: Annotated[int, typer.Argument(metavar="ID", help="As `thebes token list` shows it.")],
    folder: Folder = None,
) -> None:
    """End a token. The jobs of its owner go on."""
    connect(folder).revoke_token(token_id)
    print(f"token {token_id} is revoked")


# Tenants.


@tenant.command("set")
def set_tenant(
    name: Annotated[str, typer.Argument(help="The tenant's name.")],
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, help="GPUs that its jobs may hold together, at most.")
    ] = None,
    no_limit: Annotated[bool, typer.Option("--no-limit", help="As many GPUs as there are.")] = False,
    open: Annotated[bool | None, typer.Option("--open/--closed", help="Whether members see each other's jobs.")] = None,
    folder: Folder = None,
) -> None:
    """Make a tenant, or change one. Limits that are left out stay as they are."""
    if no_limit and gpus is not None:
        raise UserError("--gpus and --no-limit contradict each other", hint="give one of them")
    client = connect(folder)
    before = next((entry for entry in client.tenants() if entry["name"] == name), None)
    quota = None if no_limit else gpus if gpus is not None else before["gpu_quota"] if before else None
    shown = bool(before and before["open"]) if open is None else open
    client.put_tenant(name, gpu_quota=quota, open=shown)
    print(f"tenant {name}: {_quota(quota)}, {'open' if shown else 'closed'}")


def _quota(gpus: int | None) -> str:
    return "no limit" if gpus is None else plural(gpus, "GPU")


@tenant.command("list")
def list_tenants(folder: Folder = None, output: ShortOutputOption = ShortOutput.table) -> None:
    """List tenants and their limits."""
    tenants = connect(folder).tenants()
    if output == ShortOutput.json:
        print_json(tenants)
        return
    rows = [(entry["name"], _quota(entry["gpu_quota"]), "yes" if entry["open"] else "no") for entry in tenants]
    print(*table(("tenant", "limit", "members see each other's jobs"), rows, width=terminal_width()), sep="\n")


@tenant.command("delete")
def delete_tenant(name: Annotated[str, typer.Argument(help="The tenant's name.")], folder: Folder = None) -> None:
    """Remove a tenant."""
    connect(folder).delete_tenant(name)
    print(f"tenant {name} is removed")
