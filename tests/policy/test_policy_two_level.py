"""Two levels: each organisation has what its quota promises, gets its part of the rest, and decides on its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from kit.workloads import finishes, mixed_cluster, story, trace_of, workloads
from thebes import Decision, Policy, Result, Trace, UserError, View, fill, simulate
from thebes.model.decision import HOLDS, NOT_LEASED
from thebes.model.facts import DURATIONS, PLANS
from thebes.model.parameters import configure
from thebes.policy import find, registry
from thebes.policy.base import DECISIONS
from thebes.policy.fairness.fair_share import decayed_usage
from thebes.policy.fairness.two_level import TwoLevel
from thebes.policy.fairness.two_level_auction import Standing, rho, worst_off
from thebes.sim.costs import FREE_OF_COST

# Every policy of the project but those that cannot be asked for a Decision, with time scales for small workloads.
SETTINGS = {
    "las": "quantum_s=7",
    "gittins": "quantum_s=10;delta_gpu_s=40",
    "shortest-expected": "quantum_s=10",
    "tiresias-l": "queue_limits=20,60;promote_knob=2;promote_floor_s=10",
    "tiresias-g": "queue_limits=20,60;quantum_s=10",
    "multi-dlas": "queue_limit=20;split_every_s=30",
}
INNER = sorted(
    name
    for name, kind in registry().items()
    if kind.grain == DECISIONS and not issubclass(kind, TwoLevel) and PLANS not in kind.needs
)


FREE: dict[str, Any] = {"costs": FREE_OF_COST, "perf": "ideal"}


def two_level(inner: str, **settings: Any) -> TwoLevel:
    return TwoLevel(inner=inner, inner_set=SETTINGS.get(inner, ""), **{"lease_s": 30.0} | settings)


class Watched(Policy):
    """Another policy with somebody looking over its shoulder at every decision."""

    def __init__(self, policy: Policy, look: Callable[[View, Decision], None]) -> None:
        self.policy, self.look = policy, look
        self.needs: Any = policy.needs
        self.shares: Any = policy.shares
        self.decisions = 0

    @property
    def reads_every_s(self) -> float:
        return self.policy.reads_every_s

    def check(self, cluster: Any, tenants: tuple[str, ...]) -> None:
        self.policy.check(cluster, tenants)

    def decide(self, view: View) -> Decision:
        decision = self.policy.decide(view)
        self.look(view, decision)
        self.decisions += 1
        return decision


def watch(trace: Trace, cluster: Any, policy: Policy, look: Callable[[View, Decision], None], **options: Any) -> Result:
    watched = Watched(policy, look)
    result = simulate(trace, cluster, watched, **options)
    assert watched.decisions > 0
    return result


def organisations_of(view: View, decision: Decision) -> np.ndarray[Any, Any]:
    """Per GPU of the Decision, the organisation that it is given to."""
    tenant = view.board.table.jobs["tenant"][decision.rows]
    counts = view.board.table.jobs["gpus"][decision.rows] if decision.counts is None else decision.counts
    return np.repeat(tenant, counts)


@dataclass
class Meter:
    """GPU-seconds that each organisation holds until an instant."""

    until_s: float
    gpu_s: Any = 0.0
    at_s: float = 0.0
    held: Any = 0.0

    def __call__(self, view: View, decision: Decision) -> None:
        self.gpu_s = self.gpu_s + self.held * max(0.0, min(view.now_s, self.until_s) - self.at_s)
        self.at_s = min(view.now_s, self.until_s)
        self.held = np.bincount(organisations_of(view, decision), minlength=len(view.tenants)).astype(float)


def crowd(**gangs: int) -> Trace:
    """Organisations that each have a dozen gangs of one size, all there from the beginning, for a thousand seconds."""
    names = [name for name in gangs for _ in range(12)]
    return trace_of(*((0.0, gangs[name], 1000.0) for name in names), vc=names)


def with_organisations(trace: Trace, names: list[str]) -> Trace:
    import polars as pl

    return Trace(trace.name, trace.jobs.with_columns(pl.Series("vc", names, dtype=pl.String)))


@st.composite
def shared_workloads(draw: st.DrawFn, **options: Any) -> Trace:
    """Small workloads of up to three organisations."""
    trace = draw(workloads(**options))
    size = trace.jobs.height
    return with_organisations(trace, draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size)))


# --- any policy inside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
@given(trace=workloads(most_gpus=4, most_jobs=10))
@effort(6)
def test_with_one_organisation_it_is_the_inner_policy(inner: str, trace: Trace) -> None:
    outer = two_level(inner)
    alone = simulate(trace, mixed_cluster(), outer._inside, fast=False)
    inside = simulate(trace, mixed_cluster(), outer)
    assert story(inside) == story(alone)
    assert finishes(inside) == finishes(alone)


def keeps_to_its_lease(view: View, decision: Decision) -> None:
    """Nobody holds more than its lease, no GPU is in two hands, and leases never exceed the cluster."""
    by_gpu = set(zip(decision.gpus.tolist(), organisations_of(view, decision).tolist(), strict=True))
    assert len({gpu for gpu, _ in by_gpu}) == len(by_gpu)
    kind_of = view.machine.nodes["node_kind"][view.machine.gpus["node"]]
    held = np.zeros_like(decision.memory.lease)
    for gpu, organisation in by_gpu:
        held[organisation, kind_of[gpu]] += 1
    assert (held <= decision.memory.lease).all()
    assert (decision.memory.lease.sum(axis=0) <= view.machine.kinds["total"]).all()
    assert (decision.memory.account.held == held.sum(axis=1)).all()


@pytest.mark.parametrize("inner", INNER)
@given(trace=shared_workloads(most_gpus=4, most_jobs=10), data=st.data())
@effort(6)
def test_every_policy_runs_inside_and_keeps_to_the_lease(inner: str, trace: Trace, data: st.DataObject) -> None:
    policy = two_level(
        inner,
        borrow=data.draw(st.booleans()),
        reclaim=data.draw(st.booleans()),
        reclaim_after_s=data.draw(st.sampled_from([0.0, 5.0])),
    )
    # Without costs: leases of seconds would be spent on suspending and resuming alone.
    result = watch(trace, mixed_cluster(), policy, keeps_to_its_lease, costs=FREE_OF_COST)
    assert result.metrics["completed"] == trace.jobs.height


@pytest.mark.parametrize("inner", ["tiresias-l", "fifo", "las"])
@given(trace=shared_workloads(most_gpus=4))
@effort(10)
def test_it_is_pure(inner: str, trace: Trace) -> None:
    policy = two_level(inner)

    def is_pure(view: View, decision: Decision) -> None:
        owners = view.machine.gpus["owner"].copy()
        again = policy.decide(view)
        for field in fields(Decision):
            np.testing.assert_equal(getattr(again, field.name), getattr(decision, field.name), err_msg=field.name)
        np.testing.assert_array_equal(view.machine.gpus["owner"], owners)
        assert np.array_equal(view.jobs.rows[decision.fate == HOLDS], decision.rows)
        assert decision.wake_s > view.now_s

    watch(trace, mixed_cluster(), policy, is_pure, costs=FREE_OF_COST)


@given(trace=shared_workloads(most_gpus=6))
@effort(10)
def test_the_same_run_twice_is_the_same(trace: Trace) -> None:
    first, second = (simulate(trace, "3x2", two_level("tiresias-l"), costs=FREE_OF_COST) for _ in range(2))
    assert story(first) == story(second)


def test_the_inner_policy_decides_what_may_be_seen_and_shared() -> None:
    assert two_level("srtf").needs == {DURATIONS}
    assert two_level("tiresias-l").needs == frozenset()
    assert two_level("las").reads_every_s == 7.0
    assert TwoLevel.needs == frozenset()


class Greedy(Policy):
    """Gives its jobs the first GPUs of the cluster, whosever they are."""

    def decide(self, view: View) -> Decision:
        counts = view.jobs.gpus
        taken = np.cumsum(counts) <= len(view.machine.gpus)
        gpus = np.arange(int(counts[taken].sum()))
        return Decision(view.jobs.rows[taken], gpus, np.where(taken, HOLDS, 1))


def test_an_inner_policy_that_takes_too_much_is_cut_to_the_lease() -> None:
    """Given one that takes the whole cluster, it gets what it is leased: the newest of its holds are cut off first."""
    greedy = TwoLevel(inner=f"{__file__}:Greedy", lease_s=30.0)
    result = watch(crowd(a=1, b=1), "2x4", greedy, keeps_to_its_lease)
    assert result.metrics["completed"] == 24


# --- quotas, lending, reclaim -----------------------------------------------------------------------------------------


def holdings(trace: Trace, cluster: str, policy: Policy, **options: Any) -> dict[float, list[int]]:
    """GPUs of each organisation from each instant on."""
    seen: dict[float, list[int]] = {}

    def look(view: View, decision: Decision) -> None:
        held = np.bincount(organisations_of(view, decision), minlength=len(view.tenants))
        seen[view.now_s] = held.tolist()

    watch(trace, cluster, policy, look, **FREE, **options)
    return seen


# a alone has eight jobs of a hundred seconds on eight GPUs; at 10 s come four of b, of ten seconds each.
LENT = trace_of(*[(0, 1, 100)] * 8, *[(10, 1, 10)] * 4, vc=["a"] * 8 + ["b"] * 4)


def test_idle_quota_is_lent_and_comes_back_at_once() -> None:
    assert holdings(LENT, "1x8", TwoLevel()) | {0.0: [8, 0], 10.0: [4, 4], 20.0: [8, 0]} == holdings(
        LENT, "1x8", TwoLevel()
    )


def test_reclaim_comes_after_the_grace() -> None:
    seen = holdings(LENT, "1x8", TwoLevel(reclaim_after_s=25.0))
    assert seen[10.0] == [8, 0]
    assert seen[35.0] == [4, 4]
    assert sorted(seen)[:4] == [0.0, 10.0, 35.0, 45.0]


def test_without_reclaim_quota_comes_back_when_the_lease_ends() -> None:
    seen = holdings(LENT, "1x8", TwoLevel(reclaim=False, lease_s=40.0))
    assert seen[10.0] == [8, 0]
    assert seen[40.0] == [4, 4]
    assert sorted(seen)[:4] == [0.0, 10.0, 40.0, 50.0]


def test_a_lease_that_ends_before_the_grace_is_not_prolonged() -> None:
    assert holdings(LENT, "1x8", TwoLevel(reclaim_after_s=50.0, lease_s=20.0))[20.0] == [4, 4]


def test_without_lending_everybody_keeps_to_the_quota() -> None:
    seen = holdings(LENT, "1x8", TwoLevel(borrow=False))
    assert seen[0.0] == [4, 0]
    assert seen[10.0] == [4, 4]
    assert max(held[0] for held in seen.values()) == 4


def test_the_split_can_be_between_those_who_are_there() -> None:
    """Given four organisations, of which two are there, each of them is promised half of the cluster, not a quarter."""
    trace = trace_of((0, 1, 9), (0, 1, 9), (50, 1, 9), (50, 1, 9), vc=list("abcd"))
    quotas: dict[str, list[float]] = {}
    for split in ("all", "active"):

        def look(view: View, decision: Decision, split: str = split) -> None:
            quotas.setdefault(split, decision.memory.ground.shares.quota[:, 0].tolist())

        watch(trace, "1x8", TwoLevel(split=split), look)
    assert quotas == {"all": [2.0, 2.0, 2.0, 2.0], "active": [4.0, 4.0, 0.0, 0.0]}


def test_who_has_nothing_on_lease_is_told_so() -> None:
    fates: list[list[int]] = []
    trace = trace_of((0, 2, 10), (1, 2, 10), vc=["a", "b"])

    def look(view: View, decision: Decision) -> None:
        fates.append(decision.fate.tolist())

    watch(trace, "1x2", TwoLevel(quotas="a=2,b=0"), look)
    assert fates[1] == [HOLDS, NOT_LEASED]


@given(trace=shared_workloads(most_gpus=1, most_jobs=20), grace_s=st.sampled_from([0.0, 4.0]))
@effort(30)
def test_a_quota_is_there_within_the_grace(trace: Trace, grace_s: float) -> None:
    """Given jobs of one GPU, nobody who has waited for the grace lacks a GPU that its quota promises."""
    policy = TwoLevel(quotas="a=2,b=3", reclaim_after_s=grace_s, lease_s=100.0)
    lacking_since: dict[int, float] = {}

    def look(view: View, decision: Decision) -> None:
        held = np.bincount(organisations_of(view, decision), minlength=len(view.tenants))
        alive = np.bincount(view.jobs.tenant, minlength=len(view.tenants))
        for number, name in enumerate(view.tenants):
            if held[number] < min(alive[number], {"a": 2, "b": 3}.get(name, 1)):
                assert view.now_s < lacking_since.setdefault(number, view.now_s) + grace_s
            else:
                lacking_since.pop(number, None)

    names = set(trace.jobs["vc"].to_list())
    if {"a", "b"} <= names:
        watch(trace, "3x2", policy, look, costs=FREE_OF_COST)


# --- fairness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gangs", "cluster"),
    [({"a": 1, "b": 1}, "1x8"), ({"a": 2, "b": 1}, "1x8"), ({"a": 3, "b": 1}, "1x8"), ({"a": 8, "b": 1}, "1x8"),
     ({"a": 8, "b": 8}, "1x8"), ({"a": 1, "b": 1, "c": 1}, "1x8")],
)  # fmt: skip
def test_equal_weights_equal_gpu_time(gangs: dict[str, int], cluster: str) -> None:
    """Given organisations that could use everything, each has had the same at any time, but for a gang's lease."""
    lease_s = 50.0
    meter = Meter(until_s=1000.0)
    watch(crowd(**gangs), cluster, TwoLevel(inner="fifo", lease_s=lease_s, decay_half_life_s=math.inf), meter, **FREE)
    assert meter.gpu_s.sum() == 8 * 1000.0  # a crowd leaves nothing idle
    assert np.abs(meter.gpu_s - meter.gpu_s.mean()).max() <= max(gangs.values()) * lease_s + 1e-6


