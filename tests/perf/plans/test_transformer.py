"""Models: the catalogue, a user's own in TOML, Hugging Face's config.json, and every mistake one can make in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thebes.model.errors import UserError
from thebes.perf.plans.timing import Constants
from thebes.perf.plans.transformer import catalogue, find, from_hf_config, from_toml, names, with_batch

OWN = """
name = "my-13b"
parameters = 13e9
layers = 40
hidden = 5120
heads = 40
sequence = 2048
global_batch = 32
"""


def toml(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def config(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


# --- the catalogue ----------------------------------------------------------------------------------------------------


def test_the_seven_models_of_the_paper_ship_with_their_batches() -> None:
    batches = {"vit": 64, "roberta-large": 64, "bert-large": 32, "t5": 16, "gpt-2": 16, "llama-2-7b": 8, "llama-30b": 4}

    assert names() == tuple(batches)
    assert {name: find(name).global_batch for name in names()} == batches


@pytest.mark.parametrize(
    ("published", "ours"),
    [
        ("roberta", "roberta-large"),
        ("bert", "bert-large"),
        ("gpt2", "gpt-2"),
        ("llama7", "llama-2-7b"),
        ("llama30", "llama-30b"),
        ("LLaMA-2-7B", "llama-2-7b"),
    ],
)
def test_published_names_are_known_too(published: str, ours: str) -> None:
    assert find(published) is catalogue()[ours]


def test_small_models_are_never_split() -> None:
    whole = {name for name in names() if "3d" not in find(name).families}

    assert whole == {"vit", "roberta-large", "bert-large"}


@pytest.mark.parametrize("name", [n for n in names() if n != "t5"])
def test_parameters_agree_with_the_shape(name: str) -> None:
    model = find(name)  # t5: see models.SOURCE.md

    assert 12 * model.layers * model.hidden**2 + model.vocabulary * model.hidden == pytest.approx(
        model.parameters, rel=0.04
    )


def test_a_checkpoint_holds_weights_and_optimiser() -> None:
    assert find("llama-2-7b").state_gib == pytest.approx(14 * 6.74e9 / 2**30)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown model 'lama-2-7b'") as error:
        find("lama-2-7b")
    assert "did you mean 'llama-2-7b'?" in error.value.hint


def test_another_batch_makes_another_model() -> None:
    assert find("llama7", 16).global_batch == with_batch(find("llama7"), 16).global_batch == 16
    with pytest.raises(UserError, match="global_batch = 0 is not a whole number"):
        find("llama7", 0)


# --- a user's own -----------------------------------------------------------------------------------------------------


def test_a_few_lines_of_toml_make_a_model(tmp_path: Path) -> None:
    model = find(str(toml(tmp_path, OWN)))

    assert (model.name, model.parameters, model.layers, model.heads) == ("my-13b", 13e9, 40, 40)
    assert model.families == {"dp", "zero-dp", "zero-offload", "3d"}
    assert model.recompute
    assert model.constants is not None  # pooled from the models that were measured


def test_what_toml_leaves_out_is_counted_or_taken_from_the_file_name(tmp_path: Path) -> None:
    lines = [line for line in OWN.splitlines() if not line.startswith(("name", "parameters"))]

    model = from_toml(toml(tmp_path, "\n".join([*lines, "vocabulary = 32000"])))

    assert model.name == "mine"
    assert model.parameters == 12 * 40 * 5120**2 + 32000 * 5120


def test_forward_times_are_of_gpu_types_that_are_known(tmp_path: Path) -> None:
    model = from_toml(toml(tmp_path, OWN + 'forward_ms = { "a800" = 340 }\n'))
    assert model.forward_s_per_sample == (("A800-80GB", 0.34),)
    with pytest.raises(UserError, match="forward_ms: unknown GPU type 'Foo'"):
        from_toml(toml(tmp_path, OWN + 'forward_ms = { "Foo" = 340 }\n'))


def test_toml_may_say_plans_constants_and_forward_times(tmp_path: Path) -> None:
    more = 'plans = ["dp", "3d"]\nrecompute = false\nflash_attention = true\n'
    more += 'forward_ms = { "A800-80GB" = 340 }\n[constants]\nk_bwd = 2.5\n'

    model = from_toml(toml(tmp_path, OWN + more))

    assert model.families == {"dp", "3d"}
    assert not model.recompute
    assert model.flash_attention
    assert model.forward_s_per_sample == (("A800-80GB", 0.34),)
    assert model.constants == Constants(k_bwd=2.5)


def test_a_model_of_ones_own_gets_fitted_figures_by_its_shape_not_by_its_name_alone(tmp_path: Path) -> None:
    """Given two files called gpt-2, then only the one with GPT-2's shape has GPT-2's forward pass and constants."""
    shape = "hidden = 1600\nheads = 25\nsequence = 1024\nglobal_batch = 16\nparameters = 1.5e9\n"
    same = from_toml(toml(tmp_path, f"layers = 48\n{shape}", "gpt-2.toml"))
    shorter = from_toml(toml(tmp_path, f"layers = 24\n{shape}", "gpt-2.toml"))

    assert same.forward_s_per_sample == find("gpt-2").forward_s_per_sample
    assert same.constants == find("gpt-2").constants
    assert shorter.forward_s_per_sample == ()  # from arithmetic
    assert shorter.constants != find("gpt-2").constants


def test_toml_may_take_the_shape_from_a_config_json(tmp_path: Path) -> None:
    config(tmp_path, **LLAMA_7B)

    model = from_toml(toml(tmp_path, 'config = "config.json"\nglobal_batch = 64\nsequence = 1024\n', "long.toml"))

    assert (model.name, model.global_batch, model.sequence, model.layers) == ("long", 64, 1024, 32)


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ("layers = 40 -> layer = 40", "unknown key 'layer'", "did you mean 'layers'?"),
        ("layers = 40 -> ", "no 'layers'", "add layers = 32"),
        ("layers = 40 -> layers = 0", "layers = 0 is not a whole number", "write layers = 32"),
        ("layers = 40 -> layers = 1001", "layers = 1001 is not a whole number from 1 to 1,000", "write layers = 32"),
        ("layers = 40 -> layers = 40.5", "layers = 40.5 is not a whole number", "write layers = 32"),
        ("layers = 40 -> layers = true", "layers = True is not a whole number", "write layers = 32"),
        ("heads = 40 -> heads = 48", "hidden = 5120 is not divisible by heads = 48", "heads 40 or 64 would"),
        ("global_batch = 32 -> global_batch = -1", "global_batch = -1 is not", "write global_batch = 8"),
        ("parameters = 13e9 -> parameters = 13", "parameters = 13, but layers and hidden alone", "one by one"),
        ("parameters = 13e9 -> parameters = nan", "parameters = nan is not a number of parameters", "parameters = 7e9"),
        ("parameters = 13e9 -> parameters = '13B'", "parameters = '13B' is not", "parameters = 7e9"),
        ("name = \"my-13b\" -> name = ''", "name = '' is not a name", 'name = "my-model"'),
        ("heads = 40 -> heads = 40\nplans = ['tp']", "plans has 'tp'", "did you mean 'dp'?"),
        ("heads = 40 -> heads = 40\nplans = []", "plans = [] is not a list", "any of dp, zero-dp"),
        ("heads = 40 -> heads = 40\nrecompute = 1", "recompute = 1", "true or false"),
        ("heads = 40 -> heads = 40\nflash_attention = 'yes'", "flash_attention = 'yes'", "true or false"),
        ("heads = 40 -> heads = 40\nvocabulary = -5", "vocabulary = -5 is not", "vocabulary = 32000"),
        ("heads = 40 -> heads = 40\nforward_ms = 3", "forward_ms is not a table", "forward_ms = {"),
        ("heads = 40 -> heads = 40\nforward_ms = { A100 = 0 }", "forward_ms of A100 is 0", "such as 340"),
        ("heads = 40 -> heads = 40\nconstants = 3", "constants is not a table", "[constants]"),
        ("heads = 40 -> heads = 40\nconstants = { k_bw = 2 }", "unknown constant 'k_bw'", "'k_bwd'"),
        ("heads = 40 -> heads = 40\nconstants = { k_sync = 0.5 }", "k_sync = 0.5 is not", "thebes fit"),
        ("heads = 40 -> heads =", "not valid TOML", "docs/plans.md"),
        ("heads = 40 -> config = 3", "config = 3 is not a path", 'config = "config.json"'),
        ('heads = 40 -> config = "gone.json"', "gone.json: no such file", ".json file"),
    ],
)
def test_a_mistake_in_toml_names_the_field_and_a_valid_alternative(
    tmp_path: Path, change: str, message: str, hint: str
) -> None:
    old, new = change.split(" -> ")

    with pytest.raises(UserError) as error:
        from_toml(toml(tmp_path, OWN.replace(old, new)))

    assert message in error.value.message
    assert "mine.toml" in error.value.message or "gone.json" in error.value.message
    assert hint in error.value.hint


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.toml: no such file"):
        find(str(tmp_path / "none.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary.toml: cannot be read"):
        find(str(tmp_path / "binary.toml"))


# --- Hugging Face -----------------------------------------------------------------------------------------------------

LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
GPT2_XL = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "n_positions": 1024, "vocab_size": 50257}
MISTRAL = LLAMA_7B | {
    "model_type": "mistral",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
QWEN2 = LLAMA_7B | {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
ROBERTA = BERT | {
    "model_type": "roberta",
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}
T5 = {
    "model_type": "t5",
    "d_model": 1024,
    "d_ff": 4096,
    "d_kv": 64,
    "num_heads": 16,
    "num_layers": 24,
    "vocab_size": 32128,
    "n_positions": 512,
}
MT5 = T5 | {
    "model_type": "mt5",
    "d_ff": 2816,
    "vocab_size": 250112,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}


@pytest.mark.parametrize(
    ("values", "parameters", "sequence"),
    [
        # Counts as published on the models' pages.
        (LLAMA_7B, 6_738_415_616, 4096),
        (GPT2_XL, 1_557_611_200, 1024),
        (MISTRAL, 7_241_732_096, 4096),
        (QWEN2, 7_615_616_512, 4096),
        (BERT, 335_141_888, 512),
        (ROBERTA, 355_359_744, 512),
        (T5, 737_668_096, 512),
        (MT5, 1_229_581_312, 512),
        (VIT, 85_798_656, 197),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_are_counted_from_the_shapes(
    tmp_path: Path, values: dict[str, Any], parameters: int, sequence: int
) -> None:
    model = from_hf_config(config(tmp_path, **values), global_batch=8)

    assert model.parameters == parameters
    assert model.sequence == sequence
    assert ("3d" in model.families) == (values["model_type"] not in ("bert", "roberta", "vit"))


def test_a_config_is_named_after_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-2-7b-hf"
    folder.mkdir()

    assert find(str(config(folder, **LLAMA_7B)), 8).name == "Llama-2-7b-hf"


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"model_type": None}, "no 'model_type'", "llama"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not one that we can count", "gpt2, llama"),
        ({"num_hidden_layers": None}, "no 'num_hidden_layers'", "a llama config.json has"),
        ({"hidden_size": "4096"}, "hidden_size = '4096' is not a whole number", '"hidden_size": 1024'),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 is not", "such as"),
        ({"num_attention_heads": 33}, "hidden = 4096 is not divisible by heads = 33", "heads 32 or 64 would"),
    ],
)
def test_a_mistake_in_a_config_names_the_field(tmp_path: Path, change: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        from_hf_config(config(tmp_path, **(LLAMA_7B | change)), global_batch=8)

    assert message in error.value.message
    assert hint in error.value.hint


def test_a_config_does_not_know_the_batch(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not say the global batch") as error:
        find(str(config(tmp_path, **LLAMA_7B)))
    assert "--batch 8" in error.value.hint


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "not a JSON object")])
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        find(str(tmp_path / "config.json"), 8)
    with pytest.raises(UserError, match=message):
        find(str(toml(tmp_path, 'config = "config.json"\nglobal_batch = 8\n')))
