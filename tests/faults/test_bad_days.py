"""What a machine does to a cluster on a bad day: a clear outcome each time, and nothing lost.

Tested elsewhere and not repeated here: a work directory that may not be entered, programs that cannot be run, a job
that ignores signals and daemons at the level of one node (tests/node/test_node_jobs.py); port, configuration, store and
folder at `thebes up` (tests/instance/test_instance_life.py, test_instance_config.py); damaged stores
(tests/store/test_store_files.py); a reboot (tests/node/test_node_faults.py). Here it happens to a cluster at work.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kit.fault_cluster import FaultCluster, fault_cluster
from kit.waiting import until
from thebes.client import Client, ServerError
from thebes.engine.door import free_port
from thebes.instance.up import bring_up
from thebes.instance.wanted import UpOptions
from thebes.live.clock import resume_clock
from thebes.node import processes

MIB = 1 << 20
# Runs until the file in its argument exists, then ends well.
WAITS = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    """One cluster for the tests that leave it as they found it. Logs may be 1 MiB long."""
    with fault_cluster(tmp_path_factory.mktemp("calm") / "i", grace_s=2.0, log_limit_mib=1) as cluster:
        yield cluster


def waiting_job(cluster: FaultCluster, signal_file: Path, **fields: Any) -> str:
    """A job that ends well when the file is made; returns when it runs."""
    job = cluster.client.submit([sys.executable, "-c", WAITS, str(signal_file)], workdir="/", **fields)
    until(lambda: cluster.client.job(job.id)["state"] == "running", "it runs")
    return job.id


def ended(cluster: FaultCluster, job_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = cluster.client.wait(job_id, 5.0)
        return found if found["done"] else None

    return until(look, f"job {job_id} ends")


def python(cluster: FaultCluster, source: str, **fields: Any) -> str:
    return cluster.client.submit([sys.executable, "-c", source], **{"workdir": "/", **fields}).id


# ---- jobs


@pytest.mark.parametrize("how", [pytest.param("cancel", marks=pytest.mark.faults), "preempt"])
def test_a_job_that_ignores_every_signal_and_leaves_daemons(calm: FaultCluster, tmp_path: Path, how: str) -> None:
    source = f"""
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.execvp("sleep", ["sleep", "600"])  # no trace of us but the environment
    os._exit(0)
os.wait()
for number in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}: signal.signal(number, signal.SIG_IGN)
if os.environ["THEBES_INCARNATION"] != "1": raise SystemExit(0)
open({str(tmp_path / "ready")!r}, "w").close()
time.sleep(600)
"""
    job = python(calm, source)
    until((tmp_path / "ready").exists, "it runs")
    getattr(calm.client, how)(job)
    found = ended(calm, job)
    assert found["state"] == ("cancelled" if how == "cancel" else "completed")
    until(lambda: not calm.of_jobs(), "its daemons are gone")
    until(lambda: calm.client.nodes()[0]["gpus_busy"] == 0, "its GPUs are free")


FLOOD = """
import os, sys
for _ in range(int(sys.argv[1])):
    data = (b"x" * 99 + b"\\n") * 10_000
    while data:
        data = data[os.write(1, data):]
