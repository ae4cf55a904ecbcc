"""`thebes up`, `down`, `status`, `doctor`, `token`, `tenant` with real processes: as a person meets them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import thebes as package
from thebes.node.instance import Instance
from thebes.node.keeper import stop_instance
from thebes.server.lifecycle import agent_names, end_attempts

T = TypeVar("T")
VIRTUAL = ("--virtual-gpus", 2)
RECOVERY_S = 5.0

SAVES_AND_GOES = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def eventually(look: Callable[[], T], timeout_s: float = 15.0) -> T:
    """The first answer that is not empty."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Cluster:
    """An instance in a folder of its own, and the command line that belongs to it."""

    def __init__(self, folder: Path, thebes: Callable[..., Any]) -> None:
        self.instance = Instance.at(folder)
        self._thebes = thebes

    def run(self, command: str, *args: object) -> Any:
        words = command.split()
        return self._thebes(*words, "--dir", self.instance.dir, *args)

    def up(self, *args: object) -> Any:
        ran = self.run("up", *args)
        assert ran.code == 0, ran.err
        return ran

    def status(self) -> dict[str, Any]:
        ran = self.run("status", "-o", "json")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    def pid(self, part: str) -> int:
        return self.instance.holder_pid(part) or 0

    def client(self) -> Any:
        from thebes.client import Client

        return Client(dir=self.instance.dir)

    def run_job(self, source: str, marker: Path) -> str:
        """Submit a script that makes a file when it has begun; returns when it has."""
        job = self.client().submit([sys.executable, "-c", source, str(marker)], gpus=1, workdir="/")
        eventually(marker.exists)
        return job.id

    def clean_up(self) -> None:
        if self.instance.run.is_dir():
            stop_instance(self.instance, agent_names(self.instance))
            end_attempts(self.instance, "kill", lambda _: None)


