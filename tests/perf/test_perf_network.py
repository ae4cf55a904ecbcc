"""The network model: costs of collectives by hand, what they do to an iteration, and what can never be."""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.effort import effort
from kit.workloads import finishes, trace_of
from thebes import Decision, Policy, UserError, View, simulate
from thebes.model.cluster import Cluster, from_short_form, from_toml
from thebes.model.links import NETWORKS, Link, with_network
from thebes.model.profiles import Profiles, iteration_s, shape_table
from thebes.perf import Network, Times
from thebes.perf.base import Gang
from thebes.perf.models import gang_class, gpu_speeds, known_names, large_catalogue
from thebes.perf.network import START_S, Hop, ring, tree, two_level
from thebes.perf.profiles import iterations
from thebes.sim.costs import FREE_OF_COST

GB = 1e9
NVLINK, WIRE = Hop(1e-6, 100 * GB), Hop(10e-6, 10 * GB)


def cluster(text: str = "4x8x8") -> Cluster:
    made = from_short_form(text)
    assert made is not None
    return made


def times_of(perf: Network, model: str, gpus: int, where: Cluster) -> Times:
    nodes, tier = shape_table(min(gpus, where.num_nodes))
    return perf.times(Gang(where, 0, model, gpus, nodes, tier))


# --- collectives, by hand ---------------------------------------------------------------------------------------------


def test_a_ring_in_one_node() -> None:
    """4 GPUs, 1 GB: 6 steps of 1 us, and 6/4 of the bytes over every link."""
    talk = ring(4, 1, NVLINK, WIRE, 1, 1 * GB)
    assert talk.inside_s == pytest.approx(START_S + 6e-6 + 1.5 * 0.01)
    assert talk.between_s == 0


def test_a_ring_over_two_nodes() -> None:
    """8 GPUs on 2 nodes: 14 steps, 2 of them over the wire, which sets the pace."""
    talk = ring(8, 2, NVLINK, WIRE, 1, 1 * GB)
    assert talk.inside_s == pytest.approx(START_S + 12e-6)
    assert talk.between_s == pytest.approx(2 * 10e-6 + 14 / 8 * 0.1)
    assert ring(8, 2, NVLINK, WIRE, 4, 1 * GB).between_s == pytest.approx(2 * 10e-6 + 14 / 8 * 0.025)


def test_a_tree_over_four_nodes() -> None:
    """8 GPUs on 4 nodes: one step in the node and log2(4) over the wire, both ways; every byte passes twice at 92 %."""
    talk = tree(8, 4, NVLINK, WIRE, 1, 1 * GB)
    assert talk.inside_s == pytest.approx(START_S + 2 * 1e-6)
    assert talk.between_s == pytest.approx(2 * 2 * 10e-6 + 2 * 0.1 / 0.92)


def test_a_tree_in_one_node() -> None:
    assert tree(4, 1, NVLINK, WIRE, 1, 1 * GB) == pytest.approx((START_S + 6e-6 + 2 * 0.01 / 0.92, 0))


def test_two_levels() -> None:
    """4 GPUs on each of 2 nodes: (p-1)(a + M/pB) twice inside; then a ring of two on M/4 per rail, four on one card."""
    talk = two_level(8, 2, NVLINK, WIRE, 1, 1 * GB)
    assert talk.inside_s == pytest.approx(START_S + 2 * 3 * (1e-6 + 1 / 4 * 0.01))
    assert talk.between_s == pytest.approx(2 * 1 * (10e-6 + (1 / 4 / 2) / (10 / 4)))
    own_card = two_level(8, 2, NVLINK, WIRE, 4, 1 * GB)
    assert own_card.between_s == pytest.approx(2 * 1 * (10e-6 + (1 / 4 / 2) / 10))


def test_two_levels_of_one_gpu_each_are_a_ring() -> None:
    assert two_level(4, 4, NVLINK, WIRE, 1, GB).total_s == pytest.approx(ring(4, 4, NVLINK, WIRE, 1, GB).total_s)


def test_small_messages_go_by_tree_and_large_ones_by_ring() -> None:
    def fastest(size: float) -> str:
        costs = {"ring": ring, "tree": tree}
        return min(costs, key=lambda name: costs[name](64, 8, NVLINK, WIRE, 1, size).total_s)

    assert fastest(1e4) == "tree"
    assert fastest(1e9) == "ring"


# --- one iteration ----------------------------------------------------------------------------------------------------