"""


def prints(calm: FaultCluster, megabytes: int) -> None:
    job = calm.client.submit([sys.executable, "-c", FLOOD, str(megabytes)], workdir="/").id
    logs, most = calm.instance.nodes / "n0" / "attempts" / f"{job}.1", 0
    while not calm.client.wait(job, 0.2)["done"]:
        most = max([most, *(path.stat().st_size for path in logs.glob("*.log"))])
    assert calm.client.job(job)["state"] == "completed"
    size = (logs / "rank-0.log").stat().st_size
    text = b"".join(calm.client.logs(job))
    assert size <= MIB
    assert b"bytes dropped here" in text
    assert most < 500 * MIB, f"the log had grown to {most >> 20} MiB"


def test_a_job_that_prints_much(calm: FaultCluster) -> None:
    prints(calm, 50)


@pytest.mark.faults
def test_a_job_that_prints_a_gigabyte(calm: FaultCluster) -> None:
    prints(calm, 1000)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"command": ["no-such-program"]}, "'no-such-program' was not found in PATH on node n0"),
        ({"command": ["true"], "workdir": "/no/such/folder"}, "the work directory /no/such/folder cannot be entered"),
    ],
)
def test_a_job_that_cannot_be_started_tells_why(calm: FaultCluster, fields: dict[str, Any], says: str) -> None:
    job = calm.client.submit(**{"workdir": "/", **fields})
    found = ended(calm, job.id)
    assert found["state"] == "failed"
    assert says in found["reason"]


# ---- the folder


@contextmanager
def controller_held_back(cluster: FaultCluster) -> Iterator[None]:
    """Controller and standby are dead, and nobody starts them before the block ends."""
    keeper = cluster.pid("keeper")
    assert keeper
    os.kill(keeper, signal.SIGSTOP)
    try:
        for part in ("standby", "controller"):
            pid = cluster.pid(part)
            assert pid
            cluster.kill(pid)
        yield
    finally:
        os.kill(keeper, signal.SIGCONT)


def refused_with(cluster: FaultCluster, text: str) -> None:
    """The keeper logs why the controller does not come up, in its words."""
    log = cluster.instance.log / "keeper.jsonl"
    until(lambda: text in log.read_text(), f"'{text}' in the keeper's log")


def came_back(cluster: FaultCluster, job_id: str, signal_file: Path) -> None:
    """The cluster answers, the job that ran all the time is known, and ends as it should."""
    with suppress(Exception):
        bring_up(
            cluster.instance, UpOptions()
        )  # what a person does who has put it right; the keeper comes by itself, too
    until(cluster.answers, "the cluster answers")
    assert cluster.client.job(job_id)["state"] == "running"
    signal_file.touch()
    assert ended(cluster, job_id)["state"] == "completed"
    assert [attempt["incarnation"] for attempt in cluster.client.job(job_id)["attempts"]] == [1]


@pytest.mark.faults
def test_a_port_that_is_taken_while_the_controller_is_away(tmp_path: Path) -> None:
    port = free_port()
    with fault_cluster(tmp_path / "i", port=port) as cluster:
        job = waiting_job(cluster, tmp_path / "go")
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with controller_held_back(cluster):
                thief.bind(("127.0.0.1", port))
                thief.listen()
            refused_with(cluster, f"port {port} on 127.0.0.1 is taken by another program")
        came_back(cluster, job, tmp_path / "go")


@pytest.mark.faults
def test_a_configuration_and_a_store_that_are_damaged_while_the_cluster_is_up(
    calm: FaultCluster, tmp_path: Path
) -> None:
    job = waiting_job(calm, tmp_path / "go")
    kept = calm.instance.config.read_text()
    with controller_held_back(calm):
        calm.instance.config.write_text('{"version": 1, "nodes": "many"}')
    refused_with(calm, "cannot be understood: nodes")
    calm.instance.config.write_text(kept)
    until(calm.answers, "the cluster answers")
    with controller_held_back(calm):
        stores = [path for path in calm.instance.dir.glob("store.db*") if path.suffix != ".db-shm"]
        copies = {path: path.read_bytes() for path in stores}
        for path in stores:
            path.write_bytes(b"\0" * len(copies[path]))
    refused_with(calm, "store.db")
    for path, data in copies.items():
        path.write_bytes(data)
    came_back(calm, job, tmp_path / "go")


def test_a_token_that_was_removed(calm: FaultCluster, tmp_path: Path) -> None:
    old = calm.instance.token.read_text()
    calm.instance.token.unlink()
    try:
        assert calm.client.status()  # whoever has it goes on
        with pytest.raises(Exception, match="no such file"):
            Client(dir=calm.instance.dir).status()
        pid = calm.pid("controller")
        assert pid
        calm.kill(pid)
        until(lambda: calm.instance.token.exists(), "the next controller makes a new one")
        until(calm.answers, "the cluster answers")
        assert calm.instance.token.stat().st_mode & 0o777 == 0o600
        assert calm.instance.token.read_text() != old
    finally:
        calm.client.close()
        calm.client = Client(dir=calm.instance.dir)


@pytest.mark.faults
def test_an_instance_whose_folder_is_removed_ends_with_everything_in_it(tmp_path: Path) -> None:
    with fault_cluster(tmp_path / "i") as cluster:
        waiting_job(cluster, tmp_path / "never")
        parts = [*cluster.of_instance(), *cluster.supervisors(), *cluster.of_jobs()]
        assert len(parts) >= 5
        shutil.rmtree(cluster.instance.dir)
        until(lambda: not [pid for pid in parts if alive(pid)], "everybody has gone")


def alive(pid: int) -> bool:
    stat = processes.read_stat(pid)
    return stat is not None and stat.alive


# ---- disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 24 MiB, where the machine lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here: that takes root and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(ballast: Path) -> None:
    """To the last byte: big pieces, then small ones."""
    for size in (MIB, 4096, 1):
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(b"x" * size) == size:
                pass


@pytest.mark.faults
def test_a_disk_that_is_full(small_disk: Path, tmp_path: Path) -> None:
    with fault_cluster(small_disk / "i") as cluster:
        ballast = small_disk / "ballast"
        runs = waiting_job(cluster, tmp_path / "never-mind")
        ends = waiting_job(cluster, tmp_path / "go")
        acknowledged = [runs, ends]
        fill(ballast)

        def submit_until_refused() -> None:
            for _ in range(2000):  # there is some room left inside the files
                fill(ballast)
                acknowledged.append(cluster.client.submit(["true"], workdir="/", env={"X": "y" * 20_000}).id)

        with pytest.raises(
            ServerError, match=r"the store cannot be written: disk full.*nothing was accepted"
        ) as refused:
            submit_until_refused()
        assert refused.value.status == 503

        def in_trouble() -> bool:
            with suppress(ServerError):  # what it tries by itself may have found room
                submit_until_refused()
            return bool(cluster.client.status()["trouble"])

        until(in_trouble, "it answers, and says what is the matter")
        (tmp_path / "go").touch()  # ends while nothing can be written
        until(lambda: not [e for e in cluster.of_jobs().values() if e["THEBES_JOB_ID"] == ends], "its process ends")
        killed = cluster.pid("controller")
        assert killed
        cluster.kill(killed)  # and the controller is killed on top of it
        time.sleep(1.0)
        assert [e for e in cluster.of_jobs().values() if e["THEBES_JOB_ID"] == runs], "a running job goes on"
        ballast.unlink()
        until(cluster.answers, "the cluster answers")
        assert ended(cluster, ends)["state"] == "completed"
        assert cluster.client.job(runs)["state"] == "running"
        (tmp_path / "never-mind").touch()
        for job_id in acknowledged:
            assert ended(cluster, job_id)["state"] == "completed"
        rows = [job["id"] for job in cluster.client.jobs()]
        assert sorted(rows) == sorted(acknowledged), "acknowledged and lost, or refused and kept"
        assert not cluster.client.status()["trouble"]


# ---- time

JUMPY = """
import os, time
_file, _time, _time_ns = os.environ.get("JUMP_FILE"), time.time, time.time_ns
def _jump():
    try:
        return float(open(_file).read() or 0)
    except (OSError, ValueError):
        return 0.0
