"""The baselines beside Rubick: sia-like, synergy-like, antman-like; each by examples that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_policy_conduct import is_pure, watch

from kit.effort import effort
from kit.workloads import finishes, story
from thebes import Decision, Policy, Result, Trace, UserError, View, simulate
from thebes.model.cluster import Cluster, NodeKind, uniform
from thebes.model.decision import BEHIND, HOLDS, NO_GPUS, NOT_CHOSEN, OVER_QUOTA
from thebes.model.machine import machine_of
from thebes.model.plan import parse_plan, plan_of
from thebes.perf.plans.book import PlanBook
from thebes.perf.plans.site import site_of
from thebes.perf.plans.speed import Plans
from thebes.perf.plans.transformer import catalogue
from thebes.policy.rubick.antman_like import Admitted, AntManLike
from thebes.policy.rubick.sia_like import SiaLike, choose, configurations
from thebes.policy.rubick.synergy_like import Needs, SynergyLike, deal_cpus
from thebes.sim.costs import FREE_OF_COST, Costs

BY_MODEL = Plans(truth="model")
FREE: dict[str, Any] = {"perf": BY_MODEL, "costs": FREE_OF_COST}
BASELINES: dict[str, Policy] = {
    "sia-like": SiaLike(),
    "synergy-like": SynergyLike(round_s=60),
    "synergy-like, fifo": SynergyLike(order="fifo"),
    "antman-like": AntManLike(patience_s=100),
}


def nodes_of_8(nodes: int = 1) -> Cluster:
    kind = NodeKind(8, gpu_type="A800-80GB", gpu_memory_gib=80, cpus=96, memory_gib=1600)
    return uniform(f"{nodes}x8", 1, nodes, kind)


def jobs(*rows: tuple[float, int, float, str], **columns: Sequence[Any]) -> Trace:
    """(submit, GPUs, duration, model) per job; further columns of the trace by name."""
    submit, gpus, duration, model = zip(*rows, strict=True)
    needed = {
        "job_id": [f"j{i}" for i in range(len(rows))],
        "submit_time": submit,
        "num_gpus": [float(g) for g in gpus],
        "duration": duration,
        "model": model,
    }
    return Trace.of("beside rubick", needed | columns)


def book_of(model: str) -> PlanBook:
    return PlanBook((catalogue()[model],), site_of(nodes_of_8(), 0))


def iteration_s(model: str, plan: str, cpus: int = 12) -> float:
    outlook = book_of(model).of(0, parse_plan(plan), 1, cpus)
    assert outlook is not None
    return outlook.iteration_s


def run(trace: Trace, policy: Policy, nodes: int = 1, **options: Any) -> Result:
    return simulate(trace, nodes_of_8(nodes), policy, **FREE | options)


def fates(trace: Trace, policy: Policy, at_s: float, nodes: int = 1) -> list[int]:
    """What becomes of each job alive at one instant."""
    seen: list[list[int]] = []

    def look(_: Policy, view: View, decision: Decision) -> None:
        if view.now_s == at_s:
            seen.append(decision.fate.tolist())

    watch(trace, nodes_of_8(nodes), policy, look, **FREE)
    return seen[0]


# --- what holds for all of them ---------------------------------------------------------------------------------------


@st.composite
def planned(draw: st.DrawFn) -> Trace:
    """A few jobs of several models and plans on a coarse clock, of two tenants, some of them guaranteed."""
    kinds = st.sampled_from(
        [("vit", 1, ""), ("bert-large", 2, "dp"), ("bert-large", 8, "zero-dp"), ("gpt-2", 4, "zero-offload"),
         ("gpt-2", 5, "dp1+tp5"), ("llama-2-7b", 1, "zero-offload"), ("llama-2-7b", 8, "zero-offload"),
         ("llama-2-7b", 16, "dp2+tp8"), ("t5", 4, "dp+gc")]
    )  # fmt: skip
    count = draw(st.integers(2, 12))
    chosen = [draw(kinds) for _ in range(count)]
    submit = np.cumsum([draw(st.sampled_from([0, 0, 5, 30, 200])) for _ in range(count)]).tolist()
    duration = [float(draw(st.sampled_from([3, 50, 400, 2000]))) for _ in range(count)]
    rows = [(float(s), gpus, d, model) for s, d, (model, gpus, _) in zip(submit, duration, chosen, strict=True)]
    return jobs(
        *rows,
        plan=[plan or None for *_, plan in chosen],
        cpus=[draw(st.sampled_from([1, 8, 12])) for _ in range(count)],
        guaranteed=[draw(st.integers(0, 1)) for _ in range(count)],
        vc=[draw(st.sampled_from(["A", "B"])) for _ in range(count)],
    )


def is_sound(policy: Policy, view: View, decision: Decision) -> None:
    """Nobody has a GPU of somebody else, gangs are whole, no node gives more CPUs than it has, everybody has a fate."""
    is_pure(policy, view, decision)
    assert decision.counts is not None
    assert decision.plans is not None
    assert len(np.unique(decision.gpus)) == len(decision.gpus) == decision.counts.sum()
    assert [plan_of(code).gpus for code in decision.plans.tolist()] == decision.counts.tolist()
    assert len(decision.fate) == len(view.jobs)
    held = view.jobs.asked_cpus[decision.fate == HOLDS] if decision.cpus is None else decision.cpus
    node = view.machine.gpus["node"][decision.gpus]
    given_cpus = np.bincount(node, weights=np.repeat(held, decision.counts), minlength=len(view.machine.nodes))
    assert (given_cpus <= view.machine.nodes["cpus"]).all()


@pytest.mark.parametrize("name", sorted(BASELINES))
@given(trace=planned(), costs=st.sampled_from([FREE_OF_COST, Costs()]))
@effort(12)
def test_every_decision_is_pure_and_sound_and_all_jobs_finish(name: str, trace: Trace, costs: Costs) -> None:
    result = watch(trace, nodes_of_8(2), BASELINES[name], is_sound, perf=BY_MODEL, costs=costs)
    assert result.metrics["completed"] == len(trace.jobs)


@pytest.mark.parametrize("name", ["synergy-like", "antman-like"])
@given(trace=planned())
@effort(8)
def test_gpus_and_plan_are_those_asked_for(name: str, trace: Trace) -> None:
    def look(_: Policy, view: View, decision: Decision) -> None:
        holds = decision.fate == HOLDS
        assert decision.counts is not None
        assert decision.plans is not None
        assert decision.counts.tolist() == view.jobs.gpus[holds].tolist()
        assert decision.plans.tolist() == view.jobs.asked_plan[holds].tolist()

    watch(trace, nodes_of_8(2), BASELINES[name], look, **FREE)


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_a_lone_job_is_asked_about_twice_and_no_more(name: str) -> None:
    """Given nobody else, whatever it is given first is all that it can use: no round is needed after that."""
    seen: list[float] = []
    trace = jobs((0, 8, 5000, "bert-large"), plan=["dp8"])
    watch(trace, nodes_of_8(), BASELINES[name], lambda _, view, __: seen.append(view.now_s), **FREE)
    assert seen == [0.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SynergyLike(order="lass"), "synergy-like: order=lass is unknown\ndid you mean 'las'?"),
        (
            lambda: AntManLike(quotas="A"),
            "antman-like: quotas=A: 'A' is not NAME=NUMBER\nwrite for instance quotas=vcA",
        ),
        (lambda: AntManLike(quotas="A=1,A=2"), "antman-like: quotas names 'A' twice\nname each"),
        (lambda: AntManLike(quotas="A=-1"), "antman-like: the quota of 'A' is -1\nquotas are GPUs: 0 or more"),
        (lambda: AntManLike(quotas="X=1").check(nodes_of_8(), ("A",)), "antman-like: quotas name 'X', which no job is"),
        (
            lambda: AntManLike(quotas="A=6,B=4").check(nodes_of_8(), ("A", "B")),
            "antman-like: the quotas add up to 10 GPUs, the cluster has 8\nquotas are guaranteed: lower some",
        ),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value).startswith(message)


# --- sia-like ---------------------------------------------------------------------------------------------------------


def in_units(*values: float) -> np.ndarray[Any, Any]:
    return np.array([round(value * 1000) for value in values])


@pytest.mark.parametrize(("count", "expected"), [(1, [8]), (2, [4, 4]), (3, [4, 2, 2]), (5, [2, 2, 2, 2, 0])])
def test_equal_jobs_get_equal_parts(count: int, expected: list[int]) -> None:
    """Linear speedup, p = -0.5: 1, 2, 4, 8 GPUs cost 1, 0.71, 0.5, 0.35; none costs 1.1.

    Three: 0.5 + 0.71 + 0.71 = 1.91. Five: 4 x 0.71 + 1.1 = 3.93, as with every lambda below 1.29; three on two GPUs and
    two on one are 4.12.
    """
    gpus, values = np.array([1, 2, 4, 8]), in_units(0.1, 0.393, 0.6, 0.746)
    chosen = choose([gpus] * count, [values] * count, 8)
    assert [int(gpus[k]) if k >= 0 else 0 for k in chosen] == expected


def test_a_job_that_gains_more_gets_more() -> None:
    """Speedups 1, 2, 4 beside 1, 1.1, 1.2 on 5 GPUs: 0.6 + 0.1 is more than 0.393 + 0.147 or anything else."""
    steep, flat = in_units(0.1, 0.393, 0.6), in_units(0.1, 0.147, 0.187)
    assert choose([np.array([1, 2, 4])] * 2, [flat, steep], 5) == [0, 2]


@given(
    offers=st.lists(
        st.dictionaries(st.integers(1, 5), st.integers(-5, 9), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    capacity=st.integers(0, 9),
)
@effort(150)
def test_no_other_choice_is_worth_more(offers: list[dict[int, int]], capacity: int) -> None:
    gpus = [np.array(sorted(offer)) for offer in offers]
    values = [np.array([offer[g] for g in sorted(offer)]) for offer in offers]

    def worth(chosen: Sequence[int]) -> int:
        taken = [(int(gpus[j][k]), int(values[j][k])) for j, k in enumerate(chosen) if k >= 0]
        return sum(value for _, value in taken) if sum(count for count, _ in taken) <= capacity else -1

    best = max(worth(every) for every in product(*(range(-1, len(each)) for each in gpus)))
    assert worth(choose(gpus, values, capacity)) == best


def test_a_lone_job_grows_to_where_its_plan_is_fastest_and_keeps_its_type() -> None:
    """Given one node and 4 GPUs asked for, it gets 8 and is faster by the ratio of the iterations."""
    trace = jobs((0, 4, 100, "bert-large"), plan=["zero-dp4"], cpus=[12])
    result = run(trace, SiaLike())
    assert result.jobs["plan_last"].to_list() == ["zero-dp8"]
    faster = iteration_s("bert-large", "zero-dp4") / iteration_s("bert-large", "zero-dp8")
    assert finishes(result) == pytest.approx([100 / faster])


@pytest.mark.parametrize(
    ("model", "plan", "expected"),
    [
        ("bert-large", "zero-dp4", [1, 2, 4, 8, 16]),  # what divides its batch of 32, as long as it is faster
        ("gpt-2", "dp1+tp5", [5, 10, 20, 40]),  # replicas of 5, as many as divide its batch of 16
        ("llama-30b", "dp4+tp2+pp5", [20, 40]),  # replicas of 10, of which one alone needs too much memory
    ],
)
def test_what_a_job_can_be_given(model: str, plan: str, expected: list[int]) -> None:
    offer = configurations(book_of(model), 0, parse_plan(plan).code, 12, parse_plan(plan).gpus, 64)
    assert offer.gpus.tolist() == expected
    assert (np.diff(offer.samples_s) > 0).all()
    assert all(plan_of(code).like(parse_plan(plan)) for code in offer.plans.tolist())


def test_an_offloaded_job_stays_offloaded_however_many_gpus_it_gets() -> None:
    trace = jobs((0, 1, 1000, "bert-large"), plan=["zero-offload"])
    result = run(trace, SiaLike())
    assert result.jobs["plan_last"].to_list()[0].startswith("zero-offload8")


def test_gpus_are_divided_at_the_beginning_of_rounds() -> None:
    """Given all GPUs taken at 0, who comes at 10 starts at 60, at the other's expense; at 120 that one grows again."""
    trace = jobs((0, 8, 1000, "bert-large"), (10, 8, 1, "bert-large"), plan=["dp8", "dp8"])
    result = run(trace, SiaLike())
    assert story(result, "start", "resize")[:3] == [(0.0, 0, "start"), (60.0, 0, "resize"), (60.0, 1, "start")]
    assert story(result, "resize")[1][0] == 120.0
    assert fates(trace, SiaLike(), 10.0) == [HOLDS, NOT_CHOSEN]


