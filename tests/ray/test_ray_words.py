"""What people are told about Ray: what a cluster offers, what is wrong with one; and sweeps: `thebes compare --ray`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.components import require
from kit.waiting import until
from thebes.engine.ray import nodes as ray_nodes
from thebes.engine.ray.check import check
from thebes.engine.ray.session import explain, knock, where
from thebes.model.errors import UserError

pytestmark = pytest.mark.ray

THEBES = (sys.executable, "-c", "from thebes.cli import main; main()")
TEN = ("philly-sample", "--cluster", "8x8", "--limit", "60")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    require("ray")
    from kit.ray_cluster import RayCluster

    with RayCluster({"n2": "r0", "n10": "r1"}, cpus=2) as found:
        yield found


@pytest.fixture(scope="module")
def bare_cluster() -> Iterator[Any]:
    """Its state in memory, no GPUs, no racks."""
    require("ray")
    from kit.ray_cluster import RayCluster

    with RayCluster({"a": ""}, storage="memory", gpus=0) as found:
        yield found


def thebes(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [*THEBES, *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)


def entry(**more: Any) -> dict[str, Any]:
    found = {"id": "1", "address": "10.0.0.7", "gpus": 8, "gpu_type": "", "labels": {}, "alive": True, "head": False}
    return {**found, **more}


def test_names_and_racks_come_from_labels() -> None:
    labels = {"host": "gpu07", "name": "other", "rack": "r2", "ray.io/availability-zone": "z1"}
    assert ray_nodes.name_of(entry(labels=labels)) == "gpu07"
    assert ray_nodes.name_of(entry(labels={"name": "other"})) == "other"
    assert ray_nodes.name_of(entry(labels={"host": "not a name"})) == "ip-10-0-0-7"
    assert ray_nodes.name_of(entry(address="fd00::7")) == "ip-fd00-7"
    assert ray_nodes.rack_of(entry(labels=labels)) == "r2"
    assert ray_nodes.rack_of(entry(labels={"ray.io/availability-zone": "z1"})) == "z1"
    assert ray_nodes.rack_of(entry(labels=labels), "name") == "other"
    assert ray_nodes.rack_of(entry()) == ""


def test_two_nodes_of_one_name_are_told() -> None:
    twins = [entry(labels={"host": "n1"}), entry(labels={"host": "n1"}, address="10.0.0.8")]
    with pytest.raises(UserError, match=r"two nodes of the Ray cluster are called 'n1': 10.0.0.7 and 10.0.0.8"):
        ray_nodes.living(twins)
    assert list(ray_nodes.living([twins[0], {**twins[1], "alive": False}])) == ["n1"]


def test_the_nodes_of_a_cluster(cluster: Any) -> None:
    found = ray_nodes.discover(cluster.address)
    assert [(one.name, one.rack, len(one.gpus), one.address) for one in found] == [
        ("n2", "r0", 8, "127.0.0.11"),
        ("n10", "r1", 8, "127.0.0.12"),
    ]
    assert all(gpu.virtual for one in found for gpu in one.gpus)


def test_a_cluster_without_gpus_is_told(bare_cluster: Any) -> None:
    with pytest.raises(UserError, match="none of the 2 nodes of the Ray cluster has a GPU"):
        ray_nodes.discover(bare_cluster.address)
    problems = {one.what: one.detail for one in check(bare_cluster.address) if one.level == "problem"}
    assert problems == {"GPUs": "none of the 2 nodes has a GPU"}


def test_what_a_check_finds(cluster: Any, bare_cluster: Any) -> None:
    found = {one.what: one for one in check(cluster.address)}
    assert {what: one.level for what, one in found.items()} == {
        "versions": "ok",
        "nodes": "ok",
        "GPUs": "warning",
        "reserving": "ok",
        "head": "ok",
        "racks": "ok",
        "calling home": "ok",
        "survival": "ok",
    }
    assert found["GPUs"].detail.startswith("16 GPUs exist only as numbers")
    assert found["head"].detail == "keeps its state in rocksdb: a restart of the head disturbs nobody"
    assert found["racks"].detail == "2: r0, r1"
    held = cluster.hold_gpus("n10", 3)
    assert held == [0, 1, 2]
    found = {one.what: one for one in check(cluster.address, "192.0.2.200")}
    cluster.let_go()
    assert "hold GPUs: 3 on n10" in found["reserving"].detail
    assert found["calling home"].level == "problem"
    assert "cannot reach this machine at 192.0.2.200:" in found["calling home"].detail
    head = next(one for one in check(bare_cluster.address) if one.what == "head")
    assert head.level == "warning"
    assert "keeps its state in memory" in head.detail
    assert "RAY_gcs_storage=rocksdb" in head.hint
    assert "RAY_REDIS_ADDRESS" in head.hint


def test_ray_that_is_not_installed_is_told(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n")
    without = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    ran = thebes("compare", *TEN, "--policies", "fifo", "--ray", "auto", env=without)
    assert ran.returncode == 2
    assert "--ray needs Ray, which is not installed." in ran.stderr
    assert "pip install 'thebes[ray]'" in ran.stderr
    code = "from thebes.engine.ray.nodes import discover; discover('auto')"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **without}, check=False
    )
    assert "the Ray engine needs Ray, which is not installed." in ran.stderr


def test_a_cluster_that_does_not_answer_is_told() -> None:
    with pytest.raises(UserError, match=r"no Ray cluster answers at 127.0.0.1:1: .*refused"):
        ray_nodes.discover("127.0.0.1:1")
    [only] = check("127.0.0.1:1")
    assert (only.level, only.what) == ("problem", "Ray cluster")
    with pytest.raises(UserError, match="'nonsense' is not the address of a Ray cluster"):
        where("nonsense")


def test_what_is_not_ray_is_told_at_once() -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        began = time.monotonic()
        with pytest.raises(UserError, match=rf"what answers at {address} is not the head of a Ray cluster"):
            ray_nodes.discover(address)
        server.shutdown()
    assert time.monotonic() - began < 45  # Ray itself tries for a minute


def test_up_again_while_ray_is_away_warns_and_comes_up(tmp_path: Path) -> None:
    """As after an outage: jobs may run there, and it will be back."""
    from thebes.live.config import Config, NodeConfig, save

    folder = tmp_path / "instance"
    folder.mkdir(mode=0o700)
    nodes = [NodeConfig(name="n1", gpus=2, virtual=True), NodeConfig(name="n2", gpus=2, virtual=True)]
    save(folder / "config.json", Config(nodes=nodes, engine="ray", ray_address="127.0.0.1:1", home_host="127.0.0.1"))
    other = thebes("up", "--dir", str(folder), "--address", "127.0.0.1:2")
    assert (other.returncode, "no Ray cluster answers at 127.0.0.1:2" in other.stderr) == (2, True)
    try:
        up = thebes("up", "--dir", str(folder))
        assert up.returncode == 0, up.stderr
        assert "warning: none of the 2 nodes of Ray can be used (no Ray cluster answers at 127.0.0.1:1" in up.stderr
        told = thebes("nodes", "--dir", str(folder)).stdout
        assert told.count("down") == 2
        assert "no Ray cluster answers" in told
    finally:
        assert thebes("down", "--now", "--dir", str(folder)).returncode == 0


def test_down_that_keeps_jobs_names_those_on_other_machines(cluster: Any, tmp_path: Path) -> None:
    env = {"THEBES_DIR": str(tmp_path / "instance")}
    try:
        up = thebes("up", "--engine", "ray", "--address", cluster.address, "--home", "127.0.0.1", env=env)
        assert up.returncode == 0, up.stderr
        assert thebes("submit", "--gpus", "1", "--", "sleep", "300", env=env).stdout == "1\n"
        deadline = time.monotonic() + 120
        while "running" not in thebes("ps", env=env).stdout:
            assert time.monotonic() < deadline
        down = thebes("down", "--keep-jobs", env=env)
        assert "job 1  runs on; the next `thebes up` takes it over" in down.stdout
        assert thebes("up", env=env).returncode == 0
        assert "running" in thebes("ps", env=env).stdout
        assert thebes("cancel", "1", env=env).returncode == 0
    finally:
        assert thebes("down", "--now", env=env).returncode == 0


def test_somebody_who_lets_us_in_and_says_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def never(*_: Any, **__: Any) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", never)
    with pytest.raises(UserError, match=r"no Ray cluster answers at h:1: no answer within 3 s"):
        knock("h:1", 3)


def test_other_versions_are_told(bare_cluster: Any) -> None:
    bare_cluster.pretend_version("1.2.3", "3.9.1")
    with pytest.raises(UserError, match=r"runs Ray 1.2.3 on Python 3.9.1, here are Ray 2\.\d+\.\d+ and Python 3\.\d+"):
        ray_nodes.discover(bare_cluster.address)


def test_a_machine_outside_the_cluster_is_told() -> None:
    error = explain("h:1", RuntimeError("Can't find a `node_ip_address.json` file from /tmp/ray/session"))
    assert error.message == "this machine is not a node of the Ray cluster at h:1"
    assert "ray start --address" in error.hint


# Sweeps --------------------------------------------------------------------------------------------------------------


def figures(path: Path) -> list[dict[str, Any]]:
    results = json.loads(path.read_text())["results"]
    return [{key: value for key, value in one.items() if key != "wall_seconds"} for one in results]


@pytest.fixture(scope="module")
def own_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "import thebes\n"
        "class Slow(thebes.Policy):\n"
        '    """Submission order, slowly at first."""\n'
        "    def decide(self, view):\n"
        "        mark = os.environ.get('SWEEP_MARK')\n"
        "        if mark and not Path(mark).exists():\n"
        "            Path(mark).write_text(str(os.getpid()))\n"
        "            time.sleep(60)\n"
        "        return thebes.fill(view, np.arange(len(view.jobs)))\n"
        "class Broken(Slow):\n"
        '    """Fails."""\n'
        "    def decide(self, view):\n"
        "        raise ValueError('this policy is broken')\n"
    )
    return str(path)


def test_runs_on_ray_give_the_same_results(cluster: Any, own_policy: str, tmp_path: Path) -> None:
    policies = ("--policies", f"fifo,srtf,{own_policy}:Slow")
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    assert thebes("compare", *TEN, *policies, "--json", str(here)).returncode == 0
    ran = thebes("compare", *TEN, *policies, "--json", str(there), "--ray", cluster.address)
    assert ran.returncode == 0, ran.stderr
    assert figures(there) == figures(here)
    assert "srtf" in ran.stdout
    auto = {"RAY_TMPDIR": str(cluster.folder)}  # where `auto` looks
    ran = thebes("compare", *TEN, "--policies", "fifo", "--json", str(there), "--ray", "auto", env=auto)
    assert ran.returncode == 0, ran.stderr
    assert figures(there) == figures(here)[:1]


def test_a_run_whose_worker_died_is_done_again(own_policy: str, tmp_path: Path) -> None:
    from kit.ray_cluster import RayCluster

    mark = tmp_path / "mark"
    os.environ["SWEEP_MARK"] = str(mark)
    try:
        with RayCluster({"n1": ""}, cpus=2) as cluster:
            command = [*THEBES, "compare", *TEN, "--policies", f"fifo,{own_policy}:Slow"]
            sweep = subprocess.Popen([*command, "--ray", cluster.address], stdout=subprocess.PIPE, text=True)
            until(lambda: (mark.exists() and mark.read_text()) or sweep.poll() is not None, "the slow policy is asked")
            assert sweep.poll() is None
            os.kill(int(mark.read_text()), signal.SIGKILL)
            out, _ = sweep.communicate(timeout=120)
            assert sweep.returncode == 0
            assert "Slow" in out or "mine" in out
    finally:
        del os.environ["SWEEP_MARK"]


def test_an_error_of_a_run_is_told_as_at_home(cluster: Any, own_policy: str) -> None:
    words = ("compare", *TEN, "--policies", f"fifo,{own_policy}:Broken")
    here, there = thebes(*words), thebes(*words, "--ray", cluster.address)
    assert there.returncode == here.returncode != 0
    assert "this policy is broken" in here.stderr
    assert "this policy is broken" in there.stderr
