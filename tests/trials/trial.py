"""A workload of real processes on a real cluster while parts of it are killed, cut off and drained; then the books.

The jobs are those of the fault tests: each proves that no other incarnation of it lives, and writes down what it does.
A trial submits them at a steady pace, lets things happen at their times, waits for the last job and checks all that
was promised: acknowledged jobs are there and completed, none was started twice or lived twice, nothing saved was done
again, no process is left, and the journal replays.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.diaries import Known, check_job
from kit.fault_cluster import JOB
from kit.waiting import PATIENCE_S, until
from thebes.client import Client
from thebes.instance.down import take_down
from thebes.instance.standby import rehearse
from thebes.instance.up import bring_up
from thebes.instance.wanted import UpOptions
from thebes.live.replay import replay_store
from thebes.node import processes
from thebes.protocol.instance import Instance, wait_gone

KINDS = {"plain": 17, "careless": 2, "daemon": 1}
LIVES = ["queued", "held", "starting", "running", "preempting", "suspended"]
STEP_S = 0.5


@dataclass(frozen=True)
class Mischief:
    """Something that happens to the cluster so many seconds after the first job was submitted."""

    at_s: float
    name: str
    do: Callable[[], object]


@dataclass
class Figures:
    """What a trial has measured."""

    jobs: int = 0
    took_s: float = 0.0
    attempts: int = 0
    preemptions: int = 0
    losses: int = 0
    gang_start_s: list[float] = field(default_factory=list)  # decision to all ranks running, of the widest gangs
    happened: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "jobs": self.jobs,
            "took_s": round(self.took_s, 1),
            "jobs_per_s": round(self.jobs / self.took_s, 2),
            "attempts": self.attempts,
            "attempts_per_s": round(self.attempts / self.took_s, 2),
            "preemptions": self.preemptions,
            "losses": self.losses,
            "happened": self.happened,
        }
        if self.gang_start_s:
            found["widest_gangs"] = {
                "attempts": len(self.gang_start_s),
                "decision_to_all_ranks_s_median": round(statistics.median(self.gang_start_s), 3),
                "decision_to_all_ranks_s_best": round(min(self.gang_start_s), 3),
            }
        return found


class Trial:
    """An instance on a cluster, its workload and what happens to it."""

    def __init__(self, folder: Path, *, seed: int = 0) -> None:
        self.instance = Instance(folder / "i")
        self.diaries = folder / "diaries"
        self.diaries.mkdir(parents=True)
        self.random = random.Random(f"trial {seed}")
        self.known: dict[str, Known] = {}
        self.figures = Figures()

    def up(self, **options: Any) -> None:
        bring_up(self.instance, UpOptions(**options), rehearse)  # what is to be compiled is compiled before
        self.client = Client(dir=self.instance.dir)

    def down(self) -> None:
        with suppress(Exception):
            self.client.close()
        take_down(self.instance, "kill", lambda text: None)

    # -- the workload

    def plan(self, jobs: int, sizes: dict[int, float], steps: tuple[int, int]) -> list[Known]:
        choose = self.random
        return [
            Known(
                key=f"t{number}",
                kind=choose.choices(list(KINDS), list(KINDS.values()))[0],
                gpus=choose.choices(list(sizes), list(sizes.values()))[0],
                steps=min(steps[1], max(steps[0], round(steps[0] * choose.lognormvariate(0.7, 0.8)))),
            )
            for number in range(jobs)
        ]

    def _submit(self, plan: Sequence[Known], over_s: float) -> None:
        began = time.monotonic()
        with Client(dir=self.instance.dir) as client:
            for number, known in enumerate(plan):
                time.sleep(max(0.0, began + over_s * number / len(plan) - time.monotonic()))
                command = [sys.executable, str(JOB), str(self.diaries), known.key, known.kind]
                command += [str(known.steps), str(STEP_S)]
                fields = {"gpus": known.gpus, "ranks_per_node": 1, "name": known.key, "max_retries": 1000}
                job = patiently(lambda c=command, f=fields, k=known: client.submit(c, key=k.key, workdir="/", **f))
                self.known[job.id] = known

    def run(self, plan: Sequence[Known], over_s: float, mischief: Sequence[Mischief], patience_s: float) -> None:
        """Play it to the end."""
        began, errors = time.monotonic(), list[BaseException]()

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        def happen() -> None:
            for one in sorted(mischief, key=lambda one: one.at_s):
                time.sleep(max(0.0, began + one.at_s - time.monotonic()))
                one.do()
                self.figures.happened.append(f"{time.monotonic() - began:.0f} s: {one.name}")

        threads = [
            threading.Thread(target=guarded, args=(lambda: self._submit(plan, over_s),), daemon=True),
            threading.Thread(target=guarded, args=(happen,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        deadline = began + patience_s
        while any(thread.is_alive() for thread in threads) or self.alive():
            assert not errors, errors
            assert time.monotonic() < deadline, f"not all jobs have ended: {self.alive()} live; {self.told()}"
            time.sleep(0.5)
        assert not errors, errors
        self.figures.took_s = time.monotonic() - began

    def alive(self) -> int:
        """Jobs that have not ended."""
        found = patiently(lambda: self.client.status())["jobs"]
        return sum(count for state, count in found.items() if state in LIVES)

    def told(self) -> str:
        return "\n".join(
            f"--- {path.name}\n" + path.read_text(errors="replace")[-4000:]
            for path in sorted(self.instance.log.glob("*"))
        )

    # -- mischief

    def kill_controller(self) -> None:
        pid = self.instance.holder_pid("controller")
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)

    # -- the books

    def balance(self) -> Counter[str]:
        rows = {job["id"]: job for job in self.client.jobs()}
        missing = set(self.known) - set(rows)
        assert not missing, f"acknowledged and lost: {sorted(missing)}"
        assert len({row["name"] for row in rows.values()}) == len(rows), "a submit was done twice"
        for job_id, known in self.known.items():
            check_job(known, rows[job_id], self.diaries / f"{known.key}.log")
        until(lambda: not self.left(), "no process of any job lives")
        for node in self.client.nodes():
            assert node["gpus_busy"] == 0, f"GPUs are held by nobody: {node}"
        replayed = replay_store(self.instance.dir)
        assert replayed
        assert all(one.same for one in replayed), [one for one in replayed if not one.same][:3]
        self._measure(rows)
        return Counter(row["state"] for row in rows.values())

    def left(self) -> list[int]:
        """Processes of jobs, by their environment."""
        mark = str(self.diaries).encode()
        return [
            pid
            for pid in processes.all_pids()
            if b"THEBES_ATTEMPT=" in (found := processes.environment(pid)) and mark in _command(pid) and found
        ]

    def _measure(self, rows: dict[str, dict[str, Any]]) -> None:
        figures = self.figures
        figures.jobs = len(rows)
        figures.preemptions = sum(row["preemptions"] for row in rows.values())
        widest = max(known.gpus for known in self.known.values())
        for job_id, known in self.known.items():
            attempts = self.client.job(job_id)["attempts"]
            figures.attempts += len(attempts)
            figures.losses += sum(attempt["cause"] == "lost" for attempt in attempts)
            if known.gpus == widest:
                figures.gang_start_s += [
                    attempt["started_s"] - attempt["created_s"] for attempt in attempts if attempt["started_s"]
                ]

    def keep(self, name: str, **more: Any) -> None:
        """Write the figures where THEBES_TRIAL_DIR says; print them in any case."""
        found = {**more, **self.figures.to_json()}
        print(f"\n{name}: {json.dumps(found)}")
        if folder := os.environ.get("THEBES_TRIAL_DIR"):
            Path(folder, f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def patiently(ask: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Ask again while nobody answers: a controller that was killed is back in a moment."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except Exception as error:
            silent = getattr(error, "status", None) in (0, 503) or "no Thebes cluster is running" in str(error)
            if not silent or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def kill_hard(pid: int) -> None:
    """And wait until it is gone."""
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            os.kill(pid, 9)
            wait_gone(pidfd, 60.0)
        finally:
            os.close(pidfd)
