"""The checker of the fast path: what changed at an instant is checked at once, everything N instants later at most."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kit.workloads import trace_of
from thebes.model.jobs import FINISHED
from thebes.model.machine import FREE, occupy, release
from thebes.perf import Ideal
from thebes.placement import Consolidate
from thebes.policy import find
from thebes.policy.orders.priority import PriorityPolicy, distribution_of
from thebes.sim import fast
from thebes.sim.check import FAULTS, FEWEST_INSTANTS, FULL_EVERY, SOUND, check_changes, check_world, nothing_seen
from thebes.sim.costs import FREE_OF_COST
from thebes.sim.setup import build_world, prepare
from thebes.sim.world import World
from thebes.trace.cluster_file import read_cluster

# Job 0 sits on all of node 0 for a long time; the others come and go on node 1, two GPUs each, one per second. Nobody
# comes to node 2.
LONG, SHORT_S = 0, 0.5
GHOST, BROKEN, DOUBLE, KIND, SETS, INDEX = FAULTS[1:]


class FastRun:
    """A simulation on the fast path that goes on instant by instant."""

    def __init__(self, shorts: int, *, checks: bool = True) -> None:
        cluster = read_cluster("3x4")
        trace = trace_of((0, 4, 10_000), *[(1 + i, 2, SHORT_S) for i in range(shorts)])
        work = prepare(trace, cluster, Consolidate(), Ideal(), seed=0)
        self.world = build_world(work, cluster, Consolidate(), FREE_OF_COST, 0)
        policy = find("fifo")()
        assert isinstance(policy, PriorityPolicy)
        self.rule, self.distribution = policy.rule(), distribution_of(policy.samples(), room=shorts + 1)
        self.memory = fast.memory_for(self.world, learns=False, checks=checks)
        self.seen_before = self.memory.seen.copy()

    def go_on(self, instants: int) -> int:
        for _ in range(instants):
            self.seen_before = self.memory.seen.copy()
            status = fast.run(self.world, self.memory, self.rule, self.distribution, 1)
            if status != fast.PAUSED:
                return status
        return fast.PAUSED

    def found(self) -> str:
        return FAULTS[self.memory.state[fast.FAULT]]


def set_owner(world: World, gpu: int, row: int) -> None:
    world.machine.gpus["owner"][gpu] = row


def slots_of(world: World, row: int) -> np.ndarray:
    first, width = world.table.jobs["first_slot"][row], world.table.jobs["width"][row]
    return world.table.slots[first : first + width]


def gpus(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def steal(world: World, row: int) -> None:
    """A GPU of job 0 goes to another job, which gives up one of its own: no count of GPUs changes on either node."""
    mine = slots_of(world, row)
    set_owner(world, int(mine[1]), FREE)
    mine[:] = sorted((int(slots_of(world, LONG)[3]), int(mine[0])))
    set_owner(world, int(mine[0]), row)


def forget_in_index(world: World, node: int) -> None:
    world.machine.words[0, world.machine.nodes["free"][node], 0] &= ~np.uint64(1 << node)


# What goes wrong with the job that started at this instant: (what, what is found).
AT_A_START: dict[str, tuple[Callable[[World, int], None], str]] = {
    "owner wrong": (lambda w, row: set_owner(w, int(slots_of(w, row)[0]), LONG), DOUBLE),
    "owner forgotten": (lambda w, row: set_owner(w, int(slots_of(w, row)[0]), FREE), DOUBLE),
    "gang broken": (lambda w, row: slots_of(w, row).__setitem__(1, slots_of(w, row)[0]), BROKEN),
    "gang too large": (lambda w, row: occupy(w.machine, row, gpus(7)), BROKEN),
    "double booking": (lambda w, row: slots_of(w, row).__setitem__(0, slots_of(w, LONG)[0]), DOUBLE),
    "a GPU of another job": (steal, INDEX),
    "wrong kind": (lambda w, row: w.table.jobs["kinds"].__setitem__(row, 0), KIND),
    "sets differ by a job": (lambda w, row: w.clock["held"].__iadd__(1), SETS),
    "sets differ by a GPU": (lambda w, row: w.clock["busy_gpus"].__iadd__(1), SETS),
    "index: node": (lambda w, row: w.machine.nodes["free"].__setitem__(1, 1), INDEX),
    "index: set of nodes": (lambda w, row: forget_in_index(w, 1), INDEX),
    "index: total": (lambda w, row: w.machine.kinds["free"].__iadd__(1), INDEX),
}

# What goes wrong with a job that ended at this instant.
AT_AN_END: dict[str, tuple[Callable[[World, int], None], str]] = {
    "still the owner": (lambda w, row: occupy(w.machine, row, slots_of(w, row)[:1]), GHOST),
    "owner again, unknown to the index": (lambda w, row: set_owner(w, int(slots_of(w, row)[0]), row), INDEX),
    "sets differ": (lambda w, row: w.clock["held"].__iadd__(1), SETS),
    "index: node": (lambda w, row: w.machine.nodes["free"].__setitem__(1, 1), INDEX),
}

# What goes wrong with job 0, to which nothing happens for a long time.
OUT_OF_SIGHT: dict[str, tuple[Callable[[World], None], str]] = {
    "owner wrong": (lambda w: set_owner(w, 0, len(w.table.jobs) - 1), GHOST),
    "owner forgotten": (lambda w: set_owner(w, 2, FREE), DOUBLE),
    "gang broken": (lambda w: slots_of(w, LONG).__setitem__(1, 0), BROKEN),
    "wrong kind": (lambda w: w.table.jobs["kinds"].__setitem__(LONG, 0), KIND),
    "index: node": (lambda w: w.machine.nodes["free"].__setitem__(0, 1), INDEX),
    "index: set of nodes": (lambda w: forget_in_index(w, 0), INDEX),
    "gang handed back": (lambda w: release(w.machine, slots_of(w, LONG)), INDEX),
}


@pytest.mark.parametrize("name", AT_A_START)
def test_a_fault_in_what_started_is_found_at_that_instant(name: str) -> None:
    corrupt, fault = AT_A_START[name]
    run = FastRun(shorts=4)
    assert run.go_on(4) == fast.PAUSED  # job 0 starts, job 1 starts, ends; job 2 starts
    assert check_changes(run.world, run.seen_before.copy()) == (SOUND, -1)
    corrupt(run.world, 2)
    found, row = check_changes(run.world, run.seen_before)
    assert FAULTS[found] == fault
    assert row in (2, -1)
    if name != "index: total":  # the full check does not add these up
        assert check_world(run.world)[0] != SOUND


@pytest.mark.parametrize("name", AT_AN_END)
def test_a_fault_in_what_ended_is_found_at_that_instant(name: str) -> None:
    corrupt, fault = AT_AN_END[name]
    run = FastRun(shorts=4)
    assert run.go_on(5) == fast.PAUSED  # up to the end of job 2
    corrupt(run.world, 2)
    found, row = check_changes(run.world, run.seen_before)
    assert FAULTS[found] == fault
    assert row in (2, -1)
    assert check_world(run.world)[0] != SOUND


@pytest.mark.parametrize("name", OUT_OF_SIGHT)
def test_a_fault_that_no_event_concerns_is_found_after_so_many_instants_at_most(name: str) -> None:
    corrupt, fault = OUT_OF_SIGHT[name]
    run = FastRun(shorts=200)
    run.go_on(4)
    corrupt(run.world)
    assert run.go_on(FEWEST_INSTANTS) == fast.UNSOUND
    assert run.found() == fault


def test_no_run_ends_unsound() -> None:
    """Given a fault on a node where nothing happens, and a run that ends before its time, it is found at the end."""
    run = FastRun(shorts=10)
    run.go_on(4)
    set_owner(run.world, 8, LONG)
    assert run.go_on(18) == fast.PAUSED
    assert run.go_on(1000) == fast.UNSOUND
    assert run.found() == GHOST
    assert (run.world.table.jobs["phase"] == FINISHED).all()


@pytest.mark.unchecked
def test_a_sound_run_is_told_to_be_sound_with_and_without_checks() -> None:
    for checks in (True, False):
        assert FastRun(shorts=200, checks=checks).go_on(1000) == fast.DONE


@pytest.mark.unchecked
def test_without_checks_nothing_is_found() -> None:
    run = FastRun(shorts=10, checks=False)
    run.go_on(4)
    run.world.table.jobs["kinds"][LONG] = 0
    assert run.go_on(1000) == fast.DONE


@pytest.mark.parametrize(("size", "instants"), [(8, 64), (1064, 64), (100_000, 3125)])
def test_the_larger_the_cluster_the_rarer_a_full_check(size: int, instants: int) -> None:
    assert nothing_seen(size)[FULL_EVERY] == instants
