"""Each placement against a brute-force reading of its definition, on small clusters in every state of fullness."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from brute import CLUSTERS, free_of, occupied, recount
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from thebes import UserError
from thebes.model.cluster import Cluster
from thebes.model.machine import Machine, copy_of, machine_of
from thebes.placement import Skew, find, registry
from thebes.placement.strategies import CONSOLIDATE, COUNT, RANDOM, RELAXED, SKEW, YARN, Strategy, largest_gangs, place

LIMIT = 0.3


class Situation:
    """A cluster, partly taken, and a gang that asks for GPUs of one kind."""

    def __init__(self, name: str, taken: list[bool], kind: int, gpus: int) -> None:
        self.cluster: Cluster = CLUSTERS[name]
        self.machine: Machine = occupied(self.cluster, taken)
        self.kind, self.gpus = kind, gpus
        self.size = self.cluster.kinds[kind].gpus
        self.before = free_of(self.machine, self.cluster)
        self.nodes = [n for n in range(self.cluster.num_nodes) if self.cluster.node_kind[n] == kind]
        self.rack = self.cluster.node_rack.tolist()

    def ask(
        self, code: int, *, skew: float = 0.0, seed: int = 0, row: int = 7, job_id: int = 7, attempt: int = 0
    ) -> list[int] | None:
        """The GPUs that the strategy gives, or None; checks what holds for all of them."""
        machine = copy_of(self.machine)
        out = np.zeros(self.gpus, dtype=np.int64)
        strategy = Strategy(code, np.array([LIMIT]), seed)
        placed = place(machine, strategy, row, job_id, attempt, self.kind, self.gpus, 0, skew, out)
        recount(machine, self.cluster)
        if not placed:
            np.testing.assert_array_equal(machine.gpus["owner"], self.machine.gpus["owner"])
            return None
        gpus = out.tolist()
        assert gpus == sorted(set(gpus))
        assert np.flatnonzero(machine.gpus["owner"] == row).tolist() == gpus
        assert (self.machine.gpus["owner"][out] == -1).all()
        assert {int(self.cluster.node_kind[self.cluster.gpu_node[gpu]]) for gpu in gpus} == {self.kind}
        return gpus

    def by_node(self, gpus: list[int]) -> dict[int, int]:
        nodes = self.cluster.gpu_node[gpus].tolist()
        return {node: nodes.count(node) for node in sorted(set(nodes))}

    def enough(self) -> bool:
        return sum(self.before[node] for node in self.nodes) >= self.gpus

    def fewest(self, nodes: list[int]) -> int | None:
        """The least number of these nodes that together have room: every subset is tried."""
        for count in range(1, len(nodes) + 1):
            if any(sum(self.before[n] for n in some) >= self.gpus for some in combinations(nodes, count)):
                return count
        return None


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    name = draw(st.sampled_from(sorted(CLUSTERS)))
    cluster = CLUSTERS[name]
    # whole nodes free or full often enough, the rest GPU by GPU
    taken: list[bool] = []
    for count in cluster.node_gpus.tolist():
        fullness = draw(st.sampled_from(["idle", "full", "some", "some"]))
        cells = draw(st.lists(st.booleans(), min_size=count, max_size=count)) if fullness == "some" else []
        taken += cells or [fullness == "full"] * count
    kind = draw(st.integers(0, len(cluster.kinds) - 1))
    gpus = draw(st.integers(1, int(cluster.kind_gpus[kind])))
    return Situation(name, taken, kind, gpus)


many = effort(250)


@given(at=situations())
@many
def test_count_takes_the_lowest_free_gpus(at: Situation) -> None:
    gpus = at.ask(COUNT)
    assert (gpus is not None) == at.enough()
    if gpus is None:
        return
    owners = at.machine.gpus["owner"]
    lowest = [g for g, node in enumerate(at.cluster.gpu_node) if node in at.nodes and owners[g] < 0][: at.gpus]
    assert at.by_node(gpus) == at.by_node(lowest)
    if len(at.cluster.kinds[at.kind].groups) < 2:  # inside a node with groups, the best group decides
        assert gpus == lowest


def yarn_by_hand(at: Situation) -> dict[int, int] | None:
    """GPUs per node: first fit on one node, or idle nodes and one for the rest under the first switch with room."""
    if at.gpus <= at.size:
        node = next((n for n in at.nodes if at.before[n] >= at.gpus), None)
        return None if node is None else {node: at.gpus}
    whole, rest = divmod(at.gpus, at.size)
    for rack in range(at.cluster.num_racks):
        under = [n for n in at.nodes if at.rack[n] == rack]
        idle = [n for n in under if at.before[n] == at.size][:whole]
        if len(idle) < whole:
            continue
        if not rest:
            return dict.fromkeys(idle, at.size)
        other = next((n for n in under if n not in idle and at.before[n] >= rest), None)
        if other is not None:
            return dict(sorted({**dict.fromkeys(idle, at.size), other: rest}.items()))
    return None


@given(at=situations())
@many
def test_yarn_stays_under_one_switch_or_waits(at: Situation) -> None:
    gpus, expected = at.ask(YARN), yarn_by_hand(at)
    assert (None if gpus is None else at.by_node(gpus)) == expected


@given(at=situations())
@many
def test_consolidate_uses_the_fewest_nodes_possible(at: Situation) -> None:
    gpus = at.ask(CONSOLIDATE)
    assert (gpus is not None) == at.enough()
    if gpus is None:
        return
    used, fewest = at.by_node(gpus), at.fewest(at.nodes)
    assert len(used) == fewest
    if fewest == 1:  # best fit: the fullest node with room, the first of those
        assert list(used) == [min((n for n in at.nodes if at.before[n] >= at.gpus), key=lambda n: (at.before[n], n))]
        return
    racks = {rack: [n for n in at.nodes if at.rack[n] == rack] for rack in range(at.cluster.num_racks)}
    able = [rack for rack, nodes in racks.items() if at.fewest(nodes) == fewest]
    if able:  # one rack where that costs no node more: the one with the least room
        room = {rack: sum(at.before[n] for n in racks[rack]) for rack in able}
        assert {at.rack[n] for n in used} == {min(able, key=lambda rack: (room[rack], rack))}


@given(at=situations())
@many
def test_relaxed_goes_anywhere_and_keeps_whole_nodes_whole(at: Situation) -> None:
    gpus = at.ask(RELAXED)
    assert (gpus is not None) == at.enough()
    if gpus is None:
        return
    used = at.by_node(gpus)
    exact = [n for n in at.nodes if at.before[n] == at.gpus]
    if exact:
        assert used == {exact[0]: at.gpus}
    broken = [n for n, count in used.items() if at.before[n] == at.size and count < at.size]
    fragments = sum(at.before[n] for n in at.nodes if at.before[n] < at.size)
    assert not broken or fragments < at.gpus
    assert len([n for n, count in used.items() if count < at.before[n]]) <= 1  # at most one new fragment


@given(at=situations())
@many
def test_skew_waits_for_the_fewest_nodes_or_goes_anywhere(at: Situation) -> None:
    skewed, balanced = at.ask(SKEW, skew=LIMIT + 0.01), at.ask(SKEW, skew=LIMIT)
    assert balanced == at.ask(RELAXED)
    if at.enough() and at.fewest(at.nodes) == -(-at.gpus // at.size):
        assert skewed == at.ask(CONSOLIDATE)
    else:
        assert skewed is None


@given(at=situations(), seed=st.integers(0, 2**31), attempt=st.integers(0, 50), row=st.integers(0, 50))
@effort(100)
def test_random_is_valid_and_the_same_for_the_same_seed(at: Situation, seed: int, attempt: int, row: int) -> None:
    """Whichever row of the table the job has: the ledger of a live cluster numbers rows anew."""
    gpus = at.ask(RANDOM, seed=seed, attempt=attempt)
    assert (gpus is not None) == at.enough()
    assert gpus == at.ask(RANDOM, seed=seed, attempt=attempt, row=row)


def test_random_differs_by_seed_by_job_and_by_attempt() -> None:
    at = Situation("2x3x4", [False] * 24, 0, 6)
    assert len({tuple(at.ask(RANDOM, job_id=job_id) or ()) for job_id in range(20)}) > 10
    assert len({tuple(at.ask(RANDOM, seed=seed) or ()) for seed in range(20)}) > 10
    assert len({tuple(at.ask(RANDOM, attempt=attempt) or ()) for attempt in range(20)}) > 10


@given(name=st.sampled_from(sorted(CLUSTERS)), data=st.data())
@effort(60)
def test_the_largest_gang_is_placed_on_an_idle_cluster_and_one_more_is_not(name: str, data: st.DataObject) -> None:
    cluster = CLUSTERS[name]
    kind = data.draw(st.integers(0, len(cluster.kinds) - 1))
    code = data.draw(st.sampled_from([COUNT, YARN, CONSOLIDATE, RELAXED, SKEW, RANDOM]))
    most = largest_gangs(machine_of(cluster), code)[kind]
    for gpus in range(1, int(cluster.kind_gpus[kind]) + 1):
        placed = Situation(name, [False] * cluster.total_gpus, kind, gpus).ask(code, skew=0.9)
        assert (placed is not None) == (gpus <= most)


# --- by name ----------------------------------------------------------------------------------------------------------


def test_placements_by_name() -> None:
    assert set(registry()) == {"count", "yarn", "consolidate", "relaxed", "skew", "random", "lwf"}
    assert all(placement.__doc__ for placement in registry().values())
    assert Skew(learn=True).strategy(0).pack_limit[0] == np.inf
    assert Skew(pack_limit=0.5).strategy(0).pack_limit[0] == 0.5


def test_an_unknown_placement_is_told_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"unknown placement 'consolidated'\ndid you mean 'consolidate'\?"):
        find("consolidated")
