"""Whole runs: what goes in is checked, what comes out is consistent, and it comes out the same every time."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from kit.workloads import RESNET, VGG, finishes, mixed_cluster, story, trace_of, workloads
from thebes import Decision, Policy, Result, Trace, UserError, View, fill, simulate
from thebes.model.compiled import plain
from thebes.policy import find
from thebes.policy.orders.tiresias import TiresiasL
from thebes.report.result import EVENT_KINDS, write_events
from thebes.sim import setup
from thebes.sim import simulate as simulation
from thebes.sim.costs import FREE_OF_COST, Costs
from thebes.sim.setup import build_world
from thebes.sim.world import World

# --- what goes in -----------------------------------------------------------------------------------------------------


def test_fractions_of_a_gpu_are_rounded_up_with_a_note() -> None:
    result = simulate(trace_of((0, 0.25, 10), (0, 1.5, 10), (0, 2.0, 10)), "1x8", "fifo")
    assert result.jobs["gpus"].to_list() == [1, 2, 2]
    assert result.notes == ("2 of 3 jobs asked for fractions of a GPU: rounded up to whole GPUs",)


def test_a_trace_without_models_gets_them_by_seed() -> None:
    trace = trace_of((0, 1, 10), (0, 1, 10), model=[None, None])
    result = simulate(trace, "1x8", "fifo", seed=5)
    assert result.notes == ("the trace names no models: assigned by seed 5 from 9 known ones",)
    assert None not in result.jobs["model"].to_list()


def test_only_the_first_jobs_if_one_wants() -> None:
    assert simulate(trace_of(*[(0, 1, 10)] * 5), "1x8", "fifo", limit=2).metrics["jobs"] == 2


# GPUs: 8 A100 in two nodes, 6 V100 in three.
TYPED = trace_of(
    (0, 2, 10), (0, 2, 10), (0, 2, 10), (0, 2, 10), gpu_type=["V100", "a100", "T4|V100", None]
)  # fmt: skip


def test_a_job_runs_on_the_type_that_it_asks_for() -> None:
    """Given 2-GPU V100 nodes and 4-GPU A100 nodes, the GPUs given show through the decisions of a policy."""
    seen: dict[int, set[int]] = {}

    class Notes(Policy):
        def decide(self, view: View) -> Decision:
            decision = fill(view, np.arange(len(view.jobs)))
            kinds = view.cluster.node_kind[view.cluster.gpu_node[decision.gpus]].reshape(-1, 2)
            seen.update({row: set(kind) for row, kind in zip(decision.rows.tolist(), kinds.tolist(), strict=True)})
            return decision

    simulate(TYPED, mixed_cluster(), Notes())
    assert [seen[row] for row in range(3)] == [{1}, {0}, {1}]
    assert len(seen[3]) == 1


@pytest.mark.parametrize(
    ("trace", "options", "message"),
    [
        (trace_of(), {}, "test: no jobs to simulate\ncheck --limit, or the trace with `thebes trace info`"),
        (trace_of((0, 1, 1)), {"limit": 0}, "test: no jobs to simulate"),
        (
            trace_of((0, 1, 1), *[(0, 9, 1)] * 7),
            {},
            "test: 7 of 8 jobs can never run on this cluster (14 GPUs: 2 nodes x 4 A100, 3 nodes x 2 V100, 2 racks, "
            "placement consolidate): j1 (9 GPUs), j2 (9 GPUs), j3 (9 GPUs), j4 (9 GPUs), j5 (9 GPUs) and 2 more\n"
            "--skip-oversize leaves them out and goes on",
        ),
        (
            trace_of((0, 1, 1), (0, 7, 1), gpu_type=["H100", "V100"]),
            {},
            "test: 2 of 2 jobs can never run on this cluster (14 GPUs: 2 nodes x 4 A100, 3 nodes x 2 V100, 2 racks, "
            "placement consolidate); 1 of them ask for a GPU type that is not there (--ignore-gpu-type takes any): "
            "j0 (1 GPUs), j1 (7 GPUs)",
        ),
        (
            trace_of((0, 9, 1)),
            {"skip_oversize": True},
            "test: no job fits 14 GPUs: 2 nodes x 4 A100, 3 nodes x 2 V100, 2 racks\nuse a larger cluster",
        ),
    ],
    ids=["empty", "limit 0", "oversize", "wrong type", "nothing fits"],
)
def test_what_can_never_run_is_refused(trace: Trace, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        simulate(trace, mixed_cluster(), "fifo", **options)
    assert str(caught.value).startswith(message)


def test_jobs_that_never_fit_can_be_left_out() -> None:
    result = simulate(trace_of((0, 1, 10), (0, 9, 10)), mixed_cluster(), "fifo", skip_oversize=True)
    assert result.jobs["job_id"].to_list() == ["j0"]
    assert result.notes == ("1 of 2 jobs left out: they can never fit this cluster (--skip-oversize)",)


def test_gpu_types_can_be_ignored() -> None:
    trace = trace_of((0, 1, 10), gpu_type=["H100"])
    assert simulate(trace, mixed_cluster(), "fifo", ignore_gpu_type=True).metrics["completed"] == 1


def test_a_gang_larger_than_a_switch_never_fits_under_yarn() -> None:
    with pytest.raises(UserError, match=r"1 of 1 jobs can never run .*placement yarn\): j0 \(5 GPUs\)"):
        simulate(trace_of((0, 5, 1)), "2x2x2", "fifo", placement="yarn")
    assert simulate(trace_of((0, 5, 1)), "2x2x2", "fifo", placement="skew").metrics["completed"] == 1


def test_an_unknown_mechanism_is_told() -> None:
    with pytest.raises(UserError, match=r"unknown cost.mechanism 'chekpoint'\ndid you mean 'checkpoint'\?"):
        Costs(mechanism="chekpoint")


class Lazy(Policy):
    """Serves small jobs only."""

    def decide(self, view: View) -> Decision:
        return fill(view, np.flatnonzero(view.jobs.gpus == 1))


def test_a_run_that_gets_stuck_says_so() -> None:
    with pytest.raises(UserError) as caught:
        simulate(trace_of((0, 1, 5), *[(0, 2, 5)] * 7), "1x4", Lazy())
    assert str(caught.value) == (
        "7 of 8 jobs never finished under Lazy with placement consolidate: j1, j2, j3, j4, j5 and 2 more\n"
        "nothing was left that could start them: the policy or the placement passes them over for ever"
    )


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])
def test_a_run_that_never_gets_anywhere_says_so(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given turns of 10 s and a checkpoint only every 100 s, two jobs kill each other's work for ever."""
    monkeypatch.setattr(simulation, "STRETCH", 200)  # look more often than every 20,000 instants
    costs = Costs(mechanism="kill", checkpoint_every_s=100.0, resume_s=0.0)
    with pytest.raises(UserError) as caught:
        simulate(trace_of((0, 1, 500), (0, 1, 500)), "1x1", find("las")(quantum_s=10.0), costs=costs, fast=fast)
    assert str(caught.value).startswith("no work is kept any more under las (at ")
    assert str(caught.value).endswith("make cost.checkpoint_every_s shorter, or use cost.mechanism=checkpoint")


