"""What plans need: counted by hand, and against everything that is known to have run, or known not to."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kit.workloads import shared_data
from thebes.model.plan import ZERO_DP, ZERO_OFFLOAD, Plan
from thebes.perf.plans.memory import HOST_BYTES, MARGIN, memory
from thebes.perf.plans.site import A800
from thebes.perf.plans.transformer import GIB, Transformer, catalogue

PROFILES = shared_data() / "profiles"
LLAMA = catalogue()["llama-2-7b"]
NAMES = {"ga": 0, "gc": 0, "zero-dp": ZERO_DP, "zero-offload": ZERO_OFFLOAD}

# A billion parameters whose activations can be counted on paper: 4 layers, 8 tokens of 64, 4 heads, batch 8.
TOY = Transformer("toy", 1e9, 4, 64, 4, 8, 8)
LAYER = 8 * (34 * 64 + 5 * 4 * 8)  # bytes of one sample in one layer
HALVED = 8 * (10 * 64 + (24 * 64 + 5 * 4 * 8) / 2)  # the same, tensor-parallel over two


def fits(model: Transformer, plan: Plan, gpu_gib: float = A800.gpu_gib) -> bool:
    needs = memory(model, plan)
    return needs.gpu_gib <= gpu_gib and needs.host_gib <= A800.host_gib


def gib(count: float) -> float:
    return pytest.approx(MARGIN * count / GIB)  # pyright: ignore


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_plain_data_parallelism_keeps_sixteen_bytes_per_parameter() -> None:
    assert memory(TOY, Plan(dp=8)) == (gib(16e9 + 4 * LAYER), 0)


def test_tensor_and_pipeline_parallelism_divide_the_state_and_most_activations() -> None:
    assert memory(TOY, Plan(dp=2, tp=2, pp=2)) == (gib(16e9 / 4 + 4 * (4 / 2 * HALVED)), 0)


def test_zero_divides_gradients_and_optimiser_but_not_weights() -> None:
    assert memory(TOY, Plan(dp=8, zero=ZERO_DP)) == (gib(2e9 + 14e9 / 8 + 4 * LAYER), 0)


def test_offload_leaves_weights_and_a_bucket_of_gradients_on_the_gpu() -> None:
    needs = memory(TOY, Plan(dp=8, zero=ZERO_OFFLOAD))

    assert needs.gpu_gib == gib(2e9 + 2e9 + 4 * LAYER)  # a billion parameters are just two buckets
    assert needs.host_gib == gib(HOST_BYTES * 1e9 / 8)


def test_flash_attention_keeps_no_attention_matrix() -> None:
    flash = replace(TOY, flash_attention=True)

    assert memory(flash, Plan(dp=8)).gpu_gib == gib(16e9 + 4 * 8 * 34 * 64)


def test_checkpointing_keeps_inputs_and_one_whole_layer() -> None:
    assert memory(TOY, Plan(dp=8, gc=True)).gpu_gib == gib(16e9 + 4 * (2 * 8 * 64) + LAYER)


def test_accumulation_makes_micro_batches_smaller() -> None:
    assert memory(TOY, Plan(dp=2, ga=4)).gpu_gib == gib(16e9 + 4 * LAYER)


def test_a_pipeline_keeps_a_micro_batch_in_flight_for_every_stage_that_follows() -> None:
    assert memory(TOY, Plan(dp=2, pp=2, ga=4)).gpu_gib == gib(16e9 / 2 + 2 * (2 * LAYER))
    assert memory(TOY, Plan(dp=2, pp=2, ga=1)).gpu_gib == gib(16e9 / 2 + 4 * (2 * LAYER))


def test_logits_fill_the_last_stage_and_the_embedding_is_not_cut_by_stages() -> None:
    model = Transformer("wide", 1e9, 4, 64, 4, 8, 8, vocabulary=1_000_000)
    whole = 64e6  # the embedding's parameters

    needs = memory(model, Plan(dp=1, tp=2, pp=2, ga=1))

    state = 16 * ((1e9 - whole) / 4 + whole / 2)
    assert needs.gpu_gib == gib(state + 8 * (2 * HALVED) + 6 * 8 * 8 * 1e6 / 2)


# --- against what is known --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gc", [False, True])
@pytest.mark.parametrize("ga", [1, 2, 4, 8])
def test_llama_7b_does_not_train_on_one_gpu_without_zero(ga: int, gc: bool) -> None:
    assert not fits(LLAMA, Plan(ga=ga, gc=gc))  # the artifact marks plan 111 on one GPU as not runnable


def measured_rows() -> Iterator[tuple[Transformer, str, list[Plan]]]:
    """Model, how the file names it, and the plans of which one must be what was measured."""
    path = PROFILES / "morphling_llm" / "placements.csv"
    if not path.exists():
        return
    with path.open() as lines:
        for row in csv.DictReader(lines):
            model, word, gpus = catalogue()[row["model"]], row["exec_plan"], int(row["num_gpus"])
            if word.isdigit():  # pipeline, tensor, data parallel, in one micro-batch
                pp, tp, dp = (int(digit) for digit in word)
                plans = [Plan(dp, tp, pp)]
            else:
                each = model.global_batch // gpus
                steps = [ga for ga in range(1, each + 1) if each % ga == 0]
                plans = [Plan(gpus, zero=NAMES[word], ga=ga, gc=word == "gc") for ga in steps]
            yield model, f"{row['model']} {word} on {gpus}", plans


@pytest.mark.skipif(not PROFILES.exists(), reason="no shared data beside this checkout")
def test_every_plan_measured_on_an_a800_fits_it() -> None:
    rows = list(measured_rows())

    assert len(rows) > 400
    assert not [name for model, name, plans in rows if not any(fits(model, plan) for plan in plans)]
    for model, _, plans in rows:
        assert all(
            model.heads % plan.tp == model.layers % plan.pp == model.global_batch % plan.dp == 0 for plan in plans
        )


def vtrain_plan(row: dict[str, str]) -> tuple[Transformer, Plan]:
    shape = (int(row[key]) for key in ("layers", "hidden", "heads", "seq_len", "global_batch"))
    model = Transformer("gpt", float(row["params_b"]) * 1e9, *shape, vocabulary=51_200)
    dp, tp, pp, micro_batch = (int(row[key]) for key in ("dp", "tp", "pp", "micro_batch"))
    return model, Plan(dp, tp, pp, ga=model.global_batch // (dp * micro_batch))


@pytest.mark.skipif(not PROFILES.exists(), reason="no shared data beside this checkout")
def test_every_megatron_plan_of_vtrain_fits_an_a100() -> None:
    folder: Path = PROFILES / "vtrain_megatron"
    with gzip.open(folder / "single_node.csv.gz", "rt") as lines:
        single = [vtrain_plan(row) for row in csv.DictReader(lines)]
    with (folder / "multi_node.csv").open() as lines:
        multi = [vtrain_plan(row) for row in csv.DictReader(lines)]

    assert len(single) > 1000
    assert len(multi) > 80
    assert not [plan for model, plan in single if not fits(model, plan)]
    # The large models can only have run with checkpointing: most of their rows would not fit without it.
    recomputed = [(model, Plan(plan.dp, plan.tp, plan.pp, ga=plan.ga, gc=True)) for model, plan in multi]
    assert not [plan for model, plan in recomputed if not fits(model, plan)]
    assert sum(not fits(model, plan) for model, plan in multi) > len(multi) / 2
