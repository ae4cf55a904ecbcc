"""PyTorch: the loop of `thebes.job.torch`, and examples/train/torch_ddp.py with two real ranks (gloo, CPU).

`make test-torch` installs PyTorch and runs these.
"""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import time
from pathlib import Path

import pytest
from attempts import EXAMPLES, ROOT, Job

from kit.waiting import IMPORT_PATIENCE_S, until
from thebes.engine.door import free_port

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: `make test-torch` installs it"
    ),
]

SCRIPT = EXAMPLES / "torch_ddp.py"
TORCHRUN = ROOT / "src" / "thebes" / "node" / "torchrun.py"
STEPS = 200
GOES_ON = re.compile(r"2 ranks on cpu, from step (\d+)")
WEIGHTS = re.compile(r"weights ([0-9a-f]{64})")


def finished(ranks: list[subprocess.Popen[str]], code: int) -> str:
    """All ranks end with this code; what rank 0 printed."""
    outputs = [process.communicate(timeout=IMPORT_PATIENCE_S)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [code] * len(ranks), "\n".join(outputs)
    return outputs[0]


def weights_in(output: str) -> str:
    found = WEIGHTS.search(output)
    assert found, output
    return found[1]


def command(job: Job, *more: str) -> list[str | Path]:
    job.next_attempt()
    return [SCRIPT, "--steps", str(STEPS), *more]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    job = Job(tmp_path_factory.mktemp("whole"))
    return weights_in(finished(job.start_ranks(2, *command(job)), 0))


def test_two_ranks_preempted_at_random_steps_end_with_the_same_weights(tmp_path: Path, uninterrupted: str) -> None:
    chance, job = random.Random(1), Job(tmp_path)
    for _ in range(2):
        ranks = job.start_ranks(2, *command(job, "--step-time", "0.05"))
        until(lambda: job.has("progress"), "the first step", IMPORT_PATIENCE_S)
        time.sleep(chance.uniform(0.0, 0.5))
        job.notice()
        finished(ranks, 85)
        job.remember()
    assert 0 < job.steps_told[0] < job.steps_told[1] < STEPS
    output = finished(job.start_ranks(2, *command(job)), 0)
    assert GOES_ON.findall(output) == [str(job.steps_told[-1])]
    assert weights_in(output) == uninterrupted


def test_killed_then_asked_on_one_node_only(tmp_path: Path, uninterrupted: str) -> None:
    """Killed without a word, the gang goes on from its last checkpoint. Then it is as on two nodes, where each has an
    attempt folder of its own: a notice that one rank hears of stops all of them at the same step."""
    job = Job(tmp_path)
    ranks = job.start_ranks(2, *command(job, "--step-time", "0.05", "--checkpoint-every", "4"))
    until(lambda: job.has("checkpoint.json"), "the first checkpoint", IMPORT_PATIENCE_S)
    time.sleep(0.1)
    for process in ranks:
        process.kill()
    for process in ranks:
        process.communicate(timeout=IMPORT_PATIENCE_S)
    assert job.remember() % 4 == 0

    script = command(job, "--step-time", "0.05")
    elsewhere = Job(tmp_path, incarnation=100, told=job.told)
    elsewhere.next_attempt()
    gang = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [job.start(*script, RANK="0", **gang), elsewhere.start(*script, RANK="1", **gang)]
    until(lambda: job.has("progress"), "the first step", IMPORT_PATIENCE_S)
    elsewhere.notice()
    finished(ranks, 85)
    assert job.has("ack")
    assert not job.has("notice")
    assert not elsewhere.has("checkpoint.json")
    job.remember()
    assert weights_in(finished(job.start_ranks(2, *command(job)), 0)) == uninterrupted


def test_under_torchrun(tmp_path: Path, uninterrupted: str) -> None:
    """As Thebes starts it (`launcher: torchrun`): the ranks' 85 is torchrun's own exit code."""
    job = Job(tmp_path)
    torchrun = [TORCHRUN, "--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    script = command(job, "--step-time", "0.05")
    process = job.start(*torchrun, "--master-port", str(free_port()), *script)
    until(lambda: job.has("progress"), "the first step", IMPORT_PATIENCE_S)
    job.notice()
    output, _ = process.communicate(timeout=IMPORT_PATIENCE_S)
    assert process.returncode == 85, output
    job.remember()
    script = command(job)
    output = job.run(*torchrun, "--master-port", str(free_port()), *script)
    assert weights_in(output) == uninterrupted


SINGLE = """
import random, sys
import numpy, torch
from thebes import job
from thebes.job.torch import Loop
random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
parts = {name: torch.nn.Linear(2, 1) for name in sys.argv[2:]}
drawn = []
for step in Loop(10, every=4, keep=1, **parts):
    drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    if str(step) == sys.argv[1]:
        job._this.agreed_to_stop()
print(drawn[-3:])
"""


def test_every_generator_goes_on_and_other_parts_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole, job = Job(tmp_path / "whole"), Job(tmp_path)
    whole.next_attempt()
    expected = whole.run("-c", SINGLE, "never", "model")
    assert [path.name for path in (whole.folder / "checkpoint").iterdir()] == ["step-00000010.pt"]  # keep=1

    job.next_attempt()
    process = job.start("-c", SINGLE, "5", "model")
    output, _ = process.communicate(timeout=IMPORT_PATIENCE_S)
    assert process.returncode == 85, output
    assert job.remember() == 6
    job.next_attempt()
    assert job.run("-c", SINGLE, "never", "model") == expected

    job.next_attempt()
    process = job.start("-c", SINGLE, "never", "model", "more")
    output, _ = process.communicate(timeout=IMPORT_PATIENCE_S)
    assert process.returncode == 1
    assert "was saved with other parts than this loop has: more" in output
