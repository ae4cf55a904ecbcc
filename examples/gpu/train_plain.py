"""A plain PyTorch training script: it knows nothing of Thebes. Prints `step N loss X` and runs until it is ended.

Parameters, gradients and Adam's two moments fill the GPU memory asked for, so all of it is live training state: a byte
that came back wrong would show in the loss. With the same seed the losses are the same, run for run.
"""

import argparse
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with a fixed workspace

import torch
from torch import nn

BYTES_PER_PARAMETER = 16  # float32: the parameter, its gradient, two moments


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(torch.relu(self.norm(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gib", type=float, default=1.0, help="training state on the GPU")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--steps", type=int, default=10**9)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    blocks = max(1, int(args.gib * (1 << 30) / BYTES_PER_PARAMETER / (args.width * (args.width + 3))))
    model = nn.Sequential(*(Block(args.width) for _ in range(blocks)), nn.Linear(args.width, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    teacher = torch.randn(args.width, 10, device="cuda")

    for step in range(1, args.steps + 1):
        x = torch.randn(args.batch, args.width, device="cuda")
        loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(dim=1))
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        if step % args.every == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main()
