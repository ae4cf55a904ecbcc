"""What an agent does beside its jobs: it starts with GPUs missing, ends its MPS daemon, and clears away what is old."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_mps_daemon import CONTROL

from kit.node_cluster import agents, connected, kill_hard, make_folder, run, shell, start_agent
from kit.waiting import PATIENCE_S, until
from thebes.node import mps
from thebes.node.old_attempts import KEEP_ATTEMPTS_S, old_attempts, old_fences, remove_attempt
from thebes.protocol.attempt import AttemptDir, take_lock
from thebes.protocol.contract import Refused

NEVER_ENDS = "while true; do sleep 0.05; done"
NO_DRIVER = pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a driver")


def logged(folder: Path, event: str) -> list[dict]:
    *lines, _ = (folder / "log" / "agent-n0.jsonl").read_text().split("\n")  # the last one may be half written
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


def make_old(*paths: Path, by_s: float = KEEP_ATTEMPTS_S + 60) -> None:
    for path in paths:
        os.utime(path, (time.time() - by_s,) * 2)


@pytest.fixture
def gpu_folder() -> Iterator[Path]:
    """Of a node with two real GPUs, known from before; the path is short enough for the sockets of MPS."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({"version": 1, "nodes": [{"name": "n0", "gpus": 2}]}))
    (folder / "nodes" / "n0").mkdir(parents=True)
    known = [{"index": index, "uuid": f"GPU-{index}", "name": "H200"} for index in range(2)]
    (folder / "nodes" / "n0" / "gpus.json").write_text(json.dumps(known))
    yield folder
    shutil.rmtree(folder)


# GPUs


@NO_DRIVER
def test_an_agent_starts_when_gpus_are_missing_and_has_its_jobs_under_control(gpu_folder: Path) -> None:
    async def test() -> None:
        with agents(gpu_folder) as running:
            async with connected(gpu_folder) as cluster:
                [facts] = await cluster.engine.nodes()
                assert facts.alive
                assert [(gpu.index, gpu.uuid, gpu.healthy) for gpu in facts.gpus] == [
                    (0, "GPU-0", False),
                    (1, "GPU-1", False),
                ]
                await cluster.engine.launch(shell("1", f"echo $CUDA_VISIBLE_DEVICES; {NEVER_ENDS}", gpus=2))
                assert await cluster.printed("1", "\n") == "GPU-0,GPU-1\n"
                running["n0"].kill()
                running["n0"].wait()
                running["n0"] = start_agent(gpu_folder)
                await cluster.met(running["n0"].pid)
                await cluster.engine.kill("1", 1)
                assert (await cluster.ended("1")).cause == "killed"

    run(test())


@NO_DRIVER
def test_an_agent_that_never_saw_its_gpus_starts_and_refuses_jobs_on_them(gpu_folder: Path) -> None:
    async def test() -> None:
        (gpu_folder / "nodes" / "n0" / "gpus.json").write_text("spoilt")
        with agents(gpu_folder):
            async with connected(gpu_folder) as cluster:
                [facts] = await cluster.engine.nodes()
                assert [(gpu.index, gpu.uuid, gpu.healthy) for gpu in facts.gpus] == [(0, "", False), (1, "", False)]
                with pytest.raises(Refused, match="no GPU 0"):
                    await cluster.engine.launch(shell("1", NEVER_ENDS))

    run(test())


# MPS


