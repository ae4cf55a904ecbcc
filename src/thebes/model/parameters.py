"""Parameters that a user can set: declared as dataclass fields, shown by `thebes policies show`, read from `--set`."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thebes.model.errors import UserError, nearest


def parameter(default: Any, doc: str, *, low: float = -math.inf, high: float = math.inf) -> Any:
    """A dataclass field that `--set` can change; numbers (of several, each) must lie in [low, high]."""
    return dataclasses.field(default=default, metadata={"doc": doc, "low": low, "high": high})


@dataclass(frozen=True)
class ParameterInfo:
    name: str
    type: Any
    default: Any
    doc: str
    low: float
    high: float


def parameters_of(owner: type) -> dict[str, ParameterInfo]:
    """The parameters that a policy (or placement, or cost model) declares."""
    if not dataclasses.is_dataclass(owner):
        return {}
    hints = typing.get_type_hints(owner)
    return {
        f.name: ParameterInfo(
            f.name, hints[f.name], f.default, f.metadata["doc"], f.metadata["low"], f.metadata["high"]
        )
        for f in dataclasses.fields(owner)
        if "doc" in f.metadata
    }


def configure(owner: type[Any], settings: dict[str, str], *, what: str) -> Any:
    """An instance with these `--set` texts applied; an error names the parameter and what it takes."""
    known = parameters_of(owner)
    values: dict[str, Any] = {}
    for key, text in settings.items():
        name = key.replace("-", "_")
        if name not in known:
            hint = nearest(name, known) if known else f"{what} has no parameters"
            raise UserError(f"{what} has no parameter '{key}'", hint=hint)
        values[name] = _parse(known[name], text, what)
    return owner(**values)


def _parse(info: ParameterInfo, text: str, what: str) -> Any:
    if info.type not in _READ:
        raise UserError(
            f"{what}: {info.name} cannot be set from text (its type is {info.type})",
            hint="parameters are float, int, bool, str, tuple[float, ...] or Path | None",
        )
    try:
        value = _READ[info.type](text)
    except ValueError:
        raise UserError(
            f"{what}: {info.name}={text} is not {_KIND_OF[info.type]}",
            hint=f"the default is {show_value(info.default)}",
        ) from None
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if isinstance(number, int | float) and not isinstance(number, bool) and not info.low <= number <= info.high:
            bounds = f"at least {info.low:g}" if info.high == math.inf else f"between {info.low:g} and {info.high:g}"
            raise UserError(
                f"{what}: {info.name}={text} must be {bounds}", hint=f"the default is {show_value(info.default)}"
            )
    return value


def show_value(value: Any) -> str:
    """A parameter's value in the form that `--set` takes."""
    if isinstance(value, tuple):
        return ",".join(f"{v:g}" for v in typing.cast("tuple[float, ...]", value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None or value == "" else str(value)


def _number(text: str) -> float:
    value = float(text)
    if math.isnan(value):
        raise ValueError(text)
    return value


def _numbers(text: str) -> tuple[float, ...]:
    return () if text.strip() in ("", "none") else tuple(_number(part) for part in text.split(","))


def _yes_or_no(text: str) -> bool:
    words = {"yes": True, "true": True, "1": True, "on": True, "no": False, "false": False, "0": False, "off": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


_READ: dict[Any, Any] = {
    float: _number,
    int: int,
    bool: _yes_or_no,
    str: str,
    tuple[float, ...]: _numbers,
    Path | None: lambda text: Path(text) if text != "none" else None,  # type: ignore[dict-item]
}
_KIND_OF: dict[Any, str] = {
    float: "a number",
    int: "a whole number",
    bool: "yes or no",
    str: "a word",
    tuple[float, ...]: "a list of numbers such as 3250,7200",
    Path | None: "a file",
}


def named_numbers(text: str, what: str, owner: str) -> dict[str, float]:
    """`vcA=64,vcB=32` as numbers by name."""
    numbers: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = part.rpartition("=")
        try:
            value = float(number) if equals and name else math.nan
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(
                f"{owner}: {what}={text}: '{part}' is not NAME=NUMBER",
                hint=f"write for instance {what}=vcA=64,vcB=32",
            )
        if name in numbers:
            raise UserError(f"{owner}: {what} names '{name}' twice", hint="name each organisation once")
        numbers[name] = value
    return numbers
