"""kill -9 at random points of a running workload, by seed: nothing acknowledged is lost, nothing runs twice at once.

A round picks a victim and an instant while real jobs run, are preempted, cancelled and held; it kills, and measures how
long it takes until the controller answers with all its agents. The cluster then goes on with the same jobs. At the end
the books are balanced: states, lines that the jobs wrote themselves, processes, GPUs, and the journal replayed.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kit.diaries import Known, check_job
from kit.fault_cluster import FaultCluster, fault_cluster, overload
from kit.waiting import until
from thebes.client import Client
from thebes.live.replay import replay_store
from thebes.model.errors import UserError
from thebes.node.keeper import start_keeper

RECOVERY_S = 30.0  # by itself, and not by one of the long timeouts; how fast it is, is told and not judged
VICTIMS = {"controller": 6, "agent": 5, "supervisor": 5, "job": 4, "keeper": 2, "standby": 2, "nursery": 1}
KINDS = {"plain": 6, "careless": 3, "daemon": 3, "fails": 2, "chatty": 2, "deaf": 1}
STANDBY_LOADS_S = 10.0
AT_ONCE = 14  # jobs that are kept waiting or running
TERMINAL = ("completed", "failed", "cancelled", "timeout")


def unanswered(error: Exception) -> bool:
    """No answer within 15 s on a machine that is full, or keeper, standby and controller all dead for a moment."""
    return getattr(error, "status", None) == 0 or "no Thebes cluster is running" in str(error)


@dataclass
class Workload:
    """Submits, and meddles, from a thread of its own until told to stop."""

    cluster: FaultCluster
    folder: Path
    seed: int
    jobs: dict[str, Known] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.random = random.Random(f"workload {self.seed}")
        self.client = Client(dir=self.cluster.instance.dir)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.number = 0

    def _run(self) -> None:
        while not self.stop.is_set():
            try:
                alive = [job["id"] for job in self.client.jobs(state=["queued", "held", "starting", "running",
                                                                       "preempting", "suspended"])]  # fmt: skip
                if len(alive) < AT_ONCE:
                    self.submit()
                elif self.random.random() < 0.3:
                    self.meddle(self.random.choice(alive))
            except Exception as error:  # told at the end; the thread goes on
                if not unanswered(error):
                    self.errors.append(f"{type(error).__name__}: {error}")
            self.stop.wait(0.05)

    def submit(self) -> None:
        choose, self.number = self.random, self.number + 1
        key = f"w{self.seed}-{self.number}"
        kind = choose.choices(list(KINDS), list(KINDS.values()))[0]
        gpus = choose.choice((1, 1, 1, 2, 3, 4))  # on small nodes the large ones are gangs over two
        steps = choose.randint(1, 30)
        fields: dict[str, Any] = {
            "gpus": gpus,
            "name": key,
            "priority": choose.choice((0, 0, 0, 5, 10)),
            "max_retries": 0 if kind == "fails" else 1000,
            "mechanism": choose.choice(("auto", "auto", "freeze", "checkpoint")),
            "workdir": "/",
            "env": {"FAULTY_KIND": kind},
        }
        if kind in ("careless", "deaf"):
            steps = choose.randint(1, 12)  # it begins anew each time: it must be able to get through
        if choose.random() < 0.2 and gpus > 1:
            fields["ranks_per_node"] = 1
        known = Known(key, kind, gpus, steps)
        command = self.cluster.job_command(self.folder, key, kind, steps, 0.05)
        deadline = time.monotonic() + 120.0
        while True:
            try:
                job = self.client.submit(command, key=key, **fields)
                self.jobs[job.id] = known
                return
            except UserError as error:
                if not unanswered(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)  # once more, with the same key

    def meddle(self, job_id: str) -> None:
        """cancel, preempt, hold or release; a refusal is an answer, and so is a repeat of what was done before."""
        what = self.random.choice(("preempt", "preempt", "hold", "cancel"))
        if job_id in self.held:
            what = "release"
        known = self.jobs.get(job_id)
        if known is None:  # acknowledged only now
            return
        try:
            if what == "cancel":
                known.perhaps_cancelled = True
            getattr(self.client, what)(job_id)
            known.cancelled = known.cancelled or what == "cancel"
        except UserError as error:
            if not unanswered(error) and getattr(error, "status", None) not in (404, 409):
                raise
            if what == "release" and unanswered(error):
                return  # perhaps it is held still
        if what == "hold":
            self.held.add(job_id)
        elif what == "release":
            self.held.discard(job_id)

    def finish(self) -> None:
        self.stop.set()
        self.thread.join(180.0)
        for job_id in sorted(self.held):
            until(lambda job_id=job_id: self.released(job_id), f"job {job_id} is released")

    def released(self, job_id: str) -> bool:
        try:
            self.client.release(job_id)
        except UserError as error:
            return not unanswered(error)  # it has ended, or was released before
        return True


@dataclass
class Round:
    victim: str
    seconds: float
    load: float

    @property
    def limit_s(self) -> float:
        return RECOVERY_S * max(1.0, self.load)


def one_round(cluster: FaultCluster, choose: random.Random) -> Round | None:
    """Kill somebody; None if the chosen one was not there."""
    kind = choose.choices(list(VICTIMS), list(VICTIMS.values()))[0]
    time.sleep(choose.random() * 0.3)
    node = choose.choice(cluster.nodes)
    pid: int | None
    if kind in ("supervisor", "job"):
        found = cluster.supervisors() if kind == "supervisor" else mortal_jobs(cluster)
        pid = choose.choice(sorted(found)) if found else None
    elif kind == "nursery":
        pid = cluster.nursery(node)
    else:
        pid = cluster.pid(f"agent-{node}" if kind == "agent" else kind)
    if pid is None or not cluster.kill(pid):
        return None
    killed_s, load = time.monotonic(), overload()
    # A standby that is new has to load everything first: such recoveries are told apart.
    if kind == "standby":
        cluster.standby_killed_s = killed_s
    elif kind == "controller" and killed_s - cluster.standby_killed_s < STANDBY_LOADS_S:
        kind = "controller with a new standby"
    if kind == "keeper":
        with suppress(OSError):
            start_keeper(cluster.instance)  # as `thebes up` does
    until(cluster.answers, f"the cluster answers after kill -9 of the {kind}")
    return Round(kind, time.monotonic() - killed_s, max(load, overload()))


def mortal_jobs(cluster: FaultCluster) -> list[int]:
    """Processes of jobs that have retries: whoever is to fail by design shall fail by design."""
    return [pid for pid, env in cluster.of_jobs().items() if env.get("FAULTY_KIND") != "fails"]


def balance(cluster: FaultCluster, work: Workload, folder: Path) -> Counter[str]:
    """Everything that must hold when all jobs have ended."""
    rows = {job["id"]: job for job in cluster.client.jobs()}
    missing = set(work.jobs) - set(rows)
    assert not missing, f"acknowledged and lost: {sorted(missing)}"
    names = Counter(row["name"] for row in rows.values())
    assert not [name for name, count in names.items() if count > 1], "a submit was done twice"
    for job_id, known in work.jobs.items():
        check_job(known, rows[job_id], (folder / f"{known.key}.log"))
    until(lambda: not cluster.of_jobs(), "no process of any job lives")
    until(lambda: not cluster.supervisors(), "nor any supervisor")
    until(lambda: not any(node["gpus_busy"] for node in cluster.client.nodes()), "GPUs are held by nobody")
    replayed = replay_store(cluster.instance.dir)
    assert replayed
    assert all(one.same for one in replayed), [one for one in replayed if not one.same][:3]
    return Counter(row["state"] for row in rows.values())


def run_rounds(tmp_path: Path, seed: int, rounds: int, **options: Any) -> tuple[list[Round], Counter[str], int]:
    choose = random.Random(f"kills {seed}")
    folder = tmp_path / "diaries"
    folder.mkdir()
    with fault_cluster(tmp_path / "i", grace_s=2.0, **options) as cluster:
        work = Workload(cluster, folder, seed)
        try:
            work.thread.start()
            until(lambda: len(work.jobs) >= 5, "the workload begins")
            done: list[Round] = []
            deadline = time.monotonic() + 60.0 * rounds
            while len(done) < rounds and time.monotonic() < deadline:
                one = one_round(cluster, choose)
                done += [one] if one else []
            work.finish()
            until(
                lambda: not any(job["state"] not in TERMINAL for job in cluster.client.jobs()),
                "all jobs end",
                300.0 * overload(),
                every_s=0.2,
            )
            assert not work.errors, work.errors
            states = balance(cluster, work, folder)
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            work.stop.set()
            work.client.close()
    assert not cluster.of_instance(), "the cluster has not gone down"
    late = [one for one in done if one.seconds > one.limit_s]
    assert not late, f"recovery took too long: {late}"
    assert len(done) == rounds
    return done, states, len(work.jobs)


def tell(capsys: pytest.CaptureFixture[str], seed: int, done: list[Round], states: Counter[str], jobs: int) -> None:
    worst = {kind: max(one.seconds for one in done if one.victim == kind) for kind in {one.victim for one in done}}
    load = max(one.load for one in done)
    with capsys.disabled():
        told = ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in sorted(worst.items()))
        print(f"\nkills seed {seed}: {len(done)} rounds, {jobs} jobs {dict(states)}; worst recovery: {told}", end="")
        print(f" (overloaded: up to {load:.1f} processes per core)" if load > 1.5 else "", end=" ", flush=True)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *args: tell(capsys, *args)


def test_a_dozen_kills(tmp_path: Path, told: Any) -> None:
    told(0, *run_rounds(tmp_path, 0, 12, virtual_gpus=3, nodes=2))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {"virtual_gpus": 4, "nodes": 2}),
        (2, {"virtual_gpus": 4, "nodes": 1, "policy": "las"}),
        (3, {"virtual_gpus": 2, "nodes": 3, "policy": "fifo"}),
        (4, {"virtual_gpus": 3, "nodes": 2}),
    ],
)
def test_two_hundred_kills(tmp_path: Path, told: Any, seed: int, options: dict[str, Any]) -> None:
    told(seed, *run_rounds(tmp_path, seed, 52, **options))
