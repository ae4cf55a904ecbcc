"""Joining a Ray cluster, and saying clearly why that did not work.

Only the driver process of the engine and sweeps load Ray: its library may end the process that it is loaded into (it
does when a head that keeps its state in memory is restarted).
"""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
from importlib import import_module
from typing import Any

from thebes.model.errors import UserError

NAMESPACE = "thebes"
ANSWER_S = 10.0
INSTALL_HINT = "Install it with: pip install 'thebes[ray]'"
# gRPC is HTTP/2: both sides begin with a frame of settings, whose type is the fourth of nine bytes.
_GRPC_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_GRPC_SETTINGS = bytes((4,))
_START_HINT = "`ray status` on a node of the cluster tells its address; `ray start --head` starts one"


def load_ray(needed_for: str) -> Any:
    """The module, or one clear error."""
    try:
        return import_module("ray")
    except ImportError as error:
        if error.name and error.name.partition(".")[0] != "ray":
            raise UserError(
                f"Ray does not load: {error}", hint="install it again: pip install 'thebes[ray]'"
            ) from error
        raise UserError(f"{needed_for} needs Ray, which is not installed.", hint=INSTALL_HINT) from error


def join(ray: Any, address: str, *, timeout_s: float = ANSWER_S) -> None:
    """Become a driver of the cluster; UserError when nobody answers there or versions do not agree."""
    place = where(address)
    knock(place, timeout_s)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=place,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            configure_logging=False,
        )
    except Exception as error:
        raise explain(place, error) from error


def where(address: str) -> str:
    """`auto` is the cluster that this machine is a node of; otherwise HOST:PORT of the head."""
    if address not in ("", "auto"):
        if not re.fullmatch(r"\[?[\w.:-]+\]?:\d{1,5}", address):
            raise UserError(
                f"'{address}' is not the address of a Ray cluster",
                hint="write HOST:PORT of its head (6379 unless chosen otherwise), or auto",
            )
        return address
    services = import_module("ray._private.services")
    try:
        found = services.canonicalize_bootstrap_address("auto")
    except (ConnectionError, OSError):
        found = None
    if not found:
        raise UserError("this machine is not a node of a running Ray cluster", hint=f"give an address; {_START_HINT}")
    return found


def knock(place: str, timeout_s: float) -> None:
    """Whether a process listens there that speaks as a head does, before Ray tries for a minute."""
    host, _, port = place.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as line:
            try:
                line.sendall(_GRPC_GREETING)
                answer = line.recv(9, socket.MSG_WAITALL)
            except TimeoutError:
                answer = b""  # it may be frozen for a moment; or it waits for other words than ours
            except OSError:
                answer = b"hung up"
    except (OSError, OverflowError) as error:
        why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        raise UserError(f"no Ray cluster answers at {place}: {why}", hint=_START_HINT) from None
    if answer and answer[3:4] != _GRPC_SETTINGS:
        raise UserError(f"what answers at {place} is not the head of a Ray cluster", hint=_START_HINT)


def explain(place: str, error: Exception) -> UserError:
    """Ray's words about a failed join in one sentence."""
    text = str(error)
    if "ersion mismatch" in text:
        said = dict(re.findall(r"(Ray|Python): ([\w.]+)", text.partition("This process")[0]))
        ours = dict(re.findall(r"(Ray|Python): ([\w.]+)", text.partition("This process")[2]))
        here = ours.get("Python", platform.python_version())
        return UserError(
            f"the Ray cluster at {place} runs Ray {said.get('Ray', '?')} on Python {said.get('Python', '?')}, "
            f"here are Ray {ours.get('Ray', '?')} and Python {here}",
            hint="both must be the same on all machines: install Thebes in an environment with the cluster's versions",
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if "Can't find a `node_ip_address" in text or "raylet" in text.lower():
        return UserError(
            f"this machine is not a node of the Ray cluster at {place}",
            hint="run this on a machine of the cluster, best on its head; or make it a node: ray start --address=…",
        )
    return UserError(f"the Ray cluster at {place} cannot be joined: {first}", hint=_START_HINT)
