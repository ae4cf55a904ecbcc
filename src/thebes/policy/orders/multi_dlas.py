"""One small Tiresias per job size: the cluster is split between sizes by demand, each part runs its own two queues.

It follows `multi-dlas-gpu` of the released Tiresias simulator, which splits every 600 s and leaves idle what a part
cannot use (some sizes are never served). Here the others get what is left over, so that the policy is work conserving.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.decision import Decision
from thebes.model.parameters import parameter
from thebes.model.view import View
from thebes.policy.base import Policy
from thebes.policy.fill import fill


@dataclass(frozen=True)
class _Split:
    """GPUs of each job size until the next split."""

    until_s: float
    gpus_of_size: dict[int, float]


@dataclass(frozen=True)
class MultiDlas(Policy):
    """One two-queue Tiresias-L per GPU count; GPUs are split between the counts by their demand."""

    name: ClassVar[str] = "multi-dlas"
    paper: ClassVar[str] = "`multi-dlas-gpu` of the Tiresias simulator, made work conserving"

    queue_limit: float = parameter(3250.0, "limit of the first queue, in GPU-seconds", low=1e-3)
    split_every_s: float = parameter(600.0, "how often the split between sizes is made anew, in seconds", low=1.0)

    def decide(self, view: View) -> Decision:
        jobs = view.jobs
        split = (
            view.memory if isinstance(view.memory, _Split) and view.now_s < view.memory.until_s else self._split(view)
        )
        queue = (jobs.attained_gpu_s >= self.queue_limit * (1 - 1e-6)).astype(np.int64)
        started = np.minimum(jobs.first_start_s, np.finfo(np.float64).max)
        in_turn = np.lexsort((jobs.submit_s, started, queue))
        inside = self._inside_share(jobs.gpus[in_turn], split)
        order = np.concatenate((in_turn[inside], in_turn[~inside]))
        climbing = jobs.running & (queue == 0)
        left_s = (self.queue_limit - jobs.attained_gpu_s[climbing]) / jobs.gpus[climbing]
        # A job that is still being restored gains no service, so looking again a second later is soon enough.
        demotion_s = view.now_s + max(1.0, float(left_s.min())) if len(left_s) else np.inf
        return fill(view, order, wake_s=min(demotion_s, split.until_s), queues=queue, memory=split)

    def _split(self, view: View) -> _Split:
        sizes, demand = np.unique(view.jobs.gpus, return_inverse=True)
        wanted = np.bincount(demand, weights=view.jobs.gpus)
        share = wanted * min(1.0, view.total_gpus / wanted.sum())
        return _Split(view.now_s + self.split_every_s, dict(zip(sizes.tolist(), share.tolist(), strict=True)))

    @staticmethod
    def _inside_share(gpus: NDArray[np.int64], split: _Split) -> NDArray[np.bool_]:
        """Which jobs, in turn, the share of their size pays for (a share pays for at least one job)."""
        inside = np.zeros(len(gpus), dtype=np.bool_)
        for size in np.unique(gpus):
            turn = np.flatnonzero(gpus == size)
            inside[turn[: max(1, int(split.gpus_of_size.get(int(size), 0) // size))]] = True
        return inside
