"""A real GPU of a Slurm or Ray cluster, by the very engines that `thebes up --engine` uses.

    python examples/gpu/on_cluster.py slurm [--partition P] [--node N] [--json OUT]
    python examples/gpu/on_cluster.py ray --address HOST:PORT [--node N] [--json OUT]

On one GPU of one node, one after the other: a run without interruption; the same run asked to save after some steps and
started again; one that is killed; one that the driver suspends while another trains on the same GPU (refused on Slurm,
which would give the GPU back); and on Slurm, what happens when somebody else has the GPU. All that ran to its end must
have the very same weights. Needs PyTorch on the nodes, and to be run in a folder that they see, on the GPU's machine.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import runs

from thebes.engine.site import EngineSite
from thebes.protocol.contract import Engine, GpusTaken, Launch, NodeChange, NodeFacts, Part, Refused, Report

TRAIN = runs.HERE.parent / "train" / "torch_ddp.py"
SOURCE = runs.HERE.parent.parent / "src"
STEPS = 600
STEP_S = 0.02
PATIENCE_S = 180.0
CALM_MIB = 64  # the driver's own share comes and goes


def used_mib() -> int:
    """GPU memory in use on this machine."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(int(line) for line in subprocess.check_output(query, text=True).split())


class Told:
    """An open engine, and the last that it told of each incarnation."""

    def __init__(self, engine: Engine, node: str, folder: Path) -> None:
        self.engine, self.node, self.folder = engine, node, folder
        self.reports: dict[tuple[str, int], Report] = {}
        self.jobs = 0

    def listen(self, news: Report | NodeChange) -> None:
        if isinstance(news, Report):
            self.reports[news.job_id, news.incarnation] = news

    def training(self, steps: int = STEPS) -> Launch:
        """A job of one GPU. Without RANK it does without a process group: no NCCL, which the driver cannot suspend."""
        self.jobs += 1
        return Launch(
            job_id=str(self.jobs),
            incarnation=1,
            parts=(Part(self.node, (0,)),),
            command=("env", "-u", "RANK", sys.executable, str(TRAIN), f"--steps={steps}", f"--step-time={STEP_S}"),
            workdir=str(self.folder),
            env={"PYTHONPATH": str(SOURCE), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            checkpoint_dir=str(self.folder / "checkpoints" / str(self.jobs)),
        )

    async def until(self, true: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while not (found := true()):
            if time.monotonic() > deadline_s:
                raise SystemExit(
                    f"waited {timeout_s:g} s in vain for {what}; last told: {list(self.reports.values())[-2:]}"
                )
            await asyncio.sleep(0.01)
        return found

    async def steps(self, launch: Launch, steps: int = 1) -> Report:
        """Until so many are done. One that has ended without is an error."""

        def there() -> Report | None:
            found = self.reports.get((launch.job_id, launch.incarnation))
            if found is not None and found.state == "exited" and (found.step or 0) < steps:
                raise SystemExit(f"the job has ended: {found}")
            return found if found is not None and (found.step or 0) >= steps else None

        return await self.until(there, f"step {steps} of {launch.job_id}.{launch.incarnation}")

    async def ended(self, launch: Launch) -> Report:
        def there() -> Report | None:
            found = self.reports.get((launch.job_id, launch.incarnation))
            return found if found is not None and found.state == "exited" else None

        return await self.until(there, f"the end of {launch.job_id}.{launch.incarnation}")

    async def weights(self, launch: Launch) -> str:
        """Of a run that has come to its end."""
        report = await self.ended(launch)
        data, _ = await self.engine.read_log(launch.job_id, launch.incarnation, 0, 0, 1 << 20)
        found = re.search(rb"weights ([0-9a-f]{64})", data)
        if found is None:
            raise SystemExit(f"it has not come to its end: {report}\n{data[-2000:].decode(errors='replace')}")
        return found[1].decode()

    async def empty(self, idle_mib: int) -> None:
        await self.until(lambda: used_mib() <= idle_mib + CALM_MIB, "an empty GPU")


async def run_through(told: Told) -> dict[str, Any]:
    launch = told.training()
    ordered_s = time.monotonic()
    await told.engine.launch(launch)
    process_s = time.monotonic() - ordered_s
    await told.steps(launch)
    first_step_s = time.monotonic() - ordered_s
    held_mib = used_mib()
    return {
        "order_to_process_s": round(process_s, 3),
        "order_to_first_step_s": round(first_step_s, 1),
        "gpu_used_mib": held_mib,
        "weights": await told.weights(launch),
    }


async def preempted(told: Told, idle_mib: int) -> dict[str, Any]:
    launch = told.training()
    await told.engine.launch(launch)
    await told.steps(launch, STEPS // 4)
    noticed_s = time.monotonic()
    await told.engine.notice(launch.job_id, 1, 60.0)
    report = await told.ended(launch)
    left_s = time.monotonic() - noticed_s
    await told.empty(idle_mib)
    again = replace(launch, incarnation=2, resumes=True)
    await told.engine.launch(again)
    return {
        "notice_to_exit_s": round(left_s, 2),
        "exit_codes": list(report.codes.values()),
        "checkpoint_step": report.checkpoint_step,
        "weights": await told.weights(again),
    }


async def killed(told: Told, idle_mib: int) -> dict[str, Any]:
    launch = told.training(steps=10**6)
    await told.engine.launch(launch)
    await told.steps(launch, 10)
    asked_s = time.monotonic()
    await told.engine.kill(launch.job_id, 1)
    await told.empty(idle_mib)
    empty_s = time.monotonic() - asked_s
    report = await told.ended(launch)
    return {"kill_to_empty_gpu_s": round(empty_s, 2), "cause": report.cause}


async def suspended(told: Told, idle_mib: int) -> dict[str, Any]:
    launch = told.training()
    await told.engine.launch(launch)
    await told.steps(launch, STEPS // 4)
    held_mib = used_mib() - idle_mib
    began_s = time.monotonic()
    try:
        await told.engine.suspend(launch.job_id, 1, "cuda")
    except Refused as refused:
        return {"refused": str(refused), "weights": await told.weights(launch)}
    out_s = time.monotonic() - began_s
    await told.empty(idle_mib)
    meanwhile = told.training()
    await told.engine.launch(meanwhile)
    other = await told.weights(meanwhile)
    began_s = time.monotonic()
    await told.engine.resume(launch.job_id, 1, "cuda")
    back_s = time.monotonic() - began_s
    return {
        "suspended_mib": held_mib,
        "suspend_s": round(out_s, 2),
        "resume_s": round(back_s, 2),
        "weights_of_the_other": other,
        "weights": await told.weights(launch),
    }


async def shared_with_others(told: Told, partition: str) -> dict[str, Any]:
    """Somebody else's Slurm job takes the GPU first."""
    other = ["srun", f"--nodelist={told.node}", "--gres=gpu:1", *([f"--partition={partition}"] if partition else [])]
    process = subprocess.Popen([*other, "--job-name=others", "sleep", "600"])
    try:

        def mine() -> list[str]:
            return subprocess.check_output(["squeue", "-h", "-n", "others", "-t", "R", "-o", "%i"], text=True).split()

        await told.until(mine, "the other job to run", 30.0)
        try:
            await told.engine.launch(told.training(1))
        except GpusTaken as refused:
            said = str(refused)
        else:
            raise SystemExit("the GPU was given twice")
        subprocess.check_call(["scancel", *mine()])
    finally:
        process.terminate()
        process.wait()
    launch = told.training(1)
    began_s = time.monotonic()
    while True:  # as the controller would: it asks again when it hears that the GPU is free
        try:
            await told.engine.launch(launch)
            break
        except GpusTaken:
            await asyncio.sleep(0.5)
        if time.monotonic() > began_s + PATIENCE_S:
            raise SystemExit("the GPU was not given back")
    return {
        "refused": said,
        "free_again_after_s": round(time.monotonic() - began_s, 1),
        "weights": await told.weights(launch),
    }


def make_engine(kind: str, facts: NodeFacts, options: argparse.Namespace, folder: Path) -> Engine:
    site = EngineSite(
        instance_id=secrets.token_hex(4),
        key=secrets.token_bytes(32),
        epoch=1,
        gpus={facts.name: len(facts.gpus)},
        gpu_types={facts.name: facts.gpus[0].name},
        shared_dir=folder,
        lease_s=60.0,
        home_host=options.home,
        partition=options.partition,
        ray_address=options.address,
    )
    if kind == "slurm":
        from thebes.engine.slurm.engine import SlurmEngine

        return SlurmEngine(site)
    from thebes.engine.ray.engine import RayEngine

    return RayEngine(site)


def chosen_node(kind: str, options: argparse.Namespace) -> NodeFacts:
    if kind == "slurm":
        from thebes.engine.slurm.nodes import discover

        found = discover(options.partition, "")
    else:
        from thebes.engine.ray.nodes import discover as ask_ray

        found = ask_ray(options.address)
    return next((facts for facts in found if facts.name == options.node), found[0])


async def story(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    facts = await asyncio.to_thread(chosen_node, kind, options)
    engine = make_engine(kind, facts, options, folder)
    told = Told(engine, facts.name, folder)
    await engine.open(told.listen)
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(node.alive for node in await engine.nodes()):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"node {facts.name} is not up: {await engine.nodes()}")
            await asyncio.sleep(0.1)
        idle_mib = used_mib()
        figures: dict[str, Any] = {"engine": kind, "gpu_type": facts.gpus[0].name, "idle_mib": idle_mib}
        for name, act in (
            ("uninterrupted", run_through(told)),
            ("preempted", preempted(told, idle_mib)),
            ("killed", killed(told, idle_mib)),
            ("suspended", suspended(told, idle_mib)),
        ):
            figures[name] = await act
            print(f"{name}: {figures[name]}", flush=True)
            await told.empty(idle_mib)
        if kind == "slurm":
            figures["shared"] = await shared_with_others(told, options.partition)
            figures["shared"].pop("weights")  # one step only
            print(f"shared: {figures['shared']}", flush=True)
    finally:
        for report in list(told.reports.values()):
            if report.state != "exited":
                with suppress(Refused, OSError):
                    await engine.kill(report.job_id, report.incarnation)
        retire = getattr(engine, "retire", None)
        if retire is not None:  # what it keeps on the nodes between jobs
            await retire()
        await engine.close()
    seen = {part["weights"] for part in figures.values() if isinstance(part, dict) and "weights" in part}
    figures["same_weights"] = len(seen) == 1
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("slurm", "ray"))
    parser.add_argument("--partition", default="")
    parser.add_argument("--address", default="", help="of Ray's head")
    parser.add_argument("--node", default="", help="the machine that this runs on; default: the first")
    parser.add_argument("--home", default="", help="where the node reaches us; default: this machine's name")
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    runs.need_torch()
    folder = Path.cwd() / f"on-cluster-{secrets.token_hex(3)}"
    folder.mkdir(mode=0o700)
    try:
        figures = asyncio.run(story(options.engine, options, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    runs.write(options.json, {**runs.machine(), **figures})
    if not figures["same_weights"]:
        raise SystemExit("the weights differ")


if __name__ == "__main__":
    main()
