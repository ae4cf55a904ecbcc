"""`thebes up`, `down`, `status`, `doctor`, `token`, `tenant` with real processes: as a person meets them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kit.waiting import until
from thebes.cli.instance import compile_ahead
from thebes.cli.screen import plural
from thebes.client import Client
from thebes.instance.asking import ask
from thebes.instance.down import end_attempts
from thebes.instance.state import agent_names
from thebes.instance.up import bring_up, wait_for_keeper
from thebes.instance.wanted import UpOptions
from thebes.model.errors import UserError
from thebes.node.keeper import stop_instance
from thebes.protocol.instance import Instance

T = TypeVar("T")
VIRTUAL = ("--virtual-gpus", 2)

SAVES_AND_GOES = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
open(sys.argv[1], "w").close()
time.sleep(3600)
"""


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

    def kill(self, *parts: str) -> None:
        """One after the other, each until it is gone: the keeper first, or it starts others."""
        pids = {part: until(lambda part=part: self.pid(part)) for part in parts}
        for part, pid in pids.items():
            os.kill(pid, signal.SIGKILL)
            until(lambda part=part, pid=pid: self.pid(part) != pid)

    def client(self) -> Any:
        return Client(dir=self.instance.dir)

    def run_job(self, source: str, marker: Path) -> str:
        """Submit a script that makes a file when it has begun; returns when it has, and the controller knows."""
        client = self.client()
        job = client.submit([sys.executable, "-c", source, str(marker)], gpus=1, workdir="/")
        until(marker.exists)
        until(lambda: client.job(job.id)["state"] == "running")
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
    """A folder in which nothing is yet."""
    return make_cluster()


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("shared") / "instance"
    yield folder
    Cluster(folder, lambda *_: None).clean_up()


@pytest.fixture
def running(shared_folder: Path, thebes: Callable[..., Any]) -> Cluster:
    """A cluster that is up, shared by tests that leave it so."""
    cluster = Cluster(shared_folder, thebes)
    cluster.up("--virtual-gpus", 4, "--nodes", 2, "--policy", "las")
    return cluster


def test_status_tells_what_runs(running: Cluster) -> None:
    state = running.status()
    assert set(state) >= {"dir", "url", "policy", "keeper", "controller", "agents", "gpus", "jobs"}
    assert state["dir"] == str(running.instance.dir)
    assert state["policy"] == "las"
    assert state["keeper"] == {"pid": running.pid("keeper")}
    assert state["controller"] == {"pid": running.pid("controller"), "healthy": True, "role": "leader"}
    assert state["agents"] == [
        {"node": "n0", "pid": running.pid("agent-n0")},
        {"node": "n1", "pid": running.pid("agent-n1")},
    ]
    assert (state["gpus"]["total"], state["gpus"]["busy"]) == (8, 0)
    assert not any(state["jobs"].values())
    told = running.run("status").out
    assert "cluster    up" in told
    assert "0 of 8 busy (virtual)" in told


def test_a_cluster_of_version_0_1_whose_placement_learns_goes_up_again(cluster: Cluster) -> None:
    """`thebes up` refuses such a placement to those who ask for it now; saved settings stay as they are."""
    cluster.up(*VIRTUAL, "--placement", "skew")
    assert cluster.run("down", "--now").code == 0
    saved = cluster.instance.config.read_text(encoding="utf-8")
    config = json.loads(saved)
    config["policy_settings"] = ["placement.learn=yes"]
    cluster.instance.config.write_text(json.dumps(config), encoding="utf-8")
    cluster.up()
    assert cluster.status()["controller"]["healthy"]


