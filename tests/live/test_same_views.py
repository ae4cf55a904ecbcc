"""The sentence on the front door, proved: a workload led through the simulator and through the ledger of a live cluster
gives a policy the same Views and draws the same Decisions from it, field by field, at every instant.

The simulator runs; beside it a ledger is told, by entries, what a live cluster would tell: jobs come, begin to run,
are measured and end. Nothing else is handed over. Snapshots, restarts, packs of the table and packed guests come in
between, and the policies are all those that are admitted live: computed, not listed. Those of the tutorial come along,
one that resizes jobs and one that shares GPUs: people's own are admitted by the same rule.

Of how far a job is and how fast it goes a live cluster hears late, not exactly, and not always. So a second property
leads the same workloads through both worlds with such reports: what a policy is shown is what was told, reckoned on
from the instant that it was told of, and a policy that does not use it decides as if nothing were measured at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kit.workloads import effort
from thebes.live.config import CARRIED
from thebes.live.entries import Arrive, Decide, Entry, Leave, Measured, Quota, Ran, Rate, entry_of
from thebes.live.ledger import Ledger, NodeSpec, cluster_of
from thebes.model.decision import Decision
from thebes.model.errors import UserError
from thebes.model.facts import LIVE, PROGRESS, Knowledge
from thebes.model.jobs import HELD, NEVER, NO_QUOTA, JobTable
from thebes.model.trace import Trace
from thebes.model.view import JobsView, View
from thebes.perf import Tiers
from thebes.perf.contention import Contention
from thebes.placement import find as find_placement
from thebes.policy import Policy, registry
from thebes.policy import find as find_policy
from thebes.policy.admission import obstacle
from thebes.sim.costs import Costs
from thebes.sim.loop import ASK, DONE, LOG_FULL, GeneralLoop
from thebes.sim.setup import build_world, prepare
from thebes.sim.world import FINISH, MIGRATE, RESIZE, RESUME, START, SUBMIT, SUSPEND

MODELS = ("resnet50", "vgg16", "alexnet", "inception3")
TENANTS = ("vision", "speech")


def admitted() -> list[str]:
    """The names of all policies that a live cluster takes, as `thebes up` finds out."""
    return sorted(name for name, kind in registry().items() if obstacle(kind(), CARRIED["local"]) is None)


def of_the_tutorial(file: str) -> Policy:
    """The policy that docs/writing-a-policy.md has its readers write to this file."""
    text = (Path(__file__).parents[2] / "docs" / "writing-a-policy.md").read_text()
    _, _, rest = text.partition(f"<!-- write: {file} -->\n```python\n")
    names: dict[str, Any] = {}
    exec(rest.partition("```")[0], names)
    (kind,) = (it for it in names.values() if isinstance(it, type) and issubclass(it, Policy))
    return kind()


BRISK: dict[str, Policy] = {  # with windows that are short beside the jobs, so that all they can do comes to pass
    "tiresias-l, brisk": find_policy("tiresias-l")(queue_limits=(50.0, 200.0), promote_knob=0.5, promote_floor_s=30.0),
    "gandiva, brisk": find_policy("gandiva")(quantum_s=20.0, profile_s=10.0),
    "gandiva-gavel, brisk": find_policy("gandiva-gavel")(round_s=30.0, profile_s=10.0),
    "two-level of tiresias-g": find_policy("two-level")(
        lease_s=60.0,
        inner="tiresias-g",
        inner_set=f"quantum_s=45;queue_limits={','.join(map(str, range(50, 1000, 25)))}",
    ),
    "two-level of las": find_policy("two-level")(lease_s=60.0, inner="las", inner_set="quantum_s=45"),
    "two-level of gandiva": find_policy("two-level")(
        lease_s=60.0, inner="gandiva", inner_set="quantum_s=20;profile_s=10"
    ),
}
POLICIES: dict[str, Policy] = (
    {name: registry()[name]() for name in admitted()}
    | BRISK
    | {name: of_the_tutorial(name) for name in ("even.py", "halves.py")}
)


@dataclass(frozen=True)
class Job:
    submit_s: float
    gpus: int
    duration_s: float
    model: str
    tenant: str
    gpu_type: str | None
    fewer: int = 0  # GPUs that it can do without
    more: int = 0  # and that it could use


NODES = {
    "one kind": [NodeSpec(f"n{i}", 4, "NVIDIA A100-SXM4-80GB") for i in range(3)],
    "racks": [NodeSpec(f"n{i}", 2, "NVIDIA A100-SXM4-80GB", None, f"rack{i // 2}") for i in range(6)],
    "kinds": [
        *(NodeSpec(f"a{i}", 4, "NVIDIA A100-SXM4-80GB", None, f"rack{i}") for i in range(2)),
        *(NodeSpec(f"v{i}", 2, "Tesla V100-PCIE-16GB", None, "rack2") for i in range(2)),
    ],
}  # fmt: skip

job = st.builds(
    Job,
    submit_s=st.integers(0, 40).map(lambda n: 30.0 * n),
    gpus=st.sampled_from([1, 1, 1, 2, 2, 3, 4, 4]),
    duration_s=st.integers(1, 1500).map(float),
    model=st.sampled_from(MODELS),
    tenant=st.sampled_from(TENANTS),
    gpu_type=st.sampled_from([None, None, "A100"]),
    fewer=st.sampled_from([0, 0, 1]),
    more=st.sampled_from([0, 0, 2]),
)


@dataclass(frozen=True)
class Post:
    """How reports of steps travel."""

    seed: int
    latest_s: float  # the slowest is told so long after its instant
    lost: float  # this part of them never comes
    noise: float  # what they say is wrong by up to this part
    restarts: float  # after this part of them the controller starts again


AT_ONCE = Post(seed=0, latest_s=0.0, lost=0.0, noise=0.0, restarts=0.0)


@dataclass(frozen=True)
class Case:
    jobs: tuple[Job, ...]
    nodes: str
    placement: str
    costs: Costs
    contention: bool
    packing: bool
    quota: int | None  # GPUs that the first tenant may hold; no job of these is larger
    kept: tuple[int, ...]  # after which decisions a snapshot is written, which packs the table
    restored: tuple[int, ...]  # and after which the controller starts again
    post: Post = AT_ONCE


cases = st.builds(
    Case,
    jobs=st.lists(job, min_size=4, max_size=14).map(lambda jobs: tuple(sorted(jobs, key=lambda j: j.submit_s))),
    nodes=st.sampled_from(sorted(NODES)),
    placement=st.sampled_from(["consolidate", "relaxed", "skew", "yarn", "count", "lwf", "random"]),
    costs=st.sampled_from([Costs(), Costs(mechanism="free")]),
    contention=st.booleans(),
    packing=st.booleans(),
    quota=st.sampled_from([None, None, 6]),
    kept=st.lists(st.integers(0, 30), max_size=3).map(tuple),
    restored=st.lists(st.integers(0, 30), max_size=3).map(tuple),
)


def trace_of(jobs: tuple[Job, ...]) -> Trace:
    return Trace.of(
        "t",
        {
            "job_id": [str(i) for i in range(len(jobs))],
            "submit_time": [j.submit_s for j in jobs],
            "duration": [j.duration_s for j in jobs],
            "num_gpus": [float(j.gpus) for j in jobs],
            "model": [j.model for j in jobs],
            "vc": [j.tenant for j in jobs],
            "gpu_type": [j.gpu_type for j in jobs],
            "min_gpus": [max(1, j.gpus - j.fewer) for j in jobs],
            "max_gpus": [j.gpus + j.more for j in jobs],
        },
    )


class Mirrored(GeneralLoop):
    """The general path of the simulator with a ledger beside it, and the journal of that ledger."""

    def watch(self, ledger: Ledger, case: Case) -> None:
        self.ledger, self.case = ledger, case
        self.told, self.asked = 0, 0
        self.pace: dict[int, tuple[float, float]] = {}
        self.keep_snapshot()

    def apply(self, entry: Entry) -> None:
        """The ledger changes, and the journal says how."""
        self.ledger.apply(entry)
        self.journal.append(json.dumps(entry.to_json()))

    def keep_snapshot(self) -> None:
        """The journal begins anew."""
        self.body = json.dumps(self.ledger.snapshot(self.ledger.now_s))
        self.journal: list[str] = []

    def start_controller_again(self) -> None:
        """Another ledger, made from nothing but what was written down."""
        was, body = self.ledger, json.loads(self.body)
        self.ledger = Ledger.restore(body, was.policy, was.placement)
        self.ledger.knowledge = was.knowledge
        for entry in self.journal:
            self.ledger.apply(entry_of(json.loads(entry)))
        for name in ("packing", "rates", "guests", "undone"):  # no View shows these
            assert getattr(self.ledger, name) == getattr(was, name), name

    def _answer(self, alive: NDArray[np.int64]) -> object:
        self.tell(begun=False)
        now_s = float(self.world.clock["now_s"][0])
        mine, theirs = self.view(), self.ledger.view(now_s)
        same_views(mine, theirs)
        same_accounts(GeneralLoop.view(self), theirs, free=self.case.costs.mechanism == "free")
        answer = super()._answer(alive)
        assert isinstance(answer, Decision)
        same_decisions(answer, mine, self.policy.decide(self.ledger.view(now_s)), theirs)
        self.planned, _ = self.ledger.decide(now_s)
        self.apply(self.planned.entry())
        return answer

    def _decide(self) -> None:
        super()._decide()
        self.tell(begun=True)
        if self.asked in self.case.kept:
            self.keep_snapshot()
        if self.asked in self.case.restored:
            self.start_controller_again()
        self.asked += 1

    def tell(self, *, begun: bool) -> None:
        """What a live cluster would have heard since the last time."""
        jobs, log = self.world.table.jobs, self.world.log
        for event in log[self.told : int(self.world.clock["logged"][0])]:
            row, time_s, kind = int(event["job"]), float(event["time_s"]), int(event["event"])
            record, asked = jobs[row], self.case.jobs[row]
            if kind == FINISH:
                self.apply(Leave(time_s, str(row), completed=True))
            elif kind == SUBMIT:
                self.apply(
                    Arrive(
                        time_s,
                        str(row),
                        asked.gpus,
                        asked.tenant,
                        time_s,
                        gpu_type=asked.gpu_type,
                        model=asked.model,
                        suspend_s=float(record["suspend_s"]),
                        resume_s=float(record["resume_s"]),
                        min_gpus=max(1, asked.gpus - asked.fewer),
                        max_gpus=asked.gpus + asked.more,
                    )
                )
                if self.ledger.packing and asked.gpus == 1:
                    self.apply(Rate(time_s, str(row), 10.0))
            elif begun and kind in (START, RESUME, MIGRATE, RESIZE):
                began = float(record["run_from_s"]), float(record["ready_s"])
                self.apply(Ran(time_s, str(row), *began))
                self.pace.pop(row, None)
            self.heard(row, kind, time_s)
        self.told = int(self.world.clock["logged"][0])
        self.tell_measurements()

    def heard(self, row: int, kind: int, time_s: float) -> None:
        """One event of the simulator's log was told."""
        if kind == SUBMIT:
            self.apply(Measured(time_s, str(row), 0.0, 1.0, float(self.world.table.jobs["full_s"][row]), NEVER))

    def tell_measurements(self) -> None:
        """Exactly and at once, whenever a job's speed has changed."""
        jobs = self.world.table.jobs
        for row in np.flatnonzero(jobs["phase"] == HELD).tolist():
            record = jobs[row]
            pace = float(record["paced_s"]), float(record["speed"])
            if self.pace.get(row) != pace:
                self.pace[row] = pace
                now_s, done_s, full_s = float(self.world.clock["now_s"][0]), *record[["progress_s", "full_s"]].tolist()
                self.apply(Measured(now_s, str(row), done_s, pace[1], full_s, pace[0]))


