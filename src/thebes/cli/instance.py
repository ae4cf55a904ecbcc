"""`thebes up`, `down`, `status`, `doctor`, `token` and `tenant`: the life of an instance, and who may use it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thebes.cli.live import Folder, ShortFormat, ShortOutput, connect
from thebes.cli.screen import paint, plural, print_json, say, table, terminal_width
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from thebes.node.instance import Instance
    from thebes.placement import Placement
    from thebes.policy import Policy
    from thebes.server.lifecycle import LogMark

token = typer.Typer(help="Tokens: who may use the cluster.", no_args_is_help=True)
tenant = typer.Typer(help="Tenants: whose account jobs run on, and how many GPUs they may hold.", no_args_is_help=True)

SITE, DECIDING, SERVING = "On Slurm or Ray", "What is decided", "As a service"
LEVEL_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


def up(
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Who runs when (`thebes policies`), or FILE.py:CLASS. Default tiresias-l."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Who carries out: local (this machine, the default), slurm or ray."),
    ] = None,
    virtual_gpus: Annotated[
        int | None,
        typer.Option(min=1, max=1024, metavar="N", help="So many virtual GPUs on each node, instead of real ones."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="So many nodes of virtual GPUs. Default 1.")
    ] = None,
    folder: Folder = None,
    partition: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=SITE, help="Slurm: the partition to work in. Default: Slurm's."),
    ] = None,
    reservation: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=SITE, help="Slurm: the reservation to work in.")
    ] = None,
    account: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=SITE, help="Slurm: the account of our jobs. Default: yours."),
    ] = None,
    qos: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=SITE, help="Slurm: their quality of service. Default: yours."),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            "--time",
            metavar="LIMIT",
            rich_help_panel=SITE,
            help="Slurm: their time limit; they go on in a new one. Default: the partition's.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", rich_help_panel=SITE, help="Ray: the head of the cluster, or auto."),
    ] = None,
    shared: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=SITE,
            help="A folder that all nodes see, for checkpoints and logs. Default: that of --dir.",
        ),
    ] = None,
    home: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", rich_help_panel=SITE, help="Where nodes reach us. Default: this machine's name."
        ),
    ] = None,
    lease: Annotated[
        float | None,
        typer.Option(
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
    grace: Annotated[
        float | None,
        typer.Option(
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
    """Start a cluster here or on Slurm or Ray, or what is missing of it. What is not said stays as it was last time."""
    from thebes.node.instance import Instance
    from thebes.server.lifecycle import Options, bring_up

    if store is not None:
        hide_password(store)
    else:
        store = os.environ.get("THEBES_STORE") or None
    instance = Instance.at(folder)
    brought = bring_up(
        instance,
        Options(
            policy=policy,
            settings=settings or (),
            placement=placement,
            virtual_gpus=virtual_gpus,
            nodes=nodes,
            host=host,
            port=port,
            tls_cert=tls_cert,
            tls_key=tls_key,
            grace_s=grace,
            packing=packing,
            engine=engine,
            partition=partition,
            reservation=reservation,
            account=account,
            qos=qos,
            time_limit=time_limit,
            address=address,
            shared=shared,
            home=home,
            lease_s=lease,
            store=store,
        ),
        compile_ahead,
    )
    config = brought.config
    gpus = plural(config.gpus, "virtual GPU" if config.nodes[0].virtual else "GPU")
    print(paint("Thebes is up already" if brought.was_up else "Thebes is up", "bold") + f"  {brought.url}")
    if brought.leader is not None:
        print(f"  standby  {brought.leader} leads; this one takes over when it is gone")
    print(f"  folder   {instance.dir}")
    print(f"  policy   {config.policy}, placement {config.placement}")
    where = "" if config.engine == "local" else f" of {config.engine.capitalize()}"
    print(f"  nodes    {plural(len(config.nodes), 'node')}{where}, {gpus}")
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
    """Until the cluster is taken down. A keeper that was killed is an error: whoever started us starts us again."""
    from thebes.server.lifecycle import wait_for_keeper

    if not wait_for_keeper(instance, log):
        raise UserError("the keeper has ended without having been told to", hint="`thebes up` takes everything over")


def hide_password(url: str) -> None:
    """Overwrite the password of an address in our own command line: everybody on this machine can read that."""
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
        pass  # not Linux as we know it: a file ~/.pgpass is the better place anyway


def compile_ahead(policy: Policy, placement: Placement) -> None:
    """Compile what the policy needs ahead, so that the controller need not do it while people wait for it."""
    from thebes.model.compiled import is_cold
    from thebes.policy.priority import PriorityPolicy

    ordered = isinstance(policy, PriorityPolicy)
    if is_cold("fill.draw_up") or (ordered and is_cold("priority.survey")):
        from thebes.server.standby import rehearse

        say("Compiling the policies for this machine (once per version, about a minute) …")
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
    from thebes.node.instance import Instance
    from thebes.server.lifecycle import living_parts, take_down

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


def status(folder: Folder = None, output: ShortFormat = ShortOutput.table) -> None:
    """What runs, where it answers, and how busy it is. Works with any part of the cluster dead."""
    from thebes.node.instance import Instance
    from thebes.server.lifecycle import describe

    state = describe(Instance.at(folder))
    if output == ShortOutput.json:
        print_json(state)
        return
    lines = _status_lines(state)
    width = max(len(name) for name, _, _ in lines) + 1
    for name, text, style in lines:
        print(f"{paint(name.ljust(width), 'dim')}{paint(text, style)}")


def _count(total: int, missing: list[str], what: str) -> tuple[str, str]:
    """How many of them are there, which are not, and in which colour to say so."""
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
    """The store and who leads, where several controllers may share it."""
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


def doctor(folder: Folder = None, output: ShortFormat = ShortOutput.table) -> None:
    """Check GPUs, driver, port, disk, permissions and the store of this machine, and say how to fix what is wrong."""
    from thebes.node.instance import Instance
    from thebes.server.doctor import examine

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


# tokens


@token.command("create")
def create_token(
    user: Annotated[str, typer.Argument(help="Whose token it is.")],
    admin: Annotated[bool, typer.Option("--admin", help="May do everything, to all jobs.")] = False,
    of_tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="On whose account its jobs run.")
    ] = None,
    expires: Annotated[str | None, typer.Option(metavar="TIME", help="Ends after so long: 12h, 30d.")] = None,
    folder: Folder = None,
    output: ShortFormat = ShortOutput.table,
) -> None:
    """Make a token for somebody. It is shown this one time."""
    expires_in_s = None
    if expires is not None:
        from thebes.server.jobfile import parse_duration_s

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
def list_tokens(folder: Folder = None, output: ShortFormat = ShortOutput.table) -> None:
    """Tokens and their owners; never their text."""
    tokens = connect(folder).tokens()
    if output == ShortOutput.json:
        print_json(tokens)
        return
    rows = [
        (str(entry["id"]), entry["user"], entry["role"], entry["tenant"] or "–", _validity(entry)) for entry in tokens
    ]
    print(*table(("id", "user", "role", "tenant", "good until"), rows, right=("id",), width=terminal_width()), sep="\n")


def _validity(entry: dict[str, Any]) -> str:
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
    """End a token. Jobs of its owner go on."""
    connect(folder).revoke_token(token_id)
    print(f"token {token_id} is revoked")


# tenants


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
    """Make a tenant, or change one. What is not said stays as it is."""
    if no_limit and gpus is not None:
        raise UserError("--gpus and --no-limit contradict each other", hint="give one of them")
    client = connect(folder)
    before: dict[str, Any] = next((entry for entry in client.tenants() if entry["name"] == name), {})
    quota = None if no_limit else gpus if gpus is not None else before.get("gpu_quota")
    shown = bool(before.get("open")) if open is None else open
    client.put_tenant(name, gpu_quota=quota, open=shown)
    print(f"tenant {name}: {_quota(quota)}, {'open' if shown else 'closed'}")


def _quota(gpus: int | None) -> str:
    return "no limit" if gpus is None else plural(gpus, "GPU")


@tenant.command("list")
def list_tenants(folder: Folder = None, output: ShortFormat = ShortOutput.table) -> None:
    """Tenants and their limits."""
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
