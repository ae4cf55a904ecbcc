"""Gandiva (OSDI'18): the acceptance tests of its specification by name, then each mechanism, then what always holds."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from kit.workloads import RESNET, VGG, finishes, mixed_cluster, story, trace_of, workloads
from thebes import Decision, Policy, Result, Trace, UserError, View, simulate
from thebes.model.cluster import Cluster, from_short_form, from_toml
from thebes.model.decision import HOLDS, NO_GPUS, NOT_ITS_TURN
from thebes.model.machine import BLOCKED
from thebes.model.parameters import configure
from thebes.perf.interference import Interference, gavel_pairs
from thebes.policy.gandiva.gandiva import Gandiva
from thebes.policy.gandiva.gavel import GandivaGavel
from thebes.policy.gandiva.slicing import quantum_s, turn_order, weights
from thebes.sim.costs import FREE_OF_COST, Costs

# Turns only: what sharing GPUs in time does without the other mechanisms.
TURNS = Gandiva(packing=False, migration=False, growing=False)
PAYS, LOSES = Interference(pack_loss=0.05), Interference(pack_loss=0.5)


@dataclass(frozen=True)
class Moment:
    """One decision: who holds which GPUs, at which share, and what becomes of everybody."""

    time_s: float
    gpus: dict[int, list[int]]
    shares: dict[int, float]
    fate: dict[int, int]


class Recorded(Policy):
    """A policy whose decisions are written down."""

    shares: Any = True

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.moments: list[Moment] = []

    def decide(self, view: View) -> Decision:
        decision = self.policy.decide(view)
        counts = view.board.table.jobs["gpus"][decision.rows] if decision.counts is None else decision.counts
        given = np.split(decision.gpus, np.cumsum(counts)[:-1])
        rows = decision.rows.tolist()
        shares = np.ones(len(rows)) if decision.shares is None else decision.shares
        self.moments.append(
            Moment(
                view.now_s,
                {row: gpus.tolist() for row, gpus in zip(rows, given, strict=False)},
                dict(zip(rows, shares.tolist(), strict=True)),
                dict(zip(view.jobs.rows.tolist(), decision.fate.tolist(), strict=True)),
            )
        )
        return decision


def watch(trace: Trace, cluster: Cluster | str, policy: Policy, **options: Any) -> tuple[Result, list[Moment]]:
    recorded = Recorded(policy)
    return simulate(trace, cluster, recorded, **options), recorded.moments


def at(moments: list[Moment], time_s: float) -> Moment:
    """The state that holds from this instant on: the last decision up to it."""
    return [moment for moment in moments if moment.time_s <= time_s][-1]


def packed(moments: list[Moment]) -> set[tuple[int, ...]]:
    """Every set of jobs that ever had the same GPUs at the same time."""
    found: set[tuple[int, ...]] = set()
    for moment in moments:
        together: dict[int, list[int]] = {}
        for row, gpus in moment.gpus.items():
            for gpu in gpus:
                together.setdefault(gpu, []).append(row)
        found |= {tuple(rows) for rows in together.values() if len(rows) > 1}
    return found


def servers(moment: Moment, row: int, size: int) -> list[int]:
    return sorted({gpu // size for gpu in moment.gpus[row]})


# --- the acceptance tests of the specification ------------------------------------------------------------------------


def test_placement_follows_the_affinity_order_1_to_5() -> None:
    """Given three servers of 4 GPUs, when jobs come one by one, then each takes the first step that has room for it."""
    jobs = [
        (0, 2, 9e5),  # 0: step 2, server 0 gets affinity 2
        (1, 1, 9e5),  # 1: step 2, server 1 gets affinity 1
        (2, 2, 9e5),  # 2: step 1, server 0
        (3, 2, 9e5),  # 3: step 2, server 2 gets affinity 2
        (4, 1, 9e5),  # 4: step 1, server 1
        (5, 2, 9e5),  # 5: step 1, server 2: of affinity 2, though server 1 is as free
        (6, 2, 9e5),  # 6: step 3, server 1: of affinity 1, but the only one with two free GPUs
        (7, 1, 9e5),  # 7: step 4: server 1 is the one of affinity 1
        (8, 2, 9e5),  # 8: step 4: servers 0 and 2 are equally loaded
        (9, 2, 9e5),  # 9: step 4: server 2 is the less loaded now
        (10, 4, 9e5),  # 10: step 5: nobody has affinity 4
    ]
    result, moments = watch(trace_of(*jobs), "3x4", TURNS)
    first = {row: at(moments, 10.0) for row in range(7)}
    assert [servers(first[row], row, 4) for row in range(7)] == [[0], [1], [0], [2], [1], [2], [1]]
    fate = at(moments, 10.0).fate
    assert [fate[row] for row in range(11)] == [HOLDS] * 7 + [NOT_ITS_TURN] * 3 + [NO_GPUS]
    starts = {row: time for time, row, kind in story(result, "start") if (kind, row) == ("start", row)}
    assert [servers(at(moments, starts[row]), row, 4) for row in (7, 8, 9)] == [[1], [0], [2]]


def test_a_gang_larger_than_a_server_takes_the_fewest_servers() -> None:
    trace = trace_of((0, 1, 9e4), (1, 6, 9e4), (2, 8, 100))
    _, moments = watch(trace, "5x4", TURNS)
    assert servers(at(moments, 2), 1, 4) == [1, 2]
    assert servers(at(moments, 2), 2, 4) == [3, 4]


def test_no_packing_when_not_overloaded() -> None:
    jobs = [(0, 1, 500.0)] * 4
    _, moments = watch(trace_of(*jobs), "1x4", Gandiva(), interference=PAYS)
    assert not packed(moments)
    _, moments = watch(trace_of(*jobs), "1x3", Gandiva(quantum_s=100), interference=PAYS, costs=FREE_OF_COST)
    assert packed(moments)


@pytest.mark.parametrize(("memory_gib", "expected"), [(15.9, False), (16.0, True)])
def test_memory_is_never_exceeded_by_a_pack(memory_gib: float, expected: bool) -> None:
    """Given jobs of 8 GiB each, then two are packed where 16 GiB are there, and never below."""
    cluster = from_toml(f"[[node]]\ncount = 1\ngpus = 1\ngpu_memory_gib = {memory_gib}", "small")
    trace = trace_of((0, 1, 9000), (0, 1, 9000))
    _, moments = watch(trace, cluster, Gandiva(), interference=PAYS)
    assert bool(packed(moments)) == expected


def test_a_pack_with_sum_below_1_is_reverted_within_one_window_and_not_retried() -> None:
    trace = trace_of((0, 1, 9000), (0, 1, 9000))
    result, moments = watch(trace, "1x1", Gandiva(), interference=LOSES)
    together = [moment.time_s for moment in moments if len(moment.gpus) == 2]
    # The second is profiled 60 s after it runs, which is when the first has written its state (12 s).
    assert together[0] == 3100 + 12 + 60
    apart = next(moment.time_s for moment in moments if moment.time_s > together[0] and len(moment.gpus) == 1)
    assert apart == together[0] + 50 + 60  # the guest resumes, both run for one window
    assert max(together) < apart
    assert result.jobs["preemptions"].sum() > 3  # they took turns again


def test_every_other_pair_is_still_tried() -> None:
    """Given three jobs on one GPU that no two can share, then every pair is tried, each once."""
    trace = trace_of((0, 1, 30000), (0, 1, 30000), (0, 1, 30000))
    _, moments = watch(trace, "1x1", Gandiva(), interference=LOSES)
    assert packed(moments) == {(0, 1), (0, 2), (1, 2)}
    trials = sum(len(after.gpus) == 2 and len(before.gpus) < 2 for before, after in pairwise(moments))
    assert trials <= 3


def test_two_equal_jobs_on_one_gpu_finish_in_twice_the_time_plus_switches() -> None:
    result = simulate(trace_of((0, 1, 10_000), (0, 1, 10_000)), "1x1", TURNS)
    # 62 s per switch at 2 %: turns of 3,100 s, at 3100, 6200, … The first runs 3100, then 3038 in each later turn, of
    # which 62 go into the other's state and its own; the second has no state to restore in its first turn (3088).
    first = 18_600 + 62 + (10_000 - 3_100 - 2 * 3_038)
    second = first + 50 + (10_000 - 3_088 - 2 * 3_038)
    assert finishes(result) == [first, second]
    assert story(result, "suspend", "resume") == [
        (3100, 0, "suspend"),
        (6200, 1, "suspend"),
        (6200, 0, "resume"),
        (9300, 0, "suspend"),
        (9300, 1, "resume"),
        (12400, 1, "suspend"),
        (12400, 0, "resume"),
        (15500, 0, "suspend"),
        (15500, 1, "resume"),
        (18600, 1, "suspend"),
        (18600, 0, "resume"),
        (first, 1, "resume"),
    ]
    free = simulate(trace_of((0, 1, 600), (0, 1, 600)), "1x1", TURNS, costs=FREE_OF_COST)
    assert finishes(free) == [1140, 1200]  # 60 s each in turn


SPLIT = trace_of((0, 3, 2000), (0, 3, 9000), (1, 2, 50_000), model=[RESNET, RESNET, VGG])


def test_departure_of_a_job_consolidates_a_split_job() -> None:
    """Given two servers with one free GPU each, a job of 2 is split; when a neighbour leaves, it comes together."""
    result, moments = watch(SPLIT, "2x4", Gandiva())
    assert servers(at(moments, 1), 2, 4) == [0, 1]
    assert servers(at(moments, 2000), 2, 4) == [0]
    assert story(result, "migrate") == [(2000, 2, "migrate")]
    assert simulate(SPLIT, "2x4", Gandiva(migration=False)).metrics["avg_jct"] > result.metrics["avg_jct"]


# --- time slicing -----------------------------------------------------------------------------------------------------


def test_the_quantum_follows_from_the_cost_of_a_switch() -> None:
    cost_s, gpus = np.array([2.0, 6.0]), np.array([1, 3])
    assert quantum_s(cost_s, gpus, 60.0, 0.02) == pytest.approx((2 + 3 * 6) / 4 / 0.02)
    assert quantum_s(np.array([0.1]), np.array([1]), 60.0, 0.02) == 60.0  # never below the paper's
    cheap = simulate(trace_of((0, 1, 500), (0, 1, 500)), "1x1", TURNS, costs=Costs(suspend_s=1, resume_s=1))
    assert [time for time, _, kind in story(cheap, "suspend") if kind == "suspend"][:3] == [100, 200, 300]


def test_nobody_is_woken_where_nobody_takes_turns() -> None:
    _, moments = watch(trace_of((0, 1, 9000), (0, 1, 9000)), "1x2", Gandiva())
    assert [moment.time_s for moment in moments] == [0.0]


def test_weights_are_turns_in_a_row() -> None:
    """Given weights 1 and 3 on one GPU, then of every four turns three go to the second."""
    priority, waited_s = np.array([0, 2]), np.array([0.0, 0.0])
    assert weights(priority, waited_s, 100.0).tolist() == [1.0, 3.0]
    seen: list[int] = []

    class Favours(Policy):
        shares = True

        def decide(self, view: View) -> Decision:
            view.jobs.__dict__["priority"] = np.where(view.jobs.rows == 1, 2, 0)
            decision = TURNS.decide(view)
            if view.now_s < 960:
                seen.extend(decision.rows.tolist())
            return decision

    simulate(trace_of((0, 1, 900), (0, 1, 900)), "1x1", Favours(), costs=FREE_OF_COST)
    assert seen.count(1) == 3 * seen.count(0)


@given(
    heights=st.lists(st.integers(2, 4), min_size=1, max_size=3),
    size=st.sampled_from([1, 2]),
)
@effort(10)
def test_equal_jobs_get_equal_turns(heights: list[int], size: int) -> None:
    """Given equally many equal gangs per server, at any tick no two of a server differ by more than one turn."""
    height = max(heights)
    trace = trace_of(*[(0, size, 2000.0)] * (height * len(heights)))
    _, moments = watch(trace, f"{len(heights)}x{size}", TURNS, costs=FREE_OF_COST)
    turns = np.zeros(height * len(heights))
    for moment in moments:
        if moment.time_s < 1800 and len(moment.fate) == len(turns):
            turns[list(moment.gpus)] += 1
    assert turns.max() - turns.min() <= 1


def test_gangs_take_turns_as_a_whole() -> None:
    """Given a gang of 4 over single-GPU jobs, then either all of it runs or none; and it has its share of turns."""
    trace = trace_of(*[(0, 4, 6000.0), (0, 4, 6000.0)], *[(1, 1, 6000.0)] * 4, (40_000, 1, 10))
    policy = replace(TURNS, starve_after_s=100.0)
    _, moments = watch(trace, "1x4", policy, costs=FREE_OF_COST)
    for moment in moments:
        for row in (0, 1):
            assert len(moment.gpus.get(row, [0] * 4)) == 4
    crowd = [moment for moment in moments if 200 < moment.time_s < 2000]
    ran = {row: sum(row in moment.gpus for moment in crowd) for row in range(6)}
    assert min(ran.values()) > 0


def test_a_new_job_has_the_next_turn() -> None:
    result = simulate(trace_of((0, 1, 9e3), (0, 1, 9e3), (70, 1, 9e3)), "1x1", TURNS, costs=FREE_OF_COST)
    assert story(result, "start") == [(0, 0, "start"), (60, 1, "start"), (120, 2, "start")]


def test_a_gpu_that_falls_free_inside_a_turn_goes_to_the_next() -> None:
    result = simulate(trace_of((0, 1, 20), (0, 1, 500)), "1x1", TURNS, costs=FREE_OF_COST)
    assert finishes(result) == [20, 520]


# --- starvation -------------------------------------------------------------------------------------------------------


def test_the_starvation_guard_bounds_every_wait() -> None:
    """Given a newcomer at every tick, each of which has the next turn, an old job waits for the limit and one turn."""
    crowd = trace_of((0, 1, 600), *[(59 + 60 * i, 1, 60) for i in range(60)])

    def longest_wait_s(limit_s: float) -> float:
        result = simulate(crowd, "1x1", replace(TURNS, starve_after_s=limit_s), costs=FREE_OF_COST)
        events = [event for event in story(result, "start", "suspend", "resume") if event[1] == 0]
        return max(after[0] - before[0] for before, after in pairwise(events) if after[2] == "resume")

    assert longest_wait_s(600) <= 600 + 60
    assert longest_wait_s(1e9) > 3000


def test_a_job_that_was_queued_too_long_may_over_subscribe_any_server() -> None:
    """Given servers full of single-GPU jobs, a job of 4 has no server of its affinity; the guard gives it one."""
    trace = trace_of(*[(0, 1, 50_000.0)] * 4, (1, 4, 100))
    result = simulate(trace, "1x4", replace(TURNS, starve_after_s=1000.0), costs=FREE_OF_COST)
    assert result.jobs["first_wait_s"][4] <= 1000 + 60
    assert simulate(trace, "1x4", TURNS, costs=FREE_OF_COST).jobs["first_wait_s"][4] > 20_000


def test_who_waited_beyond_the_limit_goes_first_then_the_new_then_by_weighted_wait() -> None:
    order = turn_order(
        weight=np.array([1.0, 1.0, 2.0, 1.0, 3.0]),
        waited_s=np.array([10.0, 50.0, 30.0, 5.0, 900.0]),
        new=np.array([False, False, False, True, False]),
        starved=np.array([False, False, False, False, True]),
    )
    assert order.tolist() == [4, 3, 2, 1, 0]
    risen = weights(np.zeros(3, np.int64), np.array([50.0, 100.0, 300.0]), 100.0)
    assert risen.tolist() == [1.0, 1.0, 3.0]


# --- packing ----------------------------------------------------------------------------------------------------------


def test_a_pack_that_pays_beats_turns() -> None:
    trace = trace_of(*[(0, 1, 20_000.0)] * 4, model=["alexnet"] * 4)  # busy for 0.7 of the time
    with_packs = simulate(trace, "1x2", Gandiva(), interference=PAYS).metrics["makespan"]
    without = simulate(trace, "1x2", Gandiva(packing=False), interference=PAYS).metrics["makespan"]
    assert with_packs < 0.9 * without  # two at 0.68 each instead of one, less the time until they are packed


def test_packed_gangs_have_the_same_gpus_and_half_of_each() -> None:
    trace = trace_of(*[(0, 2, 9000.0)] * 3, (0, 1, 9000.0), (0, 1, 9000.0))
    _, moments = watch(trace, "1x4", Gandiva(), interference=PAYS)
    pairs = packed(moments)
    assert pairs
    for moment in moments:
        for one, other in pairs:
            if one in moment.gpus and other in moment.gpus and set(moment.gpus[one]) & set(moment.gpus[other]):
                assert moment.gpus[one] == moment.gpus[other]
                assert moment.shares[one] == moment.shares[other] == 0.5


def test_packed_jobs_part_when_room_appears() -> None:
    """Given a pair beside a job that ends, then the guest moves to the vacated GPU and both run at full speed."""
    trace = trace_of((0, 1, 30_000), (0, 1, 30_000), (0, 1, 8000))
    _, moments = watch(trace, "1x2", Gandiva(), interference=PAYS)
    assert packed(moments)
    assert len({gpu for gpus in moments[-1].gpus.values() for gpu in gpus}) == len(moments[-1].gpus)
    alone = [moment for moment in moments if len(moment.fate) == 2]
    assert not packed(alone)


def test_measured_pairs_decide_who_stays_together() -> None:
    """Given Gavel's pairs on a V100, two small language models gain from sharing, two ResNet-50 lose."""
    gavel = Interference(gpu="gavel")
    for model in ("LM (batch size 5)", "ResNet-50 (batch size 16)"):
        trace = trace_of(*[(0, 1, 20_000.0)] * 2, model=[model] * 2)
        _, moments = watch(trace, "1x1", Gandiva(), interference=gavel, perf="gavel")
        rate = gavel_pairs()["V100"][model, model]
        assert packed(moments)
        assert bool(packed([at(moments, 10_000)])) == (2 * rate > 1)


