"""Measurements of a live cluster: `python -m benchmarks.live JSON` brings one up with virtual GPUs, prints its figures.

Each case is a process with a cluster of its own in a temporary folder. Nothing is pinned: controller, agents, jobs and
the clients that make the load share the machine, as they would in a lab.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.live_cluster import (
    LiveCluster,
    cluster,
    cpu_s,
    job_body,
    memory_mb,
    spread_ms,
    wait_until,
)
from thebes import store as db
from thebes.protocol.instance import Instance

Figures = dict[str, Any]

FOREVER = ["sleep", "36000"]
SUBMIT = "/v1/jobs"
THEBES = str(Path(sys.executable).with_name("thebes"))
QUEUED_SHARE = 0.2  # of the jobs in a large store


# -- many submits at once


def submits(jobs: int, clients: int, through: str) -> Figures:
    """So many clients, each a process with one kept connection, submit one job after the other."""
    with cluster(8) as live:
        controller = live.parts()["controller"][0]
        busy_s = cpu_s(controller)
        load = _submit_by_wire if through == "http" else _submit_by_client
        took_s, each_s = _crowd(live, load, clients, jobs // clients)
        accepted = sum(live.metrics()[name] for name in live.metrics() if name.startswith("thebes_submits_total"))
        stored = sum(live.client().status()["jobs"].values())
        if accepted != len(each_s) or stored != len(each_s):
            raise AssertionError(f"{len(each_s)} acknowledged, {accepted:g} counted, {stored} in the store")
        return {
            "jobs": len(each_s),
            "clients": clients,
            "wall_seconds": took_s,
            "acknowledged_per_second": len(each_s) / took_s,
            "controller_cpu_seconds": cpu_s(controller) - busy_s,
            **spread_ms(each_s),
        }


Load = Callable[[LiveCluster, int, Any, Any], None]


def _crowd(live: LiveCluster, load: Load, clients: int, each: int) -> tuple[float, list[float]]:
    """Seconds from the moment that all go on until the last is done, and of each request."""
    context = multiprocessing.get_context("fork")
    gate, results = context.Barrier(clients + 1), context.SimpleQueue()
    crowd = [context.Process(target=load, args=(live, each, gate, results)) for _ in range(clients)]
    for one in crowd:
        one.start()
    gate.wait()
    began = time.perf_counter()
    each_s = [second for _ in crowd for second in results.get()]
    took_s = time.perf_counter() - began
    for one in crowd:
        one.join()
    return took_s, each_s


def _submit_by_wire(live: LiveCluster, count: int, gate: Any, results: Any) -> None:
    wire, body = live.wire(), job_body(FOREVER, name="load", gpus=1)
    wire.ask("GET", "/v1/healthz")
    gate.wait()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        status, answer = wire.ask("POST", SUBMIT, body, **{"Idempotency-Key": uuid.uuid4().hex})
        taken.append(time.perf_counter() - began)
        if status != 201:
            raise AssertionError(f"{status}: {answer!r}")
    results.put(taken)


def _submit_by_client(live: LiveCluster, count: int, gate: Any, results: Any) -> None:
    client = live.client()
    client.status()
    gate.wait()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        client.submit(FOREVER, gpus=1, name="load", workdir="/")
        taken.append(time.perf_counter() - began)
    results.put(taken)


# -- many jobs that run


def held(jobs: int, watch_s: float, settle_s: float = 3.0) -> Figures:
    """So many jobs that sleep: what holding them costs, how the controller recovers with them, how fast all end."""
    with cluster(jobs) as live:
        client = live.client()
        parts = live.parts()
        before_s = {name: sum(map(cpu_s, found)) for name, found in parts.items()}

        def running(count: int) -> bool:
            return client.status()["jobs"].get("running", 0) == count

        began = time.perf_counter()
        array = client.submit(FOREVER, gpus=1, array=list(range(jobs)), workdir="/")
        wait_until(lambda: running(jobs), timeout_s=120)
        figures: Figures = {"jobs": jobs, "all_started_seconds": time.perf_counter() - began}
        parts = live.parts()
        figures["start_cpu_seconds"] = {
            name: sum(map(cpu_s, found)) - before_s.get(name, 0.0) for name, found in parts.items()
        }
        time.sleep(settle_s)  # what the starts left behind
        figures["memory"] = {name: _memory(found) for name, found in parts.items()}
        figures["idle"] = _idle_cost(live, watch_s)
        figures["recovery"] = _recovery(live, jobs)
        began = time.perf_counter()
        client.cancel(array.id)
        wait_until(lambda: client.status()["gpus"]["busy"] == 0, timeout_s=120)
        return figures | {"all_cancelled_seconds": time.perf_counter() - began}


def _memory(processes: list[Any]) -> Figures:
    found = [memory_mb(process) for process in processes]
    return {
        "processes": len(found),
        "rss_mb_largest": max((rss for rss, _ in found), default=0.0),
        "pss_mb_mean": statistics.fmean(pss for _, pss in found) if found else 0.0,
        "pss_mb_sum": sum(pss for _, pss in found),
    }


def _idle_cost(live: LiveCluster, watch_s: float) -> Figures:
    """Shares of one core, while nothing happens."""
    parts = live.parts()
    before = {name: sum(map(cpu_s, found)) for name, found in parts.items()}
    time.sleep(watch_s)
    used = {name: (sum(map(cpu_s, found)) - before[name]) / watch_s for name, found in parts.items()}
    return {"seconds": watch_s, "core_share": used, "core_share_of_all": sum(used.values())}


def _recovery(live: LiveCluster, jobs: int) -> Figures:
    """Kill the controller; seconds until another answers, and until it has decided about a new job."""
    victim = live.parts()["controller"][0]
    began = time.perf_counter()
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: _answers(live, victim.pid), timeout_s=120)
    answering_s = time.perf_counter() - began
    wire = live.wire()
    status, _ = wire.ask("POST", SUBMIT, job_body(["true"]))
    accepting_s = time.perf_counter() - began
    states = live.client().status()["jobs"]
    if status != 201 or states.get("running") != jobs:
        raise AssertionError(f"after the crash: {status}, {states}")
    lives = len(list(live.instance.live_attempts()))
    return {"answering_seconds": answering_s, "accepting_seconds": accepting_s, "supervisors_alive": lives}


def _answers(live: LiveCluster, old_pid: int) -> bool:
    pid = live.instance.holder_pid("controller")
    if pid is None or pid == old_pid:
        return False
    try:
        wire = live.wire()
        return wire.ask("GET", "/v1/status")[0] == 200
    except OSError:
        return False


# -- how soon a job runs


def start(jobs: int, pause_s: float) -> Figures:
    """From the call in the client to the first thing that the job does, one job after the other on an idle cluster."""
    with cluster(8) as live:
        client = live.client()
        whole, parts = [], []
        for number in range(jobs + 3):  # the first ones load code and open files
            time.sleep(pause_s)
            began = time.time()
            job = client.submit(["sh", "-c", "date +%s.%N"], workdir="/")
            acknowledged = time.time()
            client.wait(job.id, timeout_s=120)
            if number < 3:
                continue
            first_act = float(b"".join(client.logs(job.id)))
            (attempt,) = client.job(job.id)["attempts"]
            whole.append(first_act - began)
            parts.append(
                {
                    "acknowledged": acknowledged - began,
                    "decided": attempt["created_s"] - began,
                    "process_made": attempt["started_s"] - began,
                    "first_act": first_act - began,
                }
            )
        instants = {name: 1e3 * statistics.median(part[name] for part in parts) for name in parts[0]}
        return {"jobs": jobs, **spread_ms(whole), "median_ms_until": instants}


# -- many jobs in the store


def large_store(jobs: int, repeats: int, decide_s: float) -> Figures:
    """A store with so many jobs, one in five of them queued: a start, every command, decisions and what they block."""
    folder = Path(tempfile.mkdtemp(prefix="thebes-bench-"))
    try:
        with cluster(8, folder=folder):
            pass
        queued = int(jobs * QUEUED_SHARE)
        figures: Figures = {"jobs": jobs, "queued": queued, "fill_seconds": _fill(folder, jobs, queued)}
        figures["store_mib"] = sum(path.stat().st_size for path in folder.glob("store.db*")) / 2**20
        with cluster(8, folder=folder) as live:
            figures["open_seconds"] = _opening(live.instance)
            _calm(live)
            figures["commands"] = _commands(live, jobs, repeats)
            figures["decisions"] = _decisions(live, decide_s)
            figures["memory"] = {name: _memory(found) for name, found in live.parts().items()}
            victim = live.parts()["controller"][0]
            began = time.perf_counter()
            os.kill(victim.pid, signal.SIGKILL)
            wait_until(lambda: _answers(live, victim.pid), timeout_s=120)
            figures["restart_seconds"] = time.perf_counter() - began
        return figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, jobs: int, queued: int) -> float:
    """Jobs of many users: those that have ended, with an attempt and three events each, then those that wait."""
    began, now_s = time.perf_counter(), time.time() - 86_400
    spec = json.dumps({"command": FOREVER, "workdir": "/"})

    def add(c: db.Connection, first: int, last: int) -> None:
        for number in range(first, last):
            at_s, user, gpus = now_s + number * 0.5, f"user{number % 40}", (1, 1, 2, 4)[number % 4]
            (row,) = db.create_jobs(
                c,
                spec,
                user=user,
                tenant=f"team{number % 5}",
                name=f"job{number % 100}",
                gpus=gpus,
                nodes=None,
                priority=0,
                submit_s=at_s,
            )
            db.add_event(c, at_s, "submitted", job_id=row.id, actor=user, detail={"gpus": gpus})
            if number >= jobs - queued:
                continue
            db.insert_attempt(c, row.id, 1, created_s=at_s, parts=[("n0", tuple(range(gpus)))], state="ended")
            db.update_attempt(c, row.id, 1, started_s=at_s, ended_s=at_s + 60, cause="exit", codes={0: 0}, run_s=60.0)
            state = "failed" if number % 10 == 0 else "completed"
            db.update_job(c, row.id, state=state, first_start_s=at_s, end_s=at_s + 60, incarnation=1, exit_code=0)
            db.add_event(c, at_s, "started", job_id=row.id, detail={"incarnation": 1})
            db.add_event(c, at_s + 60, state, job_id=row.id)

    with db.Store.open(Instance(folder).store) as store:
        for first in range(0, jobs, 2000):
            store.change_blocking(lambda c, first=first: add(c, first, min(jobs, first + 2000)))
    return time.perf_counter() - began


def _opening(instance: Instance) -> float | None:
    """Seconds that the controller itself counted from the store to its first decision."""
    lines = (instance.log / "controller.jsonl").read_text().splitlines()
    opened = [json.loads(line) for line in lines if '"open"' in line]
    return opened[-1].get("took_s") if opened else None


def _calm(live: LiveCluster) -> None:
    """Until the GPUs are taken, who has them runs, and nothing is left to write."""
    wire = live.wire()

    def settled() -> bool:
        status = json.loads(wire.ask("GET", "/v1/status")[1])
        return status["gpus"]["busy"] == 8 and status["jobs"].get("running", 0) > 0 and "starting" not in status["jobs"]

    wait_until(settled, timeout_s=120)
    time.sleep(1.0)


def _commands(live: LiveCluster, jobs: int, repeats: int) -> list[Figures]:
    """Every command a user has: wall time of the whole, of which the server's by its own count."""
    ended, waiting = "7", str(jobs - 5)
    running = live.client().jobs(state="running", limit=1)
    runs = next(iter(running))["id"]
    lines = [
        ["ps"],
        ["ps", "-a"],
        ["ps", "-A"],
        ["ps", "-o", "json"],
        ["show", ended],
        ["show", waiting],
        ["events"],
        ["events", ended],
        ["nodes"],
        ["status"],
        ["top", "--once"],
        ["logs", runs],
        ["wait", ended],
        ["submit", "--dry-run", "--", "true"],
        ["submit", "--", *FOREVER],
        ["hold", waiting],
        ["release", waiting],
        ["preempt", runs],
        ["cancel", waiting],
        ["requeue", waiting],
        ["token", "list"],
        ["tenant", "list"],
    ]
    return [_command(live, words, repeats) for words in lines]


