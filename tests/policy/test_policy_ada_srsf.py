"""LWF-kappa, AdaDUAL and Ada-SRSF as the paper defines them, and the order in which its variants come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kit.effort import effort
from kit.hkbu_workload import mean_jct_s, played
from kit.workloads import mixed_cluster, trace_of, workloads
from thebes import Trace, UserError, simulate
from thebes.model.cluster import from_short_form
from thebes.model.machine import machine_of, occupy
from thebes.perf.interference import Interference
from thebes.placement import Lwf
from thebes.placement.strategies import place
from thebes.policy import find, registry
from thebes.policy.ada_srsf import AdaSrsf, ada_dual_bound, all_reduce_s
from thebes.sim.choices import configure

B, ETA = 0.856e-3, 0.235e-3


# The law of contention and AdaDUAL's boundary.


@given(st.floats(0.1, 1e4), st.floats(0, 1))
def test_the_contention_formula_reduces_to_a_plus_b_m_for_one_transfer(size_mb: float, a_s: float) -> None:
    assert all_reduce_s(size_mb, 1, a_s, B, ETA) == pytest.approx(a_s + B * size_mb)


def test_the_contention_formula_by_hand() -> None:
    assert all_reduce_s(100.0, 3, 0.001, B, ETA) == pytest.approx(0.001 + 3 * B * 100 + 2 * ETA * 100)


def sum_of_finishes(new_mb: float, rest_mb: float, b: float, eta: float, *, start: bool) -> float:
    """Two transfers on one link, played step by step: the new one starts beside the other, or waits for its end."""
    if not start:
        return rest_mb * b + (rest_mb * b + new_mb * b)
    together_s = all_reduce_s(min(new_mb, rest_mb), 2, 0.0, b, eta)
    alone_s = all_reduce_s(abs(new_mb - rest_mb), 1, 0.0, b, eta)
    return together_s + (together_s + alone_s)


@given(st.floats(1.0, 1000.0), st.floats(0.01, 3.0), st.floats(0.0, 2.0))
def test_ada_dual_starts_exactly_where_starting_makes_the_sum_of_finish_times_smaller(
    rest_mb: float, ratio: float, eta_over_b: float
) -> None:
    bound, eta = ada_dual_bound(eta_over_b), eta_over_b * B
    if abs(ratio - bound) < 1e-6:
        return
    started = sum_of_finishes(ratio * rest_mb, rest_mb, B, eta, start=True)
    waited = sum_of_finishes(ratio * rest_mb, rest_mb, B, eta, start=False)
    assert (started < waited) == (ratio < bound)


def test_the_ada_dual_boundary_is_b_over_twice_b_plus_eta() -> None:
    assert AdaSrsf().bound == pytest.approx(0.856 / (2 * (0.856 + 0.235)))
    assert AdaSrsf().bound == pytest.approx(0.392, abs=5e-4)


@pytest.mark.parametrize(("late_s", "meets"), [(-1e-4, True), (1e-4, False)])
def test_a_transfer_is_admitted_on_one_side_of_the_boundary_only(late_s: float, meets: bool) -> None:
    # given VGG in its transfer from 0.09 s on, and ResNet's all-reduce ready when M_new / M_rest is just at the bound
    rest_s = B * 99.2 / AdaSrsf().bound
    ready_s = 0.09 + B * 526.4 - rest_s + late_s
    trace = Trace.of(
        "boundary",
        {
            "job_id": ["vgg", "resnet"],
            "submit_time": [0.0, ready_s - 0.062],
            "duration": [0.09, 0.062],
            "num_gpus": [2.0, 2.0],
            "model": ["vgg16", "resnet50"],
        },
    )
    result = simulate(trace, "2x1", AdaSrsf(grain_s=0.0), perf="hkbu")
    # then VGG is delayed by the other transfer, or not at all
    assert (result.jobs["finish_s"][0] > 0.09 + B * 526.4 + 1e-6) == meets


# LWF.


def placements(*jobs: tuple[float, int, float], cluster: str, **settings: Any) -> list[list[int]]:
    """GPUs of each job that the policy's first decision places; all arrive at once."""
    seen: list[Any] = []

    class Watched(AdaSrsf):
        def decide(self, view: Any) -> Any:
            decision = super().decide(view)
            seen.append(decision)
            return decision

    simulate(trace_of(*jobs), cluster, Watched(**settings), perf="ideal")
    first, gpus = seen[0], []
    at = 0
    for row in first.rows.tolist():
        count = jobs[row][1]
        gpus.append(first.gpus[at : at + count].tolist())
        at += count
    return gpus


