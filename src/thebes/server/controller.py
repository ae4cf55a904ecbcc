"""The controller: one loop that hears, decides, writes down and then acts. All judgement is in `core`.

Messages (reports of nodes, users' wishes, arrivals) wait in one inbox. A turn of the loop hands them to the core, asks
the policy if anything changed, commits what came out in one transaction, and only then gives the commands to the
engine. Commands of one job are carried out in order, those of different jobs side by side.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sqlalchemy import Connection

from thebes.engine.contract import (
    PARKED_LEASE_S,
    Engine,
    GpusTaken,
    NodeChange,
    NodeFacts,
    Refused,
    Report,
)
from thebes.model.decision import NO_GPUS
from thebes.model.errors import UserError
from thebes.node.instance import Instance
from thebes.node.launch import torchrun_command
from thebes.server import store as db
from thebes.server.clock import ClusterClock, resume_clock
from thebes.server.core import Command, Core, PolicyFailed, Settings, failed_dependency
from thebes.server.errors import Conflict, Forbidden, Invalid, NotFound
from thebes.server.forecast import expected_start_s, forecast
from thebes.server.ledger import Ledger, NodeSpec
from thebes.server.metrics import Metrics
from thebes.server.recovery import (
    check_dependencies,
    last_checkpoints,
    last_instant_s,
    named,
    newest_job,
    unfinished_dependencies,
)
from thebes.server.snapshots import Snapshots
from thebes.server.spec import JobSpec

if TYPE_CHECKING:
    from thebes.server.config import Config
    from thebes.server.principal import Principal

logger = logging.getLogger("thebes.controller")

SNAPSHOT_EVERY = 5000  # journal entries between two snapshots of the ledger
NODES_WAIT_S = 3.0  # how long a start waits for all nodes before it goes on with those that answered
SITE_WAIT_S = 0.5
DECISION_SHARE = 0.2  # at most this share of time goes into decisions when a flood of jobs comes in
LONGEST_PAUSE_S = 0.25
LONG_DECISION_S = 0.01
RETRY_S = (0.1, 2.0)  # pauses between two tries of a command whose node cannot be reached
QUEUE_ROOM = 10_000  # events that a subscriber may lag behind
MAX_ESTIMATED = 500  # jobs alive; with more, nobody is told when it will start

T = TypeVar("T")
Message = Callable[[float], None]


class Changes:
    """Who wants to hear of events gets them in a queue of their own; who is too slow is told so, once, and dropped."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[dict[str, Any]]] = set()

    def subscribe(self) -> asyncio.Queue[dict[str, Any]]:
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(QUEUE_ROOM + 1)
        self._queues.add(queue)
        return queue

    def unsubscribe(self, queue: asyncio.Queue[dict[str, Any]]) -> None:
        self._queues.discard(queue)

    def publish(self, event: dict[str, Any]) -> None:
        for queue in list(self._queues):
            if queue.qsize() >= QUEUE_ROOM:
                queue.put_nowait({"kind": "lagged"})
                self._queues.discard(queue)
            else:
                queue.put_nowait(event)


