"""Rubick (Zhang et al., MLSys'25, arXiv 2408.08586): GPUs, CPUs and execution plans are decided together.

Each job has a sensitivity curve (`curves`): how fast its best plan is on every number of GPUs. Guaranteed jobs get the
fewest GPUs that keep the speed they asked for; all other GPUs go to where they bring most (`round`), taken from flatter
curves if needed (`board`), as often as the cost of a restart allows (`guard`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thebes.model.arrays import Ints
from thebes.model.cluster import Cluster
from thebes.model.decision import HOLDS, NO_GPUS, NO_PLACE, OVER_QUOTA, Decision
from thebes.model.errors import UserError
from thebes.model.facts import PLANS, PROGRESS
from thebes.model.jobs import NEVER
from thebes.model.machine import FREE
from thebes.model.parameters import parameter
from thebes.model.plan import NO_PLAN, plan_of
from thebes.model.view import View
from thebes.perf.plans.book import PlanBook
from thebes.policy.base import Policy
from thebes.policy.quotas import check_names, check_sum, read_quotas
from thebes.policy.rubick.board import NOWHERE, BoardJob, Seat, SeatBoard
from thebes.policy.rubick.cpus import deal_cpus
from thebes.policy.rubick.curves import DemandCurve, Footing, Room
from thebes.policy.rubick.guard import allowed_after_s, burden, guarded, next_round_s
from thebes.policy.rubick.library import Demand, Freedom, Library, library_of
from thebes.policy.rubick.refit import refitted, with_model
from thebes.policy.rubick.round import Rules, expand, mend, replan, schedule

if TYPE_CHECKING:
    from thebes.perf.plans.fit import Sample

MOST_SAMPLES = 64  # per model; a refit looks at so many


class RubickMemory(NamedTuple):
    """What Rubick knows from one decision to the next."""

    protected: tuple[tuple[int, float], ...] = ()  # (id, until): starved jobs that were given GPUs by force
    forced: tuple[tuple[int, int], ...] = ()  # (id, how often it was changed against its guard)
    samples: tuple[tuple[int, Sample], ...] = ()  # (model, what was measured) where the book was wrong
    refitted_s: tuple[tuple[int, float], ...] = ()  # (model, when)
    book: PlanBook | None = None  # refitted; None if the View's will do


class Situation(NamedTuple):
    """One View in the form that the round needs."""

    view: View
    room: Room
    library: Library
    curves: list[DemandCurve]
    seats: list[Seat]
    gpus: list[Ints]  # that each job holds, ascending
    changes: Ints  # of every job so far: preemptions, moves, other plans
    forced: Ints  # of these, those against its guard
    cost_s: NDArray[np.float64]  # of one more
    guarded: NDArray[np.bool_]
    starved: NDArray[np.bool_]
    protected: dict[int, float]


@dataclass(frozen=True)
class Rubick(Policy):
    """Rubick: resources and execution plans together; steep curves get GPUs from flat ones, promises are kept.

    Guaranteed jobs (trace column guaranteed) run at least as fast as what they asked for, within their tenant's quota;
    best-effort jobs share the rest by what every GPU brings.
    """

    name: ClassVar[str] = "rubick"
    paper: ClassVar[str] = "Rubick (MLSys'25, arXiv 2408.08586), the idea rather than the published code"
    needs: ClassVar[frozenset[str]] = frozenset({PLANS})
    uses: ClassVar[Mapping[str, str]] = {PROGRESS: "believes the curves as they were fitted, and never fits them again"}
    freedom: ClassVar[Freedom] = Freedom()

    quotas: str = parameter("", "GPUs for guaranteed jobs, as vcA=40,vcB=24; a tenant that is not named has no limit")
    round_s: float = parameter(60.0, "time between two rounds while anything waits or could grow", low=1.0)
    threshold: float = parameter(
        0.97, "guard: what a job must keep of its running time after all its reconfigurations", low=0, high=1
    )
    starvation_s: float = parameter(600.0, "a best-effort job that waits longer takes GPUs of others by force", low=0)
    protect_s: float = parameter(1800.0, "for so long no job takes them away again", low=0)
    shrink: bool = parameter(True, "take GPUs from running jobs; no: only hand out what is free (expand-only)")
    override: bool = parameter(
        True, "guaranteed and starved jobs take from best-effort jobs even where the guard of those says no"
    )
    margin: float = parameter(0.1, "a victim's slope must be lower by this part", low=0, high=1)
    worth_moving: float = parameter(0.3, "a running job is reconfigured for so much more speed, at least", low=0.01)
    worth_starting: float = parameter(
        0.5, "a best-effort job starts on GPUs that bring this part of its best throughput per GPU", low=0, high=1
    )
    headroom: float = parameter(0.2, "part of the cluster that Expand leaves free for the next job", low=0, high=1)
    doubt: float = parameter(
        0.1, "a promise is kept by another plan than the user's own only if that is faster by this part", low=0
    )
    refit_above: float = parameter(
        0.1, "refit a model when measured and predicted iterations part by more than this; 0: never", low=0
    )

    _quotas: dict[str, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_quotas", read_quotas(self.quotas, self.name))

    def check(self, cluster: Cluster, tenants: tuple[str, ...]) -> None:
        """Refuse quotas of unknown tenants, or of more GPUs than there are."""
        check_names(self._quotas, "quotas", self.name, tenants)
        check_sum(self._quotas, self.name, cluster, "one of them")

    def ignores(self) -> Mapping[str, str]:
        return {"placement": "it chooses GPUs, CPUs and plans together"}

    def decide(self, view: View) -> Decision:
        memory = view.memory if isinstance(view.memory, RubickMemory) else RubickMemory()
        memory = self._refit(view, memory)
        now = self._situation(view, memory)
        jobs = view.jobs
        admitted, over_quota = self._admit(now)
        board = self._board(now)
        rules = Rules(
            shrink=self.shrink,
            worth_moving=self.worth_moving,
            worth_starting=self.worth_starting,
            headroom=int(self.headroom * view.total_gpus),
        )

        mend(board, rules)
        steep = np.array([curve.up_slope(0) for curve in now.curves])
        waiting = ~jobs.running
        promised = _ordered(np.flatnonzero(waiting & jobs.guaranteed & admitted), -jobs.priority, -steep)
        best_effort = waiting & ~jobs.guaranteed
        starved = _ordered(np.flatnonzero(best_effort & now.starved), jobs.since_s)
        others = _ordered(np.flatnonzero(best_effort & ~now.starved), -jobs.priority, -steep)
        forced = schedule(board, promised, starved, others, rules)
        replan(board, rules)
        expand(board, rules)
        deal_cpus(board, _cpu_looks(now, board))

        fate = self._fates(now, board, over_quota)
        until_s = view.now_s + self.protect_s
        kept = [(job, end_s) for job, end_s in now.protected.items()]
        ids = jobs.id.tolist()
        protected = (*kept, *((ids[j], until_s) for j in forced))
        memory = memory._replace(protected=tuple(sorted(protected)), forced=_forced(now, board))
        return self._decision(now, board, fate, memory, rules.headroom)

    # --- reading the View ---------------------------------------------------------------------------------------------

    def _situation(self, view: View, memory: RubickMemory) -> Situation:
        jobs, book = view.jobs, memory.book or view.plans
        room = _room(view, book)
        library = library_of(book, room, self.freedom, self.doubt)
        demands = zip(
            jobs.model.tolist(), jobs.gpus.tolist(), jobs.asked_plan.tolist(), jobs.asked_cpus.tolist(),
            jobs.guaranteed.tolist(), jobs.min_gpus.tolist(), jobs.max_gpus.tolist(), strict=True,
        )  # fmt: skip
        curves = [library.curve(Demand(*demand)) for demand in demands]
        cost_s, changes = jobs.suspend_s + jobs.resume_s, jobs.preemptions + jobs.moves
        against = dict(memory.forced)
        gpus = _held_gpus(view)
        alive = set(jobs.id.tolist())
        return Situation(
            view=view,
            room=room,
            library=library,
            curves=curves,
            seats=_seats(view, library, curves, gpus),
            gpus=gpus,
            changes=changes,
            forced=np.array([against.get(job, 0) for job in jobs.id.tolist()], dtype=np.int64),
            cost_s=cost_s,
            guarded=guarded(jobs.ran_s, changes, cost_s, self.threshold),
            starved=~jobs.running & (view.now_s - jobs.since_s >= self.starvation_s),
            protected={job: end_s for job, end_s in memory.protected if end_s > view.now_s and job in alive},
        )

    def _admit(self, now: Situation) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Guaranteed jobs whose minRes still fits into their tenant's quota; running ones come first."""
        view, jobs = now.view, now.view.jobs
        admitted, over = np.ones(len(jobs), dtype=np.bool_), np.zeros(len(jobs), dtype=np.bool_)
        if not self._quotas:
            return admitted, over
        names = view.tenants
        left = [self._quotas.get(name, np.inf) for name in names]
        order = _ordered(np.flatnonzero(jobs.guaranteed), ~jobs.running, -jobs.priority)
        for j in order:
            tenant, least = int(jobs.tenant[j]), now.curves[j].least
            if tenant >= len(left):
                continue
            if least > self._quotas.get(names[tenant], np.inf):
                whose, quota = f"'{names[tenant]}'", self._quotas[names[tenant]]
                raise UserError(
                    f"{self.name}: a guaranteed job of {whose} (row {jobs.rows[j]}, {jobs.gpus[j]} GPUs) needs {least} "
                    f"GPUs for the speed that it asked for, the quota of {whose} is {quota:g}: it can never start",
                    hint=f"set quotas={names[tenant]}={least} or more, or guaranteed=0 for this job",
                )
            if left[tenant] >= least or jobs.running[j]:
                left[tenant] -= least
            else:
                admitted[j], over[j] = False, True
        return admitted, over

    def _board(self, now: Situation) -> SeatBoard:
        jobs = now.view.jobs
        rooted = guarded(jobs.ran_s, now.changes - now.forced, now.cost_s, self.threshold)
        restarts = burden(jobs.ran_s, now.changes, now.cost_s)
        protected = [job in now.protected for job in jobs.id.tolist()]
        facts = zip(
            now.curves, jobs.tenant.tolist(), jobs.min_gpus.tolist(), jobs.max_gpus.tolist(), jobs.guaranteed.tolist(),
            jobs.running.tolist(), protected, now.guarded.tolist(), rooted.tolist(), restarts.tolist(), strict=True,
        )  # fmt: skip
        records = [BoardJob(*fact) for fact in facts]
        free = now.view.machine.nodes["free"].tolist()
        return SeatBoard(
            now.room, free, records, now.seats, now.view.quotas.tolist(), margin=self.margin, override=self.override
        )

    # --- refit --------------------------------------------------------------------------------------------------------

    def _refit(self, view: View, memory: RubickMemory) -> RubickMemory:
        """Fit a model again where measured and predicted speeds differ, once per round."""
        jobs = view.jobs
        if not self.refit_above or not view.knows(PROGRESS):
            return memory
        running = np.flatnonzero(jobs.iteration_s > 0.0)
        if not len(running):
            return memory
        from thebes.perf.plans.fit import Sample  # it loads SciPy, which others need not wait for

        book: PlanBook = memory.book or view.plans
        last_s, samples, known = dict(memory.refitted_s), list(memory.samples), set(memory.samples)
        news: set[int] = set()
        for j in running.tolist():
            number, code = int(jobs.model[j]), int(jobs.plan[j])
            if code == NO_PLAN or view.now_s - last_s.get(number, -NEVER) < self.round_s:
                continue
            plan, nodes, cpus = plan_of(code), int(jobs.nodes[j]), int(jobs.cpus[j])
            expected = book.of(number, plan, nodes, max(1, cpus))
            measured_s = float(jobs.iteration_s[j])
            if expected is None or abs(measured_s / expected.iteration_s - 1.0) <= self.refit_above:
                continue
            sample = Sample(plan, plan.gpus, nodes, cpus, measured_s)
            if (number, sample) not in known:
                known.add((number, sample))
                samples.append((number, sample))
                news.add(number)
        if not news:
            return memory
        for number in sorted(news):
            of_model = [sample for model, sample in samples if model == number][-MOST_SAMPLES:]
            found = refitted(view.plans, number, of_model)
            book = with_model(book, number, found) if found else book
            last_s[number] = view.now_s
        return memory._replace(samples=tuple(samples), refitted_s=tuple(sorted(last_s.items())), book=book)

    # --- the answer ---------------------------------------------------------------------------------------------------

    def _fates(self, now: Situation, board: SeatBoard, over_quota: NDArray[np.bool_]) -> Ints:
        fate = np.full(len(board.seats), NO_GPUS, dtype=np.int64)
        for j, seat in enumerate(board.seats):
            if seat.nodes:
                fate[j] = HOLDS
            elif over_quota[j] or not board.within_quota(j, now.curves[j].least):
                fate[j] = OVER_QUOTA
            elif now.curves[j].least <= board.total_free:
                fate[j] = NO_PLACE
        return fate

    def _wake_s(self, now: Situation, board: SeatBoard, headroom: int) -> float:
        """The next round, if there is anything that it could change."""
        jobs, now_s = now.view.jobs, now.view.now_s
        if any(not seat.nodes for seat in board.seats):
            return next_round_s(now_s, now_s, self.round_s)
        spare = board.total_free - headroom
        if spare <= 0 or not self.freedom.resources:
            return NEVER
        # Every job that may be reconfigured has been tried just now, so only the end of a guard can change anything.
        touched = np.array([job.running and board.restarts(j) for j, job in enumerate(board.jobs)])
        changes = now.changes - now.forced + touched
        open_s = allowed_after_s(changes, now.cost_s, self.threshold) - jobs.ran_s
        grows = [_could_grow(board, j, seat, spare, self.worth_moving) for j, seat in enumerate(board.seats)]
        left_s = open_s[np.array(grows, dtype=np.bool_) & (open_s > 0.0)]
        return next_round_s(now_s, now_s + float(left_s.min(initial=NEVER)), self.round_s)

    def _decision(self, now: Situation, board: SeatBoard, fate: Ints, memory: RubickMemory, headroom: int) -> Decision:
        held = np.flatnonzero(fate == HOLDS)
        gpus = _hand_out(now, board, held.tolist())
        seats = [board.seats[j] for j in held]
        return Decision(
            rows=now.view.jobs.rows[held],
            gpus=np.concatenate(gpus) if gpus else np.zeros(0, dtype=np.int64),
            fate=fate,
            wake_s=self._wake_s(now, board, headroom),
            memory=memory,
            counts=np.array([len(of_job) for of_job in gpus], dtype=np.int64),
            plans=np.array([seat.footing.plan for seat in seats], dtype=np.int64),
            cpus=np.array([seat.footing.cpus for seat in seats], dtype=np.int64),
        )


