"""The models that plans train: the shape of a transformer, its fixed global batch and the plans that it accepts.

The seven models of Rubick's evaluation (arXiv 2408.08586) ship in `data/plans/models.toml`; a user adds one with a few
lines of TOML or with the config.json that Hugging Face publishes beside every model. Shapes give the parameter count.
"""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

from thebes.model.errors import UserError, nearest
from thebes.model.plan import FAMILIES, SPLIT
from thebes.perf.plans.site import site_of_gpu
from thebes.perf.plans.timing import Constants

GIB = float(1 << 30)
# Mixed-precision Adam keeps 16 bytes per parameter: weights and gradients in half precision, and the optimiser's
# weights and two moments in single precision. A checkpoint holds all but the gradients.
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMISER_BYTES = 2, 2, 12
# Limits that no model of today comes near; they catch slips of units.
MOST_PARAMETERS = 1e14
MOST_SIZE = 1_000_000
MOST_CUTS = 1000  # layers or heads that a plan could divide
WITHOUT_SPLIT = tuple(family for family in FAMILIES if family != SPLIT)
POOLED = "*"  # the row of constants for models that were not measured


@dataclass(frozen=True)
class Transformer:
    """A model, the batch that every iteration trains, and the families of plans that it may be trained under."""

    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    sequence: int
    global_batch: int
    families: frozenset[str] = frozenset(FAMILIES)
    recompute: bool = True  # whether it accepts gradient checkpointing
    vocabulary: int = 0  # 0 if it has no logits over a vocabulary worth counting
    constants: Constants | None = None
    forward_s_per_sample: tuple[tuple[str, float], ...] = ()  # (GPU type, seconds)
    flash_attention: bool = False  # if so, attention matrices are not kept

    @property
    def state_gib(self) -> float:
        """The size of a checkpoint: weights and the optimiser's state."""
        return (WEIGHT_BYTES + OPTIMISER_BYTES) * self.parameters / GIB

    @property
    def embedding(self) -> float:
        """Parameters that sit whole in the first (and the last) stage of a pipeline."""
        return float(min(self.vocabulary * self.hidden, self.parameters / 2))


class Fitted(NamedTuple):
    """What fitting found for a model: constants, and the forward pass of one sample by GPU type."""

    constants: Constants
    forward_s: tuple[tuple[str, float], ...]


def with_batch(model: Transformer, batch: int) -> Transformer:
    """The same model, trained with another global batch."""
    _checked_size("model " + model.name, batch, "global_batch", 8)
    return replace(model, global_batch=batch)


@cache
def catalogue() -> dict[str, Transformer]:
    """The models that ship, by their own names and by those in the published files."""
    text = (files("thebes") / "data" / "plans" / "models.toml").read_text(encoding="utf-8")
    found: dict[str, Transformer] = {}
    for name, table in tomllib.loads(text).items():
        also = table.pop("also")
        model = _with_fitted(_from_table({"name": name, **table}, f"models.toml, [{name}]"), shipped=True)
        found |= dict.fromkeys((name, *also), model)
    return found


def shipped_name(model: Transformer) -> str | None:
    """Which model of the catalogue this is, whatever its batch, accepted plans and name; None if it is another one."""
    return _by_content().get(_content(model))


@cache
def _by_content() -> dict[Transformer, str]:
    return {_content(model): model.name for model in catalogue().values()}


def _content(model: Transformer) -> Transformer:
    return replace(model, name="", global_batch=1, families=frozenset(), recompute=True)


def _same_shape(model: Transformer, other: Transformer | None) -> bool:
    """Whether measurements of one hold for the other: samples take as long, and as many parameters are sent."""
    if other is None:
        return False
    sizes = all(getattr(model, name) == getattr(other, name) for name in ("layers", "hidden", "heads", "sequence"))
    return sizes and abs(model.parameters / other.parameters - 1) < 0.05