def test_the_mps_daemon_goes_with_the_agent_unless_a_job_lives(gpu_folder: Path, tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / mps.PROGRAM
    program.write_text(CONTROL)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(mps, "ANSWER_S", PATIENCE_S)
    daemon = mps.Mps(gpu_folder / "run" / "mps-n0")

    async def test() -> None:
        with agents(gpu_folder) as running:
            async with connected(gpu_folder) as cluster:
                await cluster.engine.launch(shell("1", f"echo $CUDA_MPS_PIPE_DIRECTORY; {NEVER_ENDS}", packs=True))
                assert await cluster.printed("1", "\n") == f"{daemon.pipes}\n"
                running["n0"].terminate()
                assert running["n0"].wait(PATIENCE_S) == 0
                assert mps.healthy(daemon)
                running["n0"] = start_agent(gpu_folder)
                await cluster.met(running["n0"].pid)
                await cluster.engine.kill("1", 1)
                await cluster.ended("1")
                assert mps.healthy(daemon)
                running["n0"].terminate()
                assert running["n0"].wait(PATIENCE_S) == 0
                assert not mps.healthy(daemon)

    run(test())


# What is old


def test_old_forgotten_attempts_and_their_fences_go_and_nothing_else(tmp_path: Path) -> None:
    async def test() -> None:
        folder = make_folder(tmp_path / "cluster", {"n0": 8})
        fences, jobs = folder / "nodes" / "n0" / "fence", ("old", "young", "unforgotten")
        saved = folder / "jobs" / "old" / "checkpoint" / "model.pt"
        with agents(folder) as running:
            async with connected(folder) as cluster:
                for job in jobs:
                    checkpoints = str(folder / "jobs" / job / "checkpoint")
                    await cluster.engine.launch(shell(job, "echo said", checkpoint_dir=checkpoints))
                    await cluster.ended(job)
                saved.write_text("the user's")
                await cluster.engine.forget("old", 1)
                await cluster.engine.forget("young", 1)
                running["n0"].kill()
                running["n0"].wait()
                (fences / "gone").write_text("4\n")
                for job in ("old", "unforgotten"):
                    make_old(cluster.attempt(job) / "state.json", cluster.attempt(job))
                make_old(cluster.attempt("young"), saved, saved.parent, *fences.iterdir())
                running["n0"] = start_agent(folder)
                await cluster.met(running["n0"].pid)
                until(lambda: logged(folder, "removed what was old"))
                assert not cluster.attempt("old").exists()
                assert sorted(path.name for path in fences.iterdir()) == ["unforgotten", "young"]
                assert await cluster.log("young") == "said\n"
                assert await cluster.log("unforgotten") == "said\n"
                with pytest.raises(FileNotFoundError):
                    await cluster.log("old")
                assert saved.read_text() == "the user's"

    run(test())


def test_a_look_for_what_is_old_finds_so_much_at_most(tmp_path: Path) -> None:
    attempts, opened, fences = (tmp_path / name for name in ("attempts", "open", "fence"))
    for path in (opened, fences, *(attempts / f"{job}.1" for job in range(5))):
        path.mkdir(parents=True)
    for job in range(3, 9):
        (fences / str(job)).write_text("1\n")
    (opened / "0.1").touch()
    now = time.time() + 1
    found = old_attempts(attempts, opened, before_s=now, limit=10)
    assert sorted(one.name for one in found) == ["1.1", "2.1", "3.1", "4.1"]
    assert len(old_attempts(attempts, opened, before_s=now, limit=3)) == 3
    assert sorted(path.name for path in old_fences(fences, attempts, before_s=now, limit=10)) == ["5", "6", "7", "8"]
    assert len(old_fences(fences, attempts, before_s=now, limit=2)) == 2
    assert not old_attempts(attempts, opened, before_s=now - 60, limit=10)
    assert not old_fences(fences, attempts, before_s=now - 60, limit=10)
    assert not old_attempts(tmp_path / "nowhere", opened, before_s=now, limit=10)
    assert not old_fences(tmp_path / "nowhere", attempts, before_s=now, limit=10)


def test_an_attempt_is_removed_with_all_that_is_in_it_but_not_what_it_points_to(tmp_path: Path) -> None:
    folder = AttemptDir(tmp_path / "attempts", "1", 1)
    theirs = tmp_path / "theirs"
    for path in (theirs, folder.path / "made by the job"):
        path.mkdir(parents=True)
        (path / "file").touch()
    (folder.path / "link").symlink_to(theirs)
    (folder.path / "state.json").touch()
    os.mkfifo(folder.path / "ctl")
    fd = take_lock(folder.path)
    assert fd is not None
    os.write(fd, b"1\n")
    assert not remove_attempt(folder)  # somebody lives in it
    os.close(fd)
    assert remove_attempt(folder)
    assert not folder.path.exists()
    assert (theirs / "file").exists()


# What cannot be done at once


def test_attempts_that_cannot_be_settled_at_first_are_settled_later(own_folder: Path) -> None:
    async def test() -> None:
        with agents(own_folder) as running:
            async with connected(own_folder) as cluster:
                for job in ("1", "2"):
                    await cluster.engine.launch(shell(job, NEVER_ENDS))
                running["n0"].kill()
                running["n0"].wait()
                for job in ("1", "2"):
                    kill_hard(cluster.state(job)["supervisor"])
                lock = cluster.attempt("2") / "lock"
                lock.unlink()
                lock.mkdir()  # cannot be opened for writing
                running["n0"] = start_agent(own_folder)
                until(lambda: logged(own_folder, "cannot settle"))
                assert cluster.state("1")["state"] == "running"
                lock.rmdir()
                for job in ("1", "2"):
                    assert (await cluster.ended(job)).cause == "lost"

    run(test())


def test_a_job_that_is_just_ending_refuses_to_be_terminated(shared_agent: Path) -> None:
    async def test() -> None:
        async with connected(shared_agent) as cluster:
            await cluster.engine.launch(shell("upkeep", NEVER_ENDS))
            (cluster.attempt("upkeep") / "ctl").unlink()
            with pytest.raises(Refused, match="just ending"):
                await cluster.engine.terminate("upkeep", 1, 5.0)
            kill_hard(cluster.state("upkeep")["supervisor"])
            await cluster.ended("upkeep")

    run(test())
