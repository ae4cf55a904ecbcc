"""Rubick in simulations with real models: the acceptance tests of its specification (section 8), by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from kit.workloads import story
from thebes import Decision, Policy, Result, Trace, UserError, View, simulate
from thebes.model.cluster import Cluster, NodeKind, uniform
from thebes.model.decision import HOLDS, NO_GPUS, OVER_QUOTA
from thebes.model.plan import plan_of
from thebes.perf.plans.book import PlanBook
from thebes.perf.plans.speed import Plans
from thebes.policy import find
from thebes.policy.rubick.curves import Room
from thebes.policy.rubick.library import Demand, Freedom, Library
from thebes.policy.rubick.rubick import Rubick, RubickE, RubickMemory, RubickN, RubickR
from thebes.sim.costs import Costs
from thebes.trace import read

BY_MODEL = Plans(truth="model")
MODELS = ("vit", "roberta-large", "bert-large", "t5", "gpt-2", "llama-2-7b")
Look = Callable[[View, Decision], None]


def nodes_of_8(nodes: int = 1, cpus: int = 96, memory_gib: float = 1600.0) -> Cluster:
    kind = NodeKind(8, gpu_type="A800-80GB", gpu_memory_gib=80, cpus=cpus, memory_gib=memory_gib)
    return uniform(f"{nodes}x8", 1, nodes, kind)


def jobs(*rows: tuple[float, int, float, str], **columns: Sequence[Any]) -> Trace:
    """(submit, GPUs, duration, model) per job; further columns of the trace by name."""
    submit, gpus, duration, model = zip(*rows, strict=True)
    given: dict[str, Sequence[Any]] = {
        "job_id": [f"j{i}" for i in range(len(rows))],
        "submit_time": submit,
        "num_gpus": [float(g) for g in gpus],
        "duration": duration,
        "model": model,
    }
    return Trace.of("rubick", given | columns)


@dataclass(frozen=True)
class Watched(Policy):
    """Another policy with somebody looking over its shoulder at every decision."""

    policy: Policy
    look: Look
    seen: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", self.policy.needs)

    def check(self, cluster: Cluster, tenants: tuple[str, ...]) -> None:
        self.policy.check(cluster, tenants)

    def decide(self, view: View) -> Decision:
        decision = self.policy.decide(view)
        self.look(view, decision)
        self.seen.append(view.now_s)
        return decision


def watch(trace: Trace, cluster: Cluster, policy: Policy, look: Look, **options: Any) -> Result:
    watched = Watched(policy, look)
    result = simulate(trace, cluster, watched, **{"perf": BY_MODEL} | options)
    assert watched.seen
    return result


def run(trace: Trace, cluster: Cluster, policy: Policy, **options: Any) -> Result:
    return simulate(trace, cluster, policy, **{"perf": BY_MODEL} | options)


@st.composite
def planned(draw: st.DrawFn, guaranteed: bool = True) -> Trace:
    """A few jobs of the smaller models, some of them guaranteed."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 3000).map(float),
                st.sampled_from([1, 2, 4, 8, 16]),
                st.sampled_from([1.0, 100.0, 2000.0, 9000.0]),
                st.sampled_from(MODELS),
            ).filter(lambda row: row[3] == "llama-2-7b" or row[1] <= 8),
            min_size=1,
            max_size=8,
        )
    )
    columns: dict[str, list[Any]] = {"vc": [draw(st.sampled_from(["A", "B"])) for _ in rows]}
    if guaranteed:
        columns["guaranteed"] = [draw(st.integers(0, 1)) for _ in rows]
    return jobs(*rows, **columns)


ALL = (Rubick(), RubickE(), RubickR(), RubickN())


# --- what every policy promises ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
@given(trace=planned())
@effort(6)
def test_rubick_is_pure(policy: Policy, trace: Trace) -> None:
    """The same View, asked again, gives the same Decision, and asking changed nothing in the world."""

    def is_pure(view: View, decision: Decision) -> None:
        owners, free = view.machine.gpus["owner"].copy(), view.machine.nodes["free"].copy()
        again = policy.decide(view)
        for one in fields(Decision):
            np.testing.assert_equal(getattr(again, one.name), getattr(decision, one.name), err_msg=one.name)
        np.testing.assert_array_equal(view.machine.gpus["owner"], owners)
        np.testing.assert_array_equal(view.machine.nodes["free"], free)
        assert np.array_equal(view.jobs.rows[decision.fate == HOLDS], decision.rows)
        assert decision.wake_s > view.now_s

    watch(trace, nodes_of_8(2), policy, is_pure)