def test_a_restart_is_worth_it_only_after_a_while() -> None:
    """Given restarts at 500 s, a job that came at 0 may change at 1000: (T - 0) / (T + 500) must not eat the gain.

    From 4 GPUs to 8 its throughput grows by less than 2; T / (T + 500) is below 1/2 until 500 s.
    """
    ratio = iteration_s("bert-large", "dp4") / iteration_s("bert-large", "dp8")
    assert 1.0 < ratio < 2.0
    trace = jobs((0, 4, 200, "bert-large"), (0, 4, 20000, "bert-large"), plan=["dp4", "dp4"])
    result = run(trace, SiaLike(), costs=Costs(suspend_s=250, resume_s=250))
    grown = story(result, "resize")
    assert len(grown) == 1
    # T / (T + 500) * ratio > 1
    assert grown[0][0] == pytest.approx(60 * np.ceil(500 / (ratio - 1) / 60))


def test_a_job_whose_share_does_not_change_is_left_where_it_is() -> None:
    def look(_: Policy, view: View, decision: Decision) -> None:
        owner = view.machine.gpus["owner"]
        assert decision.counts is not None
        at = np.cumsum(decision.counts)
        for row, width, seat in zip(decision.rows, decision.counts, np.split(decision.gpus, at[:-1]), strict=True):
            now = np.flatnonzero(owner == row)
            assert len(now) != width or now.tolist() == seat.tolist()

    trace = jobs(*[(40.0 * i, 2, 300, "bert-large") for i in range(12)])
    watch(trace, nodes_of_8(2), SiaLike(), look, **FREE)


