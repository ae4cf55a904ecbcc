"""The ledger: the arrays that policies see, and what can be asked of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from thebes.live.entries import Entry
from thebes.live.ledger import applying, planning, showing, snapshot
from thebes.live.ledger.drawing import sketch_for
from thebes.live.ledger.nodes import NodeSpec, cluster_of
from thebes.live.ledger.planning import Planned
from thebes.live.ledger.rows import ROOM, UNTOLD, records
from thebes.model import rules
from thebes.model.arrays import Ints
from thebes.model.decision import REASONS, workspace_for
from thebes.model.facts import LIVE
from thebes.model.jobs import HELD, NEVER, NO_QUOTA, JobTable
from thebes.model.machine import Machine, copy_of, machine_of
from thebes.model.view import View
from thebes.placement import Placement
from thebes.placement.strategies import SKEW, largest_gangs
from thebes.policy.base import Policy


class Ledger:
    """Rows are jobs in order of arrival; a row is given up when its job has ended and the table is packed."""

    def __init__(self, nodes: Sequence[NodeSpec], policy: Policy, placement: Placement, *, seed: int = 0) -> None:
        self.nodes = tuple(nodes)
        self.cluster = cluster_of(nodes)
        self.policy = policy
        self.placement = placement
        self.node_index = {node.name: i for i, node in enumerate(nodes)}
        self.strategy = placement.strategy(seed)
        self.quantum_s = policy.reads_every_s
        self.knowledge = LIVE
        self.machine = machine_of(self.cluster)
        self.tenants: list[str] = []
        self.limits: list[int] = []  # of each tenant; the table's quotas are what parked jobs leave of them
        self.blocked: frozenset[str] = frozenset()  # nodes
        self.sick: frozenset[int] = frozenset()  # GPUs
        self.services: list[float] = []
        self.memory: str | None = None  # what the policy remembers, as the journal keeps it
        self.shown: tuple[JobTable, Machine] | None = None  # copies that the last View has shown
        self.shown_cluster = cluster_of(nodes)
        self.room = workspace_for(self.machine)
        self.wake_s = NEVER
        self.now_s = 0.0
        self.last_finish_s = -NEVER
        self.ids: list[str] = []  # per row; empty: the job has left
        self.next_id = 0  # the number of the next job to arrive; none is ever given twice
        self.marks = np.zeros(ROOM, dtype=np.uint64)  # per row: stands for the id where all ids would take too long
        self.fates = np.full(ROOM, UNTOLD, dtype=np.int16)  # per row: what the last decision said
        self.row_of: dict[str, int] = {}  # rows ascend: they are given in order, and packing keeps it
        self.parked: set[str] = set()  # known, but not to be scheduled: held by the user, or on a node that is blocked
        self.held_by_user: set[str] = set()
        self.gang_classes = rules.GangClasses(by_skew=placement.code == SKEW)
        self.models: dict[str, int] = {}  # numbers in the order in which models first came
        self.packing = False  # whether jobs may be packed, and what is known about it
        self.rates: dict[str, float] = {}  # steps per second alone, of jobs that may be packed
        self.guests: dict[str, str] = {}  # guest -> host
        self.undone: list[tuple[frozenset[str], float]] = []  # pairs that did not pay, and when
        self.slots_used = 0
        self.table = JobTable(records(ROOM), np.zeros(4 * ROOM, dtype=np.int64), np.array([NO_QUOTA], dtype=np.int64))
        self.sketch = sketch_for(self.table, self.machine)

    def apply(self, entry: Entry) -> None:
        """The one way in: nothing else changes a ledger."""
        applying.apply(self, entry)

    def view(self, now_s: float) -> View:
        """What the policy sees: copies of all that it could write to, so that the ledger stays as it is."""
        return showing.view_of(self, now_s)

    def digest(self, now_s: float) -> str:
        """A fingerprint of all that the policy sees."""
        return showing.digest_of(self, now_s)

    def decide(self, now_s: float, *, fingerprint: bool = True) -> tuple[Planned, View]:
        """Ask the policy. Its answer is checked, and what it remembers written down; nothing has changed yet."""
        return planning.plan(self, now_s, fingerprint=fingerprint)

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """All of it, to begin a journal with. The table is packed first, and is the very same when restored."""
        return snapshot.snapshot_of(self, now_s)

    @classmethod
    def restore(cls, body: Mapping[str, Any], policy: Policy, placement: Placement, *, seed: int = 0) -> Ledger:
        """The ledger as it was when its snapshot was taken."""
        ledger = cls([NodeSpec(*listed) for listed in body["nodes"]], policy, placement, seed=seed)
        snapshot.fill(ledger, body)
        return ledger

    def moved_to(
        self, nodes: Sequence[NodeSpec], policy: Policy, placement: Placement, gpu_types: Mapping[str, str | None]
    ) -> Ledger:
        """The same jobs on another cluster, or under another policy."""
        moved = Ledger.restore(self.snapshot(self.now_s), self.policy, self.placement)
        body = snapshot.moved_elsewhere(moved, Ledger(nodes, policy, placement), gpu_types)
        return Ledger.restore(body, policy, placement)

    def copy(self) -> Ledger:
        """An independent one, to look ahead with."""
        other = copy.copy(self)
        other.table = JobTable(*(array.copy() for array in self.table))
        other.machine = copy_of(self.machine)
        other.marks, other.fates = self.marks.copy(), self.fates.copy()
        other.limits = list(self.limits)
        other.tenants, other.services, other.ids = list(self.tenants), list(self.services), list(self.ids)
        other.row_of, other.gang_classes = dict(self.row_of), self.gang_classes.copy()
        other.models, other.room, other.shown = dict(self.models), workspace_for(self.machine), None
        other.parked, other.held_by_user = set(self.parked), set(self.held_by_user)
        other.rates, other.guests, other.undone = dict(self.rates), dict(self.guests), list(self.undone)
        other.sketch = sketch_for(other.table, other.machine)
        return other

    # -- what is asked of it ------------------------------------------------------------------------------------------

    def gpus_of(self, job_id: str) -> tuple[int, ...]:
        """The GPUs that the job holds, or none."""
        row = self.row_of[job_id]
        job = self.table.jobs[row]
        if job["phase"] != HELD:
            return ()
        return tuple(self.table.slots[job["first_slot"] : job["first_slot"] + job["width"]].tolist())

    def held_gpus(self, job_id: str) -> tuple[int, ...]:
        """The same, and none for a job that the ledger does not know."""
        return self.gpus_of(job_id) if job_id in self.row_of else ()

    def shares_gpus(self, job_id: str) -> bool:
        """Whether it was given less than whole GPUs."""
        row = self.row_of.get(job_id)
        return row is not None and bool(self.table.jobs["share"][row] < 1.0)

    def holds(self, job_id: str) -> bool:
        row = self.row_of.get(job_id)
        return row is not None and self.table.jobs["phase"][row] == HELD

    def holders(self) -> list[str]:
        """All jobs that hold GPUs, in order of arrival."""
        rows = np.flatnonzero(self.table.jobs["phase"][: len(self.ids)] == HELD)
        return [self.ids[row] for row in rows.tolist()]

    def costs_of(self, job_id: str) -> tuple[float, float]:
        """What suspending and resuming the job is expected to take."""
        row = self.row_of.get(job_id)
        return (0.0, 0.0) if row is None else tuple(self.table.jobs[["suspend_s", "resume_s"]][row].tolist())

    def pace_of(self, job_id: str) -> tuple[float, float]:
        """What was told last of a job: its speed, and one iteration at full speed; NaN if it was never measured."""
        row = self.row_of.get(job_id)
        return (np.nan, np.nan) if row is None else tuple(self.table.jobs[["speed", "full_s"]][row].tolist())

    def knows(self, job_id: str) -> bool:
        return job_id in self.row_of

    def local(self, gpu: int) -> tuple[str, int]:
        """Node and number on that node of a GPU."""
        node = int(self.cluster.gpu_node[gpu])
        return self.nodes[node].name, gpu - int(self.cluster.node_first_gpu[node])

    def parts(self, gpus: Iterable[int]) -> list[tuple[str, tuple[int, ...]]]:
        """A gang's GPUs by node, in the order of the cluster: neighbours in the network have neighbouring ranks."""
        found: dict[str, list[int]] = {}
        for gpu in sorted(gpus):
            node, number = self.local(gpu)
            found.setdefault(node, []).append(number)
        return [(node, tuple(numbers)) for node, numbers in found.items()]

    def gpu_number(self, node: str, index: int) -> int:
        return int(self.cluster.node_first_gpu[self.node_index[node]]) + index

    def gpu_at(self, node: str, number: int) -> int | None:
        at = self.node_index.get(node)
        return None if at is None or number >= self.nodes[at].gpus else self.gpu_number(node, number)

    def kinds_for(self, gpu_type: str | None) -> int:
        """Node kinds, as bits, whose GPUs suit."""
        return rules.kinds_that_suit(self.cluster, gpu_type)

    def never_fits(self, gpus: int, nodes: int | None, gpu_type: str | None) -> str:
        """Why such a job can never run on this cluster with all its nodes up; empty if it can."""
        largest = largest_gangs(machine_of(self.cluster), self.placement.code)
        return rules.never_runs(self.cluster, largest, gpus, nodes or 0, self.kinds_for(gpu_type), gpu_type)

    def fate_of(self, job_id: str) -> int:
        """What the last decision said of the job: HOLDS, a reason to wait, or UNTOLD."""
        row = self.row_of.get(job_id)
        return UNTOLD if row is None else int(self.fates[row])

    def reason(self, fate: int) -> str:
        return REASONS[fate]

    def scheduled(self) -> Ints:
        """Rows that the policy sees."""
        if self.parked:
            return np.array([row for job, row in self.row_of.items() if job not in self.parked], dtype=np.int64)
        return np.fromiter(self.row_of.values(), np.int64, len(self.row_of))