def _command(live: LiveCluster, words: list[str], repeats: int) -> Figures:
    """Wall time is the median: most of it is Python's start, which varies with what else the machine does."""
    once = words[0] in ("hold", "release", "preempt", "cancel", "requeue")
    environment = os.environ | {"THEBES_DIR": str(live.instance.dir)}
    walls, server = [], []
    for _ in range(1 if once else repeats):
        before = _server_s(live)
        began = time.perf_counter()
        done = subprocess.run([THEBES, *words], env=environment, capture_output=True, text=True, timeout=120)
        walls.append(time.perf_counter() - began)
        server.append(_server_s(live) - before)
        if done.returncode:
            raise AssertionError(f"thebes {' '.join(words)}: {done.stderr.strip()[-300:]}")
    return {
        "command": " ".join(words[: 2 if words[0] in ("submit", "ps", "top", "token", "tenant") else 1]),
        "about": words[1] if words[0] in ("show", "events", "wait") and len(words) > 1 else "",
        "wall_ms": 1e3 * statistics.median(walls),
        "server_ms": 1e3 * statistics.median(server),
    }


def _server_s(live: LiveCluster) -> float:
    """All seconds spent on requests so far, other than those for figures."""
    return sum(
        value
        for name, value in live.metrics().items()
        if name.startswith("thebes_http_request_seconds_sum") and 'route="/metrics"' not in name
    )


