"""`thebes fit`: constants and errors, three kinds of files, what it writes and what it refuses."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kit.workloads import shared_data
from thebes.perf.plans.fit import predict
from thebes.perf.plans.measured import samples_of
from thebes.perf.plans.site import A800
from thebes.perf.plans.timing import Constants
from thebes.perf.plans.transformer import catalogue, from_toml

HEADER = "model,plan,gpus,nodes,cpus,iteration_s,placement"
SHARED = shared_data() / "profiles"
published = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data do not lie beside the checkout")
OWN_MODEL = """
layers = 8
hidden = 1024
heads = 8
sequence = 512
global_batch = 32
"""


def csv_of(model: str, rows: int | None = None) -> str:
    """Shipped rows in the notation of users."""
    lines = [
        f"{model},{s.plan},{s.gpus},{s.nodes},{s.cpus:g},{s.iteration_s}," for s in samples_of(model) if s.nodes == 1
    ]
    return "\n".join([HEADER, *lines[:rows], ""])


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    path = tmp_path / "bert.csv"
    path.write_text(csv_of("bert-large"))
    return path


def test_it_prints_constants_errors_per_plan_and_every_sample(thebes, bert: Path) -> None:
    ran = thebes("fit", bert)

    assert ran.code == 0
    assert "bert-large on A800-80GB: 16 samples, mean error" in ran.out
    for name in Constants._fields:
        assert name in ran.out
    for plan in ("dp8", "dp8+gc", "zero-dp8", "zero-offload8"):
        assert f" {plan} " in ran.out
    for head in ("mean error", "worst", "measured s", "predicted s"):
        assert head in ran.out


def test_the_json_has_everything(thebes, bert: Path) -> None:
    found = json.loads(thebes("fit", bert, "--json", "-").out)

    assert set(found["constants"]) == set(Constants._fields)
    assert len(found["samples"]) == 16
    assert found["mean_error"] == pytest.approx(sum(abs(s["error"]) for s in found["samples"]) / 16)
    assert {kind["kind"] for kind in found["plans"]} == {"dp", "dp+gc", "zero-dp", "zero-offload"}


def test_what_it_saves_is_what_thebes_plan_reads(thebes, bert: Path, tmp_path: Path) -> None:
    saved = tmp_path / "mine.toml"
    told = json.loads(thebes("fit", bert, "--save", saved, "--json", "-").out)

    model = from_toml(saved)
    assert model.constants is not None
    assert model.constants._asdict() == pytest.approx(told["constants"], rel=1e-4)
    samples = [s for s in samples_of("bert-large") if s.nodes == 1]
    predicted = predict(model, A800, model.constants, samples)
    assert predicted.tolist() == pytest.approx([s["predicted_s"] for s in told["samples"]], rel=1e-3)
    ran = thebes("plan", saved, "--gpus", "8")
    assert ran.code == 0
    assert "zero-dp8" in ran.out


def test_a_model_of_ones_own(thebes, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN_MODEL)
    world = from_toml(tmp_path / "own.toml")
    rows = [s for s in samples_of("bert-large") if s.nodes == 1]
    seconds = predict(world, A800, Constants(k_const=0.1), [replace(s, batch=32) for s in rows])
    lines = [f"{s.plan},{s.gpus},1,{t}" for s, t in zip(rows, seconds.tolist(), strict=True)]
    (tmp_path / "samples.csv").write_text("\n".join(["plan,gpus,nodes,iteration_s", *lines]))

    found = json.loads(thebes("fit", tmp_path / "samples.csv", "--model", tmp_path / "own.toml", "--json", "-").out)

    assert found["model"] == "own"
    assert found["mean_error"] < 0.02


def test_on_other_gpus_a_note_says_whose_links_are_assumed(thebes, bert: Path) -> None:
    note = "what links and kernels reach of their data sheets is known of A800-80GB only"
    assert note not in thebes("fit", bert).err
    assert note in thebes("fit", bert, "--gpu-type", "H100").err


def test_gzip_is_read_as_it_is(thebes, bert: Path, tmp_path: Path) -> None:
    packed = tmp_path / "bert.csv.gz"
    packed.write_bytes(gzip.compress(bert.read_bytes()))
    assert thebes("fit", packed).out == thebes("fit", bert).out


def test_notes_tell_what_the_samples_do_not_determine(thebes, tmp_path: Path) -> None:
    lines = csv_of("bert-large").splitlines()
    (tmp_path / "few.csv").write_text("\n".join(line for line in lines if "offload" not in line))
    assert "note: no sample with ZeRO-Offload" in thebes("fit", tmp_path / "few.csv").err


def test_of_many_samples_the_worst_are_shown(thebes, tmp_path: Path) -> None:
    rows = [f"bert-large,{s.plan},{s.gpus},{s.nodes},12,{s.iteration_s}," for s in samples_of("bert-large")]
    (tmp_path / "all.csv").write_text("\n".join([HEADER, *rows]))

    assert "the 40 worst of 72 samples" in thebes("fit", tmp_path / "all.csv").out
    assert "worst of" not in thebes("fit", tmp_path / "all.csv", "--all").out


@pytest.mark.parametrize("suffix", [".html", ".png", ".pdf"])
def test_a_drawing(thebes, bert: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"fit{suffix}"
    ran = thebes("fit", bert, "--plot", target)
    assert ran.code == 0
    assert f"plot: {target}" in ran.err
    assert target.stat().st_size > 2000


# --- published files --------------------------------------------------------------------------------------------------


@published
def test_rubicks_file_is_read_as_it_is(thebes) -> None:
    path = SHARED / "morphling_llm" / "placements.csv"
    found = json.loads(thebes("fit", path, "--model", "llama-30b", "--json", "-").out)
    assert (found["model"], found["gpu_type"], len(found["samples"])) == ("llama-30b", "A800-80GB", 11)
    assert found["mean_error"] < 0.02


@published
def test_vtrains_file_is_read_as_it_is(thebes) -> None:
    path = SHARED / "vtrain_megatron" / "single_node.csv.gz"
    found = json.loads(thebes("fit", path, "--model", "gpt-h1024-l24", "--json", "-").out)
    assert (found["gpu_type"], len(found["samples"])) == ("A100-80GB", 152)


@published
def test_a_model_fitted_on_other_gpus_is_shown_on_these(thebes, tmp_path: Path) -> None:
    """Its forward pass was fitted on A100s: on the default type `thebes plan` could not use it."""
    path, saved = SHARED / "vtrain_megatron" / "multi_node.csv", tmp_path / "v.toml"
    ran = thebes("fit", path, "--model", "gpt-h3072-l30", "--save", saved)
    assert "--gpu-type A100-80GB" in ran.err


@published
def test_a_file_of_several_models_asks_which(thebes) -> None:
    ran = thebes("fit", SHARED / "morphling_llm" / "placements.csv")
    assert ran.code == 2
    assert "samples of 6 models: vit (95), roberta (120)" in ran.err
    assert "--model vit" in ran.err


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(thebes, tmp_path: Path, text: str, *options: object) -> str:
    (tmp_path / "bad.csv").write_text(text)
    ran = thebes("fit", tmp_path / "bad.csv", *options)
    assert ran.code == 2
    assert "→" in ran.err
    return ran.err


def test_several_models_in_one_file_have_to_be_told_apart(thebes, tmp_path: Path) -> None:
    mixed = csv_of("bert-large") + "\n".join(csv_of("gpt-2").splitlines()[1:])
    assert "samples of 2 models: bert-large (16), gpt-2" in refusal(thebes, tmp_path, mixed)
    assert thebes("fit", tmp_path / "bad.csv", "--model", "gpt-2").code == 0


def test_too_few_samples(thebes, tmp_path: Path) -> None:
    assert "5 samples for 7 constants, 2 too few" in refusal(thebes, tmp_path, csv_of("bert-large", rows=5))


def test_a_time_that_is_no_number_names_line_and_field(thebes, tmp_path: Path) -> None:
    text = csv_of("bert-large") + "bert-large,dp8,8,1,12,inf,\n"
    assert "bad.csv, line 18: iteration_s = inf" in refusal(thebes, tmp_path, text)


def test_a_plan_that_does_not_use_its_gpus(thebes, tmp_path: Path) -> None:
    text = csv_of("bert-large") + "bert-large,dp8,4,1,12,1,\n"
    assert "line 18: plan dp8 uses 8 GPUs, but gpus = 4" in refusal(thebes, tmp_path, text)


def test_a_batch_that_is_not_divisible(thebes, tmp_path: Path) -> None:
    error = refusal(thebes, tmp_path, csv_of("bert-large"), "--batch", 12)
    assert "global batch 12 is not divisible by dp x ga = 8" in error


def test_a_model_that_is_not_in_the_file(thebes, bert: Path) -> None:
    ran = thebes("fit", bert, "--model", "gpt-2")
    assert ran.code == 2
    assert "no samples of model 'gpt-2'" in ran.err
    assert "bert-large" in ran.err


def test_a_model_that_nobody_knows(thebes, tmp_path: Path) -> None:
    assert "unknown model 'mine'" in refusal(thebes, tmp_path, csv_of("bert-large").replace("bert-large", "mine"))


def test_no_model_at_all(thebes, tmp_path: Path) -> None:
    assert "no column 'model'" in refusal(thebes, tmp_path, "plan,gpus,nodes,iteration_s\ndp1,1,1,1\n")


def test_a_file_without_rows(thebes, tmp_path: Path) -> None:
    assert "no samples" in refusal(thebes, tmp_path, HEADER + "\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--save", "mine.json"), "the name must end in .toml"),
        (("--plot", "mine.svg"), "the name must end in .html, .png, .pdf"),
        (("--noise", "3"), "--noise 3 is not a share"),
        (("--node-size", "0"), "--node-size 0"),
        (("--node-size", "4"), "8 GPUs on 1 nodes of 4"),
        (("--gpu-type", "TPU"), "unknown GPU type 'TPU'"),
    ],
)
def test_options_that_make_no_sense(thebes, bert: Path, options: tuple[str, str], message: str) -> None:
    ran = thebes("fit", bert, *options)
    assert ran.code == 2
    assert message in ran.err


def test_a_file_that_is_not_there(thebes, tmp_path: Path) -> None:
    ran = thebes("fit", tmp_path / "none.csv")
    assert ran.code == 2
    assert "no such file" in ran.err


def test_every_model_that_was_measured_can_be_fitted(thebes, tmp_path: Path) -> None:
    for name in ("vit", "roberta-large", "gpt-2"):
        (tmp_path / f"{name}.csv").write_text(csv_of(name))
        assert thebes("fit", tmp_path / f"{name}.csv").code == 0
    assert catalogue()["t5"].constants is not None  # nobody measured it: the pooled ones
