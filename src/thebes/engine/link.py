"""One conversation with an agent (or with the step of a Slurm job), kept up for ever.

The line is dialled over a Unix socket, or taken from an agent or step that calls home: what is said is the same. The
other end (the *peer*) counts as down when it cannot be reached for a moment; when it is back, the listener hears so and
then every report anew. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

from thebes.protocol import wire
from thebes.protocol.clock import boot_id, boot_s
from thebes.protocol.contract import Listener, NodeChange, NodeFacts, Refused, Report
from thebes.protocol.messages import Hello, HelloAnswer, Ping

CALL_S = 10.0
DOWN_AFTER_S = 1.0
CALLED_DOWN_AFTER_S = 3.0  # a peer that calls us needs a moment more
RETRY_FIRST_S, RETRY_LAST_S = 0.02, 0.5
PING_EVERY_S = 5.0
PING_S = 5.0  # an agent that takes longer hangs
_TIMES = ("started_s", "exited_s", "checkpoint_s", "step_s", "first_step_s")


class Unreachable(OSError):  # noqa: N818 - reads as what it says
    """The agent of a node cannot be reached."""


class LineReader(Protocol):
    async def readline(self) -> bytes: ...


class LineWriter(Protocol):
    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


Dial = Callable[[], Awaitable[tuple[LineReader, LineWriter]]]


class NodeLink:
    """The conversation with the agent or step that speaks for `node`. `who` is what people call it."""

    def __init__(self, node: str, listener: Listener, *, who: str = "", down_after_s: float = DOWN_AFTER_S) -> None:
        self.node = node
        self.who = who or f"the agent of {node}"
        self.listener = listener
        self.down_after_s = down_after_s
        self.ping_every_s: float | None = None  # None: PING_EVERY_S
        self.greeting: Hello = {}  # what the peer is told with `hello`
        self.facts = NodeFacts(node, (), alive=False, detail=f"{self.who} has not been reached yet")
        self.reports: dict[tuple[str, int], Report] = {}  # the newest of each incarnation that the peer knows
        self.announced_alive: bool | None = None
        self.greeted = False  # the peer has heard us since we began, so it goes by our lease
        self.lost_s = 0.0  # when the peer was last there, by the loop's clock
        self.heard_s = 0.0  # when the peer last said anything
        self.shift_s = 0.0  # what to add to the peer's times: another machine has another boot clock
        self.looked = asyncio.Event()  # reached, or known to be down
        self.ready = asyncio.Event()  # connected, and everything missed has been told
        self.early: list[Report | NodeChange] = []
        self.writer: LineWriter | None = None
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.numbers = count(1)
        self.task: asyncio.Task[None] | None = None
        self._down_timer: asyncio.TimerHandle | None = None

    # Keeping it up ---------------------------------------------------------------------------------------------------

    async def keep_up(self, dial: Dial) -> None:
        """Connect, listen, and again, for ever."""
        loop = asyncio.get_running_loop()
        self.lost_s = loop.time()
        delay_s = RETRY_FIRST_S
        while True:
            # A connection that is there but says nothing is no better than none.
            self._arm()
            try:
                async with asyncio.timeout(self.down_after_s):
                    reader, self.writer = await dial()
                await self._converse(reader)
                delay_s = RETRY_FIRST_S
            except (OSError, TimeoutError, ValueError):
                pass
            finally:
                self._disarm()
                self._hang_up()
            if loop.time() - self.lost_s >= self.down_after_s:
                self.go_down()
            await asyncio.sleep(delay_s)
            delay_s = min(RETRY_LAST_S, delay_s * 2)

    def expect(self) -> None:
        """The peer will call; until then, and whenever it has hung up, it is given a moment."""
        self.lost_s = self.heard_s = asyncio.get_running_loop().time()
        self._arm()

    async def attach(self, reader: LineReader, writer: LineWriter) -> None:
        """The peer has called: talk as long as it lasts. An earlier conversation ends: the peer has lost it."""
        while self.task is not None and self.task is not asyncio.current_task():
            earlier = self.task
            earlier.cancel()
            await asyncio.gather(earlier, return_exceptions=True)
            if self.task is earlier:
                self.task = None
        self.task = asyncio.current_task()
        self.writer = writer
        self._arm()
        try:
            await self._converse(reader)
        except (OSError, TimeoutError, ValueError):
            pass
        finally:
            self._hang_up()
            if self.task is asyncio.current_task():
                self.task = None
            self._arm()

    def _arm(self) -> None:
        self._disarm()
        loop = asyncio.get_running_loop()
        self._down_timer = loop.call_at(max(loop.time(), self.lost_s + self.down_after_s), self.go_down)

    def _disarm(self) -> None:
        if self._down_timer is not None:
            self._down_timer.cancel()
            self._down_timer = None

    async def end(self) -> None:
        """Let go of it."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._disarm()
        self._hang_up()

    # The conversation ------------------------------------------------------------------------------------------------

    async def _converse(self, reader: LineReader) -> None:
        listen = asyncio.ensure_future(self._listen(reader))
        try:
            asked_s = boot_s()
            answer: HelloAnswer = await self._ask("hello", self.greeting, PING_S)
            self._compare_clocks(answer, (asked_s + boot_s()) / 2)
            # Before anything is asked of the peer: its lease may have run out while it was away.
            said_s = await self._ping(answer.get("boot_s"))
            self._disarm()
            self.greeted = True
            self._up(wire.facts_from_dict(answer["facts"]), [self._report(one) for one in answer["reports"]])
            while not listen.done():
                await asyncio.wait([listen], timeout=self.ping_every_s or PING_EVERY_S)
                if not listen.done():
                    said_s = await self._ping(said_s)
            listen.result()
        finally:
            listen.cancel()
            await asyncio.gather(listen, return_exceptions=True)

    async def _ping(self, said_s: float | None) -> float | None:
        """Tell the peer until when we have heard of it, by its own clock; that renews its lease. Its time now."""
        answer = await self._ask("ping", Ping(heard_s=said_s), PING_S)
        return answer.get("boot_s") if isinstance(answer, dict) else None

    async def _listen(self, reader: LineReader) -> None:
        while line := await reader.readline():
            self.heard_s = asyncio.get_running_loop().time()
            message = json.loads(line)
            if message.get("push") == "report":
                report = self._report(message["report"])
                self.reports[report.job_id, report.incarnation] = report
                self._pass_on(report)
            elif message.get("push") == "facts":
                self.facts = wire.facts_from_dict(message["facts"])
                self._pass_on(NodeChange(self.facts))
            else:
                future = self.waiting.pop(message.get("id"), None)
                if future is not None and not future.done():
                    _settle(future, message, self.node)
        self._hang_up()

    def _compare_clocks(self, answer: HelloAnswer, now_s: float) -> None:
        there = answer.get("boot")
        self.shift_s = 0.0 if there in (None, boot_id()) else now_s - float(answer["boot_s"])

    def _report(self, found: dict[str, Any]) -> Report:
        report = wire.report_from_dict(found)
        if not self.shift_s:
            return report
        times = {name: getattr(report, name) for name in _TIMES}
        return replace(report, **{name: at + self.shift_s for name, at in times.items() if at is not None})

    def report_from(self, found: dict[str, Any]) -> Report:
        """A report in an answer of the peer, in our time."""
        return self._report(found)

    def _pass_on(self, news: Report | NodeChange) -> None:
        """Pushes begin after the answer to `hello`, which is told first even if it is read in the same breath."""
        if self.ready.is_set():
            self.listener(news)
        else:
            self.early.append(news)

    def _up(self, facts: NodeFacts, reports: Iterable[Report]) -> None:
        changed = self.announced_alive is not True or facts != self.facts  # a new agent has another pid
        reports = list(reports)
        self.reports = {(one.job_id, one.incarnation): one for one in reports}
        self.facts = facts
        self.announced_alive = True
        self.looked.set()
        if changed:
            self.listener(NodeChange(facts))
        early, self.early = self.early, []
        self.reports |= {(one.job_id, one.incarnation): one for one in early if isinstance(one, Report)}
        for news in (*reports, *early):
            self.listener(news)
        self.ready.set()

    def go_down(self) -> None:
        self.looked.set()
        if self.announced_alive is not False:
            self.announced_alive = False
            self.facts = replace(self.facts, alive=False, pid=None, detail=f"{self.who} does not answer")
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
                future.set_exception(Unreachable(f"{self.who} has hung up"))
        self.waiting.clear()

    @property
    def silent_s(self) -> float:
        """Since when nothing was heard."""
        return asyncio.get_running_loop().time() - self.heard_s

    # Asking ----------------------------------------------------------------------------------------------------------

    async def call(self, op: str, arguments: Mapping[str, object], timeout_s: float = CALL_S) -> Any:
        """One request and its answer; it raises Refused, OSError or TimeoutError.

        An agent that has just gone may be back in a moment, and every request can be repeated: so it is, until the node
        counts as down.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.0 if self.announced_alive is False else 2 * self.down_after_s):
                    await self.ready.wait()
            try:
                return await self._ask(op, arguments, deadline_s - asyncio.get_running_loop().time())
            except Unreachable:
                if self.announced_alive is False or (self._down_timer is None and (not self.task or self.task.done())):
                    raise

    async def _ask(self, op: str, arguments: Mapping[str, object], timeout_s: float) -> Any:
        if self.writer is None:
            raise Unreachable(f"{self.who} cannot be reached")
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