# --- migration --------------------------------------------------------------------------------------------------------


def test_jobs_that_take_turns_move_to_vacated_gpus() -> None:
    trace = trace_of((0, 1, 100), (0, 1, 900), (0, 1, 900))
    result = simulate(trace, "1x2", Gandiva(packing=False), costs=FREE_OF_COST)
    # The first and the third take turns until the first ends; then nobody waits.
    assert finishes(result) == [160, 900, 1000]
    trace = trace_of((0, 1, 900), (0, 1, 90), (0, 1, 900))
    moved = simulate(trace, "1x2", Gandiva(packing=False), costs=FREE_OF_COST)
    assert finishes(moved) == [930, 90, 960]


def test_a_move_that_costs_more_than_it_gains_is_not_made() -> None:
    early = trace_of((0, 3, 20), (0, 3, 200_000), (1, 2, 50_000), model=[RESNET, RESNET, VGG])
    assert not story(simulate(early, "2x4", Gandiva()), "migrate")  # it ran 20 s: 62 s are not worth it
    assert not story(simulate(SPLIT, "2x4", Gandiva(migrate_margin=100.0)), "migrate")


def test_a_running_job_is_left_alone_during_its_cool_down() -> None:
    """Given a job that grew and shrank again, it grows no sooner than its cool-down after that growth."""
    trace = elastic(trace_of((0, 2, 50_000), (500, 2, 100)), 4, 2)
    for cooldown_s in (600.0, 5000.0):
        result = simulate(trace, "1x4", Gandiva(cooldown_s=cooldown_s))
        assert [time for time, _, _ in story(result, "resize")] == [62, 500, 62 + cooldown_s]


