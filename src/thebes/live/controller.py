"""The controller is one loop that hears, decides, writes down and then acts. All judgement is in `core` and its rooms.

Messages (reports of nodes, users' wishes, arrivals) wait in one inbox. A turn of the loop hands them to the core, asks
the policy if anything changed, commits what came out in one transaction, and only then gives the commands to the
engine (`dispatch`). What users ask for is in `requests`, what is told to them in `overview`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from thebes import store as db
from thebes.live import deciding, journal, orders, overview, recovery, requests
from thebes.live.changes import Changes
from thebes.live.clock import ClusterClock, resume_clock
from thebes.live.core import Core, Settings
from thebes.live.deciding import PolicyFailed
from thebes.live.dispatch import Dispatch
from thebes.live.estimates import Estimates
from thebes.live.listening import EngineListener
from thebes.live.metrics import Metrics
from thebes.live.snapshots import Snapshots
from thebes.live.stored import last_checkpoints, last_instant_s, newest_job, unfinished_dependencies
from thebes.model.errors import UserError
from thebes.protocol.contract import PARKED_LEASE_S, Engine, NodeFacts
from thebes.protocol.instance import Instance

if TYPE_CHECKING:
    from thebes.live.config import Config

logger = logging.getLogger("thebes.controller")

SNAPSHOT_EVERY = 5000  # journal entries between two snapshots of the ledger
NODES_WAIT_S = 3.0  # a start waits so long for all nodes, then goes on with those that answered
SITE_WAIT_S = 0.5
DECISION_SHARE = 0.2  # at most this share of time goes into decisions when a flood of jobs comes in
LONGEST_PAUSE_S = 0.25
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0  # pauses before a policy that fails is asked again
LONG_DECISION_S = 0.01

T = TypeVar("T")
Message = Callable[[float], None]


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
        strict: bool = False,
    ) -> None:
        from thebes.live.config import live_policy

        self.store = store
        self.engine = engine
        self.config = config
        self.instance = instance
        self.policy, self.placement = live_policy(config)
        self.metrics = Metrics()
        self.estimates = Estimates()
        self.changes = Changes()
        self.shared = Instance(Path(config.shared_dir)) if config.shared_dir else instance  # what jobs see
        self.snapshots = Snapshots(self.shared.dir, config.limits)
        self.trouble: str | None = None  # why the policy cannot be asked
        self.strict = strict  # see thebes.live.core.Settings
        self._clock_of = clock
        self.inbox: list[Message] = []
        self._bell = asyncio.Event()
        self._background_work: set[asyncio.Future[None]] = set()
        self._waiting: asyncio.Task[None] | None = None  # the task that waits for nodes that were left alone
        self._broken: BaseException | None = None  # why the loop must end
        self._loop: asyncio.Task[None] | None = None
        self._decided_at = 0.0
        self._decision_took_s = 0.0
        self._retry_s = 0.0  # after a policy has failed: the pause until it is asked again, and when that is over
        self._retry_at_s = -float("inf")
        self._put_off = False
        self._stopped = False
        self._at_work = False

    # -- open and close ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Go on where the last controller stopped: first with the store, then with what lives on the nodes."""
        started = time.monotonic()
        with self.store.read() as c:
            kept, last_s, left = db.get_meta(c, "clock"), last_instant_s(c), db.get_meta(c, "left")
            rows, attempts = db.alive_jobs(c), db.open_attempts(c)
            drained, tenants = db.drained_nodes(c), db.list_tenants(c)
            waits_for, failed = unfinished_dependencies(c, rows)
            checkpoints = last_checkpoints(c)
            entries = list(db.journal_since_snapshot(c))
            ledger = journal.restored(entries, rows, self.config, self.policy, self.placement)
            ever = db.jobs_ever(c)
        newest = await asyncio.to_thread(newest_job, self.shared.jobs)
        if newest > ever:  # the store is from a backup: checkpoints and logs of jobs that it does not know are there
            await self.store.change(lambda c: db.pass_over_jobs(c, newest), must=True)
        self.clock = self._clock_of(kept, last_s)
        now_s = self.clock.now_s()
        settings = Settings(
            self.config.grace_s, self.config.log_limit_mib << 20, str(self.shared.jobs), strict=self.strict
        )
        self.core = core = Core(ledger, settings, self.metrics)  # type: ignore[arg-type] - it counts all that Tally does
        self.dispatch = Dispatch(core, self.engine, self.snapshots, self.tell)
        self.listener = EngineListener(self)
        # The journal goes on with the ledger as it is now, because the nodes or the policy may have changed.
        journal.keep_snapshot(core, self.config, now_s)
        recovery.load(core, rows, attempts, waits_for, failed, drained, now_s)
        recovery.note_checkpoints(core, checkpoints)
        for tenant in tenants:
            orders.set_quota(core, tenant.name, tenant.gpu_quota, now_s)
        await self.engine.open(self.listener.hear, parked_s=_parked_s(left))
        nodes = await self._nodes_up()
        reports = [self.listener.in_cluster_time(report) for report in await self.engine.reports()]
        recovery.reconcile(core, reports, nodes, self.clock.now_s())
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

    async def _nodes_up(self) -> list[NodeFacts]:
        """All nodes if they answer soon, or else those that do. The others report when they can."""
        # Agents of this machine start together with us; a site has told what it could when the engine opened.
        deadline = time.monotonic() + (NODES_WAIT_S if self.config.engine == "local" else SITE_WAIT_S)
        while True:
            nodes = await self.engine.nodes()
            if (nodes and all(node.alive for node in nodes)) or time.monotonic() > deadline:
                return nodes
            await asyncio.sleep(0.02)

    async def ended(self) -> None:
        """Return when the loop has stopped, or raise its error: without the loop nothing happens any more."""
        assert self._loop is not None
        await asyncio.shield(self._loop)

    async def close(self) -> None:
        """Stop deciding. Jobs go on; the next controller takes them over."""
        assert self._loop is not None
        self._stopped = True
        self._bell.set()
        with suppress(asyncio.CancelledError):
            await self._loop
        for task in [
            *self.dispatch.tasks.values(),
            *self._background_work,
            *([self._waiting] if self._waiting else []),
        ]:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.engine.close()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        self.inbox.append(message)
        self._bell.set()

    async def ask(self, question: Callable[[float], T]) -> T:
        """Have the loop do something, and wait until the result is committed."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def message(now_s: float) -> None:
            try:
                result = question(now_s)
            except UserError as error:
                if not answer.done():  # the asker may have given up
                    answer.set_exception(error)
            else:
                self._after_commit.append(lambda: None if answer.done() else answer.set_result(result))

        self.tell(message)
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
        return not (
            self._at_work
            or self.inbox
            or self.dispatch.tasks
            or self._background_work
            or (self.core.dirty and self.clock.now_s() >= self._retry_at_s)
        )

    async def _ring(self) -> None:
        """Wait until there is something to do: a message, or an instant at which the policy wants to be asked."""
        pause_s: float | None = None
        if self.core.dirty:
            allowed_s = self._decided_at + self._pause_s() - time.monotonic()
            pause_s = max(0.0, allowed_s, self._retry_at_s - self.clock.now_s())
        elif self.core.ledger.wake_s < float("inf") and not self.core.closing:
            allowed_s = self._decided_at + self._pause_s() - time.monotonic()
            pause_s = max(0.0, self.core.ledger.wake_s - self.clock.now_s(), allowed_s)
        revise_in_s = None if self.trouble or self.core.closing else self.estimates.pause_s()
        if revise_in_s is not None:
            pause_s = revise_in_s if pause_s is None else min(pause_s, revise_in_s)
        if pause_s is None or pause_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), pause_s)
        else:
            await asyncio.sleep(0)  # other tasks get their turn, too
        self._bell.clear()

    def _pause_s(self) -> float:
        """The pause between two decisions when much happens, so that deciding takes only a share of the time."""
        return min(LONGEST_PAUSE_S, self._decision_took_s * (1 / DECISION_SHARE - 1))

    def _turn(self) -> None:
        core, now_s, decided = self.core, self.clock.now_s(), False
        messages, self.inbox = self.inbox, []
        for message in messages:
            message(now_s)
        if core.closing:
            core.dirty = False  # nothing is decided any more, so nothing is due
        due = (core.dirty or core.ledger.wake_s <= now_s) and now_s >= self._retry_at_s
        # Where a decision takes long, requests are answered first, and the next turn decides.
        self._put_off = bool(self._after_commit) and not self._put_off and self._decision_took_s > LONG_DECISION_S
        if due and not core.closing and not self._put_off and time.monotonic() >= self._decided_at + self._pause_s():
            self._decide()
            decided = True
        if self.trouble is None and not core.closing:
            self.estimates.revise(core, self.clock.now_s(), decided=decided)

    def _decide(self) -> None:
        core, started, news = self.core, time.perf_counter(), self.core.dirty
        try:
            planned = deciding.decide(core, self.clock.now_s())
            self._works()
            if news or planned.changes:
                self.estimates.changed()
        except PolicyFailed as error:
            # Jobs go on as they are. Any other error is ours and may have left half a decision behind: it ends this
            # process, and the next one begins with what is in the store.
            if self.trouble != str(error):
                logger.error("decision failed", exc_info=error, extra={"fields": {"error": str(error)}})
            self._failed(str(error))
        self._decision_took_s = time.perf_counter() - started
        self._decided_at = time.monotonic()
        self.metrics.decided(self._decision_took_s)

    def _failed(self, what: str) -> None:
        """Ask the policy again when something happens, or after a pause that grows."""
        now_s, policy = self.clock.now_s(), self.core.ledger.policy.label
        if self.trouble != what:
            self.core.event(now_s, "policy-failed", None, policy=policy, error=what)
        self.trouble = what
        self._retry_s = min(LONGEST_RETRY_S, 2.0 * self._retry_s or FIRST_RETRY_S)
        self.core.dirty = False  # until something happens
        self.core.ledger.wake_s = self._retry_at_s = now_s + self._retry_s

    def _works(self) -> None:
        if self.trouble is not None:
            self.core.event(self.clock.now_s(), "policy-works", None, policy=self.core.ledger.policy.label)
        self.trouble, self._retry_s, self._retry_at_s = None, 0.0, -float("inf")

    async def _commit_and_act(self) -> None:
        core = self.core
        if core.journalled >= SNAPSHOT_EVERY:
            journal.keep_snapshot(core, self.config, self.clock.now_s())
        writes, commands, told = core.take()
        after, self._after_commit = self._after_commit, []
        if writes:
            started = time.perf_counter()
            # It must be written, because the core has moved on. While the disk is full we wait here, and jobs go on.
            await self.store.change(lambda c: [write(c) for write in writes], must=True)
            self.metrics.committed(time.perf_counter() - started, len(writes))
        for event in told:
            self.changes.publish(event)
            logger.info(event["kind"], extra={"fields": {k: event[k] for k in ("job_id", "node", "detail")}})
        for done in after:
            done()
        for command in commands:
            self.dispatch.order(command)

    async def _all_are_back(self) -> None:
        """Wait until all nodes are back; until then the next controller must still know that they were left alone."""
        unparked = getattr(self.engine, "unparked", None)  # see `Parks`
        if unparked is not None:
            await unparked()
        self.tell(lambda now_s: self.core.writes.append(lambda c: db.set_meta(c, "left", "")))

    async def leave(self) -> None:
        """Let jobs go on without us. The next controller must know that nodes were told so."""
        left = json.dumps({"wall_s": time.time()})
        await self.store.change(lambda c: db.set_meta(c, "left", left), must=True)
        await self.engine.leave()

    def background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background_work.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Future[None]) -> None:
        self._background_work.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # An acknowledged job may depend on it, so the next controller reads everything again.
            self._broken = task.exception()
            self._bell.set()

    # -- what users ask for, and what is ------------------------------------------------------------------------------

    submit = requests.submit
    act = requests.act
    set_quota = requests.set_quota
    quota = requests.quota
    drain = requests.drain
    undrain = requests.undrain
    plan = requests.plan
    shutdown = requests.shutdown

    live = overview.live
    nodes = overview.nodes
    status = overview.status
    refresh_metrics = overview.refresh_metrics


def _parked_s(left: str | None) -> float:
    """For how long from now nodes may still go on alone, because the last controller left them on purpose."""
    if not left:
        return 0.0
    return max(0.0, PARKED_LEASE_S - max(0.0, time.time() - json.loads(left)["wall_s"]))