# --- the acceptance tests ---------------------------------------------------------------------------------------------


def test_spec_8_3_nobody_holds_gpus_that_bring_less_than_one_percent() -> None:
    """Given BERT alone on 16 GPUs, then it holds a level of its curve, and every level is 1 % above the one below."""

    def look(view: View, decision: Decision) -> None:
        book: PlanBook = view.plans
        curve = book.curve(int(view.jobs.model[0]))
        count = int(decision.counts[0])  # type: ignore[index]
        assert curve.gpus_for[count, -1] == count

    watch(jobs((0, 1, 500, "bert-large")), nodes_of_8(2), Rubick(headroom=0.0), look)


def test_spec_8_4_gpus_move_to_the_steeper_curve() -> None:
    """Given a ViT job on all GPUs, when GPT-2 comes, then ViT, whose curve is flat, gives half of them up at least."""
    trace = jobs((0, 8, 20_000, "vit"), (10_000, 8, 20_000, "gpt-2"))
    held: dict[float, list[int]] = {}

    def look(view: View, decision: Decision) -> None:
        held[view.now_s] = decision.counts.tolist()  # type: ignore[union-attr]

    result = watch(trace, nodes_of_8(), Rubick(headroom=0.0), look)
    assert held[0.0] == [8]
    flat, steep = held[10_000.0]
    assert flat <= steep
    assert flat + steep == 8
    assert (10_000.0, 0, "resize") in story(result)


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
@given(trace=planned())
@effort(12)
def test_spec_8_5_no_guaranteed_job_is_below_its_sla_in_any_round(policy: Rubick, trace: Trace) -> None:
    """The SLA by hand: the asked plan on the asked GPUs and CPUs, against what every Decision gives."""

    def look(view: View, decision: Decision) -> None:
        book, all_jobs = view.plans, view.jobs
        assert decision.counts is not None
        assert decision.plans is not None
        assert decision.cpus is not None
        for at, position in enumerate(np.flatnonzero(decision.fate == HOLDS)):
            if not all_jobs.guaranteed[position]:
                continue
            number, asked = int(all_jobs.model[position]), plan_of(int(all_jobs.asked_plan[position]))
            promised = book.of(number, asked, -(-asked.gpus // 8), int(all_jobs.asked_cpus[position]))
            mine = decision.gpus[decision.counts[:at].sum() :][: decision.counts[at]]
            nodes = len(np.unique(view.machine.gpus["node"][mine]))
            given = book.of(number, plan_of(int(decision.plans[at])), nodes, int(decision.cpus[at]))
            assert given.samples_s >= promised.samples_s * (1 - 1e-9)
        running = np.flatnonzero(all_jobs.running & all_jobs.guaranteed)
        assert (decision.fate[running] == HOLDS).all()  # and none that runs is ever suspended

    watch(trace, nodes_of_8(2), policy, look)


def test_spec_8_6_the_guard_limits_reconfigurations() -> None:
    """Given jobs that come and go for hours, then what restarts cost no best-effort job is above 3 % of its running."""
    rng = np.random.default_rng(3)
    rows = [(float(at), 8, 6000.0, str(rng.choice(MODELS))) for at in np.sort(rng.integers(0, 40_000, 40))]
    costs = Costs(suspend_s=10, resume_s=50)
    gentle = run(jobs(*rows), nodes_of_8(2), Rubick(override=False), costs=costs)
    table = gentle.jobs
    changes = table["preemptions"] + table["migrations"] + table["resizes"] + table["reconfigurations"]
    assert changes.sum() > 0
    assert (changes * 60.0 <= 0.03 * table["ran_s"] + 1e-6).all()
    restless = run(jobs(*rows), nodes_of_8(2), Rubick(override=False, threshold=0.5), costs=costs)
    assert restless.metrics["resizes"] > gentle.metrics["resizes"]


def test_spec_8_6_where_a_restart_costs_more_there_are_fewer() -> None:
    rng = np.random.default_rng(3)
    rows = [(float(at), 8, 6000.0, str(rng.choice(MODELS))) for at in np.sort(rng.integers(0, 40_000, 40))]
    changes = [
        run(jobs(*rows), nodes_of_8(2), Rubick(override=False), costs=Costs(suspend_s=c, resume_s=c)).metrics["resizes"]
        for c in (5.0, 300.0)
    ]
    assert changes[0] > changes[1]


def test_spec_8_8_the_running_set_is_the_allocation_and_keeps_within_the_cluster() -> None:
    """Every round: no GPU twice, no node beyond its CPUs and host memory, who holds GPUs runs and nobody else."""
    rng = np.random.default_rng(5)
    rows = [(float(at), 8, 4000.0, str(rng.choice(MODELS))) for at in np.sort(rng.integers(0, 20_000, 30))]
    trace = jobs(*rows, guaranteed=rng.integers(0, 2, 30).tolist())
    expected: list[np.ndarray[Any, Any]] = [np.zeros(0, dtype=np.int64)]

    def look(view: View, decision: Decision) -> None:
        assert len(np.unique(decision.gpus)) == len(decision.gpus) <= view.total_gpus
        running = view.jobs.rows[view.jobs.running]
        assert set(running) <= set(expected[0])  # who was given nothing does not run on
        owners = view.machine.gpus["owner"]
        assert set(owners[owners >= 0]) == set(running)
        cpus = np.zeros(len(view.machine.nodes))
        for at, count in enumerate(decision.counts):  # type: ignore[arg-type]
            mine = decision.gpus[decision.counts[:at].sum() :][:count]  # type: ignore[index]
            np.add.at(cpus, view.machine.gpus["node"][mine], decision.cpus[at])  # type: ignore[index]
        assert cpus.max() <= 96
        expected[0] = decision.rows

    result = watch(trace, nodes_of_8(2), Rubick(), look)
    assert result.metrics["completed"] == 30


def test_spec_8_8_an_evicted_job_makes_no_progress() -> None:
    """Given a best-effort job whose GPUs all go to a guaranteed one, then its work stands still until it has some."""
    trace = jobs((0, 8, 4000, "gpt-2"), (1000, 8, 4000, "gpt-2"), guaranteed=[0, 1])
    progress: list[tuple[float, bool, float]] = []

    def look(view: View, decision: Decision) -> None:
        if view.jobs.rows[0] == 0:
            progress.append((view.now_s, bool(view.jobs.running[0]), float(view.jobs.progress_s[0])))

    watch(trace, nodes_of_8(), RubickE(), look)
    stopped = [done for _, running, done in progress if not running][1:]
    assert len(stopped) > 5
    assert len(set(stopped)) == 1


def test_spec_8_8_shrink_happens_when_it_should_and_expand_only_differs() -> None:
    trace = jobs((0, 8, 20_000, "vit"), (10_000, 8, 2_000, "gpt-2"))
    full, expand_only = (run(trace, nodes_of_8(), Rubick(headroom=0.0, shrink=shrink)) for shrink in (True, False))
    assert (10_000.0, 0, "resize") in story(full)
    assert not story(expand_only, "suspend")
    assert full.jobs["finish_s"][1] < expand_only.jobs["finish_s"][1]


# --- guaranteed jobs and quotas ---------------------------------------------------------------------------------------


def test_a_guaranteed_job_gets_fewer_gpus_than_it_asked_for_if_they_keep_its_speed() -> None:
    """Given a slow plan of the user's own, then a better one needs fewer GPUs for the same speed."""
    trace = jobs((0, 8, 1000, "gpt-2"), (0, 8, 1000, "gpt-2"), plan=["zero-offload8+gc"] * 2, guaranteed=[1, 1])
    counts: list[int] = []
    watch(trace, nodes_of_8(), Rubick(headroom=1.0), lambda _, decision: counts.extend(decision.counts))  # type: ignore[arg-type]
    assert max(counts) < 8
    assert len(counts) >= 2


def test_a_tenant_beyond_its_quota_waits() -> None:
    """Given a quota of 8 GPUs and two guaranteed jobs that need 8 each, then the second waits for the first."""
    trace = jobs((0, 8, 1000, "gpt-2"), (0, 8, 1000, "gpt-2"), vc=["A", "A"], guaranteed=[1, 1])
    fates: list[list[int]] = []
    policy = RubickN(quotas="A=8")
    result = watch(trace, nodes_of_8(2), policy, lambda _, decision: fates.append(decision.fate.tolist()))
    assert fates[0] == [HOLDS, OVER_QUOTA]
    assert result.jobs["first_start_s"].to_list() == [0, 1000]
    both = run(trace, nodes_of_8(2), RubickN())
    assert both.jobs["first_start_s"].to_list() == [0, 0]


def test_a_best_effort_job_is_told_that_there_are_no_gpus() -> None:
    trace = jobs((0, 8, 1000, "gpt-2"), (10, 8, 1000, "gpt-2"))
    fates: list[list[int]] = []
    watch(trace, nodes_of_8(), RubickN(), lambda _, decision: fates.append(decision.fate.tolist()))
    assert fates[1] == [HOLDS, NO_GPUS]


# --- starvation -------------------------------------------------------------------------------------------------------


def test_a_gang_does_not_wait_for_ever_behind_small_jobs() -> None:
    """Given small jobs that keep every node busy, then a gang of 16 starts when its patience is over, and is left."""
    rows = [(0.0, 16, 3000.0, "llama-2-7b")] + [(0.0, 1, 9000.0, "bert-large") for _ in range(24)]
    trace = jobs(*rows, plan=["dp2+tp8"] + ["dp1"] * 24)
    result = run(trace, nodes_of_8(2), RubickN(starvation_s=900.0, protect_s=600.0))
    assert 900 <= result.jobs["first_start_s"][0] <= 960
    assert result.metrics["completed"] == 25
    patient = run(trace, nodes_of_8(2), RubickN(starvation_s=200_000.0))
    assert patient.jobs["first_start_s"][0] > 3000


# --- refit ------------------------------------------------------------------------------------------------------------


def test_a_model_is_refitted_when_what_was_measured_and_what_was_predicted_part() -> None:
    """Given a world that is not quite as the book says, then the new book is nearer to it."""
    both = ((0.0, 8, 4000.0, "bert-large"), (0.0, 8, 4000.0, "gpt-2"))
    trace = jobs(*both, (1000.0, 1, 1.0, "vit"), plan=["dp8", "zero-dp8", "dp1"])
    gaps: list[float] = []
    memories: list[RubickMemory] = []

    def look(view: View, decision: Decision) -> None:
        assert isinstance(decision.memory, RubickMemory)
        memories.append(decision.memory)
        for number, sample in decision.memory.samples:
            books = (view.plans, decision.memory.book or view.plans)
            before, after = (book.of(number, sample.plan, sample.nodes, int(sample.cpus)).iteration_s for book in books)
            gaps.append(abs(before / sample.iteration_s - 1) - abs(after / sample.iteration_s - 1))

    watch(trace, nodes_of_8(2), RubickN(refit_above=0.005), look, perf=Plans(truth="measured"))
    assert memories[0].book is None  # nothing was measured yet
    assert memories[-1].book is not None
    assert min(gaps) > 0
    assert len(memories[-1].samples) <= 2 * len(memories)


def test_without_a_gap_nothing_is_refitted() -> None:
    trace = jobs((0, 8, 4000, "bert-large"))

    def look(view: View, decision: Decision) -> None:
        assert decision.memory == RubickMemory()

    watch(trace, nodes_of_8(), Rubick(refit_above=0.005), look)
    watch(trace, nodes_of_8(), Rubick(refit_above=0.0), look, perf=Plans(truth="measured"))


def test_a_model_is_refitted_once_per_round() -> None:
    """Given submissions every second, then refits are a round apart."""
    trace = jobs(*((float(at), 1, 300.0, "bert-large") for at in range(12)))
    refits: list[float] = []

    def look(view: View, decision: Decision) -> None:
        assert isinstance(decision.memory, RubickMemory)
        refits.extend(at_s for _, at_s in decision.memory.refitted_s)

    watch(trace, nodes_of_8(), Rubick(refit_above=0.001, round_s=60.0), look, perf=Plans(truth="measured"))
    times = np.unique(refits)
    assert len(times)
    assert (np.diff(times) >= 60.0).all()


@given(trace=planned())
@effort(8)
def test_whatever_a_refit_finds_nodes_keep_within_their_cpus_and_jobs_finish(trace: Trace) -> None:
    """Given a book that is refitted all the time, then every Decision still passes the checker."""
    offload = trace.jobs.with_columns(pl.lit("zero-offload").alias("plan"))
    policy = Rubick(refit_above=0.001, doubt=0.0)
    result = run(replace(trace, jobs=offload), nodes_of_8(2), policy, perf=Plans(truth="measured"))
    assert result.metrics["completed"] == len(trace)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def refusal(trace: Trace, cluster: Cluster, policy: Policy) -> str:
    with pytest.raises(UserError) as caught:
        run(trace, cluster, policy)
    return str(caught.value)


def test_a_quota_of_nobody_is_refused() -> None:
    trace = jobs((0, 8, 10, "gpt-2"), vc=["alpha"])
    text = refusal(trace, nodes_of_8(), Rubick(quotas="alhpa=8"))
    assert "quotas name 'alhpa', which no job is of" in text
    assert "did you mean 'alpha'?" in text


@pytest.mark.parametrize(
    ("quotas", "words"),
    [
        ("A", ("rubick: quotas=A: 'A' is not NAME=NUMBER", "quotas=vcA=64,vcB=32")),
        ("A=1,A=2", ("quotas names 'A' twice",)),
        ("A=-1", ("rubick: the quota of 'A' is -1", "0 or more")),
    ],
)
def test_quotas_that_make_no_sense_are_refused(quotas: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        Rubick(quotas=quotas)
    for word in words:
        assert word in str(caught.value)


def test_a_promise_beyond_the_quota_is_refused() -> None:
    trace = jobs((0, 8, 10, "gpt-2"), vc=["A"], guaranteed=[1])
    text = refusal(trace, nodes_of_8(), RubickN(quotas="A=4"))
    assert "a guaranteed job of 'A' (row 0, 8 GPUs) needs 8 GPUs for the speed that it asked for, the quota of" in text
    assert "set quotas=A=8 or more, or guaranteed=0" in text


def test_quotas_beyond_the_cluster_are_refused() -> None:
    trace = jobs((0, 8, 10, "gpt-2"), vc=["A"], guaranteed=[1])
    text = refusal(trace, nodes_of_8(1), Rubick(quotas="A=9"))
    assert text.startswith("rubick: the quotas add up to 9 GPUs, the cluster has 8")


@pytest.mark.parametrize("guaranteed", [0, 1])
@pytest.mark.parametrize("policy", ["rubick", "rubick-e", "rubick-r", "rubick-n", "sia-like", "synergy-like"])
def test_gpus_that_no_plan_uses_stop_nobody(policy: str, guaranteed: int) -> None:
    """Given a trace without models whose jobs ask for 3 and 7 GPUs, then all of them run, some GPUs idle."""
    columns = {
        "job_id": ["a", "b", "c"], "submit_time": [0.0, 10.0, 20.0], "num_gpus": [3.0, 7.0, 1.0],
        "duration": [500.0] * 3, "guaranteed": [guaranteed] * 3,
    }  # fmt: skip
    for seed in range(3):
        result = simulate(Trace.of("odd", columns), nodes_of_8(2), policy, perf="plans", seed=seed)
        assert result.metrics["completed"] == 3


def test_a_promise_of_a_plan_that_cannot_run_is_refused() -> None:
    """Given LLaMA-30B with its whole state on each of 8 GPUs, then the error names plan, reason and another plan."""
    from thebes.perf.plans.site import A800
    from thebes.perf.plans.transformer import catalogue

    library = Library(PlanBook((catalogue()["llama-30b"],), A800), Room(8, 8, 96, 1600.0), Freedom())
    with pytest.raises(UserError) as caught:
        library.curve(Demand(0, 8, plan_of_text("dp4+tp2"), 8, True, 1, 64))
    assert "a guaranteed job of llama-30b asks for 8 GPUs with plan dp4+tp2, which cannot run: needs " in str(
        caught.value
    )
    assert "set plan to " in str(caught.value)


def plan_of_text(text: str) -> int:
    from thebes.model.plan import parse_plan

    return parse_plan(text).code


# --- the published workload -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published() -> Trace:
    return read("rubick-406")


def test_spec_8_7_every_job_of_the_published_workload_finishes_and_the_ablations_are_ordered(published: Trace) -> None:
    """Spec 8.7, and no livelock (7.3): 406 jobs on 64 GPUs; each freedom that is taken away costs completion time."""
    results = {
        name: run(published, nodes_of_8(8), find(name)()) for name in ("rubick", "rubick-e", "rubick-r", "rubick-n")
    }
    assert {name: result.metrics["completed"] for name, result in results.items()} == dict.fromkeys(results, 406)
    full, e, r, n = (results[name].metrics["avg_jct"] for name in results)
    assert full < min(e, r)
    assert max(e, r) < n


def test_expand_only_is_worse_on_the_published_workload(published: Trace) -> None:
    full, expand_only = (run(published, nodes_of_8(8), Rubick(shrink=shrink)).metrics for shrink in (True, False))
    assert expand_only["completed"] == 406
    assert full["avg_jct"] < expand_only["avg_jct"]


def test_promises_are_kept_as_measured_on_the_published_workload(published: Trace) -> None:
    """Given half of the jobs guaranteed and a world that is not as predicted, then none of them runs below its SLA."""
    chosen = np.random.default_rng(406).integers(0, 2, len(published))
    columns = (pl.Series("guaranteed", chosen), pl.Series("vc", np.where(chosen == 1, "A", "B")))
    trace = replace(published, jobs=published.jobs.with_columns(*columns))
    result = run(trace, nodes_of_8(8), Rubick(quotas="A=48"), perf=Plans(truth="measured"))
    assert result.metrics["completed"] == 406
    assert result.jobs.filter(pl.col("guaranteed"))["speed_mean"].min() >= 0.99  # type: ignore[operator]