# --- grow and shrink --------------------------------------------------------------------------------------------------


def elastic(trace: Trace, *max_gpus: int) -> Trace:
    """The same jobs, of which each could use up to so many GPUs."""
    return Trace(trace.name, trace.jobs.with_columns(max_gpus=pl.Series(max_gpus)))


def test_idle_gpus_go_to_a_job_that_can_use_them_and_come_back() -> None:
    trace = elastic(trace_of((0, 2, 10_000), (2000, 2, 500)), 4, 2)
    result, moments = watch(trace, "1x4", Gandiva())
    # Growing from 2 to 4 GPUs costs 62 s and doubles the rate, so it pays once 62 s have been run.
    assert len(at(moments, 62).gpus[0]) == 4
    assert len(at(moments, 2000).gpus[0]) == 2
    assert result.jobs["first_wait_s"][1] == 0
    assert result.jobs["jct_s"][0] < 10_000
    assert not story(simulate(trace, "1x4", Gandiva(growing=False)), "resize")


def test_growth_takes_gpus_of_its_own_server_first() -> None:
    trace = elastic(trace_of((0, 2, 5000)), 6)
    _, moments = watch(trace, "2x4", Gandiva())
    assert at(moments, 62).gpus[0] == [0, 1, 2, 3]


def test_a_growth_that_does_not_raise_the_rate_is_undone_and_not_repeated() -> None:
    """Given a job that grows over a network that eats the gain, then one window later it is back, and stays there."""
    trace = elastic(trace_of((0, 4, 20_000), model=[VGG]), 5)
    result, moments = watch(trace, "2x4", Gandiva(grow_above=1.1))
    widths = [len(moment.gpus[0]) for moment in moments if 0 in moment.gpus]
    assert max(widths) == 5
    assert widths[-1] == 4
    assert len(story(result, "resize")) == 2


