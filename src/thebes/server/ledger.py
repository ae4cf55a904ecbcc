"""What the live scheduler knows, in the very arrays that policies see in the simulator, and how it changes.

The ledger changes only through `apply(entry)`, with entries that can be written down: so the journal of entries is the
ledger, a restarted controller gets its own back, and any decision can be made again from the journal (`replay`).
It does no I/O and has no clock; entries carry their time. The rules are those of `thebes.sim.world`, except that when a
job begins to run, and when it ends, is told by entries instead of being computed ahead.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thebes.model.cluster import Cluster, NodeKind, build
from thebes.model.compiled import plain
from thebes.model.decision import FAULTS, HOLDS, NO_GPUS, REASONS, Decision, diff, fault_in, workspace_for
from thebes.model.errors import UserError
from thebes.model.jobs import FINISHED, HELD, JOB, NEVER, NO_QUOTA, WAITING, JobTable
from thebes.model.machine import BLOCKED, copy_of, machine_of, occupy, release, set_free
from thebes.model.view import DISTRIBUTION, JobsView, Sketch, View
from thebes.node.packing import Rules
from thebes.perf.models import UNKNOWN_MEMORY_GIB, UNKNOWN_STATE_GIB, UNKNOWN_UTILISATION, catalogue
from thebes.placement import Placement
from thebes.placement.strategies import SKEW
from thebes.policy.base import Policy
from thebes.policy.packing import pair_up
from thebes.policy.priority import PriorityPolicy, ticks_until

Entry = Mapping[str, Any]
IntArray = npt.NDArray[np.int64]

ROOM = 256  # rows to begin with; doubles
SERVICES_KEPT = 50_000
FORMAT = 1
UNTOLD = -1  # the fate of a job that no decision has been about


@dataclass(frozen=True)
class NodeSpec:
    """A node of the live cluster, as the ledger needs it."""

    name: str
    gpus: int
    gpu_type: str = ""
    memory_gib: float | None = None
    rack: str = ""


def cluster_of(nodes: Sequence[NodeSpec]) -> Cluster:
    """The cluster that policies see: the nodes in this order, which must be rack by rack."""
    racks = {rack: at for at, rack in enumerate(dict.fromkeys(n.rack for n in nodes))}
    groups = [(NodeKind(n.gpus, gpu_type=n.gpu_type, gpu_memory_gib=n.memory_gib), 1, [racks[n.rack]]) for n in nodes]
    built = build("live", groups)
    return Cluster(
        built.name, built.kinds, built.node_kind, built.node_rack, tuple(n.name for n in nodes), dict(built.links)
    )


@dataclass(frozen=True, eq=False)
class Planned:
    """A decision in words that outlive row numbers: job ids and GPU numbers of the cluster."""

    now_s: float
    digest: str  # of the View it was made from
    suspend: tuple[str, ...]
    start: tuple[tuple[str, tuple[int, ...]], ...]
    migrate: tuple[tuple[str, tuple[int, ...]], ...]
    promote: tuple[str, ...]
    queues: IntArray | None
    fates: IntArray
    wake_s: float
    memory: object
    guests: tuple[tuple[str, str], ...] = ()  # (guest, host): packed on the host's GPU

    def entry(self) -> dict[str, Any]:
        """As an entry to apply and to keep."""
        return {
            "op": "decide",
            "t": self.now_s,
            "digest": self.digest,
            "suspend": list(self.suspend),
            "start": [[job, list(gpus)] for job, gpus in self.start],
            "migrate": [[job, list(gpus)] for job, gpus in self.migrate],
            "promote": list(self.promote),
            "queues": None if self.queues is None else _packed_small(self.queues),
            "fates": _packed_small(self.fates),
            "wake_s": None if self.wake_s == NEVER else self.wake_s,
            "memory": _packed_object(self.memory),
            "guests": [list(pair) for pair in self.guests],
        }

    @property
    def changes(self) -> bool:
        return bool(self.suspend or self.start or self.migrate or self.promote or self.guests)


class Ledger:
    """Rows are jobs in order of arrival; a row is given up when its job has ended and the table is packed."""

    def __init__(self, nodes: Sequence[NodeSpec], policy: Policy, placement: Placement, *, seed: int = 0) -> None:
        self.nodes = tuple(nodes)
        self.cluster = cluster_of(nodes)
        self.policy = policy
        self.placement = placement
        self.node_index = {node.name: i for i, node in enumerate(nodes)}
        self.strategy = placement.strategy(seed)
        self.quantum_s = policy.rule().quantum_s if isinstance(policy, PriorityPolicy) else 0.0
        self.machine = machine_of(self.cluster)
        self.tenants: list[str] = []
        self.limits: list[int] = []  # of each tenant; the table's quotas are what parked jobs leave of them
        self.blocked: frozenset[str] = frozenset()  # nodes
        self.sick: frozenset[int] = frozenset()  # GPUs
        self.services: list[float] = []
        self.memory: object = None
        self.wake_s = NEVER
        self.now_s = 0.0
        self.ids: list[str] = []  # per row; empty: the job has left
        self.marks = np.zeros(ROOM, dtype=np.uint64)  # per row: stands for the id where all ids would take too long
        self.fates = np.full(ROOM, UNTOLD, dtype=np.int16)  # per row: what the last decision said
        self.row_of: dict[str, int] = {}  # rows ascend: they are given in order, and packing keeps it
        self.parked: set[str] = set()  # known, but not to be scheduled: held by the user, or on a node that is blocked
        self.held_by_user: set[str] = set()
        self.gang_classes: dict[tuple[int, int, int, float], int] = {}
        self.packing = False  # whether jobs may be packed, and what is known about it
        self.rates: dict[str, float] = {}  # steps per second alone, of jobs that may be packed
        self.guests: dict[str, str] = {}  # guest -> host
        self.undone: list[tuple[frozenset[str], float]] = []  # pairs that did not pay, and when
        self.slots_used = 0
        self.table = JobTable(_records(ROOM), np.zeros(4 * ROOM, dtype=np.int64), np.array([NO_QUOTA], dtype=np.int64))
        self._redraw()

    # -- what is asked of it ------------------------------------------------------------------------------------------

    def gpus_of(self, job_id: str) -> tuple[int, ...]:
        """The GPUs that the job holds, or none."""
        row = self.row_of[job_id]
        job = self.table.jobs[row]
        if job["phase"] != HELD:
            return ()
        return tuple(self.table.slots[job["first_slot"] : job["first_slot"] + job["gpus"]].tolist())

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

    def kinds_for(self, gpu_type: str | None) -> int:
        """Node kinds, as bits, whose GPUs suit; an unknown type on the node's side suits everybody."""
        if not gpu_type:
            return (1 << len(self.cluster.kinds)) - 1
        types = {name.strip().lower() for name in gpu_type.split("|")}
        return sum(
            1 << k
            for k, kind in enumerate(self.cluster.kinds)
            if not kind.gpu_type or any(t in kind.gpu_type.lower() for t in types)
        )

    def never_fits(self, gpus: int, nodes: int | None, gpu_type: str | None) -> str:
        """Why such a job can never run on this cluster with all its nodes up; empty if it can."""
        kinds = self.kinds_for(gpu_type)
        if not kinds:
            types = sorted({kind.gpu_type for kind in self.cluster.kinds if kind.gpu_type})
            return f"no node has GPUs of type {gpu_type} (there are: {', '.join(types)})"
        share = gpus // nodes if nodes else 0
        best = 0
        for kind in range(len(self.cluster.kinds)):
            if not (kinds >> kind) & 1:
                continue
            here = self.cluster.node_gpus[self.cluster.node_kind == kind]
            best = max(best, int(here.sum()))
            if here.sum() >= gpus and (not nodes or (here >= share).sum() >= nodes):
                return ""
        if nodes and best >= gpus:
            return f"there are not {nodes} nodes with {share} GPUs each ({self.cluster.describe()})"
        return f"it asks for {gpus} GPUs, the cluster has {best} that it could use together"

    def fate_of(self, job_id: str) -> int:
        """What the last decision said of the job: HOLDS, a reason to wait, or UNTOLD."""
        row = self.row_of.get(job_id)
        return UNTOLD if row is None else int(self.fates[row])

    def _scheduled(self) -> IntArray:
        """Rows that the policy sees."""
        if self.parked:
            return np.array([row for job, row in self.row_of.items() if job not in self.parked], dtype=np.int64)
        return np.fromiter(self.row_of.values(), np.int64, len(self.row_of))

    def view(self, now_s: float) -> View:
        now_s = float(now_s)  # compiled code that first sees a whole number would take only whole numbers from then on
        rows = self._scheduled()
        needs = self.policy.needs
        services = np.array(self.services if DISTRIBUTION in needs else [])
        return View(
            now_s=now_s,
            cluster=self.cluster,
            jobs=JobsView(self.table, rows, now_s, needs),
            machine=self.machine,
            _table=self.table,
            _sketch=self.sketch,
            _strategy=self.strategy,
            _gang_classes=max(1, len(self.gang_classes)),
            finished_gpu_s=services,
            memory=self.memory,
            tenants=tuple(self.tenants) or ("",),
        )

    def digest(self, view: View) -> str:
        """A fingerprint of all that the policy saw. Every decision has one: of 20,000 jobs it takes 6 ms."""
        what, rows = hashlib.sha256(), len(self.ids)
        what.update(repr((view.now_s, sorted(self.blocked), self.tenants, _words(self.memory))).encode())
        what.update(self.table.jobs[:rows].view(np.uint8))  # without a copy, so with those that have left
        what.update(self.marks[:rows])
        what.update(np.ascontiguousarray(view.jobs.rows))
        what.update(np.ascontiguousarray(self.machine.gpus["owner"]))
        what.update(self.table.quotas)
        what.update(np.ascontiguousarray(view.finished_gpu_s))
        if self.packing:
            what.update(repr((self.rates, self.guests, [(sorted(p), t) for p, t in self.undone])).encode())
        return what.hexdigest()[:32]

    def decide(self, now_s: float, *, fingerprint: bool = True) -> tuple[Planned, View]:
        """Ask the policy; the answer is checked, and nothing has changed yet."""
        now_s = max(float(now_s), self.now_s)
        view = self.view(now_s)
        digest = self.digest(view) if fingerprint else ""
        if not len(view.jobs):
            return Planned(now_s, digest, (), (), (), (), None, np.zeros(0, dtype=np.int64), NEVER, None), view
        decision = self.policy.decide(view)
        self._check(decision, view)
        actions = diff(self.table, view.jobs.rows, decision)
        jobs = self.table.jobs["gpus"]

        def named(position: int) -> tuple[str, tuple[int, ...]]:
            row, at = int(decision.rows[position]), int(actions.offset[position])
            return self.ids[row], tuple(decision.gpus[at : at + int(jobs[row])].tolist())

        return (
            Planned(
                now_s=now_s,
                digest=digest,
                suspend=tuple(self.ids[row] for row in actions.suspend),
                start=tuple(named(i) for i in actions.start.tolist()),
                migrate=tuple(named(i) for i in actions.migrate.tolist()),
                promote=tuple(self.ids[row] for row in decision.promote),
                queues=decision.queues,
                fates=decision.fate,
                wake_s=float(decision.wake_s),
                memory=decision.memory,
                guests=self._paired(decision, view) if self.packing else (),
            ),
            view,
        )

    def _paired(self, decision: Decision, view: View) -> tuple[tuple[str, str], ...]:
        """Waiting jobs that shall be guests of running ones, on top of the policy's decision."""
        jobs = self.table.jobs
        taken = {*self.guests, *self.guests.values()}
        waiting: list[str] = []
        hosts: list[str] = []
        for row, fate in zip(view.jobs.rows.tolist(), decision.fate.tolist(), strict=True):
            job = self.ids[row]
            if jobs["gpus"][row] != 1 or job not in self.rates or job in taken:
                continue
            runs = jobs["phase"][row] == HELD and jobs["run_from_s"][row] < view.now_s
            if fate == HOLDS and runs:
                hosts.append(job)
            elif fate == NO_GPUS and jobs["phase"][row] == WAITING:
                waiting.append(job)
        recent = {pair for pair, at_s in self.undone if view.now_s - at_s < Rules().retry_after_s}
        return pair_up(waiting, hosts, recent)

    def _check(self, decision: object, view: View) -> None:
        label = self.policy.label
        if not isinstance(decision, Decision):
            raise UserError(f"policy {label}: decide returned {type(decision).__name__}, not a Decision")
        fault, row = fault_in(self.table, self.machine, decision, workspace_for(self.machine))
        if fault:
            who = f" (job {self.ids[row]})" if 0 <= row < len(self.ids) else ""
            raise UserError(
                f"policy {label}: its decision {FAULTS[fault]}{who}",
                hint="nothing was changed; this is a bug of the policy",
            )
        if not decision.wake_s > view.now_s:
            late_s = view.now_s - decision.wake_s
            raise UserError(f"policy {label}: it asks to be woken {late_s:g} s ago, which is not in the future")
        if len(decision.fate) != len(view.jobs):
            raise UserError(f"policy {label}: it tells the fate of {len(decision.fate)} of {len(view.jobs)} jobs")

    def reason(self, fate: int) -> str:
        return REASONS[fate]

    # -- how it changes -----------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> None:
        """The one way in. Entries are plain data: {"op": …, "t": seconds, …}."""
        self.now_s = max(self.now_s, float(entry["t"]))
        getattr(self, f"_{entry['op']}")(entry)

    def _arrive(self, e: Entry) -> None:
        """A job is to be scheduled from now on."""
        self._make_room(int(e["gpus"]))
        row, jobs = len(self.ids), self.table.jobs
        self.ids.append(e["job"])
        self.row_of[e["job"]] = row
        record = np.zeros(1, dtype=JOB)[0]
        model = catalogue().get(e.get("model") or "")
        record["gpus"], record["submit_s"], record["work_s"], record["left_s"] = e["gpus"], e["submit_s"], NEVER, NEVER
        record["kinds"], record["want_nodes"] = self.kinds_for(e.get("gpu_type")), e.get("nodes") or 0
        record["skew"] = model.skew if model else 0.0
        record["state_gib"] = model.state_gib if model else UNKNOWN_STATE_GIB
        record["priority"], record["tenant"] = e.get("priority", 0), self._tenant(e["tenant"])
        record["suspend_s"], record["resume_s"] = e.get("suspend_s", 0.0), e.get("resume_s", 0.0)
        record["min_gpus"] = record["max_gpus"] = record["width"] = e["gpus"]
        record["memory_gib"] = model.memory_gib if model else UNKNOWN_MEMORY_GIB
        record["utilisation"] = model.utilisation if model else UNKNOWN_UTILISATION
        record["first_slot"], record["speed"], record["share"] = self.slots_used, 1.0, 1.0
        record["first_start_s"] = record["run_from_s"] = record["paced_s"] = record["finish_s"] = NEVER
        record["saved_s"] = -NEVER
        record["phase"], record["since_s"], record["queue_since_s"] = WAITING, e["t"], e["t"]
        jobs[row] = record
        self.marks[row], self.fates[row] = _mark(e["job"]), UNTOLD
        jobs["gang_class"][row] = self._gang_class(jobs[row])
        self.slots_used += int(e["gpus"])

    def _leave(self, e: Entry) -> None:
        """The job has ended, in whatever way; `completed` adds its service to what policies may learn from."""
        row = self.row_of[e["job"]]
        if self.table.jobs["phase"][row] == HELD:
            self._let_go(row, e["t"])
        if e.get("completed"):
            job = self.table.jobs[row]
            self.services.append(float(job["executed_s"] * job["gpus"]))
            del self.services[:-SERVICES_KEPT]
        self.table.jobs["phase"][row] = FINISHED
        self.rates.pop(e["job"], None)
        self.guests.pop(e["job"], None)
        del self.row_of[e["job"]]
        self.ids[row] = ""
        self.held_by_user.discard(e["job"])
        if e["job"] in self.parked:
            self.parked.discard(e["job"])
            self._block()

    def _ran(self, e: Entry) -> None:
        """The job that was given GPUs has begun to run on them."""
        row = self.row_of.get(e["job"])
        if row is not None and self.table.jobs["phase"][row] == HELD:
            self.table.jobs["run_from_s"][row] = max(float(e["t"]), float(self.table.jobs["since_s"][row]))

    def _rate(self, e: Entry) -> None:
        """How fast a job that may be packed runs alone."""
        if e["job"] in self.row_of:
            self.rates[e["job"]] = float(e["steps_per_s"])

    def _part(self, e: Entry) -> None:
        """A guest leaves its host; `undone`: because the two did not pay."""
        host = self.guests.pop(e["job"], None)
        if host is not None and e.get("undone"):
            self.undone = [*self.undone[-99:], (frozenset((e["job"], host)), float(e["t"]))]

    def _back(self, e: Entry) -> None:
        """A job that held GPUs waits again, without the policy having decided so: it failed, was lost or asked to."""
        row = self.row_of[e["job"]]
        if self.table.jobs["phase"][row] == HELD:
            self._let_go(row, e["t"])
            if e["job"] in self.parked:
                self._block()

    def _hold(self, e: Entry) -> None:
        """Held by the user: known, but not to be scheduled."""
        self._back(e)
        self.held_by_user.add(e["job"])
        self.parked.add(e["job"])

    def _release(self, e: Entry) -> None:
        row = self.row_of[e["job"]]
        self.held_by_user.discard(e["job"])
        self.parked.discard(e["job"])
        self.table.jobs["since_s"][row] = e["t"]  # the wait that the user chose earns nothing

    def _set(self, e: Entry) -> None:
        """New facts about a job: its priority, or what suspending and resuming it costs."""
        row = self.row_of.get(e["job"])
        if row is not None:
            for name in ("priority", "suspend_s", "resume_s"):
                if name in e:
                    self.table.jobs[name][row] = e[name]

    def _quota(self, e: Entry) -> None:
        at = self._tenant(e["tenant"])
        self.limits[at] = NO_QUOTA if e["gpus"] is None else e["gpus"]
        self._share_quotas()

    def _nodes(self, e: Entry) -> None:
        """These nodes are down or drained, these GPUs sick: nothing new goes there, what is there stays."""
        self.blocked = frozenset(e["blocked"])
        self.sick = frozenset(e.get("sick", ()))
        self._block()

    def _decide(self, e: Entry) -> None:
        """Carry a decision out."""
        now_s, jobs = e["t"], self.table.jobs
        rows = self._scheduled()
        for job in e["promote"]:
            row = self.row_of[job]
            jobs["age_s"][row] = jobs["unread_s"][row] = jobs["aged_wait_s"][row] = 0.0
            jobs["waited_s"][row] += now_s - jobs["since_s"][row]
            jobs["since_s"][row] = jobs["queue_since_s"][row] = now_s
            jobs["promotions"][row] += 1
            jobs["queue"][row] = 0
        for job in e["suspend"]:
            row = self.row_of[job]
            self._let_go(row, now_s)
            jobs["preemptions"][row] += 1
        for job, _ in e["migrate"]:
            self._let_go(self.row_of[job], now_s)
            jobs["migrations"][self.row_of[job]] += 1
        for job, gpus in [*e["migrate"], *e["start"]]:
            self.guests.pop(job, None)
            self._take(self.row_of[job], gpus, now_s)
        for guest, host in e.get("guests", ()):
            self.guests[guest] = host
        if e["queues"] is not None:
            queues = _unpacked_small(e["queues"])
            before = jobs["queue"][rows]
            moved = queues != before
            jobs["demotions"][rows] += queues > before
            jobs["queue"][rows[moved]], jobs["queue_since_s"][rows[moved]] = queues[moved], now_s
        self.fates[rows] = _unpacked_small(e["fates"])
        self.wake_s = NEVER if e["wake_s"] is None else float(e["wake_s"])
        self.memory = _unpacked_object(e["memory"])

    # -- holding and letting go, as in thebes.sim.world ---------------------------------------------------------------

    def _take(self, row: int, gpus: Sequence[int], now_s: float) -> None:
        jobs = self.table.jobs
        job = jobs[row]
        wait_s = now_s - float(job["since_s"])
        jobs["waited_s"][row] += wait_s
        if job["first_start_s"] < NEVER:
            jobs["aged_wait_s"][row] += wait_s
        else:
            jobs["first_start_s"][row] = now_s
        slots = self.table.slots[job["first_slot"] : job["first_slot"] + job["gpus"]]
        slots[:] = gpus
        occupy(self.machine, np.int64(row), slots)
        jobs["phase"][row], jobs["since_s"][row] = HELD, now_s
        jobs["run_from_s"][row] = jobs["ready_s"][row] = NEVER
        nodes = {int(self.cluster.gpu_node[gpu]) for gpu in gpus}
        jobs["nodes"][row], jobs["node_kind"][row] = len(nodes), int(self.cluster.node_kind[min(nodes)])
        jobs["holds"][row] += 1

    def _let_go(self, row: int, now_s: float) -> None:
        jobs = self.table.jobs
        job = jobs[row]
        if self.ids[row] not in self.parked:
            release(self.machine, self.table.slots[job["first_slot"] : job["first_slot"] + job["gpus"]])
        for guest in [guest for guest, host in self.guests.items() if host == self.ids[row]]:
            del self.guests[guest]
        ran_s = max(0.0, now_s - float(job["run_from_s"])) if job["run_from_s"] < NEVER else 0.0
        jobs["executed_s"][row] += ran_s
        jobs["age_s"][row] += ran_s
        jobs["unread_s"][row] = self._unread_after(job, ran_s, now_s)
        jobs["phase"][row], jobs["since_s"][row], jobs["run_from_s"][row] = WAITING, now_s, NEVER

    def _unread_after(self, job: Any, ran_s: float, now_s: float) -> float:
        """As the simulator does: the running time that no tick of the policy's clock has read."""
        if self.quantum_s <= 0.0:
            return 0.0
        last_tick_s = _ticks(self.quantum_s, now_s) * self.quantum_s
        if last_tick_s > job["since_s"]:
            return max(0.0, now_s - max(last_tick_s, float(job["run_from_s"]))) if job["run_from_s"] < NEVER else 0.0
        return float(job["unread_s"]) + ran_s

    # -- the table's own housekeeping ---------------------------------------------------------------------------------

    def _tenant(self, name: str) -> int:
        if name not in self.tenants:
            self.tenants.append(name)
            self.limits.append(NO_QUOTA)
            if len(self.tenants) > len(self.table.quotas):
                quotas = np.full(2 * len(self.table.quotas), NO_QUOTA, dtype=np.int64)
                quotas[: len(self.table.quotas)] = self.table.quotas
                self.table = self.table._replace(quotas=quotas)
        return self.tenants.index(name)

    def _gang_class(self, job: Any) -> int:
        skew = float(job["skew"]) if self.placement.code == SKEW else 0.0
        key = (int(job["gpus"]), int(job["kinds"]), int(job["want_nodes"]), skew)
        return self.gang_classes.setdefault(key, len(self.gang_classes))

    def _classify(self) -> None:
        """Number the kinds of gangs anew, in order of appearance."""
        self.gang_classes = {}
        jobs = self.table.jobs[: len(self.ids)]
        if not len(jobs):
            return
        keys = np.stack([jobs[name].astype(np.float64) for name in ("gpus", "kinds", "want_nodes", "skew")])
        order = np.lexsort(keys)  # stable: of equal ones, the first comes first
        is_new = np.concatenate(([True], (keys[:, order[1:]] != keys[:, order[:-1]]).any(axis=0)))
        firsts = order[is_new]
        numbers = np.zeros(len(firsts), dtype=np.int64)
        for at in np.argsort(firsts).tolist():
            numbers[at] = self._gang_class(jobs[firsts[at]])
        jobs["gang_class"][order] = numbers[np.cumsum(is_new) - 1]

    def _make_room(self, gpus: int) -> None:
        dead = len(self.ids) - len(self.row_of)
        if dead > 1000 and dead > len(self.row_of):
            self._pack()
        jobs, slots = self.table.jobs, self.table.slots
        if len(self.ids) == len(jobs):
            more = _records(2 * len(jobs))
            more[: len(jobs)] = jobs
            jobs = more
            self.marks, self.fates = _longer(self.marks, len(jobs)), _longer(self.fates, len(jobs))
        if self.slots_used + gpus > len(slots):
            slots = np.concatenate((slots, np.zeros(max(gpus, len(slots)), dtype=np.int64)))
        if jobs is not self.table.jobs or slots is not self.table.slots:
            self.table = JobTable(jobs, slots, self.table.quotas)
            self._redraw()

    def _pack(self) -> None:
        """Give up the rows of jobs that have left. Order stays, so policies notice nothing."""
        alive = sorted(self.row_of.values())
        jobs = _records(max(ROOM, 2 * len(alive)))
        jobs[: len(alive)] = self.table.jobs[alive]
        self.marks, self.fates = _longer(self.marks[alive], len(jobs)), _longer(self.fates[alive], len(jobs))
        self.ids = [self.ids[row] for row in alive]
        self.row_of = {job: row for row, job in enumerate(self.ids)}
        counts = jobs["gpus"][: len(alive)]
        jobs["first_slot"][: len(alive)] = np.concatenate(([0], np.cumsum(counts)[:-1])) if len(alive) else 0
        self.slots_used = int(counts.sum())
        moved_by = self.table.jobs["first_slot"][alive] - jobs["first_slot"][: len(alive)]
        slots = self.table.slots[np.arange(self.slots_used) + np.repeat(moved_by, counts)]
        slots = np.concatenate((slots, np.zeros(max(4 * ROOM, self.slots_used), dtype=np.int64)))
        self.table = JobTable(jobs, slots, self.table.quotas)
        self._classify()
        self._block()

    def _redraw(self) -> None:
        self.sketch = Sketch(
            copy_of(self.machine), self.table.slots.copy(), np.zeros(len(self.table.jobs), dtype=np.bool_)
        )

    def _block(self) -> None:
        """Draw the machine anew: who holds what, and what nobody can have.

        A job with GPUs on a blocked node cannot be moved and is parked: its GPUs, also those on other nodes, count as
        taken until it ends.
        """
        self.machine = machine_of(self.cluster)
        self.parked = set(self.held_by_user)
        unusable = {
            gpu
            for gpu in range(self.cluster.total_gpus)
            if gpu in self.sick or self.nodes[int(self.cluster.gpu_node[gpu])].name in self.blocked
        }
        holders = self.holders()
        self.parked.update(job for job in holders if unusable.intersection(self.gpus_of(job)))
        taken = set(unusable)
        for job in holders:
            if job in self.parked:
                taken.update(self.gpus_of(job))
            else:
                row = self.row_of[job]
                first = int(self.table.jobs["first_slot"][row])
                gpus = self.table.slots[first : first + int(self.table.jobs["gpus"][row])]
                occupy(self.machine, np.int64(row), gpus)
        for gpu in taken:
            node = int(self.cluster.gpu_node[gpu])
            self.machine.gpus["owner"][gpu] = BLOCKED
            self.machine.kinds["total"][int(self.cluster.node_kind[node])] -= 1
            set_free(self.machine, np.int64(node), np.int64(int(self.machine.nodes["free"][node]) - 1))
        self._share_quotas()
        self._redraw()

    def _share_quotas(self) -> None:
        """Policies do not see parked jobs, but what those hold is part of their tenant's quota."""
        self.table.quotas[: len(self.limits)] = self.limits
        for job in self.parked:
            record = self.table.jobs[self.row_of[job]]
            if record["phase"] == HELD and self.limits[record["tenant"]] != NO_QUOTA:
                self.table.quotas[record["tenant"]] -= record["gpus"]

    # -- snapshot -----------------------------------------------------------------------------------------------------

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """All of it, to begin a journal with. Packs the table first, so that who restores it has the very same one."""
        self._pack()
        count = len(self.ids)
        return {
            "format": FORMAT,
            "t": now_s,
            "nodes": [_listed(n) for n in self.nodes],
            "policy": self.policy.label,
            "placement": self.placement.name,
            "ids": list(self.ids),
            "dtype": [[name, str(JOB[name])] for name in JOB.names or ()],
            "jobs": _packed(self.table.jobs[:count].tobytes()),
            "slots": _packed(self.table.slots[: self.slots_used].tobytes()),
            "tenants": list(self.tenants),
            "quotas": [None if limit == NO_QUOTA else int(limit) for limit in self.limits],
            "blocked": sorted(self.blocked),
            "sick": sorted(self.sick),
            "held": sorted(self.held_by_user),
            "services": _packed(np.array(self.services).tobytes()),
            "packing": self.packing,
            "rates": dict(self.rates),
            "guests": dict(self.guests),
            "undone": [[sorted(pair), at_s] for pair, at_s in self.undone],
            "memory": _packed_object(self.memory),
            "wake_s": None if self.wake_s == NEVER else self.wake_s,
            "now_s": self.now_s,
        }

    @classmethod
    def restore(cls, body: Mapping[str, Any], policy: Policy, placement: Placement, *, seed: int = 0) -> Ledger:
        """The ledger as it was. Fields that later versions of Thebes added are zero."""
        nodes = [NodeSpec(*listed) for listed in body["nodes"]]
        ledger = cls(nodes, policy, placement, seed=seed)
        stored = np.frombuffer(_unpacked(body["jobs"]), dtype=np.dtype([(n, t) for n, t in body["dtype"]]))
        count = len(stored)
        jobs = _records(max(ROOM, 2 * count))
        for name in JOB.names or ():
            if name in (stored.dtype.names or ()):
                jobs[name][:count] = stored[name]
        if "width" not in (stored.dtype.names or ()):  # written before jobs could share GPUs or change their number
            for name in ("min_gpus", "max_gpus", "width"):
                jobs[name][:count] = stored["gpus"]
            jobs["share"][:count], jobs["paced_s"][:count] = 1.0, NEVER
        slots = np.frombuffer(_unpacked(body["slots"]), dtype=np.int64)
        ledger.slots_used = len(slots)
        ledger.tenants = list(body["tenants"])
        quotas = np.full(max(1, len(ledger.tenants)), NO_QUOTA, dtype=np.int64)
        ledger.limits = [NO_QUOTA if quota is None else quota for quota in body["quotas"]]
        ledger.table = JobTable(
            jobs, np.concatenate((slots, np.zeros(max(4 * ROOM, len(slots)), dtype=np.int64))), quotas
        )
        ledger.ids = list(body["ids"])
        ledger.marks = _longer(np.array([_mark(job) for job in ledger.ids], dtype=np.uint64), len(jobs))
        ledger.fates = np.full(len(jobs), UNTOLD, dtype=np.int16)
        ledger.row_of = {job: row for row, job in enumerate(ledger.ids)}
        ledger._classify()
        ledger.services = np.frombuffer(_unpacked(body["services"])).tolist()
        ledger.memory = _unpacked_object(body["memory"])
        ledger.packing = bool(body.get("packing"))
        ledger.rates, ledger.guests = dict(body.get("rates", {})), dict(body.get("guests", {}))
        ledger.undone = [(frozenset(pair), float(at_s)) for pair, at_s in body.get("undone", [])]
        ledger.wake_s = NEVER if body["wake_s"] is None else float(body["wake_s"])
        ledger.now_s = float(body["now_s"])
        ledger.blocked = frozenset(body["blocked"])
        ledger.sick = frozenset(body.get("sick", ()))
        ledger.held_by_user = set(body["held"])
        ledger._block()
        return ledger

    def moved_to(
        self, nodes: Sequence[NodeSpec], policy: Policy, placement: Placement, gpu_types: Mapping[str, str | None]
    ) -> Ledger:
        """The same jobs on another cluster, or under another policy.

        Who holds GPUs keeps them if they are still there and it could be given them; else it waits again.
        """
        body = self.snapshot(self.now_s)
        moved = Ledger.restore(body, self.policy, self.placement)
        there = Ledger(nodes, policy, placement)
        kept: dict[str, list[int]] = {}
        for job in list(moved.row_of):
            found = [there._gpu_at(*moved.local(gpu)) for gpu in moved.gpus_of(job)]
            gpus = sorted(gpu for gpu in found if gpu is not None)
            kinds = {int(there.cluster.node_kind[there.cluster.gpu_node[gpu]]) for gpu in gpus}
            suits = len(kinds) == 1 and (there.kinds_for(gpu_types.get(job)) >> min(kinds)) & 1
            if gpus and len(gpus) == len(found) and suits:
                kept[job] = gpus
            else:
                moved.apply({"op": "back", "job": job, "t": moved.now_s})
        body = moved.snapshot(moved.now_s)
        jobs, slots = moved.table.jobs, moved.table.slots
        for job, row in moved.row_of.items():
            jobs["kinds"][row] = there.kinds_for(gpu_types.get(job))
            first, count = int(jobs["first_slot"][row]), int(jobs["gpus"][row])
            slots[first : first + count] = kept.get(job, 0)
            if job in kept:
                jobs["node_kind"][row] = there.cluster.node_kind[there.cluster.gpu_node[kept[job][0]]]
        body |= {
            "nodes": [_listed(n) for n in nodes],
            "jobs": _packed(jobs[: len(moved.ids)].tobytes()),
            "slots": _packed(slots[: moved.slots_used].tobytes()),
            "blocked": [],
            "sick": [],
            "memory": _packed_object(None),
            "wake_s": None,
        }
        return Ledger.restore(body, policy, placement)

    def _gpu_at(self, node: str, number: int) -> int | None:
        at = self.node_index.get(node)
        return None if at is None or number >= self.nodes[at].gpus else self.gpu_number(node, number)

    def copy(self) -> Ledger:
        """An independent one, to look ahead with."""
        other = copy.copy(self)
        other.table = JobTable(*(array.copy() for array in self.table))
        other.machine = copy_of(self.machine)
        other.marks, other.fates = self.marks.copy(), self.fates.copy()
        other.limits = list(self.limits)
        other.tenants, other.services, other.ids = list(self.tenants), list(self.services), list(self.ids)
        other.row_of, other.gang_classes = dict(self.row_of), dict(self.gang_classes)
        other.parked, other.held_by_user = set(self.parked), set(self.held_by_user)
        other.rates, other.guests, other.undone = dict(self.rates), dict(self.guests), list(self.undone)
        other._redraw()
        return other


