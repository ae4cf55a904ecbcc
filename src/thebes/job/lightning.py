"""Lightning: a callback that saves and leaves on notice, reports steps and tells of checkpoints.

    from thebes import job
    from thebes.job.lightning import PreemptionCallback

    trainer = Trainer(callbacks=[PreemptionCallback()], ...)
    trainer.fit(model, data, ckpt_path=job.resume_path())

Works with the packages `lightning` and `pytorch_lightning`, whichever the program has imported.
"""

from __future__ import annotations

import sys
from typing import Any

from thebes import job

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class PreemptionCallback(Callback):
    """All ranks save together at the next batch after a notice, then the process ends with code 85."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # Here and not at the end of a batch: only now does Lightning count the last batch as done, so a checkpoint
        # written here does not repeat it.
        step = int(trainer.global_step)
        if not job.should_stop_all():
            return
        path = job.checkpoint_dir() / f"step-{step:08d}.ckpt"
        trainer.save_checkpoint(path)
        job.checkpointed(step, path)
        job.exit_preempted()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        job.report(int(trainer.global_step))