# --- surroundings -----------------------------------------------------------------------------------------------------


class Shut(Policy):
    """As an outer policy does it: some GPUs are not to be had from some instant on."""

    shares: Any = True

    def __init__(self, policy: Policy, gpus: list[int], from_s: float) -> None:
        self.policy, self.gpus, self.from_s = policy, gpus, from_s

    def decide(self, view: View) -> Decision:
        if view.now_s < self.from_s:
            return self.policy.decide(view)
        gpus = view.machine.gpus.copy()
        gpus["owner"][self.gpus] = BLOCKED
        decision = self.policy.decide(replace(view, machine=view.machine._replace(gpus=gpus)))
        assert not np.isin(decision.gpus, self.gpus).any()
        return decision


@pytest.mark.parametrize("policy", [Gandiva(), GandivaGavel()], ids=lambda policy: policy.name)
def test_gpus_that_are_not_to_be_had_are_given_up(policy: Policy) -> None:
    trace = trace_of((0, 2, 5000), (0, 1, 5000), (0, 1, 5000), (100, 1, 5000))
    result = simulate(trace, "2x2", Shut(policy, [0, 1], 100.0))
    assert result.jobs["finish_s"].null_count() == 0


def test_seats_keep_to_the_kinds_that_a_job_accepts() -> None:
    trace = trace_of(*[(0, 2, 500.0)] * 8, gpu_type=["V100"] * 6 + ["A100"] * 2)
    result, moments = watch(trace, mixed_cluster(), Gandiva(), interference=PAYS)
    assert all(gpu >= 8 for moment in moments for row in range(6) for gpu in moment.gpus.get(row, []))
    assert result.jobs["finish_s"].null_count() == 0


