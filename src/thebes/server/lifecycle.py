"""How an instance comes up and goes down, and what state it is in: what `thebes up`, `down` and `status` do.

Works with any part dead: who lives is asked of locks, what the controller knows is asked of the controller if it
answers, and running jobs can be reached through their supervisors alone.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from thebes.engine.contract import PREEMPTED_EXIT_CODE
from thebes.model.errors import UserError
from thebes.node.instance import Attempt, Instance, LockHeld, explain, stop_process, wait_gone
from thebes.node.keeper import CONTROLLER_PATIENCE_S, MISTAKES, call_keeper, start_keeper, stop_instance
from thebes.server.config import (
    Config,
    NodeConfig,
    check_listening,
    from_cluster,
    live_policy,
    load,
    make,
    of_cluster,
    save,
)

if TYPE_CHECKING:
    from thebes.placement import Placement
    from thebes.policy import Policy
    from thebes.server.leader import Member

READY_S = 90.0  # loading takes three seconds, or thirty on a slow machine that is busy with training
ANSWER_S = 10.0  # for a controller that lives: a busy machine stalls for seconds
SITE_S = 10.0  # a cluster that was there before need not answer within this
STRANGE_S = 0.5  # a part that has just died, or come and not yet written who it is, is no stranger
HOPELESS_DEATHS = 3
DEFAULT_VIRTUAL_GPUS = 8

LATER = "goes on from its last checkpoint at the next `thebes up`"

Mode = Literal["checkpoint", "keep", "kill"]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What `thebes up` was told; None means nothing was said about it."""

    policy: str | None = None
    settings: Sequence[str] = ()
    placement: str | None = None
    virtual_gpus: int | None = None
    nodes: int | None = None
    host: str | None = None
    port: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    grace_s: float | None = None
    packing: bool | None = None
    store: str | None = None
    engine: str | None = None
    partition: str | None = None
    reservation: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str | None = None
    address: str | None = None
    home: str | None = None
    lease_s: float | None = None
    shared: str | None = None


@dataclass(frozen=True)
class Ending:
    """What became of one running job when the cluster went down."""

    job_id: str
    outcome: str


@dataclass(frozen=True)
class Brought:
    """A cluster that is up."""

    config: Config
    url: str
    was_up: bool
    log: LogMark  # what the keeper has logged since
    leader: str | None = None  # where the leader answers, if this one is a standby
    trouble: str = ""  # why none of the nodes can be used now


# what is wanted


def wanted_config(saved: Config | None, options: Options, *, ask_site: bool = True) -> Config:
    """The saved configuration with what was said this time; without a saved one, the defaults."""
    values: dict[str, Any] = saved.model_dump() if saved else {}
    if options.policy is not None:
        values["policy"] = _absolute_policy(options.policy)
        values["policy_settings"] = []  # those of another policy
    if options.settings:
        values["policy_settings"] = list(options.settings)
    told = {
        "placement": options.placement,
        "host": options.host,
        "port": options.port,
        "grace_s": options.grace_s,
        "packing": options.packing,
        "tls_cert": _absolute(options.tls_cert),
        "tls_key": _absolute(options.tls_key),
        "store": options.store,
        "engine": options.engine,
        "partition": options.partition,
        "reservation": options.reservation,
        "account": options.account,
        "qos": options.qos,
        "time_limit": options.time_limit,
        "ray_address": options.address,
        "lease_s": options.lease_s,
        "shared_dir": _absolute(options.shared),
    }
    values.update({key: value for key, value in told.items() if value is not None})
    _check_engine_options(str(values.get("engine", "local")), options)
    if values.get("engine") == "slurm" and values.get("packing"):
        raise UserError(
            "--packing is not for --engine slurm: Slurm gives each GPU to one job at a time",
            hint="leave it out, or say --no-packing",
        )
    if values.get("engine", "local") == "local":
        values["nodes"] = [node.model_dump() for node in _wanted_nodes(saved, options)]
    else:
        values |= _called_at(values, options)
        found = _site_nodes(saved, values) if ask_site or saved is None else saved.nodes
        values["nodes"] = [node.model_dump() for node in found]
    return make(**values)


