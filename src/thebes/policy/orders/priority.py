"""Priority policies: all decisions of a policy of the Tiresias family follow from one order of the jobs.

A `Rule` says how jobs are ordered: by which key, inside which feedback queues, with which promotion. `rank_and_key`
turns a job into its place in that order at one instant; `next_change_s` and `promotion_s` say when that place will
change by itself, so that demotions and promotions happen at their exact instants and polling is not needed.
The simulator's fast path and the pure `decide` of every such policy call the same functions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.compiled import Record, Records, compiled, inlined, inner, maker
from thebes.model.decision import HOLDS, Decision
from thebes.model.jobs import HELD, NEVER, WAITING, attained_s, remaining_s, running_s
from thebes.model.rules import ticks_until
from thebes.model.view import View
from thebes.policy.base import Policy
from thebes.policy.fill import fill
from thebes.policy.orders.learning import known_count

SUBMIT, GPUS, REMAINING_TIME, REMAINING_SERVICE, START, FIRST_START, ATTAINED, GITTINS = range(8)

# Places in one queue fall into so many groups, one after the other: the rank is GROUPS * queue + group.
GROUPS = 4

# For a job stopped at the instant of its demotion, the computed service may fall short by a rounding error.
ROUNDING = 1e-7


class Rule(NamedTuple):
    """How jobs are ordered."""

    order: int  # one of the keys above
    by_gpu_time: bool  # attained service counts GPUs x time (2D), not time alone
    limits: NDArray[np.float64]  # upper limits of all queues but the last; empty if there are no queues
    quantum_s: float  # the service of running jobs is read at multiples of it; 0 means at every decision
    horizon: float  # for Gittins: how far to look ahead (service) where no queue says it
    promote_knob: float  # 0 if no job is promoted
    promote_floor_s: float
    preemptive: bool
    strict: bool  # stop at the first job that does not fit, instead of passing it over


class Distribution(NamedTuple):
    """Total service of past jobs: the first `known[0]` of `samples`, sorted; `prefix[i]` is the sum of the first i."""

    samples: NDArray[np.float64]
    prefix: NDArray[np.float64]
    known: NDArray[np.int64]


def distribution_of(samples: NDArray[np.float64], room: int = 0) -> Distribution:
    """A distribution with room for `room` more samples."""
    size = len(samples) + room
    empty = Distribution(np.zeros(size), np.zeros(size + 1), np.zeros(1, dtype=np.int64))
    set_samples(empty, samples)
    return empty


def set_samples(d: Distribution, samples: NDArray[np.float64]) -> None:
    """Replace the distribution's content; `samples` must fit its room."""
    count = len(samples)
    d.samples[:count] = np.sort(samples)
    d.prefix[1 : count + 1] = np.cumsum(d.samples[:count])
    d.known[0] = count


@compiled
def gittins_index(d: Distribution, attained: float, horizon: float) -> float:
    """P(S - a <= D | S > a) / E[min(S - a, D) | S > a]: the chance to finish within D, per service spent on trying.

    It takes two binary searches and prefix sums. With D infinite it is one over the mean remaining service. It is 0
    beyond the largest sample, where nothing is known, and such a job is the least likely to end soon.
    """
    n = d.known[0]
    samples = d.samples[:n]
    above = np.searchsorted(samples, attained, side="right")
    if above >= n:
        return 0.0
    within = np.searchsorted(samples, attained + horizon, side="right") if horizon < NEVER else n
    alive = n - above
    done = within - above
    spent = d.prefix[within] - d.prefix[above] - done * attained
    if within < n:
        spent += horizon * (n - within)
    return (done / alive) / (spent / alive) if spent > 0 else NEVER


@inner
def _weight(rule: Rule, job: Record) -> float:
    """Service per second of running."""
    return float(job.gpus) if rule.by_gpu_time else 1.0


@inner
def queue_of(rule: Rule, job: Record, age_s: float, run_from_s: float, now_s: float) -> int:
    """The feedback queue of a job that had age `age_s` when it began, or will begin, to run at `run_from_s`.

    Instants are compared, in the very form in which `next_change_s` announces them, so that a demotion is in force at
    its instant and not a moment earlier, whatever the rounding.
    """
    weight, queue = _weight(rule, job), 0
    for limit in rule.limits:
        limit_s = limit / weight
        if age_s < limit_s * (1.0 - ROUNDING) and now_s < run_from_s + (limit_s - age_s):
            break
        queue += 1
    return queue