# --- costs ------------------------------------------------------------------------------------------------------------


def test_a_suspended_job_delays_its_successor_on_the_same_gpus() -> None:
    """Given 12 s to save, 50 s to restore and a preemption at 10 s, the successor runs from 22, the job from 84 on."""
    result = simulate(trace_of((0, 2, 20), (10, 1, 12)), "1x2", "sjf")
    assert finishes(result) == [34 + 50 + 10, 34]
    jobs = result.jobs
    assert jobs["overhead_gpu_s"].to_list() == [2 * (12 + 50), 0]
    assert jobs["useful_gpu_s"].to_list() == [40, 12]
    assert jobs["idle_held_gpu_s"].to_list() == [0, 0]  # the last owner pays until its state is written
    assert jobs["queue_delay_s"].to_list() == [24, 0]


class Displaces(Policy):
    """Job 0 sits on GPUs 0 to 2 until job 1 comes, which gets the two it is told."""

    def __init__(self, *gpus: int) -> None:
        self.gpus = gpus

    def decide(self, view: View) -> Decision:
        row = int(view.jobs.rows[-1])
        return Decision([row], self.gpus if row else (0, 1, 2), np.zeros(len(view.jobs), dtype=np.int64))


@pytest.mark.parametrize(
    ("gpus", "finish", "idle"), [((1, 2), 27, 0), ((2, 3), 27, 12), ((3, 4), 15, 0)], ids=["both", "one", "none"]
)
def test_a_successor_waits_for_the_gpus_that_are_being_written_from(
    gpus: tuple[int, int], finish: float, idle: float
) -> None:
    """Given a job displaced at 10 s whose state takes 12 s to save, and a successor on both, one or none of its GPUs.

    A GPU that is clear while the gang waits for another is idle and held; one that is written from is on the other's
    account.
    """
    result = simulate(trace_of((0, 3, 20), (10, 2, 5)), "1x5", Displaces(*gpus))
    assert finishes(result)[1] == finish
    assert result.jobs["idle_held_gpu_s"].to_list() == [0, idle]
    assert result.jobs["overhead_gpu_s"].to_list() == [3 * (12 + 50), 0]


