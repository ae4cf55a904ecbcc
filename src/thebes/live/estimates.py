"""When waiting jobs will start: estimated when they begin to wait, and again after something has changed.

A look ahead takes up to 20 ms of processor time (`forecast`), so only one is made after a decision and one more every
half second while estimates are older than the last change: four per cent of the time at most, however long the queue.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from thebes.live.forecast import expected_start_s
from thebes.live.ledger import UNTOLD
from thebes.model.decision import HOLDS

if TYPE_CHECKING:
    from thebes.live.core import Core
    from thebes.live.job import LiveJob

logger = logging.getLogger("thebes.controller")

MAX_ESTIMATED = 500  # living jobs; with more, no start is estimated
PAUSE_S = 0.5  # pause between two revisions that no decision asks for


class Estimates:
    """Which estimates are older than the last change, and when the next one may be revised."""

    def __init__(self) -> None:
        self._round = 0  # counts changes
        self._stale = False
        self._shown = False  # whether a job may have an estimate
        self._allowed_at = 0.0

    def changed(self) -> None:
        """Note that something has happened that may bring a start forward or put it off."""
        self._round += 1
        self._stale = True

    def pause_s(self) -> float | None:
        """Seconds until the next one may be revised; None if all are as new as the last change."""
        return max(0.0, self._allowed_at - time.monotonic()) if self._stale else None

    def revise(self, core: Core, now_s: float, *, decided: bool) -> None:
        """Estimate one job: after a decision one that has no estimate yet, or else the one whose estimate is oldest."""
        if len(core.jobs) > MAX_ESTIMATED:
            if self._shown:  # an estimate that nobody revises is worse than none
                for job in core.jobs.values():
                    job.expected_start_s = None
            self._shown = self._stale = False
        if not self._stale:
            return
        self._shown = True
        old = [job for job in core.jobs.values() if job.estimated_in < self._round and _waits(core, job)]
        if not old:
            self._stale = False
            return
        job = min(old, key=lambda one: one.estimated_in)
        if time.monotonic() >= self._allowed_at or (decided and not job.estimated_in):
            self._estimate(core, job, now_s)
            self._allowed_at = time.monotonic() + PAUSE_S

    def _estimate(self, core: Core, job: LiveJob, now_s: float) -> None:
        first = not job.estimated_in
        job.estimated_in = self._round
        try:
            job.expected_start_s = expected_start_s(core, job.id, now_s)
        except BaseException as error:  # a policy of the user's own may fail where no decision has led it yet
            logger.warning("no estimate", extra={"fields": {"job_id": job.id, "error": str(error)}})
            job.expected_start_s = None
        if first:
            job.first_expected_s = job.expected_start_s


def _waits(core: Core, job: LiveJob) -> bool:
    """Whether the last decision has left the job out, and it has never run."""
    return not job.incarnation and core.ledger.fate_of(job.id) not in (HOLDS, UNTOLD)