@dataclass(frozen=True)
class RubickE(Rubick):
    """Rubick that reconfigures plans only: every job has the GPUs and CPUs that it asked for."""

    name: ClassVar[str] = "rubick-e"
    freedom: ClassVar[Freedom] = Freedom(plans=True, resources=False)


@dataclass(frozen=True)
class RubickR(Rubick):
    """Rubick that scales resources only: every job keeps its user's type of plan, on more GPUs or fewer."""

    name: ClassVar[str] = "rubick-r"
    freedom: ClassVar[Freedom] = Freedom(plans=False, resources=True)


@dataclass(frozen=True)
class RubickN(Rubick):
    """Rubick that changes neither plans nor resources: its queue and its promises alone."""

    name: ClassVar[str] = "rubick-n"
    freedom: ClassVar[Freedom] = Freedom(plans=False, resources=False)


def _ordered(positions: Ints, *keys: NDArray[Any]) -> list[int]:
    """Positions by these keys, the first one first; among equals in order of submission."""
    return positions[np.lexsort([key[positions] for key in reversed(keys)])].tolist()


def _room(view: View, book: PlanBook) -> Room:
    site, nodes = book.site, view.machine.nodes
    return Room(len(nodes), site.node_gpus, site.node_cpus, site.node_gib)


def _held_gpus(view: View) -> list[Ints]:
    """The GPUs of every job, ascending; they are sorted by owner once for all jobs."""
    owner = view.machine.gpus["owner"]
    order = np.argsort(owner, kind="stable")
    sorted_owner = owner[order]
    first = np.searchsorted(sorted_owner, view.jobs.rows, side="left").tolist()
    last = np.searchsorted(sorted_owner, view.jobs.rows, side="right").tolist()
    return [order[a:b] for a, b in zip(first, last, strict=True)]