def names() -> tuple[str, ...]:
    """The models' own names, in the catalogue's order."""
    return tuple(dict.fromkeys(model.name for model in catalogue().values()))


def find(name: str, batch: int | None = None) -> Transformer:
    """A model by its name, its TOML file or its Hugging Face config.json; `batch` replaces its global batch."""
    if name.endswith(".toml"):
        model = from_toml(Path(name))
    elif name.endswith(".json"):
        return from_hf_config(Path(name), global_batch=batch)
    else:
        known = catalogue().get(name.lower())
        if known is None:
            raise UserError(
                f"unknown model '{name}'",
                hint=f"{nearest(name, names())}; or a file of your own, such as my-model.toml or config.json",
            )
        model = known
    return model if batch is None else with_batch(model, batch)


@cache
def _fitted() -> dict[str, Fitted]:
    """Constants fitted to measured rows, by model; see fit.py and data/plans/SOURCE.md."""
    path = files("thebes") / "data" / "plans" / "fitted.csv"
    if not path.is_file():
        return {}
    found: dict[str, Fitted] = {}
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        constants = Constants(*(float(row[name]) for name in Constants._fields))
        forward = ((row["gpu_type"], float(row["forward_s"])),) if row["forward_s"] else ()
        before = found[row["model"]].forward_s if row["model"] in found else ()
        found[row["model"]] = Fitted(constants, (*before, *forward))
    return found


def _with_fitted(model: Transformer, *, shipped: bool = False) -> Transformer:
    """The model with what was fitted for it, except where its own file says otherwise.

    A user's model may have the name of one that ships. It gets that model's figures only if it also has its shape.
    """
    known = _fitted().get(model.name) if shipped or _same_shape(model, catalogue().get(model.name)) else None
    pooled = _fitted().get(POOLED)
    constants = known.constants if known else pooled.constants if pooled else Constants()
    return replace(
        model,
        constants=model.constants or constants,
        forward_s_per_sample=model.forward_s_per_sample or (known.forward_s if known else ()),
    )


_KEYS = (
    "name",
    "parameters",
    "layers",
    "hidden",
    "heads",
    "sequence",
    "global_batch",
    "plans",
    "recompute",
    "flash_attention",
    "vocabulary",
    "forward_ms",
    "constants",
    "config",
)
_EXAMPLES = {"layers": 32, "hidden": 4096, "heads": 32, "sequence": 2048, "global_batch": 8, "vocabulary": 32000}


def from_toml(path: Path) -> Transformer:
    """A model of the user's own. docs/plans.md has the reference."""
    text = _read(path)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}", hint="docs/plans.md shows a complete example") from None
    if "config" in table:
        return _with_fitted(_from_config_and_more(table, path))
    return _with_fitted(_from_table({"name": path.stem, **table}, str(path)))


def from_hf_config(path: Path, global_batch: int | None = None, name: str = "") -> Transformer:
    """The model of a Hugging Face config.json. The file does not hold the batch, so the caller gives it."""
    where, config = str(path), _read_config(path)
    shape = _shape(config, where)
    if global_batch is None:
        raise UserError(
            f"{where}: a config.json does not say the global batch", hint="add --batch 8, samples per iteration"
        )
    default = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    table = {"name": name or str(config.get("_name_or_path") or default), "global_batch": global_batch, **shape}
    return _with_fitted(_from_table(table, where))


def _from_config_and_more(table: dict[str, Any], path: Path) -> Transformer:
    """A model from a TOML file that takes the shape from `config = "config.json"` and adds or overrides the rest."""
    where = str(path)
    if not isinstance(table["config"], str):
        raise UserError(f"{where}: config = {table['config']!r} is not a path", hint='write config = "config.json"')
    config_path = path.parent / table["config"]
    own = {key: value for key, value in table.items() if key != "config"}
    return _from_table({"name": path.stem, **_shape(_read_config(config_path), str(config_path)), **own}, where)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON: {error}", hint="expected a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a JSON object", hint="expected a Hugging Face config.json")
    return cast("dict[str, Any]", config)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file", hint=f"a .toml or .json file, or one of {', '.join(names())}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}", hint="expected a text file in UTF-8") from None