@inner
def next_tick_s(rule: Rule, now_s: float) -> float:
    """When the service of running jobs is read next; never for rules that do not read it in steps."""
    return (ticks_until(rule.quantum_s, now_s) + 1.0) * rule.quantum_s if ticks(rule) else NEVER


@inner
def ticks(rule: Rule) -> bool:
    """Whether running jobs move in the order at every tick of the quantum."""
    return rule.quantum_s > 0.0 and (rule.order == ATTAINED or rule.order == GITTINS)


@inner
def _service_read(rule: Rule, job: Record, age_s: float, now_s: float) -> float:
    """Attained service as it was read last: at a tick while the job held GPUs, or now if there are no ticks.

    A job that is suspended or resumed keeps its last reading until the next tick that finds it on GPUs: carrying a
    decision out moves no job in the order, so deciding twice at one instant gives the same answer.
    """
    if not ticks(rule):
        return (age_s + running_s(job, now_s)) * _weight(rule, job)
    last_tick_s = ticks_until(rule.quantum_s, now_s) * rule.quantum_s
    if job.phase == HELD and last_tick_s > job.since_s:
        return (age_s + running_s(job, last_tick_s)) * _weight(rule, job)
    return max(0.0, age_s - job.unread_s) * _weight(rule, job)


@inner
def rank_and_key(rule: Rule, d: Distribution, job: Record, age_s: float, now_s: float) -> tuple[int, float]:
    """The job's place in the order: smaller rank first, then smaller key, then earlier submission.

    `age_s` is the job's age at the beginning of its hold: `job.age_s`, or 0 for one that is being promoted. The rank is
    the feedback queue, divided so that running jobs stand before waiting ones.
    """
    queue = 0
    if rule.limits.size > 0:
        queue = queue_of(rule, job, age_s, job.run_from_s, now_s)
    rank = GROUPS * queue
    if rule.order == SUBMIT:
        return rank, job.submit_s
    if rule.order == GPUS:
        return rank, float(job.gpus)
    if rule.order == REMAINING_TIME:
        return rank, remaining_s(job, now_s)
    if rule.order == REMAINING_SERVICE:
        return rank, remaining_s(job, now_s) * job.gpus
    if rule.order == ATTAINED:
        return rank, _service_read(rule, job, age_s, now_s)
    if rule.order == GITTINS and d.known[0] > 0:
        horizon = rule.horizon
        if rule.limits.size > 0:
            horizon = rule.limits[queue] if queue < rule.limits.size else NEVER
        return rank, -gittins_index(d, _service_read(rule, job, age_s, now_s), horizon)
    if rule.order == FIRST_START:
        return (rank, job.first_start_s) if job.first_start_s < NEVER else (rank + 1, job.submit_s)
    # START, and GITTINS before anything is known. Running jobs go on, in the order in which they started (or came into
    # the queue running); then come jobs that were preempted in this queue, the last one first; then, in the order in
    # which they came, jobs that have not run in it and jobs that are demoted at this very instant.
    came_s = job.queue_since_s if queue == job.queue else now_s
    if came_s < now_s and job.phase == HELD:
        return rank, max(job.since_s, came_s)
    if came_s < job.since_s and job.phase == WAITING:
        return rank + 1, -job.since_s
    return rank + 2, came_s


@inner
def next_change_s(rule: Rule, job: Record, age_s: float, run_from_s: float, now_s: float) -> float:
    """When the place of a job that runs from `run_from_s` on, at age `age_s`, changes: its demotion."""
    change_s = NEVER
    queue = queue_of(rule, job, age_s, run_from_s, now_s)
    if queue < rule.limits.size:
        change_s = run_from_s + (rule.limits[queue] / _weight(rule, job) - age_s)
    return change_s


@inner
def promotion_s(rule: Rule, job: Record, age_s: float, since_s: float) -> float:
    """When a job that waits since `since_s` is promoted: its wait has reached PROMOTEKNOB times its running time.

    Only jobs outside the first queue are eligible. The floor is the shortest wait that earns a promotion; without one,
    long jobs are promoted the moment they are preempted, preempt others, and the cluster does nothing but switch.
    """
    if rule.promote_knob <= 0.0 or queue_of(rule, job, age_s, NEVER, since_s) == 0:
        return NEVER
    return since_s + max(rule.promote_floor_s, rule.promote_knob * age_s - job.aged_wait_s)


@inlined
def moves_while_running(rule: Rule) -> bool:
    """Whether running jobs move in the order all the time, so that every decision must look at each of them."""
    if rule.order == ATTAINED or rule.order == GITTINS:
        return not ticks(rule)
    return rule.order == REMAINING_TIME or rule.order == REMAINING_SERVICE