@pytest.fixture
def make_cluster(thebes: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(name: str = "c") -> Cluster:
        made.append(Cluster(tmp_path / name, thebes))
        return made[-1]

    yield make
    for cluster in made:
        cluster.clean_up()


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster()


def test_up_tells_where_it_runs_and_status_what_runs(cluster: Cluster) -> None:
    began = time.monotonic()
    ran = cluster.up("--virtual-gpus", 4, "--nodes", 2, "--policy", "las")
    assert time.monotonic() - began < 20.0
    state = cluster.status()
    assert f"Thebes is up  {state['url']}" in ran.out
    assert "policy   las, placement consolidate" in ran.out
    assert "2 nodes, 8 virtual GPUs" in ran.out
    assert f"export THEBES_DIR={cluster.instance.dir}" in ran.out
    assert "thebes submit" in ran.out
    assert set(state) >= {"dir", "url", "policy", "keeper", "controller", "agents", "gpus", "jobs"}
    assert state["dir"] == str(cluster.instance.dir)
    assert state["policy"] == "las"
    assert state["keeper"] == {"pid": cluster.pid("keeper")}
    assert state["controller"] == {"pid": cluster.pid("controller"), "healthy": True}
    assert state["agents"] == [
        {"node": "n0", "pid": cluster.pid("agent-n0")},
        {"node": "n1", "pid": cluster.pid("agent-n1")},
    ]
    assert (state["gpus"]["total"], state["gpus"]["busy"]) == (8, 0)
    assert not any(state["jobs"].values())
    assert stat.S_IMODE(cluster.instance.token.stat().st_mode) == 0o600
    assert stat.S_IMODE(cluster.instance.dir.stat().st_mode) == 0o700
    told = cluster.run("status").out
    assert "cluster    up" in told
    assert "0 of 8 busy (virtual)" in told


def test_up_twice_then_down_then_up_as_before(cluster: Cluster) -> None:
    cluster.up(*VIRTUAL, "--policy", "fifo", "--grace", 2)
    before = cluster.status()
    again = cluster.up()
    assert "Thebes is up already" in again.out
    assert cluster.status() == before
    assert cluster.up("--policy", "fifo").code == 0
    other = cluster.run("up", "--policy", "las", "--virtual-gpus", 3)
    assert other.code == 2
    assert "runs with other options: policy is fifo, not las; nodes is 2 virtual GPUs, not 3 virtual GPUs" in other.err
    assert "`thebes down` first" in other.err
    assert cluster.status() == before

    down = cluster.run("down")
    assert down.code == 0, down.err
    assert "Thebes is down" in down.out
    state = cluster.status()
    assert (state["keeper"]["pid"], state["controller"]["pid"], state["agents"][0]["pid"]) == (None, None, None)
    assert state["url"] is None
    assert cluster.run("down").out == f"nothing runs in {cluster.instance.dir}\n"

    token = cluster.instance.read_token()
    cluster.up("--policy", "las")  # the rest stays as it was said
    after = cluster.status()
    assert (after["policy"], after["gpus"]["total"]) == ("las", 2)
    assert after["url"] == before["url"]
    assert cluster.instance.read_token() == token


@pytest.mark.parametrize("part", ["controller", "agent-n0"])
def test_what_is_killed_comes_back(cluster: Cluster, part: str, tmp_path: Path) -> None:
    cluster.up(*VIRTUAL)
    job = cluster.run_job(SAVES_AND_GOES, tmp_path / "begun")
    url, old = cluster.status()["url"], cluster.pid(part)
    os.kill(old, signal.SIGKILL)
    began = time.monotonic()
    eventually(lambda: cluster.pid(part) not in (0, old))
    eventually(lambda: (s := cluster.status())["controller"]["healthy"] and s["gpus"]["busy"] == 1)
    assert time.monotonic() - began < RECOVERY_S
    assert cluster.status()["url"] == url
    assert cluster.client().job(job)["state"] == "running"
    assert cluster.client().job(job)["incarnation"] == 1


def test_a_killed_keeper_harms_nothing_and_up_brings_another(cluster: Cluster) -> None:
    cluster.up(*VIRTUAL)
    before = cluster.status()
    os.kill(before["keeper"]["pid"], signal.SIGKILL)
    eventually(lambda: cluster.pid("keeper") == 0)
    state = cluster.status()
    assert state == {**before, "keeper": {"pid": None}}
    assert "parts are missing" in cluster.run("status").out
    assert cluster.up().out.startswith("Thebes is up")
    after = cluster.status()
    assert after["keeper"]["pid"] not in (None, before["keeper"]["pid"])
    assert {**after, "keeper": None} == {**before, "keeper": None}

    # Now the keeper and then everything else: status works with nothing alive, and up starts it all.
    os.kill(after["keeper"]["pid"], signal.SIGKILL)
    os.kill(after["controller"]["pid"], signal.SIGKILL)
    os.kill(after["agents"][0]["pid"], signal.SIGKILL)
    eventually(lambda: not any(cluster.pid(part) for part in ("keeper", "controller", "agent-n0")))
    state = cluster.status()
    assert state["controller"] == {"pid": None, "healthy": False}
    assert state["gpus"]["busy"] is None
    cluster.up()
    assert cluster.status()["controller"]["healthy"]


def test_two_instances_side_by_side_one_in_a_very_long_path(make_cluster: Callable[..., Cluster]) -> None:
    long = make_cluster("/".join(["a-rather-long-name-of-a-folder" * 3] * 3))
    short = make_cluster("short")
    long.up(*VIRTUAL)
    short.up("--virtual-gpus", 1, "--policy", "fifo")
    assert long.status()["url"] != short.status()["url"]
    job = short.client().submit(["true"], gpus=1, workdir="/")
    assert job.wait(20)["state"] == "completed"
    assert list(long.client().jobs()) == []
    assert long.client().submit(["true"], gpus=2, workdir="/").wait(20)["state"] == "completed"
    assert short.run("down").code == 0
    assert long.status()["controller"]["healthy"]


def test_a_port_that_is_taken_is_told_and_nothing_stays_behind(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = cluster.run("up", *VIRTUAL, "--port", port)
        assert ran.code == 2
        assert f"port {port} on 127.0.0.1 is taken by another program" in ran.err
        assert "--port" in ran.err
        assert [cluster.pid(part) for part in ("keeper", "controller", "agent-n0")] == [0, 0, 0]
        assert not cluster.instance.config.exists()
    cluster.up(*VIRTUAL, "--port", port)
    assert cluster.status()["url"] == f"http://127.0.0.1:{port}"


def test_a_corrupted_configuration_is_told_and_left_alone(cluster: Cluster) -> None:
    cluster.instance.create()
    cluster.instance.config.write_text('{"nodes": 7}')
    for command in ("up", "status"):
        ran = cluster.run(command)
        assert ran.code == 2
        assert f"{cluster.instance.config} cannot be understood: nodes:" in ran.err
        assert "move it away" in ran.err
    assert cluster.instance.config.read_text() == '{"nodes": 7}'
    doctor = cluster.run("doctor")
    assert doctor.code == 1
    assert "problem  instance" in doctor.out
    assert cluster.run("down").code == 0


def test_a_configuration_that_breaks_while_the_cluster_runs_does_not_keep_it_up(cluster: Cluster) -> None:
    cluster.up(*VIRTUAL)
    cluster.instance.config.write_text("{")
    assert cluster.run("down").code == 0
    assert [cluster.pid(part) for part in ("keeper", "controller", "agent-n0")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "0.0.0.0 can be reached from the network: tokens would travel in the clear"),
        (("--tls-cert", "x.pem"), "--tls-cert and --tls-key go together"),
        (("--policy", "srtf"), "policy srtf needs to know how long each job will run"),
        (("--policy", "tiresia"), "unknown policy 'tiresia'"),
        (("--placement", "nowhere"), "unknown placement 'nowhere'"),
        (("--set", "nonsense"), "policy_settings.0: "),
    ],
)
def test_what_up_refuses_leaves_nothing_behind(cluster: Cluster, options: tuple[str, ...], message: str) -> None:
    ran = cluster.run("up", *VIRTUAL, *options)
    assert ran.code == 2
    assert message in ran.err
    assert not cluster.instance.config.exists()
    assert cluster.pid("keeper") == 0


