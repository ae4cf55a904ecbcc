"""Sensitivity curves of Rubick (arXiv 2408.08586): what a job gains, or loses, with every GPU more or less.

A curve has a *level* for each number of GPUs that is worth holding: where a smaller number reaches 99 % of the same
throughput, the smaller one takes its place (the 1 % rule). Rates are throughput over a reference of the model, so that
slopes of different models can be compared. Everything is computed when first asked for and kept: curves never change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

NEAR = 0.99  # the 1 % rule: this part of a throughput is as good as all of it
SLACK = 1e-9  # an SLA is met up to rounding


class Footing(NamedTuple):
    """What a job does in one shape of placement, and what it takes there beside its GPUs."""

    rate: float  # throughput over the model's reference
    cpus: int = 1  # for each GPU
    host_gib: float = 0.0  # for each GPU
    plan: int = 0  # code of the plan (thebes.model.plan)


Shape = tuple[int, int]  # nodes, GPUs on each of them
BestPlanAt = Callable[[int, int, int], Footing | None]  # (GPUs, nodes, CPUs per GPU) -> what the best plan does there


class Room(NamedTuple):
    """What every node of the cluster has, and how many nodes there are."""

    nodes: int
    gpus: int  # of each node, as is all that follows
    cpus: int
    host_gib: float

    @property
    def cpu_share(self) -> int:
        """CPUs that go with a GPU when all GPUs of a node are in use."""
        return max(1, self.cpus // self.gpus)

    def fewest(self, gpus: int) -> int:
        """How many nodes so many GPUs span at best."""
        return -(-gpus // self.gpus)

    def most_cpus(self, gpus: int) -> int:
        """CPUs for each of so many GPUs that can be had wherever they lie, as on the fewest nodes."""
        return self.cpus // -(-gpus // self.fewest(gpus))


class DemandCurve:
    """One kind of job: a model, the plans that it may use and the numbers of GPUs that it may have."""

    MOST_SPREAD = 4  # a gang is never put on more than so many times the nodes that it needs

    def __init__(
        self,
        levels: Sequence[int],
        look: BestPlanAt,
        room: Room,
        *,
        sla: float = 0.0,
        cpus: int = 0,
        own: BestPlanAt | None = None,
        doubt: float = 0.0,
    ) -> None:
        """`own`: the plan whose speed is promised; others must be expected to exceed the promise by `doubt`."""
        self.room = room
        self.sla = sla  # the rate that is guaranteed; 0 for best effort
        self.cpus = cpus  # for each GPU, if the scheduler may not choose them
        self._look, self._own = look, own
        self._doubt = doubt
        self._footings: dict[Shape, Footing | None] = {}
        self._shapes: dict[int, tuple[tuple[Shape, Footing], ...]] = {}
        self._ups: dict[int, tuple[tuple[float, int], ...]] = {}
        self._down: dict[int, float] = {}
        self._lower: dict[int, tuple[int, ...]] = {}
        self._rate = {0: 0.0}
        top = 0.0
        for gpus in sorted(levels):
            footing = self.footing(self._fewest(gpus)) if self._fewest(gpus)[0] <= room.nodes else None
            if footing is not None and footing.rate * NEAR > top:  # otherwise fewer GPUs are as good
                self._rate[gpus] = top = footing.rate
        self.levels = tuple(self._rate)[1:]
        self.rates = tuple(self._rate.values())[1:]

    def _fewest(self, gpus: int) -> Shape:
        """The shape on the fewest nodes that share the GPUs evenly."""
        nodes = self.room.fewest(gpus)
        while gpus % nodes:
            nodes += 1
        return nodes, gpus // nodes

    def footing(self, shape: Shape) -> Footing | None:
        """The best plan in this shape with the fewest CPUs that come near enough; None if the SLA is not met."""
        if shape not in self._footings:
            found = self._find(shape, self._look, self.sla * (1.0 + self._doubt))
            if found is None and self._own is not None:
                found = self._find(shape, self._own, self.sla)
            self._footings[shape] = found
        return self._footings[shape]

    def _find(self, shape: Shape, look: BestPlanAt, sla: float) -> Footing | None:
        nodes, each = shape
        gpus, most = nodes * each, self.room.most_cpus(nodes * each)
        usual = min(self.room.cpu_share, most)
        if usual < 1:
            return None
        if self.cpus:
            fixed = look(gpus, nodes, min(self.cpus, most))
            meets = fixed is not None and fixed.rate >= max(sla * (1.0 - SLACK), 1e-300)
            return fixed._replace(cpus=min(self.cpus, most)) if fixed is not None and meets else None
        full = look(gpus, nodes, usual)
        if full is None or full.rate <= 0.0:
            return None
        goal = max(NEAR * full.rate, sla * (1.0 - SLACK))
        top = usual if full.rate >= goal else most  # more CPUs than usual only if the SLA needs them
        return _fewest_cpus(look, gpus, nodes, top, goal)

    def with_cpus(self, shape: Shape, cpus: int) -> Footing | None:
        """The best plan in this shape with exactly so many CPUs per GPU."""
        found = self._look(shape[0] * shape[1], shape[0], cpus)
        return found and found._replace(cpus=cpus)

    @property
    def least(self) -> int:
        """The fewest GPUs that will do; 0 if none will."""
        return self.levels[0] if self.levels else 0

    def rate(self, gpus: int) -> float:
        """The rate at the best placement; between two levels, that of the lower one."""
        found = self._rate.get(gpus)
        if found is None:
            below = [rate for level, rate in zip(self.levels, self.rates, strict=True) if level <= gpus]
            found = self._rate[gpus] = below[-1] if below else 0.0
        return found

    def shapes(self, gpus: int) -> tuple[tuple[Shape, Footing], ...]:
        """Ways to spread so many GPUs evenly over nodes, fastest first."""
        if gpus not in self._shapes:
            fewest = self.room.fewest(gpus)
            found: list[tuple[Shape, Footing]] = []
            for nodes in range(fewest, min(self.MOST_SPREAD * fewest, self.room.nodes, gpus) + 1):
                footing = self.footing((nodes, gpus // nodes)) if gpus % nodes == 0 else None
                if footing is not None:
                    found.append(((nodes, gpus // nodes), footing))
            self._shapes[gpus] = tuple(sorted(found, key=lambda one: (-one[1].rate, one[0][0])))
        return self._shapes[gpus]

    def ups(self, gpus: int) -> tuple[tuple[float, int], ...]:
        """(slope, level) of every larger level that is at least 1 % faster, steepest first."""
        if gpus not in self._ups:
            now = self.rate(gpus)
            found = [
                ((rate - now) / (level - gpus), level)
                for level, rate in zip(self.levels, self.rates, strict=True)
                if level > gpus and rate * NEAR > now
            ]
            self._ups[gpus] = tuple(sorted(found, key=lambda one: (-one[0], one[1])))
        return self._ups[gpus]

    def up_slope(self, gpus: int) -> float:
        """The steepest gain per GPU from here on."""
        ups = self.ups(gpus)
        return ups[0][0] if ups else 0.0

    def lower(self, gpus: int) -> tuple[int, ...]:
        """Levels below, largest first, and 0 at the end unless a rate is guaranteed."""
        if gpus not in self._lower:
            below = [level for level in reversed(self.levels) if level < gpus]
            self._lower[gpus] = tuple(below + ([0] if self.sla <= 0.0 else []))
        return self._lower[gpus]

    def down_slope(self, gpus: int) -> float:
        """The smallest loss per GPU of any step down from here; infinite at the bottom."""
        if gpus not in self._down:
            now = self.rate(gpus)
            steps = [(now - self.rate(level)) / (gpus - level) for level in self.lower(gpus)]
            self._down[gpus] = min(steps, default=float("inf"))
        return self._down[gpus]


def _fewest_cpus(look: BestPlanAt, gpus: int, nodes: int, top: int, goal: float) -> Footing | None:
    """The plan with the fewest CPUs that reach the goal, by bisection, because rates grow with CPUs."""
    best = look(gpus, nodes, top)
    if best is None or best.rate < goal:
        return None
    low, high = 0, top  # low fails, and high reaches it
    while high - low > 1:
        middle = (low + high) // 2 if low else 1  # one CPU is enough for most plans
        found = look(gpus, nodes, middle)
        if found is not None and found.rate >= goal:
            best, high = found, middle
        else:
            low = middle
    return best._replace(cpus=high)


def slope(curve: DemandCurve, gpus: int, change: int) -> float:
    """slope(job, r, d) = |T(r + d) - T(r)| / (T_ref |d|)."""
    return abs(curve.rate(gpus + change) - curve.rate(gpus)) / abs(change)
