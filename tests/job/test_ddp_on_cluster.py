"""Training under the real agent, supervisor and engine: preempted and resumed, the weights are the very same.

No controller: the test plays its part, and takes from the reports what the controller would (where to resume from).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from attempts import EXAMPLES, ROOT, environment

from kit.waiting import IMPORT_PATIENCE_S, until_async
from thebes.engine.local import LocalEngine
from thebes.protocol.contract import Launch, NodeChange, Part, Report

NODES = ("n0", "n1")
WEIGHTS = re.compile(r"weights ([0-9a-f]{16,64})")


@dataclass
class Cluster:
    """Two nodes with a virtual GPU each, and what they have told."""

    folder: Path
    engine: LocalEngine
    reports: dict[tuple[str, int, str], Report] = field(default_factory=dict)

    def hear(self, news: Report | NodeChange) -> None:
        if isinstance(news, Report):
            self.reports[news.job_id, news.incarnation, news.node] = news

    async def launch(
        self, job_id: str, incarnation: int, nodes: tuple[str, ...], command: list[str], resume_from: str = ""
    ) -> None:  # fmt: skip
        checkpoints = self.folder / "jobs" / job_id / "checkpoint"
        checkpoints.mkdir(parents=True, exist_ok=True)
        await self.engine.launch(
            Launch(
                job_id=job_id, incarnation=incarnation, parts=tuple(Part(node, (0,)) for node in nodes),
                command=tuple(command), workdir=str(self.folder),
                env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}, checkpoint_dir=str(checkpoints),
                resumes=incarnation > 1, resume_from=resume_from, grace_s=60.0,
            )
        )  # fmt: skip

    async def until(self, job_id: str, incarnation: int, node: str, true: Callable[[Report], object]) -> Report:

        async def there() -> Report | None:
            found = self.reports.get((job_id, incarnation, node))
            if found is None or true(found):
                return found
            assert found.state != "exited", f"{found}: {await self.log(job_id, incarnation, 0)}"
            return None

        return await until_async(there, "the report", IMPORT_PATIENCE_S, told=lambda: self.reports)  # type: ignore[return-value]

    async def ended(self, job_id: str, incarnation: int, nodes: tuple[str, ...], code: int) -> Report:
        """Every rank ends with this code; the report of the first node."""
        found = [await self.until(job_id, incarnation, node, lambda report: report.state == "exited") for node in nodes]
        codes = {rank: one for report in found for rank, one in report.codes.items()}
        assert codes == dict.fromkeys(range(len(nodes)), code), await self.log(job_id, incarnation, 0)
        assert {report.cause for report in found} == {"exit"}
        return found[0]

    async def log(self, job_id: str, incarnation: int, rank: int) -> str:
        text, _ = await self.engine.read_log(job_id, incarnation, rank, 0, 1 << 20)
        return text.decode()


@asynccontextmanager
async def cluster_in(folder: Path) -> AsyncIterator[Cluster]:
    folder.mkdir(mode=0o700)
    config = {"version": 1, "nodes": [{"name": name, "gpus": 1, "virtual": True} for name in NODES]}
    (folder / "config.json").write_text(json.dumps(config))
    agents = [
        subprocess.Popen([sys.executable, "-m", "thebes.node.agent", str(folder), node], env=environment())
        for node in NODES
    ]
    cluster = Cluster(folder, LocalEngine(folder, NODES))
    try:
        await cluster.engine.open(cluster.hear)

        async def all_alive() -> bool:
            return all(facts.alive for facts in await cluster.engine.nodes())

        await until_async(all_alive, "the agents answer")
        yield cluster
    finally:
        for job_id, incarnation, node in list(cluster.reports):
            if cluster.reports[job_id, incarnation, node].state != "exited":
                await cluster.engine.kill(job_id, incarnation)
                await cluster.until(job_id, incarnation, node, lambda report: report.state == "exited")
        await cluster.engine.close()
        for agent in agents:
            agent.terminate()
            agent.wait(timeout=IMPORT_PATIENCE_S)


def on_a_cluster(test: Callable[[Cluster], Coroutine[Any, Any, None]], tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster_in(tmp_path / "cluster") as cluster:
            await test(cluster)

    asyncio.run(run())


async def preempted_and_whole(cluster: Cluster, nodes: tuple[str, ...], command: list[str], slowly: list[str]) -> None:
    """Job 1 is never interrupted; job 2 is preempted twice. Both end with the same weights."""
    await cluster.launch("1", 1, nodes, command)
    await cluster.ended("1", 1, nodes, 0)

    told, steps = "", [0]
    for incarnation in (1, 2):
        await cluster.launch("2", incarnation, nodes, command + slowly, told)
        await cluster.until("2", incarnation, nodes[0], lambda report: (report.step or 0) > steps[-1])
        await cluster.engine.notice("2", incarnation, 60.0)
        report = await cluster.ended("2", incarnation, nodes, 85)
        assert report.acknowledged
        assert report.checkpoint_path is not None
        assert report.checkpoint_step is not None
        assert report.step == report.checkpoint_step  # nothing was done that is not saved
        told = report.checkpoint_path
        steps.append(report.checkpoint_step)
    assert steps == sorted(set(steps))
    await cluster.launch("2", 3, nodes, command, told)
    await cluster.ended("2", 3, nodes, 0)

    whole = WEIGHTS.findall(await cluster.log("1", 1, 0))
    assert len(whole) == 1
    assert WEIGHTS.findall(await cluster.log("2", 3, 0)) == whole


def test_numpy_on_one_node(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "numpy_train.py"), "--steps", "400"]
    on_a_cluster(lambda cluster: preempted_and_whole(cluster, ("n0",), command, ["--step-time", "0.05"]), tmp_path)


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: `make test-torch`")
def test_two_ranks_of_pytorch_on_two_nodes(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "torch_ddp.py"), "--steps", "300"]
    on_a_cluster(lambda cluster: preempted_and_whole(cluster, NODES, command, ["--step-time", "0.05"]), tmp_path)
