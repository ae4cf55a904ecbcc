"""The engine of a Ray cluster: one agent per node, which calls home; Ray starts the agents and tells which nodes live.

Nothing here loads Ray. A child process (`driver`) does, and is started again whenever it ends: the controller
notices a pause in news of nodes, no more. An agent is not Ray's: it and its jobs outlive actor, raylet and head.

A node counts as up when its agent talks to us and Ray calls the node alive. What ran on a node is told as lost only
when the agent says so, or when Ray calls the node dead and it was silent for so long that its lease is over.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from thebes.engine.agents import AgentEngine
from thebes.engine.door import HomeDoor
from thebes.engine.link import CALL_S, CALLED_DOWN_AFTER_S, PING_EVERY_S, NodeLink
from thebes.engine.ray import nodes as ray_nodes
from thebes.engine.silence import Granted, Silence
from thebes.engine.site import EngineSite
from thebes.model.errors import UserError
from thebes.protocol.clock import boot_s
from thebes.protocol.contract import Gpu, Launch, Listener, NodeChange, NodeFacts, Refused, Report
from thebes.protocol.sealed import SealedReader, SealedWriter

LOG = logging.getLogger(__name__)
OPEN_WITHIN_S = 2.0
FIRST_CALL_S = 20.0  # actors, then agents, have to start
AGAIN_FIRST_S, AGAIN_LAST_S = 0.2, 5.0
HEAD_SILENT_S = 10.0
LINE_LIMIT_BYTES = 64 << 20
RETIRE_S = 25.0
ALONE_S = 600.0  # an agent without jobs that has heard nothing of a controller for so long goes
TAKEN = "other work in Ray"


class CalledLink(NodeLink):
    """A conversation that may be refused once it is known what the caller knows."""

    def __init__(self, node: str, listener: Listener, welcome: Callable[[str, Collection[Report]], bool]) -> None:
        super().__init__(node, listener, down_after_s=FIRST_CALL_S)
        self._welcome = welcome
        self.accepted = False
        self.word_s = 0.0  # when one that we accepted last said anything

    def _up(self, facts: NodeFacts, reports: Iterable[Report]) -> None:
        told = list(reports)
        if not self._welcome(self.node, told):
            raise OSError("another agent than the one that has our jobs")
        self.accepted = True
        self.down_after_s = CALLED_DOWN_AFTER_S
        super()._up(facts, told)

    def keep_word(self) -> None:
        """Before another conversation begins: what was heard in it does not count until it is accepted."""
        if self.accepted:
            self.word_s, self.accepted = self.heard_s, False


class RayEngine(AgentEngine):
    """`Engine` over agents that actors of Ray keep running."""

    def __init__(self, site: EngineSite, *, alone_s: float = ALONE_S) -> None:
        super().__init__()
        self.site = site
        self.alone_s = alone_s
        self.home = HomeDoor(site.key, site.epoch, self._called)
        self.table: dict[str, Mapping[str, Any]] = {}  # Ray's newest word on each of our nodes
        self.driver: asyncio.subprocess.Process | None = None
        self.head_heard_s = 0.0
        self._announced: dict[str, NodeFacts] = {}
        self._reports: dict[tuple[str, int, str], Report] = {}  # the newest of each part
        self._promised: set[tuple[str, int, str]] = set()  # launches on the way: nobody has told of them yet
        self._dead_since: dict[str, float] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._here = ""  # our address in Ray
        self._trouble = ""  # why Ray cannot be asked
        self._seen = asyncio.Event()  # Ray has told of its nodes at least once
        self._notes = site.shared_dir / "ray" / site.instance_id  # which parts were started where
        self._silence = Silence(site.lease_s)
        self._granted = Granted(site.shared_dir / "ray" / f"{site.instance_id}.leases.json", site.lease_s)

    # Life ------------------------------------------------------------------------------------------------------------

    async def open(self, listener: Listener, *, parked_s: float = 0.0) -> None:
        """Returns when every agent has called, is known to be away, or takes too long."""
        self._listener = listener
        loop = asyncio.get_running_loop()
        self._silence.begin(parked_s)
        await asyncio.to_thread(self._read_notes)
        await asyncio.to_thread(self._granted.begin, self.site.gpus)
        try:
            await self.home.open("", self.site.home_port)
        except OSError as error:
            raise UserError(
                f"nodes cannot call us at port {self.site.home_port}: {error.strerror or error}",
                hint="choose another with --home HOST:PORT",
            ) from None
        for name in self.site.gpus:
            link = CalledLink(name, self._from_link, self._welcome)
            link.ping_every_s = min(PING_EVERY_S, self.site.lease_s / 6)
            link.greeting = {"homes": self.homes, "lease_s": self.site.lease_s}
            self._links[name] = link
            link.expect()
            link.word_s = loop.time()
        self._tasks = [loop.create_task(self._keep_driver()), loop.create_task(self._watch_leases())]
        self._tasks.append(loop.create_task(self._silence.stay_awake()))
        # A controller that takes over must answer soon: nodes that need longer tell when they are there.
        with suppress(TimeoutError):
            async with asyncio.timeout(OPEN_WITHIN_S):
                await asyncio.gather(*(link.looked.wait() for link in self._links.values()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(OSError, UserError):  # or the next one counts with a lease that was longer before us
            await self._granted.save()
        await self.home.close()
        await super().close()

    async def retire(self) -> None:
        """No job is left and the cluster is taken down: agents, actors and reserved GPUs go."""
        links = list(self._links.values())
        with suppress(OSError, TimeoutError):
            await self._ask_driver("retire", RETIRE_S)
        # Those that Ray cannot reach any more.
        await asyncio.gather(
            *(link.call("retire", {}, 2.0) for link in links if link.announced_alive and link.ready.is_set()),
            return_exceptions=True,
        )

    @property
    def homes(self) -> list[str]:
        """Where nodes find us: as we were told, or at the address that this machine has in Ray."""
        own = self.site.home(self.home.port)
        if not self.site.home_host and self._here:
            own = f"[{self._here}]:{self.home.port}" if ":" in self._here else f"{self._here}:{self.home.port}"
        return [own, *self.site.other_homes]

    async def _called(self, who: str, reader: SealedReader, writer: SealedWriter) -> None:
        link = self._links.get(who.removeprefix("node:")) if who.startswith("node:") else None
        if link is None:
            LOG.warning("%s has called, which is no node of ours", who)
            return
        assert isinstance(link, CalledLink)
        link.keep_word()
        await link.attach(reader, writer)

    def _welcome(self, node: str, reports: Collection[Report]) -> bool:
        """The agent of a node knows what was started there. An agent that does not may be on another machine of that
        name, while the old one is cut off and its jobs still live: it has to wait until the old one's lease is over.
        """
        told = {(one.job_id, one.incarnation, one.node) for one in reports}
        known = {key for key, one in self._reports.items() if key[2] == node and one.state != "exited"}
        missing = known - told - self._promised
        link = self._links[node]
        assert isinstance(link, CalledLink)
        if not missing or self._silence.over(link, link.word_s, self._granted.of(node)):
            return True
        LOG.warning("the agent of %s knows nothing of job %s: it has to wait", node, min(missing)[0])
        return False

    # What nodes and Ray say ------------------------------------------------------------------------------------------

    def _from_link(self, change: Report | NodeChange) -> None:
        if isinstance(change, NodeChange):
            if self._links[change.facts.name].greeted:
                self._granted.met(change.facts.name)
            self._tell_node(change.facts.name)
            return
        key = (change.job_id, change.incarnation, change.node)
        self._reports[key] = change
        self._promised.discard(key)
        self._heard(change)

    def facts(self, name: str) -> NodeFacts:
        """What the agent says and what Ray says, in one."""
        facts, entry = self._links[name].facts, self.table.get(name)
        if not facts.gpus:
            count = self.site.gpus[name]
            facts = replace(facts, gpus=tuple(Gpu(index, name=self.site.gpu_types[name]) for index in range(count)))
        if entry is None:
            detail = facts.detail if not facts.alive else "Ray has not told of it yet"
            if self._trouble and not facts.alive:
                facts = replace(facts, detail=self._trouble)
                detail = self._trouble
            return replace(facts, alive=False, detail=detail) if self._seen.is_set() else facts
        taken = set(entry.get("taken", ()))
        facts = replace(
            facts,
            rack=ray_nodes.rack_of(entry),
            address=entry["address"],
            gpus=tuple(replace(gpu, taken=TAKEN if gpu.index in taken else "") for gpu in facts.gpus),
        )
        if not entry["alive"]:
            why = f": {entry['why']}" if entry.get("why") else ""
            return replace(facts, alive=False, detail=f"Ray says that node {name} is dead{why}")
        if not facts.alive and entry.get("trouble"):
            return replace(facts, detail=f"{facts.detail}: {entry['trouble']}")
        return facts

    def _tell_node(self, name: str) -> None:
        facts = self.facts(name)
        if self._announced.get(name) != facts:
            self._announced[name] = facts
            self._heard(NodeChange(facts))

    async def nodes(self) -> list[NodeFacts]:
        return [self.facts(name) for name in self._links]

    def master_address(self, link: NodeLink) -> str:
        return self.facts(link.node).address or super().master_address(link)

    def _take_table(self, table: list[dict[str, Any]]) -> None:
        """A node that joined again has two entries: the living one counts."""
        newest: dict[str, Mapping[str, Any]] = {}
        for entry in table:
            name = ray_nodes.name_of(entry)
            if name in self._links and (entry["alive"] or name not in newest):
                newest[name] = entry
        now_s = asyncio.get_running_loop().time()
        self.head_heard_s = now_s
        self._seen.set()
        self.table = newest
        for name, link in self._links.items():
            entry = newest.get(name)
            if entry is not None and entry["alive"]:
                self._dead_since.pop(name, None)
            else:
                self._dead_since.setdefault(name, now_s)
                if not link.looked.is_set():  # nobody will call
                    link.go_down()
            self._tell_node(name)

    # Leases ----------------------------------------------------------------------------------------------------------

    async def _watch_leases(self) -> None:
        """Ray calls a node dead and nothing was heard of it: when its lease is over, so is what ran there."""
        while True:
            await asyncio.sleep(min(1.0, self.site.lease_s / 6))
            with suppress(OSError, UserError):
                await self._granted.save()
            if asyncio.get_running_loop().time() - self.head_heard_s > HEAD_SILENT_S:
                continue
            for name, since_s in self._dead_since.items():
                link = self._links[name]
                if self._silence.over(link, max(since_s, link.heard_s), self._granted.of(name)):
                    self._lose(name, f"node {name} is dead for Ray, and was silent for {link.silent_s:.0f} s")

    async def unparked(self) -> None:
        """Returns when no node with jobs goes by what it was told when the last controller left."""
        nodes = {key[2] for key, report in self._reports.items() if report.state != "exited"}
        await self._silence.unparked(self._links[node] for node in nodes if node in self._links)

    def _lose(self, node: str, detail: str) -> None:
        for (job_id, incarnation, where), report in list(self._reports.items()):
            if where == node and report.state != "exited":
                lost = replace(report, state="exited", cause="lost", detail=detail, exited_s=boot_s())
                LOG.warning("lost: job %s, incarnation %d: %s", job_id, incarnation, detail)
                self._reports[job_id, incarnation, where] = lost
                self._heard(lost)

    # What was started where: for a controller that comes up while a node is away -------------------------------------

    def _note(self, job_id: str, incarnation: int) -> Path:
        return self._notes / f"{job_id}.{incarnation}"

    def _read_notes(self) -> None:
        self._notes.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._notes.iterdir():
            job_id, _, incarnation = path.name.rpartition(".")
            with suppress(OSError, ValueError):
                for node in path.read_text().split():
                    report = Report(job_id, int(incarnation), node, "starting")
                    self._reports.setdefault((job_id, int(incarnation), node), report)
                    self._where.setdefault((job_id, int(incarnation)), []).append(node)

    async def launch(self, launch: Launch) -> None:
        key = (launch.job_id, launch.incarnation)
        nodes = [part.node for part in launch.parts]
        for node in nodes:
            self._link(node)
        await asyncio.to_thread(self._note(*key).write_text, " ".join(nodes))
        for node in nodes:
            if (*key, node) not in self._reports:
                self._reports[*key, node] = Report(*key, node, "starting")
                self._promised.add((*key, node))
        try:
            await super().launch(launch)
        except Refused:
            if len(nodes) == 1:
                self._drop(*key)
            raise

    def _nodes_of(self, job_id: str, incarnation: int) -> list[str]:
        """Without those that are gone with their part: nobody can be asked there, and nothing is left to be done."""
        return [node for node in super()._nodes_of(job_id, incarnation) if not self._gone(job_id, incarnation, node)]

    def _gone(self, job_id: str, incarnation: int, node: str) -> bool:
        report = self._reports.get((job_id, incarnation, node))
        return report is not None and report.cause == "lost" and not self._links[node].ready.is_set()

    async def _each(self, op: str, job_id: str, incarnation: int, timeout_s: float = CALL_S, **more: Any) -> None:
        if op not in ("kill", "forget") and not self._nodes_of(job_id, incarnation):
            raise Refused(f"job {job_id} was lost with its nodes")
        await super()._each(op, job_id, incarnation, timeout_s, **more)

    async def forget(self, job_id: str, incarnation: int) -> None:
        """A node that is gone reports its part again if it comes back, and is told then."""
        await super().forget(job_id, incarnation)
        self._drop(job_id, incarnation)

    def _drop(self, job_id: str, incarnation: int) -> None:
        for key in [key for key in self._reports if key[:2] == (job_id, incarnation)]:
            del self._reports[key]
            self._promised.discard(key)
        with suppress(OSError):
            self._note(job_id, incarnation).unlink(missing_ok=True)

    async def reports(self) -> list[Report]:
        """Those of the nodes that answer, and what we have taken for lost."""
        found = await super().reports()
        known = {(one.job_id, one.incarnation, one.node) for one in found}
        return [*found, *(one for key, one in self._reports.items() if key not in known and one.state == "exited")]

    # The driver ------------------------------------------------------------------------------------------------------

    def _wanted(self) -> dict[str, Any]:
        return {
            "address": self.site.ray_address,
            "instance": self.site.instance_id,
            "names": self.site.gpus,
            "homes": self.homes if self.site.home_host else [],  # else they are told when we know our address
            "key": self.site.key.hex(),
            "lease_s": self.site.lease_s,
            "alone_s": self.alone_s,
        }

    async def _keep_driver(self) -> None:
        """Ray may end it at any moment: then there is another one."""
        wait_s = AGAIN_FIRST_S
        while True:
            begun_s = asyncio.get_running_loop().time()
            try:
                await self._drive()
            except (OSError, ValueError) as error:
                LOG.warning("the driver of Ray: %s", error)
            if asyncio.get_running_loop().time() - begun_s > 30.0:
                wait_s = AGAIN_FIRST_S
            await asyncio.sleep(wait_s)
            wait_s = min(AGAIN_LAST_S, 2 * wait_s)

    async def _drive(self) -> None:
        self.driver = await asyncio.create_subprocess_exec(
            *ray_nodes.driver_command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_LIMIT_BYTES,
            start_new_session=True,
        )
        try:
            assert self.driver.stdin is not None
            assert self.driver.stdout is not None
            self.driver.stdin.write(json.dumps(self._wanted()).encode() + b"\n")
            while line := await self.driver.stdout.readline():
                self._driver_said(json.loads(line))
            code = await self.driver.wait()
            LOG.warning("the driver of Ray has ended with %s", code)
        finally:
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(OSError("the driver of Ray has ended"))
            self._asked.clear()
            if self.driver.returncode is None:
                self.driver.kill()
                with suppress(asyncio.CancelledError):
                    await self.driver.wait()

    def _driver_said(self, message: dict[str, Any]) -> None:
        if message.get("push") == "here":
            self._here, self._trouble = message["address"], ""
            for link in self._links.values():
                link.greeting["homes"] = self.homes
            assert self.driver is not None
            assert self.driver.stdin is not None
            self.driver.stdin.write(json.dumps({"id": 0, "op": "homes", "homes": self.homes}).encode() + b"\n")
        elif message.get("push") == "nodes":
            self._take_table(message["nodes"])
        elif message.get("push") == "error":
            LOG.error("Ray: %s (%s)", message["message"], message["hint"])
            if message["message"] != self._trouble:
                self._trouble = message["message"]
                for name in self._links:
                    self._tell_node(name)
        else:
            future = self._asked.pop(message.get("id", 0), None)
            if future is not None and not future.done():
                if "error" in message:
                    future.set_exception(OSError(message["detail"]))
                else:
                    future.set_result(message.get("result"))

    async def _ask_driver(self, op: str, timeout_s: float) -> Any:
        if self.driver is None or self.driver.stdin is None or self.driver.returncode is not None:
            raise OSError("the driver of Ray is not there")
        self._number += 1
        number = self._number
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.driver.stdin.write(json.dumps({"id": number, "op": op}).encode() + b"\n")
            async with asyncio.timeout(timeout_s):
                return await self._asked[number]
        finally:
            self._asked.pop(number, None)