def _records(count: int) -> Any:
    records = np.recarray(count, dtype=JOB)
    records[:] = np.zeros(count, dtype=JOB)
    return plain(records)


def _ticks(quantum_s: float, now_s: float) -> float:
    return float(getattr(ticks_until, "py_func", ticks_until)(quantum_s, now_s))


def _listed(node: NodeSpec) -> list[Any]:
    """A node in a snapshot; the rack only where there is one, as in those written before there were any."""
    return [node.name, node.gpus, node.gpu_type, node.memory_gib, *([node.rack] if node.rack else [])]


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _packed_small(values: IntArray) -> str:
    return _packed(values.astype(np.int16).tobytes())


def _unpacked_small(text: str) -> npt.NDArray[np.int16]:
    return np.frombuffer(_unpacked(text), dtype=np.int16)


def _mark(job_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "little")


def _longer(values: Any, count: int) -> Any:
    """The same values in an array of this length."""
    longer = np.zeros(count, dtype=values.dtype)
    longer[: len(values)] = values
    return longer


def _packed_object(value: object) -> str | None:
    """What a policy remembers is its own class. The journal is ours alone: nobody else writes to the store."""
    return None if value is None else _packed(pickle.dumps(value))


def _unpacked_object(text: str | None) -> object:
    return None if text is None else pickle.loads(_unpacked(text))


def _words(value: object) -> str:
    return "" if value is None else repr(value)
