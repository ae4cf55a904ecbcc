"""Whether jobs packed on one GPU are better off than one after the other, judged by measured step rates.

Each job's rate together is divided by its rate alone; the sum over the jobs is what the GPU does compared with running
them in turn: above 1 packing pays. Nothing here measures or acts: samples go in, a verdict with its reason comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from thebes.model.errors import UserError


@dataclass(frozen=True)
class PackingRules:
    """When packing pays. A pair must win clearly to begin with, and is kept until it clearly does not (hysteresis)."""

    enter_sum: float = 1.10
    leave_sum: float = 1.02
    fair_share: float = 0.7  # each job makes at least this part of the 1/n that it would have in turn
    settle_s: float = 3.0  # nothing is measured for so long after a change
    min_window_s: float = 10.0
    min_steps: int = 10
    patience: int = 2  # so many windows in a row below `leave_sum` undo a pair that has paid
    retry_after_s: float = 3600.0  # jobs that did not pay together are not tried again for so long

    def __post_init__(self) -> None:
        if not 1.0 <= self.leave_sum <= self.enter_sum:
            raise UserError(f"packing: 1 <= leave_sum ({self.leave_sum}) <= enter_sum ({self.enter_sum}) must hold")
        if not 0.0 <= self.fair_share <= 1.0:
            raise UserError(f"packing: fair_share lies between 0 and 1, not at {self.fair_share}")
        if self.min_window_s <= 0 or self.min_steps < 1 or self.patience < 1:
            raise UserError("packing: min_window_s must be above 0, min_steps and patience at least 1")


@dataclass(frozen=True)
class StepSample:
    """A job was at this step at this time."""

    time_s: float
    step: int


@dataclass(frozen=True)
class Window:
    """Steps made in a stretch of time, between two samples."""

    steps: int
    seconds: float

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds if self.seconds > 0 else 0.0

    def long_enough(self, rules: PackingRules) -> bool:
        # Jobs report now and then, so a window between two reports is a little shorter than the time that passed.
        return self.seconds >= 0.9 * rules.min_window_s and self.steps >= rules.min_steps


def window(samples: Iterable[StepSample], from_s: float, to_s: float) -> Window:
    """From the first to the last sample within these times; empty if there are fewer than two."""
    inside = [sample for sample in samples if from_s <= sample.time_s <= to_s]
    if len(inside) < 2:
        return Window(0, 0.0)
    return Window(inside[-1].step - inside[0].step, inside[-1].time_s - inside[0].time_s)


@dataclass(frozen=True)
class Packing:
    """Jobs on one GPU, in the order in which they came, and what has been found about them so far."""

    jobs: tuple[str, ...]
    paid: bool = False
    low_windows: int = 0


@dataclass(frozen=True)
class Verdict:
    """What to do with a packing, and why. `after` is the packing to judge next time."""

    action: Literal["measure", "keep", "undo"]
    reason: str
    after: Packing
    shares: Mapping[str, float]  # rate together over rate alone
    total: float | None = None
    leaves: str | None = None


def judge(packing: Packing, alone: Mapping[str, float], together: Mapping[str, Window], rules: PackingRules) -> Verdict:
    """The verdict on one window. `alone` are steps per second of each job with the GPU to itself.

    The job that came last leaves, which restores the arrangement that was there, and measured, before.
    """
    missing = [job for job in packing.jobs if alone.get(job, 0.0) <= 0.0]
    if missing:
        return Verdict("measure", f"the rate alone of {', '.join(missing)} is not known", packing, {})
    short = [job for job in packing.jobs if job not in together or not together[job].long_enough(rules)]
    if short and not _stalled(short, together, rules):
        return Verdict("measure", f"the window of {', '.join(short)} is too short yet", packing, {})

    shares = {job: together[job].steps_per_s / alone[job] for job in packing.jobs}
    total = sum(shares.values())
    slowest = min(packing.jobs, key=lambda job: shares[job])
    floor = rules.fair_share / len(packing.jobs)
    told = " + ".join(f"{shares[job]:.2f}" for job in packing.jobs) + f" = {total:.2f}"

    def undo(reason: str) -> Verdict:
        return Verdict("undo", reason, replace(packing, low_windows=0), shares, total, packing.jobs[-1])

    if shares[slowest] < floor:
        return undo(f"{slowest} makes {shares[slowest]:.2f} of its rate alone, less than {floor:.2f}: {told}")
    if not packing.paid:
        if total < rules.enter_sum:
            return undo(f"{told} is below {rules.enter_sum:.2f}: packing does not pay")
        after = replace(packing, paid=True, low_windows=0)
        return Verdict("keep", f"{told} reaches {rules.enter_sum:.2f}: packing pays", after, shares, total)
    if total >= rules.leave_sum:
        after = replace(packing, low_windows=0)
        return Verdict("keep", f"{told} is at least {rules.leave_sum:.2f}", after, shares, total)
    low = packing.low_windows + 1
    if low < rules.patience:
        after = replace(packing, low_windows=low)
        reason = f"{told} is below {rules.leave_sum:.2f}, for {low} of {rules.patience} windows"
        return Verdict("keep", reason, after, shares, total)
    return undo(f"{told} was below {rules.leave_sum:.2f} for {low} windows: packing does not pay any more")


def _stalled(short: Sequence[str], together: Mapping[str, Window], rules: PackingRules) -> bool:
    """Whether the others have measured three times as long as needed: a job without steps by then makes none."""
    others = [window for job, window in together.items() if job not in short]
    patient = bool(others) and min(window.seconds for window in others) >= 3 * rules.min_window_s
    return patient and all(job in together for job in short)
