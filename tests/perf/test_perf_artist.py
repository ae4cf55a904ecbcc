"""ArtISt-sim in closed form: its formula by hand, and the slowdowns that the real one was run to."""

from __future__ import annotations

import numpy as np
import pytest

from kit.workloads import finishes, trace_of
from thebes import UserError, simulate
from thebes.model.cluster import from_short_form
from thebes.model.profiles import shape_table
from thebes.perf import Artist
from thebes.perf.artist import PROFILES, Dimension, dimensions, exposed_s, reduce_s, shape_of
from thebes.perf.base import Gang

# Spec 2.3: 8 in a machine, 8 over 2 machines, 8 over 8 machines, 32 over 4 machines, 16 over 2 racks, 16 scattered.
PLACEMENTS = [(8, 1, 1), (8, 2, 1), (8, 8, 1), (32, 4, 1), (16, 2, 2), (16, 16, 2)]
PUBLISHED = {
    "alexnet": (1.00, 1.13, 1.14, 1.40, 2.3, 24),
    "mobilenetv3": (1.36, 10.3, 69, 30, 197, 2950),
    "resnet18": (1.04, 2.1, 10.4, 5.1, 29, 422),
    "resnet50": (1.12, 1.12, 1.13, 1.13, 1.5, 14),
    "vgg11": (1.00, 1.06, 1.02, 1.18, 1.3, 9.5),
    "bert": (1.09, 1.14, 3.4, 2.1, 8.4, 117),
}
# Where our layers of equal size are furthest from the real ones: found by comparing, not predicted.
FAR_OFF = {("alexnet", 3), ("vgg11", 3), ("vgg11", 4), ("bert", 3)}


def slowdown(model: str, gpus: int, nodes: int, racks: int) -> float:
    profile = PROFILES[model]
    levels = shape_of(gpus, nodes, racks, one_slot=True)
    layer_s, _ = reduce_s(profile.gradient_mb * 1e6 / profile.layers, levels)
    return 1 + exposed_s(profile, layer_s) / (profile.compute_ms / 1e3)


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("at", range(6), ids=["8 in 1", "8 over 2", "8 over 8", "32 over 4", "2 racks", "scattered"])
def test_slowdowns_are_those_of_the_real_one(model: str, at: int) -> None:
    """Within a tenth of the whole iteration, but for four within a quarter: the layers' profiles are not public.

    Where most communication is hidden, the exposed part alone is off by much more (AlexNet on 32: 0.06 for 0.40).
    """
    tolerance = 0.25 if (model, at) in FAR_OFF else 0.1
    assert slowdown(model, *PLACEMENTS[at]) == pytest.approx(PUBLISHED[model][at], rel=tolerance)


def test_sensitivity_is_layers_times_latency_not_bytes() -> None:
    """The reverse of common measurements: MobileNetV3 suffers most from the network, VGG least."""
    scattered = {model: slowdown(model, 16, 16, 2) for model in PROFILES}
    assert sorted(scattered, key=lambda m: scattered[m]) == [
        "vgg11", "resnet50", "alexnet", "bert", "resnet18", "mobilenetv3"
    ]  # fmt: skip


def test_a_layer_by_hand() -> None:
    """8 GPUs over 2 machines, 80 MB: three pairs of steps in the slot, then one over the rack's ring on a quarter."""
    total_s, last_s = reduce_s(80e6, shape_of(8, 2, 1, one_slot=True))
    assert last_s == pytest.approx(2 * 1 * (5e-6 + 20e6 / (2 * 4 * 200e9)))
    assert total_s - last_s == pytest.approx(2 * 3 * (0 + 80e6 / (4 * 4 * 600e9)))


def test_the_switch_across_racks_takes_two_hops() -> None:
    assert reduce_s(0, dimensions(network=2)) == (pytest.approx(2 * 1 * 2 * 50e-6),) * 2


@pytest.mark.parametrize(
    ("gpus", "nodes", "racks", "units"),
    [
        (4, 1, 1, [4]),
        (8, 1, 1, [4, 2]),
        (6, 1, 1, [6]),  # does not divide into slots: all in the machine's ring
        (32, 4, 1, [4, 2, 4]),
        (8, 8, 1, [8]),
        (7, 2, 1, [7]),  # does not divide over machines
        (16, 2, 2, [4, 2, 2]),
        (64, 8, 2, [4, 2, 4, 2]),
        (16, 16, 2, [16]),
        (12, 3, 2, [12]),  # three machines do not divide over two racks
    ],
)
def test_shapes(gpus: int, nodes: int, racks: int, units: list[int]) -> None:
    assert [level.units for level in shape_of(gpus, nodes, racks, one_slot=True)] == units


def test_two_gpus_of_different_slots_use_the_ring_of_the_machine() -> None:
    assert shape_of(2, 1, 1, one_slot=False) == [Dimension(2, 1, 0.5e-6, 4 * 600e9)]


@pytest.mark.parametrize("model", PROFILES)
def test_in_the_table_one_gpu_is_compute_alone(model: str) -> None:
    cluster = from_short_form("2x8x8")
    assert cluster is not None
    nodes, tier = shape_table(1)
    times = Artist().times(Gang(cluster, 0, model, 1, nodes, tier))
    assert times.compute_s == pytest.approx([PROFILES[model].compute_ms / 1e3] * 2)
    assert not times.inner_s.any()
    assert not times.wire_s.any()


def test_speed_1_is_compute_alone() -> None:
    """Given BERT on 16 GPUs of two racks, even its best placement is slower than 1."""
    result = simulate(trace_of((0, 16, 10), model=["bert"]), "2x1x8", "fifo", perf="artist")
    assert finishes(result) == pytest.approx([10 * slowdown("bert", 16, 2, 2)])


def test_models_are_drawn_as_in_dallys_trace() -> None:
    names = Artist().assign(np.ones(5000, dtype=np.int64), 0)
    assert {name: names.count(name) / 5000 for name in PROFILES} == {
        name: pytest.approx(profile.jobs / 500, abs=0.03) for name, profile in PROFILES.items()
    }


def test_other_models_are_refused() -> None:
    with pytest.raises(UserError, match=r"performance model artist does not know 'vgg19'\ndid you mean 'vgg11'\?"):
        simulate(trace_of((0, 1, 1), model=["vgg19"]), "2x4", "fifo", perf="artist")
    with pytest.raises(UserError, match="performance model artist: a job without a model"):
        simulate(trace_of((0, 1, 1), (0, 1, 1), model=["bert", None]), "2x4", "fifo", perf="artist")
