"""A real but tiny training run that lasts as long as it is told; `thebes rehearse` runs it in place of users' jobs.

    python -m thebes.job.stand_in --steps 200 --step-time 0.05

It is least squares by momentum on batches that depend on the step alone, so that the final weights are the same however
often it was preempted: the line `weights DIGEST` at the end proves it. It is plain Python, so that a start costs
little.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from array import array

from thebes import job

WIDTH, BATCH = 16, 8


def train(steps: int, *, seed: int = 0, start: int = 0, state: bytes = b"", pace: object = None) -> tuple[int, bytes]:
    """Make the steps from `start` on; `pace(step)` may stop before any of them. Returns the steps made, and state."""
    truth = [math.sin(i + seed) for i in range(WIDTH)]
    loaded = array("d", state) if state else array("d", [0.0] * (2 * WIDTH))
    weights, momentum = loaded[:WIDTH], loaded[WIDTH:]
    for step in range(start, steps):
        if callable(pace) and pace(step):
            return step, (weights + momentum).tobytes()
        # A batch follows from the step and not from a random generator, so that a resumed run sees the same batches.
        batch = [[math.cos((row + BATCH * step) * (i + 1) * 0.7) for i in range(WIDTH)] for row in range(BATCH)]
        errors = [sum(x * (w - t) for x, w, t in zip(row, weights, truth, strict=True)) for row in batch]
        for i in range(WIDTH):
            gradient = sum(row[i] * error for row, error in zip(batch, errors, strict=True)) / BATCH
            momentum[i] = 0.9 * momentum[i] - 0.02 * gradient
            weights[i] += momentum[i]
    return steps, (weights + momentum).tobytes()


def digest(state: bytes) -> str:
    return hashlib.sha256(state).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description="A training run that lasts as long as it is told.")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-time", type=float, default=0.05, metavar="S")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, state = 0, b""
    resumed = job.resume_path()
    if resumed is not None:
        data = resumed.read_bytes()
        start, state = int.from_bytes(data[:8], "little"), data[8:]
        print(f"resumed at step {start}", flush=True)
    began = time.monotonic()

    def pace(step: int) -> bool:
        job.report(step)
        while True:  # a request to stop may come in the middle of a long step, which is not waited for
            left_s = began + (step - start + 1) * options.step_time - time.monotonic()
            if left_s <= 0:
                return job.should_stop()
            if job.should_stop():
                return True
            time.sleep(min(left_s, 0.05))

    done, state = train(options.steps, seed=options.seed, start=start, state=state, pace=pace)
    if done < options.steps:
        path = job.checkpoint_dir() / f"step-{done}"
        job.atomic_save(lambda file: file.write(done.to_bytes(8, "little") + state), path)
        job.checkpointed(done, path)
        print(f"preempted at step {done}", flush=True)
        job.exit_preempted()
    print(f"weights {digest(state)}", flush=True)


if __name__ == "__main__":
    main()
