"""The engine of one machine: passes the controller's wishes to the node agents over their Unix sockets.

One connection per node is kept up for ever. An agent that cannot be reached for a second counts as down; when it is
back, the listener hears so and then every report anew. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from thebes.engine import wire
from thebes.engine.contract import (
    GANG_NOT_STARTED,
    Launch,
    Listener,
    Mechanism,
    NodeChange,
    NodeFacts,
    Refused,
    Report,
)

LOG = logging.getLogger(__name__)
CALL_S = 10.0
START_S = 40.0  # an older incarnation may have to be ended first
SUSPEND_S = 600.0  # moving GPU memory into host memory takes half a second per GiB
DOWN_AFTER_S = 1.0
RETRY_FIRST_S, RETRY_LAST_S = 0.02, 0.5
PING_EVERY_S = 5.0
PING_S = 5.0  # an agent that takes longer hangs


class Unreachable(OSError):  # noqa: N818 - reads as what it says
    """The agent of a node cannot be reached."""


class Link:
    """The connection to one agent."""

    def __init__(self, node: str, path: Path, listener: Listener) -> None:
        self.node = node
        self.path = path
        self.listener = listener
        self.facts = NodeFacts(node, (), alive=False, detail=f"the agent of {node} has not been reached yet")
        self.told_alive: bool | None = None
        self.lost_s = 0.0  # when it was last there, by the loop's clock
        self.looked = asyncio.Event()  # reached, or known to be down
        self.ready = asyncio.Event()  # connected, and everything missed has been told
        self.early: list[Report | NodeChange] = []
        self.writer: asyncio.StreamWriter | None = None
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.numbers = count(1)
        self.task: asyncio.Task[None] | None = None

    async def keep_up(self) -> None:
        """Connect, listen, and again, for ever."""
        loop = asyncio.get_running_loop()
        self.lost_s = loop.time()
        delay_s = RETRY_FIRST_S
        while True:
            # A connection that is there but says nothing is no better than none.
            down = loop.call_at(max(loop.time(), self.lost_s + DOWN_AFTER_S), self._down)
            try:
                async with asyncio.timeout(DOWN_AFTER_S):
                    reader, self.writer = await wire.connect(self.path)
                await self._converse(reader, down)
                delay_s = RETRY_FIRST_S
            except (OSError, TimeoutError, ValueError):
                pass
            finally:
                down.cancel()
                self._hang_up()
            if loop.time() - self.lost_s >= DOWN_AFTER_S:
                self._down()
            await asyncio.sleep(delay_s)
            delay_s = min(RETRY_LAST_S, delay_s * 2)

    async def _converse(self, reader: asyncio.StreamReader, down: asyncio.TimerHandle) -> None:
        listen = asyncio.ensure_future(self._listen(reader))
        try:
            answer = await self._ask("hello", {}, PING_S)
            down.cancel()
            self._up(wire.facts_from_dict(answer["facts"]), [wire.report_from_dict(one) for one in answer["reports"]])
            while not listen.done():
                await asyncio.wait([listen], timeout=PING_EVERY_S)
                if not listen.done():
                    await self._ask("ping", {}, PING_S)
            listen.result()
        finally:
            listen.cancel()
            await asyncio.gather(listen, return_exceptions=True)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            if message.get("push") == "report":
                self._pass_on(wire.report_from_dict(message["report"]))
            elif message.get("push") == "facts":
                self.facts = wire.facts_from_dict(message["facts"])
                self._pass_on(NodeChange(self.facts))
            else:
                future = self.waiting.pop(message.get("id"), None)
                if future is not None and not future.done():
                    _settle(future, message, self.node)
        self._hang_up()

    def _pass_on(self, news: Report | NodeChange) -> None:
        """Pushes begin after the answer to `hello`, which is told first even if it is read in the same breath."""
        if self.ready.is_set():
            self.listener(news)
        else:
            self.early.append(news)

    def _up(self, facts: NodeFacts, reports: Iterable[Report]) -> None:
        changed = self.told_alive is not True or facts != self.facts  # a new agent has another pid
        self.facts = facts
        self.told_alive = True
        self.looked.set()
        if changed:
            self.listener(NodeChange(facts))
        early, self.early = self.early, []
        for news in (*reports, *early):
            self.listener(news)
        self.ready.set()

    def _down(self) -> None:
        self.looked.set()
        if self.told_alive is not False:
            self.told_alive = False
            detail = f"the agent of {self.node} does not answer"
            self.facts = replace(self.facts, alive=False, pid=None, detail=detail)
            self.listener(NodeChange(self.facts))

    def _hang_up(self) -> None:
        if self.ready.is_set():
            self.lost_s = asyncio.get_running_loop().time()
        self.ready.clear()
        self.early.clear()
        if self.writer is not None:
            self.writer.close()
            self.writer = None
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(Unreachable(f"the agent of node {self.node} has hung up"))
        self.waiting.clear()

    async def call(self, op: str, arguments: dict[str, Any], timeout_s: float = CALL_S) -> Any:
        """One request and its answer. Raises Refused, OSError or TimeoutError.

        An agent that has just gone may be back in a moment, and every request can be repeated: so it is, until the node
        counts as down.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.0 if self.told_alive is False else 2 * DOWN_AFTER_S):
                    await self.ready.wait()
            try:
                return await self._ask(op, arguments, deadline_s - asyncio.get_running_loop().time())
            except Unreachable:
                if self.told_alive is False or not self.task or self.task.done():
                    raise

    async def _ask(self, op: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        if self.writer is None:
            raise Unreachable(f"the agent of node {self.node} cannot be reached")
        number = next(self.numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting[number] = future
        try:
            self.writer.write(wire.encode({"id": number, "op": op, **arguments}))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise TimeoutError(f"node {self.node} has not answered '{op}' in time") from None
        finally:
            self.waiting.pop(number, None)


def _settle(future: asyncio.Future[Any], message: dict[str, Any], node: str) -> None:
    match message.get("error"):
        case None:
            future.set_result(message.get("result"))
        case "refused":
            future.set_exception(Refused(message["detail"]))
        case "missing":
            future.set_exception(FileNotFoundError(message["detail"]))
        case _:
            future.set_exception(OSError(f"node {node}: {message['detail']}"))


class LocalEngine:
    """`Engine` over the agents of one instance folder."""

    def __init__(self, instance_dir: Path | str, node_names: Iterable[str]) -> None:
        self._run = Path(instance_dir) / "run"
        self._names = list(node_names)
        self._links: dict[str, Link] = {}
        self._where: dict[tuple[str, int], list[str]] = {}  # nodes of an incarnation, as far as heard of
        self._listener: Listener | None = None

    async def open(self, listener: Listener) -> None:
        """Returns when every agent was reached or is known to be down."""
        self._listener = listener
        for name in self._names:
            link = Link(name, self._run / f"agent-{name}.sock", self._heard)
            link.task = asyncio.get_running_loop().create_task(link.keep_up())
            self._links[name] = link
        await asyncio.gather(*(link.looked.wait() for link in self._links.values()))

    async def close(self) -> None:
        tasks = [link.task for link in self._links.values() if link.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._links.clear()

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
        """Of the nodes that can be reached: for the others there is a NodeChange."""
        answers = await asyncio.gather(
            *(link.call("list", {}) for link in self._links.values()), return_exceptions=True
        )
        found: list[Report] = []
        for answer in answers:
            if isinstance(answer, OSError | TimeoutError):
                continue
            if isinstance(answer, BaseException):
                raise answer
            found += [wire.report_from_dict(one) for one in answer]
        return found

    async def launch(self, launch: Launch) -> None:
        """All parts or none. If one cannot start, the others end with "launch-failed" as it does."""
        links = [self._link(part.node) for part in launch.parts]
        arguments: dict[str, Any] = {"launch": wire.launch_to_dict(launch)}
        if len(links) > 1:
            arguments["master_addr"] = "127.0.0.1"
            arguments["master_port"] = await links[0].call("port", {})
        key = (launch.job_id, launch.incarnation)
        self._where[key] = [link.node for link in links]
        answers = await asyncio.gather(
            *(link.call("start", {**arguments, "part": index}, START_S) for index, link in enumerate(links)),
            return_exceptions=True,
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        failed = [
            wire.report_from_dict(answer)
            for answer in answers
            if not isinstance(answer, BaseException) and answer["cause"] == "launch-failed"
        ]
        if len(links) > 1 and (errors or failed):
            why = str(errors[0]) if errors else f"{failed[0].node}: {failed[0].detail}"
            await self._kill_parts(launch, because=f"{GANG_NOT_STARTED}: {why}")
        if errors:
            raise errors[0]

    async def _kill_parts(self, launch: Launch, because: str) -> None:
        arguments = {"job_id": launch.job_id, "incarnation": launch.incarnation, "because": because}
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
        await self._each("forget", job_id, incarnation)
        self._where.pop((job_id, incarnation), None)

    async def read_log(self, job_id: str, incarnation: int, rank: int, offset: int, limit: int) -> tuple[bytes, int]:
        """FileNotFoundError when no node has a log of this rank."""
        wanted = {"job_id": job_id, "incarnation": incarnation, "rank": rank, "offset": offset, "limit": limit}
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

    def _link(self, node: str) -> Link:
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