def test_a_backup_says_of_what_and_does_not_go_onto_a_running_cluster(running: Cluster, tmp_path: Path, thebes) -> None:
    file, folder = tmp_path / "monday.thebes", running.instance.dir
    jobs = len(list(running.client().jobs()))  # how many depends on which tests have run before
    told = running.run("backup", file).out
    assert re.fullmatch(rf"backup of {re.escape(str(folder))} written: {re.escape(str(file))}, \d+\.\d MiB\n", told)
    refused = running.run("restore", file)
    assert refused.code == 2
    assert f"the cluster in {folder} runs" in refused.err
    told = thebes("restore", file, "--dir", tmp_path / "new")
    assert told.out == f"restored into {tmp_path / 'new'}: {plural(jobs, 'job')}. `thebes up` goes on from there.\n"


def test_after_a_restore_jobs_go_on_and_no_number_is_given_out_twice(cluster: Cluster, tmp_path: Path) -> None:
    """What happened since the backup is on the nodes: starts of jobs, and jobs that it does not know."""
    cluster.up(*VIRTUAL)
    script = "echo start $THEBES_INCARNATION; test -e again && exit 0; sleep 300"
    submit = ("submit", "--gpus", "1", "--workdir", tmp_path, "--", "bash", "-c", script)
    assert cluster.run(*submit).out == "1\n"
    client = cluster.client()
    until(lambda: client.job("1")["state"] == "running")
    assert cluster.run("backup", tmp_path / "file").code == 0
    assert cluster.run("submit", "--", "sleep", "300").out == "2\n"
    until(lambda: client.job("2")["state"] == "running")
    assert cluster.run("preempt", "1", "--grace", "0s").code == 0
    until(lambda: (client.job("1")["incarnation"], client.job("1")["state"]) == (2, "running"))
    assert cluster.run("down", "--now").code == 0
    assert cluster.run("restore", tmp_path / "file", "--force").code == 0
    (tmp_path / "again").touch()
    cluster.up()
    client = cluster.client()
    until(lambda: client.job("1")["state"] == "completed")
    assert cluster.run("submit", "--", "true").out == "3\n"
    until(lambda: client.job("3")["state"] == "completed")


def test_what_is_secret_is_for_the_owner_alone(running: Cluster) -> None:
    assert stat.S_IMODE(running.instance.dir.stat().st_mode) == 0o700
    for path in (running.instance.token, running.instance.config, running.instance.store):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_up_again_changes_nothing_and_tells_where_it_runs(running: Cluster) -> None:
    before = running.status()
    again = running.up()
    assert again.out.startswith(f"Thebes is up already  {before['url']}\n")
    assert "policy   las, placement consolidate" in again.out
    assert "2 nodes, 8 virtual GPUs" in again.out
    assert f"export THEBES_DIR={running.instance.dir}" in again.out
    assert "thebes submit" in again.out
    assert running.up("--policy", "las", "--virtual-gpus", 4).code == 0
    assert running.status() == before


def test_up_with_other_options_names_them(running: Cluster) -> None:
    before = running.status()
    other = running.run("up", "--policy", "fifo", "--virtual-gpus", 3)
    assert other.code == 2
    differences = "policy is las, not fifo; nodes is 4 virtual + 4 virtual GPUs, not 3 virtual + 3 virtual GPUs"
    assert f"runs with other options: {differences}" in other.err
    assert "`thebes down` first" in other.err
    assert running.status() == before


@pytest.mark.parametrize("part", ["controller", "agent-n0", "standby"])
def test_what_is_killed_comes_back_and_jobs_do_not_notice(running: Cluster, part: str, tmp_path: Path) -> None:
    job = running.run_job(SAVES_AND_GOES, tmp_path / "begun")
    url, old, controller = running.status()["url"], running.pid(part), running.pid("controller")
    running.kill(part)
    until(lambda: running.pid(part) not in (0, old))
    until(lambda: (s := running.status())["controller"]["healthy"] and s["gpus"]["busy"] == 1)
    assert part == "controller" or running.pid("controller") == controller
    assert running.status()["url"] == url
    info = running.client().job(job)
    assert (info["state"], info["incarnation"]) == ("running", 1)
    running.client().cancel(job)
    assert running.client().wait(job, 120)["state"] == "cancelled"