# --- synergy-like -----------------------------------------------------------------------------------------------------

INSENSITIVE, HUNGRY = Needs(1, 1), Needs(12, 20)


def dealt(seats: list[list[int]], needs: list[Needs], nodes: int = 1) -> list[int]:
    arrays = [np.array(seat, dtype=np.int64) for seat in seats]
    return deal_cpus(machine_of(nodes_of_8(nodes)), arrays, np.arange(len(seats)), needs, 96).tolist()


def test_cpus_that_one_does_not_need_go_to_one_that_does() -> None:
    """4 GPUs at 12 leave 96 - 48 - 4 = 44 CPUs beside 4 GPUs that need one each: 8 more for each of the four."""
    assert dealt([[0, 1, 2, 3], [4, 5, 6, 7]], [HUNGRY, INSENSITIVE]) == [20, 1]


def test_where_all_are_hungry_each_has_its_proportional_share() -> None:
    assert dealt([[0, 1, 2, 3], [4, 5, 6, 7]], [HUNGRY, HUNGRY]) == [12, 12]


def test_what_is_left_goes_by_the_order_as_far_as_it_reaches() -> None:
    """6 GPUs at 12, 2 at 1: 96 - 74 = 22 left. The first (2 GPUs) takes 8 each, the second (4 GPUs) one each."""
    assert dealt([[0, 1], [2, 3, 4, 5], [6, 7]], [HUNGRY, HUNGRY, INSENSITIVE]) == [20, 13, 1]


