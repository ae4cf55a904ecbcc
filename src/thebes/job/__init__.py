"""How a training script takes part in preemption. Standard library only; without a cluster it does nothing.

    from thebes import job

    state, start = load(job.resume_path()) if job.resume_path() else fresh()
    for step in range(start, steps):
        if job.should_stop():
            path = job.checkpoint_dir() / f"step-{step}.bin"
            job.atomic_save(lambda file: save(state, file), path)
            job.checkpointed(step, path)
            job.exit_preempted()
        train(state)
        job.report(step + 1)

There are ready-made parts: `thebes.job.torch` for plain PyTorch loops, `thebes.job.lightning`,
`thebes.job.transformers`.
See docs/preemption.md.
"""

from __future__ import annotations

import os

from thebes.job import gang
from thebes.job.files import atomic_save, latest, prune
from thebes.job.handshake import EXIT_PREEMPTED, Handshake

__all__ = [
    "EXIT_PREEMPTED",
    "atomic_save",
    "checkpoint_dir",
    "checkpointed",
    "deadline_s",
    "exit_preempted",
    "install_signals",
    "latest",
    "prune",
    "rank",
    "report",
    "resume_path",
    "resuming",
    "seconds_left",
    "should_stop",
    "should_stop_all",
    "world_size",
]

_this = Handshake(os.environ)

should_stop = _this.should_stop
deadline_s = _this.deadline_s
seconds_left = _this.seconds_left
install_signals = _this.install_signals
checkpointed = _this.checkpointed
report = _this.report
exit_preempted = _this.exit_preempted
resuming = _this.resuming
resume_path = _this.resume_path
checkpoint_dir = _this.checkpoint_dir
rank = _this.rank
world_size = _this.world_size


def should_stop_all() -> bool:
    """should_stop() for loops with torch.distributed: every rank calls it once per step, and all get the same answer.

    So all ranks stop at the same step. Without a process group it is should_stop().
    """
    return gang.should_stop_all(_this)
