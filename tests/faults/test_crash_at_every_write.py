"""The controller dies before and after every single commit of a scripted workload, and the outcome is always the same.

The script has an array, a preemption with handshake, a freeze, cancel, hold and release, drain and undrain, a failure,
a retry, a lost supervisor and dependencies. In one process, with the fake engine and clock of the server's tests, it is
run once without a crash, which tells how many commits there are, and then once for each of them and each side. A sample
is done with real processes that are really killed. Acknowledged jobs are neither lost nor doubled, whoever made the
call repeats it as the client does, and all jobs end as they do without a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kit.cluster_in_a_test import ADMIN, LiveCluster
from kit.fake_engine import FakeClock, FakeEngine
from kit.fault_cluster import FaultCluster
from kit.waiting import PATIENCE_S, until
from thebes import store as db
from thebes.client import Client
from thebes.jobspec.spec import JobSpec
from thebes.live.config import Config, save
from thebes.live.errors import Conflict
from thebes.live.replay import replay_store
from thebes.model.errors import UserError
from thebes.protocol.contract import Mechanism
from thebes.protocol.instance import write_json
from thebes.store import writer
from thebes.store.crash_points import VARIABLE, CrashPoint

NODES = {"n0": 2, "n1": 2}


class StopsTheWorld(CrashPoint):
    """Instead of the process, the writer stands still, until the controller has been taken away from above it."""

    def __init__(self, at: int = 0, side: Any = "before") -> None:
        super().__init__(at, side)
        self.crashed = threading.Event()
        self.buried = threading.Event()

    def before_commit(self) -> None:
        if self.crashed.is_set():
            raise writer.StorageFault("nobody writes any more")
        super().before_commit()
        if self.crashed.is_set():
            raise writer.StorageFault("died before the commit")

    def _die_at(self, side: str) -> None:
        if self.commits == self.at and self.side == side:
            self.crashed.set()
            assert self.buried.wait(120.0)


class StrictEngine(FakeEngine):
    """A broken promise is not only raised, where the controller would take it for a refusal, but kept for the test."""

    def __init__(self, clock: FakeClock, nodes: dict[str, int]) -> None:
        super().__init__(clock, nodes)
        self.broken: list[str] = []
        self.were_frozen: set[tuple[str, int]] = set()

    async def suspend(self, job_id: str, incarnation: int, mechanism: Mechanism) -> None:
        await super().suspend(job_id, incarnation, mechanism)
        self.were_frozen.add((job_id, incarnation))

    def check(self) -> None:
        every = self.living
        try:
            # Virtual GPUs are all alike: a job that was frozen may go on, or say good-bye, beside another.
            self.living = {key: one for key, one in every.items() if key not in self.were_frozen}
            super().check()
            jobs = [job for job, _ in every]
            assert len(jobs) == len(set(jobs)), "two incarnations of one job live"
        except AssertionError as error:
            self.broken.append(f"{error}: {[(key, one.state, one.launch.parts) for key, one in every.items()]}")
            raise
        finally:
            self.living = every


class Crashed(Exception):  # noqa: N818 - reads as what it says
    """The controller has died under a call."""


@dataclass
class Story:
    """The script, played on a cluster that may die at one or two of its writes."""

    folder: Path
    crashes: list[tuple[int, str]]
    crash_count: int = 0
    commits: int = 0
    acknowledged: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = [{"name": name, "gpus": gpus, "virtual": True} for name, gpus in NODES.items()]
        self.engine = StrictEngine(FakeClock(), NODES)
        self.cluster = LiveCluster(self.folder, self.engine, Config(nodes=listed, grace_s=10.0))  # type: ignore[arg-type]

    # -- lives of the controller

    async def open(self) -> None:
        """A new controller; it may die while it opens, and then there is another."""
        while True:
            point = StopsTheWorld(*self.crashes.pop(0)) if self.crashes else StopsTheWorld()
            self.point = point
            with _crash_point(point):
                try:
                    await self.alive(self.cluster.open())
                    return
                except Crashed:
                    await self.bury()

    async def bury(self) -> None:
        """Take away what was left of a controller whose writer stands still."""
        self.crash_count += 1
        controller = getattr(self.cluster, "controller", None)
        tasks = [] if controller is None else [controller._loop, *controller.dispatch.tasks.values()]
        for task in tasks:
            if task is not None:
                task.cancel()
        self.engine.listener = None
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        self.point.buried.set()
        await asyncio.to_thread(self.cluster.store.close)
        self.commits += self.point.commits

    async def alive(self, work: Awaitable[Any]) -> Any:
        """The result of a call, or Crashed if the controller dies before it has answered."""
        task = asyncio.ensure_future(work)
        while not task.done():
            if self.point.crashed.is_set():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise Crashed
            await asyncio.wait([task], timeout=0.002)
        return task.result()

    async def do(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """A call that is repeated, as the client does; a repeat may be told that it was done."""
        repeated = False
        while True:
            try:
                result = await self.alive(call())
                await self.alive(self.cluster.quiet())
                assert not self.engine.broken, f"{self.engine.broken[0]} {self.picture()}"
                return result
            except Crashed:
                await self.bury()
                await self.open()
                repeated = True
            except Conflict:
                assert repeated
                return None

    async def submit(self, key: str, gpus: int = 1, **fields: Any) -> str:
        spec = JobSpec(command=[key], gpus=gpus, workdir="/", name=key, **fields)
        ids = await self.do(lambda: self.cluster.controller.submit(spec, ADMIN, client_key=key))
        self.acknowledged[key] = ids
        return ids[0]

    async def act(self, verb: str, job: str) -> None:
        await self.do(lambda: self.cluster.controller.act(verb, job, ADMIN))

    async def happens(self, event: Callable[[], None]) -> None:
        """Something on the nodes; it happens once, whoever is alive to hear of it."""
        event()
        await self.do(self.cluster.quiet)

    async def living(self, job: str) -> int:
        """The incarnation that lives, as soon as there is one; who stands in its way is killed at its deadline."""
        for tries in range(50):
            if tries % 5 == 4:
                await self.happens(self.pass_time)
            if (found := self.cluster.incarnation(job)) and self.engine.living[job, found].state == "running":
                return found
            await self.do(self.cluster.quiet)
        raise AssertionError(f"job {job} does not run: {self.picture()}")

    async def ends(self, job: str, code: int = 0, cause: str = "exit") -> None:
        incarnation = await self.living(job)
        await self.happens(lambda: self.engine.end(job, incarnation, code, cause=cause))

    async def told_to_go(self, job: str, step: int) -> None:
        """Wait for the notice, then save and leave as a good job does."""
        for _ in range(50):
            for (other, incarnation), one in list(self.engine.living.items()):
                if other == job and one.notice_s is not None:
                    await self.happens(lambda: self.engine.checkpointed(job, incarnation, step))  # noqa: B023
                    await self.happens(lambda: self.engine.end(job, incarnation, 85))  # noqa: B023
                    return
            await self.do(self.cluster.quiet)
        raise AssertionError(f"job {job} was never told to go: {self.picture()}")

    def picture(self) -> str:
        """What controller and engine think, for a test that fails."""
        core = self.cluster.controller.core
        jobs = [(job.id, job.state, job.target, list(job.attempts.values())) for job in core.jobs.values()]
        living = [(key, one.state, one.notice_s) for key, one in self.engine.living.items()]
        return f"{jobs} on_gpu={core.on_gpu} unlaunched={list(core.unlaunched)} living={living}"

    # -- the script

    async def play(self) -> dict[str, Any]:
        await self.open()
        first = await self.submit("first", 2)
        array = (await self.submit("array", 1, array=[1, 2, 3])).split("_")[0]
        after = await self.submit("after", 1, after=[first])
        urgent = await self.submit("urgent", 4, priority=10)  # everybody else has to go
        frozen = await self.submit("frozen", 1, mechanism="freeze")
        await self.told_to_go(first, 7)
        for index in (1, 2):  # two of the array have GPUs: one saves, one is killed at the deadline
            if (name := f"{array}_{index}") in {job for job, _ in self.engine.living}:
                if index == 1:
                    await self.told_to_go(name, 3)
                else:
                    await self.happens(self.pass_time)
        await self.ends(urgent)
        await self.ends(first)
        hasty = await self.submit("hasty", 4, priority=10)
        await self.happens(self.pass_time)  # nobody saves this time
        await self.act("cancel", hasty)
        for index in (1, 2):
            await self.ends(f"{array}_{index}")
        await self.act("hold", f"{array}_3")
        await self.act("release", f"{array}_3")
        await self.do(lambda: self.cluster.controller.drain("n1", "broken", True, "root"))
        await self.happens(self.pass_time)
        await self.do(lambda: self.cluster.controller.undrain("n1", "root"))
        await self.ends(f"{array}_3")
        await self.ends(after)
        await self.ends(frozen)
        retries = await self.submit("retries", 2, max_retries=1)
        await self.ends(retries, 3)
        await self.ends(retries, cause="lost")
        await self.ends(retries)
        fails = await self.submit("fails", 1)
        waits = await self.submit("waits", 1, after=[fails])
        assert waits
        await self.ends(fails, 5)
        await self.submit("late", 1, after=[fails])
        queued = await self.submit("queued", 4)
        await self.submit("behind", 4)
        await self.act("cancel", queued)
        await self.ends(self.acknowledged["behind"][0])
        return await self.close()

    def pass_time(self) -> None:
        self.engine.clock.time_s += 11.0
        self.engine.tick()
        with contextlib.suppress(AttributeError):
            self.cluster.controller.core.dirty = True
            self.cluster.controller._bell.set()

    async def close(self) -> dict[str, Any]:
        """Everything has ended; who is who, and how it went."""
        await self.do(self.cluster.quiet)
        with self.cluster.store.read() as c:
            rows, _ = db.list_jobs(c, viewer=db.EVERYTHING, limit=200)
            attempts = db.open_attempts(c)
        controller = self.cluster.controller
        assert not attempts, f"attempts that nobody ends: {attempts}"
        assert not self.engine.living, f"alive and unknown: {sorted(self.engine.living)}"
        assert not self.engine.ended, f"not forgotten: {sorted(self.engine.ended)}"
        assert not controller.core.jobs
        assert not controller.core.on_gpu, "GPUs are held by nobody"
        assert all(count == 1 for count in self.engine.launches.values()), "an incarnation was started twice"
        found = {row.id: row for row in rows}
        assert sorted(found) == sorted(id_ for ids in self.acknowledged.values() for id_ in ids), "lost or doubled"
        self.commits += self.point.commits
        await self.cluster.close()
        return {row.id: (row.name, row.state, row.exit_code, row.failures) for row in rows}


@contextlib.contextmanager
def _crash_point(point: CrashPoint) -> Any:
    """The next store that is opened gets this one."""
    original = CrashPoint.from_environment
    CrashPoint.from_environment = classmethod(lambda cls: point)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        CrashPoint.from_environment = original  # type: ignore[method-assign]


def play(folder: Path, *crashes: tuple[int, str]) -> tuple[dict[str, Any], Story]:
    story = Story(folder, list(crashes))

    async def bounded() -> dict[str, Any]:
        async with asyncio.timeout(300.0):
            return await story.play()

    return asyncio.run(bounded()), story


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int]:
    """How it goes without a crash, and with how many commits."""
    outcome, story = play(tmp_path_factory.mktemp("undisturbed") / "i")
    return outcome, story.commits


def check(folder: Path, expected: dict[str, Any], *crashes: tuple[int, str]) -> int:
    """Play with these crashes; how many of them happened."""
    outcome, story = play(folder, *crashes)
    assert outcome == expected, f"crash at {crashes}"
    write_json(folder / "config.json", story.cluster.config.model_dump(mode="json"))
    assert all(one.same for one in replay_store(folder)), f"crash at {crashes}: decisions cannot be made again"
    return story.crash_count


def test_the_script_without_a_crash(undisturbed: tuple[dict[str, Any], int]) -> None:
    outcome, commits = undisturbed
    by_name = {name: state for name, state, _, _ in outcome.values()}
    assert by_name == {
        "first": "completed", "array": "completed", "after": "completed", "urgent": "completed", "frozen": "completed",
        "hasty": "cancelled", "retries": "completed", "fails": "failed", "waits": "cancelled", "late": "cancelled",
        "queued": "cancelled", "behind": "completed",
    }  # fmt: skip
    assert commits > 60


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_crash_at_some_writes(tmp_path: Path, undisturbed: tuple[dict[str, Any], int], side: str) -> None:
    outcome, commits = undisturbed
    for at in random.Random(f"some {side}").sample(range(1, commits), 3):
        check(tmp_path / str(at), outcome, (at, side))


@pytest.mark.faults
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_crash_at_every_write(
    tmp_path: Path, undisturbed: tuple[dict[str, Any], int], side: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome, _ = undisturbed
    at, failures = 0, []
    while True:  # until the script ends without a crash
        at += 1
        try:
            if check(tmp_path / str(at), outcome, (at, side)) == 0:
                break
        except Exception as error:
            failures.append(f"{at}:{side}: {type(error).__name__}: {error}")
    with capsys.disabled():
        print(f"\ncrashes {side} each of {at - 1} commits ", end="", flush=True)
    assert not failures, "\n".join(failures)


@pytest.mark.faults
def test_a_crash_during_the_recovery_from_a_crash(tmp_path: Path, undisturbed: tuple[dict[str, Any], int]) -> None:
    outcome, commits = undisturbed
    for at in range(1, commits, 3):
        choose = random.Random(f"again {at}")
        sides = [choose.choice(("before", "after")) for _ in range(3)]
        check(tmp_path / str(at), outcome, (at, sides[0]), (1, sides[1]), (choose.randint(1, 3), sides[2]))


# ---- with real processes


class RealController:
    """Agents and a controller without a keeper: whoever asks for something starts the controller again."""

    def __init__(self, folder: Path) -> None:
        self.cluster = FaultCluster(folder)
        self.cluster.instance.create()
        nodes = [{"name": name, "gpus": gpus, "virtual": True} for name, gpus in NODES.items()]
        save(self.cluster.instance.config, Config(nodes=nodes, grace_s=2.0))  # type: ignore[arg-type]
        self.agents = [self._start("thebes.node.agent", name) for name in NODES]
        self.controller: subprocess.Popen[bytes] | None = None
        self.deaths = 0

    def _start(self, module: str, *more: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, str(self.cluster.instance.dir), *more]
        return subprocess.Popen(command, start_new_session=True, env={**os.environ, **(env or {})})

    def start(self, crash_at: str = "") -> None:
        self.controller = self._start("thebes.instance.main", env={VARIABLE: crash_at} if crash_at else None)

    def call(self, what: Callable[[Client], Any], *, repeats: Collection[int] = ()) -> Any:
        """Until an answer comes; a repeat may be answered with a status in `repeats`: it was done the first time."""
        repeated = False
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with Client(dir=self.cluster.instance.dir) as client:
                    return what(client)
            except UserError as error:
                status = getattr(error, "status", 0)
                if repeated and status in repeats:
                    return None
                if status != 0 or time.monotonic() > deadline:
                    raise
                repeated = True
                self.bring_back()
                time.sleep(0.05)

    def bring_back(self) -> None:
        if self.controller is not None and (code := self.controller.poll()) is not None:
            assert code == -signal.SIGKILL, f"the controller ended with {code}"
            self.deaths += 1
            self.start()

    def stop(self) -> None:
        for process in [self.controller, *self.agents]:
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(60.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def real_script(real: RealController, folder: Path, prefix: str) -> dict[str, tuple[str, list[str]]]:
    """Every sort of write, with jobs that run; per key the expected state and the ids."""
    found: dict[str, tuple[str, list[str]]] = {}

    def submit(key: str, state: str, kind: str = "plain", steps: int = 3, gpus: int = 1, **fields: Any) -> str:
        key = f"{prefix}-{key}"
        command = real.cluster.job_command(folder, key, kind, steps, 0.05)
        job = real.call(lambda c: c.submit(command, key=key, name=key, gpus=gpus, workdir="/", **fields))
        found[key] = (state, list(job.ids or (job.id,)))
        return job.id

    first = submit("first", "completed", steps=30, gpus=3)
    array = submit("array", "completed", "careless", array=[1, 2])
    submit("urgent", "completed", gpus=4, priority=10)
    submit("after", "completed", after=[first])
    fails = submit("fails", "failed", "fails")
    submit("never", "cancelled", after=[fails])
    gone = submit("gone", "cancelled", "deaf", steps=2000)
    held = submit("held", "completed")
    real.call(lambda c: c.hold(held), repeats=(409,))
    real.call(lambda c: c.cancel(gone), repeats=(409,))
    real.call(lambda c: c.drain("n1", reason="broken", preempt=True))
    real.call(lambda c: c.undrain("n1"), repeats=(409,))
    real.call(lambda c: c.release(held), repeats=(409,))
    assert array
    for _, ids in found.values():
        for job_id in ids:
            deadline = time.monotonic() + 2 * PATIENCE_S
            while not real.call(lambda c, job_id=job_id: c.wait(job_id, 2.0))["done"]:
                assert time.monotonic() < deadline, f"job {job_id} does not end"
                real.bring_back()
    return found


@pytest.mark.faults
def test_a_controller_that_is_really_killed_at_a_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choose = random.Random("really")
    points = [(at, choose.choice(("before", "after"))) for at in (1, *choose.sample(range(2, 40), 4))]
    folder = tmp_path / "diaries"
    folder.mkdir()
    real = RealController(tmp_path / "i")
    expected: dict[str, tuple[str, list[str]]] = {}
    try:
        for at, side in points:
            real.start(f"{at}:{side}")
            expected |= real_script(real, folder, f"{at}-{side}")
            assert real.controller is not None
            real.controller.kill()  # the next one counts from its own start
            real.controller.wait()
        real.start()
        rows = {job["id"]: job for job in real.call(lambda c: list(c.jobs()))}
        assert sorted(rows) == sorted(job_id for _, ids in expected.values() for job_id in ids), "lost or doubled"
        for key, (state, ids) in expected.items():
            assert {rows[job_id]["state"] for job_id in ids} == {state}, f"{key}: {[rows[i] for i in ids]}"
        assert "DOUBLE" not in "".join(path.read_text() for path in folder.glob("*.log") if "array" not in path.name)
        until(lambda: not real.cluster.of_jobs(), "no process of any job lives")
        until(lambda: not any(node["gpus_busy"] for node in real.call(lambda c: c.nodes())), "all GPUs are free")
        assert all(one.same for one in replay_store(tmp_path / "i"))
        with capsys.disabled():
            print(f"\nreal controllers killed at a write: {real.deaths} of {len(points)} ", end="", flush=True)
        assert real.deaths >= len(points) - 1
    finally:
        real.stop()
        real.cluster.clean_up()