def _check_engine_options(engine: str, options: Options) -> None:
    """An option that would mean nothing is a mistake."""
    if engine not in ("local", "slurm", "ray"):
        raise UserError(f"--engine {engine}: there is no such engine", hint="local, slurm or ray")
    belongs = {
        "--partition": ("slurm", options.partition),
        "--reservation": ("slurm", options.reservation),
        "--account": ("slurm", options.account),
        "--qos": ("slurm", options.qos),
        "--time": ("slurm", options.time_limit),
        "--address": ("ray", options.address),
    }
    for name, (to, value) in belongs.items():
        if value is not None and engine != to:
            raise UserError(f"{name} is for --engine {to}, and this is --engine {engine}", hint=f"add --engine {to}")
    if options.time_limit and not re.fullmatch(
        r"(\d+-)?\d+(:\d+){0,2}|unlimited|infinite", options.time_limit, re.IGNORECASE
    ):
        raise UserError(
            f"--time {options.time_limit}: not a time as Slurm writes it",
            hint="minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS: for instance 720, 12:00:00 or 7-0; or UNLIMITED",
        )
    if engine != "local" and (options.virtual_gpus is not None or options.nodes is not None):
        raise UserError(
            f"--virtual-gpus and --nodes are for --engine local: {engine.capitalize()} tells which nodes there are",
            hint="leave them out",
        )
    if engine == "local" and (options.home is not None or options.shared is not None):
        raise UserError(
            "--home and --shared are for --engine slurm or ray: the local engine has no other machines",
            hint="leave them out, or add --engine",
        )


def _called_at(values: dict[str, Any], options: Options) -> dict[str, Any]:
    """Where nodes call: as told, as before, or a free port that is kept from now on."""
    host, port = str(values.get("home_host", "")), int(values.get("home_port", 0))
    if options.home is not None:
        told, colon, number = options.home.rpartition(":")
        if colon and number.isdigit():
            host, port = told.strip("[]"), int(number)
        else:
            host = options.home.strip("[]")
        if not host or port > 65535:
            raise UserError(f"--home {options.home}: not HOST or HOST:PORT", hint="for instance --home login1:7400")
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise UserError(
                f"--home {options.home}: no such host is known",
                hint="name this machine as the nodes of the cluster know it, or one of its addresses",
            ) from None
    if not port:
        from thebes.engine.home import free_port

        port = free_port()
    return {"home_host": host, "home_port": port}


def _site_nodes(saved: Config | None, values: dict[str, Any]) -> list[NodeConfig]:
    """As the site tells now; if it cannot be asked, those of the last time: its jobs may still run there."""
    from thebes.server.engines import discover

    try:
        return discover(
            values["engine"],
            partition=values.get("partition", ""),
            reservation=values.get("reservation", ""),
            ray_address=values.get("ray_address", ""),
        )
    except UserError:
        told = ("engine", "partition", "reservation", "ray_address")
        if saved is None or any(values.get(key, "") != getattr(saved, key) for key in told):
            raise
        return list(saved.nodes)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _absolute_policy(name: str) -> str:
    """The controller runs in another folder: FILE.py:CLASS must not depend on where `up` was typed."""
    place, colon, kind = name.rpartition(":")
    return f"{_absolute(place)}:{kind}" if colon and place.endswith(".py") else name


def _wanted_nodes(saved: Config | None, options: Options) -> list[NodeConfig]:
    old = saved.nodes if saved else []
    virtual = options.virtual_gpus is not None or (bool(old) and all(node.virtual for node in old))
    if virtual:
        gpus = options.virtual_gpus if options.virtual_gpus is not None else old[0].gpus
        count = options.nodes if options.nodes is not None else len(old) or 1
        if gpus < 1:
            raise UserError("--virtual-gpus must be at least 1", hint="it is the number of GPUs on each node")
        if options.virtual_gpus is None and options.nodes is None:
            return list(old)
        return [NodeConfig(name=f"n{i}", gpus=gpus, virtual=True) for i in range(count)]
    if options.nodes not in (None, 1):
        raise UserError(
            "--nodes divides virtual GPUs only: the GPUs of this machine are one node",
            hint=f"add --virtual-gpus {DEFAULT_VIRTUAL_GPUS} (per node) to try several nodes",
        )
    from thebes.node.gpus import discover  # a UserError says how to go on without any

    try:
        found = discover()
    except UserError:
        if not old:
            raise
        found = []
    if old and len(found) <= old[0].gpus:
        return list(
            old
        )  # one that has gone keeps its number, and its jobs their GPUs; the agent says which are missing
    types = {gpu.name for gpu in found}
    return [NodeConfig(name="n0", gpus=len(found), gpu_type=types.pop() if len(types) == 1 else "")]