if _file:
    time.time = lambda: _time() + _jump()
    time.time_ns = lambda: _time_ns() + int(_jump() * 1e9)
"""


@pytest.mark.faults
def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process of ours is given a wall clock that the test turns by days, back and forth, while jobs run."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(JUMPY)
    jump = tmp_path / "jump"
    jump.write_text("0")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("JUMP_FILE", str(jump))

    def turn(seconds: float) -> None:
        draft = tmp_path / "jump.new"
        draft.write_text(str(seconds))
        draft.replace(jump)

    with fault_cluster(tmp_path / "i", grace_s=2.0) as cluster:
        asked = time.monotonic()
        first = cluster.client.status()["time_s"]
        began = time.monotonic()
        long = waiting_job(cluster, tmp_path / "go", time_s=3600.0)
        turn(10 * 86400.0)
        short = python(cluster, "pass", time_s=60.0)
        assert ended(cluster, short)["state"] == "completed"
        turn(-10 * 86400.0)
        cluster.client.preempt(long)
        until(lambda: cluster.client.job(long)["incarnation"] == 2, "it is preempted and starts again")
        until(lambda: cluster.client.job(long)["state"] == "running", "it runs again")
        pid = cluster.pid("controller")
        assert pid
        cluster.kill(pid)
        until(cluster.answers, "the cluster answers")
        turn(86400.0)
        (tmp_path / "go").touch()
        assert ended(cluster, long)["state"] == "completed"
        passed = time.monotonic() - began
        went_s = cluster.client.status()["time_s"] - first
        assert passed - 1 < went_s < time.monotonic() - asked + 1
        job = cluster.client.job(long)
        assert 0 < job["run_s"] < passed + 1
        times = [event["time_s"] for event in cluster.client.events()]
        hour_s = 3600.0  # a jump is a day or more
        assert first - hour_s < min(times) <= max(times) < first + went_s + hour_s


def test_the_clock_goes_on_through_restarts_and_never_back() -> None:
    """The boot clock rules; the wall clock is asked once, and again only after a reboot."""
    wall, boot = [1000.0], [5.0]
    options: dict[str, Any] = {"boot_clock": lambda: boot[0], "wall_clock": lambda: wall[0]}
    clock = resume_clock(None, 0.0, boot="a", **options)
    assert clock.now_s() == 1000.0
    wall[0], boot[0] = 1.0, 6.0
    assert clock.now_s() == 1001.0
    assert resume_clock(clock.kept(), 1001.0, boot="a", **options).now_s() == 1001.0
    boot[0] = 2.0  # the machine was started again, its wall clock is wrong
    assert resume_clock(clock.kept(), 1001.0, boot="b", **options).now_s() == 1001.0
    assert json.loads(clock.kept())["boot"] == "a"
