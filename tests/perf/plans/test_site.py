"""Sites: what a cluster says of itself, and what is assumed where it says nothing."""

from __future__ import annotations

import pytest

from thebes.model.cluster import from_short_form, from_toml
from thebes.model.errors import UserError
from thebes.perf.plans.site import A800, site_of, site_of_gpu


def test_the_papers_cluster() -> None:
    assert (A800.gpu_type, A800.gpu_gib, A800.node_gpus, A800.node_cpus, A800.node_gib) == (
        "A800-80GB",
        80,
        8,
        96,
        1600,
    )
    assert (A800.cpus_per_gpu, A800.host_gib, A800.fewest_nodes(8), A800.fewest_nodes(9)) == (12, 200, 1, 2)


def test_a_cluster_that_says_nothing_is_the_papers() -> None:
    cluster = from_short_form("8x8")
    assert cluster is not None
    assert site_of(cluster, 0) == A800


def test_what_a_cluster_says_goes_first() -> None:
    cluster = from_toml(
        """
        [[node]]
        count = 4
        gpus = 4
        gpu_type = "NVIDIA-H100-80GB-HBM3"
        gpu_memory_gib = 79.6
        cpus = 64
        memory_gib = 512
        [link.node]
        bandwidth_gbps = 3000
        [link.rack]
        bandwidth_gbps = 400
        [link.cluster]
        bandwidth_gbps = 200
        """,
        "ours.toml",
    )

    site = site_of(cluster, 0)

    assert (site.gpu_type, site.gpu_gib, site.tflops, site.pcie_gb_s) == ("H100-80GB", 79.6, 989, 50)
    assert (site.node_gpus, site.node_cpus, site.node_gib) == (4, 64, 512)
    assert (site.inner_gb_s, site.wire_gb_s) == (375, 25)  # bytes, and the slower of the two tiers between nodes


def test_a_gpu_that_nobody_knows_keeps_its_name_and_is_taken_as_an_a800() -> None:
    cluster = from_toml('[[node]]\ngpus = 8\ngpu_type = "X9"\ngpu_memory_gib = 24\n', "x.toml")

    site = site_of(cluster, 0)

    assert (site.gpu_type, site.gpu_gib, site.tflops) == ("X9", 24, A800.tflops)


@pytest.mark.parametrize(
    ("asked", "found"),
    [("a100", "A100-80GB"), ("A100-40GB", "A100-40GB"), ("nvidia-a100-sxm4-40gb", "A100-40GB"), ("v100", "V100-32GB")],
)
def test_gpus_by_name(asked: str, found: str) -> None:
    assert site_of_gpu(asked).gpu_type == found


def test_an_unknown_gpu_type_names_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown GPU type 'A8000'") as error:
        site_of_gpu("A8000")
    assert error.value.hint == "did you mean 'a800-80gb'?"
