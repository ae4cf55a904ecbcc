"""How fast a placed job runs: the tensor tables, the tiers, and what both do to a run."""

from __future__ import annotations

import numpy as np
import pytest

from kit.workloads import RESNET, VGG, finishes, trace_of
from thebes import Decision, Policy, UserError, View, simulate
from thebes.model.cluster import from_toml
from thebes.perf import Ideal, Network, Tiers, find, registry
from thebes.perf.models import BALANCED, SKEWED, assign, catalogue
from thebes.perf.profiles import profiles_for
from thebes.sim.costs import FREE_OF_COST

# Spec 2.4: model, tensors, total MB, largest MB, largest/total, largest/mean.
TABLE = """
vgg19       15  547.1  392.0  0.717  10.75
vgg16       12  526.8  392.0  0.744   8.93
vgg11        9  506.5  392.0  0.774   6.97
alexnet      7  235.8  144.0  0.611   4.27
resnet152   48  149.6    9.0  0.060   2.89
resnet101   35  119.7    9.0  0.075   2.63
resnet50    18   80.6    9.0  0.112   2.01
inception4  81  132.8    5.9  0.044   3.60
inception3  21   56.6    7.8  0.138   2.89
"""


@pytest.mark.parametrize("line", TABLE.strip().splitlines(), ids=lambda line: line.split()[0])
def test_the_tensor_tables_are_the_published_ones(line: str) -> None:
    name, tensors, total, largest, share, to_mean = line.split()
    model = catalogue()[name]
    sizes = model.tensors_mib
    assert len(sizes) == int(tensors)
    assert round(sum(sizes), 1) == float(total)
    assert round(max(sizes), 1) == float(largest)
    assert round(model.skew, 3) == float(share)
    assert round(max(sizes) / (sum(sizes) / len(sizes)), 2) == float(to_mean)
    assert model.state_gib == pytest.approx(3 * float(total) / 1024, rel=1e-3)
    assert model.model_class == (SKEWED if name[:3] in ("vgg", "ale") else BALANCED)


def test_models_are_assigned_by_seed() -> None:
    assert len(catalogue()) == 9
    assert assign(50, seed=1) == assign(50, seed=1) != assign(50, seed=2)
    assert set(assign(500, seed=1)) == set(catalogue())


def test_speed_models_by_name() -> None:
    assert list(registry()) == ["tiers", "ideal", "network", "gavel", "pollux", "artist", "hkbu", "plans"]
    assert registry()["tiers"] is Tiers
    assert registry()["ideal"] is Ideal
    with pytest.raises(UserError, match=r"unknown performance model 'tier'\ndid you mean 'tiers'\?"):
        find("tier")


@pytest.mark.parametrize("key", ["balanced", "skewed"])
def test_tiers_need_a_speed_for_each_tier(key: str) -> None:
    with pytest.raises(UserError) as caught:
        Tiers(**{key: (1.0, 0.9, 0.8)})
    assert str(caught.value) == (
        f"perf tiers: {key} needs 4 speeds (group, node, rack, cluster), not 3\nwrite perf.{key}=1,1,0.95,0.9"
    )


# --- in a run ---------------------------------------------------------------------------------------------------------

# Two racks of two nodes of 4 GPUs, each node with two NVLink groups of 2.
CLUSTER = from_toml("[[node]]\ncount = 4\nracks = 2\ngpus = 4\ngroups = [2, 2]\n", "groups.toml")
SPEEDS = Tiers(balanced=(1.0, 0.9, 0.8, 0.5), skewed=(1.0, 0.7, 0.4, 0.2))


class Pinned(Policy):
    """Gives the only job the GPUs that it is told."""

    def __init__(self, *gpus: int) -> None:
        self.gpus = np.array(gpus, dtype=np.int64)

    def decide(self, view: View) -> Decision:
        return Decision(view.jobs.rows, self.gpus, np.zeros(1, dtype=np.int64))


@pytest.mark.parametrize(
    ("model", "speeds"), [(RESNET, SPEEDS.balanced), (VGG, SPEEDS.skewed), ("googlenet", SPEEDS.balanced)]
)
@pytest.mark.parametrize(
    ("tier", "gpus", "nodes"),
    [(0, (2, 3), 1), (1, (1, 2), 1), (2, (3, 4), 2), (3, (7, 8), 2)],
    ids=["one group", "one node", "one rack", "two racks"],
)
def test_a_job_slows_down_with_the_widest_network_it_spans(
    tier: int, gpus: tuple[int, ...], nodes: int, model: str, speeds: tuple[float, ...]
) -> None:
    result = simulate(trace_of((0, 2, 10), model=[model]), CLUSTER, Pinned(*gpus), perf=SPEEDS)
    assert finishes(result) == pytest.approx([10 / speeds[tier]])
    assert result.jobs["speed_mean"].to_list() == pytest.approx([speeds[tier]])
    assert result.jobs["nodes_last"].to_list() == [nodes]
    assert result.jobs["useful_gpu_s"].to_list() == pytest.approx([2 * 10 / speeds[tier]])


def test_speed_1_is_the_best_placement_that_the_cluster_offers() -> None:
    """Given a gang of 8 that needs two nodes anyway, it is not slower for it on an idle cluster."""
    for model in (RESNET, VGG):
        trace = trace_of((0, 8, 10), (100, 4, 10), (200, 16, 10), model=[model] * 3)
        result = simulate(trace, CLUSTER, "fifo", perf=SPEEDS)
        assert result.jobs["speed_mean"].to_list() == [1.0, 1.0, 1.0]


def test_placement_does_not_matter_where_speed_is_ideal() -> None:
    trace = trace_of(*((i, 3, 10 + i) for i in range(6)), model=[VGG] * 6)
    ideal = [simulate(trace, "8x4", "fifo", placement=p, perf="ideal", costs=FREE_OF_COST) for p in ("count", "random")]
    assert finishes(ideal[0]) == finishes(ideal[1]) == [2 * i + 10 for i in range(6)]
    assert simulate(trace, "8x4", "fifo", placement="random").metrics["avg_jct"] > ideal[0].metrics["avg_jct"]


def test_a_model_without_a_table_is_noted() -> None:
    trace = trace_of((0, 1, 1), (0, 1, 1), (0, 1, 1), model=["googlenet", "bert", RESNET])
    result = simulate(trace, "2x4", "fifo")
    assert result.notes == ("models without a tensor table are taken as not skewed: bert, googlenet",)


def test_elastic_jobs_pass_the_same_counts_at_the_same_times() -> None:
    """Given jobs of 2 and of 4 GPUs that may have 1 to 8, both have the same profile on the same number of GPUs."""
    cluster = from_toml("[[node]]\ncount = 4\ngpus = 4\n", "c.toml")
    gpus = np.array([2, 4])
    made = profiles_for(
        Network(), cluster, [VGG, VGG], gpus, np.array([1, 1]), np.array([8, 8]), np.array([1, 1])
    )  # fmt: skip
    first, second = (made.table.first[row : row + 8] for row in made.first_row)
    for one, other in zip(first, second, strict=True):
        assert made.table.wire_s[one : one + 2].tolist() == made.table.wire_s[other : other + 2].tolist()
    assert made.full_s[0] < made.full_s[1]
