"""Real data-parallel training with PyTorch (DDP): preempted at any step, it ends with the very same weights.

    thebes submit --gpus 2 -- python examples/train/torch_ddp.py --steps 300              # Thebes starts the ranks
    thebes submit --gpus 2 --launcher torchrun -- python examples/train/torch_ddp.py      # torchrun starts them
    torchrun --standalone --nproc-per-node 2 examples/train/torch_ddp.py                  # by hand, no cluster

The only lines that have to do with preemption are those of `Loop`: it resumes, agrees with the other ranks when to
stop (all at the same step), saves model, optimiser and every rank's random generators, and leaves with exit code 85.
What remains to the script is an order of data that depends on the step alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thebes import job
from thebes.job.torch import Loop

ROWS, FEATURES, BATCH = 2048, 16, 32


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.rand(ROWS, FEATURES, generator=generator) * 2 - 1
    return features, torch.sin(3 * features[:, :1]) * features[:, 1:2]


def rows_of(step: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's share of a step's batch: epochs are shuffled by their number, steps walk through them."""
    steps_per_epoch = ROWS // (BATCH * ranks)
    epoch, place = divmod(step, steps_per_epoch)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
    return order[place * BATCH * ranks :][rank * BATCH : (rank + 1) * BATCH]


def digest(model: nn.Module) -> str:
    state = hashlib.sha256()
    for value in model.state_dict().values():
        state.update(value.cpu().contiguous().numpy().tobytes())
    return state.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on several ranks with PyTorch DDP.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-time", type=float, default=0.0, metavar="S", help="stretch each step to S seconds")
    parser.add_argument("--checkpoint-every", type=int, default=None, metavar="N", help="besides on notice")
    parser.add_argument("--out", type=Path, help="write the final weights here")
    options = parser.parse_args()

    torch.set_num_threads(1)  # sums in one order, and one core per rank
    cuda = torch.cuda.is_available() and os.environ.get("THEBES_VIRTUAL_GPUS") != "1"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = job.rank(), job.world_size()

    torch.manual_seed(100 + rank)  # dropout differs between ranks; DDP gives all of them rank 0's first weights
    plain = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(plain) if dist.is_initialized() else plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    features, targets = (part.to(device) for part in data())

    loop = Loop(options.steps, every=options.checkpoint_every, model=model, optimizer=optimizer, schedule=schedule)
    if rank == 0:
        print(f"{ranks} ranks on {device.type}, from step {loop.step}", flush=True)
    due = time.monotonic()
    for step in loop:
        rows = rows_of(step, rank, ranks).to(device)
        loss = nn.functional.mse_loss(model(features[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        due = max(due, time.monotonic() - options.step_time) + options.step_time  # frozen time is not made up for
        time.sleep(max(0.0, due - time.monotonic()))
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)

    if rank == 0:
        if options.out:
            job.atomic_save(lambda file: torch.save(plain.state_dict(), file), options.out)
        print(f"done: {options.steps} steps, weights {digest(plain)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