def test_a_gang_over_two_nodes_is_bound_by_the_fuller_one() -> None:
    """Node 0: 4 + 4 GPUs at 12, nothing left. Node 1: 4 GPUs at 12, 48 left. The gang has 12 on both."""
    assert dealt([[4, 5, 6, 7, 8, 9, 10, 11], [0, 1, 2, 3]], [HUNGRY, HUNGRY], 2) == [12, 12]


def test_a_gang_without_gpus_has_no_part_in_it() -> None:
    assert dealt([[], [0, 1, 2, 3, 4, 5, 6, 7]], [HUNGRY, HUNGRY])[1] == 12


def test_an_offloaded_job_is_as_fast_as_the_cpus_of_its_node_let_it_be() -> None:
    """Given an offloaded job alone, more CPUs than its share; when a hungry neighbour comes, back to the share."""
    trace = jobs((0, 4, 1000, "gpt-2"), (100, 4, 100, "gpt-2"), plan=["zero-offload", "zero-offload"], cpus=[1, 1])
    seen: dict[float, list[int]] = {}

    def look(_: Policy, view: View, decision: Decision) -> None:
        assert decision.cpus is not None
        seen[view.now_s] = decision.cpus.tolist()

    result = watch(trace, nodes_of_8(), SynergyLike(), look, **FREE)
    assert seen[0.0][0] > 12
    assert seen[100.0] == [12, 12]
    assert result.metrics["preemptions"] == 0