COLUMNS = [n for n, c in vars(JobsView).items() if isinstance(c, cached_property) and not n.startswith("_")]


def column(view: View, name: str) -> Any:
    try:
        values = getattr(view.jobs, name)
    except UserError as error:
        return type(error).__name__, error.message
    return [view.tenants[at] for at in values] if name == "tenant" else values


def same_views(mine: View, theirs: View) -> None:
    assert mine.now_s == theirs.now_s
    np.testing.assert_array_equal(ids_of(mine, mine.jobs.rows), ids_of(theirs, theirs.jobs.rows))
    for name in COLUMNS:
        np.testing.assert_array_equal(column(mine, name), column(theirs, name), err_msg=name)
    for at in range(len(mine.jobs)):
        np.testing.assert_array_equal(mine.jobs.held(at), theirs.jobs.held(at))
    np.testing.assert_array_equal(owners(mine), owners(theirs))
    for name in ("free", "total"):
        np.testing.assert_array_equal(mine.machine.kinds[name], theirs.machine.kinds[name])
    np.testing.assert_array_equal(mine.machine.nodes["free"], theirs.machine.nodes["free"])
    assert mine.tenants == theirs.tenants
    assert mine.last_finish_s == theirs.last_finish_s
    assert simple(mine.board.strategy) == simple(theirs.board.strategy)
    np.testing.assert_array_equal(mine.quotas, theirs.quotas[: len(theirs.tenants)])
    np.testing.assert_array_equal(mine.finished_gpu_s, theirs.finished_gpu_s)
    assert simple(mine.memory) == simple(theirs.memory)