def test_one_gpu_does_not_talk() -> None:
    times = times_of(Network(), "vgg16", 1, cluster())
    assert (times.inner_s == 0).all()
    assert (times.wire_s == 0).all()
    assert times.compute_s == pytest.approx([known_names()["vgg16"].compute_s("V100")] * len(times.compute_s))


def test_buckets_pay_latency_each() -> None:
    """Given ResNet-50 (102.4 MB), 25 MB buckets are 5, and each starts a collective of its own."""
    one, five = (
        times_of(Network(bucket_mb=size, algorithm="ring"), "resnet50", 4, cluster("1x4")) for size in (1e3, 25)
    )
    latency_s = START_S + 6 * 3.4e-6
    assert (five.inner_s - one.inner_s)[0] == pytest.approx(4 * latency_s)
    assert one.inner_s[0] == pytest.approx(latency_s + 1.5 * 102.4e6 / 120e9)


def test_a_gang_over_two_nodes_by_hand() -> None:
    """Given 4 + 4 GPUs on 10 GbE in two levels: the split into inner and wire time is that of the formula."""
    perf = Network(network="10gbe", algorithm="two-level", bucket_mb=1e4)
    times = times_of(perf, "resnet50", 8, cluster("2x8"))
    size = 102.4e6
    assert times.inner_s[2] == pytest.approx(START_S + 6 * (5.7e-6 + size / 4 / 12e9))
    assert times.wire_s[2] == pytest.approx(2 * 50e-6 + 2 * size / 8 / (1.17e9 / 4))


def test_groups_inside_a_node_are_a_level_of_their_own() -> None:
    text = "[[node]]\ngpus = 4\ngroups = [2, 2]\n[link.group]\npreset = 'nvlink3'\n[link.node]\npreset = 'pcie4'\n"
    where = from_toml(text, "c.toml")
    times = times_of(Network(algorithm="two-level", bucket_mb=1e4), "resnet50", 4, where)
    size = 102.4e6
    expected = START_S + 2 * (3.4e-6 + size / 2 / 235e9) + 2 * (5.7e-6 + size / 4 / 24e9)
    assert times.inner_s[1] == pytest.approx(expected)
    assert (times.wire_s[:2] == 0).all()


def test_the_gpu_of_a_node_kind_sets_the_compute_time() -> None:
    def compute_s(gpu_type: str, model: str = "resnet50") -> float:
        where = from_toml(f'[[node]]\ngpus = 4\ngpu_type = "{gpu_type}"\n', "c.toml")
        return times_of(Network(), model, 2, where).compute_s[0]

    assert compute_s("A100-SXM4-80GB") == 0.0259  # measured
    assert compute_s("v100") == compute_s("") == 0.0554
    assert compute_s("P100") == pytest.approx(0.0554 / gpu_speeds()["P100"])  # scaled
    assert compute_s("V100", "vgg16") == pytest.approx(3 * 31e9 * 64 / (0.25 * 125e12))  # rule of thumb
    assert compute_s("V100", "gpt2") == pytest.approx(6 * 124e6 * 8 * 1024 / (0.4 * 125e12), rel=1e-3)


def test_half_precision_gradients_halve_the_bytes() -> None:
    full, half = (
        times_of(Network(gradient_bytes=size, bucket_mb=1e5, algorithm="ring"), "vgg16", 8, cluster("8x1"))
        for size in (4, 2)
    )
    latency_s = START_S + 14 * 15e-6
    assert half.wire_s[-1] + half.inner_s[-1] - latency_s == pytest.approx(
        (full.wire_s[-1] + full.inner_s[-1] - latency_s) / 2
    )


sizes = st.floats(1e3, 1e11)
gangs = st.tuples(st.integers(2, 64), st.integers(1, 64)).filter(lambda gang: gang[1] <= gang[0])
hops = st.builds(Hop, st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))


