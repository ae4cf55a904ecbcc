"""A real agent on a real GPU: an unmodified PyTorch job is suspended by the driver and resumed, also by another agent.

Runs where there is an NVIDIA driver and PyTorch; as a script too, where there is no pytest:

    PYTHONPATH=src:tests python tests/node/test_node_real_gpu.py
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

from kit.node_cluster import Cluster, agents, connected, kill_hard, launch, start_agent
from kit.waiting import until_async
from thebes.node import mps, processes
from thebes.protocol.contract import Refused

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_GPU = Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists()

TRAIN = """
import torch
torch.manual_seed(1)
model = torch.nn.Linear(4096, 4096, device="cuda")
held = torch.zeros(1 << 30, device="cuda")
optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(512, 4096, device="cuda")
for step in range(10**9):
    loss = (model(x) - x).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.9f}", flush=True)
"""

TORCHRUN = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
notice = os.environ["THEBES_ATTEMPT_DIR"] + "/notice"
while not os.path.exists(notice):
    time.sleep(0.05)
dist.barrier()
sys.exit(85)
"""


def make_gpu_folder(folder: Path) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"version": 1, "nodes": [{"name": "n0", "gpus": 1}]}))
    return folder


async def steps(cluster: Cluster, above: int) -> int:
    """Wait until the job has got this far."""
    deadline = time.monotonic() + 120
    while True:
        lines = [line.split() for line in (await cluster.log("1")).splitlines() if line.startswith("step")]
        if lines and int(lines[-1][1]) > above:
            return int(lines[-1][1])
        assert time.monotonic() < deadline, await cluster.log("1")
        await asyncio.sleep(0.05)


async def suspend_and_resume(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(TRAIN)
    with agents(folder) as running:
        async with connected(folder) as cluster:
            facts = (await cluster.engine.nodes())[0]
            print(facts, flush=True)
            assert facts.mechanisms == ("checkpoint", "cuda")
            assert facts.gpus[0].uuid.startswith("GPU-")
            await cluster.engine.launch(launch("1", sys.executable, str(script), progress_pattern=r"step (\d+)"))
            await steps(cluster, 100)
            for agent_dies in (False, True):
                before = await suspended(cluster)
                if agent_dies:
                    running["n0"].kill()
                    running["n0"].wait()
                    cluster.heard.clear()
                    running["n0"] = start_agent(folder)
                    await cluster.report("1", "suspended")
                await cluster.engine.resume("1", 1, "cuda")
                found = await cluster.report("1", "running")
                print(f"suspend {found.suspend_took_s} s, resume {found.resume_took_s:.2f} s", flush=True)
                await steps(cluster, before + 100)
            losses = [float(line.split()[3]) for line in (await cluster.log("1")).splitlines() if "loss" in line]
            assert losses == sorted(losses, reverse=True)
            try:
                await cluster.engine.suspend("1", 1, "freeze")
            except Refused as error:
                print("refused:", error, flush=True)
            await cluster.engine.kill("1", 1)
            assert (await cluster.ended("1")).cause == "killed"
            print(await cluster.engine.reports(), flush=True)


async def suspended(cluster: Cluster) -> int:
    """Suspend the job and see that it stands; its last step."""
    await cluster.engine.suspend("1", 1, "cuda")
    found = await cluster.report("1", "suspended")
    assert found.suspend_took_s is not None
    before = await steps(cluster, 0)
    await asyncio.sleep(1.0)
    assert await steps(cluster, 0) == before
    return before


async def torchrun_ends_with_85(folder: Path) -> None:
    script = folder / "gang.py"
    script.write_text(TORCHRUN)
    with agents(folder):
        async with connected(folder) as cluster:
            await cluster.engine.launch(launch("2", sys.executable, str(script), launcher="torchrun", ranks_per_node=2))

            async def both_told() -> bool:
                return (await cluster.log("2")).count("of 2") >= 2

            await until_async(both_told, "both ranks have told")
            await cluster.engine.notice("2", 1, 60.0)
            found = await cluster.ended("2")
            print(found, flush=True)
            assert found.codes == {0: 85}, await cluster.log("2")


async def packed_jobs_run_under_mps(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(TRAIN)
    with agents(folder):
        async with connected(folder) as cluster:
            try:
                for job in ("1", "3"):
                    await cluster.engine.launch(launch(job, sys.executable, str(script), packs=True))
                for job in ("1", "3"):
                    await cluster.printed(job, "step 100 ")
                pids = [cluster.state(job)["pids"]["0"] for job in ("1", "3")]
                assert all(b"CUDA_MPS_PIPE_DIRECTORY=" in processes.environment(pid) for pid in pids)
                try:
                    await cluster.engine.suspend("1", 1, "cuda")
                except Refused as error:
                    print("refused:", error, flush=True)
                else:
                    raise AssertionError("suspended under MPS")
                steps_now = await steps(cluster, 0)
                await steps(cluster, steps_now + 50)  # a refusal changes nothing
                # The daemon is the agent's child when its supervisor's leftovers are looked for: it must not be hit.
                kill_hard(cluster.state("3")["supervisor"])
                assert (await cluster.ended("3")).cause == "lost"
                await steps(cluster, steps_now + 100)
                await cluster.engine.kill("1", 1)
                await cluster.ended("1")
            finally:
                mps.stop(mps.Mps(folder / "run" / "mps-n0"))


if __name__ == "__main__":
    for check in (packed_jobs_run_under_mps, torchrun_ends_with_85, suspend_and_resume):
        asyncio.run(check(make_gpu_folder(Path(tempfile.mkdtemp()))))
        print(check.__name__, "ok", flush=True)
else:
    import pytest

    @pytest.mark.skipif(not (HAS_TORCH and HAS_GPU), reason="needs an NVIDIA GPU and PyTorch")
    def test_a_job_is_suspended_by_the_driver_and_resumed(tmp_path: Path) -> None:
        asyncio.run(suspend_and_resume(make_gpu_folder(tmp_path / "c")))

    @pytest.mark.skipif(not (HAS_TORCH and HAS_GPU), reason="needs an NVIDIA GPU and PyTorch")
    def test_a_gang_under_torchrun_that_is_preempted_ends_with_85(tmp_path: Path) -> None:
        asyncio.run(torchrun_ends_with_85(make_gpu_folder(tmp_path / "c")))

    @pytest.mark.skipif(not (HAS_TORCH and HAS_GPU), reason="needs an NVIDIA GPU and PyTorch")
    def test_packed_jobs_run_under_mps(tmp_path: Path) -> None:
        asyncio.run(packed_jobs_run_under_mps(make_gpu_folder(tmp_path / "c")))
