"""The index of free GPUs against a recount by hand, after any sequence of taking and releasing."""

from __future__ import annotations

import numpy as np
import pytest
from brute import CLUSTERS, TOML, free_of, occupied, recount
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from thebes.model.cluster import TIERS, from_short_form, from_toml
from thebes.model.machine import (
    FREE,
    copy_of,
    copy_state,
    machine_of,
    next_node,
    nodes_spanned,
    occupy,
    release,
    take,
    tier_spanned,
)


@given(name=st.sampled_from(sorted(CLUSTERS)), data=st.data())
@effort(100)
def test_the_index_survives_any_sequence(name: str, data: st.DataObject) -> None:
    cluster = CLUSTERS[name]
    machine = machine_of(cluster)
    recount(machine, cluster)
    held: list[np.ndarray] = []
    for job in range(data.draw(st.integers(1, 12))):
        free = free_of(machine, cluster)
        roomy = [node for node, count in enumerate(free) if count]
        if held and (not roomy or data.draw(st.booleans())):
            release(machine, held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif data.draw(st.booleans()):
            node = data.draw(st.sampled_from(roomy))
            count = data.draw(st.integers(1, free[node]))
            out = np.full(count, -7, dtype=np.int64)
            assert take(machine, job, node, count, out, 0) == count
            assert (machine.gpus["owner"][out] == job).all()
            assert set(cluster.gpu_node[out].tolist()) == {node}
            held.append(np.sort(out))
        else:
            spare = np.flatnonzero(machine.gpus["owner"] == FREE).tolist()
            gpus = np.array(sorted(data.draw(st.sets(st.sampled_from(spare), min_size=1))), dtype=np.int64)
            occupy(machine, job, gpus)
            held.append(gpus)
        recount(machine, cluster)
    for gpus in held:
        release(machine, gpus)
    recount(machine, cluster)
    assert (machine.gpus["owner"] == FREE).all()


@given(kept=st.sets(st.integers(0, 4999), max_size=12), start=st.integers(0, 5000))
@effort(30)
def test_a_far_node_is_found_across_words_and_summaries(kept: set[int], start: int) -> None:
    """Given 5,000 nodes, more than one word of the summary covers, when few are free, the next free one is found."""
    machine = occupied(BIG, (node not in kept for node in range(5000)))
    assert next_node(machine, 0, 1, start) == min((node for node in kept if node >= start), default=-1)


BIG = from_short_form("5000x1")


def test_a_copy_is_independent_and_can_be_brought_up_to_date() -> None:
    cluster = CLUSTERS["mixed"]
    machine = machine_of(cluster)
    copy = copy_of(machine)
    occupy(copy, 5, np.array([0, 1, 8], dtype=np.int64))
    recount(machine, cluster)
    assert (machine.gpus["owner"] == FREE).all()
    copy_state(machine, copy)
    recount(copy, cluster)
    assert (copy.gpus["owner"] == FREE).all()


# --- NVLink groups ----------------------------------------------------------------------------------------------------

GROUPED = from_toml("[[node]]\ngpus = 8\ngroups = [4, 3, 1]\n", "grouped")


@pytest.mark.parametrize(
    ("taken", "count", "expected"),
    [
        ((), 1, [7]),  # the smallest group that holds it
        ((), 3, [4, 5, 6]),
        ((), 4, [0, 1, 2, 3]),
        ((), 5, [0, 1, 2, 3, 7]),  # no group holds it: the largest, then the best fit for the rest
        ((), 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ((0, 1), 2, [2, 3]),  # an exact fit rather than breaking the group of three
        ((7,), 1, [4]),
        ((4,), 2, [5, 6]),
        ((0, 1, 4, 7), 3, [2, 3, 5]),  # equal rooms: the first group
    ],
)
def test_a_small_job_sits_in_one_group(taken: tuple[int, ...], count: int, expected: list[int]) -> None:
    machine = occupied(GROUPED, (gpu in taken for gpu in range(8)))
    out = np.zeros(count, dtype=np.int64)
    take(machine, 1, 0, count, out, 0)
    assert sorted(out.tolist()) == expected


# --- distances --------------------------------------------------------------------------------------------------------


@given(data=st.data())
@effort(100)
def test_spans_against_their_definition(data: st.DataObject) -> None:
    cluster = from_toml(TOML, "mixed")
    machine = machine_of(cluster)
    gpus = sorted(data.draw(st.sets(st.integers(0, cluster.total_gpus - 1), min_size=1, max_size=5)))
    nodes = {int(cluster.gpu_node[gpu]) for gpu in gpus}
    groups = {int(cluster.gpu_group[gpu]) for gpu in gpus}
    racks = {int(cluster.node_rack[node]) for node in nodes}
    widest = "cluster" if len(racks) > 1 else "rack" if len(nodes) > 1 else "node" if len(groups) > 1 else "group"
    array = np.array(gpus, dtype=np.int64)
    assert TIERS[tier_spanned(machine, array)] == widest
    assert nodes_spanned(machine, array) == len(nodes)
