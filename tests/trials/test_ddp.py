"""PyTorch's DDP over two nodes, here, on Slurm and on Ray: preempted, moved and resumed, with the same weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from trial import Trial

from kit.components import require
from kit.waiting import IMPORT_PATIENCE_S, until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train" / "torch_ddp.py"
STEPS = 200


@contextmanager
def on_slurm(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    require("slurm")
    from kit.slurm_cluster import slurm_cluster

    with slurm_cluster(nodes=4, gpus=8) as slurm:
        for name, value in slurm.env.items():
            monkeypatch.setenv(name, value)
        trial.up(engine="slurm", partition="main", home=slurm.address, grace_s=60.0)
        try:
            yield
        finally:
            trial.down()


@contextmanager
def on_ray(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    require("ray")
    from kit.ray_cluster import RayCluster

    with RayCluster() as ray:
        trial.up(engine="ray", address=ray.address, home="127.0.0.1", grace_s=60.0)
        try:
            yield
        finally:
            trial.down()


@contextmanager
def here(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    trial.up(virtual_gpus=2, nodes=4, grace_s=60.0)
    try:
        yield
    finally:
        trial.down()


WHERE = {"torch": here, "slurm": on_slurm, "ray": on_ray}  # by the suite that runs it


def submit(trial: Trial, launcher: str, step_s: float) -> str:
    command = [sys.executable, str(SCRIPT), "--steps", str(STEPS), "--step-time", str(step_s)]
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    job = trial.client.submit(command, gpus=2, nodes=2, launcher=launcher, env=env, workdir=str(ROOT))
    return str(job.id)


def when(trial: Trial, job_id: str, true: Any, what: str) -> dict[str, Any]:
    """What is told of a job when this is true of it."""

    def look() -> dict[str, Any] | None:
        info = trial.client.job(job_id)
        if true(info):
            return info
        assert info["state"] not in ("failed", "cancelled", "timeout"), f"{info}\n{log(trial, job_id)}"
        return None

    found = until(look, what, IMPORT_PATIENCE_S, every_s=0.1, told=lambda: log(trial, job_id))
    assert found is not None
    return found


def log(trial: Trial, job_id: str) -> str:
    return b"".join(trial.client.logs(job_id)).decode(errors="replace")


def weights(trial: Trial, job_id: str) -> str:
    [found] = re.findall(r"weights ([0-9a-f]{16,64})", log(trial, job_id))
    return found


@pytest.mark.parametrize("launcher", ["plain", "torchrun"])
@pytest.mark.parametrize("where", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in WHERE])
def test_two_nodes_of_pytorch(where: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch")
    trial = Trial(tmp_path)
    with WHERE[where](trial, monkeypatch):
        try:
            whole = submit(trial, launcher, 0.0)
            when(trial, whole, lambda info: info["state"] == "completed", "the uninterrupted run")
            moved = submit(trial, launcher, 0.05)
            info = when(trial, moved, lambda info: (info["step"] or 0) > 10, "its first steps")
            first = {node for node, _ in info["attempts"][-1]["parts"]}
            assert len(first) == 2
            for node in first:
                trial.client.drain(node, reason="moves", preempt=True)
            info = when(trial, moved, lambda info: info["state"] == "completed", "its end on other nodes")
            then = {node for node, _ in info["attempts"][-1]["parts"]}
            assert not first & then
            assert len(then) == 2
            assert info["lost_gpu_s"] == 0.0
            assert len(info["attempts"]) >= 2
            assert weights(trial, moved) == weights(trial, whole)
        except BaseException:
            print(trial.told())
            raise
