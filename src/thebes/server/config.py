"""What `thebes up` decided about an instance: `config.json` in its folder, read by every later start.

An error names the file and the key. A file that cannot be understood is never overwritten.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from thebes.model.errors import UserError
from thebes.node.instance import explain, write_json
from thebes.server.limits import Limits

if TYPE_CHECKING:
    from thebes.placement import Placement
    from thebes.policy import Policy

VERSION = 1


class NodeConfig(BaseModel):
    """One node: so many GPUs, found by NVML or virtual."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    gpus: int = Field(ge=1, le=1024)
    virtual: bool = False
    gpu_type: str = Field("", max_length=200)  # as NVML names it; empty: unknown, suits every job
    rack: str = Field("", max_length=200)  # or leaf switch


class Config(BaseModel):
    """All that is configured about an instance."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = VERSION
    policy: str = Field("tiresias-l", min_length=1)
    policy_settings: list[Annotated[str, Field(pattern=r"^[^=]+=")]] = Field(default_factory=list)
    placement: str = Field("consolidate", min_length=1)
    nodes: list[NodeConfig] = Field(min_length=1, max_length=1024)
    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(0, ge=0, le=65535)
    tls_cert: str | None = None
    tls_key: str | None = None
    grace_s: float = Field(30.0, ge=0, le=86_400, allow_inf_nan=False)
    packing: bool = False
    log_limit_mib: int = Field(64, ge=1, le=1 << 20)
    limits: Limits = Limits()  # what one token may ask of the API
    store: str = ""  # postgresql://…; empty: store.db in the instance's folder
    engine: Literal["local", "slurm", "ray"] = "local"
    partition: str = ""  # Slurm's; empty: its default
    reservation: str = ""
    account: str = ""  # on which Slurm books what our jobs use; empty: the user's default
    qos: str = ""
    time_limit: str = ""  # of our Slurm jobs, as Slurm writes it; empty: the partition's
    ray_address: str = ""  # HOST:PORT of the head; empty: the cluster that Ray finds by itself
    home_host: str = ""  # where agents on other machines reach us; empty: this machine's name
    home_port: int = Field(0, ge=0, le=65535)  # 0: chosen at the first start, and kept
    lease_s: float = Field(60.0, ge=2, le=86_400, allow_inf_nan=False)  # how long a node may go on without a word
    shared_dir: str = ""  # a folder that all nodes see; empty: the instance's own

    @model_validator(mode="after")
    def _node_names_differ(self) -> Config:
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            raise ValueError("two nodes have the same name")
        racks = [node.rack for node in self.nodes]
        if len(dict.fromkeys(racks)) != sum(1 for at, rack in enumerate(racks) if at == 0 or rack != racks[at - 1]):
            raise ValueError("nodes of one rack must stand together")
        return self

    @property
    def node_names(self) -> list[str]:
        return [node.name for node in self.nodes]

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)


# What each controller of a cluster has for itself; all the rest they have in common.
OWN = frozenset({"host", "port", "tls_cert", "tls_key", "store", "home_host", "home_port"})


def of_cluster(config: Config) -> dict[str, Any]:
    """What all controllers of a cluster have in common, to be kept in their store."""
    return config.model_dump(mode="json", exclude=set(OWN))


def from_cluster(kept: dict[str, Any], own: Config | None, store: str = "") -> Config:
    """A controller's configuration, from what the cluster's store has and what is its own."""
    mine = {"store": store} if own is None else own.model_dump(mode="json", include=set(OWN))
    try:
        return Config.model_validate({**kept, **mine})
    except ValidationError as error:
        raise UserError(
            f"the configuration in the store cannot be understood: {'; '.join(_faults(error))}",
            hint="was it written by a newer Thebes?",
        ) from None


def load(path: Path) -> Config:
    """The configuration in a file; a UserError tells which key is wrong, or that there is no instance."""
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"there is no instance in {path.parent}", hint="start one with `thebes up`, or name another with --dir"
        ) from None
    except UnicodeDecodeError:
        raise _corrupted(path, "it is not text") from None
    except OSError as error:
        raise explain(error, path, "cannot be read") from error
    try:
        found = json.loads(text)
    except ValueError as error:
        raise _corrupted(path, f"it is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise _corrupted(path, "it is not a JSON object")
    version = found.get("version", VERSION)
    if isinstance(version, int) and version > VERSION:
        raise UserError(
            f"{path} was written by a newer Thebes (version {version}, this one knows {VERSION})",
            hint="use that version of Thebes, or another folder with --dir",
        )
    try:
        return Config.model_validate(found)
    except ValidationError as error:
        raise _corrupted(path, "; ".join(_faults(error))) from None


def save(path: Path, config: Config) -> None:
    write_json(path, config.model_dump(mode="json"))


def make(**values: Any) -> Config:
    """A configuration from options; a UserError names the option that is wrong."""
    try:
        return Config(**values)
    except ValidationError as error:
        raise UserError("; ".join(_faults(error)), hint="`thebes up --help` tells what each option takes") from None


def _faults(error: ValidationError) -> list[str]:
    faults: list[str] = []
    for fault in error.errors(include_url=False):
        key = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ").lower()
        value = "" if fault["type"] in ("missing", "value_error") else f" (found {fault['input']!r})"
        faults.append(f"{key}: {message}{value}" if key else message)
    return faults


def _corrupted(path: Path, fault: str) -> UserError:
    return UserError(
        f"{path} cannot be understood: {fault}",
        hint="correct it; or move it away and run `thebes up` with the options you want: jobs are kept in store.db",
    )


def live_policy(config: Config) -> tuple[Policy, Placement]:
    """The policy and the placement of a live cluster; those that need to know durations are refused."""
    from thebes.model.parameters import configure
    from thebes.model.view import DURATIONS, PLANS, PROFILES
    from thebes.placement import find as find_placement
    from thebes.policy import find as find_policy

    kind = find_policy(config.policy)
    label = kind.name or config.policy
    own: dict[str, str] = {}
    of_placement: dict[str, str] = {}
    for prefix, key, value in map(_parse_setting, config.policy_settings):
        if prefix in ("", label):
            own[key] = value
        elif prefix == "placement":
            of_placement[key] = value
        else:
            raise UserError(f"--set {prefix}.{key}: there is no '{prefix}' here", hint="write KEY or placement.KEY")
    policy, where = configure(kind, own, what=f"policy {label}"), find_placement(config.placement)
    if DURATIONS in policy.needs:
        raise UserError(
            f"policy {label} needs to know how long each job will run, which nobody knows on a live cluster",
            hint="`thebes policies` tells what each needs; tiresias-l, las and fifo need nothing",
        )
    if PROFILES in policy.needs:
        raise UserError(
            f"policy {label} needs profiles of the models, which a live cluster does not have yet",
            hint="`thebes policies` tells what each needs; tiresias-l, las and fifo need nothing",
        )
    if PLANS in policy.needs:
        raise UserError(
            f"policy {label} changes the execution plans of running jobs, which the engines do not carry out yet",
            hint="try it in simulation: `thebes simulate … --policy " + label + " --perf plans`",
        )
    if policy.shares:
        raise UserError(
            f"policy {label} shares GPUs by itself, which the engines do not carry out yet",
            hint="tiresias-l with `thebes up --packing` packs jobs on top of the policy",
        )
    return policy, configure(where, of_placement, what=f"placement {where.name}")


def _parse_setting(text: str) -> tuple[str, str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError(f"--set {text}: not KEY=VALUE", hint="write for instance --set promote_knob=8")
    prefix, _, key = name.rpartition(".")
    return prefix, key, value


def check_listening(config: Config) -> None:
    """Refuse to speak in the clear to the network, and certificates that cannot be used."""
    if (config.tls_cert is None) != (config.tls_key is None):
        raise UserError("--tls-cert and --tls-key go together", hint="give both, as files in PEM format")
    addresses = resolve(config.host)
    if config.tls_cert is None:
        public = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
        if public:
            raise UserError(
                f"{config.host} can be reached from the network: tokens would travel in the clear",
                hint="give --tls-cert and --tls-key, or leave --host out and use an SSH tunnel",
            )
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key, password="")
    except (ssl.SSLError, OSError) as error:
        files = f"{config.tls_cert} and {config.tls_key}"
        reason = os.strerror(error.errno) if error.errno and not isinstance(error, ssl.SSLError) else str(error)
        raise UserError(
            f"TLS: {files} cannot be used: {reason}", hint="they must be a certificate and its key without a password"
        ) from None


def resolve(host: str) -> Sequence[str]:
    """The addresses that listening on `host` would open."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UserError(f"--host {host}: no such address on this machine", hint="for instance 127.0.0.1") from None
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
