"""Jobs with execution plans: a Decision can change plan, GPUs and CPUs of a running job, each at its price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest

import thebes
from kit.workloads import finishes, story
from thebes import Decision, Policy, Trace, View
from thebes.model.cluster import Cluster, NodeKind, uniform
from thebes.model.decision import HOLDS, NOT_CHOSEN
from thebes.model.errors import UserError
from thebes.model.facts import PLANS
from thebes.model.jobs import NEVER
from thebes.model.plan import Plan, parse_plan
from thebes.model.view import HiddenFromPolicy
from thebes.perf.plans.book import PlanBook
from thebes.perf.plans.site import site_of
from thebes.perf.plans.speed import Plans
from thebes.perf.plans.transformer import catalogue
from thebes.sim.costs import FREE_OF_COST, Costs

BY_MODEL = Plans(truth="model")


def cluster(nodes: int = 1, cpus: int = 96) -> Cluster:
    kind = NodeKind(8, gpu_type="A800-80GB", gpu_memory_gib=80, cpus=cpus, memory_gib=1600)
    return uniform(f"{nodes}x8", 1, nodes, kind)


def planned(*jobs: tuple[float, int, float, str], **columns: Sequence[Any]) -> Trace:
    """(submit, GPUs, duration, model) per job; further columns by name."""
    submit, gpus, duration, model = zip(*jobs, strict=True)
    ids = [f"j{i}" for i in range(len(jobs))]
    return Trace.of(
        "planned",
        {
            "job_id": ids,
            "submit_time": submit,
            "num_gpus": [float(g) for g in gpus],
            "duration": duration,
            "model": model,
        }
        | columns,
    )


@dataclass(frozen=True)
class Wanted:
    """What a job shall have, from an instant on; no plan named: what the mechanism makes of it."""

    gpus: tuple[int, ...]
    plan: str = ""
    cpus: int = 0
    from_s: float = 0.0


@dataclass(frozen=True)
class Puppet(Policy):
    """Gives every job what the test has written down for it."""

    name: ClassVar[str] = "puppet"
    needs: ClassVar[frozenset[str]] = frozenset({PLANS})
    script: Mapping[int, Sequence[Wanted]] = ()  # type: ignore[assignment]

    def decide(self, view: View) -> Decision:
        now = [max((w for w in self.script[row] if w.from_s <= view.now_s), key=lambda w: w.from_s)
               for row in view.jobs.rows.tolist()]  # fmt: skip
        held = [(row, w) for row, w in zip(view.jobs.rows.tolist(), now, strict=True) if w.gpus]
        later = [w.from_s for row in view.jobs.rows.tolist() for w in self.script[row] if w.from_s > view.now_s]
        return Decision(
            rows=np.array([row for row, _ in held], dtype=np.int64),
            gpus=np.array([gpu for _, w in held for gpu in w.gpus], dtype=np.int64),
            fate=np.array([HOLDS if w.gpus else NOT_CHOSEN for w in now], dtype=np.int64),
            wake_s=min(later, default=NEVER),
            counts=np.array([len(w.gpus) for _, w in held], dtype=np.int64),
            plans=np.array([parse_plan(w.plan).code for _, w in held]) if any(w.plan for _, w in held) else None,
            cpus=np.array([w.cpus for _, w in held]) if any(w.cpus for _, w in held) else None,
        )


def run(trace: Trace, *script: Sequence[Wanted], on: Cluster | None = None, **options: Any) -> thebes.Result:
    options = {"costs": FREE_OF_COST, "perf": BY_MODEL} | options
    return thebes.simulate(trace, on or cluster(), Puppet(script=dict(enumerate(script))), **options)


def book_of(model: str, nodes: int = 1, batch: int | None = None) -> PlanBook:
    return PlanBook((catalogue()[model],), site_of(cluster(nodes), 0))


def iteration_s(model: str, plan: str, cpus: int = 12, nodes: int = 1) -> float:
    outlook = book_of(model, nodes).of(0, parse_plan(plan), nodes, cpus)
    assert outlook is not None
    return outlook.iteration_s


ALL = tuple(range(8))


def test_speed_one_is_the_asked_plan_and_another_plan_runs_as_fast_as_its_iteration_is_short() -> None:
    """Given 100 s of work under the asked plan; when it runs under another; then time goes as the iterations do."""
    trace = planned((0, 8, 100, "bert-large"), plan=["dp8"])
    assert finishes(run(trace, [Wanted(ALL, "dp8")])) == pytest.approx([100])
    slower = iteration_s("bert-large", "dp8+gc") / iteration_s("bert-large", "dp8")
    assert slower > 1.1
    assert finishes(run(trace, [Wanted(ALL, "dp8+gc")])) == pytest.approx([100 * slower])


def test_another_plan_on_the_same_gpus_is_a_reconfiguration_and_costs_suspend_and_resume() -> None:
    trace = planned((0, 8, 100, "bert-large"), plan=["dp8+gc"])
    faster = iteration_s("bert-large", "dp8+gc") / iteration_s("bert-large", "dp8")
    costs = Costs(suspend_s=3, resume_s=2, migrate_s=1000)
    result = run(trace, [Wanted(ALL, "dp8+gc"), Wanted(ALL, "dp8", from_s=50)], costs=costs)
    assert finishes(result) == pytest.approx([50 + 5 + 50 / faster])
    assert [kind for _, _, kind in story(result)] == ["submit", "start", "reconfigure", "finish"]
    job = result.jobs.row(0, named=True)
    assert (job["reconfigurations"], job["resizes"], job["migrations"], job["preemptions"]) == (1, 0, 0, 0)
    assert job["plan_last"] == "dp8"
    assert job["overhead_gpu_s"] == pytest.approx(8 * 5)
    assert result.events["plan"].to_list()[1:] == ["dp8+gc", "dp8", "dp8"]
    assert result.metrics["reconfigurations"] == 1


def test_the_global_batch_is_kept_when_a_job_grows() -> None:
    """Given 4 GPUs asked for; when it gets 8; then speed is the ratio of iterations, not twice that."""
    trace = planned((0, 4, 100, "bert-large"), plan=["dp4"])
    ratio = iteration_s("bert-large", "dp4") / iteration_s("bert-large", "dp8")
    assert 1.0 < ratio < 2.0
    result = run(trace, [Wanted(ALL[:4], "dp4"), Wanted(ALL, "dp8", from_s=50)])
    assert finishes(result) == pytest.approx([50 + 50 / ratio])
    assert result.jobs["resizes"].to_list() == [1]


def test_more_cpus_speed_an_offloaded_job_up_at_once_and_for_nothing() -> None:
    trace = planned((0, 1, 100, "llama-2-7b"), plan=["zero-offload"], cpus=[2])
    plan = str(book_of("llama-2-7b").best(0, 1, 1, 2).plan)  # type: ignore[union-attr]
    assert plan.startswith("zero-offload1")
    faster = iteration_s("llama-2-7b", plan, cpus=2) / iteration_s("llama-2-7b", plan, cpus=12)
    assert faster > 1.05
    costs = Costs(suspend_s=30, resume_s=30)
    script = [Wanted((0,), plan, cpus=2), Wanted((0,), plan, cpus=12, from_s=50)]
    result = run(trace, script, costs=costs)
    assert finishes(result) == pytest.approx([50 + 50 / faster])
    assert [kind for _, _, kind in story(result)] == ["submit", "start", "finish"]
    assert result.jobs["cpus_last"].to_list() == [12]


def test_a_width_without_a_plan_gets_the_asked_type_of_plan_and_leaves_idle_what_that_cannot_use() -> None:
    """Given data parallel with a batch of 32; when it gets 3 GPUs; then it runs on 2 of them."""
    trace = planned((0, 4, 100, "bert-large"), plan=["dp4"])
    result = run(trace, [Wanted(ALL[:3])])
    assert result.jobs["plan_last"].to_list() == ["dp2"]
    assert finishes(result) == pytest.approx(
        [100 * iteration_s("bert-large", "dp2") / iteration_s("bert-large", "dp4")]
    )


def test_a_plan_that_leaves_gpus_idle_is_kept_at_the_next_decision() -> None:
    """Given 3 GPUs of which its plan uses 2; when nothing changes at a later decision; then it goes on as before."""
    trace = planned((0, 4, 100, "bert-large"), plan=["dp4"])
    once, again = run(trace, [Wanted(ALL[:3])]), run(trace, [Wanted(ALL[:3]), Wanted(ALL[:3], from_s=10)])
    assert finishes(again) == pytest.approx(finishes(once))
    assert [kind for _, _, kind in story(again)] == ["submit", "start", "finish"]


def test_idle_gpus_may_lie_on_more_nodes_than_the_plan_uses() -> None:
    """Given 3 GPUs on 3 nodes, of which the plan uses 2; then it runs as on 2 nodes."""
    trace = planned((0, 4, 100, "bert-large"), plan=["dp4"])
    result = run(trace, [Wanted((0, 8, 16))], on=cluster(3))
    slower = iteration_s("bert-large", "dp2", nodes=2) / iteration_s("bert-large", "dp4")
    assert finishes(result) == pytest.approx([100 * slower])


def test_a_policy_that_knows_nothing_of_plans_runs_every_job_under_its_own() -> None:
    trace = planned((0, 8, 100, "bert-large"), (0, 8, 50, "gpt-2"), plan=["dp8", "zero-dp8"])
    for policy in ("fifo", "tiresias-l", "gandiva", "themis"):
        result = thebes.simulate(trace, cluster(2), policy, perf=BY_MODEL, costs=FREE_OF_COST)
        assert finishes(result) == pytest.approx([100, 50]), policy
        assert result.jobs["plan_last"].to_list() == ["dp8", "zero-dp8"]


def test_a_job_without_a_plan_asks_for_the_best_one() -> None:
    trace = planned((0, 8, 100, "llama-2-7b"))
    best = book_of("llama-2-7b").best(0, 8, 1, 12)
    assert best is not None
    result = thebes.simulate(trace, cluster(), "fifo", perf=BY_MODEL)
    assert result.jobs["plan_last"].to_list() == [str(best.plan)]


def test_jobs_of_one_model_with_other_batches_are_other_work() -> None:
    trace = planned((0, 8, 100, "bert-large"), (0, 8, 100, "bert-large"), global_batch=[32, 64], plan=["dp8", "dp8"])
    result = thebes.simulate(trace, cluster(2), "fifo", perf=BY_MODEL)
    assert result.jobs["model"].to_list() == ["bert-large", "bert-large (batch 64)"]


def test_traces_without_models_get_models_that_can_use_their_gpus() -> None:
    columns = {
        "job_id": ["a", "b", "c"],
        "submit_time": [0.0] * 3,
        "num_gpus": [1.0, 4.0, 7.0],
        "duration": [10.0] * 3,
    }
    result = thebes.simulate(Trace.of("bare", columns), cluster(2), "fifo", perf=BY_MODEL)
    assert finishes(result) == pytest.approx([10, 10, 10])
    assert "1 of 3 jobs ask for a number of GPUs that no plan of their model uses: some idle" in result.notes


def test_gpus_that_no_plan_uses_stand_idle_wherever_they_are() -> None:
    """Given 3 GPUs on 3 nodes for a job whose plans use 2: then it runs as on 2 nodes."""
    trace = planned((0, 2, 100, "bert-large"), plan=["dp2"])
    result = run(trace, [Wanted((0, 8, 16))], on=cluster(3))
    assert result.jobs["plan_last"].to_list() == ["dp2"]
    slower = iteration_s("bert-large", "dp2", nodes=2) / iteration_s("bert-large", "dp2")
    assert finishes(result) == pytest.approx([100 * slower])


# -- what a policy may not do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted(ALL[:4], "dp8"), "plan dp8, which takes 8 GPUs, and 4 GPUs"),
        (Wanted(ALL[:1], "dp1"), "plan dp1, which cannot run"),
        (Wanted(ALL, "zero-dp8", cpus=13), "cannot run: 13 CPUs for each of 8 GPUs of a node that has 96"),
        (Wanted(ALL, "zero-dp8", cpus=-1), "cannot run: -1 CPUs"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(wanted: Wanted, message: str) -> None:
    trace = planned((0, 8, 100, "llama-2-7b"), plan=["zero-dp"])
    with pytest.raises(UserError, match=message):
        run(trace, [wanted])


def test_a_decision_that_names_plans_names_one_for_each_row() -> None:
    trace = planned((0, 4, 100, "bert-large"), (0, 4, 100, "bert-large"))

    class Forgetful(Puppet):
        def decide(self, view: View) -> Decision:
            decision = super().decide(view)
            return Decision(decision.rows, decision.gpus, decision.fate, plans=np.zeros(len(decision.rows), np.int64))

    with pytest.raises(UserError, match="names no execution plan for job row 0"):
        thebes.simulate(trace, cluster(), Forgetful(script={0: [Wanted(ALL[:4])], 1: [Wanted(ALL[4:])]}), perf=BY_MODEL)
    with pytest.raises(UserError, match="names 1 rows but 2 plans"):
        Decision(rows=np.array([0]), gpus=np.array([0]), fate=np.array([HOLDS]), plans=np.array([1, 2]))


def test_cpus_of_a_node_are_not_given_twice() -> None:
    trace = planned((0, 4, 100, "bert-large"), (0, 4, 100, "bert-large"), plan=["dp4", "dp4"])
    half = [Wanted(ALL[:4], "dp4", cpus=12)], [Wanted(ALL[4:], "dp4", cpus=12)]
    assert finishes(run(trace, *half)) == pytest.approx([100, 100])
    more = [Wanted(ALL[:4], "dp4", cpus=13)], [Wanted(ALL[4:], "dp4", cpus=12)]
    with pytest.raises(UserError, match="gives the jobs on a node more CPUs than it has"):
        run(trace, *more)


@dataclass(frozen=True)
class Halves(Puppet):
    """As told, and everybody has half of each of its GPUs."""

    shares: ClassVar[bool] = True

    def decide(self, view: View) -> Decision:
        decision = super().decide(view)
        return replace(decision, shares=np.full(len(decision.rows), 0.5))


@pytest.mark.parametrize(("node_gib", "enough"), [(2.1, True), (1.9, False)])
def test_host_memory_of_a_node_is_not_given_twice(node_gib: float, enough: bool) -> None:
    """Given a GPU that two offloaded jobs share, and so its CPUs; when their states do not fit into the host's memory;
    then the checker speaks up."""
    outlook = book_of("llama-2-7b").best(0, 1, 1, 12)
    assert outlook is not None
    assert outlook.host_gib > 50
    node = NodeKind(1, gpu_type="A800-80GB", gpu_memory_gib=200, cpus=12, memory_gib=node_gib * outlook.host_gib)
    trace = planned((0, 1, 100, "llama-2-7b"), (0, 1, 100, "llama-2-7b"), plan=[str(outlook.plan)] * 2)
    both = Halves(script={row: [Wanted((0,), str(outlook.plan), cpus=12)] for row in range(2)})
    if enough:
        assert len(finishes(thebes.simulate(trace, uniform("1x1", 1, 1, node), both, perf="plans"))) == 2
        return
    with pytest.raises(UserError, match="gives the jobs on a node more host memory than it has"):
        thebes.simulate(trace, uniform("1x1", 1, 1, node), both, perf="plans")


def test_plans_are_hidden_from_policies_that_do_not_declare_them() -> None:
    class Curious(Puppet):
        needs: ClassVar[frozenset[str]] = frozenset()

        def decide(self, view: View) -> Decision:
            return view.plans.best(0, 1, 1, 1)

    with pytest.raises(HiddenFromPolicy, match=r"view\.plans is hidden"):
        thebes.simulate(planned((0, 1, 1, "vit")), cluster(), Curious(), perf=BY_MODEL)


def test_a_policy_of_plans_wants_the_performance_model_of_plans() -> None:
    with pytest.raises(UserError, match="decides on execution plans, and performance model tiers has none"):
        run(planned((0, 1, 1, "vit")), [Wanted((0,))], perf="tiers")


# -- what a trace may not say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "gpus", "columns", "message", "hint"),
    [
        ("bert-large", 3, {"plan": ["dp3"]}, "batch 32", "2 or 4 would do"),
        ("bert-large", 4, {"plan": ["dp8"]}, "plan = dp8 takes 8 GPUs, num_gpus = 4", "change one of the two"),
        ("bert-large", 4, {"plan": ["ddp4"]}, "'ddp4' in 'ddp4' is no part of an execution plan", "zero-dp8"),
        (
            "bert-large",
            7,
            {},
            "uses 7 GPUs: no plan divides batch 32 .*; num_gpus = 4 or 8 would do",
            "thebes plan bert-large",
        ),
        ("llama-2-7b", 1, {"plan": ["dp"]}, "plan = dp: llama-2-7b cannot run under it on 1 GPUs", "would do"),
        ("llama-30b", 1, {}, "532.7 GiB of host memory per GPU, has 200; num_gpus = 4 would", "thebes plan llama-30b"),
        ("bert-large", 4, {"cpus": [13]}, "cpus = 13 for each GPU, but a node has 96 CPUs for 8 GPUs", "at most 12"),
        ("bert-large", 4, {"cpus": ["few"]}, "cpus = few", "whole number"),
        ("bert-large", 4, {"global_batch": [0]}, "global_batch = 0", "whole number from 1"),
        ("bert-large", 4, {"guaranteed": ["maybe"]}, "guaranteed = maybe", "1 .guaranteed. or 0"),
        ("bert-large", 4, {"plans": ["dp|fsdp"]}, "'fsdp' is no family of plans", "zero-offload"),
        ("bert-large", 4, {"plans": ["3d"]}, "bert-large accepts none of them", "it accepts dp"),
    ],
)
def test_what_the_trace_says_wrong_of_plans_is_named(
    model: str, gpus: int, columns: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        thebes.simulate(planned((0, gpus, 10, model), **columns), cluster(), "fifo", perf=BY_MODEL)
    assert pl.Series([caught.value.hint]).str.contains(hint).all(), caught.value.hint
    assert "job j0" in str(caught.value)


def test_one_job_without_a_model_among_others_is_named() -> None:
    with pytest.raises(UserError, match="job j1: names no model"):
        thebes.simulate(planned((0, 1, 1, "vit"), (0, 1, 1, None)), cluster(), "fifo", perf=BY_MODEL)  # type: ignore[arg-type]


def test_clusters_of_several_kinds_are_refused() -> None:
    mixed = thebes.model.cluster.build("mixed", [(NodeKind(8, "A800"), 1, [0]), (NodeKind(8, "V100"), 1, [0])])
    with pytest.raises(UserError, match="clusters of one kind of node"):
        thebes.simulate(planned((0, 1, 1, "vit")), mixed, "fifo", perf=BY_MODEL)
    same_gpus = [(NodeKind(8, "A800", groups=(4, 4)), 1, [0]), (NodeKind(8, "A800"), 1, [0])]
    with pytest.raises(UserError, match="clusters of one kind of node"):
        thebes.simulate(
            planned((0, 1, 1, "vit")), thebes.model.cluster.build("groups", same_gpus), "fifo", perf="plans"
        )


def test_nodes_with_fewer_cpus_than_gpus_are_refused() -> None:
    with pytest.raises(UserError, match="cpus = 4 for 8 GPUs") as caught:
        thebes.simulate(planned((0, 1, 1, "vit")), cluster(cpus=4), "fifo", perf=BY_MODEL)
    assert "cpus = 8 or more" in (caught.value.hint or "")


def test_a_gpu_type_that_nobody_knows_is_told() -> None:
    unknown = uniform("1x8", 1, 1, NodeKind(8, gpu_type="K80"))
    notes = thebes.simulate(planned((0, 1, 1, "vit")), unknown, "fifo", perf=BY_MODEL).notes
    assert any("gpu_type K80" in note and "A800-80GB" in note for note in notes)


def test_on_a_large_cluster_a_job_can_use_more_than_64_gpus() -> None:
    trace = planned((0, 64, 100, "llama-2-7b"))
    seen: list[int] = []

    class Looking(Puppet):
        def decide(self, view: View) -> Decision:
            seen.append(int(view.jobs.max_gpus[0]))
            return super().decide(view)

    for nodes in (8, 64):
        thebes.simulate(trace, cluster(nodes), Looking(script={0: [Wanted(tuple(range(64)))]}), perf=BY_MODEL)
    assert seen[0] == 64
    assert seen[1] > 64


def test_the_truth_is_what_was_measured_where_somebody_has() -> None:
    """Given plans measured on A800 nodes: dp8 0.157684 s, zero-dp8 on two nodes 0.197558 s (4 + 4 GPUs)."""
    trace = planned((0, 8, 100, "bert-large"), plan=["dp8"])
    assert finishes(run(trace, [Wanted(ALL, "dp8")], perf=Plans())) == pytest.approx([100])
    spread = run(trace, [Wanted((0, 1, 2, 3, 8, 9, 10, 11), "zero-dp8")], on=cluster(2), perf=Plans())
    assert finishes(spread) == pytest.approx([100 * 0.197558 / 0.157684], rel=1e-4)


def test_what_was_measured_holds_for_all_jobs_of_the_model_whatever_plans_they_accept() -> None:
    """Given two jobs of one model, one of which accepts fewer plans; then the same plan is as fast for both."""
    trace = planned((0, 8, 100, "bert-large"), (0, 8, 100, "bert-large"), plan=["dp8"] * 2, plans=["", "dp|zero-dp"])
    script = [Wanted(ALL, "zero-dp8")], [Wanted(tuple(range(8, 16)), "zero-dp8")]
    one, other = finishes(run(trace, *script, on=cluster(2), perf=Plans()))
    assert one == pytest.approx(other)


def test_what_was_measured_does_not_hold_for_another_model_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        'name = "bert-large"\nlayers = 12\nhidden = 1024\nheads = 16\nsequence = 512\nglobal_batch = 32\n'
    )
    trace = planned((0, 8, 100, "bert-large"), plan=["dp8"])
    script = [Wanted(ALL, "zero-dp8")]
    as_measured, by_model = (
        finishes(run(trace, script, perf=Plans(truth=truth, models_file=str(tmp_path / "own.toml"))))
        for truth in ("measured", "model")
    )
    assert as_measured == by_model


def test_plans_are_looked_for_on_as_many_gpus_as_the_cluster_has() -> None:
    """Given a guaranteed job of 128 GPUs; when Rubick decides; then it finds what keeps that promise."""
    trace = planned((0, 128, 100, "llama-2-7b"), guaranteed=[1])
    result = thebes.simulate(trace, cluster(32), "rubick", perf=BY_MODEL, costs=FREE_OF_COST)
    assert finishes(result)[0] <= 100 + 1e-6


def test_a_checkpoint_holds_what_the_transformer_says() -> None:
    """Given a resume that costs a second per GiB; then it is that of 14 bytes per parameter."""
    trace = planned((0, 1, 100, "bert-large"), plan=["dp1"])
    script = [Wanted((0,), "dp1"), Wanted((), from_s=10), Wanted((0,), "dp1", from_s=20)]
    costs = Costs(suspend_s=0, resume_s=0, resume_s_per_gib=1)
    assert finishes(run(trace, script, costs=costs)) == pytest.approx([110 + 14 * 336e6 / 2**30])


def test_a_models_file_that_is_no_toml_says_how_to_write_one() -> None:
    with pytest.raises(UserError, match=r"perf.models_file: config.json is no .toml file") as caught:
        thebes.simulate(planned((0, 1, 1, "vit")), cluster(), "fifo", perf=Plans(models_file="config.json"))
    assert 'config = "config.json"' in (caught.value.hint or "")


@pytest.mark.parametrize("policy", ["rubick", "rubick-r", "sia-like"])
def test_a_job_that_says_how_far_it_is_elastic_is_taken_at_its_word(policy: str) -> None:
    """Given six jobs on a crowded cluster and one that is alone; then nobody has fewer or more GPUs than it said."""
    jobs = [(0, 4, 3000, "gpt-2")] * 6 + [(20_000, 4, 3000, "gpt-2")]
    trace = planned(*jobs, min_gpus=[4, 2, 4, 2, 4, 2, 2], max_gpus=[4, 4, 8, 8, 4, 4, 4])  # type: ignore[arg-type]
    result = thebes.simulate(trace, cluster(2), policy, perf=BY_MODEL)
    held = result.events.filter(pl.col("kind").is_in(["start", "resume", "resize"]))
    least, most = ([trace.jobs[column][job] for job in held["job"]] for column in ("min_gpus", "max_gpus"))
    assert all(low <= gpus <= high for low, gpus, high in zip(least, held["gpus"], most, strict=True))


def test_an_unknown_truth_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown perf\.truth 'guess'"):
        Plans(truth="guess")
    assert Plan().gpus == 1


def test_gandiva_grows_a_job_by_the_same_mechanism_as_rubick() -> None:
    """Given an elastic job alone on a node; when Gandiva gives it the idle GPUs; then its plan grows with it."""
    trace = planned((0, 4, 4000, "bert-large"), plan=["dp4"], min_gpus=[2], max_gpus=[8])
    result = thebes.simulate(trace, cluster(), "gandiva", perf=BY_MODEL)
    assert [kind for _, _, kind in story(result)] == ["submit", "start", "resize", "finish"]
    assert result.events["plan"].to_list() == ["dp4", "dp4", "dp8", "dp8"]
    assert result.jobs["jct_s"][0] < 4000


def test_jobs_that_cannot_run_as_they_ask_are_counted_and_can_be_left_out() -> None:
    """Given a trace for nodes of eight GPUs on nodes of four: two jobs' tensor parallelism does not fit there."""
    small = uniform("4x4", 1, 4, NodeKind(4, gpu_type="A800-80GB", gpu_memory_gib=80, cpus=48, memory_gib=800))
    trace = planned(*[(0, 8, 10, "llama-2-7b")] * 3, plan=["dp1+tp8", "zero-dp8", "dp1+tp8"])
    with pytest.raises(UserError, match=r"job j0: plan = .*2 of 3 jobs cannot run here as they ask to") as caught:
        thebes.simulate(trace, small, "fifo", perf=BY_MODEL)
    assert "--skip-oversize leaves such jobs out" in caught.value.hint
    result = thebes.simulate(trace, small, "fifo", perf=BY_MODEL, skip_oversize=True)
    assert result.jobs["job_id"].to_list() == ["j1"]
    assert "2 of 3 jobs left out: they cannot run here as they ask (--skip-oversize)" in result.notes


def test_what_plans_take_a_gpu_for_holds_for_policies_that_share_gpus() -> None:
    """Given 8x8 without a GPU type, which plans take for A800s of 80 GB: then a job of 70 GiB finds room."""
    trace = planned((0, 4, 10, "llama-2-7b"), plan=["zero-dp4+ga2"])
    assert finishes(thebes.simulate(trace, "1x8", "srsf-1", perf=BY_MODEL)) == pytest.approx([10], rel=0.2)