def test_neighbours_on_a_node_that_slow_each_other_down_are_no_trouble() -> None:
    loud = Interference(node_loss=0.19, pack_loss=0.1)
    trace = trace_of(*[(10.0 * i, 1 + i % 3, 3000.0) for i in range(12)])
    result = simulate(trace, "2x4", Gandiva(), interference=loud, contention=True)
    assert result.jobs["finish_s"].null_count() == 0


# --- what always holds ------------------------------------------------------------------------------------------------

QUICK = Gandiva(quantum_s=5.0, switch_share=0.5, profile_s=3.0, cooldown_s=5.0, starve_after_s=40.0, migrate_margin=0.1)
VARIANTS: dict[str, Policy] = {
    "all": QUICK,
    "turns": replace(QUICK, packing=False, migration=False, growing=False),
    "low": replace(QUICK, max_height=2),
    "gavel": GandivaGavel(round_s=10.0, profile_s=3.0),
}


@pytest.mark.parametrize("name", sorted(VARIANTS))
@given(
    trace=workloads(most_gpus=4, typed=True),
    grows=st.booleans(),
    loss=st.sampled_from([0.0, 0.05, 0.5]),
    costs=st.sampled_from([FREE_OF_COST, Costs(suspend_s=1.5, resume_s=2.0)]),
    contention=st.booleans(),
)
@effort(12)
def test_every_job_finishes_and_every_decision_is_sound(
    name: str, trace: Trace, grows: bool, loss: float, costs: Costs, contention: bool
) -> None:
    """The checker looks at every decision: gangs whole, shares and memory within each GPU, kinds as wanted."""
    if grows:
        trace = elastic(trace, *(2 * int(gpus) for gpus in trace.jobs["num_gpus"]))
    options: dict[str, Any] = {
        "costs": costs,
        "contention": contention,
        "interference": Interference(node_loss=0.05, pack_loss=loss),
    }
    result = simulate(trace, mixed_cluster(), VARIANTS[name], **options)
    assert result.jobs["finish_s"].null_count() == 0
    again = simulate(trace, mixed_cluster(), VARIANTS[name], **options)
    assert finishes(again) == finishes(result)