def test_a_first_start_and_state_size_cost_if_one_wants() -> None:
    costs = Costs(start_s=3.0, start_s_per_gib=2.0)
    result = simulate(trace_of((0, 1, 10), model=[VGG]), "1x1", "fifo", costs=costs)
    gib = 3 * 547.1 / 1024
    assert finishes(result) == pytest.approx([13 + 2 * gib], rel=1e-3)


def test_a_killed_job_goes_back_to_its_last_periodic_checkpoint() -> None:
    trace = trace_of((0, 2, 20), (11, 1, 10))
    every = simulate(trace, "1x2", "sjf", costs=Costs(mechanism="kill", resume_s=1.0, checkpoint_every_s=4.0))
    never = simulate(trace, "1x2", "sjf", costs=Costs(mechanism="kill", resume_s=1.0, checkpoint_every_s=0.0))
    assert finishes(every) == [21 + 1 + 12, 21]
    assert finishes(never) == [21 + 1 + 20, 21]
    assert every.jobs["lost_gpu_s"].to_list() == [2 * 3, 0]
    assert never.jobs["lost_gpu_s"].to_list() == [2 * 11, 0]
    assert every.jobs["useful_gpu_s"].to_list() == never.jobs["useful_gpu_s"].to_list() == [40, 10]


def test_a_job_that_is_preempted_before_its_state_is_written_waits_for_it() -> None:
    """Given a state that takes 100 s to write from 10 s on, two quick moves do not make it readable any sooner."""

    def decide(view: View) -> Decision:
        place = [0, 1, 2][min(int(view.now_s / 10), 2)]
        wake_s = {0: 10.0, 1: 20.0}.get(place, np.inf)
        return Decision([0], [place], np.zeros(1, dtype=np.int64), wake_s=wake_s)

    class Restless(Policy):
        def decide(self, view: View) -> Decision:
            return decide(view)

    costs = Costs(suspend_s=100.0, resume_s=0.0)
    result = simulate(trace_of((0, 1, 30)), "1x3", Restless(), costs=costs)
    assert finishes(result) == [110 + 20]
    assert result.jobs["idle_held_gpu_s"].to_list() == [10 + 90]


# --- what comes out ---------------------------------------------------------------------------------------------------

POLICIES: dict[str, Policy] = {
    "srtf": find("srtf")(),
    "tiresias-l": TiresiasL(queue_limits=(20.0, 60.0), promote_knob=2.0, promote_floor_s=10.0),
    "las": find("las")(quantum_s=10.0),
    "multi-dlas": find("multi-dlas")(queue_limit=20.0, split_every_s=30.0),
}
CHEAP = Costs(start_s=1.0, suspend_s=2.0, resume_s=1.5)
runs = given(trace=workloads(most_gpus=6), policy=st.sampled_from(sorted(POLICIES)))


