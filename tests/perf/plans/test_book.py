"""The plan book: the fastest plan that fits, why others do not, and the cheapest allocation within 1 %."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kit.effort import effort
from thebes.model.errors import UserError
from thebes.model.plan import FAMILIES, Plan, parse_plan
from thebes.perf.plans.book import MOST_CUT, MOST_DP, NEAR_EQUAL, Outlook, PlanBook, cheapest
from thebes.perf.plans.fit import Sample
from thebes.perf.plans.measured import rows
from thebes.perf.plans.site import A800, Site, site_of_gpu
from thebes.perf.plans.timing import Constants
from thebes.perf.plans.transformer import Transformer, catalogue, names, with_batch

ALL = tuple(catalogue()[name] for name in names())
LLAMA, GPT2, VIT = (catalogue()[name] for name in ("llama-2-7b", "gpt-2", "vit"))
BOOK = PlanBook((LLAMA, GPT2, VIT), A800)
CPUS = A800.cpus_per_gpu


def best(model: Transformer, gpus: int, like: Plan | None = None, site: Site = A800) -> Outlook:
    found = PlanBook((model,), site).best(0, gpus, site.fewest_nodes(gpus), site.cpus_per_gpu, like)
    assert found is not None
    return found


# --- the best plan ----------------------------------------------------------------------------------------------------


def families(model: Transformer) -> dict[int, str]:
    """The family of the best plan, by GPUs."""
    book = PlanBook((model,), A800)
    found = {gpus: book.best(0, gpus, A800.fewest_nodes(gpus), CPUS) for gpus in range(1, 65)}
    return {gpus: outlook.plan.family for gpus, outlook in found.items() if outlook}


def test_spec_8_2_the_best_plan_of_a_7b_model_goes_from_offload_over_zero_to_3d() -> None:
    """Acceptance test 2 of Rubick's specification: true of batch 16 with flash attention, not of the shipped model as
    it stands. The two tests below say where that one differs and why."""
    found = families(replace(with_batch(LLAMA, 16), flash_attention=True))

    assert found == {
        1: "zero-offload",
        2: "zero-dp",
        4: "zero-dp",
        8: "zero-dp",
        16: "3d",
        32: "3d",
        64: "3d",
    }


def test_where_attention_matrices_are_kept_two_gpus_are_better_split() -> None:
    """ZeRO-DP divides no activations: on two GPUs it would have to compute them twice, tensor parallelism has room."""
    model = with_batch(LLAMA, 16)

    assert families(model) == families(replace(model, flash_attention=True)) | {2: "3d"}
    assert "GiB on each GPU" in PlanBook((model,), A800).why_not(0, parse_plan("zero-dp2+ga8"), 1, CPUS)
    assert best(model, 2).plan == parse_plan("dp1+tp2+ga16")


def test_with_a_batch_of_8_the_order_is_the_same_from_4_gpus() -> None:
    found = families(LLAMA)

    assert (found[1], found[4], found[16], found[32], found[64]) == ("zero-offload", "zero-dp", "3d", "3d", "3d")


def test_a_model_that_fits_one_gpu_stays_off_the_host() -> None:
    assert best(VIT, 1).plan.family == "dp"
    assert best(GPT2, 1).host_gib == 0


def test_what_an_outlook_says_hangs_together() -> None:
    found = best(GPT2, 8)

    assert found.plan.gpus == 8
    assert found.samples_s == pytest.approx(GPT2.global_batch / found.iteration_s)
    assert found.wire_s == 0  # one node
    assert found == PlanBook((GPT2,), A800).of(0, found.plan, 1, CPUS)


def test_a_fixed_type_of_plan_only_changes_its_data_parallel_size_and_accumulation() -> None:
    asked = parse_plan("dp1+tp2+pp2+ga8")

    found = best(LLAMA, 16, like=asked)

    assert found.plan.like(asked)
    assert found.plan.dp == 4
    assert BOOK.best(0, 2, 1, CPUS, like=asked) is None


def test_there_is_no_plan_for_a_number_of_gpus_that_divides_nothing() -> None:
    assert BOOK.best(0, 3, 1, CPUS) is None
    assert BOOK.best(0, 0, 0, CPUS) is None
    assert BOOK.best(0, 16, 1, CPUS) is None  # a node has 8
    assert BOOK.best(0, 8, 1, CPUS + 1) is None  # and 96 CPUs


def test_no_plan_is_larger_than_its_code() -> None:
    assert Plan(dp=MOST_DP, tp=MOST_CUT, pp=MOST_CUT)
    for large in ({"dp": MOST_DP + 1}, {"tp": MOST_CUT + 1}, {"pp": MOST_CUT + 1}):
        with pytest.raises(UserError):
            Plan(**large)
    many = PlanBook((with_batch(VIT, 1 << 15),), A800)
    assert many.best(0, 1 << 15, 1 << 12, 1) is None
    assert many.best(0, 1 << 13, 1 << 10, 1) is not None


def test_more_cpus_speed_up_offload_alone() -> None:
    offload, split = parse_plan("zero-offload1+ga4"), parse_plan("dp1+tp2+ga8")

    def seconds(plan: Plan, cpus: int) -> float:
        found = BOOK.of(0, plan, 1, cpus)
        assert found is not None
        return found.iteration_s

    assert seconds(offload, 24) < seconds(offload, 12) < seconds(offload, 1)
    assert seconds(split, 24) == seconds(split, 1)


@pytest.mark.parametrize(
    ("plan", "nodes", "cpus", "measured_s"),
    [
        ("dp4+tp4+pp2", 4, 12, 1.165),
        ("dp1+tp4+pp4", 4, 12, 1.803),
        ("dp1+tp2+pp2", 1, 12, 5.107),
        ("zero-offload1+gc", 1, 12, 66.0),
        ("zero-offload1+gc", 1, 24, 46.0),
    ],
)
def test_the_points_of_the_papers_figure_7_are_predicted(plan: str, nodes: int, cpus: int, measured_s: float) -> None:
    """LLaMA-2-7B with a batch of 16; everything was fitted with a batch of 8. How they accumulated is not known."""
    asked = parse_plan(plan)

    found = PlanBook((with_batch(LLAMA, 16),), A800).best(0, asked.gpus, nodes, cpus, like=asked)

    assert found is not None
    assert found.iteration_s == pytest.approx(measured_s, rel=0.1)


# --- why not ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "plan", "nodes", "reason"),
    [
        (0, "dp3", 1, "global batch 8 is not divisible by dp 3: 2 or 4 would do"),
        (0, "dp2+ga3", 1, "a rank's 4 samples are not divisible by ga 3: 2 or 4 would do"),
        (0, "dp1+tp3", 1, "tp 3 does not divide 32 heads: 2 or 4 would do"),
        (0, "dp1+pp3", 1, "pp 3 does not divide 32 layers: 2 or 4 would do"),
        (0, "dp1+pp64", 8, "pp 64 does not divide 32 layers: 32 would do"),
        (0, "dp16", 2, "global batch 8 is not divisible by dp 16: 8 would do"),
        (0, "dp1+ga8", 1, "needs 142.2 GiB on each GPU, has 80"),
        (2, "dp1+tp2", 1, "vit does not accept 3d plans: dp, zero-dp, zero-offload would do"),
        (1, "dp16", 1, "16 GPUs do not fit on 1 node of 8: 2 would do"),
        (1, "dp1", 2, "1 GPU cannot lie on 2 nodes"),
        (1, "zero-dp8", 1, ""),
    ],
)
def test_a_rejected_plan_says_why_and_what_would_do(number: int, plan: str, nodes: int, reason: str) -> None:
    assert BOOK.why_not(number, parse_plan(plan), nodes, CPUS) == reason
    assert (BOOK.of(number, parse_plan(plan), nodes, CPUS) is None) == bool(reason)


def test_rejections_by_host_memory_cpus_and_checkpointing() -> None:
    poor = replace(A800, node_gib=256.0)
    book = PlanBook((LLAMA, replace(LLAMA, recompute=False)), poor)

    assert book.why_not(0, parse_plan("zero-offload1+ga8"), 1, 1) == ("needs 110.5 GiB of host memory per GPU, has 32")
    assert book.best(0, 1, 1, 1) is None
    assert book.why_not(0, parse_plan("zero-offload8"), 1, 13) == (
        "13 CPUs for each of 8 GPUs of a node that has 96: 1 to 12 would do"
    )
    assert book.why_not(1, parse_plan("dp8+gc"), 1, 1) == (
        "llama-2-7b does not accept gradient checkpointing: leave gc out"
    )


def test_a_batch_of_16_cannot_be_offloaded_to_32_gpus() -> None:
    book = PlanBook((with_batch(LLAMA, 16),), A800)

    assert "not divisible by dp 32" in book.why_not(0, parse_plan("zero-offload32"), 4, CPUS)
    assert book.best(0, 32, 4, CPUS, like=parse_plan("zero-offload1")) is None


def test_every_plan_that_was_measured_is_one_that_the_book_would_propose() -> None:
    for row in rows():
        model = catalogue()[row.model]
        assert PlanBook((model,), A800).why_not(0, row.sample.plan, row.sample.nodes, CPUS) == ""


# --- properties -------------------------------------------------------------------------------------------------------


@st.composite
def transformers(draw: st.DrawFn) -> Transformer:
    heads, width = draw(st.integers(1, 12)), draw(st.sampled_from([16, 64, 128]))
    layers, hidden = draw(st.integers(1, 24)), heads * width
    return Transformer(
        "drawn",
        12.0 * layers * hidden**2 * draw(st.floats(0.5, 50)) + 1,
        layers,
        hidden,
        heads,
        draw(st.sampled_from([128, 1024, 4096])),
        draw(st.integers(1, 48)),
        frozenset(draw(st.sets(st.sampled_from(FAMILIES), min_size=1))),
        draw(st.booleans()),
        draw(st.sampled_from([0, 32000])),
        Constants(k_bwd=draw(st.floats(1, 4)), k_sync=draw(st.floats(1, 10)), k_opt_off=draw(st.floats(0.01, 10))),
    )


@st.composite
def sites(draw: st.DrawFn) -> Site:
    base = site_of_gpu(draw(st.sampled_from(["a800", "v100-16gb", "t4"])))
    gpus = draw(st.integers(1, 8))
    cpus = gpus * draw(st.integers(1, 12))
    return replace(base, node_gpus=gpus, node_cpus=cpus, node_gib=gpus * draw(st.floats(1, 100)))


def every_plan(gpus: int, batch: int) -> list[Plan]:
    """All plans on these GPUs, sensible or not."""
    shapes = [
        (dp, tp, gpus // dp // tp)
        for dp in range(1, gpus + 1)
        for tp in range(1, gpus // dp + 1)
        if gpus % (dp * tp) == 0
    ]
    return [
        Plan(dp, tp, pp, zero, ga, gc)
        for dp, tp, pp in shapes
        for zero in ((0, 1, 2) if tp == pp == 1 else (0,))
        for ga in range(1, batch + 1)
        for gc in (False, True)
    ]


@given(transformers(), sites(), st.integers(1, 12), st.data())
@effort(60, deadline=None)
def test_the_best_plan_fits_uses_all_gpus_and_no_other_that_fits_is_faster(
    model: Transformer, site: Site, gpus: int, data: st.DataObject
) -> None:
    nodes = data.draw(st.integers(site.fewest_nodes(gpus), gpus))
    cpus = data.draw(st.integers(1, max(1, site.node_cpus // -(-gpus // nodes))))
    book = PlanBook((model,), site)

    found = book.best(0, gpus, nodes, cpus)
    outlooks = [book.of(0, plan, nodes, cpus) for plan in every_plan(gpus, model.global_batch)]

    feasible = [outlook for outlook in outlooks if outlook is not None]
    if found is None:
        assert not feasible
        return
    assert found.plan.gpus == gpus
    assert book.why_not(0, found.plan, nodes, cpus) == ""
    assert found.gpu_gib <= site.gpu_gib
    assert found.host_gib <= site.node_gib / site.node_gpus
    assert found.iteration_s == pytest.approx(min(outlook.iteration_s for outlook in feasible))


@given(transformers(), sites(), st.integers(1, 24))
@effort(40, deadline=None)
def test_a_curve_is_the_best_plan_everywhere_and_never_asks_for_more(model: Transformer, site: Site, most: int) -> None:
    book = PlanBook((model,), site, gpus=most)

    curve = book.curve(0)

    for gpus in range(1, most + 1):
        for cpus in range(1, site.cpus_per_gpu + 1):
            found = book.best(0, gpus, site.fewest_nodes(gpus), cpus)
            assert curve.samples_s[gpus, cpus] == pytest.approx(0 if found is None else found.samples_s)
    assert (curve.gpus_for <= np.arange(most + 1)[:, None]).all()
    assert (curve.cpus_for <= np.arange(site.cpus_per_gpu + 1)[None, :]).all()
    assert book.most_gpus(0) == curve.gpus_for.max()


@given(arrays(np.float64, (9, 5), elements=st.sampled_from([0.0, 0.5, 0.99, 0.995, 1.0, 1.005, 1.02, 2.0])))
@effort(200)
def test_the_one_percent_rule(samples: np.ndarray) -> None:
    """Acceptance test 3: what a lookup returns is within 1 %, and one unit less of it would not be."""
    samples[0], samples[:, 0] = 0, 0

    gpus_for, cpus_for = cheapest(samples)

    for gpus, cpus in np.argwhere(samples[1:, 1:] >= 0) + 1:
        chosen = int(gpus_for[gpus, cpus]), int(cpus_for[gpus, cpus])
        assert samples[chosen] >= NEAR_EQUAL * samples[gpus, cpus]  # never more than 1 % lost, however long the chain
        assert chosen[0] <= gpus
        assert chosen[1] <= cpus
        assert (gpus_for[chosen], cpus_for[chosen]) == chosen  # replaced once and for all
        if chosen == (gpus, cpus):
            for less in ((gpus - 1, cpus), (gpus, cpus - 1)):
                smaller = samples[gpus_for[less], cpus_for[less]]
                assert smaller == 0 or smaller < NEAR_EQUAL * samples[gpus, cpus]


def test_the_one_percent_rule_by_hand() -> None:
    samples = np.zeros((6, 2))
    samples[:, 1] = [0, 1.0, 1.985, 2.0, 0, 2.01]

    gpus_for, _ = cheapest(samples)

    # 3 GPUs bring 0.8 % more than 2, nobody can use 4, and 5 bring 1.3 % more than the 2 that stand for 3 and 4.
    assert gpus_for[:, 1].tolist() == [0, 1, 2, 2, 2, 5]


# --- caches and refits ------------------------------------------------------------------------------------------------


def test_a_refit_makes_a_new_book_and_leaves_the_old_one_alone() -> None:
    before = BOOK.best(1, 8, 1, CPUS)
    assert GPT2.constants is not None
    slower = GPT2.constants._replace(k_const=GPT2.constants.k_const + 5)

    refitted = BOOK.with_constants(1, slower)

    after = refitted.best(1, 8, 1, CPUS)
    assert before is not None
    assert after is not None
    assert after.iteration_s == pytest.approx(before.iteration_s + 5)
    assert BOOK.best(1, 8, 1, CPUS) is before
    assert refitted.best(0, 8, 1, CPUS) is BOOK.best(0, 8, 1, CPUS)  # the other models' answers are kept


def test_a_book_learns_from_what_was_measured() -> None:
    """A GPU that is half as fast as we thought: after a few measurements the book knows."""
    slow = replace(A800, gpu_type="slow", tflops=A800.tflops / 2)
    plans = ("dp1+ga4", "dp2+ga2", "zero-dp4", "zero-dp8", "zero-offload1+ga4", "zero-offload4", "dp8", "dp4+tp2")
    plan_of = [parse_plan(plan) for plan in (*plans, "dp8+gc", "zero-offload8")]
    unknown = replace(GPT2, forward_s_per_sample=())
    truth = PlanBook((unknown,), replace(slow, tflops=slow.tflops / 2))
    outlooks = [truth.of(0, plan, 1, CPUS) for plan in plan_of]
    samples = [Sample(o.plan, o.plan.gpus, 1, CPUS, o.iteration_s) for o in outlooks if o is not None]
    book = PlanBook((VIT, unknown), slow)

    learnt = book.with_samples(1, samples)

    for asked in ("zero-dp2+ga2", "dp2+tp5"):
        nodes = slow.fewest_nodes(parse_plan(asked).gpus)
        before, after, real = (
            one.of(number, parse_plan(asked), nodes, CPUS) for one, number in ((book, 1), (learnt, 1), (truth, 0))
        )
        assert before is not None
        assert after is not None
        assert real is not None
        assert after.iteration_s == pytest.approx(real.iteration_s, rel=0.05)
        assert before.iteration_s < 0.8 * real.iteration_s
    assert learnt.models[0] is book.models[0]


def test_equal_books_share_their_answers() -> None:
    same = PlanBook((replace(LLAMA), replace(GPT2), replace(VIT)), replace(A800))

    assert same == BOOK
    assert same.best(0, 8, 1, CPUS) is BOOK.best(0, 8, 1, CPUS)


@pytest.mark.parametrize("number", range(len(ALL)), ids=names())
def test_every_shipped_model_can_use_the_papers_cluster(number: int) -> None:
    assert PlanBook(ALL, A800).most_gpus(number) >= 8


def test_nobody_can_write_into_what_all_books_share() -> None:
    """Given a page that later runs will read; when somebody writes to it; then that fails."""
    candidates, curve = BOOK.candidates(0, 8), BOOK.curve(0)
    for array in (*candidates.plans, *candidates.memory, candidates.fits, *curve):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