def test_twice_the_weight_twice_the_gpu_time() -> None:
    meter = Meter(until_s=900.0)
    watch(crowd(a=1, b=1), "3x2", TwoLevel(inner="fifo", weights="a=2", lease_s=50.0), meter, **FREE)
    assert meter.gpu_s.tolist() == [4 * 900.0, 2 * 900.0]
    meter = Meter(until_s=1000.0)
    watch(crowd(a=1, b=1), "1x8", TwoLevel(inner="fifo", weights="a=2", lease_s=50.0), meter, **FREE)
    assert abs(meter.gpu_s[0] - 2 * meter.gpu_s[1]) <= 2 * 50.0


def test_a_gang_larger_than_the_quota_gets_its_turn_in_bounded_time() -> None:
    """Given quota q of a cluster that everybody fills, a gang of g that its organisation wants first starts in time.

    Alone it has saved enough after (g - q) / q leases. Beside jobs that fill the quota: a lease until half of the quota
    is free for saving, and 2 g / q leases of saving.
    """
    lease_s, q, g = 50.0, 4.0, 8
    alone = trace_of(*[(0, 1, 2000)] * 12, (0, g, 30), vc=["a"] * 12 + ["b"])
    assert simulate(alone, "1x8", TwoLevel(inner="fifo", lease_s=lease_s), **FREE).jobs["first_start_s"][12] == (
        (g - q) / q * lease_s
    )
    beside = trace_of(*[(0, 1, 2000)] * 24, (0, g, 30), vc=["a"] * 12 + ["b"] * 13)
    result = simulate(beside, "1x8", TwoLevel(inner="srtf", lease_s=lease_s), **FREE)
    assert 0.0 < result.jobs["first_start_s"][24] <= (1 + 2 * g / q) * lease_s