def same_accounts(mine: View, theirs: View, *, free: bool) -> None:
    """GPU-seconds up to now. Until when a suspended job writes its state is known to the simulator alone: it charges
    that time to the job, the ledger to whoever waits for the GPUs. Without that cost the accounts are equal."""
    jobs, other = (view.board.table.jobs[view.jobs.rows] for view in (mine, theirs))
    for one, view in ((jobs, mine), (other, theirs)):
        ran_s = np.where(view.jobs.running, np.maximum(view.now_s - one["paced_s"], 0.0), 0.0)
        one["useful_gpu_s"] += one["width"] * one["share"] * ran_s
    stayed = (jobs["preemptions"] == 0) & (mine.jobs.moves == 0) | free
    np.testing.assert_allclose(other["useful_gpu_s"], jobs["useful_gpu_s"], atol=1e-6)
    np.testing.assert_allclose(other["overhead_gpu_s"][stayed], jobs["overhead_gpu_s"][stayed], atol=1e-6)
    assert (other["overhead_gpu_s"] <= jobs["overhead_gpu_s"] + 1e-6).all()
    assert (other["idle_gpu_s"] >= jobs["idle_gpu_s"] - 1e-6).all()
    assert not free or np.allclose(other["idle_gpu_s"], jobs["idle_gpu_s"], atol=1e-6)


