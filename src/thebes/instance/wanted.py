"""The configuration that `thebes up` is asked for: the saved one with this time's options, and what differs."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thebes.live.config import (
    Config,
    NodeConfig,
    make,
)
from thebes.model.errors import UserError

DEFAULT_VIRTUAL_GPUS = 8


@dataclass(frozen=True)
class UpOptions:
    """The options of `thebes up`; None means that an option was not given."""

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


def wanted_config(saved: Config | None, options: UpOptions, *, ask_site: bool = True) -> Config:
    """The saved configuration with the options given this time; without a saved one, the defaults."""
    values: dict[str, Any] = saved.model_dump() if saved else {}
    if options.policy is not None:
        values["policy"] = _absolute_policy(options.policy)
        values["policy_settings"] = []  # the saved ones belong to another policy
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


def _check_engine_options(engine: str, options: UpOptions) -> None:
    """Refuse an option that has no meaning for this engine, because it is a mistake."""
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


def _called_at(values: dict[str, Any], options: UpOptions) -> dict[str, Any]:
    """The address that nodes call: as given, as before, or on a free port that is kept from now on."""
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
        from thebes.engine.door import free_port

        port = free_port()
    return {"home_host": host, "home_port": port}


def _site_nodes(saved: Config | None, values: dict[str, Any]) -> list[NodeConfig]:
    """The nodes that the site has now; if it cannot be asked, those of the last time, where jobs may still run."""
    from thebes.live.engines import discover

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
    """The policy with an absolute path, because the controller runs in another folder than `up`."""
    place, colon, kind = name.rpartition(":")
    return f"{_absolute(place)}:{kind}" if colon and place.endswith(".py") else name


def _wanted_nodes(saved: Config | None, options: UpOptions) -> list[NodeConfig]:
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
        )  # a GPU that has gone keeps its number, and its jobs their GPUs; the agent says which are missing
    types = {gpu.name for gpu in found}
    return [NodeConfig(name="n0", gpus=len(found), gpu_type=types.pop() if len(types) == 1 else "")]


def differences(running: Config, wanted: Config) -> list[str]:
    """In what two configurations differ, in words for people."""
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


def shown_store(url: str) -> str:
    """The address of a store for people, without a password."""
    if not url:
        return ""
    from thebes.store.postgres_address import without_password

    return without_password(url)