def test_a_killed_keeper_harms_nothing_and_up_brings_another(running: Cluster) -> None:
    before = running.status()
    running.kill("keeper")
    assert running.status() == {**before, "keeper": {"pid": None}}
    assert "parts are missing" in running.run("status").out
    assert "does not run: keeper" in running.run("doctor").out
    assert running.up().out.startswith("Thebes is up ")
    after = running.status()
    assert after["keeper"]["pid"] not in (None, before["keeper"]["pid"])
    assert {**after, "keeper": None} == {**before, "keeper": None}


def test_with_everything_killed_status_works_and_up_brings_it_back(running: Cluster) -> None:
    parts = ("keeper", "standby", "controller", "agent-n0", "agent-n1")
    running.kill(*parts)
    state = running.status()
    assert state["controller"] == {"pid": None, "healthy": False, "role": None}
    assert [agent["pid"] for agent in state["agents"]] == [None, None]
    assert (state["gpus"]["total"], state["gpus"]["busy"], state["jobs"], state["url"]) == (8, None, None, None)
    assert "cluster    down" in running.run("status").out
    running.up()
    assert all(running.pid(part) for part in parts)


def test_doctor_finds_a_healthy_cluster(running: Cluster) -> None:
    ran = running.run("doctor", "-o", "json")
    findings = {finding["check"]: finding for finding in json.loads(ran.out)}
    assert ran.code == 0
    expected = {"python", "kernel", "gpu", "folder", "disk", "clock", "open files", "processes", "port", "store"}
    assert expected <= set(findings)
    assert findings["running"]["found"] == "5 processes, and the controller answers"
    assert findings["store"]["level"] == "ok"
    running.instance.dir.chmod(0o755)
    told = running.run("doctor").out
    running.instance.dir.chmod(0o700)
    assert "others can look into" in told
    assert f"→ chmod 700 {running.instance.dir}" in told


def test_tokens_and_tenants(running: Cluster) -> None:
    assert running.run("tenant set vision", "--gpus", 1, "--open").out == "tenant vision: 1 GPU, open\n"
    assert running.run("tenant set vision", "--closed").out == "tenant vision: 1 GPU, closed\n"
    assert running.run("tenant set vision", "--no-limit").out == "tenant vision: no limit, closed\n"
    assert "vision" in running.run("tenant list").out
    assert running.run("tenant set vision", "--no-limit", "--gpus", 1).code == 2
    made = running.run("token create ada", "--tenant", "vision", "--expires", "30d")
    assert made.code == 0, made.err
    text = made.out.strip()
    assert "shown this one time" in made.err
    tokens = json.loads(running.run("token list", "-o", "json").out)
    (number,) = [entry["id"] for entry in tokens if entry["user"] == "ada"]
    assert text not in running.run("token list").out
    client = Client(url=running.status()["url"], token=text)
    assert client.status()
    assert running.run(f"token revoke {number}").out == f"token {number} is revoked\n"
    with pytest.raises(UserError, match="token"):
        client.status()
    assert running.run("tenant delete vision").out == "tenant vision is removed\n"
    assert running.run("tenant delete vision").code == 2


def test_down_then_up_as_before(cluster: Cluster) -> None:
    cluster.up(*VIRTUAL, "--policy", "fifo", "--grace", 2)
    before, token = cluster.status(), cluster.instance.read_token()
    down = cluster.run("down")
    assert down.code == 0, down.err
    assert "Thebes is down" in down.out
    state = cluster.status()
    assert (state["keeper"]["pid"], state["controller"]["pid"], state["agents"][0]["pid"]) == (None, None, None)
    assert state["url"] is None
    assert cluster.run("down").out == f"nothing runs in {cluster.instance.dir}\n"
    cluster.up("--policy", "las")  # the rest stays as it was said
    after = cluster.status()
    assert (after["policy"], after["gpus"]["total"]) == ("las", 2)
    assert after["url"] == before["url"]
    assert cluster.instance.read_token() == token