def _from_table(table: Mapping[str, Any], where: str) -> Transformer:
    for key in table:
        if key not in _KEYS:
            raise UserError(f"{where}: unknown key '{key}'", hint=nearest(key, _KEYS))
    name = table["name"]
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"{where}: name = {name!r} is not a name", hint='write name = "my-model"')
    layers, hidden, heads, sequence, batch = (
        _size(table, key, where) for key in ("layers", "hidden", "heads", "sequence", "global_batch")
    )
    if hidden % heads:
        valid = _divisors_near(hidden, heads)
        raise UserError(f"{where}: hidden = {hidden} is not divisible by heads = {heads}", hint=f"heads {valid} would")
    none = table.get("vocabulary", 0) == 0  # some models have no vocabulary, such as ViT
    vocabulary = 0 if none else _size(table, "vocabulary", where)
    counted = 12.0 * layers * hidden * hidden + vocabulary * hidden
    recompute, flash = _yes_or_no(table, "recompute", True, where), _yes_or_no(table, "flash_attention", False, where)
    return Transformer(
        name.strip(),
        _parameters(table, counted, where),
        layers,
        hidden,
        heads,
        sequence,
        batch,
        _families(table.get("plans", list(FAMILIES)), where),
        recompute,
        vocabulary,
        _constants(table.get("constants"), where),
        _forward_s(table.get("forward_ms", {}), where),
        flash,
    )


def _yes_or_no(table: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key} = {value!r}", hint=f"write {key} = true or false")
    return value


def _size(table: Mapping[str, Any], key: str, where: str) -> int:
    if key not in table:
        raise UserError(f"{where}: no '{key}'", hint=f"add {key} = {_EXAMPLES[key]}")
    return _checked_size(where, table[key], key, _EXAMPLES[key])


def _checked_size(where: str, value: object, key: str, example: int) -> int:
    most = MOST_CUTS if key in ("layers", "heads") else MOST_SIZE
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UserError(
            f"{where}: {key} = {value!r} is not a whole number from 1 to {most:,}",
            hint=f"write {key} = {example}",
        )
    return value


def _is_number(value: object, low: float, high: float) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and low <= value <= high


def _parameters(table: Mapping[str, Any], counted: float, where: str) -> float:
    """The given number, or one counted from the shape. A number far from the shape is a slip of units."""
    given = table.get("parameters", counted)
    if not _is_number(given, 1, MOST_PARAMETERS):
        raise UserError(
            f"{where}: parameters = {given!r} is not a number of parameters",
            hint=f"write parameters = 7e9 for 7 billion, or leave it out: the shape has {counted:.3g}",
        )
    if not counted / 20 <= given <= counted * 1000:  # mixtures of experts have more than the shape says
        raise UserError(
            f"{where}: parameters = {given:g}, but layers and hidden alone make {counted:.3g}",
            hint=f"count parameters one by one, such as {counted:.2g}, or leave the line out",
        )
    return float(given)


def _families(value: object, where: str) -> frozenset[str]:
    hint = f'write plans = ["{FAMILIES[0]}", "{FAMILIES[1]}"]: any of {", ".join(FAMILIES)}'
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: plans = {value!r} is not a list of families of plans", hint=hint)
    for family in cast("list[object]", value):
        if family not in FAMILIES:
            raise UserError(f"{where}: plans has {family!r}", hint=nearest(str(family), FAMILIES))
    return frozenset(cast("list[str]", value))