def _seats(view: View, library: Library, curves: Sequence[DemandCurve], gpus: Sequence[Ints]) -> list[Seat]:
    """Where each job sits now, under the plan that it has."""
    node_of, seats = view.machine.gpus["node"], list[Seat]()
    models, plans, cpus = view.jobs.model.tolist(), view.jobs.plan.tolist(), view.jobs.cpus.tolist()
    for j, mine in enumerate(gpus):
        if not len(mine):
            seats.append(NOWHERE)
            continue
        nodes, counts = _spread(node_of[mine])
        footing = library.held(curves[j], models[j], plans[j], len(nodes), max(counts), len(mine))
        if footing.cpus > cpus[j] > 0:  # a new fit may ask for more than there are; CPUs are dealt out later
            fewer = library.look_at(models[j], plans[j], len(mine))(len(mine), len(nodes), cpus[j])
            footing = (fewer or footing)._replace(cpus=cpus[j])
        seats.append(Seat(nodes, counts, footing))
    return seats


def _spread(nodes: Ints) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if nodes[0] == nodes[-1]:
        return (int(nodes[0]),), (len(nodes),)
    found, counts = np.unique(nodes, return_counts=True)
    return tuple(found.tolist()), tuple(counts.tolist())


def _forced(now: Situation, board: SeatBoard) -> tuple[tuple[int, int], ...]:
    """How often each living job was displaced against its guard, with this round."""
    now_too = [job.guarded and board.is_displaced(j) for j, job in enumerate(board.jobs)]
    counts = now.forced + np.array(now_too, dtype=np.int64)
    return tuple((job, count) for job, count in zip(now.view.jobs.id.tolist(), counts.tolist(), strict=True) if count)