def test_lwf_1_spreads_only_single_gpu_jobs() -> None:
    # given four single-GPU jobs and two of two GPUs, by ascending service, on two nodes of four
    jobs = [(0, 1, 10), (0, 1, 11), (0, 1, 12), (0, 1, 13), (0, 2, 20), (0, 4, 30)]
    chosen = placements(*jobs, cluster="2x4", kappa=1)
    # then each single one takes the GPU with the least work, wherever it is
    assert chosen[:4] == [[0], [1], [2], [3]]
    # and the others sit on one node each, the one with the least mean work
    assert chosen[4:] == [[4, 5], [4, 5, 6, 7]] or chosen[4:] == [[4, 5], [0, 1, 2, 3]]


def test_lwf_consolidates_above_kappa_and_spreads_below() -> None:
    # given single jobs of 1, 5 and 5 s on GPUs 0, 1 and 2 of two nodes of two, then a long job of two
    spread = placements((0, 1, 5), (0, 1, 5), (0, 1, 1), (0, 2, 50), cluster="2x2", kappa=2)
    packed = placements((0, 1, 5), (0, 1, 5), (0, 1, 1), (0, 2, 50), cluster="2x2", kappa=1)
    # least work on GPUs: 3 (nothing), 0 (1 s); least work on nodes: the second, with 5 s
    assert spread[3] == [0, 3]
    assert packed[3] == [2, 3]


def test_first_fit_fills_the_first_gpus_to_the_brim() -> None:
    assert placements((0, 1, 1), (0, 2, 2), (0, 1, 9), cluster="2x2", placement="first-fit") == [[0], [0, 1], [0]]


def test_random_depends_on_the_seed_alone() -> None:
    jobs = [(0, 2, 5 + i) for i in range(8)]
    once = placements(*jobs, cluster="8x2", placement="random")
    assert once == placements(*jobs, cluster="8x2", placement="random")
    assert len({tuple(gpus) for gpus in once}) > 2


@given(workloads(typed=True), st.sampled_from(["lwf", "first-fit", "random"]))
@effort(30, deadline=None)
def test_decisions_are_sound_on_mixed_clusters_and_all_jobs_finish(trace: Trace, placement: str) -> None:
    # the checker looks at every decision: gangs, kinds, shares, memory
    result = simulate(trace, mixed_cluster(), AdaSrsf(placement=placement), skip_oversize=True)
    assert result.jobs["finish_s"].null_count() == 0


@given(workloads(most_gpus=8), st.integers(0, 8))
@effort(30, deadline=None)
def test_lwf_serves_other_policies_too(trace: Trace, kappa: int) -> None:
    result = simulate(trace, from_short_form("3x4"), "srtf", placement=Lwf(kappa=kappa))
    assert result.jobs["finish_s"].null_count() == 0


@pytest.mark.parametrize(("kappa", "given"), [(1, [4, 5]), (2, [2, 3]), (0, [4, 5])])
def test_exclusive_lwf_takes_the_least_busy_node_above_kappa(kappa: int, given: list[int]) -> None:
    # given two busy GPUs on the first of two nodes, and a job of two that would fit exactly beside them
    machine, out = machine_of(from_short_form("2x4")), np.zeros(2, dtype=np.int64)
    occupy(machine, 0, np.array([0, 1]))
    # when it is above kappa it takes the idle node, else the first free GPUs
    assert place(machine, Lwf(kappa=kappa).strategy(0), 1, 1, 0, 0, 2, 0, 0.0, out)
    assert out.tolist() == given


# Names and bad input.


