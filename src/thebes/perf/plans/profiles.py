"""Profiles of execution plans: one row per (model, plan, CPUs), written when the plan is first used.

There are far more plans than any run uses, so rows are not computed beforehand. The table that compiled code reads
stays in place while rows are added, and is exchanged for a larger one only when it is full.
"""

from __future__ import annotations

import numpy as np

from thebes.model.cluster import Cluster
from thebes.model.plan import Plan
from thebes.model.profiles import Profiles, shape_table
from thebes.perf.base import Times
from thebes.perf.plans.book import Outlook, PlanBook
from thebes.perf.plans.measured import as_where_measured, measured_of

FIRST_ROWS = 256


class PlanProfiles:
    """How fast plans run on this cluster: as measured where that was done, else by the book's model."""

    def __init__(self, book: PlanBook, cluster: Cluster, *, as_measured: bool) -> None:
        self.book = book
        self.cluster = cluster
        self.as_measured = as_measured and as_where_measured(book.site)
        self._rows: dict[tuple[int, Plan, int, int], int] = {}
        self.table = Profiles(
            first=np.zeros(FIRST_ROWS + 1, dtype=np.int64),
            compute_s=np.zeros(FIRST_ROWS),
            inner_s=np.zeros(FIRST_ROWS),
            wire_s=np.zeros(FIRST_ROWS),
            gamma=np.ones(1),  # the plan's own times know about overlap, so here all parts add up
        )

    def row(self, number: int, plan: Plan, cpus: int, gpus: int) -> int:
        """The row of this plan of this model (its number in the book), with so many CPUs for each of `gpus` GPUs."""
        key = (number, plan, cpus, gpus)
        if key not in self._rows:
            self._append(self.times(number, plan, cpus, gpus))
            self._rows[key] = len(self._rows)
        return self._rows[key]

    def times(self, number: int, plan: Plan, cpus: int, gpus: int) -> Times:
        """One iteration in each shape. Exposed traffic between nodes stands apart, because contention slows it down."""
        nodes, _ = shape_table(min(gpus, self.cluster.num_nodes))
        # No gang ever gets fewer nodes than can hold it, but the table has a place for such shapes. A plan that leaves
        # GPUs idle counts as spread as far as a plan of its size can be.
        nodes = np.clip(nodes, self.book.site.fewest_nodes(plan.gpus), plan.gpus)
        outlooks = {int(n): self._outlook(number, plan, int(n), cpus) for n in np.unique(nodes)}
        total_s = np.array([self._seconds(number, outlooks[int(n)], int(n), cpus) for n in nodes])
        wire_share = np.array([outlooks[int(n)].wire_s / outlooks[int(n)].iteration_s for n in nodes])
        return Times(total_s * (1.0 - wire_share), np.zeros(len(nodes)), total_s * wire_share)

    def _outlook(self, number: int, plan: Plan, nodes: int, cpus: int) -> Outlook:
        outlook = self.book.of(number, plan, nodes, cpus)
        assert outlook is not None, self.book.why_not(number, plan, nodes, cpus)
        return outlook

    def _seconds(self, number: int, outlook: Outlook, nodes: int, cpus: int) -> float:
        model, plan = self.book.models[number], outlook.plan
        known = None
        if self.as_measured:
            known = measured_of(model, plan, nodes, cpus)
        return outlook.iteration_s if known is None else known

    def _append(self, times: Times) -> None:
        at = len(self._rows)
        begin = int(self.table.first[at])
        end = begin + len(times.compute_s)
        if at + 1 >= len(self.table.first) or end > len(self.table.compute_s):
            self.table = _twice(self.table, end)
        for column, values in zip(("compute_s", "inner_s", "wire_s"), times, strict=True):
            getattr(self.table, column)[begin:end] = values
        self.table.first[at + 1] = end


def _twice(table: Profiles, needed: int) -> Profiles:
    """The same rows in a table with twice the room."""
    room = max(2 * len(table.compute_s), 2 * needed)
    first = np.zeros(2 * len(table.first), dtype=np.int64)
    first[: len(table.first)] = table.first
    columns = [np.zeros(room) for _ in range(3)]
    for new, old in zip(columns, (table.compute_s, table.inner_s, table.wire_s), strict=True):
        new[: len(old)] = old
    return Profiles(first, *columns, gamma=table.gamma)