def _cpu_looks(now: Situation, board: SeatBoard) -> Any:
    models = now.view.jobs.model.tolist()

    def with_cpus(j: int, cpus: int) -> Footing | None:
        seat = board.seats[j]
        look = now.library.look_at(models[j], seat.footing.plan, seat.gpus)
        return look(seat.gpus, len(seat.nodes), cpus)

    return with_cpus


def _could_grow(board: SeatBoard, j: int, seat: Seat, spare: int, worth_moving: float) -> bool:
    ups = board.jobs[j].curve.ups(seat.gpus)
    goal = seat.footing.rate * (1.0 + worth_moving)
    return any(level - seat.gpus <= spare and board.jobs[j].curve.rate(level) >= goal for _, level in ups)


def _hand_out(now: Situation, board: SeatBoard, held: Sequence[int]) -> list[Ints]:
    """The very GPUs: a job that stays keeps its own; one that changes keeps what it can and takes free ones, clear
    ones first."""
    machine = now.view.machine
    node_of, first, size = machine.gpus["node"], machine.nodes["first"], machine.nodes["gpus"]
    changed = {
        j: s for j, s in enumerate(board.seats) if (s.nodes, s.counts) != (now.seats[j].nodes, now.seats[j].counts)
    }
    pools: dict[int, list[int]] = {}
    kept: dict[int, list[int]] = {}
    for seat in changed.values():
        for node in seat.nodes:
            if node not in pools:
                there = np.arange(first[node], first[node] + size[node])
                pools[node] = there[machine.gpus["owner"][there] == FREE].tolist()
    for j, seat in changed.items():
        counts, kept[j] = dict(zip(seat.nodes, seat.counts, strict=True)), []
        for gpu, node in zip(now.gpus[j].tolist(), node_of[now.gpus[j]].tolist(), strict=True):
            if counts.get(node, 0) > 0:
                counts[node] -= 1
                kept[j].append(gpu)
            elif node in pools:
                pools[node].append(gpu)
    clear_s = machine.gpus["clear_s"]
    for pool in pools.values():
        pool.sort(key=lambda gpu: (max(clear_s[gpu], now.view.now_s), gpu), reverse=True)
    for j, seat in changed.items():
        counts = dict(zip(seat.nodes, seat.counts, strict=True))
        for node in node_of[kept[j]].tolist() if kept[j] else []:
            counts[node] -= 1
        for node, count in counts.items():
            kept[j] += [pools[node].pop() for _ in range(count)]
    return [np.array(sorted(kept[j]), dtype=np.int64) if j in changed else now.gpus[j] for j in held]
