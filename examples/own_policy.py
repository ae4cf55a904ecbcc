"""A complete policy of one's own: short jobs get a head start, then whoever has waited longest goes first.

    thebes simulate philly-sample --cluster 8x8 --policy examples/own_policy.py:HeadStart --set head_start_s=1800

A job that has run for less than `head_start_s` goes before all that have run longer. Among equals the job that has
waited longest goes first, with one correction: a running job counts as having waited `patience_s` longer than it did,
so that two jobs do not take turns all the time. Nothing is known in advance: neither run times nor their distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import thebes


@dataclass(frozen=True)
class HeadStart(thebes.Policy):
    """Jobs that have run little go first; after that, the longest wait."""

    # The name in tables and reports. The class docstring is what `thebes policies show` prints.
    name: ClassVar[str] = "head-start"

    # What `--set` can change: a default, a sentence, bounds.
    head_start_s: float = thebes.parameter(3600.0, "running time that goes before all others, in seconds", low=0)
    patience_s: float = thebes.parameter(1800.0, "how much longer another must have waited, in seconds", low=0)
    look_every_s: float = thebes.parameter(600.0, "time between two looks at the queue, in seconds", low=1)

    def decide(self, view: thebes.View) -> thebes.Decision:
        jobs = view.jobs  # NumPy columns over the jobs that are alive, in order of submission
        newcomer = jobs.attained_s < self.head_start_s
        waited_s = jobs.waited_s + np.where(jobs.running, self.patience_s, 0.0)

        # `lexsort` sorts by its last key first. It is stable: equal jobs stay in order of submission.
        order = np.lexsort((-waited_s, ~newcomer))

        # Submissions and finishes wake the policy anyway. Here the order also changes by itself as time passes,
        # so it asks to be woken. Only if somebody waits: otherwise there is nothing to decide.
        somebody_waits = not jobs.running.all()
        wake_s = view.now_s + self.look_every_s if somebody_waits else np.inf
        return thebes.fill(view, order, wake_s=wake_s)