def _decisions(live: LiveCluster, seconds: float) -> Figures:
    """Submit a job every 50 ms, so that decisions follow each other, and see how long a small request waits."""
    before, stop = live.metrics(), threading.Event()
    probes: list[float] = []

    def probe() -> None:
        wire = live.wire()
        while not stop.wait(0.005):
            began = time.perf_counter()
            wire.ask("GET", "/v1/healthz")
            probes.append(time.perf_counter() - began)

    prober = threading.Thread(target=probe)
    prober.start()
    wire, submitted = live.wire(), []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        wire.ask("POST", SUBMIT, job_body(["true"]))
        submitted.append(time.perf_counter() - began)
        time.sleep(0.05)
    count = "thebes_decision_seconds_count"
    # On a machine that stalls all this time may have passed before the first of either.
    wait_until(lambda: probes and live.metrics()[count] > before[count], timeout_s=60)
    stop.set()
    prober.join()
    after = live.metrics()
    made = after[count] - before[count]
    spent_s = after["thebes_decision_seconds_sum"] - before["thebes_decision_seconds_sum"]
    return {
        "seconds": seconds,
        "decisions": int(made),
        "decision_mean_ms": 1e3 * spent_s / max(1, made),
        "submit": spread_ms(submitted),
        "probe": spread_ms(probes),
        "probes": len(probes),
        "probes_over_50_ms": sum(probe_s > 0.05 for probe_s in probes),
        "share_of_probes_over_50_ms": sum(probe_s > 0.05 for probe_s in probes) / len(probes),
    }


CASES: dict[str, Callable[..., Figures]] = {"submits": submits, "held": held, "start": start, "store": large_store}


def measure(case: str, **arguments: Any) -> Figures:
    load_before = round(os.getloadavg()[0], 2)
    return {"case": case, **arguments, "load_average_before": load_before, **CASES[case](**arguments)}


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