def test_turns_follow_each_other() -> None:
    """Given three organisations with gangs of the whole cluster, each runs within a lease of every other."""
    lease_s = 50.0
    trace = trace_of((0, 8, 1000), (0, 8, 1000), (0, 8, 1000), vc=list("abc"))
    result = simulate(trace, "1x8", TwoLevel(inner="fifo", lease_s=lease_s), **FREE)
    assert max(result.jobs["first_start_s"]) <= (1 + 2 * 3 + 2) * lease_s
    assert np.ptp(finishes(result)) <= 3 * lease_s


def test_usage_decays_by_its_half_life() -> None:
    """4 GPUs for one half-life leave 4 * T/ln 2 * 1/2; then idle for another, half of that is left."""
    half_life_s = 100.0
    used = decayed_usage(np.zeros(1), np.array([4]), half_life_s, half_life_s)
    assert used[0] == pytest.approx(4 * half_life_s / math.log(2) / 2, rel=1e-12)
    assert decayed_usage(used, np.array([0]), half_life_s, half_life_s)[0] == pytest.approx(used[0] / 2, rel=1e-12)
    in_steps = np.zeros(1)
    for _ in range(7):
        in_steps = decayed_usage(in_steps, np.array([4]), half_life_s / 7, half_life_s)
    assert in_steps[0] == pytest.approx(used[0], rel=1e-12)
    assert decayed_usage(np.array([5.0]), np.array([3]), 10.0, math.inf)[0] == 35.0
    assert decayed_usage(np.array([5.0]), np.array([3]), 10.0, 0.0)[0] == 0.0


