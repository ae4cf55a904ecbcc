"""The engine of a Slurm cluster: one Slurm job per incarnation, one step in it, one `node/step.py` per node.

`salloc --no-shell` takes exactly the nodes (and where the site allows it exactly the GPUs) that were decided, at once
or not at all; `srun` starts a step there whose tasks call home; when all have called, all are told to start. The step
keeps its own lease and writes its result into the folder that all nodes share, so neither this process nor slurmctld is
needed for a job to go on. What Slurm says of nodes and jobs is asked for every second or so. Nothing is decided here.

After a crash of the controller everything is found again: an incarnation that was told to start has a record in the
shared folder; a Slurm job of ours without one has not started anything and is cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from thebes.engine import slurm_nodes as site_nodes
from thebes.engine.contract import (
    GANG_NOT_STARTED,
    PARKED_LEASE_S,
    Gpu,
    GpusTaken,
    Launch,
    Listener,
    Mechanism,
    NodeChange,
    NodeFacts,
    Part,
    Refused,
    Report,
)
from thebes.engine.home import Home, SealedReader, SealedWriter
from thebes.engine.link import CALL_S, CALLED_DOWN_AFTER_S, Link
from thebes.engine.silence import Silence
from thebes.engine.site import Site
from thebes.engine.slurm_commands import (
    Group,
    JobRecord,
    NodeRecord,
    Partition,
    Queued,
    Request,
    Slurm,
    SlurmError,
    Terms,
    seconds_of,
    srun_args,
)
from thebes.engine.slurm_gang import Gang, Key, Shared
from thebes.model.errors import UserError
from thebes.node.attempt import AttemptDir, read_log
from thebes.node.instance import write_json
from thebes.node.launch import PartLaunch, part_launch
from thebes.node.old_attempts import KEEP_ATTEMPTS_S

LOG = logging.getLogger(__name__)
OPEN_WITHIN_S = 2.0
POLL_S = 1.5
RACKS_EVERY_S = 60.0
HOLDERS_EVERY_S = 5.0  # who the other jobs belong to
SILENT_S = 20.0  # slurmctld may be away for so long before its nodes count as down
GIVEN_WITHIN_S = 10  # an allocation, or somebody else was faster
GIVEN_BACK_S = 2.0
CALLED_WITHIN_S = 30.0  # all steps, after srun
START_WITHIN_S = 90.0  # a step waits for the word to start
START_S = 40.0
KILLED_WITHIN_S = 5.0  # or Slurm does it
GONE_S = 2.0  # after which a Slurm job that is over has told all it will: file systems are slow at times
CLEANING_S = 10.0  # GPUs of a Slurm job that does not go away count as taken from then on
WITHHELD_S = 15.0  # so long we do not ask again for what Slurm did not give
UNHEARD_S = 60.0  # so long nothing is started on a node whose step did not call
CLOSE_S = 5.0  # for allocations to go back
OVER = "Exited with exit code"  # so srun tells of a task
TIDY_EVERY_S = 86_400.0
TIDY_AT_ONCE = 1000  # removals; what is left over waits for the next go
TIDY_AGAIN_S = 60.0
UNKNOWN_PORT = 987_654_321  # stands for MASTER_PORT until a step has found a free one
UNKNOWN_ADDRESS = "thebes-master-address"

T = TypeVar("T")
Ours = dict[str, list[tuple[int, Gang, Part]]]  # Slurm jobs of ours by node, with what each has there


class SlurmEngine:
    """`Engine` over Slurm's commands and the steps that call home."""

    def __init__(self, site: Site, slurm: Slurm | None = None) -> None:
        self.site = site
        self.slurm = slurm or Slurm()
        self.shared = Shared(site.shared_dir)
        self.home = Home(site.key, site.epoch, self._called)
        self.mode: site_nodes.Mode = "exact"
        self._listener: Listener | None = None
        self._gangs: dict[Key, Gang] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._releasing: dict[int, tuple[Gang, asyncio.Task[None]]] = {}
        self._cleaning: dict[int, tuple[Gang, float]] = {}  # Slurm jobs of ours that are being wound up, since when
        self._withheld: dict[tuple[str, int], tuple[float, str]] = {}
        self._partition: Partition | None = None
        self._config: dict[str, str] = {}
        self._records: dict[str, NodeRecord] = {}
        self._racks: dict[str, str] = {}
        self._racks_at = float("-inf")
        self._holders: list[JobRecord] = []
        self._holders_at = float("-inf")
        self._facts = {
            name: NodeFacts(name, tuple(map(Gpu, range(gpus))), alive=False, detail="Slurm has not been asked yet")
            for name, gpus in site.gpus.items()
        }
        self._down_since: dict[str, float] = {}
        self._answered_s = 0.0  # when slurmctld last did
        self._look = asyncio.Event()
        self._looked = asyncio.Event()  # set and replaced after each look
        self._silence = Silence(site.lease_s)

    # Life ------------------------------------------------------------------------------------------------------------

    async def open(self, listener: Listener, *, parked_s: float = 0.0) -> None:
        self._listener = listener
        loop = asyncio.get_running_loop()
        self._answered_s = loop.time()
        self._silence.begin(parked_s)
        await asyncio.to_thread(self.shared.make)
        self.script = await asyncio.to_thread(self.shared.install_step)
        await self._open_door()
        for gang in await asyncio.to_thread(lambda: list(self.shared.load())):
            self._gangs[gang.key] = gang
            for node in gang.nodes:
                gang.reports[node] = await asyncio.to_thread(self.shared.report, gang, node)
            if gang.alive:
                if gang.lease_s < self.site.lease_s:  # written down before they are told
                    gang.lease_s = self.site.lease_s
                    await self._durably(self.shared.save, gang)
                self._expect(gang, gang.alive)
            else:
                gang.phase = "over"
        looking = self._spawn(self._keep_looking())
        self._spawn(self._silence.stay_awake())
        self._spawn(self._keep_tidy())
        links = [link for gang in self._gangs.values() for link in gang.links.values()]
        # A controller that takes over must answer soon: what needs longer is told when it is there.
        with suppress(TimeoutError):
            async with asyncio.timeout(OPEN_WITHIN_S):
                await asyncio.gather(self._looked.wait(), *(link.looked.wait() for link in links))
        if looking.done():
            looking.result()

    async def _open_door(self) -> None:
        try:
            await self.home.open("", self.site.home_port)
        except OSError as error:
            raise UserError(
                f"port {self.site.home_port}, at which nodes call, cannot be used: {error.strerror or error}",
                hint="choose another with `thebes up --home HOST:PORT`",
            ) from None
        self.homes = [self.site.home(self.home.port), *self.site.other_homes]
        await asyncio.to_thread(write_json, self.shared.homes, {"homes": self.homes, "epoch": self.site.epoch})

    async def close(self) -> None:
        releasing = [task for _, task in self._releasing.values()]
        if releasing:
            await asyncio.wait(releasing, timeout=CLOSE_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for gang in self._gangs.values():
            await asyncio.gather(*(link.end() for link in gang.links.values()))
        await self.home.close()

    async def leave(self) -> None:
        park = {"for_s": PARKED_LEASE_S}
        links = [gang.links[node] for gang in self._gangs.values() for node in gang.alive if node in gang.links]
        await asyncio.gather(*(link.call("park", park) for link in links), return_exceptions=True)

    async def unparked(self) -> None:
        """Returns when no step goes by what it was told when the last controller left."""
        links = [gang.links[node] for gang in self._gangs.values() for node in gang.alive if node in gang.links]
        await self._silence.unparked(links)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("slurm engine", exc_info=task.exception())

    def _tell(self, news: Report | NodeChange) -> None:
        if self._listener is not None:
            try:
                self._listener(news)
            except Exception:  # its own trouble: it must not cost us what follows
                LOG.exception("news could not be handled")

    async def _learn_site(self) -> None:
        """What changes only when an administrator changes it."""
        self._config, partitions = await asyncio.gather(self.slurm.config(), self.slurm.partitions())
        wanted = self.site.partition
        self._partition = next((one for one in partitions if (one.name == wanted if wanted else one.default)), None)

    # Who calls -------------------------------------------------------------------------------------------------------

    def _expect(self, gang: Gang, nodes: Iterable[str]) -> None:
        for node in nodes:
            link = Link(
                node,
                functools.partial(self._heard, gang, node),
                who=f"the step of job {gang.job_id} on node {node}",
                down_after_s=CALLED_DOWN_AFTER_S,
            )
            link.greeting = {"homes": self.homes, "lease_s": self.site.lease_s}
            link.ping_every_s = min(5.0, self.site.lease_s / 6)
            link.expect()
            gang.links[node] = link

    async def _called(self, who: str, reader: SealedReader, writer: SealedWriter) -> None:
        kind, _, rest = who.partition(":")
        name, _, whose = rest.partition(":")
        node, _, token = whose.partition(":")
        folder = AttemptDir.named(self.shared.nodes, name) if kind == "step" else None
        gang = self._gangs.get((folder.job_id, folder.incarnation)) if folder else None
        if gang is None or node not in gang.links or token != gang.token:
            LOG.info("%s called, and is not known any more", who)
            self._look.set()  # its Slurm job is cancelled if it is still there
            return
        await gang.links[node].attach(reader, writer)

    def _heard(self, gang: Gang, node: str, news: Report | NodeChange) -> None:
        """From the step of a gang on a node. That the line is there or not concerns us alone."""
        if isinstance(news, NodeChange):
            gang.tell()
            return
        self._note(gang, replace(news, node=node))
        if gang.phase == "started" and news.state == "starting" and gang.master is not None:
            self._spawn(self._start_late(gang, node))

    async def _start_late(self, gang: Gang, node: str) -> None:
        """An earlier controller has said `start` to others, or died when it was about to."""
        async with self._lock(gang.job_id):
            link = gang.links.get(node)
            if link is None or gang.master is None or gang.reports[node].state != "starting":
                return
            address, port = gang.master
            with suppress(Refused, OSError, TimeoutError):
                await link.call("start", {"master_addr": address, "master_port": port}, START_S)

    def _note(self, gang: Gang, report: Report) -> None:
        """A report is news, and may be the last."""
        before = gang.reports.get(report.node)
        if before is not None and before.state == "exited":
            return
        gang.reports[report.node] = report
        if gang.phase != "launching":
            self._tell(report)
        if report.state == "exited":
            link = gang.links.get(report.node)
            if link is not None and link.writer is not None:
                self._spawn(self._say_done(link))
        gang.tell()
        if gang.phase == "started" and not gang.alive:
            self._over(gang)

    async def _say_done(self, link: Link) -> None:
        with suppress(Refused, OSError, TimeoutError):
            await link.call("done", {}, 2.0)

    def _over(self, gang: Gang) -> None:
        """All parts have ended: the allocation goes back."""
        gang.phase = "over"
        if gang.slurm_job:
            self._release(gang)
        self._spawn(self._let_go(gang))

    async def _let_go(self, gang: Gang) -> None:
        """Its steps hang up when they have heard that we know."""
        with suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                for link in gang.links.values():
                    while link.writer is not None:
                        await asyncio.sleep(0.05)
        for link in gang.links.values():
            await link.end()

    def _release(self, gang: Gang, *, at_once: bool = False) -> None:
        job = gang.slurm_job
        self._cleaning.setdefault(job, (gang, asyncio.get_running_loop().time()))
        if job not in self._releasing:
            self._releasing[job] = (gang, self._spawn(self._cancel(job, at_once=at_once)))

    async def _cancel(self, job: int, *, at_once: bool = False) -> None:
        """Until slurmctld has heard it."""
        pause_s = 0.2
        try:
            while True:
                try:
                    return await self.slurm.cancel([job], at_once=at_once)
                except SlurmError as error:
                    LOG.warning("Slurm job %d cannot be cancelled yet: %s", job, error)
                await asyncio.sleep(pause_s)
                pause_s = min(5.0, 2 * pause_s)
        finally:
            self._releasing.pop(job, None)

    # Looking ---------------------------------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        while True:
            self._look.clear()
            try:
                await self._look_once()
            except Exception:  # the next look may go better
                LOG.exception("looking at Slurm")
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._look.wait()

    async def _look_now(self) -> None:
        """Returns after a look that began after this call."""
        for _ in range(2):
            looked = self._looked
            self._look.set()
            await looked.wait()

    async def _look_once(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if not self._config or self._partition is None:
                await self._learn_site()
            began_s = loop.time()
            queue = await self.slurm.queue(uid=os.getuid(), over_too=True)
            records = {one.name: one for one in await self.slurm.nodes() if one.name in self.site.gpus}
            if loop.time() >= self._racks_at:
                self._racks = await self.slurm.racks()
                self._racks_at = loop.time() + RACKS_EVERY_S
            self._records = records
            self.mode = site_nodes.mode_of(records.values(), self._partition, self._config)
            await self._learn_holders()
        except SlurmError as error:
            if loop.time() - self._answered_s > SILENT_S or not self._records:
                self._set_facts(silent=str(error))
            self._done_looking()
            return
        self._answered_s = loop.time()
        await self._tidy(queue, began_s)
        self._set_facts()
        by_job: dict[int, list[Queued]] = {}
        for one in queue:
            for number in {one.leader, one.job}:
                by_job.setdefault(number, []).append(one)
        for gang in list(self._gangs.values()):
            if gang.phase == "started":
                await self._compare(gang, by_job.get(gang.slurm_job, []))
        self._done_looking()

    async def _keep_tidy(self) -> None:
        """What is too old to be kept goes, at the start and then daily, as it does on nodes that have an agent."""
        while True:
            before_s = time.time() - KEEP_ATTEMPTS_S
            removed = TIDY_AT_ONCE
            with suppress(OSError):
                removed = await asyncio.to_thread(self.shared.remove_old, before_s, self.script, TIDY_AT_ONCE)
            await asyncio.sleep(TIDY_EVERY_S if removed < TIDY_AT_ONCE else TIDY_AGAIN_S)

    def _done_looking(self) -> None:
        self._looked.set()
        self._looked = asyncio.Event()

    async def _learn_holders(self) -> None:
        """Whose jobs have the GPUs that are in use and not ours; asked only when there are such."""
        now, ours = asyncio.get_running_loop().time(), self._ours()
        for record in self._records.values():
            known = sum(len(ids) for ids in self._ours_on(record.name, ours).values())
            if len(record.used) > known or self.mode == "whole":
                if now >= self._holders_at:
                    self._holders = await self.slurm.jobs()
                    self._holders_at = now + HOLDERS_EVERY_S
                return
        self._holders, self._holders_at = [], float("-inf")

    def _allocated(self) -> Iterable[tuple[int, Gang]]:
        """Slurm jobs of ours that have GPUs, or may have."""
        for gang in self._gangs.values():
            if gang.phase != "over":
                yield gang.slurm_job, gang
        yield from ((job, gang) for job, (gang, _) in self._cleaning.items() if gang.phase == "over")

    def _ours(self) -> Ours:
        """All of it by node: there may be thousands of either."""
        found: Ours = {}
        for job, gang in self._allocated():
            for part in gang.parts:
                found.setdefault(part.node, []).append((job, gang, part))
        return found

    def _ours_on(self, node: str, ours: Ours) -> dict[int, tuple[int, ...]]:
        """The numbers by which Slurm knows the GPUs that it gave us on a node, by Slurm job."""
        found: dict[int, tuple[int, ...]] = {}
        for job, gang, part in ours.get(node, ()):
            known = self.mode == "exact" or node not in gang.ids
            found[job or -len(found) - 1] = part.gpus if known else gang.ids[node]
        return found

    async def _tidy(self, queue: Iterable[Queued], began_s: float) -> None:
        """What Slurm has of ours that we know nothing of is cancelled; what is wound up is forgotten."""
        prefix = f"thebes-{self.site.instance_id}-"
        present = {one.leader for one in queue if not one.over}
        for job, (_, since_s) in list(self._cleaning.items()):
            if job not in present and job not in self._releasing and since_s < began_s:
                del self._cleaning[job]
        known = {gang.slurm_job for gang in self._gangs.values() if gang.phase != "over"} | self._cleaning.keys()
        launching = {prefix + gang.name for gang in self._gangs.values() if gang.phase == "launching"}
        strays: dict[int, Queued] = {}
        for one in queue:
            ours = one.name.startswith(prefix) and not one.over and one.state != "COMPLETING"
            if ours and one.leader not in known and one.name not in launching and one.leader not in self._releasing:
                strays[one.leader] = one
        if strays and await asyncio.to_thread(self._leads):
            for one in strays.values():
                LOG.warning("Slurm job %d (%s) belongs to nothing that runs: it is cancelled", one.leader, one.name)
                self._release(Gang(one.name, 0, (), "over", one.leader), at_once=True)

    def _leads(self) -> bool:
        """Whether no newer controller has opened the same folder: what we do not know may be its own."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return json.loads(self.shared.homes.read_bytes())["epoch"] == self.site.epoch
        return False

    def _set_facts(self, silent: str = "") -> None:
        now = asyncio.get_running_loop().time()
        self._withheld = {gpu: told for gpu, told in self._withheld.items() if told[0] > now}
        ours = self._ours()
        holders = site_nodes.holders_by_node(self._holders, {job for job, _ in self._allocated()})
        for name, before in list(self._facts.items()):
            record = self._records.get(name)
            if record is None:
                detail = silent or f"Slurm has no node {name}"
                facts = replace(before, alive=False, detail=detail)
            else:
                rack = self._racks.get(name, before.rack)
                facts = site_nodes.facts_of(
                    record, rack=rack, taken=self._taken(record, ours, holders.get(name, []), now), silent=silent
                )
            if not facts.alive:
                self._down_since.setdefault(name, now)
            else:
                self._down_since.pop(name, None)
            if facts != before:
                self._facts[name] = facts
                self._tell(NodeChange(facts))

    def _taken(
        self, record: NodeRecord, all_ours: Ours, holders: list[site_nodes.Holder], now: float
    ) -> dict[int, str]:
        name = record.name
        launching = [gang for _, gang, _ in all_ours.get(name, ()) if gang.phase == "launching"]
        if self.mode == "counts" and any(name not in gang.ids for gang in launching):
            # Which GPUs Slurm gives is about to be read.
            return {gpu.index: gpu.taken for gpu in self._facts[name].gpus if gpu.taken}
        ours = self._ours_on(name, all_ours)
        held = {number for _, _, part in all_ours.get(name, ()) for number in part.gpus}
        if self.mode == "whole":
            every = range(len(site_nodes.kinds_of(record)))
            if held:
                taken = {number: site_nodes.WHOLE_NODES for number in every if number not in held}
            else:
                busy = record.states & {"ALLOCATED", "MIXED"}
                whose = str(holders[0]) if holders else "another Slurm job"
                taken = dict.fromkeys(every, whose) if busy else {}
        else:
            taken = site_nodes.taken_gpus(record, exact=self.mode == "exact", ours=ours, held=held, holders=holders)
        for job, (gang, since_s) in self._cleaning.items():
            if now - since_s > CLEANING_S:
                for part in gang.parts:
                    if part.node == name:
                        taken |= dict.fromkeys(part.gpus, f"Slurm is still winding up its job {job}")
        taken |= {number: why for (node, number), (_, why) in self._withheld.items() if node == name}
        return taken

    async def _compare(self, gang: Gang, mine: Collection[Queued]) -> None:
        """Does Slurm think of this gang as we do? Says `lost` where nothing else can be."""
        now = asyncio.get_running_loop().time()
        if any(not one.over for one in mine):
            gang.gone_s = None
            if any(one.state in ("RUNNING", "SUSPENDED") for one in mine):
                self._end_the_silent(gang)
            return
        gang.gone_s = now if gang.gone_s is None else gang.gone_s
        state = next((one.state for one in mine), "gone")
        for node in gang.alive:
            report = await asyncio.to_thread(self.shared.report, gang, node)
            if report.state == "exited":
                self._note(gang, report)
                continue
            link = gang.links.get(node)
            if link is not None and link.ready.is_set():
                await self._fence(gang, link, state)
            elif self._is_surely_dead(gang, node, state, now):
                cause = "killed" if gang.kill_asked else "lost"
                detail = "" if gang.kill_asked else f"Slurm job {gang.slurm_job} is {_in_words(state)} (node {node})"
                self._note(gang, await asyncio.to_thread(self.shared.write_lost, gang, node, cause, detail))

    async def _fence(self, gang: Gang, link: Link, state: str) -> None:
        """Slurm's job is over and its step lives: a slurmd was down. It shall save and go."""
        if gang.gone_s is None or gang.fenced or asyncio.get_running_loop().time() - gang.gone_s < GONE_S:
            return
        grace_s = min(gang.grace_s, self.site.lease_s / 2)
        because = f"Slurm job {gang.slurm_job} is {_in_words(state)}"
        gang.fenced = True
        with suppress(Refused, OSError, TimeoutError):
            await link.call("fence", {"grace_s": grace_s, "because": because})

    def _is_surely_dead(self, gang: Gang, node: str, state: str, now: float) -> bool:
        """The rules of leases: at most one incarnation, also when a node is cut off."""
        assert gang.gone_s is not None
        if node not in self._down_since and state != "NODE_FAIL":
            return now - gang.gone_s >= GONE_S  # slurmd has said that all processes are gone
        link = gang.links[node]
        # A node that is up again has been told by slurmctld to end what it should not have.
        since_s = self._down_since.get(node, gang.gone_s)
        return self._silence.over(link, max(link.heard_s, since_s), gang.lease_s)

    def _end_the_silent(self, gang: Gang) -> None:
        """Slurm runs it, and we hear nothing: Slurm shall end it. Or nobody is left of it: srun has ended."""
        if gang.slurm_job in self._cleaning:
            return
        if gang.srun_ended.is_set() and not any(link.writer for link in gang.links.values()):
            if gang.gone_s is None:
                self._spawn(self._wind_up(gang))
            return
        for node in gang.alive:
            link = gang.links.get(node)
            if link is None or link.ready.is_set() or node in self._down_since:
                continue
            if self._silence.over(link, link.heard_s, gang.lease_s):
                LOG.warning("%s is silent: Slurm shall end job %d", link.who, gang.slurm_job)
                self._release(gang, at_once=True)
                return

    async def _wind_up(self, gang: Gang) -> None:
        """All tasks have ended; what they have written is the result."""
        await asyncio.sleep(GONE_S)
        for node in gang.alive:
            report = await asyncio.to_thread(self.shared.report, gang, node)
            if report.state == "exited":
                self._note(gang, report)
        if gang.phase == "started":
            self._release(gang, at_once=True)

    # What the controller asks ----------------------------------------------------------------------------------------

    async def nodes(self) -> list[NodeFacts]:
        return list(self._facts.values())

    async def reports(self) -> list[Report]:
        return [
            report for gang in self._gangs.values() if gang.phase != "launching" for report in gang.reports.values()
        ]

    async def launch(self, launch: Launch) -> None:
        """All parts or none. If one cannot start, the others end with "launch-failed" as it does."""
        if AttemptDir.named(self.shared.nodes, f"{launch.job_id}.{launch.incarnation}") is None:
            raise Refused(f"'{launch.job_id}' is not a job id")
        key = (launch.job_id, launch.incarnation)
        async with self._lock(launch.job_id):
            if key in self._gangs:
                return
            newest = await asyncio.to_thread(self.shared.fence, launch.job_id)
            if launch.incarnation < newest:
                raise Refused(
                    f"incarnation {launch.incarnation} of job {launch.job_id} is older than {newest}, "
                    "the newest that this cluster has seen"
                )
            if await self._has_ended(Gang(launch.job_id, launch.incarnation, launch.parts)):
                return
            await asyncio.to_thread(self.shared.raise_fence, launch.job_id, launch.incarnation)
            for other in [gang for gang in self._gangs.values() if gang.job_id == launch.job_id and gang.alive]:
                await self._remove(other)
            gang = Gang(launch.job_id, launch.incarnation, launch.parts, grace_s=launch.grace_s)
            gang.lease_s, gang.token = self.site.lease_s, secrets.token_hex(4)
            self._gangs[key] = gang
            try:
                await self._allocate(gang, launch)
                await self._start_steps(gang)
                await self._start_ranks(gang)
            except BaseException:
                if gang.phase == "launching":
                    await asyncio.shield(self._abandon(gang))
                raise

    async def _has_ended(self, gang: Gang) -> bool:
        """Whether a launch of an earlier controller, of which we have no record, has come to something and ended."""
        reports = [await asyncio.to_thread(self.shared.report, gang, node) for node in gang.nodes]
        if all(report.state != "exited" for report in reports):
            return False
        if all(report.started_s is None and not report.codes for report in reports):
            # Its steps were never told to start, and gave up: they leave nothing behind but these files.
            await asyncio.to_thread(self.shared.remove_attempts, gang)
            return False
        for report in reports:
            lost = replace(report, state="exited", cause="lost", detail="it ended while there was no controller")
            self._tell(report if report.state == "exited" else lost)
        return True

    async def _allocate(self, gang: Gang, launch: Launch) -> None:
        for part in gang.parts:
            facts, record = self._facts.get(part.node), self._records.get(part.node)
            if facts is None:
                raise Refused(f"there is no node '{part.node}'")
            if record is None:
                raise SlurmError(f"node {part.node}: {facts.detail}", "silent")
            missing = [number for number in part.gpus if number >= len(facts.gpus)]
            if missing:
                raise Refused(f"node {part.node} has no GPU {missing[0]}: it has {len(facts.gpus)}")
        steps = [self._part(gang, launch, index) for index in range(len(gang.parts))]  # may refuse
        overlapping = [task for other, task in self._releasing.values() if set(other.nodes) & set(gang.nodes)]
        await asyncio.to_thread(self._write_attempts, gang, launch, steps)
        if overlapping:  # what we have given back ourselves
            await asyncio.wait(overlapping, timeout=GIVEN_BACK_S)
        groups = self._groups_of(gang)
        request = Request(
            name=f"thebes-{self.site.instance_id}-{gang.name}",
            comment=f"Thebes job {gang.job_id}",
            groups=groups,
            wait_s=self._wait_s(len(groups)),
            terms=Terms(self.site.partition, self.site.reservation, self.site.account, self.site.qos),
            time=self._time(),
            whole_nodes=self.mode == "whole",
        )
        try:
            gang.slurm_job = await self.slurm.allocate(request)
        except SlurmError as error:
            if error.trouble in ("silent", "missing"):
                raise
            await self._not_given(gang, error)
        if self.mode == "counts":
            for record in await self.slurm.jobs(gang.slurm_job):
                gang.ids.update(record.gpus)

    async def _not_given(self, gang: Gang, error: SlurmError) -> None:
        """Whoever has them is told of before the launch is refused; or it would be decided the same way again."""
        del self._gangs[gang.key]
        self._holders_at = float("-inf")
        await self._look_now()
        wanted = [(part.node, number) for part in gang.parts for number in part.gpus]
        named = [
            f"{node} GPU {gpu.index} has {gpu.taken}"
            for node in gang.nodes
            for gpu in self._facts[node].gpus
            if gpu.taken and (node, gpu.index) in wanted
        ]
        down = [f"node {node}: {self._facts[node].detail}" for node in gang.nodes if not self._facts[node].alive]
        if not named and not down:
            why = f"Slurm does not give it ({error})"
            until = asyncio.get_running_loop().time() + WITHHELD_S
            self._withheld |= dict.fromkeys(wanted, (until, why))
            self._set_facts()
        raise GpusTaken("; ".join([*down, *named][:3]) or str(error)) from None

    def _groups_of(self, gang: Gang) -> tuple[Group, ...]:
        """Nodes that give the same are one component of the Slurm job."""
        with_memory = "MEMORY" in self._config.get("SelectTypeParameters", "").upper()
        limits = site_nodes.limits_of(self._partition, self._config)
        found: dict[tuple[str, int, int], list[str]] = {}
        for part in gang.parts:
            record = self._records[part.node]
            gpus = range(len(site_nodes.kinds_of(record))) if self.mode == "whole" else part.gpus
            cpus, memory_mib = site_nodes.share_of(record, len(gpus), limits)
            shape = (site_nodes.gres_for(record, list(gpus)), cpus, memory_mib if with_memory else 0)
            found.setdefault(shape, []).append(part.node)
        return tuple(Group(tuple(nodes), *shape) for shape, nodes in found.items())

    def _wait_s(self, groups: int) -> int:
        """Heterogeneous jobs start only when the backfill scheduler comes round."""
        if groups == 1:
            return GIVEN_WITHIN_S
        words = self._config.get("SchedulerParameters", "").split(",")
        interval = next((word.partition("=")[2] for word in words if word.startswith("bf_interval=")), "30")
        return GIVEN_WITHIN_S + int(interval if interval.isdigit() else 30)

    def _time(self) -> str:
        """As long as the partition lets a job run, where it would give less by itself. Else nothing: then a QOS that
        allows less than the partition has its say."""
        if self.site.time_limit or self._partition is None:
            return self.site.time_limit
        return self._partition.max_time if self._partition.default_time != "NONE" else ""

    def _part(self, gang: Gang, launch: Launch, index: int) -> PartLaunch:
        part = gang.parts[index]
        gpus = [replace(gpu, uuid="" if gpu.virtual else str(gpu.index)) for gpu in self._facts[part.node].gpus]
        return part_launch(
            launch,
            index,
            gpus=gpus,
            base_env={},
            attempt_dir=str(self.shared.attempt(part.node, gang).path),
            poke="",
            master_addr=UNKNOWN_ADDRESS,
            master_port=UNKNOWN_PORT,
        )

    def _write_attempts(self, gang: Gang, launch: Launch, parts: Iterable[PartLaunch]) -> None:
        """In a thread."""
        if launch.checkpoint_dir:
            Path(launch.checkpoint_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        kill_wait_s = seconds_of(self._config.get("KillWait", "30 sec")) or 30.0
        for part in parts:
            step = {
                "key": self.site.key.hex(),
                "homes": self.homes,
                "homes_file": str(self.shared.homes),
                "lease_s": self.site.lease_s,
                "start_within_s": START_WITHIN_S,
                "term_grace_s": min(launch.grace_s, max(1.0, 0.8 * kill_wait_s)),
                "unknown_port": UNKNOWN_PORT,
                "unknown_address": UNKNOWN_ADDRESS,
                "visible": "ours" if self.mode == "whole" else "slurm",
            }
            self.shared.write_attempt(self.shared.attempt(part.node, gang), part.as_dict(), step)

    async def _start_steps(self, gang: Gang) -> None:
        """One srun for all nodes; returns when every step has called."""
        log = self.shared.logs / f"{gang.name}.log"
        command = [self.site.python, "-I", "-S", str(self.script), str(self.shared.nodes), gang.name, gang.token]
        args = srun_args(gang.slurm_job, self._groups_of(gang), command, output=str(log), whole=self.mode == "whole")
        self._expect(gang, gang.nodes)
        gang.srun = await asyncio.to_thread(_start_apart, gang.slurm_job, args, self.slurm.env, log)
        self._spawn(self._await_srun(gang, gang.srun))
        called = asyncio.gather(*(link.ready.wait() for link in gang.links.values()))
        ended = asyncio.ensure_future(gang.srun_ended.wait())
        try:
            deadline = asyncio.get_running_loop().time() + CALLED_WITHIN_S
            failed = False
            while not called.done() and not ended.done() and not failed:
                left_s = deadline - asyncio.get_running_loop().time()
                if left_s <= 0:
                    break
                await asyncio.wait([called, ended], timeout=min(1.0, left_s), return_when=asyncio.FIRST_COMPLETED)
                failed = await asyncio.to_thread(_has_failed, log)
            if called.done():
                return
            raise await self._unheard(gang, log, failed=failed or ended.done())
        finally:
            called.cancel()
            ended.cancel()
            await asyncio.gather(called, ended, return_exceptions=True)

    async def _unheard(self, gang: Gang, log: Path, *, failed: bool) -> Refused:
        """Steps have not called: which, why, and what to do about it."""
        silent = [node for node, link in gang.links.items() if not link.ready.is_set()]
        own_words = [self.shared.attempt(node, gang).path / "supervisor.log" for node in silent]
        said = await asyncio.to_thread(_first_words, own_words)
        said_srun = await asyncio.to_thread(_last_line, log)
        where = f"node{'s' if len(silent) > 1 else ''} {', '.join(silent[:5])}{', …' if len(silent) > 5 else ''}"
        if silent and not gang.srun_ended.is_set():
            self._avoid(silent, gang)
        if failed and not said:
            return Refused(
                f"the step did not come up on {where} ({said_srun or 'without a word'}): nodes must see "
                f"{self.site.shared_dir} and {self.site.python}; `thebes up --shared` names another folder"
            )
        return Refused(
            f"no call from {where} within {CALLED_WITHIN_S:g} s ({said or said_srun or 'without a word'}): nodes must "
            f"reach {self.homes[0]}; if not, name an address of this machine that they do with `thebes up --home`"
        )

    def _avoid(self, nodes: Iterable[str], gang: Gang) -> None:
        """Steps there cannot run or call us: for a while nothing is started there, or all jobs would try in turn."""
        until = asyncio.get_running_loop().time() + UNHEARD_S
        others = [part for _, other in self._allocated() if other is not gang for part in other.parts]
        held = {(part.node, number) for part in others for number in part.gpus}
        why = f"a step on its node did not call us at {self.homes[0]}"
        every = [(node, gpu.index) for node in nodes for gpu in self._facts[node].gpus]
        self._withheld |= dict.fromkeys([gpu for gpu in every if gpu not in held], (until, why))
        self._look.set()

    async def _await_srun(self, gang: Gang, process: subprocess.Popen[bytes]) -> None:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, gone.set)
        try:
            await gone.wait()
            process.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        gang.srun_ended.set()

    async def _start_ranks(self, gang: Gang) -> None:
        first = gang.links[gang.nodes[0]]
        port = int(await first.call("port", {}))
        address = self._facts[gang.nodes[0]].address or "127.0.0.1"
        gang.master = (address, port)
        gang.phase = "started"
        try:
            await self._durably(self.shared.save, gang)
        except BaseException:
            gang.phase = "launching"
            raise
        order = {"master_addr": address, "master_port": port}
        links = [gang.links[node] for node in gang.nodes]
        answers = await asyncio.gather(*(link.call("start", order, START_S) for link in links), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for link, answer in zip(links, answers, strict=True):
            if not isinstance(answer, BaseException):
                self._note(gang, link.report_from(answer))
        failed = [report for report in gang.reports.values() if report.cause == "launch-failed"]
        if len(links) > 1 and (errors or failed):
            why = str(errors[0]) if errors else f"{failed[0].node}: {failed[0].detail}"
            because = {"because": f"{GANG_NOT_STARTED}: {why}"}
            alive = [gang.links[node] for node in gang.alive]
            await asyncio.gather(*(link.call("kill", because) for link in alive), return_exceptions=True)
        if errors:
            gang.kill_asked = True
            self._release(gang, at_once=True)

    async def _abandon(self, gang: Gang) -> None:
        """Nothing of it has started, and nothing stays."""
        links = [link for link in gang.links.values() if link.ready.is_set()]
        await asyncio.gather(*(link.call("kill", {}, 2.0) for link in links), return_exceptions=True)
        gang.phase = "over"
        if gang.slurm_job:
            self._release(gang, at_once=True)
            _, task = self._releasing[gang.slurm_job]
            with suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    await asyncio.shield(task)
        for link in gang.links.values():
            await link.end()
        if self._gangs.get(gang.key) is gang:
            del self._gangs[gang.key]
        await asyncio.to_thread(self.shared.remove_attempts, gang)

    async def _remove(self, gang: Gang) -> None:
        """Kill an incarnation and wait until it is gone."""
        await self._kill(gang)
        if not await self._until_over(gang, KILLED_WITHIN_S + 15.0):
            raise Refused(f"incarnation {gang.incarnation} of job {gang.job_id} cannot be ended")

    async def _until_over(self, gang: Gang, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while gang.alive:
                    await gang.changed.wait()
        return not gang.alive

    async def notice(self, job_id: str, incarnation: int, grace_s: float) -> None:
        await self._each(self._living(job_id, incarnation), "notice", grace_s=grace_s)

    async def terminate(self, job_id: str, incarnation: int, grace_s: float) -> None:
        await self._each(self._living(job_id, incarnation), "terminate", grace_s=grace_s)

    async def kill(self, job_id: str, incarnation: int) -> None:
        gang = self._gangs.get((job_id, incarnation))
        if gang is None:
            if not (self.shared.gangs / f"{job_id}.{incarnation}.json").exists():
                # Its start may still be on the way: it must not come to life after this.
                await asyncio.to_thread(self.shared.raise_fence, job_id, incarnation + 1)
            return
        if gang.alive:
            await self._kill(gang)

    async def _kill(self, gang: Gang) -> None:
        gang.kill_asked = True
        with suppress(Refused, OSError, TimeoutError):
            await self._each(gang, "kill")
            self._spawn(self._insist(gang))
            return
        if gang.slurm_job:
            self._release(gang, at_once=True)
            self._look.set()

    async def _insist(self, gang: Gang) -> None:
        if not await self._until_over(gang, KILLED_WITHIN_S) and gang.slurm_job:
            self._release(gang, at_once=True)
            self._look.set()

    async def suspend(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        """Never: a job that stands still keeps its GPUs as far as Slurm is concerned, so nobody else could use them."""
        self._living(job_id, incarnation)
        raise Refused(f"'{mechanism}' makes no room under Slurm: it would not give the GPUs to another job")

    async def resume(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        self._living(job_id, incarnation)
        raise Refused(f"nothing is suspended by '{mechanism}' under Slurm")

    async def forget(self, job_id: str, incarnation: int) -> None:
        gang = self._gangs.get((job_id, incarnation))
        if gang is None:
            return
        if gang.alive:
            raise Refused(f"job {job_id} is alive on node {gang.alive[0]}: it cannot be forgotten")
        await asyncio.to_thread(self.shared.drop, gang)
        self._gangs.pop(gang.key, None)
        lock = self._locks.get(job_id)
        if lock is not None and not lock.locked():
            del self._locks[job_id]

    async def read_log(self, job_id: str, incarnation: int, rank: int, offset: int, limit: int) -> tuple[bytes, int]:
        """FileNotFoundError when no node has a log of this rank."""
        return await asyncio.to_thread(self._read_log, (job_id, incarnation), rank, offset, limit)

    def _read_log(self, key: Key, rank: int, offset: int, limit: int) -> tuple[bytes, int]:
        gang = self._gangs.get(key)
        for node in gang.nodes if gang is not None else self.site.gpus:
            with suppress(FileNotFoundError):
                return read_log(self.shared.attempt(node, key).log(rank), offset, limit)
        raise FileNotFoundError(f"there is no log of rank {rank} of job {key[0]}, incarnation {key[1]}")

    def _lock(self, job_id: str) -> asyncio.Lock:
        return self._locks.setdefault(job_id, asyncio.Lock())

    def _living(self, job_id: str, incarnation: int) -> Gang:
        gang = self._gangs.get((job_id, incarnation))
        if gang is None:
            raise Refused(f"this cluster has no incarnation {incarnation} of job {job_id}")
        if not gang.alive:
            raise Refused(f"job {job_id} has ended")
        return gang

    async def _each(self, gang: Gang, op: str, timeout_s: float = CALL_S, **more: Any) -> None:
        """To every part that has not ended; the first error is raised after all have answered."""
        links = [gang.links[node] for node in gang.alive]
        answers = await asyncio.gather(*(link.call(op, more, timeout_s) for link in links), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _durably(self, work: Callable[..., None], *args: Any) -> None:
        try:
            await asyncio.to_thread(work, *args)
        except UserError as error:
            raise OSError(error.message) from None


def _start_apart(job: int, args: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process that outlives us: another session, its own files.

    When srun has ended, so have all tasks, and nobody needs the allocation: it goes back even if we are not there. Not
    if srun was killed, though: then they may live.
    """
    args = ["/bin/sh", "-c", f'"$@"; [ $? -gt 128 ] || exec scancel --quiet {job}', "thebes-srun", *args]
    with log.open("ab") as out:
        return subprocess.Popen(
            args, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd="/", start_new_session=True
        )


def _has_failed(log: Path) -> bool:
    """Whether srun tells that a task has ended."""
    with suppress(OSError):
        return OVER in log.read_text("utf-8", "replace")
    return False


def _first_words(logs: Iterable[Path]) -> str:
    """What the first of them says that says anything; the others are not read."""
    return next(filter(None, map(_last_line, logs)), "")


def _last_line(path: Path) -> str:
    """What was said last, but for srun's own words that something has ended."""
    with suppress(OSError):
        lines = path.read_text("utf-8", "replace").strip().splitlines()
        telling = [line for line in lines if OVER not in line]
        return (telling or lines or [""])[-1][:300]
    return ""


def _in_words(state: str) -> str:
    known = {
        "TIMEOUT": "at the time limit of its partition",
        "PREEMPTED": "preempted by the site",
        "CANCELLED": "cancelled",
        "NODE_FAIL": "over because a node failed",
        "gone": "over",
    }
    return known.get(state, f"over ({state})")
