"""Neighbours: speeds that change at the instant somebody starts, stops or moves; shared GPUs; jobs that change size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import thebes
import thebes.policy.dally.dally
from kit.effort import effort
from kit.workloads import VGG, finishes, trace_of
from thebes.model.cluster import NodeKind, uniform
from thebes.model.decision import HOLDS, NOT_CHOSEN, Decision
from thebes.model.errors import UserError
from thebes.model.trace import Trace
from thebes.model.view import View
from thebes.perf import Tiers
from thebes.perf.contention import Contention
from thebes.perf.interference import Interference
from thebes.policy import Policy
from thebes.sim.costs import FREE_OF_COST, Costs

# Spread over nodes every iteration takes twice as long: half of it on the wires.
HALF_ON_THE_WIRES = Tiers(balanced=(1.0, 1.0, 0.5, 0.5), skewed=(1.0, 1.0, 0.5, 0.5))


@dataclass(frozen=True)
class Wanted:
    """What a job shall have, from an instant on."""

    gpus: tuple[int, ...]
    share: float = 1.0
    from_s: float = 0.0


@dataclass(frozen=True)
class Puppet(Policy):
    """Gives every job what the test has written down for it, from the instant written down."""

    name: ClassVar[str] = "puppet"
    shares: ClassVar[bool] = True

    plan: Mapping[int, Sequence[Wanted]] = ()  # type: ignore[assignment]

    def decide(self, view: View) -> Decision:
        rows: list[int] = []
        gpus: list[int] = []
        counts: list[int] = []
        shares: list[float] = []
        wakes = [np.inf]
        for row in view.jobs.rows.tolist():
            steps = [step for step in self.plan[row] if step.from_s <= view.now_s]
            wakes += [step.from_s for step in self.plan[row] if step.from_s > view.now_s]
            if steps and steps[-1].gpus:
                rows.append(row)
                gpus += steps[-1].gpus
                counts.append(len(steps[-1].gpus))
                shares.append(steps[-1].share)
        fate = np.where(np.isin(view.jobs.rows, rows), HOLDS, NOT_CHOSEN)
        return Decision(
            rows=np.array(rows, dtype=np.int64), gpus=np.array(gpus, dtype=np.int64), fate=fate,
            wake_s=min(wakes), counts=np.array(counts, dtype=np.int64), shares=np.array(shares),
        )  # fmt: skip


def puppet_run(trace: Trace, plan: Sequence[Sequence[Wanted]], cluster: str = "3x2", **options: object):
    options = {"costs": FREE_OF_COST, "perf": "ideal"} | options
    return thebes.simulate(trace, cluster, Puppet(plan=dict(enumerate(plan))), **options)  # type: ignore[arg-type]


def test_two_transfers_on_one_node_slow_each_other_until_one_of_them_ends() -> None:
    """Given two jobs of 100 s that meet on the middle node, each with half of its iteration on the wires.

    Alone each would take 100 s / 0.5 = 200 s. Together a transfer takes 2 + 0.275 times as long: an iteration
    1 + 2.275 instead of 2. The second, started at 50, changes the first's speed then; its own changes when that ends.
    """
    trace = trace_of((0, 2, 100), (50, 2, 100))
    plan = [[Wanted((0, 2))], [Wanted((3, 4))]]
    result = puppet_run(trace, plan, perf=HALF_ON_THE_WIRES, contention=True)
    # Speed 1 is inside one node: alone across nodes 0.5, together 1 / 3.275.
    first = 50 + (100 - 50 * 0.5) * 3.275
    second = first + (100 - (first - 50) / 3.275) * 2
    assert finishes(result) == pytest.approx([first, second], rel=1e-12)
    comm = result.jobs["comm_s"].to_list()
    assert comm[0] == pytest.approx(25 + (first - 50) * 2.275 / 3.275)


def test_jobs_inside_their_nodes_and_jobs_on_other_nodes_meet_nobody() -> None:
    trace = trace_of((0, 2, 100), (0, 1, 100), (0, 2, 100))
    plan = [[Wanted((0, 2))], [Wanted((1,))], [Wanted((4, 5))]]
    result = puppet_run(trace, plan, perf=HALF_ON_THE_WIRES, contention=True)
    assert finishes(result) == pytest.approx([200, 100, 100])


def test_the_penalty_stops_growing_at_the_cap() -> None:
    """Given four transfers on one node: k = 4 with a cap of 3 takes 4 + 2 x eta."""
    trace = trace_of(*[(0, 2, 100)] * 4)
    plan = [[Wanted((i, 4 + i))] for i in range(4)]
    cluster = uniform("2x4", 1, 2, NodeKind(4))
    result = thebes.simulate(
        trace, cluster, Puppet(plan=dict(enumerate(plan))), perf=HALF_ON_THE_WIRES, costs=FREE_OF_COST,
        contention=Contention(on=True, eta=0.5, cap=3),
    )  # fmt: skip
    assert finishes(result) == pytest.approx([100 * (1 + 4 + 2 * 0.5)] * 4)


def test_oversubscribed_uplinks_slow_those_who_cross_racks_and_nobody_else() -> None:
    """Given two racks of two nodes and uplinks for a quarter of their wires: two crossing wires per rack are k = 4."""
    cluster = uniform("2x2x2", 2, 2, NodeKind(2))
    trace = trace_of((0, 2, 100), (0, 2, 100), (0, 2, 100))
    plan = [[Wanted((0, 4))], [Wanted((2, 6))], [Wanted((1, 3))]]
    law = Contention(on=True, eta=0.0, oversubscription=4.0)
    result = thebes.simulate(
        trace, cluster, Puppet(plan=dict(enumerate(plan))), perf=HALF_ON_THE_WIRES, costs=FREE_OF_COST, contention=law
    )
    # The third stays in its rack: it meets one other on each node, k = 2, until they end; they meet k = 4.
    third = 100 * 3
    assert finishes(result)[2] == pytest.approx(third)
    crossing = 100 * (1 + 4)
    assert finishes(result)[:2] == pytest.approx([crossing, crossing])


def test_expected_overlap_counts_each_neighbour_by_the_time_that_it_talks() -> None:
    trace = trace_of((0, 2, 100), (0, 2, 100))
    plan = [[Wanted((0, 2))], [Wanted((1, 3))]]
    law = Contention(on=True, eta=0.0, overlap="expected")
    result = puppet_run(trace, plan, perf=HALF_ON_THE_WIRES, contention=law)
    assert finishes(result) == pytest.approx([100 * (1 + 1.5)] * 2)  # each talks half of its time: k = 1.5


def test_neighbours_on_a_node_disturb_each_other_while_both_are_there() -> None:
    trace = trace_of((0, 1, 100), (0, 1, 50))
    result = puppet_run(trace, [[Wanted((0,))], [Wanted((1,))]], interference=Interference(node_loss=0.2))
    assert finishes(result) == pytest.approx([50 / 0.8 + 50, 50 / 0.8])


@st.composite
def meetings(draw: st.DrawFn) -> list[tuple[float, float, tuple[int, int], bool]]:
    """Jobs on a GPU of their own on each of two nodes out of four: (submit, duration, nodes, skewed)."""
    count = draw(st.integers(1, 6))
    jobs = []
    for _ in range(count):
        a, b = draw(st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True).map(sorted))
        jobs.append((draw(st.integers(0, 40)) * 2.5, draw(st.integers(1, 30)) * 4.0, (a, b), draw(st.booleans())))
    return sorted(jobs, key=lambda job: job[0])


def _by_hand(jobs: list[tuple[float, float, tuple[int, int], bool]], eta: float) -> list[float]:
    """The same law, step by step from one start or end to the next, with nothing kept between the steps."""
    left = [job[1] for job in jobs]
    ends = [np.inf] * len(jobs)
    now = 0.0
    while any(end == np.inf for end in ends):
        on = [i for i, job in enumerate(jobs) if job[0] <= now and ends[i] == np.inf]
        speed = {}
        for i in on:
            k = max(sum(node in jobs[j][2] for j in on) for node in jobs[i][2])
            wire = 1.0 if jobs[i][3] else 0.25  # speeds 0.5 and 0.8 across nodes
            speed[i] = 1.0 / (1.0 + wire * (k + (min(k, 3) - 1) * eta))
        next_s = min([now + left[i] / speed[i] for i in on] + [job[0] for job in jobs if job[0] > now], default=np.inf)
        for i in on:
            left[i] -= (next_s - now) * speed[i]
            if left[i] <= 1e-7:
                ends[i] = next_s
        now = next_s
    return ends


@given(jobs=meetings(), eta=st.sampled_from([0.0, 0.275, 1.0]))
@effort(60)
def test_contention_agrees_with_the_law_step_by_step(
    jobs: list[tuple[float, float, tuple[int, int], bool]], eta: float
) -> None:
    """Given jobs that come and go on shared nodes, when simulated by events, the ends are those of the naive sum."""
    trace = trace_of(
        *((submit, 2, duration) for submit, duration, _, _ in jobs),
        model=[VGG if skewed else "resnet50" for *_, skewed in jobs],
    )
    plan = [[Wanted((nodes[0] * 8 + i, nodes[1] * 8 + i))] for i, (_, _, nodes, _) in enumerate(jobs)]
    result = thebes.simulate(
        trace, "4x8", Puppet(plan=dict(enumerate(plan))), costs=FREE_OF_COST,
        perf=Tiers(balanced=(1, 1, 0.8, 0.8), skewed=(1, 1, 0.5, 0.5)), contention=Contention(on=True, eta=eta),
    )  # fmt: skip
    assert finishes(result) == pytest.approx(_by_hand(jobs, eta), rel=1e-9, abs=1e-6)


# -- several jobs on one GPU ------------------------------------------------------------------------------------------


def test_two_packed_jobs_run_at_once_at_the_rates_of_the_interference_model() -> None:
    """Given utilisations of 0.95: together each keeps 0.95 / 1.9; when one ends, the other goes on at full speed."""
    trace = trace_of((0, 1, 100), (0, 1, 50))
    result = puppet_run(trace, [[Wanted((0,), 0.5)], [Wanted((0,), 0.5)]])
    rate = 0.95 / 1.9
    assert finishes(result) == pytest.approx([50 / rate + 50, 50 / rate])


def test_the_gpu_seconds_of_a_shared_gpu_are_charged_once() -> None:
    trace = trace_of((0, 1, 100), (0, 1, 50))
    result = puppet_run(trace, [[Wanted((0,), 0.5)], [Wanted((0,), 0.5)]], cluster="1x1")
    both_s = 50 / (0.95 / 1.9)
    useful = result.jobs["useful_gpu_s"].to_list()
    assert useful == pytest.approx([0.5 * both_s + 0.5 * 50, 0.5 * both_s])
    assert result.timeline["busy_gpus"].to_list() == [1, 1, 0]


def test_a_job_left_alone_on_its_gpu_may_take_the_whole_of_it() -> None:
    trace = trace_of((0, 1, 100), (0, 1, 50))
    both_s = 50 / (0.95 / 1.9)
    result = puppet_run(trace, [[Wanted((0,), 0.5), Wanted((0,), 1.0, both_s)], [Wanted((0,), 0.5)]], cluster="1x1")
    assert result.jobs["useful_gpu_s"].to_list() == pytest.approx([0.5 * both_s + 50, 0.5 * both_s])
    assert result.metrics["preemptions"] == 0


def test_a_guest_that_leaves_gives_no_gpu_away() -> None:
    """Given a guest beside its host, when it is suspended, the host stays and nobody else gets its GPU."""
    trace = trace_of((0, 1, 100), (0, 1, 50))
    plan = [[Wanted((0,), 0.5)], [Wanted((0,), 0.5), Wanted((), from_s=10), Wanted((1,), from_s=20)]]
    result = puppet_run(trace, plan, cluster="1x2")
    rate = 0.95 / 1.9
    assert finishes(result) == pytest.approx([10 + (100 - 10 * rate), 20 + (50 - 10 * rate)])


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        ([[Wanted((0,), 0.6)], [Wanted((0,), 0.6)]], "gives a GPU twice"),
        ([[Wanted((0,), 0.0)], [Wanted((1,), 1.0)]], "gives a share that is not above 0 and at most 1"),
        ([[Wanted((0,), 1.5)], [Wanted((1,), 1.0)]], "gives a share that is not above 0 and at most 1"),
        ([[Wanted((0,), 0.5)], [Wanted((0,), 0.5)]], "gives the jobs on a GPU more memory than it has"),
    ],
)
def test_the_checker_refuses_shares_that_cannot_be(plan: list[list[Wanted]], fault: str) -> None:
    cluster = uniform("tight", 1, 1, NodeKind(2, gpu_memory_gib=12.0))  # two jobs of 8 GiB do not fit
    with pytest.raises(UserError, match=fault):
        puppet_run(trace_of((0, 1, 100), (0, 1, 50)), plan, cluster=cluster)  # type: ignore[arg-type]


def test_a_policy_that_shares_without_saying_so_is_refused() -> None:
    class Sly(Puppet):
        shares = False

    plan = dict(enumerate([[Wanted((0,), 0.5)], [Wanted((0,), 0.5)]]))
    with pytest.raises(UserError, match="shares GPUs, but the policy does not say that it does") as error:
        thebes.simulate(trace_of((0, 1, 100), (0, 1, 50)), "1x2", Sly(plan=plan))
    assert "shares = True" in (error.value.hint or "")


def test_shares_and_counts_come_one_per_row() -> None:
    for wrong in ({"shares": np.ones(2)}, {"counts": np.ones(2, dtype=np.int64)}):
        with pytest.raises(UserError, match="names 1 rows but 2"):
            Decision(rows=np.array([0]), gpus=np.array([0]), fate=np.array([HOLDS]), **wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="shares are a list of numbers"):
        Decision(rows=np.array([0]), gpus=np.array([0]), fate=np.array([HOLDS]), shares=np.array(["half"]))


# -- jobs that change size --------------------------------------------------------------------------------------------


def elastic(*jobs: Sequence[float], least: int, most: int) -> Trace:
    trace = trace_of(*jobs)
    more = {"min_gpus": [least] * len(jobs), "max_gpus": [most] * len(jobs)}
    return Trace("elastic", trace.jobs.with_columns(**{k: np.array(v) for k, v in more.items()}))


def test_a_job_that_grows_runs_faster_and_pays_for_the_change() -> None:
    """Given 2 GPUs asked for and 4 from 50 s on, when a resize costs 3 + 2 s, then the rest runs at twice the speed."""
    trace = elastic((0, 2, 100), least=1, most=4)
    plan = [[Wanted((0, 1)), Wanted((0, 1, 2, 3), from_s=50)]]
    result = puppet_run(trace, plan, cluster="1x4", costs=Costs(suspend_s=3, resume_s=2))
    assert finishes(result) == pytest.approx([50 + 5 + 25])
    job = result.jobs.row(0, named=True)
    assert (job["resizes"], job["migrations"], job["preemptions"]) == (1, 0, 0)
    assert job["useful_gpu_s"] == pytest.approx(2 * 50 + 4 * 25)
    assert job["overhead_gpu_s"] == pytest.approx(2 * 3 + 4 * 2)
    assert result.events["kind"].cast(str).to_list() == ["submit", "start", "resize", "finish"]


def test_a_job_that_shrinks_runs_slower_and_gives_its_gpus_to_others() -> None:
    trace = elastic((0, 2, 100), (50, 1, 10), least=1, most=4)
    plan = [[Wanted((0, 1)), Wanted((0,), from_s=50)], [Wanted((1,))]]
    result = puppet_run(trace, plan, cluster="1x2")
    assert finishes(result) == pytest.approx([50 + 50 * 2, 60])


def test_a_job_that_was_suspended_larger_comes_back_with_what_it_asked_for() -> None:
    trace = elastic((0, 2, 100), least=1, most=4)
    plan = [[Wanted((0, 1, 2, 3)), Wanted((), from_s=10), Wanted((0, 1), from_s=20)]]
    result = puppet_run(trace, plan, cluster="1x4")
    assert finishes(result) == pytest.approx([20 + 80])


@pytest.mark.parametrize("count", [1, 5])
def test_a_job_gets_no_number_of_gpus_that_it_does_not_accept(count: int) -> None:
    trace = elastic((0, 2, 100), least=2, most=4)
    with pytest.raises(UserError, match="another number of GPUs than it asked for"):
        puppet_run(trace, [[Wanted(tuple(range(count)))]], cluster="1x8")


@pytest.mark.parametrize(("column", "value"), [("min_gpus", 3), ("max_gpus", 1), ("min_gpus", 0)])
def test_bounds_that_contradict_the_request_are_refused(column: str, value: int) -> None:
    trace = trace_of((0, 2, 100))
    trace = Trace("contradictory", trace.jobs.with_columns(**{column: np.array([value])}))
    with pytest.raises(UserError, match=f"contradictory: job j0: {column} = {value} with 2 GPUs asked for") as error:
        thebes.simulate(trace, "1x4", "fifo")
    assert "leave it blank" in (error.value.hint or "")


def test_work_lost_in_a_kill_is_what_was_done_since_the_last_checkpoint_whatever_the_speed() -> None:
    """Given checkpoints every 40 s of running and a neighbour from 50 s to 70 s that halves the speed.

    Killed at 100 s, the job goes back to 80 s of running: 50 at full speed, 20 at half, 10 at full.
    """
    trace = trace_of((0, 1, 200), (50, 1, 10))
    plan = [[Wanted((0,)), Wanted((), from_s=100), Wanted((0,), from_s=110)], [Wanted((1,))]]
    result = puppet_run(
        trace, plan, interference=Interference(node_loss=0.5),
        costs=Costs(mechanism="kill", resume_s=0, checkpoint_every_s=40),
    )  # fmt: skip
    kept = 50 + 20 * 0.5 + 10
    assert finishes(result) == pytest.approx([110 + 200 - kept, 70])
    assert result.jobs["lost_gpu_s"][0] == pytest.approx(20)


# -- what a review found ----------------------------------------------------------------------------------------------


def test_no_more_jobs_sit_on_a_gpu_than_the_world_can_tell_apart() -> None:
    trace = trace_of(*[(0, 1, 10)] * 17, model=["alexnet"] * 17)
    cluster = uniform("roomy", 1, 1, NodeKind(1, gpu_memory_gib=1000.0))
    with pytest.raises(UserError, match="puts more than 16 jobs on one GPU"):
        puppet_run(trace, [[Wanted((0,), 1 / 17)]] * 17, cluster=cluster)  # type: ignore[arg-type]


def test_the_delays_of_several_partners_add_up() -> None:
    """Given three equal jobs that keep a GPU busy: together they get as far as by turns, not worse."""
    trace = trace_of(*[(0, 1, 100)] * 3)
    cluster = uniform("roomy", 1, 1, NodeKind(1, gpu_memory_gib=1000.0))
    result = puppet_run(trace, [[Wanted((0,), 1 / 3)]] * 3, cluster=cluster)  # type: ignore[arg-type]
    assert finishes(result) == pytest.approx([300.0] * 3)


def test_a_share_that_changes_while_a_job_is_restored_is_charged_as_it_was() -> None:
    """Given 100 s to start and a partner from 40 s on, the first 40 s of the start count whole, the rest half."""
    trace = trace_of((0, 1, 100), (40, 1, 100))
    plan = [[Wanted((0,)), Wanted((0,), 0.5, 40)], [Wanted((0,), 0.5)]]
    result = puppet_run(trace, plan, cluster="1x1", costs=Costs(start_s=100))
    assert result.jobs["overhead_gpu_s"].to_list() == pytest.approx([40 + 0.5 * 60, 0.5 * 100])


def test_a_partner_on_the_gpu_is_no_neighbour_on_the_node_as_well() -> None:
    """Given two equal jobs on one GPU and a third beside them, all three lose by the same rules."""
    trace = trace_of((0, 1, 100), (0, 1, 100), (0, 1, 100))
    plan = [[Wanted((0,), 0.5)], [Wanted((0,), 0.5)], [Wanted((1,))]]
    result = puppet_run(trace, plan, cluster="1x2", interference=Interference(node_loss=0.5))
    together = 0.95 / 1.9 * 0.5  # a partner on the GPU, a neighbour on the node
    alone = 0.5 * 0.5  # two neighbours
    assert together == alone
    assert finishes(result) == pytest.approx([100 / together] * 3)


def test_work_that_a_kill_undid_is_no_progress() -> None:
    seen: list[float] = []

    class Watching(Puppet):
        def decide(self, view: View) -> Decision:
            seen.append(float(view.jobs.progress_s[0]))
            return super().decide(view)

    plan = {0: [Wanted((0,)), Wanted((), from_s=50), Wanted((0,), from_s=60)]}
    costs = Costs(mechanism="kill", resume_s=0, checkpoint_every_s=40)
    thebes.simulate(trace_of((0, 1, 100)), "1x1", Watching(plan=plan), costs=costs, perf="ideal")
    assert seen == pytest.approx([0, 50, 40])


def test_switching_for_ever_is_noticed_and_told() -> None:
    trace = trace_of(*[(0, 1, 10_000)] * 5)
    with pytest.raises(UserError, match="no work gets done any more under dally") as error:
        thebes.simulate(trace, "1x2", thebes.policy.dally.dally.Dally(lease_s=30.0))
    assert "longer than it takes to suspend and resume" in (error.value.hint or "")


def test_an_organisation_keeps_its_name_even_if_it_is_the_only_one() -> None:
    result = thebes.simulate(trace_of((0, 1, 10), vc=["lab"]), "1x2", "fifo")
    assert result.jobs["tenant"].to_list() == ["lab"]