@maker
def survey(
    rule: Rule, d: Distribution, jobs: Records, rows: NDArray[np.int64], now_s: float
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """The rank and key of each job, and which jobs are promoted now."""
    ranks, keys = np.empty(rows.size, dtype=np.int64), np.empty(rows.size)
    promoted = np.zeros(rows.size, dtype=np.bool_)
    for i in range(rows.size):
        job = jobs[rows[i]]
        age_s = job.age_s
        if job.phase == WAITING and promotion_s(rule, job, age_s, job.since_s) <= now_s:
            promoted[i] = True
            age_s = 0.0
        ranks[i], keys[i] = rank_and_key(rule, d, job, age_s, now_s)
    return ranks, keys, promoted


@compiled
def wake_after(
    rule: Rule,
    jobs: Records,
    rows: NDArray[np.int64],
    fate: NDArray[np.int64],
    promoted: NDArray[np.bool_],
    now_s: float,
) -> float:
    """The first instant at which a place in the order changes by itself, once the decision is carried out.

    It is not known yet when a job that starts now will really run (it may have to be restored first); the earliest case
    is that it runs at once. If it runs later, the policy wakes once too early and finds nothing to do.
    """
    wake_s = NEVER
    somebody_waits = False
    for i in range(rows.size):
        job = jobs[rows[i]]
        age_s = 0.0 if promoted[i] else job.age_s
        if fate[i] == HOLDS:
            run_from_s = job.run_from_s if job.phase == HELD else now_s
            wake_s = min(wake_s, next_change_s(rule, job, age_s, run_from_s, now_s))
            continue
        somebody_waits = True
        if job.phase == HELD:
            wake_s = min(wake_s, promotion_s(rule, job, attained_s(job, now_s), now_s))
        else:
            wake_s = min(wake_s, promotion_s(rule, job, age_s, now_s if promoted[i] else job.since_s))
    wake_s = max(wake_s, np.nextafter(now_s, NEVER))  # a promotion may be due at once, when the floor is 0
    # Readings matter only while jobs wait. Demotions always matter: when a job came into its queue decides its place.
    return min(wake_s, next_tick_s(rule, now_s)) if somebody_waits else wake_s


class Ordering(NamedTuple):
    """Everything that such a policy is; the simulator's fast path takes it in place of Views and Decisions."""

    rule: Rule
    samples: NDArray[np.float64]  # service of past jobs, given beforehand
    learn: bool  # whether the service of finished jobs is added to them


class PriorityPolicy(Policy):
    """A policy that is one order. Subclasses give the rule, and the decision follows."""

    learn: bool = False  # use the service of finished jobs as the distribution (see thebes.policy.orders.learning)

    def rule(self) -> Rule:
        raise NotImplementedError

    def samples(self) -> NDArray[np.float64]:
        """Service of past jobs, given beforehand."""
        return np.zeros(0)

    def one_order(self) -> Ordering:
        return Ordering(self.rule(), self.samples(), self.learn)

    @property
    def reads_every_s(self) -> float:
        return self.rule().quantum_s

    def decide(self, view: View) -> Decision:
        rule, rows = self.rule(), view.jobs.rows
        jobs = view.board.table.jobs
        known = view.finished_gpu_s[: known_count(len(view.finished_gpu_s))] if self.learn else np.zeros(0)
        d = distribution_of(np.concatenate((self.samples(), known)))
        ranks, keys, promoted = survey(rule, d, jobs, rows, view.now_s)
        order = np.lexsort((keys, ranks))  # it is stable, so equal places stay in order of submission
        decision = fill(
            view,
            order,
            preempt=rule.preemptive,
            strict=rule.strict,
            promote=rows[promoted],
            queues=ranks // GROUPS if len(rule.limits) else None,
        )
        return replace(decision, wake_s=wake_after(rule, jobs, rows, decision.fate, promoted, view.now_s))


def make_rule(
    order: int,
    *,
    by_gpu_time: bool = True,
    limits: tuple[float, ...] = (),
    quantum_s: float = 0.0,
    horizon: float = NEVER,
    promote_knob: float = 0.0,
    promote_floor_s: float = 0.0,
    preemptive: bool = True,
    strict: bool = False,
) -> Rule:
    """A Rule with the usual defaults."""
    return Rule(
        order,
        by_gpu_time,
        np.array(limits, dtype=np.float64),
        float(quantum_s),
        float(horizon),
        float(promote_knob),
        float(promote_floor_s),
        preemptive,
        strict,
    )