def consistent(result: Result) -> None:
    """Events, timeline, jobs and metrics tell one story."""
    jobs, timeline = result.jobs, result.timeline
    events = story(result)
    times = [time for time, _, _ in events]
    assert times == sorted(times)
    order = {kind: place for place, kind in enumerate(("finish", "submit", "suspend", "start"))}
    for a, b in pairwise(events):
        if a[0] == b[0] and a[2] in order and b[2] in order:
            assert order[a[2]] <= order[b[2]], (a, b)

    # each job: submitted once, started once, ended once; holding and waiting by turns
    for row in range(jobs.height):
        mine = [(time, kind) for time, job, kind in events if job == row and kind not in ("demote", "promote")]
        kinds = [kind for _, kind in mine]
        assert kinds[:2] == ["submit", "start"]
        assert kinds[-1] == "finish"
        assert kinds[2:-1] == ["suspend", "resume"] * (len(kinds[2:-1]) // 2)
        assert jobs["preemptions"][row] == kinds.count("suspend")
        assert mine[0][0] == jobs["submit_s"][row] <= mine[1][0] == jobs["first_start_s"][row]
        assert mine[-1][0] == jobs["finish_s"][row]
        assert jobs["jct_s"][row] == pytest.approx(mine[-1][0] - mine[0][0])
        ends = [time for time, kind in mine if kind in ("start", "resume")]
        begins = [time for time, kind in mine if kind in ("submit", "suspend")]
        assert jobs["queue_delay_s"][row] == pytest.approx(sum(ends) - sum(begins), abs=1e-6)

    # the timeline is what the events add up to, at every instant
    gpus = jobs["gpus"].to_list()
    change = {"submit": (0, 1), "start": (1, -1), "resume": (1, -1), "suspend": (-1, 1), "finish": (-1, 0)}
    state, by_time = np.zeros(4, dtype=int), {}
    for time, job, kind in events:
        held, waiting = change.get(kind, (0, 0))
        state = state + np.array([held * gpus[job], waiting, held, waiting * gpus[job]], dtype=int)
        by_time[time] = state.tolist()
    columns = ["busy_gpus", "waiting_jobs", "running_jobs", "waiting_gpus"]
    shown = {row[0]: list(row[1:]) for row in timeline.select("time_s", *columns).rows()}
    assert {time: shown[time] for time in by_time} == by_time
    assert timeline["time_s"].is_sorted()
    assert timeline["busy_gpus"].max() <= result.total_gpus
    assert timeline.select(columns).tail(1).row(0) == (0, 0, 0, 0)

    # the metrics are sums and means of the frames
    metrics = result.metrics
    assert metrics["completed"] == metrics["jobs"] == jobs.height
    assert metrics["events"] == len(events)
    assert metrics["avg_jct"] == pytest.approx(jobs["jct_s"].mean())
    assert metrics["makespan"] == pytest.approx(jobs["finish_s"].max() - jobs["submit_s"].min())
    for name in ("preemptions", "promotions", "migrations", "demotions"):
        assert metrics[name] == jobs[name].sum()
    for name in ("useful", "overhead", "lost", "idle_held"):
        assert metrics[f"{name}_gpu_seconds"] == pytest.approx(jobs[f"{name}_gpu_s"].sum())
    for kind, name in (("promote", "promotions"), ("demote", "demotions"), ("migrate", "migrations")):
        assert len(story(result, kind)) == metrics[name]


@runs
@effort(40)
def test_events_timeline_jobs_and_metrics_tell_one_story(trace: Trace, policy: str) -> None:
    consistent(simulate(trace, "3x2", POLICIES[policy], costs=CHEAP))


def fingerprint(result: Result) -> str:
    """Everything but the wall time, as text."""
    metrics = {name: value for name, value in result.metrics.items() if name != "wall_seconds"}
    frames = [result.jobs, result.events.with_columns(pl.col("kind").cast(pl.String)), result.timeline]
    return json.dumps([metrics, *(frame.write_json() for frame in frames)])


@runs
@effort(15)
def test_a_run_repeats_to_the_last_bit(trace: Trace, policy: str) -> None:
    first, second = (simulate(trace, "3x2", POLICIES[policy], costs=CHEAP, placement="random") for _ in range(2))
    assert fingerprint(first) == fingerprint(second)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])