def test_usage_in_a_run_counts_what_was_held_and_not_the_idle_time_after_it() -> None:
    usage: dict[float, list[float]] = {}

    def look(view: View, decision: Decision) -> None:
        usage[view.now_s] = decision.memory.account.usage_gpu_s.tolist()

    trace = trace_of((0, 2, 100), (400, 1, 10), vc=["a", "b"])
    policy = TwoLevel(decay_half_life_s=100.0)
    watch(trace, "1x4", policy, look, perf="ideal")
    after_run = 2 * 100 / math.log(2) / 2
    assert usage[400.0] == pytest.approx([after_run * 2 ** -((400 - 100) / 100), 0.0], rel=1e-12)


def test_who_has_used_less_borrows_first() -> None:
    """Given a that ran alone before, when the idle quota of c is lent, b gets it."""
    trace = trace_of(
        (0, 1, 100), (100, 1, 500), (100, 1, 500), (100, 1, 500), (100, 1, 500), (900, 1, 1),
        vc=["a", "a", "a", "b", "b", "c"],
    )  # fmt: skip
    assert holdings(trace, "1x3", TwoLevel(lease_s=1000.0))[100.0] == [1, 2, 0]
    assert holdings(trace, "1x3", TwoLevel(lease_s=1000.0, decay_half_life_s=0.0))[100.0] == [2, 1, 0]