def _constants(value: object, where: str) -> Constants | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise UserError(f"{where}: constants is not a table", hint="write [constants] and k_bwd = 2.0 below it")
    table = cast("dict[str, object]", value)
    for key, number in table.items():
        if key not in Constants._fields:
            raise UserError(f"{where}: unknown constant '{key}'", hint=nearest(key, Constants._fields))
        least = 0.0 if key in ("k_opt", "k_opt_off", "k_const") else 1.0
        if not _is_number(number, least, 1e6):
            raise UserError(
                f"{where}: {key} = {number!r} is not a number of at least {least:g}",
                hint=f"write {key} = {getattr(Constants(), key):g}, or let `thebes fit` find it",
            )
    return Constants(**{key: float(cast("float", number)) for key, number in table.items()})


def _forward_s(value: object, where: str) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: forward_ms is not a table", hint='write forward_ms = { "A800-80GB" = 340 }')
    pairs: list[tuple[str, float]] = []
    for gpu_type, ms in cast("dict[str, object]", value).items():
        if not _is_number(ms, 1e-6, 1e9):
            raise UserError(
                f"{where}: forward_ms of {gpu_type} is {ms!r}",
                hint="milliseconds of the forward pass of one sample on one GPU, such as 340",
            )
        pairs.append((_gpu_type(gpu_type, where), float(cast("float", ms)) / 1e3))
    return tuple(pairs)


def _gpu_type(name: str, where: str) -> str:
    """A GPU type by its full name, so that the site with that GPU finds it."""
    try:
        return site_of_gpu(name).gpu_type
    except UserError as error:
        raise UserError(f"{where}: forward_ms: {error.message}", hint=error.hint) from None


def _divisors_near(number: int, wanted: int) -> str:
    """The divisors of `number` on both sides of `wanted`, such as `24 or 32`."""
    divisors = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors += [number // d for d in divisors]
    near = {max(d for d in divisors if d <= wanted), min((d for d in divisors if d >= wanted), default=number)}
    return " or ".join(str(d) for d in sorted(near))


# Hugging Face: every architecture has its own words for the same sizes, and its own matrices.


def _shape(config: dict[str, Any], where: str) -> dict[str, Any]:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"{where}: no 'model_type'", hint=f'expected "model_type": "llama" or {_known_kinds()}')
    if kind not in _READERS:
        raise UserError(
            f"{where}: model_type '{kind}' is not one that we can count",
            hint=f"known: {_known_kinds()}. For others write a .toml with layers, hidden, heads and parameters",
        )
    return _READERS[kind](config, where)


def _known_kinds() -> str:
    return ", ".join(_READERS)


def _of(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"{where}: no '{key}'", hint=f'a {config["model_type"]} config.json has "{key}"')
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST_SIZE:
        raise UserError(
            f"{where}: {key} = {value!r} is not a whole number from 1 to {MOST_SIZE:,}",
            hint=f'write it in digits, such as "{key}": {default or 1024}',
        )
    return value


def _gpt2(config: dict[str, Any], where: str) -> dict[str, Any]:
    layers, hidden = _of(config, "n_layer", where), _of(config, "n_embd", where)
    vocabulary, positions = _of(config, "vocab_size", where), _of(config, "n_positions", where, 1024)
    inner = _of(config, "n_inner", where, 4 * hidden)
    layer = 4 * hidden * hidden + 4 * hidden + 2 * hidden * inner + hidden + inner + 4 * hidden
    return {
        "parameters": layers * layer + (vocabulary + positions) * hidden + 2 * hidden,
        "layers": layers,
        "hidden": hidden,
        "heads": _of(config, "n_head", where),
        "sequence": positions,
        "vocabulary": vocabulary,
    }


