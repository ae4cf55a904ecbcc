"""The checker of design rule 3: what a policy may not do, and what the simulator may not do to itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kit.workloads import finishes, mixed_cluster, story, trace_of
from thebes import Decision, Policy, UserError, View, fill, simulate
from thebes.model.cluster import Cluster
from thebes.model.jobs import HELD
from thebes.model.machine import occupy
from thebes.perf import Ideal
from thebes.placement import Consolidate
from thebes.policy import find
from thebes.sim import simulate as simulation
from thebes.sim.check import FAULTS, check_world
from thebes.sim.costs import FREE_OF_COST, Costs
from thebes.sim.loop import GeneralLoop
from thebes.sim.setup import build_world, prepare
from thebes.sim.world import World


def whole(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


class Scripted(Policy):
    """Decides what the script says: a function of the view."""

    def __init__(self, script: Callable[[View], Any]) -> None:
        self.script = script

    def decide(self, view: View) -> Any:
        return self.script(view)


def told(rows: Any, gpus: Any, **more: Any) -> Callable[[View], Decision]:
    return lambda view: Decision(rows, gpus, np.zeros(len(view.jobs), dtype=np.int64), **more)


# Jobs 0 and 1 ask for 2 GPUs each at 0 s, job 2 comes later; the cluster has 8 A100s and 6 V100s.
JOBS = trace_of((0, 2, 10), (0, 2, 10), (50, 1, 10), gpu_type=["A100", None, None])


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (told([0, 1], [0, 1, 1, 2]), "gives a GPU twice (job row 1)"),
        (told([0, 1], [0, 1, 2]), "gives a job another number of GPUs than it asked for (job row 1)"),
        (told([0], [0, 1, 2]), "gives a job another number of GPUs than it asked for"),
        (told([0, 2], [0, 1, 2]), "names a job that is not alive (job row 2)"),
        (told([0], [0, 14]), "gives a GPU that does not exist or a list that is not sorted (job row 0)"),
        (told([0], [-1, 0]), "gives a GPU that does not exist or a list that is not sorted (job row 0)"),
        (told([0], [1, 0]), "gives a GPU that does not exist or a list that is not sorted (job row 0)"),
        (told([0], [0, 0]), "gives a GPU that does not exist or a list that is not sorted (job row 0)"),
        (told([0], [8, 9]), "gives GPUs of a kind that the job did not ask for, or of two kinds (job row 0)"),
        (told([1], [7, 8]), "gives GPUs of a kind that the job did not ask for, or of two kinds (job row 1)"),
        (told([1, 0], [0, 1, 2, 3]), "names a job twice or out of order (job row 0)"),
        (told([1, 1], [0, 1, 2, 3]), "names a job twice or out of order (job row 1)"),
        (told([99], [0]), "names a job twice or out of order (job row 99)"),
        (told([-1], [0]), "names a job twice or out of order"),
        (told([0], [0, 1], promote=[2]), "promotes a job that is not waiting (job row 2)"),
        (told([0], [0, 1], promote=[77]), "promotes a job that is not waiting (job row 77)"),
    ],
)  # fmt: skip
def test_a_policy_that_breaks_a_rule_is_refused(script: Callable[[View], Decision], message: str) -> None:
    with pytest.raises(UserError) as caught:
        simulate(JOBS, mixed_cluster(), Scripted(script))
    assert str(caught.value) == (
        f"policy Scripted: its decision at 0 s {message}\n"
        "a Decision names whole gangs on free GPUs; `thebes.fill(view, order)` makes one from an order"
    )


class Unwritable:
    """It can be remembered by nobody."""

    def __reduce__(self) -> Any:
        raise RuntimeError("I cannot be written down")


class Speechless(Exception):  # noqa: N818 - what it is
    def __str__(self) -> str:
        raise ValueError("not even this")


def raising(error: BaseException) -> Callable[[View], Decision]:
    def script(view: View) -> Decision:
        raise error

    return script


def overwriting(view: View) -> Decision:
    decision = fill(view, np.arange(len(view.jobs)))
    view.machine.gpus["owner"][:] = 1
    return decision


def of_the_form(**fields: Any) -> Callable[[View], Decision]:
    """The right answer but for these fields, put in behind the back of the class."""

    def script(view: View) -> Decision:
        decision = fill(view, np.arange(len(view.jobs)))
        for name, value in fields.items():
            object.__setattr__(decision, name, value)
        return decision

    return script


# The ledger refuses the same ones: tests/live/test_gate_live.py.
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (of_the_form(queues=whole(0)), "its decision at 0 s names the queues of 1 jobs, but 2 are alive"),
        (of_the_form(queues=whole(0, 40_000)), "its decision at 0 s names a queue outside 0 … 32767"),
        (of_the_form(queues=whole(0, -1)), "its decision at 0 s names a queue outside 0 … 32767"),
        (of_the_form(queues=np.array([0.5, 1])), "a Decision's queues is a list of whole numbers, not float64"),
        (of_the_form(queues=np.array([None, 1])), "a Decision's queues is a list of whole numbers, not object"),
        (of_the_form(rows=np.array(["0"], dtype=object)), "a Decision's rows is a list of whole numbers, not object"),
        (of_the_form(fate=whole()), "its decision at 0 s tells the fate of 0 jobs, but 2 are alive"),
        (of_the_form(fate=whole(0, 77)), "its decision at 0 s tells a fate that does not exist"),
        (of_the_form(fate=np.array([0, None])), "a Decision's fate is a list of whole numbers, not object"),
        (of_the_form(promote=whole(1, 1)), "its decision at 0 s promotes a job twice"),
        (of_the_form(shares=np.array([0.5, 0.5])), "shares GPUs, but the policy does not say that it does"),
        (of_the_form(cpus=whole(1, 1)), "names execution plans or CPUs, which this simulation does not carry out"),
        (of_the_form(wake_s="soon"), "its decision cannot be read: ValueError"),
        (of_the_form(wake_s=np.nan), "it asks to be woken at nan s"),
        (of_the_form(memory=Unwritable()), "what it wants to remember cannot be written down: RuntimeError: I cannot"),
        (of_the_form(memory=lambda: None), "what it wants to remember cannot be written down: "),
        (overwriting, "it changed the View that it was shown"),
        (raising(RecursionError("deep")), "decide failed: RecursionError: deep (test_sim_rules.py, line "),
        (raising(MemoryError()), "decide failed: MemoryError (test_sim_rules.py, line "),
        (raising(SystemExit(3)), "decide failed: SystemExit: 3 (test_sim_rules.py, line "),
        (raising(Speechless()), "decide failed: Speechless (test_sim_rules.py, line "),
        (lambda view: {"rows": [0]}, "decide returned dict, not a Decision"),
    ],
)  # fmt: skip
def test_whatever_a_policy_answers_is_refused_with_one_clear_error(script: Callable[[View], Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        simulate(JOBS, mixed_cluster(), Scripted(script))
    assert f"policy Scripted: {message}" in str(caught.value) or message in str(caught.value)
    assert str(caught.value).startswith("policy Scripted: ")
    assert caught.value.hint


def test_a_job_that_has_ended_cannot_be_named() -> None:
    def script(view: View) -> Decision:
        return Decision(whole(0), whole(0, 1), np.zeros(len(view.jobs), dtype=np.int64))

    with pytest.raises(UserError, match=r"its decision at 10 s names a job that is not alive \(job row 0\)"):
        simulate(JOBS, mixed_cluster(), Scripted(script))


def test_a_running_job_cannot_be_promoted() -> None:
    def script(view: View) -> Decision:
        return fill(view, np.arange(len(view.jobs)), promote=whole(0) if view.now_s else None)

    trace = trace_of((0, 1, 10), (5, 1, 10))
    with pytest.raises(UserError, match=r"its decision at 5 s promotes a job that is not waiting \(job row 0\)"):
        simulate(trace, "1x2", Scripted(script))


@pytest.mark.parametrize("wake_s", [0.0, -5.0, np.nan])
def test_a_policy_cannot_be_woken_in_the_past(wake_s: float) -> None:
    with pytest.raises(UserError) as caught:
        simulate(JOBS, mixed_cluster(), Scripted(lambda view: fill(view, np.arange(2), wake_s=wake_s)))
    assert str(caught.value) == (
        f"policy Scripted: at 0 s it asks to be woken at {wake_s:g} s\n"
        "wake_s is an instant after view.now_s; leave it out if nothing changes by itself"
    )


def test_what_is_not_a_decision_is_told() -> None:
    with pytest.raises(UserError) as caught:
        simulate(JOBS, mixed_cluster(), Scripted(lambda view: None))
    assert str(caught.value) == (
        "policy Scripted: decide returned NoneType, not a Decision\nend it with `return thebes.fill(view, order)`"
    )


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ([0.0, 1.0], "a Decision's gpus is a list of whole numbers, not float64 in 1 dimensions"),
        ([[0, 1]], "a Decision's gpus is a list of whole numbers, not int64 in 2 dimensions"),
    ],
)
def test_a_decision_takes_whole_numbers(gpus: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Decision(whole(0), gpus, whole(0))


@pytest.mark.parametrize(
    "rows_of",
    [list, tuple, lambda gpus: np.array(gpus, dtype=np.int32), lambda gpus: np.array([[g, 99] for g in gpus])[:, 0]],
    ids=["list", "tuple", "int32", "strided"],
)
def test_any_list_of_whole_numbers_will_do(rows_of: Callable[[Any], Any]) -> None:
    """Given GPUs 1, 3 and 5 for three jobs, however they are written down, each job has its own."""

    def script(view: View) -> Decision:
        gpus = [1 + 2 * row for row in view.jobs.rows.tolist()]
        return Decision(rows_of(view.jobs.rows.tolist()), rows_of(gpus), np.zeros(len(view.jobs), dtype=np.int64))

    assert finishes(simulate(trace_of(*[(0, 1, 10)] * 3), "1x6", Scripted(script))) == [10, 10, 10]


# --- migration --------------------------------------------------------------------------------------------------------


def swap_at(instant: float) -> Callable[[View], Decision]:
    """Two jobs of 2 GPUs, on GPUs 0-1 and 2-3; they change places at one instant."""

    def script(view: View) -> Decision:
        places = [(0, 1), (2, 3)] if view.now_s < instant else [(2, 3), (0, 1)]
        gpus = [gpu for row in view.jobs.rows.tolist() for gpu in places[row]]
        wake_s = instant if view.now_s < instant else np.inf
        return Decision(view.jobs.rows, gpus, np.zeros(len(view.jobs), dtype=np.int64), wake_s=wake_s)

    return script


def test_jobs_can_swap_places() -> None:
    """Given a swap at 10 s that costs 3 s to save, 1 s to move and 5 s to restore, both end 9 s later."""
    costs = Costs(suspend_s=3.0, resume_s=5.0, migrate_s=1.0)
    result = simulate(trace_of((0, 2, 30), (0, 2, 40)), "2x2", Scripted(swap_at(10.0)), costs=costs)
    assert story(result, "migrate") == [(10, 0, "migrate"), (10, 1, "migrate")]
    assert finishes(result) == [39, 49]
    assert result.metrics["migrations"] == 2
    assert result.metrics["preemptions"] == 0
    assert result.jobs["overhead_gpu_s"].to_list() == [18, 18]
    assert result.jobs["useful_gpu_s"].to_list() == [60, 80]


def test_a_killed_job_that_is_moved_loses_what_was_not_saved() -> None:
    """Given periodic checkpoints every 4 s and a move at 10 s, the 2 s since the last one are done again."""
    costs = Costs(mechanism="kill", resume_s=1.0, checkpoint_every_s=4.0)
    result = simulate(trace_of((0, 2, 30), (0, 2, 40)), "2x2", Scripted(swap_at(10.0)), costs=costs)
    assert finishes(result) == [33, 43]
    assert result.jobs["lost_gpu_s"].to_list() == [4, 4]


# --- the state itself -------------------------------------------------------------------------------------------------


def world_at(instants: int) -> tuple[World, GeneralLoop]:
    """Three of four jobs hold GPUs on a mixed cluster; job 3 waits."""
    cluster: Cluster = mixed_cluster()
    trace = trace_of((0, 3, 100), (0, 2, 100), (0, 4, 100), (0, 8, 100))
    work = prepare(trace, cluster, Consolidate(), Ideal(), seed=0)
    world = build_world(work, cluster, Consolidate(), FREE_OF_COST, 0)
    running = GeneralLoop(world, cluster, find("backfill")(), checks=True)
    running.run(instants)
    assert (world.table.jobs["phase"] == HELD).tolist() == [True, True, True, False]
    assert check_world(world) == (0, -1)
    return world, running


def corrupt_ghost(world: World) -> None:
    free = int(np.flatnonzero(world.machine.gpus["owner"] < 0)[0])
    occupy(world.machine, 3, whole(free))


def corrupt_torn(world: World) -> None:
    free = int(np.flatnonzero(world.machine.gpus["owner"] < 0)[0])
    occupy(world.machine, 0, whole(free))


def corrupt_unsorted(world: World) -> None:
    world.table.slots[1] = world.table.slots[0]


def corrupt_double(world: World) -> None:
    jobs = world.table.jobs
    world.table.slots[jobs["first_slot"][0] + 2] = world.table.slots[jobs["first_slot"][2] + 3]


def corrupt_kind(world: World) -> None:
    world.table.jobs["kinds"][0] = 0


def corrupt_count(world: World) -> None:
    world.clock["held"][0] += 1


def corrupt_index(world: World) -> None:
    world.machine.nodes["free"][0] += 1


@pytest.mark.parametrize(
    ("corrupt", "fault", "row"),
    [
        (corrupt_ghost, "a job that holds no GPUs is noted as the owner of one", 3),
        (corrupt_torn, "a job holds fewer or more GPUs than its gang has", -1),
        (corrupt_unsorted, "a job holds fewer or more GPUs than its gang has", 0),
        (corrupt_double, "a GPU is held by two jobs", 0),
        (corrupt_kind, "a job sits on GPUs of a kind that it did not ask for", 0),
        (corrupt_count, "the set of running jobs differs from the allocation", -1),
        (corrupt_index, "the index of free GPUs is wrong", -1),
    ],
)
def test_the_checker_finds_what_is_wrong_with_the_world(corrupt: Callable[[World], None], fault: str, row: int) -> None:
    world, _ = world_at(1)
    corrupt(world)
    found, where = check_world(world)
    assert (FAULTS[found], where) == (fault, row)


def test_a_corrupt_world_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a GPU that is noted as held by a job that is not there yet, the run stops at its first instant."""

    def haunted(*args: Any, **named: Any) -> World:
        world = build_world(*args, **named)
        occupy(world.machine, 1, whole(3))
        return world

    monkeypatch.setattr(simulation, "build_world", haunted)
    with pytest.raises(AssertionError, match=r"noted as the owner of one \(job row 1\) at 0.0 s: a defect of Thebes"):
        simulate(trace_of((0, 1, 10), (50, 1, 10)), "1x4", "fifo")
