"""The configuration of an instance that `thebes up` has chosen: `config.json` in its folder, read at every later start.

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

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from thebes.live.limits import Limits
from thebes.model.errors import UserError
from thebes.protocol.instance import explain, write_json

if TYPE_CHECKING:
    from thebes.placement import Placement
    from thebes.policy import Policy

VERSION = 1
# What each engine can carry out of a Decision beyond whole GPUs (see thebes.policy.admission). What was never tried
# with an engine is left out; besides, Slurm gives each GPU to only one of its jobs at a time.
CARRIED: dict[str, frozenset[str]] = {
    "local": frozenset({"counts", "shares"}),
    "slurm": frozenset(),
    "ray": frozenset(),
}


class NodeConfig(BaseModel):
    """One node: so many GPUs, found by NVML or virtual."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    gpus: int = Field(ge=1, le=1024)
    virtual: bool = False
    gpu_type: str = Field(default="", max_length=200)  # as NVML names it; empty if unknown, which suits every job
    rack: str = Field(default="", max_length=200)  # the rack or leaf switch


def _with_a_value(setting: str) -> str:
    name, equals, _ = setting.partition("=")
    if not equals or not name:
        raise ValueError(f"'{setting}' is not KEY=VALUE, as in promote_knob=8")
    return setting


class Config(BaseModel):
    """All that is configured about an instance."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = VERSION
    policy: str = Field("tiresias-l", min_length=1)
    policy_settings: list[Annotated[str, AfterValidator(_with_a_value)]] = Field(default_factory=list)
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
    store: str = ""  # postgresql://…; empty for store.db in the instance's folder
    engine: Literal["local", "slurm", "ray"] = "local"
    partition: str = ""  # of Slurm; empty for its default
    reservation: str = ""
    account: str = ""  # the account in Slurm for what our jobs use; empty for the user's default
    qos: str = ""
    time_limit: str = ""  # of our Slurm jobs, as Slurm writes it; empty for the partition's
    ray_address: str = ""  # HOST:PORT of the head; empty for the cluster that Ray finds by itself
    home_host: str = ""  # the address at which agents on other machines reach us; empty for this machine's name
    home_port: int = Field(0, ge=0, le=65535)  # 0 if it is to be chosen at the first start; it is then kept
    lease_s: float = Field(60.0, ge=2, le=86_400, allow_inf_nan=False)  # how long a node may go on without a message
    shared_dir: str = ""  # a folder that all nodes see; empty for the instance's own

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


# What each controller of a cluster has for itself; they share all the rest.
OWN = frozenset({"host", "port", "tls_cert", "tls_key", "store", "home_host", "home_port"})


def of_cluster(config: Config) -> dict[str, Any]:
    """What all controllers of a cluster have in common, which their store keeps."""
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
        message = fault["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        value = "" if fault["type"] in ("missing", "value_error") else f" (found {fault['input']!r})"
        faults.append(f"{key}: {message}{value}" if key else message)
    return faults


def _corrupted(path: Path, fault: str) -> UserError:
    return UserError(
        f"{path} cannot be understood: {fault}",
        hint="correct it; or move it away and run `thebes up` with the options you want: jobs are kept in store.db",
    )


def admitted_policy(config: Config) -> tuple[Policy, Placement]:
    """The policy and the placement of a cluster that somebody starts with these settings."""
    from thebes.policy.admission import obstacle_of_placement

    policy, placement = live_policy(config)
    refused = obstacle_of_placement(placement)
    if refused is not None:
        raise refused
    return policy, placement


def live_policy(config: Config) -> tuple[Policy, Placement]:
    """The policy and the placement of a live cluster; a policy that cannot run live is refused.

    A placement that cannot learn there is not: version 0.1 started such clusters, and they go on as they were.
    """
    from thebes.model.parameters import configure
    from thebes.placement import find as find_placement
    from thebes.policy import find as find_policy
    from thebes.policy.admission import obstacle

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
    placement = configure(where, of_placement, what=f"placement {where.name}")
    if "placement" in policy.ignores():  # as in a simulation; `unused_placement` says so
        placement = policy.default_placement()
    refused = obstacle(policy, CARRIED[config.engine], engine=f"the {config.engine}")
    if refused is not None:
        raise refused
    if policy.shares and config.packing:
        raise UserError(
            f"policy {label} shares GPUs by itself: --packing would put further jobs beside those",
            hint="leave --packing out, or choose a policy that gives whole GPUs",
        )
    return policy, placement


def unused_placement(config: Config) -> str:
    """Why the placement that was chosen has no effect; empty if it has, or if the policy would choose it itself."""
    policy, _ = live_policy(config)
    why = policy.ignores().get("placement", "")
    own = policy.default_placement().name
    return (
        f"policy {policy.label} does not use placement {config.placement}: {why}"
        if why and config.placement != own
        else ""
    )


def _parse_setting(text: str) -> tuple[str, str, str]:
    name, _, value = text.partition("=")
    prefix, _, key = name.rpartition(".")
    return prefix, key, value


def check_listening(config: Config) -> None:
    """Refuse to speak in the clear to the network, and refuse certificates that cannot be used."""
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