@given(trace=planned())
@effort(10)
def test_nobody_is_slower_than_with_its_gpu_proportional_share(trace: Trace) -> None:
    def look(_: Policy, view: View, decision: Decision) -> None:
        assert decision.cpus is not None
        assert decision.plans is not None
        book, models = view.plans, view.jobs.model[decision.fate == HOLDS].tolist()
        for number, code, cpus in zip(models, decision.plans.tolist(), decision.cpus.tolist(), strict=True):
            nodes = book.site.fewest_nodes(plan_of(code).gpus)
            has, share = (book.of(number, plan_of(code), nodes, c) for c in (cpus, 12))
            assert has.samples_s >= share.samples_s

    watch(trace, nodes_of_8(2), SynergyLike(), look, **FREE)


def test_a_hungry_job_goes_to_the_node_that_has_cpus_for_it() -> None:
    """Given node 0 with 4 offloaded GPUs and node 1 with 4 that need no CPUs, it goes to node 1 by best case.

    Without CPUs in mind both nodes are the same, and the first would do.
    """
    trace = jobs(
        (0, 4, 1000, "gpt-2"), (1, 5, 1000, "gpt-2"), (2, 1, 1000, "gpt-2"),
        plan=["zero-offload", "dp1+tp5", "zero-offload"],
    )  # fmt: skip
    nodes: list[list[int]] = []

    def look(_: Policy, view: View, decision: Decision) -> None:
        nodes.append(view.machine.gpus["node"][decision.gpus].tolist())

    watch(trace, nodes_of_8(2), SynergyLike(), look, **FREE)
    assert nodes[2][-1] == nodes[1][-1] == 1


def test_least_attained_service_takes_gpus_at_rounds_only() -> None:
    """Given a job on all GPUs since 0, who comes at 100 gets them at 300; at 600 both have had as much, at 900 not."""
    trace = jobs((0, 8, 1000, "bert-large"), (100, 8, 800, "bert-large"), plan=["dp8", "dp8"])
    result = run(trace, SynergyLike())
    assert story(result, "start", "suspend", "resume")[:5] == [
        (0.0, 0, "start"), (300.0, 0, "suspend"), (300.0, 1, "start"), (900.0, 1, "suspend"), (900.0, 0, "resume"),
    ]  # fmt: skip
    assert fates(trace, SynergyLike(), 100.0) == [HOLDS, NO_GPUS]


def test_fifo_keeps_the_order_and_stops_nobody() -> None:
    trace = jobs((0, 4, 100, "bert-large"), (1, 8, 100, "bert-large"), (2, 4, 100, "bert-large"))
    result = run(trace, SynergyLike(order="fifo"))
    assert result.jobs["first_start_s"].to_list() == pytest.approx([0, 100, 200])
    assert fates(trace, SynergyLike(order="fifo"), 2.0) == [HOLDS, NO_GPUS, BEHIND]


# --- antman-like ------------------------------------------------------------------------------------------------------


def test_an_opportunistic_job_makes_room_and_comes_back() -> None:
    """Given a best-effort job on 8 GPUs from 0, a guaranteed one on 4 from 100 to 150; then 1000 s take 1050."""
    trace = jobs((0, 8, 1000, "bert-large"), (100, 4, 50, "bert-large"), plan=["dp8", "dp4"], guaranteed=[0, 1])
    result = run(trace, AntManLike())
    assert finishes(result) == pytest.approx([1050, 150])
    assert story(result, "suspend", "resume") == [(100.0, 0, "suspend"), (150.0, 0, "resume")]


def test_a_guaranteed_job_is_never_suspended() -> None:
    trace = jobs((0, 8, 100, "bert-large"), (1, 8, 100, "bert-large"), (2, 4, 10, "vit"), guaranteed=[1, 1, 0])
    result = run(trace, AntManLike())
    assert finishes(result) == pytest.approx([100, 200, 210])
    assert result.metrics["preemptions"] == 0


def test_only_as_many_are_suspended_as_the_gang_needs_and_the_newest_first() -> None:
    """Given three best-effort jobs of 2 GPUs and two free GPUs, a gang of 4 takes those and the newest job's."""
    rows = [(float(i), 2, 500, "bert-large") for i in range(3)]
    result = run(jobs(*rows, (10, 4, 50, "bert-large"), guaranteed=[0, 0, 0, 1]), AntManLike())
    assert story(result, "suspend") == [(10.0, 2, "suspend")]