class Controller:
    """The live scheduler of one instance."""

    def __init__(
        self,
        store: db.Store,
        engine: Engine,
        config: Config,
        instance: Instance,
        *,
        clock: Callable[[str | None, float], ClusterClock] = resume_clock,
    ) -> None:
        from thebes.server.config import live_policy

        self.store = store
        self.engine = engine
        self.config = config
        self.instance = instance
        self.policy, self.placement = live_policy(config)
        self.metrics = Metrics()
        self.changes = Changes()
        self.shared = Instance(Path(config.shared_dir)) if config.shared_dir else instance  # what jobs see
        self.snapshots = Snapshots(self.shared.dir, config.limits)
        self.trouble: str | None = None  # why the policy cannot be asked
        self._clock_of = clock
        self._inbox: list[Message] = []
        self._bell = asyncio.Event()
        self._orders: dict[str, asyncio.Task[None]] = {}
        self._background_work: set[asyncio.Future[None]] = set()
        self._told_of: dict[str, NodeFacts] = {}
        self._waiting: asyncio.Task[None] | None = None  # for nodes that were left to themselves
        self._broken: BaseException | None = None  # why the loop must end
        self._pending: dict[str, list[Command]] = {}
        self._on_the_way: set[tuple[str, int]] = set()  # launches ordered and not yet carried out or refused
        self._loop: asyncio.Task[None] | None = None
        self._decided_at = 0.0
        self._decision_took_s = 0.0
        self._put_off = False
        self._stopped = False
        self._at_work = False

    # -- open and close ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take up where the last controller stopped: first the store, then what lives on the nodes."""
        started = time.monotonic()
        with self.store.read() as c:
            kept, last_s, left = db.get_meta(c, "clock"), last_instant_s(c), db.get_meta(c, "left")
            rows, attempts = db.alive_jobs(c), db.open_attempts(c)
            drained, tenants = db.drained_nodes(c), db.list_tenants(c)
            waits_for, failed = unfinished_dependencies(c, rows)
            checkpoints = last_checkpoints(c)
            ledger = self._packs(self._restored(list(db.journal_since_snapshot(c)), rows))
            ever = db.jobs_ever(c)
        newest = await asyncio.to_thread(newest_job, self.shared.jobs)
        if newest > ever:  # the store is from a backup: checkpoints and logs of jobs that it does not know are there
            await self.store.change(lambda c: db.pass_over_jobs(c, newest), must=True)
        self.clock = self._clock_of(kept, last_s)
        now_s = self.clock.now_s()
        settings = Settings(self.config.grace_s, self.config.log_limit_mib << 20, str(self.shared.jobs))
        self.core = core = Core(ledger, settings, self.metrics)
        # The journal goes on with the ledger as it is now: the nodes or the policy may have changed.
        self._keep_snapshot(now_s)
        core.load(rows, attempts, waits_for, failed, drained, now_s)
        core.note_checkpoints(checkpoints)
        for tenant in tenants:
            core.set_quota(tenant.name, tenant.gpu_quota, now_s)
        await self.engine.open(self._heard, parked_s=_parked_s(left))
        nodes = await self._nodes_up()
        reports = [self._in_cluster_time(report) for report in await self.engine.reports()]
        core.reconcile(reports, nodes, self.clock.now_s())
        kept_clock = self.clock.kept()
        core.writes.append(lambda c: db.set_meta(c, "clock", kept_clock))
        if left:
            self._waiting = asyncio.create_task(self._all_are_back())
        self._loop = asyncio.create_task(self._run(), name="controller")
        self._bell.set()
        logger.info(
            "open",
            extra={"fields": {"jobs": len(rows), "attempts": len(attempts), "took_s": time.monotonic() - started}},
        )

    def _restored(self, entries: Collection[db.JournalEntry], rows: Collection[db.JobRow]) -> Ledger:
        nodes = [NodeSpec(n.name, n.gpus, n.gpu_type, rack=n.rack) for n in self.config.nodes]
        ledger: Ledger | None = None
        for entry in entries:
            if entry.kind == "snapshot":
                ledger = Ledger.restore(entry.body, self.policy, self.placement)
                before = entry.body.get("config")
            elif ledger is not None:
                ledger.apply(entry.body)
        if ledger is None:
            return Ledger(nodes, self.policy, self.placement)
        if ledger.nodes != tuple(nodes) or before != self._chosen():
            gpu_types = {row.id: JobSpec.model_validate_json(row.spec).gpu_type for row in rows}
            return ledger.moved_to(nodes, self.policy, self.placement, gpu_types)
        return ledger

    def _packs(self, ledger: Ledger) -> Ledger:
        """Jobs share GPUs or do not, as configured now. Those who shared are stopped if they may not any more."""
        ledger.packing = self.config.packing
        if not ledger.packing:
            ledger.guests = {}
        return ledger

    def _chosen(self) -> dict[str, Any]:
        """What a journal must be replayed with."""
        config = self.config
        return {
            "policy": config.policy,
            "policy_settings": list(config.policy_settings),
            "placement": config.placement,
        }

    async def _nodes_up(self) -> list[NodeFacts]:
        """All nodes if they answer soon; else those that do. The rest reports when it can."""
        # Agents of this machine start together with us; a site has told what it could when the engine opened.
        deadline = time.monotonic() + (NODES_WAIT_S if self.config.engine == "local" else SITE_WAIT_S)
        while True:
            nodes = await self.engine.nodes()
            if (nodes and all(node.alive for node in nodes)) or time.monotonic() > deadline:
                return nodes
            await asyncio.sleep(0.02)

    async def ended(self) -> None:
        """Returns when the loop has stopped, or raises what it failed of: without it nothing happens any more."""
        assert self._loop is not None
        await asyncio.shield(self._loop)

    async def close(self) -> None:
        """Stop deciding. Jobs go on; the next controller takes them over."""
        self._stopped = True
        if self._loop is not None:
            self._bell.set()
            with suppress(asyncio.CancelledError):
                await self._loop
        for task in [*self._orders.values(), *self._background_work, *([self._waiting] if self._waiting else [])]:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.engine.close()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        self._inbox.append(message)
        self._bell.set()

    async def _ask(self, question: Callable[[float], T]) -> T:
        """Have the loop do something, and wait until what came of it is committed."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def message(now_s: float) -> None:
            try:
                result = question(now_s)
            except UserError as error:
                if not answer.done():  # who asked may have given up
                    answer.set_exception(error)
            else:
                self._after_commit.append(lambda: None if answer.done() else answer.set_result(result))

        self._tell(message)
        return await answer

    async def _run(self) -> None:
        self._after_commit: list[Callable[[], None]] = []
        while not self._stopped:
            await self._ring()
            if self._broken is not None:
                raise self._broken
            if self._stopped:
                break
            self._at_work = True
            self._turn()
            await self._commit_and_act()
            self._at_work = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until something happens."""
        return not (self._at_work or self._inbox or self._orders or self._background_work or self.core.dirty)

    async def _ring(self) -> None:
        """Until there is something to do: a message, or an instant at which the policy wants to be asked."""
        pause_s: float | None = None
        if self.core.dirty:
            pause_s = max(0.0, self._decided_at + self._pause_s() - time.monotonic())
        elif self.core.ledger.wake_s < float("inf") and not self.core.closing:
            allowed_s = self._decided_at + self._pause_s() - time.monotonic()
            pause_s = max(0.0, self.core.ledger.wake_s - self.clock.now_s(), allowed_s)
        if pause_s is None or pause_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), pause_s)
        else:
            await asyncio.sleep(0)  # let the others have their turn, too
        self._bell.clear()

    def _pause_s(self) -> float:
        """Between two decisions when much happens: so that deciding takes only a share of the time."""
        return min(LONGEST_PAUSE_S, self._decision_took_s * (1 / DECISION_SHARE - 1))

    def _turn(self) -> None:
        core, now_s = self.core, self.clock.now_s()
        messages, self._inbox = self._inbox, []
        for message in messages:
            message(now_s)
        if core.closing:
            core.dirty = False  # nothing is decided any more, so nothing is due
        due = core.dirty or core.ledger.wake_s <= now_s
        # Who asked for something is answered first, where a decision takes long; the next turn decides.
        self._put_off = bool(self._after_commit) and not self._put_off and self._decision_took_s > LONG_DECISION_S
        if due and not core.closing and not self._put_off and time.monotonic() >= self._decided_at + self._pause_s():
            self._decide()

    def _decide(self) -> None:
        core, started = self.core, time.perf_counter()
        try:
            core.decide(self.clock.now_s())
            self.trouble = None
        except PolicyFailed as error:
            # Jobs go on as they are. Any other error is ours and may have left half a decision behind: it ends this
            # process, and the next one begins with what is in the store.
            if self.trouble != str(error):
                logger.error("decision failed", exc_info=error, extra={"fields": {"error": str(error)}})
            self._failed(str(error))
        self._decision_took_s = time.perf_counter() - started
        self._decided_at = time.monotonic()
        self.metrics.decided(self._decision_took_s)
        self._estimate()

    def _estimate(self) -> None:
        """When will a job start that has just had to wait? Once per job, one job per turn, where it is cheap to say."""
        core = self.core
        if self.trouble is not None or len(core.jobs) > MAX_ESTIMATED:
            return
        for job in core.jobs.values():
            if not job.asked_when and core.ledger.fate_of(job.id) == NO_GPUS and not job.incarnation:
                job.asked_when = True
                job.expected_start_s = expected_start_s(core, job.id, self.clock.now_s())
                return

    def _failed(self, what: str) -> None:
        self.trouble = what
        self.core.dirty = False
        self.core.ledger.wake_s = self.clock.now_s() + 10.0

    def _keep_snapshot(self, now_s: float) -> None:
        core = self.core
        core.journalled = 0
        body = core.ledger.snapshot(now_s) | {"config": self._chosen()}
        core.writes.append(lambda c: _keep_snapshot(c, body))

    async def _commit_and_act(self) -> None:
        core = self.core
        if core.journalled >= SNAPSHOT_EVERY:
            self._keep_snapshot(self.clock.now_s())
        writes, commands, told = core.take()
        after, self._after_commit = self._after_commit, []
        if writes:
            started = time.perf_counter()
            # Must: the core has moved on. While the disk is full we wait here, and jobs go on without us.
            await self.store.change(lambda c: [write(c) for write in writes], must=True)
            self.metrics.committed(time.perf_counter() - started, len(writes))
        for event in told:
            self.changes.publish(event)
            logger.info(event["kind"], extra={"fields": {k: event[k] for k in ("job_id", "node", "detail")}})
        for done in after:
            done()
        for command in commands:
            self._order(command)

    # -- the engine ----------------------------------------------------------------------------------------------------

    def _heard(self, what: Report | NodeChange) -> None:
        if isinstance(what, Report):
            report = self._in_cluster_time(what)
            self._tell(lambda now_s: self.core.report(report, now_s))
            return
        facts, before = what.facts, self._told_of.get(what.facts.name)
        self._told_of[facts.name] = facts
        if self._inbox and isinstance(self._inbox[-1], _NodeNews):
            self._inbox[-1].changed.append(facts)
        else:
            self._tell(_NodeNews(self.core, facts))
        if facts.alive and (before is None or (before.alive, before.pid) != (True, facts.pid)):
            self._background(self._node_back(facts.name))  # it may have been away for a moment only, before we looked

    async def _node_back(self, node: str) -> None:
        """An agent is back: what it does not know any more has ended while it was away."""
        heard_of, on_the_way = self.core.heard_of(node), set(self._on_the_way)
        with suppress(OSError, TimeoutError, Refused):
            reports = [self._in_cluster_time(r) for r in await self.engine.reports() if r.node == node]

            def message(now_s: float) -> None:
                for report in reports:
                    self.core.report(report, now_s)
                self.core.node_back(node, reports, heard_of, on_the_way | self._on_the_way, now_s)

            self._tell(message)

    def _in_cluster_time(self, report: Report) -> Report:
        from dataclasses import replace

        times = ("started_s", "exited_s", "checkpoint_s", "step_s", "first_step_s")
        found = {name: getattr(report, name) for name in times}
        return replace(report, **{k: self.clock.from_boot(v) for k, v in found.items() if v is not None})

    def _background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background_work.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Future[None]) -> None:
        self._background_work.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # An acknowledged job may depend on it: the next controller reads everything anew.
            self._broken = task.exception()
            self._bell.set()

    def _order(self, command: Command) -> None:
        """Commands of one job go to the engine in order."""
        waiting = self._pending.setdefault(command.job_id, [])
        waiting.append(command)
        if command.verb == "launch":
            self._on_the_way.add((command.job_id, command.incarnation))
        if command.job_id not in self._orders:
            self._orders[command.job_id] = asyncio.create_task(self._carry_out_all(command.job_id))

    async def _carry_out_all(self, job_id: str) -> None:
        try:
            while self._pending.get(job_id):
                command = self._pending[job_id].pop(0)
                await self._carry_out(command)
                if command.verb == "launch":
                    self._tell(functools.partial(self._launch_known, job_id, command.incarnation))
        finally:
            self._pending.pop(job_id, None)
            self._orders.pop(job_id, None)

    def _launch_known(self, job_id: str, incarnation: int, _now_s: float) -> None:
        """A launch is on the way until the core has heard how it went: no node that is back may judge it before."""
        self._on_the_way.discard((job_id, incarnation))

    async def _carry_out(self, command: Command) -> None:
        """Until it is done or refused; a node that cannot be reached now can be reached later."""
        pause_s, longest_s = RETRY_S
        called_off: Command | None = None
        while True:
            try:
                await self._try(command)
                if command.verb == "kill" and called_off is not None:
                    self._refused(called_off, "it was stopped before it had started")
                return
            except Refused as refused:
                self._refused(command, str(refused), taken=isinstance(refused, GpusTaken))
                return
            except (OSError, TimeoutError) as error:
                logger.warning(
                    "engine", extra={"fields": {"verb": command.verb, "job_id": command.job_id, "error": str(error)}}
                )
                if self._pending.get(command.job_id) and command.verb in ("notice", "suspend", "forget"):
                    return  # a later command says more; what is not forgotten is told of when the node is back
                await asyncio.sleep(pause_s)
                pause_s = min(longest_s, 2 * pause_s)
                if command.verb == "launch" and self._called_off(command):
                    called_off = command
                    command = Command("kill", command.job_id, command.incarnation)  # so that it cannot come to life
            except Exception as error:
                logger.exception("engine")
                self._refused(command, f"{type(error).__name__}: {error}")
                return

    def _called_off(self, launch: Command) -> bool:
        """Whether the job shall stop before its launch has reached the node; the orders to stop are taken back then."""
        waiting = self._pending.get(launch.job_id, [])
        stops = [
            c for c in waiting if c.incarnation == launch.incarnation and c.verb in ("notice", "terminate", "kill")
        ]
        for command in stops:
            waiting.remove(command)
        return bool(stops)

    async def _try(self, command: Command) -> None:
        engine, job, incarnation = self.engine, command.job_id, command.incarnation
        if command.verb == "launch":
            assert command.launch is not None
            if command.snapshot is not None:
                digest = command.snapshot
                try:
                    await asyncio.to_thread(self.snapshots.unpack, digest, job)
                except UserError as error:
                    raise Refused(error.message) from None
            await engine.launch(command.launch)
        elif command.verb == "notice":
            await engine.notice(job, incarnation, command.grace_s)
        elif command.verb == "terminate":
            await engine.terminate(job, incarnation, command.grace_s)
        elif command.verb == "kill":
            await engine.kill(job, incarnation)
        elif command.verb == "forget":
            await engine.forget(job, incarnation)
        elif command.verb == "suspend":
            await engine.suspend(job, incarnation, command.mechanism)
            self._tell(lambda now_s: self.core.suspended(job, incarnation, now_s))
        else:
            started = time.perf_counter()
            await engine.resume(job, incarnation, command.mechanism)
            took_s = time.perf_counter() - started
            self._tell(lambda now_s: self.core.resumed(job, incarnation, took_s, now_s))

    def _refused(self, command: Command, why: str, *, taken: bool = False) -> None:
        job, incarnation = command.job_id, command.incarnation
        answers: dict[str, Callable[[float], None]] = {
            "launch": lambda now_s: self.core.launch_refused(job, incarnation, why, now_s, taken=taken),
            "suspend": lambda now_s: self.core.suspend_refused(job, incarnation, why, now_s),
            "resume": lambda now_s: self.core.resume_refused(job, incarnation, why, now_s),
        }
        if command.verb in answers:
            self._tell(answers[command.verb])
        else:
            # Whoever we wanted to stop is not there: its node will tell, or has told, how it ended.
            logger.info("refused", extra={"fields": {"verb": command.verb, "job_id": job, "why": why}})

    # -- what users ask for --------------------------------------------------------------------------------------------

    async def submit(self, spec: JobSpec, principal: Principal, *, client_key: str | None = None) -> list[str]:
        """Accept a job: when this returns, it is in the store. The ids of the job, or of all members of the array."""
        tenant = self._check(spec, principal)
        spec_json = spec.model_dump_json(exclude_defaults=True)
        now_s = self.clock.now_s()
        members: list[int | None] = [None] if spec.array is None else list(dict.fromkeys(spec.array))

        def create(c: Connection) -> tuple[list[db.JobRow], bool, set[str], tuple[str, str] | None]:
            again = client_key is not None and db.key_is_used(c, principal.user, client_key)
            waits_for, failed = (set[str](), None) if again else check_dependencies(c, spec, principal)
            rows = db.create_jobs(
                c,
                spec_json,
                members=members,
                user=principal.user,
                tenant=tenant,
                name=spec.name,
                gpus=spec.gpus,
                nodes=spec.nodes,
                priority=spec.priority,
                submit_s=now_s,
                client_key=client_key,
                held=spec.hold,
                after=[*spec.after, *spec.after_any],
            )
            return rows, again, waits_for, failed

        def accepted(created: asyncio.Future[Any]) -> None:
            if created.cancelled() or created.exception() is not None:
                return
            rows, again, waits_for, failed = created.result()
            if not again:  # else it has arrived already, and may have ended
                waits = {row.id: waits_for for row in rows}
                self._tell(lambda now_s: self._arrive(rows, waits, {row.id: failed for row in rows if failed}, now_s))
                self.metrics.submitted(tenant, len(rows))

        created = self.store.change(create, must=False)
        created.add_done_callback(accepted)
        rows, *_ = await asyncio.shield(created)  # what is committed arrives, also if the caller has given up waiting
        return [row.id for row in rows]

    def _arrive(
        self,
        rows: list[db.JobRow],
        waits_for: Mapping[str, Collection[str]],
        failed: Mapping[str, tuple[str, str]],
        now_s: float,
    ) -> None:
        if any(other not in self.core.jobs for others in waits_for.values() for other in others):
            self._background(self._arrive_later(rows))  # some ended between the commit and now: look again
            return
        for row in rows:
            if row.id in failed:
                self.core.dependency_failed([row], *failed[row.id], now_s)
            else:
                self.core.arrived([row], waits_for.get(row.id, ()), now_s)

    async def _arrive_later(self, rows: list[db.JobRow]) -> None:
        def look() -> tuple[dict[str, set[str]], dict[str, tuple[str, str]]]:
            with self.store.read() as c:
                return unfinished_dependencies(c, rows)

        found = await asyncio.to_thread(look)
        self._tell(lambda now_s: self._arrive(rows, *found, now_s))

    def _check(self, spec: JobSpec, principal: Principal) -> str:
        """Refuse what can never run; the tenant it runs for."""
        if self.core.closing:
            raise Conflict("the cluster is going down", hint="`thebes up` starts it again")
        tenant = spec.tenant or principal.tenant
        if tenant != principal.tenant and not principal.is_admin:
            raise Forbidden(f"your jobs run for tenant '{principal.tenant}', not '{tenant}'", hint="leave --tenant out")
        why_not = self.core.ledger.never_fits(spec.gpus, spec.nodes, spec.gpu_type)
        if why_not:
            raise Invalid(f"the job can never run: {why_not}", hint="`thebes nodes` shows what there is")
        if spec.launcher == "torchrun":
            try:
                torchrun_command(spec.command, nodes=1, node_rank=0, ranks=1, master_addr="", master_port=0)
            except Refused as refused:
                raise Invalid(f"the job can never run: {refused}", hint="or use the plain launcher") from None
        if spec.priority > 0 and not principal.is_admin:
            raise Forbidden(
                "a priority above 0 would put your job before everybody else's: only an admin can give one",
                hint="leave --priority out; below 0 lets others go first",
            )
        quota = self.quota(tenant)
        if quota is not None and spec.gpus > quota:
            raise Invalid(
                f"the job can never run: it asks for {spec.gpus} GPUs, the quota of tenant '{tenant}' is {quota}",
                hint="ask for fewer GPUs, or have an admin raise the quota",
            )
        if spec.snapshot is not None and not self.snapshots.has(spec.snapshot):
            raise Invalid("the snapshot named was not uploaded", hint="`thebes submit --snapshot` does both")
        return tenant

    def quota(self, tenant: str) -> int | None:
        """GPUs that the tenant may hold at once; None: no limit."""
        ledger = self.core.ledger
        if tenant not in ledger.tenants:
            return None
        quota = ledger.limits[ledger.tenants.index(tenant)]
        return None if quota >= 1 << 60 else quota

    async def set_quota(self, tenant: str, gpus: int | None) -> None:
        """An admin has changed a tenant: it holds from now on."""
        await self._ask(lambda now_s: self.core.set_quota(tenant, gpus, now_s))

    async def act(self, verb: str, job_id: str, principal: Principal, **options: Any) -> list[str]:
        """cancel, hold, release, requeue or preempt a job, or all members of an array that it can be done to."""

        def look() -> list[db.JobRow]:
            with self.store.read() as c:
                return named(c, job_id)

        rows = await asyncio.to_thread(look)
        if not rows or not (principal.is_admin or rows[0].user == principal.user):
            raise NotFound(f"there is no job {job_id}", hint="`thebes ps` lists yours")
        whole_array = rows[0].id != job_id

        def act(now_s: float) -> list[str]:
            done: list[str] = []
            refused: UserError | None = None
            for row in rows:
                try:
                    self._act_on(verb, row, principal.user, now_s, **options)
                    done.append(row.id)
                except UserError as error:
                    refused = error
                    if not whole_array:
                        raise
            if not done and refused is not None:
                raise refused
            return done

        return await self._ask(act)

    def _act_on(self, verb: str, row: db.JobRow, actor: str, now_s: float, *, grace_s: float | None = None) -> None:
        core = self.core
        if row.id not in core.jobs:
            if not row.terminal:
                raise Conflict(f"job {row.id} has just been submitted or has just ended", hint="try again")
            if verb == "requeue":
                ended, waits_for, checkpoints = self._as_it_ended(row)
                core.requeue_ended(ended, waits_for, actor, now_s)
                core.note_checkpoints(checkpoints)
                return
            raise Conflict(
                f"job {row.id} has ended already: {row.state}", hint=f"`thebes requeue {row.id}` runs it again"
            )
        if verb == "cancel":
            core.cancel(row.id, actor, now_s)
        elif verb == "hold":
            core.hold(row.id, actor, now_s)
        elif verb == "release":
            core.release(row.id, actor, now_s)
        elif verb == "requeue":
            core.requeue(row.id, actor, now_s)
        elif verb == "preempt":
            core.requeue(row.id, actor, now_s, why="preempt", grace_s=grace_s)
        else:
            raise Invalid(f"there is no '{verb}'", hint="cancel, hold, release, requeue or preempt")

    def _as_it_ended(self, row: db.JobRow) -> tuple[db.JobRow, set[str], dict[str, tuple[int | None, str]]]:
        """Look again: since it was read, the job may have run once more. With what it comes after that has not ended,
        and the last checkpoint that it told."""
        with self.store.read() as c:
            row = db.get_job(c, row.id) or row
            checkpoints = last_checkpoints(c, row.id)
            waits_for, failed = unfinished_dependencies(c, [row])
        if not row.terminal:
            raise Conflict(f"job {row.id} has just ended", hint="try again")
        if row.incarnation:  # who was let go on once waits no more
            return row, set(), checkpoints
        if row.id in failed:
            other, state = failed[row.id]
            raise Conflict(
                f"job {row.id} comes after job {other}, which is {state}", hint=f"`thebes requeue {other}` first"
            )
        # What has just ended is not in the store yet, perhaps; but it is not in the core any more.
        return row, waits_for.get(row.id, set()) & self.core.jobs.keys(), checkpoints

    async def drain(self, node: str, reason: str, preempt: bool, actor: str) -> None:
        await self._ask(lambda now_s: self.core.drain(node, reason, actor, now_s, preempt=preempt))

    async def undrain(self, node: str, actor: str) -> None:
        await self._ask(lambda now_s: self.core.undrain(node, actor, now_s))

    async def shutdown(self, mode: Literal["checkpoint", "keep", "kill"]) -> dict[str, Any]:
        """What becomes of running jobs when the cluster is stopped; answers when all that shall end has ended."""
        if mode == "keep":
            await self._leave()
            return {"mode": mode, "stopped": []}
        stopped = await self._ask(lambda now_s: self.core.stop_all(mode, now_s))
        patience_s = 10.0 + max((self._grace_s(job) for job in stopped), default=0.0)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and any(
            self.core.jobs[job].attempts for job in stopped if job in self.core.jobs
        ):
            await asyncio.sleep(0.02)
        await self._ask(lambda _: None)  # how they ended is in the store: whoever asks for it now is told
        retire = getattr(self.engine, "retire", None)  # see `Retires`
        if retire is not None:
            await retire()
        return {"mode": mode, "stopped": stopped}

    async def _all_are_back(self) -> None:
        """Until then the next controller must still know that nodes were left to themselves."""
        unparked = getattr(self.engine, "unparked", None)  # see `Parks`
        if unparked is not None:
            await unparked()
        self._tell(lambda now_s: self.core.writes.append(lambda c: db.set_meta(c, "left", "")))

    async def _leave(self) -> None:
        """Jobs shall go on without us. The next controller must know that nodes were told so."""
        left = json.dumps({"wall_s": time.time()})
        await self.store.change(lambda c: db.set_meta(c, "left", left), must=True)
        await self.engine.leave()

    def _grace_s(self, job_id: str) -> float:
        job = self.core.jobs.get(job_id)
        return self.config.grace_s if job is None or job.spec.grace_s is None else job.spec.grace_s

    async def plan(self, spec: JobSpec, principal: Principal) -> dict[str, Any]:
        """What would become of this job if it were submitted now."""

        def look() -> tuple[set[str], tuple[str, str] | None]:
            with self.store.read() as c:
                return check_dependencies(c, spec, principal)

        try:
            tenant = self._check(spec, principal)
            waits_for, failed = await asyncio.to_thread(look) if spec.after or spec.after_any else (set[str](), None)
            if failed is not None:
                raise Invalid(f"it would be cancelled at once: {failed_dependency(*failed)}")
        except Invalid as error:
            return {"starts": "never", "start_in_s": None, "reason": error.message, "nodes": {}, "preempts": []}
        return forecast(self.core, spec, tenant, waits_for, self.clock.now_s())

    # -- what is -------------------------------------------------------------------------------------------------------

    def live(self, job_id: str) -> dict[str, Any] | None:
        """What is known of a job beyond the store: why it waits, how far it is, where it runs."""
        job = self.core.jobs.get(job_id)
        if job is None:
            return None
        return {
            "reason": self.core.reason(job),
            "run_s": self.core.ran_s(job, self.clock.now_s()),
            "expected_start_s": job.expected_start_s if job.first_start_s is None else None,
            "step": job.step,
            "steps_per_s": job.steps_per_s,
            "gpus_held": {part.node: list(part.gpus) for part in job.active.parts} if job.active else {},
        }

    def nodes(self) -> list[dict[str, Any]]:
        core, found = self.core, []
        for spec in core.ledger.nodes:
            facts = core.nodes.get(spec.name)
            gpus: list[dict[str, Any]] = []
            for index in range(spec.gpus):
                holders = sorted(core.on_gpu.get(core.ledger.gpu_number(spec.name, index), ()))
                gpu = facts.gpus[index] if facts is not None and index < len(facts.gpus) else None
                gpus.append(
                    {
                        "index": index,
                        "uuid": gpu.uuid if gpu else "",
                        "name": gpu.name if gpu else "",
                        "memory_gib": gpu.memory_gib if gpu else 0.0,
                        "virtual": gpu.virtual if gpu else False,
                        "healthy": gpu.healthy if gpu else False,
                        "taken": gpu.taken if gpu else "",
                        "job": holders[0][0] if holders else None,
                        "user": core.jobs[holders[0][0]].user if holders and holders[0][0] in core.jobs else None,
                    }
                )
            found.append(
                {
                    "name": spec.name,
                    "alive": facts is not None and facts.alive,
                    "rack": spec.rack,
                    "drained": spec.name in core.drained or bool(facts is not None and facts.drained),
                    "reason": core.drained.get(spec.name, "")
                    or (facts.detail or facts.drained if facts is not None else ""),
                    "pid": facts.pid if facts is not None else None,
                    "mechanisms": list(facts.mechanisms) if facts is not None else [],
                    "gpus_total": spec.gpus,
                    "gpus_busy": sum(gpu["job"] is not None for gpu in gpus),
                    "gpus": gpus,
                }
            )
        return found

    def status(self) -> dict[str, Any]:
        core = self.core
        states: dict[str, int] = {}
        for job in core.jobs.values():
            states[job.state] = states.get(job.state, 0) + 1
        return {
            "policy": self.policy.label,
            "placement": self.placement.name,
            "gpus": {"total": core.ledger.cluster.total_gpus, "busy": len(core.on_gpu)},
            "jobs": states,
            "time_s": self.clock.now_s(),
            "trouble": self.trouble or self.store.trouble,
            "closing": core.closing,
        }

    def refresh_metrics(self) -> None:
        """Gauges that are worked out when somebody looks."""
        core = self.core
        jobs: dict[tuple[str, str], int] = {}
        for job in core.jobs.values():
            jobs[job.state, job.tenant] = jobs.get((job.state, job.tenant), 0) + 1
        self.metrics.set_jobs(jobs)
        gpus: dict[tuple[str, str], int] = {}
        largest_free = 0
        for node in self.nodes():
            name, busy, total = node["name"], node["gpus_busy"], node["gpus_total"]
            usable = node["alive"] and not node["drained"]
            rest = "free" if usable else "drained" if node["drained"] else "down"
            gpus[name, "busy"], gpus[name, rest] = busy, total - busy
            largest_free = max(largest_free, total - busy if usable else 0)
        self.metrics.set_gpus(gpus)
        free = sum(count for (_, state), count in gpus.items() if state == "free")
        self.metrics.fragmentation(1.0 - largest_free / free if free else 0.0)
        self.metrics.store_trouble(self.store.trouble is not None)


class _NodeNews:
    """A message: these nodes have changed, one after the other."""

    def __init__(self, core: Core, facts: NodeFacts) -> None:
        self._core, self.changed = core, [facts]

    def __call__(self, now_s: float) -> None:
        self._core.nodes_changed(self.changed, now_s)


def _parked_s(left: str | None) -> float:
    """For how long from now nodes may still go on alone, because the last controller left them on purpose."""
    if not left:
        return 0.0
    return max(0.0, PARKED_LEASE_S - max(0.0, time.time() - json.loads(left)["wall_s"]))


def _keep_snapshot(c: Connection, body: dict[str, Any]) -> None:
    db.append_journal(c, body["t"], "snapshot", body)
    db.prune_journal(c)
    db.prune_events(c, now_s=body["t"])