def test_a_log_that_has_to_grow_loses_nothing(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given room for a single event at first, the log doubles many times and the result is the same."""
    trace = trace_of(*((i, 1 + i % 4, 5 + 3 * (i % 7)) for i in range(60)))
    expected = simulate(trace, "3x2", POLICIES["tiresias-l"], costs=CHEAP, fast=fast)

    def cramped(*args: Any, **named: Any) -> World:
        world = build_world(*args, **named)
        return world._replace(log=plain(np.recarray(1, dtype=world.log.dtype)))

    monkeypatch.setattr(simulation, "build_world", cramped)
    assert fingerprint(simulate(trace, "3x2", POLICIES["tiresias-l"], costs=CHEAP, fast=fast)) == fingerprint(expected)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])
def test_a_timeline_that_gets_too_long_gets_coarser(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given room for 16 steps and some hundred instants, it covers the whole run and nothing else changes."""
    trace = trace_of(*((i, 1 + i % 4, 5 + 3 * (i % 7)) for i in range(60)))
    full = simulate(trace, "3x2", "srtf", costs=CHEAP, fast=fast)
    monkeypatch.setattr(setup, "TIMELINE_ROOM", 16)
    coarse = simulate(trace, "3x2", "srtf", costs=CHEAP, fast=fast)
    assert coarse.events.equals(full.events)
    assert coarse.jobs.equals(full.jobs)
    times = coarse.timeline["time_s"]
    assert 4 <= coarse.timeline.height <= 16 < full.timeline.height
    assert times.is_sorted()
    assert times[0] == 0.0
    assert set(times) <= set(full.timeline["time_s"])
    assert coarse.timeline.row(-1)[1:] == (0, 0, 0, 0)
    last = full.timeline["time_s"].max()
    assert times.max() > last - last / 4


@pytest.mark.unchecked
def test_the_checker_changes_nothing() -> None:
    trace = trace_of(*((i, 1 + i % 4, 5 + 3 * (i % 7)) for i in range(40)))
    for fast in (True, False):
        checked, quick = (simulate(trace, "3x2", "srtf", checks=checks, fast=fast) for checks in (True, False))
        assert fingerprint(checked) == fingerprint(quick)


def test_the_suite_refuses_runs_without_the_checker() -> None:
    for fast in (True, False):
        with pytest.raises(AssertionError, match="a test simulates without the checker"):
            simulate(trace_of((0, 1, 1)), "1x1", "srtf", checks=False, fast=fast)


def test_progress_is_told_and_ends_at_the_end() -> None:
    told: list[tuple[int, int, float]] = []
    for fast in (True, False):
        simulate(trace_of((0, 1, 10), (0, 1, 5)), "1x1", "fifo", fast=fast, progress=lambda *now: told.append(now))
        assert told[-1] == (2, 2, 15.0)


# --- events as a file -------------------------------------------------------------------------------------------------


def test_events_can_be_written(tmp_path: Path) -> None:
    result = simulate(trace_of((0, 1, 10), model=[RESNET]), "1x1", "fifo")
    for name, read in (("e.csv", pl.read_csv), ("e.parquet", pl.read_parquet)):
        write_events(result, tmp_path / name)
        table = read(tmp_path / name)
        assert table["kind"].cast(pl.String).to_list() == ["submit", "start", "finish"]
        assert table["job_id"].to_list() == ["j0"] * 3
    assert set(result.events["kind"].cast(pl.String)) <= set(EVENT_KINDS)
    with pytest.raises(UserError, match=r"e.txt: events are written as .parquet or .csv\nchoose a name"):
        write_events(result, tmp_path / "e.txt")
    with pytest.raises(UserError, match=r"e.csv: cannot write: .*\nchoose another place"):
        write_events(result, tmp_path / "nowhere" / "e.csv")


def test_a_cost_free_run_has_no_overhead() -> None:
    result = simulate(trace_of((0, 2, 20), (10, 1, 12)), "1x2", "sjf", costs=FREE_OF_COST)
    assert finishes(result) == [32, 22]
    assert result.metrics["overhead_gpu_seconds"] == result.metrics["idle_held_gpu_seconds"] == 0


# --- the released simulator as a policy -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "placement", "message"),
    [
        ("2x2", "relaxed", "tiresias-compat knows the placements count and yarn, not 'relaxed'\nleave --placement out"),
        (
            mixed_cluster(),
            None,
            "tiresias-compat knows only equal nodes in equal racks, not 14 GPUs: 2 nodes x 4 A100, 3 nodes x 2 V100, "
            "2 racks\nuse a short form such as 8x8, or a Tiresias CSV",
        ),
    ],
)
def test_the_released_simulator_has_its_limits(cluster: Any, placement: str | None, message: str) -> None:
    with pytest.raises(UserError) as caught:
        simulate(trace_of((0, 1, 1)), cluster, "tiresias-compat", placement=placement)
    assert str(caught.value).startswith(message)