def test_a_gang_goes_to_one_node_where_suspending_somebody_lets_it() -> None:
    """Given 3 free GPUs on each of two nodes, a guaranteed gang of 4 gets one node; who was there has what is left."""
    trace = jobs(
        (0, 5, 500, "gpt-2"), (0, 5, 500, "gpt-2"), (10, 4, 50, "bert-large"),
        plan=["dp1+tp5", "dp1+tp5", "dp4"], guaranteed=[1, 0, 1],
    )  # fmt: skip
    result = run(trace, AntManLike(), nodes=2)
    assert story(result, "migrate")[0] == (10.0, 1, "migrate")
    assert result.jobs["nodes_last"].to_list()[2] == 1


def test_a_quota_bounds_what_is_guaranteed_and_the_rest_is_for_opportunists() -> None:
    """Given a quota of 4, the second gang of 4 waits for the first; a best-effort job has the other 4 GPUs at once."""
    trace = jobs(
        (0, 4, 100, "bert-large"), (1, 4, 100, "bert-large"), (2, 4, 500, "bert-large"),
        guaranteed=[1, 1, 0], vc=["A", "A", "B"],
    )  # fmt: skip
    policy = AntManLike(quotas="A=4")
    assert fates(trace, policy, 2.0) == [HOLDS, OVER_QUOTA, HOLDS]
    assert run(trace, policy).jobs["first_start_s"].to_list() == pytest.approx([0, 100, 2])


def test_who_waits_long_for_quota_runs_by_chance_until_its_turn_comes() -> None:
    """Given patience of 30 s, the second gang starts at 31 on GPUs of nobody; when quota is free it is guaranteed.

    At 40 somebody else's guaranteed gang suspends it, 30 s later it may run by chance again; at 100 the first gang
    ends, and it goes on by right.
    """
    trace = jobs(
        (0, 4, 100, "bert-large"), (1, 4, 100, "bert-large"), (40, 4, 20, "bert-large"),
        guaranteed=[1, 1, 1], vc=["A", "A", "B"],
    )  # fmt: skip
    by_right: dict[float, object] = {}

    def look(_: Policy, view: View, decision: Decision) -> None:
        by_right[view.now_s] = decision.memory

    policy = AntManLike(quotas="A=4,B=4", patience_s=30)
    result = watch(trace, nodes_of_8(), policy, look, **FREE)
    assert story(result, "start", "suspend", "resume") == [
        (0.0, 0, "start"), (31.0, 1, "start"), (40.0, 1, "suspend"), (40.0, 2, "start"), (70.0, 1, "resume"),
    ]  # fmt: skip
    assert (by_right[70.0], by_right[100.0]) == (Admitted((0,)), Admitted((1,)))
    assert finishes(result)[1] == pytest.approx(70 + 91)
    assert run(trace, AntManLike(quotas="A=4,B=4", patience_s=np.inf)).jobs["first_start_s"][1] == 100.0


def test_a_gang_larger_than_its_quota_is_opportunistic_from_the_beginning() -> None:
    trace = jobs((0, 8, 100, "bert-large"), (10, 2, 20, "bert-large"), guaranteed=[1, 1], vc=["A", "B"])
    result = run(trace, AntManLike(quotas="A=4"))
    assert result.jobs["first_start_s"].to_list() == [0.0, 10.0]
    assert finishes(result)[0] == pytest.approx(120)


def test_gpus_that_a_gang_waits_for_are_used_meanwhile_but_not_by_other_guarantees() -> None:
    """Given 4 GPUs until 100, a gang of 8 reserves the node: 2 guaranteed GPUs wait behind it, 4 by chance do not."""
    trace = jobs(
        (0, 4, 100, "bert-large"), (1, 8, 100, "bert-large"), (2, 2, 10, "bert-large"), (3, 4, 500, "bert-large"),
        guaranteed=[1, 1, 1, 0],
    )  # fmt: skip
    assert fates(trace, AntManLike(), 3.0) == [HOLDS, NO_GPUS, BEHIND, HOLDS]
    result = run(trace, AntManLike())
    assert result.jobs["first_start_s"].to_list() == pytest.approx([0, 100, 200, 3])
    assert story(result, "suspend") == [(100.0, 3, "suspend")]