# --- finish-time fairness between organisations -----------------------------------------------------------------------


def test_rho_of_an_organisation_by_hand() -> None:
    """Two jobs of 4 GPUs and 100 s, submitted 50 s ago, on a quota of 4: 200 s there, 50 + 800/4 or 50 + 800/8 here."""
    now = Standing(np.array([50.0]), np.array([800.0]), np.array([200.0]))
    assert rho(now, 0, np.array([4.0, 8.0, 0.0]), wait_s=600.0).tolist() == [1.25, 0.75, (50 + 600 + 800) / 200]


def test_the_offer_goes_to_the_worst_off() -> None:
    rhos = np.array([1.0, 3.0, 2.0, 0.5, 4.0])
    assert worst_off(rhos, 0.8).tolist() == [4]
    assert worst_off(rhos, 0.5).tolist() == [4, 1, 2]
    assert worst_off(rhos, 0.0).tolist() == [4, 1, 2, 0, 3]
    assert worst_off(rhos, 1.0).tolist() == [4]


def test_idle_gpus_go_to_the_organisation_that_is_worst_off() -> None:
    """Given c away, its GPU is lent to b, whose jobs have waited, and not to a, whose work is new and long."""
    trace = trace_of(
        (0, 1, 300), (0, 1, 300), (0, 1, 300), (90, 1, 500), (90, 1, 500), (900, 1, 1),
        vc=["b", "b", "b", "a", "a", "c"],
    )  # fmt: skip
    seen = holdings(trace, "1x3", TwoLevel(outer="themis", lease_s=1000.0))
    assert seen[0.0] == [3, 0, 0]
    assert seen[90.0] == [2, 1, 0]
    assert TwoLevel(outer="themis").needs == {DURATIONS}