class AskedTwice(Policy):
    """A policy that must give the same answer again, and leave the world and its old memory as they were."""

    shares: Any = True

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def decide(self, view: View) -> Decision:
        owners, before = view.machine.gpus["owner"].copy(), deepcopy(view.memory)
        decision, again = self.policy.decide(view), self.policy.decide(view)
        for field in fields(Decision):
            np.testing.assert_equal(getattr(again, field.name), getattr(decision, field.name), err_msg=field.name)
        np.testing.assert_array_equal(view.machine.gpus["owner"], owners)
        assert view.memory == before
        # Nobody waits who would fit into the GPUs that are left.
        waiting = ~np.isin(view.jobs.rows, decision.rows)
        assert (view.jobs.gpus[waiting] > view.total_gpus - len(np.unique(decision.gpus))).all()
        return decision


@pytest.mark.parametrize("name", ["all", "turns", "gavel"])
@given(trace=workloads(most_gpus=6), loss=st.sampled_from([0.0, 0.5]))
@effort(8)
def test_decisions_are_pure_and_leave_no_gpu_idle(name: str, trace: Trace, loss: float) -> None:
    simulate(trace, "3x2", AskedTwice(VARIANTS[name]), interference=Interference(pack_loss=loss))


def test_pairs_of_gandiva_gavel_are_chosen_by_seed_and_only_when_gpus_are_short() -> None:
    crowd = trace_of(*[(0, 1, 3000.0 + 100 * i) for i in range(6)])
    _, one = watch(crowd, "1x3", GandivaGavel(seed=1), interference=PAYS)
    _, same = watch(crowd, "1x3", GandivaGavel(seed=1), interference=PAYS)
    others = {
        frozenset(packed(watch(crowd, "1x3", GandivaGavel(seed=seed), interference=PAYS)[1])) for seed in range(6)
    }
    assert packed(one) == packed(same)
    assert len(others) > 1
    assert not packed(watch(crowd, "1x6", GandivaGavel(), interference=PAYS)[1])


