"""Commands that read plain options without pydantic.

Recent Typer builds a pydantic adapter for each option of a command, given or not: up to a third of a second before the
command begins. Texts, numbers, flags and choices need none. A value that is not right at once goes to Typer's own
reader, which has the error messages; so does every value when another version of Typer keeps its readers elsewhere.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, get_args, get_origin

from typer.core import TyperCommand, TyperGroup

NOT_HERE = object()


class QuickCommand(TyperCommand):
    """A command whose options are all plain."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        use_plain_readers(self.get_params(ctx))
        return super().parse_args(ctx, args)


class QuickGroup(TyperGroup):
    """A group of commands whose options are all plain."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        use_plain_readers(self.get_params(ctx))
        return super().parse_args(ctx, args)


def use_plain_readers(parameters: list[Any]) -> None:
    """Put our reader where Typer would put the one that it builds on first use."""
    for parameter in parameters:
        if getattr(parameter, "_runtime_param", NOT_HERE) is None:
            parameter._runtime_param = PlainReader(parameter)


class PlainReader:
    """It reads a value as the annotation says if that is plain, and lets Typer do it otherwise."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        descriptor = self.parameter.type_descriptor
        annotation, settings = descriptor.annotation, descriptor.parameter_info
        if several:
            item = get_args(annotation)[0] if get_origin(annotation) is list else None
            values = [plain(one, item, settings) for one in value] if isinstance(value, list | tuple) else [NOT_HERE]
            read: Any = NOT_HERE if NOT_HERE in values else values
        else:
            read = plain(value, annotation, settings)
        if read is not NOT_HERE:
            return read
        self.parameter._runtime_param = None
        return self.parameter.get_runtime_param().coerce(value, param=param, ctx=ctx)


def plain(value: Any, annotation: Any, settings: Any) -> Any:
    """The value, or NOT_HERE when only Typer's own reader can tell."""
    if not isinstance(annotation, type):
        return NOT_HERE
    if annotation in (str, bool):
        return value if isinstance(value, annotation) else NOT_HERE
    try:
        if issubclass(annotation, Enum):
            return annotation(value)
        if annotation in (int, float):
            number = annotation(value)
            low, high = getattr(settings, "min", None), getattr(settings, "max", None)
            return number if (low is None or number >= low) and (high is None or number <= high) else NOT_HERE
    except ValueError:
        pass
    return NOT_HERE
