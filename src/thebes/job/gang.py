"""All ranks of a PyTorch job stop at the same step: a rank that was asked to stop tells the others by an all-reduce.

One rank hears of a notice a moment before another. If it stopped alone, the others would wait for it in their next
collective until the deadline. PyTorch is used only where the program has imported it already.
"""

from __future__ import annotations

import sys
from typing import Any

from thebes.job.handshake import Handshake, torch_distributed

_flag_group: tuple[Any, Any, str] | None = None  # (its process group, our own group or None, device)


def should_stop_all(handshake: Handshake) -> bool:
    """The same as should_stop(), with one answer for all ranks. It is a collective: all ranks call it equally often."""
    distributed = torch_distributed()
    if distributed is None or distributed.get_world_size() == 1:
        return handshake.should_stop()
    torch: Any = sys.modules["torch"]
    group, device = _where(torch, distributed)
    flag = torch.tensor([int(handshake.should_stop())], dtype=torch.int32, device=device)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=group)
    if not int(flag.item()):
        return False
    handshake.agreed_to_stop()
    return True


def _where(torch: Any, distributed: Any) -> tuple[Any, str]:
    """A group that agrees on the CPU, so that asking does not wait for the GPU's queue of work."""
    global _flag_group
    world = distributed.group.WORLD
    if _flag_group is None or _flag_group[0] is not world:  # after a rendezvous there is a new process group
        group, device = None, "cpu"
        if "gloo" not in distributed.get_backend():
            if distributed.is_gloo_available():
                group = distributed.new_group(backend="gloo")  # this is a collective too, and all ranks are here
            else:
                device = f"cuda:{torch.cuda.current_device()}"
        _flag_group = (world, group, device)
    return _flag_group[1], _flag_group[2]