def differences(running: Config, wanted: Config) -> list[str]:
    """In what two configurations differ, for people."""
    old, new = running.model_dump(), wanted.model_dump()
    told: list[str] = []
    for key in old:
        if old[key] == new[key]:
            continue
        before, after = (_shown(key, value) for value in (old[key], new[key]))
        name = (
            "time"
            if key == "time_limit"
            else key.removesuffix("_s").removesuffix("_dir").removeprefix("ray_").replace("_", " ")
        )
        told.append(f"{name} is {before}, not {after}")
    return told


def _shown(key: str, value: Any) -> str:
    if key == "store":
        return shown_store(value) or "a file"
    if key == "nodes":
        return " + ".join(f"{node['gpus']}{' virtual' if node['virtual'] else ''}" for node in value) + " GPUs"
    return " ".join(value) or "none" if isinstance(value, list) else "not set" if value in ("", None) else str(value)


# a store that several controllers share


def shown_store(url: str) -> str:
    """For people: without a password."""
    if not url:
        return ""
    from thebes.server.postgres import without_password

    return without_password(url)


@dataclass(frozen=True)
class Cluster:
    """What the store of several controllers says about them."""

    store: str
    kept: dict[str, Any] | None  # the configuration that they have in common
    others: tuple[Member, ...]  # controllers that are at work with it, without the one of this folder

    def keep(self, config: Config) -> None:
        if of_cluster(config) == self.kept:
            return
        from thebes.server import store as db
        from thebes.server.shift import CONFIG_KEY

        with db.Store.open(self.store) as store:
            text = json.dumps(of_cluster(config))
            store.change_blocking(lambda c: db.set_meta(c, CONFIG_KEY, text))


def look_at_cluster(instance: Instance, saved: Config | None, options: Options) -> Cluster | None:
    """Who else uses the store, and how; None for a store in a file. A UserError tells why it cannot be used."""
    url = options.store if options.store is not None else saved.store if saved else ""
    if not url:
        return None
    from thebes.server import store as db
    from thebes.server.database import POSTGRES_SCHEMES
    from thebes.server.leader import Lease, Member, identity_of
    from thebes.server.postgres import Postgres
    from thebes.server.shift import CONFIG_KEY

    if not url.startswith(POSTGRES_SCHEMES):
        raise UserError(
            "--store: this is not an address of a PostgreSQL database",
            hint="as in postgresql://USER@HOST:5432/DATABASE",
        )
    with db.Store.open(url) as store:
        assert isinstance(store.database, Postgres)
        with store.read() as c:
            kept, empty = db.get_meta(c, CONFIG_KEY), not db.jobs_ever(c)
        lease = Lease(store.database, Member(identity_of(instance.dir), "", ""))
        try:
            others = tuple(one for one in lease.members() if one.alive and one.id != lease.me.id)
        finally:
            lease.close()
    if empty and saved is not None and not saved.store and instance.store.exists():
        with db.Store.open(instance.store) as file, file.read() as c:
            if db.jobs_ever(c):
                raise UserError(
                    f"the jobs of this cluster are in {instance.store}, and {shown_store(url)} is empty",
                    hint="move them: `thebes backup FILE`, then `thebes restore FILE --store URL`; or choose another "
                    "folder with --dir",
                )
    return Cluster(url, None if kept is None else json.loads(kept), others)


