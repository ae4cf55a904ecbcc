"""What an agent is asked over a connection: one line of JSON per request and per answer (`protocol/wire.py`)."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from thebes.model.errors import UserError
from thebes.node.attempts import Attempts
from thebes.node.ending import AttemptEnding
from thebes.node.home import CallHome
from thebes.node.node_lease import NodeLease
from thebes.node.reporting import Reporter
from thebes.node.starting import Starting
from thebes.node.suspending import Suspending
from thebes.protocol import messages, wire
from thebes.protocol.clock import boot_id, boot_s
from thebes.protocol.contract import Refused
from thebes.protocol.instance import EventLog
from thebes.protocol.log_file import read_log
from thebes.protocol.tasks import Tasks

LOG_LIMIT_BYTES = 1 << 20

Operation = Callable[[Any], Awaitable[Any]]  # each takes one of `protocol/messages.py`


class Requests:
    """It answers every request on its own, so that a slow one holds up no other."""

    def __init__(
        self,
        starting: Starting,
        suspending: Suspending,
        *,
        home: CallHome | None,
        lease: NodeLease | None,
        go: Callable[[], None],
    ) -> None:
        self.starting, self.home, self.lease, self.go = starting, home, lease, go
        self.attempts: Attempts = starting.attempts
        self.reporter: Reporter = starting.reporter
        self.tasks: Tasks = starting.tasks
        self.log: EventLog = starting.log
        self.node = self.attempts.node
        ending: AttemptEnding = starting.ending
        self.operations: dict[str, Operation] = {
            "ping": self._ping,
            "hello": self._hello,
            "homes": self._homes,
            "park": self._park,
            "retire": self._retire,
            "facts": self._facts,
            "list": self._list,
            "port": self._port,
            "start": starting.start,
            "notice": ending.notice,
            "terminate": ending.terminate,
            "kill": ending.kill,
            "suspend": suspending.suspend,
            "resume": suspending.resume,
            "forget": self._forget,
            "log": self._log,
        }

    # The line --------------------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # the agent ends
            await self.talk(reader, writer)

    async def talk(self, reader: Any, writer: Any) -> None:
        try:
            while line := await reader.readline():
                self.tasks.spawn(self._answer(writer, json.loads(line)))
        except (OSError, ValueError) as error:
            self.log.write("connection", node=self.node, error=repr(error))
        finally:
            self.reporter.listeners.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": request.get("id")}
        try:
            answer["result"] = await self.operations[request["op"]](request)
            if request["op"] == "hello":
                self.reporter.listeners.add(writer)  # whatever is pushed from now on is newer than the answer
        except Refused as error:
            answer.update(error="refused", detail=str(error))
        except FileNotFoundError as error:
            answer.update(error="missing", detail=str(error))
        except UserError as error:
            answer.update(error="failed", detail=error.message)
        except Exception as error:
            answer.update(error="failed", detail=f"{type(error).__name__}: {error}")
        if "error" in answer:
            self.log.write(
                "not done",
                node=self.node,
                op=request.get("op"),
                job=request.get("job_id"),
                incarnation=request.get("incarnation"),
                error=answer["error"],
                detail=answer["detail"],
            )
        if not writer.is_closing():
            writer.write(wire.encode(answer))
            with suppress(OSError):
                await writer.drain()

    # About the node --------------------------------------------------------------------------------------------------

    async def _ping(self, request: messages.Ping) -> dict[str, float]:
        """The controller tells until when it has heard of us, by our own clock."""
        heard_s = request.get("heard_s")
        if self.lease is not None and isinstance(heard_s, int | float):
            self.lease.renew(float(heard_s))
        return {"boot_s": boot_s()}

    async def _facts(self, request: object) -> dict[str, Any]:
        return wire.facts_to_dict(self.reporter.facts)

    async def _list(self, request: object) -> list[dict[str, Any]]:
        return self.reporter.all_reports()

    async def _hello(self, request: messages.Hello) -> messages.HelloAnswer:
        """All there is to know; changes are pushed from then on."""
        if self.home is not None and self.lease is not None:
            self.home.homes = list(request.get("homes") or self.home.homes)
            self.lease.greet(float(request.get("lease_s") or 0.0))
            facts = self.reporter.facts
            self.reporter.facts = replace(facts, address=facts.address or self.home.address)
        return {
            "facts": wire.facts_to_dict(self.reporter.facts),
            "reports": self.reporter.all_reports(),
            "boot": boot_id(),
            "boot_s": boot_s(),
        }

    async def _homes(self, request: messages.Homes) -> None:
        if self.home is not None:
            self.home.homes = list(request["homes"])

    async def _park(self, request: messages.Park) -> None:
        """The controller leaves on purpose."""
        if self.lease is not None:
            self.lease.park(float(request["for_s"]))

    async def _retire(self, request: object) -> None:
        """The cluster is taken down, and nobody will need us."""
        if self.attempts.alive():
            raise Refused(f"jobs still run on node {self.node}")
        asyncio.get_running_loop().call_later(0.05, self.go)  # after the answer

    async def _port(self, request: object) -> int:
        return self.starting.free_port()

    # About attempts --------------------------------------------------------------------------------------------------

    async def _forget(self, request: messages.AboutAttempt) -> None:
        attempt = self.attempts.asked_for(request)
        if attempt is None:
            return
        if attempt.alive:
            raise Refused(f"job {attempt.dir.job_id} is alive on node {self.node}: it cannot be forgotten")
        self.attempts.forget(attempt)

    async def _log(self, request: messages.ReadLog) -> dict[str, Any]:
        folder = self.attempts.named(f"{request['job_id']}.{int(request['incarnation'])}")
        if folder is None:
            raise FileNotFoundError(f"'{request['job_id']}' is not a job id")
        limit = max(0, min(int(request["limit"]), LOG_LIMIT_BYTES))
        data, after = read_log(folder.log(int(request["rank"])), int(request["offset"]), limit)
        return {"data": base64.b64encode(data).decode(), "offset": after}