@given(trace=shared_workloads(most_gpus=4, most_jobs=12), f=st.sampled_from([0.0, 0.5, 0.8, 1.0]))
@effort(15)
def test_themis_between_organisations_keeps_to_the_leases(trace: Trace, f: float) -> None:
    policy = two_level("tiresias-l", outer="themis", f=f)
    assert watch(trace, mixed_cluster(), policy, keeps_to_its_lease, costs=FREE_OF_COST).metrics["completed"]


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "a=-1"}, "two-level: the weight of 'a' is -1\nweights are above 0"),
        ({"weights": "a=0"}, "two-level: the weight of 'a' is 0\nweights are above 0"),
        ({"quotas": "a=-4"}, "two-level: the quota of 'a' is -4\nquotas are GPUs: 0 or more"),
        ({"quotas": "a"}, "two-level: quotas=a: 'a' is not NAME=NUMBER\nwrite for instance quotas=vcA=64,vcB=32"),
        ({"weights": "a=two"}, "two-level: weights=a=two: 'a=two' is not NAME=NUMBER"),
        ({"quotas": "a=nan"}, "two-level: quotas=a=nan: 'a=nan' is not NAME=NUMBER"),
        ({"quotas": "a=1,a=2"}, "two-level: quotas names 'a' twice\nname each organisation once"),
        ({"quotas": "a=1,d=2"}, "two-level: quotas name 'd', which no job is of\nvalid names: a, b"),
        ({"weights": "aa=1"}, "two-level: weights name 'aa', which no job is of\ndid you mean 'a'?"),
        ({"quotas": "a=5,b=4"}, "two-level: the quotas add up to 9 GPUs, the cluster has 8\nquotas are guaranteed"),
        ({"quotas": "a=8", "borrow": "no"}, "two-level: 'b' has a quota of 0 GPUs and may not borrow: its jobs would"),
        ({"quotas": "a=4,b=0", "borrow": "no"}, "two-level: 'b' has a quota of 0 GPUs and may not borrow"),
        ({"split": "al"}, "two-level: split=al is unknown\ndid you mean 'all'?"),
        ({"outer": "themes"}, "two-level: outer=themes is unknown\ndid you mean 'themis'?"),
        ({"inner": "tiresias"}, "unknown policy 'tiresias'\ndid you mean 'tiresias-l'?"),
        ({"inner": "two-level"}, "two-level: two-level cannot run inside an organisation\ninner is any other policy"),
        ({"inner": "ada-srsf"}, "two-level: ada-srsf cannot run inside an organisation"),
        ({"inner": "tiresias-compat"}, "two-level: tiresias-compat cannot run inside an organisation"),
        ({"inner": "rubick"}, "two-level: inner=rubick decides on execution plans, which cannot be"),
        ({"inner_set": "promote_knob"}, "two-level: inner_set=promote_knob: 'promote_knob' is not KEY=VALUE\nwrite"),
        ({"inner_set": "knob=1"}, "policy tiresias-l inside two-level has no parameter 'knob'"),
        ({"inner_set": "promote_knob=-1"}, "policy tiresias-l inside two-level: promote_knob=-1 must be at least 0"),
        ({"lease_s": "0"}, "policy two-level: lease_s=0 must be at least 0.001"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_the_run(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        simulate(crowd(a=1, b=1), "1x8", configure(find("two-level"), settings, what="policy two-level"))
    assert str(caught.value).startswith(message)


def test_the_inner_policy_takes_its_settings() -> None:
    policy = configure(find("two-level"), {"inner_set": "promote_knob=8; queue_limits=10,20"}, what="two-level")
    assert policy._inside == find("tiresias-l")(promote_knob=8.0, queue_limits=(10.0, 20.0))


def test_the_inner_policy_can_be_ones_own() -> None:
    own = TwoLevel(inner=f"{__file__}:Backwards")
    assert finishes(simulate(trace_of((0, 1, 10), (0, 1, 5)), "1x1", own, perf="ideal")) == [15.0, 5.0]


class Backwards(Policy):
    """Last come, first served."""

    def decide(self, view: View) -> Decision:
        return fill(view, np.arange(len(view.jobs))[::-1])