@given(gangs, hops, hops, st.integers(1, 8), sizes, st.floats(1, 10))
@effort(60)
def test_more_bytes_or_less_bandwidth_is_never_faster(
    gang: tuple[int, int], inside: Hop, between: Hop, lanes: int, size: float, factor: float
) -> None:
    gpus, units = gang
    for cost in (ring, tree, two_level):
        usual = cost(gpus, units, inside, between, lanes, size).total_s
        assert cost(gpus, units, inside, between, lanes, size * factor).total_s >= usual
        slower = (
            Hop(inside.latency_s, inside.bytes_per_s / factor),
            Hop(between.latency_s, between.bytes_per_s / factor),
        )
        assert cost(gpus, units, *slower, lanes, size).total_s >= usual
        later = Hop(inside.latency_s * factor, inside.bytes_per_s), Hop(between.latency_s * factor, between.bytes_per_s)
        assert cost(gpus, units, *later, lanes, size).total_s >= usual


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Sound links of any speed; groups or none."""
    groups = draw(st.sampled_from(["", "groups = [4, 4]\n", "groups = [2, 2, 2, 2]\n"]))
    widths = sorted(draw(st.lists(st.floats(1, 4000), min_size=4, max_size=4)), reverse=True)
    latencies = draw(st.lists(st.none() | st.floats(0.1, 100), min_size=4, max_size=4))
    made = from_toml(f"[[node]]\ncount = 8\nracks = 2\ngpus = 8\n{groups}", "c.toml")
    names = ("group", "node", "rack", "cluster")
    links = {name: Link(*link) for name, *link in zip(names, widths, latencies, strict=True)}
    return Cluster(made.name, made.kinds, made.node_kind, made.node_rack, made.node_names, links)


@given(clusters(), st.integers(2, 64), st.sampled_from(list(large_catalogue())), st.integers(1, 8))
@effort(60)
def test_a_wider_tier_is_never_faster(where: Cluster, gpus: int, model: str, cards: int) -> None:
    perf = Network(nics_per_node=cards)
    seconds = iterations(times_of(perf, model, gpus, where), perf.gamma)
    slack = 1 + 1e-9
    if gpus <= 8:
        assert seconds[0] <= seconds[1] * slack
        assert (seconds[1] <= seconds[2:] * slack).all()
    least = max(2, math.ceil(gpus / 8))
    rack, across = seconds[2 * (least - 1) :: 2], seconds[2 * (least - 1) + 1 :: 2]
    assert (rack <= across * slack).all()


@numba.njit
def compiled_iteration_s(table: Profiles, row: int, shape: int, slow: float) -> float:
    return iteration_s(table, row, shape, slow)


@given(st.sampled_from(list(NETWORKS)), st.integers(1, 40), st.sampled_from(list(large_catalogue())), st.floats(1, 10))
@effort(40, deadline=None)
def test_compiled_and_array_iterations_agree(name: str, gpus: int, model: str, gamma: float) -> None:
    """`thebes.perf.profiles.iterations` and the compiled `iteration_s` are one formula."""
    times = times_of(Network(network=name), model, gpus, cluster())
    size = np.array([0, len(times.compute_s)], dtype=np.int64)
    table = Profiles(size, *times, np.array([gamma]))
    compiled = [compiled_iteration_s(table, 0, shape, 1.0) for shape in range(len(times.compute_s))]
    assert compiled == pytest.approx(iterations(times, gamma).tolist(), rel=1e-12)


# --- models -----------------------------------------------------------------------------------------------------------


def test_models_are_assigned_by_demand_and_seed() -> None:
    gpus = np.array([1, 2, 4, 5, 8, 9, 64] * 60)
    assert gang_class(gpus[:7]).tolist() == [0, 1, 1, 2, 2, 3, 3]
    names = Network().assign(gpus, 1)
    assert names == Network().assign(gpus, 1) != Network().assign(gpus, 2)
    known = large_catalogue()
    for count, name in zip(gpus.tolist(), names, strict=True):
        assert ("1", "2-4", "5-8", "9+")[int(gang_class(np.array([count]))[0])] in known[name].gangs
    assert len(set(names)) > 20


def test_the_assignment_is_part_of_the_result() -> None:
    jobs = [(0, gpus, 10) for gpus in (1, 2, 8, 16)]
    result = simulate(trace_of(*jobs, model=[None] * 4), "4x8", "fifo", perf="network", seed=3)
    assert result.jobs["model"].to_list() == Network().assign(np.array([1, 2, 8, 16]), 3)


def test_state_and_skew_of_models_without_a_tensor_table() -> None:
    llama, vgg = large_catalogue()["llama-7b"], large_catalogue()["vgg16"]
    assert llama.state_gib == pytest.approx(3 * 4 * 6.74e9 / 2**30)
    assert llama.skew == 0
    assert vgg.skew == pytest.approx(0.744, abs=1e-3)


# --- in a run ---------------------------------------------------------------------------------------------------------


def test_a_run_at_the_speed_of_its_placement() -> None:
    """Given a gang of 8 on nodes of 4, two nodes are its best placement: speed 1."""
    result = simulate(trace_of((0, 8, 10)), "2x4", "fifo", perf="network", costs=FREE_OF_COST)
    assert finishes(result) == [10]


class Pinned(Policy):
    """Gives the only job the GPUs that it is told."""

    def __init__(self, *gpus: int) -> None:
        self.gpus = np.array(gpus, dtype=np.int64)

    def decide(self, view: View) -> Decision:
        return Decision(view.jobs.rows, self.gpus, np.zeros(1, dtype=np.int64))


@pytest.mark.parametrize("name", ["10gbe", "100gbe", "nvlink+hdr"])
@pytest.mark.parametrize(("gpus", "shape"), [((0, 1, 2, 3), 0), ((0, 1, 4, 5), 2), ((0, 1, 8, 9), 3)])
def test_spreading_costs_what_the_formula_says(name: str, gpus: tuple[int, ...], shape: int) -> None:
    """Given VGG-16 on 4 GPUs in one node, two nodes, two racks: it runs at the ratio of the iterations."""
    where = with_network(cluster("2x2x4"), name)
    result = simulate(trace_of((0, 4, 10), model=["vgg16"]), where, Pinned(*gpus), perf="network")
    seconds = iterations(times_of(Network(), "vgg16", 4, where), Network().gamma)
    assert finishes(result) == pytest.approx([10 * seconds[shape] / seconds[0]])
    same = simulate(trace_of((0, 4, 10), model=["vgg16"]), "2x2x4", Pinned(*gpus), perf=Network(network=name))
    assert finishes(same) == finishes(result)


# --- errors -----------------------------------------------------------------------------------------------------------

TWO_RACKS = "[[node]]\ncount = 4\nracks = 2\ngpus = 4\n"


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (
            '[link.rack]\npreset = "hdr"\n',
            "c.toml: no bandwidth for the node tier: [link.node] is missing\n"
            'give every tier of the cluster a bandwidth_gbps or a preset = "hdr", or name no links at all',
        ),
        ('[link.node]\npreset = "pcie4"\n', "c.toml: no bandwidth for the rack tier: [link.rack] is missing"),
        ('[link.node]\nlatency_us = 1\n[link.rack]\npreset = "hdr"\n', "c.toml: no bandwidth for the node tier"),
    ],
)
def test_a_tier_without_bandwidth_is_refused_before_the_run(links: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        simulate(trace_of((0, 1, 1)), from_toml(TWO_RACKS + links, "c.toml"), "fifo", perf="network")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("bandwidth", [0.0, -3.0, float("nan")])
def test_links_made_in_python_are_checked_too(bandwidth: float) -> None:
    made = cluster("2x4")
    bad = Cluster(
        made.name, made.kinds, made.node_kind, made.node_rack, made.node_names, {"rack": Link(bandwidth)}
    )  # fmt: skip
    with pytest.raises(UserError, match=r"2x4, \[link.rack\]: bandwidth_gbps = \S+ is not a positive number"):
        simulate(trace_of((0, 1, 1)), bad, "fifo", perf="network")


def test_a_tier_may_stand_for_its_twin() -> None:
    """Given only the rack's link, the network across racks is the same one."""
    text = TWO_RACKS + '[link.node]\npreset = "pcie4"\n[link.rack]\npreset = "100gbe"\n'
    where = from_toml(text, "c.toml")
    Network().check(where)
    times = times_of(Network(), "vgg16", 8, where)
    assert times.wire_s[2::2] == pytest.approx(times.wire_s[3::2])


def test_unknown_models_gpus_algorithms_and_networks_are_refused() -> None:
    with pytest.raises(UserError, match=r"performance model network does not know 'resnet51'\ndid you mean 'resnet50'"):
        simulate(trace_of((0, 1, 1), model=["resnet51"]), "2x4", "fifo", perf="network")
    strange = from_toml('[[node]]\ngpus = 4\ngpu_type = "MI300"\n', "c.toml")
    with pytest.raises(UserError, match="performance model network does not know GPU type 'MI300'"):
        simulate(trace_of((0, 1, 1)), strange, "fifo", perf="network")
    with pytest.raises(UserError, match=r"unknown perf.algorithm 'rings'\ndid you mean 'ring'\?"):
        Network(algorithm="rings")
    with pytest.raises(UserError, match=r"unknown perf.network '10gb'\ndid you mean '10gbe'\?"):
        Network(network="10gb")
    with pytest.raises(UserError, match=r"perf.gpu does not know GPU type 'Z80'"):
        Network(gpu="Z80")