def wanted_for(cluster: Cluster | None, saved: Config | None, options: Options) -> Config:
    """The same as `wanted_config`, where other controllers may be at work: what they have in common is settled."""
    if cluster is None:
        return wanted_config(saved, options)
    own = None if saved is None else saved.model_copy(update={"store": cluster.store})
    base = saved if cluster.kept is None else from_cluster(cluster.kept, own, cluster.store)
    wanted = wanted_config(base, options, ask_site=not cluster.others)
    if cluster.others:
        from thebes.server.shift import refuse_local

        if wanted.engine == "local":
            refuse_local(cluster.others)
        if base is not None and of_cluster(wanted) != cluster.kept:
            told = differences(from_cluster(of_cluster(base), wanted), wanted)
            raise UserError(
                f"the cluster in {shown_store(cluster.store)} runs with other options: {'; '.join(told)}",
                hint="leave them out: they are taken over; or take all its controllers down first "
                f"({', '.join(other.name for other in cluster.others)})",
            )
    if wanted.engine != "local" and not wanted.shared_dir:
        raise UserError(
            "several controllers need a folder for checkpoints that all machines see",
            hint="name it with --shared DIR, the same for all controllers",
        )
    return wanted


# up


def bring_up(
    instance: Instance,
    options: Options,
    prepare: Callable[[Policy, Placement], None] = lambda _policy, _placement: None,
) -> Brought:
    """Start what does not run yet, and wait until it answers. If that fails, what was started is stopped again.

    `prepare` is called before a start, when everything was found to be in order.
    """
    instance.create()
    with _alone(instance):
        _check_here(instance)
        saved = load(instance.config) if instance.exists else None
        cluster = look_at_cluster(instance, saved, options)
        wanted = wanted_for(cluster, saved, options)
        running = saved is not None and bool(living_parts(instance))
        if saved is not None and wanted != saved:
            _refuse_change(instance, saved, wanted, running)
        chosen = live_policy(wanted)
        check_listening(wanted)
        was_up = instance.holder_pid("keeper") is not None
        mark = LogMark(instance.log / "keeper.jsonl")
        if not was_up:
            _make_shared(wanted)
            prepare(*chosen)
            if wanted != saved:
                save(instance.config, wanted)
            if cluster is not None:
                cluster.keep(wanted)
        if running:
            _go_on(instance)
        keeper = None if was_up else start_keeper(instance)
        if was_up:
            call_keeper(instance)
        try:
            known = saved is not None and saved.engine == wanted.engine and saved.nodes == wanted.nodes
            url, leader, trouble = _wait_until_ready(instance, wanted, mark, keeper, known=known)
        except BaseException:
            if not running and not was_up:
                stop_instance(instance, wanted.node_names)
                _restore(instance, saved, wanted)
            raise
    return Brought(wanted, url, was_up, mark, leader, trouble)