def test_gandiva_gavel_breaks_a_pair_below_1_and_takes_turns_in_rounds() -> None:
    trace = trace_of((0, 1, 1000), (0, 1, 1000))
    result, moments = watch(trace, "1x1", GandivaGavel(), interference=LOSES, costs=FREE_OF_COST)
    assert [len(moment.gpus) for moment in moments[:2]] == [2, 1]
    assert moments[1].time_s == 60
    assert packed(moments[1:]) == set()
    assert {event[1] for event in story(result, "suspend")} == {0, 1}


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("quantum_s", "0"),
        ("switch_share", "0"),
        ("switch_share", "2"),
        ("profile_s", "0.5"),
        ("pack_above", "-1"),
        ("migrate_margin", "-0.1"),
        ("cooldown_s", "-5"),
        ("grow_above", "0.9"),
        ("starve_after_s", "0"),
        ("max_height", "-1"),
        ("max_height", "1.5"),
    ],
)
def test_parameters_out_of_range_are_refused(key: str, text: str) -> None:
    with pytest.raises(UserError, match=key):
        configure(Gandiva, {key: text}, what="gandiva")


@pytest.mark.parametrize(("key", "text"), [("round_s", "0"), ("keep_from", "3"), ("seed", "-1")])
def test_parameters_of_gandiva_gavel_out_of_range_are_refused(key: str, text: str) -> None:
    with pytest.raises(UserError, match=key):
        configure(GandivaGavel, {key: text}, what="gandiva-gavel")


@pytest.mark.parametrize("policy", ["gandiva", "gandiva-gavel"])
def test_a_gang_that_no_nodes_can_hold_is_refused_before_the_run(policy: str) -> None:
    with pytest.raises(UserError, match="never run"):
        simulate(trace_of((0, 9, 10)), from_short_form("2x4") or "", policy)
