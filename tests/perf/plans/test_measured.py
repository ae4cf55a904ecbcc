"""The rows that ship: what they say, which are not trusted, and files of samples in three notations."""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace

import pytest

from kit.workloads import shared_data
from thebes.model.errors import UserError
from thebes.model.plan import parse_plan
from thebes.perf.plans.measured import as_where_measured, measured, measured_of, rows, samples_of
from thebes.perf.plans.samples import parse_samples, rubick_plan
from thebes.perf.plans.site import A800, site_of_gpu
from thebes.perf.plans.timing import Constants
from thebes.perf.plans.transformer import catalogue, find, with_batch

SHARED = shared_data() / "profiles"
published = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data do not lie beside the checkout")


def test_six_models_were_measured_and_t5_was_not() -> None:
    counts = {name: len(samples_of(name, suspicious=True)) for name in dict.fromkeys(row.model for row in rows())}
    assert counts == {"vit": 95, "roberta-large": 120, "bert-large": 72, "gpt-2": 74, "llama-2-7b": 48, "llama-30b": 11}
    assert set(counts) == {model.name for model in catalogue().values()} - {"t5"}


def test_every_row_is_a_plan_that_its_model_could_run() -> None:
    for model, sample, _ in rows():
        assert sample.plan.gpus == sample.gpus
        assert sample.plan.family in catalogue()[model].families
        assert sample.batch == catalogue()[model].global_batch
        assert sample.batch % (sample.plan.dp * sample.plan.ga) == 0
        assert 1 <= sample.fewest <= sample.gpus // sample.nodes <= 8


@pytest.mark.parametrize(
    ("model", "plan", "nodes", "seconds"),
    [
        ("llama-2-7b", "dp8+tp4+pp2", 8, 0.672942),  # published as 248: pp, tp, dp
        ("llama-30b", "dp1+tp4+pp6", 6, 5.29653),
        ("gpt-2", "zero-dp8", 1, 0.530168),
        ("gpt-2", "dp1+tp5", 1, 1.03667),
        ("bert-large", "dp8+gc", 1, 0.190326),
        ("vit", "dp8", 2, 0.0661565),  # of 17, 26, 35 and 44 the evenest
    ],
)
def test_a_measured_point_comes_out_as_it_was_measured(model: str, plan: str, nodes: int, seconds: float) -> None:
    parsed = parse_plan(plan)
    assert measured(model, parsed, parsed.gpus, nodes) == seconds


def test_what_nobody_measured_is_not_made_up() -> None:
    offload = parse_plan("zero-offload8")
    assert measured("t5", parse_plan("dp8"), 8, 1) is None
    assert measured("bert-large", parse_plan("dp8"), 4, 1) is None
    assert measured("bert-large", parse_plan("dp8"), 8, 1, batch=64) is None
    assert measured("bert-large", offload, 8, 1) is not None
    assert measured("bert-large", offload, 8, 1, cpus=4) is None


def test_rows_that_contradict_the_others_ship_but_are_not_given_out() -> None:
    distrusted = [row for row in rows() if row.suspicious]

    assert {row.model for row in distrusted} == {"vit", "roberta-large"}
    assert len(distrusted) == 50
    assert measured("roberta-large", parse_plan("dp1"), 1, 1) is None
    assert measured("roberta-large", parse_plan("dp1+gc"), 1, 1) == 1.76023


def test_the_distrusted_rows_are_as_odd_as_we_say() -> None:
    """RoBERTa: one GPU as fast as two. ViT: odd placements at least 1.6 times as slow as the slowest even one."""
    alone, pair = (
        next(s.iteration_s for s in samples_of("roberta-large", suspicious=True) if str(s.plan) == plan)
        for plan in ("dp1", "dp2")
    )
    assert alone < 1.05 * pair
    for kind in ("dp8", "dp8+gc", "zero-dp8"):
        of_kind = [row for row in rows() if row.model == "vit" and str(row.sample.plan) == kind]
        even = max(row.sample.iteration_s for row in of_kind if not row.suspicious)
        assert min(row.sample.iteration_s for row in of_kind if row.suspicious) > 1.6 * even


# --- files ------------------------------------------------------------------------------------------------------------


