"""Hugging Face Trainer: a callback that saves and leaves on notice, reports steps and tells of every checkpoint.

from thebes import job
from thebes.job.transformers import PreemptionCallback, resume_from_checkpoint

arguments = TrainingArguments(output_dir=str(job.checkpoint_dir()), ...)
trainer = Trainer(args=arguments, callbacks=[PreemptionCallback()], ...)
trainer.train(resume_from_checkpoint=resume_from_checkpoint())
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]

from thebes import job


class PreemptionCallback(TrainerCallback):  # pyright: ignore[reportUntypedBaseClass]
    """On notice the Trainer saves after the current step and stops; then the process ends with code 85."""

    def __init__(self) -> None:
        self._preempted = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        job.report(int(state.global_step))
        if job.should_stop_all():
            self._preempted = state.global_step < state.max_steps  # after the last step the job is done
            control.should_save = True
            control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if path.is_dir():  # only on the process that writes
            job.checkpointed(int(state.global_step), path)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._preempted:
            job.exit_preempted()


def resume_from_checkpoint() -> str | None:
    """The checkpoint to go on from, for Trainer.train(); None for a run that starts afresh."""
    path = job.resume_path()
    if path is not None and (path / "trainer_state.json").is_file():
        return str(path)
    if not job.resuming():
        return None
    # The last checkpoint told is gone. The Trainer writes its state last, so a folder that has it is whole.
    states = sorted(job.checkpoint_dir().glob("checkpoint-*/trainer_state.json"), key=_step_of)
    return str(states[-1].parent) if states else None


def _step_of(state_file: Path) -> int:
    number = state_file.parent.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1