def _make_shared(config: Config) -> None:
    """The folder that all nodes see, for us alone."""
    if config.shared_dir:
        path = Path(config.shared_dir)
        try:
            for folder in (path, path / "jobs", path / "nodes"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            told = explain(error, path, "cannot be made")
            raise UserError(told.message, hint=told.hint.replace("--dir", "--shared")) from error


def wait_for_keeper(instance: Instance, log: LogMark) -> bool:
    """Until it ends; whether it was told to since that mark: a `down` may come before we begin to wait."""
    pid = instance.holder_pid("keeper")
    with suppress(ProcessLookupError):
        if pid is not None:
            pidfd = os.pidfd_open(pid)
            try:
                while not wait_gone(pidfd, 3600.0):
                    pass
            finally:
                os.close(pidfd)
    return log.stopped()


def _go_on(instance: Instance) -> None:
    """A `thebes down` that was broken off has left a controller that starts nothing more: the next one does."""
    answer = ask(instance, "GET", "/v1/status", with_token=True, timeout_s=ANSWER_S)
    pid = instance.holder_pid("controller")
    if answer is not None and answer.body.get("closing") and pid is not None:
        stop_process(pid, instance.lock_path("controller"), patience_s=CONTROLLER_PATIENCE_S)


def _check_here(instance: Instance) -> None:
    """A folder on a network file system may be seen by several machines; locks are, processes are not."""
    deadline_s = time.monotonic() + STRANGE_S
    while strangers := [pid for pid in living_parts(instance).values() if not Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline_s:
            raise UserError(
                f"the cluster in {instance.dir} runs on another machine (pid {strangers[0]} is not here)",
                hint="log in there; or choose a folder on a local disk with --dir or THEBES_DIR",
            )
        time.sleep(0.05)


def _refuse_change(instance: Instance, saved: Config, wanted: Config, running: bool) -> None:
    told = differences(saved, wanted)
    if running:
        raise UserError(
            f"the cluster in {instance.dir} runs with other options: {'; '.join(told)}",
            hint="`thebes down` first, then `thebes up` with the new options; queued jobs stay",
        )
    alive = sorted({attempt.job_id for attempt in instance.live_attempts()})
    if saved.nodes != wanted.nodes and alive:
        raise UserError(
            f"jobs still run on the nodes that would change: {', '.join(alive)}",
            hint="`thebes up` without options takes them over, or `thebes down --now` ends them",
        )


def _restore(instance: Instance, saved: Config | None, wanted: Config) -> None:
    """A start that failed leaves no trace in the configuration."""
    if saved == wanted:
        return
    with suppress(UserError, OSError):
        if saved is None:
            instance.config.unlink(missing_ok=True)
        else:
            save(instance.config, saved)


def _alone(instance: Instance) -> Any:
    try:
        return instance.hold_lock("up", wait_s=60.0)
    except LockHeld as held:
        raise UserError(
            f"another `thebes up` or `thebes down` (pid {held.pid}) is at work in {instance.dir}",
            hint="wait for it, or end it",
        ) from None


def _wait_until_ready(
    instance: Instance, config: Config, mark: LogMark, keeper: subprocess.Popen[bytes] | None, *, known: bool
) -> tuple[str, str | None, str]:
    """Its address; that of the leader, if this one is a standby; and why no node can be used.

    On a site that was `known` before, that is no reason not to come up: its jobs may run, and it will be back.
    """
    deadline_s = time.monotonic() + READY_S
    answered_s = float("inf")
    missing = "the controller does not answer"
    while time.monotonic() < deadline_s:
        failure = mark.failure()
        if failure is not None:
            raise failure
        if keeper is not None and keeper.poll() is not None and instance.holder_pid("keeper") is None:
            raise UserError(_said(instance, "keeper") or "the keeper ended at once", hint=f"see {instance.log}")
        answer = ask(instance, "GET", "/v1/healthz", timeout_s=1.0)
        if answer is not None and answer.status == 200 and {"keeper", "controller"} <= set(living_parts(instance)):
            endpoint = instance.read_endpoint()
            url = endpoint["url"] if endpoint else ""
            if answer.body.get("role") == "standby":
                if answer.body.get("leader"):
                    return url, str(answer.body["leader"]), ""
                missing = answer.body.get("trouble") or "nobody leads the cluster yet"
                time.sleep(0.03)
                continue
            silent = silent_nodes(instance, config)
            if not silent:
                return url, None, ""
            answered_s = min(answered_s, time.monotonic())
            missing = f"no word from the agent of {', '.join(silent[:8])}"
            if config.engine != "local":
                missing = _why_silent(instance, config)
                if known and time.monotonic() > answered_s + SITE_S:
                    return url, None, missing
        elif answer is not None and answer.status != 200:
            missing = f"the controller answers: {answer.body.get('error', answer.status)}"
        time.sleep(0.03)
    last = mark.last_words()
    raise UserError(
        f"the cluster did not come up within {READY_S:g} s: {missing}" + (f" ({last})" if last else ""),
        hint=f"the logs in {instance.log} tell more; `thebes doctor` checks this machine",
    )


def _why_silent(instance: Instance, config: Config) -> str:
    """Why none of the nodes of a site can be used."""
    answer = ask(instance, "GET", "/v1/nodes", with_token=True, timeout_s=ANSWER_S)
    nodes = answer.body.get("nodes", []) if answer is not None and answer.status == 200 else []
    why = next((str(node["reason"]) for node in nodes if node.get("reason")), "")
    return f"none of the {len(config.nodes)} nodes of {config.engine.capitalize()} can be used" + (why and f" ({why})")


def silent_nodes(instance: Instance, config: Config) -> list[str]:
    """Nodes whose agent the controller has no connection to; on a site with many, one that answers is enough."""
    silent = _not_alive(instance, config)
    return [] if config.engine != "local" and len(silent) < len(config.nodes) else silent


def _not_alive(instance: Instance, config: Config) -> list[str]:
    answer = ask(instance, "GET", "/v1/nodes", with_token=True, timeout_s=ANSWER_S)
    if answer is None or answer.status != 200:
        return config.node_names
    alive = {node["name"] for node in answer.body.get("nodes", []) if node.get("alive")}
    return [name for name in config.node_names if name not in alive]


class LogMark:
    """What the keeper logs from now on about parts that died."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0

    def entries(self) -> Iterator[dict[str, Any]]:
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                with suppress(ValueError):
                    yield json.loads(line)

    def deaths(self) -> Iterator[dict[str, Any]]:
        return (entry for entry in self.entries() if entry.get("event") == "died")

    def stopped(self) -> bool:
        """Whether the keeper was told to stop."""
        return any(entry.get("event") == "stopping" for entry in self.entries())

    def failure(self) -> UserError | None:
        """The reason why waiting longer makes no sense, if there is one."""
        count: dict[str, int] = {}
        for death in self.deaths():
            part = death["part"]
            count[part] = count.get(part, 0) + 1
            if death["code"] in MISTAKES or count[part] >= HOPELESS_DEATHS:
                return _as_error(part, death, self.path.parent)
        return None

    def last_words(self) -> str:
        words = [f"{death['part']}: {death['said'].splitlines()[-1]}" for death in self.deaths() if death["said"]]
        return words[-1] if words else ""


def _as_error(part: str, death: dict[str, Any], log: Path) -> UserError:
    """What a part printed last, as the error that it was."""
    said = death["said"]
    lines = [line for line in said.splitlines() if line.strip()]
    told = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if told:
        hint = lines[told[-1] + 1] if told[-1] + 1 < len(lines) else ""
        return UserError(lines[told[-1]].removeprefix("error: "), hint=hint.strip().removeprefix("→ "))
    last = lines[-1] if lines else f"exit code {death['code']}"
    return UserError(f"{part} does not start: {last}", hint=f"see {log / part}.stderr")


def _said(instance: Instance, part: str) -> str:
    with suppress(OSError):
        return (instance.log / f"{part}.stderr").read_text(errors="replace").strip().removeprefix("error: ")
    return ""


# down


def take_down(instance: Instance, mode: Mode, tell: Tell) -> list[Ending]:
    """Stop everything; what became of each running job. Queued jobs stay in the store."""
    if not instance.dir.is_dir() or not instance.run.is_dir():
        raise UserError(f"there is no instance in {instance.dir}", hint="name its folder with --dir or THEBES_DIR")
    with _alone(instance):
        _check_here(instance)
        heirs = _heirs(instance, mode)
        if heirs:
            tell(f"the cluster goes on without this controller: {', '.join(heirs)}")
            mode = "keep"
        endings = _end_through_controller(instance, mode, tell) if living_parts(instance) and not heirs else []
        going_on = _running_elsewhere(instance) if mode == "keep" and not heirs else []
        for name in stop_instance(instance, agent_names(instance)):
            tell(f"{name} did not stop by itself and was killed")
        known = {ending.job_id for ending in endings}
        if mode == "keep":
            rest = [
                Ending(job_id, "runs on; the next `thebes up` takes it over")
                for job_id in dict.fromkeys([*_job_ids(instance), *going_on])
                if job_id not in known
            ]
        else:
            rest = [end for end in end_attempts(instance, mode, tell) if end.job_id not in known]
        return sorted([*endings, *rest], key=lambda ending: [int(n) for n in ending.job_id.split("_")])


def _heirs(instance: Instance, mode: Mode) -> list[str]:
    """Other controllers of this cluster: they go on with the jobs, so this one just leaves."""
    answer = ask(instance, "GET", "/v1/healthz", timeout_s=2.0)
    if answer is None or answer.status != 200:
        return []
    if answer.body.get("role") == "standby":
        others = [answer.body["leader"]] if answer.body.get("leader") else []
    else:
        told = ask(instance, "GET", "/v1/status", with_token=True, timeout_s=ANSWER_S)
        found = told.body.get("controllers") or [] if told is not None else []
        others = [str(one["name"]) for one in found if not one["leads"] and one["seen_ago_s"] < 5.0]
    if others and mode == "kill":
        raise UserError(
            f"other controllers of this cluster would start the jobs again: {', '.join(others)}",
            hint="cancel the jobs (`thebes cancel`), or take the others down first",
        )
    return others


def _running_elsewhere(instance: Instance) -> list[str]:
    """Jobs that run on other machines: nothing in our folder tells of them."""
    with suppress(UserError):
        if load(instance.config).engine == "local":
            return []
    answer = ask(instance, "GET", "/v1/jobs?state=running&limit=1000", with_token=True, timeout_s=ANSWER_S)
    return [str(job["id"]) for job in answer.body.get("jobs", [])] if answer is not None else []


def _job_ids(instance: Instance) -> list[str]:
    return list(dict.fromkeys(attempt.job_id for attempt in instance.live_attempts()))


def _end_through_controller(instance: Instance, mode: Mode, tell: Tell) -> list[Ending]:
    """Let the controller end the jobs, so that the results are stored. If it is dead we come back for them."""
    deadline_s = time.monotonic() + (8.0 if instance.holder_pid("keeper") is not None else 2.0)
    while (answer := ask(instance, "GET", "/v1/healthz", timeout_s=1.0)) is None or answer.status != 200:
        if time.monotonic() > deadline_s:
            tell("the controller does not answer: jobs are ended through their supervisors")
            return []
        time.sleep(0.05)
    grace_s = _grace_s(instance)
    if mode == "checkpoint" and _job_ids(instance):
        tell(f"asking running jobs to save their state (up to {grace_s:g} s) …")
    answer = ask(
        instance,
        "POST",
        "/v1/shutdown",
        body={"mode": mode},
        with_token=True,
        timeout_s=_longest_grace_s(instance) + 30.0,
    )
    if answer is None or answer.status != 200:
        why = answer.body.get("error", answer.status) if answer else "no answer"
        tell(f"the controller could not end the jobs ({why}): they are ended through their supervisors")
        return []
    stopped = dict.fromkeys(str(job_id) for job_id in answer.body.get("stopped", []))
    return [Ending(job_id, _told_by_controller(instance, job_id)) for job_id in stopped]


def _told_by_controller(instance: Instance, job_id: str) -> str:
    answer = ask(instance, "GET", f"/v1/jobs/{job_id}", with_token=True, timeout_s=ANSWER_S)
    if answer is None or answer.status != 200:
        return "was stopped"
    job = answer.body
    if job["state"] in ("completed", "failed", "cancelled", "timeout"):
        return job["state"]
    last = job["attempts"][-1] if job["attempts"] else {}
    if last.get("ended_s") is None:
        return "has not ended yet"
    return outcome(last["cause"], set(last["codes"].values()), last["checkpoint_step"])


def _grace_s(instance: Instance) -> float:
    try:
        return load(instance.config).grace_s
    except UserError:
        return Config.model_fields["grace_s"].default


def _longest_grace_s(instance: Instance) -> float:
    """Jobs may have asked for more time than the cluster gives by itself."""
    graces = [_grace_s(instance)]
    for attempt in instance.live_attempts():
        with suppress(OSError, ValueError, KeyError, TypeError):
            graces.append(float(json.loads((attempt.dir / "launch.json").read_bytes())["grace_s"]))
    return max(graces)


def end_attempts(instance: Instance, mode: Mode, tell: Tell) -> list[Ending]:
    """End what still runs by its supervisors alone. They store the results; the next controller reads them."""
    attempts = list(instance.live_attempts())
    if not attempts:
        return []
    grace_s = _longest_grace_s(instance)
    command = "kill" if mode == "kill" else f"notice {grace_s:g}"
    for attempt in attempts:
        attempt.command(command)
    patience_s = 10.0 if mode == "kill" else grace_s + 10.0
    deadline_s = time.monotonic() + patience_s
    for attempt in attempts:
        while attempt.lives and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if attempt.lives:
            tell(f"job {attempt.job_id}: its supervisor does not answer and is killed")
            stop_process(attempt.pid, attempt.dir / "lock", patience_s=0.0)
    return [Ending(attempt.job_id, _outcome(attempt)) for attempt in _one_per_job(attempts)]


def _one_per_job(attempts: Sequence[Attempt]) -> list[Attempt]:
    return list({attempt.job_id: attempt for attempt in attempts}.values())


def _outcome(attempt: Attempt) -> str:
    state = attempt.state()
    if state.get("state") != "exited":
        return f"lost its supervisor; {LATER}"
    return outcome(state.get("cause", ""), set(state.get("codes", {}).values()), None)


def outcome(cause: str, codes: set[int], step: int | None) -> str:
    """How an incarnation ended when the cluster went down, in a few words."""
    if cause == "exit" and codes == {0}:
        return "completed"
    if PREEMPTED_EXIT_CODE in codes:
        saved = "saved its state" if step is None else f"saved its state at step {step}"
        return f"{saved}; goes on at the next `thebes up`"
    if step is not None:
        return f"stopped; goes on from step {step} at the next `thebes up`"
    return f"{'killed' if cause == 'killed' else 'ended'} without saving; {LATER}"


# how it is


def agent_names(instance: Instance) -> list[str]:
    """Nodes with an agent, now or once: asked of the folder, so that a damaged configuration does not matter."""
    return sorted(path.name.removeprefix("agent-").removesuffix(".lock") for path in instance.run.glob("agent-*.lock"))


def living_parts(instance: Instance) -> dict[str, int]:
    """Keeper, controller and agents that live, with their pids."""
    names = ("keeper", "standby", "controller", *(f"agent-{node}" for node in agent_names(instance)))
    found = {name: instance.holder_pid(name) for name in names}
    return {name: pid for name, pid in found.items() if pid is not None}


def describe(instance: Instance) -> dict[str, Any]:
    """The state of an instance, for `thebes status`; what cannot be known is None."""
    config = load(instance.config)
    parts = living_parts(instance)
    endpoint = instance.read_endpoint() or {}
    healthy, told, role, leader, silent = False, None, None, None, None
    controllers: Any = None
    if "controller" in parts:
        health = ask(instance, "GET", "/v1/healthz", timeout_s=ANSWER_S)
        healthy = health is not None and health.status == 200
        if health is not None and healthy:
            role, leader = health.body.get("role"), health.body.get("leader")
            controllers = health.body.get("controllers")
        if healthy and role != "standby":
            told = ask(instance, "GET", "/v1/status", with_token=True, timeout_s=ANSWER_S)
            silent = _not_alive(instance, config)
    facts = told.body if told is not None and told.status == 200 else {}
    gpus = facts.get("gpus") if isinstance(facts.get("gpus"), dict) else {}
    return {
        "dir": str(instance.dir),
        "url": endpoint.get("url") if "controller" in parts else None,
        "policy": config.policy,
        "placement": config.placement,
        "keeper": {"pid": parts.get("keeper")},
        "controller": {"pid": parts.get("controller"), "healthy": healthy, "role": role},
        "store": shown_store(config.store) or None,
        "leader": leader,
        "controllers": controllers or facts.get("controllers"),
        "engine": config.engine,
        "agents": [{"node": node, "pid": parts.get(f"agent-{node}")} for node in config.node_names]
        if config.engine == "local"
        else [],  # Slurm or Ray start what is needed
        "nodes": {"total": len(config.nodes), "silent": silent},
        "gpus": {
            "total": gpus.get("total", config.gpus),
            "busy": gpus.get("busy"),
            "virtual": all(node.virtual for node in config.nodes),
        },
        "jobs": facts.get("jobs"),
        "trouble": facts.get("trouble"),
    }


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict[str, Any] = field(default_factory=dict)


def ask(
    instance: Instance,
    method: str,
    path: str,
    *,
    body: Any = None,
    with_token: bool = False,
    timeout_s: float,
) -> Answer | None:
    """One request to the controller of this folder, without patience; None if nobody answers."""
    endpoint = instance.read_endpoint()
    if endpoint is None:
        return None
    headers = {"Content-Type": "application/json"}
    if with_token:
        try:
            headers["Authorization"] = f"Bearer {instance.read_token()}"
        except UserError:
            return None
    try:
        connection = _connection(endpoint, timeout_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            content = json.loads(response.read() or b"{}")
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return Answer(response.status, content if isinstance(content, dict) else {})


def _connection(endpoint: dict[str, Any], timeout_s: float) -> http.client.HTTPConnection:
    url = urlsplit(endpoint["url"])
    if url.scheme != "https":
        return http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout_s)
    # The certificate is the one that lies in our own configuration: it, and not the name in it, says whom we talk to.
    context = ssl.create_default_context(cafile=endpoint.get("tls_cert"))
    context.check_hostname = False
    return http.client.HTTPSConnection(url.hostname or "", url.port, timeout=timeout_s, context=context)