def test_two_instances_side_by_side_one_in_a_very_long_path(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)
    long = make_cluster("/".join(["a-rather-long-name-of-a-folder" * 3] * 3))
    public = make_cluster("public")
    long.up(*VIRTUAL)
    public.up("--virtual-gpus", 1, "--host", "0.0.0.0", "--tls-cert", cert, "--tls-key", key)
    state = public.status()
    assert state["url"].startswith("https://127.0.0.1:")
    assert state["controller"]["healthy"]
    assert long.client().submit(["true"], gpus=2, workdir="/").wait(120)["state"] == "completed"
    assert public.run("down").code == 0
    assert long.status()["controller"]["healthy"]


def test_a_port_that_is_taken_is_told_and_nothing_stays_behind(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = cluster.run("up", *VIRTUAL, "--port", port)
        assert ran.code == 2
        assert f"port {port} on 127.0.0.1 is taken by another program" in ran.err
        assert "--port" in ran.err
        assert [cluster.pid(part) for part in ("keeper", "standby", "controller", "agent-n0")] == [0, 0, 0, 0]
        assert not cluster.instance.config.exists()


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


def test_down_with_a_broken_configuration_and_up_with_a_damaged_store(cluster: Cluster) -> None:
    cluster.up(*VIRTUAL)
    good = cluster.instance.config.read_text()
    cluster.instance.config.write_text("{")
    assert cluster.run("down").code == 0
    assert [cluster.pid(part) for part in ("keeper", "standby", "controller", "agent-n0")] == [0, 0, 0, 0]
    cluster.instance.config.write_text(good)
    cluster.instance.store.write_bytes(b"not a store at all")
    ran = cluster.run("doctor")
    assert ran.code == 1
    assert "problem  store" in ran.out
    refused = cluster.run("up")
    assert refused.code == 2
    assert "store.db is not a Thebes store" in refused.err
    assert cluster.pid("keeper") == 0
    assert cluster.instance.config.read_text() == good


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "0.0.0.0 can be reached from the network: tokens would travel in the clear"),
        (("--tls-cert", "x.pem"), "--tls-cert and --tls-key go together"),
        (("--policy", "srtf"), "policy srtf needs to know how long each job will run"),
        (("--policy", "tiresia"), "unknown policy 'tiresia'"),
        (("--placement", "nowhere"), "unknown placement 'nowhere'"),
        (("--set", "nonsense"), "policy_settings.0: 'nonsense' is not KEY=VALUE"),
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


def test_a_cluster_of_another_machine_in_a_shared_folder_is_left_to_it(cluster: Cluster) -> None:
    cluster.instance.create()
    with cluster.instance.hold_lock("keeper") as lock:
        os.pwrite(lock.fd, b"999999999\n", 0)  # a pid that is not here, as on a network file system
        for command in ("up", "down"):
            ran = cluster.run(command)
            assert ran.code == 2
            assert "runs on another machine (pid 999999999 is not here)" in ran.err


def test_status_without_an_instance(cluster: Cluster) -> None:
    ran = cluster.run("status")
    assert ran.code == 2
    assert "there is no instance in" in ran.err
    assert "thebes up" in ran.err
    assert cluster.run("down").code == 2


