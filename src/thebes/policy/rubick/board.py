"""Where Rubick's jobs sit while a round is worked out: GPUs, CPUs and host memory of every node, and their holders.

`SeatBoard` is the scratch pad of one decision. Every change goes through `put`, which keeps a log: a transaction that
does not reach its target is rolled back, and then nothing has changed (AllocOnNode of the paper commits all or
nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from thebes.policy.rubick.curves import DemandCurve, Footing, Room, Shape

NOTHING = Footing(0.0, 0)
# How much a job may take from others: what brings more with it; what a starved job needs; what a job was promised.
BY_SLOPE, STARVED, PROMISED = range(3)
_ROUNDING = 1e-6  # GiB


class Seat(NamedTuple):
    """The GPUs of one job: how many on which nodes, and what the job does there."""

    nodes: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    footing: Footing = NOTHING

    @property
    def gpus(self) -> int:
        return sum(self.counts)


NOWHERE = Seat()


class BoardJob(NamedTuple):
    """What holds for one job during a whole round."""

    curve: DemandCurve
    tenant: int = 0
    least: int = 1  # GPUs
    most: int = 1 << 40
    guaranteed: bool = False
    running: bool = False
    protected: bool = False  # it waited too long for its GPUs, so for a while no best-effort job takes them
    guarded: bool = False  # its reconfiguration guard forbids taking from it
    rooted: bool = False  # the same for its own gain: changes that were forced upon it do not count
    burden: float = 0.0  # part of its running time that restarts would have cost after one more


class Offer(NamedTuple):
    """One step down for a victim: its cost for each GPU that helps, and where the victim sits after it."""

    burden: float  # 0 if the guard allows it
    cost: float
    job: int
    seat: Seat


class Supply(NamedTuple):
    """The most that could be taken on one node."""

    slope: float  # of the flattest victim
    gpus: tuple[int, int, int]  # by slope, by a starved job, by one that was promised them


NO_SUPPLY = Supply(inf, (0, 0, 0))


class SeatBoard:
    """The state of a round. Positions of jobs and nodes are plain whole numbers."""

    def __init__(
        self,
        room: Room,
        free: Sequence[int],
        jobs: Sequence[BoardJob],
        seats: Sequence[Seat],
        quotas: Sequence[int] = (),
        *,
        margin: float = 0.1,
        override: bool = True,
    ) -> None:
        """`free`: free GPUs per node; `seats`: what jobs hold now, in addition; `quotas`: GPUs per tenant."""
        self.room, self.jobs = room, jobs
        self.margin = margin  # a victim's slope must be lower by so much, so that no job is moved for nothing
        self.override = override  # a job that takes by force ignores the guards of best-effort jobs
        self.free = list(free)
        self.free_cpus = [room.cpus] * len(self.free)
        self.free_gib = [room.host_gib] * len(self.free)
        self.residents: list[set[int]] = [set() for _ in self.free]
        self.seats: list[Seat] = [NOWHERE] * len(jobs)
        self.left = list(quotas)
        self.before = list(seats)
        self.level_nodes = [0] * (room.gpus + 1)  # nodes with exactly so many free GPUs
        self.total_free = sum(self.free)
        self.log: list[tuple[int, Seat]] = []
        self._supplies = [NO_SUPPLY] * len(self.free)
        self._stale = set(range(len(self.free)))  # nodes whose supply has to be worked out again
        for j, seat in enumerate(seats):
            if seat.nodes:
                self._sit(j, seat)
        for count in self.free:
            self.level_nodes[count] += 1

    # --- changes, and how to undo them ---------------------------------------------------------------------------

    def _sit(self, j: int, seat: Seat) -> None:
        """Enter a seat that exists already: its GPUs are not among the free ones."""
        cpus, gib = seat.footing.cpus, seat.footing.host_gib
        for node, count in zip(seat.nodes, seat.counts, strict=True):
            self.free_cpus[node] -= count * cpus
            self.free_gib[node] -= count * gib
            self.residents[node].add(j)
        if self.left:
            self.left[self.jobs[j].tenant] -= seat.gpus
        self.seats[j] = seat

    def _change(self, j: int, seat: Seat, sign: int) -> None:
        cpus, gib = seat.footing.cpus, seat.footing.host_gib
        free, levels = self.free, self.level_nodes
        self._stale.update(seat.nodes)
        for node, count in zip(seat.nodes, seat.counts, strict=True):
            levels[free[node]] -= 1
            free[node] += sign * count
            levels[free[node]] += 1
            self.free_cpus[node] += sign * count * cpus
            self.free_gib[node] += sign * count * gib
            if sign > 0:
                self.residents[node].discard(j)
            else:
                self.residents[node].add(j)
        self.total_free += sign * seat.gpus
        if self.left:
            self.left[self.jobs[j].tenant] += sign * seat.gpus

    def put(self, j: int, seat: Seat) -> None:
        """Let the job sit there and nowhere else."""
        self.log.append((j, self.seats[j]))
        self._move(j, seat)

    def _move(self, j: int, seat: Seat) -> None:
        if self.seats[j].nodes:
            self._change(j, self.seats[j], +1)
        if seat.nodes:
            self._change(j, seat, -1)
        self.seats[j] = seat

    def mark(self) -> int:
        return len(self.log)

    def rollback(self, mark: int) -> None:
        """Undo everything since `mark`."""
        while len(self.log) > mark:
            self._move(*self.log.pop())

    # --- questions ------------------------------------------------------------------------------------------------

    def touched(self, j: int) -> bool:
        """Whether the job is reconfigured in this round anyway, so that one more change costs nothing."""
        return self.seats[j] is not self.before[j]

    def restarts(self, j: int) -> bool:
        """Whether the job gets other GPUs or another plan; other CPUs are no reason for a restart."""
        held, seat = self.before[j], self.seats[j]
        return (held.nodes, held.counts, held.footing.plan) != (seat.nodes, seat.counts, seat.footing.plan)

    def is_displaced(self, j: int) -> bool:
        """Whether the job loses GPUs and in the end has no more than before, which no job would wish for."""
        held, seat = self.before[j], self.seats[j]
        return seat.gpus <= held.gpus and not _is_part(held, seat)

    def within_quota(self, j: int, gpus: int) -> bool:
        return not self.left or gpus <= self.left[self.jobs[j].tenant] + self.seats[j].gpus

    def has_room(self, node: int, each: int, footing: Footing) -> bool:
        return (
            self.free[node] >= each
            and self.free_cpus[node] >= each * footing.cpus
            and self.free_gib[node] + _ROUNDING >= each * footing.host_gib
        )

    def find(self, shape: Shape, footing: Footing, own: Sequence[int] = ()) -> tuple[int, ...] | None:
        """Nodes with room for this shape: the job's own first, then tight ones, so that whole nodes stay whole."""
        count, each = shape
        if sum(self.level_nodes[each:]) < count:
            return None
        nodes = [node for node in own if self.has_room(node, each, footing)][:count]
        if len(nodes) < count:
            free = self.free
            others = [node for node in range(len(free)) if free[node] >= each and node not in nodes]
            others.sort(key=lambda node: free[node])
            for node in others:
                if self.has_room(node, each, footing):
                    nodes.append(node)
                    if len(nodes) == count:
                        break
        return tuple(sorted(nodes)) if len(nodes) == count else None

    # --- without victims --------------------------------------------------------------------------------------------

    def settle(self, j: int, gpus: int, *, above: float = 0.0) -> bool:
        """Seat a job on so many GPUs, its own or free ones, in the fastest shape that is possible and beats `above`."""
        job, own = self.jobs[j], self.seats[j]
        if not job.least <= gpus <= job.most or not self.within_quota(j, gpus) or gpus - own.gpus > self.total_free:
            return False
        mark = self.mark()
        if own.nodes:
            self.put(j, NOWHERE)
        for shape, footing in job.curve.shapes(gpus):
            if footing.rate <= above:
                break
            nodes = self.find(shape, footing, own.nodes)
            if nodes is not None:
                self.put(j, Seat(nodes, (shape[1],) * shape[0], footing))
                return True
        self.rollback(mark)
        return False

    # --- with victims: AllocOnNode ------------------------------------------------------------------------------------

    def claim(self, j: int, gpus: int, force: int = BY_SLOPE) -> bool:
        """Seat a job on so many GPUs, taking from jobs with flatter curves; nothing changes if that fails.

        With force a guaranteed or starved job takes them however steep the curves of the others are.
        """
        job = self.jobs[j]
        if not job.least <= gpus <= job.most or not self.within_quota(j, gpus):
            return False
        mark = self.mark()
        if self.seats[j].nodes:
            self.put(j, NOWHERE)
        for shape, footing in job.curve.shapes(gpus):
            worth = footing.rate / gpus * (1.0 - self.margin)
            if self._claim_shape(j, shape, footing, worth, force):
                return True
        self.rollback(mark)
        return False

    def claim_more(self, j: int, gpus: int) -> bool:
        """Grow a job on the nodes where it sits, taking from flatter curves there; nothing changes if that fails."""
        job, own = self.jobs[j], self.seats[j]
        count = len(own.nodes)
        each = gpus // count
        if gpus % count or each > self.room.gpus or gpus > job.most or not self.within_quota(j, gpus):
            return False
        footing = job.curve.footing((count, each))
        if footing is None:
            return False
        worth = (footing.rate - own.footing.rate) / (gpus - own.gpus) * (1.0 - self.margin)
        if not all(
            self._could_give(node, each - held, worth) for node, held in zip(own.nodes, own.counts, strict=True)
        ):
            return False
        mark = self.mark()
        self.put(j, NOWHERE)
        if all(self._make_room(node, each, footing, worth, BY_SLOPE) for node in own.nodes):
            self.put(j, Seat(own.nodes, (each,) * count, footing))
            return True
        self.rollback(mark)
        return False

    def _could_give(self, node: int, gpus: int, worth: float) -> bool:
        self._look_again()
        supply = self._supplies[node]
        return self.free[node] >= gpus or (supply.slope < worth and self.free[node] + supply.gpus[BY_SLOPE] >= gpus)

    def _claim_shape(self, j: int, shape: Shape, footing: Footing, worth: float, force: int) -> bool:
        count, each = shape
        mark, nodes = self.mark(), list[int]()
        for node in self._candidates(count, each, worth, force):
            here = self.mark()
            if self._make_room(node, each, footing, worth, force):
                nodes.append(node)
                if len(nodes) == count:
                    self.put(j, Seat(tuple(sorted(nodes)), (each,) * count, footing))
                    return True
            else:
                self.rollback(here)
        self.rollback(mark)
        return False

    def _candidates(self, count: int, each: int, worth: float, force: int) -> list[int]:
        """Nodes that could have room, those with most free GPUs first; none if they are too few."""
        self._look_again()
        able = [
            node
            for node, (free, supply) in enumerate(zip(self.free, self._supplies, strict=True))
            if free >= each or (free + supply.gpus[force] >= each and (force or supply.slope < worth))
        ]
        return sorted(able, key=lambda node: -self.free[node]) if len(able) >= count else []

    def _look_again(self) -> None:
        for node in self._stale:
            self._supplies[node] = self._supply(node)
        self._stale.clear()

    def _supply(self, node: int) -> Supply:
        """The most that the jobs of a node could give."""
        lowest, gpus = inf, [0, 0, 0]
        for v in self.residents[node]:
            job, seat = self.jobs[v], self.seats[v]
            give = seat.gpus - job.curve.least if job.guaranteed else seat.counts[seat.nodes.index(node)]
            for force in (BY_SLOPE, STARVED, PROMISED):
                slope = self._gives(v, force)
                if slope < inf:
                    gpus[force] += give
                    lowest = min(lowest, slope) if force == BY_SLOPE else lowest
        return Supply(lowest, (gpus[0], gpus[1], gpus[2]))

    def _gives(self, v: int, force: int) -> float:
        """The slope at which this job could be a victim; infinite if it cannot."""
        job, seat = self.jobs[v], self.seats[v]
        if not job.running or (job.protected and force < PROMISED):
            return inf
        if seat is self.before[v]:
            if job.guarded and (job.guaranteed or force == BY_SLOPE or not self.override):
                return inf
        elif not _is_part(seat, self.before[v]):
            return inf  # newcomers of this round and jobs that have just moved keep what they were given
        return job.curve.down_slope(seat.gpus)

    def _make_room(self, node: int, each: int, footing: Footing, worth: float, force: int) -> bool:
        while not self.has_room(node, each, footing):
            short = max(1, each - self.free[node])
            offers = [
                offer
                for v in self.residents[node]
                if self._gives(v, force) < (inf if force else worth)
                for offer in [self._offer(v, node, short)]
                if offer is not None and (force or offer.cost < worth)
            ]
            if not offers:
                return False
            best = min(offers, key=lambda offer: (offer.burden, offer.cost, offer.job))
            self.put(best.job, best.seat)
        return True

    def _offer(self, v: int, node: int, short: int) -> Offer | None:
        """The cheapest step down that frees GPUs of this node."""
        job, seat = self.jobs[v], self.seats[v]
        burden = job.burden if job.guarded and not self.touched(v) else 0.0
        held, best = dict(zip(seat.nodes, seat.counts, strict=True)), None
        for lower in self._lower_seats(job, seat, node):
            freed = held[node] - dict(zip(lower.nodes, lower.counts, strict=True)).get(node, 0)
            cost = (seat.footing.rate - lower.footing.rate) / min(freed, short)
            if best is None or cost < best.cost:
                best = Offer(burden, cost, v, lower)
        return best

    def _lower_seats(self, job: BoardJob, seat: Seat, node: int) -> list[Seat]:
        """Smaller seats inside this one that free GPUs of the node: fewer GPUs on one node, or fewer nodes."""
        found: list[Seat] = []
        for gpus in job.curve.lower(seat.gpus):
            if gpus == 0:
                if not job.guaranteed:
                    found.append(NOWHERE)
            elif gpus < job.least:
                continue
            elif len(seat.nodes) == 1:
                footing = job.curve.footing((1, gpus))
                if footing is not None:
                    found.append(Seat(seat.nodes, (gpus,), footing))
            elif gpus % seat.counts[0] == 0 and min(seat.counts) == max(seat.counts):
                count = gpus // seat.counts[0]
                footing = job.curve.footing((count, seat.counts[0]))
                if footing is not None:
                    kept = tuple(other for other in seat.nodes if other != node)[:count]
                    found.append(Seat(kept, seat.counts[:count], footing))
        return found


def _is_part(seat: Seat, whole: Seat) -> bool:
    """Whether a seat lies within another one, as for a job that was shrunk in this round, not moved."""
    held = dict(zip(whole.nodes, whole.counts, strict=True))
    return all(count <= held.get(node, 0) for node, count in zip(seat.nodes, seat.counts, strict=True))
