"""The requests that travel from an engine to an agent or step, and the answer to `hello`: which fields each has.

Types alone: on the wire they are plain JSON objects (`wire.py`), and agents of earlier versions read the same ones.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from thebes.protocol.contract import Mechanism


class Ping(TypedDict):
    heard_s: float | None  # until when the controller has heard of the peer, by the peer's own clock


class Hello(TypedDict, total=False):
    homes: list[str]
    lease_s: float


class HelloAnswer(TypedDict):
    facts: dict[str, Any]  # NodeFacts
    reports: list[dict[str, Any]]  # Report
    boot: str
    boot_s: float


class Homes(TypedDict):
    homes: list[str]


class Park(TypedDict):
    for_s: float


class AboutAttempt(TypedDict):
    job_id: str
    incarnation: int


class WithGrace(AboutAttempt):
    """`notice` and `terminate`."""

    grace_s: float


class KillAttempt(AboutAttempt):
    because: NotRequired[str]  # why the gang could not start


class ByMechanism(AboutAttempt):
    """`suspend` and `resume`."""

    mechanism: Mechanism


class Start(TypedDict):
    """To an agent. A step has its launch in a file, and is told the master alone."""

    launch: dict[str, Any]  # Launch
    part: int
    master_addr: NotRequired[str]
    master_port: NotRequired[int]


class StartStep(TypedDict):
    master_addr: str
    master_port: int


class ReadLog(AboutAttempt):
    rank: int
    offset: int
    limit: int