def _llama(config: dict[str, Any], where: str) -> dict[str, Any]:
    layers, hidden = _of(config, "num_hidden_layers", where), _of(config, "hidden_size", where)
    heads, inner = _of(config, "num_attention_heads", where), _of(config, "intermediate_size", where)
    width = _of(config, "head_dim", where, max(1, hidden // heads))
    key_value = _of(config, "num_key_value_heads", where, heads) * width
    vocabulary = _of(config, "vocab_size", where)
    layer = hidden * (2 * heads * width + 2 * key_value) + 3 * hidden * inner + 2 * hidden
    if config["model_type"] == "qwen2":
        layer += heads * width + 2 * key_value  # biases of the three projections
    tables = 1 if config.get("tie_word_embeddings") else 2
    return {
        "parameters": layers * layer + tables * vocabulary * hidden + hidden,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        # Models can read more than they are trained on: long contexts are a later, short stage of training.
        "sequence": min(_of(config, "max_position_embeddings", where, 2048), 4096),
        "vocabulary": vocabulary,
    }


def _encoder_layer(hidden: int, inner: int) -> int:
    return 4 * (hidden * hidden + hidden) + 2 * hidden * inner + hidden + inner + 4 * hidden


def _bert(config: dict[str, Any], where: str) -> dict[str, Any]:
    layers, hidden = _of(config, "num_hidden_layers", where), _of(config, "hidden_size", where)
    inner, vocabulary = _of(config, "intermediate_size", where), _of(config, "vocab_size", where)
    positions = _of(config, "max_position_embeddings", where, 512)
    tables = (vocabulary + positions + _of(config, "type_vocab_size", where, 2)) * hidden + 2 * hidden
    pooler = hidden * hidden + hidden
    return {
        "parameters": layers * _encoder_layer(hidden, inner) + tables + pooler,
        "layers": layers,
        "hidden": hidden,
        "heads": _of(config, "num_attention_heads", where),
        # The first two positions of RoBERTa are padding.
        "sequence": positions - 2 if config["model_type"] == "roberta" and positions > 2 else positions,
        "vocabulary": vocabulary,
        "plans": list(WITHOUT_SPLIT),
    }


def _t5(config: dict[str, Any], where: str) -> dict[str, Any]:
    encoder, hidden = _of(config, "num_layers", where), _of(config, "d_model", where)
    decoder = _of(config, "num_decoder_layers", where, encoder)
    heads, inner = _of(config, "num_heads", where), _of(config, "d_ff", where)
    attention = 4 * hidden * heads * _of(config, "d_kv", where, max(1, hidden // heads))
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    forward = (3 if gated else 2) * hidden * inner
    vocabulary = _of(config, "vocab_size", where)
    tables = 1 if config.get("tie_word_embeddings", True) else 2
    buckets = 2 * heads * _of(config, "relative_attention_num_buckets", where, 32)
    return {
        "parameters": encoder * (attention + forward + 2 * hidden)
        + decoder * (2 * attention + forward + 3 * hidden)
        + tables * vocabulary * hidden
        + buckets
        + 2 * hidden,
        "layers": encoder + decoder,
        "hidden": hidden,
        "heads": heads,
        "sequence": _of(config, "n_positions", where, 512),
        "vocabulary": vocabulary,
    }


def _vit(config: dict[str, Any], where: str) -> dict[str, Any]:
    layers, hidden = _of(config, "num_hidden_layers", where), _of(config, "hidden_size", where)
    inner = _of(config, "intermediate_size", where, 4 * hidden)
    image, patch = _of(config, "image_size", where, 224), _of(config, "patch_size", where, 16)
    tokens = (image // patch) ** 2 + 1
    patches = _of(config, "num_channels", where, 3) * patch * patch * hidden + hidden
    return {
        "parameters": layers * _encoder_layer(hidden, inner) + patches + (tokens + 1) * hidden + 2 * hidden,
        "layers": layers,
        "hidden": hidden,
        "heads": _of(config, "num_attention_heads", where),
        "sequence": tokens,
        "plans": list(WITHOUT_SPLIT),
    }


_READERS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "bert": _bert,
    "roberta": _bert,
    "t5": _t5,
    "mt5": _t5,
    "vit": _vit,
}