def test_without_gpus_up_tells_how_to_go_on(cluster: Cluster) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has GPUs")
    ran = cluster.run("up")
    assert ran.code == 2
    assert "--virtual-gpus" in ran.err
    assert "--nodes divides virtual GPUs only" in cluster.run("up", "--nodes", 2).err


def test_a_folder_that_cannot_be_written_is_told(thebes: Callable[..., Any], tmp_path: Path) -> None:
    if os.geteuid() == 0:
        # Root may write anywhere, but not even root below a file.
        (tmp_path / "file").touch()
        ran = thebes("up", *VIRTUAL, "--dir", tmp_path / "file" / "x")
        assert "a part of the path is a file" in ran.err
    else:
        tmp_path.chmod(0o500)
        ran = thebes("up", *VIRTUAL, "--dir", tmp_path / "x")
        assert "no permission" in ran.err
    assert ran.code == 2
    assert "--dir" in ran.err


def test_status_without_an_instance(cluster: Cluster) -> None:
    ran = cluster.run("status")
    assert ran.code == 2
    assert "there is no instance in" in ran.err
    assert "thebes up" in ran.err
    assert cluster.run("down").code == 2


def test_tls_makes_a_public_cluster(cluster: Cluster, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    cluster.up(*VIRTUAL, "--host", "0.0.0.0", "--tls-cert", cert, "--tls-key", key)
    state = cluster.status()
    assert state["url"].startswith("https://127.0.0.1:")
    assert state["controller"]["healthy"]
    assert cluster.run("down").code == 0


def test_down_lets_jobs_save_and_up_lets_them_go_on(cluster: Cluster, tmp_path: Path) -> None:
    cluster.up(*VIRTUAL, "--grace", 5)
    job = cluster.run_job(SAVES_AND_GOES, tmp_path / "begun")
    waiting = cluster.client().submit(["true"], gpus=2, workdir="/").id
    ran = cluster.run("down")
    assert ran.code == 0, ran.err
    assert f"job {job}  " in ran.out
    assert not list(cluster.instance.live_attempts())
    (tmp_path / "begun").unlink()
    cluster.up()
    eventually((tmp_path / "begun").exists)
    info = cluster.client().job(job)
    assert (info["state"], info["incarnation"], info["failures"]) == ("running", 2, 0)
    cluster.client().cancel(job)
    assert cluster.client().wait(waiting, 20)["state"] == "completed"


def test_down_can_leave_jobs_running_for_the_next_up(cluster: Cluster, tmp_path: Path) -> None:
    cluster.up(*VIRTUAL)
    job = cluster.run_job(SAVES_AND_GOES, tmp_path / "begun")
    (attempt,) = cluster.instance.live_attempts()
    ran = cluster.run("down", "--keep-jobs")
    assert ran.code == 0, ran.err
    assert f"job {job}  " in ran.out
    assert attempt.lives
    refused = cluster.run("up", "--virtual-gpus", 4)
    assert refused.code == 2
    assert f"jobs still run on the nodes that would change: {job}" in refused.err
    cluster.up()
    eventually(lambda: cluster.status()["gpus"]["busy"] == 1)
    assert attempt.lives
    assert cluster.client().job(job)["incarnation"] == 1


def test_down_now_kills(cluster: Cluster, tmp_path: Path) -> None:
    cluster.up(*VIRTUAL)
    cluster.run_job("import sys, time\nopen(sys.argv[1], 'w').close()\ntime.sleep(60)", tmp_path / "begun")
    began = time.monotonic()
    ran = cluster.run("down", "--now")
    assert ran.code == 0, ran.err
    assert time.monotonic() - began < 10.0
    assert not list(cluster.instance.live_attempts())
    assert cluster.run("down", "--now", "--keep-jobs").code == 2


def test_down_with_the_controller_dead_reaches_jobs_through_their_supervisors(cluster: Cluster, tmp_path: Path) -> None:
    cluster.up(*VIRTUAL, "--grace", 5)
    job = cluster.run_job(SAVES_AND_GOES, tmp_path / "begun")
    os.kill(cluster.pid("keeper"), signal.SIGKILL)
    eventually(lambda: cluster.pid("keeper") == 0)
    os.kill(cluster.pid("controller"), signal.SIGKILL)
    eventually(lambda: cluster.pid("controller") == 0)
    ran = cluster.run("down")
    assert ran.code == 0, ran.err
    assert "the controller does not answer" in ran.err
    assert f"job {job}  saved its state; goes on at the next `thebes up`" in ran.out
    (tmp_path / "begun").unlink()
    cluster.up()
    eventually((tmp_path / "begun").exists)
    assert cluster.client().job(job)["failures"] == 0


def test_doctor_finds_a_healthy_cluster_and_a_damaged_store(cluster: Cluster) -> None:
    assert cluster.run("doctor").code == 0
    cluster.up(*VIRTUAL)
    ran = cluster.run("doctor", "-o", "json")
    findings = {finding["check"]: finding for finding in json.loads(ran.out)}
    assert ran.code == 0
    assert {"python", "kernel", "gpu", "folder", "disk", "clock", "open files", "processes", "port", "store"} <= set(
        findings
    )
    assert findings["running"]["found"] == "3 processes, and the controller answers"
    assert findings["store"]["level"] == "ok"
    os.kill(cluster.pid("keeper"), signal.SIGKILL)
    eventually(lambda: cluster.pid("keeper") == 0)
    assert "does not run: keeper" in cluster.run("doctor").out
    cluster.instance.dir.chmod(0o755)
    assert "others can look into" in cluster.run("doctor").out
    cluster.run("down")
    connection = sqlite3.connect(cluster.instance.store)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    with cluster.instance.store.open("r+b") as file:
        file.seek(0)
        file.write(b"not a store at all")
    ran = cluster.run("doctor")
    assert ran.code == 1
    assert "problem  store" in ran.out
    refused = cluster.run("up")
    assert refused.code == 2
    assert "store.db" in refused.err
    assert cluster.pid("keeper") == 0


def test_tokens_and_tenants(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.up(*VIRTUAL)
    assert cluster.run("tenant set vision", "--gpus", 1, "--open").out == "tenant vision: 1 GPU, open\n"
    assert cluster.run("tenant set vision", "--closed").out == "tenant vision: 1 GPU, closed\n"
    assert cluster.run("tenant set vision", "--no-limit").out == "tenant vision: no limit, closed\n"
    assert "vision" in cluster.run("tenant list").out
    made = cluster.run("token create ada", "--tenant", "vision", "--expires", "30d")
    assert made.code == 0, made.err
    text = made.out.strip()
    assert "shown this one time" in made.err
    tokens = json.loads(cluster.run("token list", "-o", "json").out)
    (number,) = [entry["id"] for entry in tokens if entry["user"] == "ada"]
    assert text not in cluster.run("token list").out
    client = package.Client(url=cluster.status()["url"], token=text)
    assert client.status()
    assert cluster.run(f"token revoke {number}").out == f"token {number} is revoked\n"
    with pytest.raises(package.UserError, match="token"):
        client.status()
    assert cluster.run("tenant delete vision").out == "tenant vision is removed\n"
    assert cluster.run("tenant delete vision").code == 2
