"""A small network trained with NumPy: may be preempted after any step and ends with the very same weights.

    thebes submit --gpus 1 -- python examples/train/numpy_train.py --steps 600 --step-time 0.1
    python examples/train/numpy_train.py            # by hand, without a cluster: the same run, never interrupted

What it shows: ask should_stop() at each step, save everything that the next step depends on (weights, momentum, the
random generator, the step), say checkpointed(), leave with exit code 85, and go on from resume_path().
`--step-time` stretches each step, to stand for a larger model. With several ranks each one trains the same network and
rank 0 saves; for ranks that really work together see torch_ddp.py.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one core per rank, and sums in one order

import argparse
import hashlib
import itertools
import json
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np

from thebes import job

SIZES = (8, 64, 64, 1)
ROWS, BATCH = 4096, 128
LEARNING_RATE, MOMENTUM, DROPOUT = 0.05, 0.9, 0.1


class Network:
    """A multi-layer perceptron, its momentum, and the generator that chooses batches and dropped units."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.weights: list[np.ndarray] = []
        for inputs, outputs in itertools.pairwise(SIZES):
            self.weights.append(self.rng.normal(0.0, np.sqrt(2.0 / inputs), (inputs, outputs)))
            self.weights.append(np.zeros(outputs))
        self.momentum = [np.zeros_like(weight) for weight in self.weights]

    def save(self, file: BinaryIO, step: int) -> None:
        arrays = {f"weight{i}": value for i, value in enumerate(self.weights)}
        arrays |= {f"momentum{i}": value for i, value in enumerate(self.momentum)}
        np.savez(file, step=np.array(step), rng=np.array(json.dumps(self.rng.bit_generator.state)), **arrays)

    def load(self, path: Path) -> int:
        with np.load(path) as saved:
            self.weights = [saved[f"weight{i}"] for i in range(len(self.weights))]
            self.momentum = [saved[f"momentum{i}"] for i in range(len(self.momentum))]
            self.rng.bit_generator.state = json.loads(str(saved["rng"]))
            return int(saved["step"])

    def train(self, features: np.ndarray, targets: np.ndarray) -> float:
        """One step of gradient descent on a random batch. Returns its loss."""
        rows = self.rng.integers(0, len(features), BATCH)
        outputs, masks = [features[rows]], []
        for layer in range(0, len(self.weights), 2):
            value = outputs[-1] @ self.weights[layer] + self.weights[layer + 1]
            if layer < len(self.weights) - 2:
                mask = (value > 0) * (self.rng.random(value.shape) >= DROPOUT) / (1.0 - DROPOUT)
                masks.append(mask)
                value = value * mask
            outputs.append(value)
        error = outputs[-1] - targets[rows]
        back = 2.0 * error / BATCH
        gradients: list[np.ndarray] = []
        for layer in reversed(range(0, len(self.weights), 2)):
            gradients[:0] = [outputs[layer // 2].T @ back, back.sum(axis=0)]
            if layer:
                back = (back @ self.weights[layer].T) * masks[layer // 2 - 1]
        for weight, momentum, gradient in zip(self.weights, self.momentum, gradients, strict=True):
            momentum *= MOMENTUM
            momentum -= LEARNING_RATE * gradient
            weight += momentum
        return float(np.mean(error**2))

    def digest(self) -> str:
        return hashlib.sha256(b"".join(weight.tobytes() for weight in self.weights)).hexdigest()


def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of a smooth function with noise."""
    rng = np.random.default_rng(seed + 1)
    features = rng.uniform(-1.0, 1.0, (ROWS, SIZES[0]))
    targets = np.sin(3.0 * features[:, :1]) * features[:, 1:2] + 0.05 * rng.normal(size=(ROWS, 1))
    return features, targets


def checkpoint(network: Network, step: int) -> None:
    if job.rank() == 0:
        path = job.checkpoint_dir() / f"step-{step:08d}.npz"
        job.atomic_save(lambda file: network.save(file, step), path)
        job.checkpointed(step, path)
        job.prune(job.checkpoint_dir(), keep=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network with NumPy.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-time", type=float, default=0.0, metavar="S", help="stretch each step to S seconds")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="N", help="besides on notice; 0: never")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the final weights here")
    options = parser.parse_args()

    network, start = Network(options.seed), 0
    features, targets = data(options.seed)
    resumed = job.resume_path()
    if resumed is not None:
        start = network.load(resumed)
        print(f"resumed at step {start} from {resumed.name}", flush=True)

    loss, due = 0.0, time.monotonic()
    for step in range(start, options.steps):
        if job.should_stop():
            checkpoint(network, step)
            print(f"preempted at step {step}, saved, {job.seconds_left():.1f} s left", flush=True)
            job.exit_preempted()
        loss = network.train(features, targets)
        # From start to start: a run takes steps x step time. Time in which it was frozen is not made up for.
        due = max(due, time.monotonic() - options.step_time) + options.step_time
        time.sleep(max(0.0, due - time.monotonic()))
        job.report(step + 1, samples=(step + 1) * BATCH)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} loss {loss:.4f}", flush=True)
        if options.checkpoint_every and (step + 1) % options.checkpoint_every == 0:
            checkpoint(network, step + 1)
    checkpoint(network, options.steps)
    if options.out and job.rank() == 0:
        job.atomic_save(lambda file: np.savez(file, *network.weights), options.out)
    print(f"done: {options.steps} steps, loss {loss:.4f}, weights {network.digest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