def ids_of(view: View, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return view.board.table.jobs["id"][rows]


def owners(view: View) -> list[int]:
    """Per GPU, the id of the job that holds it."""
    ids = view.board.table.jobs["id"]
    return [int(ids[owner]) if owner >= 0 else int(owner) for owner in view.machine.gpus["owner"]]


def same_decisions(mine: Decision, my_view: View, theirs: Decision, their_view: View) -> None:
    for each in fields(Decision):
        one, other = getattr(mine, each.name), getattr(theirs, each.name)
        if each.name in ("rows", "promote"):
            one, other = ids_of(my_view, one), ids_of(their_view, other)
        assert simple(one) == simple(other), each.name


def simple(value: Any) -> Any:
    """What a policy remembers, in a form that can be compared whatever it is made of."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: simple(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, np.ndarray):
        return [simple(item) for item in value.tolist()]
    if isinstance(value, dict):
        return {key: simple(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [simple(item) for item in value]
    return "NaN" if isinstance(value, float) and np.isnan(value) else value


def led_through_both(
    policy: Policy,
    case: Case,
    spoil: Callable[[Ledger], None] = lambda _: None,
    loop_of: type[Mirrored] = Mirrored,
    knowledge: Knowledge = LIVE,
) -> Mirrored:
    nodes, placement = NODES[case.nodes], find_placement(case.placement)()
    cluster, trace = cluster_of(nodes), trace_of(case.jobs)
    work = prepare(trace, cluster, placement, Tiers(), seed=0)
    policy.check(cluster, work.tenants)
    contention = Contention(on=case.contention)
    world = build_world(work, cluster, placement, case.costs, 0, contention=contention, shares=policy.shares)
    world.clock["quantum_s"] = policy.reads_every_s
    loop = loop_of(world, cluster, policy, checks=True, tenants=work.tenants, knowledge=knowledge)
    ledger = Ledger(nodes, policy, placement)
    ledger.knowledge = knowledge
    ledger.packing = case.packing and not policy.shares  # `thebes up` refuses both together
    for at, tenant in enumerate(work.tenants):
        limit = case.quota if tenant == TENANTS[0] else None
        ledger.apply(Quota(0.0, tenant, limit))
        world.table.quotas[at] = NO_QUOTA if limit is None else limit
    spoil(ledger)
    loop.watch(ledger, case)
    status = ASK
    while status != DONE:
        status = loop.run(1000)
        if status == LOG_FULL:
            loop.grow_log()
    loop.tell(begun=False)
    return loop


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(case=cases)
@effort(12)
def test_the_same_views_and_decisions_in_simulation_and_live(name: str, case: Case) -> None:
    loop = led_through_both(POLICIES[name], case)
    assert loop.asked > 0
    alive = loop.alive.rows[: loop.alive.size[0]]
    assert list(loop.ledger.row_of) == [str(row) for row in alive]  # the same jobs have ended in both worlds
    assert not len(alive)


# --- reports that come late, are not exact, or do not come at all -----------------------------------------------------


posts = st.builds(
    Post,
    seed=st.integers(0, 1000),
    latest_s=st.sampled_from([0.0, 5.0, 300.0]),
    lost=st.sampled_from([0.0, 0.5]),
    noise=st.sampled_from([0.0, 0.3]),
    restarts=st.sampled_from([0.0, 0.1]),
)


@dataclass(frozen=True, order=True)
class Letter:
    """One report: told at `due_s`, of the instant `at_s`."""

    due_s: float
    at_s: float
    row: int
    progress_s: float
    speed: float
    full_s: float


@dataclass
class Heard:
    """What can be known of one job, by somebody who keeps every run and every report in mind."""

    runs: list[list[float]] = field(default_factory=list)  # [from, until]
    stands_s: float = 0.0  # an older report than this is out of turn
    last: Letter | None = None

    def ran_s(self, from_s: float, until_s: float) -> float:
        return sum(max(0.0, min(end_s, until_s) - max(begin_s, from_s)) for begin_s, end_s in self.runs)

    def progress_s(self, now_s: float) -> float:
        return (
            np.nan if self.last is None else self.last.progress_s + self.last.speed * self.ran_s(self.last.at_s, now_s)
        )


class Late(Mirrored):
    """The ledger hears of progress by post. What it makes of that is shown to the policy of the simulator, too."""

    def watch(self, ledger: Ledger, case: Case) -> None:
        super().watch(ledger, case)
        self.post, self.dice = case.post, Random(case.post.seed)
        self.written: list[Letter] = []
        self.on_the_way: list[Letter] = []
        self.known: dict[int, Heard] = {}
        self.delivered, self.out_of_turn = 0, 0

    def view(self) -> View:
        """The simulator's View with what was told of progress in the place of what is."""
        exact = super().view()
        jobs = exact.board.table.jobs.copy()
        for job, row in self.ledger.row_of.items():
            for name in ("progress_s", "paced_s", "speed", "full_s"):
                jobs[name][int(job)] = self.ledger.table.jobs[name][row]
        table = JobTable(jobs, *exact.board.table[1:])
        columns = JobsView(table, exact.jobs.rows, exact.now_s, exact.jobs.needs, knowledge=self.knowledge)
        return replace(exact, jobs=columns, board=exact.board._replace(table=table))

    def _answer(self, alive: NDArray[np.int64]) -> object:
        self.tell(begun=False)
        exact = GeneralLoop.view(self)
        as_told(self.known, exact, self.ledger.view(exact.now_s))
        unmeasured = self.policy.decide(exact) if PROGRESS not in {*self.policy.uses, *self.policy.needs} else None
        answer = super()._answer(alive)
        assert isinstance(answer, Decision)
        if unmeasured is not None:
            same_decisions(unmeasured, exact, answer, exact)
        for job, _ in self.planned.shares:  # what was done up to now was booked
            self.known[int(job)].stands_s = max(self.known[int(job)].stands_s, exact.now_s)
        return answer

    def _decide(self) -> None:
        super()._decide()
        self.write()

    def write(self) -> None:
        """Jobs make steps, and report: at instants up to the next decision, which is not known yet."""
        now_s, jobs = float(self.world.clock["now_s"][0]), self.world.table.jobs
        self.written = []
        for row in np.flatnonzero(jobs["phase"] == HELD).tolist():
            for at_s in (now_s, now_s + self.dice.random() * 60.0, now_s + self.dice.random() * 600.0):
                done_s, paced_s, speed, full_s, run_from_s = jobs[row][
                    ["progress_s", "paced_s", "speed", "full_s", "run_from_s"]
                ].tolist()
                if at_s >= run_from_s and self.dice.random() >= self.post.lost:
                    facts = done_s + max(0.0, at_s - paced_s) * speed, speed, full_s
                    wrong = [fact * (1.0 + self.post.noise * self.dice.uniform(-1.0, 1.0)) for fact in facts]
                    due_s = at_s + self.dice.choice((0.0, self.dice.random())) * self.post.latest_s
                    self.written.append(Letter(due_s, at_s, row, *wrong))

    def tell(self, *, begun: bool) -> None:
        now_s = float(self.world.clock["now_s"][0])
        self.on_the_way += [letter for letter in self.written if letter.at_s < now_s]
        self.written = []
        self.deliver(now_s)  # what comes in between two decisions is told before what happens at this one
        super().tell(begun=begun)

    def deliver(self, now_s: float) -> None:
        due = sorted(letter for letter in self.on_the_way if letter.due_s <= now_s)
        self.on_the_way = [letter for letter in self.on_the_way if letter.due_s > now_s]
        for letter in due:
            self.apply(
                Measured(letter.due_s, str(letter.row), letter.progress_s, letter.speed, letter.full_s, letter.at_s)
            )
            self.delivered += 1
            heard = self.known[letter.row]
            if letter.at_s >= heard.stands_s:
                heard.last, heard.stands_s = letter, letter.at_s
                if self.dice.random() < 0.3 and self.ledger.holds(str(letter.row)):  # since when it runs is told again
                    record = self.world.table.jobs[letter.row]
                    began = float(record["run_from_s"]), float(record["ready_s"])
                    self.apply(Ran(letter.due_s, str(letter.row), *began))
            else:
                self.out_of_turn += 1
            if self.dice.random() < self.post.restarts:
                self.start_controller_again()

    def heard(self, row: int, kind: int, time_s: float) -> None:
        """Each run begins and ends at its instant: reports of an earlier one are out of turn from then on."""
        heard = self.known.setdefault(row, Heard())
        if kind in (SUSPEND, MIGRATE, RESIZE, FINISH):
            heard.runs[-1][1], heard.stands_s = time_s, time_s
        if kind in (START, RESUME, MIGRATE, RESIZE):
            run_from_s = float(self.world.table.jobs["run_from_s"][row])
            heard.runs.append([run_from_s, NEVER])
            heard.stands_s = run_from_s

    def tell_measurements(self) -> None:
        """They come by post."""


def as_told(known: dict[int, Heard], exact: View, shown: View) -> None:
    """What is shown of progress is what was told of it, reckoned on while the job ran, or NaN; never anything else."""
    now_s, hidden = exact.now_s, exact.jobs.ran_s < exact.jobs.knowledge.measured_after_s
    for at, job in enumerate(exact.jobs.id.tolist()):
        heard = known[job]
        speed, full_s = (np.nan, np.nan) if heard.last is None else (heard.last.speed, heard.last.full_s)
        running = bool(exact.jobs.running[at])
        at_work = running and now_s > exact.jobs.run_from_s[at]
        expected = {
            "speed": speed if running else 0.0,
            "progress_s": heard.progress_s(now_s),
            "iteration_s": full_s / speed if at_work else 0.0,
        }
        for name, value in expected.items():
            wanted = np.nan if hidden[at] and (name != "iteration_s" or at_work) else value
            np.testing.assert_allclose(getattr(shown.jobs, name)[at], wanted, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(case=cases, post=posts, measured_after_s=st.sampled_from([0.0, 100.0]))
@effort(8)
def test_late_and_inexact_reports_show_what_was_told_and_sway_nobody_else(
    name: str, case: Case, post: Post, measured_after_s: float
) -> None:
    known = replace(LIVE, measured_after_s=measured_after_s)
    loop = led_through_both(POLICIES[name], replace(case, post=post), loop_of=Late, knowledge=known)
    assert isinstance(loop, Late)
    assert loop.asked > 0


CROWD = Case(
    jobs=tuple(
        Job(40.0 * (i // 2), (1, 1, 4, 1, 2)[i % 5], 100.0 + 90.0 * (i % 7), MODELS[i % 3], TENANTS[i % 2], None)
        for i in range(30)
    ),
    nodes="racks",
    placement="consolidate",
    costs=Costs(),
    contention=True,
    packing=False,
    quota=None,
    kept=(),
    restored=(),
)


def reads_service_at_any_time(ledger: Ledger) -> None:
    """Ticks are ignored, as they once were."""
    ledger.quantum_s = 0.0


def never_measures(ledger: Ledger) -> None:
    apply = ledger.apply

    def spoilt(entry: Entry) -> None:
        if not isinstance(entry, Measured):
            apply(entry)

    ledger.apply = spoilt  # type: ignore[method-assign]


def shows_zeros(*names: str) -> Callable[[Ledger], None]:
    """These columns are 0 for everybody, as they once were."""

    def spoil(ledger: Ledger) -> None:
        view = ledger.view

        def spoilt(now_s: float) -> View:
            shown = view(now_s)
            for name in names:
                shown.board.table.jobs[name] = 0
            return shown

        ledger.view = spoilt  # type: ignore[method-assign]

    return spoil


def notes_the_last_sharer(ledger: Ledger) -> None:
    apply = ledger.apply

    def spoilt(entry: Entry) -> None:
        apply(entry)
        if isinstance(entry, Decide):
            for job, gpus in (*entry.migrate, *entry.start):
                ledger.machine.gpus["owner"][list(gpus)] = ledger.row_of[job]

    ledger.apply = spoilt  # type: ignore[method-assign]


def misreads(kind: type[Entry], **changes: Callable[[Any], Any]) -> Callable[[Ledger], None]:
    """Entries of this kind are applied with other fields than they have."""

    def spoil(ledger: Ledger) -> None:
        apply = ledger.apply

        def spoilt(entry: Entry) -> None:
            wrong = {name: change(entry) for name, change in changes.items()} if isinstance(entry, kind) else {}
            apply(replace(entry, **wrong))

        ledger.apply = spoilt  # type: ignore[method-assign]

    return spoil


def books_nothing_when_it_measures(ledger: Ledger) -> None:
    """What ran up to a measurement was in no account, as it once was."""
    apply = ledger.apply

    def spoilt(entry: Entry) -> None:
        row = ledger.row_of.get(entry.job) if isinstance(entry, Measured) else None
        before = None if row is None else float(ledger.table.jobs["useful_gpu_s"][row])
        apply(entry)
        if row is not None:
            ledger.table.jobs["useful_gpu_s"][row] = before

    ledger.apply = spoilt  # type: ignore[method-assign]


def gives_any_kind(ledger: Ledger) -> None:
    ledger.kinds_for = lambda gpu_type: (1 << len(ledger.cluster.kinds)) - 1  # type: ignore[method-assign]


def takes_every_report(ledger: Ledger) -> None:
    """Whichever hold it is about, and whatever was told after it."""

    apply = ledger.apply

    def spoilt(e: Entry) -> None:
        if not isinstance(e, Measured):
            apply(e)
        elif e.job in ledger.row_of:
            record = ledger.table.jobs[ledger.row_of[e.job]]
            record["progress_s"], record["speed"], record["full_s"], record["paced_s"] = (
                e.progress_s, e.speed, e.full_s, e.at_s,
            )  # fmt: skip

    ledger.apply = spoilt  # type: ignore[method-assign]


def shows_what_nobody_measured(ledger: Ledger) -> None:
    """A speed of 1 in the place of what is not known, as the simulator begins with."""
    view = ledger.view

    def spoilt(now_s: float) -> View:
        shown = view(now_s)
        speed = shown.board.table.jobs["speed"]
        speed[np.isnan(speed)] = 1.0
        return shown

    ledger.view = spoilt  # type: ignore[method-assign]


def hides_nothing(ledger: Ledger) -> None:
    ledger.knowledge = LIVE


TYPED = replace(CROWD, nodes="kinds", jobs=tuple(replace(job, gpu_type="A100") for job in CROWD.jobs))
SPOILT: dict[str, tuple[str, Case, Callable[[Ledger], None]]] = {
    "ticks": ("two-level of las", CROWD, reads_service_at_any_time),
    "measures": ("fifo", CROWD, never_measures),
    "owners": ("halves.py", CROWD, notes_the_last_sharer),
    **{
        name: ("fifo", CROWD, shows_zeros(name))
        for name in ("tier", "best_tier", "min_nodes", "model", "progress_s", "speed")
    },
    "iteration_s": ("fifo", CROWD, shows_zeros("full_s")),
    "ids": ("dally", CROWD, shows_zeros("id")),
    "kinds": ("fifo", TYPED, gives_any_kind),
    "when a job began to run": ("las", CROWD, misreads(Ran, run_from_s=lambda e: e.time_s)),
    "queues": ("tiresias-l, brisk", CROWD, misreads(Decide, queues=lambda e: None)),
    "promotions": ("tiresias-l, brisk", CROWD, misreads(Decide, promote=lambda e: ())),
    "shares": ("halves.py", CROWD, misreads(Decide, shares=lambda e: ())),
    "memory": ("two-level of las", CROWD, misreads(Decide, memory=lambda e: None)),
    "tenants": ("two-level of las", CROWD, misreads(Arrive, tenant=lambda e: TENANTS[0])),
    "useful time": ("las", CROWD, books_nothing_when_it_measures),
    "services": ("two-level of tiresias-g", CROWD, misreads(Leave, completed=lambda e: False)),
}


@pytest.mark.parametrize("fault", sorted(SPOILT))
def test_a_ledger_with_a_fault_is_told_from_the_simulator(fault: str) -> None:
    """The comparison above can fail: each of these was wrong once, or could be."""
    name, case, spoil = SPOILT[fault]
    led_through_both(POLICIES[name], case)
    with pytest.raises(AssertionError):
        led_through_both(POLICIES[name], case, spoil)


SLOW_POST = replace(CROWD, post=Post(seed=1, latest_s=300.0, lost=0.2, noise=0.3, restarts=0.0))
MISHEARD: dict[str, Callable[[Ledger], None]] = {
    "reckons from the instant of the telling": misreads(Measured, at_s=lambda e: e.time_s),
    "takes reports out of turn": takes_every_report,
    "shows what nobody measured": shows_what_nobody_measured,
    "shows what is to be withheld": hides_nothing,
}


@pytest.mark.parametrize("fault", sorted(MISHEARD))
def test_a_ledger_that_mishears_reports_is_told_from_one_that_does_not(fault: str) -> None:
    withheld = replace(LIVE, measured_after_s=30.0)
    heard = led_through_both(POLICIES["las"], SLOW_POST, loop_of=Late, knowledge=withheld)
    assert isinstance(heard, Late)
    assert heard.delivered > heard.out_of_turn > 0
    with pytest.raises(AssertionError):
        led_through_both(POLICIES["las"], SLOW_POST, MISHEARD[fault], loop_of=Late, knowledge=withheld)


def test_policies_are_admitted_live() -> None:
    assert {"fifo", "las", "tiresias-l", "tiresias-g", "gittins", "two-level", "gandiva", "gandiva-gavel"} <= set(
        admitted()
    )
