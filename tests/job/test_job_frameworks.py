"""The callbacks for Lightning and the Hugging Face Trainer, against the real packages where they are installed.

Importing these takes long, so one process imports them and forks a child per incarnation of the job. The training step
itself makes the notice, at a step given: the places that matter are hit exactly.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from attempts import environment

from kit.waiting import IMPORT_PATIENCE_S

pytestmark = pytest.mark.torch


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


INCARNATIONS = '''
import importlib, json, os, pathlib, sys, time
import torch
import torch._dynamo   # the first optimiser would load it, in every child anew
torch.set_num_threads(1)
ROOT = pathlib.Path(sys.argv[1])

def digest(model):
    import hashlib
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.state_dict().values())).hexdigest()

def notice_at(step, stop):
    """Within the training step number `step`."""
    if step == stop:
        pathlib.Path(os.environ["THEBES_ATTEMPT_DIR"], "notice").touch()
        time.sleep(0.06)   # should_stop() looks at the file at most every 0.05 s

def incarnations(train, name, stops):
    """Run `train(stop)` in a process each; returns the steps told and the digest of the last one."""
    home, told, steps = ROOT / name, "", []
    for number, stop in enumerate([*stops, -1]):
        attempt = home / f"attempt.{number}"
        attempt.mkdir(parents=True)
        os.environ.update(THEBES_ATTEMPT_DIR=str(attempt), THEBES_CHECKPOINT_DIR=str(home / "checkpoint"),
                          THEBES_RESUME=str(int(number > 0)), THEBES_RESUME_FROM=told)
        child = os.fork()
        if child == 0:
            try:
                import thebes.job
                importlib.reload(thebes.job)   # this incarnation's environment
                (attempt / "digest").write_text(train(stop))
                os._exit(0)
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(end.code)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(99)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (0 if stop < 0 else 85), (name, number, stop, code)
        if (attempt / "checkpoint.json").exists():
            checkpoint = json.loads((attempt / "checkpoint.json").read_text())
            told = checkpoint["path"]
            steps.append(checkpoint["step"])
        assert json.loads((attempt / "progress").read_text())["step"] > 0
    return steps, (attempt / "digest").read_text()
'''

LIGHTNING = """
import importlib
package = sys.argv[2]
L = importlib.import_module(package)

class Loader:
    "Eight batches in order; remembers its place."
    def __init__(self):
        self.at = 0
        self.data = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return 8
    def __iter__(self):
        self.at %= 8
        while self.at < 8:
            self.at += 1
            yield self.data[self.at - 1]
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

class Model(L.LightningModule):
    def __init__(self, stop):
        super().__init__()
        torch.manual_seed(0)
        self.stop, self.net, self.batches = stop, torch.nn.Linear(3, 1), 0
    def training_step(self, batch, batch_idx):
        self.batches += 1
        notice_at(self.trainer.global_step + 1, self.stop)
        return self.net(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

def trains(accumulate):
    def train(stop):
        from thebes import job
        from thebes.job.lightning import PreemptionCallback
        model = Model(stop)
        trainer = L.Trainer(max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
                            enable_model_summary=False, enable_checkpointing=False,
                            accumulate_grad_batches=accumulate, callbacks=[PreemptionCallback()])
        trainer.fit(model, Loader(), ckpt_path=job.resume_path(), weights_only=False)
        assert trainer.global_step == 24 // accumulate, trainer.global_step
        return digest(model)
    return train

_, whole = incarnations(trains(1), "whole", [])
steps, resumed = incarnations(trains(1), "resumed", [3, 8, 11, 16, 23])   # 8 and 16: the last batch of an epoch
assert steps == [3, 8, 11, 16, 23], steps
assert resumed == whole
_, whole = incarnations(trains(2), "whole-2", [])
steps, resumed = incarnations(trains(2), "resumed-2", [1, 3, 6])   # the notice comes between two batches of one step
assert steps == [1, 3, 6], steps
assert resumed == whole
print("as one", steps)
"""

TRANSFORMERS = """
import transformers

class Model(torch.nn.Module):
    def __init__(self, stop):
        super().__init__()
        torch.manual_seed(0)
        self.stop, self.net, self.drop, self.trainer = stop, torch.nn.Linear(3, 1), torch.nn.Dropout(0.3), None
    def forward(self, x, labels=None):
        notice_at(self.trainer.state.global_step + 1, self.stop)
        return {"loss": (self.net(self.drop(x)) - labels).pow(2).mean()}

def train(stop):
    from thebes import job
    from thebes.job.transformers import PreemptionCallback, resume_from_checkpoint
    numbers = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(3, generator=numbers), "labels": torch.randn(1, generator=numbers)} for _ in range(32)]
    model = Model(stop)
    arguments = transformers.TrainingArguments(
        output_dir=str(job.checkpoint_dir()), num_train_epochs=3, per_device_train_batch_size=4, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no", learning_rate=0.05)
    model.trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data,
                                         callbacks=[PreemptionCallback()])
    model.trainer.train(resume_from_checkpoint=resume_from_checkpoint())
    assert model.trainer.state.global_step == 24
    return digest(model)

_, whole = incarnations(train, "whole", [])
steps, resumed = incarnations(train, "resumed", [3, 8, 11, 23])
assert steps == [3, 8, 11, 23], steps
assert resumed == whole
print("as one", steps)
"""


def run(tmp_path: Path, script: str, *arguments: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INCARNATIONS + script, str(tmp_path), *arguments],
        env=environment(CUDA_VISIBLE_DEVICES=""), cwd=tmp_path, text=True, capture_output=True,
        timeout=IMPORT_PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "as one" in ended.stdout


@needs("torch", "lightning")
def test_lightning(tmp_path: Path) -> None:
    run(tmp_path, LIGHTNING, "lightning")


@needs("torch", "pytorch_lightning")
def test_pytorch_lightning(tmp_path: Path) -> None:
    run(tmp_path, LIGHTNING, "pytorch_lightning")


@needs("torch", "transformers", "accelerate")
def test_transformers(tmp_path: Path) -> None:
    run(tmp_path, TRANSFORMERS)
