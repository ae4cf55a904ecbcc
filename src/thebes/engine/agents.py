"""An engine over one agent per node: passes the controller's wishes on to the agents. How they are reached is the
business of the engines that build on it (`local`: Unix sockets on this machine; `ray`: they call home). Nothing is
decided here.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from thebes.engine.link import CALL_S, NodeLink
from thebes.protocol import wire
from thebes.protocol.contract import (
    GANG_NOT_STARTED,
    PARKED_LEASE_S,
    Launch,
    Listener,
    Mechanism,
    NodeChange,
    NodeFacts,
    Refused,
    Report,
)
from thebes.protocol.messages import Homes, KillAttempt, Park, ReadLog, Start

LOG = logging.getLogger(__name__)
START_S = 40.0  # an older incarnation may have to be ended first
SUSPEND_S = 600.0  # moving GPU memory into host memory takes half a second per GiB


class AgentEngine:
    """`Engine` over the links to the agents, one per node. `open` is left to the engines that build on it."""

    def __init__(self) -> None:
        self._links: dict[str, NodeLink] = {}
        self._where: dict[tuple[str, int], list[str]] = {}  # nodes of an incarnation, as far as heard of
        self._listener: Listener | None = None

    async def close(self) -> None:
        await asyncio.gather(*(link.end() for link in self._links.values()))
        self._links.clear()

    async def leave(self) -> None:
        """Agents that keep no lease (those of this machine) have nothing to be told."""
        park = Park(for_s=PARKED_LEASE_S)
        await asyncio.gather(*(link.call("park", park) for link in self._links.values()), return_exceptions=True)

    async def tell_homes(self, homes: Sequence[str]) -> None:
        """Where agents find the controllers of this cluster from now on; those that cannot be told hear it later."""
        told = Homes(homes=list(homes))
        for link in self._links.values():
            link.greeting["homes"] = told["homes"]
        await asyncio.gather(*(link.call("homes", told) for link in self._links.values()), return_exceptions=True)

    def master_address(self, link: NodeLink) -> str:
        """Where the other ranks of a gang find its first node."""
        return link.facts.address or "127.0.0.1"

    def _heard(self, change: Report | NodeChange) -> None:
        if isinstance(change, Report):
            nodes = self._where.setdefault((change.job_id, change.incarnation), [])
            if change.node not in nodes:
                nodes.append(change.node)
        if self._listener is not None:
            try:
                self._listener(change)
            except Exception:  # its own trouble: it must not cost us the connection, nor what follows
                LOG.exception("news of a node could not be handled")

    async def nodes(self) -> list[NodeFacts]:
        return [link.facts for link in self._links.values()]

    async def reports(self) -> list[Report]:
        """Of the nodes that count as up: for the others there is a NodeChange.

        They tell everything when they are met and every change after that, so they are not asked: an agent that is
        slow to answer must not look like one that knows nothing.
        """
        return [report for link in self._links.values() if link.announced_alive for report in link.reports.values()]

    async def launch(self, launch: Launch) -> None:
        """All parts or none. If one cannot start, the others end with "launch-failed" as it does."""
        links = [self._link(part.node) for part in launch.parts]
        start = Start(launch=wire.launch_to_dict(launch), part=0)
        if len(links) > 1:
            start["master_addr"] = self.master_address(links[0])
            start["master_port"] = await links[0].call("port", {})
        key = (launch.job_id, launch.incarnation)
        self._where[key] = [link.node for link in links]
        answers = await asyncio.gather(
            *(link.call("start", {**start, "part": index}, START_S) for index, link in enumerate(links)),
            return_exceptions=True,
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        told = [
            link.report_from(answer)
            for link, answer in zip(links, answers, strict=True)
            if not isinstance(answer, BaseException)
        ]
        for report in told:
            link = self._links[report.node]
            if link.reports.setdefault(key, report) is report and report.state == "exited":
                link.listener(report)  # one that has ended long ago: nobody else tells of it
        failed = [report for report in told if report.cause == "launch-failed"]
        if len(links) > 1 and (errors or failed):
            why = str(errors[0]) if errors else f"{failed[0].node}: {failed[0].detail}"
            await self._kill_parts(launch, because=f"{GANG_NOT_STARTED}: {why}")
        if errors:
            raise errors[0]

    async def _kill_parts(self, launch: Launch, because: str) -> None:
        arguments = KillAttempt(job_id=launch.job_id, incarnation=launch.incarnation, because=because)
        await asyncio.gather(
            *(self._link(part.node).call("kill", arguments) for part in launch.parts), return_exceptions=True
        )

    async def notice(self, job_id: str, incarnation: int, grace_s: float) -> None:
        await self._each("notice", job_id, incarnation, grace_s=grace_s)

    async def terminate(self, job_id: str, incarnation: int, grace_s: float) -> None:
        await self._each("terminate", job_id, incarnation, grace_s=grace_s)

    async def kill(self, job_id: str, incarnation: int) -> None:
        await self._each("kill", job_id, incarnation)

    async def suspend(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        """All parts or none: if one refuses, the others are resumed."""
        nodes = self._nodes_of(job_id, incarnation)
        if mechanism == "cuda" and len(nodes) > 1:
            raise Refused("the driver suspends single-process jobs only; this one runs on several nodes")
        try:
            await self._each("suspend", job_id, incarnation, SUSPEND_S, mechanism=mechanism)
        except Refused:
            if len(nodes) > 1:
                with suppress(Refused, OSError, TimeoutError):
                    await self._each("resume", job_id, incarnation, SUSPEND_S, mechanism=mechanism)
            raise

    async def resume(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        await self._each("resume", job_id, incarnation, SUSPEND_S, mechanism=mechanism)

    async def forget(self, job_id: str, incarnation: int) -> None:
        nodes = self._nodes_of(job_id, incarnation)
        await self._each("forget", job_id, incarnation)
        for node in nodes:
            self._link(node).reports.pop((job_id, incarnation), None)
        self._where.pop((job_id, incarnation), None)

    async def read_log(self, job_id: str, incarnation: int, rank: int, offset: int, limit: int) -> tuple[bytes, int]:
        """FileNotFoundError when no node has a log of this rank."""
        wanted = ReadLog(job_id=job_id, incarnation=incarnation, rank=rank, offset=offset, limit=limit)
        first = self._where.get((job_id, incarnation), [])
        nodes = [*first, *(name for name in self._links if name not in first)]
        trouble: OSError | TimeoutError | None = None
        for node in nodes:
            try:
                answer = await self._link(node).call("log", wanted)
            except FileNotFoundError:
                continue
            except (OSError, TimeoutError) as error:
                trouble = error
                continue
            return base64.b64decode(answer["data"]), answer["offset"]
        raise trouble or FileNotFoundError(f"there is no log of rank {rank} of job {job_id}, incarnation {incarnation}")

    def _link(self, node: str) -> NodeLink:
        try:
            return self._links[node]
        except KeyError:
            raise Refused(f"there is no node '{node}'") from None

    def _nodes_of(self, job_id: str, incarnation: int) -> list[str]:
        """Where it is; all nodes if nobody has told yet."""
        return self._where.get((job_id, incarnation)) or list(self._links)

    async def _each(self, op: str, job_id: str, incarnation: int, timeout_s: float = CALL_S, **more: Any) -> None:
        """To every part; the first error is raised after all have answered."""
        arguments = {"job_id": job_id, "incarnation": incarnation, **more}
        answers = await asyncio.gather(
            *(self._link(node).call(op, arguments, timeout_s) for node in self._nodes_of(job_id, incarnation)),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
