"""Lightning: a callback that saves and leaves on notice, reports steps and tells of the checkpoint.

    from thebes import job
    from thebes.job.lightning import PreemptionCallback

    trainer = Trainer(callbacks=[PreemptionCallback()], ...)
    trainer.fit(model, data, ckpt_path=job.resume_path())

It works with the packages `lightning` and `pytorch_lightning`, whichever the program has imported. In the middle of an
epoch Lightning goes on with the right data only if the data loader has state_dict and load_state_dict.
"""

from __future__ import annotations

import sys
from typing import Any

from thebes import job

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]
else:
    try:
        from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]
    except ImportError:
        from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]


class PreemptionCallback(Callback):  # pyright: ignore[reportUntypedBaseClass]
    """After a notice all ranks save together at the end of a step, and the process ends with code 85."""

    def __init__(self) -> None:
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = int(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = int(trainer.global_step)
        if step == self._step:  # gradients are still being accumulated, and a checkpoint would lose them
            return
        self._step = step
        job.report(step)
        # After the last batch of an epoch, Lightning's counters are right only when the epoch has ended.
        if not trainer.is_last_batch:
            self._stop_if_asked(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: Any) -> None:
        if job.should_stop_all():
            step = int(trainer.global_step)
            path = job.checkpoint_dir() / f"step-{step:08d}.ckpt"
            trainer.save_checkpoint(path)
            job.checkpointed(step, path)
            job.exit_preempted()