def test_the_baselines_are_policies_by_name() -> None:
    for name, admission, n in (
        ("ada-srsf", "ada-dual", 1),
        ("srsf-1", "srsf", 1),
        ("srsf-2", "srsf", 2),
        ("srsf-3", "srsf", 3),
    ):
        policy = find(name)()
        assert isinstance(policy, AdaSrsf)
        assert (policy.name, policy.admission, policy.n) == (name, admission, n)
        assert name in registry()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kappa": -1}, "kappa=-1 must be at least 0"),
        ({"n": 0}, "n=0 must be at least 1"),
        ({"eta_ms_per_mb": -0.1}, "eta_ms_per_mb=-0.1 must be at least 0"),
        ({"grain_s": -1.0}, "grain_s=-1 must be at least 0"),
        ({"a_ms": float("nan")}, "a_ms=nan must be at least 0"),
        ({"b_ms_per_mb": 0.0}, "b_ms_per_mb=0 is no bandwidth"),
        ({"forward_share": 1.0}, "forward_share=1 is no share of an iteration"),
        ({"placement": "lfw"}, "placement=lfw is unknown"),
        ({"admission": "dual"}, "admission=dual is unknown"),
    ],
)
def test_bad_settings_are_refused_before_the_run(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        AdaSrsf(**settings)


def test_bad_settings_are_refused_from_the_command_line_too() -> None:
    with pytest.raises(UserError, match="n=0 must be at least 1"):
        configure(AdaSrsf, {"n": "0"}, what="ada-srsf")
    with pytest.raises(UserError, match="kappa=-1"):
        configure(Lwf, {"kappa": "-1"}, what="placement lwf")
    with pytest.raises(UserError, match="kappa=-1 is below 0"):
        Lwf(kappa=-1)


# Orderings on the paper's workload (spec 3.5 and 5.2), means over several seeds.

SEEDS = range(20)
MEANS: dict[str, float] = {}


def mean_of(**settings: Any) -> float:
    key = repr(sorted(settings.items()))
    if key not in MEANS:
        MEANS[key] = mean_jct_s(AdaSrsf(grain_s=0.0, **settings), SEEDS)
    return MEANS[key]


@pytest.mark.slow
def test_placements_come_out_in_the_papers_order() -> None:
    lwf = {kappa: mean_of(kappa=kappa) for kappa in (1, 2, 4, 32)}
    first_fit, random = mean_of(placement="first-fit"), mean_of(placement="random")
    assert lwf[1] < lwf[2] < first_fit
    assert first_fit == pytest.approx(lwf[4], rel=0.15)
    assert lwf[4] < lwf[32] < random
    # and LWF-1 beats first-fit by at least the paper's 1.59
    assert first_fit / lwf[1] > 1.59


@pytest.mark.slow
def test_accepting_more_contention_is_worse() -> None:
    assert mean_of(admission="srsf", n=1) < mean_of(admission="srsf", n=2) < mean_of(admission="srsf", n=3)
    assert mean_of() < mean_of(admission="srsf", n=2)


@pytest.mark.slow
def test_ada_dual_gains_next_to_nothing_over_no_contention_at_all() -> None:
    """The paper has Ada 20 % below SRSF(1); here the two differ by less than the seeds do.

    In the authors' released simulator, asking a transfer for its remaining bytes also advances it, and only AdaDUAL
    asks: with nothing but that corrected, their own code has Ada 2.5 % above SRSF(1) (ten seeds; 31 % below as
    released).
    """
    ada, alone = (jcts_of(AdaSrsf(grain_s=0.0, **s)) for s in ({}, {"admission": "srsf", "n": 1}))
    differences = ada / alone - 1
    assert abs(differences.mean()) < differences.std(ddof=1)
    # and each is the better one on some seeds
    assert differences.min() < 0 < differences.max()


def jcts_of(policy: AdaSrsf) -> NDArray[np.float64]:
    return np.array([played(policy, seed).jobs["jct_s"].to_numpy().mean() for seed in SEEDS])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"placement": "count"}, "does not use placement count"),
        ({"contention": True}, "does not use the contention settings"),
        ({"interference": Interference(gpu="gavel")}, "does not use the interference settings"),
    ],
)
def test_settings_without_effect_are_told(settings: dict[str, Any], words: str) -> None:
    trace = trace_of((0, 1, 5))
    result = simulate(trace, "1x2", "srsf-2", **settings)
    assert [note for note in result.notes if words in note and note.startswith("srsf-2 ")]
    # and what nobody set is not told
    assert not [note for note in simulate(trace, "1x2", AdaSrsf(kappa=2)).notes if "does not use" in note]


def test_the_workload_is_the_papers() -> None:
    result = played(AdaSrsf(grain_s=0.0), seed=0)
    sizes, counts = np.unique(result.jobs["gpus"].to_numpy(), return_counts=True)
    assert dict(zip(sizes.tolist(), counts.tolist(), strict=True)) == {1: 80, 2: 14, 4: 26, 8: 30, 16: 8, 32: 2}
    assert result.jobs["submit_s"].max() <= 12.0
