"""Plain PyTorch loops: a range of steps that saves, resumes and stops on notice, on one rank or many.

    loop = Loop(steps=10_000, model=model, optimizer=optimizer, every=500)
    for step in loop:
        ...one training step...

A checkpoint holds the state of everything passed by name (anything with state_dict and load_state_dict), the step, and
every rank's random number generators. The model is expected whole on each rank (one process, or DDP). For sharded
models use torch.distributed.checkpoint with the functions of `thebes.job`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

from thebes import job
from thebes.job.handshake import torch_distributed


class Stateful(Protocol):
    """A model, an optimiser, a scheduler, a scaler, or a data loader that remembers its place."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Loop:
    """An iterator over the steps still to do. Make it when the process group is up and the models are in place."""

    def __init__(
        self, steps: int, *, every: int | None = None, keep: int = 2, folder: Path | None = None, **parts: Stateful
    ) -> None:
        """Checkpoint after `every` so many steps (None: only on notice and at the end) and keep the last `keep`."""
        if every is not None and every < 1:
            raise ValueError("every: at least one step between checkpoints")
        self.steps = steps
        self.every = every
        self.keep = keep
        self.folder = folder if folder is not None else job.checkpoint_dir()
        self.parts = {name: _unwrapped(part) for name, part in parts.items()}
        self.step = 0  # steps done so far
        self._restore()

    def __iter__(self) -> Iterator[int]:
        saved = self.step
        while self.step < self.steps:
            if job.should_stop_all():
                self.save()
                job.exit_preempted()
            yield self.step
            self.step += 1
            job.report(self.step)
            if self.every is not None and self.step % self.every == 0:
                self.save()
                saved = self.step
        if self.step != saved:
            self.save()

    def save(self) -> Path:
        """Write a checkpoint now. All ranks call it; rank 0 writes, and the others wait until it is safe."""
        import torch  # pyright: ignore[reportMissingImports]

        path = self.folder / f"step-{self.step:08d}.pt"
        generators = _gathered(_generators())
        if job.rank() == 0:
            state = {
                "step": self.step,
                "generators": generators,
                "parts": {name: part.state_dict() for name, part in self.parts.items()},
            }
            save = cast("Callable[..., None]", torch.save)
            job.atomic_save(lambda file: save(state, file), path)
            job.checkpointed(self.step, path)
            job.prune(self.folder, keep=self.keep)
        distributed = torch_distributed()
        if distributed:
            distributed.barrier()
        return path

    def _restore(self) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        path = _of_rank_0(job.resume_path())
        if path is None:
            return
        # This is our own file and may hold any kind of state, so it is not limited to tensors.
        state = torch.load(path, map_location="cpu", weights_only=False)
        missing = self.parts.keys() ^ state["parts"].keys()
        if missing:
            raise ValueError(f"{path} was saved with other parts than this loop has: {', '.join(sorted(missing))}")
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        self.step = int(state["step"])
        if len(state["generators"]) == job.world_size():  # with other ranks, there are none to go on with
            _set_generators(state["generators"][job.rank()])


def _unwrapped(part: Any) -> Any:
    """The model inside DistributedDataParallel, so that the checkpoint fits one rank as well as many."""
    parallel = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
    return part.module if parallel is not None and isinstance(part, parallel) else part


def _generators() -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]

    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()  # of this rank's device
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def _set_generators(states: dict[str, Any]) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


def _gathered(value: Any) -> list[Any]:
    """The value of every rank, in rank order."""
    distributed = torch_distributed()
    if not distributed:
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def _of_rank_0(value: Any) -> Any:
    """The value of rank 0, because ranks that choose a file by themselves may choose differently."""
    distributed = torch_distributed()
    if not distributed:
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]