@published
def test_the_shipped_rows_are_the_published_ones() -> None:
    text = (SHARED / "morphling_llm" / "placements.csv").read_text()
    found = parse_samples(text, "placements.csv")

    assert found.gpu_type == "A800-80GB"
    published_s = [float(row["iter_time"]) for row in csv.DictReader(text.splitlines())]
    assert sorted(row.sample.iteration_s for row in rows()) == sorted(published_s)
    for name, samples in found.samples.items():
        shipped = samples_of(catalogue()[name].name, suspicious=True)
        assert [(s.plan, s.nodes, s.fewest) for s in samples] == [(s.plan, s.nodes, s.fewest) for s in shipped]


@published
def test_vtrains_rows_bring_their_own_models() -> None:
    raw = (SHARED / "vtrain_megatron" / "single_node.csv.gz").read_bytes()
    found = parse_samples(gzip.decompress(raw).decode(), "single_node.csv")

    assert sum(map(len, found.samples.values())) == 1219
    assert found.shapes["gpt-h1024-l24"].parameters == pytest.approx(12 * 24 * 1024**2 + 51_200 * 1024)
    first = found.samples["gpt-h1024-l24"][0]
    assert (str(first.plan), first.batch, first.iteration_s) == ("dp1+pp2+ga2", 16, pytest.approx(0.372160408))


def test_published_digits_are_pp_tp_and_dp() -> None:
    assert str(rubick_plan("llama7", "248", 64, 8)) == "dp8+tp4+pp2"
    assert str(rubick_plan("gpt2", "ga", 2, 16)) == "dp2+ga4"
    assert str(rubick_plan("gpt2", "gc", 2, 16)) == "dp2+gc"
    assert str(rubick_plan("llama7", "zero-offload", 1, 8)) == "zero-offload1+ga8"
    with pytest.raises(UserError, match="exec_plan 'magic'"):
        rubick_plan("llama7", "magic", 1, 8)


OWN = "model,plan,gpus,nodes,cpus,iteration_s,placement\n"


def test_our_own_columns() -> None:
    found = parse_samples(OWN + "mine,dp8,8,2,6,0.25,35\nmine,zero-dp4,4,1,,0.5,\n", "mine.csv")

    first, second = found.samples["mine"]
    assert (str(first.plan), first.gpus, first.nodes, first.cpus, first.iteration_s, first.fewest) == (
        *("dp8", 8, 2, 6.0, 0.25),
        3,
    )
    assert (second.cpus, second.fewest) == (12.0, 0)
    assert second.where == "mine.csv, line 3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine.csv: empty"),
        ("plan,gpus,iteration_s\ndp1,1,1\n", "mine.csv: no column 'nodes'"),
        (OWN + "m,dp8,8,1,12,soon,\n", "line 2: iteration_s = 'soon' is not a number"),
        (OWN + "m,dp8,8.5,1,12,1,\n", "line 2: gpus = 8.5 is not a whole number"),
        (OWN + "m,dp8,8,1,12\n", "line 2: iteration_s = None is not a number"),
        (OWN + "m,dq8,8,1,12,1,\n", "line 2, plan: 'dq8' in 'dq8' is no part"),
        (OWN + "m,dp8,8,2,12,1,36\n", "placement 36 is not 8 GPUs on 2 nodes"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_why(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_samples(text, "mine.csv")
    assert message in caught.value.message
    assert caught.value.hint


# -- models and sites of one's own ------------------------------------------------------------------------------------


def test_a_model_that_only_shares_a_name_was_not_measured() -> None:
    """Given a small model of the user's that is called gpt-2, then GPT-2's measured times say nothing of it."""
    gpt2, plan = find("gpt-2"), parse_plan("zero-dp4+ga2")
    assert measured_of(gpt2, plan, 1, 12.0) == measured("gpt-2", plan, 4, 1)
    assert measured_of(replace(gpt2, layers=12, hidden=800, parameters=1e8), plan, 1, 12.0) is None
    assert measured_of(replace(gpt2, constants=Constants(k_bwd=3.0)), plan, 1, 12.0) is None


def test_a_model_that_is_renamed_or_accepts_fewer_plans_was_measured_all_the_same() -> None:
    gpt2, plan = find("gpt-2"), parse_plan("zero-dp4+ga2")
    other = replace(gpt2, name="gpt-2 (batch 16)", families=frozenset({"zero-dp"}), recompute=False)
    assert measured_of(other, plan, 1, 12.0) == measured("gpt-2", plan, 4, 1)
    assert measured_of(with_batch(gpt2, 32), plan, 1, 12.0) is None


def test_measured_times_hold_behind_the_same_links_only() -> None:
    assert as_where_measured(A800)
    assert not as_where_measured(replace(A800, wire_gb_s=1.25))
    assert not as_where_measured(site_of_gpu("A100-80GB"))