def test_what_becomes_of_jobs_when_the_cluster_goes_down(cluster: Cluster, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    cluster.up(*VIRTUAL, "--grace", 120)
    job = cluster.run_job(SAVES_AND_GOES, begun)
    waiting = cluster.client().submit(["true"], gpus=2, workdir="/").id

    # With keeper and controller dead jobs are reached through their supervisors.
    cluster.kill("keeper", "standby", "controller")
    ran = cluster.run("down")
    assert ran.code == 0, ran.err
    assert "the controller does not answer" in ran.err
    assert f"job {job}  saved its state; goes on at the next `thebes up`" in ran.out
    assert not list(cluster.instance.live_attempts())

    # The next `up` lets it go on; being stopped is no failure. Now the controller asks it to save.
    begun.unlink()
    cluster.up()
    until(begun.exists)
    until(lambda: cluster.client().job(job)["state"] == "running")  # its first line comes before the report of it
    info = cluster.client().job(job)
    assert (info["incarnation"], info["failures"]) == (2, 0)
    ran = cluster.run("down")
    assert ran.code == 0, ran.err
    assert f"job {job}  saved its state; goes on at the next `thebes up`" in ran.out

    # Left running, it is taken over by the next `up`, which cannot change its node meanwhile.
    begun.unlink()
    cluster.up()
    until(begun.exists)
    (attempt,) = cluster.instance.live_attempts()
    ran = cluster.run("down", "--keep-jobs")
    assert ran.code == 0, ran.err
    assert f"job {job}  runs on; the next `thebes up` takes it over" in ran.out
    assert attempt.lives
    refused = cluster.run("up", "--virtual-gpus", 4)
    assert refused.code == 2
    assert f"jobs still run on the nodes that would change: {job}" in refused.err
    cluster.up()
    until(lambda: cluster.status()["gpus"]["busy"] == 1)
    assert attempt.lives
    assert cluster.client().job(job)["incarnation"] == 3

    # At once, with no grace. Who waits, waits.
    began = time.monotonic()
    ran = cluster.run("down", "--now")
    assert ran.code == 0, ran.err
    assert time.monotonic() - began < 60.0
    assert f"job {job}  " in ran.out
    assert not list(cluster.instance.live_attempts())
    assert f"job {waiting}  " not in ran.out


def test_down_takes_one_wish_at_a_time(cluster: Cluster) -> None:
    ran = cluster.run("down", "--now", "--keep-jobs")
    assert ran.code == 2
    assert "contradict each other" in ran.err


def test_up_after_a_down_that_was_broken_off_makes_the_cluster_take_jobs_again(running: Cluster) -> None:
    answer = ask(running.instance, "POST", "/v1/shutdown", body={"mode": "checkpoint"}, with_token=True, timeout_s=30.0)
    assert answer is not None
    assert answer.status == 200
    with pytest.raises(UserError, match="going down"):
        running.client().submit(["true"], workdir="/")
    running.up()
    assert running.client().submit(["true"], workdir="/").wait(120)["state"] == "completed"


def in_the_foreground(cluster: Cluster) -> subprocess.Popen[str]:
    """`thebes up --foreground` that has said that it is up."""
    command = [sys.executable, "-c", "from thebes.cli import main; main()", "up", "--dir", str(cluster.instance.dir)]
    process = subprocess.Popen(
        [*command, "--virtual-gpus", "1", "--foreground"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "Thebes is up" in line:
            return process
    raise AssertionError(process.communicate()[1])


def test_in_the_foreground_it_stays_until_the_cluster_is_taken_down(cluster: Cluster) -> None:
    first = in_the_foreground(cluster)
    assert first.poll() is None
    cluster.kill("keeper")  # systemd would start us again now
    _, told = first.communicate(timeout=120)
    assert first.returncode == 2
    assert "the keeper has ended without having been told to" in told
    second = in_the_foreground(cluster)
    assert cluster.run("down").code == 0
    second.communicate(timeout=120)
    assert second.returncode == 0


def test_a_cluster_taken_down_before_anybody_waits_for_it_was_told_to_end(cluster: Cluster) -> None:
    brought = bring_up(cluster.instance, UpOptions(virtual_gpus=1, nodes=1), compile_ahead)
    assert cluster.run("down").code == 0
    assert wait_for_keeper(cluster.instance, brought.log)
