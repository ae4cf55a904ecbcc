"""Curves of a plan book for Rubick: the curve that each job climbs, its promise, and what its present plan does."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from thebes.model.errors import UserError
from thebes.model.plan import NO_PLAN, Plan, plan_of
from thebes.perf.plans.book import Outlook, PlanBook
from thebes.policy.rubick.curves import BestPlanAt, DemandCurve, Footing, Room


class Demand(NamedTuple):
    """What a job asked for; equal demands have equal curves."""

    model: int
    gpus: int
    plan: int  # code
    cpus: int
    guaranteed: bool
    least: int  # GPUs that it can run on
    most: int


class Freedom(NamedTuple):
    """What the scheduler may change: Rubick both; its variants E, R and N one or none of them."""

    plans: bool = True
    resources: bool = True


class Library:
    """All curves of one book on one cluster, for one variant, worked out when first asked for."""

    def __init__(self, book: PlanBook, room: Room, freedom: Freedom, doubt: float = 0.0) -> None:
        self.book, self.room, self.freedom = book, room, freedom
        self.doubt = doubt  # how far predictions of two plans may be from the truth
        self._looks: dict[tuple[int, int, int], BestPlanAt] = {}
        self._references: dict[int, float] = {}
        self._curves: dict[tuple[int | float, ...], DemandCurve] = {}
        self._jobs: dict[Demand, DemandCurve] = {}
        self._held: dict[tuple[int, int, int, int, int, int], Footing] = {}

    # --- looks --------------------------------------------------------------------------------------------------------

    def _footing(self, number: int, found: Outlook | None, cpus: int) -> Footing | None:
        if found is None:
            return None
        return Footing(found.samples_s / self.reference(number), cpus, found.host_gib, found.plan.code)

    def look(self, number: int, like: int = NO_PLAN) -> BestPlanAt:
        """A look at the best plan of all, or at the best of one type."""
        key = (number, like, 0)
        if key not in self._looks:
            self._looks[key] = self._best(number, plan_of(like) if like != NO_PLAN else None)
        return self._looks[key]

    def look_at(self, number: int, code: int, on: int) -> BestPlanAt:
        """A look at one plan only. On `on` GPUs, where its job has it already, it may leave some of them idle."""
        key = (number, code, on)
        if key not in self._looks:
            self._looks[key] = self._exactly(number, plan_of(code), on)
        return self._looks[key]

    def _best(self, number: int, like: Plan | None) -> BestPlanAt:
        @cache
        def look(gpus: int, nodes: int, cpus: int) -> Footing | None:
            return self._footing(number, self.book.best(number, gpus, nodes, cpus, like), cpus)

        return look

    def _exactly(self, number: int, plan: Plan, on: int) -> BestPlanAt:
        @cache
        def look(gpus: int, nodes: int, cpus: int) -> Footing | None:
            if plan.gpus != gpus and not plan.gpus < gpus == on:
                return None
            return self._footing(number, self.book.of(number, plan, min(nodes, plan.gpus), cpus), cpus)

        return look

    def reference(self, number: int) -> float:
        """T_ref: the model's throughput on one node, or on the fewest GPUs that hold it."""
        if number not in self._references:
            samples = self.book.curve(number).samples_s[:, -1]
            usable = np.flatnonzero(samples > 0.0)
            on_a_node = usable[usable <= self.room.gpus]
            at = on_a_node[-1] if len(on_a_node) else (usable[0] if len(usable) else 0)
            self._references[number] = float(samples[at]) or 1.0
        return self._references[number]

    # --- curves -------------------------------------------------------------------------------------------------------

    def sla(self, demand: Demand) -> float:
        """The promise: the rate of the asked GPUs and CPUs under the user's own plan at its best placement."""
        nodes = self.room.fewest(demand.gpus)
        cpus = max(1, min(demand.cpus or self.room.cpu_share, self.room.most_cpus(demand.gpus)))
        if demand.plan == NO_PLAN:
            found = self.look(demand.model)(demand.gpus, nodes, cpus)
            why = "no plan uses exactly so many"
        else:
            found = self.look_at(demand.model, demand.plan, demand.gpus)(demand.gpus, nodes, cpus)
            why = self.book.why_not(demand.model, plan_of(demand.plan), nodes, cpus)
        if found is None:
            raise UserError(
                f"rubick: a guaranteed job of {self._name(demand.model)} asks for {demand.gpus} GPUs with plan "
                f"{_plan_text(demand.plan)}, which cannot run: {why}",
                hint=f"what it is promised is that plan's speed: set plan to {self._instead(demand)}, or guaranteed=0",
            )
        return found.rate

    def _instead(self, demand: Demand) -> str:
        best = self.look(demand.model)(demand.gpus, self.room.fewest(demand.gpus), self.room.cpu_share)
        return _plan_text(best.plan) if best else "one of `thebes plan`"

    def _name(self, number: int) -> str:
        return self.book.models[number].name

    def curve(self, demand: Demand) -> DemandCurve:
        """The curve of a job; it is the same object for all jobs that climb the same one."""
        if demand not in self._jobs:
            self._jobs[demand] = self._shared_curve(demand)
        return self._jobs[demand]

    def _shared_curve(self, demand: Demand) -> DemandCurve:
        plans, resources = self.freedom
        number, sla = demand.model, self.sla(demand) if demand.guaranteed else 0.0
        like = NO_PLAN if plans else demand.plan
        cpus = 0 if resources else (demand.cpus or self.room.cpu_share)
        fixed = 0 if resources else demand.gpus
        key = (number, like, fixed, cpus, sla, demand.plan if sla > 0.0 else NO_PLAN, demand.least, demand.most)
        if key not in self._curves:
            levels = [demand.gpus] if fixed else self._levels(demand, like)
            look = self._fixed(demand) if fixed else self.look(number, like)
            own = self.look_at(number, demand.plan, demand.gpus) if sla > 0.0 and demand.plan != NO_PLAN else None
            curve = DemandCurve(levels, look, self.room, sla=sla, cpus=cpus, own=own, doubt=self.doubt)
            if not curve.levels:
                raise UserError(self._why_never(demand, sla), hint=self._hint_never(demand, like))
            self._curves[key] = curve
        return self._curves[key]

    def _fixed(self, demand: Demand) -> BestPlanAt:
        """On the GPUs asked for: the user's plan, or the best; where none uses them all, the user's leaves some."""
        if demand.plan == NO_PLAN:
            return self.look(demand.model)
        own, best = self.look_at(demand.model, demand.plan, demand.gpus), self.look(demand.model)
        if not self.freedom.plans:
            return own
        return lambda gpus, nodes, cpus: best(gpus, nodes, cpus) or own(gpus, nodes, cpus)

    def _levels(self, demand: Demand, like: int) -> list[int]:
        """GPU counts that the book finds worth having; a promise may need one that is within 1 % of a smaller one."""
        sampled = self.book.curve(demand.model, like=plan_of(like) if like != NO_PLAN else None)
        counts = np.arange(len(sampled.samples_s))
        useful = sampled.samples_s[:, -1] > 0.0
        if not demand.guaranteed:
            useful &= sampled.gpus_for[:, -1] == counts
        within = (counts >= demand.least) & (counts <= min(demand.most, self.room.nodes * self.room.gpus))
        return np.flatnonzero(useful & within).tolist()

    def _why_never(self, demand: Demand, sla: float) -> str:
        what = "guaranteed job" if sla > 0.0 else "job"
        return (
            f"rubick: a {what} of {self._name(demand.model)} that asks for {demand.gpus} GPUs with plan "
            f"{_plan_text(demand.plan)} can never run on {self.room.nodes} nodes of {self.room.gpus} GPUs"
        )

    def _hint_never(self, demand: Demand, like: int) -> str:
        counts = np.flatnonzero(self.book.curve(demand.model).samples_s[:, -1] > 0.0)
        if not len(counts):
            return "the model is too large for this cluster: give it more GPUs, or GPUs with more memory"
        some = ", ".join(map(str, counts[:6].tolist()))
        return f"num_gpus that any plan of the model can use: {some}{', …' * (len(counts) > 6)}"

    # --- what runs now ------------------------------------------------------------------------------------------------

    def held(self, curve: DemandCurve, number: int, plan: int, nodes: int, each: int, gpus: int) -> Footing:
        """What a running job does under its present plan, and the fewest CPUs with which it does so."""
        key = (id(curve), number, plan, nodes, each, gpus)
        if key not in self._held:
            self._held[key] = self._find_held(curve, number, plan, nodes, each, gpus)
        return self._held[key]

    def _find_held(self, curve: DemandCurve, number: int, plan: int, nodes: int, each: int, gpus: int) -> Footing:
        if plan == NO_PLAN:
            return Footing(curve.rate(gpus), 1, 0.0, plan)
        look = self.look_at(number, plan, gpus)
        for sla in (curve.sla, 0.0):  # a job below its promise still runs as it does
            single = DemandCurve((), _on(look, gpus), self.room, sla=sla, cpus=curve.cpus)
            found = single.footing((nodes, each))
            if found is not None:
                return found
        return Footing(curve.rate(gpus), 1, 0.0, plan)


def _on(look: BestPlanAt, gpus: int) -> BestPlanAt:
    """A look at one number of GPUs, because a gang that was placed by other means may lie unevenly."""
    return lambda _, nodes, cpus: look(gpus, nodes, cpus)


def _plan_text(code: int) -> str:
    return str(plan_of(code)) if code != NO_PLAN else "(none)"


@lru_cache(maxsize=64)
def library_of(book: PlanBook, room: Room, freedom: Freedom, doubt: float) -> Library:
    return Library(book, room, freedom, doubt)
