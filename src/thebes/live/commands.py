"""The commands that the core gives to the engine, a class for each. They are carried out after the commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thebes.protocol.contract import Launch, Mechanism


@dataclass(frozen=True)
class _Command:
    """Every command is about one incarnation of one job."""

    verb: ClassVar[str]  # for logs
    job_id: str
    incarnation: int


@dataclass(frozen=True)
class LaunchGang(_Command):
    """Start all parts of an incarnation."""

    verb: ClassVar[str] = "launch"
    launch: Launch
    snapshot: str | None = None  # the work directory to unpack before that


@dataclass(frozen=True)
class Notice(_Command):
    """Ask it to save its state and leave within the grace period."""

    verb: ClassVar[str] = "notice"
    grace_s: float


@dataclass(frozen=True)
class Terminate(_Command):
    """Send SIGTERM, and SIGKILL at the end of the grace period."""

    verb: ClassVar[str] = "terminate"
    grace_s: float


@dataclass(frozen=True)
class Kill(_Command):
    verb: ClassVar[str] = "kill"


@dataclass(frozen=True)
class Suspend(_Command):
    """Stop it in place, by a mechanism other than the handshake."""

    verb: ClassVar[str] = "suspend"
    mechanism: Mechanism


@dataclass(frozen=True)
class Resume(_Command):
    """Let a suspended incarnation go on."""

    verb: ClassVar[str] = "resume"
    mechanism: Mechanism


@dataclass(frozen=True)
class Forget(_Command):
    """Its end is in the store, so that its node need not keep the result any more."""

    verb: ClassVar[str] = "forget"


Command = LaunchGang | Notice | Terminate | Kill | Suspend | Resume | Forget
